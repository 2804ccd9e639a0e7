"""The loop drafts and verifies as much as it is told to, and says what plain decoding says."""


import jax
import numpy as np
import pytest

import jspec
from jspec import adaptive
from jspec.adaptive import Adaptive, BatchSizeSchedule, ByBatchSize, Costs
from jspec.config import ModelConfig
from jspec.decode import Engine
from jspec.proposers import find
from jspec.proposers.base import Drafter
from jspec.proposers.draft_model import DraftModelConfig
from tests.counting import backend_compiles
from tests.test_lossless import OPTIONS, PROMPTS, assert_lossless, pair, plain, record, target
from tests.test_tree_decode import UNEVEN, tree_pair
from tests.transcripts import Recorder

pytestmark = pytest.mark.any_device

K = 4
LEVELS = (0, 1, 2, 4)


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


@pytest.fixture(scope="module", autouse=True)
def quick_compilation():
    """Compiling is what takes long here."""
    jax.config.update("jax_disable_most_optimizations", jax.default_backend() == "cpu")
    yield
    jax.config.update("jax_disable_most_optimizations", False)


@pytest.fixture
def at_random(monkeypatch):
    """Lets loops draft at random; returns the policies that they got."""
    made = []

    def policy(drafting, *, num_drafts, **sizes):
        levels = [level for level in LEVELS if level < num_drafts] + [num_drafts]
        made.append(AtRandom(levels, seed=len(made)))
        return made[-1]

    monkeypatch.setattr(adaptive, "policy", policy)
    return made


def drafter_of(name):
    """A model and a drafter: of a tree, with random weights, or without any."""
    if name == "tree":
        return tree_pair("eagle", UNEVEN)
    if name in ("eagle", "medusa"):
        return pair(name, 3)
    lookup = {} if name == "suffix" else {"prompt_lookup_min": 1, "prompt_lookup_max": 2}
    return target(ModelConfig.tiny()), Drafter(find(name).Config(num_drafts=K, **lookup), None)


@pytest.mark.parametrize("name", ["ngram", "ngram_gpu", "suffix", "eagle", "medusa", "tree"])
def test_random_numbers_of_drafts_leave_the_output_as_it_is(name, at_random, rng):
    model, drafter = drafter_of(name)
    verified = 0
    for _ in range(3):
        recorder = record(model, drafter, shuffled_by=rng)
        assert recorder.report.generations == plain(model.config)
        assert set(at_random[-1].drafted) == set(at_random[-1].levels)
        verified += recorder.report.stats.num_draft_tokens
    assert verified > 0


def test_steps_without_drafts_keep_what_the_drafter_knows_of_the_context(at_random):
    """A draft model that is the target stays always right, so its cache has no gap and no leftover."""
    model = target(ModelConfig.tiny())
    config = DraftModelConfig(num_drafts=K, model=model.config)
    recorder = record(model, Drafter(config, model.params))
    assert_lossless(recorder)
    stats = recorder.report.stats
    assert stats.num_accepted_tokens == stats.num_draft_tokens > 20
    assert at_random[0].drafted.count(0) > 5


@pytest.mark.parametrize("name", ["ngram", "ngram_gpu", "eagle", "tree"])
def test_a_warmed_loop_changes_the_number_of_drafts_without_compiling(name, at_random, monkeypatch):
    model, drafter = drafter_of(name)
    engine = Engine(model, PROMPTS, *drafter, **OPTIONS)
    engine.warmup()
    reads = []
    device_get = jax.device_get
    monkeypatch.setattr(jax, "device_get", lambda tree: reads.append(1) or device_get(tree))
    with backend_compiles() as compiled:
        report = engine.run()
    assert not compiled
    assert len(reads) == report.num_steps
    assert len(set(at_random[0].drafted)) == len(at_random[0].levels) > 2
    assert set(at_random[0].caps) > {0, 1}


def test_a_loop_has_one_shape_a_level_beside_the_one_for_prompts():
    model, drafter = drafter_of("ngram")
    engine = Engine(model, PROMPTS, *drafter, **OPTIONS, drafting=Adaptive(levels=LEVELS))
    assert engine.scheduler.shapes == [(3, 1), (6, 5), (9, 5), (15, 5), (15, 5)]
    engine = Engine(model, PROMPTS, *drafter, **OPTIONS)
    assert engine.scheduler.shapes == [(3, 1), (15, 5), (15, 5)]


