"""Medusa heads, called as vLLM's runner calls them. Source: vLLM v1/spec_decode/medusa.py."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import torch

from jspec import proposers
from jspec.axes import PAD_SLOT
from jspec.metadata import next_power_of_2
from jspec.state import Batch
from torch_bridge.device import DeviceProposer
from torch_bridge.dlpack import check_not_forked
from torch_bridge.packing import Layout, int64_pairs
from torch_bridge.settings import count_first, drafts_of_step


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
          int64 [B, K] drafts of torch's own, one of each head.

        Raises:
          TypeError, ValueError: the hidden states do not fit. RuntimeError: no weights are loaded,
            or this process was forked.
        """
        del sampling_metadata, slot_mappings
        check_not_forked()
        self._ready()
        columns = drafts_of_step(
            type(self).__name__, num_speculative_tokens, self.num_speculative_tokens
        )
        wanted = self._reads.hidden_size
        is_tensor = isinstance(target_hidden_states, torch.Tensor)
        if not is_tensor or target_hidden_states.shape[1:] != (wanted,):
            got = f"of shape {tuple(target_hidden_states.shape)}" if is_tensor else "no tensor"
            raise ValueError(
                f"MedusaProposer: `target_hidden_states` is {got}, wanted [B, {wanted}], the state "
                "of each request's last accepted row after the target's final norm."
            )
        num_requests = target_hidden_states.shape[0]
        capacity = next_power_of_2(num_requests)
        layout = Layout((), (("B", capacity),))
        self._packer.follow_stream()
        hidden = self._hidden.write([target_hidden_states], capacity, "target_hidden_states")
        words = self._packer.pack(layout, {}, {"B": num_requests})
        draft = self._drafts.get(layout)
        if draft is None:
            draft = self._drafts[layout] = _compiled(self.config, layout)
        self._memory, tokens = draft(self._params, self._memory, words, hidden)
        drafts = self._packer.take(tokens, num_requests)
        return drafts if columns == drafts.shape[1] else drafts[:, :columns].contiguous()

    @torch.inference_mode()
    def dummy_run(self, num_tokens: int, *args: Any, **kwargs: Any) -> None:
        """Compiles what steps of so many requests run.

        Args:
          num_tokens: most requests, at most `max_num_seqs` count.
          *args, **kwargs: not used.
        """
        del args, kwargs
        if not self._can_compile:
            return
        num_requests = min(num_tokens, self.settings.max_requests)
        shape = (num_requests, self._reads.hidden_size)
        self.propose(torch.zeros(shape, dtype=self._dtype(), device=self.device))


def _compiled(config: Any, layout: Layout) -> Any:
    @functools.partial(jax.jit, donate_argnums=1)
    def jspec_bridge_medusa(params, memory, words, hidden):
        _, sizes = layout.unpack(words)
        request = jnp.arange(hidden.shape[0], dtype=jnp.int32)
        live = request < sizes["B"]
        zeros = jnp.zeros_like(request)
        batch = Batch(
            token_ids=zeros,
            positions=zeros,  # so that no draft lies at the longest length: the runner cuts there
            query_start=jnp.minimum(jnp.arange(len(request) + 1, dtype=jnp.int32), sizes["B"]),
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
