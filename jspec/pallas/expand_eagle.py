"""expand_eagle: a step's rows with room for drafts, for parallel drafting and draft models."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Bool, Int

from jspec.axes import PAD_SLOT, AnyArray, Impl
from jspec.pallas import _backend, _dispatch, _lookup


class ExpandedRows(NamedTuple):
    """The rows that a drafter's first pass runs on: R = T + B * (num_slots - shift) of them.

    Request r starts at row `query_start[r] + r * (num_slots - shift)`: its accepted tokens, the
    next token, masked rows, then as many rejected rows as the verifier rejected. Rows of no
    request, and those of a request with query length 0, are padding.

    Attributes:
      token_ids: `pad_token` in rejected and padding rows.
      positions: counted from the request's first position; 0 in rejected and padding rows.
      rejected_mask: True in rejected and padding rows: no KV, no draft.
      masked_mask: True where the row holds `mask_token`.
      sample_index: rows that the drafts are read from, the next token's first; the request's first
        row where it has none such, 0 for a padded request.
      hidden_index: with shift, the row that each target row's hidden state goes to; else PAD.
      hidden_source: with shift, the target row whose hidden state belongs in each row; PAD in
        masked and padding rows, after the target's rows, and without shift.
    """

    token_ids: Int[jax.Array, "R"]
    positions: Int[jax.Array, "R"]
    rejected_mask: Bool[jax.Array, "R"]
    masked_mask: Bool[jax.Array, "R"]
    sample_index: Int[jax.Array, "B slots"]
    hidden_index: Int[jax.Array, "T"]
    hidden_source: Int[jax.Array, "R"]


def expand_eagle(
    token_ids: Int[AnyArray, "T"],
    positions: Int[AnyArray, "T"],
    next_token: Int[AnyArray, "B"],
    query_start: Int[AnyArray, "B+1"],
    last_index: Int[AnyArray, "B"],
    *,
    num_slots: int,
    shift: bool,
    mask_token: int,
    pad_token: int = 0,
    impl: Impl = "auto",
) -> ExpandedRows:
    """Lays a step's rows out anew, with the next token and room for drafts after the accepted ones.

    Args:
      token_ids: the rows' tokens; rows from `query_start[-1]` on may hold anything.
      positions: the rows' positions; only the first of each request is read.
      next_token: the token each request continues from.
      query_start: first row of each request, and the end of the last.
      last_index: row of each request's last accepted token.
      num_slots: rows that a request gets for the next token and the masked ones; 1 or more.
      shift: drop each request's first token, as a drafter that reads hidden states wants it.
      mask_token: id of a row to draft in parallel.
      pad_token: id of a rejected or padding row.
      impl: implementation.

    Returns:
      The rows; `positions` of the dtype given, all else int32 or bool.

    Raises:
      TypeError, ValueError: an argument of a wrong dtype, shape or size.
      NotImplementedError: a kernel was asked for that cannot run here.

    Source: vLLM 0.20.0 v1/spec_decode/utils.py, copy_and_expand_eagle_inputs_kernel.

    Example:
      >>> ids, positions = jnp.array([100, 101, 102, 103]), jnp.array([10, 11, 12, 13])
      >>> start, last = jnp.array([0, 4]), jnp.array([1])  # two of the four rows were rejected
      >>> rows = expand_eagle(ids, positions, jnp.array([900]), start, last,
      ...                     num_slots=3, shift=True, mask_token=7)
      >>> rows.token_ids.tolist(), rows.positions.tolist(), rows.sample_index.tolist()
      ([101, 900, 7, 7, 0, 0], [10, 11, 12, 13, 0, 0], [[1, 2, 3]])
    """
    sizes = _dispatch.check_arrays(
        expand_eagle, token_ids, positions, next_token, query_start, last_index
    )
    _dispatch.check_sizes("expand_eagle", num_slots=num_slots)
    B, T = sizes["B"], sizes["T"]
    how = _dispatch.choose(impl, "expand_eagle", num_cells=min(B, T))
    rows = jax.ShapeDtypeStruct((T + B * (num_slots - shift),), jnp.int32)
    mask, index = rows.update(dtype=jnp.bool_), rows.update(shape=(B, num_slots))
    out = (
        rows,
        rows.update(dtype=positions.dtype),
        mask,
        mask,
        index,
        rows.update(shape=(T,)),
        rows,
    )
    if min(B, T) == 0:
        fill = (pad_token, 0, True, False, 0, PAD_SLOT, PAD_SLOT)
        return ExpandedRows(*map(_lookup.filled, out, fill))
    args = [jnp.asarray(x) for x in (token_ids, positions, next_token, query_start, last_index)]
    static = dict(num_slots=num_slots, shift=int(shift), mask_token=mask_token, pad_token=pad_token)
    if how == "xla":
        return _reference(*args, **static)
    kernel = functools.partial(_kernel, T=T, B=B, **static)
    num_cells = max(x.size for x in out)
    return ExpandedRows(
        *_backend.launch(kernel, num_cells, args, out, name="jspec_expand_eagle", how=how)
    )


def _reference(
    token_ids: jax.Array,
    positions: jax.Array,
    next_token: jax.Array,
    query_start: jax.Array,
    last_index: jax.Array,
    *,
    num_slots: int,
    shift: int,
    mask_token: int,
    pad_token: int,
) -> ExpandedRows:
    T, B, extra = token_ids.size, next_token.size, num_slots - shift
    begin, end = query_start[:-1].astype(jnp.int32), query_start[1:].astype(jnp.int32)
    num_kept = last_index.astype(jnp.int32) + 1 - begin - shift  # [B], -1 where all was rejected
    start = begin + jnp.arange(B, dtype=jnp.int32) * extra

    # 1. The request of each row: B past the last one, which then reads as a padded request.
    row = jnp.arange(T + B * extra, dtype=jnp.int32)
    ends = end + jnp.arange(1, B + 1, dtype=jnp.int32) * extra
    request = jnp.searchsorted(ends, row, side="right", method="compare_all")  # [R]
    place = row - _read(start, request)
    slot = place - _read(num_kept, request)  # below 0 an accepted token, 0 the next token
    source = _read(begin, request) + place
    live = _read(end - begin, request) > 0
    rejected = ~live | (slot >= num_slots)
    masked = live & (slot > 0) & (slot < num_slots)

    # 2. What the row holds.
    token = jnp.where(slot < 0, _read(token_ids, source + shift), _read(next_token, request))
    token = jnp.where(masked, mask_token, token.astype(jnp.int32))
    first = _read(positions, _read(begin, request))
    has_source = live & ~masked & (source < _read(end, request)) & bool(shift)

    # 3. Rows to draft from, and where hidden states go.
    offset = jnp.maximum(num_kept[:, None] + jnp.arange(num_slots, dtype=jnp.int32)[None], 0)
    sample_index = jnp.where((end > begin)[:, None], start[:, None] + offset, 0)
    target = jnp.arange(T, dtype=jnp.int32)
    owner = jnp.searchsorted(end, target, side="right", method="compare_all")  # [T]
    return ExpandedRows(
        token_ids=jnp.where(rejected, pad_token, token),
        positions=jnp.where(rejected, 0, first + place.astype(first.dtype)),
        rejected_mask=rejected,
        masked_mask=masked,
        sample_index=sample_index,
        hidden_index=jnp.where((owner < B) & bool(shift), target + owner * extra, PAD_SLOT),
        hidden_source=jnp.where(has_source, source, PAD_SLOT),
    )


def _read(array: jax.Array, index: jax.Array) -> jax.Array:
    return array.at[index].get(mode="fill", fill_value=0)


def _kernel(
    cell,
    token_ids_ref,  # [T]
    positions_ref,  # [T]
    next_token_ref,  # [B]
    query_start_ref,  # [B + 1]
    last_index_ref,  # [B]
    token_ref,  # [R] out, and so the next three
    position_ref,
    rejected_ref,
    masked_ref,
    sample_index_ref,  # [B * num_slots] out
    hidden_index_ref,  # [T] out
    hidden_source_ref,  # [R] out
    *,
    T: int,
    B: int,
    num_slots: int,
    shift: int,
    mask_token: int,
    pad_token: int,
):
    extra = num_slots - shift

    def bounds(request):
        begin, end = query_start_ref[request], query_start_ref[request + 1]
        num_kept = last_index_ref[request] + 1 - begin - shift
        return begin.astype(jnp.int32), end.astype(jnp.int32), num_kept.astype(jnp.int32)

    # 1. One row; rows past the last request borrow its bounds and are dead.
    row = jnp.minimum(cell, T + B * extra - 1)
    found = _lookup.request_of(row, query_start_ref, num_requests=B, extra=extra)
    request = jnp.minimum(found, B - 1)
    begin, end, num_kept = bounds(request)
    place = row - begin - request * extra
    slot = place - num_kept
    source = begin + place
    live = (found < B) & (end > begin)
    rejected = ~live | (slot >= num_slots)
    masked = live & (slot > 0) & (slot < num_slots)
    token = token_ids_ref[jnp.clip(source + shift, 0, T - 1)].astype(jnp.int32)
    token = jnp.where(slot < 0, token, next_token_ref[request].astype(jnp.int32))
    token = jnp.where(masked, mask_token, token)
    first = positions_ref[jnp.clip(begin, 0, T - 1)]
    has_source = live & ~masked & (source < end) & bool(shift)

    # 2. One row to draft from.
    sample = jnp.minimum(cell, B * num_slots - 1)
    request, offset = _lookup.split(sample, num_slots)
    begin, end, num_kept = bounds(request)
    offset = jnp.maximum(num_kept + offset, 0)
    sample_row = jnp.where(end > begin, begin + request * extra + offset, 0)

    # 3. Where one target row's hidden state goes.
    target = jnp.minimum(cell, T - 1)
    owner = _lookup.request_of(target, query_start_ref, num_requests=B)
    has_row = (owner < B) & bool(shift)

    # Stores come last: no load is moved across one, and the loads above overlap.
    token_ref[row] = jnp.where(rejected, pad_token, token)
    position_ref[row] = jnp.where(rejected, 0, first + place.astype(first.dtype))
    rejected_ref[row] = rejected
    masked_ref[row] = masked
    sample_index_ref[sample] = sample_row
    hidden_index_ref[target] = jnp.where(has_row, target + owner * extra, PAD_SLOT)
    hidden_source_ref[row] = jnp.where(has_source, source, PAD_SLOT)
