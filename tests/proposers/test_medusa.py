"""Medusa drafts: as recorded, in trees, sampled, and at the limits."""

import dataclasses
import functools

import jax
import numpy as np
import pytest

import jspec
from jspec.axes import PAD_TOKEN
from jspec.models.medusa import HeadsConfig
from jspec.proposers.medusa import PROPOSER, MedusaConfig
from jspec.runtime import decode
from jspec.tree import Tree
from tests.support import recordings
from tests.support.heads import NEAR_TIE, gaps, target_of
from tests.support.medusa_heads import (
    CACHE,
    TOLERANCE,
    D,
    V,
    draft,
    drawn,
    load,
    load_stored,
    load_target,
    logits,
)
from tests.support.steps import Row, make_step

pytestmark = pytest.mark.any_device


@pytest.fixture
def target():
    return load_target()


class Watched(decode.Engine):
    """The loop itself, which also keeps what its last step read and drafted."""

    def _draft(self, scheduled, verified):
        drafts = super()._draft(scheduled, verified)
        self.hidden, self.verified = np.asarray(scheduled.hidden), np.asarray(verified.tokens)
        self.drafts = jax.tree.map(np.asarray, drafts)
        self.slots = np.asarray(scheduled.request_slot)
        return drafts

    def prompts_in_order(self, prompts):
        """Lists the prompts in the order in which the step ran them."""
        return [prompts[self.scheduler.running[slot].index] for slot in self.slots if slot >= 0]


@functools.cache
def logits_of(name):
    """Scores of every head [K, n, V] over each recorded prompt."""
    drafter, data = load(name, target_of(name)), recordings.expected(name)
    return [
        np.stack(
            [
                logits(drafter, data[f"target_hidden_{i}"], k)
                for k in range(drafter.config.num_drafts)
            ]
        )
        for i in range(recordings.num_prompts(data))
    ]


@recordings.each_model("medusa")
def test_every_head_gives_the_recorded_logits_at_every_position(name):
    data = recordings.expected(name)
    key = "logits_with_neginf" if "logits_with_neginf_0" in data else "logits"
    for i, got in enumerate(logits_of(name)):
        np.testing.assert_allclose(got, data[f"{key}_{i}"], **TOLERANCE)
        gap = data[f"all_gap_{i}"]
        np.testing.assert_allclose(gaps(got), gap, **TOLERANCE)
        differs = got.argmax(-1) != data[f"all_tokens_{i}"]
        assert not (differs & (gap > NEAR_TIE)).any()
        np.testing.assert_allclose(gaps(got[:, -1]), data[f"draft_gap_{i}"], **TOLERANCE)


@functools.cache
def first_step_of(name):
    """Runs the recorded prompts of unequal length at once; the heads read the target's states."""
    target, data = target_of(name), recordings.expected(name)
    prompts = [data[f"prompt_{i}"].tolist() for i in range(recordings.num_prompts(data))]
    drafter = load(name, target)
    engine = Watched(
        *(target, prompts, *drafter), max_tokens=9, max_requests=len(prompts) + 1, stop_ids=()
    )
    engine.step()
    order = [prompts.index(prompt) for prompt in engine.prompts_in_order(prompts)]
    return engine.hidden, engine.verified, engine.drafts, order, drafter.config.num_drafts


@recordings.each_model("medusa")
def test_the_recorded_prompts_get_the_recorded_drafts_in_one_batch(name):
    data = recordings.expected(name)
    hidden, verified, drafts, order, num_heads = first_step_of(name)
    start = 0
    for i, which in enumerate(order):
        wanted = data[f"target_hidden_{which}"]
        np.testing.assert_allclose(hidden[start : start + len(wanted)], wanted, **TOLERANCE)
        assert verified[i, 0] == data[f"next_token_{which}"]
        assert drafts.tokens[i].tolist() == data[f"draft_tokens_{which}"].tolist()
        start += len(wanted)
    assert drafts.num_drafts.tolist() == [num_heads] * len(order) + [0]


@functools.cache
def best_of_each_head(name, width):
    """Drafts a tree of each head's best tokens: (drafts, tree)."""
    num_heads = load(name, target_of(name)).config.num_drafts
    paths = [(0,) * level + (rank,) for level in range(num_heads) for rank in range(width)]
    drafter, data = load(name, target_of(name), tree=Tree(paths)), recordings.expected(name)
    last = [data[f"target_hidden_{i}"][-1] for i in range(recordings.num_prompts(data))]
    return draft(drafter, np.stack(last)), Tree(paths)


@recordings.each_model("medusa")
def test_a_tree_has_the_recorded_best_tokens_of_each_head(name):
    data = recordings.expected(name)
    drafts, tree = best_of_each_head(name, data["top4_0"].shape[1])
    for i in range(recordings.num_prompts(data)):
        assert drafts.tokens[i].tolist() == data[f"top4_{i}"].reshape(-1).tolist()
        assert drafts.parents[i].tolist() == tree.parents.tolist()
    assert set(drafts.num_drafts.tolist()) == {tree.num_nodes}


