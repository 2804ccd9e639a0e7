"""What every registered drafter must do. A new proposer is tested by being registered."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jspec
from jspec import proposers
from jspec.axes import PAD_TOKEN
from tests.support.counting import backend_compiles
from tests.support.marks import slow_ones
from tests.support.padded_tables import padded_config, padded_params
from tests.support.steps import Row, make_step

pytestmark = pytest.mark.any_device

CACHE = jspec.CacheConfig(num_pages=64, page_size=4, max_model_len=48, dtype="float32")
B, T = 4, 24
NAMES = list(proposers.REGISTRY)
DEVICE = [name for name in NAMES if proposers.find(name).kind == "device"]
WITH_WEIGHTS = [name for name in DEVICE if proposers.find(name).init_params]
HOST = [name for name in NAMES if proposers.find(name).kind == "host"]
SAMPLED = [
    f"{name}, sampled"
    for name in NAMES
    if hasattr(proposers.find(name).Config.tiny(), "draft_sampling")
]
VARIANTS = {name: {"draft_sampling": "probabilistic"} for name in SAMPLED} | {
    "draft_model, parallel": {"parallel_drafting": True, "mask_token": 63},
}
ALL = [*NAMES, *VARIANTS]


def some_slow(names):
    """EAGLE's contract repeats EAGLE-3's, and variants that of their method."""
    return slow_ones(names, lambda name: name == "eagle" or name in VARIANTS)


CONTEXTS = {
    0: [5, 6, 7, 5, 6, 7, 5, 6],
    1: [1, 2, 3, 4, 1, 2],
    2: [9, 9, 9, 9],
    3: [3, 1, 4, 1, 5, 9, 2, 6, 5],
}
ROWS = [
    Row(slot=2, context=CONTEXTS[2], drafts=[9, 9], kept=[9, 9, 9]),
    Row(slot=0, context=CONTEXTS[0], drafts=[7, 8], kept=[7, 5]),
    Row(slot=1, context=CONTEXTS[1], kept=[3]),
]


def method(name):
    return proposers.find(name.partition(",")[0])


def tiny(name, **changes):
    return dataclasses.replace(method(name).Config.tiny(), **VARIANTS.get(name, {}) | changes)


@functools.cache
def weights(config, seed=0):
    init_params = proposers.of(config).init_params
    return init_params and init_params(config, jax.random.key(seed), "float32")


def empty(name, **changes):
    """A state without requests."""
    config = tiny(name, **changes)
    return jspec.init(config, weights(config), cache=CACHE, max_requests=5)


def fresh(name, slots=CONTEXTS, **changes):
    """A state with one admitted request per slot."""
    state = empty(name, **changes)
    for slot in slots:
        state = jspec.admit(state, slot, CONTEXTS[slot])
    return state


def layout(state, rows=None, num_requests=B, num_rows=T, **kwargs):
    return make_step(
        fitted(state, ROWS) if rows is None else rows,
        num_requests=num_requests,
        num_rows=num_rows,
        width=state.config.num_drafts + 1,
        pages_per_request=CACHE.pages_per_request,
        reads=proposers.of(state.config).reads(state.config),
        **kwargs,
    )


def fitted(state, rows):
    """Cuts drafts and kept tokens to the drafter's K."""
    k = state.config.num_drafts
    return [
        dataclasses.replace(r, drafts=list(r.drafts)[:k], kept=list(r.kept)[: k + 1]) for r in rows
    ]


def drafts_of(state, rows=ROWS, **kwargs):
    state, drafts = jspec.step(state, *layout(state, fitted(state, rows), **kwargs))
    return jax.tree.map(np.asarray, drafts)


def assert_same(got, wanted):
    assert jax.tree.structure(got) == jax.tree.structure(wanted)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        if jnp.issubdtype(a.dtype, jnp.floating):  # products of other shapes round otherwise
            np.testing.assert_allclose(a, b, atol=1e-5, rtol=1e-4)
        else:
            np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("most", [1, 3])
