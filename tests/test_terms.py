"""Masks and biases: their meaning by hand and by third parties, tile states, folds, text forms."""

from __future__ import annotations

import itertools

import array_api_compat.torch as torch_xp
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import limelight.biases
import limelight.masks
from limelight import (
    ALiBi,
    BlockSparse,
    Causal,
    DecomposedBias,
    DenseBias,
    DenseMask,
    Documents,
    KeyLengths,
    Packed,
    PrefixLM,
    RelativeBias,
    RelativeBias2D,
    ShawRelative,
    SlidingWindow,
    T5Bias,
    TransformerXLBias,
)
from limelight.masks import And, Or
from limelight.picture import dense
from limelight.terms import Term, from_spec
from limelight.tile import Positions, Size, TileState


def kind(term):
    return "+".join(type(part).__name__ for part in term.parts())


def rows(text):
    """A matrix written out: "110/011" has two rows."""
    return np.array([[character == "1" for character in row] for row in text.split("/")])


# Masks, by hand: mask, q_len, kv_len, query_start, what is visible.

LITERAL_MASKS = [
    (Causal(), 3, 3, 0, "100/110/111"),
    (Causal(), 2, 4, 0, "1000/1100"),
    (Causal(), 2, 4, 2, "1110/1111"),
    (Causal(), 3, 2, -1, "00/10/11"),
    (SlidingWindow(1), 4, 4, 0, "1100/1110/0111/0011"),
    (SlidingWindow(1, 0), 4, 4, 0, "1000/1100/0110/0011"),
    (SlidingWindow(0, 1), 3, 4, 0, "1100/0110/0011"),
    (SlidingWindow(0), 3, 3, 0, "100/010/001"),
    (SlidingWindow(None, 0), 3, 3, 0, "100/110/111"),
    (SlidingWindow(None), 2, 3, 0, "111/111"),
    (SlidingWindow(None, 1), 3, 3, 0, "110/111/111"),
    (SlidingWindow(1, None), 3, 3, 0, "111/111/011"),
    (SlidingWindow(1), 2, 5, 3, "00111/00011"),
    (SlidingWindow(1), 2, 3, 9, "000/000"),
    (KeyLengths(np.array([2])), 2, 4, 0, "1100/1100"),
    (KeyLengths(np.array([0])), 1, 3, 0, "000"),
    (KeyLengths(np.array([-3])), 1, 3, 0, "000"),
    (KeyLengths(np.array([7])), 1, 3, 0, "111"),
    (KeyLengths(np.array([1])), 1, 3, 2, "100"),
    (DenseMask(rows("101/010")), 2, 3, 0, "101/010"),
    (DenseMask(rows("101/010")), 2, 3, 5, "101/010"),
    (DenseMask(rows("101")), 2, 3, 0, "101/101"),
    (DenseMask(rows("1/0")), 2, 3, 0, "111/000"),
    (DenseMask(rows("101/010")[None, None]), 2, 3, 0, "101/010"),
    (Documents(np.array([0, 0, 1, 1])), 4, 4, 0, "1100/1100/0011/0011"),
    (Documents(np.array([4, 2, 4, -1])), 4, 4, 0, "1010/0100/1010/0000"),
    (Documents(np.array([0, 0, 1, 1])), 2, 4, 2, "0011/0011"),
    (Documents(np.array([0, 0, 1, 1])), 2, 4, 3, "0011/0000"),
    (Documents(np.array([0, 0, 1, 1])), 2, 4, -1, "0000/1100"),
    (Documents(np.array([0, 0, 1]), np.array([1, 0])), 2, 3, 0, "001/110"),
    (Documents(np.array([0, -1, 1]), np.array([-1, 0, 5])), 3, 3, 0, "000/100/000"),
    (Documents(np.array([0, 0, 1]), np.array([1, 0])), 2, 3, 7, "001/110"),
    (Documents(np.array([0, 0, 1], np.uint8)), 3, 3, 1, "110/001/000"),
    (PrefixLM(2), 4, 4, 0, "1100/1100/1110/1111"),
    (PrefixLM(0), 3, 3, 0, "100/110/111"),
    (PrefixLM(9), 2, 3, 0, "111/111"),
    (PrefixLM(1), 3, 4, -2, "1000/1000/1000"),
    (PrefixLM(1), 2, 4, 2, "1110/1111"),
    (PrefixLM(np.array([3])), 3, 4, 0, "1110/1110/1110"),
    (PrefixLM(np.array([-4])), 2, 2, 0, "10/11"),
    (Packed(np.array([0, 2, 3])), 4, 4, 0, "1100/1100/0010/0000"),
    (Packed(np.array([1, 3, 3, 4])), 4, 5, 0, "00000/01100/01100/00010"),
    (Packed(np.array([0, 2, 4])), 2, 4, 1, "1100/0011"),
    (Packed(np.array([0, 2, 4])), 3, 4, -1, "0000/1100/1100"),
    (Packed(np.array([0, 2, 4])), 2, 4, 3, "0011/0000"),
    (Packed(np.array([0, 3, 4]), np.array([0, 1, 3])), 4, 4, 0, "1110/0001/0001/0000"),
    (Packed(np.array([0, 3, 4]), np.array([1, 1, 2])), 2, 4, 5, "0000/0001"),
    (Packed(np.array([0])), 2, 2, 0, "00/00"),
    (BlockSparse(rows("10/01/11"), 1, 2), 3, 4, 0, "1100/0011/1111"),
    (BlockSparse(rows("10/01"), 2, 3), 3, 4, 0, "1110/1110/0001"),
    (BlockSparse(rows("10/01")[None], 2, 3), 3, 4, 5, "1110/1110/0001"),
    (BlockSparse(rows("01")), 2, 130, 0, "/".join(["0" * 128 + "11"] * 2)),
    (Causal() & Packed(np.array([0, 2, 4])), 4, 4, 0, "1000/1100/0010/0011"),
    (PrefixLM(1) & Packed(np.array([0, 2, 4])), 4, 4, 0, "1000/1100/0010/0011"),
    (BlockSparse(rows("00/10"), 2, 2) | SlidingWindow(0), 4, 4, 0, "1000/0100/1110/1101"),
    (Causal() & SlidingWindow(1), 3, 3, 0, "100/110/011"),
    (Causal() | SlidingWindow(0, 1), 3, 3, 0, "110/111/111"),
    (Causal() & KeyLengths(np.array([1])), 3, 3, 0, "100/100/100"),
    (Causal() & (KeyLengths(np.array([1])) | SlidingWindow(0)), 3, 3, 0, "100/110/101"),
    (Causal() & Documents(np.array([0, 0, 1, 1])), 4, 4, 0, "1000/1100/0010/0011"),
]  # fmt: skip


