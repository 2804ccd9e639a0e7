"""The loop is lossless: with any drafter it gives the tokens of plain decoding."""

import dataclasses

import jax
import numpy as np
import pytest

import jspec
from jspec.proposers import REGISTRY
from jspec.runtime.decode import Engine
from tests.support import recordings
from tests.support.counting import backend_compiles

LOOKUP = {"prompt_lookup_min": 1, "prompt_lookup_max": 3}
OPTIONS = {"ngram": LOOKUP, "ngram_gpu": LOOKUP, "suffix": {"max_spec_offset": 2.0}}
NUM_TOKENS = 32
MODEL_FREE = [name for name in REGISTRY if REGISTRY[name].model_free]  # others: test_lossless.py


@pytest.fixture(scope="module")
def model():
    return jspec.load(recordings.MODELS / "draft_llama_small", "float32")


@pytest.fixture(scope="module")
def prompts(model):
    """Eleven prompts of different lengths; three are the recorded ones."""
    recorded = recordings.expected("draft_llama_small")
    rng = np.random.default_rng(3)
    drawn = [rng.integers(3, 128, size).tolist() for size in (1, 2, 7, 40, 70, 16, 3, 90)]
    return [recorded[f"prompt_{i}"].tolist() for i in range(3)] + drawn


@pytest.fixture(scope="module")
def plain(model, prompts):
    return jspec.generate_plain(model, prompts, max_tokens=NUM_TOKENS, stop_ids=())


@recordings.of_this_repository
def test_plain_decoding_gives_the_golden_continuations(plain):
    recorded = recordings.expected("draft_llama_small")
    for i in range(3):
        assert recorded[f"continuation_gap_{i}"].min() > 1e-3  # no near tie to excuse
        assert plain.generations[i].tokens == recorded[f"continuation_{i}"].tolist()


@pytest.mark.parametrize("max_requests", [1, 3, 8])
@pytest.mark.parametrize("num_drafts", [1, 2, 5, 8])
@pytest.mark.parametrize("name", MODEL_FREE)
def test_speculation_equals_plain_decoding(model, prompts, plain, name, num_drafts, max_requests):
    config = REGISTRY[name].Config(num_drafts=num_drafts, **OPTIONS.get(name, {}))
    report = jspec.generate(
        *(model, prompts, config),
        max_tokens=NUM_TOKENS,
        max_requests=max_requests,
        stop_ids=(),
        drafting="fixed",
    )
    assert report.generations == plain.generations
    assert report.stats.num_accepted_tokens > 50  # it did speculate
    assert report.num_tokens == len(prompts) * NUM_TOKENS


@pytest.mark.parametrize("name", MODEL_FREE)
def test_stop_tokens_and_few_pages_change_when_requests_run_but_not_what_they_say(
    model, prompts, plain, name
):
    texts = [generation.tokens for generation in plain.generations]
    stop = next(t for t in texts[0][4:] if any(t not in text for text in texts))
    wanted = jspec.generate_plain(model, prompts, max_tokens=NUM_TOKENS, stop_ids=[stop])
    assert {g.reason for g in wanted.generations} == {"stop", "length"}
    assert wanted.generations[0].tokens == texts[0][: texts[0].index(stop) + 1]
    cache = jspec.CacheConfig(num_pages=20, page_size=8, max_model_len=128, dtype="float32")
    config = REGISTRY[name].Config(num_drafts=4, **OPTIONS.get(name, {}))
    report = jspec.generate(
        model,
        prompts,
        config,
        max_tokens=NUM_TOKENS,
        max_requests=3,
        cache=cache,
        chunk_size=32,
        stop_ids=[stop],
    )
    assert report.generations == wanted.generations


@pytest.mark.parametrize("name", MODEL_FREE)
def test_a_request_ends_at_the_longest_length_the_cache_allows(model, prompts, name):
    cache = jspec.CacheConfig(num_pages=8, page_size=8, max_model_len=46, dtype="float32")
    some = [p for p in prompts if len(p) < 46] + [[7] * 45]
    assert max(map(len, some)) + NUM_TOKENS > 46
    wanted = jspec.generate_plain(model, some, max_tokens=NUM_TOKENS, cache=cache, stop_ids=())
    config = REGISTRY[name].Config(num_drafts=5, **OPTIONS.get(name, {}))
    report = jspec.generate(
        model, some, config, max_tokens=NUM_TOKENS, max_requests=1, cache=cache, stop_ids=()
    )
    assert report.generations == wanted.generations
    assert max(len(p) + len(g.tokens) for p, g in zip(some, wanted.generations, strict=True)) == 46
    assert len(report.generations[-1].tokens) == 1


