"""N-gram lookup: the definition, both drafters step by step, and what is special on the host."""

import dataclasses
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import jspec
from jspec.axes import PAD_TOKEN
from jspec.proposers import find, ngram
from tests.support import recordings
from tests.support.oracles import ngram as oracle
from tests.support.steps import POISON, Row, make_step

METHODS = ["ngram", "ngram_gpu"]
MAX_LEN, B, T, K = 40, 5, 40, 3
CACHE = jspec.CacheConfig(num_pages=1, max_model_len=MAX_LEN)
LOOKUP = dict(num_drafts=K, min_n=1, max_n=3, max_model_len=MAX_LEN)


def started(method, *prompts, max_requests=B, vocab_size=None):
    """A state that holds one request per prompt, in slots 0, 1, ..."""
    config = find(method).Config(
        num_drafts=K, prompt_lookup_min=1, prompt_lookup_max=3, vocab_size=vocab_size
    )
    state = jspec.init(config, cache=CACHE, max_requests=max_requests)
    for slot, prompt in enumerate(prompts):
        state = jspec.admit(state, slot, prompt)
    return state


def layout(*rows):
    return make_step(
        rows, num_requests=B, num_rows=T, width=K + 1, pages_per_request=1, poison=True
    )


def stepped(state, *rows):
    """Runs a step; returns the drafts of each row as a list."""
    state, drafts = jspec.step(state, *layout(*rows))
    return state, as_lists(drafts)[: len(rows)]


def as_lists(drafts):
    tokens, counts = np.asarray(drafts.tokens), np.asarray(drafts.num_drafts)
    behind = np.arange(tokens.shape[1])[None] >= counts[:, None]
    assert (tokens[behind] == PAD_TOKEN).all() and (tokens[~behind] >= 0).all()
    return [row[:count].tolist() for row, count in zip(tokens, counts, strict=True)]


def searched(tokens, **kwargs):
    """Drafts for one context with the host search."""
    width = max(1, len(tokens))
    history = np.full((1, width), POISON, np.int32)
    history[0, : len(tokens)] = tokens
    found, count = ngram.propose_batch(history, np.array([len(tokens)], np.int32), **kwargs)
    return found[0, : count[0]].tolist()


def recorded(state, slot=0):
    """What the memory knows of a slot: the whole row up to its last token."""
    row = np.asarray(state.memory.history)[slot].tolist()
    while row and row[-1] == PAD_TOKEN:
        row.pop()
    return row


def expected(tokens):
    return oracle.draft(tokens, **LOOKUP)


# The definition.


@pytest.mark.parametrize(
    "tokens, min_n, max_n, num_drafts, wanted",
    [
        ([1, 2, 9, 1, 2, 8, 1, 2], 2, 2, 3, [9, 1, 2]),  # the earliest of equal matches
        ([5, 6, 1, 4, 5, 6, 2, 4, 5, 6], 1, 3, 2, [2, 4]),  # the longest match
        ([5, 6, 1, 4, 5, 6, 2, 4, 5, 6], 1, 2, 2, [1, 4]),  # up to max_n
        ([1, 1, 1, 1], 1, 2, 3, [1, 1]),  # a match may overlap the suffix
        ([1, 2, 1, 2, 1], 3, 3, 4, [2, 1]),
        ([1, 2, 3, 1, 2, 3, 1, 2, 3], 1, 9, 4, [1, 2, 3]),
        ([7, 7, 7, 7], 1, 3, 4, [7]),  # a larger max_n may shorten the draft
        ([1, 2, 3, 4], 2, 4, 3, []),
        ([7], 1, 3, 3, []),
        ([5, 6, 7, 5, 6], 4, 4, 3, []),
        ([0, 0, 0], 1, 3, 2, [0]),  # id 0 is ordinary
        ([], 1, 3, 2, []),
    ],
)
def test_the_longest_then_earliest_match_is_continued(tokens, min_n, max_n, num_drafts, wanted):
    kwargs = dict(num_drafts=num_drafts, min_n=min_n, max_n=max_n, max_model_len=100)
    assert searched(tokens, **kwargs) == wanted
    assert oracle.draft(tokens, **kwargs) == wanted