@pytest.mark.parametrize(("mask", "q_len", "kv_len", "start", "expected"), LITERAL_MASKS)
def test_masks_by_hand(mask, q_len, kv_len, start, expected):
    found = dense(mask, q_len, kv_len, query_start=start)[0]
    np.testing.assert_array_equal(found, rows(expected))


@pytest.mark.parametrize(("mask", "q_len", "kv_len", "start", "expected"), LITERAL_MASKS)
def test_masks_by_hand_in_torch(mask, q_len, kv_len, start, expected):
    at = positions(start, Size(1, 1, q_len, kv_len), torch_xp).whole()
    found = mask.map_tensors(torch.as_tensor).values(at, torch_xp)
    np.testing.assert_array_equal(found.expand(1, 1, q_len, kv_len)[0, 0].numpy(), rows(expected))


@pytest.mark.parametrize(
    ("q_len", "kv_len", "start"), [(5, 5, 0), (3, 7, 4), (7, 3, -4), (4, 6, 1)]
)
def test_causal_is_tril(q_len, kv_len, start):
    """`torch.tril` keeps what lies on and under the diagonal `start`."""
    expected = torch.ones(q_len, kv_len).tril(start).bool().numpy()
    np.testing.assert_array_equal(dense(Causal(), q_len, kv_len, query_start=start)[0], expected)


@pytest.mark.parametrize(("left", "right"), [(2, 1), (0, 0), (None, 2), (2, None), (3, 0)])
def test_sliding_window_is_a_band(left, right):
    ones = torch.ones(8, 9)
    band = ones if left is None else ones.triu(1 - left)
    band = band if right is None else band.tril(right + 1)
    found = dense(SlidingWindow(left, right), 8, 9, query_start=1)[0]
    np.testing.assert_array_equal(found, band.bool().numpy())


def test_key_lengths_of_each_batch_element():
    visible = values(KeyLengths(np.array([2, 0])), Size(2, 1, 1, 3))
    np.testing.assert_array_equal(visible[:, 0, 0], rows("110/000"))


def test_documents_of_each_batch_element():
    ids = np.array([[0, 0, 1], [5, 6, 5]])
    visible = values(Documents(ids), Size(2, 1, 3, 3), start=np.array([0, 1]))
    np.testing.assert_array_equal(visible[0, 0], rows("110/110/001"))
    np.testing.assert_array_equal(visible[1, 0], rows("010/101/000"))


def test_packed_documents_and_prefixes_of_each_batch_element():
    size = Size(2, 1, 3, 3)
    packed = values(Packed(np.array([[0, 1, 3], [1, 2, 2]])), size)
    np.testing.assert_array_equal(packed[0, 0], rows("100/011/011"))
    np.testing.assert_array_equal(packed[1, 0], rows("000/010/000"))
    prefixes = values(PrefixLM(np.array([2, 0])), size)
    np.testing.assert_array_equal(prefixes[0, 0], rows("110/110/111"))
    np.testing.assert_array_equal(prefixes[1, 0], rows("100/110/111"))


def test_blocks_of_each_batch_element_and_head():
    blocks = np.stack([np.stack([rows("10"), rows("01")]), np.stack([rows("00"), rows("11")])])
    visible = values(BlockSparse(blocks, 2, 2), Size(2, 2, 1, 3))
    np.testing.assert_array_equal(visible[:, :, 0].reshape(4, 3), rows("110/001/000/111"))


@settings(max_examples=50)
@given(st.lists(st.integers(0, 4), min_size=0, max_size=6), st.integers(0, 3))
def test_packed_is_documents_by_their_lengths(lengths, padding):
    ids = np.repeat(np.arange(len(lengths) + 1), [*lengths, padding])
    ids[ids == len(lengths)] = -1
    size = Size(1, 1, len(ids), len(ids))
    packed = Packed(np.cumsum([0, *lengths]))
    np.testing.assert_array_equal(values(packed, size), values(Documents(ids), size))


