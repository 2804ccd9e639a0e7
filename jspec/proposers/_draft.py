"""Drafting with a decoder of one's own: the first pass over a step, then K - 1 one-token passes.

EAGLE, EAGLE-3, MTP and draft models differ in the decoder alone, so `chain` and `in_parallel` take
it as an argument. Source: vLLM v1/spec_decode/llm_base_proposer.py, propose.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from jspec import metadata
from jspec.axes import PAD_SLOT, PAD_TOKEN, AnyArray
from jspec.metadata import CommonAttentionMetadata, set_inputs_first_pass
from jspec.models.layers import Embeds
from jspec.pallas.eagle_step import eagle_step
from jspec.proposers._config import DraftingConfig
from jspec.state import Batch, Drafts, PagedView
from jspec.tree import DynamicTree, Tree
from jspec.verification import sampling

_STREAM = 1
"""Random numbers of drafts, apart from those of verification."""


class DraftModel(NamedTuple):
    """A decoder bound to its weights, as the draft loop calls it.

    Attributes:
      run: `(token_ids [T], hidden [T, D], view, cache, embeds) -> (out [T, D], feedback [T, D],
        cache)`: `out` is what `logits` reads, `feedback` the hidden state of the next pass. Without
        hidden states both `hidden` and `feedback` are None. `cache` is whatever `run` keeps.
      logits: `(out [B, D]) -> [B, V']`, a score per draft id; -inf for rows that pad the head.
      vocab_size: tokens of the target (V).
      target_ids: token of each draft id, ascending; None where they are the same.
      mask_token: id of the rows that are drafted in parallel.
      mask_hidden: hidden state of these rows, where hidden states are read.
    """

    run: Callable[..., tuple[Array, Array | None, Any]]
    logits: Callable[[Array], Array]
    vocab_size: int
    target_ids: Int[Array, "Vd"] | None = None
    mask_token: int = 0
    mask_hidden: Float[Array, "D"] | None = None


class Vocabulary(NamedTuple):
    """What `pick` needs of a drafter; see `DraftModel`."""

    vocab_size: int
    target_ids: Int[Array, "Vd"] | None = None


class Rows(NamedTuple):
    """The rows of a first pass, and where drafts are read from."""

    token_ids: Int[Array, "T"]
    hidden: Float[Array, "T D"] | None
    embeds: Embeds | None
    view: PagedView
    sample_index: Int[Array, "B slots"]


def chain(
    model: DraftModel,
    config: DraftingConfig,
    batch: Batch,
    cache: Any,
    *,
    num_drafts: int,
    shift: bool,
) -> tuple[Any, Drafts]:
    """Drafts one token after the other.

    Args:
      model: the drafter's decoder.
      config: how tokens are picked.
      batch: the step; `hidden` in the form that `model.run` reads.
      cache: what `model.run` keeps, with the `page_size` and `max_model_len` of a KVCache; donated
        by the enclosing jit.
      num_drafts: drafts wanted (static); 0 runs the first pass alone, so that the cache is current.
      shift: True for a decoder that pairs hidden state i with token i + 1.

    Returns:
      (cache, drafts).
    """
    page_size, max_model_len = cache.page_size, cache.max_model_len
    limit = min(max_model_len, batch.block_table.shape[1] * page_size)
    with jax.named_scope("first_pass"):
        rows = first_pass(
            batch, num_slots=1, shift=shift, page_size=page_size, max_model_len=max_model_len
        )
        last = rows.sample_index[:, 0]  # [B]
        out, hidden, cache = model.run(rows.token_ids, rows.hidden, rows.view, cache, rows.embeds)
        if num_drafts == 0:
            return cache, no_drafts(model, config, batch)
        hidden = None if hidden is None else take(hidden, last)  # [T, D] -> [B, D]
        token, probs = pick(model, config, model.logits(take(out, last)), batch, 0)
        first = token, probs, take(rows.view.slots, last)

    # A request without a kept token runs as if past the limit: it writes nothing.
    live = is_live(batch)
    position = jnp.where(live, take(rows.view.positions, last), max_model_len)
    axes = None if rows.view.axes is None else take(rows.view.axes.T, last).T  # [3, B]
    seq_lens = batch.seq_lens - batch.num_rejected + (0 if shift else 1)
    requests = jnp.arange(last.shape[0] + 1, dtype=jnp.int32)
    last_position = jnp.int32(max_model_len - 1)

    def step(carry: tuple, index: Array) -> tuple[tuple, tuple]:
        token, hidden, position, axes, seq_lens, cache = carry
        _, slots, seq_lens = eagle_step(
            position, batch.block_table, seq_lens, page_size=page_size, max_model_len=limit
        )
        # Unclamped: from 0, a request past the limit would count up through real slots again.
        position = position + 1
        if axes is not None:
            axes = jnp.where((position < max_model_len)[None], axes + 1, last_position)
        view = PagedView(
            block_table=batch.block_table,
            seq_lens=jnp.where(live, seq_lens, 0),
            positions=jnp.minimum(position, last_position),
            axes=axes,
            slots=slots,
            query_start=requests,
        )
        out, hidden, cache = model.run(token, hidden, view, cache, None)
        token, probs = pick(model, config, model.logits(out), batch, index)
        return (token, hidden, position, axes, seq_lens, cache), (token, probs, slots)

    with jax.named_scope("loop"):
        carry = (token, hidden, position, axes, seq_lens, cache)
        carry, rest = jax.lax.scan(step, carry, jnp.arange(1, num_drafts, dtype=jnp.int32))
    tokens, probs, slots = jax.tree.map(
        lambda x, xs: jnp.concatenate([x[None], xs]).swapaxes(0, 1),  # [K, B] -> [B, K]
        *(first, rest),
    )
    return carry[-1], truncate(batch, tokens, probs, max_model_len, stored=slots >= 0)


def in_parallel(
    model: DraftModel,
    config: DraftingConfig,
    batch: Batch,
    cache: Any,
    *,
    num_drafts: int,
    shift: bool,
) -> tuple[Any, Drafts]:
    """Drafts all tokens in one pass, from mask tokens after the next token.

    Args, Returns: as `chain`.
    """
    max_model_len = cache.max_model_len
    rows = first_pass(
        batch,
        num_slots=max(num_drafts, 1),
        shift=shift,
        page_size=cache.page_size,
        max_model_len=max_model_len,
        mask_token=model.mask_token,
        mask_hidden=model.mask_hidden,
    )
    out, _, cache = model.run(rows.token_ids, rows.hidden, rows.view, cache, rows.embeds)
    if num_drafts == 0:
        return cache, no_drafts(model, config, batch)
    index = rows.sample_index  # [B, K]
    logits = model.logits(take(out, index.reshape(-1))).reshape(*index.shape, -1)
    picked = [pick(model, config, logits[:, j], batch, j) for j in range(num_drafts)]
    tokens, probs = jax.tree.map(lambda *columns: jnp.stack(columns, axis=1), *picked)
    stored = take(rows.view.slots, index) >= 0
    return cache, truncate(batch, tokens, probs, max_model_len, stored=stored)


def first_pass(
    batch: Batch,
    *,
    num_slots: int,
    shift: bool,
    page_size: int,
    max_model_len: int,
    mask_token: int = 0,
    mask_hidden: Float[Array, "D"] | None = None,
) -> Rows:
    """Lays out the rows of a drafter's first pass over a step.

    Args:
      batch: the step.
      num_slots, shift, mask_token, mask_hidden: as `jspec.metadata.set_inputs_first_pass`.
      page_size: slots per page (S).
      max_model_len: positions at or above it are not stored.
    """
    view = metadata.paged_view(batch, page_size=page_size, max_model_len=max_model_len)
    extends = num_slots > 1 or not shift
    if batch.token_index is not None and extends:
        raise NotImplementedError(
            "`positions` has three axes (M-RoPE), and this drafter adds rows to the step, which "
            "have none. Draft with a chain that reads hidden states (eagle, eagle3, mtp)."
        )
    rows = set_inputs_first_pass(
        batch.token_ids,
        view.positions,
        batch.next_token,
        CommonAttentionMetadata.of(view.query_start, view.seq_lens, view.block_table, view.slots),
        hidden=batch.hidden if shift else None,
        num_rejected=batch.num_rejected,
        num_slots=num_slots,
        shift=shift,
        mask_token=mask_token,
        mask_hidden=mask_hidden,
        page_size=page_size,
        max_model_len=max_model_len,
    )
    last = max_model_len - 1
    # Rows after the last page of a request would read another request's page.
    num_pages = jnp.cumprod(batch.block_table >= 0, axis=1, dtype=jnp.int32).sum(1, jnp.int32)
    return Rows(
        token_ids=jnp.asarray(rows.token_ids),
        hidden=None if rows.hidden is None else jnp.asarray(rows.hidden),
        embeds=_shifted_embeds(batch, extends),
        view=PagedView(
            block_table=rows.metadata.block_table,
            seq_lens=jnp.minimum(rows.metadata.seq_lens, num_pages * page_size),
            positions=jnp.clip(rows.positions, 0, last),
            axes=None if batch.token_index is None else jnp.asarray(batch.positions),
            slots=rows.metadata.slots,
            query_start=rows.metadata.query_start,
        ),
        sample_index=jnp.asarray(rows.sample_index),
    )


def pick(
    model: DraftModel | Vocabulary,
    config: DraftingConfig,
    logits: Float[Array, "B Vdp"],
    batch: Batch,
    index: Int[Array, ""] | int,
) -> tuple[Int[Array, "B"], Float[Array, "B V"] | None]:
    """Picks draft `index` of each request; the lowest id wins ties.

    Returns:
      (tokens, probs): target ids, see `to_tokens`; their distribution over the target's vocabulary,
      None if greedy.
    """
    target_ids = model.target_ids
    probs = None
    if not config.samples:
        ids = jnp.argmax(logits, axis=-1).astype(jnp.int32)
    else:
        assert batch.temperature is not None and batch.seed is not None  # checked by the api
        logits = logits[:, : model.vocab_size if target_ids is None else len(target_ids)]
        place = next_position(batch) + 1 + index
        ids = sampling.draw(logits, batch.temperature, batch.seed, place, stream=_STREAM)
        probs = sampling.distribution(logits, batch.temperature)
    if probs is not None and target_ids is not None:
        wide = jnp.zeros((probs.shape[0], model.vocab_size), probs.dtype)
        probs = wide.at[:, target_ids].set(probs, mode="drop", wrap_negative_indices=False)
    return to_tokens(model, ids), probs


def to_tokens(model: DraftModel | Vocabulary, ids: Int[Array, "..."]) -> Int[Array, "..."]:
    """Returns the target's tokens of draft ids.

    PAD where `target_ids` leads out of the vocabulary, which only unchecked weights do
    (`jspec.pure`): drafts end there.
    """
    if model.target_ids is None:
        return ids
    tokens = take(model.target_ids, ids)
    return jnp.where((tokens >= 0) & (tokens < model.vocab_size), tokens, PAD_TOKEN)


def next_position(batch: Batch) -> Int[Array, "B"]:
    """Place of each request's next token in the request."""
    index = batch.positions if batch.token_index is None else batch.token_index
    return take(jnp.asarray(index), batch.last_index) + 1


