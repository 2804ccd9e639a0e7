"""The loop drafts and verifies the chosen numbers; the output equals plain decoding."""

import itertools

import jax
import numpy as np
import pytest

import jspec
from jspec.models.config import ModelConfig
from jspec.proposers import find
from jspec.proposers.base import Drafter
from jspec.proposers.draft_model import DraftModelConfig
from jspec.runtime import policies
from jspec.runtime.decode import Engine
from jspec.runtime.policies import Adaptive, BatchSizeSchedule, ByBatchSize, Costs
from jspec.runtime.scheduling import Scheduler
from tests.runtime.test_lossless import (
    NUM_SCORED,
    OPTIONS,
    PROMPTS,
    assert_lossless,
    pair,
    plain,
    record,
    target,
)
from tests.runtime.test_sampled_decode import BY_CHANCE, MIXED, sampled_pair, twin
from tests.runtime.test_tree_decode import UNEVEN, tree_pair
from tests.support.counting import backend_compiles
from tests.support.marks import slow_ones
from tests.support.transcripts import Recorder

pytestmark = [pytest.mark.any_device, pytest.mark.usefixtures("quick_compilation")]

K = 4
LEVELS = (0, 1, 4)


class AtRandom(ByBatchSize):
    """Drafts a random number of tokens, and verifies a random number of each request's drafts."""

    def __init__(self, levels, seed):
        super().__init__(levels)
        self.rng = np.random.default_rng(seed)
        self.drafted, self.caps = [], []

    def draft(self, slots):
        self.drafted.append(int(self.rng.choice(self.levels)))
        return self.drafted[-1]

    def verify(self, offers):
        caps = {slot: int(self.rng.integers(0, count + 1)) for slot, count in offers.items()}
        self.caps += caps.values()
        return caps


@pytest.fixture
def at_random(monkeypatch):
    """Lets loops draft at random; returns the policies that they got."""
    made = []

    def policy(drafting, *, num_drafts, **sizes):
        levels = [level for level in LEVELS if level < num_drafts] + [num_drafts]
        made.append(AtRandom(levels, seed=len(made)))
        return made[-1]

    monkeypatch.setattr(policies, "policy", policy)
    return made


def drafter_of(name):
    """A model and a drafter: of a tree, with random weights, or without any."""
    if name == "tree":
        return tree_pair("eagle", UNEVEN)
    if name == "eagle":
        return pair(name, 3)
    lookup = {} if name == "suffix" else {"prompt_lookup_min": 1, "prompt_lookup_max": 2}
    return target(ModelConfig.tiny()), Drafter(find(name).Config(num_drafts=K, **lookup), None)


def count_reads(monkeypatch):
    """Returns a list that grows by one with each fetch of a pytree or of an array of JAX."""
    reads = []
    device_get, asarray = jax.device_get, np.asarray

    def counted_get(tree):
        reads.append(tree)
        with monkeypatch.context() as inner:  # it fetches its leaves with numpy
            inner.setattr(np, "asarray", asarray)
            return device_get(tree)

    def counted_asarray(value, *args, **options):
        if isinstance(value, jax.Array):
            reads.append(value)
        return asarray(value, *args, **options)

    monkeypatch.setattr(jax, "device_get", counted_get)
    monkeypatch.setattr(np, "asarray", counted_asarray)
    return reads


@pytest.mark.parametrize(
    "name",
    slow_ones(["ngram", "ngram_gpu", "suffix", "eagle", "tree"], lambda name: name != "ngram"),
)
def test_random_numbers_of_drafts_change_neither_output_nor_executables(
    name, at_random, rng, monkeypatch
):
    """Nor does the loop read more than once a step."""
    model, drafter = drafter_of(name)
    reads = count_reads(monkeypatch)
    for _ in range(3):
        engine = Engine(model, PROMPTS, *drafter, **OPTIONS)
        rng.shuffle(engine.scheduler.free_pages)
        engine.warmup()
        reads.clear()
        with backend_compiles() as compiled:
            report = engine.run()
        assert not compiled
        assert len(reads) == report.num_steps
        assert report.generations == plain(model.config)
        assert report.stats.num_draft_tokens > 0
        assert set(at_random[-1].drafted) == set(at_random[-1].levels)
        assert set(at_random[-1].caps) > {0, 1}