def test_blocks_are_a_dense_mask_repeated():
    blocks = np.random.default_rng(0).random((1, 2, 3, 4)) < 0.5
    found = values(BlockSparse(blocks, 4, 5), Size(2, 2, 10, 17))
    np.testing.assert_array_equal(found[1], np.kron(blocks[0], np.ones((4, 5)))[:, :10, :17] == 1)


# Biases, by hand and by their papers.

ARANGE8 = np.arange(8.0)[:, None]


def decomposed(rel_h, rel_w, **options):
    """Of one batch element and head: a row for each query."""
    return DecomposedBias(
        *(np.array(rows, float)[None, None] for rows in (rel_h, rel_w)), **options
    )


LITERAL_BIASES = [
    (ALiBi(np.array([0.5])), 2, 3, 0, [[0, -0.5, -1], [-0.5, 0, -0.5]]),
    (ALiBi(np.array([2.0])), 1, 3, 2, [[-4, -2, 0]]),
    (ALiBi(np.array([-1.0])), 2, 2, 0, [[0, 1], [1, 0]]),
    (DenseBias(np.array([[1.0, 2.0], [3.0, -np.inf]])), 2, 2, 9, [[1, 2], [3, -np.inf]]),
    (DenseBias(np.array([[1.0], [3.0]])), 2, 2, 0, [[1, 1], [3, 3]]),
    (DenseBias(np.array([[1.0, 3.0]])), 2, 2, 0, [[1, 3], [1, 3]]),
    (ALiBi(np.array([1.0])) + DenseBias(np.array([[10.0, 20.0]])), 2, 2, 0, [[10, 19], [9, 20]]),
    (RelativeBias(np.array([[7.0, 8.0, 9.0]])), 3, 4, 0, [[8, 9, 9, 9], [7, 8, 9, 9], [7, 7, 8, 9]]),
    (RelativeBias(np.array([[7.0, 8.0, 9.0]])), 2, 3, 1, [[7, 8, 9], [7, 7, 8]]),
    (RelativeBias(np.array([[7.0, 8.0]]), first=1), 2, 4, 0, [[7, 7, 8, 8], [7, 7, 7, 8]]),
    (RelativeBias(np.array([[7.0]])), 1, 2, 3, [[7, 7]]),
    # Eight buckets, four each way, of which two are wider: distance 2, and 3 or more.
    (T5Bias(ARANGE8, max_distance=4), 2, 5, 2, [[2, 1, 0, 5, 6], [3, 2, 1, 0, 5]]),
    (T5Bias(ARANGE8, bidirectional=False, max_distance=64), 1, 6, 4, [[4, 3, 2, 1, 0, 0]]),
    # Distances 4 to 7, 8 to 15, 16 to 31, 32 and more share the buckets 4, 5, 6 and 7.
    (T5Bias(ARANGE8, bidirectional=False, max_distance=64), 1, 3, 9, [[5, 5, 4]]),
    (T5Bias(ARANGE8, bidirectional=False, max_distance=64), 1, 2, 32, [[7, 6]]),
    # A row of three: the query's column less the key's, from -2 to 2.
    (RelativeBias2D(ARANGE8[:5], 1, 3), 3, 3, 0, [[2, 1, 0], [3, 2, 1], [4, 3, 2]]),
    (RelativeBias2D(ARANGE8[:5], 3, 1), 3, 3, 0, [[2, 1, 0], [3, 2, 1], [4, 3, 2]]),
    (RelativeBias2D(ARANGE8[:5], 3, 1), 3, 3, -1, [[0, 0, 0], [2, 1, 0], [3, 2, 1]]),
    (decomposed([[0, 10], [5, 7]], [[1, 2, 3], [4, 8, 9]]), 2, 6, 0,
     [[1, 2, 3, 11, 12, 13], [9, 13, 14, 11, 15, 16]]),
    (decomposed([[0, 10]], [[1, 2]], first_key=1), 1, 7, 3, [[0, 1, 2, 11, 12, 0, 0]]),
    (decomposed([[5]], [[np.inf]], first_key=1), 1, 2, 0, [[0, np.inf]]),
    # Queries are all ones here: a row of a table stands for its sum.
    (ShawRelative(np.array([[-1, 0], [3, 2], [0, 1]])), 3, 4, 0,
     [[5, 1, 1, 1], [-1, 5, 1, 1], [-1, -1, 5, 1]]),
    (ShawRelative(np.array([[1.0], [2], [3], [4]]), first=-2), 2, 4, 1, [[2, 3, 4, 4], [1, 2, 3, 4]]),
    (ShawRelative(np.array([[7.0]])), 1, 2, 0, [[7, 7]]),
    (TransformerXLBias(np.array([[[1.0], [2], [3]]])), 2, 3, 0, [[2, 3, 3], [1, 2, 3]]),
    (TransformerXLBias(np.array([[[1.0, 1.0], [2, 2], [3, 3]]]), np.array([[10, 20, 30]]), first=0),
     2, 4, 0, [[12, 24, 36, 36], [12, 12, 24, 36]]),
    (TransformerXLBias(np.array([[[1.0], [2]]]), np.array([[10, 20]]), first=-1)
     + DenseBias(np.array([[0.5]])), 1, 3, 2, [[11.5, 11.5, 22.5]]),
]  # fmt: skip


