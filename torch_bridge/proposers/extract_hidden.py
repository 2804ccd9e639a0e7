"""Storage of the target's hidden states, with the methods that vLLM's runner calls.

Source: vLLM v1/spec_decode/extract_hidden_states.py.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from os import PathLike
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch

from jspec.axes import INT32_MAX, PAD_SLOT
from jspec.models import hidden_cache
from jspec.proposers.extract_hidden import ExtractHiddenStatesConfig
from torch_bridge.interop.checks import check_are_tensors, check_has, check_tensors
from torch_bridge.interop.dlpack import to_torch
from torch_bridge.interop.layout import Layout, int64_pairs
from torch_bridge.proposers.device import DeviceProposer
from torch_bridge.proposers.prepare import NextTokens
from torch_bridge.proposers.settings import count_first


class ExtractHiddenStatesProposer(NextTokens, DeviceProposer):
    """Stores hidden states of the target by KV slot; drafts are placeholders. See `DeviceProposer`.

    Raises:
      ValueError: num_speculative_tokens is not 1, or the drafter batch is not padded.
    """

    methods = ("extract_hidden_states",)

    def __init__(self, vllm_config: Any, device: Any, runner: Any = None):
        super().__init__(vllm_config, device, runner)
        owner = self._owner
        if self.num_speculative_tokens != 1:
            raise ValueError(
                f"{owner}: num_speculative_tokens is {self.num_speculative_tokens}, wanted 1: "
                "states are stored, and the one draft is a placeholder."
            )
        flag = "speculative_config.disable_padded_drafter_batch"
        if self._read(flag, False):
            raise ValueError(
                f"{owner}: disable_padded_drafter_batch is set, and rejected rows are stored, too. "
                "Leave it out."
            )

    def load_model(self, target_model: torch.nn.Module | str | PathLike[str]) -> None:
        """Reads which layers are stored; there are no weights.

        Args:
          target_model: not read.

        Raises:
          ValueError: the draft's config.json names no layers.
        """
        del target_model
        path = "speculative_config.draft_model_config.hf_config"
        layers = _get(self._read(path), "eagle_aux_hidden_state_layer_ids")
        if not layers:
            raise ValueError(
                f"{self._owner}: `{path}` has no eagle_aux_hidden_state_layer_ids. List the layers "
                "to store there, n = after n layers of the target."
            )
        target = self._read("model_config.hf_config")
        config = ExtractHiddenStatesConfig(
            hidden_layers=tuple(layers),
            hidden_size=_get(target, "hidden_size"),
            vocab_size=_get(target, "vocab_size"),
        )
        self.set_drafter(config, None)

    @count_first
    def propose(
        self,
        sampled_token_ids: torch.Tensor,
        target_hidden_states: Sequence[torch.Tensor],
        common_attn_metadata: Any,
        slot_mappings: Any = None,
        *,
        num_speculative_tokens: int | None = None,
    ) -> torch.Tensor:
        """Stores a step's hidden states, without waiting for the device.

        Args:
          sampled_token_ids: int [B, W].
          target_hidden_states: float [T, D] of each layer.
          common_attn_metadata: `slot_mapping` is read: -1 stores nothing.
          slot_mappings, num_speculative_tokens: not read.

        Returns:
          [B, 1] the first sampled tokens, in a tensor of its own.

        Raises:
          TypeError, ValueError: a tensor is invalid; the message names it. RuntimeError:
            `load_model` was not called, or this process was forked.
        """
        del slot_mappings, num_speculative_tokens
        self._ready()
        owner, size = self._owner, self.config.hidden_size
        check_tensors(owner, {"sampled_token_ids": (sampled_token_ids, "int B W")}, self.device)
        check_has(owner, "common_attn_metadata", common_attn_metadata, "slot_mapping")
        if not isinstance(target_hidden_states, Sequence):
            raise TypeError(
                f"{owner}: `target_hidden_states` is a {type(target_hidden_states).__name__}, "
                "wanted a list of tensors, one for each stored layer. Pass it in brackets."
            )
        check_are_tensors(owner, **_by_layer(target_hidden_states))
        shapes = [tuple(states.shape) for states in target_hidden_states]
        num_rows = shapes[0][0] if shapes and shapes[0] else 0
        if shapes != [(num_rows, size)] * len(self.config.hidden_layers):
            raise ValueError(
                f"{owner}: `target_hidden_states` has shapes {shapes}, wanted "
                f"{len(self.config.hidden_layers)} of [T, {size}], one for each stored layer."
            )
        slots = common_attn_metadata.slot_mapping
        check_tensors(owner, {"slot_mapping": (slots, "int T..")}, self.device, T=num_rows)
        forms = {"slot_mapping": "long T"}
        forms |= dict.fromkeys(_by_layer(target_hidden_states), "float T D")
        words, store = self._pack([slots[:num_rows], *target_hidden_states], forms)
        # The second result, one number, makes the next step's writes wait for this one's reads.
        self._memory, done = store(self._memory, words)
        self._packer.take(done, 1, 1)
        with torch.inference_mode(False):  # writable in every mode
            return sampled_token_ids[:, :1].clone()

    @staticmethod
    def _next_tokens(
        sampled: torch.Tensor, discard: torch.Tensor, backup: torch.Tensor, vocab_size: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Picks each request's first sampled token, or the backup where it is none.

        Unlike other drafters', the count is 1 for a token of the vocabulary, of a discarded request
        as well.
        """
        tensors = {
            "sampled_token_ids": (sampled, "int B W"),
            "discard_request_mask": (discard, "bool B.."),
        }
        check_tensors("prepare_next_token_ids_padded", tensors)
        first = sampled[:, 0]
        is_token = (first >= 0) & (first < vocab_size)
        kept = is_token & ~discard[: len(first)]
        return torch.where(kept, first.to(torch.int32), backup), is_token.to(torch.int32)

    def read_hidden_states(self, block_table_row: Sequence[int], num_tokens: int) -> torch.Tensor:
        """Reads what was stored for a request's first tokens; waits for the device.

        Args:
          block_table_row: pages of the request in order.
          num_tokens: computed tokens, without rejected drafts.

        Returns:
          [n, L, D] on the host.

        Raises:
          TypeError, ValueError: the pages are no integers in one dimension.
        """
        self._ready()
        row = _page_numbers(self._owner, block_table_row)
        states = hidden_cache.read(self._memory, row, num_tokens)
        return to_torch(jax.device_put(states, jax.devices("cpu")[0]))

    @torch.inference_mode()
    def _run_empty(self, num_tokens: int) -> None:
        states = torch.zeros(
            (num_tokens, self.config.hidden_size), dtype=self._dtype(), device=self.device
        )
        slots = torch.full((num_tokens,), -1, dtype=torch.int64, device=self.device)
        metadata = type("Metadata", (), {"slot_mapping": slots})
        sampled = torch.zeros((1, 1), dtype=torch.int32, device=self.device)
        self.propose(sampled, [states] * len(self.config.hidden_layers), metadata)

    @staticmethod
    def _make(config: ExtractHiddenStatesConfig, layout: Layout) -> Callable[..., Any]:
        @functools.partial(jax.jit, donate_argnums=0)
        def jspec_bridge_store(memory, words):
            arrays, sizes = layout.unpack(words)
            slots = arrays.pop("slot_mapping")
            row = jnp.arange(slots.shape[0], dtype=jnp.int32)
            slots = jnp.where(row < sizes["T"], slots, PAD_SLOT)
            states = jnp.stack(list(arrays.values()), axis=1)
            return hidden_cache.write(memory, states, slots), int64_pairs(sizes["T"][None, None])

        return jspec_bridge_store


def _get(hf_config: Any, name: str) -> Any:
    is_mapping = isinstance(hf_config, Mapping)
    return hf_config.get(name) if is_mapping else getattr(hf_config, name, None)


def _page_numbers(owner: str, block_table_row: Sequence[int]) -> np.ndarray:
    row = np.asarray(block_table_row)
    if row.size and not np.issubdtype(row.dtype, np.integer):
        raise TypeError(
            f"{owner}: `block_table_row` is {block_table_row!r:.60}, wanted page numbers. Pass the "
            "request's row of the block table."
        )
    if row.ndim != 1:
        raise ValueError(
            f"{owner}: `block_table_row` has shape {row.shape}, wanted one dimension. Pass the row "
            "of one request."
        )
    return np.clip(row, PAD_SLOT, INT32_MAX).astype(np.int32)


def _by_layer(hidden_states: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
    return {f"target_hidden_states[{i}]": states for i, states in enumerate(hidden_states)}
