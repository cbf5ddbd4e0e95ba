"""The C launcher against the stub driver: the plan's launches, and a status for every wrong use."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from c_launcher import (
    BACKWARD,
    FORWARD,
    CAttention,
    CTensor,
    Launcher,
    c_attention,
    compiled,
    packed,
)
from concrete import Attention
from hypothesis import given, settings
from hypothesis import strategies as st
from stub_driver import build

from limelight.export.tracer import plan_variant
from limelight.export.variant import Problem

SIZES = st.fixed_dictionaries(
    {
        "batch": st.sampled_from([0, 1, 2, 16]),
        "kv_heads": st.sampled_from([1, 2, 5]),
        "q_len": st.sampled_from([0, 1, 16, 129, 1000]),
        "kv_len": st.sampled_from([0, 1, 63, 64, 1024]),
    }
)
GRADIENTS = ("none", "inputs", "all")


def made(gradients="none", mask="causal", bias="alibi", target=(9, 0), **others):
    """A problem of the folder: for C, and the plan's launches."""
    problem = Problem.of("float16", 64, mask=mask, bias=bias, gradients=gradients)
    sizes = {"batch": 2, "q_heads": 4, "kv_heads": 2, "q_len": 100, "kv_len": 90}
    sizes |= {name: others.pop(name) for name in tuple(others) if name in sizes}
    attention = Attention(problem, sizes, **others)
    variant = plan_variant(problem, target)
    launches = attention.launches(variant)
    return c_attention(attention, variant), launches


def operation(gradients):
    return FORWARD if gradients == "none" else BACKWARD


@pytest.fixture
def stub(launcher):
    launcher.stub.reset()
    launcher.stub.make_current(1)
    yield launcher.stub
    launcher.stub.reset()


def check(stub, launches, first=0):
    """That the stub was asked for exactly these."""
    found = stub.launches[first:]
    assert [each.entry.decode() for each in found] == [each.kernel.__name__ for each in launches]
    for ours, theirs in zip(found, launches, strict=True):
        assert tuple(ours.grid) == (theirs.grid, 1, 1)
        assert ours.block[0] == 32 * theirs.num_warps
        assert ours.parameters == packed(theirs.values())


@pytest.mark.parametrize("gradients", GRADIENTS)
@pytest.mark.parametrize("mask", ["causal", "key_lengths & causal"])
def test_launches_are_the_plan_s(launcher, stub, mask, gradients):
    @settings(max_examples=30, deadline=None)
    @given(
        SIZES, st.sampled_from([1, 3]), st.integers(-99, 99), st.floats(1e-3, 9), st.integers(1, 3)
    )
    def agree(sizes, group, query_start, scale, spread):
        q_heads = sizes["kv_heads"] * group
        attention, launches = made(
            gradients, mask, **sizes, q_heads=q_heads,
            query_start=query_start, scale=scale, spread=spread,
        )  # fmt: skip
        attention.stream = 77
        first = len(stub.launches)
        status = launcher.launch(operation(gradients), attention)
        assert status == ("SUCCESS" if launches else "EMPTY"), launcher.message
        check(stub, launches, first)
        assert all(each.device == 1 and each.stream == 77 for each in stub.launches[first:])

    agree()


def test_a_table_has_as_many_entries_as_the_caller_says(launcher, stub):
    attention, launches = made("all", "none", "relative_bias")
    assert launcher.launch(BACKWARD, attention) == "SUCCESS", launcher.message
    check(stub, launches)
    attention.bias_tensors[0].shape[1] += 1
    assert launcher.launch(BACKWARD, attention) == "WRONG_STRIDE"
    assert launcher.message == "bias.table.stride.0: found 1501, needed bias.table.shape.1"


def test_nothing_is_loaded_twice(launcher, stub):
    attention, _ = made("all")
    for device in (1, 2, 1, 2):
        stub.make_current(device)
        assert launcher.launch(BACKWARD, attention) == "SUCCESS"
    loads = stub.loads()
    assert launcher.launch(BACKWARD, attention) == "SUCCESS"
    assert stub.loads() == loads


def test_workspace_is_what_a_launch_asks_for(launcher, stub):
    attention, _ = made("all")
    needed = launcher.workspace(BACKWARD, attention)
    assert needed > 0
    attention.workspace_size = needed
    assert launcher.launch(BACKWARD, attention) == "SUCCESS"
    attention.workspace_size = needed - 1
    assert launcher.launch(BACKWARD, attention) == "SMALL_WORKSPACE"
    assert str(needed) in launcher.message
    bare = CAttention.from_buffer_copy(attention)
    bare.query, bare.workspace = CTensor(), 0
    assert launcher.workspace(BACKWARD, bare) == needed
    attention, _ = made()
    assert launcher.workspace(FORWARD, attention) == 0


