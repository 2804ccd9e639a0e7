"""paged_attention: the running softmax of tiles of queries over the pages of their requests."""

import functools
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from jspec.axes import AnyArray, Impl
from jspec.pallas import _backend, _dispatch

BLOCK_TOKENS = 128
"""Keys that the plain loop reads at a time: fewer waste rounds, more waste work on short ones."""

# Measured on an H200 (bfloat16, head_dim 128, page 16). 64 keys a round beat 32 and 128; about 512
# programs fill the device, and more of them only add partial results.
_MAX_ROWS = 64  # of queries a program, and of keys a round
_TILE_BYTES = 16 * 1024  # of queries, of keys and of values: larger ones run short of registers
_PROGRAMS = 512
_MAX_HEAD_DIM = 512
_DTYPES = ("bfloat16", "float16", "float32")


class Attended(NamedTuple):
    """A softmax on its way: its result is `out / total`, and further keys may still join.

    Attributes:
      top: the largest score so far; -inf where nothing was seen.
      total: sum of the weights `exp(score - top)`.
      out: sum of the values times their weights.
    """

    top: Float[Array, "G n E"]
    total: Float[Array, "G n E"]
    out: Float[Array, "G n E d"]


def paged_attention(
    q: Float[Array, "G n E d"],
    k: Float[Array, "L P S n d"],
    v: Float[Array, "L P S n d"],
    layer: int | Int[AnyArray, ""],
    block_table: Int[AnyArray, "G M"],
    num_seen: Int[AnyArray, "G E"],
    first_seen: Int[AnyArray, "G E"] | None = None,
    *,
    scale: float,
    impl: Impl = "auto",
) -> Attended:
    """Attends from G tiles of E query rows to keys and values in pages.

    Row e of tile g sees the keys `first_seen[g, e] <= key < num_seen[g, e]` of the tile's request,
    where key i lies in page `block_table[g, i // S]` at place `i % S`. All E rows of a tile and a
    key/value head share its keys: query heads of a group and neighbouring tokens alike.

    Args:
      q: queries, rotated.
      k: keys of all layers.
      v: values of all layers.
      layer: 0..L-1; may be traced.
      block_table: pages of each tile's request in order; entries past the keys that are seen may
        hold anything. An id outside of 0..P-1 reads the nearest page.
      num_seen: the key after the last one that a row sees; 0 or less for a row that sees none.
      first_seen: the first key that a row sees, where that is not key 0; may be negative.
      scale: factor of the scores, commonly `d ** -0.5`.
      impl: implementation. "auto" takes the kernel on a CUDA GPU that Triton compiles for (compute
        capability 8.0 and later), and the plain loop elsewhere.

    Returns:
      float32 parts of the softmax; a row that sees nothing has top -inf, total 0 and out 0. Slots
      before the first and after the last key that rows of a tile see may hold anything, NaN too.

    Raises:
      TypeError, ValueError: an argument of a wrong dtype or shape.
      NotImplementedError: a kernel was asked for that cannot run here.

    Source: the running softmax of arXiv 1805.02867; split over keys as in Flash-Decoding.

    Example:
      >>> q, pages = jnp.zeros((1, 1, 1, 2)), jnp.arange(8.0).reshape(1, 2, 2, 1, 2)
      >>> table, num_seen = jnp.array([[1, 0]]), jnp.array([[4]])  # page 1, then page 0
      >>> _, total, out = paged_attention(q, pages, pages, 0, table, num_seen, scale=1.0)
      >>> (out / total[..., None]).tolist()  # the mean of [4 5], [6 7], [0 1] and [2 3]
      [[[[3.0, 4.0]]]]
    """
    sizes = _check(q, k, v, layer, block_table, num_seen, first_seen)
    G, n, E, d = q.shape
    dtypes = [jnp.dtype(x.dtype).name for x in (q, k, v)]
    how = _dispatch.choose(
        impl,
        "paged_attention",
        num_cells=G * n,
        fits=d <= _MAX_HEAD_DIM and set(dtypes) <= set(_DTYPES),
        why=f"a head_dim above {_MAX_HEAD_DIM}, or dtypes other than {', '.join(_DTYPES)}",
    )
    if how == "mosaic":
        raise NotImplementedError(
            "paged_attention: there is no Mosaic kernel. Select the Triton lowering, or pass "
            'impl="xla" or "auto".'
        )
    block_table = jnp.asarray(block_table).astype(jnp.int32)
    limit = sizes["M"] * k.shape[2]
    num_seen = jnp.minimum(jnp.asarray(num_seen), limit).astype(jnp.int32)
    if first_seen is not None:
        first_seen = jnp.asarray(first_seen).astype(jnp.int32)
    layer = jnp.clip(jnp.asarray(layer, jnp.int32), 0, k.shape[0] - 1)
    if how == "xla":
        return _reference(q, k, v, layer, block_table, num_seen, first_seen, scale=scale)
    return _launch(q, k, v, layer, block_table, num_seen, first_seen, scale=scale, how=how)


