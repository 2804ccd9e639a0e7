"""Drafter memory by request, for runners that pass batch indices instead of batch slots.

The order of requests changes from step to step, but a request keeps its KV slots: the slot of its
last accepted token is the one before the first row of its next step.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int32

from jspec import proposers
from jspec.axes import INT32_MAX, PAD_SLOT
from jspec.pallas._lookup import is_page
from jspec.proposers import _in_turn
from jspec.state import Batch, Drafts, Memory, Params, pytree


@pytree
class FollowedMemory:
    """A drafter's memory, in which a request's row is found by its KV slot.

    Attributes:
      inner: the drafter's.
      slot: KV slot of the last accepted token of the request that used each row; PAD where none
        did.
      idle: steps since a row was used. A new request gets the row that was idle longest.
    """

    inner: _in_turn.Memory
    slot: Int32[Array, "R"]
    idle: Int32[Array, "R"]


def followed(memory: Memory) -> Memory:
    """Wraps a memory that has a row for each request, so that requests find their rows."""
    if not isinstance(memory, _in_turn.Memory):
        return memory
    shape, place = memory.next_position.shape, memory.next_position.sharding
    nothing, zeros = np.full(shape, PAD_SLOT, np.int32), np.zeros(shape, np.int32)
    slot, idle = jax.device_put((nothing, zeros), place)  # committed, as a step's results are
    return FollowedMemory(inner=memory, slot=slot, idle=idle)


def propose(
    config: object, params: Params, memory: Memory, batch: Batch, *, num_drafts: int
) -> tuple[Memory, Drafts]:
    """Drafts as `jspec.proposers.propose`, for requests in any order.

    Args:
      config, params, num_drafts: as there.
      memory: of `followed`.
      batch: the step; `request_slot` is only read to find padding.

    Returns:
      (memory, drafts).
    """
    if not isinstance(memory, FollowedMemory):
        return proposers.propose(config, params, memory, batch, num_drafts=num_drafts)
    memory, batch = _follow(memory, batch)
    inner, drafts = proposers.propose(config, params, memory.inner, batch, num_drafts=num_drafts)
    return dataclasses.replace(memory, inner=inner), drafts


def _follow(memory: FollowedMemory, batch: Batch) -> tuple[FollowedMemory, Batch]:
    """Finds the row of each request, or assigns one."""
    inner, num_rows = memory.inner, len(memory.slot)
    start, end = batch.query_start[:-1], batch.query_start[1:]
    runs = (batch.request_slot >= 0) & (end > start)
    index = jnp.asarray(batch.positions if batch.token_index is None else batch.token_index)
    first = index.at[start].get(mode="clip", wrap_negative_indices=False)
    slot = _slot(batch, first - 1, inner.cache.page_size)
    same = (memory.slot[None] == slot[:, None]) & (inner.next_position[None] == first[:, None])
    same &= (runs & (slot >= 0))[:, None]  # [B, R]
    # Pages are reused: of two rows with one slot, the one used last is the request's.
    source = jnp.argmax(jnp.where(same, INT32_MAX - memory.idle, -1), axis=1)
    found = same.any(axis=1)
    # Requests that share a cached prefix may find one row: the others of them get copies.
    claims = found[:, None] & (source[:, None] == jnp.arange(num_rows)[None])  # [B, R]
    owns = found & (jnp.cumsum(claims, axis=0) == 1)[jnp.arange(len(source)), source]

    is_kept = (claims & owns[:, None]).any(axis=0)
    oldest = jnp.argsort(jnp.where(is_kept, -1, memory.idle), descending=True)
    needs = runs & ~owns
    rank = jnp.cumsum(needs) - 1
    free = oldest.at[rank].get(mode="clip", wrap_negative_indices=False)
    has_room = rank < num_rows - is_kept.sum()
    row = jnp.where(owns, source, jnp.where(needs & has_room, free, PAD_SLOT)).astype(jnp.int32)

    def put(x: Array, values: Array | int) -> Array:
        return x.at[..., row].set(values, mode="drop", wrap_negative_indices=False)

    outputs = inner.outputs.at[:, source].get(mode="clip", wrap_negative_indices=False)
    inner = dataclasses.replace(
        inner,
        outputs=inner.outputs.at[:, row].set(outputs, mode="drop", wrap_negative_indices=False),
        next_position=put(inner.next_position, jnp.where(found, first, PAD_SLOT)),
    )
    last = index.at[batch.last_index].get(mode="clip", wrap_negative_indices=False)
    memory = FollowedMemory(
        inner=inner,
        slot=put(memory.slot, _slot(batch, last, inner.cache.page_size)),
        idle=put(jnp.minimum(memory.idle, INT32_MAX - 1) + 1, 0),
    )
    return memory, dataclasses.replace(batch, request_slot=row)


def _slot(batch: Batch, index: Int32[Array, "B"], page_size: int) -> Int32[Array, "B"]:
    """KV slot of a place in each request; PAD where there is none."""
    request = jnp.arange(len(index), dtype=jnp.int32)
    page = (
        jnp.asarray(batch.block_table)
        .at[request, jnp.where(index < 0, PAD_SLOT, index // page_size)]
        .get(mode="fill", fill_value=PAD_SLOT, wrap_negative_indices=False)
    )
    return jnp.where(is_page(page, page_size), page * page_size + index % page_size, PAD_SLOT)
