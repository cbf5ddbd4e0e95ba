"""The manifest: an export in words, for whoever generates code from it. A plain dictionary.

`manifest.schema.json` beside this file says what each entry means; `validate` holds a manifest to
it, and its parts to each other.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from importlib import resources
from typing import Any

from limelight._version import __version__
from limelight.export.expression import names, parse, text
from limelight.export.variant import ALIGNMENT, Tensor, Variant
from limelight.launcher import Binary, Recipe
from limelight.launcher.abi import SCRATCH_POINTERS

SCHEMA = 1
SIZES = ("batch", "q_heads", "kv_heads", "q_len", "kv_len", "query_start")
SEMANTICS = {
    "score": "softcap(scale * dot(query, key)) + bias, then the mask; softcap(x) is "
    "softcap * tanh(x / softcap)",
    "position": "of query i: query_start + i; of key j: j",
    "lse": "natural logarithm of the sum of exp(score), the sink's included",
    "heads": "query head h reads head h // (q_heads // kv_heads) of key and value",
    "row_without_keys": "out 0, lse -inf (with sinks: the sink), gradients 0",
    "strides": "count elements; of a dimension of size 1 they are taken as 0",
    "deterministic": "every output is written once, and repeats bit for bit",
}


def name_of(recipe: Recipe) -> str:
    """Of a kernel: the same for the same machine code."""
    major, minor = recipe.target
    return f"{recipe.name}-sm_{major}{minor}-{recipe.digest()[:12]}"


def to_manifest(variants: Sequence[Variant], binaries: Mapping[str, Binary]) -> dict[str, Any]:
    """binaries: of every kernel, by `name_of`."""
    return {
        "schema": SCHEMA,
        "limelight": __version__,
        "triton": next(iter(binaries.values())).triton_version,
        "semantics": SEMANTICS,
        "workspace_alignment": ALIGNMENT,
        "kernels": {name: _kernel(name, binaries[name]) for name in sorted(binaries)},
        "variants": [_variant(variant) for variant in variants],
    }


def is_portable(target: tuple[int, int]) -> bool:
    """Whether later GPUs can take the code: Triton compiles for one architecture from 9.0 on."""
    return target < (9, 0)


def to_text(manifest: Mapping[str, Any]) -> str:
    """As JSON: a parameter on each line, and the arguments of a launch."""
    return _lines(manifest, "") + "\n"


def _lines(node: Any, indent: str) -> str:
    flat = json.dumps(node, ensure_ascii=False)
    if not isinstance(node, (dict, list)) or len(flat) <= 96:
        return flat
    if isinstance(node, list) and all(isinstance(each, str) for each in node):
        return flat
    inside = indent + " "
    if isinstance(node, dict):
        parts = [f"{json.dumps(key)}: {_lines(value, inside)}" for key, value in node.items()]
    else:
        parts = [_lines(each, inside) for each in node]
    opened, closed = flat[0], flat[-1]
    return f"{opened}\n{inside}" + f",\n{inside}".join(parts) + f"\n{indent}{closed}"


def _kernel(name: str, binary: Binary) -> dict[str, Any]:
    major, minor = binary.target
    target = f"sm_{major}{minor}"
    images = {"cubin": binary.cubin, "ptx": binary.ptx.encode()}
    ptx_version = re.search(r"\.version\s+([\d.]+)", binary.ptx)
    return {
        "entry": binary.entry,
        "target": target,
        "portable": is_portable(binary.target),
        "ptx_version": ptx_version[1] if ptx_version else "",
        "files": {kind: f"kernels/{name}.{kind}" for kind in images},
        "sha256": {kind: hashlib.sha256(image).hexdigest() for kind, image in images.items()},
        "threads": binary.threads,
        "shared": binary.shared,
        "registers": binary.registers,
        "stack": binary.stack,
        "parameters": list(_parameters(binary)),
    }


def _parameters(binary: Binary) -> Iterator[dict[str, Any]]:
    offset = 0
    for each in binary.parameters:
        offset = -(-offset // each.size) * each.size
        yield {
            "name": each.name,
            "kind": each.kind,
            "offset": offset,
            "size": each.size,
            "multiple_of": each.multiple_of,
        }
        offset += each.size
    for name in ("global_scratch", "profile_scratch")[:SCRATCH_POINTERS]:
        offset = -(-offset // 8) * 8
        yield {"name": name, "kind": "*u8", "offset": offset, "size": 8, "multiple_of": 1}
        offset += 8


def _variant(variant: Variant) -> dict[str, Any]:
    p = variant.problem
    major, minor = variant.target
    return {
        "operation": p.operation,
        "select": {
            "dtype": p.dtype,
            "head_dim": p.head_dim,
            "value_dim": p.value_dim,
            "mask": p.mask,
            "bias": p.bias,
            "softcap": p.softcap,
            "gradients": p.gradients,
        },
        "target": f"sm_{major}{minor}",
        "tensors": [_tensor(tensor) for tensor in variant.tensors],
        "numbers": list(variant.numbers),
        "conditions": [
            f"{text(left)} {operator} {text(right)}" for left, operator, right in variant.conditions
        ],
        "workspace": [{"name": each.name, "bytes": text(each.size)} for each in variant.workspace],
        "launches": [
            {
                "kernel": name_of(launch.recipe),
                "grid": text(launch.grid),
                "needed_for": list(launch.needed_for),
                "arguments": [text(argument) for argument in launch.arguments]
                + ["0"] * SCRATCH_POINTERS,
            }
            for launch in variant.launches
        ],
    }


def _tensor(tensor: Tensor) -> dict[str, Any]:
    return {
        "name": tensor.name,
        "dtype": tensor.dtype,
        "shape": [text(size) for size in tensor.shape],
        "strides": [text(stride) for stride in tensor.strides],
        "optional": tensor.optional,
        "written": tensor.written,
    }


def schema() -> str:
    """The text of manifest.schema.json."""
    return resources.files("limelight.export").joinpath("manifest.schema.json").read_text()


class ManifestError(ValueError):
    """A manifest that is not what its schema says."""


def validate(manifest: Mapping[str, Any]) -> None:
    """Raises ManifestError, which says where, unless the manifest is whole."""
    rules = json.loads(schema())
    _follow(manifest, rules, rules, "manifest")
    for number, variant in enumerate(manifest["variants"]):
        where = f"variants[{number}]"
        for launch in variant["launches"]:
            kernel = manifest["kernels"].get(launch["kernel"])
            if kernel is None:
                raise ManifestError(f"{where}: no kernel {launch['kernel']}")
            if len(launch["arguments"]) != len(kernel["parameters"]):
                raise ManifestError(f"{where}: {launch['kernel']} takes other arguments")
        declared = set(_declared(variant))
        for expression in _expressions(variant):
            if unknown := set(names(parse(expression))) - declared:
                raise ManifestError(f"{where}: {expression}: no {', '.join(sorted(unknown))}")


def _declared(variant: Mapping[str, Any]) -> Iterator[str]:
    """Every name that an expression of a variant may have."""
    yield from SIZES
    yield from variant["numbers"]
    for tensor in variant["tensors"]:
        yield tensor["name"]
        for what, entries in (("shape", tensor["shape"]), ("stride", tensor["strides"])):
            for axis, entry in enumerate(entries):
                if entry == f"{tensor['name']}.{what}.{axis}":
                    yield entry
    yield from (each["name"] for each in variant["workspace"])


NUMBERS = ("scale", "softcap")
"""The names of numbers that are not whole."""


def split_condition(condition: str) -> tuple[str, str, str]:
    """Its left expression, its order ("<", "<=", ">" or ">="), its right expression."""
    left, order, right = re.split(r" (<=|>=|<|>) ", condition)
    return left, order, right


def is_of_numbers(condition: str) -> bool:
    """Whether it compares numbers that are not whole."""
    return not set(NUMBERS).isdisjoint(re.findall(r"[A-Za-z_][\w.]*", condition))


def _expressions(variant: Mapping[str, Any]) -> Iterator[str]:
    for tensor in variant["tensors"]:
        yield from (*tensor["shape"], *tensor["strides"])
    for condition in variant["conditions"]:
        left, _, right = split_condition(condition)
        yield from (left, right)
    yield from (each["bytes"] for each in variant["workspace"])
    for launch in variant["launches"]:
        yield from (launch["grid"], *launch["arguments"])


_TYPES: dict[str, Any] = {
    "object": dict, "array": list, "string": str, "integer": int, "boolean": bool,
}  # fmt: skip


def _follow(node: Any, rule: Mapping[str, Any], schema: Mapping[str, Any], where: str) -> None:
    """Holds a node to a rule: the part of JSON Schema that the schema uses."""
    if "$ref" in rule:
        rule = schema["$defs"][rule["$ref"].rpartition("/")[2]]
    kind = _TYPES.get(rule.get("type", ""), object)
    if not isinstance(node, kind) or (kind is int and isinstance(node, bool)):
        raise ManifestError(f"{where}: found {node!r:.60}, needed: {rule['type']}")
    if "const" in rule and node != rule["const"]:
        raise ManifestError(f"{where}: found {node!r}, needed {rule['const']!r}")
    if "enum" in rule and node not in rule["enum"]:
        raise ManifestError(f"{where}: found {node!r}, needed one of {rule['enum']}")
    if "pattern" in rule and not re.search(rule["pattern"], node):
        raise ManifestError(f"{where}: found {node!r}, needed {rule['pattern']}")
    if "minimum" in rule and node < rule["minimum"]:
        raise ManifestError(f"{where}: found {node}, needed {rule['minimum']} or more")
    if isinstance(node, dict):
        known = rule.get("properties", {})
        if missing := [name for name in rule.get("required", ()) if name not in node]:
            raise ManifestError(f"{where}: lacks {', '.join(missing)}")
        for name, child in node.items():
            other = rule.get("additionalProperties", False)
            if name not in known and other is False:
                raise ManifestError(f"{where}: has an unknown {name!r}")
            _follow(child, known.get(name, other), schema, f"{where}.{name}")
    elif isinstance(node, list) and "items" in rule:
        for number, child in enumerate(node):
            _follow(child, rule["items"], schema, f"{where}[{number}]")
