"""torch.compile, export, fake tensors and the operators' own contract."""

from __future__ import annotations

import pytest
import torch
from inputs import normal, qkv
from torch._subclasses.fake_tensor import FakeTensorMode

from limelight import (
    ALiBi,
    BlockSparse,
    Causal,
    DenseBias,
    DenseMask,
    Documents,
    KeyLengths,
    Packed,
    PrefixLM,
    SlidingWindow,
    attention,
    backends,
    explain,
    record,
    scaled_dot_product_attention,
)
from limelight.adapters.base import Arguments
from limelight.adapters.torch import operator
from limelight.adapters.torch.adapter import ADAPTER
from limelight.backends import BACKENDS

NAMES = [backend.name for backend in BACKENDS]


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def compiled(function, dynamic=False, backend="aot_eager"):
    """fullgraph: a break of the graph is an error."""
    return torch.compile(function, fullgraph=True, dynamic=dynamic, backend=backend)


def same(function, tensors, dynamic=False, backend="aot_eager"):
    """A compiled call gives the outputs and gradients of an eager one, in the same layouts."""
    eager = function(*tensors)
    traced = compiled(function, dynamic, backend)(*tensors)
    torch.testing.assert_close(traced, eager)
    leaves = [t for t in tensors if t.requires_grad]
    if not leaves:
        return
    d_out = torch.randn_like(eager)
    for found, right in zip(
        torch.autograd.grad(traced, leaves, d_out, allow_unused=True),
        torch.autograd.grad(eager, leaves, d_out, allow_unused=True),
        strict=True,
    ):
        torch.testing.assert_close(found, right)


OPTIONS = {
    "plain": lambda extra: {},
    "causal": lambda extra: {"mask": Causal()},
    "window": lambda extra: {"mask": Causal() & SlidingWindow(3)},
    "lengths": lambda extra: {"mask": KeyLengths(extra["lengths"]), "query_start": "end"},
    "documents": lambda extra: {"mask": Documents(extra["ids"]) & Causal()},
    "prefix": lambda extra: {"mask": PrefixLM(4) | PrefixLM(extra["lengths"])},
    "packed": lambda extra: {"mask": Packed(extra["ids"].sort().values.cumsum(0)) & Causal()},
    "blocks": lambda extra: {"mask": BlockSparse(extra["dense"][:3, :2] > 0, 3, 5)},
    "dense mask": lambda extra: {"mask": DenseMask(extra["dense"] > 0) | SlidingWindow(0)},
    "slopes": lambda extra: {"bias": ALiBi(extra["slopes"]), "mask": Causal()},
    "dense bias": lambda extra: {"bias": DenseBias(extra["dense"])},
    "two biases": lambda extra: {"bias": ALiBi(extra["slopes"]) + DenseBias(extra["dense"])},
    "paper's slopes and a dense bias": lambda extra: {"bias": ALiBi() + DenseBias(extra["dense"])},
    "sinks": lambda extra: {"sinks": extra["slopes"]},
    "numbers": lambda extra: {"scale": 0.3, "softcap": 2.0, "query_start": 2, "mask": Causal()},
    "starts": lambda extra: {"query_start": extra["lengths"], "mask": Causal()},
    "dropout": lambda extra: {"dropout_p": 0.5, "seed": 3},
    "dropout with a seed in a tensor": lambda extra: {"dropout_p": 0.5, "seed": extra["seed"]},
    "deterministic": lambda extra: {"deterministic": True},
}


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", OPTIONS)
def test_compiled_is_eager(name, dynamic):
    q, k, v = qkv(kv_heads=2)
    slopes, dense = normal(4), normal(9, 9)
    lengths, ids, seed = torch.tensor([9, 4]), torch.tensor([0] * 4 + [1] * 5), torch.tensor([5])

    def run(q, k, v, slopes, dense, lengths, ids, seed):
        extra = {"slopes": slopes, "dense": dense, "lengths": lengths, "ids": ids, "seed": seed}
        return attention(q, k, v, **OPTIONS[name](extra))

    same(run, (q, k, v, slopes, dense, lengths, ids, seed), dynamic)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method:DeprecationWarning")  # torch's own
