"""What a PyTorch runner hands to its drafter: configuration, metadata, requests."""

import contextlib
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
    """The attributes of vLLM's that the bridge may read, and no other."""

    query_start_loc: torch.Tensor
    query_start_loc_cpu: torch.Tensor
    seq_lens: torch.Tensor
    num_reqs: int
    num_actual_tokens: int
    max_query_len: int
    max_seq_len: int
    block_table_tensor: torch.Tensor
    slot_mapping: torch.Tensor


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
