"""The target model against recorded logits, hidden states and greedy continuations."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jspec
from jspec.checkpoint import Model
from jspec.models import llama, weights
from jspec.models.config import ModelConfig
from tests.support import recordings
from tests.support.heads import GAP_TOLERANCE, NEAR_TIE, TOLERANCE, gaps
from tests.support.paged import make_view, poisoned_cache, shuffled_tables

PAGE_SIZE = 5

forward = jax.jit(
    llama.forward, static_argnames=("config", "hidden_layers"), donate_argnames="cache"
)


class Recorded:
    """A golden model with its prompts and continuations; loaded once for all tests."""

    def __init__(self, folder):
        self.model: Model = jspec.load(folder, "float32")
        self.config = self.model.config
        self.data = recordings.expected(folder.name)
        self.num_prompts = recordings.num_prompts(self.data)
        self.prompts = [self.data[f"prompt_{i}"].tolist() for i in range(self.num_prompts)]
        self.texts = [
            [*prompt, *self.data[f"continuation_{i}"].tolist()]
            for i, prompt in enumerate(self.prompts)
        ]
        self.pages = -(-max(map(len, self.texts)) // PAGE_SIZE) + 1  # of a request
        self.all_hidden = (*range(self.config.num_layers + 1), "norm")

    def new_cache(self):
        num_pages = self.pages * self.num_prompts + 2
        return poisoned_cache(self.config, num_pages=num_pages, page_size=PAGE_SIZE)

    def run(self, cache, ids, view, logit_rows, hidden_layers=()):
        ids = np.concatenate(ids).astype(np.int32)
        ids = np.pad(ids, (0, len(view.positions) - len(ids)), constant_values=-7)
        return forward(
            self.config,
            self.model.params,
            ids,
            view,
            cache,
            logit_rows=np.asarray(logit_rows, np.int32),
            hidden_layers=hidden_layers,
        )


@functools.cache
def load(folder):
    return Recorded(folder)


@pytest.fixture
def target_llama():
    return load(recordings.MODELS / "target_llama")


@functools.cache
def ragged_pass_of(name):
    """Runs all recorded texts of a model at once: (logits, hidden, where each text begins)."""
    recorded, rng = load(recordings.MODELS / name), np.random.default_rng(20240229)
    lens = [len(text) for text in recorded.texts]
    B, T = len(lens) + 1, sum(lens) + 3
    pages = recorded.pages
    tables = shuffled_tables(rng, len(lens), pages, pages * len(lens) + 2)
    view = make_view(tables, [0] * len(lens), lens, page_size=PAGE_SIZE, num_rows=T, num_requests=B)
    logits, hidden, _ = recorded.run(
        recorded.new_cache(), recorded.texts, view, np.arange(T), recorded.all_hidden
    )
    return np.asarray(logits), np.asarray(hidden), view.query_start


@recordings.each_model("target")
def test_a_ragged_pass_gives_the_recorded_logits_and_hidden_states(name):
    data, (logits, hidden, start) = recordings.expected(name), ragged_pass_of(name)
    assert np.all(np.isfinite(logits)) and np.all(np.isfinite(hidden))  # padding too
    for i in range(recordings.num_prompts(data)):
        rows = slice(*start[i : i + 2])
        np.testing.assert_allclose(logits[rows], data[f"logits_{i}"], **TOLERANCE)
        np.testing.assert_allclose(gaps(logits[rows]), data[f"top2_gap_{i}"], **GAP_TOLERANCE)
        if f"hidden_states_{i}" in data:
            states = [*data[f"hidden_states_{i}"], data[f"final_norm_hidden_{i}"]]
            np.testing.assert_allclose(hidden[rows], np.concatenate(states, -1), **TOLERANCE)


@functools.cache
def continuations_of(name):
    """Decodes all recorded prompts, read in chunks: (tokens, gap of each) of each prompt."""
    recorded, rng = load(recordings.MODELS / name), np.random.default_rng(20240229)
    B, chunk, pages = recorded.num_prompts, 7, recorded.pages
    tables = shuffled_tables(rng, B, pages, pages * B + 2)
    num_tokens = [len(recorded.data[f"continuation_{i}"]) for i in range(B)]
    texts = [list(prompt) for prompt in recorded.prompts]
    all_gaps = [[] for _ in texts]
    done, cache = [0] * B, recorded.new_cache()
    while any(len(found) < n for found, n in zip(all_gaps, num_tokens, strict=True)):
        counts = [min(chunk, len(text) - at) for text, at in zip(texts, done, strict=True)]
        view = make_view(tables, done, counts, page_size=PAGE_SIZE, num_rows=chunk * B)
        ids = [text[at : at + n] for text, at, n in zip(texts, done, counts, strict=True)]
        logits, _, cache = recorded.run(cache, ids, view, view.query_start[1:] - 1)
        done = [at + n for at, n in zip(done, counts, strict=True)]
        for i, token in enumerate(np.argmax(logits, axis=-1).tolist()):
            if (
                done[i] == len(texts[i]) and len(all_gaps[i]) < num_tokens[i]
            ):  # the prompt is through
                texts[i].append(token)
                all_gaps[i].append(gaps(logits[i]))
    tokens = [text[len(prompt) :] for text, prompt in zip(texts, recorded.prompts, strict=True)]
    return tokens, all_gaps


@recordings.each_model("target")
def test_chunked_prefill_and_single_tokens_give_the_recorded_continuations(name):
    data, (tokens, all_gaps) = recordings.expected(name), continuations_of(name)
    for i, (got, gap) in enumerate(zip(tokens, all_gaps, strict=True)):
        recorded_gap = data[f"continuation_gap_{i}"]
        ties = np.flatnonzero(recorded_gap < NEAR_TIE)
        end = ties[0] if len(ties) else len(got)
        np.testing.assert_array_equal(got[:end], data[f"continuation_{i}"][:end])
        np.testing.assert_allclose(gap[:end], recorded_gap[:end], **GAP_TOLERANCE)
        assert end == len(got), f"{len(got) - end} tokens behind near ties were not compared"


def test_one_request_decodes_alone_as_it_does_in_a_batch(target_llama, rng):
    text = target_llama.texts[1]
    table = shuffled_tables(rng, 1, target_llama.pages, target_llama.pages)
    cache = target_llama.new_cache()
    for at in range(len(text)):
        view = make_view(table, [at], [1], page_size=PAGE_SIZE)
        logits, _, cache = target_llama.run(cache, [text[at : at + 1]], view, [0])
        np.testing.assert_allclose(logits[0], target_llama.data["logits_1"][at], **TOLERANCE)


def test_rejected_drafts_leave_no_trace(target_llama, rng):
    text = target_llama.texts[0]
    table = shuffled_tables(rng, 1, target_llama.pages, target_llama.pages)
    cache = target_llama.new_cache()
    for at in range(0, 12, 2):  # four wrong tokens behind each right pair, overwritten later
        ids = [*text[at : at + 2], 3, 1, 4, 1]
        view = make_view(table, [at], [6], page_size=PAGE_SIZE)
        logits, _, cache = target_llama.run(cache, [ids], view, [0, 1])
        wanted = target_llama.data["logits_0"][at : at + 2]
        np.testing.assert_allclose(logits, wanted, **TOLERANCE)


def test_ids_outside_the_vocabulary_embed_as_zeros(target_llama):
    view = make_view(np.arange(target_llama.pages)[None], [0], [4], page_size=PAGE_SIZE)
    V = target_llama.config.vocab_size
    _, hidden, _ = target_llama.run(target_llama.new_cache(), [[-1, V, V - 1, 0]], view, [0], (0,))
    assert not np.any(hidden[:2])
    np.testing.assert_array_equal(hidden[2:], target_llama.model.params["embed"][np.array([-1, 0])])


def test_pad_logit_rows_are_zeros(target_llama):
    view = make_view(np.arange(target_llama.pages)[None], [0], [4], page_size=PAGE_SIZE)
    ids = [target_llama.texts[0][:4]]
    logits, hidden, _ = target_llama.run(target_llama.new_cache(), ids, view, [3, -1])
    np.testing.assert_allclose(logits[0], target_llama.data["logits_0"][3], **TOLERANCE)
    assert not np.any(logits[1])
    assert hidden is None


def test_hidden_states_come_in_the_order_asked_for(target_llama):
    view = make_view(np.arange(target_llama.pages)[None], [0], [4], page_size=PAGE_SIZE)
    ids = [target_llama.texts[0][:4]]
    _, hidden, _ = target_llama.run(target_llama.new_cache(), ids, view, [0], ("norm", 5, 2))
    states = target_llama.data["hidden_states_0"][:, :4]
    wanted = [target_llama.data["final_norm_hidden_0"][:4], states[5], states[2]]
    np.testing.assert_allclose(hidden, np.concatenate(wanted, axis=-1), **TOLERANCE)


def test_bfloat16_stays_near_float32(target_llama):
    text = target_llama.texts[0]
    model = jspec.load(recordings.MODELS / "target_llama", "bfloat16")
    assert {leaf.dtype for leaf in jax.tree.leaves(model.params)} == {jnp.dtype("bfloat16")}
    cache = poisoned_cache(
        model.config, num_pages=target_llama.pages, page_size=PAGE_SIZE, dtype="bfloat16"
    )
    view = make_view(np.arange(target_llama.pages)[None], [0], [len(text)], page_size=PAGE_SIZE)
    logits, hidden, cache = forward(
        model.config,
        model.params,
        np.array(text, np.int32),
        view,
        cache,
        logit_rows=np.arange(len(text)),
        hidden_layers=("norm",),
    )
    assert (logits.dtype, hidden.dtype, cache.k.dtype) == ("float32", "bfloat16", "bfloat16")
    wanted = target_llama.data["logits_0"]
    assert np.abs(logits - wanted).max() < 0.05 * np.abs(wanted).max()  # 8-bit weights, 7 layers


@pytest.mark.parametrize(
    "changes", [{}, {"tie_embeddings": True, "qk_norm": True}, {"qkv_bias": True, "o_bias": True}]
)
def test_the_rules_fill_every_column_of_every_leaf_once(changes):
    config = ModelConfig.tiny(**changes)
    template = weights.abstract(llama.Llama, config, "float32")
    columns = {}
    for place in filter(None, llama.rules(config).values()):
        leaf = functools.reduce(lambda tree, key: tree[key], place.path, template)
        start, end = place.columns or (0, leaf.shape[-1])
        columns.setdefault(place.path, np.zeros(leaf.shape[-1], int))[start:end] += 1
    assert len(columns) == len(jax.tree.leaves(template))
    assert all(np.all(filled == 1) for filled in columns.values())


def test_random_params_fit_the_template_and_give_spread_logits():
    config = ModelConfig.tiny(num_layers=1, qkv_bias=True, qk_norm=True)
    params = llama.init_params(config, jax.random.key(0), "float32")
    template = weights.abstract(llama.Llama, config, "float32")
    assert jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), params) == jax.tree.map(
        lambda leaf: (leaf.shape, leaf.dtype), template
    )
    view = make_view(np.arange(4)[None], [0], [6], page_size=4)
    cache = poisoned_cache(config, num_pages=4, page_size=4)
    logits, _, _ = forward(
        config, params, np.arange(6, dtype=np.int32), view, cache, logit_rows=np.arange(6)
    )
    assert 0.5 < np.std(logits) < 2


def test_a_caller_cannot_change_the_cached_template():
    config = ModelConfig.tiny()
    weights.abstract(llama.Llama, config, "float32").clear()
    assert "embed" in weights.abstract(llama.Llama, config, "float32")


def test_an_unknown_hidden_layer_is_refused(target_llama):
    view = make_view(np.arange(target_llama.pages)[None], [0], [1], page_size=PAGE_SIZE)
    with pytest.raises(ValueError, match="Count layers from 1"):
        target_llama.run(target_llama.new_cache(), [[1]], view, [0], (8,))


def test_a_cache_of_another_model_is_refused(target_llama):
    view = make_view(np.arange(target_llama.pages)[None], [0], [1], page_size=PAGE_SIZE)
    other = poisoned_cache(ModelConfig.tiny(), num_pages=4, page_size=4)
    with pytest.raises(ValueError, match=r"init_pages\(config"):
        target_llama.run(other, [[1]], view, [0])
