"""Drafters with a decoder of their own, with the methods that vLLM's runner calls.

A step passes one array to JAX and one back. Source: vLLM v1/spec_decode/llm_base_proposer.py.
"""

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import torch
from jaxtyping import Array, Int32

from jspec.axes import PAD_SLOT
from jspec.metadata import next_power_of_2, row_request
from jspec.state import Batch
from torch_bridge.interop.checks import check_are_tensors, check_tensors, of_metadata
from torch_bridge.interop.layout import Layout, int64_pairs, without_padding
from torch_bridge.interop.packing import to_int32
from torch_bridge.proposers import rows
from torch_bridge.proposers.device import DeviceProposer
from torch_bridge.proposers.prepare import Preparing
from torch_bridge.proposers.settings import count_first, drafts_of_step, refuse_context_parallelism
from torch_bridge.proposers.weights import target_has_axes

_TABLE = "block_table_tensor"
_FORMS = {
    "query_start_loc": "int B+1",
    "target_token_ids": "int T",
    "target_positions": "long T",
    "next_token_ids": "int B",
    "seq_lens": "int B",
    "num_rejected_tokens_gpu": "int B",
    _TABLE: "int P",
    "target_hidden_states": "float T D",
}
_FORMS_WITH_AXES = _FORMS | {"target_positions": "long T axes"}
"""The tensors of a step, as they are packed: the first one, `query_start_loc`, has the number of
requests. The table is flat, so that its width, which differs between releases of vLLM, compiles
nothing; nor does the width of integers, see `torch_bridge.interop.checks`."""


