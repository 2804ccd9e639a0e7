"""N-gram lookup on the device: the same winner as `ngram`, as one vectorised pass.

Histories stay in device memory, so a step reads nothing back. The ops above the proposer keep the
original's behaviour to the integer. Source: vLLM v1/spec_decode/ngram_proposer_gpu.py.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int32

from jspec.axes import PAD_SLOT, PAD_TOKEN
from jspec.config import CacheConfig
from jspec.metadata import row_request
from jspec.pallas.ngram_match import ngram_match
from jspec.proposers.base import Proposer
from jspec.proposers.ngram import NgramConfig
from jspec.state import Batch, Drafts, pytree


@dataclass(frozen=True, kw_only=True)
class NgramGPUConfig(NgramConfig):
    """Chooses the same as `NgramConfig`, for the drafter that stays on the device."""


@pytree
class Memory:
    """Token histories on the device.

    Attributes:
      history: the known tokens of each request by position, ids outside the vocabulary as PAD.
    """

    history: Int32[Array, "R S"]


def init(config: NgramGPUConfig, params: Any, cache: CacheConfig, max_requests: int) -> Memory:
    """Allocates the histories."""
    del config, params
    return Memory(history=jnp.full((max_requests, cache.max_model_len), PAD_TOKEN, jnp.int32))


def propose(
    config: NgramGPUConfig, params: Any, memory: Memory, batch: Batch, num_drafts: int
) -> tuple[Memory, Drafts]:
    """Records the tokens of a step and drafts from each request's own history.

    Args:
      config: static choices.
      params: unused.
      memory: donate it, and the write happens in place.
      batch: the step.
      num_drafts: unused: the caller truncates drafts to it.

    Returns:
      (memory, drafts). A row without a kept token or without a match has none; with n known
      tokens, the newest included, there are at most max_model_len - n.
    """
    del params, num_drafts
    max_model_len = memory.history.shape[1]

    with jax.named_scope("record"):
        history, lengths = _record(config, memory.history, batch)

    with jax.named_scope("lookup"):
        min_n, max_n = config.bounds
        tokens, num_valid = ngram_match(
            history,
            lengths,
            lengths > 0,
            batch.request_slot,
            min_n=min_n,
            max_n=max_n,
            num_drafts=config.num_drafts,
        )
        count = jnp.minimum(num_valid, jnp.maximum(max_model_len - lengths, 0))
        kept = jnp.arange(config.num_drafts, dtype=jnp.int32)[None, :] < count[:, None]
        tokens = jnp.where(kept, tokens, PAD_TOKEN)
    return Memory(history=history), Drafts(tokens=tokens, num_drafts=count)


def admit(
    config: NgramGPUConfig,
    memory: Memory,
    slot: Int32[Array, ""],
    tokens: Int32[Array, "S"],
    num_tokens: Int32[Array, ""],
) -> Memory:
    """Fills a request's row with its whole prompt; nothing of an earlier request stays."""
    is_prompt = jnp.arange(tokens.shape[0], dtype=jnp.int32) < num_tokens
    row = jnp.where(is_prompt, _in_vocabulary(config, tokens), PAD_TOKEN)
    return Memory(
        history=memory.history.at[slot].set(row, mode="drop", wrap_negative_indices=False)
    )


def append_tokens(
    token_ids: Int32[Array, "B S"],
    num_tokens: Int32[Array, "B"],
    sampled: Int32[Array, "B W"],
    num_sampled: Int32[Array, "B"],
) -> Int32[Array, "B S"]:
    """Writes newly sampled tokens after the known ones of each row.

    Args:
      token_ids: known tokens, left-aligned.
      num_tokens: known tokens of each row before the write.
      sampled: new tokens; a PAD leaves its cell as it was.
      num_sampled: columns of `sampled` that count.

    Returns:
      The new token_ids; a token that would land outside its row is dropped.

    Source: vLLM v1/spec_decode/ngram_proposer_gpu.py, NgramProposerGPU.propose.
    """
    token_ids = _check_rows("append_tokens", token_ids)
    row = jnp.arange(token_ids.shape[0], dtype=jnp.int32)[:, None]
    offset = jnp.arange(sampled.shape[1], dtype=jnp.int32)[None, :]
    written = (offset < num_sampled[:, None]) & (sampled != PAD_TOKEN)
    column = jnp.where(written, num_tokens[:, None] + offset, PAD_SLOT)
    return token_ids.at[row, column].set(sampled, mode="drop", wrap_negative_indices=False)