@pytest.mark.slow
def test_steps_without_drafts_keep_what_the_drafter_knows_of_the_context(at_random):
    """A draft model that is the target stays right, so its cache has no gap and no leftover."""
    model = target(ModelConfig.tiny())
    config = DraftModelConfig(num_drafts=K, model=model.config)
    recorder = record(model, Drafter(config, model.params))
    assert_lossless(recorder)
    stats = recorder.report.stats
    assert stats.num_accepted_tokens == stats.num_draft_tokens > 20
    assert at_random[0].drafted.count(0) > 5


def test_a_loop_has_one_shape_a_level_beside_the_one_for_prompts():
    model, drafter = drafter_of("ngram")
    engine = Engine(model, PROMPTS, *drafter, **OPTIONS | {"drafting": Adaptive(levels=LEVELS)})
    assert engine.scheduler.shapes == [(3, 1), (6, 5), (15, 5), (15, 5)]
    engine = Engine(model, PROMPTS, *drafter, **OPTIONS)
    assert engine.scheduler.shapes == [(3, 1), (15, 5), (15, 5)]


def test_drafts_take_the_smallest_shape_that_holds_them():
    schedule = BatchSizeSchedule([(1, 1, 4), (2, 3, 1)])
    sizes = {"max_requests": 3, "max_tokens": 8, "num_drafts": K, "chunk_size": 6, "stop_ids": ()}
    for counts in itertools.product(range(K + 1), repeat=3):
        scheduler = Scheduler([[5]] * 3, OPTIONS["cache"], **sizes, drafting=schedule)
        for request, count in zip(scheduler.admit(), counts, strict=True):
            request.drafts = [7] * count
        rows, (num_rows, width) = scheduler.schedule()
        assert [row.num_drafts for row in rows] == list(counts)
        assert num_rows == next(size for size in (3, 6, 15) if size >= 3 + sum(counts))
        assert width == (K + 1 if any(counts) else 1)
        scheduler.pack(rows, num_rows)


def test_a_schedule_decides_by_the_number_of_requests():
    """Three requests draft one token each; with two left each drafts two, the last one three."""
    model = target(ModelConfig.tiny())
    config = DraftModelConfig(num_drafts=K, model=model.config)
    schedule = BatchSizeSchedule([(1, 1, 3), (2, 2, 2), (3, 3, 1)])
    recorder = Recorder(
        *(model, PROMPTS, config, model.params),
        **OPTIONS | {"drafting": schedule},
    )
    steps = []
    run = recorder._run

    def noting(scheduled, width):
        verified, drafts = run(scheduled, width)
        steps.append((int((scheduled.request_slot >= 0).sum()), drafts.tokens.shape[1]))
        return verified, drafts

    recorder._run = noting
    recorder.run()
    assert_lossless(recorder)
    assert {size for size, _ in steps} == {1, 2, 3}
    assert all(width == 4 - size for size, width in steps)


@pytest.mark.parametrize("wide, pays", [(10.1, True), (60.0, False)])
def test_a_loop_verifies_what_its_costs_allow(wide, pays):
    """Steps without drafts take 10, all others `wide`; every draft is right."""
    model = target(ModelConfig.tiny())
    drafter = Drafter(DraftModelConfig(num_drafts=K, model=model.config), model.params)
    passes = {3 * (1 + level): wide if level else 10.0 for level in LEVELS}
    costs = Costs(passes=passes, drafts=dict.fromkeys(LEVELS, 0.0))
    chosen = Adaptive(levels=LEVELS, costs=costs)
    prompts = [prompt[:1] for prompt in PROMPTS]  # without steps that read prompts
    report = jspec.generate(model, prompts, *drafter, **OPTIONS | {"drafting": chosen})
    fixed = jspec.generate(model, prompts, *drafter, **OPTIONS)
    assert report.generations == fixed.generations
    if pays:
        assert report.stats == fixed.stats
    else:
        assert report.stats.num_draft_tokens == 0 < fixed.stats.num_draft_tokens


def test_a_loop_soon_stops_verifying_drafts_that_are_always_wrong():
    model, drafter = pair("eagle", 3)
    head = jax.random.normal(jax.random.key(3), drafter.params["head"].shape)
    params = dict(drafter.params, head=head.at[:NUM_SCORED].set(0))  # never the target's token
    wrong = Drafter(drafter.config, params)
    prompts = PROMPTS[:1] * 6
    options = OPTIONS | {"max_requests": 1}
    fixed = jspec.generate(model, prompts, *wrong, **options)
    chosen = Adaptive(costs=Costs({1: 10.0, 2: 12.0, 4: 15.0}, {0: 0.0, 1: 0.1, 3: 0.3}))
    report = jspec.generate(model, prompts, *wrong, **options | {"drafting": chosen})
    assert report.generations == fixed.generations
    assert fixed.stats.num_drafts > 80 and fixed.stats.num_accepted_tokens == 0
    assert 0 < report.stats.num_drafts < 12


