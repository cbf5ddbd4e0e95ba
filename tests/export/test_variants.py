"""Exported variants are the plan: for any sizes, strides and numbers, the same launches."""

from __future__ import annotations

import pytest
from concrete import Attention
from hypothesis import given, settings
from hypothesis import strategies as st

from limelight.export.expression import evaluate
from limelight.export.tracer import plan_variant
from limelight.export.variant import Problem
from limelight.kernels.program import recipe

PROBLEMS = [
    Problem.of("float16", 64, mask="none", bias="none", gradients="none"),
    Problem.of("float16", 64, mask="causal", bias="alibi", gradients="inputs"),
    Problem.of("float16", 64, mask="causal & key_lengths", bias="alibi", gradients="all"),
    Problem.of("float16", 128, mask="causal", bias="t5_bias", gradients="none", softcap=True),
    Problem.of("bfloat16", 72, mask="sliding_window(64, 0)", bias="alibi", gradients="inputs"),
    Problem.of("float16", 64, mask="causal", bias="t5_bias + relative_bias", gradients="all"),
    Problem.of("float16", 32, mask="none", bias="dense_bias", gradients="all"),
    Problem.of("float32", 128, mask="key_lengths | causal", bias="none", gradients="inputs"),
]
TARGETS = [(6, 1), (7, 5), (8, 0), (9, 0)]
SIZES = st.fixed_dictionaries(
    {
        "batch": st.sampled_from([0, 1, 2, 3, 16]),
        "kv_heads": st.sampled_from([1, 2, 5]),
        "q_len": st.sampled_from([0, 1, 15, 16, 64, 129, 1000]),
        "kv_len": st.sampled_from([0, 1, 16, 63, 64, 777, 1024]),
    }
)
OTHERS = st.fixed_dictionaries(
    {
        "query_start": st.integers(-5000, 5000),
        "scale": st.floats(1e-6, 100),
        "softcap": st.floats(0.5, 100),
        "spread": st.integers(1, 3),
    }
)


@pytest.mark.parametrize("target", TARGETS, ids=str)
@pytest.mark.parametrize("problem", PROBLEMS, ids=str)
def test_a_variant_has_the_launches_of_the_plan(problem, target):
    if problem.dtype == "bfloat16" and target < (8, 0):
        pytest.skip("bfloat16 needs sm_80")
    variant = plan_variant(problem, target)
    least = least_size(variant)

    @settings(max_examples=15, deadline=None)
    @given(SIZES, st.sampled_from([1, 2, 3]), OTHERS)
    def agree(sizes, group, others):
        sizes = {name: max(size, least) for name, size in sizes.items()}
        attention = Attention(problem, {**sizes, "q_heads": sizes["kv_heads"] * group}, **others)
        planned = attention.launches(variant)
        values = attention.values()
        for left, operator, right in variant.conditions:
            assert eval(
                f"a {operator} b", {"a": evaluate(left, values), "b": evaluate(right, values)}
            )
        exported = [each for each in variant.launches if evaluate(each.grid, values)]
        assert len(exported) == len(planned)
        for ours, theirs in zip(exported, planned, strict=True):
            assert ours.recipe.name == theirs.kernel.__name__
            assert evaluate(ours.grid, values) == theirs.grid
            found = [evaluate(argument, values) for argument in ours.arguments]
            assert found == [value for _, value in theirs.values()]
            same_kernel(ours.recipe, recipe(theirs, target))

    agree()


def least_size(variant):
    """2 where a plan compiles a size or stride of 1 in, which an export passes as a number."""
    own = [tensor for tensor in variant.tensors if "." in tensor.name]
    return 2 if any(len(tensor.shape) > 1 for tensor in own) else 0


def same_kernel(ours, theirs):
    """But for hints, of which an export may give fewer."""
    assert ours.num_warps == theirs.num_warps
    assert ours.num_stages == theirs.num_stages
    mine, other = ours.read_signature(), theirs.read_signature()
    assert mine.types == other.types
    assert mine.constants == other.constants
    for a, b in zip(mine.parameters, other.parameters, strict=True):
        assert b.multiple_of % a.multiple_of == 0, a
