"""Compiling needs no GPU: what comes out takes exactly what the signature says."""

from __future__ import annotations

import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

triton = pytest.importorskip("triton")

import tuple_kernels as k

from limelight.launcher import (
    AbiError,
    CompileError,
    Recipe,
    SharedMemoryError,
    abi,
    compile_kernel,
    turing,
)
from limelight.launcher.binary import Binary, DamagedBinary
from limelight.launcher.signature import Constant, Signature

BIASES = (
    k.Slope(k.add_slope, "*fp32"),
    k.Both(
        k.add_both,
        k.Table(k.add_table, "*fp16:16", "i64:8", "fp32", True),
        k.Slope(k.add_slope, "*fp32"),
    ),
)
SIGNATURE = {
    "scores": "*fp32:16",
    "out": "*fp32:16",
    "biases": BIASES,
    "length": "i32",
    "scale": "fp32",
    "extra": "*fp32",
    "BLOCK": 128,
}
ORDER = [
    "scores",
    "out",
    "biases.0.slopes",
    "biases.1.left.table",
    "biases.1.left.stride",
    "biases.1.left.gain",
    "biases.1.right.slopes",
    "length",
    "scale",
    "extra",
]


def recipe(**changes) -> Recipe:
    signature = SIGNATURE | changes.pop("signature", {})
    facts = {"function": k.apply_biases, "target": (8, 0)} | changes
    return Recipe(signature=signature, **facts)


@pytest.mark.parametrize("target", [(6, 1), (7, 5), (8, 0), (9, 0)])
def test_compiles_nested_tuples_depth_first(target):
    binary = compile_kernel(recipe(target=target))
    assert [each.name for each in binary.parameters] == ORDER
    assert [each.code for each in binary.parameters] == list("QQQQqfQifQ")
    assert binary.cubin.startswith(b"\x7fELF")
    assert f".target sm_{target[0]}{target[1]}" in binary.ptx
    assert (binary.entry, binary.threads, binary.target) == ("apply_biases", 128, target)
    assert binary.registers > 0
    assert binary.stack == 0
    assert binary.triton_version == triton.__version__


def test_constants_and_empty_tuples_leave_no_parameter():
    binary = compile_kernel(recipe(signature={"biases": (), "extra": None}))
    assert [each.name for each in binary.parameters] == ["scores", "out", "length", "scale"]


def test_a_string_can_be_a_constant():
    def choose(kind: str) -> Binary:
        signature = {"scores": "*fp32", "how": k.Choice(Constant(kind), "fp32")}
        return compile_kernel(Recipe(function=k.choose, signature=signature, target=(8, 0)))

    assert [each.name for each in choose("keep").parameters] == ["scores", "how.value"]
    assert choose("keep").ptx != choose("negate").ptx


def test_hints_reach_the_code():
    wide = {"BLOCK": 512, "biases": ()}
    plain = compile_kernel(recipe(signature=wide | {"scores": "*fp32"}))
    aligned = compile_kernel(recipe(signature=wide | {"length": "i32:16"}))
    assert "ld.global.v4" not in plain.ptx
    assert "ld.global.v4" in aligned.ptx


def test_no_line_info_and_no_paths():
    binary = compile_kernel(recipe())
    assert b".debug_line" not in binary.cubin
    assert str(Path(__file__).parent).encode() not in binary.cubin


def test_gluon():
    signature = {"scores": "*fp32", "scale": "fp32", "BLOCK": 128}
    binary = compile_kernel(Recipe(function=k.gluon_scale, signature=signature, target=(9, 0)))
    assert [each.name for each in binary.parameters] == ["scores", "scale"]


def test_resources_agree_with_cuobjdump(tmp_path):
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    if not tool.exists():
        pytest.skip("Triton's wheel lacks cuobjdump")
    signature = {"left": "*fp16", "right": "*fp16", "out": "*fp32", "SIZE": 128}
    binary = compile_kernel(
        Recipe(function=k.multiply, signature=signature, target=(8, 0), options={"maxnreg": 64})
    )
    assert binary.stack > 0, "this test wants a kernel that spills"
    (tmp_path / "a.cubin").write_bytes(binary.cubin)
    command = [str(tool), "--dump-resource-usage", str(tmp_path / "a.cubin")]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert f"REG:{binary.registers} STACK:{binary.stack} " in text


def product(kind: str, **changes) -> Recipe:
    signature = {"left": f"*{kind}", "right": f"*{kind}", "out": "*fp32", "SIZE": 32}
    return Recipe(**{"function": k.multiply, "signature": signature, "target": (7, 5)} | changes)


def test_turing_multiplies_float16_on_tensor_cores():
    binary = compile_kernel(product("fp16", num_stages=3))  # more than one stage would abort
    assert turing.INSTRUCTION in binary.ptx
    assert ".target sm_75" in binary.ptx
    assert binary.target == (7, 5)
    assert binary.stack == 0


@pytest.mark.parametrize(
    "other",
    [product("fp32"), product("bf16"), product("fp16", target=(7, 0))],
    ids=["fp32", "bf16", "Volta"],
)
def test_other_products_are_left_to_fma(other):
    binary = compile_kernel(other)
    assert "mma.sync" not in binary.ptx
    assert "fma.rn" in binary.ptx


