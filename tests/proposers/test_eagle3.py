"""EAGLE-3 heads against recorded hidden states, logits and chains, and a loop without a cache."""

import dataclasses
import functools

import jax
import numpy as np
import pytest

from jspec.models import weights
from jspec.models.config import ModelConfig
from jspec.models.eagle3 import Eagle3ModelConfig, Head
from jspec.proposers import _draft
from jspec.proposers.eagle3 import PROPOSER, draft_model
from tests.support import recordings
from tests.support.heads import (
    GAP_TOLERANCE,
    NEAR_TIE,
    PAGE_SIZE,
    TOLERANCE,
    assert_target_gives_what_a_head_read,
    checkpoint,
    dense_attention,
    dense_mlp,
    dense_norm,
    gaps,
    num_drafts_of,
    recorded_batch,
    recorded_cache,
    target_of,
)
from tests.support.paged import make_view, poisoned_cache, shuffled_tables
from tests.support.transcripts import chain_with_outputs

pytestmark = pytest.mark.any_device


def load(name, given=None, **kwargs):
    given = checkpoint(name) if given is None else given
    return PROPOSER.load(given, target_of(name), **{"dtype": "float32"} | kwargs)


def before_norm(config, params):
    """The draft model, with the residual stream as the output that logits are read from."""
    head = weights.bind(Head, dataclasses.replace(config.model, norm_output=False), params)

    def run(*arguments):
        _, x, cache = head(*arguments)
        return x, head.norm(x) if config.model.norm_output else x, cache

    model = draft_model(config, params)
    return model._replace(run=run, logits=lambda x: head.logits(head.norm(x)))


@recordings.each_model("eagle3", "peagle")
def test_the_target_gives_the_recorded_hidden_states_and_next_token(name):
    config, _ = load(name)
    assert_target_gives_what_a_head_read(name, PROPOSER.reads(config).hidden_layers, "aux_hidden")


@functools.cache
def first_pass_of(name):
    """Runs the first pass over the recorded prompts; returns what is recorded of it, and rows."""
    data, (config, params) = recordings.expected(name), load(name)
    batch = recorded_batch(data, config, "aux_hidden")

    @jax.jit
    def run(params, batch, cache):
        fused = weights.bind(Head, config.model, params).fuse(batch.hidden)
        rows = _draft.first_pass(
            dataclasses.replace(batch, hidden=fused),
            num_slots=1,
            shift=True,
            page_size=PAGE_SIZE,
            max_model_len=cache.max_model_len,
        )
        arguments = (rows.token_ids, rows.hidden, rows.view, cache, rows.embeds)
        x, _, _ = before_norm(config, params).run(*arguments)
        model = draft_model(config, params)
        out, feedback, _ = model.run(*arguments)
        return fused, x, out, feedback, model.logits(out)

    outputs = run(params, batch, recorded_cache(data, config.model.decoder))
    norm_output = config.model.norm_output
    return *jax.tree.map(np.asarray, outputs), norm_output, np.asarray(batch.query_start)


@recordings.each_model("eagle3")
def test_the_first_pass_gives_the_recorded_hidden_states_and_logits(name):
    data = recordings.expected(name)
    fused, x, out, feedback, logits, norm_output, start = first_pass_of(name)
    assert logits.dtype == np.float32
    np.testing.assert_array_equal(feedback, out if norm_output else x)
    assert norm_output == ("norm_hidden_0" in data)
    for i in range(recordings.num_prompts(data)):
        rows = slice(*start[i : i + 2])
        np.testing.assert_allclose(fused[rows], data[f"combined_{i}"], **TOLERANCE)
        np.testing.assert_allclose(x[rows], data[f"out_hidden_{i}"], **TOLERANCE)
        np.testing.assert_allclose(logits[rows], data[f"logits_{i}"], **TOLERANCE)
        np.testing.assert_allclose(gaps(logits[rows]), data[f"top2_gap_{i}"], **GAP_TOLERANCE)
        if norm_output:
            np.testing.assert_allclose(out[rows], data[f"norm_hidden_{i}"], **TOLERANCE)


@functools.cache
def chain_of(name, is_prenorm):
    """Drafts the recorded chain: (drafts, what each was picked from, its logits)."""
    data, steps = recordings.expected(name), num_drafts_of(recordings.expected(name))
    given = checkpoint(name, config={"norm_output": False} if is_prenorm else {})
    config, params = load(name, given, num_drafts=steps)
    batch = recorded_batch(data, config, "aux_hidden")

    @jax.jit
    def run(params, batch, cache):
        fused = weights.bind(Head, config.model, params).fuse(batch.hidden)
        batch = dataclasses.replace(batch, hidden=fused)
        return chain_with_outputs(before_norm(config, params), config, batch, cache, steps=steps)

    drafts, x, logits = run(params, batch, recorded_cache(data, config.model.decoder))
    _, proposed = jax.jit(PROPOSER.propose, static_argnums=(0, 4))(
        config, params, recorded_cache(data, config.model.decoder), batch, steps
    )
    np.testing.assert_array_equal(proposed.tokens, drafts.tokens)
    return jax.tree.map(np.asarray, (drafts, x, logits))


