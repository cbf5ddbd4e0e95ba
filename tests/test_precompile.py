"""`precompile`: the first call, or a capture, finds everything ready."""

from __future__ import annotations

from collections import OrderedDict

import pytest
import torch
from inputs import normal, qkv

import limelight
from limelight import ALiBi, Causal, KeyLengths, NoBackendError, Problem, backends, precompile
from limelight.testing import assert_close

pytest.importorskip("triton")

from limelight.launcher import Cache, CaptureError, cache, compile_kernel


@pytest.fixture
def kernels(monkeypatch, tmp_path) -> Cache:
    """An empty cache in the place of the process's own."""
    from limelight.kernels import program, runner, torch_flash

    own = Cache(tmp_path)
    monkeypatch.setattr(program, "default_cache", lambda: own)
    monkeypatch.setattr(runner, "default_cache", lambda: own)
    monkeypatch.setattr(torch_flash.RUNNER, "_prepared", OrderedDict())
    return own


@pytest.fixture
def compiled(monkeypatch) -> list[str]:
    """The names of the kernels that were compiled, in order."""
    names = []

    def named(recipe, **options):
        names.append(recipe.name)
        return compile_kernel(recipe, **options)

    monkeypatch.setattr(cache, "compile_kernel", named)
    return names


def arguments(device, **changes):
    """A call of tensors that want gradients, with a bias that does and padding."""
    q, k, v = qkv(q_len=40, kv_len=50, head_dim=16, device=device, dtype=torch.float16, **changes)
    slopes = normal(q.shape[1], device=device)
    lengths = torch.full((q.shape[0],), 45, device=device)
    return (q, k, v), {
        "bias": ALiBi(slopes),
        "mask": Causal() & KeyLengths(lengths),
        "query_start": "end",
    }


def test_compiles_for_a_gpu_that_is_not_here(kernels, compiled):
    tensors, options = arguments("cpu")
    with backends("flash"):
        assert precompile(*tensors, device="A100", **options).backend == "flash"
    wanted = {"forward", "row_numbers", "key_gradients", "query_gradient", "add_partial_sums"}
    assert sorted(compiled) == sorted(wanted)
    assert {path.name.partition("-")[0] for path in kernels.folder.iterdir()} == wanted
    with backends("flash"):  # other lengths, from a problem without tensors: the same kernels
        tensors, options = arguments("cpu", batch=3)
        problem = limelight.explain(*tensors, **options).problem
        precompile(problem, device="A100")
    assert len(compiled) == len(wanted)


def test_only_what_the_problem_wants(kernels, compiled):
    with backends("flash"):
        precompile(Problem.of(dtype="float16", head_dim=16), device="A100")
    assert compiled == ["forward"]


def test_hopper_with_its_own_backward(kernels, compiled):
    with backends("hopper"):
        precompile(Problem.of(training=True), device="H200")
    assert sorted(compiled) == ["backward", "finish", "forward", "prepare"]


@pytest.mark.parametrize("options", [{"deterministic": True}, {"head_dim": 256}], ids=str)
def test_hopper_forward_and_the_backward_of_flash(kernels, compiled, options):
    with backends("hopper"):
        precompile(Problem.of(training=True, **options), device="H200")
    assert sorted(compiled) == ["forward", "key_gradients", "query_gradient", "row_numbers"]


def test_an_lse_may_have_a_gradient_or_not(kernels, compiled):
    with backends("flash"):
        precompile(
            Problem.of(dtype="float16", head_dim=16, training=True, return_lse=True), device="A100"
        )
    assert sorted(compiled) == [
        "forward",
        "key_gradients",
        "query_gradient",
        "row_numbers",
        "row_numbers",
    ]


def test_nothing_to_compile(kernels, compiled):
    tensors, options = arguments("cpu")
    with backends("tiled", "math"):
        assert precompile(*tensors, **options).backend == "tiled"
        assert precompile(*(t.detach().numpy() for t in tensors)).backend == "math"
    assert compiled == []


def test_errors_are_those_of_a_call(kernels):
    with backends("flash"):
        with pytest.raises(NoBackendError, match="bfloat16"):
            precompile(Problem.of(dtype="bfloat16"), device="RTX 2080")
        with pytest.raises(ValueError, match="device: found 'RTX 1'"):
            precompile(Problem.of(), device="RTX 1")
        with pytest.raises(TypeError, match="the Problem alone"):
            precompile(Problem.of(), mask=Causal())


@pytest.fixture
def cuda():
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA GPU")
    return "cuda"


@pytest.mark.gpu
def test_a_first_call_can_be_captured(cuda, kernels, compiled):
    tensors, options = arguments(cuda)
    wanted = (*tensors, *options["bias"].tensors())
    d_out = torch.ones_like(tensors[0])

    def run():
        out = limelight.attention(*tensors, **options)
        gradients = torch.autograd.grad(out, wanted, d_out)
        return out.detach(), *gradients  # a graph that lives on would keep this stream's nodes

    graph = torch.cuda.CUDAGraph()
    with backends("flash"):
        why = r"compile forward .*limelight\.precompile"
        with pytest.raises(CaptureError, match=why), torch.cuda.graph(graph):
            d_out.clone()  # an empty capture would be warned of
            run()
        precompile(*tensors, **options)
        before = len(compiled)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = run()
        graph.replay()
        assert len(compiled) == before > 0
        for got, want in zip(captured, run(), strict=True):
            assert_close("captured", got, want, 1e-7)
