"""Pictures: what is drawn is what `values` says."""

from __future__ import annotations

import numpy as np
import pytest

import limelight as ll
from limelight import picture
from limelight.biases import Bias
from limelight.examples import Array, example, kinds
from limelight.masks import Mask
from limelight.tile import Size

ALL = [*kinds(Mask).values(), *kinds(Bias).values()]


def made(kind, size):
    return example(kind, size).map_tensors(lambda array: array.values())


SIZES = [Size(1, 8, 32, 32), Size(1, 2, 3, 9), Size(1, 2, 9, 3), Size(1, 1, 1, 1)]


@pytest.mark.parametrize("kind", ALL, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_every_kind_has_an_example_that_fits(kind, size):
    described = example(kind, size)
    assert all(isinstance(tensor, Array) for tensor in described.tensors())
    term = made(kind, size)
    for array, tensor in zip(described.tensors(), term.tensors(), strict=True):
        assert (array.shape, array.dtype) == (tensor.shape, tensor.dtype.name)
    described.check(size)
    values = picture.dense(term, size.q_len, size.kv_len, heads=size.q_heads)
    assert values.shape == size[1:]


@pytest.mark.parametrize("kind", ALL, ids=lambda kind: kind.__name__)
def test_every_example_is_worth_a_picture(kind):
    values = picture.dense(made(kind, Size(1, 8, 32, 32)), 32, 32, heads=8)[0]
    assert len(np.unique(values)) >= 2


def test_an_example_takes_values():
    assert example(ll.SlidingWindow, Size(1, 1, 8, 8), {"left": 3}) == ll.SlidingWindow(3)
    assert example(ll.SlidingWindow, Size(1, 1, 8, 8), {"left": 3, "right": 0}) == ll.SlidingWindow(
        3, 0
    )
    with pytest.raises(ValueError, match="sliding_window: found no left"):
        example(ll.SlidingWindow, Size(1, 1, 8, 8), {"right": 0})


def test_mask_without_colour():
    drawn = picture.terminal(np.tri(4, 8, 4, dtype=bool), colour=False).plain
    assert drawn.split("\n") == ["queries ↓  keys →", "      0", "    0 █████▄", "    2 ███████▄"]


def test_bias_without_colour():
    values = np.array([[0.0, 1.0, 2.0, 3.0, 4.0], [-np.inf, 4.0, 4.0, 0.0, 0.0]])
    drawn = picture.terminal(values, colour=False).plain.split("\n")
    assert drawn[2:] == ["    0  ░▒▓█", "    1 ·██"]
    assert picture.legend(values, colour=False).plain == "0 [ ░▒▓█] 4   · hidden"


def test_colour_puts_two_queries_in_a_line():
    mask = np.array([[True, False], [False, False], [True, True]])
    drawn = picture.terminal(mask)
    assert [line for line in drawn.plain.split("\n")[2:]] == ["    0 ▀▀", "    2 ▀▀"]
    lit, dark = "#bef23c", "#26262c"
    styles = [str(span.style) for span in drawn.spans if "#" in str(span.style)]
    assert styles == [f"{lit} on {dark}", f"{dark} on {dark}", lit, lit]


def test_colour_scale_ends():
    drawn = picture.terminal(np.array([[0.0, 1.0]]))
    styles = [str(span.style) for span in drawn.spans if "#" in str(span.style)]
    assert styles == ["#440154", "#fde725"]


def test_equal_values_have_a_colour():
    assert "#21918c" in [str(span.style) for span in picture.terminal(np.zeros((1, 1))).spans]


def test_wide_matrices_are_thinned():
    drawn = picture.terminal(np.ones((300, 300), bool), colour=False, width=80).plain.split("\n")
    assert "(every 5th of each)" in drawn[0]
    assert max(map(len, drawn)) <= 80
    assert drawn[1].split() == ["0", "50", "100", "150", "200", "250"]


@pytest.mark.parametrize("bias", [True, False])
def test_png(tmp_path, bias):
    pytest.importorskip("matplotlib")
    values = np.where(np.tri(8), -np.arange(8.0), -np.inf) if bias else np.tri(8, dtype=bool)
    path = tmp_path / "picture.png"
    picture.save_png([("head 0", values), ("head 1", values)], path, title="a title")
    assert path.read_bytes().startswith(b"\x89PNG")
