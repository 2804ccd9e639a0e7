"""MTP modules against recorded hidden states, logits and chains, and how they load."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jspec
from jspec.models import llama, weights
from jspec.models.layers import embed, rope_table
from jspec.models.mtp import MTP
from jspec.proposers import _draft
from jspec.proposers import mtp as proposer
from tests.support import recordings
from tests.support.heads import GAP_TOLERANCE, NEAR_TIE, TOLERANCE, gaps
from tests.support.paged import make_view, poisoned_cache
from tests.support.steps import Row, make_step

pytestmark = pytest.mark.any_device

PAGE_SIZE, PAGES = 5, 16
CACHE = jspec.CacheConfig(
    num_pages=4 * PAGES, page_size=PAGE_SIZE, max_model_len=PAGE_SIZE * PAGES, dtype="float32"
)


@functools.cache
def load(folder):
    model = jspec.load(folder, "float32")
    data = recordings.expected(folder.name)
    drafter = jspec.load(folder, target=model, num_drafts=1 + len(data["chain_tokens_0"]))
    return model, drafter, data


@pytest.fixture
def recorded():
    return load(recordings.MODELS / "mimo_mtp")


def limits_of(data) -> jspec.CacheConfig:
    """Returns pages for the recorded prompts, their continuations and drafts."""
    prompts = range(recordings.num_prompts(data))
    longest = max(len(data[f"prompt_{i}"]) + len(data[f"continuation_{i}"]) for i in prompts)
    pages = max(PAGES, -(-(longest + 8) // PAGE_SIZE))
    return dataclasses.replace(
        CACHE, num_pages=(len(prompts) + 1) * pages, max_model_len=pages * PAGE_SIZE
    )


def first_rows(config, data):
    """The recorded prompts as one ragged, padded step, and the rows of its first pass."""
    prompts = range(recordings.num_prompts(data))
    scheduled, verified = as_step(
        [data[f"prompt_{i}"] for i in prompts],
        [data[f"target_hidden_{i}"] for i in prompts],
        [data[f"next_token_{i}"] for i in prompts],
        config,
        pages=limits_of(data).pages_per_request,
    )
    step = jax.tree.map(jnp.asarray, (scheduled, verified))
    batch = jspec.prepare(*step, vocab_size=config.vocab_size)
    limit = limits_of(data).max_model_len
    rows = _draft.first_pass(
        batch, num_slots=1, shift=True, page_size=PAGE_SIZE, max_model_len=limit
    )
    return batch, rows


def as_step(prompts, hidden, next_tokens, config, *, num_rows=None, pages=PAGES):
    """A step that ran whole prompts, with the given hidden states."""
    rows = [
        Row(slot=b, context=list(prompt), kept=[int(token)], start=0)
        for b, (prompt, token) in enumerate(zip(prompts, next_tokens, strict=True))
    ]
    T = sum(map(len, prompts))
    scheduled, verified = make_step(
        rows,
        num_requests=len(rows) + 1,
        num_rows=num_rows or T + 2,
        width=config.num_drafts + 1,
        pages_per_request=pages,
        poison=True,
        reads=proposer.PROPOSER.reads(config),
    )
    scheduled.hidden[:T] = np.concatenate(hidden)
    return scheduled, verified


@functools.cache
def target_pass_of(name):
    """Runs prompts and continuations through the model itself: (logits, hidden, rows of each)."""
    model, drafter, data = load(recordings.MODELS / name)
    (layer,) = proposer.PROPOSER.reads(drafter.config).hidden_layers
    n, config, pages = recordings.num_prompts(data), model.config, limits_of(data).pages_per_request
    texts = [[*data[f"prompt_{i}"], *data[f"continuation_{i}"][:-1]] for i in range(n)]
    ids = np.concatenate(texts).astype(np.int32)
    tables = np.arange(n * pages, dtype=np.int32).reshape(n, pages)
    view = make_view(tables, [0] * n, [len(text) for text in texts], page_size=PAGE_SIZE)
    logits, hidden, _ = jax.jit(llama.forward, static_argnames=("config", "hidden_layers"))(
        config,
        model.params,
        ids,
        view,
        poisoned_cache(config, num_pages=n * pages, page_size=PAGE_SIZE),
        logit_rows=np.arange(len(ids), dtype=np.int32),
        hidden_layers=(layer,),
    )
    return np.asarray(logits), np.asarray(hidden), view.query_start


@recordings.each_model("mtp")
def test_the_target_of_the_recording_gives_its_logits_and_hidden_states(name):
    data, (logits, hidden, start) = recordings.expected(name), target_pass_of(name)
    for i in range(recordings.num_prompts(data)):
        n = len(data[f"prompt_{i}"])
        at, behind = slice(start[i], start[i] + n), slice(start[i] + n - 1, start[i + 1])
        np.testing.assert_allclose(logits[at], data[f"logits_{i}"], **TOLERANCE)
        np.testing.assert_allclose(hidden[at], data[f"target_hidden_{i}"], **TOLERANCE)
        assert np.argmax(logits[at][-1]) == data[f"next_token_{i}"]
        gap = data[f"continuation_gap_{i}"]
        np.testing.assert_allclose(gaps(logits[behind]), gap, **GAP_TOLERANCE)


@functools.cache
def first_pass_of(name):
    """Runs the first module over the recorded prompts: (out, out unmasked, logits, rows)."""
    _, (config, params), data = load(recordings.MODELS / name)
    batch, rows = first_rows(config, data)

    @jax.jit
    def outputs(params, rows, pages):
        model = weights.bind(MTP, config.model, params)
        out, _, _ = model(0, rows.token_ids, rows.hidden, rows.view, pages)
        # The other recording left the embedding at position 0 in place.
        module = model.modules["0"]
        embedding = embed(params["embed"], rows.token_ids, vocab_size=config.vocab_size)
        both = [module.hidden_norm(rows.hidden), module.token_norm(embedding)]
        x = jnp.concatenate(both, axis=-1) @ module.input_proj[...]
        rope = rope_table(config.model.rope, config.model.head_dim, rows.view.positions)
        unmasked = module.final_norm(module.layer(x, rope, rows.view, pages, 0)[0])
        return out, unmasked, model.logits(out)

    found = outputs(params, rows, proposer.init(config, params, limits_of(data), 1))
    return *jax.tree.map(np.asarray, found), np.asarray(batch.query_start)


@recordings.each_model("mtp")
def test_the_first_pass_gives_the_recorded_hidden_states_and_logits(name):
    data, (out, unmasked, logits, start) = recordings.expected(name), first_pass_of(name)
    for i in range(recordings.num_prompts(data)):
        at = slice(*start[i : i + 2])
        np.testing.assert_allclose(out[at], data[f"mtp_hidden_{i}"], **TOLERANCE)
        np.testing.assert_allclose(unmasked[at], data[f"mtp_hidden_unmasked_{i}"], **TOLERANCE)
        np.testing.assert_allclose(logits[at], data[f"mtp_logits_{i}"], **TOLERANCE)
        np.testing.assert_allclose(gaps(logits[at]), data[f"mtp_gap_{i}"], **GAP_TOLERANCE)


@functools.cache
def chain_of(name):
    """Drafts one token more than the recorded chain: (drafts, logits of each [B, K, V])."""
    _, (config, params), data = load(recordings.MODELS / name)
    batch, _ = first_rows(config, data)
    seen = []

    @jax.jit
    def draft(params, pages, batch):
        (model,) = proposer.draft_models(config, params)

        def logits(out):
            scores = model.logits(out)
            jax.debug.callback(seen.append, scores, ordered=True)
            return scores

        return _draft.chain(
            model._replace(logits=logits),
            config,
            batch,
            pages,
            num_drafts=config.num_drafts,
            shift=True,
        )

    _, drafts = draft(params, proposer.init(config, params, limits_of(data), 1), batch)
    jax.effects_barrier()
    assert len(seen) == config.num_drafts
    return np.asarray(drafts.tokens), np.stack(seen, axis=1)


@recordings.each_model("mtp")
def test_the_chain_gives_the_recorded_logits_and_tokens(name):
    data, (tokens, logits) = recordings.expected(name), chain_of(name)
    for i in range(recordings.num_prompts(data)):
        # The recorded chain begins with the last row of the first pass.
        wanted = data[f"chain_tokens_{i}"].tolist()
        got, gap = logits[i, : len(wanted)], data[f"chain_gap_{i}"]
        np.testing.assert_allclose(got, data[f"chain_logits_{i}"], **TOLERANCE)
        np.testing.assert_allclose(gaps(got), gap, **GAP_TOLERANCE)
        assert (gap > NEAR_TIE).all()  # nothing to excuse
        assert tokens[i, : len(wanted)].tolist() == wanted


@functools.cache
def text_of(name):
    """Decodes the recorded prompts with their model's modules: (tokens of each, accepted)."""
    model, (config, params), data = load(recordings.MODELS / name)
    prompts = [data[f"prompt_{i}"].tolist() for i in range(recordings.num_prompts(data))]
    longest = len(data["continuation_0"])
    run = {"max_tokens": longest, "stop_ids": (), "drafting": "fixed"}
    report = jspec.generate(model, prompts, config, params, **run)
    return [g.tokens for g in report.generations], report.stats.num_accepted_tokens