@pytest.mark.parametrize("max_model_len, wanted", [(6, [30]), (5, []), (4, []), (9, [30, 10, 20])])
def test_nothing_is_drafted_beyond_the_length_limit(max_model_len, wanted):
    kwargs = dict(num_drafts=4, min_n=2, max_n=2, max_model_len=max_model_len)
    assert searched([10, 20, 30, 10, 20], **kwargs) == wanted


@given(
    tokens=st.lists(st.integers(-1, 2), max_size=40),
    bounds=st.lists(st.integers(1, 9), min_size=2, max_size=2).map(sorted),
    num_drafts=st.integers(1, 6),
    max_model_len=st.integers(1, 45),
)
def test_the_linear_search_finds_what_the_definition_says(
    tokens, bounds, num_drafts, max_model_len
):
    kwargs = dict(
        num_drafts=num_drafts, min_n=bounds[0], max_n=bounds[1], max_model_len=max_model_len
    )
    assert searched(tokens, **kwargs) == oracle.draft(tokens, **kwargs)


@recordings.each_case("ngram_cpu_gpu")
def test_the_recorded_cpu_drafts_are_reproduced(case):
    _, given, want, scalars = case
    lengths = np.where(given["has_sampled"], given["num_tokens"], np.int32(0))
    limits = {name: scalars[name] for name in ("min_n", "max_n", "max_model_len")}
    tokens, count = ngram.propose_batch(
        given["token_ids"], lengths, num_drafts=scalars["k"], **limits
    )
    np.testing.assert_array_equal(tokens, want["cpu_drafts"])
    np.testing.assert_array_equal(count, want["cpu_num"])


# Configuration.


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    "low, high, resolved",
    [(None, None, (5, 5)), (2, None, (2, 2)), (None, 4, (4, 4)), (1, 3, (1, 3))],
)
def test_a_missing_bound_takes_the_other_or_five(method, low, high, resolved):
    Config = find(method).Config
    config = Config(num_drafts=2, prompt_lookup_min=low, prompt_lookup_max=high)
    assert (config.prompt_lookup_min, config.prompt_lookup_max) == resolved == config.bounds
    same = Config(num_drafts=2, prompt_lookup_min=resolved[0], prompt_lookup_max=resolved[1])
    assert config == same and hash(config) == hash(same)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    "changes, words",
    [
        (dict(num_drafts=0), "num_drafts.*0"),
        (dict(num_drafts=-2), "num_drafts.*-2"),
        (dict(num_drafts=2.5), "num_drafts.*2.5"),
        (dict(prompt_lookup_min=0), "prompt_lookup_min.*0"),
        (dict(prompt_lookup_max=0), "prompt_lookup_max.*0"),
        (dict(prompt_lookup_max=-1, prompt_lookup_min=1), "prompt_lookup_max.*-1"),
        (dict(prompt_lookup_min=4, prompt_lookup_max=3), "prompt_lookup_min.*4.*max.*3.*Lower"),
        (dict(vocab_size=0), "vocab_size.*0"),
    ],
)
def test_a_size_that_cannot_work_is_refused_by_name_and_value(method, changes, words):
    with pytest.raises(ValueError, match=f"{find(method).Config.__name__}.*{words}"):
        find(method).Config(**{"num_drafts": 3, **changes})


# Both drafters, step by step.


