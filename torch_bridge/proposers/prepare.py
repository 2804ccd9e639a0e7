"""Methods that a runner calls between verification and drafting, with vLLM's signatures.

Source: vLLM v1/spec_decode/llm_base_proposer.py.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch

from torch_bridge.interop.checks import check_are_tensors
from torch_bridge.interop.metadata import HOST_LENGTHS, has_own, remade
from torch_bridge.interop.shared import on_device
from torch_bridge.ops.kernels import eagle_prepare_inputs_padded, eagle_prepare_next_token_padded


def metadata_first(method: Callable[..., Any]) -> Callable[..., Any]:
    """Lets a method take `common_attn_metadata` as first argument, which vLLM up to 0.20 passes."""

    @functools.wraps(method)
    def call(self, *args, **kwargs):
        if kwargs.pop("common_attn_metadata", None) is None and len(args) + len(kwargs) == 5:
            args = args[1:]
        return method(self, *args, **kwargs)

    return call


class NextTokens:
    """Picks next tokens, where sampled tokens are on the device."""

    @metadata_first
    def prepare_next_token_ids_padded(
        self,
        sampled_token_ids: torch.Tensor,
        requests: Mapping[str, Any],
        gpu_input_batch: Any,
        discard_request_mask: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Picks the token that each request continues from, where sampled tokens are on the device.

        A request that keeps none continues from its last known token. A leading
        `common_attn_metadata`, as in vLLM 0.20, is accepted and not read. Nothing waits for the
        device.

        Args:
          sampled_token_ids: int [B, W]; -1 after the last kept one.
          requests: by id; `get_token_id(index)` is read.
          gpu_input_batch: `num_reqs`, `req_ids`, `num_tokens_no_spec` and `vocab_size` are read.
          discard_request_mask: bool [B] or longer; True for a request whose tokens do not count.

        Returns:
          (next_token_ids, valid_sampled_tokens_count): int32 [B] each; the second is 0 where
          discarded.

        Raises:
          TypeError, ValueError: a tensor is invalid; the message names it. ValueError: a request
            was given embeddings in place of a prompt.
        """
        sampled, batch = sampled_token_ids, gpu_input_batch
        if isinstance(sampled, list):
            raise TypeError(
                "prepare_next_token_ids_padded: `sampled_token_ids` is a list, wanted a torch "
                "tensor. Lists on the host are for prepare_next_token_ids_cpu."
            )
        if not isinstance(sampled, torch.Tensor) or not sampled.ndim:
            check_are_tensors("prepare_next_token_ids_padded", sampled_token_ids=sampled)
        num_rows = sampled.shape[0]
        num_requests = min(batch.num_reqs, num_rows)
        lengths = batch.num_tokens_no_spec[:num_requests]
        backup = [
            int(requests[request_id].get_token_id(int(length) - 1))
            for request_id, length in zip(batch.req_ids[:num_requests], lengths, strict=True)
        ] + [0] * (num_rows - num_requests)
        backup = on_device(backup, sampled.device, torch.int32)
        return self._next_tokens(sampled, discard_request_mask, backup, batch.vocab_size)

    _next_tokens = staticmethod(eagle_prepare_next_token_padded)


