"""Trees as static choices, the recorded ones, and trees that a toy model drafts."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec.axes import PAD_TOKEN
from jspec.config import CacheConfig
from jspec.metadata import ancestors
from jspec.models.eagle import EagleModelConfig
from jspec.models.kv_cache import init_cache
from jspec.models.medusa import HeadsConfig
from jspec.proposers._config import TreeDraftingConfig, check_width
from jspec.proposers._draft import DraftModel
from jspec.proposers._tree import draft_tree
from jspec.proposers.eagle import EagleConfig
from jspec.proposers.eagle3 import Eagle3Config
from jspec.proposers.medusa import MedusaConfig
from jspec.state import Batch
from jspec.tree import DynamicTree, Tree
from tests.support import recordings

pytestmark = pytest.mark.any_device

UNEVEN = [(0,), (1,), (3,), (0, 0), (0, 2), (3, 0), (0, 2, 0), (0, 2, 1)]
EVEN = [(0,), (1,), (0, 0), (0, 1), (1, 0), (1, 1)]
CHAIN = [(0,), (0, 0), (0, 0, 0)]
DEEP = [(0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0), (0, 1, 0), (1, 0, 0), (1, 0, 1)]
WIDE = Tree([(0,), (500,)])
TREES = [EVEN, UNEVEN, CHAIN, [(0,), (2,)], [(1,), (1, 0)]]


def tree_of(case) -> Tree:
    return Tree([tuple(path) for path in case.scalars["tree"]])


def is_even(tree: Tree) -> bool:
    """Whether every node of a level has the same number of children; the original drafts these."""
    return tree.num_children_per_level is not None


def visible_as_listed(case, tree: Tree) -> np.ndarray:
    """Which nodes see which, in the order of the recorded list, which need not be sorted."""
    place = [tree.choices.index(tuple(path)) for path in case.scalars["tree"]]
    return tree.visible[place][:, place]


@recordings.each_case("tree_drafting")
def test_levels_children_and_ancestors_equal_the_recorded_ones(case):
    want, tree, paths = case.want, tree_of(case), case.scalars["tree"]
    assert tree.choices == Tree(str([tuple(path) for path in paths[::-1]])).choices
    assert tree.cu_per_level == tuple(want["cu_drafts_per_level"])
    np.testing.assert_array_equal(want["tree_draft_pos_offsets"], np.arange(tree.num_nodes) + 1)
    counts = want["depth_counts"]  # longer where the list was not sorted
    assert tree.num_per_level == tuple(counts[: tree.depth]) and not counts[tree.depth :].any()
    bias = want["tree_attn_bias"]
    np.testing.assert_array_equal(bias[1:, 1:] == 0, visible_as_listed(case, tree))
    assert (bias[:, 0] == 0).all() and np.isneginf(bias[0, 1:]).all()
    if is_even(tree):  # the original divides level sizes elsewhere
        assert tree.num_children_per_level == tuple(want["child_drafts_per_level"])
        assert tree.num_per_level == tuple(case.scalars["draft_columns_per_level"])


def test_an_uneven_tree_says_who_follows_whom():
    tree = Tree(UNEVEN[::-1])
    assert list(tree.choices) == UNEVEN
    assert (tree.num_nodes, tree.depth, tree.width) == (8, 3, 4)
    assert tree.parents.tolist() == [PAD_TOKEN] * 3 + [0, 0, 2, 4, 4]
    assert tree.ranks.tolist() == [0, 1, 3, 0, 2, 0, 0, 1]
    assert tree.depths.tolist() == [1, 1, 1, 2, 2, 2, 3, 3]
    assert (tree.num_per_level, tree.cu_per_level) == ((3, 3, 2), (3, 6, 8))
    wanted = [[a == b[: len(a)] for a in UNEVEN] for b in UNEVEN]
    assert tree.visible.tolist() == wanted
    assert Tree.chain(3) == Tree(CHAIN) and hash(Tree.chain(3)) == hash(Tree(CHAIN))
    with pytest.raises(ValueError, match="read-only"):
        tree.parents[0] = 3


@pytest.mark.parametrize("paths", TREES)
def test_ancestors_follow_from_the_parents(paths):
    tree = Tree(paths)
    parents = np.stack([tree.parents, np.full(tree.num_nodes, PAD_TOKEN, np.int32)])
    got = jax.jit(ancestors, static_argnames="depth")(parents, depth=tree.depth)
    np.testing.assert_array_equal(got[0], tree.visible)
    np.testing.assert_array_equal(got[1], np.eye(tree.num_nodes))


def test_ancestors_of_a_long_chain_reach_the_root():
    trees = [Tree.chain(depth) for depth in range(1, 18)]
    found = jax.jit(lambda rows: [ancestors(row, depth=row.shape[1]) for row in rows])
    for tree, got in zip(trees, found([tree.parents[None] for tree in trees]), strict=True):
        np.testing.assert_array_equal(got[0], tree.visible)


@pytest.mark.parametrize(
    "choices, error, word",
    [
        ([], ValueError, "empty"),
        ([()], ValueError, r"leave \(\) out"),
        ([(0,), (0, -1)], ValueError, r"\(0, -1\).*at least 0"),
        ([(0,), (1, 0)], ValueError, r"\(1, 0\).*Add the parent"),
        ([(0,), (1,), (0,)], ValueError, r"\(0,\) twice"),
        ([(0), (1)], TypeError, "comma"),
        ([[0], [1]], TypeError, r"\[0\].*tuple"),
        ([(0.0,)], TypeError, "plain ints"),
        ([(True,)], TypeError, "plain ints"),
        (7, TypeError, "list of tuples"),
        ("[(0,), (1", ValueError, "Python literal"),
        ("print(1)", ValueError, "Python literal"),
        ("(0, 1)", TypeError, "comma"),
    ],
)
def test_a_tree_that_is_none_is_refused_by_name(choices, error, word):
    with pytest.raises(error, match=word):
        Tree(choices)


@pytest.mark.parametrize(
    "call, error, word",
    [
        (lambda: DynamicTree(top_k=2, depth=2, num_nodes=7), ValueError, "Lower num_nodes"),
        (lambda: DynamicTree(top_k=0, depth=2, num_nodes=1), ValueError, "top_k"),
        (lambda: TreeDraftingConfig(tree=Tree(EVEN), num_drafts=5), ValueError, "Leave num_drafts"),
        (lambda: TreeDraftingConfig(tree=EVEN), TypeError, r"tree=jspec.Tree\("),
        (
            lambda: TreeDraftingConfig(tree=Tree(EVEN), draft_sampling="probabilistic"),
            ValueError,
            "draft_sampling='greedy'",
        ),
        (lambda: TreeDraftingConfig(), ValueError, "num_drafts=1"),
        (
            lambda: MedusaConfig(
                model=HeadsConfig.tiny(), tree=DynamicTree(top_k=2, depth=2, num_nodes=4)
            ),
            TypeError,
            "MedusaConfig.*wanted a jspec.Tree",
        ),
        (lambda: EagleConfig(tree=WIDE, model=EagleModelConfig.tiny()), ValueError, "lower ranks"),
        (
            lambda: dataclasses.replace(
                Eagle3Config.tiny(), num_drafts=6, tree=Tree(EVEN), parallel_drafting=True
            ),
            ValueError,
            "parallel_drafting=False",
        ),
        (
            lambda: check_width("Mine", Tree([(0,), (4,)]), 4),
            ValueError,
            "Mine.*best 5.*lower ranks",
        ),
    ],
)
def test_a_config_that_contradicts_its_tree_is_refused(call, error, word):
    with pytest.raises(error, match=word):
        call()


# Drafting with the toy model of the recordings: integer arithmetic, no attention.


class Toy:
    """Its next hidden state is a function of token, position and hidden state; see the MANIFEST."""

    def __init__(self, vocab_size):
        self.vocab_size = vocab_size
        self.passes = []

    def forward(self, ids, positions, hidden):
        h0, h1, h2 = (hidden[..., j] for j in range(3))
        last = [5 * ids + 3 * positions + 7 * h0 + h1]
        last += [ids + 11 * positions + 2 * h1 + 1, h0 + 2 * ids + h2]
        stack = jnp.stack if isinstance(hidden, jax.Array) else np.stack
        last = stack(last, -1) % self.vocab_size
        return last, (last + 1) % self.vocab_size

    def logits(self, last):
        l0, l1, l2 = (last[..., j, None] for j in range(3))
        v = np.arange(self.vocab_size, dtype=last.dtype)
        v = v.reshape((1,) * (last.ndim - 1) + (-1,))
        return ((17 * v + 29 * l0 + 5 * l1 + l2) * 31) % 257 * self.vocab_size + v

    def as_draft_model(self, root_logits, root_hidden):
        """Answers the first pass with what was recorded of it."""

        def run(token_ids, hidden, view, cache, embeds):
            self.passes.append((token_ids, view, hidden))
            if len(self.passes) == 1:
                return root_hidden, root_hidden, cache
            passed = self.forward(token_ids, view.positions, hidden.astype(jnp.int32))
            last, feedback = (x.astype(jnp.float32) for x in passed)
            return last, feedback, cache

        def logits(out):
            if len(self.passes) == 1:
                return root_logits
            return self.logits(out.astype(jnp.int32)).astype(jnp.float32)

        return DraftModel(run=run, logits=logits, vocab_size=self.vocab_size)


def toy_batch(given):
    """One row a request: its root."""
    positions = given["positions"].astype(np.int32)
    B = len(positions)
    batch = Batch(
        token_ids=np.zeros(B, np.int32),
        positions=positions,
        query_start=np.arange(B + 1, dtype=np.int32),
        seq_lens=given["seq_lens"],
        block_table=given["block_table"],
        num_drafts=np.zeros(B, np.int32),
        request_slot=np.arange(B, dtype=np.int32),
        backup_token=np.zeros(B, np.int32),
        discard=np.zeros(B, bool),
        hidden=given["hidden_states"],
        next_token=np.full(B, 5, np.int32),
        last_index=np.arange(B, dtype=np.int32),
        num_valid=np.ones(B, np.int32),
        num_rejected=np.zeros(B, np.int32),
    )
    return jax.tree.map(jnp.asarray, batch)


def oracle(toy, tree, logits, hidden, position):
    """Tokens of one request's tree by plain recursion from the root."""
    tokens, states = {}, {(): (logits, hidden)}
    for path in tree.choices:
        above, feedback = states[path[:-1]]
        order = np.lexsort((np.arange(len(above)), -above))  # the lowest id wins ties
        tokens[path] = int(order[path[-1]])
        last, new = toy.forward(tokens[path], position + len(path), feedback)
        states[path] = toy.logits(last), new
    return [tokens[path] for path in tree.choices]


