"""What Python calls. The tables come one by one: numba takes longer to unpack a named tuple.

`extend`, which is called most, looks itself whether the tables have room; for the others their
caller has.
"""

import functools

import numpy as np
from numba import float32, float64, int32, int64

from jspec._numba import allocating_part, entry, part
from jspec.suffix import branching, drafting, paths, siblings, tables
from jspec.suffix.drafting import Limits, Scratch
from jspec.suffix.paths import append
from jspec.suffix.siblings import hash_child
from jspec.suffix.tables import (
    GROUPS,
    LENGTH,
    LIVE,
    NODES,
    NONE,
    PAGE,
    PAGES,
    STARTS,
    UNUSED,
    Forest,
    depth_of,
    num_buckets,
    token_at,
)

_rows_needed = part(tables.rows_needed)
_entry = entry(branching, drafting, paths, siblings, tables)
_TABLE, _VECTOR = int32[:, ::1], int32[::1]
_FOREST = (*[_TABLE] * 5, *[_VECTOR] * 2)


@functools.cache
def compile_all() -> None:
    """Compiles the functions below: seconds the first time, then from disk."""
    limits = (int64, float64, float64, float64)
    for function, arguments in (
        (rehash, (_VECTOR, _VECTOR)),
        (new_sequence, (int64,)),
        (extend, (int64, int64, _VECTOR)),
        (remove_sequence, (int64,)),
        (remove_tree, (int64,)),
        (speculate, (_VECTOR, float32[::1], *limits, int64, int64, _VECTOR)),
        (advance, (*[_VECTOR] * 5, int64, *limits[1:], _TABLE, _VECTOR)),
    ):
        function.compile((*_FOREST, *arguments))


def grow(forest: Forest, kind: int, num_rows: int) -> Forest:
    """Returns the forest with a larger table; rows keep their numbers.

    Raises:
      MemoryError: their numbers would not fit into int32.
    """
    if num_rows * (PAGE if kind == PAGES else 1) > np.iinfo(np.int32).max:
        raise MemoryError(
            f"the suffix cache would need {num_rows} rows in a table, more than int32 counts. "
            "Lower max_cached_requests, or set max_cached_tokens or max_bytes."
        )
    grown = list(forest)
    grown[kind] = np.empty((num_rows, forest[kind].shape[1]), np.int32)
    grown[kind][: len(forest[kind])] = forest[kind]
    if kind == NODES:
        buckets = np.full(num_buckets(num_rows), NONE, np.int32)
        chain = np.full(num_rows, UNUSED, np.int32)
        chain[: len(forest.chain)] = np.where(forest.chain == UNUSED, UNUSED, NONE)
        grown[-2:] = buckets, chain
        rehash(*grown, forest.buckets, forest.chain)
    return Forest(*grown)


@_entry
def rehash(nodes, groups, pages, sequences, used, buckets, chain, old_buckets, old_chain):
    """Fills `buckets` and `chain` from what they were before the tables grew."""
    forest = Forest(nodes, groups, pages, sequences, used, buckets, chain)
    for first in old_buckets:
        node = int64(first)
        while node != NONE:
            hash_child(forest, node)
            node = int64(old_chain[node])


@_entry
def new_sequence(nodes, groups, pages, sequences, used, buckets, chain, root):
    """See `jspec.suffix.tables.new_sequence`."""
    forest = Forest(nodes, groups, pages, sequences, used, buckets, chain)
    return tables.new_sequence(forest, root)


@_entry
def extend(nodes, groups, pages, sequences, used, buckets, chain, own, shared, tokens):
    """Adds tokens to two sequences (NONE = no such); tells whether there was room, and it did."""
    forest = Forest(nodes, groups, pages, sequences, used, buckets, chain)
    if not _has_room(forest, 2 * tokens.size, 2):
        return False
    for token in tokens:
        if own != NONE:
            append(forest, own, token)
        if shared != NONE:
            append(forest, shared, token)
    return True