def test_the_last_accepted_row_of_each_request_feeds_the_heads(target):
    """Drafts [2 0 3] and kept tokens [1 1 4] give rows 0, 3 and 7."""
    rows = [
        Row(slot=0, context=[5, 6], drafts=[7, 8], kept=[9]),
        Row(slot=1, context=[5, 7], kept=[9]),
        Row(slot=2, context=[5, 8], drafts=[1, 2, 3], kept=[1, 2, 3, 4]),
    ]
    drafter = load("medusa_llama_vllm", target)
    scheduled, verified = make_step(
        rows,
        num_requests=3,
        num_rows=8,
        width=4,
        pages_per_request=8,
        reads=PROPOSER.reads(drafter.config),
    )
    batch = jspec.prepare(scheduled, verified)
    assert batch.last_index.tolist() == [0, 3, 7]
    wanted = draft(drafter, scheduled.hidden[[0, 3, 7]])
    state = jspec.init(*drafter, cache=CACHE, max_requests=3)
    _, drafts = jspec.step(state, scheduled, verified)
    assert np.asarray(drafts.tokens).tolist() == wanted.tokens.tolist()
    assert len(set(map(tuple, wanted.tokens.tolist()))) == 3
    others = np.delete(np.arange(8), [0, 3, 7])
    scheduled.hidden[others] = np.nan  # no other row may be read
    _, drafts = jspec.step(jspec.init(*drafter, cache=CACHE, max_requests=3), scheduled, verified)
    assert np.asarray(drafts.tokens).tolist() == wanted.tokens.tolist()


def test_fewer_drafts_than_heads_load_and_run_fewer_heads(rng, target):
    tensors = drawn(rng, num_heads=5, bias=True)
    whole = load_stored(tensors, target)
    few = load_stored(tensors, target, num_drafts=3)
    assert whole.config.num_drafts == 5 and few.config.num_drafts == 3
    assert set(few.params["heads"]) == {"0", "1", "2"}
    hidden = rng.standard_normal((2, D))
    wanted = draft(whole, hidden).tokens
    assert draft(few, hidden).tokens.tolist() == wanted[:, :3].tolist()
    assert draft(whole, hidden, num_drafts=2).tokens.tolist() == wanted[:, :2].tolist()

    def num_products(num_drafts):
        state = jspec.init(*whole, cache=CACHE, max_requests=1)
        scheduled, verified = make_step(
            [Row(slot=0, context=[1], kept=[2])],
            num_requests=1,
            num_rows=1,
            width=6,
            pages_per_request=8,
            reads=PROPOSER.reads(whole.config),
        )
        batch = jspec.prepare(scheduled, verified)
        core = jspec.pure(whole.config, num_drafts=num_drafts)
        return str(jax.make_jaxpr(core)(state.params, state.memory, batch)).count("dot_general[")

    assert [num_products(k) for k in (0, 1, 5)] == [0, 2, 10]


def test_more_drafts_than_heads_are_refused(rng, target):
    tensors = drawn(rng, num_heads=3)
    with pytest.raises(ValueError, match="`num_drafts` is 5.*has 3 heads.*num_drafts=3"):
        load_stored(tensors, target, num_drafts=5)
    with pytest.raises(ValueError, match="`num_drafts` is 5.*3 heads.*num_drafts=3 or less"):
        MedusaConfig(num_drafts=5, model=HeadsConfig.tiny())
    with pytest.raises(ValueError, match="`tree` has 4 levels.*has 3 heads.*tree of that depth"):
        load_stored(tensors, target, tree=Tree.chain(4))
    with pytest.raises(ValueError, match="num_drafts.*0"):
        load_stored(tensors, target, num_drafts=0)


def test_among_equal_logits_the_lowest_of_the_targets_ids_is_drafted(rng, target):
    ids = np.array([90, 7, 3, 50])
    tensors = drawn(rng, rows=4) | {"token_map": ids}
    for i in range(2):
        tensors[f"lm_heads.{i}.weight"][:] = 0  # every token scores the same
    config, hidden = {"truncated_vocab_size": 4}, rng.standard_normal((1, D))
    assert draft(load_stored(tensors, target, config), hidden).tokens.tolist() == [[3, 3]]
    tree = Tree([(0,), (1,), (2,), (0, 1)])
    drafts = draft(load_stored(tensors, target, config, tree=tree), hidden)
    assert drafts.tokens.tolist() == [[3, 7, 50, 7]]


def test_no_draft_lies_past_the_longest_request(rng, target):
    """A chain is cut at a draft, a tree at a level."""
    tensors, hidden = drawn(rng, num_heads=3), rng.standard_normal((1, D))
    chain = load_stored(tensors, target)
    tree = Tree([(0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0)])
    nodes = load_stored(tensors, target, tree=tree)
    most = CACHE.max_model_len
    for context, depth in ((most - 4, 3), (most - 3, 2), (most - 2, 1), (most - 1, 0)):
        drafts = draft(chain, hidden, context=context)
        assert drafts.num_drafts.tolist() == [depth]
        assert (drafts.tokens[0, depth:] == PAD_TOKEN).all()
        drafts = draft(nodes, hidden, context=context)
        count = [0, 2, 5, 6][depth]
        assert drafts.num_drafts.tolist() == [count]
        assert (drafts.tokens[0, :count] >= 0).all()
        assert (drafts.tokens[0, count:] == PAD_TOKEN).all()
        assert (drafts.parents[0, count:] == PAD_TOKEN).all()


