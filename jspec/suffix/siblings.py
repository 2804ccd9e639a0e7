"""Children of a node: found by token, listed by falling count.

Equal counts keep the order that Arctic Inference gives them, since drafts depend on it: a child
that rises passes all its equals, and so does one that falls. A group records the two ends of a run
of equals, so that no step takes longer the more children there are. An only child needs neither
group nor hash.
"""

from numba import int64, uint32, uint64

from jspec._numba import part
from jspec.suffix.tables import (
    CHILD,
    COUNT,
    GROUP,
    GROUPS,
    HEAD,
    NEXT,
    NONE,
    PARENT,
    PREV,
    TAIL,
    TOKEN,
    give,
    take,
)


@part
def find(forest, parent, token):
    """Returns the child of a node by its token, or NONE."""
    nodes = forest.nodes
    first = int64(nodes[parent, CHILD])
    if first == NONE or nodes[first, TOKEN] == token:
        return first
    if is_only(forest, first):
        return int64(NONE)
    node = int64(forest.buckets[_bucket(forest, parent, token)])
    while node != NONE and (nodes[node, TOKEN] != token or nodes[node, PARENT] != parent):
        node = int64(forest.chain[node])
    return node


@part
def is_only(forest, node):
    return forest.nodes[node, PREV] == node


@part
def adopt(forest, node):
    """Makes a new node of count 1 the last child of its parent."""
    nodes = forest.nodes
    parent = nodes[node, PARENT]
    first = int64(nodes[parent, CHILD])
    if first == NONE:
        nodes[parent, CHILD] = node
        return
    if is_only(forest, first):
        hash_child(forest, first)
    hash_child(forest, node)
    _insert_after(forest, node, int64(nodes[first, PREV]))
    _join(forest, node)


@part
def disown(forest, node):
    """Takes a node from its parent's children."""
    nodes = forest.nodes
    parent, was_only = nodes[node, PARENT], is_only(forest, node)
    _leave(forest, node)
    _detach(forest, node)
    if not was_only:
        unhash_child(forest, node)
        first = int64(nodes[parent, CHILD])
        if is_only(forest, first):
            unhash_child(forest, first)


@part
def replace(forest, old, new):
    """Puts a new node where a sibling of the same token and count was."""
    nodes, groups = forest.nodes, forest.groups
    parent, before, after = nodes[old, PARENT], nodes[old, PREV], nodes[old, NEXT]
    if is_only(forest, old):
        nodes[parent, CHILD] = new
        return
    unhash_child(forest, old)
    hash_child(forest, new)
    if nodes[parent, CHILD] == old:
        nodes[parent, CHILD] = new
    else:
        nodes[before, NEXT] = new
    nodes[nodes[parent, CHILD] if after == NONE else after, PREV] = new
    nodes[new, PREV], nodes[new, NEXT] = before, after
    group = nodes[old, GROUP]
    nodes[new, GROUP] = group
    if group != NONE:
        if groups[group, HEAD] == old:
            groups[group, HEAD] = new
        elif groups[group, TAIL] == old:
            groups[group, TAIL] = new


@part
def increment(forest, node):
    """Counts one more; moves before all siblings that had as many, or that now do."""
    nodes = forest.nodes
    count, before = nodes[node, COUNT], int64(nodes[node, PREV])
    if before == node:
        nodes[node, COUNT] = count + 1
        return
    is_first = nodes[nodes[node, PARENT], CHILD] == node
    if is_first or nodes[before, COUNT] > count + 1:
        _leave(forest, node)
        nodes[node, COUNT] = count + 1
        return
    group = nodes[before, GROUP]
    head = before if group == NONE else int64(forest.groups[group, HEAD])
    _leave(forest, node)
    _detach(forest, node)
    nodes[node, COUNT] = count + 1
    _insert_before(forest, node, head)
    _join(forest, node)


