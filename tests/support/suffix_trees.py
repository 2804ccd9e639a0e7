"""What tests of the suffix cache share: a look into its trees, and texts that repeat themselves."""

import numpy as np

from jspec.suffix import tables as t


def paths(cache, root=None):
    """Lists a tree's paths with their counts, children in their order; checks its structure."""
    nodes, groups = cache._forest.nodes, cache._forest.groups
    found = {}

    def visit(node, path):
        if nodes[node, t.CHILD] < t.NONE:
            place, depth = -2 - nodes[node, t.CHILD], cache.max_tree_depth
            page, offset = divmod(int(place), t.PAGE)
            text = []
            while page != t.NONE:
                text += cache._forest.pages[page, offset : t.PAGE].tolist()
                page, offset = int(cache._forest.pages[page, t.NEXT_PAGE]), 0
            text = (text[: text.index(t.END)] if t.END in text else text)[:depth]
            assert tuple(text[: len(path)]) == path and nodes[node, t.COUNT] == 1
            for size in range(len(path) + 1, len(text) + 1):
                found[tuple(text[:size])] = 1
            return
        first = child = nodes[node, t.CHILD]
        last, above = first, np.inf
        while child != t.NONE:
            count, group = nodes[child, t.COUNT], nodes[child, t.GROUP]
            assert nodes[child, t.PARENT] == node and count <= above
            alone = count != above and (
                nodes[child, t.NEXT] == t.NONE or nodes[nodes[child, t.NEXT], t.COUNT] != count
            )
            assert (group == t.NONE) == alone
            if not alone and count != above:
                assert groups[group, t.HEAD] == child
            longer = (*path, int(nodes[child, t.TOKEN]))
            found[longer] = int(count)
            visit(child, longer)
            if not nodes[child, t.CHILD] < t.NONE and path:
                link = nodes[child, t.LINK]
                assert nodes[link, t.TOKEN] == longer[-1] and nodes[link, t.COUNT] >= count
            last, above, child = child, count, nodes[child, t.NEXT]
        assert first == t.NONE or nodes[first, t.PREV] == last

    visit(cache._shared_root if root is None else root, ())
    return found


def text(rng, size, vocab=40):
    """Random tokens in which phrases come again."""
    phrases = [rng.integers(0, vocab, rng.integers(2, 30)) for _ in range(6)]
    parts = [phrases[rng.integers(6)] for _ in range(size)]
    return np.concatenate(parts)[:size].astype(np.int32)
