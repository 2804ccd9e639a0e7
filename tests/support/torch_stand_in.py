"""Stands in for vLLM's GPUModelRunner: its calls to a drafter, in its order, with its types.

Read off vllm/v1/worker/gpu_model_runner.py of 0.20.0 and 0.33.0. What the target does comes from
jspec's own loop (`StandInEngine`); the runner takes its results and gives drafts back.
"""

import importlib
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, Literal

import jax
import numpy as np
import torch

import torch_bridge
from jspec.axes import PAD_SLOT, PAD_TOKEN
from jspec.runtime.decode import Engine
from jspec.state import Drafts
from tests.support.torch_batch import InputBatch, TargetStep
from tests.support.torch_runner import CommonAttentionMetadata, Request, common_attn_metadata

Release = Literal["0.20", "0.33"]


def ours(name: str) -> type:
    """Finds a proposer class of jspec's by name."""
    return getattr(torch_bridge, name)


class StandInRunner:
    """Owns a drafter and calls it.

    Args:
      vllm_config: of `tests.support.torch_runner.vllm_config`.
      device: of all tensors.
      vocab_size: of the target.
      look_up: finds a proposer class by name.
      release: of vLLM; 0.33 hands the number of drafts over in front.
    """

    def __init__(
        self,
        vllm_config: Any,
        device: torch.device,
        vocab_size: int,
        *,
        look_up: Callable[[str], type] = ours,
        release: Release = "0.20",
    ):
        self.vllm_config, self.device, self.release = vllm_config, device, release
        self.look_up = look_up
        self.speculative_config = vllm_config.speculative_config
        self.method = vllm_config.speculative_config.method
        self.num_spec_tokens = vllm_config.speculative_config.num_speculative_tokens
        self.max_model_len = vllm_config.model_config.max_model_len
        self.max_num_reqs = vllm_config.scheduler_config.max_num_seqs
        self.input_batch = InputBatch(self.max_num_reqs, self.max_model_len, vocab_size)
        self.use_aux_hidden_state_outputs = False
        self.drafter = self._make_drafter()

    def _make_drafter(self) -> Any:
        config, device, cls = self.vllm_config, self.device, self.look_up
        match self.method:
            case "custom_class":
                module, name = self.speculative_config.model.rsplit(".", 1)
                return getattr(importlib.import_module(module), name)(config)
            case "ngram":
                return cls("NgramProposer")(config)
            case "draft_model":
                return cls("DraftModelProposer")(vllm_config=config, device=device, runner=self)
            case "ngram_gpu":
                shape = self.max_num_reqs, self.max_model_len
                self.num_tokens_no_spec_gpu = torch.zeros(
                    shape[0], dtype=torch.int32, device=device
                )
                self.token_ids_gpu_tensor = torch.zeros(shape, dtype=torch.int32, device=device)
                self.num_valid_cpu = torch.zeros(shape[0], dtype=torch.int32)
                return cls("NgramProposerGPU")(config, device, self)
            case "dflash":
                self.use_aux_hidden_state_outputs = True
                return cls("DFlashProposer")(config, device, self)
            case "suffix":
                return cls("SuffixDecodingProposer")(config)
            case "eagle" | "eagle3" | "mtp":
                drafter = cls("EagleProposer")(config, device, self)
                if self.method == "eagle3":
                    self.use_aux_hidden_state_outputs = drafter.eagle3_use_aux_hidden_state
                return drafter
            case "medusa":
                return cls("MedusaProposer")(vllm_config=config, device=device)
            case "extract_hidden_states":
                self.use_aux_hidden_state_outputs = True
                return cls("ExtractHiddenStatesProposer")(vllm_config=config, device=device)
        raise ValueError(self.method)

    @property
    def runs_a_model(self) -> bool:
        return self.method in ("eagle", "eagle3", "mtp", "dflash", "draft_model")

    @property
    def uses_gpu_tokens(self) -> bool:
        """Whether drafts are made before the sampled tokens are on the host."""
        if self.method == "ngram_gpu":
            return True
        padded = not getattr(self.speculative_config, "disable_padded_drafter_batch", False)
        return padded and (self.runs_a_model or self.method == "extract_hidden_states")

    def start(
        self,
        target: torch.nn.Module,
        kv_cache_config: Any,
        kernel_block_sizes: list[int],
        capture_sizes: tuple[int, ...] = (16, 1),
    ) -> None:
        """Does what a worker does before the first request, in its order."""
        self._load_model(target)
        self._dummy_run(self.vllm_config.scheduler_config.max_num_batched_tokens)  # profiles
        self._initialize_kv_cache(kv_cache_config, kernel_block_sizes)
        for num_tokens in capture_sizes:
            self._dummy_run(num_tokens, is_graph_capturing=True)

    @torch.no_grad()
    def _load_model(self, target: torch.nn.Module) -> None:
        if self.release == "0.20" or hasattr(self.drafter, "load_model"):
            self.drafter.load_model(target)

    @torch.inference_mode()
    def _dummy_run(self, num_tokens: int, is_graph_capturing: bool = False) -> None:
        if not self.runs_a_model and self.method != "extract_hidden_states":
            return
        self._check_is_one_of_vllms()
        slots = torch.zeros(num_tokens, dtype=torch.int64, device=self.device)
        self.drafter.dummy_run(
            num_tokens,
            use_cudagraphs=is_graph_capturing,
            is_graph_capturing=is_graph_capturing,
            slot_mappings={"layers.0": slots},
        )

    def _initialize_kv_cache(self, kv_cache_config: Any, kernel_block_sizes: list[int]) -> None:
        self.vllm_config.cache_config.num_gpu_blocks = kv_cache_config.num_blocks
        if self.runs_a_model:
            self._check_is_one_of_vllms()
            self.drafter.initialize_attn_backend(kv_cache_config, kernel_block_sizes)
            if self.method != "draft_model" or self.release == "0.33":
                self.drafter.initialize_cudagraph_keys("PIECEWISE")
        if self.method == "extract_hidden_states":
            self.drafter.initialize_cudagraph_keys("PIECEWISE")
            self.drafter.validate_same_kv_cache_group(kv_cache_config)

    def _check_is_one_of_vllms(self) -> None:
        cls = self.look_up
        known = (
            cls("EagleProposer")
            | cls("DFlashProposer")
            | cls("DraftModelProposer")
            | cls("ExtractHiddenStatesProposer")
        )
        assert isinstance(self.drafter, known)

    @torch.inference_mode()
    def sample_tokens(self, step: TargetStep) -> list[list[int]]:
        """Drafts for a pass of the target; returns what the scheduler gets of the drafts."""
        cls, batch = self.look_up, self.input_batch
        old = set(batch.req_ids)
        batch.arrange(step.requests, step.num_prompt)
        if self.method == "ngram_gpu":
            torch_bridge.proposers.ngram.update_ngram_gpu_tensors_incremental(
                batch,
                self.token_ids_gpu_tensor,
                self.num_tokens_no_spec_gpu,
                [SimpleNamespace(req_id=name) for name in batch.req_ids if name not in old],
                self.device,
            )
        metadata: Any = step.metadata
        models = ["EagleProposer", "DFlashProposer"]
        if self.release == "0.33":
            models.append("ExtractHiddenStatesProposer")
        if isinstance(self.drafter, tuple(map(cls, models))) and self.drafter.kv_cache_gid != 0:
            metadata = None  # of another group of KV pages: there is none
        fits = False
        if metadata is not None:
            fits = metadata.max_seq_len + self.num_spec_tokens <= self.max_model_len
        spec = None
        if any(step.num_drafts):
            spec = SimpleNamespace(
                num_draft_tokens=step.num_drafts,
                cu_num_draft_tokens=torch.tensor(
                    np.cumsum(step.num_drafts), dtype=torch.int32, device=self.device
                ),
            )
        valid = [[t for t in row if t != PAD_TOKEN] for row in step.sampled.tolist()]
        valid = [
            [] if skip else row for row, skip in zip(valid, step.discard.tolist(), strict=True)
        ]
        drafts: Any = torch.zeros(1, dtype=torch.int32, device=self.device).expand(
            batch.num_reqs, self.num_spec_tokens
        )
        if self.uses_gpu_tokens and fits:
            drafts = self._propose(step, step.sampled, valid, spec, metadata)
        batch.append(valid)
        if not self.uses_gpu_tokens and fits:
            drafts = self._propose(step, valid, valid, spec, metadata)
        if not isinstance(drafts, torch.Tensor):
            return drafts
        on_host = drafts.tolist()
        if not drafts._is_view():
            drafts.fill_(-1)  # as async scheduling does to what it took over
        if self.method == "ngram_gpu" and fits:
            counts = self.num_valid_cpu.tolist()
            return [row[:count] for row, count in zip(on_host, counts, strict=False)]
        return on_host

    def _propose(
        self,
        step: TargetStep,
        sampled: Any,
        valid: list[list[int]],
        spec: SimpleNamespace | None,
        metadata: CommonAttentionMetadata,
    ) -> Any:
        drafter, batch, cls = self.drafter, self.input_batch, self.look_up
        first = (self.num_spec_tokens,) if self.release == "0.33" else ()
        slots = {"layers.0": metadata.slot_mapping}
        if self.method in ("ngram", "custom_class"):
            if self.method == "ngram":
                assert isinstance(drafter, cls("NgramProposer"))
            return drafter.propose(
                *(first if self.method == "ngram" else ()),
                sampled,
                batch.num_tokens_no_spec,
                batch.token_ids_cpu,
                slot_mappings=slots,
            )
        if self.method == "ngram_gpu":
            assert isinstance(drafter, cls("NgramProposerGPU"))
            next_ids, count, valid_gpu = drafter.update_token_ids_ngram(
                sampled,
                batch,
                self.token_ids_gpu_tensor,
                self.num_tokens_no_spec_gpu,
                step.discard,
            )
            size = next_ids.shape[0]
            drafts, num_valid = drafter.propose(
                *first,
                self.num_tokens_no_spec_gpu[:size],
                self.token_ids_gpu_tensor[:size],
                valid_gpu,
                count,
            )
            self.num_valid_cpu[:size] = num_valid.cpu()
            return drafts
        if self.method == "suffix":
            assert isinstance(drafter, cls("SuffixDecodingProposer"))
            return drafter.propose(*first, batch, sampled, slot_mappings=slots)
        if self.method == "medusa":
            assert isinstance(drafter, cls("MedusaProposer"))
            return drafter.propose(
                target_hidden_states=self._sampled_states(step, valid),
                sampling_metadata=None,
                slot_mappings=slots,
            )
        if self.method == "extract_hidden_states":
            return self._extract(step, sampled, metadata, slots)
        return self._propose_by_model(step, sampled, spec, metadata, slots)

    def _sampled_states(self, step: TargetStep, valid: list[list[int]]) -> torch.Tensor:
        ends = step.metadata.query_start_loc_cpu[1:].tolist()
        rows = []
        for end, num_drafts in zip(ends, step.num_drafts, strict=True):
            rows.extend(range(end - num_drafts - 1, end))
        states = step.hidden[0][torch.tensor(rows, device=self.device)]
        if states.shape[0] == len(valid):
            return states
        indices, offset = [], 0
        for num_drafts, tokens in zip(step.num_drafts, valid, strict=True):
            indices.append(offset + len(tokens) - 1)
            offset += num_drafts + 1
        return states[torch.tensor(indices, device=self.device)]

    def _extract(self, step: TargetStep, sampled: Any, metadata: Any, slots: Any) -> torch.Tensor:
        assert isinstance(self.drafter, self.look_up("ExtractHiddenStatesProposer"))
        assert isinstance(sampled, torch.Tensor)
        counted = {}
        if self.release == "0.33":
            counted["num_speculative_tokens"] = self.num_spec_tokens
        drafts = self.drafter.propose(
            **counted,
            sampled_token_ids=sampled,
            target_hidden_states=list(step.hidden),
            common_attn_metadata=metadata,
            slot_mappings=slots,
        )
        self.drafter.prepare_next_token_ids_padded(
            sampled, step.requests, self.input_batch, step.discard
        )
        return drafts

    def _propose_by_model(
        self, step: TargetStep, sampled: Any, spec: Any, metadata: Any, slots: Any
    ) -> torch.Tensor:
        drafter, cls = self.drafter, self.look_up
        known = cls("EagleProposer") | cls("DFlashProposer") | cls("DraftModelProposer")
        assert isinstance(drafter, known)
        starts = step.metadata.query_start_loc_cpu
        num_scheduled = dict(zip(step.requests, starts.diff().tolist(), strict=True))
        indices = rejected = None
        rows: Any = slice(int(starts[-1]))
        if isinstance(sampled, list):
            next_ids = drafter.prepare_next_token_ids_cpu(
                sampled, step.requests, self.input_batch, num_scheduled
            )
            if spec is not None:
                metadata, rows = drafter.prepare_inputs(metadata, sampled, spec.num_draft_tokens)
        else:
            next_ids, count = drafter.prepare_next_token_ids_padded(
                sampled, step.requests, self.input_batch, step.discard
            )
            if spec is not None:
                metadata, indices, rejected = drafter.prepare_inputs_padded(metadata, spec, count)
                rows = slice(metadata.num_actual_tokens)
        hidden = torch.cat([states[rows] for states in step.hidden], dim=-1)
        counted = {}
        if self.release == "0.33":
            counted["num_speculative_tokens"] = self.num_spec_tokens
        assert drafter.supports_mm_inputs is False
        drafts = drafter.propose(
            **counted,
            target_token_ids=step.token_ids[rows],
            target_positions=step.positions[rows],
            target_hidden_states=hidden,
            next_token_ids=next_ids,
            token_indices_to_sample=indices,
            sampling_metadata=None,
            common_attn_metadata=metadata,
            mm_embed_inputs=None,
            num_rejected_tokens_gpu=rejected,
            slot_mappings=slots,
        )
        if self.release == "0.33":
            assert drafter.take_last_draft_probs() is None
        return drafts


