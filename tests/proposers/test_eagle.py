"""EAGLE-1 heads against recorded hidden states, logits and chains, and what loading refuses."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jspec
from jspec.checkpoint import read
from jspec.models import weights
from jspec.models.eagle import Eagle, EagleModelConfig
from jspec.proposers import _draft
from jspec.proposers.eagle import PROPOSER, draft_model
from jspec.proposers.loaders.eagle import recognises
from tests.conftest import GOLDEN
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
    target,
    target_of,
)
from tests.support.paged import make_view, poisoned_cache, shuffled_tables
from tests.support.transcripts import chain_with_outputs

pytestmark = pytest.mark.any_device

HEADS = ["eagle1_llama", "eagle1_llama_fcbias"]


def load(checkpoint, **kwargs):
    return PROPOSER.load(checkpoint, target(), **{"dtype": "float32"} | kwargs)


@functools.cache
def first_pass_of(name):
    """Runs the first pass over the recorded prompts: (out, feedback, logits, rows of each)."""
    data = recordings.expected(name)
    config, params = PROPOSER.load(checkpoint(name), target_of(name), dtype="float32")
    batch = recorded_batch(data, config, "target_hidden")

    @jax.jit
    def run(params, batch, cache):
        model = draft_model(config, params)
        rows = _draft.first_pass(
            batch,
            num_slots=1,
            shift=True,
            page_size=PAGE_SIZE,
            max_model_len=cache.max_model_len,
        )
        out, feedback, _ = model.run(rows.token_ids, rows.hidden, rows.view, cache, rows.embeds)
        return out, feedback, model.logits(out)

    outputs = run(params, batch, recorded_cache(data, config.model))
    return *jax.tree.map(np.asarray, outputs), np.asarray(batch.query_start)


@recordings.each_model("eagle")
def test_the_first_pass_gives_the_recorded_hidden_states_and_logits(name):
    data, (out, feedback, logits, start) = recordings.expected(name), first_pass_of(name)
    assert logits.dtype == np.float32
    np.testing.assert_array_equal(out, feedback)
    for i in range(recordings.num_prompts(data)):
        rows = slice(*start[i : i + 2])
        np.testing.assert_allclose(out[rows], data[f"out_hidden_{i}"], **TOLERANCE)
        np.testing.assert_allclose(logits[rows], data[f"logits_{i}"], **TOLERANCE)


@functools.cache
def chain_of(name):
    """Drafts the recorded chain: (drafts, what each was picked from, its logits)."""
    data = recordings.expected(name)
    steps = num_drafts_of(data)
    config, params = PROPOSER.load(
        checkpoint(name), target_of(name), dtype="float32", num_drafts=steps
    )
    batch = recorded_batch(data, config, "target_hidden")

    @jax.jit
    def run(params, batch, cache):
        model = draft_model(config, params)
        return chain_with_outputs(model, config, batch, cache, steps=steps)

    outputs = run(params, batch, recorded_cache(data, config.model))
    return jax.tree.map(np.asarray, outputs)


@recordings.each_model("eagle")
def test_the_draft_loop_gives_the_recorded_chain(name):
    data, (drafts, out, logits) = recordings.expected(name), chain_of(name)
    num_prompts = recordings.num_prompts(data)
    assert drafts.num_drafts.tolist() == [out.shape[1]] * num_prompts + [0]
    for i in range(num_prompts):
        assert data[f"chain_gap_{i}"].min() > NEAR_TIE  # nothing to excuse
        np.testing.assert_array_equal(drafts.tokens[i], data[f"chain_tokens_{i}"])
        np.testing.assert_allclose(out[i], data[f"chain_hidden_{i}"], **TOLERANCE)
        np.testing.assert_allclose(logits[i], data[f"chain_logits_{i}"], **TOLERANCE)
        np.testing.assert_allclose(gaps(logits[i]), data[f"chain_gap_{i}"], **GAP_TOLERANCE)


@recordings.each_model("eagle")
def test_the_target_gives_the_recorded_hidden_states_and_next_token(name):
    assert_target_gives_what_a_head_read(name, ("norm",), "target_hidden")


def test_two_layers_are_those_of_a_plain_loop(rng):
    """Layer 0 has no input norm, layer 1 has one, nothing is normed at the end."""
    config = EagleModelConfig.tiny(num_layers=2, fc_bias=True, qkv_bias=True)
    params = weights.draw(Eagle, config, jax.random.key(3), "float32")
    params = jax.tree.map(lambda leaf: leaf + 0.1 * rng.standard_normal(leaf.shape, "f"), params)
    ids, hidden = rng.integers(0, 64, 9), rng.standard_normal((9, 32), np.float32)
    tables = shuffled_tables(rng, 1, 2, 2)
    view = make_view(tables, [0], [9], page_size=PAGE_SIZE)
    cache = poisoned_cache(config, num_pages=2, page_size=PAGE_SIZE)
    model = weights.bind(Eagle, config, params)
    out, _, _ = model(ids.astype(np.int32), hidden, view, cache)
    wanted = dense(config, jax.tree.map(np.float64, params), ids, hidden)
    np.testing.assert_allclose(out, wanted, **TOLERANCE)
    np.testing.assert_allclose(model.logits(out), wanted @ params["head"].T, atol=1e-3)


def dense(config, params, ids, hidden):
    """EAGLE-1 without a cache, in float64."""
    eps = config.rms_norm_eps
    x = np.concatenate([params["embed"][ids], hidden], -1) @ params["fc"] + params["fc_bias"]
    for i in range(config.num_layers):
        layer = params["layers"][str(i)]
        read = dense_norm(x, layer["input_norm"]["weight"], eps) if i else x
        x = x + dense_attention(config, layer["attention"], read)
        x = x + dense_mlp(layer["mlp"], dense_norm(x, layer["post_norm"]["weight"], eps))
    return x


def test_embedding_and_head_are_the_targets_own_arrays():
    embed = np.asarray(target().params["embed"])
    for given in (checkpoint(HEADS[0]), checkpoint(HEADS[0], drop=["embed_tokens.weight"])):
        params = load(given).params
        assert params["embed"] is target().params["embed"]
        assert params["head"] is target().params["head"]
    other = load(checkpoint(HEADS[0], **{"embed_tokens.weight": embed + 1})).params
    np.testing.assert_array_equal(other["embed"], embed + 1)
    assert other["head"] is target().params["head"]


def test_the_head_of_a_target_with_tied_embeddings_is_its_embedding():
    config = dataclasses.replace(target().config, tie_embeddings=True)
    params = {name: leaf for name, leaf in target().params.items() if name != "head"}
    tied = target()._replace(config=config, params=params)
    params = PROPOSER.load(checkpoint(HEADS[0]), tied, dtype="float32").params
    assert params["head"] is params["embed"] is tied.params["embed"]


def test_a_head_may_have_another_dtype_than_its_target():
    config, params = PROPOSER.load(checkpoint(HEADS[0]), target(dtype="bfloat16"), dtype="float32")
    assert params["fc"].dtype == np.float32 and params["embed"].dtype == jnp.bfloat16
    prompts = [[5, 6, 7, 8], [9, 4]]
    arguments = {"max_tokens": 12, "stop_ids": (), "drafting": "fixed"}
    report = jspec.generate(target(dtype="bfloat16"), prompts, config, params, **arguments)
    assert report.stats.num_accepted_tokens > 0


def test_the_config_says_what_the_checkpoint_has():
    config, params = load(checkpoint(HEADS[1]), num_drafts=3, draft_sampling="probabilistic")
    assert config.num_drafts == 3 and config.draft_sampling == "probabilistic"
    assert config.model.fc_bias and params["fc_bias"].shape == (64,)
    assert not config.model.qkv_bias and not config.model.o_bias  # `bias` is the projection's
    with pytest.warns(UserWarning, match="bias True, and the head has no fc.bias"):
        assert load(checkpoint(HEADS[0], config={"bias": True})).config.model.fc_bias is False
    assert load(checkpoint(HEADS[0])).config.num_drafts == 5
    reads = PROPOSER.reads(config)
    assert (reads.hidden_layers, reads.hidden_size, reads.sampling) == (("norm",), 64, True)


def test_a_head_is_recognised_by_its_tensors():
    head = checkpoint(HEADS[0])
    assert recognises(head.config, head.names)
    assert jspec.load(GOLDEN / "models" / HEADS[0], target=target()).config.model.num_layers == 1
    assert recognises({"architectures": ["EagleLlamaForCausalLM"]}, [])
    target_names = read(GOLDEN / "models" / "target_llama").names
    assert not recognises({"architectures": ["LlamaForCausalLM"]}, target_names)
    for other in ("midlayer.mlp.up_proj.weight", "hidden_norm.weight", "d2t", "mask_hidden"):
        assert not recognises(head.config, [*head.names, other])
    for name in ("Eagle3LlamaForCausalLM", "LlamaForCausalLMEagle3"):
        assert not recognises({"architectures": [name]}, head.names)


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"config": {"hidden_size": 48}}, "hidden_size is 48, the target's 64.*trained for"),
        ({"config": {"vocab_size": 99}}, "vocab_size is 99, the target's 128.*trained for"),
        ({"layers.0.input_layernorm.weight": np.ones(64)}, "layers.0.input_layernorm.*Remove"),
        ({"lm_head.weight": np.ones((128, 64))}, "lm_head.weight.*Remove"),
        (
            {"embed_tokens.weight": np.ones((128, 32))},
            r"embed_tokens.weight \[128, 32\], wanted \[128, 64\].*same model",
        ),
        ({"drop": ["fc.weight"]}, r"missing: fc.weight \[64, 128\]"),
        (
            {"fc.weight": np.ones((64, 64))},
            r"wrong shape: fc.weight \[64, 64\], wanted \[64, 128\]",
        ),
        ({"layers.1.mlp.up_proj.weight": np.ones((9, 9))}, "unknown: layers.1.mlp.up_proj.weight"),
        (
            {"layers.1.mlp.up_proj.weight": np.ones((9, 9)), "config": {"num_hidden_layers": 2}},
            "missing: layers.1.input_layernorm.weight",
        ),
    ],
)
def test_a_head_that_does_not_fit_is_refused(changes, words):
    changes = dict(changes)
    options = {name: changes.pop(name) for name in ("drop", "config") if name in changes}
    with pytest.raises(ValueError, match="(?s)" + words):
        load(checkpoint(HEADS[0], **options, **changes))


def test_a_table_of_its_own_has_the_dtype_of_the_head():
    own = np.asarray(target().params["embed"]) + 1
    given = checkpoint(HEADS[0], **{"embed_tokens.weight": own})
    params = PROPOSER.load(given, target(dtype="bfloat16"), dtype="float32").params
    assert params["embed"].dtype == np.float32 and params["head"].dtype == jnp.bfloat16
    np.testing.assert_array_equal(params["embed"], own)
