"""vLLM's index kernels that add no rows, on tensors of torch.

Source: vLLM v1/spec_decode/utils.py.
"""

from typing import Any

import torch

from jspec.axes import PAD_TOKEN
from jspec.metadata import PADDING_SLOT_ID
from jspec.pallas import eagle_step
from jspec.pallas._dispatch import check_sizes
from torch_bridge.interop.checks import check_tensors
from torch_bridge.interop.packing import to_int32
from torch_bridge.ops.run import Arrays, run


def eagle_step_update_slot_mapping_and_metadata(
    positions_1d: torch.Tensor,
    block_table_tensor: torch.Tensor,
    seq_lens: torch.Tensor,
    block_size: int,
    max_model_len: int,
    out_clamped_positions: torch.Tensor,
    out_slot_mapping: torch.Tensor,
    input_batch_size: int | None = None,
) -> None:
    """Advances each request by one token, in place: its position, the slot of its KV, its length.

    A request whose next position is not below `max_model_len` gets position 0, slot -1 and length
    1; if position 0 is passed to the next call, it gets real slots again, as in the original.

    Args:
      positions_1d: int [B] position of the token just drafted from; row 0 of the three for M-RoPE.
      block_table_tensor: int [B, M] pages, or more rows; it may be a view of a wider table. For
        positions past the table its last column is used.
      seq_lens: int [B] or longer; KV length before the step, overwritten with the length after it.
      block_size: slots per page.
      max_model_len: positions a request may have.
      out_clamped_positions: int [B] or longer, written; may be `positions_1d` itself.
      out_slot_mapping: int [input_batch_size] or longer, written; -1 from B on.
      input_batch_size: B with the padding of CUDA graphs; B if None.

    Raises:
      TypeError, ValueError: an argument is invalid: the message names it, and nothing is
        written.

    Source: vLLM v1/spec_decode/utils.py, of the same name.

    Example:
      >>> positions, table = torch.tensor([6, 15, 30]), torch.tensor([[4, 9, 2, 7]] * 3)
      >>> lengths, slots = positions + 1, torch.zeros(4, dtype=torch.int64)
      >>> eagle_step_update_slot_mapping_and_metadata(
      ...     positions, table, lengths, 8, 31, positions, slots, input_batch_size=4)
      >>> positions.tolist(), slots.tolist(), lengths.tolist()
      ([7, 16, 0], [39, 16, -1, -1], [8, 17, 1])
    """
    op = "eagle_step_update_slot_mapping_and_metadata"
    device, sizes = check_tensors(op, {"positions_1d": (positions_1d, "long B")})
    num_requests = sizes["B"]
    num_rows = num_requests if input_batch_size is None else input_batch_size
    check_sizes(op, num_requests, input_batch_size=num_rows)
    check_sizes(op, block_size=block_size, max_model_len=max_model_len)
    outputs = {
        "seq_lens": (seq_lens, "int B.."),
        "out_clamped_positions": (out_clamped_positions, "int B.."),
        "out_slot_mapping": (out_slot_mapping, "int R.."),
    }
    check_tensors(op, outputs, device, B=num_requests, R=num_rows)
    table = block_table_tensor
    if isinstance(table, torch.Tensor):
        table = table[:num_requests]
    position, slot, length = run(
        op,
        _eagle_step,
        {
            "positions_1d": (positions_1d, "long B"),
            "block_table_tensor": (table, "int B M"),
            "seq_lens": (seq_lens[:num_requests], "int B"),
        },
        "int B, int B, int B",
        page_size=block_size,
        max_model_len=max_model_len,
    )
    out_clamped_positions[:num_requests].copy_(position)
    out_slot_mapping[:num_requests].copy_(slot)
    out_slot_mapping[num_requests:num_rows].fill_(PADDING_SLOT_ID)
    seq_lens[:num_requests].copy_(length)


def _eagle_step(arrays: Arrays, **static: Any) -> tuple[Any, ...]:
    names = "positions_1d", "block_table_tensor", "seq_lens"
    return eagle_step(*(arrays[name] for name in names), **static)