@_entry
def remove_sequence(nodes, groups, pages, sequences, used, buckets, chain, sequence):
    """See `jspec.suffix.paths.remove_sequence`."""
    forest = Forest(nodes, groups, pages, sequences, used, buckets, chain)
    paths.remove_sequence(forest, sequence)


@_entry
def remove_tree(nodes, groups, pages, sequences, used, buckets, chain, sequence):
    """See `jspec.suffix.paths.remove_tree`."""
    forest = Forest(nodes, groups, pages, sequences, used, buckets, chain)
    paths.remove_tree(forest, sequence)


@_entry
def speculate(
    nodes,
    groups,
    pages,
    sequences,
    used,
    buckets,
    chain,
    tokens,  # [most] out
    probs,  # [most] out
    most,
    factor,
    offset,
    least_prob,
    own,
    shared_root,
    context,
):
    """See `jspec.suffix.drafting.speculate`."""
    forest = Forest(nodes, groups, pages, sequences, used, buckets, chain)
    limits = Limits(most, factor, offset, least_prob)
    scratch = _scratch(tokens.size, context.size)
    return drafting.speculate(forest, own, shared_root, context, limits, scratch, tokens, probs)


@_entry
def speculate_tree(
    nodes,
    groups,
    pages,
    sequences,
    used,
    buckets,
    chain,
    own,
    shared_root,
    context,
    most,
    factor,
    offset,
    least_prob,
):
    """See `jspec.suffix.branching.speculate_tree`. Compiled when it is first called."""
    forest = Forest(nodes, groups, pages, sequences, used, buckets, chain)
    limits = Limits(most, factor, offset, least_prob)
    return branching.speculate_tree(forest, own, shared_root, context, limits)


@_entry
def advance(
    nodes,
    groups,
    pages,
    sequences,
    used,
    buckets,
    chain,
    own,  # [B] a sequence in a tree of its own, or NONE for padding
    shared,  # [B] the response's sequence in the shared tree, or NONE
    new_start,  # [B + 1]
    new_tokens,  # [new_start[B]]
    room,  # [B] most drafts of each row
    shared_root,
    factor,
    offset,
    least_prob,
    tokens,  # [B, K] out
    num_drafts,  # [B] out
):
    """Adds each row's new tokens and drafts for it, row by row."""
    forest = Forest(nodes, groups, pages, sequences, used, buckets, chain)
    depth = depth_of(forest)
    context, probs = np.empty(depth, np.int32), np.empty(tokens.shape[1], np.float32)
    scratch = _scratch(tokens.shape[1], depth)
    for b in range(own.size):
        if own[b] == NONE:
            continue
        for i in range(new_start[b], new_start[b + 1]):
            append(forest, own[b], new_tokens[i])
            if shared[b] != NONE:
                append(forest, shared[b], new_tokens[i])
        limits = Limits(min(int64(room[b]), tokens.shape[1]), factor, offset, least_prob)
        if limits.most <= 0:
            continue
        length = int64(sequences[own[b], LENGTH])
        size = min(length, depth)
        oldest = sequences[own[b], STARTS + (length - size) % depth + depth]
        for i in range(size):
            context[i] = token_at(pages, oldest, i)
        num_drafts[b] = drafting.speculate(
            *(forest, own[b], shared_root, context[:size], limits, scratch, tokens[b], probs)
        )[0]


@part
def _has_room(forest, num_tokens, num_sequences):
    depth, used = depth_of(forest), forest.used
    for kind, table in ((NODES, forest.nodes), (GROUPS, forest.groups), (PAGES, forest.pages)):
        needed = _rows_needed(kind, depth, num_tokens, num_sequences)
        if table.shape[0] - used[kind, LIVE] < needed:
            return False
    return True


@allocating_part
def _scratch(num_drafts, depth):
    tokens, probs = np.empty(num_drafts, np.int32), np.empty(num_drafts, np.float32)
    return Scratch(tokens, probs, np.empty(depth, np.int64))
