"""Folders that transformers wrote are continued as transformers continues them, in float32."""

import json

import pytest

import jspec
from jspec.cli import models, prompts
from tests.conftest import RECORDED_TEXT

FOUND = json.loads((RECORDED_TEXT / "generation.json").read_text())["models"]


@pytest.fixture(scope="module", params=FOUND)
def recorded(request):
    name = request.param
    return FOUND[name], jspec.load(RECORDED_TEXT / name, "float32")


def test_prompts_and_end_tokens_are_the_recorded_ones(recorded):
    found, model = recorded
    tokenizer = models.open_tokenizer(model)
    for prompt in found["prompts"]:
        asked, raw = (prompt["prompt"], True) if "prompt" in prompt else (prompt["messages"], False)
        row = prompts.CommandPrompt(asked, "prompt")
        bad = prompts.BadPrompts()
        _, ids = prompts.encode(tokenizer, [row], bad, model=model.config, raw=raw)
        assert ids == [prompt["ids"]]
        assert tokenizer.decode(prompt["tokens"]) == prompt["text"]
    assert list(model.stop_ids) == found["stop_ids"]
    assert not set(model.config.eos_token_ids) & set(model.stop_ids)  # what config.json says


def test_greedy_tokens_are_the_recorded_ones_with_and_without_drafts(recorded):
    found, model = recorded
    ids = [prompt["ids"] for prompt in found["prompts"]]
    wanted = [prompt["tokens"] for prompt in found["prompts"]]
    reasons = ["stop" if tokens[-1] in found["stop_ids"] else "length" for tokens in wanted]
    assert set(reasons) == {"stop", "length"}
    drafter = jspec.NgramConfig(num_drafts=3, prompt_lookup_min=1, prompt_lookup_max=3)
    for report in (
        jspec.generate_plain(model, ids, max_tokens=24),
        jspec.generate(model, ids, drafter, max_tokens=24, max_requests=3),
        jspec.generate(model, ids, drafter, max_tokens=24, max_requests=3, drafting="fixed"),
    ):
        assert [generation.tokens for generation in report.generations] == wanted
        assert [generation.reason for generation in report.generations] == reasons
    assert report.stats.num_accepted_tokens > 0
