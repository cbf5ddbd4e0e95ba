"""FlashAttention-2 (Dao, arXiv:2307.08691, algorithms 1 and 2) in PyTorch operations.

Scores are made a tile at a time, for a few batch elements and heads together; masks and biases are
evaluated on the tile, and tiles that a mask empties are never touched. The backward recomputes the
tiles from the log-sum-exp: five products a tile, no atomics, so it is deterministic.

Shapes: b batch elements and h query heads of a chunk, g = h / group heads of keys and values, M
rows (queries) and N keys of a tile. Products run on [b g, group M, N], where the query heads that
share keys are stacked; masks and biases see the same memory as [b, h, M, N].
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import array_api_compat.torch as xp
import torch
from torch import Tensor

from limelight import dropout
from limelight.call import Call, Gradients
from limelight.tile import Tile, TileState, on_host
from limelight.tuning import TileConfig

# Scores in a tile of all its heads and batch elements together: 4 MB in float32.
CHUNK_SCORES = 2**20


def forward(call: Call, tiles: TileConfig) -> tuple[Tensor, Tensor]:
    """out [B, H, M, E], laid out as (B, M, H, E), and the LSE [B, H, M], in the compute dtype."""
    batch, heads, q_len, _ = call.size
    work = _Work(call, tiles)
    out = call.query.new_empty((batch, q_len, heads, call.value.shape[3]), dtype=work.dtype)
    out = out.transpose(1, 2)
    lse = call.query.new_empty((batch, heads, q_len), dtype=work.dtype)
    for chunk in work.chunks():
        for rows in work.row_tiles():
            window = (chunk.batches, chunk.heads, rows)
            out[window], lse[window] = _forward_rows(chunk, rows)
    return out, lse


def _forward_rows(chunk: _Chunk, rows: slice) -> tuple[Tensor, Tensor]:
    row_max, row_sum, acc = _online_softmax(chunk, rows)
    # A row that sees nothing: output 0, LSE log(0) = -inf.
    out = acc / row_sum.masked_fill(row_sum == 0, 1.0) * dropout.rescale(chunk.call.dropout_p)
    return out, (row_sum.log() + row_max).squeeze(-1)


def _online_softmax(chunk: _Chunk, rows: slice) -> tuple[Tensor, Tensor, Tensor]:
    """The maximum, the sum of exp(score - maximum), and that sum weighted with the values.

    [b, h, M, 1], [b, h, M, 1] and [b, h, M, E], over the keys that these rows see.
    """
    query = chunk.query_rows(rows)
    row_max = query.new_full((*query.shape[:2], 1), -torch.inf)
    row_sum = torch.zeros_like(row_max)
    acc = query.new_zeros((*query.shape[:2], chunk.value.shape[2]))
    for tile in chunk.score_tiles(query, rows):
        new_max = torch.maximum(row_max, tile.scores.amax(dim=-1, keepdim=True))
        shift = new_max.masked_fill(new_max == -torch.inf, 0.0)
        weights = tile.scores.sub_(shift).exp_()
        rescale = torch.exp(row_max - shift)
        row_sum.mul_(rescale).add_(weights.sum(dim=-1, keepdim=True))
        if chunk.call.dropout_p > 0:
            weights.masked_fill_(chunk.dropped(tile.at), 0.0)
        acc.mul_(rescale).baddbmm_(weights, tile.value)
        row_max = new_max
    row_max, row_sum, acc = (chunk.ungrouped(t) for t in (row_max, row_sum, acc))
    if chunk.call.sinks is not None:
        sinks = chunk.sinks()[:, None, None]
        new_max = torch.maximum(row_max, sinks)
        shift = new_max.masked_fill(new_max == -torch.inf, 0.0)
        rescale = torch.exp(row_max - shift)
        row_sum = row_sum * rescale + torch.exp(sinks - shift)
        acc, row_max = acc * rescale, new_max
    return row_max, row_sum, acc


def backward(
    call: Call,
    tiles: TileConfig,
    out: Tensor,
    lse: Tensor,
    d_out: Tensor | None,
    d_lse: Tensor | None,
    wanted: Gradients,
) -> Gradients:
    """The wanted gradients, each in its input's dtype, accumulated in the compute dtype."""
    work = _Work(call, tiles)
    parameters = call.bias.tensors() if call.bias is not None else []
    # Only what many chunks add to needs an accumulator of its own.
    d_sinks = torch.zeros_like(call.sinks, dtype=work.dtype) if wanted.sinks else None
    d_bias = [
        torch.zeros_like(tensor, dtype=work.dtype) if want else None
        for tensor, want in zip(parameters, wanted.bias, strict=True)
    ]
    d_query, d_key, d_value = (
        torch.empty_like(tensor) if want else None
        for tensor, want in zip((call.query, call.key, call.value), wanted[:3], strict=True)
    )
    for chunk in work.chunks():
        d_keys, d_values = torch.zeros_like(chunk.key), torch.zeros_like(chunk.value)
        for rows in work.row_tiles():
            window = (chunk.batches, chunk.heads, rows)
            state = _RowState.of(
                chunk,
                rows,
                out=out[window].to(work.dtype),
                lse=lse[window].to(work.dtype),
                d_out=None if d_out is None else d_out[window].to(work.dtype),
                d_lse=None if d_lse is None else d_lse[window].to(work.dtype),
            )
            if d_sinks is not None:
                d_sinks[chunk.heads] -= state.sinks_gradient(chunk.sinks())
            d_query_rows = _backward_rows(chunk, rows, state, d_keys, d_values, d_bias)
            if d_query is not None:
                d_query[window] = d_query_rows
        shared = (chunk.batches, chunk.kv_heads)
        if d_key is not None:
            d_key[shared] = d_keys.view(d_key[shared].shape)
        if d_value is not None:
            d_value[shared] = d_values.view(d_value[shared].shape)
    return Gradients(
        d_query,
        d_key,
        d_value,
        None if d_sinks is None else d_sinks.to(call.sinks.dtype),
        tuple(
            None if gradient is None else gradient.to(tensor.dtype)
            for gradient, tensor in zip(d_bias, parameters, strict=True)
        ),
    )


