"""Folders: the command, reproducible and without torch; manifests; what is refused."""

from __future__ import annotations

import copy
import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from c_launcher import FOLDER_PROBLEMS, TARGETS, stub_binary

from limelight import export
from limelight.export import build
from limelight.export.expression import parse, text
from limelight.export.manifest import ManifestError, name_of, validate
from limelight.export.traced import Number, Trace, Unknown, Whole
from limelight.export.tracer import plan_variant
from limelight.export.variant import Problem
from limelight.launcher import SharedMemoryError

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def manifest(folder):
    return json.loads((folder / "manifest.json").read_text())


def command(folder, *arguments):
    """`limelight export` where torch cannot be imported, with a cache of its own."""
    blocked = folder / "blocked" / "torch"
    blocked.mkdir(parents=True)
    (blocked / "__init__.py").write_text('raise ImportError("torch is blocked")')
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(blocked.parent), *sys.path]),
        "TRITON_CACHE_DIR": str(folder / "triton"),
        "PYTHONHASHSEED": str(len(str(folder))),
    }
    environment.pop("TRITON_INTERPRET", None)
    out = folder / "out"
    program = [sys.executable, "-m", "limelight", "export", *arguments, "--out", str(out)]
    done = subprocess.run(program, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    return out, done.stdout


def test_the_command_needs_no_torch_and_repeats_byte_for_byte(tmp_path):
    options = "--target sm_80 --dtype float16 --head-dim 64 --causal --bias none --forward-only"
    folders = []
    for name in ("one", "another-one"):
        (tmp_path / name).mkdir()
        folder, said = command(tmp_path / name, *options.split())
        assert "variants: 1, kernels: 1" in said
        folders.append({str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*.*")})
    assert folders[0] == folders[1]
    files = folders[0]
    (ptx,) = (contents.decode() for name, contents in files.items() if name.endswith(".ptx"))
    assert ".version 7.0\n.target sm_80\n" in ptx
    (cubin,) = (contents for name, contents in files.items() if name.endswith(".cubin"))
    for contents in (ptx.encode(), cubin):
        assert b".py" not in contents, "a path of this machine"
    found = json.loads(files["manifest.json"])
    validate(found)
    (kernel,) = found["kernels"].values()
    # The parameters, again from the PTX's own words.
    head = re.search(r"\.entry forward\((.*?)\)", ptx, re.DOTALL)[1]
    sizes = [int(bits) // 8 for bits in re.findall(r"\.param \.[a-z](\d+)", head)]
    sizes = sizes or [
        int(b) // 8 for b in re.findall(r"\.param (?:\.align \d+ )?\.[a-z](\d+)", head)
    ]
    assert sizes == [each["size"] for each in kernel["parameters"]]
    assert kernel["stack"] == 0


def test_the_default_set_is_planned():
    """Every launch of it, as far as compiling goes."""
    variants = build.planned()
    assert {variant.target for variant in variants} == {(6, 0), (7, 0), (7, 5), (8, 0), (9, 0)}
    for variant in variants:
        launches = {"none": 1, "inputs": 4, "all": 5}[variant.problem.gradients]
        assert len(variant.launches) == launches
    kernels = {name_of(launch.recipe) for each in variants for launch in each.launches}
    assert len(kernels) < 330


def test_an_export_takes_the_place_of_another(tmp_path):
    for problem in FOLDER_PROBLEMS[:2]:
        variant = plan_variant(problem, (8, 0))
        binaries = {name_of(each.recipe): stub_binary(each.recipe) for each in variant.launches}
        build.write(tmp_path, [variant], binaries)
    kernels = {path.stem for path in (tmp_path / "kernels").iterdir()}
    assert kernels == set(binaries)


@pytest.mark.parametrize("name", ["Cargo.toml", "manifest.json", "limelight.c"])
@pytest.mark.parametrize(
    "text", ["", "[]", '{"kernels": {"a": {"files": {"ptx": "kernels/keep"}}}}']
)
def test_a_folder_of_another_origin_is_left_alone(tmp_path, name, text):
    (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match="out: found .*of another origin"):
        export.compile(tmp_path, targets=["sm_80"])
    assert [(each.name, each.read_text()) for each in tmp_path.iterdir()] == [(name, text)]


def test_a_file_is_no_folder(tmp_path):
    (tmp_path / "out").write_text("mine")
    with pytest.raises(ValueError, match="out: found a file"):
        export.compile(tmp_path / "out", targets=["sm_80"])


def test_what_is_asked_for_twice_is_there_once():
    options = {"targets": ["sm_80"], "dtypes": ["float16"], "head_dims": [64], "biases": ["alibi"]}
    assert len(build.planned(masks=["causal", "Causal"], **options)) == 3


def test_the_manifest_says_all(manifest):
    validate(manifest)
    assert len(manifest["variants"]) == len(TARGETS) * len(FOLDER_PROBLEMS)
    assert {kernel["portable"] for kernel in manifest["kernels"].values()} == {True, False}
    for name, kernel in manifest["kernels"].items():
        assert name.startswith(kernel["entry"])
        ends = [each["offset"] + each["size"] for each in kernel["parameters"]]
        assert ends == sorted(ends)


@pytest.mark.parametrize(
    ("place", "value", "says"),
    [
        (("schema",), 2, "manifest.schema: found 2, needed 1"),
        (("variants", 0, "target"), "80", "needed ^sm_"),
        (("variants", 0, "operation"), "sideways", "one of ['forward', 'backward']"),
        (("variants", 0, "launches", 0, "grid"), "cdiv(q_length, 64)", "no q_length"),
        (("variants", 0, "launches", 0, "arguments"), ["0"], "takes other arguments"),
        (("variants", 0, "launches", 0, "kernel"), "nothing", "no kernel nothing"),
        (("variants", 0, "extra"), 1, "has an unknown 'extra'"),
        (("workspace_alignment",), True, "needed: integer"),
        (("workspace_alignment",), 0, "needed 16 or more"),
    ],
)  # fmt: skip
def test_a_wrong_manifest_is_refused(manifest, place, value, says):
    spoilt = copy.deepcopy(manifest)
    *way, last = place
    node = spoilt
    for step in way:
        node = node[step]
    node[last] = value
    with pytest.raises(ManifestError, match=re.escape(says)):
        validate(spoilt)
    del spoilt["kernels"]
    with pytest.raises(ManifestError, match="lacks kernels"):
        validate(spoilt)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"targets": ["sm_81"]}, "target: found 'sm_81', needed one of sm_60"),
        ({"dtypes": ["float64"]}, "dtype: found 'float64'"),
        ({"dtypes": ["bfloat16"], "targets": ["sm_75"]}, "dtypes: found bfloat16"),
        ({"head_dims": [320]}, "query: found head_dim 320"),
        ({"masks": ["sideways"]}, "mask: found 'sideways'"),
        ({"masks": ["sliding_window"]}, "needed numbers, as 'sliding_window(left=600, right=600)'"),
        ({"biases": ["decomposed_bias"]}, "a plan for which bias.rel_h.shape.3 is compiled into"),
        ({"biases": ["transformer_xl_bias(-5)"]}, "needed one that is the same for all sizes"),
        (
            {"dtypes": ["float32"], "targets": ["sm_90"], "head_dims": [64]},
            "dtypes: found float32",
        ),
    ],
    ids=str,
)
def test_what_cannot_be_exported_is_refused(tmp_path, options, says):
    with pytest.raises(ValueError, match=re.escape(says)):
        export.compile(tmp_path, **options)
    assert not list(tmp_path.iterdir())


