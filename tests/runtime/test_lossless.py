"""Drafters with weights leave the target's greedy output as it is, each request for itself.

A new drafter is tested by being registered. Its weights are random, its target is a random Llama of
the shape that its tiny config reads; the head scores few tokens, so that some drafts are right.
"""

import dataclasses
import functools

import jax
import numpy as np
import pytest

import jspec
from jspec import proposers
from jspec.checkpoint import Model
from jspec.models import llama
from jspec.models.config import ModelConfig
from jspec.proposers.base import Drafter
from jspec.proposers.draft_model import DraftModelConfig
from jspec.runtime.decode import Engine
from tests.support.counting import backend_compiles
from tests.support.marks import slow_ones
from tests.support.transcripts import Recorder

pytestmark = [pytest.mark.any_device, pytest.mark.usefixtures("quick_compilation")]

NAMES = [p.name for p in proposers.REGISTRY.values() if p.kind == "device" and not p.model_free]
MOST_DRAFTS = {"extract_hidden_states": 1, "medusa": 3}  # what their tiny configs allow
NUM_SCORED = 4  # tokens that the target may say

# Prompts of 3, 9, 20, 1 and 15 tokens. The longest two meet the longest length a request may have;
# with its neighbours the longest is read in chunks.
PROMPTS = [np.random.default_rng(n).integers(1, 60, n).tolist() for n in (3, 9, 20, 1, 15)]
NUM_TOKENS = 18
CACHE = jspec.CacheConfig(num_pages=24, page_size=4, max_model_len=32, dtype="float32")
OPTIONS = {
    **{"max_tokens": NUM_TOKENS, "cache": CACHE, "stop_ids": ()},
    **{
        "max_requests": 3,
        "drafting": "fixed",
        "chunk_size": 6,
    },  # less than the drafts of three, so two shapes a K
}


@functools.cache
def target(config: ModelConfig) -> Model:
    params = llama.init_params(config, jax.random.key(1), "float32")
    params["head"] = params["head"].at[NUM_SCORED:].set(0)
    return Model(config, params, None, None, ())


def pair(name: str, num_drafts: int) -> tuple[Model, Drafter]:
    """Makes a drafter and a target that it can read; they share embedding and head if they can."""
    proposer = proposers.find(name)
    most = MOST_DRAFTS.get(name, num_drafts)
    if num_drafts > most:
        with pytest.raises(ValueError, match="num_drafts"):
            dataclasses.replace(proposer.Config.tiny(), num_drafts=num_drafts)
        pytest.skip(f"{name} drafts at most {most} tokens")
    config = dataclasses.replace(proposer.Config.tiny(), num_drafts=num_drafts)
    reads = proposer.reads(config)
    layers = [layer for layer in reads.hidden_layers if layer != "norm"]
    sizes = {"vocab_size": config.vocab_size, "num_layers": max(2, *layers, 0)}
    if reads.hidden_layers:
        sizes["hidden_size"] = reads.hidden_size // len(reads.hidden_layers)
    model = target(ModelConfig.tiny(**sizes))
    if proposer.init_params is None:
        return model, Drafter(config, None)
    params = proposer.init_params(config, jax.random.key(2), "float32")
    for leaf in ("embed", "head"):
        if leaf in params and params[leaf].shape == model.params[leaf].shape:
            params[leaf] = model.params[leaf]
    return model, Drafter(config, params)


@functools.cache
def plain(config: ModelConfig):
    options = {name: OPTIONS[name] for name in ("max_tokens", "cache", "stop_ids")}
    return jspec.generate_plain(target(config), PROMPTS, **options).generations


def record(model: Model, drafter: Drafter, prompts=PROMPTS, shuffled_by=None) -> Recorder:
    """Decodes prompts and keeps each one's steps."""
    recorder = Recorder(model, prompts, *drafter, **OPTIONS)
    if shuffled_by is not None:
        shuffled_by.shuffle(recorder.scheduler.free_pages)
    recorder.run()
    return recorder


def assert_lossless(recorder: Recorder) -> None:
    generations = recorder.report.generations
    assert generations == plain(recorder.model.config)
    lengths = [min(NUM_TOKENS, CACHE.max_model_len - len(prompt)) for prompt in PROMPTS]
    assert [len(generation.tokens) for generation in generations] == lengths
    assert recorder.report.stats.num_draft_tokens > 0


@pytest.mark.parametrize("num_drafts", slow_ones([1, 2, 5], lambda k: k < 5))
@pytest.mark.parametrize("name", NAMES)
def test_greedy_output_is_that_of_plain_decoding(name, num_drafts):
    model, drafter = pair(name, num_drafts)
    recorder = record(model, drafter)
    assert_lossless(recorder)
    if drafter.params and drafter.params.get("head") is model.params["head"]:
        assert recorder.report.stats.num_accepted_tokens > 0


@pytest.mark.parametrize("name", slow_ones(NAMES, lambda name: name not in ("eagle3", "mtp")))
def test_neighbours_chunks_and_the_order_of_pages_do_not_change_a_draft(name, rng):
    """With eight drafts, or as many as the method allows; the output is plain decoding's, too."""
    model, drafter = pair(name, min(8, MOST_DRAFTS.get(name, 8)))
    together = record(model, drafter, shuffled_by=rng)
    assert_lossless(together)
    assert together.most_at_once == 3 and together.num_chunks > 0
    for prompt, steps in zip(PROMPTS, together.steps, strict=True):
        assert steps == record(model, drafter, [prompt]).steps[0]
        assert any(step.drafts for step in steps)


@pytest.mark.parametrize("num_drafts", slow_ones([1, 2, 5, 8], lambda k: k != 5))
def test_a_draft_model_that_is_the_target_is_always_right(num_drafts):
    model = target(ModelConfig.tiny())
    config = DraftModelConfig(num_drafts=num_drafts, model=model.config)
    recorder = record(model, Drafter(config, model.params))
    assert_lossless(recorder)
    stats = recorder.report.stats
    assert stats.num_accepted_tokens == stats.num_draft_tokens
    for steps in recorder.steps:
        assert all(step.kept[:-1] == step.verified for step in steps)
        assert len(steps[0].drafts) == num_drafts


def test_a_warmed_loop_that_reads_hidden_states_neither_compiles_nor_reads_twice(monkeypatch):
    model, drafter = pair("eagle", 3)
    engine = Engine(model, PROMPTS, *drafter, **OPTIONS | {"max_requests": 2})
    engine.warmup()
    reads = []
    device_get = jax.device_get
    monkeypatch.setattr(jax, "device_get", lambda tree: reads.append(1) or device_get(tree))
    with backend_compiles() as compiled:
        report = engine.run()
    assert not compiled
    assert len(reads) == report.num_steps