@dataclass(frozen=True, slots=True)
class _RowState:
    """What the backward knows of some rows before it looks at keys; [b, h, M, 1] but for d_out.

    A probability is exp(score - shift) / row_sum. delta is what the softmax's derivative takes from
    the gradient of each of a row's probabilities.
    """

    nothing: Tensor  # the rows that see no key: they have no gradient, whatever arrives
    d_out: Tensor  # [b, h, M, E]
    shift: Tensor
    row_sum: Tensor | None  # None for 1
    delta: Tensor

    @classmethod
    def of(
        cls,
        chunk: _Chunk,
        rows: slice,
        *,
        out: Tensor,
        lse: Tensor,
        d_out: Tensor | None,
        d_lse: Tensor | None,
    ) -> _RowState:
        nothing = (lse == -torch.inf)[..., None]
        d_out = torch.zeros_like(out) if d_out is None else d_out.masked_fill(nothing, 0.0)
        delta = (d_out * out).sum(dim=-1, keepdim=True)
        if d_lse is not None:
            delta -= d_lse[..., None].masked_fill(nothing, 0.0)
        shift, row_sum = lse[..., None], None
        if lse_lost_digits(lse):
            shift, row_sum, _ = _online_softmax(chunk, rows)
            row_sum = row_sum.masked_fill(nothing, 1.0)
        shift = shift.masked_fill(nothing, torch.inf)  # exp(-inf - inf) is 0
        return cls(nothing, d_out, shift, row_sum, delta)

    def sinks_gradient(self, sinks: Tensor) -> Tensor:
        """What these rows take from the gradient of the sinks [h]."""
        probs = torch.exp(sinks[:, None, None] - self.shift)
        if self.row_sum is not None:
            probs /= self.row_sum
        return (probs * self.delta).sum(dim=(0, 2, 3))


