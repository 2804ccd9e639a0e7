"""Lays requests out in a paged cache: shuffled pages, padding, and NaN wherever nobody wrote."""

from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np

from jspec.axes import PAD_SLOT
from jspec.models.config import ModelConfig
from jspec.models.kv_cache import KVCache
from jspec.state import PagedView

POISON = 1_000_003  # a page and a position that no test uses


def poisoned_cache(
    config: ModelConfig, *, num_pages: int, page_size: int, dtype: str = "float32"
) -> KVCache:
    """Makes a cache that turns every result into NaN that reads what was not written."""
    shape = (config.num_layers, num_pages, page_size, config.num_kv_heads, config.head_dim)
    limit = num_pages * page_size
    return KVCache(
        k=jnp.full(shape, jnp.nan, dtype), v=jnp.full(shape, jnp.nan, dtype), max_model_len=limit
    )


def shuffled_tables(
    rng: np.random.Generator, num_requests: int, pages_per_request: int, num_pages: int
) -> np.ndarray:
    """Gives each request pages of its own, in no order: int32 [B, M]."""
    pages = rng.permutation(num_pages)[: num_requests * pages_per_request]
    return pages.reshape(num_requests, pages_per_request).astype(np.int32)


def make_view(
    tables: np.ndarray,
    starts: Sequence[int],
    counts: Sequence[int],
    *,
    page_size: int,
    num_rows: int | None = None,
    num_requests: int | None = None,
    causal: bool = True,
) -> PagedView:
    """Places rows `starts[b] .. starts[b] + counts[b] - 1` of each request; pads with poison."""
    B, T = num_requests or len(counts), num_rows or sum(counts)
    table = np.full((B, tables.shape[1]), POISON, np.int32)
    table[: len(tables)] = tables
    query_start, seq_lens = np.zeros(B + 1, np.int32), np.zeros(B, np.int32)
    positions, slots = np.full(T, POISON, np.int32), np.full(T, PAD_SLOT, np.int32)
    at = 0
    for b, (start, count) in enumerate(zip(starts, counts, strict=True)):
        place = np.arange(start, start + count)
        positions[at : at + count] = place
        slots[at : at + count] = tables[b][place // page_size] * page_size + place % page_size
        at += count
        query_start[b + 1 :] = at
        seq_lens[b] = start + count
    return PagedView(
        block_table=table,
        seq_lens=seq_lens,
        positions=positions,
        slots=slots,
        query_start=query_start,
        causal=causal,
    )
