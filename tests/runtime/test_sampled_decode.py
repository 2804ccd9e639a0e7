"""Sampling in the loop: tokens depend on their own prompt, and have the target's distribution."""

import dataclasses

import jax
import numpy as np
import pytest

import jspec
from jspec.checkpoint import Model
from jspec.models import llama
from jspec.models.config import ModelConfig
from jspec.proposers.base import Drafter
from jspec.proposers.draft_model import DraftModelConfig
from jspec.runtime import benchmark
from jspec.runtime.decode import Engine
from jspec.runtime.policies import BatchSizeSchedule
from jspec.runtime.target import DraftProbs
from tests.runtime.test_lossless import OPTIONS, PROMPTS, pair, plain, target
from tests.support.counting import backend_compiles
from tests.support.marks import slow_ones

pytestmark = [pytest.mark.any_device, pytest.mark.usefixtures("quick_compilation")]

BY_CHANCE = ("rejection", "block")
MIXED = {  # per prompt; the second is greedy
    "temperature": [0.8, 0.0, 1.3, 0.5, 1.0],
    "seed": [3, 3, -7, 2**31 - 1, 0],
    "top_k": [0, 5, 9, 40, -1],
    "top_p": [0.95, 1.0, 0.9, 1.0, 0.8],
    "min_p": [0.0, 0.1, 0.0, 0.05, 0.0],
}
PLAIN = {key: OPTIONS[key] for key in ("max_tokens", "cache", "stop_ids")}


def sampled_pair(name="draft_model"):
    """A target, and a drafter that samples its drafts."""
    model, drafter = pair(name, 3)
    config = dataclasses.replace(drafter.config, draft_sampling="probabilistic")
    return model, Drafter(config, drafter.params)


def twin(num_drafts=3):
    """A target that drafts for itself, by sampling."""
    model = target(ModelConfig.tiny())
    config = DraftModelConfig(
        num_drafts=num_drafts, model=model.config, draft_sampling="probabilistic"
    )
    return model, Drafter(config, model.params)


def numbers_of(index):
    return {name: value[index] for name, value in MIXED.items()}


@pytest.fixture(scope="module")
def plain_mixed():
    """What plain sampling gives, prompt by prompt."""
    model, _ = sampled_pair()
    return jspec.generate_plain(model, PROMPTS, **PLAIN, **MIXED).generations


def test_plain_sampling_of_a_prompt_depends_on_its_own_numbers(plain_mixed):
    model, _ = sampled_pair()
    for i in (1, 2):
        alone = jspec.generate_plain(model, [PROMPTS[i]], **PLAIN, **numbers_of(i))
        assert alone.generations == [plain_mixed[i]]
    greedy = plain(model.config)
    assert plain_mixed[1] == greedy[1]
    assert all(plain_mixed[i] != greedy[i] for i in (0, 2, 3, 4))


@pytest.mark.parametrize(
    "name", slow_ones(["ngram", "draft_model", "eagle"], lambda name: name != "eagle")
)
def test_matched_drafts_give_the_tokens_of_plain_sampling(name, plain_mixed):
    """Whatever drafts: on the host, on the device by sampling, with hidden states."""
    model, drafter = pair("eagle", 3) if name == "eagle" else sampled_pair()
    if name == "ngram":
        config = jspec.NgramConfig(num_drafts=3, prompt_lookup_min=1, prompt_lookup_max=3)
        drafter = Drafter(config, None)
    wanted = plain_mixed
    if name == "eagle":
        wanted = jspec.generate_plain(model, PROMPTS, **PLAIN, **MIXED).generations
    report = jspec.generate(model, PROMPTS, *drafter, **OPTIONS, **MIXED)
    assert report.generations == wanted
    assert report.stats.num_draft_tokens > 0


@pytest.mark.parametrize("verification", ["match", *BY_CHANCE])
def test_at_temperature_0_the_tokens_are_those_of_greedy_decoding(verification):
    model, drafter = sampled_pair()
    report = jspec.generate(
        model, PROMPTS, *drafter, **OPTIONS, temperature=0, verification=verification
    )
    assert report.generations == plain(model.config)
    assert report.stats.num_draft_tokens > 0


@pytest.mark.slow
@pytest.mark.parametrize("verification", BY_CHANCE)
def test_neighbours_chunks_and_the_number_of_rows_do_not_change_what_a_prompt_gets(verification):
    model, drafter = sampled_pair()
    options = OPTIONS | {"verification": verification}
    together = jspec.generate(model, PROMPTS, *drafter, **options, **MIXED)
    assert together.stats.num_accepted_tokens > 0
    wanted = together.generations
    order = [4, 2, 0, 3, 1]
    shuffled = jspec.generate(
        *(model, [PROMPTS[i] for i in order], *drafter),
        **options | {"max_requests": 2},
        **{name: [value[i] for i in order] for name, value in MIXED.items()},
    )
    assert shuffled.generations == [wanted[i] for i in order]
    options["max_requests"] = 1
    alone = jspec.generate(model, [PROMPTS[2]], *drafter, **options, **numbers_of(2))
    assert alone.generations == [wanted[2]]