@recordings.each_model("mtp")
def test_generated_text_is_the_recorded_continuation_whatever_is_drafted(name):
    data, (texts, num_accepted) = recordings.expected(name), text_of(name)
    for i, tokens in enumerate(texts):
        assert (data[f"continuation_gap_{i}"] > NEAR_TIE).all()
        assert tokens == data[f"continuation_{i}"].tolist()
    assert num_accepted > 0


@pytest.fixture
def checkpoint():
    return jspec.checkpoint.read(recordings.MODELS / "mimo_mtp")


def changed(checkpoint, config=(), tensors=lambda name, tensor: [(name, tensor)]):
    """The checkpoint with other config entries, and each tensor replaced by those of a function."""
    items = [item for pair in checkpoint.tensors() for item in tensors(*pair)]
    return checkpoint._replace(
        config={**checkpoint.config, **dict(config)},
        names=tuple(name for name, _ in items),
        tensors=lambda: iter(items),
    )


def draft_with(checkpoint, target, **options):
    return proposer.PROPOSER.load(checkpoint, target, dtype="float32", **options)


def test_a_model_is_its_own_drafter_and_shares_embedding_and_head():
    folder = recordings.MODELS / "mimo_mtp"
    model = jspec.load(folder, "float32")
    drafter = jspec.load(folder, target=model)
    assert isinstance(drafter.config, jspec.MTPConfig)
    assert drafter.config.num_drafts == 1  # as many as there are modules
    assert drafter.config.hidden_layer == 3  # before the final norm
    assert drafter.params["embed"] is model.params["embed"]
    assert drafter.params["head"] is model.params["head"]
    assert set(drafter.params["modules"]) == {"0"}
    options = {"num_drafts": 7, "hidden_layer": "norm", "draft_sampling": "probabilistic"}
    config = jspec.load(folder, target=model, **options).config
    assert (config.num_drafts, config.hidden_layer, config.draft_sampling) == (*options.values(),)
    assert proposer.PROPOSER.reads(config) == (("norm",), 64, True, 64)


