"""The paged KV cache: keys and values in pages, written by slot and read through block tables."""

import dataclasses
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jspec._checks import check_at_least
from jspec.axes import PAD_SLOT, AnyArray, Impl
from jspec.config import CacheConfig
from jspec.pallas.paged_attention import add_keys, paged_attention
from jspec.state import PagedView, pytree, static


@pytree
class KVCache:
    """Keys and values of all layers; a step donates it and gets it back, updated in place.

    Slot s of a layer lies in page `s // S` at place `s % S`.

    Attributes:
      k: keys.
      v: values.
      max_model_len: most tokens a request may have.
      node_k: keys of tree nodes, in passes with trees: a node gets no page slot before it is kept.
      node_v: values of tree nodes.
    """

    k: Float[Array, "L P S n d"]
    v: Float[Array, "L P S n d"]
    max_model_len: int = static()
    node_k: Float[Array, "L B X n d"] | None = None
    node_v: Float[Array, "L B X n d"] | None = None

    @property
    def page_size(self) -> int:
        """Slots per page (S)."""
        return self.k.shape[2]


def init_cache(cache: CacheConfig, *, num_layers: int, num_kv_heads: int, head_dim: int) -> KVCache:
    """Allocates an empty cache.

    Args:
      cache: pages, slots per page and element type.
      num_layers: layers that cache keys and values (L).
      num_kv_heads: key/value heads (n).
      head_dim: size of one head (d).

    Raises:
      ValueError: a size is below 1.

    Example:
      >>> pages = CacheConfig(num_pages=4, page_size=2, max_model_len=8)
      >>> init_cache(pages, num_layers=3, num_kv_heads=1, head_dim=8).k.shape
      (3, 4, 2, 1, 8)
    """
    check_at_least(
        "init_cache", 1, num_layers=num_layers, num_kv_heads=num_kv_heads, head_dim=head_dim
    )
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
    slots: Int[AnyArray, "T"],
    node_slots: Int[AnyArray, "T"] | None = None,
) -> KVCache:
    """Writes a key and a value of one layer to each slot.

    Args:
      cache: donated by the enclosing jit for an update in place.
      layer: 0..L-1.
      k: keys, rotated.
      v: values.
      slots: no two equal; PAD_SLOT and slots beyond the cache write nothing.
      node_slots: as `slots`, in the tree nodes' part; see `with_nodes`.

    Returns:
      The cache with the new rows.
    """
    if node_slots is not None:
        assert cache.node_k is not None and cache.node_v is not None  # see `with_nodes`
        cache = dataclasses.replace(
            cache,
            node_k=_put(cache.node_k, layer, k, node_slots),
            node_v=_put(cache.node_v, layer, v, node_slots),
        )
    if len(slots) == 1:
        # XLA on a CPU rewrites a one-row scatter into a slice update that it fuses with the
        # readers, and then copies the whole cache. A second row that is dropped prevents it.
        slots = jnp.concatenate([jnp.asarray(slots), jnp.full(1, PAD_SLOT, slots.dtype)])
        k, v = jnp.concatenate([k, k]), jnp.concatenate([v, v])
    return dataclasses.replace(
        cache, k=_put(cache.k, layer, k, slots), v=_put(cache.v, layer, v, slots)
    )


def with_nodes(cache: KVCache, num_requests: int, num_nodes: int) -> KVCache:
    """Adds room for the tree nodes of a pass.

    Args:
      cache: without nodes.
      num_requests: requests of the pass (B).
      num_nodes: nodes of each (X).
    """
    L, _, _, n, d = cache.k.shape
    empty = jnp.zeros((L, num_requests, num_nodes, n, d), cache.k.dtype)
    return dataclasses.replace(cache, node_k=empty, node_v=empty)