def test_drafts_have_their_shape_and_are_padded(name, most):
    num_drafts = min(most, tiny(name).num_drafts)  # some methods have a limit of their own
    drafts = drafts_of(fresh(name, num_drafts=num_drafts))
    assert drafts.tokens.shape == (B, num_drafts) and drafts.tokens.dtype == np.int32
    assert drafts.num_drafts.shape == (B,) and drafts.num_drafts.dtype == np.int32
    column = np.arange(num_drafts)[None]
    live = column < drafts.num_drafts[:, None]
    assert (drafts.tokens[~live] == PAD_TOKEN).all()
    assert (drafts.tokens[live] >= 0).all()
    assert drafts.num_drafts[len(ROWS) :].tolist() == [0] * (B - len(ROWS))


@pytest.mark.parametrize("name", some_slow(SAMPLED))
def test_sampled_drafts_come_with_their_distribution(name):
    state = fresh(name)
    vocab_size, most = state.config.vocab_size, state.config.num_drafts
    scheduled, verified = layout(state)
    state, drafts = jspec.step(state, scheduled, verified)
    tokens, probs = np.asarray(drafts.tokens), np.asarray(drafts.probs)
    assert probs.shape == (B, most, vocab_size) and probs.dtype == np.float32
    live = np.arange(most)[None] < np.asarray(drafts.num_drafts)[:, None]
    assert live.any() and not probs[~live].any()
    np.testing.assert_allclose(probs[live].sum(-1), 1, atol=1e-5)
    assert (np.take_along_axis(probs, np.maximum(tokens, 0)[..., None], -1)[live] > 0).all()
    is_greedy = live & (scheduled.temperature == 0)[:, None]
    assert is_greedy.any() and (live & ~is_greedy).any()
    assert (probs[is_greedy].max(-1) == 1).all()
    assert (probs[live & ~is_greedy].max(-1) < 1).all()
    _, drafts = jspec.step(state, *layout(state), num_drafts=0)
    assert drafts.probs.shape == (B, 0, vocab_size)


@pytest.mark.parametrize("name", some_slow(ALL))
def test_padding_is_inert_whatever_it_holds(name):
    assert_same(drafts_of(fresh(name), poison=True), drafts_of(fresh(name)))


@pytest.mark.parametrize("name", some_slow(ALL))
def test_the_bucket_does_not_change_the_drafts(name):
    wide = drafts_of(fresh(name), num_requests=B + 2, num_rows=T + 9)
    assert_same(jax.tree.map(lambda x: x[:B], wide), drafts_of(fresh(name)))


@pytest.mark.parametrize(
    "name", some_slow([n for n in ALL if not method(n).shares_across_requests])
)
def test_permuted_requests_get_permuted_drafts(name):
    order = [2, 0, 1]
    wanted = jax.tree.map(lambda x: x[[*order, 3]], drafts_of(fresh(name)))
    assert_same(drafts_of(fresh(name), [ROWS[i] for i in order]), wanted)


@pytest.mark.parametrize("name", [n for n in ALL if method(n).init_params])
def test_rows_that_pad_a_table_are_neither_read_nor_drafted(name):
    """Nor is an embedding of theirs: their ids are no tokens."""
    state = fresh(name)
    scheduled, verified = layout(state, fitted(state, ROWS))
    token_ids = np.array(scheduled.token_ids)
    token_ids[1] = state.config.vocab_size
    scheduled = dataclasses.replace(scheduled, token_ids=token_ids)
    _, wanted = jspec.step(state, scheduled, verified)
    config = padded_config(state.config)
    params = padded_params(weights(state.config))
    with pytest.raises(ValueError, match="(?s)wrong shape.*padded_vocab_size"):
        jspec.init(state.config, params, cache=CACHE, max_requests=5)
    state = jspec.init(config, params, cache=CACHE, max_requests=5)
    for slot in CONTEXTS:
        state = jspec.admit(state, slot, CONTEXTS[slot])
    _, drafts = jspec.step(state, scheduled, verified)
    assert_same(*(jax.tree.map(np.asarray, d) for d in (drafts, wanted)))
    assert np.asarray(drafts.num_drafts).sum() > 0


