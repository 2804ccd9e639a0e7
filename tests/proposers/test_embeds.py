"""Input embeddings in the place of token embeddings, in a drafter's first pass."""

import dataclasses

import jax
import numpy as np
import pytest

import jspec
from jspec.models.config import ModelConfig
from jspec.proposers import draft_model
from jspec.proposers import mtp as proposer
from tests.support.counting import backend_compiles
from tests.support.steps import Row, make_step

pytestmark = pytest.mark.any_device

CACHE = jspec.CacheConfig(num_pages=16, page_size=4, max_model_len=16, dtype="float32")
D, T, B = 32, 14, 3
ROWS = [
    Row(slot=1, context=[5, 6, 7, 8, 9], drafts=[1, 2], kept=[1, 3], start=0),
    Row(slot=3, context=[4, 4, 2], kept=[8], start=0),
]
FIRST = [0, 7]  # first row of each request


def make(num_modules=1):
    model = ModelConfig.tiny(num_layers=num_modules)
    config = jspec.MTPConfig(
        num_drafts=3, model=model, hidden_layer=1, draft_sampling="probabilistic"
    )
    params = proposer.PROPOSER.init_params(config, jax.random.key(1), "float32")
    state = jspec.init(config, params, cache=CACHE, max_requests=4)
    for slot in range(4):
        state = jspec.admit(state, slot, [1])
    return config, params, state


def layout(config, rows=ROWS, **changes):
    scheduled, verified = make_step(
        rows,
        num_requests=B,
        num_rows=T,
        width=4,
        pages_per_request=4,
        poison=True,
        reads=proposer.PROPOSER.reads(config),
    )
    return dataclasses.replace(scheduled, **changes), verified


def no_embeds():
    """Embeddings that nothing may read: NaN, nowhere asked for."""
    return np.full((T, D), np.nan, np.float32), np.zeros(T, bool)


def run(state, step):
    state, drafts = jspec.step(state, *step)
    return state, jax.tree.map(np.asarray, drafts)


def assert_same(got, wanted):
    np.testing.assert_array_equal(got.tokens, wanted.tokens)
    np.testing.assert_allclose(got.probs, wanted.probs, atol=1e-6)


@pytest.mark.parametrize("num_modules", [1, 2])
def test_a_masked_row_is_as_if_its_token_had_that_embedding(num_modules):
    config, params, state = make(num_modules)
    _, plain = run(state, layout(config))
    # Row 2 of the first request (token 7) and row 2 of the second (token 2) get that of token 30.
    embeds, mask = no_embeds()
    for row in (2, FIRST[1] + 2):
        embeds[row], mask[row] = params["embed"][30], True
    _, _, state = make(num_modules)
    _, got = run(state, layout(config, embeds=embeds, embeds_mask=mask))
    step = layout(config)
    for row in (2, FIRST[1] + 2):
        step[0].token_ids[row] = 30
    _, _, state = make(num_modules)
    _, wanted = run(state, step)
    assert_same(got, wanted)
    assert np.abs(got.probs[:2] - plain.probs[:2]).max(axis=(1, 2)).min() > 1e-4


def test_rows_that_no_pass_reads_change_nothing():
    """The first row of a request, rejected rows and padding: whatever their embeddings are."""
    config, _, state = make()
    _, wanted = run(state, layout(config))
    embeds, mask = no_embeds()
    mask[[FIRST[0], FIRST[1], 10, 11, T - 1]] = True  # 10: the end of the live rows
    mask[[6]] = True  # behind the last accepted row of the first request, which has 6 rows kept
    _, _, state = make()
    _, got = run(state, layout(config, embeds=embeds, embeds_mask=mask))
    assert_same(got, wanted)


def test_an_empty_request_in_front_takes_no_embedding_from_its_neighbour():
    config, params, state = make()
    rows = [Row(slot=1, context=[5, 6, 7, 8, 9], kept=[3], start=2)]
    embeds, mask = no_embeds()
    embeds[1], mask[1] = params["embed"][30], True  # for row 0, where an empty request points
    _, wanted = run(state, layout(config, rows, embeds=embeds, embeds_mask=mask))
    scheduled, verified = layout(config, rows, embeds=embeds, embeds_mask=mask)

    def behind(x):  # the live request moves from place 0 to place 1
        return np.concatenate([x[1:2], x[:1], x[2:]])

    moved = {
        name: behind(getattr(scheduled, name))
        for name in ("seq_lens", "block_table", "num_drafts", "request_slot", "backup_token")
    }
    scheduled = dataclasses.replace(
        scheduled,
        **moved,
        discard=behind(scheduled.discard),
        temperature=behind(scheduled.temperature),
        seed=behind(scheduled.seed),
        query_start=np.array([0, 0, 3, 3], np.int32),
    )
    _, _, state = make()
    _, got = run(state, (scheduled, jspec.Verified(tokens=behind(verified.tokens))))
    np.testing.assert_array_equal(got.tokens[1], wanted.tokens[0])
    np.testing.assert_allclose(got.probs[1], wanted.probs[0], atol=1e-6)


def test_behind_a_chunk_the_next_token_has_its_own_embedding():
    """Its input embedding comes with the next chunk, when the row before it is long done."""
    config, params, state = make()
    prompt = [5, 6, 7, 8, 9, 3]
    chunk = [Row(slot=1, context=prompt[:3], kept=[0], start=0, backup=prompt[3])]
    rest = [Row(slot=1, context=prompt, kept=[2], start=3)]
    embeds, mask = no_embeds()
    embeds[:2], mask[:2] = params["embed"][30], True  # of tokens 3 and 4 of the prompt
    state, _ = run(state, layout(config, chunk))
    _, got = run(state, layout(config, rest, embeds=embeds, embeds_mask=mask))
    whole = [Row(slot=1, context=prompt, kept=[2], start=0)]
    embeds, mask = no_embeds()
    embeds[4], mask[4] = params["embed"][30], True  # token 4 alone: token 3 begins the chunk
    _, _, state = make()
    _, wanted = run(state, layout(config, whole, embeds=embeds, embeds_mask=mask))
    assert_same(got, wanted)


def test_embeddings_of_another_width_are_refused_before_anything_compiles():
    config, _, state = make()
    embeds, mask = np.zeros((T, D + 1), np.float32), np.zeros(T, bool)
    scheduled, verified = layout(config, embeds=embeds, embeds_mask=mask)
    with backend_compiles() as compiled:
        with pytest.raises(ValueError, match="`embeds` is of shape .14, 33., wanted .T, 32."):
            jspec.step(state, scheduled, verified)
        with pytest.raises(ValueError, match="`embeds` and `embeds_mask` together"):
            jspec.step(state, dataclasses.replace(scheduled, embeds_mask=None), verified)
    assert not compiled


def test_a_drafter_that_adds_rows_refuses_embeddings_by_name():
    config = draft_model.DraftModelConfig(num_drafts=2, model=ModelConfig.tiny())
    params = draft_model.PROPOSER.init_params(config, jax.random.key(0), "float32")
    state = jspec.init(config, params, cache=CACHE, max_requests=4)
    scheduled, verified = layout(make()[0])
    embeds, mask = no_embeds()
    scheduled = dataclasses.replace(
        scheduled, embeds=embeds, embeds_mask=mask, hidden=None, temperature=None, seed=None
    )
    with pytest.raises(NotImplementedError, match="`embeds` is given.*eagle"):
        jspec.step(state, scheduled, verified)