def keep_nodes(cache: KVCache, path: Int[Array, "B J"], slots: Int[Array, "B J"]) -> KVCache:
    """Moves keys and values of accepted tree nodes to the pages, and drops the other nodes.

    Args:
      cache: with nodes.
      path: nodes of each request that were kept; PAD where there is none.
      slots: page slot of each; PAD writes nothing.

    Returns:
      The cache without nodes.
    """
    assert cache.node_k is not None and cache.node_v is not None
    request = jnp.arange(path.shape[0], dtype=jnp.int32)[:, None]
    slots = jnp.where(path >= 0, slots, PAD_SLOT).reshape(-1)
    if len(slots) == 1:  # as in `write`
        slots = jnp.concatenate([slots, jnp.full(1, PAD_SLOT, slots.dtype)])

    def move(nodes: Array, pages: Array) -> Array:
        L, P, S, n, d = pages.shape
        rows = nodes.at[:, request, path].get(mode="clip", wrap_negative_indices=False)
        rows = rows.reshape(L, -1, n, d)  # [L, B, J, n, d] -> [L, B * J, n, d]
        rows = jnp.pad(rows, ((0, 0), (0, len(slots) - rows.shape[1]), (0, 0), (0, 0)))
        flat = pages.reshape(L, P * S, n, d)
        flat = flat.at[:, slots].set(rows, mode="drop", wrap_negative_indices=False)
        return flat.reshape(pages.shape)

    return KVCache(
        k=move(cache.node_k, cache.k),
        v=move(cache.node_v, cache.v),
        max_model_len=cache.max_model_len,
    )