@pytest.mark.parametrize("name", some_slow(NAMES))
def test_fewer_drafts_are_the_first_ones(name):
    whole = drafts_of(fresh(name))
    state = fresh(name)
    for columns in range(state.config.num_drafts + 1):
        step = layout(state, fitted(state, ROWS))
        _, drafts = jspec.step(fresh(name), *step, num_drafts=columns)
        assert np.asarray(drafts.tokens).tolist() == whole.tokens[:, :columns].tolist()
        assert (
            np.asarray(drafts.num_drafts).tolist() == np.minimum(whole.num_drafts, columns).tolist()
        )
    with pytest.raises(ValueError, match="`num_drafts` is 9"):
        jspec.step(state, *layout(state), num_drafts=9)


@pytest.mark.parametrize("name", some_slow(NAMES))
def test_a_request_may_ask_for_fewer_drafts(name):
    whole, state = drafts_of(fresh(name)), fresh(name)
    scheduled, verified = layout(state, fitted(state, ROWS))
    most = np.array([1, 0, 9, -4], np.int32)
    scheduled = dataclasses.replace(scheduled, max_drafts=most)
    _, drafts = jspec.step(state, scheduled, verified)
    count = np.minimum(whole.num_drafts, np.maximum(most, 0))
    column = np.arange(whole.tokens.shape[1])[None]
    assert np.asarray(drafts.num_drafts).tolist() == count.tolist()
    wanted = np.where(column < count[:, None], whole.tokens, PAD_TOKEN)
    assert np.asarray(drafts.tokens).tolist() == wanted.tolist()


@pytest.mark.parametrize("name", some_slow(["ngram_gpu", "draft_model, sampled"]))
def test_steps_with_caps_for_each_request_are_warmed_where_asked_for(name):
    state = empty(name, num_drafts=2)
    # A bucket of its own: elsewhere in this process the shapes may be compiled already.
    buckets = jspec.Buckets(requests=(B + 3,), tokens=(T + 3,), max_drafts=True)
    jspec.warmup(state, buckets)
    for slot in CONTEXTS:
        state = jspec.admit(state, slot, CONTEXTS[slot])
    scheduled, verified = layout(state, num_requests=B + 3, num_rows=T + 3)
    scheduled = dataclasses.replace(scheduled, max_drafts=np.ones(B + 3, np.int32))
    with backend_compiles() as compiled:
        jspec.step(state, scheduled, verified)
    assert not compiled


@pytest.mark.parametrize("name", some_slow(NAMES))
def test_a_step_without_what_the_drafter_reads_is_refused(name):
    state = fresh(name)
    reads = proposers.of(state.config).reads(state.config)
    scheduled, verified = layout(state)
    if reads.hidden_layers:
        with pytest.raises(ValueError, match="`hidden` is None.*hidden_layers"):
            jspec.step(state, dataclasses.replace(scheduled, hidden=None), verified)
        narrow = np.zeros((T, reads.hidden_size + 1), np.float32)
        with pytest.raises(ValueError, match="`hidden` is of shape"):
            jspec.step(state, dataclasses.replace(scheduled, hidden=narrow), verified)
    assert_same(drafts_of(state), drafts_of(fresh(name)))


@pytest.mark.parametrize("name", some_slow(NAMES))
def test_step_is_prepare_and_propose(name):
    state = fresh(name)
    scheduled, verified = layout(state, fitted(state, ROWS), poison=True)
    batch = jspec.prepare(scheduled, verified, vocab_size=state.config.vocab_size)
    _, drafts = jspec.propose(state, batch)
    assert_same(jax.tree.map(np.asarray, drafts), drafts_of(fresh(name), poison=True))


@pytest.mark.parametrize("name", some_slow(NAMES))
def test_a_request_that_is_discarded_drafts_nothing_and_loses_nothing(name):
    """A prompt read in two chunks drafts like one read at once."""
    prompt = CONTEXTS[3]
    state = fresh(name, slots=[3])
    first = Row(slot=3, context=prompt[:4], kept=[8], start=0, backup=prompt[4])
    state, drafts = jspec.step(state, *layout(state, [first]))
    assert np.asarray(drafts.num_drafts).tolist() == [0] * B
    assert (np.asarray(drafts.tokens) == PAD_TOKEN).all()
    last = Row(slot=3, context=prompt, kept=[1], start=4)
    chunked = drafts_of(state, [last])
    whole = drafts_of(fresh(name, slots=[3]), [Row(slot=3, context=prompt, kept=[1], start=0)])
    assert_same(chunked, whole)