def test_with_the_default_compiler():
    q, k, v = qkv(kv_heads=2)
    slopes = normal(4)

    def block(q, k, v, slopes):
        out = attention(q * 2, k, v, mask=Causal(), bias=ALiBi(slopes * 1.5))
        return out.transpose(1, 2).flatten(2).relu()

    same(block, (q, k, v, slopes), backend="inductor")


def test_lse_and_its_gradient():
    q, k, v = qkv()

    def run(q, k, v):
        out, lse = attention(q, k, v, return_lse=True)
        return out * lse[..., None]

    same(run, (q, k, v))


def test_lse_alone():
    q, k, v = qkv()
    same(lambda q, k, v: attention(q, k, v, return_lse=True)[1], (q, k, v))


@pytest.mark.parametrize("low", [torch.bfloat16, torch.float16], ids=str)
def test_autocast(low):
    q, k, v = qkv()

    def run(q, k, v):
        with torch.autocast("cpu", dtype=low):
            return attention(q, k, v, mask=Causal())

    assert compiled(run)(q, k, v).dtype == low
    with backends("tiled"):
        same(run, (q, k, v))


def test_scaled_dot_product_attention():
    q, k, v, mask = *qkv(), normal(9, 9)
    same(lambda q, k, v, mask: scaled_dot_product_attention(q, k, v, mask), (q, k, v, mask))
    same(lambda q, k, v: scaled_dot_product_attention(q[0], k, v, is_causal=True), (q, k, v))


def test_dropout_draws_from_the_generator():
    q, k, v = qkv(grad=False, q_len=40)
    run = compiled(lambda q, k, v: attention(q, k, v, dropout_p=0.5))
    torch.manual_seed(3)
    first, second = run(q, k, v), run(q, k, v)
    torch.manual_seed(3)
    assert torch.equal(run(q, k, v), first)
    assert not torch.equal(first, second)


@pytest.mark.parametrize("transposed", [False, True])
def test_layouts_are_as_promised(transposed):
    """Graphs are planned with the strides of fake tensors: the real ones have to be those."""
    leaves = [normal(2, 9, 4, 8) if transposed else normal(2, 4, 9, 8) for _ in range(3)]

    def run(*leaves):
        q, k, v = (t.transpose(1, 2) for t in leaves) if transposed else leaves
        return attention(q, k, v).transpose(1, 2).reshape(2, 9, 32)

    same(run, leaves)
    for name in NAMES:
        with backends(name), FakeTensorMode(allow_non_fake_inputs=True) as mode:
            fakes = [mode.from_tensor(t.detach()) for t in leaves]
            q, k, v = (t.transpose(1, 2) for t in fakes) if transposed else fakes
            if (
                explain(
                    *(t.detach().transpose(1, 2) if transposed else t.detach() for t in leaves)
                ).backend
                is None
            ):
                continue
            fake = torch.ops.limelight.attention(*recorded(q, k, v))
        with backends(name):
            q, k, v = (t.detach().transpose(1, 2) if transposed else t.detach() for t in leaves)
            real = torch.ops.limelight.attention(*recorded(q, k, v))
        for promised, found in zip(fake, real, strict=True):
            assert promised.shape == found.shape
            assert promised.stride() == found.stride()
            assert promised.dtype == found.dtype


def recorded(q, k, v, **options):
    """The arguments that the operator gets for a call."""
    kept = []

    def spy(*arguments):
        kept.append(arguments)
        return q, q, q

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            operator.torch.ops, "limelight", type("ops", (), {"attention": staticmethod(spy)})
        )
        operator.attention(ADAPTER, ADAPTER.prepared(Arguments(q, k, v, **options)))
    return kept[0]


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("name", ["plain", "window", "lengths", "two biases", "dropout", "numbers"])
def test_opcheck_of_the_operator(name, grad):
    q, k, v = qkv(grad=grad, kv_heads=2)
    extra = {
        "slopes": normal(4, grad=grad),
        "dense": normal(9, 9, grad=grad),
        "lengths": torch.tensor([9, 4]),
    }
    arguments = recorded(q, k, v, **OPTIONS[name](extra))
    torch.library.opcheck(torch.ops.limelight.attention.default, arguments)