@pytest.mark.slow
@pytest.mark.parametrize(
    "verification, drafting",
    [("rejection", "fixed"), ("block", BatchSizeSchedule([(1, 1, 3), (2, 3, 2)]))],
)
def test_a_drafter_that_is_the_target_is_always_right(verification, drafting):
    """So each draft met its own distribution, though requests change rows and slots."""
    model, drafter = twin()
    report = jspec.generate(
        *(model, PROMPTS, *drafter),
        **OPTIONS | {"drafting": drafting},
        temperature=[1.0, 0.7, 1.2, 0.0, 0.9],
        verification=verification,
    )
    assert report.stats.num_draft_tokens > 40
    assert report.stats.num_accepted_tokens == report.stats.num_draft_tokens


def test_with_the_best_token_alone_sampling_is_greedy_decoding():
    model, drafter = sampled_pair()
    report = jspec.generate(
        *(model, PROMPTS, *drafter),
        **OPTIONS,
        temperature=1.0,
        top_p=1e-6,  # top_k=1 would keep what equals the best one, too
        verification="rejection",
    )
    assert report.generations == plain(model.config)


@pytest.fixture(scope="module")
def counted():
    """How often the loop writes each text of three tokens out of three, by way of verification."""
    config = ModelConfig.tiny(vocab_size=8, num_layers=1)
    params = llama.init_params(config, jax.random.key(1), "float32")
    model = Model(config, params, None, None, ())
    drafter = DraftModelConfig(num_drafts=2, model=config, draft_sampling="probabilistic")
    params = dict(params, head=params["head"] + 0.5 * params["head"][::-1])  # alike, not the same
    num_texts = 2000

    def count(verification, first_seed):
        report = jspec.generate(
            *(model, [[5, 2]] * num_texts, drafter, params),
            max_tokens=3,
            max_requests=250,
            cache=jspec.CacheConfig(num_pages=500, page_size=4, max_model_len=8, dtype="float32"),
            stop_ids=(),
            temperature=2.0,
            top_k=3,
            seed=list(range(first_seed, first_seed + num_texts)),
            verification=verification,
            drafting="fixed",
        )
        assert 0 < report.stats.num_accepted_tokens < report.stats.num_draft_tokens
        texts = [tuple(generation.tokens) for generation in report.generations]
        return np.array([texts.count(text) for text in ALL_TEXTS]), set(texts)

    seen = {}
    ALL_TEXTS = [tuple(t) for t in np.ndindex(8, 8, 8)]
    for i, verification in enumerate(("match", *BY_CHANCE)):
        seen[verification], texts = count(verification, i * num_texts)
        assert 20 < len(texts) <= 27
    return seen


@pytest.mark.parametrize("verification", BY_CHANCE)
def test_only_block_verification_gives_the_drafter_new_seeds_in_every_step(verification):
    """It looks at drafts that it does not keep: the next ones must not be drawn from them."""
    seeds = []

    class Watched(Engine):
        def _draft(self, scheduled, verified):
            seeds.append(int(scheduled.seed[0]))
            return super()._draft(scheduled, verified)

    model, drafter = sampled_pair()
    options = OPTIONS | {"verification": verification, "max_requests": 1}
    report = Watched(model, [PROMPTS[2]], *drafter, **options, **numbers_of(2)).run()
    assert len(seeds) == report.num_steps > 3
    is_new = verification == "block"
    assert len(set(seeds)) == (len(seeds) if is_new else 1)
    assert (MIXED["seed"][2] in seeds) == (not is_new)


@pytest.mark.slow
@pytest.mark.parametrize("verification", BY_CHANCE)
def test_texts_of_the_loop_are_distributed_as_those_of_plain_sampling(counted, verification):
    """Chi-square of two samples of 2,000 texts; 26 degrees of freedom, p = 0.0001."""
    a, b = counted["match"], counted[verification]
    either = a + b > 0
    assert ((a - b)[either] ** 2 / (a + b)[either]).sum() < 62


@pytest.mark.slow
def test_a_warmed_loop_neither_compiles_nor_reads_distributions(monkeypatch):
    model, drafter = sampled_pair()
    engine = Engine(
        *(model, PROMPTS, *drafter),
        **OPTIONS | {"max_requests": 2, "drafting": BatchSizeSchedule([(1, 1, 3), (2, 3, 1)])},
        temperature=0.8,
        top_p=0.9,
        verification="block",
    )
    engine.warmup()
    reads = []
    device_get = jax.device_get
    monkeypatch.setattr(jax, "device_get", lambda tree: reads.append(tree) or device_get(tree))
    with backend_compiles() as compiled:
        report = engine.run()
    assert not compiled
    assert len(reads) == report.num_steps
    assert max(leaf.ndim for leaf in jax.tree.leaves(reads)) == 2
    assert isinstance(engine.draft_probs, DraftProbs)


