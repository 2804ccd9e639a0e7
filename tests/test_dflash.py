"""DFlash and DFlash2 against recorded arrays, and what a block may see and write."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jspec
from jspec import api
from jspec.axes import PAD_SLOT, PAD_TOKEN
from jspec.models import dflash
from jspec.models.dflash import BlockConfig, Sight
from jspec.models.dflash2 import RefineConfig
from jspec.proposers import dflash as proposer
from tests import recordings
from tests.heads import (
    GAP_TOLERANCE,
    NEAR_TIE,
    TOLERANCE,
    assert_target_gives_what_a_head_read,
    gaps,
    target_of,
)
from tests.paged import make_view, poisoned_cache, shuffled_tables
from tests.steps import Row, make_step

pytestmark = pytest.mark.any_device

PAGE_SIZE = 3
PAGES = 12  # of a request


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
    model, n = dflash.build(config.model, params), recordings.num_prompts(data)
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
    layers = proposer.reads(load(name).config).hidden_layers
    assert_target_gives_what_a_head_read(name, layers, "context_features")


def fresh(config, params, *, max_requests=4, max_model_len=PAGES * PAGE_SIZE, poisoned=True):
    """A state with NaN in every page, so that whatever reads what was not written shows it."""
    pages = -(-max_model_len // PAGE_SIZE)
    cache = jspec.CacheConfig(
        num_pages=max_requests * pages,
        page_size=PAGE_SIZE,
        max_model_len=max_model_len,
        dtype="float32",
    )
    state = jspec.init(config, params, cache=cache, max_requests=max_requests)
    if poisoned:
        memory = jax.tree.map(lambda x: jnp.full_like(x, jnp.nan), state.memory)
        memory = api.commit(memory, api.device_of(state.memory))
        state = dataclasses.replace(state, memory=memory)
    return state


def hidden_of(config, tokens, start=0):
    """Hidden states that follow from token and position, as `make_step` gives them."""
    return np.array(
        [
            np.random.default_rng([token, start + i]).standard_normal(config.model.input_size)
            for i, token in enumerate(tokens)
        ],
        np.float32,
    )


def run(state, rows, *, hidden=None, num_rows=64, num_requests=4, width=None, **kwargs):
    """A step of the drafter; `hidden` replaces what `make_step` draws."""
    pages = state.cache.pages_per_request
    scheduled, verified = make_step(
        rows,
        num_requests=num_requests,
        num_rows=num_rows,
        width=width or state.config.num_drafts + 1,
        pages_per_request=pages,
        reads=proposer.reads(state.config),
        poison=True,
    )
    if hidden is not None:
        filled = np.full(scheduled.hidden.shape, np.nan, np.float32)
        filled[: len(hidden)] = hidden
        scheduled = dataclasses.replace(scheduled, hidden=filled)
    state, drafts = jspec.step(state, scheduled, verified, **kwargs)
    return state, jax.tree.map(np.asarray, drafts)


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
    rescored = dflash.build(config.model, params).selector.rescore(
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


def tiny(**changes):
    config = dataclasses.replace(jspec.DFlashConfig.tiny(), **changes)
    return config, weights(config)


@functools.cache
def weights(config):
    return proposer.init_params(config, jax.random.key(1), "float32")


REFINED = BlockConfig.tiny(refine=RefineConfig(num_taps=2, group_size=8, rank=4, top_k=5))
SMALL_VOCAB = BlockConfig.tiny(draft_vocab_size=20)


@pytest.mark.parametrize("model", [BlockConfig.tiny(), REFINED, SMALL_VOCAB])
def test_rejected_rows_and_an_earlier_block_leave_no_trace(model):
    """Three steps with rejections draft like one that reads the same tokens at once."""
    config, params = tiny(model=model)
    state = fresh(config, params)
    state, _ = run(state, [Row(slot=1, context=[5, 6, 7, 8], kept=[9], start=0)])
    state, _ = run(state, [Row(slot=1, context=[5, 6, 7, 8, 9], drafts=[1, 2, 3], kept=[1, 4])])
    state, stepped = run(
        state, [Row(slot=1, context=[5, 6, 7, 8, 9, 1, 4], drafts=[2, 2, 2], kept=[8])]
    )
    context = [5, 6, 7, 8, 9, 1, 4]
    _, whole = run(fresh(config, params), [Row(slot=1, context=context, kept=[8], start=0)])
    assert stepped.num_drafts[0] == config.num_drafts
    assert stepped.tokens.tolist() == whole.tokens.tolist()


@pytest.mark.parametrize("columns", [0, 1])
def test_a_step_with_fewer_drafts_keeps_the_context_current(columns):
    config, params = tiny()
    first = [Row(slot=0, context=[5, 6, 7, 8], kept=[9], start=0)]
    second = [Row(slot=0, context=[5, 6, 7, 8, 9], kept=[3])]
    results = []
    for kwargs in ({}, {"num_drafts": columns}):
        state, drafts = run(fresh(config, params), first, **kwargs)
        results.append(run(state, second)[1].tokens.tolist())
    assert drafts.tokens.shape == (4, columns)
    assert results[0] == results[1]


def written(state):
    """Slots of the first layer that hold something."""
    flat = np.asarray(state.memory.k[0]).reshape(-1, *state.memory.k.shape[3:])
    return np.flatnonzero(flat.any((1, 2))).tolist()


@pytest.mark.parametrize(
    "num_rejected, context, block",
    [
        ((0, 0), [12, 13, 14, 38, 39], [15, 16, 17, 40, 41, 42]),
        ((1, 0), [12, 13, 38, 39], [14, 15, 16, 40, 41, 42]),
    ],
)
def test_context_and_block_rows_land_in_their_slots(num_rejected, context, block):
    model = BlockConfig.tiny(
        decoder=dataclasses.replace(BlockConfig.tiny().decoder, vocab_size=100),
        draft_vocab_size=100,
    )
    config, params = tiny(num_drafts=2, model=model, mask_token=99)
    cache = jspec.CacheConfig(num_pages=12, page_size=4, max_model_len=12, dtype="float32")
    rejected = np.array(num_rejected, np.int32)

    def int32(*values):
        return np.array(values, np.int32)

    scheduled = jspec.Scheduled(
        token_ids=int32(1, 2, 3, 4, 5),
        positions=int32(0, 1, 2, 6, 7),
        query_start=int32(0, 3, 5),
        seq_lens=int32(3, 8),
        block_table=np.array([[3, 4, 0], [8, 9, 10]], np.int32),
        num_drafts=rejected,
        request_slot=int32(0, 1),
        backup_token=int32(PAD_TOKEN, PAD_TOKEN),
        discard=np.zeros(2, bool),
        hidden=hidden_of(config, [1, 2, 3, 4, 5]),
    )
    verified = jspec.Verified(tokens=np.array([[50, -1, -1], [60, -1, -1]], np.int32))
    for columns, slots in ((0, context), (2, context + block)):
        state = jspec.init(config, params, cache=cache, max_requests=2)
        state, drafts = jspec.step(state, scheduled, verified, num_drafts=columns)
        assert written(state) == sorted(slots)
        assert np.asarray(drafts.num_drafts).tolist() == [columns, columns]


def test_a_discarded_request_gets_its_context_but_no_block():
    config, params = tiny()
    state = fresh(config, params, poisoned=False)
    row = Row(slot=1, context=[5, 6, 7, 8], kept=[9], start=0, backup=3)
    state, drafts = run(state, [row])
    assert drafts.num_drafts.tolist() == [0] * 4
    first = PAGES * PAGE_SIZE
    assert written(state) == [first, first + 1, first + 2, first + 3]


def drafts_of_a_block(num_drafts, row):
    """What a whole block of that many drafts gives."""
    config, _ = tiny(num_drafts=num_drafts)
    _, drafts = run(fresh(config, weights(jspec.DFlashConfig.tiny())), [row])
    return drafts.tokens[0].tolist()


@pytest.mark.parametrize("room", [0, 1, 2, 3, 4])
def test_a_block_stops_at_the_longest_request(room):
    config, params = tiny()
    context = [5, 6, 7, 8, 9, 4, 3]
    row = Row(slot=1, context=context, kept=[2], start=0)
    limit = len(context) + 1 + room
    state, drafts = run(fresh(config, params, max_model_len=limit), [row])
    count = min(room, config.num_drafts)
    assert drafts.num_drafts[0] == count
    assert (drafts.tokens[0, count:] == PAD_TOKEN).all()
    if count:
        assert drafts.tokens[0, :count].tolist() == drafts_of_a_block(count, row)
    filled = np.isfinite(np.asarray(state.memory.k[0])).all((2, 3)).reshape(-1)
    pages = state.cache.pages_per_request * PAGE_SIZE
    end = pages + min(limit, len(context) + 1 + config.num_drafts)
    assert np.flatnonzero(filled).tolist() == list(range(pages, end))


def run_without_pages(row, pages, missing):
    """A step with a table of `pages` columns, one of them PAD."""
    config, params = tiny()
    scheduled, verified = make_step(
        [row],
        num_requests=2,
        num_rows=8,
        width=4,
        pages_per_request=PAGES,
        reads=proposer.reads(config),
    )
    table = scheduled.block_table[:, :pages].copy()
    if missing is not None:
        table[:, missing] = PAD_SLOT
    scheduled = dataclasses.replace(scheduled, block_table=table)
    return jspec.step(fresh(config, params), scheduled, verified)


@pytest.mark.parametrize("pages, missing", [(3, None), (12, 3)])
def test_a_block_stops_where_the_block_table_has_no_page(pages, missing):
    """A table of three pages, or one whose fourth page is PAD: nine tokens find a slot."""
    row = Row(slot=1, context=[5, 6, 7, 8, 9, 4, 3], kept=[2], start=0)
    state, drafts = run_without_pages(row, pages, missing)
    assert np.asarray(drafts.num_drafts).tolist() == [1, 0]
    assert np.asarray(drafts.tokens[0]).tolist() == [*drafts_of_a_block(1, row), *[PAD_TOKEN] * 2]
    filled = np.isfinite(np.asarray(state.memory.k[0])).all((2, 3)).reshape(-1)
    start = PAGES * PAGE_SIZE
    assert np.flatnonzero(filled).tolist() == list(range(start, start + 9))


def test_nothing_is_drafted_where_the_next_token_has_no_page():
    """The mask rows have one: only the last place of the missing page is the block's."""
    row = Row(slot=1, context=[5, 6, 7, 8, 9, 4, 3, 2], kept=[2], start=0)
    _, drafts = run_without_pages(row, PAGES, 2)
    assert np.asarray(drafts.num_drafts).tolist() == [0, 0]