@functools.cache
def drafted_by_toy(name, tree, steps):
    """Drafts a tree over the rows of a recorded case: (toy, drafts)."""
    (case,) = [case for case in recordings.cases("tree_drafting") if case.name == name]
    given, scalars = case.given, case.scalars
    toy = Toy(scalars["vocab_size"])
    S, limit = scalars["block_size"], scalars["max_model_len"]
    num_pages = int(given["block_table"].max()) + 1
    pages = CacheConfig(num_pages=num_pages, page_size=S, max_model_len=limit, dtype="float32")
    cache = init_cache(pages, num_layers=1, num_kv_heads=1, head_dim=2)

    @jax.jit
    def draft(logits, hidden, batch, cache):
        _, drafts = draft_tree(
            toy.as_draft_model(logits, hidden),
            TreeDraftingConfig(tree=tree),
            batch,
            cache,
            num_drafts=steps,
            shift=True,
        )
        return toy.passes, drafts

    roots = (jnp.asarray(given[name]) for name in ("logits", "hidden_states"))
    toy.passes, drafts = jax.tree.map(np.asarray, draft(*roots, toy_batch(given), cache))
    return toy, drafts


def draft_toy(case, tree, steps=None):
    return drafted_by_toy(case.name, tree, tree.num_nodes if steps is None else steps)