@pytest.mark.parametrize(("bias", "q_len", "kv_len", "start", "expected"), LITERAL_BIASES)
def test_biases_by_hand(bias, q_len, kv_len, start, expected):
    np.testing.assert_array_equal(dense(bias, q_len, kv_len, query_start=start)[0], expected)


# The authors' own function (ofirpress/attention_with_linear_biases, get_slopes), printed for these
# head counts. 8 and 16 are the paper's own sequences: ratio 1/2, and the square root of that.
PAPER_SLOPES = {
    1: [2**-8],
    2: [2**-4, 2**-8],
    8: [1 / 2, 1 / 4, 1 / 8, 1 / 16, 1 / 32, 1 / 64, 1 / 128, 1 / 256],
    12: [
        1 / 2, 1 / 4, 1 / 8, 1 / 16, 1 / 32, 1 / 64, 1 / 128, 1 / 256,
        0.70710678, 0.35355339, 0.17677670, 0.08838835,
    ],
    16: [
        0.70710678, 0.5, 0.35355339, 0.25, 0.17677670, 0.125, 0.08838835, 0.0625,
        0.04419417, 0.03125, 0.02209709, 0.015625, 0.01104854, 0.0078125, 0.00552427, 0.00390625,
    ],
    20: [
        0.70710678, 0.5, 0.35355339, 0.25, 0.17677670, 0.125, 0.08838835, 0.0625,
        0.04419417, 0.03125, 0.02209709, 0.015625, 0.01104854, 0.0078125, 0.00552427, 0.00390625,
        0.84089642, 0.59460356, 0.42044821, 0.29730178,
    ],
}  # fmt: skip


@pytest.mark.parametrize("heads", PAPER_SLOPES)
def test_alibi_slopes_are_the_papers(heads):
    np.testing.assert_allclose(ALiBi.paper_slopes(heads), PAPER_SLOPES[heads], rtol=1e-6)


def test_alibi_without_slopes_takes_the_papers():
    found = dense(ALiBi(), 1, 2, heads=8)
    np.testing.assert_allclose(found[:, 0, 1], [-slope for slope in PAPER_SLOPES[8]])


def test_alibi_under_a_causal_mask_is_the_papers_figure():
    """Figure 3: m times 0; -1 0; -2 -1 0; ... below the diagonal."""
    found = dense(ALiBi(np.array([0.25])), 4, 4)[0]
    figure = 0.25 * np.array([[0, 0, 0, 0], [-1, 0, 0, 0], [-2, -1, 0, 0], [-3, -2, -1, 0]])
    np.testing.assert_array_equal(np.tril(found), figure)


@pytest.mark.parametrize("bidirectional", [True, False])
@pytest.mark.parametrize("max_distance", [9, 20, 100, 128, 1000])
@pytest.mark.parametrize("buckets", [4, 7, 16, 32, 33])
def test_t5_buckets_are_those_of_transformers(buckets, max_distance, bidirectional):
    t5 = pytest.importorskip("transformers.models.t5.modeling_t5")
    offsets = torch.arange(-1500, 1501)
    expected = t5.T5Attention._relative_position_bucket(
        offsets, bidirectional, buckets, max_distance
    )
    bias = T5Bias(np.zeros((buckets, 1)), bidirectional, max_distance)
    if max_distance <= buckets // (4 if bidirectional else 2):
        return  # refused
    np.testing.assert_array_equal(bias.entry(offsets.numpy(), np), expected.numpy())


@pytest.mark.parametrize(("height", "width"), [(7, 7), (2, 5), (4, 1)])
def test_relative_2d_is_swins(height, width):
    """As Swin's own code computes its `relative_position_index`."""
    grid = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
    places = torch.stack(grid).flatten(1)
    apart = (places[:, :, None] - places[:, None, :]).permute(1, 2, 0)
    apart = apart + torch.tensor([height - 1, width - 1])
    index = apart[..., 0] * (2 * width - 1) + apart[..., 1]
    table = torch.randn((2 * height - 1) * (2 * width - 1), 3, dtype=torch.float64)
    found = dense(RelativeBias2D(table.numpy(), height, width), *index.shape, heads=3)
    np.testing.assert_array_equal(found, table[index].permute(2, 0, 1).numpy())


# Every mask and bias, over random tiles.

SIZE = Size(2, 4, 12, 15)
HEAD_DIM = 4
QUERY = np.random.default_rng(2).normal(size=(*SIZE[:3], HEAD_DIM))


