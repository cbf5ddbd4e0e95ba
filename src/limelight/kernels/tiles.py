"""Tiles of rows: loading them from a strided tensor and storing them."""

import triton
import triton.language as tl


@triton.jit
def load_rows(
    tensor, stride, start, low, high, DIM: tl.constexpr, TILE: tl.constexpr, BOUNDED: tl.constexpr
):
    """Rows from `start` on, [TILE, DIM padded to a power of two].

    tensor: pointer to row 0 of one head, whose elements lie side by side. Padding is zero; where
    BOUNDED, so is a row outside [low, high), which is not read.
    """
    PADDED: tl.constexpr = padded(DIM)
    row = tl.arange(0, TILE)
    column = tl.arange(0, PADDED)
    first = tensor + tl.cast(start, tl.int64) * stride
    places = first + row[:, None] * stride + column[None, :]
    if BOUNDED:
        inside = (start + row >= low) & (start + row < high)
        if DIM != PADDED:
            tile = tl.load(places, mask=inside[:, None] & (column < DIM)[None, :], other=0.0)
        else:
            tile = tl.load(places, mask=inside[:, None], other=0.0)
    elif DIM != PADDED:
        tile = tl.load(places, mask=(column < DIM)[None, :], other=0.0)
    else:
        tile = tl.load(places)
    return tile


@triton.jit
def store_rows(tensor, stride, start, high, tile, DIM: tl.constexpr, TILE: tl.constexpr):
    """Writes the rows of a tile that lie under `high`, cast to the tensor's dtype."""
    PADDED: tl.constexpr = padded(DIM)
    row = tl.arange(0, TILE)
    column = tl.arange(0, PADDED)
    first = tensor + tl.cast(start, tl.int64) * stride
    places = first + row[:, None] * stride + column[None, :]
    inside = (start + row < high)[:, None] & (column < DIM)[None, :]
    tl.store(places, tile.to(tensor.dtype.element_ty), mask=inside)


@triton.jit
def head_of(tensor, strides, batch, head):
    """The pointer to one head of one batch element; offsets may pass 2**31 elements."""
    return (
        tensor + tl.cast(batch, tl.int64) * strides.batch + tl.cast(head, tl.int64) * strides.head
    )


@triton.jit
def load_or(pointer, offset, otherwise):
    """One number from an optional tensor: `otherwise` where the pointer is null."""
    return tl.load(pointer + offset, mask=is_given(pointer), other=otherwise)


@triton.jit
def is_given(pointer):
    """Whether an optional tensor is there: its pointer is not null."""
    return tl.cast(pointer, tl.int64) != 0


@triton.constexpr_function
def padded(dim):
    """The least power of two that holds `dim` and that a matrix product takes."""
    return max(16, 1 << (dim - 1).bit_length())
