"""DFlash and DFlash2 against recorded arrays."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jspec
from jspec.axes import PAD_TOKEN
from jspec.models import dflash, weights
from jspec.proposers import dflash as proposer
from tests.proposers.test_dflash import PAGE_SIZE, PAGES, fresh, run
from tests.support import recordings
from tests.support.heads import (
    GAP_TOLERANCE,
    NEAR_TIE,
    TOLERANCE,
    assert_target_gives_what_a_head_read,
    gaps,
    target_of,
)
from tests.support.paged import make_view, poisoned_cache, shuffled_tables
from tests.support.steps import Row

pytestmark = pytest.mark.any_device


@functools.cache
def load(name, **options):
    return jspec.load(recordings.MODELS / name, target=target_of(name), **options)


def pages_of(data, config):
    """Pages of a request with room for the longest recorded prompt and the block behind it."""
    longest = max(len(data[f"prompt_{i}"]) for i in range(recordings.num_prompts(data)))
    return max(PAGES, -(-(longest + config.num_drafts + 2) // PAGE_SIZE))


@functools.cache
def block_of(name):
    """Runs the recorded prompts and blocks at once, over shuffled pages that hold NaN before."""
    data, (config, params) = recordings.expected(name), load(name)
    model, n = weights.bind(dflash.DFlash, config.model, params), recordings.num_prompts(data)
    decoder, W, pages = config.model.decoder, config.num_drafts + 1, pages_of(data, config)
    lens = [len(data[f"prompt_{i}"]) for i in range(n)]
    tables = shuffled_tables(np.random.default_rng(20240229), n, pages, n * pages + 4)
    context = make_view(tables, [0] * n, lens, page_size=PAGE_SIZE, num_rows=sum(lens) + 2)
    block = make_view(tables, lens, [W] * n, page_size=PAGE_SIZE)
    features = np.full((sum(lens) + 2, config.model.input_size), np.nan, np.float32)
    features[: sum(lens)] = np.concatenate([data[f"context_features_{i}"] for i in range(n)])
    ids = np.full((n, W), config.mask_token, np.int32)
    ids[:, 0] = [data[f"next_token_{i}"] for i in range(n)]

    @jax.jit
    def run(cache, features, ids, context, block):
        fused = model.fuse(features)
        cache = model.precompute_context_kv(features, context.positions, context.slots, cache)
        out, after = model(ids, block, cache)
        return fused, cache, out, model.logits(out.reshape(-1, out.shape[-1])), after

    cache = poisoned_cache(decoder, num_pages=n * pages + 4, page_size=PAGE_SIZE)
    fused, cache, out, logits, _ = run(cache, features, ids, context, block)
    flat = [x.reshape(decoder.num_layers, -1, *x.shape[3:]) for x in (cache.k, cache.v)]
    k, v = (np.asarray(x)[:, context.slots] for x in flat)
    parts = np.asarray(fused), k, v, ids, np.asarray(out), np.asarray(logits).reshape(n, W, -1)
    return *parts, context.query_start


@recordings.each_model("dflash")
def test_context_and_block_have_the_recorded_keys_values_hidden_states_and_logits(name):
    data = recordings.expected(name)
    fused, k, v, ids, out, logits, start = block_of(name)
    for i in range(recordings.num_prompts(data)):
        rows = slice(*start[i : i + 2])
        np.testing.assert_allclose(fused[rows], data[f"context_hidden_{i}"], **TOLERANCE)
        np.testing.assert_array_equal(ids[i], data[f"block_ids_{i}"])
        np.testing.assert_allclose(out[i], data[f"block_hidden_{i}"], **TOLERANCE)
        np.testing.assert_allclose(logits[i, 1:], data[f"block_logits_{i}"], **TOLERANCE)
        if f"context_k_{i}" in data:
            np.testing.assert_allclose(k[:, rows], data[f"context_k_{i}"], **TOLERANCE)
            np.testing.assert_allclose(v[:, rows], data[f"context_v_{i}"], **TOLERANCE)
        if f"candidates_{i}" in data:
            best = logits[i, 1:].argmax(-1)
            np.testing.assert_array_equal(best, data[f"argmax_tokens_{i}"])
        else:
            np.testing.assert_allclose(gaps(logits[i, 1:]), data[f"draft_gap_{i}"], **GAP_TOLERANCE)


@recordings.each_model("dflash")
def test_the_target_gives_the_recorded_context_features_and_next_token(name):
    layers = proposer.PROPOSER.reads(load(name).config).hidden_layers
    assert_target_gives_what_a_head_read(name, layers, "context_features")


@functools.cache
def steps_of(name, chunk):
    """Reads all recorded prompts at once, whole or in chunks: drafts of each prompt's steps."""
    data, (config, params) = recordings.expected(name), load(name)
    n, pages = recordings.num_prompts(data), pages_of(data, config)
    prompts = [data[f"prompt_{i}"].tolist() for i in range(n)]
    state = fresh(config, params, max_requests=n + 1, max_model_len=pages * PAGE_SIZE)
    done, found = [0] * n, [[] for _ in prompts]
    while any(at < len(prompt) for at, prompt in zip(done, prompts, strict=True)):
        rows, hidden = [], []
        for i, (at, prompt) in enumerate(zip(done, prompts, strict=True)):
            end = min(len(prompt), at + (chunk or len(prompt)))
            if at == end:
                continue
            last = end == len(prompt)
            kept = [int(data[f"next_token_{i}"])] if last else [7]
            backup = None if last else prompt[end]
            rows.append(Row(slot=i, context=prompt[:end], kept=kept, start=at, backup=backup))
            hidden.append(data[f"context_features_{i}"][at:end])
            done[i] = end
        num_rows = sum(map(len, prompts)) + 3
        hidden = np.concatenate(hidden)
        state, drafts = run(state, rows, hidden=hidden, num_rows=num_rows, num_requests=n + 1)
        for b, row in enumerate(rows):
            found[row.slot].append(drafts.tokens[b].tolist())
    return found


