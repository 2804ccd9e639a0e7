"""Drafts from suffix trees: match the end of a context, follow what came next most often.

Every suffix of the context that a tree knows gives a draft, whose score is the sum of its tokens'
probabilities: the expected number of accepted tokens. The best score wins, the longer match among
equals, and a request's own tree against the shared one.
"""

from typing import NamedTuple

import numpy as np
from jaxtyping import Float32, Int32, Int64
from numba import float32, int64

from jspec._numba import part
from jspec.suffix.siblings import find
from jspec.suffix.tables import (
    CHILD,
    COUNT,
    END,
    LINK,
    NONE,
    ROOT,
    TOKEN,
    depth_of,
    is_leaf,
    leaf_of,
    token_at,
)

_SHORT = 4  # most contexts match fewer tokens of the shared tree, so that a match is tried first


class Limits(NamedTuple):
    """How much is drafted: a match of m tokens gives at most `factor * m + offset` of them."""

    most: int
    factor: float
    offset: float
    least_prob: float


class Scratch(NamedTuple):
    """Room for a draft that may not be the best one, and for the ends of all matches."""

    tokens: Int32[np.ndarray, "K"]
    probs: Float32[np.ndarray, "K"]
    ends: Int64[np.ndarray, "depth"]


@part
def speculate(forest, sequence, shared_root, context, limits, scratch, tokens, probs):
    """Drafts from a sequence's own tree, or from the shared one where that scores higher.

    Args:
      forest: the tables.
      sequence: whose tree is asked first.
      shared_root: root of the shared tree.
      context: int32 [n], n <= depth; its last n - 1 tokens are matched, and fewer.
      limits: see `Limits`.
      scratch: see `Scratch`.
      tokens: int32 [K], filled with the draft.
      probs: float32 [K], likewise.

    Returns:
      (num_drafts, score, match_len).
    """
    root = int64(forest.sequences[sequence, ROOT])
    nothing = (0, float32(-1), 0)
    own = _search(forest, root, context, limits, scratch, tokens, probs, nothing)
    own = (own[0], max(own[1], float32(0)), own[2])
    return _search(forest, shared_root, context, limits, scratch, tokens, probs, own)


@part
def _search(forest, root, context, limits, scratch, tokens, probs, best):
    """Returns (num_drafts, score, match_len) of the best draft, unless none beats `best`."""
    num_drafts, score, match_len = best
    for size in range(match(forest, root, context, scratch.ends), 0, -1):
        most = limit_of(size, limits)
        if float32(most) <= score:  # a token scores 1 at most
            continue
        end = scratch.ends[size]
        count, found = _follow(forest, end, size, most, limits, scratch.tokens, scratch.probs)
        if found > score:
            num_drafts, score, match_len = count, found, size
            for i in range(count):
                tokens[i], probs[i] = scratch.tokens[i], scratch.probs[i]
    return num_drafts, score, match_len


@part
def limit_of(size, limits):
    """Bounds the draft of a match, rounding as the original: the last sum alone is double."""
    wanted = float32(size) * float32(limits.factor) + float32(limits.offset)
    return max(0, int(min(float(wanted) + 1e-6, float(limits.most))))


@part
def match(forest, root, context, ends):
    """Fills `ends[m]` with the node or leaf that the last m tokens lead to; returns the longest m.

    A node links to that of its path without the first token, so that the walk need not start from
    the root again for each m.
    """
    most = context.size - 1
    if most > _SHORT and _walk(forest, root, 0, context, -_SHORT, False)[2] == NONE:
        most = _SHORT - 1
    node, known, longest = root, 0, 0
    for size in range(most, 0, -1):
        if known > 0:
            node, known = int64(forest.nodes[node, LINK]), known - 1
        node, known, end = _walk(forest, node, known, context, -size, longest > 0)
        if end != NONE:
            longest = max(longest, size)
            ends[size] = end
    return longest


@part
def _walk(forest, node, known, context, start, is_match):
    """Follows context[start:], of which `known` tokens led to a node.

    Returns:
      (node, known, end): the deepest node, how many tokens led there, and where all of them lead,
      a leaf included; NONE = nowhere, which `is_match` rules out.
    """
    start += context.size
    size = context.size - start
    while known < size:
        child = find(forest, node, context[start + known])
        if child == NONE:
            return node, known, child
        if is_leaf(forest, child):
            if is_match or _leads_on(forest, child, context, start, known + 1):
                return node, known, child
            return node, known, int64(NONE)
        node, known = child, known + 1
    return node, known, node


@part
def _leads_on(forest, leaf, context, start, known):
    """Tells whether a leaf goes on like context[start:], of which `known` tokens led to it."""
    place = leaf_of(forest.nodes[leaf, CHILD])
    for distance in range(known, context.size - start):
        token = token_at(forest.pages, place, distance)
        if token == END or token != context[start + distance]:
            return False
    return True


@part
def _follow(forest, node, size, most, limits, tokens, probs):
    """Follows the most frequent child; returns (num_drafts, score)."""
    nodes, least = forest.nodes, float32(limits.least_prob)
    prob, score, count = float32(1), float32(0), 0
    if prob < least:
        return count, score
    while count < most and not is_leaf(forest, node):
        child = int64(nodes[node, CHILD])
        if child == NONE:
            return count, score
        prob *= float32(nodes[child, COUNT]) / float32(nodes[node, COUNT])
        if prob < least:
            return count, score
        tokens[count], probs[count] = nodes[child, TOKEN], prob
        score += prob
        count += 1
        node = child
    if count < most:  # one occurrence is left, which goes on with certainty
        place, depth = leaf_of(nodes[node, CHILD]), depth_of(forest)
        while count < most and size + count < depth:
            token = token_at(forest.pages, place, size + count)
            if token == END:
                break
            tokens[count], probs[count] = token, prob
            score += prob
            count += 1
    return count, score