def test_a_draft_vocabulary_drafts_its_own_target_ids():
    config, params = tiny(model=SMALL_VOCAB)
    _, drafts = run(fresh(config, params), [Row(slot=0, context=[5, 6, 7], kept=[1], start=0)])
    assert set(drafts.tokens[0].tolist()) <= set(params["target_ids"].tolist())
    assert max(params["target_ids"].tolist()) > 20


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


def test_a_tie_between_candidates_goes_to_the_lowest_id():
    config, params = tiny(model=REFINED)
    params = params | {"selector": params["selector"] | {"after": jnp.zeros((64, 4))}}
    selector = dflash.build(REFINED, params).selector
    logits = np.zeros((1, 64), np.float32)
    logits[0, [40, 9, 30]] = [3, 2, 3]
    scores = selector.rescore(jnp.asarray(logits), jnp.ones((1, 32)), np.zeros(1, np.int32))
    assert int(jnp.argmax(scores)) == 30


def test_positions_of_three_axes_are_refused():
    config, params = tiny()
    scheduled, verified = make_step(
        [Row(slot=0, context=[5], kept=[1])],
        num_requests=1,
        num_rows=1,
        width=4,
        pages_per_request=PAGES,
        reads=proposer.reads(config),
    )
    scheduled = dataclasses.replace(
        scheduled,
        positions=np.zeros((3, 1), np.int32),
        token_index=np.zeros(1, np.int32),
    )
    with pytest.raises(NotImplementedError, match="eagle"):
        jspec.step(fresh(config, params), scheduled, verified)


def test_one_sight_a_layer_is_wanted():
    with pytest.raises(ValueError, match="layer_types"):
        BlockConfig.tiny(sights=(Sight(),))
    with pytest.raises(ValueError, match="below the vocab_size"):
        dataclasses.replace(jspec.DFlashConfig.tiny(), mask_token=64)
    with pytest.raises(ValueError, match="at most the vocab_size"):
        BlockConfig.tiny(draft_vocab_size=65)
