"""How a token, a sequence or a whole tree enters and leaves the tables."""

from numba import int64

from jspec._numba import part
from jspec.suffix.siblings import (
    adopt,
    decrement,
    disown,
    find,
    increment,
    is_only,
    replace,
    unhash_child,
)
from jspec.suffix.tables import (
    CHILD,
    COUNT,
    END,
    FIRST_PAGE,
    GROUP,
    GROUPS,
    LENGTH,
    LINK,
    NEXT,
    NEXT_PAGE,
    NONE,
    NUM_REMOVALS,
    PAGE,
    PARENT,
    PREV,
    REMOVALS,
    ROOT,
    STARTS,
    TAIL,
    TOKEN,
    depth_of,
    free_sequence,
    give,
    give_node,
    is_leaf,
    leaf_of,
    new_node,
    store,
    token_at,
)


@part
def append(forest, sequence, token):
    """Adds a token to a sequence: each path that its last places began is one token longer.

    The tables have the rows that this may take; see `rows_needed`.
    """
    nodes, row = forest.nodes, forest.sequences[sequence]
    depth, length, root = depth_of(forest), int64(row[LENGTH]), int64(row[ROOT])
    # Where a path is a leaf all longer ones are, unless a removal has just left one of them alone.
    is_settled = row[REMOVALS] == forest.used[NUM_REMOVALS, 0]
    row[REMOVALS] = forest.used[NUM_REMOVALS, 0]
    column = STARTS + length % depth
    row[column + depth] = store(forest, sequence, token)
    parent = shorter = root
    for size in range(1, min(length + 1, depth) + 1):  # of the path, its new token included
        if size > 1:
            column = column - 1 if column > STARTS else STARTS + depth - 1
            parent = int64(row[column])
            if is_leaf(forest, parent):  # grows with the text
                if is_settled:
                    break
                continue
        child = find(forest, parent, token)
        if child == NONE:
            child = new_node(forest, parent, token, 1)
            nodes[child, CHILD] = leaf_of(row[column + depth])
            adopt(forest, child)
        else:
            if is_leaf(forest, child):
                child = _share(forest, child, size, shorter)
            increment(forest, child)
        row[column] = child
        shorter = child


@part
def _share(forest, leaf, size, shorter):
    """Makes a leaf's path of `size` tokens a node, for a second occurrence; returns the node."""
    nodes = forest.nodes
    token = int64(END)
    if size < depth_of(forest):
        token = token_at(forest.pages, leaf_of(nodes[leaf, CHILD]), size)
    if token == END:
        nodes[leaf, CHILD] = NONE
        nodes[leaf, LINK] = shorter
        return leaf
    # The leaf keeps its row, since its sequence may hold it as one of its ends; it moves one down.
    node = new_node(forest, nodes[leaf, PARENT], nodes[leaf, TOKEN], 1)
    replace(forest, leaf, node)
    nodes[node, CHILD] = leaf
    nodes[node, LINK] = shorter
    nodes[leaf, TOKEN] = token
    nodes[leaf, PARENT] = node
    nodes[leaf, PREV] = leaf
    nodes[leaf, NEXT] = nodes[leaf, GROUP] = NONE
    return node


@part
def remove_sequence(forest, sequence):
    """Takes a sequence out of its tree: all its paths count one less."""
    nodes, pages = forest.nodes, forest.pages
    root, page = int64(forest.sequences[sequence, ROOT]), NONE
    for start in range(forest.sequences[sequence, LENGTH]):
        if start % PAGE == 0:
            page = pages[page, NEXT_PAGE] if start else forest.sequences[sequence, FIRST_PAGE]
        place, node = int64(page) * PAGE + start % PAGE, root
        for distance in range(depth_of(forest)):
            token = token_at(pages, place, distance)
            if token == END:
                break
            node = find(forest, node, token)
            if nodes[node, COUNT] == 1:
                _remove_path(forest, node)
                break
            decrement(forest, node)
    forest.used[NUM_REMOVALS, 0] += 1
    free_sequence(forest, sequence)


@part
def _remove_path(forest, node):
    """Frees a node of count 1 and the one path below it."""
    disown(forest, node)
    while node > NONE:
        child = int64(forest.nodes[node, CHILD])
        give_node(forest, node)
        node = child


@part
def remove_tree(forest, sequence):
    """Frees a sequence together with its tree, which holds nothing else."""
    nodes, groups, used = forest.nodes, forest.groups, forest.used
    root = node = int64(forest.sequences[sequence, ROOT])
    while True:
        while nodes[node, CHILD] > NONE:
            node = int64(nodes[node, CHILD])
        if node == root:
            break
        group, parent = int64(nodes[node, GROUP]), int64(nodes[node, PARENT])
        if group != NONE and groups[group, TAIL] == node:  # children go first to last
            give(groups, used, GROUPS, group)
        nodes[parent, CHILD] = nodes[node, NEXT]
        if not is_only(forest, node):
            unhash_child(forest, node)
        give_node(forest, node)
        node = parent
    give_node(forest, root)
    free_sequence(forest, sequence)
