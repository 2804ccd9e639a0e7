"""Differences between two runs: which may be rounding, and which are errors."""

import pytest

import jspec
from jspec import cli
from jspec.cli import comparison
from jspec.metrics import SpecDecodingStats
from jspec.runtime import benchmark
from jspec.runtime.decode import Report
from jspec.runtime.scheduling import Generation
from tests.conftest import GOLDEN
from tests.support.text_models import with_tokenizer

PROMPTS = [[3, 4, 5], [7] * 70, [9]]
CACHE = jspec.CacheConfig(num_pages=8, max_model_len=128, dtype="float32")


@pytest.fixture(scope="module")
def model():
    return jspec.load(GOLDEN / "models" / "draft_llama_small", "float32")


@pytest.fixture(scope="module")
def plain(model):
    return jspec.generate_plain(model, PROMPTS, max_tokens=3, cache=CACHE, stop_ids=[])


def changed(plain, index, at, token):
    """A run that has another token at one place of one prompt."""
    generations = list(plain.generations)
    tokens = list(generations[index].tokens)
    tokens[at] = token
    generations[index] = Generation(tokens, generations[index].reason)
    return Report(generations, SpecDecodingStats.new(1))


def compare(model, report, plain, greedy=True):
    return comparison.differences(model, PROMPTS, report, plain, cache=CACHE, greedy=greedy)


def test_logits_after_a_text_are_those_that_plain_decoding_chose_from(model, plain):
    for prompt, generation in zip(PROMPTS, plain.generations, strict=True):
        for at, token in enumerate(generation.tokens):
            text = [*prompt, *generation.tokens[:at]]
            assert comparison._logits_after(model, text, CACHE).argmax() == token


def test_a_difference_is_a_tie_only_where_the_logits_are_close(model, plain):
    assert compare(model, plain, plain) == {"differing_prompts": 0, "near_ties": 0}
    assert compare(model, plain, None) == {"differing_prompts": None, "near_ties": None}
    text = [*PROMPTS[1], *plain.generations[1].tokens[:2]]
    worst = int(comparison._logits_after(model, text, CACHE).argmin())
    report = changed(plain, 1, 2, worst)
    assert compare(model, report, plain) == {"differing_prompts": 1, "near_ties": 0}
    assert compare(model, report, plain, greedy=False)["near_ties"] is None
    # Two equal rows of the head have equal logits.
    best = plain.generations[1].tokens[2]
    twin = (best + 1) % model.config.vocab_size
    head = model.params["head"]
    model = model._replace(params=model.params | {"head": head.at[twin].set(head[best])})
    report = changed(plain, 1, 2, twin)
    assert compare(model, report, plain) == {"differing_prompts": 1, "near_ties": 1}


@pytest.mark.parametrize("dtype,code", [("float32", 1), ("bfloat16", 0)])
def test_a_changed_token_is_an_error_in_float32_alone(
    dtype, code, tmp_path, own_cache, monkeypatch, capfd
):
    run = benchmark.run

    def with_another_token(model, prompts, config=None, *arguments, **options):
        report = run(model, prompts, config, *arguments, **options)
        return (
            report if config is None else changed(report, 0, 1, report.generations[0].tokens[1] ^ 1)
        )

    monkeypatch.setattr(benchmark, "run", with_another_token)
    folder = with_tokenizer(tmp_path / "tiny", "draft_llama_small")
    words = ["generate", "--model", str(folder), "--prompt", "abcabc", "--max-tokens", "3"]
    words += ["--num-drafts", "2", "--dtype", dtype]
    assert cli.main([*words, "--compare-plain"]) == code
    out = capfd.readouterr().out
    assert "identical to plain  no" in out and "differing prompts  1" in out and "near ties" in out