def _backward_rows(
    chunk: _Chunk,
    rows: slice,
    state: _RowState,
    d_keys: Tensor,
    d_values: Tensor,
    d_bias: list[Tensor | None],
) -> Tensor:
    """Returns the gradient of these query rows; adds to those of keys, values and the bias."""
    call = chunk.call
    query = chunk.query_rows(rows).masked_fill_(chunk.grouped(state.nothing), 0.0)
    d_rows = chunk.grouped(state.d_out) * dropout.rescale(call.dropout_p)
    shift, delta = chunk.grouped(state.shift), chunk.grouped(state.delta)
    row_sum = None if state.row_sum is None else chunk.grouped(state.row_sum)
    d_query = torch.zeros_like(query)
    # What the bias's own look at the queries adds to their gradient, [b, h, M, D].
    d_read = None
    if call.bias is not None and call.bias.reads_query():
        d_read = torch.zeros_like(chunk.ungrouped(query))
    for tile in chunk.score_tiles(query, rows, slopes=True):
        keys = tile.at.keys
        probs = tile.scores.sub_(shift).exp_()
        if row_sum is not None:
            probs.div_(row_sum)
        d_probs = torch.bmm(d_rows, tile.value.mT, out=chunk.work.buffer("d_probs", probs.shape))
        survived = probs
        if call.dropout_p > 0:
            dropped = chunk.dropped(tile.at)
            survived = probs.masked_fill(dropped, 0.0)
            d_probs.masked_fill_(dropped, 0.0)
        d_values[:, keys].baddbmm_(survived.mT, d_rows)
        d_scores = d_probs.sub_(delta).mul_(probs)
        if call.bias is not None:
            at = tile.at
            if d_read is not None:
                at = replace(at, query=at.query.masked_fill(state.nothing, 0.0))
                d_read += call.bias.fold_query(chunk.ungrouped(d_scores), at, xp)
            if any(gradient is not None for gradient in d_bias):
                call.bias.fold(chunk.ungrouped(d_scores), at, xp, d_bias)
        if tile.slope is not None:
            d_scores.mul_(tile.slope)
        d_keys[:, keys].baddbmm_(d_scores.mT, query)
        d_query.baddbmm_(d_scores, tile.key)
    d_query = chunk.ungrouped(d_query.mul_(call.scale))
    return d_query if d_read is None else d_query.add_(d_read)


def compute_dtype(query: Tensor) -> torch.dtype:
    """The dtype of scores, sums and the LSE."""
    return torch.float64 if query.dtype == torch.float64 else torch.float32


def lse_lost_digits(lse: Tensor) -> bool:
    """Whether some row's LSE is so large that exp(score - LSE) is no probability any more.

    Beside a maximum of 1e4, float32 has few digits left for the logarithm of the sum; beside its
    own minimum, with which some models mask, it has none. Always False on a device, which would
    have to be waited for.
    """
    if not on_host(lse):
        return False
    return bool(((lse.abs() > 1e4) & (lse != -torch.inf)).any())


@dataclass(frozen=True, slots=True)
class _ScoreTile:
    """scores [b g, group M, N], -inf where hidden; the caller may overwrite them.

    key and value are zero where no row of the tile sees them: 0 * NaN is NaN. slope is the
    derivative of the softcap at each score.
    """

    at: Tile
    scores: Tensor
    key: Tensor
    value: Tensor
    slope: Tensor | None