@pytest.mark.parametrize("method", METHODS)
def test_a_long_session_drafts_what_the_definition_says(method, rng):
    """Requests come, are read in chunks, verify drafts, miss steps, end and leave their slot."""
    state = started(method)
    known, unread = {}, {}

    def draw(n):
        return rng.integers(0, 3, n).tolist()

    for _ in range(150):
        for slot in range(B):
            if slot not in known and rng.random() < 0.5:
                known[slot] = draw(rng.integers(1, 13))
                unread[slot] = 0
                state = jspec.admit(state, slot, known[slot])
        rows, wanted = [], []
        for slot in rng.permutation(list(known))[: rng.integers(0, B + 1)].tolist():
            tokens = known[slot]
            start = unread.pop(slot, None)
            if start is not None and len(tokens) - start > 4:
                rows.append(Row(slot, tokens[: start + 4], (), draw(1), start, tokens[start + 4]))
                wanted.append([])
                unread[slot] = start + 4
                continue
            drafts = draw(rng.integers(0, K + 1)) if start is None else []
            kept = [*drafts[: rng.integers(0, len(drafts) + 1)], *draw(1)]
            rows.append(Row(slot, list(tokens), drafts, kept, start))
            tokens += kept
            wanted.append(expected(tokens))
        state, drafts = stepped(state, *rows)
        assert drafts == wanted
        for slot in [s for s in known if len(known[s]) >= MAX_LEN - K]:
            state = jspec.release(state, slot)
            del known[slot]


@pytest.mark.parametrize("method", METHODS)
def test_rejected_drafts_are_never_matched_or_copied(method):
    prompt = [1, 2, 3, 1]
    state = started(method, prompt)
    state, drafts = stepped(state, Row(0, prompt, drafts=[2, 8, 9], kept=[2, 5]))
    assert drafts == [[]]  # 5 is new
    assert recorded(state) == [*prompt, 2, 5]  # without 8 and 9
    state, drafts = stepped(state, Row(0, [*prompt, 2, 5], drafts=[8, 9], kept=[8, 9, 2]))
    assert drafts == [[3, 1, 2]]  # of 2: the first place, as (9, 2) did not occur before
    assert drafts == [expected([*prompt, 2, 5, 8, 9, 2])]


@pytest.mark.parametrize("method", METHODS)
def test_a_discarded_row_drafts_nothing_and_a_later_step_is_right(method):
    prompt = [1, 2, 3, 4, 1, 2]
    state = started(method, prompt)
    state, drafts = stepped(state, Row(0, prompt[:3], kept=[9], start=0, backup=prompt[3]))
    assert drafts == [[]]
    state, drafts = stepped(state, Row(0, prompt, kept=[3], start=3))
    assert drafts == [[4, 1, 2]]


@pytest.mark.parametrize("method", METHODS)
def test_a_prefix_cached_prompt_is_known_without_being_run(method):
    prompt = [1, 2, 3, 4, 1, 2]
    _, drafts = stepped(started(method, prompt), Row(0, prompt, kept=[3], start=5))
    assert drafts == [[4, 1, 2]]


@pytest.mark.parametrize("method", METHODS)
def test_a_reused_slot_shows_nothing_of_its_earlier_request(method):
    old = [6, 7, 8, 9, 6, 7, 8, 9, 6, 7]
    state, _ = stepped(started(method, old), Row(0, old, kept=[8], start=0))
    state = jspec.admit(jspec.release(state, 0), 0, [6])
    assert recorded(state) == [6]
    state, drafts = stepped(state, Row(0, [6], kept=[7], start=0))
    assert drafts == [[]]
    _, drafts = stepped(state, Row(0, [6, 7], kept=[6]))
    assert drafts == [[7, 6]]


@pytest.mark.parametrize("method", METHODS)
def test_drafts_end_where_the_longest_request_does(method):
    for length, room in ((MAX_LEN - 4, 3), (MAX_LEN - 3, 2), (MAX_LEN - 1, 0)):
        prompt = [4, 5] * MAX_LEN
        prompt = prompt[:length]
        kept = [4 + length % 2]
        _, drafts = stepped(started(method, prompt), Row(0, prompt, kept=kept))
        assert drafts == [expected([*prompt, *kept])]
        assert len(drafts[0]) == room


