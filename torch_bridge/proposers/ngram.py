"""N-gram lookup on the device, and functions that a runner calls with it; see also `ngram_host`.

The functions read and write attributes of vLLM's objects. Source: vLLM
v1/spec_decode/ngram_proposer_gpu.py.
"""

from collections.abc import Iterable
from typing import Any

import jax
import torch

from jspec.axes import PAD_TOKEN
from jspec.metadata import next_power_of_2
from jspec.pallas import ngram_match
from torch_bridge.interop.checks import check_tensors
from torch_bridge.interop.dlpack import check_not_forked, check_preallocation, jax_device
from torch_bridge.interop.shared import alias, empty, on_device, torch_device
from torch_bridge.ops.run import Arrays, packer_of, run
from torch_bridge.proposers.ngram_host import Lookup, NgramProposer
from torch_bridge.proposers.settings import count_first, drafts_of_step

__all__ = [
    "NgramProposer",
    "NgramProposerGPU",
    "copy_num_valid_draft_tokens",
    "update_ngram_gpu_tensors_incremental",
    "update_scheduler_for_invalid_drafts",
]


class NgramProposerGPU(Lookup):
    """Drafts what `NgramProposer` does on the device, from histories that stay there.

    Unlike `jspec`'s drafter, and like the original, it does not stop at `max_model_len`: near the
    limit a runner uses no drafts. Construction compiles for every size of a batch, on a
    temporary table of histories.

    Args:
      vllm_config: read by attribute, as by `NgramProposer`, and `scheduler_config.max_num_seqs`.
      device: of the tensors that `propose` gets and returns.
      runner: not used; the argument is there for vLLM's signature.

    Attributes:
      min_n: shortest suffix that may match, in tokens.
      max_n: longest suffix that is compared, in tokens.
      k: most drafts a request gets.
      max_model_len: most tokens of a request.
      max_num_seqs: requests of a step that construction compiles for.
      device: of the tensors.

    Raises:
      ValueError: the configuration lacks something. RuntimeError: JAX has no such device, or this
        process was forked from one that ran JAX.
    """

    def __init__(self, vllm_config: Any, device: Any, runner: Any = None):
        del runner
        super().__init__(vllm_config)
        owner = type(self).__name__
        self.vllm_config = vllm_config
        self.max_num_seqs = self.settings.max_requests
        self.device = torch_device(device, owner)
        check_preallocation(self.device)
        jax_device(self.device)  # raises where there is none
        self._copy = empty((0, 0), torch.int32, self.device)
        self._shared: dict[int, jax.Array] = {}
        self._shared_key: Any = None
        self._warm_up()

    @count_first
    def propose(
        self,
        num_tokens_no_spec: torch.Tensor,
        token_ids_gpu: torch.Tensor,
        valid_sampled_token_ids_gpu: torch.Tensor,
        valid_sampled_tokens_count: torch.Tensor,
        *,
        num_speculative_tokens: int | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Writes the sampled tokens into the histories and drafts, without waiting for the device.

        JAX reads the histories where they are if they begin a contiguous table of at least
        `max_num_seqs` rows, of which they may be a slice, and of `max_model_len` columns; or else a
        copy. The table is referenced until a call with another one. More rows or columns than the
        configuration says compile at their first step.

        Args:
          num_tokens_no_spec: int [B] known tokens of each row before this step; not changed.
          token_ids_gpu: int32 [B, S] known tokens, rewritten; what lies after them is not read.
          valid_sampled_token_ids_gpu: int [B, W] sampled tokens; a PAD leaves its cell as it was,
            and tokens past the end of a row are dropped.
          valid_sampled_tokens_count: int [B] number of its valid columns; 0 drafts nothing.
          num_speculative_tokens: K of this step, by default the configured one.

        Returns:
          (drafts, num_valid): int32 [B, K] and [B] of torch's own; PAD where there is no draft,
          and how many drafts lead up to the first PAD.

        Raises:
          TypeError, ValueError: an argument is invalid; the message names it. RuntimeError: this
            process was forked.

        Source: vLLM v1/spec_decode/ngram_proposer_gpu.py, NgramProposerGPU.propose.
        """
        check_not_forked()
        num_drafts = drafts_of_step(type(self).__name__, num_speculative_tokens, self.k)
        table, num_tokens = token_ids_gpu, num_tokens_no_spec
        sampled, count = valid_sampled_token_ids_gpu, valid_sampled_tokens_count
        given = {
            "num_tokens_no_spec": (num_tokens, "int B"),
            "token_ids_gpu": (table, "int32 B S"),
            "valid_sampled_token_ids_gpu": (sampled, "int B W"),
            "valid_sampled_tokens_count": (count, "int B"),
        }
        _, sizes = check_tensors(type(self).__name__, given, self.device)
        B = sizes["B"]
        if B == 0:
            nothing = torch.empty((0, num_drafts), dtype=torch.int32, device=self.device)
            return nothing, nothing.new_empty(0)
        packer_of(self.device).follow_stream()
        with torch.inference_mode():  # inference tensors and others may be written to
            _append(table, num_tokens, sampled, count)
            most = self.max_num_seqs if B <= self.max_num_seqs else next_power_of_2(B)
            histories = self._table(table, min(next_power_of_2(B), most))
        drafts, num_valid = run(
            "ngram",
            _match,
            {"num_tokens": (num_tokens, "int B"), "count": (count, "int B")},
            "int B, int B",
            histories,
            bucket=lambda _: {"B": histories.shape[0]},
            min_n=self.min_n,
            max_n=self.max_n,
            num_drafts=self.k,
        )
        if num_drafts < self.k:
            return drafts[:, :num_drafts].contiguous(), num_valid.clamp_(max=num_drafts)
        return drafts, num_valid

    def update_token_ids_ngram(
        self,
        sampled_token_ids: torch.Tensor | list[list[int]],
        gpu_input_batch: Any,
        token_ids_gpu: torch.Tensor,
        num_tokens_no_spec: torch.Tensor,
        discard_request_mask: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Counts the valid sampled tokens of each row and picks the one it continues from.

        Valid tokens are assumed to be left-aligned: the token at column `count - 1` is returned,
        also where an invalid one is before it. Nothing waits for the device.

        In: sampled [[9 1000 3 -1]], vocab_size 100. Out: next_token [1000], count [2].

        Args:
          sampled_token_ids: int [B, W] with PAD where there is none, or a list for each request.
          gpu_input_batch: `num_reqs` (B) and `vocab_size`, from which on ids are invalid, are read.
          token_ids_gpu: int32 [at least B, S] known tokens.
          num_tokens_no_spec: int [at least B] known tokens of each row; a row without a valid
            token continues from the last of them.
          discard_request_mask: bool [at least B] rows whose sampled tokens must not count.

        Returns:
          (next_token, count, sampled): [B], int32 [B] and [B, W]; the last with discarded rows set
          to PAD.

        Raises:
          TypeError, ValueError: an argument is invalid; the message names it.

        Source: vLLM v1/spec_decode/ngram_proposer_gpu.py, NgramProposerGPU.update_token_ids_ngram.
        """
        B = gpu_input_batch.num_reqs
        if isinstance(sampled_token_ids, list):
            width = max(1, *map(len, sampled_token_ids)) if sampled_token_ids else 1
            padded = [[*row, *[PAD_TOKEN] * (width - len(row))] for row in sampled_token_ids]
            sampled = on_device(padded, self.device, torch.int32).reshape(-1, width)
        else:
            sampled = sampled_token_ids
        given = {
            "sampled_token_ids": (sampled, "int B W"),
            "token_ids_gpu": (token_ids_gpu, "int32 B.. S"),
            "num_tokens_no_spec": (num_tokens_no_spec, "int B.."),
            "discard_request_mask": (discard_request_mask, "bool B.."),
        }
        check_tensors(type(self).__name__, given, self.device, B=B)
        sampled = sampled.masked_fill(discard_request_mask[:B].unsqueeze(1), PAD_TOKEN)
        valid = (sampled != PAD_TOKEN) & (sampled < gpu_input_batch.vocab_size)
        count = valid.sum(1, dtype=torch.int32)
        newest = sampled.gather(1, (count.long() - 1).clamp_(min=0).unsqueeze(1)).squeeze(1)
        place = (num_tokens_no_spec[:B].long() - 1).clamp_(0, token_ids_gpu.shape[1] - 1)
        backup = token_ids_gpu[:B].gather(1, place.unsqueeze(1)).squeeze(1)
        return torch.where(count > 0, newest, backup), count, sampled

    def _table(self, token_ids: torch.Tensor, rows: int) -> jax.Array:
        """Passes the histories to JAX, with the memory after them up to `rows` rows."""
        B, width = token_ids.shape
        num_tokens = token_ids.untyped_storage().nbytes() // 4 - token_ids.storage_offset()
        # JAX needs 64 bytes of alignment on a CPU, XLA 16 on a GPU.
        aligned = token_ids.is_contiguous() and token_ids.data_ptr() % 64 == 0
        wanted = max(width, self.max_model_len)
        if not aligned or num_tokens < rows * width or width < wanted:
            if self._copy.shape[0] < rows or self._copy.shape[1] != wanted:
                self._copy = empty((rows, wanted), torch.int32, self.device)
            self._copy[:B, :width].copy_(token_ids)
            token_ids, width = self._copy, wanted
        key = token_ids.data_ptr(), width
        if key != self._shared_key:  # the arrays hold their memory, so its address is not reused
            self._shared, self._shared_key = {}, key
        if rows not in self._shared:
            self._shared[rows] = alias(token_ids.as_strided((rows, width), (width, 1)))
        return self._shared[rows]

    def _warm_up(self) -> None:
        """Compiles steps of all sizes: powers of two of rows."""
        most = self.max_num_seqs
        table = empty((most, self.max_model_len), torch.int32, self.device)
        zeros = torch.zeros(most, dtype=torch.int32, device=self.device)
        nothing = zeros.unsqueeze(1).expand(most, self.k + 1)
        for rows in {min(1 << i, most) for i in range(most.bit_length() + 1)}:
            self.propose(zeros[:rows], table[:rows], nothing[:rows], zeros[:rows])
        self._shared, self._shared_key = {}, None


def _append(
    token_ids: torch.Tensor, num_tokens: torch.Tensor, sampled: torch.Tensor, count: torch.Tensor
) -> None:
    """Writes sampled tokens after the known ones of each row, in place."""
    last = token_ids.shape[1] - 1
    # A negative length becomes a place far after the end of the row.
    start = (num_tokens.long() & (2**63 - 1)).unsqueeze(1)
    # Columns past the end of a row repeat the one for its last cell: of several writes to a cell,
    # a device may keep any.
    column = torch.arange(sampled.shape[1], device=sampled.device)
    column = column.minimum((last - start).clamp_(min=0))  # [B, W]
    place = start + column
    token = sampled.gather(1, column)
    kept = (column < count.unsqueeze(1)) & (token != PAD_TOKEN) & (place <= last)
    place.clamp_(max=last)
    token = torch.where(kept, token.to(torch.int32), token_ids.gather(1, place))
    token_ids.scatter_(1, place, token)


def _match(arrays: Arrays, token_ids: jax.Array, **static: Any) -> tuple[jax.Array, jax.Array]:
    count = arrays["count"]
    drafts_of = arrays["live"] & (count > 0)
    return ngram_match(token_ids, arrays["num_tokens"] + count, drafts_of, **static)


def update_scheduler_for_invalid_drafts(
    num_valid_draft_tokens_event: Any,
    num_valid_draft_tokens_cpu: torch.Tensor,
    scheduler_output: Any,
    req_id_to_index: dict[str, int],
) -> None:
    """Removes invalid drafts from a scheduled step.

    The entry of a request without valid drafts is deleted. A request without index or without
    drafts stays as it is.

    Args:
      num_valid_draft_tokens_event: waited for; None where nothing was queued.
      num_valid_draft_tokens_cpu: int [B] number of valid drafts, by row.
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
    """Reorders histories on the device after the batch was reordered.

    The row of a continuing request is moved on the device; a new or resumed one
    gets its known tokens from the host, and so do all in the first call. Lengths are always
    copied from the host. Everything is queued on the caller's stream, without a wait.

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
    # In inference mode, inference tensors and others may be written to.
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
    """Copies the numbers of drafts to the host on a separate stream.

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
    # So that its memory is not reused before the copy is done.
    num_valid_draft_tokens.record_stream(stream)