def _check(q, k, v, layer, block_table, num_seen, first_seen) -> dict[str, int]:
    arrays: dict[str, Any] = {"num_seen": (num_seen, "int G E")}
    if first_seen is not None:
        arrays["first_seen"] = (first_seen, "int G E")
    sizes = _dispatch.check_forms("paged_attention", block_table=(block_table, "int G M"), **arrays)
    if k.shape != v.shape or k.ndim != 5:
        raise ValueError(
            f"paged_attention: `k` has shape {k.shape} and `v` {v.shape}, wanted [L, P, S, n, d] "
            "of both. Pass the arrays of a KVCache."
        )
    wanted = (sizes["G"], k.shape[3], sizes["E"], k.shape[4])
    if q.shape != wanted:
        raise ValueError(
            f"paged_attention: `q` has shape {q.shape}, wanted {wanted}: [G, n, E, d], with G and "
            "E of `num_seen`, and n and d of `k`. Put the query heads that share a key/value head "
            "side by side along E."
        )
    if isinstance(layer, int) and not 0 <= layer < k.shape[0]:
        raise ValueError(
            f"paged_attention: `layer` is {layer}, and `k` has {k.shape[0]} layers. "
            f"Pass 0 to {k.shape[0] - 1}."
        )
    return sizes


def add_keys(
    attended: Attended,
    q: Float[Array, "G n d E"],
    k: Float[Array, "G n C d"],
    v: Float[Array, "G n C d"],
    seen: Bool[Array, "G C E"],
    *,
    scale: float,
) -> Attended:
    """Lets C further keys join a softmax.

    Args:
      attended: what was seen before.
      q: queries, head dimension before rows: the product then reads the keys as they lie.
      k: keys.
      v: values; a weight of 0 does not mute NaN.
      seen: whether a row sees a key.
      scale: factor of the scores.
    """
    top, total, out = attended
    scores = jnp.einsum("gncd,gnde->gnce", k, q, preferred_element_type=jnp.float32)
    scores = jnp.where(seen[:, None], scores * scale, -jnp.inf).swapaxes(2, 3)  # [G, n, E, C]
    new_top = jnp.maximum(top, jnp.max(scores, axis=-1))
    shift = jnp.where(new_top == -jnp.inf, 0, new_top)  # a row that has seen nothing yet
    weights = jnp.exp(scores - shift[..., None])
    fade = jnp.exp(top - shift)
    total = total * fade + jnp.sum(weights, axis=-1)
    new = jnp.einsum(
        "gnec,gncd->gned", weights.astype(v.dtype), v, preferred_element_type=jnp.float32
    )
    return Attended(new_top, total, out * fade[..., None] + new)