def test_a_schedule_decides_by_the_number_of_requests():
    """Three requests draft one token each; with two left each drafts two, the last one three."""
    model = target(ModelConfig.tiny())
    config = DraftModelConfig(num_drafts=K, model=model.config)
    schedule = BatchSizeSchedule([(1, 1, 3), (2, 2, 2), (3, 3, 1)])
    recorder = Recorder(
        *(model, PROMPTS, config, model.params),
        **OPTIONS,
        drafting=schedule,
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


def costs(model, drafter, wide):
    """One row takes 10, every more `wide` in all shapes that have drafts."""
    sizes = [3 * (1 + level) for level in LEVELS]
    passes = {size: 10.0 if size == 3 else wide for size in sizes}
    return Costs(passes=passes, drafts=dict.fromkeys(LEVELS, 0.0))


@pytest.mark.parametrize("wide, most_verified", [(10.1, None), (60.0, 0)])
def test_a_loop_verifies_what_its_costs_allow(wide, most_verified):
    model = target(ModelConfig.tiny())
    drafter = Drafter(DraftModelConfig(num_drafts=K, model=model.config), model.params)
    chosen = Adaptive(levels=LEVELS, costs=costs(model, drafter, wide))
    report = jspec.generate(model, PROMPTS, *drafter, **OPTIONS, drafting=chosen)
    fixed = jspec.generate(model, PROMPTS, *drafter, **OPTIONS)
    assert report.generations == fixed.generations == plain(model.config)
    if most_verified is None:
        assert report.num_steps == fixed.num_steps
    else:  # only steps that read prompts, whose rows are free, verify any
        assert fixed.num_steps < report.num_steps


def test_a_loop_on_wrong_drafts_stops_verifying_them_and_goes_on_without_a_choice_of_its_own():
    model, drafter = pair("eagle", 3)
    params = dict(drafter.params, head=-drafter.params["head"])  # never the target's best token
    wrong = Drafter(drafter.config, params)
    prompts = PROMPTS[:1] * 6
    options = OPTIONS | {"max_requests": 1}
    fixed = jspec.generate(model, prompts, *wrong, **options)
    chosen = Adaptive(costs=Costs({1: 10.0, 2: 14.0, 4: 20.0}, {0: 0.0, 1: 0.1, 3: 0.3}))
    report = jspec.generate(model, prompts, *wrong, **options, drafting=chosen)
    assert report.generations == fixed.generations
    assert fixed.stats.num_drafts > 80
    assert report.stats.num_drafts < 12


@pytest.mark.parametrize("name", ["ngram", "eagle", "tree"])
def test_a_loop_measures_its_costs_before_it_starts(name):
    model, drafter = drafter_of(name)
    engine = Engine(model, PROMPTS, *drafter, **OPTIONS, drafting=Adaptive())
    policy = engine.scheduler.policy
    assert not policy.has_costs
    engine.warmup()
    assert all(policy.costs.run(size) > 0 for size in policy.sizes)
    assert policy.costs.draft(policy.levels[0]) == 0
    assert (policy.costs.draft(policy.levels[-1]) > 0) == (name != "ngram")
    assert engine.report.draft_seconds == engine.report.num_steps == 0
    with backend_compiles() as compiled:
        report = engine.run()
    assert not compiled
    assert report.generations == plain(model.config)
    unwarmed = jspec.generate(model, PROMPTS, *drafter, **OPTIONS, drafting=Adaptive())
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
            lambda: Adaptive(costs=Costs({3: 1.0, 9: 1.0}, {0: 0.0, 2: 0.0, 4: 0.0})),
            ValueError,
            r"wanted \[3, 9, 15\].*leave costs out",
        ),
    ],
)
def test_bad_choices_are_named_before_anything_compiles(drafting, error, word):
    model, drafter = drafter_of("ngram")
    with backend_compiles() as compiled, pytest.raises(error, match=word):
        drafting = drafting() if callable(drafting) else drafting
        jspec.generate(model, PROMPTS, *drafter, **OPTIONS, drafting=drafting)
    assert not compiled


def test_half_a_tree_is_no_level():
    model, drafter = drafter_of("tree")
    with pytest.raises(ValueError, match="whole or not at all"):
        jspec.generate(model, PROMPTS, *drafter, **OPTIONS, drafting=Adaptive(levels=(0, 3)))