@pytest.mark.parametrize(
    "name", slow_ones(["ngram", "eagle", "tree"], lambda name: name != "ngram")
)
def test_a_loop_measures_its_costs_before_it_starts(name):
    model, drafter = drafter_of(name)
    engine = Engine(model, PROMPTS, *drafter, **OPTIONS | {"drafting": Adaptive()})
    policy = engine.scheduler.policy
    assert not policy.has_costs
    engine.warmup()
    assert all(policy.costs.run(size) > 0 for size in policy.sizes)
    drafts = [policy.costs.draft(level) for level in policy.levels]
    assert drafts[0] == 0 and drafts == sorted(drafts)
    if name == "ngram":  # it drafts all in any case
        assert not any(drafts)
    assert engine.report.draft_seconds == engine.report.num_steps == 0
    with backend_compiles() as compiled:
        report = engine.run()
    assert not compiled
    assert report.generations == plain(model.config)
    unwarmed = jspec.generate(model, PROMPTS, *drafter, **OPTIONS | {"drafting": Adaptive()})
    assert unwarmed.generations == report.generations


@pytest.mark.parametrize(
    "drafting, error, word",
    [
        (3, TypeError, "BatchSizeSchedule"),
        ([(1, 4, 2)], TypeError, "BatchSizeSchedule"),
        (lambda: Adaptive(levels=(0, 9)), ValueError, "at most 4 tokens.*Lower the levels"),
        (lambda: Adaptive(levels=(3, 1)), ValueError, "ascending"),
        (lambda: Adaptive(levels=(0,)), ValueError, "ascending"),
        (lambda: Adaptive(memory=0.5), ValueError, "memory"),
        (lambda: Adaptive(probe_share=-1), ValueError, "probe_share"),
        (
            lambda: Adaptive(costs=Costs({3: 1.0, 6: 1.0}, {0: 0.0, 1: 0.0, 4: 0.0})),
            ValueError,
            r"wanted \[3, 6, 15\].*leave costs out",
        ),
        (lambda: Costs({1: 0.0}, {0: 0.0}), ValueError, "above 0"),
        (lambda: Costs({1: 1.0}, {0: -1.0}), ValueError, "at least 0"),
    ],
)
def test_bad_choices_are_named_before_anything_compiles(drafting, error, word):
    model, drafter = drafter_of("ngram")
    with backend_compiles() as compiled, pytest.raises(error, match=word):
        drafting = drafting() if callable(drafting) else drafting
        jspec.generate(model, PROMPTS, *drafter, **OPTIONS | {"drafting": drafting})
    assert not compiled


def test_half_a_tree_is_no_level():
    model, drafter = drafter_of("tree")
    with pytest.raises(ValueError, match="all of it or none"):
        jspec.generate(model, PROMPTS, *drafter, **OPTIONS | {"drafting": Adaptive(levels=(0, 3))})


@pytest.mark.parametrize("verification", slow_ones(BY_CHANCE, lambda name: name == "block"))
def test_drafts_kept_by_chance_are_drafted_as_they_pay(verification):
    """A target that drafts for itself keeps every draft; another drafter spoils no greedy text."""
    costs = Costs({3: 1.0, 6: 1.1, 9: 1.2, 12: 1.6}, {0: 0.0, 1: 0.3, 2: 0.5, 3: 0.9})
    drafting = Adaptive(levels=(0, 1, 2, 3), costs=costs, memory=2.0)
    options = OPTIONS | {"verification": verification, "drafting": drafting}

    def run(model, drafter, numbers):
        engine = Engine(model, PROMPTS, *drafter, **options, **numbers)
        levels, draft = [], engine.scheduler.policy.draft
        engine.scheduler.policy.draft = lambda slots: levels.append(draft(slots)) or levels[-1]
        engine.warmup()
        with backend_compiles() as compiled:
            report = engine.run()
        assert not compiled
        return report, set(levels)

    report, _ = run(*twin(), {name: MIXED[name] for name in ("temperature", "seed")})
    assert report.stats.num_accepted_tokens == report.stats.num_draft_tokens > 20
    model, drafter = sampled_pair()
    report, levels = run(model, drafter, MIXED)
    assert 0 < report.stats.num_accepted_tokens < report.stats.num_draft_tokens
    assert len(levels) > 1
    assert report.generations[1] == plain(model.config)[1]  # greedy among the sampled
    assert run(model, drafter, MIXED)[0].generations == report.generations
