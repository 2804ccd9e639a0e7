"""What a PyTorch runner hands to its drafter: configuration, metadata, requests."""

import contextlib
import dataclasses
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch


def vllm_config(
    method: str,
    num_drafts: int,
    *,
    path: Any = None,
    hf_config: Any = None,
    max_model_len: int = 256,
    max_requests: int = 4,
    max_rows: int = 256,
    num_pages: int = 64,
    page_size: int = 16,
    dtype: torch.dtype = torch.float32,
    **speculative: Any,
) -> SimpleNamespace:
    """Makes a configuration with the attributes that vLLM's has."""
    return SimpleNamespace(
        speculative_config=SimpleNamespace(
            method=method,
            num_speculative_tokens=num_drafts,
            draft_model_config=SimpleNamespace(model=str(path), hf_config=hf_config),
            **speculative,
        ),
        model_config=SimpleNamespace(max_model_len=max_model_len, dtype=dtype, hf_config=hf_config),
        scheduler_config=SimpleNamespace(
            max_num_seqs=max_requests, max_num_batched_tokens=max_rows
        ),
        cache_config=SimpleNamespace(num_gpu_blocks=num_pages, block_size=page_size),
        parallel_config=SimpleNamespace(tensor_parallel_size=1, data_parallel_rank=0),
    )


@dataclass
class CommonAttentionMetadata:
    """The fields of vLLM's own: those of 0.20 and, behind `causal`, of 0.32 together."""

    query_start_loc: torch.Tensor
    query_start_loc_cpu: torch.Tensor
    seq_lens: torch.Tensor
    num_reqs: int
    num_actual_tokens: int
    max_query_len: int
    max_seq_len: int
    block_table_tensor: torch.Tensor
    slot_mapping: torch.Tensor
    causal: bool | torch.Tensor = True
    logits_indices_padded: torch.Tensor | None = None
    num_logits_indices: int | None = None
    max_logits_per_req: int | None = None
    encoder_seq_lens: torch.Tensor | None = None
    encoder_seq_lens_cpu: np.ndarray | None = None
    dcp_local_seq_lens: torch.Tensor | None = None
    dcp_local_seq_lens_cpu: torch.Tensor | None = None
    dcp_local_seq_lens_cpu_upper_bound: torch.Tensor | None = None
    positions: torch.Tensor | None = None
    is_prefilling: torch.Tensor | None = None
    seq_lens_cpu_upper_bound: torch.Tensor | None = None
    req_idx: np.ndarray | None = None
    mm_req_doc_ranges: dict[int, list[tuple[int, int]]] | None = None
    rswa_prefix_lens: torch.Tensor | None = None
    replayssm_decode_base_cpu: torch.Tensor | None = None
    _seq_lens_cpu: torch.Tensor | None = None
    _num_computed_tokens_cpu: torch.Tensor | None = None
    _num_computed_tokens_cache: torch.Tensor | None = None
    _token_to_req_indices_cache: torch.Tensor | None = None


def with_every_field(cad: CommonAttentionMetadata) -> CommonAttentionMetadata:
    """Fills what is None with values that fit the pass, so that a stale one is seen."""
    num_rows, lengths = int(cad.query_start_loc_cpu[-1]), cad.seq_lens.cpu()
    computed = lengths - cad.query_start_loc_cpu.diff()
    device, index = cad.seq_lens.device, np.arange(len(lengths), dtype=np.int32)
    rows = torch.arange(num_rows, device=device)
    owner = torch.repeat_interleave(torch.from_numpy(index), cad.query_start_loc_cpu.diff())
    return dataclasses.replace(
        cad,
        causal=False,
        logits_indices_padded=rows,
        num_logits_indices=num_rows,
        max_logits_per_req=cad.max_query_len,
        encoder_seq_lens=cad.seq_lens.clone(),
        encoder_seq_lens_cpu=lengths.numpy(),
        dcp_local_seq_lens=cad.seq_lens.clone(),
        dcp_local_seq_lens_cpu=lengths.clone(),
        dcp_local_seq_lens_cpu_upper_bound=lengths.clone(),
        positions=rows,
        is_prefilling=torch.ones(len(lengths), dtype=torch.bool, device=device),
        seq_lens_cpu_upper_bound=lengths.clone(),
        req_idx=index,
        mm_req_doc_ranges={0: [(0, 1)]},
        rswa_prefix_lens=cad.seq_lens.clone(),
        replayssm_decode_base_cpu=computed.clone(),
        _seq_lens_cpu=lengths.clone(),
        _num_computed_tokens_cpu=computed,
        _num_computed_tokens_cache=computed.to(device),
        _token_to_req_indices_cache=owner.to(device),
    )


def common_attn_metadata(
    query_start: Any, seq_lens: Any, block_table: Any, *, page_size: int, device: Any = "cpu"
) -> CommonAttentionMetadata:
    """Makes the metadata of a step whose rows are the last ones of each request."""
    start, lengths, table = (
        torch.from_numpy(np.array(x, np.int32)) for x in (query_start, seq_lens, block_table)
    )
    slots = []
    for b in range(len(lengths)):
        num_rows = int(start[b + 1] - start[b])
        places = torch.arange(int(lengths[b]) - num_rows, int(lengths[b]))
        slots.append(table[b, places // page_size].long() * page_size + places % page_size)
    return CommonAttentionMetadata(
        query_start_loc=start.to(device),
        query_start_loc_cpu=start,
        seq_lens=lengths.to(device),
        num_reqs=len(lengths),
        num_actual_tokens=int(start[-1]),
        max_query_len=int(start.diff().max()),
        max_seq_len=int(lengths.max()),
        block_table_tensor=table.to(device),
        slot_mapping=torch.cat(slots).to(device),
        seq_lens_cpu_upper_bound=lengths.clone(),
        _seq_lens_cpu=lengths.clone(),
    )


@dataclass
class Request:
    """A request of the runner: its tokens, and how many of them were computed."""

    tokens: list[int]
    num_computed_tokens: int = 0

    def get_token_id(self, index: int) -> int:
        """Returns a known token, -1 behind the last one."""
        return self.tokens[index] if index < len(self.tokens) else -1


@contextlib.contextmanager
def no_waits() -> Iterator[None]:
    """Makes it an error that torch waits for a CUDA device."""
    _sync_debug_mode("error")
    try:
        yield
    finally:
        _sync_debug_mode("default")


def _sync_debug_mode(mode: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says that this is a prototype
        torch.cuda.set_sync_debug_mode(mode)
