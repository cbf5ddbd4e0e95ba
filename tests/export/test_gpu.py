"""Exports on a GPU, through the C launcher, against the oracle: the GPU's own code, and PTX."""

from __future__ import annotations

import copy
import ctypes
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from c_launcher import BACKWARD, DTYPES, FORWARD, CAttention, CTensor, Launcher, compiled
from torch import Tensor

from limelight import ALiBi, Causal, DenseBias, KeyLengths, RelativeBias, export, reference
from limelight.testing import as_float64, as_numpy, assert_close

pytestmark = pytest.mark.gpu

TOLERANCES = {torch.float16: 2e-3, torch.bfloat16: 1.5e-2}


@pytest.fixture(scope="session")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Launcher]:
    """Exports for this GPU and perhaps for sm_80, by what is exported."""
    if not torch.cuda.is_available() or shutil.which("gcc") is None:
        pytest.skip("needs a CUDA GPU, and gcc")
    major, minor = torch.cuda.get_device_capability()
    kept: dict[str, Launcher] = {}

    def made(*also: str, **options: Any) -> Launcher:
        if (key := str(options)) not in kept:
            place = Path(tmp_path_factory.mktemp("exported"))
            targets = sorted({f"sm_{major}{minor}", *also})
            export.compile(place, targets=targets, **options)
            kept[key] = Launcher(compiled(place, place, Path("libcuda.so.1")), None, place)
        return kept[key]

    return made