class StandInEngine(Engine):
    """jspec's decode loop, whose drafts the stand-in's drafter makes.

    `jspec.step` runs beside it, and must draft the same unless `is_compared` is False.
    """

    runner: StandInRunner
    is_compared = True
    num_compared = 0
    compiled: list[str]

    def _draft(self, scheduled, verified):
        wanted = super()._draft(scheduled, verified)
        step, kept = jax.device_get((scheduled, verified))
        live = [slot for slot in step.request_slot if slot != PAD_SLOT]
        running = [self.scheduler.running[int(slot)] for slot in live]
        B, device = len(live), self.runner.device
        metadata = common_attn_metadata(
            *(step.query_start[: B + 1], step.seq_lens[:B], step.block_table[:B]),
            page_size=self.state.cache.page_size,
            device=device,
        )
        num_rows = metadata.num_actual_tokens
        width = self.model.config.hidden_size
        hidden = [torch.zeros((num_rows, width), device=device)]  # of the target, read or not
        if step.hidden is not None:
            parts = torch.tensor(step.hidden[:num_rows]).to(device).split(width, dim=1)
            hidden = [part.contiguous() for part in parts]
        drafts = self.runner.sample_tokens(
            TargetStep(
                requests={str(r.index): Request(r.tokens, r.num_computed) for r in running},
                num_prompt={str(r.index): r.num_prompt for r in running},
                token_ids=torch.tensor(step.token_ids[:num_rows], device=device),
                positions=torch.tensor(step.positions[:num_rows], device=device).long(),
                metadata=metadata,
                num_drafts=step.num_drafts[:B].tolist(),
                sampled=torch.tensor(kept.tokens[:B], device=device),
                discard=torch.tensor(step.discard[:B], device=device),
                hidden=hidden,
            )
        )
        K = self.state.config.num_drafts
        tokens = np.full((len(step.request_slot), K), PAD_TOKEN, np.int32)
        counts = np.zeros(len(step.request_slot), np.int32)
        for b, row in enumerate(drafts):
            row = row[: row.index(PAD_TOKEN)] if PAD_TOKEN in row else row
            tokens[b, : len(row)], counts[b] = row, len(row)
        decides = np.flatnonzero(~step.discard[:B])
        if self.is_compared:
            np.testing.assert_array_equal(counts[decides], np.asarray(wanted.num_drafts)[decides])
            np.testing.assert_array_equal(tokens[decides], np.asarray(wanted.tokens)[decides])
            self.num_compared += int(counts[decides].sum())
        return Drafts(tokens=tokens, num_drafts=counts)
