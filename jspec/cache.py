"""The paged KV cache: pages of keys and values, written by slot and read through block tables."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jspec.config import CacheConfig
from jspec.state import PagedView, pytree, static


@pytree
class KVCache:
    """Keys and values of all layers. Callers donate it: a pass updates it in place.

    Attributes:
      k: keys, `[layers, pages, slots, kv heads, head size]`.
      v: values, likewise.
      max_model_len: most tokens a request may have.
    """

    k: Float[Array, "L P S n d"]
    v: Float[Array, "L P S n d"]
    max_model_len: int = static()

    @property
    def page_size(self) -> int:
        """Slots per page (S)."""
        return self.k.shape[2]


def init_cache(cache: CacheConfig, *, num_layers: int, num_kv_heads: int, head_dim: int) -> KVCache:
    """Allocates an empty cache."""
    shape = (num_layers, cache.num_pages, cache.page_size, num_kv_heads, head_dim)
    return KVCache(
        k=jnp.zeros(shape, cache.dtype),
        v=jnp.zeros(shape, cache.dtype),
        max_model_len=cache.max_model_len,
    )


def write(
    cache: KVCache,
    layer: int,
    k: Float[Array, "T n d"],
    v: Float[Array, "T n d"],
    slots: Int[Array, "T"],
) -> KVCache:
    """Writes one row of keys and values to each slot of a layer."""
    L, P, S, n, d = cache.k.shape

    def put(pages: Array, rows: Array) -> Array:
        flat = pages.reshape(L, P * S, n, d)
        flat = flat.at[layer, slots].set(
            rows.astype(pages.dtype), mode="drop", wrap_negative_indices=False
        )
        return flat.reshape(pages.shape)

    return KVCache(k=put(cache.k, k), v=put(cache.v, v), max_model_len=cache.max_model_len)


class _Tiles(NamedTuple):
    """Rows of a ragged pass, cut so that the rows of a tile belong to one request."""

    request: Int[Array, "G"]
    rows: Int[Array, "G Q"]  # T where a tile is not full
    place: Int[Array, "T"]  # of each row among the G * Q; G * Q for padding


def _tile(query_start: Int[Array, "B1"], T: int) -> _Tiles:
    B = query_start.shape[0] - 1
    Q = max(1, -(-T // B))
    # A request of r rows needs ceil(r / Q) <= 1 + (r - 1) / Q tiles: this many suffice for all.
    G = B + max(0, (T - B) // Q)
    num_tiles = -(-jnp.diff(query_start) // Q)  # [B]
    tile_end = jnp.cumsum(num_tiles, dtype=jnp.int32)  # [B]
    tile = jnp.arange(G, dtype=jnp.int32)
    request = jnp.searchsorted(tile_end, tile, side="right").astype(jnp.int32)  # [G]; B = unused
    request = jnp.minimum(request, B - 1)
    first = query_start[request] + (tile - (tile_end - num_tiles)[request]) * Q
    rows = first[:, None] + jnp.arange(Q, dtype=jnp.int32)  # [G, Q]
    rows = jnp.where(rows < query_start[request + 1][:, None], rows, T)
    place = jnp.full(T, G * Q, jnp.int32)
    place = place.at[rows].set(
        jnp.arange(G * Q, dtype=jnp.int32).reshape(G, Q), mode="drop", wrap_negative_indices=False
    )
    return _Tiles(request, rows, place)


def attend(
    q: Float[Array, "T N d"], cache: KVCache, layer: int, view: PagedView, *, scale: float
) -> Float[Array, "T N d"]:
    """Attends from each row to the cached keys of its request."""
    T, N, d = q.shape
    n = cache.k.shape[3]
    tiles = _tile(view.query_start, T)
    fill = dict(mode="fill", wrap_negative_indices=False)
    q = q.at[tiles.rows].get(fill_value=0, **fill)  # [T, N, d] -> [G, Q, N, d]
    positions = view.positions.at[tiles.rows].get(fill_value=-1, **fill)
    G, Q = tiles.rows.shape
    table = view.block_table[tiles.request]
    k = cache.k.at[layer, table].get(fill_value=0, **fill).reshape(G, -1, n, d)
    v = cache.v.at[layer, table].get(fill_value=0, **fill).reshape(G, -1, n, d)
    place = jnp.arange(k.shape[1], dtype=jnp.int32)
    live = place < view.seq_lens[tiles.request][:, None]  # [G, C]
    mask = live[:, None, :] & (tiles.rows < T)[:, :, None]
    if view.causal:
        mask &= place <= positions[:, :, None]  # [G, Q, C]
    v = jnp.where(live[:, :, None, None], v, 0)
    q = q.reshape(G, Q, n, N // n, d)
    s = jnp.einsum("gqnhd,gcnd->gnhqc", q, k, preferred_element_type=jnp.float32) * scale
    s = jnp.where(mask[:, None, None], s, -jnp.inf)
    top = jnp.max(s, axis=-1, keepdims=True)
    p = jnp.exp(s - jnp.where(top == -jnp.inf, 0, top))
    total = jnp.sum(p, axis=-1)  # [G, n, h, Q]
    out = jnp.einsum("gnhqc,gcnd->gqnhd", p.astype(v.dtype), v, preferred_element_type=jnp.float32)
    total = jnp.maximum(total, jnp.finfo(jnp.float32).tiny).transpose(0, 3, 1, 2)
    out = (out / total[..., None]).astype(q.dtype)
    return out.reshape(G * Q, N, d).at[tiles.place].get(fill_value=0, **fill)
