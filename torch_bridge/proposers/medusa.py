"""Medusa heads, with the methods of vLLM's proposer. Source: vLLM v1/spec_decode/medusa.py."""

import functools
from collections.abc import Callable
from os import PathLike
from typing import Any

import jax
import jax.numpy as jnp
import torch

from jspec import proposers
from jspec.axes import PAD_SLOT
from jspec.state import Batch
from torch_bridge.interop.layout import Layout, int64_pairs, without_padding
from torch_bridge.proposers.device import DeviceProposer
from torch_bridge.proposers.settings import count_first, drafts_of_step


class MedusaProposer(DeviceProposer):
    """Heads on the target's last hidden state; see `DeviceProposer`."""

    methods = ("medusa",)
    has_pages = False

    @count_first
    def propose(
        self,
        target_hidden_states: torch.Tensor,
        sampling_metadata: Any = None,
        slot_mappings: Any = None,
        *,
        num_speculative_tokens: int | None = None,
    ) -> torch.Tensor:
        """Drafts the next tokens of each request, greedily, without waiting for the device.

        Args:
          target_hidden_states: float [B, D] of each request's last accepted row.
          sampling_metadata, slot_mappings: not read.
          num_speculative_tokens: K of this step, by default the configured one.

        Returns:
          int64 [B, K] drafts in memory of torch's own, one of each head.

        Raises:
          TypeError, ValueError: the hidden states are invalid. RuntimeError: no weights are loaded,
            or this process was forked.
        """
        del sampling_metadata, slot_mappings
        self._ready()
        num_drafts = drafts_of_step(
            self._owner, num_speculative_tokens, self.num_speculative_tokens
        )
        words, draft = self._pack([target_hidden_states], {"target_hidden_states": "float B D"})
        self._memory, tokens = draft(self._params, self._memory, words)
        return self._packer.take(tokens, target_hidden_states.shape[0], num_drafts)

    def load_model(self, target_model: torch.nn.Module | str | PathLike[str]) -> None:
        """Loads the heads, see `DeviceProposer.load_model`, and compiles batches of every size.

        vLLM's runner does not call `dummy_run` of this drafter.
        """
        super().load_model(target_model)
        self.warmup()

    @torch.inference_mode()
    def _run_empty(self, num_tokens: int) -> None:
        num_requests = min(num_tokens, self.settings.max_requests)
        shape = (num_requests, self._reads.hidden_size)
        self.propose(torch.zeros(shape, dtype=self._dtype(), device=self.device))

    @staticmethod
    def _make(config: Any, layout: Layout) -> Callable[..., Any]:
        @functools.partial(jax.jit, donate_argnums=1)
        def jspec_bridge_medusa(params, memory, words):
            arrays, sizes = layout.unpack(words)
            hidden = arrays["target_hidden_states"]
            request = jnp.arange(hidden.shape[0], dtype=jnp.int32)
            live, start = without_padding(jnp.arange(len(request) + 1, dtype=jnp.int32), sizes["B"])
            zeros = jnp.zeros_like(request)
            batch = Batch(
                token_ids=zeros,
                positions=zeros,  # so that no draft is cut at the longest length: the runner cuts
                query_start=start,
                seq_lens=live.astype(jnp.int32),
                block_table=jnp.full((len(request), 1), PAD_SLOT, jnp.int32),
                num_drafts=zeros,
                request_slot=jnp.where(live, request, PAD_SLOT),
                backup_token=zeros,
                discard=~live,
                hidden=hidden,
                next_token=zeros,
                last_index=request,
                num_valid=live.astype(jnp.int32),
                num_rejected=zeros,
            )
            memory, drafts = proposers.propose(config, params, memory, batch)
            return memory, int64_pairs(drafts.tokens)

        return jspec_bridge_medusa