def masks(draw=None):
    """One of every mask, for SIZE; with `draw`, random ones."""
    rng = np.random.default_rng(0 if draw is None else draw(st.integers(0, 10**6)))
    start = int(rng.integers(0, 4))
    return [
        Causal(),
        SlidingWindow(int(rng.integers(0, 6))),
        SlidingWindow(None, int(rng.integers(0, 6))),
        SlidingWindow(int(rng.integers(0, 6)), None),
        KeyLengths(rng.integers(-2, 18, 2)),
        PrefixLM(int(rng.integers(0, 18))),
        PrefixLM(rng.integers(-2, 18, 2)),
        Packed(np.sort(rng.integers(0, 16, 5))),
        Packed(np.sort(rng.integers(0, 16, (2, 3)), axis=1)),
        Packed(np.sort(rng.integers(0, 16, 4)), np.sort(rng.integers(0, 13, (2, 4)), axis=1)),
        BlockSparse(rng.random((2, 4, 3, 3)) < 0.6, 4, 5),
        BlockSparse(rng.random((1, 4, 2, 5)) < 0.4, 7, 3),
        DenseMask(rng.random((2, 1, 12, 15)) < 0.5),
        DenseMask(np.repeat(rng.random((1, 3)) < 0.5, 5, axis=1)),
        Documents(np.sort(rng.integers(-1, 3, 15))),
        Documents(np.sort(rng.integers(-1, 3, (2, 15)), axis=1)),
        Documents(rng.integers(0, 2, 15) * start, rng.integers(0, 2, 12) * start),
        Documents(np.sort(rng.integers(-1, 3, 15)), np.sort(rng.integers(-1, 3, (2, 12)), axis=1)),
    ]


def biases(rng=None):
    rng = np.random.default_rng(0) if rng is None else rng
    return [
        ALiBi(rng.normal(size=4)),
        ALiBi(rng.normal(size=(2, 4))),
        DenseBias(rng.normal(size=(12, 15))),
        DenseBias(rng.normal(size=(2, 1, 12, 1))),
        DenseBias(rng.normal(size=(4, 1, 15))),
        ALiBi(rng.normal(size=4)) + DenseBias(rng.normal(size=(1, 15))),
        RelativeBias(rng.normal(size=(4, 7))),
        RelativeBias(rng.normal(size=(1, 6)), first=-4) + T5Bias(rng.normal(size=(9, 1)), False, 7),
        T5Bias(rng.normal(size=(8, 4)), max_distance=6),
        RelativeBias2D(rng.normal(size=(45, 4)), 3, 5),
        DecomposedBias(rng.normal(size=(2, 4, 12, 3)), rng.normal(size=(2, 4, 12, 5))),
        DecomposedBias(rng.normal(size=(2, 4, 12, 4)), rng.normal(size=(2, 4, 12, 3)), first_key=2),
        ShawRelative(rng.normal(size=(5, HEAD_DIM))),
        ShawRelative(rng.normal(size=(1, HEAD_DIM))),
        ShawRelative(rng.normal(size=(40, HEAD_DIM)), first=-30),
        TransformerXLBias(rng.normal(size=(4, 26, HEAD_DIM)), rng.normal(size=(4, 26)), first=-11),
        TransformerXLBias(rng.normal(size=(1, 7, HEAD_DIM)), rng.normal(size=(4, 7))),
        TransformerXLBias(rng.normal(size=(4, 9, HEAD_DIM)), first=3) + ALiBi(rng.normal(size=4)),
    ]


def test_every_exported_mask_and_bias_is_tried_here():
    """A new one has to join these lists, and so all the generic tests."""
    tried = {type(part) for term in (*masks(), *biases()) for part in term.parts()}
    exported = {
        getattr(module, name)
        for module in (limelight.masks, limelight.biases)
        for name in module.__all__
    }
    assert exported - tried == {
        limelight.masks.Mask,
        limelight.masks.And,
        limelight.masks.Or,
        limelight.biases.Bias,
        limelight.biases.Sum,
    }


def positions(start=0, size=SIZE, xp=np):
    return Positions.of(
        xp,
        size=size,
        dtype=xp.float64,
        device="cpu",
        query_start=start,
        query=xp.asarray(QUERY) if size == SIZE else None,
        scale=0.3,
    )


def values(term, size=SIZE, start=0):
    found = term.values(positions(start, size).whole(), np)
    return np.broadcast_to(found, tuple(size))


def some_slice(draw, length):
    start = draw(st.integers(0, length - 1))
    return slice(start, draw(st.integers(start + 1, length)))


@st.composite
def tiled_masks(draw):
    every = masks(draw)
    mask = draw(st.sampled_from(every))
    for _ in range(draw(st.integers(0, 2))):
        other = draw(st.sampled_from(every))
        mask = draw(st.sampled_from([mask & other, mask | other, other | mask]))
    start = draw(
        st.integers(-8, 20) | st.lists(st.integers(-8, 20), min_size=2, max_size=2).map(np.array)
    )
    window = tuple(some_slice(draw, length) for length in SIZE)
    return mask, start, window


@settings(max_examples=400)
@given(tiled_masks())
def test_a_tile_is_the_same_part_of_the_whole(case):
    mask, start, window = case
    whole = values(mask, start=start)[window]
    tile = positions(start).tile(*window)
    np.testing.assert_array_equal(np.broadcast_to(mask.values(tile, np), whole.shape), whole)


@settings(max_examples=600)
@given(tiled_masks())
def test_tile_state_is_true(case):
    mask, start, window = case
    whole = values(mask, start=start)[window]
    state = mask.tile_state(positions(start).tile(*window))
    if state == TileState.EMPTY:
        assert not whole.any(), "hides a visible key"
    if state == TileState.FULL:
        assert whole.all(), "shows a hidden key"


