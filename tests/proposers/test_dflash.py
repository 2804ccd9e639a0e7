"""DFlash and DFlash2: what a block may see and write."""

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
from jspec.models import weights as model_weights
from jspec.models.dflash import AttentionMask, BlockConfig
from jspec.models.dflash2 import RefineConfig
from jspec.proposers import dflash as proposer
from tests.support.steps import Row, make_step

pytestmark = pytest.mark.any_device

PAGE_SIZE = 3
PAGES = 12  # of a request


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
        reads=proposer.PROPOSER.reads(state.config),
        poison=True,
    )
    if hidden is not None:
        filled = np.full(scheduled.hidden.shape, np.nan, np.float32)
        filled[: len(hidden)] = hidden
        scheduled = dataclasses.replace(scheduled, hidden=filled)
    state, drafts = jspec.step(state, scheduled, verified, **kwargs)
    return state, jax.tree.map(np.asarray, drafts)


def tiny(**changes):
    config = dataclasses.replace(jspec.DFlashConfig.tiny(), **changes)
    return config, weights(config)


@functools.cache
def weights(config):
    return proposer.PROPOSER.init_params(config, jax.random.key(1), "float32")


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
        reads=proposer.PROPOSER.reads(config),
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


def test_a_tie_between_candidates_goes_to_the_lowest_id():
    config, params = tiny(model=REFINED)
    params = params | {"selector": params["selector"] | {"after": jnp.zeros((64, 4))}}
    selector = model_weights.bind(dflash.DFlash, REFINED, params).selector
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
        reads=proposer.PROPOSER.reads(config),
    )
    scheduled = dataclasses.replace(
        scheduled,
        positions=np.zeros((3, 1), np.int32),
        token_index=np.zeros(1, np.int32),
    )
    with pytest.raises(NotImplementedError, match="eagle"):
        jspec.step(fresh(config, params), scheduled, verified)


def test_one_mask_a_layer_is_wanted():
    with pytest.raises(ValueError, match="layer_types"):
        BlockConfig.tiny(masks=(AttentionMask(),))
    with pytest.raises(ValueError, match="below the vocab_size"):
        dataclasses.replace(jspec.DFlashConfig.tiny(), mask_token=64)
    with pytest.raises(ValueError, match="at most the vocab_size"):
        BlockConfig.tiny(draft_vocab_size=65)