def test_a_head_of_its_own_is_kept_and_a_tied_target_lends_its_embedding(recorded, checkpoint):
    model = recorded[0]
    other = changed(checkpoint, tensors=lambda name, x: [(name, x * 2 if "lm_" in name else x)])
    params = draft_with(other, model).params
    np.testing.assert_array_equal(params["head"], 2 * model.params["head"])
    alone = changed(checkpoint, tensors=lambda name, x: [(name, x)] if "mtp_layers" in name else [])
    params = draft_with(alone, model).params
    assert params["embed"] is model.params["embed"] and params["head"] is model.params["head"]
    tied = model._replace(
        config=dataclasses.replace(model.config, tie_embeddings=True),
        params={k: v for k, v in model.params.items() if k != "head"},
    )
    assert draft_with(alone, tied).params["head"] is model.params["embed"]


def test_several_modules_load_side_by_side(recorded, checkpoint):
    def twice(name, tensor):
        second = name.replace("mtp_layers.0", "mtp_layers.1")
        return [(name, tensor)] if second == name else [(name, tensor), (second, tensor)]

    two = changed(checkpoint, {"num_nextn_predict_layers": 2}, twice)
    config, params = draft_with(two, recorded[0])
    assert config.model.num_layers == config.num_drafts == 2
    for a, b in zip(*(jax.tree.leaves(params["modules"][i]) for i in "01"), strict=True):
        np.testing.assert_array_equal(a, b)