@settings(max_examples=200)
@given(tiled_masks())
def test_tile_state_is_true_of_torch_tensors(case):
    mask, start, window = case
    whole = values(mask, start=start)[window]
    start = torch.as_tensor(start) if isinstance(start, np.ndarray) else start
    mask = mask.map_tensors(torch.as_tensor)
    tile = positions(start, xp=torch_xp).tile(*window)
    np.testing.assert_array_equal(
        np.broadcast_to(mask.values(tile, torch_xp).numpy(), whole.shape), whole
    )
    state = mask.tile_state(tile)
    assert state != TileState.EMPTY or not whole.any()
    assert state != TileState.FULL or whole.all()


@pytest.mark.parametrize(
    ("mask", "state", "window"),
    [
        (Causal(), TileState.EMPTY, (slice(0, 4), slice(4, 8))),
        (Causal(), TileState.PARTIAL, (slice(0, 4), slice(3, 8))),
        (Causal(), TileState.FULL, (slice(7, 9), slice(4, 8))),
        (Causal(), TileState.PARTIAL, (slice(6, 9), slice(4, 8))),
        (SlidingWindow(2), TileState.EMPTY, (slice(8, 9), slice(0, 6))),
        (SlidingWindow(2), TileState.PARTIAL, (slice(8, 9), slice(0, 7))),
        (SlidingWindow(2), TileState.FULL, (slice(4, 6), slice(3, 7))),
        (KeyLengths(np.array([3, 5])), TileState.EMPTY, (slice(0, 4), slice(5, 9))),
        (KeyLengths(np.array([3, 5])), TileState.FULL, (slice(0, 4), slice(0, 3))),
        (KeyLengths(np.array([3, 5])), TileState.PARTIAL, (slice(0, 4), slice(0, 4))),
        (Documents(np.repeat([0, 1, 2], 5)), TileState.EMPTY, (slice(0, 5), slice(5, 15))),
        (Documents(np.repeat([0, 1, 2], 5)), TileState.FULL, (slice(5, 10), slice(6, 9))),
        (PrefixLM(3), TileState.EMPTY, (slice(0, 4), slice(4, 8))),
        (PrefixLM(5), TileState.PARTIAL, (slice(0, 4), slice(4, 8))),
        (PrefixLM(np.array([8, 9])), TileState.FULL, (slice(0, 4), slice(4, 8))),
        (PrefixLM(np.array([3, 0])), TileState.EMPTY, (slice(0, 4), slice(4, 8))),
        (PrefixLM(np.array([3, 0])), TileState.FULL, (slice(7, 9), slice(4, 8))),
        (Packed(np.array([0, 5, 10, 15])), TileState.EMPTY, (slice(0, 5), slice(5, 15))),
        (Packed(np.array([0, 5, 10, 15])), TileState.FULL, (slice(5, 10), slice(6, 9))),
        (Packed(np.array([0, 5, 10, 15])), TileState.PARTIAL, (slice(4, 9), slice(6, 9))),
        (Packed(np.array([0, 5, 10])), TileState.EMPTY, (slice(10, 12), slice(10, 15))),
        (
            Packed(np.array([0, 5, 15]), np.array([0, 2, 12])),
            TileState.FULL,
            (slice(2, 12), slice(5, 15)),
        ),
        (BlockSparse(rows("10/01/11"), 4, 8), TileState.EMPTY, (slice(4, 7), slice(2, 8))),
        (BlockSparse(rows("10/01/11"), 4, 8), TileState.FULL, (slice(8, 12), slice(2, 15))),
        (BlockSparse(rows("10/01/11"), 4, 8), TileState.PARTIAL, (slice(4, 9), slice(2, 8))),
        (Causal() & KeyLengths(np.array([3, 5])), TileState.EMPTY, (slice(8, 9), slice(5, 7))),
        (Causal() | KeyLengths(np.array([3, 5])), TileState.FULL, (slice(0, 4), slice(0, 3))),
    ],
)
def test_tile_state_skips_what_it_can(mask, state, window):
    """PARTIAL is always right; these would be needlessly slow."""
    batches, heads = slice(0, 2), slice(0, 4)
    assert mask.tile_state(positions().tile(batches, heads, *window)) == state


@settings(max_examples=100)
@given(st.data())
def test_a_tile_of_a_bias_is_the_same_part_of_the_whole(data):
    rng = np.random.default_rng(data.draw(st.integers(0, 10**6)))
    bias = data.draw(st.sampled_from(biases(rng)))
    start = data.draw(st.integers(-8, 20))
    window = tuple(some_slice(data.draw, length) for length in SIZE)
    whole = values(bias, start=start)[window]
    tile = positions(start).tile(*window)
    found = np.broadcast_to(bias.values(tile, np), whole.shape)
    np.testing.assert_allclose(found, whole, rtol=0, atol=1e-13)  # products round by their shapes