def test_a_kernel_must_fit_its_target():
    variant = plan_variant(FOLDER_PROBLEMS[0], (8, 0))
    binary = stub_binary(variant.launches[0].recipe)
    build._check("kernel", binary, max_stack=0)
    with pytest.raises(export.SpillError, match="kernel spills 16 bytes of a thread, over 8"):
        build._check("kernel", replace(binary, stack=16), max_stack=8)
    # sm_86 has less than sm_80, whose code it runs.
    with pytest.raises(SharedMemoryError, match="sm_86 has 101376"):
        build._check("kernel", replace(binary, shared=120 * 1024), max_stack=0)
    build._check("kernel", replace(binary, target=(9, 0), shared=120 * 1024), max_stack=0)
    with pytest.raises(ValueError, match="clusters"):
        build._check("kernel", replace(binary, num_ctas=2), max_stack=0)


def test_spelling_and_order_of_terms_do_not_matter():
    one = Problem.of("float16", 64, mask="KeyLengths & causal", bias="ALiBi")
    assert one == Problem.of("float16", 64, mask="causal & key_lengths", bias="alibi")


def test_a_traced_number_says_what_was_asked_of_it():
    trace = Trace()
    length = Whole("length", 100, trace)
    assert text((length * 2 + 0 - 3).expression) == "length * 2 - 3"
    assert text((-(-length // 64)).expression) == "cdiv(length, 64)"
    assert length < 128
    assert not length + 1 > 200
    assert [text(left) + operator + text(right) for left, operator, right in trace.conditions] == [
        "length<128",
        "length + 1<=200",
    ]
    assert length != 100
    assert length == length + 0
    assert length % 16 == 1
    assert Whole("stride", 64, trace, multiple_of=8) % 8 == 0
    assert text((1 / Number("scale", 0.5, trace)).expression) == "1 / scale"
    with pytest.raises(Unknown, match="length is looked up"):
        hash(length)


@pytest.mark.parametrize("wrong", ["", "a +", "cdiv(a)", "a b", "f(a, b)", "(a", "a ^ b", "-a"])
def test_what_is_no_expression(wrong):
    with pytest.raises(ValueError, match="needed another place for it"):
        parse(wrong)


def test_the_example_in_c_builds(folder, tmp_path):
    if shutil.which("gcc") is None:
        pytest.skip("needs gcc")
    source = ROOT / "examples" / "c" / "attention.c"
    warnings = ("-Wall", "-Wextra", "-pedantic", "-Werror")
    program = tmp_path / "attention"
    build = [
        "gcc",
        "-std=c11",
        *warnings,
        "-pthread",
        f"-I{folder}",
        source,
        folder / "limelight.c",
    ]
    subprocess.run([*build, "-o", program, "-ldl", "-lm"], check=True)
    done = subprocess.run([program], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr == "usage: attention KERNELS CASE [TARGET]\n"
