"""eagle_step: position, KV slot and length of each request for the next drafted token."""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Int

from jspec.axes import PAD_SLOT, AnyArray, Impl
from jspec.pallas import _backend, _dispatch, _lookup


def eagle_step(
    positions: Int[AnyArray, "B"],
    block_table: Int[AnyArray, "B M"],
    seq_lens: Int[AnyArray, "B"],
    *,
    page_size: int,
    max_model_len: int,
    num_rows: int | None = None,
    impl: Impl = "auto",
) -> tuple[Int[jax.Array, "B"], Int[jax.Array, "rows"], Int[jax.Array, "B"]]:
    """Advances each request by one token: its position, the slot of its KV, its length.

    A request whose next position is not below `max_model_len` gets position 0, PAD_SLOT and length
    1, and so does one at a negative position (padding). Fed back, that position 0 would count up
    through real slots: a draft loop carries the unclamped position.

    Args:
      positions: place of the token just drafted from; row 0 of the three for M-RoPE.
      block_table: pages of each request in order; past the table its last column answers, and
        a PAD page has no slot.
      seq_lens: KV length before the step.
      page_size: slots a page.
      max_model_len: positions a request may have.
      num_rows: length of the returned slots; rows from B on are PAD_SLOT. B if None.
      impl: implementation.

    Returns:
      (positions, slots, seq_lens): the first two of the dtype of `positions`, the last of its own.

    Raises:
      TypeError, ValueError: an argument of a wrong dtype, shape or size.
      NotImplementedError: a kernel was asked for that cannot run here.

    Source: vLLM 0.20.0 v1/spec_decode/utils.py, eagle_step_slot_mapping_metadata_kernel.

    Example:
      >>> positions, table = jnp.array([6, 15, 30]), jnp.array([[4, 9, 2, 7]] * 3)
      >>> step = eagle_step(positions, table, positions + 1, page_size=8, max_model_len=31)
      >>> [x.tolist() for x in step]
      [[7, 16, 0], [39, 16, -1], [8, 17, 1]]
    """
    sizes = _dispatch.check_arrays(eagle_step, positions, block_table, seq_lens)
    B = sizes["B"]
    _dispatch.check_sizes("eagle_step", page_size=page_size, max_model_len=max_model_len)
    num_rows = B if num_rows is None else num_rows
    _dispatch.check_sizes("eagle_step", minimum=B, num_rows=num_rows)
    how = _dispatch.choose(impl, "eagle_step", num_cells=B)
    args = jnp.asarray(positions), jnp.asarray(block_table), jnp.asarray(seq_lens)
    limits = dict(page_size=page_size, max_model_len=max_model_len)
    if how == "xla":
        return _reference(*args, **limits, num_rows=num_rows)
    kernel = functools.partial(_kernel, num_requests=B, num_pages=sizes["M"], **limits)
    out = (
        jax.ShapeDtypeStruct((B,), positions.dtype),
        jax.ShapeDtypeStruct((num_rows,), positions.dtype),
        jax.ShapeDtypeStruct((B,), seq_lens.dtype),
    )
    return _backend.launch(kernel, num_rows, args, out, name="jspec_eagle_step", how=how)


def _reference(
    positions: jax.Array,
    block_table: jax.Array,
    seq_lens: jax.Array,
    *,
    page_size: int,
    max_model_len: int,
    num_rows: int,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    B, M = block_table.shape
    outside = (positions < 0) | (positions >= max_model_len - 1)
    position = jnp.where(outside, 0, positions + 1)
    column = jnp.minimum(position // page_size, M - 1)
    page = jnp.take_along_axis(block_table, column[:, None], axis=1, mode="clip")[:, 0]  # [B]
    page = page.astype(position.dtype)
    slot = page * page_size + position % page_size
    slot = jnp.where(outside | ~_lookup.is_page(page, page_size), PAD_SLOT, slot)
    length = jnp.where(outside, 1, jnp.minimum(seq_lens, max_model_len - 1) + 1)
    return position, jnp.pad(slot, (0, num_rows - B), constant_values=PAD_SLOT), length


def _kernel(
    row,
    position_ref,  # [B]
    block_table_ref,  # [B * M]
    seq_len_ref,  # [B]
    next_position_ref,  # [B] out
    slot_ref,  # [num_rows] out
    next_seq_len_ref,  # [B] out
    *,
    num_requests: int,
    num_pages: int,
    page_size: int,
    max_model_len: int,
):
    request = jnp.minimum(row, num_requests - 1)
    position = position_ref[request]
    outside = (position < 0) | (position >= max_model_len - 1)
    position = jnp.where(outside, 0, position + 1)
    slot = _lookup.slot_of(
        position, request, block_table_ref, num_pages=num_pages, page_size=page_size
    )
    dead = outside | (row >= num_requests)
    length = jnp.minimum(seq_len_ref[request], max_model_len - 1) + 1
    next_position_ref[request] = position
    slot_ref[row] = jnp.where(dead, PAD_SLOT, slot)
    next_seq_len_ref[request] = jnp.where(outside, 1, length)