@pytest.mark.parametrize("name", some_slow([*WITH_WEIGHTS, "draft_model, parallel"]))
def test_rejected_drafts_leave_nothing_that_a_later_draft_sees(name):
    """Cells that no step has written are NaN; the text is read at once, or draft by draft."""
    text = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3]
    state = jspec.admit(empty(name), 0, text[:5])
    nan = jax.tree.map(
        lambda x: jnp.full_like(x, jnp.nan) if jnp.issubdtype(x.dtype, jnp.floating) else x,
        state.memory,
    )
    state = dataclasses.replace(state, memory=nan)
    for row in (
        Row(slot=0, context=text[:5], kept=text[5:6], start=0),
        Row(slot=0, context=text[:6], drafts=[7, 7, 7], kept=text[6:7]),
        Row(slot=0, context=text[:7], drafts=[text[7], 8, 8], kept=text[7:9]),
    ):
        state, _ = jspec.step(state, *layout(state, fitted(state, [row])))
    drafts = drafts_of(state, [Row(slot=0, context=text[:9], kept=text[9:])])
    state = jspec.admit(empty(name), 0, text[:9])
    assert_same(drafts, drafts_of(state, [Row(slot=0, context=text[:9], kept=text[9:], start=0)]))
    assert drafts.num_drafts[0] == drafts.tokens.shape[1]


@pytest.mark.parametrize("name", some_slow(NAMES))
def test_no_draft_goes_past_the_longest_request(name):
    context = [4, 5] * (CACHE.max_model_len // 2 - 1)  # 46 of 48 tokens, then one more kept
    for kept, limit in (([4], 1), ([4, 5], 0)):
        state = empty(name)
        state = jspec.admit(state, 0, context)
        row = Row(slot=0, context=context, drafts=kept[:-1], kept=kept)
        assert drafts_of(state, [row]).num_drafts[0] <= limit


@pytest.mark.parametrize("name", some_slow(NAMES))
def test_a_released_slot_forgets_its_request(name):
    state = jspec.release(fresh(name, slots=[0]), 0)
    state = jspec.admit(state, 0, [8, 6])
    row = Row(slot=0, context=[8, 6], kept=[7], start=0)
    again = drafts_of(state, [row])
    state = jspec.admit(empty(name), 0, [8, 6])
    assert_same(again, drafts_of(state, [row]))


@pytest.mark.parametrize("name", some_slow(NAMES))
def test_memory_and_limits_go_by_the_place_whatever_the_axes_are(name):
    """Positions of three axes (M-RoPE) turn keys; slots, histories and lengths know the place."""
    scheduled, verified = layout(empty(name))
    far = scheduled.positions + np.int32(2 * CACHE.max_model_len)
    axes = dataclasses.replace(
        scheduled, positions=np.stack([far, far, far]), token_index=scheduled.positions
    )
    if name in ("draft_model", "dflash"):
        with pytest.raises(NotImplementedError, match="M-RoPE.*Draft .*with a chain"):
            jspec.step(fresh(name), axes, verified)
        return
    states, drafts = zip(
        *(jspec.step(fresh(name), step, verified) for step in (scheduled, axes)), strict=True
    )
    np.testing.assert_array_equal(drafts[0].num_drafts, drafts[1].num_drafts)
    wanted, got = (jax.tree.leaves(state.memory) for state in states)
    assert len(wanted) == len(got)
    for a, b in zip(wanted, got, strict=True):
        if isinstance(a, jax.Array | np.ndarray):  # the trees of suffix decoding are no array
            np.testing.assert_array_equal(np.asarray(a) != 0, np.asarray(b) != 0)
    if name in ("ngram", "ngram_gpu", "suffix"):
        np.testing.assert_array_equal(drafts[0].tokens, drafts[1].tokens)