@pytest.mark.parametrize("given", ["both", "out", "lse"])
def test_opcheck_of_the_backward(given):
    q, k, v = qkv()
    tensors, spec, *numbers = recorded(q, k, v, bias=ALiBi(normal(4)), mask=Causal())
    tensors = [t.detach() for t in tensors]
    out, lse, _ = torch.ops.limelight.attention(tensors, spec, *numbers)
    d_out = None if given == "lse" else torch.randn_like(out)
    d_lse = None if given == "out" else torch.randn_like(lse)
    for needs in ([True] * 4, [False, True, False, True]):
        arguments = (tensors, out, lse, d_out, d_lse, spec, *numbers, needs)
        torch.library.opcheck(
            torch.ops.limelight.attention_backward.default,
            arguments,
            test_utils=("test_schema", "test_faketensor", "test_autograd_registration"),
        )


def test_gradients_of_broadcast_and_expanded_inputs():
    q, k, v = normal(2, 4, 9, 8), normal(2, 1, 9, 8), normal(2, 1, 9, 8)
    same(lambda q, k, v: attention(q, k.expand(2, 4, 9, 8), v.expand(2, 4, 9, 8)), (q, k, v))


@pytest.mark.parametrize("wanted", ["query", "key", "bias", "none"])
def test_subsets_of_gradients(wanted):
    q, k, v = qkv(grad=False)
    slopes = normal(4, grad=False)
    chosen = {"query": q, "key": k, "bias": slopes}.get(wanted)
    if chosen is not None:
        chosen.requires_grad_()
    same(lambda q, k, v, s: attention(q, k, v, bias=ALiBi(s)), (q, k, v, slopes))


def test_second_derivative_of_a_compiled_forward():
    """The operator, with its backward, can be differentiated twice."""
    q, k, v = qkv(dtype=torch.float64)
    arguments = recorded(q, k, v, mask=Causal())
    out, _, _ = torch.ops.limelight.attention(*arguments)
    eager = attention(q, k, v, mask=Causal())

    def second(out):
        first = torch.autograd.grad(out.square().sum(), q, create_graph=True)[0]
        return torch.autograd.grad(first.square().sum(), (q, k, v))

    torch.testing.assert_close(second(out), second(eager))


# What a graph depends on, and what it does not.


class Counter:
    def __init__(self):
        self.graphs = 0

    def __call__(self, graph, inputs):
        self.graphs += 1
        return graph.forward


def test_other_numbers_in_tensors_do_not_compile_again():
    count = Counter()
    run = torch.compile(
        lambda q, k, v, n, seed: attention(q, k, v, mask=KeyLengths(n), dropout_p=0.5, seed=seed),
        fullgraph=True,
        backend=count,
    )
    q, k, v = qkv(grad=False)
    for lengths, seed in (([9, 4], 1), ([0, 3], 2), ([1, 1], 3)):
        n, s = torch.tensor(lengths), torch.tensor([seed])
        found = run(q, k, v, n, s)
        torch.testing.assert_close(
            found, attention(q, k, v, mask=KeyLengths(n), dropout_p=0.5, seed=s)
        )
    assert count.graphs == 1


def test_other_lengths_do_not_compile_again_where_dynamic():
    count = Counter()
    run = torch.compile(
        lambda q, k, v: attention(q, k, v, mask=Causal()),
        fullgraph=True,
        dynamic=True,
        backend=count,
    )
    for length in (9, 12, 300, 17):
        q, k, v = qkv(grad=False, q_len=length)
        torch.testing.assert_close(run(q, k, v), attention(q, k, v, mask=Causal()))
    assert count.graphs == 1


@pytest.mark.parametrize("dynamic", [None, False, True])
def test_an_integer_window_and_numbers_that_change(dynamic):
    """A number of Python is a constant or a symbol; either way the right one is used."""
    run = torch.compile(
        lambda q, k, v, w, start, scale: attention(
            q, k, v, mask=SlidingWindow(w, 0), query_start=start, scale=scale
        ),
        fullgraph=True,
        dynamic=dynamic,
        backend="aot_eager",
    )
    q, k, v = qkv(grad=False)
    for w, start, scale in ((1, 0, 0.5), (4, 0, 0.5), (4, 3, 0.25), (2, 1, 1.0), (1, 0, 0.5)):
        right = attention(q, k, v, mask=SlidingWindow(w, 0), query_start=start, scale=scale)
        torch.testing.assert_close(run(q, k, v, w, start, scale), right)


