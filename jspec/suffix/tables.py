"""The tables that suffix trees live in: rows of int32 that are taken, given back, and used again.

All trees of a cache share them. For every place of a sequence, a tree holds the path of
at most `depth` tokens that starts there; a node counts how often its path occurs. A path that
occurred once is a leaf, which is no more than its place in the stored text: it grows with the text
for free, and becomes one node a token where a second occurrence runs along it.
"""

from typing import NamedTuple

import numpy as np
from jaxtyping import Int32
from numba import int64

from jspec._numba import part

NONE = -1
UNUSED = -2  # in `chain`: the node is free
END = -(2**31)  # what lies after the last token of a sequence

# Columns of a node. CHILD is the first child, or NONE, or `leaf_of(place)` for a leaf. LINK is the
# node of the same path without its first token. The first child's PREV is the last child.
TOKEN, COUNT, PARENT, CHILD, LINK, PREV, NEXT, GROUP = range(8)
# Columns of a group: two or more neighbouring siblings of equal count.
HEAD, TAIL = range(2)
# Columns of a sequence. REMOVALS is how many sequences had been removed when it last grew. Then,
# for each of its last `depth` starts, the node that its path has reached, and as many places where
# those paths begin.
LENGTH, ROOT, FIRST_PAGE, LAST_PAGE, REMOVALS, STARTS = range(6)
# A page holds tokens and the number of the next page; a place is `page * PAGE + offset`.
_PAGE_BITS = 5
PAGE = NEXT_PAGE = 1 << _PAGE_BITS

# Rows of `used`: of each table, and the number of removals so far.
NODES, GROUPS, PAGES, SEQUENCES, NUM_REMOVALS = range(5)
# Its columns: the first row of a list of free ones (of nodes: where to look for one), the first row
# that never was in use, and how many are in use.
FREE, TOP, LIVE = range(3)


class Forest(NamedTuple):
    """The tables. `used` counts their rows; `buckets` and `chain` are the hash of children."""

    nodes: Int32[np.ndarray, "rows 8"]
    groups: Int32[np.ndarray, "rows 2"]
    pages: Int32[np.ndarray, "rows 33"]
    sequences: Int32[np.ndarray, "rows columns"]
    used: Int32[np.ndarray, "5 3"]
    buckets: Int32[np.ndarray, "buckets"]
    chain: Int32[np.ndarray, "rows"]


def new_forest(depth: int) -> Forest:
    """Returns tables without rows."""
    widths = (GROUP + 1, TAIL + 1, NEXT_PAGE + 1, STARTS + 2 * depth)
    nodes, groups, pages, sequences = (np.empty((0, width), np.int32) for width in widths)
    used = np.zeros((NUM_REMOVALS + 1, LIVE + 1), np.int32)
    used[:, FREE] = NONE
    used[NODES, FREE] = 0
    buckets, chain = np.full(1, NONE, np.int32), np.empty(0, np.int32)
    return Forest(nodes, groups, pages, sequences, used, buckets, chain)


@part
def depth_of(forest):
    return (forest.sequences.shape[1] - STARTS) // 2


def rows_needed(kind: int, depth: int, num_tokens: int, num_sequences: int) -> int:
    """Bounds the rows that adding tokens to sequences takes from a table."""
    if kind == NODES:  # one for each path that a token ends, and the root of a new tree
        return num_tokens * depth + num_sequences
    if kind == GROUPS:
        return num_tokens * depth
    if kind == PAGES:
        return num_tokens // PAGE + num_sequences
    return num_sequences


def num_buckets(num_nodes: int) -> int:
    """Sizes the hash: a power of two, not above the rows, as only children are not in it."""
    return 1 << (max(1, num_nodes).bit_length() - 1)