@part
def decrement(forest, node):
    """Counts one less; moves after all siblings that had as many."""
    nodes = forest.nodes
    count, after = nodes[node, COUNT], nodes[node, NEXT]
    if after == NONE or nodes[after, COUNT] < count:
        _leave(forest, node)
        nodes[node, COUNT] = count - 1
    else:
        tail = int64(forest.groups[nodes[node, GROUP], TAIL])
        _leave(forest, node)
        _detach(forest, node)
        nodes[node, COUNT] = count - 1
        _insert_after(forest, node, tail)
    _join(forest, node)


@part
def hash_child(forest, node):
    bucket = _bucket(forest, forest.nodes[node, PARENT], forest.nodes[node, TOKEN])
    forest.chain[node] = forest.buckets[bucket]
    forest.buckets[bucket] = node


@part
def unhash_child(forest, node):
    chain = forest.chain
    bucket = _bucket(forest, forest.nodes[node, PARENT], forest.nodes[node, TOKEN])
    other = int64(forest.buckets[bucket])
    if other == node:
        forest.buckets[bucket] = chain[node]
        return
    while chain[other] != node:
        other = int64(chain[other])
    chain[other] = chain[node]


@part
def _bucket(forest, parent, token):
    key = (uint64(parent) << uint64(32)) | uint64(uint32(token))
    key *= uint64(0x9E3779B97F4A7C15)
    key ^= key >> uint64(29)
    return int64((key >> uint64(16)) & uint64(forest.buckets.size - 1))


@part
def _detach(forest, node):
    nodes = forest.nodes
    parent, before, after = nodes[node, PARENT], nodes[node, PREV], nodes[node, NEXT]
    if nodes[parent, CHILD] == node:
        nodes[parent, CHILD] = after
    else:
        nodes[before, NEXT] = after
    if after != NONE:
        nodes[after, PREV] = before
    elif nodes[parent, CHILD] != NONE:
        nodes[nodes[parent, CHILD], PREV] = before


@part
def _insert_before(forest, node, other):
    nodes = forest.nodes
    parent, before = nodes[node, PARENT], nodes[other, PREV]
    if nodes[parent, CHILD] == other:
        nodes[parent, CHILD] = node
    else:
        nodes[before, NEXT] = node
    nodes[node, PREV], nodes[node, NEXT] = before, other
    nodes[other, PREV] = node


@part
def _insert_after(forest, node, other):
    nodes = forest.nodes
    after = nodes[other, NEXT]
    nodes[node, PREV], nodes[node, NEXT] = other, after
    nodes[other, NEXT] = node
    nodes[nodes[nodes[node, PARENT], CHILD] if after == NONE else after, PREV] = node


@part
def _leave(forest, node):
    """Takes a node out of its group; it keeps its place in the list."""
    nodes, groups = forest.nodes, forest.groups
    group = int64(nodes[node, GROUP])
    if group == NONE:
        return
    nodes[node, GROUP] = NONE
    if groups[group, HEAD] == node:
        groups[group, HEAD] = nodes[node, NEXT]
    elif groups[group, TAIL] == node:
        groups[group, TAIL] = nodes[node, PREV]
    if groups[group, HEAD] == groups[group, TAIL]:
        nodes[groups[group, HEAD], GROUP] = NONE
        give(groups, forest.used, GROUPS, group)


@part
def _join(forest, node):
    """Puts a node into the group of a neighbour that has its count, if one has."""
    nodes, groups = forest.nodes, forest.groups
    count, before, after = nodes[node, COUNT], nodes[node, PREV], nodes[node, NEXT]
    is_first = nodes[nodes[node, PARENT], CHILD] == node
    if not is_first and nodes[before, COUNT] == count:
        other, end = before, TAIL
    elif after != NONE and nodes[after, COUNT] == count:
        other, end = after, HEAD
    else:
        return
    group = int64(nodes[other, GROUP])
    if group == NONE:
        group = take(groups, forest.used, GROUPS)
        groups[group, HEAD] = groups[group, TAIL] = other
        nodes[other, GROUP] = group
    groups[group, end] = node
    nodes[node, GROUP] = group