class _Work:
    """One call cut into chunks (batch elements and heads) and row tiles."""

    def __init__(self, call: Call, tiles: TileConfig) -> None:
        self.call = call
        self.dtype = compute_dtype(call.query)
        self.positions = call.positions(xp, self.dtype)
        _, _, q_len, kv_len = call.size
        self.rows = min(tiles.rows, max(q_len, 1))
        self.keys = min(tiles.keys, max(kv_len, 1))
        self._buffers: dict[str, Tensor] = {}

    def row_tiles(self) -> Iterator[slice]:
        return _ranges(self.call.size.q_len, self.rows)

    def key_tiles(self) -> Iterator[slice]:
        return _ranges(self.call.size.kv_len, self.keys)

    def chunks(self) -> Iterator[_Chunk]:
        batch, q_heads, _, _ = self.call.size
        kv_heads = q_heads // self.call.group
        head_scores = self.call.group * self.rows * self.keys
        heads = max(1, min(kv_heads, CHUNK_SCORES // head_scores))
        batches = max(1, min(batch, CHUNK_SCORES // (head_scores * kv_heads)))
        for b in _ranges(batch, batches):
            for g in _ranges(kv_heads, heads):
                yield _Chunk(self, b, g)

    def buffer(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """Uninitialised memory, the same at each call: fresh pages cost as much as the scores."""
        count = 1
        for size in shape:
            count *= size
        buffer = self._buffers.get(name)
        if buffer is None or buffer.numel() < count:
            buffer = self._buffers[name] = self.call.query.new_empty(count, dtype=self.dtype)
        return buffer[:count].view(shape)


class _Chunk:
    """Some batch elements and heads of a call, with their keys and values in the compute dtype."""

    def __init__(self, work: _Work, batches: slice, kv_heads: slice) -> None:
        self.work, self.call = work, work.call
        self.batches, self.kv_heads = batches, kv_heads
        self.group = self.call.group
        self.heads = slice(kv_heads.start * self.group, kv_heads.stop * self.group)
        self.key = self._shared(self.call.key)
        self.value = self._shared(self.call.value)

    def _shared(self, tensor: Tensor) -> Tensor:
        """[b g, length, dim]"""
        part = tensor[self.batches, self.kv_heads].to(self.work.dtype)
        return part.reshape(part.shape[0] * part.shape[1], *part.shape[2:])

    def grouped(self, tensor: Tensor) -> Tensor:
        """[b, h, M, X] -> [b g, group M, X]"""
        b, h, m, x = tensor.shape
        return tensor.reshape(b * h // self.group, self.group * m, x)

    def ungrouped(self, tensor: Tensor) -> Tensor:
        """[b g, group M, X] -> [b, h, M, X]"""
        h = self.heads.stop - self.heads.start
        bg, gm, x = tensor.shape
        return tensor.view(bg * self.group // h, h, gm // self.group, x)

    def query_rows(self, rows: slice) -> Tensor:
        """[b g, group M, D], scaled."""
        query = self.call.query[self.batches, self.heads, rows].to(self.work.dtype)
        return self.grouped(query) * self.call.scale

    def sinks(self) -> Tensor:
        return self.call.sinks[self.heads].to(self.work.dtype)

    def dropped(self, at: Tile) -> Tensor:
        """[b g, group M, N]: True where dropout drops a weight."""
        call = self.call
        return self.grouped(dropout.dropped(at, call.seed, call.dropout_p, xp))

    def score_tiles(self, query: Tensor, rows: slice, slopes: bool = False) -> Iterator[_ScoreTile]:
        """The tiles with keys that these rows may see, in order."""
        mask = self.call.mask
        for keys in self.work.key_tiles():
            at = self.work.positions.tile(self.batches, self.heads, rows, keys)
            state = TileState.FULL if mask is None else mask.tile_state(at)
            if state != TileState.EMPTY:
                yield self._scores(query, at, state, slopes)

    def _scores(self, query: Tensor, at: Tile, state: TileState, slopes: bool) -> _ScoreTile:
        call = self.call
        key, value = self.key[:, at.keys], self.value[:, at.keys]
        visible = None
        if state == TileState.PARTIAL and call.mask is not None:
            visible = call.mask.evaluated(at, xp)
        bias = None if call.bias is None else call.bias.evaluated(at, xp)
        if call.bias is not None and call.bias.hides():
            shown = bias != -torch.inf
            visible = shown if visible is None else visible & shown
        if visible is not None:
            seen = self._seen(visible)
            key, value = (t.masked_fill(~seen, 0.0) for t in (key, value))
        shape = (query.shape[0], query.shape[1], key.shape[1])
        scores = torch.bmm(query, key.mT, out=self.work.buffer("scores", shape))
        slope = None
        if call.softcap is not None:
            tanh = scores.div_(call.softcap).tanh_()
            if slopes:
                slope = 1 - tanh.square()
            scores.mul_(call.softcap)
        full = self.ungrouped(scores)
        if bias is not None:
            full.add_(bias)
        if visible is not None:
            full.masked_fill_(~visible, -torch.inf)
        return _ScoreTile(at, scores, key, value, slope)

    def _seen(self, visible: Tensor) -> Tensor:
        """[b g, N, 1]: the keys that at least one row of the tile sees."""
        b, g = (s.stop - s.start for s in (self.batches, self.kv_heads))
        seen = visible.any(dim=2)  # [b or 1, h or 1, N or 1]
        if seen.shape[1] > 1:
            seen = seen.unflatten(1, (g, self.group)).any(dim=2)
        return seen[..., None].expand(b, g, -1, 1).reshape(b * g, -1, 1)


def _ranges(length: int, size: int) -> Iterator[slice]:
    return (slice(start, min(start + size, length)) for start in range(0, length, size))