def is_live(batch: Batch) -> Bool[Array, "B"]:
    """Whether a request drafts: it kept a token, and that has a place."""
    return (batch.num_valid > 0) & (next_position(batch) > 0)


def take(x: Array, index: Array) -> Array:
    """Reads rows of x by indices that lie inside."""
    return jnp.asarray(x).at[index].get(mode="clip", wrap_negative_indices=False)


def no_drafts(
    model: DraftModel | Vocabulary,
    config: DraftingConfig,
    batch: Batch,
    *,
    tree: Tree | DynamicTree | None = None,
) -> Drafts:
    """Returns drafts without columns, of the form that those with columns have."""
    num_requests = batch.next_token.shape[0]
    none = jnp.zeros((num_requests, 0), jnp.int32)
    return Drafts(
        tokens=none,
        num_drafts=jnp.zeros(num_requests, jnp.int32),
        probs=jnp.zeros((num_requests, 0, model.vocab_size), jnp.float32)
        if config.samples
        else None,
        parents=None if tree is None else none,
    )


def truncate(
    batch: Batch,
    tokens: Int[Array, "B K"],
    probs: Float[Array, "B K V"] | None,
    max_model_len: int,
    *,
    stored: Bool[Array, "B K"] | bool = True,
    depths: Int[AnyArray, "requests K"] | None = None,
    parents: Int[AnyArray, "requests K"] | None = None,
) -> Drafts:
    """Truncates drafts at the longest request, and where a row that they saw had no KV slot.

    Args:
      batch, max_model_len: as `chain`.
      tokens, probs: of each draft.
      stored: whether the row that each draft was read from has a KV slot.
      depths: how many tokens after the next one each draft is; None = 1..K, a chain. Ascending.
      parents: of a tree.
    """
    if depths is None:
        depths = np.arange(1, tokens.shape[1] + 1, dtype=np.int32)[None]
    room = max_model_len - 1 - next_position(batch)  # [B]
    kept = stored & (tokens != PAD_TOKEN) & (depths <= room[:, None]) & is_live(batch)[:, None]
    kept = jnp.cumprod(kept, axis=1, dtype=jnp.int32) > 0  # [B, K]
    return Drafts(
        tokens=jnp.where(kept, tokens, PAD_TOKEN),
        num_drafts=kept.sum(axis=1, dtype=jnp.int32),
        probs=None if probs is None else jnp.where(kept[:, :, None], probs, 0),
        parents=None if parents is None else jnp.where(kept, parents, PAD_TOKEN),
    )


def _shifted_embeds(batch: Batch, extends: bool) -> Embeds | None:
    """Input embeddings of the rows: they move left with their tokens.

    Those of the next token are not in the step: it has its own embedding.
    """
    if batch.embeds is None or batch.embeds_mask is None:
        return None
    if extends:
        raise NotImplementedError(
            "`embeds` is given, and this drafter adds rows to the step, which have none. Leave "
            "embeds out, or draft with a chain that reads hidden states (eagle, eagle3, mtp)."
        )
    row = jnp.arange(batch.embeds.shape[0], dtype=jnp.int32)
    end = batch.query_start[1:]
    last = jnp.where(end > batch.query_start[:-1], batch.last_index, PAD_SLOT)
    has_none = jnp.zeros(row.shape, bool)
    has_none = has_none.at[jnp.concatenate([last, end - 1])].set(
        True, mode="drop", wrap_negative_indices=False
    )
    mask = jnp.roll(batch.embeds_mask, -1) & ~has_none & (row < end[-1])
    return jnp.roll(batch.embeds, -1, axis=0), mask