@pytest.mark.parametrize("bias", biases(), ids=kind)
def test_fold_is_the_derivative_of_values(bias):
    """d sum(values * weight) / d tensors, by torch's autograd of `values`."""
    weight = np.random.default_rng(1).normal(size=tuple(SIZE))
    start = np.array([3, -2])
    folded = [np.zeros(tensor.shape) for tensor in bias.tensors()]
    bias.fold(weight, positions(start).whole(), np, folded)

    parameters = [torch.as_tensor(tensor).requires_grad_() for tensor in bias.tensors()]
    traced = bias.with_tensors(iter(parameters))
    at = positions(torch.as_tensor(start), xp=torch_xp).whole()
    at.query.requires_grad_()
    total = (traced.values(at, torch_xp) * torch.as_tensor(weight)).sum()
    expected = torch.autograd.grad(total, parameters, retain_graph=True)
    for found, each in zip(folded, expected, strict=True):
        np.testing.assert_allclose(found, each.numpy(), atol=1e-12)
    if bias.reads_query():
        found = bias.fold_query(weight, positions(start).whole(), np)
        (each,) = torch.autograd.grad(total, at.query)
        np.testing.assert_allclose(found, each.numpy(), atol=1e-12)


@pytest.mark.parametrize("bias", biases(), ids=kind)
def test_folds_of_tiles_add_up_to_the_fold_of_the_whole(bias):
    weight = np.random.default_rng(1).normal(size=tuple(SIZE))
    whole, parts = ([np.zeros(t.shape) for t in bias.tensors()] for _ in range(2))
    bias.fold(weight, positions().whole(), np, whole)
    cuts = [[slice(0, 1), slice(1, 2)], [slice(0, 4)], [slice(0, 5), slice(5, 12)], [slice(0, 15)]]
    for window in itertools.product(*cuts):
        bias.fold(weight[window], positions().tile(*window), np, parts)
    for found, expected in zip(parts, whole, strict=True):
        np.testing.assert_allclose(found, expected, atol=1e-12)


def test_fold_leaves_out_what_is_not_wanted():
    bias = ALiBi(np.ones(4)) + DenseBias(np.ones((12, 15)))
    wanted = np.zeros((12, 15))
    bias.fold(np.ones(tuple(SIZE)), positions().whole(), np, [None, wanted])
    assert (wanted == 8).all()


# Text, structure, equality.

TERMS = [
    *masks(),
    *biases(),
    ALiBi(),
    Causal() & SlidingWindow(3, None) & KeyLengths(np.array([1, 2])),
    (Causal() | SlidingWindow(3))
    & (KeyLengths(np.array([1, 2])) | DenseMask(np.ones((12, 15), bool))),
    ALiBi() + DenseBias(np.ones((12, 15))) + ALiBi(np.ones(4)),
]


@pytest.mark.parametrize("term", TERMS, ids=kind)
def test_spec_and_tensors_make_the_same_term_again(term):
    again = from_spec(term.spec(), iter(term.tensors()))
    assert type(again) is type(term)
    assert again.spec() == term.spec()
    assert all(one is other for one, other in zip(again.tensors(), term.tensors(), strict=True))
    resolved = [t.resolved(SIZE.q_heads, np.asarray) for t in (term, again)]
    np.testing.assert_array_equal(values(resolved[0]), values(resolved[1]))


def test_specs_of_different_terms_differ():
    plain = [
        Causal(), SlidingWindow(1), SlidingWindow(1, 0), SlidingWindow(None, 1), SlidingWindow(1, None),
        Causal() & SlidingWindow(1), Causal() | SlidingWindow(1), SlidingWindow(1) & Causal(),
        PrefixLM(1), PrefixLM(2), PrefixLM(np.ones(1, int)),
        BlockSparse(rows("1")), BlockSparse(rows("1"), 64), BlockSparse(rows("1"), 128, 64),
        Packed(np.ones(3, int)), Packed(np.ones(3, int), np.ones(3, int)),
        RelativeBias(np.ones((1, 3))), RelativeBias(np.ones((1, 3)), 2), T5Bias(np.ones((8, 1))),
        T5Bias(np.ones((8, 1)), False), T5Bias(np.ones((8, 1)), True, 64),
        RelativeBias2D(np.ones((9, 1)), 2, 2), RelativeBias2D(np.ones((9, 1)), 1, 5),
        ALiBi(), ALiBi(np.ones(4)), Documents(np.ones(3, int)),
        Documents(np.ones(3, int), np.ones(3, int)), ALiBi() + ALiBi(),
    ]  # fmt: skip
    assert len({term.spec() for term in plain}) == len(plain)


def test_spec_holds_no_data():
    assert KeyLengths(np.array([1])).spec() == KeyLengths(np.array([2])).spec()


def test_composites_are_flat():
    a, b, c, d = Causal(), SlidingWindow(1), SlidingWindow(2), KeyLengths([1])
    assert ((a & b) & (c & d)).children == (a, b, c, d)
    assert (a & (b & c)).children == (a, b, c)
    assert ((a | b) | c).children == (a, b, c)
    assert ((a | b) & c).children == (a | b, c)
    x, y, z = ALiBi(), DenseBias(1), ALiBi(2)
    assert ((x + y) + z).children == (x, y, z)
    assert (x + (y + z)).children == (x, y, z)
    assert (a & (b | c & d)).parts() == (a, b, c, d)


