"""Drafting with several modules in turn: draft t comes from module t mod n.

Each module has keys and values of its own, over the same positions. Module i reads, at position
r, the output of module i - 1 at r - 1 (module 0: the target's hidden state at r) and the token at
r + 1. Source: arXiv 2412.19437 section 2.2; vLLM's multi-module MTP speculator.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jspec.axes import PAD_SLOT
from jspec.models.kv_cache import KVCache
from jspec.pallas.eagle_step import eagle_step
from jspec.proposers import _draft
from jspec.proposers._config import DraftingConfig
from jspec.proposers._draft import DraftModel, Rows, take
from jspec.state import Batch, Drafts, PagedView, pytree


@pytree
class Memory:
    """What several modules carry between steps.

    Attributes:
      cache: keys and values; layer i is module i's.
      outputs: of modules 0..n-2 at each request's last accepted position, which the next modules
        read one position later.
      next_position: the position that they are read at; PAD where nothing was run yet.
    """

    cache: KVCache
    outputs: Float[Array, "X R D"]
    next_position: Int[Array, "R"]


def init(cache: KVCache, *, max_requests: int, hidden_size: int, dtype: Any) -> Memory:
    """Makes the memory of as many modules as the cache has layers."""
    num_modules = cache.k.shape[0]
    return Memory(
        cache=cache,
        outputs=jnp.zeros((num_modules - 1, max_requests, hidden_size), dtype),
        next_position=jnp.full(max_requests, PAD_SLOT, jnp.int32),
    )


def forget(memory: Memory, slot: Int[Array, ""]) -> Memory:
    """Empties a request's row, before and after its life."""
    next_position = memory.next_position.at[slot].set(PAD_SLOT, mode="drop")
    return dataclasses.replace(memory, next_position=next_position)


def in_turn(
    models: Sequence[DraftModel],
    config: DraftingConfig,
    batch: Batch,
    memory: Memory,
    *,
    num_drafts: int,
) -> tuple[Memory, Drafts]:
    """Drafts one token after the other, each with the next module.

    A module has seen nothing of the positions that earlier drafts took while others ran, so its
    pass covers these, too: draft t runs min(t, n) rows a request, the last of which gives it.

    Args:
      models: the modules, in order; all read the target's hidden width, and write their own layer
        of the cache.
      config: how tokens are picked.
      batch: the step.
      memory: donated by the enclosing jit.
      num_drafts: drafts wanted (static); 0 runs the first pass alone.

    Returns:
      (memory, drafts).
    """
    n = len(models)
    page_size, max_model_len = memory.cache.page_size, memory.cache.max_model_len
    limit = min(max_model_len, batch.block_table.shape[1] * page_size)
    with jax.named_scope("first_pass"):
        rows = _draft.first_pass(
            batch, num_slots=1, shift=True, page_size=page_size, max_model_len=max_model_len
        )
        last = rows.sample_index[:, 0]  # [B]
        outputs, memory = _run_all(models, batch, rows, memory)  # n of [B, D]
    num_requests = last.shape[0]
    if num_drafts == 0:
        return memory, _draft.no_drafts(models[0], config, batch)

    # As in a chain: a request without a kept token runs as if past the limit.
    live = _draft.is_live(batch)
    position = jnp.where(live, take(rows.view.positions, last), max_model_len)
    axes = None if rows.view.axes is None else take(rows.view.axes.T, last)  # [B, 3]
    seq_lens = batch.seq_lens - batch.num_rejected
    picked = [_draft.pick(models[0], config, models[0].logits(outputs[0]), batch, 0)]
    places: list[_Places] = []
    hidden, cache = outputs[0][:, None], memory.cache  # [B, 1, D]
    for t in range(1, num_drafts):
        with jax.named_scope(f"draft_{t}"):
            _, slots, seq_lens = eagle_step(
                position, batch.block_table, seq_lens, page_size=page_size, max_model_len=limit
            )
            position = position + 1
            if axes is not None:
                axes = jnp.where((position < max_model_len)[:, None], axes + 1, max_model_len - 1)
            places.append(_Places(picked[-1][0], position, axes, slots))
            model, width = models[t % n], min(t, n)
            ids, at, all_axes, slots = (
                _side_by_side(x) for x in zip(*places[-width:], strict=True)
            )
            view = PagedView(
                block_table=batch.block_table,
                seq_lens=jnp.where(live, seq_lens, 0),
                positions=jnp.minimum(at, max_model_len - 1),
                axes=None if all_axes is None else all_axes.T,
                slots=slots,
                query_start=jnp.arange(num_requests + 1, dtype=jnp.int32) * width,
            )
            out, _, cache = model.run(ids, hidden.reshape(len(ids), -1), view, cache, None)
            hidden = out.reshape(num_requests, width, -1)
            picked.append(_draft.pick(model, config, model.logits(hidden[:, -1]), batch, t))
            if t < n:  # the next module reads its own predecessor's last accepted output, too
                hidden = jnp.concatenate([outputs[t][:, None], hidden], axis=1)

    tokens, probs = jax.tree.map(lambda *columns: jnp.stack(columns, axis=1), *picked)  # [B, K]
    all_slots = jnp.stack([take(rows.view.slots, last), *(p.slots for p in places)], axis=1)
    drafts = _draft.truncate(batch, tokens, probs, max_model_len, stored=all_slots >= 0)
    return dataclasses.replace(memory, cache=cache), drafts


