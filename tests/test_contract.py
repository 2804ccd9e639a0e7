"""What every registered drafter must do. A new proposer is tested by being registered."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jspec
from jspec import api, proposers
from jspec.axes import PAD_TOKEN
from jspec.state import Batch
from tests.counting import backend_compiles
from tests.steps import Row, make_step

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


@pytest.mark.parametrize("name", SAMPLED)
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


@pytest.mark.parametrize("name", ALL)
def test_padding_is_inert_whatever_it_holds(name):
    assert_same(drafts_of(fresh(name), poison=True), drafts_of(fresh(name)))


@pytest.mark.parametrize("name", ALL)
def test_the_bucket_does_not_change_the_drafts(name):
    wide = drafts_of(fresh(name), num_requests=B + 2, num_rows=T + 9)
    assert_same(jax.tree.map(lambda x: x[:B], wide), drafts_of(fresh(name)))


@pytest.mark.parametrize("name", [n for n in ALL if not method(n).shares_across_requests])
def test_permuted_requests_get_permuted_drafts(name):
    order = [2, 0, 1]
    wanted = jax.tree.map(lambda x: x[[*order, 3]], drafts_of(fresh(name)))
    assert_same(drafts_of(fresh(name), [ROWS[i] for i in order]), wanted)


@pytest.mark.parametrize("name", NAMES)
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


@pytest.mark.parametrize("name", NAMES)
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


@pytest.mark.parametrize("name", ["ngram_gpu", "draft_model, sampled"])
def test_steps_with_caps_for_each_request_are_warmed_where_asked_for(name):
    state = empty(name, num_drafts=2)
    # A bucket of its own: elsewhere in this process the shapes may be compiled already.
    buckets = jspec.Buckets(requests=(B + 3,), tokens=(T + 3,), max_drafts=True)
    jspec.warmup(state, buckets)
    state = jspec.admit(state, 0, CONTEXTS[0])
    scheduled, verified = layout(state, num_requests=B + 3, num_rows=T + 3)
    scheduled = dataclasses.replace(scheduled, max_drafts=np.ones(B + 3, np.int32))
    with backend_compiles() as compiled:
        jspec.step(state, scheduled, verified)
    assert not compiled


@pytest.mark.parametrize("name", NAMES)
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


@pytest.mark.parametrize("name", NAMES)
def test_step_is_prepare_and_propose(name):
    state = fresh(name)
    scheduled, verified = layout(state, fitted(state, ROWS), poison=True)
    batch = jspec.prepare(scheduled, verified, vocab_size=state.config.vocab_size)
    _, drafts = jspec.propose(state, batch)
    assert_same(jax.tree.map(np.asarray, drafts), drafts_of(fresh(name), poison=True))


@pytest.mark.parametrize("name", NAMES)
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


@pytest.mark.parametrize("name", [*WITH_WEIGHTS, "draft_model, parallel"])
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


@pytest.mark.parametrize("name", NAMES)
def test_no_draft_goes_past_the_longest_request(name):
    context = [4, 5] * (CACHE.max_model_len // 2 - 1)  # 46 of 48 tokens, then one more kept
    for kept, limit in (([4], 1), ([4, 5], 0)):
        state = empty(name)
        state = jspec.admit(state, 0, context)
        row = Row(slot=0, context=context, drafts=kept[:-1], kept=kept)
        assert drafts_of(state, [row]).num_drafts[0] <= limit


@pytest.mark.parametrize("name", NAMES)
def test_a_released_slot_forgets_its_request(name):
    state = jspec.release(fresh(name, slots=[0]), 0)
    state = jspec.admit(state, 0, [8, 6])
    row = Row(slot=0, context=[8, 6], kept=[7], start=0)
    again = drafts_of(state, [row])
    state = jspec.admit(empty(name), 0, [8, 6])
    assert_same(again, drafts_of(state, [row]))


@pytest.mark.parametrize("name", NAMES)
def test_a_consumed_or_wrong_state_is_refused_by_name(name):
    state = fresh(name, slots=[0, 1])
    with pytest.raises(ValueError, match="taken.*release"):
        jspec.admit(state, 1, [1, 2])
    with pytest.raises(ValueError, match="max_requests"):
        jspec.admit(state, 5, [1, 2])
    with pytest.raises(ValueError, match="empty"):
        jspec.admit(state, 2, [])
    with pytest.raises(ValueError, match="max_model_len"):
        jspec.admit(state, 2, [1] * (CACHE.max_model_len + 1))
    with pytest.raises(ValueError, match="prompt token 1"):
        jspec.admit(state, 2, [1, -3])
    with pytest.raises(ValueError, match="holds no request"):
        jspec.release(state, 4)
    assert_same(drafts_of(state, ROWS[1:]), drafts_of(fresh(name, slots=[0, 1]), ROWS[1:]))
    with pytest.raises(ValueError, match="num_drafts"):
        tiny(name, num_drafts=0)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    "field, value, error, word",
    [
        ("token_ids", np.zeros(T, np.float32), TypeError, "int32"),
        ("seq_lens", np.zeros(B + 1, np.int32), ValueError, "seq_lens"),
        ("block_table", np.zeros((B, 0), np.int32), ValueError, "block_table"),
        ("discard", np.zeros(B, np.int32), TypeError, "bool"),
        ("query_start", np.zeros((2, 2), np.int32), ValueError, "query_start"),
        ("token_index", np.zeros(T, np.int32), ValueError, "token_index"),
        ("positions", np.arange(T) + 2**32, TypeError, "int64.*int32"),  # 32 bits would wrap
        ("token_ids", [1] * T, TypeError, "list.*np.asarray"),
        ("seq_lens", None, TypeError, "seq_lens.*NoneType"),
        ("hidden", [[1.0]] * T, TypeError, "hidden.*list"),
    ],
)
def test_a_field_that_does_not_fit_is_refused_before_anything_compiles(
    name, field, value, error, word
):
    state = fresh(name)
    scheduled, verified = layout(state)
    with backend_compiles() as compiled, pytest.raises(error, match=word):
        jspec.step(state, dataclasses.replace(scheduled, **{field: value}), verified)
    assert not compiled
    assert_same(drafts_of(state), drafts_of(fresh(name)))


@pytest.mark.parametrize("name", NAMES)
def test_an_argument_of_another_type_is_refused_and_the_state_stays(name):
    state = fresh(name)
    scheduled, verified = layout(state)
    batch = jspec.prepare(scheduled, verified)
    with pytest.raises(TypeError, match="`cache` is None.*CacheConfig"):
        jspec.init(state.config, cache=None, max_requests=1)
    with pytest.raises(TypeError, match="`state` is a NoneType.*jspec.init"):
        jspec.step(None, scheduled, verified)
    with pytest.raises(TypeError, match="`scheduled` is a Verified"):
        jspec.step(state, verified, scheduled)
    with pytest.raises(TypeError, match="`verified` is a list"):
        jspec.step(state, scheduled, verified.tokens.tolist())
    with pytest.raises(TypeError, match="`tokens` is .*list.*np.asarray"):
        jspec.step(state, scheduled, jspec.Verified(tokens=verified.tokens.tolist()))
    with pytest.raises(TypeError, match="`batch` is a Scheduled.*jspec.prepare"):
        jspec.propose(state, scheduled)
    with pytest.raises(ValueError, match="Batch: `next_token` has shape"):
        jspec.propose(state, dataclasses.replace(batch, next_token=np.zeros(B + 1, np.int32)))
    with pytest.raises(TypeError, match="Batch: `num_valid` has dtype float32"):
        jspec.propose(state, dataclasses.replace(batch, num_valid=np.zeros(B, np.float32)))
    for slot in (0.5, "0", None, True, np.array([0, 1])):
        with pytest.raises(TypeError, match="`slot` is .*int"):
            jspec.admit(state, slot, [1])
        with pytest.raises(TypeError, match="`slot` is .*int"):
            jspec.release(state, slot)
    with pytest.raises(ValueError, match="tokenizer"):
        jspec.admit(state, 4, [[1], [1, 2]])
    state = jspec.release(jspec.admit(state, np.int64(4), [1]), np.int32(4))
    assert_same(drafts_of(state), drafts_of(fresh(name)))


@pytest.mark.parametrize("name", ALL)
def test_a_warmed_bucket_never_compiles_again(name):
    state = empty(name)
    jspec.warmup(state, jspec.Buckets(requests=(B,), tokens=(T,)))
    with backend_compiles() as compiled:
        for slot in CONTEXTS:
            state = jspec.admit(state, slot, CONTEXTS[slot])
        for rows in (ROWS, ROWS[:1], ROWS[1:]):
            scheduled, verified = layout(state, fitted(state, rows))
            state, _ = jspec.step(state, scheduled, verified)
            if (
                method(name).kind == "device"
            ):  # uncommitted arrays must not be a new signature either
                scheduled, verified = jax.tree.map(jax.device_put, (scheduled, verified))
                state, _ = jspec.step(state, scheduled, verified)
                for vocab_size in (None, state.config.vocab_size):
                    batch = jspec.prepare(scheduled, verified, vocab_size=vocab_size)
                    state, _ = jspec.propose(state, batch)
        state = jspec.release(state, 0)
    assert not compiled


@pytest.mark.parametrize("name", DEVICE)
def test_what_verification_alone_reads_is_no_other_step(name):
    state = fresh(name)
    reads = proposers.of(state.config).reads(state.config)
    scheduled, verified = layout(state, fitted(state, ROWS))
    state, wanted = jspec.step(state, scheduled, verified)
    more = {"top_k": np.ones(B, np.int32), "top_p": np.ones(B, np.float32)}
    if not reads.sampling:
        more |= {"temperature": np.ones(B, np.float32), "seed": np.ones(B, np.int32)}
    if not reads.hidden_layers:
        more["hidden"] = np.ones((T, 8), np.float32)
    scheduled = dataclasses.replace(scheduled, **more)
    with backend_compiles() as compiled:
        _, drafts = jspec.step(fresh(name), scheduled, verified)
    assert not compiled
    assert_same(jax.tree.map(np.asarray, drafts), jax.tree.map(np.asarray, wanted))


@pytest.mark.parametrize("name", DEVICE)
def test_only_memory_is_donated_and_it_is_rewritten_in_place(name):
    state = fresh(name)
    args = api.commit(layout(state, fitted(state, ROWS)), jax.devices()[0])
    compiled = api._step.lower(
        state.config, state.params, state.memory, *args, num_drafts=state.config.num_drafts
    ).compile()
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(state.memory))
    assert compiled.memory_analysis().alias_size_in_bytes == size
    before = [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(state.memory)]
    params = jax.tree.leaves(state.params)
    after, _ = jspec.step(state, *args)
    assert [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(after.memory)] == before
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(state.memory))
    assert not any(leaf.is_deleted() for leaf in [*params, *jax.tree.leaves(args)])
    with pytest.raises(RuntimeError, match="consumed"):
        jspec.step(state, *args)


@pytest.mark.parametrize("name", DEVICE)
def test_the_pure_core_scans_under_an_outer_jit_without_the_host(name):
    """Tracing a whole step is the proof on a CPU that nothing in it reads a value."""
    state = fresh(name)
    config, rows = state.config, fitted(state, ROWS)
    scheduled, verified = layout(state, rows)
    batch = jax.tree.map(
        jnp.asarray, jspec.prepare(scheduled, verified, vocab_size=config.vocab_size)
    )
    core = jspec.pure(config)

    @functools.partial(jax.jit, donate_argnums=1)
    def three(params, memory, batch):
        return jax.lax.scan(lambda m, _: core(params, m, batch), memory, length=3)

    _, drafts = three(state.params, state.memory, batch)
    assert_same(jax.tree.map(lambda x: np.asarray(x[0]), drafts), drafts_of(fresh(name)))


@pytest.mark.parametrize("name", DEVICE)
def test_prepare_gives_the_same_batch_on_host_and_device(name):
    state = fresh(name)
    step = layout(state, fitted(state, ROWS), poison=True)
    on_host = jspec.prepare(*step, vocab_size=20)
    on_device = jspec.prepare(*jax.tree.map(jnp.asarray, step), vocab_size=20)
    assert all(isinstance(leaf, np.ndarray) for leaf in jax.tree.leaves(on_host))
    assert isinstance(on_host, Batch)
    assert_same(jax.tree.map(np.asarray, on_device), on_host)


@pytest.mark.parametrize("name", HOST)
def test_a_host_drafter_inside_jit_says_what_to_do(name):
    state = fresh(name)
    with pytest.raises(TypeError, match="outside of jit"):
        jax.jit(lambda s, v: jspec.step(state, s, v)[1])(*layout(state))
    with pytest.raises(TypeError, match="outside of jit"):
        jspec.pure(state.config)


@pytest.mark.gpu
@pytest.mark.parametrize("name", DEVICE)
def test_a_thousand_changing_steps_neither_sync_nor_compile(name):
    state = empty(name)
    jspec.warmup(state, jspec.Buckets(requests=(B,), tokens=(T,)))
    for slot in CONTEXTS:
        state = jspec.admit(state, slot, CONTEXTS[slot])
    device = jax.devices()[0]
    batches = [
        jax.device_put(layout(state, fitted(state, rows)), device)
        for rows in (ROWS, ROWS[:2], ROWS[1:], ROWS[::-1])
    ]
    with backend_compiles() as compiled, jax.transfer_guard("disallow"):
        for i in range(1000):
            state, drafts = jspec.step(state, *batches[i % len(batches)])
    assert not compiled
    assert np.asarray(drafts.tokens).shape[0] == B