TREE = jspec.Tree([(0,), (1,)])


@pytest.mark.parametrize(
    "numbers, word",
    [
        ({"seed": 3}, "Pass a temperature"),
        ({"top_k": 3}, "`top_k` is 3 and `temperature` None"),
        ({"temperature": -0.1}, "0 is greedy"),
        ({"temperature": float("nan")}, "`temperature` is nan"),
        ({"temperature": float("inf")}, "`temperature` is inf"),
        ({"temperature": "hot"}, "wanted a number"),
        ({"temperature": [0.5, 0.7]}, "2 entries.*5 prompts.*single number"),
        ({"temperature": 1.0, "seed": 2**31}, "lowest 32 bits"),
        ({"temperature": 1.0, "seed": 2**31}, "from -2147483648 to 2147483647"),
        ({"temperature": 1.0, "seed": 2**64}, "is 18446744073709551616.*lowest 32 bits"),
        ({"temperature": [[1.0], [1.0, 2.0]]}, "a list of one for each"),
        ({"temperature": 1.0, "seed": 0.5}, "wanted an int"),
        ({"temperature": 1.0, "top_k": -2}, "0 and -1 keep every token"),
        ({"temperature": 1.0, "top_p": 0.0}, "pass top_k=1"),
        ({"temperature": 1.0, "top_p": [1, 1, 1, 1, 1.1]}, "`top_p` is 1.1"),
        ({"temperature": 1.0, "min_p": 1.5}, "`min_p` is 1.5"),
        ({"temperature": 1.0, "verification": "blocks"}, "wanted one of match, rejection, block"),
    ],
)
def test_numbers_out_of_range_are_named_before_anything_compiles(numbers, word):
    model, drafter = pair("draft_model", 3)
    with backend_compiles() as compiled, pytest.raises(ValueError, match=word):
        jspec.generate(model, PROMPTS, *drafter, **OPTIONS, **numbers)
    assert not compiled


@pytest.mark.slow
@pytest.mark.parametrize("min_p,num_pages", [(0.01, 5), ([0.01] * len(PROMPTS), 6)])
def test_timed_plain_decoding_compiles_before_its_first_token(min_p, num_pages):
    model, _ = pair("draft_model", 3)
    cache = jspec.CacheConfig(num_pages=num_pages, max_model_len=80, dtype="float32")
    at_first = []
    with backend_compiles() as compiled:
        benchmark.run(
            model,
            PROMPTS,
            max_tokens=3,
            cache=cache,
            temperature=1.0,
            min_p=min_p,
            on_tokens=lambda *args: at_first.append(len(compiled)),
        )
    assert at_first[0] == len(compiled)


@pytest.mark.parametrize("num_prompts", [0, 1])
def test_lists_of_numbers_are_as_long_as_that_of_the_prompts(num_prompts):
    model, drafter = pair("draft_model", 3)
    each = {"temperature": [0.7] * num_prompts, "seed": [1] * num_prompts}
    each |= {"top_k": [2] * num_prompts, "min_p": [0.1] * num_prompts}
    report = jspec.generate(model, PROMPTS[:num_prompts], *drafter, **OPTIONS, **each)
    assert len(report.generations) == num_prompts


def test_a_drafter_that_samples_asks_for_a_temperature_before_anything_compiles():
    model, drafter = sampled_pair()
    with backend_compiles() as compiled, pytest.raises(ValueError, match="0 for greedy"):
        jspec.generate(model, PROMPTS, *drafter, **OPTIONS)
    assert not compiled


def test_trees_are_matched_alone():
    model, drafter = pair("eagle", 2)
    config = dataclasses.replace(drafter.config, num_drafts=2, tree=TREE)
    with pytest.raises(ValueError, match="Choose that, or a drafter with tree=None"):
        jspec.generate(
            *(model, PROMPTS, config, drafter.params),
            **OPTIONS,
            temperature=1.0,
            verification="block",
        )


def test_a_constraint_in_a_step_asks_for_its_temperature():
    model, drafter = pair("draft_model", 3)
    engine = Engine(model, PROMPTS, *drafter, **OPTIONS)
    scheduled = engine.scheduler.pack([], 3)
    scheduled = dataclasses.replace(scheduled, top_k=np.zeros(3, np.int32))
    with pytest.raises(ValueError, match="temperature and seed, too"):
        jspec.metadata.check_scheduled(scheduled)
