"""N-gram lookup for PyTorch runners: on the device here, on the host in `ngram_host`.

Source: vLLM v1/spec_decode/ngram_proposer_gpu.py.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import torch

from jspec.axes import PAD_TOKEN
from jspec.metadata import next_power_of_2
from jspec.pallas import ngram_match
from torch_bridge.interop.checks import check_tensors
from torch_bridge.interop.dlpack import check_not_forked, check_preallocation, placement
from torch_bridge.interop.layout import Layout, layout_of
from torch_bridge.interop.packing import Packer, Plan
from torch_bridge.interop.shared import alias, empty, on_device, torch_device
from torch_bridge.proposers.ngram_batch import (
    copy_num_valid_draft_tokens,
    update_ngram_gpu_tensors_incremental,
    update_scheduler_for_invalid_drafts,
)
from torch_bridge.proposers.ngram_host import NgramProposer, lookup_bounds
from torch_bridge.proposers.settings import Settings, count_first, drafts_of_step

__all__ = [
    "NgramProposer",
    "NgramProposerGPU",
    "copy_num_valid_draft_tokens",
    "update_ngram_gpu_tensors_incremental",
    "update_scheduler_for_invalid_drafts",
]


class NgramProposerGPU:
    """Drafts the same on the device, from histories that never leave it.

    Unlike `jspec`'s drafter, and as the original, it does not end at `max_model_len`: near the
    limit, a runner takes no drafts. Construction compiles for every size of a batch, with as much
    memory as a table of histories has.

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
        owner = type(self).__name__
        settings = Settings.of(vllm_config, owner)
        self.vllm_config = vllm_config
        self.k, self.max_model_len = settings.num_drafts, settings.max_model_len
        self.max_num_seqs = settings.max_requests
        self.min_n, self.max_n = lookup_bounds(vllm_config, settings, owner)
        self.device = torch_device(device, owner)
        check_preallocation(self.device)
        self._packer = Packer(self.device, owner)
        self._placed = placement(self._packer.device)
        self._copy = empty((0, 0), torch.int32, self.device)
        self._shared: dict[int, jax.Array] = {}
        self._shared_key: Any = None
        self._warm_up()

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """Does nothing: there are no weights."""

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
        copy. The table is kept until a call with another one. What is larger than the configuration
        says, rows or columns, compiles at its first step.

        Args:
          num_tokens_no_spec: int [B] known tokens of each row before this step; not changed.
          token_ids_gpu: int32 [B, S] known tokens, rewritten; what lies after them is not read.
          valid_sampled_token_ids_gpu: int [B, W] sampled tokens; a PAD leaves its cell as it was,
            and what would land outside of its row is dropped.
          valid_sampled_tokens_count: int [B] columns of it that count; 0 drafts nothing.
          num_speculative_tokens: K of this step, by default the configured one.

        Returns:
          (drafts, num_valid): int32 [B, K] and [B] of torch's own; PAD where there is no draft,
          and how many drafts lead up to the first PAD.

        Raises:
          TypeError, ValueError: an argument is refused by name. RuntimeError: this process was
            forked.

        Source: vLLM v1/spec_decode/ngram_proposer_gpu.py, NgramProposerGPU.propose.
        """
        check_not_forked()
        columns = drafts_of_step(type(self).__name__, num_speculative_tokens, self.k)
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
            nothing = torch.empty((0, columns), dtype=torch.int32, device=self.device)
            return nothing, nothing.new_empty(0)
        self._packer.follow_stream()
        with torch.inference_mode():  # in which tensors of both kinds may be written to
            _append(table, num_tokens, sampled, count)
            histories = self._table(table, self._bucket(B))
        rows = histories.shape[0]

        def plan() -> tuple[Plan, Any]:
            packed = {"num_tokens": (num_tokens, "int B"), "count": (count, "int B")}
            layout = layout_of(packed, {"B": rows})
            planned = self._packer.plan(layout, {n: x for n, (x, _) in packed.items()}, sizes)
            return planned, _compiled(layout, self.min_n, self.max_n, self.k)

        words, match = self._packer.pack_planned(rows, [num_tokens, count], plan)
        with self._placed():
            found = match(histories, words)
        # One copy: the drafts of all rows, then the counts.
        both = self._packer.own(found, rows * self.k + B, torch.int32)
        drafts, num_valid = both[: B * self.k].view(B, self.k), both[rows * self.k :]
        if columns < self.k:
            return drafts[:, :columns].contiguous(), num_valid.clamp_(max=columns)
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

        Valid tokens are taken to be packed left: with a hole the token at column `count - 1` is
        returned, whatever it is. Nothing waits for the device.

        In: sampled [[9 1000 3 -1]], vocab_size 100. Out: next_token [1000], count [2].

        Args:
          sampled_token_ids: int [B, W] with PAD where there is none, or a list for each request.
          gpu_input_batch: `num_reqs` (B) and `vocab_size`, from which on ids are invalid, are read.
          token_ids_gpu: int32 [at least B, S] known tokens.
          num_tokens_no_spec: int [at least B] known tokens of each row; the last of them serves a
            row without valid token.
          discard_request_mask: bool [at least B] rows whose sampled tokens must not count.

        Returns:
          (next_token, count, sampled): [B], int32 [B] and [B, W]; the last with discarded rows set
          to PAD.

        Raises:
          TypeError, ValueError: an argument is refused by name.

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

    def _bucket(self, num_requests: int) -> int:
        rows = next_power_of_2(num_requests)
        return rows if num_requests > self.max_num_seqs else min(rows, self.max_num_seqs)

    def _table(self, token_ids: torch.Tensor, rows: int) -> jax.Array:
        """Hands the histories to JAX, with the memory after them up to so many rows."""
        B, width = token_ids.shape
        num_tokens = token_ids.untyped_storage().nbytes() // 4 - token_ids.storage_offset()
        # JAX wants 64 bytes of alignment on a CPU, XLA 16 on a GPU.
        aligned = token_ids.is_contiguous() and token_ids.data_ptr() % 64 == 0
        wanted = max(width, self.max_model_len)
        if not aligned or num_tokens < rows * width or width < wanted:
            if self._copy.shape[0] < rows or self._copy.shape[1] != wanted:
                self._copy = empty((rows, wanted), torch.int32, self.device)
            self._copy[:B, :width].copy_(token_ids)
            token_ids, width = self._copy, wanted
        key = token_ids.data_ptr(), width
        if key != self._shared_key:  # the memory of an address that JAX holds is not given away
            self._shared, self._shared_key = {}, key
        if rows not in self._shared:
            self._shared[rows] = alias(token_ids.as_strided((rows, width), (width, 1)))
        return self._shared[rows]

    def _warm_up(self) -> None:
        """Compiles what steps of all sizes run: as many executables as a size has bits."""
        most = self.max_num_seqs
        table = empty((most, self.max_model_len), torch.int32, self.device)
        zeros = torch.zeros(most, dtype=torch.int32, device=self.device)
        nothing = zeros.unsqueeze(1).expand(most, self.k + 1)
        for rows in {min(1 << i, most) for i in range(most.bit_length() + 1)}:
            self.propose(zeros[:rows], table[:rows], nothing[:rows], zeros[:rows])
        self._shared, self._shared_key = {}, None


_INT64_MAX = 2**63 - 1


def _append(
    token_ids: torch.Tensor, num_tokens: torch.Tensor, sampled: torch.Tensor, count: torch.Tensor
) -> None:
    """Writes sampled tokens after the known ones of each row, in place."""
    last = token_ids.shape[1] - 1
    # A negative length becomes a place far after the end of the row.
    start = (num_tokens.long() & _INT64_MAX).unsqueeze(1)
    # Columns beyond the end of a row repeat the one that lands on its last cell: of writes to one
    # cell, a device may keep any.
    column = torch.arange(sampled.shape[1], device=sampled.device)
    column = column.minimum((last - start).clamp_(min=0))  # [B, W]
    place = start + column
    token = sampled.gather(1, column)
    kept = (column < count.unsqueeze(1)) & (token != PAD_TOKEN) & (place <= last)
    place.clamp_(max=last)
    token = torch.where(kept, token.to(torch.int32), token_ids.gather(1, place))
    token_ids.scatter_(1, place, token)


@functools.lru_cache(maxsize=256)
def _compiled(layout: Layout, min_n: int, max_n: int, num_drafts: int) -> Any:
    """Makes the one executable of a size, which all drafters of a process share."""

    @jax.jit
    def jspec_bridge_ngram(token_ids, words):
        arrays, sizes = layout.unpack(words)
        lengths = arrays["num_tokens"] + arrays["count"]
        is_live = jnp.arange(lengths.shape[0], dtype=jnp.int32) < sizes["B"]
        drafts, num_valid = ngram_match(
            token_ids,
            lengths,
            is_live & (arrays["count"] > 0),
            min_n=min_n,
            max_n=max_n,
            num_drafts=num_drafts,
        )
        return jnp.concatenate([drafts.reshape(-1), num_valid])

    return jspec_bridge_ngram
