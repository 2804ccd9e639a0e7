"""DFlash: all drafts in one pass over a block of mask tokens after the context.

The context's keys and values come straight from the target's hidden states, and stay in pages of
the drafter's own; each step adds the accepted tokens'. The block's own keys and values lie after
the context, where the next step overwrites them. Source: arXiv 2602.06036; vLLM
v1/spec_decode/dflash.py.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jspec import metadata
from jspec._checks import check_at_least
from jspec.axes import PAD_SLOT
from jspec.metadata import CommonAttentionMetadata, set_inputs_first_pass_dflash
from jspec.models import weights
from jspec.models.dflash import BlockConfig, DFlash
from jspec.models.kv_cache import KVCache
from jspec.proposers import _draft
from jspec.proposers._config import DraftingConfig
from jspec.proposers._draft import Vocabulary
from jspec.proposers.base import Proposer, Reads, init_pages, init_params, refuse_axes
from jspec.proposers.loaders import dflash as loader
from jspec.state import Batch, Drafts, PagedView, Params


@dataclass(frozen=True, kw_only=True)
class DFlashConfig(DraftingConfig):
    """Chooses the drafter.

    The block has 1 + `num_drafts` rows, all of which see each other: a drafter with a smaller
    `num_drafts` drafts other tokens, not the first ones of the same.

    Attributes:
      model: its shape.
      mask_token: id of the rows that drafts are read from.

    Raises:
      ValueError: the mask token is outside the vocabulary.
    """

    model: BlockConfig
    mask_token: int

    def __post_init__(self):
        super().__post_init__()
        refuse_axes("dflash", self.decoder)
        check_at_least("DFlashConfig", 0, mask_token=self.mask_token)
        if self.mask_token >= self.vocab_size:
            raise ValueError(
                f"DFlashConfig: `mask_token` is {self.mask_token}, wanted an id below the "
                f"vocab_size, {self.vocab_size}: its embedding is the target's. Take the drafter "
                "that was trained for this target."
            )

    @classmethod
    def tiny(cls):
        """Returns a config that tests can afford."""
        return cls(num_drafts=3, model=BlockConfig.tiny(), mask_token=63)


def propose(
    config: DFlashConfig, params: Params, memory: KVCache, batch: Batch, num_drafts: int
) -> tuple[KVCache, Drafts]:
    """Adds the step's accepted tokens to the context, then runs one block for each request."""
    if batch.token_index is not None:
        raise NotImplementedError(
            "dflash: `positions` has three axes (M-RoPE), and the block's rows have one. Draft "
            "with a chain that reads hidden states (eagle, eagle3, mtp)."
        )
    model = weights.bind(DFlash, config.model, params)
    B, W = batch.next_token.shape[0], config.num_drafts + 1
    page_size = memory.page_size
    limit = min(memory.max_model_len, batch.block_table.shape[1] * page_size)

    # 1. The accepted rows join the context. Rejected ones have no slot.
    view = metadata.paged_view(batch, page_size=page_size, max_model_len=limit)
    rows = set_inputs_first_pass_dflash(
        batch.positions,
        batch.next_token,
        CommonAttentionMetadata.of(view.query_start, view.seq_lens, view.block_table, view.slots),
        num_rejected=batch.num_rejected,
        num_drafts=config.num_drafts,
        mask_token=config.mask_token,
        page_size=page_size,
        max_model_len=limit,
    )
    assert rows.context_positions is not None and rows.context_slots is not None
    with jax.named_scope("context"):
        memory = model.precompute_context_kv(
            batch.hidden, rows.context_positions, rows.context_slots, memory
        )
    if num_drafts == 0:
        return memory, _draft.no_drafts(_vocabulary(config, params), config, batch)

    # 2. The block. It ends before the first row without a slot: no row may see what lies there.
    live = _draft.is_live(batch)
    slots = jnp.where(live[:, None], rows.metadata.slots.reshape(B, W), PAD_SLOT)
    stored = jnp.cumprod(slots >= 0, axis=1, dtype=jnp.int32)  # [B, W]
    slots = jnp.where(stored > 0, slots, PAD_SLOT)
    context_len = batch.seq_lens - batch.num_rejected
    block = PagedView(
        block_table=batch.block_table,
        seq_lens=jnp.where(live, context_len + stored.sum(axis=1, dtype=jnp.int32), 0),
        positions=rows.positions,
        slots=slots.reshape(-1),
        query_start=rows.metadata.query_start,
    )
    with jax.named_scope("block"):
        out, memory = model(rows.token_ids.reshape(B, W), block, memory)

    # 3. The mask rows' tokens.
    with jax.named_scope("pick"):
        tokens, probs = _pick(config, params, model, batch, out[:, 1 : 1 + num_drafts])
    stored = slots[:, 1 : 1 + num_drafts] >= 0
    return memory, _draft.truncate(batch, tokens, probs, limit, stored=stored)


def _vocabulary(config: DFlashConfig, params: Params) -> Vocabulary:
    return Vocabulary(config.vocab_size, params.get("target_ids"))


def _pick(
    config: DFlashConfig,
    params: Params,
    model: DFlash,
    batch: Batch,
    hidden: Float[Array, "B K D"],
) -> tuple[Int[Array, "B K"], Float[Array, "B K V"] | None]:
    """Picks the tokens of mask rows: each on its own, or (DFlash2) from left to right."""
    B, K, D = hidden.shape
    vocabulary = _vocabulary(config, params)
    logits = model.logits(hidden.reshape(B * K, D)).reshape(B, K, -1)
    index = jnp.arange(K, dtype=jnp.int32)

    def pick(scores: Array, index: Array) -> tuple[Array, Array | None]:
        return _draft.pick(vocabulary, config, scores, batch, index)

    if config.model.refine is None:
        return jax.vmap(pick, in_axes=(1, 0), out_axes=1)(logits, index)

    def step(previous: Array, row: tuple[Array, Array, Array]) -> tuple[Array, Any]:
        logits, hidden, index = row
        token, probs = pick(model.selector.rescore(logits, hidden, previous), index)
        return token, (token, probs)

    per_place = (logits.swapaxes(0, 1), hidden.swapaxes(0, 1), index)  # [K, B, ...]
    _, (tokens, probs) = jax.lax.scan(step, batch.next_token, per_place)
    return tokens.T, None if probs is None else probs.swapaxes(0, 1)


PROPOSER = Proposer(
    name="dflash",
    Config=DFlashConfig,
    init=init_pages,
    propose=propose,
    reads=lambda config: Reads(
        hidden_layers=config.model.hidden_layers,
        hidden_size=config.model.input_size,
        sampling=config.samples,
    ),
    init_params=lambda config, key, dtype: init_params(
        DFlash, config, key, dtype, num_ids=config.model.draft_vocab_size
    ),
    recognises=loader.recognises,
    load=partial(loader.load, DFlashConfig),
    rules=loader.rules,
)