def test_without_the_instruction_the_ordinary_way_is_taken(monkeypatch):
    monkeypatch.setattr(turing, "INSTRUCTION", "not in the PTX")
    binary = compile_kernel(product("fp16"))
    assert "mma.sync" not in binary.ptx
    assert "fma.rn" in binary.ptx


@pytest.mark.parametrize(
    "text",
    [
        "",
        "%0 = tt.dot %a, %b, %c : tensor<16x16xbf16, #a> * tensor<16x16xbf16, #b> -> tensor<16x16xf32, #mma>",
        "%0 = tt.dot %a, %b, %c : tensor<16x16xf16, #a> * tensor<16x16xf16, #b> -> tensor<16x16xf32, #mma>",
    ],
    ids=["no product", "bfloat16", "no layout to rename"],
)
def test_what_turing_cannot_run_is_seen_before(text):
    assert not turing._fits(text)


def test_too_much_shared_memory_for_the_target():
    signature = {"left": "*fp32", "right": "*fp32", "out": "*fp32", "SIZE": 128}
    wanted = Recipe(function=k.multiply, signature=signature, target=(7, 5))
    with pytest.raises(
        SharedMemoryError, match=r"multiply needs \d+ bytes .* sm_75 has 65536"
    ) as raised:
        compile_kernel(wanted)
    assert raised.value.needed > raised.value.limit == 65536


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"scale": "float"}, r"scale: found type 'float', needed a pointer such as \*fp16, or i32"),
        ({"scale": "bf16"}, "scale: found type 'bf16'"),
        ({"scores": "*fp32:x"}, "needed a number after the colon"),
        ({"typo": "i32"}, "has no parameter typo"),
    ],
)
def test_a_wrong_signature_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        compile_kernel(recipe(signature=changes))


def test_a_missing_parameter_is_named():
    signature = {name: kind for name, kind in SIGNATURE.items() if name != "scale"}
    with pytest.raises(ValueError, match="the signature lacks scale"):
        Signature.read(k.apply_biases.arg_names, signature)


@pytest.mark.parametrize("options", [{"num_waprs": 4}, {"launch_pdl": True}, {"num_warps": 8}])
def test_an_option_without_effect_is_refused(options):
    with pytest.raises(ValueError, match="options: found"):
        compile_kernel(recipe(options=options))


def test_a_difference_to_the_ptx_is_an_error():
    binary = compile_kernel(recipe())
    entry = abi.Entry.read(binary.ptx)
    resources = abi.Resources.read(binary.cubin, binary.entry)
    abi.check(binary.parameters, entry, resources)
    with pytest.raises(AbiError, match="the PTX takes"):
        abi.check(binary.parameters[1:], entry, resources)
    moved = replace(resources, layout=((8, 8), *resources.layout[1:]))
    with pytest.raises(AbiError, match="lays its parameters out"):
        abi.check(binary.parameters, entry, moved)


def test_isolated_gives_the_same_kernel():
    assert compile_kernel(recipe(), isolated=True) == compile_kernel(recipe())


def test_isolated_failure_is_an_exception(capfd):
    broken = Recipe(function=k.abort_the_compiler, signature={"scores": "*i32"}, target=(8, 0))
    with pytest.raises(CompileError, match="abort_the_compiler ended with"):
        compile_kernel(broken, isolated=True)
    assert capfd.readouterr().out == ""


def test_isolated_needs_importable_functions():
    @triton.jit
    def local(scores):
        pass

    with pytest.raises(ValueError, match="needs importable functions"):
        compile_kernel(
            Recipe(function=local, signature={"scores": "*fp32"}, target=(8, 0)), isolated=True
        )


def test_a_binary_survives_being_written():
    binary = compile_kernel(recipe())
    assert Binary.from_bytes(binary.to_bytes()) == binary
    for damaged in (b"", binary.to_bytes()[:-1], binary.to_bytes().replace(b"fp32", b"fp16", 1)):
        with pytest.raises(DamagedBinary):
            Binary.from_bytes(damaged)


def test_the_digest_changes_with_whatever_changes_the_code():
    changes = [
        {},
        {"target": (9, 0)},
        {"num_warps": 8},
        {"num_stages": 3},
        {"options": {"maxnreg": 64}},
        {"signature": {"scores": "*fp16:16"}},
        {"signature": {"scores": "*fp32"}},
        {"signature": {"BLOCK": 64}},
        {"signature": {"extra": None}},
        {"signature": {"biases": BIASES[::-1]}},
    ]
    digests = [recipe(**change).digest() for change in changes]
    assert len(set(digests)) == len(changes)
    assert recipe().digest() == digests[0]


@pytest.mark.parametrize("constant", [False, True])
def test_editing_a_fragment_changes_the_digest(constant):
    """Triton's own hash misses an edit of a function inside a tuple that is one constant."""

    def digest(fragment) -> str:
        if constant:
            return Recipe(
                function=k.apply_constant,
                signature={"scores": "*fp32", "biases": Constant((fragment, None))},
                target=(8, 0),
            ).digest()
        return recipe(signature={"biases": (k.Slope(fragment, "*fp32"),)}).digest()

    before = digest(k.add_slope)
    edited = triton.JITFunction(k.add_slope.fn)
    edited._unsafe_update_src(k.add_slope.src.replace("* offsets", "* offsets * 2"))
    assert edited.cache_key != k.add_slope.cache_key
    assert digest(edited) != before