def update_token_ids(
    sampled: Int32[Array, "B W"],
    token_ids: Int32[Array, "B S"],
    num_tokens: Int32[Array, "B"],
    discard: Bool[Array, "B"],
    *,
    vocab_size: int,
) -> tuple[Int32[Array, "B"], Int32[Array, "B"], Int32[Array, "B W"]]:
    """Counts the valid sampled tokens of each row and picks the one it continues from.

    Valid tokens are taken to be packed left: with a hole the token at column `count - 1` is
    returned, whatever it is, unlike `jspec.pallas.next_token`, which returns the last valid one.

    In: sampled [[9 1000 3 -1]], vocab_size 100. Out: next_token [1000], count [2].

    Args:
      sampled: sampled tokens, PAD where there is none.
      token_ids: known tokens of each row, left-aligned.
      num_tokens: known tokens of each row; the last of them serves a row without valid token.
      discard: rows whose sampled tokens must not count.
      vocab_size: ids at or above it are invalid.

    Returns:
      (next_token, count, sampled): the last with discarded rows set to PAD.

    Source: vLLM v1/spec_decode/ngram_proposer_gpu.py, update_token_ids_ngram.
    """
    token_ids = _check_rows("update_token_ids", token_ids)
    sampled = jnp.where(discard[:, None], PAD_TOKEN, sampled)
    valid = (sampled != PAD_TOKEN) & (sampled < vocab_size)
    count = jnp.sum(valid, axis=1, dtype=jnp.int32)
    backup = _take(token_ids, num_tokens[:, None] - 1)[:, 0]
    newest = _take(sampled, count[:, None] - 1)[:, 0]
    return jnp.where(count > 0, newest, backup), count, sampled


def update_incremental(
    token_ids: Int32[Array, "R S"],
    num_tokens: Int32[Array, "R"],
    host_token_ids: Int32[Array, "R S"],
    host_num_tokens: Int32[Array, "R"],
    index: Int32[Array, "n"],
    previous_index: Int32[Array, "n"],
    is_new: Bool[Array, "n"],
) -> tuple[Int32[Array, "R S"], Int32[Array, "R"]]:
    """Follows a batch that was reordered, with requests that left, came or came back.

    A continuing request takes its row along from where it was on the device; a new or resumed one
    gets its known tokens from the host. Lengths always come from the host.

    Args:
      token_ids: rows on the device, by previous index.
      num_tokens: their lengths.
      host_token_ids: rows on the host, by current index; read for new requests only.
      host_num_tokens: their lengths.
      index: row of each active request now; PAD entries are skipped.
      previous_index: its row before, or PAD.
      is_new: whether it is new or resumed. All True makes the first call.

    Returns:
      (token_ids, num_tokens) by current index; rows without a request keep what they held.

    Source: vLLM v1/spec_decode/ngram_proposer_gpu.py, update_ngram_gpu_tensors_incremental.
    """
    token_ids = _check_rows("update_incremental", token_ids)

    def rows(table, at):
        return (
            jnp.asarray(table)
            .at[at]
            .get(mode="fill", fill_value=PAD_TOKEN, wrap_negative_indices=False)
        )

    def put(table, at, values):
        return jnp.asarray(table).at[at].set(values, mode="drop", wrap_negative_indices=False)

    # All rows are read before any is written: moves may form cycles.
    length = rows(host_num_tokens, index)
    is_known = jnp.arange(token_ids.shape[1], dtype=jnp.int32)[None, :] < length[:, None]
    moved = rows(token_ids, jnp.where(is_new, index, previous_index))  # [n, S]
    values = jnp.where(is_new[:, None] & is_known, rows(host_token_ids, index), moved)
    target = jnp.where(is_new | (previous_index >= 0), index, PAD_SLOT)
    return put(token_ids, target, values), put(num_tokens, index, length)


def _record(config: NgramGPUConfig, history, batch: Batch):
    """Writes the accepted rows and the next token to their positions; returns the lengths."""
    num_rows = batch.token_ids.shape[0]
    position = jnp.asarray(batch.positions if batch.token_index is None else batch.token_index)
    slot, last_index = jnp.asarray(batch.request_slot), jnp.asarray(batch.last_index)
    request, is_live = row_request(batch.query_start, num_rows)
    row = jnp.arange(num_rows, dtype=jnp.int32)
    is_live = is_live & (row <= last_index.at[request].get(mode="clip"))
    row_slot = jnp.where(is_live, slot.at[request].get(mode="clip"), PAD_SLOT)

    is_kept = (batch.num_valid > 0) & (slot >= 0)
    next_position = position.at[last_index].get(mode="clip") + 1
    next_slot = jnp.where(is_kept, slot, PAD_SLOT)
    slots = jnp.concatenate([row_slot, next_slot])  # [T + B]
    columns = jnp.concatenate([position, next_position])
    tokens = _in_vocabulary(config, jnp.concatenate([batch.token_ids, batch.next_token]))
    history = history.at[slots, columns].set(tokens, mode="drop", wrap_negative_indices=False)
    return history, jnp.where(is_kept, next_position + 1, 0)


def _in_vocabulary(config: NgramGPUConfig, tokens):
    """Replaces ids outside the vocabulary by PAD."""
    return jnp.where((tokens >= 0) & (tokens < config.id_limit), tokens, PAD_TOKEN)


def _take(table, columns):
    """Reads columns of each row, the nearest one where an index lies outside."""
    columns = jnp.clip(columns, 0, table.shape[1] - 1)
    return jnp.take_along_axis(table, columns, axis=1, mode="promise_in_bounds")


def _check_rows(owner: str, token_ids) -> Array:
    token_ids = jnp.asarray(token_ids)
    if token_ids.ndim != 2 or token_ids.shape[1] == 0:
        raise ValueError(
            f"{owner}: `token_ids` has shape {token_ids.shape}, wanted [B, S], one row of tokens "
            "per request. For a single request pass token_ids[None]."
        )
    return token_ids


PROPOSER = Proposer(
    name="ngram_gpu",
    Config=NgramGPUConfig,
    init=init,
    propose=propose,
    admit=admit,
)
