"""The paged cache against plain loops over contiguous keys."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec.config import CacheConfig
from jspec.models import kv_cache as kv
from jspec.models.config import ModelConfig
from tests.support.paged import make_view, poisoned_cache, shuffled_tables

SCALE = 0.3

write = jax.jit(kv.write)
attend = jax.jit(functools.partial(kv.attend, scale=SCALE), static_argnames="impl")
EVERY_IMPL = pytest.mark.parametrize(
    "impl", ["xla", "interpret", pytest.param("pallas", marks=pytest.mark.gpu)]
)


def loop_attend(q, keys, values, positions, causal, window=None):
    """Attention of one request's rows, in float64: q [r, N, d], keys and values [C, n, d]."""
    group = q.shape[1] // keys.shape[1]
    out = np.zeros(q.shape)
    for row in range(q.shape[0]):
        seen = [
            key
            for key in range(positions[row] + 1 if causal else len(keys))
            if window is None or abs(positions[row] - key) < window
        ]
        for head in range(q.shape[1]):
            scores = keys[seen, head // group] @ q[row, head] * SCALE
            weights = np.exp(scores - scores.max())
            out[row, head] = weights / weights.sum() @ values[seen, head // group]
    return out


def draw_case(
    rng, *, heads, starts, counts, page_size, causal, window=None, num_rows=None, dtype="float32"
):
    """A cache that holds every request's keys in shuffled pages, queries, and the outputs."""
    N, n = heads
    config = ModelConfig.tiny(num_heads=N, num_kv_heads=n)
    d, layer = config.head_dim, 1
    lens = [start + count for start, count in zip(starts, counts, strict=True)]
    M = max(1, -(-max(lens) // page_size)) + 1
    tables = shuffled_tables(rng, len(counts), M, 3 + M * len(counts))
    cache = poisoned_cache(config, num_pages=3 + M * len(counts), page_size=page_size, dtype=dtype)
    view = make_view(tables, starts, counts, page_size=page_size, num_rows=num_rows, causal=causal)
    view = dataclasses.replace(view, window=window)
    q = rng.standard_normal((len(view.positions), N, d)).astype(dtype)
    keys, values = rng.standard_normal((2, sum(lens), n, d)).astype(dtype)
    whole = make_view(tables, [0] * len(lens), lens, page_size=page_size)
    cache = write(cache, layer, keys, values, whole.slots)
    wanted = np.zeros(q.shape)
    for b in range(len(lens)):
        rows = slice(*view.query_start[b : b + 2])
        own = slice(*whole.query_start[b : b + 2])
        wanted[rows] = loop_attend(
            *(x.astype(float) for x in (q[rows], keys[own], values[own])),
            view.positions[rows],
            causal,
            window,
        )
    return cache, layer, view, q, wanted


@EVERY_IMPL
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(
    "heads,starts,counts,page_size",
    [
        ((4, 2), [0], [1], 4),
        ((4, 2), [3], [2], 4),
        ((4, 4), [5], [7], 1),
        ((6, 1), [0, 40, 3, 0], [9, 1, 0, 2], 3),  # a request without rows
        ((4, 2), [300, 0, 120], [4, 60, 8], 16),  # several blocks of keys
        ((4, 2), [250, 10], [3, 3], 200),  # a page above the block size
    ],
)
def test_attention_over_shuffled_pages_equals_a_plain_loop(
    heads, starts, counts, page_size, causal, impl, rng
):
    cache, layer, view, q, wanted = draw_case(
        rng, heads=heads, starts=starts, counts=counts, page_size=page_size, causal=causal
    )
    got = attend(q, cache, layer, view, impl=impl)
    np.testing.assert_allclose(got, wanted, atol=1e-5, rtol=1e-5)  # float32


@EVERY_IMPL
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("window", [1, 5, 300])
def test_a_window_hides_keys_that_many_positions_away(causal, window, impl, rng):
    """Both ways, if rows see what comes after them."""
    cache, layer, view, q, wanted = draw_case(
        rng,
        heads=(4, 2),
        starts=[300, 0, 190],
        counts=[9, 20, 12],
        page_size=16,
        causal=causal,
        window=window,
    )
    np.testing.assert_allclose(
        attend(q, cache, layer, view, impl=impl), wanted, atol=1e-5, rtol=1e-5
    )


@EVERY_IMPL
def test_pages_before_every_window_may_hold_anything(impl, rng):
    cache, layer, view, q, wanted = draw_case(
        rng, heads=(4, 2), starts=[300, 190], counts=[9, 12], page_size=16, causal=True, window=5
    )
    gone = [*view.block_table[0, : 296 // 16], *view.block_table[1, : 186 // 16]]
    k, v = (x.at[:, np.array(gone)].set(jnp.nan) for x in (cache.k, cache.v))
    cache = dataclasses.replace(cache, k=k, v=v)
    got = attend(q, cache, layer, view, impl=impl)
    np.testing.assert_allclose(got, wanted, atol=1e-5, rtol=1e-5)


@EVERY_IMPL
def test_padding_rows_come_out_as_zeros_whatever_they_hold(impl, rng):
    cache, layer, view, q, wanted = draw_case(
        rng, heads=(4, 2), starts=[2, 6], counts=[3, 2], page_size=4, causal=True, num_rows=9
    )
    q[5:] = np.nan
    got = attend(q, cache, layer, view, impl=impl)
    np.testing.assert_allclose(got, wanted, atol=1e-5, rtol=1e-5)
    assert not np.any(got[5:])


@EVERY_IMPL
def test_a_pass_of_padding_only_is_all_zeros(impl, rng):
    cache, layer, view, q, _ = draw_case(
        rng, heads=(4, 2), starts=[0], counts=[4], page_size=4, causal=True
    )
    view = dataclasses.replace(
        view, query_start=np.zeros(2, np.int32), seq_lens=np.zeros(1, np.int32)
    )
    assert not np.any(attend(q, cache, layer, view, impl=impl))


@EVERY_IMPL
def test_bfloat16_attention_accumulates_in_float32(impl, rng):
    cache, layer, view, q, wanted = draw_case(
        rng, heads=(4, 2), starts=[200], counts=[5], page_size=16, causal=True, dtype=jnp.bfloat16
    )
    got = attend(q, cache, layer, view, impl=impl)
    assert got.dtype == jnp.bfloat16
    # Weights and outputs are rounded to 8 bits; sums over 200 keys are not.
    np.testing.assert_allclose(got.astype(np.float32), wanted, atol=8e-3, rtol=2e-2)


@pytest.mark.parametrize("num_rows", [1, 5])
def test_a_write_touches_its_slots_only(num_rows, rng):
    config = ModelConfig.tiny(num_layers=3)
    cache = kv.init_cache(
        CacheConfig(num_pages=3, page_size=4, max_model_len=12, dtype="float32"),
        num_layers=3,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
    )
    slots = np.array([7, -1, 12, 2, 1_000_003], np.int32)[:num_rows]
    k, v = rng.standard_normal((2, num_rows, 2, 8)).astype(np.float32)
    got = write(cache, 1, k, v, slots)
    for pages, rows in ((got.k, k), (got.v, v)):
        wanted = np.zeros((3, 12, 2, 8), np.float32)
        for slot, row in zip(slots, rows, strict=True):
            if 0 <= slot < 12:
                wanted[1, slot] = row
        np.testing.assert_array_equal(pages.reshape(wanted.shape), wanted)


@pytest.mark.parametrize("num_rows", [1, 6])
def test_a_donated_cache_is_updated_in_place(num_rows):
    cache = kv.init_cache(
        CacheConfig(num_pages=512, max_model_len=64, dtype="float32"),
        num_layers=2,
        num_kv_heads=2,
        head_dim=8,
    )
    view = make_view(np.array([[3, 1, 0, 2]], np.int32), [9], [num_rows], page_size=16)

    def two_layers(x, cache):
        for layer in range(2):
            cache = kv.write(cache, layer, x[:, :2], x[:, 2:], view.slots)
            x = x + kv.attend(x, cache, layer, view, scale=SCALE)
        return x, cache

    x = jnp.ones((num_rows, 4, 8))
    compiled = jax.jit(two_layers, donate_argnums=1).lower(x, cache).compile()
    size = 2 * cache.k.nbytes
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes == size
    assert memory.temp_size_in_bytes < size / 8  # no copy of keys or values


@pytest.mark.parametrize("B,T", [(1, 6), (4, 11), (5, 3), (3, 9)])
def test_tiles_hold_each_row_once_and_never_two_requests(B, T, rng):
    cut = jax.jit(kv._tile, static_argnums=1)
    for _ in range(50):
        query_start = np.sort(rng.integers(0, T + 1, B + 1)).astype(np.int32)
        query_start[0] = 0
        tiles = jax.tree.map(np.asarray, cut(query_start, T))
        owner = np.repeat(np.arange(B), np.diff(query_start))
        for request, rows in zip(tiles.request, tiles.rows, strict=True):
            assert np.all(owner[rows[rows < T]] == request)
        live = np.arange(len(owner))
        np.testing.assert_array_equal(np.sort(tiles.rows[tiles.rows < T]), live)
        np.testing.assert_array_equal(tiles.rows.ravel()[tiles.place[: len(owner)]], live)
        assert np.all(tiles.place[len(owner) :] == tiles.rows.size)
        assert tiles.rows.size < 2 * T + B  # the work of padding to the longest would be B * T


def test_a_cache_without_layers_is_refused():
    pages = CacheConfig(num_pages=2, max_model_len=8)
    with pytest.raises(ValueError, match="num_layers=1 or more"):
        kv.init_cache(pages, num_layers=0, num_kv_heads=1, head_dim=8)