def nan(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.full(shape, float("nan"), dtype=dtype, device="cuda")


def apart(batch: int, heads: int, length: int, dim: int, dtype: torch.dtype) -> Tensor:
    """Rows of NaNs but for a view (batch, heads, length, dim) with gaps between its rows."""
    return nan(batch, length, heads, dim + 16, dtype=dtype)[..., :dim].transpose(1, 2)


def c_tensor(tensor: Tensor | None) -> CTensor:
    made = CTensor()
    if tensor is not None:
        made.address = tensor.data_ptr()
        for axis, (size, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
            made.shape[axis], made.stride[axis] = size, stride
    return made


@dataclass
class Case:
    """An attention on the device, with what an export selects it by."""

    dtype: torch.dtype = torch.float16
    dim: int = 64
    mask: str = "none"
    bias: str = "none"
    lengths: Tensor | None = None
    parameters: tuple[Tensor, ...] = ()
    softcap: float | None = None
    with_sinks: bool = False
    size: tuple[int, int, int, int, int] = (2, 6, 2, 200, 333)
    tensors: dict[str, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        batch, heads, kv_heads, q_len, kv_len = self.size
        sizes = {"query": (heads, q_len), "key": (kv_heads, kv_len), "value": (kv_heads, kv_len)}
        for name, (own, length) in (sizes | {"d_out": (heads, q_len)}).items():
            made = apart(batch, own, length, self.dim, self.dtype)
            self.tensors[name] = made.copy_(torch.randn(made.shape))
        self.tensors["d_lse"] = torch.randn(batch, heads, q_len, device="cuda")
        if self.with_sinks:
            self.tensors["sinks"] = torch.randn(heads, device="cuda")

    def c(self, target: int, **others: int) -> CAttention:
        batch, heads, kv_heads, q_len, kv_len = self.size
        made = CAttention(
            struct_size=ctypes.sizeof(CAttention),
            dtype=DTYPES[str(self.dtype).removeprefix("torch.")],
            head_dim=self.dim,
            mask=self.mask.encode(),
            bias=self.bias.encode(),
            bias_gradients=bool(self.parameters),
            batch=batch,
            q_heads=heads,
            kv_heads=kv_heads,
            q_len=q_len,
            kv_len=kv_len,
            query_start=kv_len - q_len,
            softcap=self.softcap or 0.0,
            stream=torch.cuda.current_stream().cuda_stream,
            target=target,
            **others,
        )
        for name, tensor in self.tensors.items():
            setattr(made, name, c_tensor(tensor))
        if self.lengths is not None:
            made.mask_tensors[0] = c_tensor(self.lengths)
        for number, parameter in enumerate(self.parameters):
            made.bias_tensors[number] = c_tensor(parameter)
        return made

    def outputs(self) -> dict[str, Tensor]:
        batch, heads, kv_heads, q_len, kv_len = self.size
        made = {
            "out": apart(batch, heads, q_len, self.dim, self.dtype),
            "lse": nan(batch, heads, q_len, dtype=torch.float32),
            "d_query": apart(batch, heads, q_len, self.dim, self.dtype),
            "d_key": apart(batch, kv_heads, kv_len, self.dim, self.dtype),
            "d_value": apart(batch, kv_heads, kv_len, self.dim, self.dtype),
        }
        if self.with_sinks:
            made["d_sinks"] = nan(heads, dtype=torch.float32)
        return made

    def run(self, launcher: Launcher, target: int = 0) -> dict[str, Tensor]:
        """The outputs of a forward and a backward."""
        attention, made = self.c(target), self.outputs()
        for name, tensor in made.items():
            setattr(attention, name, c_tensor(tensor))
        d_parameters = [torch.full_like(each, float("nan")) for each in self.parameters]
        for number, parameter in enumerate(d_parameters):
            attention.d_bias_tensors[number] = c_tensor(parameter)
            made[f"d_bias {number}"] = parameter
        size = launcher.workspace(BACKWARD, attention)
        workspace = torch.full((size,), 0xFF, dtype=torch.uint8, device="cuda")  # NaNs
        attention.workspace, attention.workspace_size = workspace.data_ptr(), size
        for operation in (FORWARD, BACKWARD):
            assert launcher.launch(operation, attention) == "SUCCESS", launcher.message
        torch.cuda.synchronize()
        return made

    def check(self, made: dict[str, Tensor], mask: object = None, bias: object = None) -> None:
        *_, q_len, kv_len = self.size
        given = {name: as_float64(tensor) for name, tensor in self.tensors.items()}
        found = reference.attention(
            given["query"], given["key"], given["value"], mask=mask, bias=bias,
            sinks=given.get("sinks"), softcap=self.softcap, query_start=kv_len - q_len,
            d_out=given["d_out"], d_lse=given["d_lse"],
        )  # fmt: skip
        assert found.gradients is not None
        query, key, value, sinks, parameters = found.gradients
        expected = {
            "out": found.out,
            "lse": found.lse,
            "d_query": query,
            "d_key": key,
            "d_value": value,
            "d_sinks": sinks,
            **{f"d_bias {number}": each for number, each in enumerate(parameters)},
        }
        for name, tensor in made.items():
            rows = tensor.dim() == 4
            assert_close(name, tensor, expected[name], TOLERANCES[self.dtype], rows=rows)


def masked(lengths: Tensor) -> object:
    return Causal() & KeyLengths(as_numpy(lengths))


@pytest.mark.parametrize("target", [0, 80])
def test_alibi_under_a_causal_mask_with_padding(exported, target):
    launcher = exported(
        "sm_80",
        dtypes=["float16"],
        head_dims=[64],
        masks=["causal & key_lengths"],
        biases=["alibi"],
    )
    lengths = torch.tensor([333, 77], device="cuda")
    slopes = torch.tensor(ALiBi.paper_slopes(6), device="cuda")
    case = Case(
        mask="causal & key_lengths", bias="alibi", lengths=lengths, parameters=(slopes,),
        with_sinks=True,
    )  # fmt: skip
    case.check(case.run(launcher, target), masked(lengths), ALiBi(as_float64(slopes)))
    one = Case(
        mask="causal & key_lengths", bias="alibi", lengths=lengths[:1], parameters=(slopes[:1],),
        size=(1, 1, 1, 1, 1),
    )  # fmt: skip
    one.check(one.run(launcher, target), masked(lengths[:1]), ALiBi(as_float64(slopes[:1])))


@pytest.mark.parametrize("target", [0, 80])
def test_plain_bfloat16(exported, target):
    launcher = exported(
        "sm_80", dtypes=["bfloat16"], head_dims=[128], masks=["none"], biases=["none"]
    )
    case = Case(dtype=torch.bfloat16, dim=128)
    case.check(case.run(launcher, target))


def test_tables_and_dense_biases(exported):
    bias = "dense_bias + relative_bias"
    launcher = exported(
        dtypes=["float16"],
        head_dims=[64],
        masks=["causal"],
        biases=[bias],
        softcap=True,
        max_stack=4096,
    )
    dense = torch.randn(1, 6, 200, 333, device="cuda")
    table = torch.randn(6, 101, device="cuda")
    case = Case(mask="causal", bias=bias, parameters=(dense, table), softcap=5.0)
    made = case.run(launcher)
    case.check(made, Causal(), DenseBias(as_float64(dense)) + RelativeBias(as_float64(table)))


def test_a_graph_replays(exported):
    launcher = exported(dtypes=["bfloat16"], head_dims=[128], masks=["none"], biases=["none"])
    case = Case(dtype=torch.bfloat16, dim=128)
    made = case.outputs()
    attention = case.c(0)
    attention.out, attention.lse = c_tensor(made["out"]), c_tensor(made["lse"])
    assert launcher.preload(FORWARD, attention) == "SUCCESS", launcher.message
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        attention.stream = torch.cuda.current_stream().cuda_stream
        assert launcher.launch(FORWARD, attention) == "SUCCESS", launcher.message
        fresh = copy.copy(launcher)
        fresh.opened = launcher.open(launcher.folder)
        assert fresh.launch(FORWARD, attention) == "CAPTURING"
    case.tensors["value"].mul_(2)
    graph.replay()
    torch.cuda.synchronize()
    case.check({name: made[name] for name in ("out", "lse")})