class _Places(NamedTuple):
    """A draft of each request, and where its row lies."""

    token: Int[Array, "B"]
    position: Int[Array, "B"]
    axes: Int[Array, "B 3"] | None
    slots: Int[Array, "B"]


def _side_by_side(columns: Sequence[Any]) -> Any:
    """Lays columns of requests out flat, request by request: width times [B] -> [B * width]."""
    if columns[0] is None:
        return None
    stacked = jnp.stack(columns, axis=1)
    return stacked.reshape(-1, *stacked.shape[2:])


def _run_all(
    models: Sequence[DraftModel], batch: Batch, rows: Rows, memory: Memory
) -> tuple[list[Float[Array, "B D"]], Memory]:
    """Runs every module over a step's rows.

    In: outputs of module i at rows [x0 x1 | y0], at the positions before them x and y.
    Out: hidden states of module i + 1 [x x0 | y].

    Returns:
      (outputs, memory): of each module at the last accepted row.
    """
    start, end = batch.query_start[:-1], batch.query_start[1:]
    slot = jnp.where(end > start, batch.request_slot, PAD_SLOT)  # [B]
    start_row = jnp.where(end > start, start, batch.token_ids.shape[0])
    known = memory.next_position.at[slot].get(
        mode="fill", fill_value=PAD_SLOT, wrap_negative_indices=False
    )
    # Nothing is known before position 0, nor after a part of the prompt that was cached elsewhere.
    first = take(rows.view.positions, start)
    follows = (first > 0) & (known == first)
    before = memory.outputs.at[:, slot].get(mode="fill", fill_value=0, wrap_negative_indices=False)
    before = jnp.where(follows[None, :, None], before, 0)  # [n - 1, B, D]

    last = rows.sample_index[:, 0]
    hidden, cache, outputs = rows.hidden, memory.cache, []
    for i, model in enumerate(models):
        out, _, cache = model.run(rows.token_ids, hidden, rows.view, cache, rows.embeds)
        outputs.append(take(out, last))
        if i + 1 < len(models):
            hidden = jnp.roll(out, 1, axis=0).at[start_row].set(before[i], mode="drop")
    memory = Memory(
        cache=cache,
        outputs=memory.outputs.at[:, slot].set(
            jnp.stack(outputs[:-1]), mode="drop", wrap_negative_indices=False
        ),
        next_position=memory.next_position.at[slot].set(
            take(rows.view.positions, last) + 1, mode="drop", wrap_negative_indices=False
        ),
    )
    return outputs, memory