@pytest.mark.parametrize("chunk", [None, 5])
@recordings.each_model("dflash")
def test_steps_give_the_recorded_drafts(name, chunk):
    """Prompts of uneven length at once, whole or in chunks, in poisoned pages."""
    data = recordings.expected(name)
    for i, (*before, last) in enumerate(steps_of(name, chunk)):
        assert data[f"draft_gap_{i}"].min() > NEAR_TIE  # nothing to excuse
        assert last == data[f"draft_tokens_{i}"].tolist()
        assert all(set(tokens) == {PAD_TOKEN} for tokens in before)


@recordings.each_model("dflash", having="candidates_0")
def test_the_recorded_candidates_and_scores_of_dflash2_come_out_of_the_selector(name):
    data, scores_of, rank = recordings.expected(name), functools.partial(scores, name), 0
    for i in range(recordings.num_prompts(data)):
        tokens, previous = data[f"draft_tokens_{i}"], int(data[f"next_token_{i}"])
        for j, token in enumerate(tokens.tolist()):
            got, edge = scores_of(i, j, previous)
            candidates = data[f"candidates_{i}"][j]
            rank = len(candidates)
            assert np.flatnonzero(got > -np.inf).tolist() == sorted(candidates)
            np.testing.assert_allclose(
                got[candidates], data[f"candidate_scores_{i}"][j], **TOLERANCE
            )
            assert int(np.argmax(got)) == token
            np.testing.assert_allclose(gaps(got), data[f"draft_gap_{i}"][j], **GAP_TOLERANCE)
            edge_gap = edge[-rank] - edge[-rank - 1]
            np.testing.assert_allclose(
                edge_gap, data[f"candidate_edge_gap_{i}"][j], **GAP_TOLERANCE
            )
            previous = token


@functools.cache
def scores(name, i, j, previous):
    """Scores draft j of prompt i behind a token: (rescored, sorted logits)."""
    data, (config, params) = recordings.expected(name), load(name)
    logits = data[f"block_logits_{i}"][j : j + 1]
    rescored = weights.bind(dflash.DFlash, config.model, params).selector.rescore(
        jnp.asarray(logits),
        jnp.asarray(data[f"block_hidden_{i}"][j + 1 : j + 2]),
        np.array([previous], np.int32),
    )
    return np.asarray(rescored[0]), np.sort(logits[0])


@recordings.of_this_repository
def test_the_selector_of_the_recorded_dflash2_changes_drafts():
    data = recordings.expected("dflash2_qwen3")  # or a drafter without one would pass
    pairs = [(data[f"draft_tokens_{i}"], data[f"argmax_tokens_{i}"]) for i in range(3)]
    assert any((tokens != best).any() for tokens, best in pairs)


@pytest.mark.parametrize("name", ["dflash_qwen3", "dflash2_qwen3"])
def test_the_distribution_of_sampled_drafts_follows_from_the_recorded_logits(name):
    """At temperature 0.7, and greedy at 0; of DFlash2 candidates alone are likely."""
    data, (config, params) = recordings.expected(name), load(name, draft_sampling="probabilistic")
    prompt, features = data["prompt_0"].tolist(), data["context_features_0"]
    kept = [int(data["next_token_0"])]
    for slot, temperature in ((0, 0.0), (1, 0.7)):  # `make_step` heats odd slots
        row = Row(slot=slot, context=prompt, kept=kept, start=0)
        _, drafts = run(fresh(config, params), [row], hidden=features)
        np.testing.assert_allclose(drafts.probs[0].sum(-1), 1, rtol=1e-5)
        if temperature == 0:
            assert drafts.tokens[0].tolist() == data["draft_tokens_0"].tolist()
            continue
        if name == "dflash_qwen3":
            logits = jnp.asarray(data["block_logits_0"])
        else:
            scores, candidates = data["candidate_scores_0"][0], data["candidates_0"][0]
            logits = jnp.full((1, 128), -jnp.inf).at[0, candidates].set(scores)
        wanted = jax.nn.softmax(logits / temperature, axis=-1)
        np.testing.assert_allclose(drafts.probs[0, : len(wanted)], wanted, atol=1e-4)
        for j, token in enumerate(drafts.tokens[0]):
            assert drafts.probs[0, j, token] > 0