def test_absent_gradients_are_left_out(launcher, stub):
    attention, launches = made("all")
    attention.d_sinks = attention.d_key = attention.d_value = CTensor()
    assert launcher.launch(BACKWARD, attention) == "SUCCESS"
    names = [each.kernel.__name__ for each in launches]
    names.remove("key_gradients")
    names.remove("add_partial_sums")  # of two
    assert [each.entry.decode() for each in stub.launches] == names


def test_strides_of_what_is_one_long_do_not_matter(launcher, stub):
    attention, launches = made(batch=1)
    attention.query.stride[0] = 12345
    attention.lse.stride[0] = 99
    assert launcher.launch(FORWARD, attention) == "SUCCESS"
    check(stub, launches)


@pytest.mark.parametrize(
    ("capability", "target", "from_ptx"),
    [(90, 90, 0), (61, 61, 0), (75, 75, 0), (80, 80, 0), (86, 80, 0), (89, 80, 0), (70, 61, 1),
     (62, 61, 0), (100, 80, 1), (120, 80, 1), (87, 80, 0)],
)  # fmt: skip
def test_the_best_code_for_a_gpu(launcher, stub, capability, target, from_ptx):
    stub.capability(capability)
    attention, launches = made(target=divmod(target, 10))
    assert launcher.launch(FORWARD, attention) == "SUCCESS", launcher.message
    check(stub, launches)
    # The same again by name: had another file been chosen, this would load one more.
    loads = stub.loads()
    attention.target, attention.from_ptx = target, from_ptx
    assert launcher.launch(FORWARD, attention) == "SUCCESS"
    assert stub.loads() == loads


def test_another_gpu_s_kernels_on_request(launcher, stub):
    attention, launches = made(target=(7, 5))
    attention.target = 75
    assert launcher.launch(FORWARD, attention) == "SUCCESS"
    check(stub, launches)
    stub.capability(70)
    assert launcher.launch(FORWARD, attention) == "WRONG_ARCHITECTURE"


def test_code_that_needs_too_much_shared_memory_is_not_chosen(launcher, stub):
    stub.max_shared(48 * 1024)
    attention, launches = made(target=(7, 5))
    assert launcher.launch(FORWARD, attention) == "SUCCESS"
    check(stub, launches)


def change(**changes):
    def apply(attention):
        for name, value in changes.items():
            setattr(attention, name, value)

    return apply


def move(name, by=0, **strides):
    def apply(attention):
        tensor = getattr(attention, name)
        tensor.address = tensor.address + by if by is not None else 0
        for axis, stride in strides.items():
            tensor.stride[int(axis[-1])] = stride

    return apply


def huge(attention):
    """More than can be counted in 64 bits; shapes that are not given are not compared."""
    attention.batch = attention.q_len = 2**31 - 1
    for name in ("query", "key", "value", "out", "d_out", "d_query", "d_key", "d_value"):
        for axis in range(4):
            getattr(attention, name).shape[axis] = 0
    for name in ("lse", "d_lse"):
        setattr(attention, name, CTensor(address=getattr(attention, name).address))


WRONG = [
    ("NOT_ALIGNED", change(workspace=0x7000_0000_0010), "workspace: found 0x700000000010"),
    ("NOT_ALIGNED", move("query", 8), "query: found 0x1000008, needed a multiple of 16"),
    ("WRONG_STRIDE", move("key", axis2=68), "key.stride.2: found 68, needed a multiple of 8"),
    ("WRONG_STRIDE", move("value", axis3=2), "value.stride.3: found 2, needed 1"),
    ("WRONG_STRIDE", move("lse", axis1=7), "lse.stride.1: found 7, needed q_len"),
    ("WRONG_STRIDE", move("out", axis2=2**23), "out.stride.2 < 8388608"),
    ("WRONG_STRIDE", move("out", axis2=-64), "out.stride.2 >= 0"),
    ("NULL_POINTER", move("d_out", None), "d_out: found no address"),
    ("NULL_POINTER", lambda a: setattr(a.bias_tensors[0], "address", 0), "bias.slopes"),
    ("WRONG_HEAD_DIM", change(head_dim=96), "head_dim: found 96"),
    ("WRONG_HEAD_DIM", change(value_dim=32), "value_dim 32"),
    ("NOT_EXPORTED", change(dtype=2), "dtype 2"),
    ("NOT_EXPORTED", change(mask=b"prefix_lm"), "mask prefix_lm"),
    ("NOT_EXPORTED", change(bias=None), "bias none"),
    ("NOT_EXPORTED", change(softcap=30.0), "softcap"),
    ("WRONG_SIZE", change(batch=-1), "batch: found -1, needed 0 to 2147483647"),
    ("WRONG_SIZE", change(q_len=2**31), "q_len: found 2147483648"),
    ("WRONG_SIZE", change(q_heads=5), "q_heads: found 5, needed a multiple of 2 kv_heads"),
    ("WRONG_SIZE", change(kv_heads=0), "kv_heads: found 0, needed 1"),
    ("WRONG_SIZE", change(query_start=2**30 + 1), "query_start"),
    ("WRONG_SIZE", huge, "2^63 bytes"),
    ("WRONG_SIZE", lambda a: a.query.shape.__setitem__(2, 99), "query.shape.2: found 99"),
    ("WRONG_NUMBER", change(scale=-1.0), "scale > 1e-20"),
    ("WRONG_NUMBER", change(scale=float("nan")), "scale"),
    ("WRONG_NUMBER", change(scale=1e39), "scale: found 1e+39, which does not fit a float"),
    ("WRONG_STRUCT", change(struct_size=8), "struct_size: found 8"),
    ("WRONG_ARCHITECTURE", change(target=86), "sm_86"),
    ("SMALL_WORKSPACE", change(workspace_size=100), "workspace: found 100 bytes"),
    ("SMALL_WORKSPACE", change(workspace=0), "at 0"),
]


