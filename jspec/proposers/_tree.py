"""Drafting a tree: the first pass over a step, then a pass for each level that has children.

A node's keys and values lie beside the pages (`kv_cache.with_nodes`), so that siblings share the
context, each node runs once, and nothing needs to be undone. Source: vLLM 0.20
v1/spec_decode/llm_base_proposer.py, propose_tree, with positions, masks and lengths that agree;
EAGLE-2 (arXiv 2406.16858) section 4 for dynamic trees.
"""

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from jspec.axes import PAD_SLOT, PAD_TOKEN
from jspec.models.kv_cache import KVCache, with_nodes
from jspec.proposers import _draft
from jspec.proposers._config import TreeDraftingConfig
from jspec.proposers._draft import DraftModel, take
from jspec.state import Batch, Drafts, PagedView
from jspec.tree import DynamicTree, Tree


class _Start(NamedTuple):
    """Where a tree grows from: each request's last row of the first pass."""

    live: Bool[Array, "B"]
    position: Int[Array, "B"]
    seq_lens: Int[Array, "B"]
    out: Float[Array, "B D"]
    hidden: Float[Array, "B D"] | None


def draft_tree(
    model: DraftModel,
    config: TreeDraftingConfig,
    batch: Batch,
    cache: KVCache,
    *,
    num_drafts: int,
    shift: bool,
) -> tuple[KVCache, Drafts]:
    """Drafts the tree of a config.

    Args:
      model: the drafter's decoder; keeps its keys and values in a KVCache.
      config: with a tree.
      batch, cache, shift: as `jspec.proposers._draft.chain`.
      num_drafts: nodes wanted (static), the first ones level by level.

    Returns:
      (cache, drafts): tokens and parents in level order; nodes deeper than a request may grow are
      PAD and not counted.
    """
    tree = config.tree
    assert tree is not None
    if batch.token_index is not None:
        raise NotImplementedError(
            "`positions` has three axes (M-RoPE), and a tree's nodes have one. Draft a chain "
            "(tree=None) for this target."
        )
    num_requests = batch.next_token.shape[0]
    page_size, max_model_len = cache.page_size, cache.max_model_len
    with jax.named_scope("first_pass"):
        rows = _draft.first_pass(
            batch, num_slots=1, shift=shift, page_size=page_size, max_model_len=max_model_len
        )
        last = rows.sample_index[:, 0]  # [B]
        out, hidden, cache = model.run(rows.token_ids, rows.hidden, rows.view, cache, rows.embeds)
    if num_drafts == 0:
        return cache, _draft.no_drafts(model, config, batch, tree=tree)
    live = _draft.is_live(batch)
    start = _Start(
        live=live,
        position=take(rows.view.positions, last),
        seq_lens=jnp.where(
            live, batch.seq_lens - batch.num_rejected + (0 if shift else 1), jnp.int32(0)
        ),
        out=take(out, last),
        hidden=None if hidden is None else take(hidden, last),
    )

    def run(
        token: Int[Array, "B X"],
        hidden: Float[Array, "B X D"] | None,
        depth: int,
        nodes: Int[np.ndarray, "X"],
        visible: Bool[Array, "B X C"],
        cache: KVCache,
    ) -> tuple[Float[Array, "B X Vd"], Float[Array, "B X D"] | None, KVCache]:
        """Runs nodes of one level; `nodes` are their places in the cache, C in all."""
        X, C = visible.shape[1:]
        request = jnp.arange(num_requests, dtype=jnp.int32)
        place = request[:, None] * C + nodes[None]
        view = PagedView(
            block_table=batch.block_table,
            seq_lens=start.seq_lens,
            positions=jnp.repeat(jnp.minimum(start.position + depth, max_model_len - 1), X),
            slots=jnp.full(num_requests * X, PAD_SLOT, jnp.int32),
            query_start=jnp.arange(num_requests + 1, dtype=jnp.int32) * X,
            node_slots=jnp.where(start.live[:, None], place, PAD_SLOT).reshape(-1),
            visible=visible.reshape(-1, C),
        )
        flat = None if hidden is None else hidden.reshape(num_requests * X, -1)
        out, hidden, cache = model.run(token.reshape(-1), flat, view, cache, None)
        logits = model.logits(out).reshape(num_requests, X, -1)
        return logits, None if hidden is None else hidden.reshape(num_requests, X, -1), cache

    logits = model.logits(start.out)[:, None]  # [B, 1, V']
    hidden = None if start.hidden is None else start.hidden[:, None]
    with jax.named_scope("tree"):
        if isinstance(tree, Tree):
            grown = _grow_fixed(model, tree, logits, hidden, run, cache, num_drafts)
        else:
            grown = _grow_dynamic(model, tree, logits, hidden, run, cache, num_drafts)
    tokens, parents, depths, cache = grown

    stored = depths <= _num_stored(batch, start, tree.depth, page_size, max_model_len)[:, None]
    return cache, _draft.truncate(
        batch, tokens, None, max_model_len, stored=stored, depths=depths, parents=parents
    )


_Grown = tuple[Int[Array, "B X"], Int[Array, "B X"], Int[Array, "B X"], KVCache]
"""(tokens, parents, depths, cache)"""


