"""expand_dflash: context rows and a block of query rows for a block-parallel drafter."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Int

from jspec.axes import PAD_SLOT, AnyArray, Impl
from jspec.pallas import _backend, _dispatch, _lookup


class BlockRows(NamedTuple):
    """What a block drafter's pass runs on: T context rows, and B * W query rows (W = drafts + 1).

    Query row r * W holds the next token of request r, the rows after it the drafts to fill in.
    Padding: context rows of no request, and every query row of a request with query length 0.

    Attributes:
      token_ids: of query rows; `pad_token` in padding.
      query_positions: counted on from the last accepted position; 0 in padding.
      query_slots: PAD_SLOT in padding.
      context_positions: 0 in padding.
      context_slots: PAD_SLOT in padding.
      sample_index: query rows that the drafts are read from.
    """

    token_ids: Int[jax.Array, "BW"]
    query_positions: Int[jax.Array, "BW"]
    query_slots: Int[jax.Array, "BW"]
    context_positions: Int[jax.Array, "T"]
    context_slots: Int[jax.Array, "T"]
    sample_index: Int[jax.Array, "B K"]


def expand_dflash(
    next_token: Int[AnyArray, "B"],
    positions: Int[AnyArray, "T"],
    query_start: Int[AnyArray, "B+1"],
    block_table: Int[AnyArray, "B M"],
    num_rejected: Int[AnyArray, "B"] | None = None,
    *,
    num_drafts: int,
    page_size: int,
    mask_token: int,
    pad_token: int = 0,
    max_model_len: int | None = None,
    impl: Impl = "auto",
) -> BlockRows:
    """Lays out a block of query rows after each request's accepted context.

    Args:
      next_token: the token each request continues from.
      positions: of the rows that the target just ran, rejected ones included; rows from
        `query_start[-1]` on may hold anything.
      query_start: first row of each request, and the end of the last.
      block_table: pages of each request in order; past the table its last column answers, and
        a PAD page has no slot.
      num_rejected: rejected rows at the end of each request; none if None.
      num_drafts: drafts per request (K).
      page_size: slots a page.
      mask_token: id of a query row to fill in.
      pad_token: id of a padding row.
      max_model_len: positions a request may have. A query row from there on gets position
        `max_model_len` - 1 and PAD_SLOT, and so do the slots of context rows that lie past it or
        were rejected. None keeps every position and slot, as the original does.
      impl: implementation.

    Returns:
      The rows; positions and slots of the dtype of `positions`, all else int32.

    Raises:
      TypeError, ValueError: an argument of a wrong dtype, shape or size.
      NotImplementedError: a kernel was asked for that cannot run here.

    Source: vLLM 0.20.0 v1/spec_decode/utils.py, copy_and_expand_dflash_inputs_kernel.

    Example:
      >>> positions, table = jnp.array([10, 11, 12, 13]), jnp.array([[3, 8, 5, 1]])
      >>> rows = expand_dflash(jnp.array([900]), positions, jnp.array([0, 4]), table,
      ...                      jnp.array([2]), num_drafts=3, page_size=4, mask_token=7)
      >>> rows.token_ids.tolist(), rows.query_positions.tolist(), rows.query_slots.tolist()
      ([900, 7, 7, 7], [12, 13, 14, 15], [4, 5, 6, 7])
    """
    sizes = _dispatch.check_arrays(
        expand_dflash, next_token, positions, query_start, block_table, num_rejected
    )
    _dispatch.check_sizes("expand_dflash", num_drafts=num_drafts, page_size=page_size)
    if max_model_len is not None:
        _dispatch.check_sizes("expand_dflash", max_model_len=max_model_len)
    B, T = sizes["B"], sizes["T"]
    how = _dispatch.choose(impl, "expand_dflash", num_cells=min(B, T))
    width = num_drafts + 1
    first = jnp.arange(B, dtype=jnp.int32)[:, None] * width
    sample_index = first + jnp.arange(1, width, dtype=jnp.int32)[None]
    query = jax.ShapeDtypeStruct((B * width,), positions.dtype)
    context = jax.ShapeDtypeStruct((T,), positions.dtype)
    out = (query.update(dtype=jnp.int32), query, query, context, context)
    if min(B, T) == 0:
        fill = (pad_token, 0, PAD_SLOT, 0, PAD_SLOT)
        return BlockRows(*map(_lookup.filled, out, fill), sample_index=sample_index)
    if num_rejected is None:
        num_rejected = jnp.zeros(B, jnp.int32)
    args = [jnp.asarray(x) for x in (next_token, positions, query_start, block_table, num_rejected)]
    static = dict(
        width=width,
        page_size=page_size,
        mask_token=mask_token,
        pad_token=pad_token,
        max_model_len=max_model_len,
    )
    if how == "xla":
        return BlockRows(*_reference(*args, **static), sample_index=sample_index)
    kernel = functools.partial(_kernel, T=T, B=B, num_pages=sizes["M"], **static)
    rows = _backend.launch(
        kernel, max(T, B * width), args, out, name="jspec_expand_dflash", how=how
    )
    return BlockRows(*rows, sample_index=sample_index)


def _reference(
    next_token: jax.Array,
    positions: jax.Array,
    query_start: jax.Array,
    block_table: jax.Array,
    num_rejected: jax.Array,
    *,
    width: int,
    page_size: int,
    mask_token: int,
    pad_token: int,
    max_model_len: int | None,
) -> tuple[jax.Array, ...]:
    T, (B, M) = positions.size, block_table.shape
    end = query_start[1:].astype(jnp.int32)
    accepted_end = end - num_rejected.astype(jnp.int32)  # [B]

    def slot_of(position, request, live):
        column = jnp.clip(position // page_size, 0, M - 1)
        page = block_table.at[request, column].get(mode="fill", fill_value=PAD_SLOT)
        page = page.astype(position.dtype)
        slot = page * page_size + position % page_size
        return jnp.where(live & _lookup.is_page(page, page_size), slot, PAD_SLOT)

    # 1. Query rows, counted on from the last accepted position.
    last = positions.at[jnp.clip(accepted_end - 1, 0, T - 1)].get(mode="promise_in_bounds")
    offset = jnp.arange(width, dtype=positions.dtype)[None]
    position = last[:, None] + 1 + offset  # [B, W]
    live = jnp.broadcast_to((end > query_start[:-1].astype(jnp.int32))[:, None], (B, width))
    request = jnp.broadcast_to(jnp.arange(B, dtype=jnp.int32)[:, None], (B, width))
    token = jnp.where(offset == 0, next_token.astype(jnp.int32)[:, None], mask_token)
    has_slot = live if max_model_len is None else live & (position < max_model_len)
    slot = slot_of(position, request, has_slot)
    if max_model_len is not None:
        position = jnp.minimum(position, max_model_len - 1)

    # 2. Context rows; one past the last request reads request B, which has no page.
    row = jnp.arange(T, dtype=jnp.int32)
    owner = jnp.searchsorted(end, row, side="right", method="compare_all")  # [T]
    has_context_slot = owner < B
    if max_model_len is not None:
        accepted = row < accepted_end.at[owner].get(mode="fill", fill_value=0)
        has_context_slot &= accepted & (positions < max_model_len)
    return (
        jnp.where(live, token, pad_token).reshape(-1),
        jnp.where(live, position, 0).reshape(-1),
        slot.reshape(-1),
        jnp.where(owner < B, positions, 0),
        slot_of(positions, owner, has_context_slot),
    )


def _kernel(
    cell,
    next_token_ref,  # [B]
    positions_ref,  # [T]
    query_start_ref,  # [B + 1]
    block_table_ref,  # [B * M]
    num_rejected_ref,  # [B]
    token_ref,  # [B * W] out, and so the next two
    query_position_ref,
    query_slot_ref,
    context_position_ref,  # [T] out, and so the next
    context_slot_ref,
    *,
    T: int,
    B: int,
    num_pages: int,
    width: int,
    page_size: int,
    mask_token: int,
    pad_token: int,
    max_model_len: int | None,
):
    slot_of = functools.partial(
        _lookup.slot_of, block_table=block_table_ref, num_pages=num_pages, page_size=page_size
    )

    def bounds(request):
        begin, end = query_start_ref[request], query_start_ref[request + 1]
        accepted_end = end - num_rejected_ref[request].astype(end.dtype)
        return begin.astype(jnp.int32), end.astype(jnp.int32), accepted_end.astype(jnp.int32)

    # 1. One query row.
    query = jnp.minimum(cell, B * width - 1)
    request, offset = _lookup.split(query, width)
    begin, end, accepted_end = bounds(request)
    live = end > begin
    last = positions_ref[jnp.clip(accepted_end - 1, 0, T - 1)]
    position = jnp.where(live, last + 1 + offset.astype(last.dtype), 0)
    slot = jnp.where(live, slot_of(position, request), PAD_SLOT)
    token = jnp.where(offset == 0, next_token_ref[request].astype(jnp.int32), mask_token)
    token = jnp.where(live, token, pad_token)

    # 2. One context row; past the last request it borrows that one's bounds and is dead.
    row = jnp.minimum(cell, T - 1)
    found = _lookup.request_of(row, query_start_ref, num_requests=B)
    owner = jnp.minimum(found, B - 1)
    context_position = jnp.where(found < B, positions_ref[row], 0)
    context_slot = jnp.where(found < B, slot_of(context_position, owner), PAD_SLOT)
    if max_model_len is not None:
        slot = jnp.where(position < max_model_len, slot, PAD_SLOT)
        position = jnp.minimum(position, max_model_len - 1)
        accepted = (row < bounds(owner)[2]) & (context_position < max_model_len)
        context_slot = jnp.where(accepted, context_slot, PAD_SLOT)

    # Stores come last: no load is moved across one, and the loads above overlap.
    token_ref[query] = token
    query_position_ref[query] = position
    query_slot_ref[query] = slot
    context_position_ref[row] = context_position
    context_slot_ref[row] = context_slot