def eagle_prepare_inputs_padded(
    cu_num_draft_tokens: torch.Tensor,
    valid_sampled_tokens_count: torch.Tensor,
    query_start_loc: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Finds each request's last accepted row, and counts the rejected rows after it.

    A request that had drafts and keeps no token (count 0) gets the row before its first, -1 for the
    first request, as in vLLM.

    Args:
      cu_num_draft_tokens: int [B] or longer; drafts verified up to and including each request.
      valid_sampled_tokens_count: int [B] or longer; tokens that each request keeps.
      query_start_loc: int [B + 1] first row of each request, and the end of the last.

    Returns:
      (token_indices_to_sample, num_rejected_tokens): int32 [B] each.

    Raises:
      TypeError, ValueError: a tensor is invalid; the message names it.

    Source: vLLM v1/spec_decode/utils.py, eagle_prepare_inputs_padded_kernel.

    Example:
      >>> eagle_prepare_inputs_padded(
      ...     torch.tensor([3, 3, 5]), torch.tensor([2, 1, 3]), torch.tensor([0, 4, 10, 13]))
      (tensor([ 1,  9, 12], dtype=torch.int32), tensor([2, 0, 0], dtype=torch.int32))
    """
    ends, counts = cu_num_draft_tokens, valid_sampled_tokens_count
    tensors = {
        "query_start_loc": (query_start_loc, "int B+1"),
        "cu_num_draft_tokens": (ends, "int B.."),
        "valid_sampled_tokens_count": (counts, "int B.."),
    }
    _, sizes = check_tensors("eagle_prepare_inputs_padded", tensors)
    with torch.inference_mode(False):  # results may be written to in every mode
        ends, counts = (to_int32(x[: sizes["B"]]) for x in (ends, counts))
        num_drafts = torch.cat([ends[:1], ends.diff()])
        num_rejected = (num_drafts + 1 - counts) * (num_drafts > 0)
        return to_int32(query_start_loc)[1:] - 1 - num_rejected, num_rejected


def eagle_prepare_next_token_padded(
    sampled_token_ids: torch.Tensor,
    discard_request_mask: torch.Tensor,
    backup_next_token_ids: torch.Tensor,
    vocab_size: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Picks the token each request continues from, and counts the tokens it keeps.

    An id counts unless it is -1 or at least `vocab_size`.

    Args:
      sampled_token_ids: int [B, W] verified tokens; -1 after the last kept one.
      discard_request_mask: bool [B] or longer; True for a request whose tokens do not count.
      backup_next_token_ids: int [B] or longer; the token of a request that keeps none.
      vocab_size: ids from here on do not count.

    Returns:
      (next_token_ids, valid_sampled_tokens_count): int32 [B] each.

    Raises:
      TypeError, ValueError: an argument is invalid; the message names it.

    Source: vLLM v1/spec_decode/utils.py, eagle_prepare_next_token_padded_kernel.

    Example:
      >>> sampled, backup = torch.tensor([[5, 7, -1], [-1, -1, -1]]), torch.tensor([70, 71])
      >>> eagle_prepare_next_token_padded(sampled, torch.tensor([False, False]), backup, 100)
      (tensor([ 7, 71], dtype=torch.int32), tensor([2, 0], dtype=torch.int32))
    """
    op, sampled = "eagle_prepare_next_token_padded", sampled_token_ids
    check_sizes(op, vocab_size=vocab_size)
    discard, backup = discard_request_mask, backup_next_token_ids
    tensors = {
        "sampled_token_ids": (sampled, "int B W"),
        "discard_request_mask": (discard, "bool B.."),
        "backup_next_token_ids": (backup, "int B.."),
    }
    _, sizes = check_tensors(op, tensors)
    B = sizes["B"]
    with torch.inference_mode(False):  # results may be written to in every mode
        valid = (sampled != PAD_TOKEN) & (sampled < vocab_size)
        valid.masked_fill_(discard[:B].unsqueeze(1), False)
        count = valid.sum(1, dtype=torch.int32)
        last = valid.cumsum(1).argmax(1)  # the first of the highest counts: the last valid column
        newest = sampled.gather(1, last.unsqueeze(1)).squeeze(1)
        return torch.where(count > 0, to_int32(newest), to_int32(backup[:B])), count
