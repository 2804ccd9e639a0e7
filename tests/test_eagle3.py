"""EAGLE-3 heads against recorded hidden states, logits and chains, and a loop without a cache."""

import dataclasses

import jax
import numpy as np
import pytest

from jspec.config import ModelConfig
from jspec.models import eagle3, llama
from jspec.models.eagle3 import Eagle3ModelConfig
from jspec.proposers import _draft
from jspec.proposers.eagle3 import PROPOSER, draft_model
from tests.heads import (
    NEAR_TIE,
    NUM_PROMPTS,
    PAGE_SIZE,
    PAGES,
    TOLERANCE,
    checkpoint,
    dense_attention,
    dense_mlp,
    dense_norm,
    recorded,
    recorded_batch,
    target,
)
from tests.paged import make_view, poisoned_cache, shuffled_tables
from tests.transcripts import chain_with_outputs

pytestmark = pytest.mark.any_device

HEADS = ["eagle3_llama", "eagle3_llama_aux", "eagle3_llama_fullvocab", "eagle3_llama_v31"]


def load(given, **kwargs):
    given = checkpoint(given) if isinstance(given, str) else given
    return PROPOSER.load(given, target(), **{"dtype": "float32"} | kwargs)


def cache_of(config):
    num_pages = NUM_PROMPTS * PAGES
    return poisoned_cache(config.model.decoder, num_pages=num_pages, page_size=PAGE_SIZE)


def before_norm(config, params):
    """The draft model, with the residual stream as the output that logits are read from."""
    head = eagle3.build(
        dataclasses.replace(config.model, norm_output=False),
        {name: leaf for name, leaf in params.items() if name != "target_ids"},
    )

    def run(*arguments):
        _, x, cache = head(*arguments)
        return x, head.norm(x) if config.model.norm_output else x, cache

    model = draft_model(config, params)
    return model._replace(run=run, logits=lambda x: head.logits(head.norm(x)))


@pytest.mark.parametrize("name", [*HEADS, "peagle_llama"])
def test_the_target_gives_the_recorded_hidden_states(name, rng):
    data, (config, _) = recorded(name), load(name)
    for i in range(NUM_PROMPTS):
        ids = data[f"prompt_{i}"].astype(np.int32)
        tables = shuffled_tables(rng, 1, PAGES, PAGES)
        _, hidden, _ = llama.forward(
            target().config,
            target().params,
            ids,
            make_view(tables, [0], [len(ids)], page_size=PAGE_SIZE),
            poisoned_cache(target().config, num_pages=PAGES, page_size=PAGE_SIZE),
            logit_rows=np.zeros(1, np.int32),
            hidden_layers=PROPOSER.reads(config).hidden_layers,
        )
        np.testing.assert_allclose(hidden, data[f"aux_hidden_{i}"], **TOLERANCE)


@pytest.mark.parametrize("name", HEADS)
def test_the_first_pass_gives_the_recorded_hidden_states_and_logits(name, rng):
    data, (config, params) = recorded(name), load(name)
    batch = recorded_batch(data, config, "aux_hidden", rng)

    @jax.jit
    def run(params, batch, cache):
        fused = eagle3.build(config.model, without_ids(params)).fuse(batch.hidden)
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

    fused, x, out, feedback, logits = run(params, batch, cache_of(config))
    assert logits.dtype == np.float32
    np.testing.assert_array_equal(feedback, out if config.model.norm_output else x)
    assert config.model.norm_output == (name == "eagle3_llama_v31")
    for i in range(NUM_PROMPTS):
        rows = slice(*batch.query_start[i : i + 2])
        np.testing.assert_allclose(fused[rows], data[f"combined_{i}"], **TOLERANCE)
        np.testing.assert_allclose(x[rows], data[f"out_hidden_{i}"], **TOLERANCE)
        np.testing.assert_allclose(logits[rows], data[f"logits_{i}"], **TOLERANCE)
        if f"norm_hidden_{i}" in data:
            np.testing.assert_allclose(out[rows], data[f"norm_hidden_{i}"], **TOLERANCE)


def without_ids(params):
    return {name: leaf for name, leaf in params.items() if name != "target_ids"}


@pytest.mark.parametrize(
    "name, suffix", [*((name, "") for name in HEADS), ("eagle3_llama_v31", "_prenorm")]
)
def test_the_draft_loop_gives_the_recorded_chain(name, suffix, rng):
    data = recorded(name)
    given = checkpoint(name, config={"norm_output": False} if suffix else {})
    config, params = load(given, num_drafts=5)
    batch = recorded_batch(data, config, "aux_hidden", rng)

    @jax.jit
    def run(params, batch, cache):
        fused = eagle3.build(config.model, without_ids(params)).fuse(batch.hidden)
        batch = dataclasses.replace(batch, hidden=fused)
        return chain_with_outputs(before_norm(config, params), config, batch, cache, steps=5)

    drafts, x, logits = run(params, batch, cache_of(config))
    assert drafts.num_drafts.tolist() == [5] * NUM_PROMPTS + [0]
    _, proposed = jax.jit(PROPOSER.propose, static_argnums=(0, 4))(
        config, params, cache_of(config), batch, 5
    )
    np.testing.assert_array_equal(proposed.tokens, drafts.tokens)
    for i in range(NUM_PROMPTS):
        assert data[f"chain_gap{suffix}_{i}"].min() > NEAR_TIE  # nothing to excuse
        np.testing.assert_array_equal(drafts.tokens[i], data[f"chain_tokens{suffix}_{i}"])
        np.testing.assert_allclose(logits[i], data[f"chain_logits{suffix}_{i}"], **TOLERANCE)
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
    params = eagle3.init_params(model, jax.random.key(3), "float32")
    params = jax.tree.map(lambda leaf: leaf + 0.1 * rng.standard_normal(leaf.shape, "f"), params)
    ids = rng.integers(0, 64, 9)
    hidden = rng.standard_normal((9, model.input_size), np.float32)
    view = make_view(shuffled_tables(rng, 1, 2, 2), [0], [9], page_size=PAGE_SIZE)
    cache = poisoned_cache(model.decoder, num_pages=2, page_size=PAGE_SIZE)
    head = eagle3.build(model, params)
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
