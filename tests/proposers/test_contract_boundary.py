"""What every registered drafter must do at the jit boundary: errors, compilation, donation."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jspec
from jspec import api, proposers
from jspec.state import Batch
from tests.proposers.test_contract import (
    ALL,
    CACHE,
    CONTEXTS,
    DEVICE,
    HOST,
    NAMES,
    ROWS,
    B,
    T,
    assert_same,
    drafts_of,
    empty,
    fitted,
    fresh,
    layout,
    method,
    some_slow,
    tiny,
)
from tests.support.counting import backend_compiles

pytestmark = pytest.mark.any_device


@pytest.mark.parametrize("name", some_slow(NAMES))
def test_a_consumed_or_wrong_state_is_refused_by_name(name):
    state = fresh(name, slots=[0, 1])
    with pytest.raises(ValueError, match="taken.*release"):
        jspec.admit(state, 1, [1, 2])
    with pytest.raises(ValueError, match="max_requests"):
        jspec.admit(state, 5, [1, 2])
    with pytest.raises(ValueError, match="empty.*BOS"):
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


@pytest.mark.parametrize("name", some_slow(NAMES))
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


@pytest.mark.parametrize("name", some_slow(ALL))
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
def test_a_step_that_warmup_did_not_compile_is_refused_or_warned_of(name):
    """Tracing is all that such a step costs; the state stays and steps on."""
    # Shapes that no other test has traced in this process.
    state, num_requests, num_rows = empty(name), B + 5, T + 11
    sizes = {"num_requests": num_requests, "num_rows": num_rows}
    buckets = jspec.Buckets(requests=(num_requests,), tokens=(num_rows,))
    jspec.warmup(state, buckets, strict=True)
    for slot in CONTEXTS:
        state = jspec.admit(state, slot, CONTEXTS[slot])
    step = layout(state, fitted(state, ROWS), **sizes)

    def refused(words, scheduled=step[0], verified=step[1], state=state, **kwargs):
        with backend_compiles() as compiled, pytest.raises(ValueError, match=words):
            jspec.step(state, scheduled, verified, **kwargs)
        assert not compiled

    wide = np.pad(step[0].block_table, ((0, 0), (0, 1)))
    refused("`block_table` is int32.*_per_request", dataclasses.replace(step[0], block_table=wide))
    caps = np.ones(num_requests, np.int32)
    refused("`max_drafts` is int32 .*None.*max_", dataclasses.replace(step[0], max_drafts=caps))
    wider = jspec.Verified(tokens=np.pad(step[1].tokens, ((0, 0), (0, 1))))
    refused("`verified.tokens` is .*Pad it", verified=wider)
    refused("`num_drafts=` is 0, .*Buckets.num_drafts", num_drafts=0)
    more = sizes | {"num_rows": num_rows + 1}
    unwarmed = layout(state, fitted(state, ROWS), **more)
    came = rf"`token_ids` is int32 \[{num_rows + 1}\]"
    refused(rf"step: {came} .*compiled int32 \[{num_rows}\]", *unwarmed)
    more = sizes | {"num_requests": num_requests + 1}
    refused("`query_start` is .*requests", *layout(state, [], **more))
    if step[0].hidden is not None:
        half = step[0].hidden.astype(jnp.bfloat16)
        words = "`hidden` is bfloat16 .* compiled float32 .*hidden_dtype"
        refused(words, dataclasses.replace(step[0], hidden=half))
    if method(name).init_params:
        half = jax.tree.map(lambda x: x.astype(jnp.bfloat16) if x.ndim > 1 else x, state.params)
        refused("`params` is .*warmup again", state=dataclasses.replace(state, params=half))
    batch = jspec.prepare(*unwarmed, vocab_size=state.config.vocab_size)
    with pytest.raises(ValueError, match=f"propose: {came}"):
        jspec.propose(state, batch)
    more = layout(state, [], num_requests=num_requests, num_rows=num_rows + 2)
    jax.eval_shape(lambda *step: jspec.step(state, *step)[1], *more)  # a caller's own jit

    jspec.warmup(state, buckets)
    with pytest.raises(UserWarning, match="step: `token_ids` is .*Until then this step compiles"):
        jspec.step(state, *unwarmed)
    with backend_compiles() as compiled:
        state, drafts = jspec.step(state, *step)
        jspec.propose(jspec.release(state, 3), jspec.prepare(*step))
    assert not compiled
    live = jax.tree.map(lambda x: np.asarray(x)[:B] if x.shape[0] > 1 else x, drafts)
    assert_same(live, drafts_of(fresh(name)))


def test_a_warmed_state_warns_once_of_each_shape_and_others_never():
    rows = T + 7  # of no other test
    state, other = fresh("ngram_gpu"), fresh("ngram_gpu")
    step = layout(state, num_rows=rows)
    jspec.warmup(state, jspec.Buckets(requests=(B,), tokens=(T,)))
    with pytest.warns(UserWarning, match="`token_ids`") as caught:
        state, _ = jspec.step(state, *step)
        state, drafts = jspec.step(state, *step)
    assert len(caught) == 1 and caught[0].filename == __file__
    assert np.asarray(drafts.num_drafts).shape == (B,)
    jspec.step(other, *layout(other, num_rows=rows + 1))


@pytest.mark.parametrize("name", HOST)
def test_a_host_drafter_takes_every_shape_after_a_strict_warmup(name):
    state = fresh(name)
    jspec.warmup(state, jspec.Buckets(requests=(B,), tokens=(T,)), strict=True)
    assert_same(drafts_of(state, num_rows=T + 1), drafts_of(fresh(name)))


@pytest.mark.parametrize("name", NAMES)
def test_buckets_that_do_not_fit_are_refused_before_anything_compiles(name):
    state = empty(name)

    def refused(error, words, buckets):
        with backend_compiles() as compiled, pytest.raises(error, match=words):
            jspec.warmup(state, buckets)
        assert not compiled

    refused(TypeError, "`buckets` is a tuple, wanted a Buckets", (4, 24))
    few = jspec.Buckets(requests=(4, 5, 8), tokens=(24,))
    refused(ValueError, "max_requests = 5. Leave 8 out", few)
    many = state.config.num_drafts + 1
    buckets = jspec.Buckets(requests=(4,), tokens=(24,), num_drafts=(many,))
    refused(ValueError, f"`num_drafts` is {many}, wanted", buckets)


@pytest.mark.parametrize("name", DEVICE)
def test_the_pure_core_refuses_what_is_not_its_own_when_it_is_traced(name):
    state = empty(name)
    scheduled, verified = layout(state, fitted(state, ROWS))
    batch = jspec.prepare(scheduled, verified)
    core, params, memory = jspec.pure(state.config), state.params, state.memory

    def refused(error, words, *arguments):
        with pytest.raises(error, match=words):
            jax.eval_shape(core, *arguments)

    refused(TypeError, "pure: `batch` is a Scheduled, wanted a Batch", params, memory, scheduled)
    whole = "pure: `memory` is a State, .*Pass state.params and state.memory"
    refused(TypeError, whole, params, state, batch)
    refused(TypeError, f"pure: `memory` is a dict, wanted the .* of {name}", params, {}, batch)
    if len(jax.tree.leaves(memory)[0].shape) > 2:  # sizes that the config chooses
        cut = jax.tree.map(lambda x: x[..., :-1] if x.ndim > 2 else x, memory)
        refused(ValueError, r"pure: `memory\S* has shape .*by the config", params, cut, batch)
    if batch.hidden is not None:
        unread = dataclasses.replace(batch, hidden=None)
        refused(ValueError, "pure: `hidden` is None.*hidden_layers", params, memory, unread)
    larger = jspec.CacheConfig(num_pages=3, page_size=8, max_model_len=16, dtype="bfloat16")
    other = jspec.init(state.config, params, cache=larger, max_requests=2)
    assert jax.eval_shape(core, params, other.memory, batch)[1].tokens.shape[0] == B


@pytest.mark.parametrize("name", some_slow(DEVICE))
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


@pytest.mark.parametrize("name", some_slow(DEVICE))
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


@pytest.mark.parametrize("name", some_slow(DEVICE))
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


@pytest.mark.parametrize("name", some_slow(DEVICE))
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
@pytest.mark.parametrize("name", some_slow(DEVICE))
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