def attend(
    q: Float[Array, "T N d"],
    cache: KVCache,
    layer: int,
    view: PagedView,
    *,
    scale: float,
    impl: Impl = "auto",
) -> Float[Array, "T N d"]:
    """Attends from each row to the cached keys of its request.

    Query head h reads key/value head `h // (N / n)`. A row sees the first `seq_lens` keys of its
    request, and of these only the ones up to its own position if `view.causal`, and only the ones
    less than `view.window` positions away where there is one; with trees, the nodes that
    `view.visible` says, too. The work follows the lengths of the requests, not `max_model_len`, and
    starts at the first key that a window reaches.

    Args:
      q: queries, rotated.
      cache: holds the rows of this pass already (see `write`).
      layer: 0..L-1.
      view: requests may have unequal numbers of rows, or none.
      scale: factor of the scores, commonly `d ** -0.5`.
      impl: implementation of the part over pages; see `jspec.pallas.paged_attention`.

    Returns:
      Attention outputs in the dtype of `q`; zeros for padding rows. Products accumulate, and the
      softmax is computed, in float32. Slots at or past `seq_lens` may hold anything, NaN too.

    Source: the running softmax of arXiv 1805.02867, over blocks of pages.
    """
    T, N, d = q.shape
    S, n = cache.k.shape[2:4]
    M = view.block_table.shape[1]

    tiles = _tile(jnp.asarray(view.query_start), T)
    G, Q = tiles.rows.shape
    E = Q * (N // n)
    num_keys = jnp.minimum(_rows(view.seq_lens, tiles.request), M * S)  # [G]
    num_seen = jnp.where(tiles.rows < T, num_keys[:, None], 0)  # [G, Q]
    if view.causal:
        num_seen = jnp.minimum(num_seen, _rows(view.positions, tiles.rows) + 1)
    first_seen = None
    if view.window is not None:
        place = _rows(view.positions, tiles.rows)
        num_seen = jnp.minimum(num_seen, place + view.window)
        first_seen = jnp.repeat(place - view.window + 1, N // n, axis=1)  # [G, Q] -> [G, E]
    num_seen = jnp.repeat(num_seen, N // n, axis=1)  # [G, Q] -> [G, E]
    q_tile = _rows(q, tiles.rows).reshape(G, Q, n, N // n, d)
    q_tile = q_tile.transpose(0, 2, 1, 3, 4).reshape(G, n, E, d)

    attended = paged_attention(
        q_tile,
        cache.k,
        cache.v,
        layer,
        _rows(view.block_table, tiles.request),
        num_seen,
        first_seen,
        scale=scale,
        impl=impl,
    )
    if view.visible is not None:
        assert cache.node_k is not None and cache.node_v is not None
        k, v = (
            _rows(nodes[layer], tiles.request).swapaxes(1, 2)  # [B, X, n, d] -> [G, n, X, d]
            for nodes in (cache.node_k, cache.node_v)
        )
        seen = (tiles.rows < T)[:, :, None] & _rows(view.visible, tiles.rows)  # [G, Q, X]
        seen = jnp.repeat(seen, N // n, axis=1).swapaxes(1, 2)  # [G, X, E]
        attended = add_keys(attended, q_tile.swapaxes(2, 3), k, v, seen, scale=scale)
    _, total, out = attended
    out = (out / jnp.where(total == 0, 1, total)[..., None]).astype(q.dtype)
    out = out.reshape(G, n, Q, N // n, d).transpose(0, 2, 1, 3, 4).reshape(G * Q, N, d)
    return out.at[tiles.place].get(mode="fill", fill_value=0, wrap_negative_indices=False)


def _put(
    pages: Float[Array, "L P S n d"],
    layer: int,
    rows: Float[Array, "T n d"],
    slots: Int[AnyArray, "T"],
) -> Float[Array, "L P S n d"]:
    """Writes rows to slots of a layer; PAD and slots beyond the last one write nothing."""
    L, P, S, n, d = pages.shape
    flat = pages.reshape(L, P * S, n, d)
    flat = flat.at[layer, slots].set(
        rows.astype(pages.dtype), mode="drop", wrap_negative_indices=False
    )
    return flat.reshape(pages.shape)


class _Tiles(NamedTuple):
    """The rows of a ragged pass, cut into G tiles of Q rows that belong to one request each."""

    request: Int[Array, "G"]  # 0..B-1, of an empty tile too
    rows: Int[Array, "G Q"]  # T where the tile is not full
    place: Int[Array, "T"]  # where each row lies among the G * Q; G * Q for padding rows


def _tile(query_start: Int[Array, "B1"], T: int) -> _Tiles:
    """Cuts T rows into tiles.

    In: query_start [0 1 4], T 6 (Q = 3)  Out: request [0 1 1], rows [0 6 6 | 1 2 3 | 6 6 6]
    """
    B = query_start.shape[0] - 1
    Q = max(1, -(-T // B))
    # r rows take ceil(r / Q) <= 1 + (r - 1) / Q tiles; summed over the requests, at most this.
    G = B + max(0, (T - B) // Q)
    num_tiles = -(-jnp.diff(query_start) // Q)  # [B]
    tile_end = jnp.cumsum(num_tiles, dtype=jnp.int32)
    tile_start = tile_end - num_tiles

    tile = jnp.arange(G, dtype=jnp.int32)
    request = jnp.minimum(_count_reached(tile_end, tile), B - 1)
    first = _rows(query_start, request) + (tile - _rows(tile_start, request)) * Q
    rows = first[:, None] + jnp.arange(Q, dtype=jnp.int32)[None]  # [G, Q]
    rows = jnp.where(rows < _rows(query_start, request + 1)[:, None], rows, T)

    row = jnp.arange(T, dtype=jnp.int32)
    owner = _count_reached(query_start[1:], row)  # B for padding rows
    place = _rows(tile_start, owner) * Q + row - _rows(query_start, owner)
    # Not `owner < B`: for two rows of one request XLA (JAX 0.11.2) does not compile that on a GPU.
    return _Tiles(request, rows, jnp.where(row < query_start[-1], place, G * Q))


def _count_reached(ends: Int[Array, "B"], at: Int[Array, "X"]) -> Int[Array, "X"]:
    return jnp.sum(at[:, None] >= ends[None], axis=1, dtype=jnp.int32)


def _rows(x: AnyArray, index: Array) -> Array:
    """Reads rows of x; an index past the end reads the last row, which the caller masks."""
    return jnp.asarray(x).at[index].get(mode="clip", wrap_negative_indices=False)
