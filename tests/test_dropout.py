"""Dropout: Philox by its published vectors; the same weights dropped everywhere."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from inputs import normal, qkv

from limelight import ALiBi, Causal, KeyLengths, attention, attention_vjp, backends, explain
from limelight.backends import BACKENDS
from limelight.dropout import dropped as dropped_at
from limelight.dropout import philox, threshold
from limelight.testing import assert_close, check
from limelight.tile import Positions, Size

pytestmark = pytest.mark.usefixtures("nan_memory")

# Random123's kat_vectors, philox4x32 with 10 rounds: counter, key, expected words.
KNOWN_ANSWERS = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    (
        (0xFFFFFFFF,) * 4,
        (0xFFFFFFFF,) * 2,
        (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD),
    ),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


def signed(key):
    """Two 32-bit words, the lower first, as the 64-bit seed that holds them."""
    value = key[0] | key[1] << 32
    return value - 2**64 if value >= 2**63 else value


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN_ANSWERS)
@pytest.mark.parametrize("library", ["numpy", "torch"])
@pytest.mark.parametrize("as_array", [False, True])
def test_philox_known_answers(counter, key, expected, library, as_array):
    seed = signed(key)
    if library == "numpy":
        words = tuple(np.array([word], np.int64) for word in counter)
        seed = np.array([seed], np.int64) if as_array else seed
    else:
        words = tuple(torch.tensor([word]) for word in counter)
        seed = torch.tensor([seed]) if as_array else seed
    assert tuple(int(word[0]) for word in philox(words, seed)) == expected


def dropped(device, p=0.5, seed=3, heads=2, q_len=3, kv_len=11, **options):
    """Which weights are dropped, [batch, heads, q_len, kv_len]: one-hot values, equal scores."""
    q = torch.zeros(2, heads, q_len, 4, device=device)
    k = torch.zeros(2, heads, kv_len, 4, device=device)
    v = torch.eye(kv_len, device=device).expand(2, heads, kv_len, kv_len)
    return attention(q, k, v, dropout_p=p, seed=seed, **options) == 0


@pytest.mark.parametrize("seed", [0, 3, -1, 2**40 + 7, 2**63 - 1, -(2**63)])
def test_a_weight_has_the_counter_of_its_place(backend, device, seed):
    """Word j % 4 of philox(counter=(j // 4, i, head, batch), key=seed), against p's threshold."""
    backend.runs(*qkv(device=device), dropout_p=0.5)
    found = dropped(device, p=0.25, seed=seed).cpu()
    for b, h, i, j in itertools.product(range(2), range(2), range(3), range(11)):
        counter = tuple(np.array([word], np.int64) for word in (j // 4, i, h, b))
        word = int(philox(counter, seed)[j % 4][0])
        assert bool(found[b, h, i, j]) == (word < 0.25 * 2**32), (b, h, i, j)


def test_every_backend_and_device_drops_the_same(device):
    patterns = {}
    for backend in BACKENDS:
        with backends(backend.name):
            if explain(*qkv(device=device), dropout_p=0.5).backend:
                patterns[backend.name] = dropped(device, seed=99, q_len=300, kv_len=256).cpu()
    assert "math" in patterns
    right = patterns.pop("math")
    for name, pattern in patterns.items():
        assert torch.equal(pattern, right), name


def test_numpy_drops_the_same_as_torch():
    q, k, v = qkv(grad=False)
    ours = attention(q.numpy(), k.numpy(), v.numpy(), dropout_p=0.5, seed=8)
    assert_close("out", ours, attention(q, k, v, dropout_p=0.5, seed=8), 1e-5)


def test_a_seed_in_a_tensor_is_the_same_seed(backend, device):
    backend.runs(*qkv(device=device), dropout_p=0.5)
    for seed in (5, -6, 2**40):
        tensor = torch.tensor([seed], device=device)
        assert torch.equal(dropped(device, seed=seed), dropped(device, seed=tensor))


def test_the_place_not_the_tile_decides():
    """Tiles of any cut agree with the whole matrix, also where they start between groups of four."""
    positions = Positions.of(
        np, size=Size(2, 3, 9, 23), dtype=np.float64, device="cpu", query_start=4
    )
    whole = ~dropped_at(positions.whole(), 17, 0.4, np)
    for b, h, m, n in [(1, 1, 2, 3), (2, 3, 9, 5), (1, 2, 4, 6), (2, 1, 1, 1)]:
        joined = np.zeros_like(whole)
        cuts = (range(0, size, cut) for size, cut in zip((2, 3, 9, 23), (b, h, m, n), strict=True))
        for starts in itertools.product(*cuts):
            window = tuple(
                slice(start, min(start + cut, size))
                for start, cut, size in zip(starts, (b, h, m, n), (2, 3, 9, 23), strict=True)
            )
            joined[window] = ~dropped_at(positions.tile(*window), 17, 0.4, np)
        assert (joined == whole).all(), (b, h, m, n)


def test_the_position_of_queries_does_not_matter(backend, device):
    """The counter holds the index of a query in its tensor, whatever query_start says."""
    backend.runs(*qkv(device=device), dropout_p=0.5)
    assert torch.equal(dropped(device, query_start=0), dropped(device, query_start=5))


def test_p_zero_is_no_dropout(backend, device):
    q, k, v = qkv(device=device)
    backend.runs(q, k, v, dropout_p=0.0)
    assert torch.equal(attention(q, k, v, dropout_p=0.0, seed=1), attention(q, k, v))


def test_p_one_drops_everything(backend, device):
    q, k, v = qkv(device=device)
    options = {"dropout_p": 1.0, "seed": 1, "bias": ALiBi(normal(4, device=device))}
    backend.runs(q, k, v, **options)
    out, lse = attention(q, k, v, return_lse=True, **options)
    assert (out == 0).all()
    assert lse.isfinite().all()
    check(q, k, v, **options)


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_share_of_dropped_weights(backend, device, p):
    backend.runs(*qkv(device=device), dropout_p=p)
    share = dropped(device, p=p, q_len=300, kv_len=256).float().mean().item()
    assert share == pytest.approx(p, abs=4 * (p * (1 - p) / (2 * 2 * 300 * 256)) ** 0.5)


def test_rows_columns_heads_and_batches_are_dropped_apart(backend, device):
    backend.runs(*qkv(device=device), dropout_p=0.5)
    pattern = dropped(device, q_len=64, kv_len=64).float()
    for axis in range(4):
        first, second = pattern.select(axis, 0), pattern.select(axis, 1)
        assert 0.3 < (first != second).float().mean().item() < 0.7, axis
    other = dropped(device, seed=4, q_len=64, kv_len=64).float()
    assert 0.45 < (pattern != other).float().mean().item() < 0.55


def test_kept_weights_are_scaled_so_that_the_mean_stays(backend, device):
    q, k, v = qkv(device=device, batch=1, heads=1, q_len=2, kv_len=1000, value_dim=1, grad=False)
    v = torch.ones_like(v)
    backend.runs(q, k, v, dropout_p=0.25)
    outs = torch.stack([attention(0 * q, k, v, dropout_p=0.25, seed=s) for s in range(30)])
    assert outs.mean().item() == pytest.approx(1.0, abs=4 * (0.25 / 0.75 / 1000 / 60) ** 0.5)


def test_lse_knows_nothing_of_dropout(backend, device):
    q, k, v = qkv(device=device)
    backend.runs(q, k, v, dropout_p=0.5)
    with_dropout = attention(q, k, v, dropout_p=0.5, seed=1, return_lse=True)[1]
    torch.testing.assert_close(with_dropout, attention(q, k, v, return_lse=True)[1])


@pytest.mark.parametrize("p", [0.001, 0.3, 0.999])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_gradients_with_dropout(backend, device, p, dtype):
    q, k, v = qkv(device=device, kv_heads=2, q_len=30, kv_len=45, dtype=dtype)
    options = {
        "dropout_p": p,
        "seed": 12,
        "mask": Causal() & KeyLengths(torch.tensor([45, 20], device=device)),
        "query_start": "end",
        "sinks": normal(4, device=device),
    }
    backend.runs(q, k, v, **options)
    check(q, k, v, **options)


def test_dropout_over_several_tiles(backend, device):
    q, k, v = qkv(device=device, batch=1, heads=2, q_len=301, kv_len=1030)
    backend.runs(q, k, v, dropout_p=0.5, seed=2)
    check(q, k, v, dropout_p=0.5, seed=2)


def test_the_library_generator_draws_the_seed(backend, device):
    q, k, v = qkv(device=device, grad=False)
    backend.runs(q, k, v, dropout_p=0.5)
    torch.manual_seed(1)
    first, second = attention(q, k, v, dropout_p=0.5), attention(q, k, v, dropout_p=0.5)
    torch.manual_seed(1)
    assert torch.equal(attention(q, k, v, dropout_p=0.5), first)
    assert not torch.equal(first, second)


def test_no_seed_is_drawn_without_dropout(device):
    """Otherwise adding attention to a program would change its other random numbers."""
    q, k, v = qkv(device=device)
    before = torch.get_rng_state()
    attention(q, k, v)
    explain(q, k, v, dropout_p=0.5)
    assert torch.equal(torch.get_rng_state(), before)


def test_numpy_generator_draws_the_seed():
    q, k, v = (t.numpy() for t in qkv(grad=False))
    np.random.seed(1)
    first = attention(q, k, v, dropout_p=0.5)
    np.random.seed(1)
    np.testing.assert_array_equal(attention(q, k, v, dropout_p=0.5), first)


def test_pullback_of_a_drawn_seed_drops_what_the_forward_dropped():
    q, k, v = (t.double().numpy() for t in qkv(grad=False, batch=1, heads=1))
    v = np.ones_like(v)
    out, pullback = attention_vjp(q, k, v, dropout_p=0.5)
    d_out = np.zeros_like(out)
    d_out[..., 0] = 1
    # The sum of d_value is that of the kept weights, which out holds in each column.
    assert pullback(d_out).value.sum() == pytest.approx(out[..., 0].sum())


def test_threshold():
    assert [threshold(p) for p in (0.0, 0.5, 1.0)] == [0, 2**31, 2**32]