def grown_by(forest: Forest, kind: int, num_rows: int) -> int:
    """Counts the bytes by which a table of so many rows is larger."""
    table = forest[kind]
    size = (num_rows - len(table)) * table.shape[1] * table.itemsize
    if kind == NODES:
        chain, buckets = forest.chain, forest.buckets
        size += (num_rows - len(chain) + num_buckets(num_rows) - len(buckets)) * chain.itemsize
    return size


@part
def take(table, used, kind):
    """Returns a row to write to."""
    row = int64(used[kind, FREE])
    if row == NONE:
        row = int64(used[kind, TOP])
        used[kind, TOP] += 1
    else:
        used[kind, FREE] = table[row, 0]
    used[kind, LIVE] += 1
    return row


@part
def give(table, used, kind, row):
    """Puts a row on the list of free ones."""
    table[row, 0] = used[kind, FREE]
    used[kind, FREE] = row
    used[kind, LIVE] -= 1


@part
def take_node(forest):
    """Returns a node's row: the next one that is free.

    A list of free ones would scatter the rows of a token, which are read and written together: with
    many trees this took half as long again.
    """
    used, chain = forest.used, forest.chain
    node = int64(used[NODES, FREE])
    while chain[node] != UNUSED:
        node = node + 1 if node + 1 < chain.size else 0
    used[NODES, FREE] = node
    used[NODES, LIVE] += 1
    chain[node] = NONE
    return node


@part
def give_node(forest, node):
    forest.chain[node] = UNUSED
    forest.used[NODES, LIVE] -= 1


@part
def new_node(forest, parent, token, count):
    node = take_node(forest)
    row = forest.nodes[node]
    row[TOKEN], row[COUNT], row[PARENT] = token, count, parent
    row[CHILD] = row[LINK] = row[NEXT] = row[GROUP] = NONE
    row[PREV] = node
    return node


@part
def new_sequence(forest, root):
    """Starts an empty sequence in the tree of a root, or in a new tree if that is NONE."""
    if root == NONE:
        root = new_node(forest, NONE, END, NONE)
    sequence = take(forest.sequences, forest.used, SEQUENCES)
    row = forest.sequences[sequence]
    row[LENGTH], row[ROOT] = 0, root
    row[FIRST_PAGE] = row[LAST_PAGE] = NONE
    row[REMOVALS] = forest.used[NUM_REMOVALS, 0]
    return sequence


@part
def free_sequence(forest, sequence):
    pages, used = forest.pages, forest.used
    page = int64(forest.sequences[sequence, FIRST_PAGE])
    while page != NONE:
        after = int64(pages[page, NEXT_PAGE])
        give(pages, used, PAGES, page)
        page = after
    give(forest.sequences, used, SEQUENCES, sequence)


@part
def store(forest, sequence, token):
    """Writes the next token of a sequence; returns its place."""
    row, pages = forest.sequences[sequence], forest.pages
    length, page = int64(row[LENGTH]), int64(row[LAST_PAGE])
    offset = length & (PAGE - 1)
    if offset == 0:
        before, page = page, take(pages, forest.used, PAGES)
        for i in range(PAGE):
            pages[page, i] = END
        pages[page, NEXT_PAGE] = NONE
        if before == NONE:
            row[FIRST_PAGE] = page
        else:
            pages[before, NEXT_PAGE] = page
        row[LAST_PAGE] = page
    pages[page, offset] = token
    row[LENGTH] = length + 1
    return page * PAGE + offset


@part
def token_at(pages, place, distance):
    """Reads the token so many places on, END where the text has not got there."""
    page, offset = place >> _PAGE_BITS, (place & (PAGE - 1)) + distance
    while offset >= PAGE:
        page = int64(pages[page, NEXT_PAGE])
        if page == NONE:
            return int64(END)
        offset -= PAGE
    return int64(pages[page, offset])


@part
def is_leaf(forest, node):
    return forest.nodes[node, CHILD] < NONE


@part
def leaf_of(place):
    """Codes a place as the CHILD of a leaf; its own inverse."""
    return -2 - place
