"""The comparers can fail: a suite whose comparer drops its result proves nothing."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from inputs import qkv

from limelight import attention
from limelight.testing import assert_close, check, error, poisoned


def test_error_is_relative():
    assert error(np.array([1.1]), np.array([1.0])) == pytest.approx(0.1)
    assert error(np.zeros(3), np.zeros(3)) == 0.0
    assert error(np.array([]), np.array([])) == 0.0


@pytest.mark.parametrize(
    ("actual", "expected"),
    [
        ([1.0, 2.0], [1.0, 2.1]),
        ([1.0, np.nan], [1.0, 2.0]),
        ([1.0, np.inf], [1.0, 2.0]),
        ([1.0, 2.0], [1.0, -np.inf]),
        ([1.0, np.inf], [1.0, -np.inf]),
        ([1.0, 2.0], [1.0, np.nan]),
        ([1e-30, 0.0], [0.0, 0.0]),
        ([1.0], [1.0, 2.0]),
    ],
)
def test_what_is_not_close(actual, expected):
    with pytest.raises(AssertionError):
        assert_close("x", np.array(actual), np.array(expected), 1e-5)


def test_what_is_close():
    assert_close(
        "x", np.array([1.0, -np.inf, np.nan]), np.array([1.0 + 1e-9, -np.inf, np.nan]), 1e-5
    )
    assert_close("x", np.zeros((0, 3)), np.zeros((0, 3)), 1e-5)


def test_a_few_wrong_rows_in_many_are_found():
    """The norm of the whole would let them pass."""
    expected = np.random.default_rng(0).normal(size=(100_000, 8))
    actual = expected * (1 + 1e-7)
    actual[777] += 0.005
    assert error(actual, expected) < 1e-4
    with pytest.raises(AssertionError, match=r"worst row \(777,\)"):
        assert_close("x", actual, expected, 1e-4)


def test_the_message_shows_the_worst_element():
    actual, expected = np.zeros((2, 3)), np.ones((2, 3))
    actual[1, 2] = 5
    with pytest.raises(AssertionError, match=r"worst element \(1, 2\): 5, expected 1"):
        assert_close("x", actual, expected, 1e-5)


def test_check_finds_a_wrong_number(monkeypatch):
    q, k, v = qkv()

    def wrong(*args, **options):
        out, lse = attention(*args, **options)
        return out + 1e-3 * (torch.arange(9) == 4)[:, None], lse

    monkeypatch.setattr("limelight.testing.attention", wrong)
    with pytest.raises(AssertionError, match=r"out: error .*worst row \(\d, \d, 4\)"):
        check(q, k, v)


def test_check_finds_a_wrong_gradient(monkeypatch):
    q, k, v = qkv()

    def wrong(query, key, value, **options):
        # The same value, another gradient.
        return attention(query, key + 1e-3 * (key - key.detach()), value, **options)

    monkeypatch.setattr("limelight.testing.attention", wrong)
    with pytest.raises(AssertionError, match="d_key: error"):
        check(q, k, v)


def test_poisoned_memory_is_not_a_number():
    with poisoned():
        for made in (
            torch.empty(3),
            torch.empty_like(torch.ones(2, 2)),
            torch.ones(2).new_empty((4,), dtype=torch.bfloat16),
        ):
            assert made.isnan().all()
        assert not torch.empty(3, dtype=torch.int64).is_floating_point()
    torch.empty(3)