def test_a_chain_written_as_a_tree_drafts_the_same(rng, target):
    tensors, hidden = drawn(rng, num_heads=3), rng.standard_normal((4, D))
    chain = draft(load_stored(tensors, target), hidden)
    tree = draft(load_stored(tensors, target, tree=Tree.chain(3)), hidden)
    assert tree.tokens.tolist() == chain.tokens.tolist()
    assert tree.parents.tolist() == [[PAD_TOKEN, 0, 1]] * 4
    first = draft(load_stored(tensors, target, tree=Tree.chain(3)), hidden, num_drafts=2)
    assert first.tokens.tolist() == chain.tokens[:, :2].tolist()


def test_sampled_drafts_come_with_the_distribution_that_they_are_drawn_from(rng, target):
    ids = np.sort(rng.permutation(V)[:20])
    tensors = drawn(rng, rows=20) | {"token_map": ids}
    config = {"truncated_vocab_size": 20}
    drafter = load_stored(tensors, target, config, draft_sampling="probabilistic")
    num_requests = 400
    hidden = np.repeat(rng.standard_normal((1, D)) / 4, num_requests, axis=0)
    fields = {
        "temperature": np.full(num_requests, 0.8, np.float32),
        "seed": np.arange(num_requests, dtype=np.int32),
    }
    fields["temperature"][-1] = 0
    cache = jspec.CacheConfig(num_pages=8, page_size=4, max_model_len=32, dtype="float32")
    drafts = draft(drafter, hidden, cache=cache, **fields)
    assert drafts.probs.shape == (num_requests, 2, V)
    for i in range(2):
        scores = logits(drafter, hidden[:1], i)[0] / 0.8
        wanted = np.exp(scores - scores.max())
        wanted /= wanted.sum()
        np.testing.assert_allclose(drafts.probs[0, i], wanted, atol=1e-6)
        counts = np.bincount(drafts.tokens[:-1, i], minlength=V)
        assert counts[wanted == 0].sum() == 0
        expected = wanted * (num_requests - 1)
        frequent = expected >= 5
        observed = [*counts[frequent], counts[~frequent].sum()]
        expected = [*expected[frequent], expected[~frequent].sum()]
        statistic = sum((o - e) ** 2 / e for o, e in zip(observed, expected, strict=True) if e)
        freedom = len(observed) - 1
        assert statistic < freedom + 4 * (2 * freedom) ** 0.5  # four standard deviations
        best = int(wanted.argmax())
        assert drafts.tokens[-1, i] == best and drafts.probs[-1, i, best] == 1
    none = draft(drafter, hidden, cache=cache, num_drafts=0, **fields)
    assert none.probs.shape == (num_requests, 0, V)


def test_a_tree_that_does_not_fit_the_heads_is_refused():
    model = HeadsConfig(hidden_size=D, vocab_size=V, num_heads=2, draft_vocab_size=3)
    tree = Tree([(0,), (1,), (0, 0)])
    assert MedusaConfig(model=model, tree=tree).num_drafts == 3
    for options, word in (
        ({"tree": tree, "num_drafts": 2}, "`tree` has 3 nodes.*Leave num_drafts out"),
        ({"tree": Tree.chain(3)}, "`tree` has 3 levels.*deeper nodes"),
        ({"tree": Tree([(3,)])}, "4 best tokens.*Lower the ranks"),
        ({"tree": tree, "draft_sampling": "probabilistic"}, "`draft_sampling`.*without a tree"),
        ({"num_drafts": 3}, "`num_drafts` is 3.*2 heads"),
        ({"draft_sampling": "beam"}, "`draft_sampling`"),
    ):
        with pytest.raises(ValueError, match=word):
            MedusaConfig(model=model, **options)
    for field in ("hidden_size", "vocab_size", "num_heads", "num_layers", "draft_vocab_size"):
        for value in (0, -1):
            with pytest.raises(ValueError, match=field):
                dataclasses.replace(model, **{field: value})


def test_decoding_with_recorded_heads_and_trees_of_them_equals_plain_decoding(target):
    """A tree holds the chain and more, and accepts more."""
    data = recordings.expected("e2e_llama_medusa")
    prompts = [data[f"prompt_{i}"].tolist() for i in range(8)]
    run = {"max_tokens": 24, "stop_ids": (), "chunk_size": 8, "drafting": "fixed"}
    tree = Tree([(0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0), (0, 0, 1), (0, 0, 0, 0)])
    reports = [
        jspec.generate(target, prompts, *load("medusa_llama", target, **o), max_requests=3, **run)
        for o in ({}, {"tree": tree})
    ]
    for report in reports:
        for i, generation in enumerate(report.generations):  # recorded: plain decoding
            assert generation.tokens == data[f"output_{i}"][:24].tolist()
    chain, of_tree = (report.stats.num_accepted_tokens for report in reports)
    assert 0 < chain < of_tree
