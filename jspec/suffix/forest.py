"""Suffix trees in flat int32 tables, compiled to run without the interpreter lock.

All trees of a cache share the same tables. For every place of a sequence, a tree holds the path of
at most `depth` tokens that starts there; a node counts how often its path occurs. A path that
occurred once is a leaf, which is no more than its place in the stored text: it grows with the text
for free, and becomes one node a token where a second occurrence runs along it. Below a path of
count 1 there is nothing to choose, so a tree of text without repetition has one row a token.

Children of a node lie in a list by falling count, equal counts in the order that Arctic Inference
keeps (its drafts depend on it): a child that rises passes the whole run of equals before it. Runs
of two and more have a record of their ends, so that no step depends on the number of children.

Tables grow in Python, between calls: whoever calls `append` has reserved `depth` rows and groups
and a page a token.
"""

from typing import NamedTuple

import numpy as np
from jaxtyping import Int32
from numba import int64, uint32, uint64

from jspec._numba import njit

NONE = -1
END = -(2**31)  # what lies after the last token of a sequence

# Columns of a node. CHILD is the first child, or NONE, or `leaf_of(place)` for a leaf. LINK is the
# node of the same path without its first token. The first child's PREV is the last child.
TOKEN, COUNT, PARENT, CHILD, LINK, PREV, NEXT, GROUP = range(8)
# Columns of a group of two and more siblings of equal count.
HEAD, TAIL = range(2)
# Columns of a sequence; then, for each of its last `depth` starts, the node that its path has
# reached, and as many places where those paths begin.
LENGTH, ROOT, FIRST_PAGE, LAST_PAGE, STARTS = range(5)
# A page: tokens, then the next page. A place is `page * PAGE + offset`.
PAGE = 32
PAGE_TOKENS = PAGE - 1
# Rows and columns of `used`, which tells the free rows of each table.
NODES, GROUPS, PAGES, SEQUENCES = range(4)
FREE, TOP, LIVE = range(3)


class Forest(NamedTuple):
    """The tables; see the constants above for their columns.

    `chain` and `buckets` find a child by its parent and token; `used` counts rows in use.
    """

    nodes: Int32[np.ndarray, "N 8"]
    groups: Int32[np.ndarray, "G 2"]
    pages: Int32[np.ndarray, "P 32"]
    sequences: Int32[np.ndarray, "Q columns"]
    chain: Int32[np.ndarray, "N"]
    buckets: Int32[np.ndarray, "H"]
    used: Int32[np.ndarray, "4 3"]


def empty(depth: int) -> Forest:
    """Returns tables without rows; `grow` makes room."""
    widths = (8, 2, PAGE, STARTS + 2 * depth)
    tables = (np.empty((0, width), np.int32) for width in widths)
    used = np.zeros((4, 3), np.int32)
    used[:, FREE] = NONE
    return Forest(*tables, np.empty(0, np.int32), np.full(1, NONE, np.int32), used)


def grow(forest: Forest, kind: int, num_rows: int) -> Forest:
    """Returns the forest with one of its tables longer; rows keep their numbers."""
    tables = list(forest)
    old = tables[kind]
    tables[kind] = np.empty((num_rows, old.shape[1]), np.int32)
    tables[kind][: len(old)] = old
    grown = Forest(*tables)
    if kind != NODES:
        return grown
    num_buckets = 1 << (num_rows - 1).bit_length()
    grown = grown._replace(
        chain=np.empty(num_rows, np.int32), buckets=np.full(num_buckets, NONE, np.int32)
    )
    _rehash(forest.chain, forest.buckets, *grown)
    return grown


@njit()
def is_leaf(forest, node):
    return forest.nodes[node, CHILD] < NONE


@njit()
def leaf_of(place):
    """Codes a place as the CHILD of a leaf; its own inverse."""
    return -2 - place


@njit()
def token_at(pages, place, distance):
    """Reads the token so many places on, END where the text has not got there."""
    page, offset = place // PAGE, place % PAGE + distance
    while offset >= PAGE_TOKENS:
        page = pages[page, PAGE_TOKENS]
        if page == NONE:
            return int64(END)
        offset -= PAGE_TOKENS
    return int64(pages[page, offset])


@njit()
def find(forest, parent, token):
    """Returns the child of a node by its token, or NONE."""
    node = forest.buckets[_bucket(forest.buckets, parent, token)]
    nodes = forest.nodes
    while node != NONE and (nodes[node, TOKEN] != token or nodes[node, PARENT] != parent):
        node = forest.chain[node]
    return int64(node)