class Preparing(NextTokens):
    """Prepares next tokens and metadata between verification and drafting.

    Nothing that the caller passes is written to: metadata comes back as a copy, of the same class.

    Attributes:
      device: of the tensors.
      max_model_len: most tokens of a request.
    """

    device: torch.device
    max_model_len: int

    def prepare_next_token_ids_cpu(
        self,
        sampled_token_ids: Sequence[Sequence[int]],
        requests: Mapping[str, Any],
        gpu_input_batch: Any,
        num_scheduled_tokens: Mapping[str, int],
    ) -> torch.Tensor:
        """Picks the token that each request continues from, where sampled tokens are on the host.

        Args:
          sampled_token_ids: kept tokens of each request; a request whose prefill is unfinished has
            none, and continues from its next prompt token.
          requests: by id; `num_computed_tokens` and `get_token_id(index)` are read.
          gpu_input_batch: `req_ids` is read, in the batch's order.
          num_scheduled_tokens: of this step, by request id.

        Returns:
          int32 [B].

        Raises:
          ValueError: a request without tokens was given embeddings in place of a prompt.
        """
        next_token_ids = []
        for index, tokens in enumerate(sampled_token_ids):
            if len(tokens):
                next_token_ids.append(int(tokens[-1]))
                continue
            request_id = gpu_input_batch.req_ids[index]
            request = requests[request_id]
            place = request.num_computed_tokens + num_scheduled_tokens[request_id]
            next_token_ids.append(int(request.get_token_id(place)))
        return on_device(next_token_ids, self.device, torch.int32)

    def prepare_inputs_padded(
        self,
        common_attn_metadata: Any,
        spec_decode_metadata: Any,
        valid_sampled_tokens_count: torch.Tensor,
    ) -> tuple[Any, torch.Tensor, torch.Tensor]:
        """Finds each request's last accepted row; rejected rows stay in the batch.

        Nothing waits for the device. A request that keeps no token has its index before its first
        row, as in vLLM; `propose` makes no drafts for it.

        Args:
          common_attn_metadata: of the target's pass.
          spec_decode_metadata: `cu_num_draft_tokens`, int [B] or longer, is read.
          valid_sampled_tokens_count: int [B] or longer, of `prepare_next_token_ids_padded`.

        Returns:
          (metadata, token_indices_to_sample, num_rejected_tokens): the same rows, lengths included;
          int32 [B] each.

        Raises:
          TypeError, ValueError: a tensor is invalid; the message names it.
        """
        cad = common_attn_metadata
        num_requests = cad.num_reqs
        starts = cad.query_start_loc_cpu[: num_requests + 1].tolist()
        index, num_rejected = eagle_prepare_inputs_padded(
            spec_decode_metadata.cu_num_draft_tokens,
            valid_sampled_tokens_count,
            cad.query_start_loc[: num_requests + 1],
        )
        metadata = remade(
            cad,
            num_actual_tokens=starts[-1],
            max_query_len=max((end - start for start, end in pairwise(starts)), default=0),
            slot_mapping=cad.slot_mapping[: starts[-1]],
            causal=True,
        )
        return metadata, index, num_rejected

    def prepare_inputs(
        self,
        common_attn_metadata: Any,
        sampled_token_ids: Sequence[Sequence[int]],
        num_draft_tokens: Sequence[int],
    ) -> tuple[Any, torch.Tensor]:
        """Removes the rows of rejected drafts from a pass.

        Computes on the host, as vLLM does: `seq_lens` is waited for where it is on a GPU.

        Args:
          common_attn_metadata: of the target's pass.
          sampled_token_ids: kept tokens of each request.
          num_draft_tokens: drafts that each request had verified; 0 means that nothing is rejected.

        Returns:
          (metadata, token_indices): of the kept rows, with the target's `max_query_len`; int64, the
          index of each kept row in the target's pass.

        Raises:
          ValueError: there is not one entry for each request, or more rows were rejected than a
            request has.
        """
        cad = common_attn_metadata
        num_requests = cad.num_reqs
        for name, values in (
            ("sampled_token_ids", sampled_token_ids),
            ("num_draft_tokens", num_draft_tokens),
        ):
            if len(values) != num_requests:
                raise ValueError(
                    f"prepare_inputs: `{name}` has {len(values)} entries, wanted {num_requests}, "
                    "as common_attn_metadata.num_reqs says. Pass one for each request."
                )
        starts = cad.query_start_loc_cpu[: num_requests + 1].tolist()
        lengths = cad.seq_lens[:num_requests].tolist()
        kept_starts, rows = [0], []
        for r, (start, end) in enumerate(pairwise(starts)):
            drafts = int(num_draft_tokens[r])
            num_rejected = drafts + 1 - len(sampled_token_ids[r]) if drafts > 0 else 0
            if not 0 <= num_rejected <= end - start:
                raise ValueError(
                    f"prepare_inputs: request {r} has {end - start} rows, {drafts} drafts and "
                    f"{len(sampled_token_ids[r])} sampled tokens, wanted at most one token more "
                    "than drafts, and a row for each draft. Pass the step's own lists."
                )
            rows.extend(range(start, end - num_rejected))
            kept_starts.append(len(rows))
            lengths[r] -= num_rejected
        kept = torch.tensor(kept_starts, dtype=torch.int32, device="cpu")
        token_indices = on_device(rows, self.device, torch.int64)
        seq_lens = torch.tensor(lengths, dtype=torch.int32, device="cpu")
        host_lengths = {name: seq_lens for name in HOST_LENGTHS if has_own(cad, name)}
        metadata = remade(
            cad,
            query_start_loc=on_device(kept_starts, self.device, torch.int32),
            query_start_loc_cpu=kept,
            seq_lens=on_device(lengths, self.device, torch.int32),
            num_actual_tokens=len(rows),
            max_seq_len=max(lengths, default=0),
            slot_mapping=cad.slot_mapping[token_indices],
            causal=True,
            **host_lengths,
        )
        return metadata, token_indices
