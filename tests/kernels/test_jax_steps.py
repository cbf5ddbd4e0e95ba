"""The launches of a call as steps of a JAX program, with Triton's interpreter in jaxlib's place.

What is tested: which arrays a step takes and makes, in which order, how they lie in memory, and
whose memory results share. The interpreter runs the kernels themselves.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("triton")
jax = pytest.importorskip("jax")
import interpreter
import jax.numpy as jnp

import limelight as ll
from limelight import reference
from limelight.adapters.jax import calls
from limelight.adapters.jax.adapter import ADAPTER
from limelight.call import Gradients
from limelight.devices import Device
from limelight.kernels import configs, jax_flash
from limelight.kernels.configs import Config
from limelight.kernels.launch import Array, Launch, Scalar
from limelight.kernels.program import Slot
from limelight.problem import Layout
from limelight.testing import assert_close

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*encountered in.*:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning"),
]


@pytest.fixture(autouse=True)
def steps(monkeypatch: pytest.MonkeyPatch) -> list[jax_flash.Step]:
    """Runs steps in the interpreter, on small tiles, and keeps them."""
    tables = ("forward", "key_gradients", "query_gradient", "dense_gradient", "offset_gradient")
    for name in (*tables, "query_gradient_of_offsets", "reading"):
        monkeypatch.setattr(configs, name, lambda *_: Config(16, 16, 4, 1))
    monkeypatch.setattr(configs, "ROW_NUMBERS", Config(32, 1, 4, 1))
    ran = []

    def run(launch: Launch, binary: None, step: jax_flash.Step) -> Any:
        ran.append(step)
        kinds = [jax.ShapeDtypeStruct(each.shape, each.dtype) for each in step.results]
        return jax.pure_callback(
            lambda *given: interpreted(launch, step, given), kinds, *step.operands
        )

    monkeypatch.setattr(jax_flash, "compiled", lambda launch, target: None)
    monkeypatch.setattr(jax_flash, "run_step", run)
    return ran


def interpreted(launch: Launch, step: jax_flash.Step, given: tuple[Any, ...]) -> list[np.ndarray]:
    """As XLA and jaxlib do it: memory for every result, then addresses in the order of the step."""
    buffers = [
        in_memory(np.asarray(array), layout)
        for array, layout in zip(given, step.operand_layouts, strict=True)
    ]
    made = []
    for n, result in enumerate(step.results):
        shared = [operand for operand, own in step.aliases.items() if own == n]
        fresh = np.full(result.shape, np.nan if result.dtype.startswith("f") else -(2**31))
        memory = in_memory(fresh.astype(result.dtype), jax_flash._layout(result))
        made.append(buffers[shared[0]] if shared else memory)
    leaves = [leaf for _, leaf in launch.leaves() if isinstance(leaf, (Array, Scalar))]
    addresses = {}
    for place, memory in zip(step.order, [*buffers, *made], strict=False):
        if isinstance(leaves[place], Array) and isinstance(leaves[place].address, Slot):
            addresses[place] = memory.ctypes.data
    numbered = iter(range(len(leaves)))
    arguments = {name: placed(node, addresses, numbered) for name, node in launch.arguments.items()}
    interpreter.run([replace(launch, arguments=arguments)])
    return [
        memory.transpose(np.argsort(jax_flash._layout(result)))
        for memory, result in zip(made, step.results, strict=True)
    ]


def in_memory(array: np.ndarray, layout: tuple[int, ...]) -> np.ndarray:
    """A copy, with its axes from the outermost to the innermost."""
    return np.array(array.transpose(layout), order="C")


def placed(node: Any, addresses: dict[int, int], numbered: Any) -> Any:
    """The arguments with an address in the place of every slot."""
    if isinstance(node, tuple):
        parts = [placed(part, addresses, numbered) for part in node]
        return type(node)(*parts) if hasattr(node, "_fields") else tuple(parts)
    if not isinstance(node, (Array, Scalar)):
        return node
    place = next(numbered)
    return replace(node, address=addresses.get(place, 0)) if isinstance(node, Array) else node


def arr(*shape: int, dtype: Any = np.float32) -> Any:
    return jnp.asarray(np.random.default_rng([len(shape), *shape]).normal(size=shape), dtype)


def check(heads_last: bool = False, q_len: int = 17, kv_len: int = 20, **options: Any) -> None:
    q, k, v = arr(2, 2, q_len, 16), arr(2, 1, kv_len, 16), arr(2, 1, kv_len, 16) * 2
    a = ADAPTER.prepared(ll.adapters.base.Arguments(q, k, v, query_start=3, **options))
    bias = options.get("bias")
    wanted = Gradients(
        True, True, True, a.sinks is not None, (True,) * (len(bias.tensors()) if bias else 0)
    )
    problem = ADAPTER.describe(replace(a, gradients=wanted.names(), return_lse=True))
    if heads_last:
        rows = {
            name: Layout.heads_last(getattr(problem, name).shape, "float32")
            for name in ("query", "key", "value")
        }
        problem = replace(problem, **rows)
    problem = replace(problem, device=Device.named("H200"))
    call = ADAPTER.call(a, problem)
    d_out, d_lse = arr(2, 2, q_len, 16) / 3, arr(2, 2, q_len)

    @jax.jit
    def both(tensors: Any, d_out: Any, d_lse: Any) -> Any:
        own = call.with_tensors(tensors)
        out, lse = jax_flash.forward(own)
        return out, lse, jax_flash.backward(own, out, lse, d_out, d_lse, wanted)

    out, lse, found = both(call.tensors(), d_out, d_lse)
    for name in ("mask", "bias"):
        if name in options:
            options[name] = options[name].map_tensors(np.asarray)
    expected = reference.attention(q, k, v, query_start=3, d_out=d_out, d_lse=d_lse, **options)
    assert_close("out", out, expected.out, 1e-5)
    assert_close("lse", lse, expected.lse, 1e-5, rows=False)
    for gradient, right in zip(
        jax.tree.leaves(found), jax.tree.leaves(expected.gradients), strict=True
    ):
        assert_close("gradient", gradient, right, 2e-5, rows=False)


def test_plain(steps):
    check()
    assert [len(step.aliases) for step in steps] == [0, 0, 1, 1]  # the numbers of rows, read twice
    assert all(step.written for step in steps)


def test_heads_last(steps):
    check(heads_last=True, mask=ll.Causal(), sinks=arr(2))
    assert steps[0].operand_layouts[0] == (0, 2, 1, 3)


def test_slopes_at_an_offset_in_shared_sums():
    check(bias=ll.ALiBi(jnp.abs(arr(2))) + ll.ALiBi(jnp.abs(arr(2, 2))))


def test_tables_and_dense():
    bias = ll.RelativeBias(arr(2, 9)) + ll.DenseBias(arr(1, 2, 17, 20))
    check(bias=bias, mask=ll.KeyLengths(jnp.asarray([18, 7])))


def test_rows_and_vectors():
    check(bias=ll.DecomposedBias(arr(2, 2, 17, 3), arr(2, 2, 17, 5)) + ll.ShawRelative(arr(5, 16)))


def test_halves(monkeypatch):
    """Two launches share each output, and what splits the tensors writes to many."""
    monkeypatch.setattr(configs, "in_halves", lambda *_: True)
    check(mask=ll.Causal())


def test_nothing_to_add_up():
    q = arr(1, 1, 0, 16)
    problem = ll.Problem.of(
        batch=1, heads=1, q_len=0, kv_len=4, head_dim=16, dtype="float32", training=True,
        library="jax", device=Device.named("H200"),
    )  # fmt: skip
    k = arr(1, 1, 4, 16)
    call = calls.Shell(problem, 0, None, None, False).call([q, k, k])
    out, lse = jax_flash.forward(call)
    wanted = Gradients(True, True, True, False, ())
    found = jax_flash.backward(call, out, lse, None, None, wanted)
    assert not np.asarray(found.key).any()
    assert math.prod(found.query.shape) == 0