@njit()
def new_sequence(forest, root):
    """Starts an empty sequence in a tree."""
    sequence = _take(forest.sequences, forest.used, SEQUENCES)
    forest.sequences[sequence, LENGTH] = 0
    forest.sequences[sequence, ROOT] = root
    forest.sequences[sequence, FIRST_PAGE] = NONE
    forest.sequences[sequence, LAST_PAGE] = NONE
    return sequence


@njit()
def new_root(forest):
    """Starts an empty tree."""
    return _new_node(forest, NONE, END, NONE)


@njit()
def append(forest, sequence, token):
    """Adds a token to a sequence: each path that its last places began is one token longer."""
    nodes, sequences = forest.nodes, forest.sequences
    depth = (sequences.shape[1] - STARTS) // 2
    length = sequences[sequence, LENGTH]
    place = _store(forest, sequence, token)
    sequences[sequence, LENGTH] = length + 1
    parent, shorter = int64(sequences[sequence, ROOT]), int64(sequences[sequence, ROOT])
    for size in range(1, min(length + 1, depth) + 1):  # of the path, its new token included
        column = STARTS + (length + 1 - size) % depth
        if size == 1:
            sequences[sequence, column + depth] = place
        else:
            parent = int64(sequences[sequence, column])
            if is_leaf(forest, parent):
                continue  # grows with the text
        child = find(forest, parent, token)
        if child == NONE:
            child = _new_node(forest, parent, token, 1)
            nodes[child, CHILD] = leaf_of(sequences[sequence, column + depth])
            _hash(forest, child)
            _insert_last(nodes, child)
            _join(forest, child)
        else:
            if is_leaf(forest, child):
                child = _share(forest, child, size, shorter)
            _increment(forest, child)
        sequences[sequence, column] = child
        shorter = child


@njit()
def remove_sequence(forest, sequence):
    """Takes a sequence out of its tree: all its paths count one less."""
    nodes, pages = forest.nodes, forest.pages
    depth = (forest.sequences.shape[1] - STARTS) // 2
    page = forest.sequences[sequence, FIRST_PAGE]
    for start in range(forest.sequences[sequence, LENGTH]):
        if start and start % PAGE_TOKENS == 0:
            page = pages[page, PAGE_TOKENS]
        place = page * PAGE + start % PAGE_TOKENS
        node = int64(forest.sequences[sequence, ROOT])
        for distance in range(depth):
            token = token_at(pages, place, distance)
            if token == END:
                break
            node = find(forest, node, token)
            if nodes[node, COUNT] == 1:
                _remove_path(forest, node)
                break
            _decrement(forest, node)
    _free_sequence(forest, sequence)


@njit()
def remove_tree(forest, sequence):
    """Frees a sequence together with its tree, which holds nothing else."""
    nodes, groups, used = forest.nodes, forest.groups, forest.used
    root = node = int64(forest.sequences[sequence, ROOT])
    while True:
        while nodes[node, CHILD] > NONE:
            node = int64(nodes[node, CHILD])
        if node == root:
            break
        group, parent = nodes[node, GROUP], int64(nodes[node, PARENT])
        if group != NONE and groups[group, TAIL] == node:  # children go first to last
            _give(groups, used, GROUPS, group)
        nodes[parent, CHILD] = nodes[node, NEXT]
        _unhash(forest, node)
        _give(nodes, used, NODES, node)
        node = parent
    _give(nodes, used, NODES, root)
    _free_sequence(forest, sequence)


# Rows.


@njit()
def _take(table, used, kind):
    row = int64(used[kind, FREE])
    if row == NONE:
        row = int64(used[kind, TOP])
        used[kind, TOP] += 1
    else:
        used[kind, FREE] = table[row, 0]
    used[kind, LIVE] += 1
    return row


@njit()
def _give(table, used, kind, row):
    table[row, 0] = used[kind, FREE]
    used[kind, FREE] = row
    used[kind, LIVE] -= 1


@njit()
def _new_node(forest, parent, token, count):
    node = _take(forest.nodes, forest.used, NODES)
    row = forest.nodes[node]
    row[TOKEN], row[COUNT], row[PARENT] = token, count, parent
    row[CHILD] = row[LINK] = row[NEXT] = row[GROUP] = NONE
    row[PREV] = node
    return node


