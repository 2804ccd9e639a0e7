"""Attention of tree nodes, and where their rows lie, against dense masks and plain loops."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec import metadata
from jspec.axes import PAD_SLOT, PAD_TOKEN
from jspec.models import kv_cache as kv
from jspec.models import llama
from jspec.models.config import ModelConfig
from jspec.runtime.scheduling import RequestRows, pack
from jspec.tree import Tree
from tests.support.paged import make_view, poisoned_cache, shuffled_tables

pytestmark = pytest.mark.any_device

SCALE = 0.3
UNEVEN = Tree([(0,), (1,), (3,), (0, 0), (0, 2), (3, 0), (0, 2, 0), (0, 2, 1)])

write = jax.jit(kv.write)
attend = jax.jit(functools.partial(kv.attend, scale=SCALE), static_argnames="impl")


def dense(q, keys, values, mask):
    """Attention of one request in float64: q [r, N, d], keys and values [c, n, d], mask [r, c]."""
    group = q.shape[1] // keys.shape[1]
    out = np.zeros(q.shape)
    for head in range(q.shape[1]):
        scores = q[:, head].astype(float) @ keys[:, head // group].T.astype(float) * SCALE
        scores = np.where(mask, scores, -np.inf)
        weights = np.exp(scores - scores.max(axis=1, keepdims=True))
        out[:, head] = weights / weights.sum(axis=1, keepdims=True) @ values[:, head // group]
    return out


@pytest.mark.parametrize("contexts", [(7, 0, 300, 3), (1, 130, 0, 12)])
@pytest.mark.parametrize("heads", [(4, 2), (6, 1)])
@pytest.mark.parametrize("impl", ["auto", "interpret"])
def test_nodes_see_the_context_and_their_ancestors(contexts, heads, impl, rng):
    """Requests: a whole tree; rows without nodes; a chunk and a part of a tree; no rows at all."""
    N, n = heads
    trees = [UNEVEN, None, Tree(UNEVEN.choices[:5]), None]
    chunks = [1, 2, 5, 0]
    X, layer, S = UNEVEN.num_nodes, 1, 4
    config = ModelConfig.tiny(num_heads=N, num_kv_heads=n)
    d, M = config.head_dim, 80
    tables = shuffled_tables(rng, 4, M, 4 * M + 3)
    cache = poisoned_cache(config, num_pages=4 * M + 3, page_size=S)
    lens = [start + chunk for start, chunk in zip(contexts, chunks, strict=True)]
    whole = make_view(tables, [0] * 4, lens, page_size=S)
    keys, values = rng.standard_normal((2, sum(lens), n, d)).astype(np.float32)
    cache = kv.with_nodes(write(cache, layer, keys, values, whole.slots), 4, X)

    rows, num_rows = [], 24  # (request, position, node)
    for b, tree in enumerate(trees):
        rows += [(b, contexts[b] + i, PAD_TOKEN) for i in range(chunks[b])]
        if tree is not None:
            rows += [(b, lens[b] - 1 + tree.depths[j], j) for j in range(tree.num_nodes)]
    owner, positions, node = (np.array(column, np.int32) for column in zip(*rows, strict=True))
    T = len(rows)
    visible = np.where((node >= 0)[:, None], UNEVEN.visible[node], False)
    missing = num_rows - T
    view = dataclasses.replace(
        make_view(tables, [0] * 4, lens, page_size=S),
        positions=np.pad(positions, (0, missing), constant_values=9),
        query_start=np.searchsorted(owner, np.arange(5)).astype(np.int32),
        slots=np.full(num_rows, PAD_SLOT, np.int32),
        node_slots=np.pad(
            np.where(node >= 0, owner * X + node, PAD_SLOT), (0, missing), constant_values=PAD_SLOT
        ),
        visible=np.pad(visible, ((0, missing), (0, 0)), constant_values=True),
    )
    own_k, own_v = rng.standard_normal((2, num_rows, n, d)).astype(np.float32)
    own_k[T:], own_v[T:] = np.nan, np.nan
    cache = write(cache, layer, own_k, own_v, view.slots, view.node_slots)
    q = rng.standard_normal((num_rows, N, d)).astype(np.float32)
    got = np.asarray(attend(q, cache, layer, view, impl=impl))
    assert not got[T:].any()
    at = whole.query_start
    for b in range(3):
        mine = owner == b
        nodes = mine & (node >= 0)
        mask = np.arange(lens[b])[None] <= positions[mine][:, None]
        mask = np.concatenate([mask, visible[mine][:, node[nodes]]], axis=1)
        wanted = dense(
            q[:T][mine],
            np.concatenate([keys[at[b] : at[b + 1]], own_k[:T][nodes]]),
            np.concatenate([values[at[b] : at[b + 1]], own_v[:T][nodes]]),
            mask,
        )
        np.testing.assert_allclose(got[:T][mine], wanted, atol=1e-5, rtol=1e-5)  # float32


def test_the_rows_of_trees_are_placed_beside_the_pages():
    """A chunk of a prompt, a tree of four nodes, one row without drafts, and padding."""
    rows = [
        RequestRows(0, [5, 6], 3, 0, [7, 8], backup=9),
        RequestRows(2, [4, 11, 12, 13, 14], 8, 4, [1, 2, 3], parents=[-1, -1, 1, 2]),
        RequestRows(1, [4], 2, 0, [5]),
    ]
    scheduled = pack(rows, num_rows=10, num_requests=4, pages_per_request=3, num_nodes=6)
    assert scheduled.draft_parents.tolist() == [
        [-1] * 6,
        [-1, -1, 1, 2, -1, -1],
        [-1] * 6,
        [-1] * 6,
    ]
    scheduled = jax.tree.map(jnp.asarray, scheduled)
    base = metadata.paged_view(scheduled, page_size=4, max_model_len=12)
    view = metadata.tree_view(base, scheduled, depth=3)
    assert view.node_slots.tolist() == [-1, -1, -1, 6, 7, 8, 9, -1, -1, -1]
    assert view.positions.tolist()[:8] == [3, 4, 8, 9, 9, 10, 11, 2]
    assert view.seq_lens.tolist() == [5, 9, 3, 0]
    assert view.slots.tolist() == [31, 32, 12, -1, -1, -1, -1, 22, -1, -1]
    wanted = np.zeros((10, 6), bool)
    wanted[[3, 4, 5, 5, 6, 6, 6], [0, 1, 1, 2, 1, 2, 3]] = True
    np.testing.assert_array_equal(view.visible, wanted)

    hidden = jnp.arange(20, dtype=jnp.float32).reshape(10, 2)
    path = jnp.array([[-1] * 3, [1, 2, -1], [-1] * 3, [-1] * 3], jnp.int32)
    count = jnp.array([0, 2, 0, 0], jnp.int32)
    got, ids = metadata.path_as_chain(scheduled, hidden, path, count)
    assert ids.tolist() == [5, 6, 4, 12, 13, 13, 14, 4, 0, 0]
    assert got[:, 0].tolist() == [0, 2, 4, 8, 10, 10, 12, 14, 16, 18]


def test_a_tree_for_three_position_axes_is_refused():
    scheduled = pack([], num_rows=2, num_requests=1, pages_per_request=1, num_nodes=2)
    view = metadata.paged_view(jax.tree.map(jnp.asarray, scheduled), page_size=4, max_model_len=4)
    axes = np.zeros((3, 2), np.int32)
    scheduled = dataclasses.replace(scheduled, positions=axes, token_index=axes[0])
    with pytest.raises(NotImplementedError, match="M-RoPE.*tree=None"):
        metadata.tree_view(view, scheduled, depth=1)


def test_a_target_scores_a_tree_as_it_scores_each_path_alone(rng):
    config = ModelConfig.tiny(num_layers=2)
    params = llama.init_params(config, jax.random.key(1), "float32")
    forward = jax.jit(llama.forward, static_argnums=0, static_argnames="hidden_layers")
    S, M, context = 4, 4, rng.integers(0, config.vocab_size, 6).tolist()
    tokens = rng.integers(0, config.vocab_size, UNEVEN.num_nodes).tolist()
    pages = rng.permutation(20)[:M].tolist()
    empty = poisoned_cache(config, num_pages=20, page_size=S)

    def run(rows, trees):
        scheduled = jax.tree.map(
            jnp.asarray,
            pack(
                rows,
                num_rows=16,
                num_requests=2,
                pages_per_request=M,
                num_nodes=UNEVEN.num_nodes if trees else None,
            ),
        )
        view, cache = metadata.paged_view(scheduled, page_size=S, max_model_len=M * S), empty
        if trees:
            view = metadata.tree_view(view, scheduled, depth=UNEVEN.depth)
            cache = kv.with_nodes(empty, 2, UNEVEN.num_nodes)
        rows = jnp.arange(16, dtype=jnp.int32)
        return forward(config, params, scheduled.token_ids, view, cache, logit_rows=rows)

    parents = UNEVEN.parents.tolist()
    logits, _, cache = run([RequestRows(0, context + tokens, 0, 8, pages, parents=parents)], True)
    for node in range(UNEVEN.num_nodes):
        path = np.flatnonzero(UNEVEN.visible[node])
        chain = context + [tokens[i] for i in path]
        wanted, _, plain = run([RequestRows(0, chain, 0, 0, pages)], False)
        rows = [*range(6), *(6 + path)]
        np.testing.assert_allclose(
            logits[np.array(rows)], wanted[: len(rows)], atol=1e-4, rtol=1e-4
        )

        # What is kept lies where the chain would have written it, and nothing else changed.
        places = jnp.array([[*path, *[PAD_TOKEN] * (3 - len(path))], [PAD_TOKEN] * 3], jnp.int32)
        spots = [pages[p // S] * S + p % S for p in range(6, 9)]
        kept = jax.jit(kv.keep_nodes)(cache, places, jnp.array([spots, spots], jnp.int32))
        assert kept.node_k is None and kept.node_v is None
        for got, theirs in ((kept.k, plain.k), (kept.v, plain.v)):
            np.testing.assert_allclose(got, theirs, atol=1e-4, rtol=1e-4)  # NaN where unwritten


@pytest.mark.parametrize("B,J", [(1, 1), (2, 3)])
def test_kept_nodes_are_moved_in_place(B, J):
    pages = jnp.zeros((2, 512, 16, 2, 8))
    cache = kv.KVCache(k=pages, v=pages + 0, max_model_len=64)

    def keep(cache, k, node_slots, path, slots):
        cache = kv.with_nodes(cache, B, 4)
        for layer in range(2):
            cache = kv.write(cache, layer, k, k, jnp.full_like(node_slots, -1), node_slots)
        return kv.keep_nodes(cache, path, slots)

    node_slots = jnp.arange(B * 4, dtype=jnp.int32)
    path, slots = jnp.zeros((2, B, J), jnp.int32)
    arguments = cache, jnp.ones((B * 4, 2, 8)), node_slots, path, slots
    compiled = jax.jit(keep, donate_argnums=0).lower(*arguments).compile()
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes >= 2 * cache.k.nbytes
    assert memory.temp_size_in_bytes < cache.k.nbytes / 8