def test_a_checkpoint_that_does_not_fit_lists_its_tensors(recorded, checkpoint):
    def broken(name, tensor):
        if name.endswith("mtp_layers.0.input_proj.weight"):
            return [("model.mtp_layers.0.extra.weight", tensor)]
        return [(name, tensor[:5] if name.endswith("0.token_layernorm.weight") else tensor)]

    with pytest.raises(ValueError) as error:
        draft_with(changed(checkpoint, tensors=broken), recorded[0])
    for line in (
        "missing: model.mtp_layers.0.input_proj.weight [64, 128]",
        "unknown: model.mtp_layers.0.extra.weight [64, 128]",
        "wrong shape: model.mtp_layers.0.token_layernorm.weight [5], wanted [64]",
    ):
        assert line in str(error.value)
    narrow = changed(checkpoint, tensors=lambda name, x: [(name, x[:9] if "lm_" in name else x)])
    with pytest.raises(ValueError, match="lm_head.weight .9, 64., wanted .128, 64."):
        draft_with(narrow, recorded[0])


@pytest.mark.parametrize(
    "changes, match",
    [
        ({"model_type": "deepseek_v3", "architectures": ["DeepseekV3ForCausalLM"]}, "ngram"),
        ({"model_type": "qwen3_next", "architectures": ["Qwen3NextForCausalLM"]}, "Qwen3Next"),
        ({"architectures": ["ErnieMTPModel"]}, "ErnieMTPModel.* wanted MiMoForCausalLM"),
        ({"num_nextn_predict_layers": None}, "`num_nextn_predict_layers` is None"),
        ({"num_nextn_predict_layers": 0}, "`num_nextn_predict_layers` is 0"),
        ({"hidden_size": 32}, "hidden_size is 32, the target's 64"),
        ({"vocab_size": 100}, "vocab_size is 100, the target's 128"),
    ],
)
def test_modules_of_another_kind_or_size_are_refused_by_name(recorded, checkpoint, changes, match):
    with pytest.raises(ValueError, match=match):
        draft_with(changed(checkpoint, changes), recorded[0])


@pytest.mark.parametrize("layer", [4, -1, "last"])
def test_a_hidden_layer_that_the_target_has_not_is_refused(recorded, checkpoint, layer):
    with pytest.raises(ValueError, match="`hidden_layer` is .* to 3 .its last layer. or 'norm'"):
        draft_with(checkpoint, recorded[0], hidden_layer=layer)


def test_modules_are_recognised_by_their_tensors_whatever_the_architecture():
    for name in (
        "model.mtp_layers.0.input_proj.weight",
        "model.layers.61.eh_proj.weight",
        "mtp.pre_fc_norm_hidden.weight",
        "model.mtp_linear_proj.0.weight",
    ):
        assert proposer.PROPOSER.recognises({}, ["model.norm.weight", name])
    assert not proposer.PROPOSER.recognises(
        {"model_type": "mimo"}, ["model.norm.weight", "fc.weight"]
    )