def oracle_of(toy, tree, given):
    """Tokens of every request's tree [B, nodes]."""
    roots = zip(given["logits"], given["hidden_states"].astype(np.int64), strict=True)
    return np.array(
        [
            oracle(toy, tree, *root, position)
            for root, position in zip(roots, given["positions"].tolist(), strict=True)
        ]
    )


def crosses_the_limit(case) -> np.ndarray:
    """Returns whether the original masks a request at each level [B, depth]: position 0 on."""
    ends = np.array(tree_of(case).cu_per_level)
    return case.given["positions"][:, None] + ends[None] >= case.scalars["max_model_len"]


def num_nodes_of(case) -> np.ndarray:
    """Counts the nodes of each request up to the longest one: the next token is at position + 1."""
    room = case.scalars["max_model_len"] - 2 - case.given["positions"]
    return (tree_of(case).depths[None] <= room[:, None]).sum(1)


def compared_requests(case, forward) -> np.ndarray:
    """Returns which requests of a forward the original ran as the tree says."""
    nodes = tree_of(case).cu_per_level[forward]
    return ~crosses_the_limit(case)[:, : forward + 1].any(axis=1) & (num_nodes_of(case) >= nodes)


def compared_nodes(case) -> np.ndarray:
    """Returns which nodes [B, nodes] the original drafted as the tree says.

    An uneven tree is drafted as one whose levels divide each other.
    """
    tree = tree_of(case)
    levels = tree.depths if is_even(tree) else np.where(tree.depths > 1, 0, 1)
    before = np.pad(crosses_the_limit(case)[:, :-1], ((0, 0), (1, 0))).cumsum(axis=1) == 0
    kept = np.arange(tree.num_nodes)[None] < num_nodes_of(case)[:, None]
    return kept & before[:, tree.depths - 1] & (levels > 0)[None]


