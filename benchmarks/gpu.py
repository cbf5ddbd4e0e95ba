"""Measures limelight on one NVIDIA GPU beside PyTorch's kernels and FlexAttention, and writes JSON.

    python -m benchmarks.gpu --out benchmarks/results/h200.json

Every way is checked before it is timed: outputs and gradients of two heads against float64. Ways
are interleaved, times are medians from CUDA events. "limelight" is the backend `flash`, "hopper"
the backend of that name, whatever would be chosen. Many processes with `--check --part 1/16` and so
on compile everything first.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import limelight as ll

WARMUP, REPEATS = 3, 15
TOLERANCE = {torch.bfloat16: 1.5e-2, torch.float16: 2e-3, torch.float32: 1e-5}
PEERS = {
    "torch flash": SDPBackend.FLASH_ATTENTION,
    "torch cudnn": SDPBackend.CUDNN_ATTENTION,
    "torch efficient": SDPBackend.EFFICIENT_ATTENTION,
}
OURS = ("limelight", "hopper")
Way = Callable[..., Tensor]


class Parameter(NamedTuple):
    """A tensor of a learned bias, and its part for the first batch element's first two heads."""

    tensor: Tensor
    part: tuple[slice, ...]


@dataclass(frozen=True)
class Case:
    """One problem, and the ways to run it. options: what `limelight.attention` gets."""

    name: str
    shape: tuple[int, int, int, int]  # batch, heads, length, head_dim
    dtype: torch.dtype = torch.bfloat16
    options: dict[str, Any] = field(default_factory=dict)
    peers: tuple[str, ...] = ()
    hopper: bool = False
    flex: Callable[[], dict[str, Any]] | None = None  # what FlexAttention gets
    others: dict[str, Way] = field(default_factory=dict)
    # Learned biases: calls of query, key, value and parameters, whose gradients are measured too.
    parameters: Callable[[], list[Parameter]] = list
    call: Way | None = None
    dense: Way | None = None  # the way of PyTorch's users: a bias in memory, the efficient kernel

    def ways(self) -> dict[str, Way]:
        call = self.call or (lambda q, k, v: ll.attention(q, k, v, **self.options))
        ways = {"limelight": _only("flash", call)}
        if self.hopper:
            ways["hopper"] = _only("hopper", call)
        if self.dense is not None:
            ways["torch dense bias"] = self.dense
        causal = isinstance(self.options.get("mask"), ll.Causal)
        for name in self.peers:
            ways[name] = _torch(PEERS[name], causal)
        if self.flex is not None:
            ways["flex"] = _flex(self.flex())
        return ways | self.others


def _only(backend: str, call: Way) -> Way:
    def run(*inputs: Tensor) -> Tensor:
        with ll.backends(backend):
            return call(*inputs)

    return run


def _torch(backend: SDPBackend, causal: bool) -> Way:
    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(q, k, v, is_causal=causal)

    return run


def _flex(options: dict[str, Any]) -> Way:
    from torch.nn.attention.flex_attention import flex_attention

    compiled = torch.compile(flex_attention, dynamic=False)
    return lambda q, k, v: compiled(q, k, v, **options)