@njit()
def _store(forest, sequence, token):
    row, pages = forest.sequences[sequence], forest.pages
    offset = row[LENGTH] % PAGE_TOKENS
    if offset == 0:
        page = _take(pages, forest.used, PAGES)
        pages[page, :PAGE_TOKENS] = END
        pages[page, PAGE_TOKENS] = NONE
        if row[LENGTH] == 0:
            row[FIRST_PAGE] = page
        else:
            pages[row[LAST_PAGE], PAGE_TOKENS] = page
        row[LAST_PAGE] = page
    pages[row[LAST_PAGE], offset] = token
    return row[LAST_PAGE] * PAGE + offset


@njit()
def _free_sequence(forest, sequence):
    page = int64(forest.sequences[sequence, FIRST_PAGE])
    while page != NONE:
        after = int64(forest.pages[page, PAGE_TOKENS])
        _give(forest.pages, forest.used, PAGES, page)
        page = after
    _give(forest.sequences, forest.used, SEQUENCES, sequence)


# Finding a child.


@njit()
def _bucket(buckets, parent, token):
    key = (uint64(parent) << uint64(32)) | uint64(uint32(token))
    key *= uint64(0x9E3779B97F4A7C15)
    return int64((key >> uint64(32)) & uint64(buckets.size - 1))


@njit()
def _hash(forest, node):
    nodes = forest.nodes
    bucket = _bucket(forest.buckets, nodes[node, PARENT], nodes[node, TOKEN])
    forest.chain[node] = forest.buckets[bucket]
    forest.buckets[bucket] = node


@njit()
def _unhash(forest, node):
    nodes, chain = forest.nodes, forest.chain
    bucket = _bucket(forest.buckets, nodes[node, PARENT], nodes[node, TOKEN])
    other = forest.buckets[bucket]
    if other == node:
        forest.buckets[bucket] = chain[node]
        return
    while chain[other] != node:
        other = chain[other]
    chain[other] = chain[node]


@njit()
def _rehash(old_chain, old_buckets, nodes, groups, pages, sequences, chain, buckets, used):
    forest = Forest(nodes, groups, pages, sequences, chain, buckets, used)
    for node in old_buckets:
        while node != NONE:
            _hash(forest, node)
            node = old_chain[node]


# Paths.


@njit()
def _share(forest, leaf, size, shorter):
    """Makes a leaf's path of `size` tokens a node, for a second occurrence; returns the node."""
    nodes = forest.nodes
    depth = (forest.sequences.shape[1] - STARTS) // 2
    token = int64(END)
    if size < depth:
        token = token_at(forest.pages, leaf_of(nodes[leaf, CHILD]), size)
    if token == END:
        nodes[leaf, CHILD] = NONE
        nodes[leaf, LINK] = shorter
        return leaf
    # The leaf keeps its row, since its sequence may hold it as one of its ends; it moves one down.
    node = _new_node(forest, nodes[leaf, PARENT], nodes[leaf, TOKEN], 1)
    _unhash(forest, leaf)
    _hash(forest, node)
    _replace(forest, leaf, node)
    nodes[node, CHILD] = leaf
    nodes[node, LINK] = shorter
    nodes[leaf, TOKEN] = token
    nodes[leaf, PARENT] = node
    nodes[leaf, PREV] = leaf
    nodes[leaf, NEXT] = nodes[leaf, GROUP] = NONE
    _hash(forest, leaf)
    return node


@njit()
def _remove_path(forest, node):
    """Frees a node of count 1 and the one path below it."""
    nodes = forest.nodes
    _leave(forest, node)
    _detach(nodes, node)
    while True:
        child = int64(nodes[node, CHILD])
        _unhash(forest, node)
        _give(nodes, forest.used, NODES, node)
        if child <= NONE:
            return
        node = child


@njit()
def _increment(forest, node):
    nodes = forest.nodes
    count = nodes[node, COUNT]
    before = nodes[node, PREV]
    is_first = nodes[nodes[node, PARENT], CHILD] == node
    if is_first or nodes[before, COUNT] > count + 1:
        _leave(forest, node)
        nodes[node, COUNT] = count + 1
        return
    group = nodes[before, GROUP]
    head = before if group == NONE else forest.groups[group, HEAD]
    _leave(forest, node)
    _detach(nodes, node)
    nodes[node, COUNT] = count + 1
    _insert_before(nodes, node, head)
    _join(forest, node)