@recordings.each_case("tree_drafting")
def test_toy_trees_equal_the_recorded_ones_and_the_oracle(case):
    given, want, tree = case.given, case.want, tree_of(case)
    toy, drafts = draft_toy(case, tree)
    # 1. The oracle, as far as the longest request goes.
    counts = num_nodes_of(case)
    assert drafts.num_drafts.tolist() == counts.tolist()
    kept = np.arange(tree.num_nodes)[None] < counts[:, None]
    tokens = np.where(kept, oracle_of(toy, tree, given), PAD_TOKEN)
    np.testing.assert_array_equal(drafts.tokens, tokens)
    np.testing.assert_array_equal(drafts.parents, np.where(kept, tree.parents[None], PAD_TOKEN))

    # 2. The recording.
    assert "raises" not in case.scalars
    recorded, num_levels = want["draft_token_ids"], tree.depth if is_even(tree) else 1
    assert recorded.shape == tokens.shape or num_levels == 1
    width = min(recorded.shape[1], tree.num_nodes)
    at = compared_nodes(case)[:, :width]
    np.testing.assert_array_equal(drafts.tokens[:, :width][at], recorded[:, :width][at])

    # 3. What the model saw. The original runs all earlier levels again; ours keeps them, so that
    # its passes together are the original's last one.
    B, seen, queries = len(counts), [], 0
    is_past = crosses_the_limit(case)
    assert case.scalars["fwd"] == list(tree.cu_per_level[:-1])
    for f, q in enumerate(case.scalars["fwd"][:num_levels]):
        ids, view, hidden = toy.passes[f + 1]
        parts = ids, view.positions, hidden
        seen.append([np.asarray(part).reshape(B, -1, *part.shape[1:]) for part in parts])
        inner = np.flatnonzero(np.isin(np.arange(q), tree.parents))  # others are never run
        forward = want.with_prefix(f"f{f}.")
        at = compared_requests(case, f)
        queries = queries + np.asarray(view.query_start)
        for name, part in zip(
            ("input_ids", "positions", "hidden_states"), zip(*seen, strict=True), strict=True
        ):
            got = np.concatenate(part, axis=1)
            wanted = forward[name].reshape(B, q, *got.shape[2:])[:, inner]
            np.testing.assert_array_equal(got[at], wanted[at], err_msg=name)
        bias = forward["tree_attn_bias"]
        np.testing.assert_array_equal(bias == 0, visible_as_listed(case, tree)[:q, :q])
        assert np.isneginf(bias[bias != 0]).all()
        if len(inner) == q:
            np.testing.assert_array_equal(forward["query_start_loc"], queries)
            lengths = np.asarray(view.seq_lens) + q
            np.testing.assert_array_equal(forward["seq_lens"], np.where(is_past[:, f], 1, lengths))


@pytest.mark.parametrize("paths", [UNEVEN, DEEP])
def test_trees_that_were_not_recorded_equal_the_oracle(paths):
    case, tree = recordings.cases("tree_drafting")[0], Tree(paths)
    toy, drafts = draft_toy(case, tree)
    np.testing.assert_array_equal(drafts.tokens, oracle_of(toy, tree, case.given))


@pytest.mark.parametrize("paths", TREES)
def test_each_node_with_children_runs_once_and_sees_its_ancestors(paths):
    case, tree = recordings.cases("tree_drafting")[0], Tree(paths)
    toy, drafts = draft_toy(case, tree)
    inner = sorted({int(parent) for parent in tree.parents} - {PAD_TOKEN})
    B, ran = len(drafts.tokens), []
    for depth, (tokens, view, _) in enumerate(toy.passes[1:], 1):
        level = [i for i in inner if tree.depths[i] == depth]
        ran += level
        assert tokens.reshape(B, -1).tolist() == drafts.tokens[:, level].tolist()
        places = np.asarray(view.node_slots).reshape(B, -1)
        wanted = np.arange(B)[:, None] * len(inner) + np.searchsorted(inner, level)
        np.testing.assert_array_equal(places, wanted)
        seen = np.asarray(view.visible).reshape(B, len(level), len(inner))
        np.testing.assert_array_equal(seen, np.tile(tree.visible[level][:, inner], (B, 1, 1)))
        assert (np.asarray(view.slots) == -1).all()
        np.testing.assert_array_equal(view.seq_lens, case.given["seq_lens"])
        roots = np.repeat(case.given["positions"], len(level))
        np.testing.assert_array_equal(view.positions, roots + depth)
    assert ran == inner


def test_fewer_columns_are_the_first_nodes():
    case = recordings.cases("tree_drafting")[0]
    _, whole = draft_toy(case, Tree(UNEVEN))
    for steps in range(len(UNEVEN) + 1):
        toy, drafts = draft_toy(case, Tree(UNEVEN), steps)
        np.testing.assert_array_equal(drafts.tokens, whole.tokens[:, :steps])
        np.testing.assert_array_equal(drafts.parents, whole.parents[:, :steps])
        assert drafts.num_drafts.tolist() == np.minimum(whole.num_drafts, steps).tolist()
        deepest = 0 if steps == 0 else int(Tree(UNEVEN).depths[steps - 1])
        assert len(toy.passes) == max(deepest, 1)
