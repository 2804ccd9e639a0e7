"""Drafts that are trees: alternatives beside the most frequent path, the most probable first."""

import numpy as np
from numba import float32, int32, int64

from jspec._numba import allocating_part
from jspec.suffix.drafting import limit_of, match
from jspec.suffix.tables import (
    CHILD,
    COUNT,
    END,
    NEXT,
    NONE,
    ROOT,
    TOKEN,
    depth_of,
    is_leaf,
    leaf_of,
    token_at,
)


@allocating_part
def speculate_tree(forest, sequence, shared_root, context, limits):
    """Drafts a tree from a sequence's own tree, or from the shared one if that scores higher.

    Args:
      As `jspec.suffix.drafting.speculate`.

    Returns:
      (tokens, parents, probs, score, match_len).
    """
    root = int64(forest.sequences[sequence, ROOT])
    own = _search(forest, root, context, limits, float32(-1))
    score = max(own[3], float32(0))
    shared = _search(forest, shared_root, context, limits, score)
    if shared[3] > score:
        return shared
    return own[0], own[1], own[2], score, own[4]


@allocating_part
def _search(forest, root, context, limits, score):
    tokens, parents = np.empty(0, np.int32), np.empty(0, np.int32)
    probs, match_len = np.empty(0, np.float32), 0
    ends = np.empty(context.size, np.int64)
    for size in range(match(forest, root, context, ends), 0, -1):
        most = limit_of(size, limits)
        if float32(most) <= score:
            continue
        found = _expand(forest, ends[size], size, most, float32(limits.least_prob))
        if found[3] > score:
            tokens, parents, probs, score = found
            match_len = size
    return tokens, parents, probs, score, match_len


@allocating_part
def _expand(forest, node, size, most, least):
    """Takes the most probable open branch again and again.

    A branch is (probability, node, tokens on its path so far, parent in the draft, whether the
    node is yet to be drafted). A chain of equal counts opens no branches: among equals the heap's
    own order decides, so the heap has to see what the original's does.
    """
    nodes = forest.nodes
    tokens, parents = [int32(0) for _ in range(0)], [int32(0) for _ in range(0)]
    probs, score = [float32(0) for _ in range(0)], float32(0)
    heap = [(float32(1), node, int64(size), int64(-1), False)]
    while len(tokens) < most and len(heap) > 0:
        prob, node, size, parent, is_new = _pop(heap)
        token = int64(END)
        if is_new:
            token = int64(nodes[node, TOKEN])
        elif is_leaf(forest, node):
            if size < depth_of(forest):
                token = token_at(forest.pages, leaf_of(nodes[node, CHILD]), size)
        else:
            child = int64(nodes[node, CHILD])
            if child != NONE and nodes[child, COUNT] == nodes[node, COUNT]:
                node, token = child, int64(nodes[child, TOKEN])
            else:
                while child != NONE:
                    share = prob * float32(nodes[child, COUNT]) / float32(nodes[node, COUNT])
                    if share < least:
                        break
                    _push(heap, (share, child, size, parent, True))
                    child = int64(nodes[child, NEXT])
        if token != END:
            _push(heap, (prob, node, size + 1, int64(len(tokens)), False))
            tokens.append(int32(token))
            parents.append(int32(parent))
            probs.append(prob)
            score += prob
    return np.array(tokens), np.array(parents), np.array(probs), score


@allocating_part
def _push(heap, branch):
    heap.append(branch)
    _rise(heap, len(heap) - 1, branch)


@allocating_part
def _rise(heap, hole, branch):
    while hole > 0 and heap[(hole - 1) // 2][0] < branch[0]:
        heap[hole] = heap[(hole - 1) // 2]
        hole = (hole - 1) // 2
    heap[hole] = branch


@allocating_part
def _pop(heap):
    """Takes the greatest branch out, among equals the one that C++'s std::pop_heap takes.

    The hole sinks along the greater children, the right one of equals, to the bottom; the last
    branch then rises from there.
    """
    greatest, last = heap[0], heap.pop()
    if len(heap) == 0:
        return greatest
    hole = 0
    while 2 * hole + 1 < len(heap):
        child = min(2 * hole + 2, len(heap) - 1)
        if heap[child][0] < heap[2 * hole + 1][0]:
            child = 2 * hole + 1
        heap[hole] = heap[child]
        hole = child
    _rise(heap, hole, last)
    return greatest
