"""The online softmax of FlashAttention-2 (arXiv:2307.08691, algorithm 1), in powers of two.

`row_max` and `row_sum` are the paper's m and l.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from limelight.kernels.scores import LN2, LOG2E


class Softmax(NamedTuple):
    """What is known of some rows so far: exponents are of two, relative to row_max."""

    row_max: Any  # [M]
    row_sum: Any  # [M]
    acc: Any  # [M, E], the weighted sum of values, not yet divided by row_sum


@triton.jit
def start(ROWS: tl.constexpr, VALUE_DIM: tl.constexpr):
    return Softmax(
        tl.full([ROWS], float("-inf"), tl.float32),
        tl.zeros([ROWS], tl.float32),
        tl.zeros([ROWS, VALUE_DIM], tl.float32),
    )


@triton.jit
def update(state, scores, factor, GUARDED: tl.constexpr):
    """The new state, its acc rescaled but without these keys' values, and their weights [M, N].

    GUARDED: whether a row may see none of the keys so far.
    """
    row_max = tl.maximum(state.row_max, tl.max(scores, 1) * factor)
    shift = row_max
    if GUARDED:
        shift = tl.where(row_max == float("-inf"), 0.0, row_max)
    weights = tl.exp2(scores * factor - shift[:, None])
    rescale = tl.exp2(state.row_max - shift)
    row_sum = state.row_sum * rescale + tl.sum(weights, 1)
    return Softmax(row_max, row_sum, state.acc * rescale[:, None]), weights


@triton.jit
def finish(state, sink):
    """The output rows and their log-sum-exp (natural log); 0 and -inf where nothing is seen.

    sink: a further logit of every row, in natural units, without a value; -inf is none.
    """
    row_max = tl.maximum(state.row_max, sink * LOG2E)
    shift = tl.where(row_max == float("-inf"), 0.0, row_max)
    rescale = tl.exp2(state.row_max - shift)
    row_sum = state.row_sum * rescale + tl.exp2(sink * LOG2E - shift)
    empty = row_sum == 0
    total = tl.where(empty, 1.0, row_sum)
    log_sum_exp = tl.where(empty, float("-inf"), (row_max + tl.log2(total)) * LN2)
    return state.acc * (rescale / total)[:, None], log_sum_exp