@pytest.mark.parametrize(("status", "spoil", "says"), WRONG, ids=[says for *_, says in WRONG])
def test_wrong_use_has_a_status_and_a_message(launcher, stub, status, spoil, says):
    attention, _ = made("all")
    spoil(attention)
    assert launcher.launch(BACKWARD, attention) == status, launcher.message
    assert says in launcher.message
    assert not stub.launches


def test_an_empty_problem(launcher, stub):
    attention, launches = made(batch=0)
    assert not launches
    attention.query.address = 0  # it has no elements
    assert launcher.launch(FORWARD, attention) == "EMPTY"
    assert "nothing was launched" in launcher.message


def test_an_architecture_without_code(launcher, stub):
    stub.capability(50)
    attention, _ = made()
    assert launcher.launch(FORWARD, attention) == "WRONG_ARCHITECTURE"
    assert "found an sm_50" in launcher.message


def test_no_context(launcher, stub):
    stub.make_current(-1)
    attention, _ = made()
    assert launcher.launch(FORWARD, attention) == "NO_CONTEXT"


def test_a_folder_without_kernels(launcher, tmp_path):
    assert not launcher.open(tmp_path)
    assert launcher.status == "NO_FILE"
    assert str(tmp_path) in launcher.message


def test_what_the_driver_says(launcher, stub):
    attention, _ = made()
    stub.fail_launches(719)
    assert launcher.launch(FORWARD, attention) == "DRIVER_FAILED"
    assert launcher.message == "cannot launch forward: CUDA_ERROR_LAUNCH_FAILED (719)"


def test_capture(launcher, stub):
    """On a device that nothing was loaded on yet."""
    stub.make_current(3)
    stub.capture(1)
    attention, launches = made("inputs", "key_lengths & causal")
    assert launcher.launch(BACKWARD, attention) == "CAPTURING"
    assert launcher.preload(BACKWARD, attention) == "CAPTURING"
    assert not stub.launches
    stub.capture(0)
    assert launcher.preload(BACKWARD, attention) == "SUCCESS"
    assert not stub.launches
    stub.capture(1)
    assert launcher.launch(BACKWARD, attention) == "SUCCESS"
    check(stub, launches)


THREADS = Path(__file__).with_name("threads.c")


def test_threads_do_not_race(folder, tmp_path):
    """Under ThreadSanitizer: threads that load and launch at once, on two devices."""
    flags = ("-g", "-fsanitize=thread")
    driver = build(tmp_path, *flags)
    program = tmp_path / "threads"
    command = ["gcc", "-std=c11", "-O1", "-pthread", *flags, f'-DLIMELIGHT_DRIVER="{driver}"']
    command += [f"-I{folder}", THREADS, folder / "limelight.c", "-o", program, "-ldl", "-lm"]
    subprocess.run(command, check=True)
    done = subprocess.run([program, folder], capture_output=True, text=True, check=False)
    if "unexpected memory mapping" in done.stderr:
        pytest.skip("this ThreadSanitizer does not know this system's addresses")
    assert done.returncode == 0, done.stderr + done.stdout
    assert done.stdout == "8 threads, 2000 launches each\n"
    assert "ThreadSanitizer" not in done.stderr


def test_no_driver(folder, tmp_path):
    library = compiled(folder, tmp_path, tmp_path / "none.so")
    launcher = Launcher(library, None, folder)
    attention, _ = made()
    assert launcher.launch(FORWARD, attention) == "NO_DRIVER"
    assert "none.so" in launcher.message
    assert "driver is needed" in launcher.message