def _reference(q, k, v, layer, block_table, num_seen, first_seen, *, scale: float) -> Attended:
    # The trip count is traced: on a GPU the host waits for the device in every round. The work
    # follows the longest request, not the table, and starts at the first key that a window reaches.
    G, n, E, d = q.shape
    S, M = k.shape[2], block_table.shape[1]
    block_pages = min(M, max(1, BLOCK_TOKENS // S))
    C = block_pages * S
    table = jnp.pad(block_table, ((0, 0), (0, -M % block_pages))).reshape(G, -1, block_pages)
    q = q.swapaxes(2, 3)  # [G, n, E, d] -> [G, n, d, E]
    last_seen = jnp.max(num_seen, axis=1)[:, None]  # [G, 1]
    longest = jnp.max(last_seen)
    first_block, reached = 0, None
    if first_seen is not None:
        reached = jnp.min(jnp.where(num_seen > 0, first_seen, longest), axis=1)[:, None]  # [G, 1]
        first_block = jnp.maximum(jnp.min(reached), 0) // C

    def block(i: Array, attended: Attended) -> Attended:
        pages = table[:, i]  # [G, block_pages]
        key = i * C + jnp.arange(C, dtype=jnp.int32)[None]  # [1, C]
        live = key < last_seen  # [G, C]; a weight of 0 would not mute NaN in other slots
        seen = key[:, :, None] < num_seen[:, None]  # [G, C, E]
        if first_seen is not None:
            live &= key >= reached
            seen &= key[:, :, None] >= first_seen[:, None]
        block_v = jnp.where(live[:, None, :, None], _pages(v, layer, pages), 0)
        return add_keys(attended, q, _pages(k, layer, pages), block_v, seen, scale=scale)

    nothing = Attended(
        jnp.full((G, n, E), -jnp.inf, jnp.float32),
        jnp.zeros((G, n, E), jnp.float32),
        jnp.zeros((G, n, E, d), jnp.float32),
    )
    return lax.fori_loop(first_block, (longest + C - 1) // C, block, nothing)


def _pages(
    cache: Float[Array, "L P S n d"], layer: Int[Array, ""], pages: Int[Array, "G M"]
) -> Float[Array, "G n C d"]:
    """Reads pages side by side; a PAD page reads page 0, which the caller masks."""
    G, n, d = pages.shape[0], *cache.shape[3:]
    rows = cache.at[layer, pages].get(mode="clip", wrap_negative_indices=False)
    return rows.reshape(G, -1, n, d).swapaxes(1, 2)


def _kernel(
    program,  # 0..(G * splits * n * row_tiles)-1
    layer_ref,  # [1]
    table_ref,  # [G, M]
    num_seen_ref,  # [G, E]
    *refs,  # first_seen [G, E] if windowed; q [G, n, E, d]; k, v [L, P, S, n, d];
    # out: top, total [splits, G, n, E], out [splits, G, n, E, d]
    scale: float,
    windowed: bool,
    rows: int,
    keys: int,
    splits: int,
):
    first_seen_ref = refs[0] if windowed else None
    q_ref, k_ref, v_ref, top_ref, total_ref, out_ref = refs[windowed:]
    _, n, E, d = q_ref.shape
    _, P, S, _, _ = k_ref.shape
    layer = layer_ref[0]

    # 1. The program's queries: neighbours share keys, so that these are read from memory once.
    row_tiles = -(-E // rows)
    program, row_tile = lax.div(program, row_tiles), lax.rem(program, row_tiles)
    program, head = lax.div(program, n), lax.rem(program, n)
    tile, split = lax.div(program, splits), lax.rem(program, splits)
    row = row_tile * rows + lax.iota(jnp.int32, rows)
    dim = lax.iota(jnp.int32, _power_of_two(d))[None]  # [1, d], padded
    is_row, is_dim = row < E, dim < d
    q_mask = is_row[:, None] & is_dim
    q = _backend.load(q_ref.at[tile, head, row[:, None], dim], q_mask)
    dtype = _common_dtype(q.dtype, k_ref.dtype)
    q = q.astype(dtype)

    # 2. Its keys: an even part of those that any of its rows sees, in whole rounds.
    num_seen = _backend.load(num_seen_ref.at[tile, row], is_row)
    stop = jnp.max(num_seen)
    begin, first_seen = jnp.int32(0), None
    if first_seen_ref is not None:
        first_seen = _backend.load(first_seen_ref.at[tile, row], is_row)
        reached = jnp.min(jnp.where(num_seen > 0, first_seen, stop))
        begin = jnp.maximum(reached, 0)
    length = jnp.maximum(stop - begin, 0)
    share = lax.div(lax.div(length + (splits - 1), splits) + (keys - 1), keys) * keys
    begin = begin + split * share
    stop = jnp.minimum(stop, begin + share)

    # 3. The running softmax over them.
    def attend(i, attended):
        top, total, out = attended
        key = begin + i * keys + lax.iota(jnp.int32, keys)
        live = key < stop  # no other slot is read: it may hold NaN
        page = _backend.load(table_ref.at[tile, lax.div(key, S)], live)
        page = jnp.clip(page, 0, P - 1)[:, None]
        at = (layer, page, lax.rem(key, S)[:, None], head, dim)
        mask = live[:, None] & is_dim
        k, v = _backend.load(k_ref.at[at], mask), _backend.load(v_ref.at[at], mask)
        seen = key[None] < num_seen[:, None]  # [rows, keys]
        seen &= live[None]
        if first_seen is not None:
            seen &= key[None] >= first_seen[:, None]
        scores = jnp.where(seen, _product(q, k.astype(dtype), 1) * scale, -jnp.inf)
        new_top = jnp.maximum(top, jnp.max(scores, axis=1))
        shift = jnp.where(new_top == -jnp.inf, 0.0, new_top)  # a row that has seen nothing yet
        weights = jnp.exp(scores - shift[:, None])
        fade = jnp.exp(top - shift)
        out = out * fade[:, None] + _product(weights.astype(v.dtype), v, 0)
        return new_top, total * fade + jnp.sum(weights, axis=1), out

    nothing = (
        jnp.full((rows,), -jnp.inf, jnp.float32),
        jnp.zeros((rows,), jnp.float32),
        jnp.zeros((rows, dim.shape[1]), jnp.float32),
    )
    rounds = lax.div(jnp.maximum(stop - begin, 0) + (keys - 1), keys)
    top, total, out = lax.fori_loop(jnp.int32(0), rounds, attend, nothing)
    _backend.store(top_ref.at[split, tile, head, row], top, is_row)
    _backend.store(total_ref.at[split, tile, head, row], total, is_row)
    _backend.store(out_ref.at[split, tile, head, row[:, None], dim], out, q_mask)


def _product(x, y, y_axis: int):
    """Multiplies x [a, b] with y along an axis of y; float32 stays float32 (no TF32)."""
    return lax.dot_general(
        x,
        y,
        (((1,), (y_axis,)), ((), ())),
        precision=lax.Precision.HIGHEST,
        preferred_element_type=jnp.float32,
    )


def _common_dtype(x, y):
    return x if x == y else jnp.float32


def _power_of_two(size: int) -> int:
    """Rounds up to what a product can have along an axis."""
    return max(16, 1 << (size - 1).bit_length())


def _launch(
    q,
    k,
    v,
    layer,
    block_table,
    num_seen,
    first_seen,
    *,
    scale: float,
    how: Literal["triton", "interpret"],
) -> Attended:
    G, n, E, d = q.shape
    most = _TILE_BYTES // (_power_of_two(d) * max(x.dtype.itemsize for x in (q, k, v)))
    most = max(16, min(_MAX_ROWS, most))
    rows = min(most, _power_of_two(E))
    programs = G * n * -(-E // rows)
    slots = block_table.shape[1] * k.shape[2]
    splits = max(1, min(_PROGRAMS // programs, -(-slots // most)))
    part = jax.ShapeDtypeStruct((splits, G, n, E), jnp.float32)
    window = () if first_seen is None else (first_seen,)
    kernel = functools.partial(
        _kernel,
        scale=scale,
        windowed=bool(window),
        rows=rows,
        keys=most,
        splits=splits,
    )
    top, total, out = _backend.for_each_program(
        kernel,
        programs * splits,
        (layer[None], block_table, num_seen, *window, q, k, v),
        (part, part, part.update(shape=(*part.shape, d))),
        name="jspec_paged_attention",
        how=how,
    )
    if splits == 1:
        return Attended(top[0], total[0], out[0])
    whole_top = jnp.max(top, axis=0)
    fade = jnp.exp(top - jnp.where(whole_top == -jnp.inf, 0, whole_top)[None])
    return Attended(
        whole_top, jnp.sum(total * fade, axis=0), jnp.sum(out * fade[..., None], axis=0)
    )