@recordings.each_model("eagle3")
def test_the_draft_loop_gives_the_recorded_chain(name):
    assert_chain(name, "")


@recordings.each_model("eagle3", having="chain_tokens_prenorm_0")
def test_a_head_that_should_feed_back_normed_states_may_feed_back_others(name):
    assert_chain(name, "_prenorm")


def assert_chain(name, suffix):
    data = recordings.expected(name)
    drafts, x, logits = chain_of(name, bool(suffix))
    num_prompts = recordings.num_prompts(data)
    assert drafts.num_drafts.tolist() == [x.shape[1]] * num_prompts + [0]
    for i in range(num_prompts):
        gap = data[f"chain_gap{suffix}_{i}"]
        assert gap.min() > NEAR_TIE  # nothing to excuse
        np.testing.assert_array_equal(drafts.tokens[i], data[f"chain_tokens{suffix}_{i}"])
        np.testing.assert_allclose(logits[i], data[f"chain_logits{suffix}_{i}"], **TOLERANCE)
        np.testing.assert_allclose(gaps(logits[i]), gap, **GAP_TOLERANCE)
        if f"chain_hidden_{i}" in data:
            np.testing.assert_allclose(x[i], data[f"chain_hidden_{i}"], **TOLERANCE)
            ids = np.argmax(logits[i], axis=-1)
            np.testing.assert_array_equal(ids, data[f"chain_draft_ids_{i}"])


@pytest.mark.parametrize(
    "decoder, options",
    [
        ({"num_layers": 3}, {}),
        ({"num_layers": 1, "qkv_bias": True, "o_bias": True}, {"norm_before_residual": True}),
        ({"qk_norm": True}, {"norm_before_fc": True, "norm_output": True}),
        ({"num_layers": 2, "qkv_bias": True}, {"fc_norm": True, "num_fused": 2}),
        ({"num_layers": 1}, {"num_fused": 0, "target_size": 32}),
    ],
)
def test_every_option_is_that_of_a_plain_loop(decoder, options, rng):
    model = Eagle3ModelConfig(
        decoder=ModelConfig.tiny(**decoder),
        **{"draft_vocab_size": 40, "target_size": 24} | options,
    )
    params = weights.draw(Head, model, jax.random.key(3), "float32")
    params = jax.tree.map(lambda leaf: leaf + 0.1 * rng.standard_normal(leaf.shape, "f"), params)
    ids = rng.integers(0, 64, 9)
    hidden = rng.standard_normal((9, model.input_size), np.float32)
    view = make_view(shuffled_tables(rng, 1, 2, 2), [0], [9], page_size=PAGE_SIZE)
    cache = poisoned_cache(model.decoder, num_pages=2, page_size=PAGE_SIZE)
    head = weights.bind(Head, model, params)
    out, feedback, _ = head(ids.astype(np.int32), head.fuse(hidden), view, cache)
    wanted, x = dense(model, jax.tree.map(np.float64, params), ids, hidden.astype(np.float64))
    np.testing.assert_allclose(out, wanted, **TOLERANCE)
    np.testing.assert_allclose(feedback, wanted if model.norm_output else x, **TOLERANCE)
    np.testing.assert_allclose(head.logits(out), wanted @ params["head"].T, atol=1e-3)


def dense(model, params, ids, hidden):
    """EAGLE-3 without a cache, in float64: (normed output, residual stream)."""
    eps = model.decoder.rms_norm_eps

    def norm(x, weights):
        return dense_norm(x, weights["weight"], eps)

    if model.norm_before_fc:
        hidden = norm(hidden, params["fc_norm"])
    if model.fc_norm:
        parts = np.split(hidden, model.num_fused, axis=-1)
        parts = [norm(part, params["fc_norms"][str(j)]) for j, part in enumerate(parts)]
        hidden = np.concatenate(parts, axis=-1)
    x = hidden @ params["fc"] if model.num_fused else hidden
    for i in range(model.decoder.num_layers):
        layer = params["layers"][str(i)]
        if i == 0:
            normed = norm(x, layer["hidden_norm"])
            x = normed if model.norm_before_residual else x
            read = np.concatenate([norm(params["embed"][ids], layer["input_norm"]), normed], -1)
        else:
            read = norm(x, layer["input_norm"])
        x = x + dense_attention(model.decoder, layer["attention"], read)
        x = x + dense_mlp(layer["mlp"], norm(x, layer["post_norm"]))
    return norm(x, params["norm"]), x