class LLMProposer(Preparing, DeviceProposer):
    """EAGLE, MTP, DFlash and draft models; see `DeviceProposer`."""

    _frames = 9

    @torch.inference_mode()
    def _run_empty(self, num_tokens: int) -> None:
        requests = min(max(num_tokens, 1), self.settings.max_requests)
        powers = [1 << i for i in range((requests - 1).bit_length() + 1)]
        nothing = torch.zeros(0, dtype=torch.int32, device=self.device)
        positions = nothing.new_zeros((0, 3) if self._takes_axes else 0, dtype=torch.int64)
        hidden = torch.zeros((0, self._reads.hidden_size), dtype=self._dtype(), device=self.device)
        step = nothing.new_zeros(1), nothing, positions, nothing, nothing, nothing, nothing
        for bucket in sorted({self._padded(power, num_tokens) for power in powers}):
            for num_drafts in self._numbers_of_drafts(bucket[0]):
                tokens = self._run(step, hidden, num_drafts, bucket)
                self._packer.take(tokens, 0, 0)  # the next step is packed into the same memory

    @count_first
    def propose(
        self,
        target_token_ids: torch.Tensor,
        target_positions: torch.Tensor,
        target_hidden_states: torch.Tensor,
        next_token_ids: torch.Tensor,
        token_indices_to_sample: torch.Tensor | None,
        common_attn_metadata: Any,
        sampling_metadata: Any = None,
        mm_embed_inputs: Any = None,
        num_rejected_tokens_gpu: torch.Tensor | None = None,
        slot_mappings: Any = None,
        *,
        num_speculative_tokens: int | None = None,
    ) -> torch.Tensor:
        """Drafts the next tokens of each request, greedily, without waiting for the device.

        No argument is written to: `common_attn_metadata.seq_lens`, which the original increments in
        place, keeps its values.

        Args:
          target_token_ids: int [T] tokens that the target ran, rejected ones included.
          target_positions: int [T], the index of each row in its request; or [3, T] of a target
            with M-RoPE, where the indices follow from `seq_lens`. A head without M-RoPE rotates by
            the first axis. Refused by drafters that add rows: draft models, DFlash and P-EAGLE.
          target_hidden_states: float [T, D'] of the same rows: of the layers that the drafter
            reads, side by side. Not read by draft models.
          next_token_ids: int [B] token that each request continues from.
          token_indices_to_sample: int [B] row of the last accepted token; None = the last row. Not
            read where `num_rejected_tokens_gpu` says the same.
          common_attn_metadata: `num_reqs`, `query_start_loc`, `seq_lens` (rejected rows included)
            and `block_table_tensor` are read.
          sampling_metadata, slot_mappings: not read.
          mm_embed_inputs: None, or a pair whose first has no embeddings: drafts come from tokens.
          num_rejected_tokens_gpu: int [B] rejected rows at the end of each request.
          num_speculative_tokens: K of this step, by default the configured one; 0 only keeps
            the drafter's KV cache current.

        Returns:
          int64 [B, K] drafts in memory of torch's own; -1 after a request's last one: where
          it would exceed `max_model_len`, and where it kept no token.

        Raises:
          TypeError, ValueError: a tensor is invalid; the message names it. NotImplementedError:
            embeddings are given, positions of three axes where rows are added, or metadata of
            decode context parallelism. RuntimeError: no weights are loaded, or this process was
            forked.
        """
        del sampling_metadata, slot_mappings
        owner = self._owner
        self._ready()
        num_drafts = drafts_of_step(owner, num_speculative_tokens, self.num_speculative_tokens)
        if mm_embed_inputs is not None and _has_embeddings(owner, mm_embed_inputs):
            raise NotImplementedError(
                f"{owner}: `mm_embed_inputs` has embeddings, which the bridge does not pass on. "
                "Pass None: drafts are then made from the tokens, as vLLM's own Llama heads do."
            )
        cad, index = common_attn_metadata, token_indices_to_sample
        if getattr(cad, "dcp_local_seq_lens", None) is not None:
            refuse_context_parallelism(owner, "common_attn_metadata.dcp_local_seq_lens")
        rejected = num_rejected_tokens_gpu
        query_start = of_metadata(owner, cad, "query_start_loc", 1)
        seq_lens, table = (of_metadata(owner, cad, name) for name in ("seq_lens", _TABLE))
        if rejected is None:
            rejected = self._num_rejected(query_start, index, next_token_ids)
        positions = target_positions
        if getattr(positions, "ndim", 1) > 1:
            positions = self._in_axes(positions)
        step = (
            *(query_start, target_token_ids, positions, next_token_ids, seq_lens),
            *(rejected, self._flat_table(table)),
        )
        tokens = self._run(step, target_hidden_states, num_drafts)
        return self._packer.take(tokens, query_start.shape[0] - 1, num_drafts)

    def take_last_draft_probs(self) -> None:
        """Returns None: drafts are greedy, which verification treats as probability 1."""
        return None

    def _run(
        self,
        step: tuple[torch.Tensor, ...],
        hidden: torch.Tensor,
        num_drafts: int,
        bucket: tuple[int, int] | None = None,
    ) -> Int32[Array, "B 2K"]:
        """Runs a step, in the order of `_FORMS`, that is padded to a bucket (requests, rows)."""
        tensors = (*step, hidden) if self._reads.hidden_layers else step
        forms = _FORMS if getattr(step[2], "ndim", 1) < 2 else _FORMS_WITH_AXES
        words, draft = self._pack(tensors, forms, (num_drafts,), bucket)
        with self._placed():
            self._memory, tokens = draft(self._params, self._memory, words)
        return tokens

    def _ready(self) -> None:
        super()._ready()
        self._memory = rows.followed(self._memory)

    def _num_rejected(
        self,
        query_start: torch.Tensor,
        index: torch.Tensor | None,
        next_token_ids: torch.Tensor,
    ) -> torch.Tensor:
        """Counts the rows after those to sample from."""
        if index is None:
            return self._packer.zeros(query_start.shape[0] - 1)
        check_tensors(
            self._owner,
            {
                "query_start_loc": (query_start, "int B+1"),
                "next_token_ids": (next_token_ids, "int B"),
                "token_indices_to_sample": (index, "int B"),
            },
            self.device,
        )
        return query_start[1:].long() - 1 - to_int32(index)

    def _flat_table(self, table: torch.Tensor) -> torch.Tensor:
        if not isinstance(table, torch.Tensor) or table.layout != torch.strided:
            check_are_tensors(self._owner, **{_TABLE: table})
        if table.ndim != 2 or not table.shape[1]:
            check_tensors(self._owner, {_TABLE: (table, "int B M")})
        return table.reshape(-1)

    def _table_width(self, columns: int) -> int:
        """Returns what a table is padded to: one width for all releases of vLLM.

        Source: vLLM v1/worker/block_table.py, get_block_table_width.
        """
        pages = -(-self.max_model_len // self.block_size)
        alignment = 128 // math.gcd(128, self.block_size)
        width = -(-pages // alignment) * alignment
        return width if columns <= width else next_power_of_2(columns)

    def _in_axes(self, positions: torch.Tensor) -> torch.Tensor:
        """Returns [3, T] positions as they are packed, [T, 3]."""
        owner = self._owner
        if positions.ndim != 2 or len(positions) != 3:
            raise ValueError(
                f"{owner}: `target_positions` has shape {tuple(positions.shape)}, "
                "wanted [T], or [3, T] with M-RoPE. Pass a position for each row of this step."
            )
        parallel = getattr(self.config, "parallel_drafting", False) and self.config.num_drafts > 1
        if parallel or self.method in ("dflash", "draft_model"):
            raise NotImplementedError(
                f"{owner}: `target_positions` has shape {tuple(positions.shape)}, three axes "
                "(M-RoPE), and this drafter adds rows to the step, which have none. Draft with a "
                "chain that reads hidden states (eagle, eagle3, mtp)."
            )
        return positions.T

    @property
    def _takes_axes(self) -> bool:
        """Whether steps have positions of three axes, by the target's config or else the head's."""
        if target_has_axes(self._read):
            return True
        model = getattr(self.config, "model", None)
        rope = getattr(getattr(model, "decoder", model), "rope", None)
        return getattr(rope, "mrope_section", None) is not None

    def _numbers_of_drafts(self, num_requests: int) -> list[int]:
        """Returns the numbers of drafts that a batch of up to `num_requests` may have to make."""
        path = "speculative_config.num_speculative_tokens_per_batch_size"
        schedule = self._read(path, ())
        asked = {count for first, _, count in schedule if first <= num_requests}
        most = self.num_speculative_tokens
        return sorted({most, *(count for count in asked if 0 <= count < most)})

    def _bucket(
        self, sizes: Mapping[str, int], asked: tuple[int, int] | None = None
    ) -> dict[str, int]:
        """Pads a step to the given (requests, rows), or else as `_padded` does."""
        num_requests, most = sizes["B"], self.settings.max_requests
        if num_requests > most:
            raise ValueError(
                f"{self._owner}: `num_reqs` is {num_requests}, wanted at most {most}. Raise "
                "max_num_seqs in the scheduler's config."
            )
        requests, rows = asked or self._padded(num_requests, sizes["T"])
        table_width = self._table_width(sizes["P"] // max(num_requests, 1))
        return {"B": requests, "T": rows, "P": requests * table_width}

    def _padded(self, num_requests: int, num_rows: int) -> tuple[int, int]:
        """Pads a step: rows to (K + 1) a request where they fit, or else to a power of two."""
        width = self.settings.num_drafts + 1
        most = next_power_of_2(self.settings.max_requests)
        requests = next_power_of_2(max(num_requests, -(-num_rows // width)))
        if requests <= most:
            return requests, requests * width
        return most, max(next_power_of_2(num_rows), most)

    @staticmethod
    def _make(config: Any, layout: Layout, num_drafts: int) -> Callable[..., Any]:
        """Makes the one executable of a bucket: unpack, prepare, draft."""

        @functools.partial(jax.jit, donate_argnums=1)
        def jspec_bridge_propose(params, memory, words):
            with jax.named_scope("unpack"):
                batch = _batch(*layout.unpack(words))
            with jax.named_scope("propose"):
                memory, drafts = rows.propose(config, params, memory, batch, num_drafts=num_drafts)
            # Always returns a result: the next step's writes wait until it is computed.
            tokens = drafts.tokens if num_drafts else jnp.zeros_like(batch.next_token)[:, None]
            return memory, int64_pairs(tokens)

        return jspec_bridge_propose


class EagleProposer(LLMProposer):
    """EAGLE, EAGLE-3, P-EAGLE and MTP heads; see `LLMProposer`.

    Source: vLLM v1/spec_decode/eagle.py.
    """

    methods = ("eagle", "eagle3", "mtp")


class DraftModelProposer(LLMProposer):
    """A small model of the same vocabulary, PARD models included; see `LLMProposer`.

    Source: vLLM v1/spec_decode/draft_model.py.
    """

    methods = ("draft_model",)


class DFlashProposer(LLMProposer):
    """DFlash and DFlash2 block drafters; see `LLMProposer`.

    Source: vLLM v1/spec_decode/dflash.py.
    """

    methods = ("dflash",)


def _has_embeddings(owner: str, mm_embed_inputs: Any) -> bool:
    try:
        return len(mm_embed_inputs[0]) > 0
    except (IndexError, TypeError) as error:
        raise TypeError(
            f"{owner}: `mm_embed_inputs` is {mm_embed_inputs!r:.60}, wanted None or a pair of "
            "embeddings and their mask. Pass None: drafts are made from the tokens."
        ) from error


def _batch(arrays: dict[str, Array], sizes: dict[str, Int32[Array, ""]]) -> Batch:
    """Makes jspec's batch of a step; entries after the actual sizes become padding values."""
    num_requests = arrays["next_token_ids"].shape[0]
    num_rows = arrays["target_token_ids"].shape[0]
    request = jnp.arange(num_requests, dtype=jnp.int32)
    live, start = without_padding(arrays["query_start_loc"], sizes["B"])
    length = jnp.diff(start)
    # A request whose rows were all rejected kept nothing: vLLM drafts from the request before.
    rejected = jnp.where(live, arrays["num_rejected_tokens_gpu"], 0)
    keeps = live & (rejected < length)
    rejected = jnp.clip(rejected, 0, jnp.maximum(length - 1, 0))
    seq_lens = jnp.where(live, arrays["seq_lens"], 0)
    positions, token_index = arrays["target_positions"], None
    if positions.ndim == 2:
        of, _ = row_request(start, num_rows)
        until_end = start.at[of + 1].get(mode="clip") - jnp.arange(num_rows, dtype=jnp.int32)
        token_index = seq_lens.at[of].get(mode="clip") - until_end
        positions = positions.T  # [T, 3] -> [3, T]
    zeros = jnp.zeros(num_requests, jnp.int32)
    width = sizes["P"] // jnp.maximum(sizes["B"], 1)
    flat_table = arrays["block_table_tensor"]
    column = jnp.arange(flat_table.shape[0] // num_requests, dtype=jnp.int32)[None]
    has_page = live[:, None] & (column < width)
    place = jnp.where(has_page, request[:, None] * width + column, PAD_SLOT)
    return Batch(
        token_ids=arrays["target_token_ids"],
        positions=positions,
        token_index=token_index,
        query_start=start,
        seq_lens=seq_lens,
        block_table=flat_table.at[place].get(
            mode="fill", fill_value=PAD_SLOT, wrap_negative_indices=False
        ),
        num_drafts=zeros,
        request_slot=jnp.where(live, request, PAD_SLOT),
        backup_token=zeros,
        discard=~live,
        hidden=arrays.get("target_hidden_states"),
        next_token=jnp.where(live, arrays["next_token_ids"], 0),
        last_index=jnp.clip(start[1:] - 1 - rejected, 0, num_rows - 1),
        num_valid=keeps.astype(jnp.int32),
        num_rejected=rejected,
    )