@pytest.mark.parametrize("method", METHODS)
def test_a_token_kept_past_the_longest_request_touches_no_other(method):
    full = ([1, 2] * MAX_LEN)[:MAX_LEN]
    other = [3, 4, 2]
    state = started(method, full, other)
    state, drafts = stepped(state, Row(0, full, kept=[7]), Row(1, other, kept=[3]))
    assert drafts == [[], [4, 2, 3]]
    assert [recorded(state, slot) for slot in (0, 1)] == [full, [*other, 3]]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    "ran, kept, wanted",
    [
        ([1, 7, 2, 7, 1], [7], [2, 7, 1]),
        ([1, 7, 2, 8, 1], [7], [2]),
        ([1, 7, -9, 3, 1], [7], []),
        ([1, 7, 2**31 - 1, 3, 1], [7], []),
    ],
)
def test_ids_outside_the_vocabulary_end_a_draft(method, ran, kept, wanted):
    state = started(method, [1], vocab_size=8)
    _, drafts = stepped(state, Row(0, ran, kept=kept, start=0))
    assert drafts == [wanted]


@pytest.mark.parametrize("method", METHODS)
def test_three_axis_positions_are_placed_by_token_index(method):
    prompt = [1, 2, 3, 4, 1, 2]
    scheduled, verified = layout(Row(0, prompt, drafts=[7], kept=[3], start=2))
    flat = jspec.step(started(method, prompt), scheduled, verified)[1]
    scheduled = dataclasses.replace(
        scheduled,
        positions=np.tile(scheduled.positions // 2, (3, 1)),
        token_index=scheduled.positions,
    )
    drafts = jspec.step(started(method, prompt), scheduled, verified)[1]
    assert as_lists(drafts) == as_lists(flat)
    assert as_lists(drafts)[0] == [4, 1, 2]


# On the host.


def test_jax_arrays_are_read_and_numpy_comes_back():
    prompt = [1, 2, 3, 1]
    state = started("ngram", prompt)
    step = jax.tree.map(jnp.asarray, layout(Row(0, prompt, kept=[2])))
    _, drafts = jspec.step(state, *step)
    assert all(type(leaf) is np.ndarray for leaf in jax.tree.leaves(drafts))
    assert as_lists(drafts)[0] == [3, 1, 2]


def test_memory_is_one_leaf_and_is_consumed_by_the_call():
    prompt = [1, 2, 3, 1]
    state = started("ngram", prompt)
    assert len(jax.tree.leaves(state.memory)) == 1
    after, _ = stepped(state, Row(0, prompt, kept=[2]))
    assert after.memory is state.memory


def test_propose_inside_jit_names_the_drafter_that_can():
    state = started("ngram", [1, 2])
    batch = jspec.prepare(*layout(Row(0, [1, 2], kept=[1])))
    with pytest.raises(TypeError, match="outside of jit.*ngram_gpu"):
        jax.jit(lambda b: ngram.propose(state.config, None, state.memory, b, 3)[1])(batch)


def test_a_row_does_not_depend_on_its_batch(rng, monkeypatch):
    monkeypatch.setattr(ngram, "_MIN_PARALLEL_TOKENS", 1)
    histories, lengths = oracle.contexts(rng, 64, 300)
    tokens, counts = ngram.propose_batch(histories, lengths, **LOOKUP)
    for b in range(64):
        alone = ngram.propose_batch(histories[b : b + 1], lengths[b : b + 1], **LOOKUP)
        np.testing.assert_array_equal(alone[0][0], tokens[b])
        assert alone[1][0] == counts[b]


def test_python_threads_may_search_at_the_same_time(rng, monkeypatch):
    monkeypatch.setattr(ngram, "_MIN_PARALLEL_TOKENS", 1)
    histories, lengths = oracle.contexts(rng, 64, 300)
    wanted = ngram.propose_batch(histories, lengths, **LOOKUP)
    with ThreadPoolExecutor(4) as pool:
        calls = [pool.submit(ngram.propose_batch, histories, lengths, **LOOKUP) for _ in range(40)]
        for call in calls:
            for got, want in zip(call.result(), wanted, strict=True):
                np.testing.assert_array_equal(got, want)


_THREADS = """
import numba, numpy as np
from jspec.proposers import ngram
ngram._MIN_PARALLEL_TOKENS = 1
rng = np.random.default_rng(0)
histories = rng.integers(0, 3, (64, 300)).astype(np.int32)
lengths = np.full(64, 300, np.int32)
results = []
for threads in (1, 8):
    numba.set_num_threads(threads)
    results.append(ngram.propose_batch(
        histories, lengths, num_drafts=4, min_n=1, max_n=9, max_model_len=302))
assert all((a == b).all() for a, b in zip(*results)) and results[0][1].max() == 2
"""


def test_one_thread_and_eight_find_the_same():
    environment = {**os.environ, "NUMBA_NUM_THREADS": "8", "JAX_PLATFORMS": "cpu"}
    subprocess.run([sys.executable, "-W", "error", "-c", _THREADS], env=environment, check=True)


def test_a_long_run_of_equal_tokens_takes_well_under_a_second():
    history, length = np.ones((1, 32_000), np.int32), np.array([32_000], np.int32)
    kwargs = dict(num_drafts=5, min_n=1, max_n=10, max_model_len=40_000)
    ngram.propose_batch(history, length, **kwargs)
    start = time.perf_counter()
    tokens, _ = ngram.propose_batch(history, length, **kwargs)
    assert time.perf_counter() - start < 0.2
    assert tokens.tolist() == [[1] * 5]


def test_an_install_without_a_writable_folder_still_compiles(monkeypatch):
    monkeypatch.setenv("HOME", "/proc/none")
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/none")
    scope = {}
    exec(compile("def double(x):\n    return 2 * x", "/proc/none/module.py", "exec"), scope)
    assert ngram._njit()(scope["double"])(21) == 42


def test_arrays_of_any_layout_share_one_compilation(rng):
    histories, lengths = oracle.contexts(rng, 6, 20)
    wanted = ngram.propose_batch(histories, lengths, **LOOKUP)
    for array in (np.asarray(jnp.asarray(histories)), np.asfortranarray(histories)):
        got = ngram.propose_batch(array, np.asarray(jnp.asarray(lengths)), **LOOKUP)
        np.testing.assert_array_equal(got[0], wanted[0])
    assert len(ngram._search_serially.signatures) == 1


@pytest.mark.parametrize(
    "changes, error, words",
    [
        (dict(histories=np.zeros((2, 4), np.int64)), TypeError, "histories.*int64.*int32"),
        (dict(histories=np.zeros(4, np.int32)), TypeError, r"histories.*\(4,\).*\[B, S\]"),
        (dict(histories=[[1, 2]]), TypeError, "histories.*list"),
        (dict(lengths=np.zeros((2, 1), np.int32)), TypeError, "lengths"),
        (dict(lengths=np.array([1, 5], np.int32)), ValueError, "lengths.*0 to 4"),
        (dict(lengths=np.array([1, -1], np.int32)), ValueError, "lengths.*-1"),
        (dict(lengths=np.array([1], np.int32)), ValueError, "lengths.*2 values"),
        (dict(num_drafts=0), ValueError, "num_drafts.*0"),
        (dict(max_model_len=0), ValueError, "max_model_len.*0"),
        (dict(min_n=4), ValueError, "min_n.*4.*max_n"),
    ],
)
def test_propose_batch_refuses_what_it_cannot_read(changes, error, words):
    good = dict(histories=np.zeros((2, 4), np.int32), lengths=np.ones(2, np.int32), **LOOKUP)
    with pytest.raises(error, match=words):
        ngram.propose_batch(**{**good, **changes})
