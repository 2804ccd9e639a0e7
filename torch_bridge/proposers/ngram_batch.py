"""What a runner does around `NgramProposerGPU`: histories follow the batch, drafts are counted.

The functions take vLLM's own objects, read and written by attribute. Source: vLLM
v1/spec_decode/ngram_proposer_gpu.py.
"""

from collections.abc import Iterable
from typing import Any

import torch

from torch_bridge.interop.shared import on_device


def update_scheduler_for_invalid_drafts(
    num_valid_draft_tokens_event: Any,
    num_valid_draft_tokens_cpu: torch.Tensor,
    scheduler_output: Any,
    req_id_to_index: dict[str, int],
) -> None:
    """Takes the drafts that do not exist out of a scheduled step.

    A request that keeps none loses its entry. One without index or without drafts stays as it is.

    Args:
      num_valid_draft_tokens_event: waited for; None where nothing was queued.
      num_valid_draft_tokens_cpu: int [B] drafts that exist, by row.
      scheduler_output: `scheduled_cached_reqs.req_ids` is read; `scheduled_spec_decode_tokens`,
        `num_scheduled_tokens` and `total_num_scheduled_tokens` are rewritten.
      req_id_to_index: row of each request.

    Source: vLLM v1/spec_decode/ngram_proposer_gpu.py, update_scheduler_for_invalid_drafts.
    """
    if num_valid_draft_tokens_event is not None:
        num_valid_draft_tokens_event.synchronize()
    num_valid = num_valid_draft_tokens_cpu.tolist()
    scheduled = scheduler_output.scheduled_spec_decode_tokens
    for req_id in scheduler_output.scheduled_cached_reqs.req_ids:
        index, drafts = req_id_to_index.get(req_id), scheduled.get(req_id)
        if index is None or drafts is None:
            continue
        kept = max(0, min(num_valid[index], len(drafts)))
        scheduler_output.total_num_scheduled_tokens -= len(drafts) - kept
        scheduler_output.num_scheduled_tokens[req_id] -= len(drafts) - kept
        if kept:
            scheduled[req_id] = drafts[:kept]
        else:
            del scheduled[req_id]


def update_ngram_gpu_tensors_incremental(
    input_batch: Any,
    token_ids_gpu_tensor: torch.Tensor,
    num_tokens_no_spec_gpu: torch.Tensor,
    new_reqs: Iterable[Any],
    device: Any = None,
    _pinned_idx_buf: torch.Tensor | None = None,
    _pinned_val_buf: torch.Tensor | None = None,
) -> None:
    """Lets histories on the device follow a batch that was reordered.

    A continuing request takes its row along from where it was on the device; a new or resumed one
    gets its known tokens from the host, and so do all in the first call. Lengths always come from
    the host. Queued on the caller's stream; nothing waits for it.

    Args:
      input_batch: `req_id_to_index`, `prev_req_id_to_index` (None = first call),
        `num_tokens_no_spec` and `token_ids_cpu_tensor` are read.
      token_ids_gpu_tensor: int32 [R, S] known tokens, rewritten.
      num_tokens_no_spec_gpu: int32 [R] lengths, rewritten.
      new_reqs: new and resumed requests, of which `req_id` is read.
      device: not used: the tensors have one.
      _pinned_idx_buf, _pinned_val_buf: not used: a second call could write to them before the
        copies of the first are done.

    Source: vLLM v1/spec_decode/ngram_proposer_gpu.py, update_ngram_gpu_tensors_incremental.
    """
    del device, _pinned_idx_buf, _pinned_val_buf
    before, now = input_batch.prev_req_id_to_index, input_batch.req_id_to_index
    if not now:
        return
    device, lengths = token_ids_gpu_tensor.device, input_batch.num_tokens_no_spec
    fresh, moves = set(now), []
    if before is not None:
        fresh = {request.req_id for request in new_reqs} & fresh
        moves = [(before.get(r, i), i) for r, i in now.items() if r not in fresh]
        moves = [move for move in moves if move[0] != move[1]]
    # In inference mode, tensors of both kinds may be written to.
    with torch.inference_mode():
        if moves:
            source, target = on_device(list(zip(*moves, strict=True)), device, torch.long)
            # All rows are read before any is written: moves may form cycles.
            token_ids_gpu_tensor.index_copy_(
                0, target, token_ids_gpu_tensor.index_select(0, source)
            )
        for index in (now[req_id] for req_id in fresh):
            num_tokens = int(lengths[index])
            token_ids_gpu_tensor[index, :num_tokens].copy_(
                input_batch.token_ids_cpu_tensor[index, :num_tokens], non_blocking=True
            )
        active = list(now.values())
        index, length = on_device([active, [int(lengths[i]) for i in active]], device, torch.long)
        num_tokens_no_spec_gpu.index_copy_(0, index, length.to(num_tokens_no_spec_gpu.dtype))


def copy_num_valid_draft_tokens(
    num_valid_draft_tokens_cpu: torch.Tensor,
    num_valid_draft_tokens_copy_stream: Any,
    num_valid_draft_tokens_event: Any,
    num_valid_draft_tokens: torch.Tensor | None,
    batch_size: int,
) -> None:
    """Copies the numbers of drafts to the host, on a stream of their own.

    Args:
      num_valid_draft_tokens_cpu: int32 [R] pinned, rewritten up to the batch's size.
      num_valid_draft_tokens_copy_stream: waits for the current stream; None on a CPU.
      num_valid_draft_tokens_event: recorded after the copy; None on a CPU.
      num_valid_draft_tokens: int32 [B] of `NgramProposerGPU.propose`; None does nothing.
      batch_size: requests in the batch.

    Source: vLLM v1/spec_decode/ngram_proposer_gpu.py, copy_num_valid_draft_tokens.
    """
    if num_valid_draft_tokens is None:
        return
    size = min(batch_size, num_valid_draft_tokens.shape[0])
    if size <= 0:
        return
    target, source = num_valid_draft_tokens_cpu[:size], num_valid_draft_tokens[:size]
    if not source.is_cuda:
        target.copy_(source)
        return
    stream = num_valid_draft_tokens_copy_stream
    stream.wait_stream(torch.cuda.current_stream(source.device))
    with torch.cuda.stream(stream):
        target.copy_(source, non_blocking=True)
        num_valid_draft_tokens_event.record()
    num_valid_draft_tokens.record_stream(stream)  # its memory is not reused before