def test_repr_shows_the_structure():
    mask = Causal() & (SlidingWindow(1) | SlidingWindow(2, None))
    assert (
        repr(mask)
        == "Causal() & (SlidingWindow(left=1, right=1) | SlidingWindow(left=2, right=None))"
    )
    again = eval(repr(mask), {"Causal": Causal, "SlidingWindow": SlidingWindow})
    assert again == mask
    assert repr(ALiBi() + ALiBi()) == "ALiBi(slopes=None) + ALiBi(slopes=None)"


@pytest.mark.parametrize(
    "compose",
    [
        lambda: Causal() & ALiBi(),
        lambda: Causal() | True,
        lambda: Causal() & None,
        lambda: Causal() & np.ones((2, 2), bool),
        lambda: Causal() & torch.ones(2, 2).bool(),
        lambda: ALiBi() + Causal(),
        lambda: ALiBi() + 1.0,
        lambda: ALiBi() + torch.ones(2, 2),
        lambda: Causal() + Causal(),
        lambda: ALiBi() & ALiBi(),
        lambda: True & Causal(),
        lambda: 1.0 + ALiBi(),
        lambda: Causal() & Causal,
    ],
)
def test_what_does_not_compose(compose):
    with pytest.raises(TypeError):
        compose()


def test_what_does_not_compose_is_named():
    with pytest.raises(TypeError, match="mask: found ALiBi, needed another limelight mask"):
        Causal() & ALiBi()
    with pytest.raises(TypeError, match="bias: found Causal, needed another limelight bias"):
        ALiBi() + Causal()


@pytest.mark.parametrize(
    "arguments", [(-1,), (1, -1), (1.5,), ("left",), (1, "both"), (None, -2), (True,)]
)
def test_wrong_windows_are_refused(arguments):
    with pytest.raises((ValueError, TypeError), match="SlidingWindow"):
        SlidingWindow(*arguments)


def test_a_window_of_a_numpy_integer_is_one():
    assert SlidingWindow(np.int64(2)).spec() == SlidingWindow(2).spec()


@pytest.mark.parametrize("length", [None, -1, 1.5, True])
def test_wrong_prefixes_are_refused(length):
    with pytest.raises(ValueError, match="PrefixLM prefix_lengths"):
        PrefixLM(None, length)


def test_a_prefix_is_given_once():
    with pytest.raises(ValueError, match="PrefixLM prefix_lengths"):
        PrefixLM(np.array([1]), 2)
    assert PrefixLM(3) == PrefixLM(prefix_length=3)
    assert eval(repr(PrefixLM(3))) == PrefixLM(3)


@pytest.mark.parametrize("size", [0, -1, 1.5, None, True])
def test_blocks_of_no_size_are_refused(size):
    for sizes, name in (((size, 8), "q_block"), ((8, size), "kv_block")):
        with pytest.raises(ValueError, match=f"BlockSparse {name}"):
            BlockSparse(rows("1"), *sizes)


@pytest.mark.parametrize(
    ("make", "argument"),
    [
        (lambda: RelativeBias(np.ones((4, 5)), 1.5), "RelativeBias first: found 1.5"),
        (lambda: RelativeBias(np.ones((4, 5)), True), "RelativeBias first: found True"),
        (lambda: RelativeBias(np.ones((4, 5)), 2**31), "RelativeBias first: found 2147483648"),
        (lambda: ShawRelative(np.ones((5, 8)), -(2**70)), "ShawRelative first: found -1180591"),
        (lambda: T5Bias(np.ones((32, 4)), "no"), "T5Bias bidirectional: found 'no'"),
        (lambda: T5Bias(np.ones((32, 4)), max_distance=0), "T5Bias max_distance: found 0"),
        (lambda: RelativeBias2D(np.ones((21, 4)), 0, 4), "RelativeBias2D height: found 0"),
        (lambda: RelativeBias2D(np.ones((21, 4)), 4, 2.0), "RelativeBias2D width: found 2.0"),
    ],
)
def test_wrong_numbers_of_tables_are_refused(make, argument):
    with pytest.raises(ValueError, match=argument):
        make()


@pytest.mark.parametrize("heads", [0, -1])
def test_slopes_of_no_heads_are_refused(heads):
    with pytest.raises(ValueError, match="heads"):
        ALiBi.paper_slopes(heads)


def test_terms_are_frozen():
    for term, name in ((Causal(), "ordered"), (SlidingWindow(1), "left"), (ALiBi(), "slopes")):
        with pytest.raises(AttributeError):
            setattr(term, name, 3)


@pytest.mark.parametrize(
    ("mask", "ordered"),
    [
        (Causal(), True),
        (SlidingWindow(1), True),
        (PrefixLM(1), True),
        (Packed([0, 1]), False),
        (KeyLengths([1]), False),
        (DenseMask(None), False),
        (KeyLengths([1]) & Causal(), True),
        (KeyLengths([1]) | (KeyLengths([1]) & Causal()), True),
    ],
)
def test_which_masks_depend_on_order(mask, ordered):
    assert mask.is_ordered() is ordered


def test_every_kind_is_known_by_its_full_name():
    for cls in (Causal, SlidingWindow, ALiBi, And, Or):
        assert Term.kinds[f"{cls.__module__}.{cls.__qualname__}"] is cls