def _documents_as_batch(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The 16 documents of one row as a batch of 16."""
    q, k, v = (t[0].unflatten(1, (16, 512)).transpose(0, 1) for t in (q, k, v))
    with ll.backends("flash"):
        out = ll.attention(q, k, v, mask=ll.Causal())
    return out.transpose(0, 1).flatten(1, 2)[None]


def cases() -> list[Case]:
    from torch.nn.attention.flex_attention import create_block_mask

    every = ("torch flash", "torch cudnn", "torch efficient")
    lengths = torch.tensor([1024, 2048, 3072, 4096], device="cuda")
    slopes = torch.tensor(ll.ALiBi.paper_slopes(16), device="cuda")
    first_keys = ll.KeyLengths(torch.full((4,), 64, device="cuda"))
    generator = torch.Generator("cuda").manual_seed(0)
    blocks = torch.rand(32, 32, generator=generator, device="cuda") < 0.1

    def block_mask(
        visible: Callable[..., Tensor], batch: int | None = None, length: int = 4096
    ) -> dict[str, Any]:
        made = create_block_mask(visible, batch, None, length, length, device="cuda")
        return {"block_mask": made}

    found = []
    for dim in (64, 128):
        shape = (4, 16, 4096, dim)
        for causal in (False, True):
            mask = {"mask": ll.Causal()} if causal else {}
            word = " causal" if causal else ""
            name = f"head_dim {dim}{word}"
            found.append(Case(name, shape, options=mask, peers=every, hopper=True))
            alibi = {**mask, "bias": ll.ALiBi(slopes)}
            found.append(Case(f"{name}, ALiBi", shape, options=alibi, hopper=True))
    shape = (4, 16, 4096, 64)
    found += [
        Case(
            "padding to lengths 1024 to 4096",
            shape,
            options={"mask": ll.KeyLengths(lengths)},
            flex=lambda: block_mask(lambda b, h, i, j: j < lengths[b], batch=4),
        ),
        Case(
            "window 512, causal",
            shape,
            options={"mask": ll.Causal() & ll.SlidingWindow(511)},
            flex=lambda: block_mask(lambda b, h, i, j: (j <= i) & (i - j < 512)),
        ),
        Case(
            "16 documents of 512 packed, causal",
            (1, 16, 8192, 64),
            options={"mask": ll.Causal() & ll.Packed(torch.arange(0, 8193, 512, device="cuda"))},
            flex=lambda: block_mask(
                lambda b, h, i, j: (j <= i) & (i // 512 == j // 512), length=8192
            ),
            others={"16 x 512 batched": _documents_as_batch},
        ),
        Case(
            "prefix 1024",
            shape,
            options={"mask": ll.PrefixLM(1024)},
            flex=lambda: block_mask(lambda b, h, i, j: (j <= i) | (j < 1024)),
        ),
        Case(
            f"blocks of 128, {blocks.float().mean():.1%} visible",
            shape,
            options={"mask": ll.BlockSparse(blocks)},
            flex=lambda: block_mask(lambda b, h, i, j: blocks[i // 128, j // 128]),
        ),
        Case(
            "window 512 and 64 first keys, causal",
            shape,
            options={"mask": ll.Causal() & (ll.SlidingWindow(511) | first_keys)},
            flex=lambda: block_mask(lambda b, h, i, j: (j <= i) & ((i - j < 512) | (j < 64))),
        ),
        Case("float32", (2, 16, 4096, 64), torch.float32, peers=("torch efficient",)),
        Case(
            "ALiBi causal, learned",
            shape,
            options={"mask": ll.Causal()},
            parameters=lambda: [Parameter(slopes.clone().requires_grad_(), (slice(2),))],
            call=lambda q, k, v, slopes: ll.attention(
                q, k, v, mask=ll.Causal(), bias=ll.ALiBi(slopes)
            ),
        ),
        Case(
            "T5's buckets, learned",
            shape,
            parameters=lambda: [Parameter(_drawn(32, 16), (slice(None), slice(2)))],
            call=lambda q, k, v, table: ll.attention(q, k, v, bias=ll.T5Bias(table)),
        ),
        Case(
            "relative table of 8191, learned",
            shape,
            parameters=lambda: [_heads(16, 8191)],
            call=lambda q, k, v, table: ll.attention(q, k, v, bias=ll.RelativeBias(table)),
            dense=_dense_relative,
        ),
        Case(
            "dense bias for all batch elements, learned",
            shape,
            parameters=lambda: [_heads(16, 4096, 4096)],
            call=lambda q, k, v, bias: ll.attention(q, k, v, bias=ll.DenseBias(bias)),
            dense=lambda q, k, v, bias: _efficient(q, k, v, bias.expand(q.shape[0], -1, -1, -1)),
        ),
        Case(
            "decomposed positions of a 64 x 64 grid, learned",
            shape,
            parameters=lambda: [_rows(4, 16, 4096, 64), _rows(4, 16, 4096, 64)],
            call=lambda q, k, v, *rel: ll.attention(q, k, v, bias=ll.DecomposedBias(*rel)),
            dense=_dense_decomposed,
        ),
        Case(
            "Transformer-XL, learned",
            shape,
            parameters=lambda: [_heads(16, 8191, 64), _heads(16, 64), _heads(16, 64)],
            call=_transformer_xl,
            dense=_dense_transformer_xl,
        ),
        Case(
            "Shaw's relative keys to 64 positions, learned",
            shape,
            parameters=lambda: [Parameter(_drawn(129, 64), ())],
            call=lambda q, k, v, table: ll.attention(q, k, v, bias=ll.ShawRelative(table)),
            dense=_dense_shaw,
        ),
    ]
    return found


def _drawn(*shape: int) -> Tensor:
    drawn = 0.3 * torch.randn(shape, device="cuda")
    return drawn.to(torch.bfloat16).requires_grad_()


def _rows(*shape: int) -> Parameter:
    return Parameter(_drawn(*shape), (slice(1), slice(2)))


def _heads(*shape: int) -> Parameter:
    return Parameter(_drawn(*shape), (slice(2),))


def _efficient(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    with sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION):
        return F.scaled_dot_product_attention(q, k, v, attn_mask=bias)


def _dense_relative(q: Tensor, k: Tensor, v: Tensor, table: Tensor) -> Tensor:
    place = torch.arange(q.shape[2], device=q.device)
    bias = table[:, place - place[:, None] + q.shape[2] - 1]
    return _efficient(q, k, v, bias.expand(q.shape[0], -1, -1, -1))


def _dense_decomposed(q: Tensor, k: Tensor, v: Tensor, rel_h: Tensor, rel_w: Tensor) -> Tensor:
    return _efficient(q, k, v, (rel_h[..., :, None] + rel_w[..., None, :]).flatten(-2))


def _transformer_xl(
    q: Tensor, k: Tensor, v: Tensor, positions: Tensor, content: Tensor, position: Tensor
) -> Tensor:
    query, bias = ll.TransformerXLBias.of(q, positions, content, position)
    return ll.attention(query, k, v, bias=bias)


def _dense_transformer_xl(
    q: Tensor, k: Tensor, v: Tensor, positions: Tensor, content: Tensor, position: Tensor
) -> Tensor:
    length = q.shape[2]
    products = (q + position[:, None]) @ positions.mT  # [B, H, L, 2 L - 1]
    shape = products.shape
    shifted = F.pad(products, (1, 0)).view(*shape[:2], shape[3] + 1, shape[2])[..., 1:, :]
    bias = shifted.view(shape)[..., :length] * q.shape[3] ** -0.5
    return _efficient(q + content[:, None], k, v, bias)


def _dense_shaw(q: Tensor, k: Tensor, v: Tensor, table: Tensor) -> Tensor:
    place = torch.arange(q.shape[2], device=q.device)
    last = table.shape[0] // 2
    entry = (place - place[:, None]).clamp(-last, last) + last
    products = (q @ table.mT) * q.shape[3] ** -0.5
    return _efficient(q, k, v, products.gather(-1, entry.expand(*q.shape[:2], *entry.shape)))


def measure(case: Case, *, check_only: bool = False) -> dict[str, Any]:
    torch.manual_seed(0)
    q, k, v = (
        torch.randn(case.shape, device="cuda", dtype=case.dtype, requires_grad=True)
        for _ in range(3)
    )
    parameters = case.parameters()
    inputs = (q, k, v, *(p.tensor for p in parameters))
    d_out = torch.randn_like(q)
    right = reference(case, inputs, parameters, d_out)
    parts = [(slice(1), slice(2))] * 4 + [p.part for p in parameters]
    row: dict[str, Any] = {"case": case.name, "shape": case.shape, "dtype": str(case.dtype)}
    ready: dict[str, tuple[Way, Tensor]] = {}
    for name, way in case.ways().items():
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        try:
            out = way(*inputs)
        except Exception as error:  # a peer that cannot run this is a result too
            if name in OURS:
                raise
            row[name] = {"fails": f"{type(error).__name__}: {str(error).splitlines()[0][:80]}"}
            continue
        # What arrives at the part that is checked; parameters are shared by the rest.
        only = torch.zeros_like(d_out)
        only[:1, :2] = d_out[:1, :2]
        gradients = torch.autograd.grad(out, inputs, only, retain_graph=True)
        errors = [
            float(((t[part].double() - r).norm() / r.norm()).detach())
            for t, part, r in zip((out, *gradients), parts, right, strict=True)
        ]
        peak = torch.cuda.max_memory_allocated() - before
        row[name] = {"error": max(errors), "peak MB": round(peak / 2**20)}
        if max(errors) <= TOLERANCE[case.dtype]:
            ready[name] = (way, out)
        elif name in OURS:
            raise SystemExit(f"{case.name}: error {max(errors):.1e}")
    if check_only:
        return row
    times: dict[tuple[str, str], list[float]] = {}
    for turn in range(WARMUP + REPEATS):
        for name, (way, out) in ready.items():
            with torch.no_grad():
                forward = timed(lambda way=way: way(*inputs))
            backward = timed(
                lambda out=out: torch.autograd.grad(out, inputs, d_out, retain_graph=True)
            )
            if turn >= WARMUP:
                times.setdefault((name, "forward"), []).append(forward)
                times.setdefault((name, "backward"), []).append(backward)
    for (name, stage), each in times.items():
        row[name][f"{stage} ms"] = round(statistics.median(each), 4)
    return row


def reference(
    case: Case, inputs: tuple[Tensor, ...], parameters: list[Parameter], d_out: Tensor
) -> list[Tensor]:
    """Output and gradients of the first batch element's first two heads, in float64."""
    parts = [(slice(1), slice(2))] * 3 + [p.part for p in parameters]
    leaves = [
        t.detach()[part].double().requires_grad_() for t, part in zip(inputs, parts, strict=True)
    ]
    options = dict(case.options)
    if options.get("mask") is not None:  # of the lengths, those of the first batch element
        options["mask"] = options["mask"].map_tensors(
            lambda t: t[:1] if t.dim() == 1 and len(t) == inputs[0].shape[0] else t
        )
    if isinstance(options.get("bias"), ll.ALiBi):
        options["bias"] = ll.ALiBi(options["bias"].slopes[:2])
    call = case.call or (lambda q, k, v: ll.attention(q, k, v, **options))
    with ll.backends("math"):
        out = call(*leaves)
        return [out, *torch.autograd.grad(out, leaves, d_out[:1, :2].double())]


def timed(work: Callable[[], object]) -> float:
    """Milliseconds on the device a call. It sleeps first, so that the CPU's part hides."""
    found = _timed(work, 1)
    return found if found > 5 else _timed(work, 5)


def _timed(work: Callable[[], object], calls: int) -> float:
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(1_200_000 * calls)  # cycles
    start.record()
    for _ in range(calls):
        work()
    stop.record()
    torch.cuda.synchronize()
    return start.elapsed_time(stop) / calls


def call_cost() -> dict[str, float]:
    """Microseconds of CPU time that an eager call takes where the GPU has little to do."""
    q, k, v = (torch.randn(1, 8, 128, 64, device="cuda", dtype=torch.float16) for _ in range(3))
    leaves = [t.clone().requires_grad_() for t in (q, k, v)]
    d_out = torch.randn_like(q)
    found = {}
    for name, way, allowed in (
        ("limelight", ll.attention, ["flash"]),
        ("limelight's choice", ll.attention, []),
        ("torch default", F.scaled_dot_product_attention, []),
    ):
        with ll.backends(*allowed) if allowed else nullcontext():
            found[f"{name} forward"] = wall_us(lambda way=way: way(q, k, v))
            found[f"{name} forward and backward"] = wall_us(
                lambda way=way: torch.autograd.grad(way(*leaves), leaves, d_out)
            )
    return found


def wall_us(work: Callable[[], object], calls: int = 50) -> float:
    """The median of 21 times of so many calls."""
    found = []
    for _ in range(22):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(calls):
            work()
        found.append((time.perf_counter() - start) / calls * 1e6)
    return round(statistics.median(found[1:]), 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--only", default="", help="run the cases whose name contains this")
    parser.add_argument("--part", default="1/1", help="of the cases, as 1/16")
    parser.add_argument("--check", action="store_true", help="time nothing, write nothing")
    parser.add_argument("--commit", default=None, help="the commit that is measured")
    options = parser.parse_args()
    about = {
        "date": date.today().isoformat(),
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": __import__("triton").__version__,
        "limelight": ll.__version__,
        "commit": options.commit or commit(),
        "repeats": REPEATS,
    }
    rows = []
    part, parts = map(int, options.part.split("/"))
    for case in [case for case in cases() if options.only in case.name][part - 1 :: parts]:
        torch._dynamo.reset()  # FlexAttention compiles for every case, and only so often
        rows.append(measure(case, check_only=options.check))
        print(json.dumps(rows[-1]), flush=True)
        torch.cuda.empty_cache()
    if options.check:
        return
    results = {"about": about, "rows": rows, "call cost us": call_cost()}
    options.out.write_text(json.dumps(results, indent=1) + "\n")


def commit() -> str:
    done = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True)
    return done.stdout.strip()


if __name__ == "__main__":
    main()