def test_an_integer_seed_that_changes():
    run = compiled(lambda q, k, v, seed: attention(q, k, v, dropout_p=0.5, seed=seed))
    q, k, v = qkv(grad=False)
    for seed in (1, 2, 3, -4, 1):
        torch.testing.assert_close(run(q, k, v, seed), attention(q, k, v, dropout_p=0.5, seed=seed))


def test_a_restriction_that_changes_is_followed():
    run = compiled(lambda q, k, v: attention(q, k, v))
    q, k, v = qkv(grad=False)
    ran = []
    for names in (("math",), ("tiled",), ("math",)):
        with backends(*names), record() as calls:
            run(q, k, v)
        ran += [call.backend for call in calls]
    with record() as calls:
        run(q, k, v)
    assert ran == ["math", "tiled", "math"]
    assert calls[0].backend == explain(q, k, v).backend


def test_compiled_calls_are_recorded_with_their_backward():
    q, k, v = qkv()
    run = compiled(lambda q, k, v: attention(q, k, v, mask=Causal()))
    with backends("math"):
        out = run(q, k, v)
    with record() as calls:
        out.sum().backward()
        with backends("math"):
            run(q, k, v)
    assert [(call.stage, call.backend) for call in calls] == [
        ("backward", "math"),
        ("forward", "math"),
    ]
    assert calls[0].choice.problem.gradients == ("query", "key", "value")


def test_the_switch_of_determinism_is_followed(no_deterministic_switch):
    run = compiled(lambda q, k, v: attention(q, k, v))
    q, k, v = qkv()
    seen = []
    for switch in (False, True, False):
        torch.use_deterministic_algorithms(switch)
        with record() as calls:
            run(q, k, v)
        seen.append(calls[0].choice.problem.deterministic)
    assert seen == [False, True, False]


def test_wrong_input_is_named_in_a_compiled_call_too():
    q, k, v = qkv(grad=False)
    with pytest.raises(Exception, match="heads"):
        compiled(lambda q, k, v: attention(q, k, v))(q, k[:, :3], v[:, :3])
    with pytest.raises(Exception, match="query_start"):
        compiled(lambda q, k, v: attention(q, k, v, mask=Causal()))(q, k[:, :, :5], v[:, :, :5])


# Fake tensors and export.


def test_fake_tensors():
    with FakeTensorMode() as mode:
        q, k, v = (mode.from_tensor(t.detach()) for t in qkv(value_dim=5, dtype=torch.bfloat16))
        out, lse = attention(q, k, v, mask=Causal(), return_lse=True)
        dropped = attention(q, k, v, dropout_p=0.5)
    assert out.shape == (2, 4, 9, 5)
    assert out.dtype == torch.bfloat16
    assert lse.shape == (2, 4, 9)
    assert lse.dtype == torch.float32
    assert dropped.shape == out.shape


class Module(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.slopes = torch.nn.Parameter(torch.tensor([0.5, 0.25, 0.125, 1.0]))

    def forward(self, q, k, v, lengths):
        mask = Causal() & KeyLengths(lengths)
        return attention(q, k, v, mask=mask, bias=ALiBi(self.slopes), query_start=0)


def test_export():
    q, k, v = qkv(grad=False)
    lengths = torch.tensor([9, 4])
    length = torch.export.Dim("length", min=2, max=4096)
    shapes = {"q": {2: length}, "k": {2: length}, "v": {2: length}, "lengths": None}
    program = torch.export.export(Module(), (q, k, v, lengths), dynamic_shapes=shapes)
    assert "limelight.attention" in str(program.graph)
    longer = qkv(grad=False, q_len=20)
    for tensors in ((q, k, v), longer):
        found = program.module()(*tensors, lengths)
        torch.testing.assert_close(found, Module()(*tensors, lengths))


def test_make_fx_and_functionalize():
    from torch.fx.experimental.proxy_tensor import make_fx

    q, k, v = qkv(grad=False)
    graph = make_fx(lambda q, k, v: attention(q, k, v, mask=Causal()), tracing_mode="fake")(q, k, v)
    torch.testing.assert_close(graph(q, k, v), attention(q, k, v, mask=Causal()))
