"""Trees in the loop: the output is plain decoding's, and what is accepted is the best path."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jspec
from jspec import proposers
from jspec.axes import PAD_TOKEN
from jspec.proposers.base import Drafter
from jspec.runtime import decode
from jspec.runtime.decode import Engine
from jspec.runtime.scheduling import Scheduler
from jspec.tree import DynamicTree, Tree
from jspec.verification import greedy, sampling
from tests.runtime.test_lossless import CACHE, OPTIONS, PROMPTS, pair, plain, record
from tests.support import recordings
from tests.support.counting import backend_compiles
from tests.support.heads import PAGE_SIZE, checkpoint, pages_of, recorded_batch, target_of
from tests.support.marks import slow_ones

pytestmark = [pytest.mark.any_device, pytest.mark.usefixtures("quick_compilation")]

UNEVEN = Tree([(0,), (1,), (3,), (0, 0), (0, 1), (1, 0), (0, 1, 0)])
DYNAMIC = DynamicTree(top_k=3, depth=3, num_nodes=8)


def tree_pair(name, tree):
    model, drafter = pair(name, 3)
    config = dataclasses.replace(drafter.config, num_drafts=tree.num_nodes, tree=tree)
    return model, Drafter(config, drafter.params)


def best_path(drafts, parents, continuation):
    """Loops over all paths: most drafts that the continuation starts with, and their last node."""
    best, last = 0, None
    for node in range(len(drafts)):
        path = []
        while node != PAD_TOKEN:
            path.insert(0, node)
            node = parents[node]
        if [drafts[i] for i in path] == continuation[: len(path)] and len(path) > best:
            best, last = len(path), path[-1]
    return best, last


@pytest.mark.parametrize(
    "name, tree",
    slow_ones(
        [("eagle", UNEVEN), ("eagle3", DYNAMIC), ("medusa", UNEVEN)],
        lambda name, tree: name != "eagle",
    ),
)
def test_greedy_output_is_that_of_plain_decoding(name, tree, rng):
    """Prompts of 1 to 20 tokens, read in chunks, over shuffled pages, up to max_model_len."""
    model, drafter = tree_pair(name, tree)
    recorder = record(model, drafter, shuffled_by=rng)
    assert recorder.report.generations == plain(model.config)
    assert recorder.num_chunks > 0 and recorder.most_at_once == 3
    stats = recorder.report.stats
    assert stats.num_spec_tokens == len(stats.num_accepted_tokens_per_pos) == tree.depth
    assert stats.num_accepted_tokens_per_pos[0] > 0
    longest = [len(p) + len(g.tokens) for p, g in zip(PROMPTS, plain(model.config), strict=True)]
    assert max(longest) == CACHE.max_model_len


@pytest.mark.slow
def test_each_step_accepts_the_longest_path_that_the_target_agrees_with():
    """So a tree gets at least what any of its chains gets on the same context."""
    model, drafter = tree_pair("eagle", UNEVEN)
    recorder = record(model, drafter)
    by_other_branches = deeper = 0
    for steps, generation in zip(recorder.steps, plain(model.config), strict=True):
        text, at = generation.tokens, 0
        for step, after in zip(steps, steps[1:], strict=False):
            at += len(step.kept)
            parents = UNEVEN.parents.tolist()
            room = len(text) - at - 1  # the last token is the target's own
            wanted, last = best_path(step.drafts, parents, text[at : at + room])
            assert len(after.kept) - 1 == wanted
            assert after.kept == text[at : at + wanted + 1]
            by_other_branches += last is not None and any(UNEVEN.choices[last])
            deeper += wanted > 1
    assert by_other_branches > 0 and deeper > 0


@pytest.mark.parametrize("name", slow_ones(["eagle", "eagle3"], lambda name: name == "eagle3"))
def test_a_chain_written_as_a_tree_drafts_and_accepts_what_the_chain_does(name):
    model, chain = pair(name, 3)
    _, tree = tree_pair(name, Tree.chain(3))
    assert record(model, tree).steps == record(model, chain).steps


def test_a_sampled_tree_gives_the_tokens_of_plain_sampling():
    """Draws depend on seed and position alone, so every token is the same, not just their law."""
    model, drafter = tree_pair("eagle", UNEVEN)
    numbers = {"temperature": 0.8, "seed": 11}
    options = {key: OPTIONS[key] for key in ("max_tokens", "cache", "stop_ids")}
    wanted = jspec.generate_plain(model, PROMPTS, **options, **numbers).generations
    assert wanted != plain(model.config)
    report = jspec.generate(model, PROMPTS, *drafter, **OPTIONS, **numbers)
    assert report.generations == wanted
    assert report.stats.num_accepted_tokens > 0


def test_a_warmed_loop_neither_compiles_nor_reads_twice(monkeypatch):
    model, drafter = tree_pair("eagle", UNEVEN)
    engine = Engine(model, PROMPTS, *drafter, **OPTIONS | {"max_requests": 2})
    engine.warmup()
    reads = []
    device_get = jax.device_get
    monkeypatch.setattr(jax, "device_get", lambda tree: reads.append(1) or device_get(tree))
    with backend_compiles() as compiled:
        report = engine.run()
    assert not compiled
    assert len(reads) == report.num_steps


def test_a_step_with_a_tree_rewrites_the_cache_in_place():
    model, drafter = tree_pair("eagle", UNEVEN)
    cache = dataclasses.replace(CACHE, num_pages=4096)
    engine = Engine(model, PROMPTS, *drafter, **OPTIONS | {"cache": cache})
    num_rows, width = engine.scheduler.shapes[1]
    compiled = decode.target_step.lower(
        model.config,
        model.params,
        engine.cache,
        jax.device_put(engine.scheduler.pack([], num_rows)),
        width=width,
        hidden_layers=engine.hidden_layers,
        tree_depth=engine.tree_depth,
    ).compile()
    memory = compiled.memory_analysis()
    size = 2 * engine.cache.k.nbytes
    assert memory.alias_size_in_bytes == size
    assert memory.temp_size_in_bytes < size / 8


@pytest.mark.parametrize("room, most", [(1, 0), (2, 3), (3, 6), (4, 7), (9, 7)])
def test_nodes_deeper_than_a_request_may_grow_are_not_verified(room, most):
    scheduler = Scheduler(
        [[1, 2, 3]],
        CACHE,
        **{"max_requests": 1, "max_tokens": room, "num_drafts": 7, "chunk_size": 9},
        stop_ids=(),
        tree_depth=3,
        drafting="fixed",
    )
    (request,) = scheduler.admit()
    request.drafts, request.parents = [5] * 7, UNEVEN.parents.tolist()
    request.num_computed = 2
    (rows,), shape = scheduler.schedule()
    assert rows.num_drafts == len(rows.parents) == most
    assert shape == scheduler.shapes[1 if most else 0]


def test_the_walk_finds_what_a_loop_over_all_paths_finds(rng):
    B, X, depth = 200, 9, 4
    parents = np.full((B, X), PAD_TOKEN, np.int32)
    for b in range(B):
        depths = []
        for node in range(X):
            fitting = [PAD_TOKEN] + [i for i in range(node) if depths[i] < depth]
            parents[b, node] = rng.choice(fitting)
            depths.append(1 if parents[b, node] < 0 else depths[parents[b, node]] + 1)
    drafts = rng.integers(0, 2, (B, X)).astype(np.int32)
    chosen = rng.integers(0, 2, (B, X + 1)).astype(np.int32)
    count = rng.integers(0, X + 1, B).astype(np.int32)
    drafts[:, 5] = np.where(rng.random(B) < 0.3, PAD_TOKEN, drafts[:, 5])
    walk = jax.jit(greedy.tree, static_argnames="depth")
    verified, path, accepted = walk(chosen, drafts, parents, count, depth=depth)
    assert verified.tokens.shape == (B, depth + 1) and path.shape == (B, depth)
    reached = 0
    for b in range(B):
        at, tokens, nodes = PAD_TOKEN, [], []
        while True:
            tokens.append(int(chosen[b, at + 1]))
            children = [
                i for i in range(count[b]) if (parents[b, i], drafts[b, i]) == (at, tokens[-1])
            ]
            if not children:
                break
            at = children[0]
            nodes.append(at)
        assert path[b].tolist() == nodes + [PAD_TOKEN] * (depth - len(nodes))
        assert verified.tokens[b].tolist() == tokens + [PAD_TOKEN] * (depth - len(nodes))
        assert accepted[b] == len(nodes)
        reached = max(reached, len(nodes))
    assert reached == depth


def test_verification_of_other_shapes_is_refused():
    one = jnp.zeros((1, 3), jnp.int32)
    with pytest.raises(ValueError, match="one after each node"):
        greedy.tree(one, one, one, jnp.ones(1, jnp.int32), depth=2)


def test_sampled_verification_keeps_the_targets_distribution(rng):
    """Chi-square of the first two tokens over 20,000 seeds, 4 degrees of freedom."""
    B, V, heat = 20_000, 5, 0.7
    tree = Tree([(0,), (1,), (0, 0), (1, 0)])
    logits = rng.standard_normal((tree.num_nodes + 1, V)).astype(np.float32)
    drafts = np.array([3, 1, 2, 4], np.int32)
    seed = jnp.arange(B, dtype=jnp.int32)
    draw = functools.partial(sampling.draw, stream=0)
    chosen = []
    for node in range(tree.num_nodes + 1):
        place = jnp.full(B, 8 + (tree.depths[node - 1] if node else 0), jnp.int32)
        rows = jnp.broadcast_to(logits[node][None], (B, V))
        chosen.append(jax.jit(draw)(rows, jnp.full(B, heat), seed, place))
    verified, path, _ = greedy.tree(
        jnp.stack(chosen, axis=1),
        jnp.broadcast_to(drafts[None], (B, 4)),
        jnp.broadcast_to(tree.parents[None], (B, 4)),
        jnp.full(B, 4, jnp.int32),
        depth=2,
    )

    def chi_square(tokens, node):
        p = np.exp(logits[node] / heat)
        wanted = p / p.sum() * len(tokens)
        return ((np.bincount(tokens, minlength=V) - wanted) ** 2 / wanted).sum()

    tokens, path = np.asarray(verified.tokens), np.asarray(path)
    assert chi_square(tokens[:, 0], 0) < 20  # p = 0.0005
    for node in (0, 1):
        reached = path[:, 0] == node
        assert reached.sum() > 500
        assert chi_square(tokens[reached, 1], node + 1) < 20


@functools.cache
def dynamic_tree_of(name):
    """Drafts the recorded dynamic tree of a head."""
    data = recordings.expected(name)
    sizes = recordings.readme(name, r"top_k (\d+), depth (\d+), (\d+) draft tokens")
    top_k, depth, num_nodes = map(int, sizes)
    # The recorded depth counts passes after the first.
    tree = DynamicTree(top_k=top_k, depth=depth + 1, num_nodes=num_nodes)
    proposer = proposers.find("eagle3" if "aux_hidden_0" in data else "eagle")
    drafter = proposer.load(checkpoint(name), target_of(name), dtype="float32", tree=tree)
    num_prompts, pages = recordings.num_prompts(data), pages_of(data)
    cache = jspec.CacheConfig(
        num_pages=num_prompts * pages,
        page_size=PAGE_SIZE,
        max_model_len=PAGE_SIZE * pages,
        dtype="float32",
    )
    state = jspec.init(*drafter, cache=cache, max_requests=num_prompts)
    hidden = "aux_hidden" if "aux_hidden_0" in data else "target_hidden"
    _, drafts = jspec.propose(state, recorded_batch(data, drafter.config, hidden))
    return jax.tree.map(np.asarray, drafts)


@recordings.each_model("eagle", "eagle3", having="tree_tokens_0")
def test_dynamic_trees_equal_the_recorded_ones(name):
    data, drafts = recordings.expected(name), dynamic_tree_of(name)
    compared = 0
    for i in range(recordings.num_prompts(data)):
        if not data[f"tree_robust_{i}"]:
            continue
        compared += 1
        tokens = data[f"tree_tokens_{i}"]
        assert tokens[0] == data[f"next_token_{i}"]
        assert drafts.num_drafts[i] == len(tokens) - 1
        assert drafts.tokens[i].tolist() == tokens[1:].tolist()
        mask, recorded = ancestors_of(drafts.parents[i]), data[f"tree_parents_mask_{i}"]
        np.testing.assert_array_equal(mask, recorded[1:, 1:])
        assert recorded[:, 0].all() and not recorded[0, 1:].any()
        assert [0, *mask.sum(axis=1)] == data[f"tree_positions_{i}"].tolist()
        paths = sorted(row[row >= 0].tolist() for row in data[f"tree_retrieve_{i}"])
        assert paths == paths_to_leaves(drafts.parents[i])
    assert compared > 0


def ancestors_of(parents):
    return jspec.metadata.ancestors(parents[None], depth=len(parents))[0]


def paths_to_leaves(parents):
    """Lists the paths from the root, which is 0, to each node that is no parent."""
    paths = []
    for node in set(range(len(parents))) - set(parents.tolist()):
        path = []
        while node != PAD_TOKEN:
            path.append(node + 1)
            node = parents[node]
        paths.append([0, *map(int, path[::-1])])
    return sorted(paths)