@njit()
def _decrement(forest, node):
    nodes = forest.nodes
    count = nodes[node, COUNT]
    after = nodes[node, NEXT]
    if after == NONE or nodes[after, COUNT] < count:
        _leave(forest, node)
        nodes[node, COUNT] = count - 1
    else:
        tail = forest.groups[nodes[node, GROUP], TAIL]
        _leave(forest, node)
        _detach(nodes, node)
        nodes[node, COUNT] = count - 1
        _insert_after(nodes, node, tail)
    _join(forest, node)


# Lists of siblings, and groups of equal count in them.


@njit()
def _detach(nodes, node):
    parent, before, after = nodes[node, PARENT], nodes[node, PREV], nodes[node, NEXT]
    if nodes[parent, CHILD] == node:
        nodes[parent, CHILD] = after
    else:
        nodes[before, NEXT] = after
    if after != NONE:
        nodes[after, PREV] = before
    elif nodes[parent, CHILD] != NONE:
        nodes[nodes[parent, CHILD], PREV] = before


@njit()
def _insert_before(nodes, node, other):
    parent, before = nodes[node, PARENT], nodes[other, PREV]
    if nodes[parent, CHILD] == other:
        nodes[parent, CHILD] = node
    else:
        nodes[before, NEXT] = node
    nodes[node, PREV], nodes[node, NEXT] = before, other
    nodes[other, PREV] = node


@njit()
def _insert_after(nodes, node, other):
    after = nodes[other, NEXT]
    nodes[node, PREV], nodes[node, NEXT] = other, after
    nodes[other, NEXT] = node
    nodes[nodes[nodes[node, PARENT], CHILD] if after == NONE else after, PREV] = node


@njit()
def _insert_last(nodes, node):
    first = nodes[nodes[node, PARENT], CHILD]
    if first == NONE:
        nodes[nodes[node, PARENT], CHILD] = node
    else:
        _insert_after(nodes, node, nodes[first, PREV])


@njit()
def _replace(forest, old, new):
    """Puts a node without a place into the place of a sibling of the same count."""
    nodes, groups = forest.nodes, forest.groups
    parent, before, after = nodes[old, PARENT], nodes[old, PREV], nodes[old, NEXT]
    is_first = nodes[parent, CHILD] == old
    if is_first:
        nodes[parent, CHILD] = new
    else:
        nodes[before, NEXT] = new
    if after != NONE:
        nodes[after, PREV] = new
    else:
        nodes[nodes[parent, CHILD], PREV] = new
    nodes[new, PREV] = new if is_first and after == NONE else before
    nodes[new, NEXT] = after
    group = nodes[old, GROUP]
    nodes[new, GROUP] = group
    if group != NONE:
        for end in (HEAD, TAIL):
            if groups[group, end] == old:
                groups[group, end] = new


@njit()
def _leave(forest, node):
    """Takes a node out of its group; it stays in the list."""
    nodes, groups = forest.nodes, forest.groups
    group = nodes[node, GROUP]
    if group == NONE:
        return
    nodes[node, GROUP] = NONE
    if groups[group, HEAD] == node:
        groups[group, HEAD] = nodes[node, NEXT]
    elif groups[group, TAIL] == node:
        groups[group, TAIL] = nodes[node, PREV]
    if groups[group, HEAD] == groups[group, TAIL]:
        nodes[groups[group, HEAD], GROUP] = NONE
        _give(groups, forest.used, GROUPS, group)


@njit()
def _join(forest, node):
    """Puts a node into the group of the neighbour that has its count, if one has."""
    nodes, groups = forest.nodes, forest.groups
    before, after = nodes[node, PREV], nodes[node, NEXT]
    is_first = nodes[nodes[node, PARENT], CHILD] == node
    if not is_first and nodes[before, COUNT] == nodes[node, COUNT]:
        other, end = before, TAIL
    elif after != NONE and nodes[after, COUNT] == nodes[node, COUNT]:
        other, end = after, HEAD
    else:
        return
    group = nodes[other, GROUP]
    if group == NONE:
        group = _take(groups, forest.used, GROUPS)
        groups[group, HEAD] = groups[group, TAIL] = other
        nodes[other, GROUP] = group
    groups[group, end] = node
    nodes[node, GROUP] = group