@pytest.mark.parametrize("name", MODEL_FREE)
def test_tokens_stream_in_order_with_accepted_drafts_counted(model, prompts, name):
    seen = {i: [] for i in range(3)}
    accepted = 0

    def on_tokens(index, tokens, num_accepted):
        nonlocal accepted
        seen[index] += tokens
        accepted += num_accepted

    config = REGISTRY[name].Config(num_drafts=5, **OPTIONS.get(name, {}))
    report = jspec.generate(
        model, prompts[:3], config, max_tokens=NUM_TOKENS, stop_ids=(), on_tokens=on_tokens
    )
    assert [seen[i] for i in range(3)] == [g.tokens for g in report.generations]
    assert accepted == report.stats.num_accepted_tokens


@pytest.mark.parametrize("name", MODEL_FREE)
def test_a_warmed_loop_never_compiles(model, prompts, name):
    config = REGISTRY[name].Config(num_drafts=5, **OPTIONS.get(name, {}))
    engine = Engine(model, prompts, config, max_tokens=12, max_requests=3, stop_ids=())
    engine.warmup()
    with backend_compiles() as compiled:
        engine.run()
    assert not compiled


@pytest.mark.parametrize("name", [n for n in MODEL_FREE if REGISTRY[n].kind == "device"])
def test_a_device_drafter_is_read_once_a_step(model, prompts, name, monkeypatch):
    config = REGISTRY[name].Config(num_drafts=3, **OPTIONS.get(name, {}))
    engine = Engine(model, prompts[:2], config, max_tokens=12, max_requests=2, stop_ids=())
    engine.warmup()
    reads = []
    device_get = jax.device_get
    monkeypatch.setattr(jax, "device_get", lambda tree: reads.append(1) or device_get(tree))
    report = engine.run()
    assert len(reads) == report.num_steps


def test_prompts_may_come_from_an_iterator(model, prompts):
    config = jspec.NgramConfig(num_drafts=2, **LOOKUP)
    report = jspec.generate(model, iter(prompts[:2]), config, max_tokens=2)
    plain = jspec.generate_plain(model, iter(prompts[:2]), max_tokens=2)
    assert len(plain.generations) == 2
    assert report.generations == plain.generations


def _broken(prompts, vocab_size=None, **kwargs):
    def call(model):
        config = jspec.NgramConfig(num_drafts=2, vocab_size=vocab_size, **LOOKUP)
        jspec.generate(model, prompts, config, **{"max_tokens": 4, **kwargs})

    return call


@pytest.mark.parametrize(
    "call, word",
    [
        (_broken([[5], []]), r"prompts\[1\].*empty"),
        (_broken([[1] * 600]), "max_model_len"),
        (_broken([[1] * 512]), r"prompts\[0\].*512 tokens.*no token can be added"),
        (_broken([[1, 128]]), "token 1 is 128.*128"),
        (_broken([[1, -1]]), "token 1 is -1"),
        (_broken([[1.5, 2.0]]), "tokenizer"),
        (_broken([[1]], max_tokens=0), "max_tokens"),
        (_broken([[1]], max_requests=0), "max_requests"),
        (_broken([[1]], chunk_size=0), "chunk_size"),
        (
            _broken([[1] * 40], cache=jspec.CacheConfig(num_pages=2, max_model_len=64)),
            "2 pages.*takes 3.*num_pages",
        ),
        (
            _broken([[1]], cache=jspec.CacheConfig(num_pages=64, max_model_len=1024)),
            "max_model_len is 1024, above the 512 positions",
        ),
        (_broken([[1], [70]], vocab_size=64), r"prompts\[1\].*token 0 is 70.*64"),  # the drafter's
    ],
)
def test_bad_input_is_named_before_anything_compiles(model, call, word):
    with backend_compiles() as compiled, pytest.raises(ValueError, match=word):
        call(model)
    assert not compiled


def test_a_method_that_is_unknown_gets_the_nearest_names():
    with pytest.raises(KeyError, match="ngram_gpu"):
        jspec.proposers.find("ngramm_gpu")
    with pytest.raises(KeyError, match="Did you mean 'ngram'"):
        jspec.proposers.find("NGRAM")
    with pytest.raises(KeyError, match="None.*Methods: ngram"):
        jspec.proposers.find(None)
    with pytest.raises(TypeError, match="NgramConfig"):
        jspec.init(dataclasses.make_dataclass("Mine", [])(), cache=None, max_requests=1)
