"""vLLM's index kernels that add rows to a step, on tensors of torch.

Source: vLLM v1/spec_decode/utils.py.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax.numpy as jnp
import torch

from jspec.axes import INT32_MAX
from jspec.pallas import expand_dflash, expand_eagle
from jspec.pallas._dispatch import check_sizes
from torch_bridge.ops.run import Arrays, page_table, run


class ExpandedInputs(NamedTuple):
    """Inputs of a drafter's first pass: R = T + B * (slots - shift) rows.

    Attributes:
      input_ids: int32 [R].
      positions: int64 [R]; 0 in rejected rows.
      is_rejected_token_mask: bool [R]; True for rows that store nothing.
      is_masked_token_mask: bool [R]; True for rows that are drafted in parallel.
      new_token_indices: int32 [B * slots] rows that drafts are read from.
      hidden_state_mapping: int32 [T] row that each target row's hidden state goes to, -1 for rows
        of no request; None without shift.
    """

    input_ids: torch.Tensor
    positions: torch.Tensor
    is_rejected_token_mask: torch.Tensor
    is_masked_token_mask: torch.Tensor
    new_token_indices: torch.Tensor
    hidden_state_mapping: torch.Tensor | None


def copy_and_expand_eagle_inputs(
    target_token_ids: torch.Tensor,
    target_positions: torch.Tensor,
    next_token_ids: torch.Tensor,
    query_start_loc: torch.Tensor,
    query_end_loc: torch.Tensor,
    padding_token_id: int,
    parallel_drafting_token_id: int,
    num_padding_slots_per_request: int,
    shift_input_ids: bool,
) -> ExpandedInputs:
    """Adds the next token and rows for drafts after the accepted rows of each request.

    Positions are computed in 32 bits; larger ones are clamped so that additions do not overflow.

    Args:
      target_token_ids: int [T] the target's rows, rejected ones included.
      target_positions: int [T]; only the first of each request is read.
      next_token_ids: int [B] the token each request continues from.
      query_start_loc: int [B + 1] first row of each request, and the end of the last.
      query_end_loc: int [B] row of each request's last accepted token.
      padding_token_id: of rejected rows.
      parallel_drafting_token_id: of rows that are drafted in parallel.
      num_padding_slots_per_request: rows for the next token and the masked ones; 1 or more.
      shift_input_ids: drop each request's first token, for drafters that read hidden states.

    Returns:
      The rows. Cells that the original leaves unwritten hold padding.

    Raises:
      TypeError, ValueError: an argument is invalid; the message names it.

    Source: vLLM v1/spec_decode/utils.py, copy_and_expand_eagle_inputs_kernel.

    Example:
      >>> rows = copy_and_expand_eagle_inputs(
      ...     torch.tensor([100, 101, 102, 103]), torch.tensor([10, 11, 12, 13]),
      ...     torch.tensor([900]), torch.tensor([0, 4]), torch.tensor([1]), 0, 7, 3, True)
      >>> rows.input_ids.tolist(), rows.new_token_indices.tolist()
      ([101, 900, 7, 7, 0, 0], [1, 2, 3])
    """
    op = "copy_and_expand_eagle_inputs"
    tensors = {
        "target_token_ids": (target_token_ids, "int T"),
        "target_positions": (target_positions, "long T"),
        "next_token_ids": (next_token_ids, "int B"),
        "query_start_loc": (query_start_loc, "int B+1"),
        "query_end_loc": (query_end_loc, "int B"),
    }
    slots, shift = num_padding_slots_per_request, bool(shift_input_ids)
    check_sizes(op, num_padding_slots_per_request=slots)
    ids, positions, rejected, masked, index, mapping = run(
        op,
        _expand_eagle,
        tensors,
        "int R, long R, bool R, bool R, int B, int T",
        rows=lambda sizes: {"R": sizes["T"] + sizes["B"] * (slots - shift)},
        num_slots=slots,
        shift=shift,
        mask_token=parallel_drafting_token_id,
        pad_token=padding_token_id,
    )
    mapping = mapping if shift else None
    return ExpandedInputs(ids, positions, rejected, masked, index.view(-1), mapping)


def _expand_eagle(arrays: Arrays, *, num_slots: int, shift: bool, **static: Any) -> tuple[Any, ...]:
    positions, num_requests = arrays["target_positions"], arrays["next_token_ids"].shape[0]
    longest = positions.shape[0] + num_requests * num_slots
    rows = expand_eagle(
        arrays["target_token_ids"],
        jnp.minimum(positions, INT32_MAX - longest),  # additions do not overflow
        arrays["next_token_ids"],
        arrays["query_start_loc"],
        arrays["query_end_loc"],
        num_slots=num_slots,
        shift=shift,
        **static,
    )
    return rows[:6]


class BlockInputs(NamedTuple):
    """Inputs of a block drafter: T context rows, B * W query rows (W = drafts + 1).

    Attributes:
      input_ids: int32 [B * W].
      context_positions: int64 [T].
      query_positions: int64 [B * W].
      context_slot_mapping: int64 [T]; rejected rows keep their slots.
      query_slot_mapping: int64 [B * W].
      token_indices: int32 [B * drafts] query rows that drafts are read from.
    """

    input_ids: torch.Tensor
    context_positions: torch.Tensor
    query_positions: torch.Tensor
    context_slot_mapping: torch.Tensor
    query_slot_mapping: torch.Tensor
    token_indices: torch.Tensor


def copy_and_expand_dflash_inputs(
    next_token_ids: torch.Tensor,
    target_positions: torch.Tensor,
    query_start_loc: torch.Tensor,
    block_table_tensor: torch.Tensor,
    num_rejected_tokens: torch.Tensor | None,
    parallel_drafting_token_id: int,
    block_size: int,
    num_speculative_tokens: int,
) -> BlockInputs:
    """Lays out a block of query rows after each request's accepted context.

    The model's limit is not applied, as in the original; past the table its last column is used,
    and a page of -1 has no slot. Positions are computed in 32 bits, as in
    `copy_and_expand_eagle_inputs`.

    Args:
      next_token_ids: int [B] the token each request continues from.
      target_positions: int [T] of the rows that the target ran, rejected ones included.
      query_start_loc: int [B + 1] first row of each request, and the end of the last.
      block_table_tensor: int [B, M] pages.
      num_rejected_tokens: int [B] rejected rows at the end of each request; None for none.
      parallel_drafting_token_id: of rows to draft.
      block_size: slots per page.
      num_speculative_tokens: drafts per request.

    Returns:
      The rows.

    Raises:
      TypeError, ValueError: an argument is invalid; the message names it.

    Source: vLLM v1/spec_decode/utils.py, copy_and_expand_dflash_inputs_kernel.

    Example:
      >>> rows = copy_and_expand_dflash_inputs(
      ...     torch.tensor([900]), torch.tensor([10, 11, 12, 13]), torch.tensor([0, 4]),
      ...     torch.tensor([[3, 8, 5, 1]]), torch.tensor([2]), 7, 4, 3)
      >>> rows.input_ids.tolist(), rows.query_slot_mapping.tolist()
      ([900, 7, 7, 7], [4, 5, 6, 7])
    """
    op = "copy_and_expand_dflash_inputs"
    tensors = {
        "next_token_ids": (next_token_ids, "int B"),
        "target_positions": (target_positions, "long T"),
        "query_start_loc": (query_start_loc, "int B+1"),
        "block_table_tensor": (block_table_tensor, "int B M"),
    }
    if num_rejected_tokens is not None:
        tensors["num_rejected_tokens"] = num_rejected_tokens, "int B"
    check_sizes(op, block_size=block_size, num_speculative_tokens=num_speculative_tokens)
    return block_rows(op, tensors, num_speculative_tokens, block_size, parallel_drafting_token_id)


def block_rows(
    op: str,
    tensors: Mapping[str, tuple[Any, str]],
    num_drafts: int,
    page_size: int,
    mask_token: int,
) -> BlockInputs:
    """Lays out blocks; `tensors` are those of `copy_and_expand_dflash_inputs`, with their forms."""
    ids, positions, slots, context, context_slots, index = run(
        op,
        _expand_dflash,
        tensors,
        "int R, long R, long R, long T, long T, int B",
        rows=lambda sizes: {"R": sizes["B"] * (num_drafts + 1)},
        num_drafts=num_drafts,
        page_size=page_size,
        mask_token=mask_token,
    )
    return BlockInputs(ids, context, positions, context_slots, slots, index.view(-1))


def _expand_dflash(arrays: Arrays, *, num_drafts: int, **static: Any) -> tuple[Any, ...]:
    return expand_dflash(
        arrays["next_token_ids"],
        jnp.minimum(arrays["target_positions"], INT32_MAX - num_drafts - 1),  # no overflow
        arrays["query_start_loc"],
        page_table(arrays),
        arrays.get("num_rejected_tokens", arrays.get("num_rejected_tokens_gpu")),
        num_drafts=num_drafts,
        **static,
    )