def _grow_fixed(
    model: DraftModel,
    tree: Tree,
    logits: Float[Array, "B 1 Vd"],
    hidden: Float[Array, "B 1 D"] | None,
    run: Callable,
    cache: KVCache,
    num_drafts: int,
) -> _Grown:
    """Picks the nodes of a level from their parents' logits, and runs those that have children."""
    tree = Tree(tree.choices[:num_drafts])  # level order: what is left is a tree
    num_requests = logits.shape[0]
    inner = np.unique(tree.parents[tree.parents != PAD_TOKEN])  # nodes with children, ascending
    cache = with_nodes(cache, num_requests, len(inner))
    visible = jnp.asarray(tree.visible[:, inner])
    above = np.array([PAD_TOKEN])  # nodes whose logits are at hand, ascending
    tokens = []
    for depth in range(1, tree.depth + 1):
        level = np.flatnonzero(tree.depths == depth)
        rank = tree.ranks[level]
        parent = np.searchsorted(above, tree.parents[level])
        _, best = jax.lax.top_k(logits, 1 + int(rank.max()))  # the lowest id wins ties
        ids = _draft.to_tokens(model, best[:, parent, rank])  # [B, X of this level]
        tokens.append(ids)
        above = level[np.isin(level, inner)]
        if len(above) == 0:
            break
        among = np.searchsorted(level, above)
        hidden = None if hidden is None else hidden[:, parent[among]]
        seen = jnp.broadcast_to(visible[above][None], (num_requests, len(above), len(inner)))
        place = np.searchsorted(inner, above).astype(np.int32)
        logits, hidden, cache = run(ids[:, among], hidden, depth, place, seen, cache)
    shape = (num_requests, tree.num_nodes)
    parents, depths = (jnp.broadcast_to(x[None], shape) for x in (tree.parents, tree.depths))
    return jnp.concatenate(tokens, axis=1), parents, depths, _without_nodes(cache)


def _grow_dynamic(
    model: DraftModel,
    tree: DynamicTree,
    logits: Float[Array, "B 1 Vd"],
    hidden: Float[Array, "B 1 D"] | None,
    run: Callable,
    cache: KVCache,
    num_drafts: int,
) -> _Grown:
    """Extends the likeliest nodes of each level; keeps the likeliest candidates of all levels."""
    K, num_requests = tree.top_k, logits.shape[0]
    num_inner = (tree.depth - 1) * K
    cache = with_nodes(cache, num_requests, num_inner)
    total = jnp.zeros((num_requests, 1), jnp.float32)  # log-probability of each path
    above = jnp.full((num_requests, 1), PAD_TOKEN, jnp.int32)  # its candidate
    seen = jnp.zeros((num_requests, 1, num_inner), bool)
    ids, scores, parents, depths = [], [], [], []
    for depth in range(1, tree.depth + 1):
        chances = jax.nn.log_softmax(logits.astype(jnp.float32), axis=-1)
        chances, best = jax.lax.top_k(chances, K)  # [B, X, K]
        score = (total[:, :, None] + chances).reshape(num_requests, -1)
        # NaN counts as the largest number, and a child must not come before its parent.
        score = jnp.where(jnp.isnan(score), -jnp.inf, score)
        token = _draft.to_tokens(model, best.reshape(num_requests, -1))
        first = sum(x.shape[1] for x in ids)  # candidates of the levels above
        ids.append(token)
        scores.append(score)
        parents.append(jnp.repeat(above, K, axis=1))
        depths += [depth] * token.shape[1]
        if depth == tree.depth:
            break
        total, chosen = jax.lax.top_k(score, K)
        above, origin = first + chosen, chosen // K
        place = np.arange((depth - 1) * K, depth * K, dtype=np.int32)
        seen = _pick(seen, origin) | jnp.asarray(place[:, None] == np.arange(num_inner))[None]
        hidden = None if hidden is None else _pick(hidden, origin)
        token = _pick(token, chosen)
        logits, hidden, cache = run(token, hidden, depth, place, seen, cache)

    _, kept = jax.lax.top_k(jnp.concatenate(scores, axis=1), tree.num_nodes)
    kept = jnp.sort(kept, axis=1)  # candidates count level by level
    parent = _pick(jnp.concatenate(parents, axis=1), kept)
    # A parent is as likely as its child and comes first, so it is among those kept.
    index = (kept[:, None] < parent[:, :, None]).sum(axis=2, dtype=jnp.int32)
    columns = (
        _pick(jnp.concatenate(ids, axis=1), kept),
        jnp.where(parent == PAD_TOKEN, PAD_TOKEN, index),
        take(jnp.array(depths, jnp.int32), kept),
    )
    tokens, parent, depth = (x[:, :num_drafts] for x in columns)
    return tokens, parent, depth, _without_nodes(cache)


def _num_stored(
    batch: Batch, start: _Start, depth: int, page_size: int, max_model_len: int
) -> Int[Array, "B"]:
    """Counts the levels of each request's tree whose rows would have a KV slot in a chain."""
    position = start.position[:, None] + jnp.arange(depth, dtype=jnp.int32)[None]  # [B, depth]
    page = batch.block_table.at[
        jnp.arange(position.shape[0], dtype=jnp.int32)[:, None], position // page_size
    ].get(mode="fill", fill_value=PAD_SLOT, wrap_negative_indices=False)
    stored = (page >= 0) & (position < max_model_len)
    return jnp.cumprod(stored, axis=1, dtype=jnp.int32).sum(axis=1, dtype=jnp.int32)


def _pick(x: Array, index: Int[Array, "B Y"]) -> Array:
    """Reads entries of each request: [B, X, ...] -> [B, Y, ...]; the indices lie inside."""
    request = jnp.arange(x.shape[0], dtype=jnp.int32)[:, None]
    return x.at[request, index].get(mode="clip", wrap_negative_indices=False)


def _without_nodes(cache: KVCache) -> KVCache:
    return dataclasses.replace(cache, node_k=None, node_v=None)
