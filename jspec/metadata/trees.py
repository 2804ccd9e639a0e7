"""Trees of drafts in a step: where their rows lie, and the kept path as the chain it is."""

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jspec.axes import PAD_SLOT, AnyArray
from jspec.metadata.prepare import row_request
from jspec.state import PagedView, Scheduled


def ancestors(parents: Int[AnyArray, "B X"], *, depth: int) -> Bool[Array, "B X X"]:
    """Finds which nodes lie on the way from the root to each node, itself included.

    In: parents [[-1 -1 0 2]], depth 3. Out: rows [1 0 0 0], [0 1 0 0], [1 0 1 0], [1 0 1 1].

    Args:
      parents: node that each node follows; PAD for the root, and for what is no node.
      depth: most tokens from the root to a node.
    """
    node = jnp.arange(parents.shape[1], dtype=jnp.int32)[None, None]
    reach = jnp.asarray(parents)[:, :, None] == node
    reach |= jnp.eye(node.size, dtype=bool)[None]
    for _ in range((depth - 2).bit_length() if depth > 1 else 0):  # each doubles the distance
        steps = reach.astype(jnp.float32)
        reach = jnp.einsum("bij,bjk->bik", steps, steps) > 0
    return reach


def tree_view(view: PagedView, scheduled: Scheduled, *, depth: int) -> PagedView:
    """Places the drafts of a step as tree nodes: beside the pages, each after its parent.

    A node sees the rows before the drafts and its ancestors, and its position is its depth after
    the last of them. The other rows stay where they are.

    Args:
      view: of the same step, as if its drafts were chains; see `paged_view`.
      scheduled: with `draft_parents`.
      depth: most tokens from the root to a node.
    """
    assert scheduled.draft_parents is not None
    if scheduled.token_index is not None:
        raise NotImplementedError(
            "`positions` has three axes (M-RoPE), and drafts come as trees, whose nodes have one. "
            "Draft a chain (tree=None) for this target."
        )
    B, X = scheduled.draft_parents.shape
    num_rows = view.positions.shape[0]
    request, live = row_request(scheduled.query_start, num_rows)
    first = _rows(scheduled.query_start[1:] - scheduled.num_drafts, request)  # [B] -> [T]
    node = jnp.arange(num_rows, dtype=jnp.int32) - first
    is_node = live & (node >= 0) & (node < X)
    visible = ancestors(scheduled.draft_parents, depth=depth)
    visible = visible.at[request, node].get(mode="clip", wrap_negative_indices=False)
    visible &= is_node[:, None]  # [T, X]
    node_depth = visible.sum(axis=1, dtype=jnp.int32)
    return dataclasses.replace(
        view,
        seq_lens=scheduled.seq_lens - scheduled.num_drafts,
        positions=jnp.where(is_node, view.positions - node - 1 + node_depth, view.positions),
        slots=jnp.where(is_node, PAD_SLOT, view.slots),
        node_slots=jnp.where(is_node, request * X + node, PAD_SLOT),
        visible=visible,
    )


def path_as_chain(
    scheduled: Scheduled,
    hidden: Float[Array, "T Dh"] | None,
    path: Int[Array, "B J"],
    num_accepted: Int[Array, "B"],
) -> tuple[Float[Array, "T Dh"] | None, Int[Array, "T"]]:
    """Moves the rows of accepted nodes to the front of their request's drafts.

    What comes back is the step that a chain of these drafts would have been: `prepare` and the
    drafter need not know of trees. The rows after are rejected drafts.

    In (one request): token_ids [7 | 4 5 6], path [[1 2]], num_accepted [2].
    Out: token_ids [7 | 5 6 6].

    Args:
      scheduled: the step.
      hidden: hidden states of its rows; move along.
      path: accepted nodes from the root on; see `jspec.verification.greedy.tree`.
      num_accepted: how many there are.

    Returns:
      (hidden, token_ids).
    """
    num_rows = scheduled.token_ids.shape[0]
    row = jnp.arange(num_rows, dtype=jnp.int32)
    request, live = row_request(scheduled.query_start, num_rows)
    first = _rows(scheduled.query_start[1:] - scheduled.num_drafts, request)
    place = row - first
    node = path.at[request, place].get(mode="clip", wrap_negative_indices=False)
    moves = live & (place >= 0) & (place < _rows(num_accepted, request))
    source = jnp.where(moves, first + node, row)
    return None if hidden is None else _rows(hidden, source), _rows(scheduled.token_ids, source)


def _rows(x: AnyArray, index: Int[Array, "T"]) -> Array:
    """Reads rows of x by indices that lie inside."""
    return jnp.asarray(x).at[index].get(mode="clip", wrap_negative_indices=False)
