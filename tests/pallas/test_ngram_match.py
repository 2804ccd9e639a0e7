"""ngram_match: recorded cases, the definition, rows read in place, and the host's two searches."""

import functools
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jspec.axes import PAD_SLOT, PAD_TOKEN
from jspec.pallas import _backend, _dispatch
from jspec.pallas.ngram_match import ngram_match
from jspec.proposers import ngram
from tests.support import recordings
from tests.support.op_runs import BACKENDS, KERNELS, POISON, assert_same, padded, run
from tests.support.oracles import ngram as oracle

LOOKUP = dict(min_n=1, max_n=3, num_drafts=4)


def defined(token_ids, lengths, mask, *, num_drafts, **bounds):
    """What the definition drafts: (drafts, num_valid) of rows that hold no PAD."""
    drafts = np.full((len(lengths), num_drafts), PAD_TOKEN)
    for b in np.flatnonzero(mask):
        known = token_ids[b, : lengths[b]].tolist()
        found = oracle.draft(known, num_drafts=num_drafts, **bounds)
        drafts[b, : len(found)] = found
    return drafts, (drafts != PAD_TOKEN).sum(axis=1)


@pytest.mark.parametrize("road", KERNELS)
@recordings.each_case("ngram_cpu_gpu")
def test_the_kernel_reproduces_recorded_matches(road, case):
    _, given, want, scalars = case
    lengths = given["num_tokens"]
    mask = given["has_sampled"] & (lengths >= scalars["min_n"])
    sizes = dict(min_n=scalars["min_n"], max_n=scalars["max_n"], num_drafts=scalars["k"])
    got = run(ngram_match, road, given["token_ids"], lengths, mask, **sizes)
    assert_same(got, (want["gpu_drafts"], want["gpu_num"]))


@pytest.mark.parametrize("road", BACKENDS)
@pytest.mark.parametrize(
    "B, width, bounds", [(1, 1, (1, 1)), (7, 40, (2, 3)), (3, 1100, (1, 5)), (2, 300, (3, 16))]
)
def test_any_size_matches_the_definition(road, B, width, bounds, rng):
    token_ids, lengths = oracle.contexts(rng, B, width)
    mask = rng.random(B) < 0.8
    kwargs = dict(min_n=bounds[0], max_n=bounds[1], num_drafts=5)
    got = run(ngram_match, road, token_ids, lengths, mask, **kwargs)
    assert got[0].dtype == got[1].dtype == np.int32
    assert_same(got, defined(token_ids, lengths, mask, **kwargs))


@pytest.mark.parametrize("road", BACKENDS)
@given(data=st.data())
def test_any_contents_match_the_definition(road, data):
    tokens = st.lists(st.integers(0, 2), min_size=12, max_size=12)
    token_ids = np.array(data.draw(st.lists(tokens, min_size=4, max_size=4)), np.int32)
    lengths = np.array(data.draw(st.lists(st.integers(0, 12), min_size=4, max_size=4)), np.int32)
    mask = np.array(data.draw(st.lists(st.booleans(), min_size=4, max_size=4)))
    got = run(ngram_match, road, token_ids, lengths, mask, **LOOKUP)
    assert_same(got, defined(token_ids, lengths, mask, **LOOKUP))


@pytest.mark.parametrize("road", BACKENDS)
def test_requests_read_their_rows_in_place_and_unused_rows_are_never_read(road, rng):
    token_ids, lengths = oracle.contexts(rng, 6, 30)
    mask = np.ones(6, bool)
    rows = np.array([8, 0, 5, 3, 7, 1], np.int32)
    table = np.full((9, 40), POISON, np.int32)
    behind = np.arange(30)[None] >= lengths[:, None]
    table[rows, :30] = np.where(behind, POISON, token_ids)
    got = run(ngram_match, road, table, lengths, mask, rows, **LOOKUP)
    assert_same(got, defined(token_ids, lengths, mask, **LOOKUP))


@pytest.mark.parametrize("road", BACKENDS)
@pytest.mark.parametrize("slot", [PAD_SLOT, 2, 2**31 - 1, -(2**31)])
def test_a_row_that_does_not_exist_drafts_nothing(road, slot):
    token_ids, rows = np.ones((2, 8), np.int32), np.array([1, slot], np.int32)
    lengths, mask = np.array([8, 8], np.int32), np.ones(2, bool)
    got = run(ngram_match, road, token_ids, lengths, mask, rows, **LOOKUP)
    assert_same(got, ([[1] * 4, [-1] * 4], [4, 0]))


@pytest.mark.parametrize("road", BACKENDS)
def test_a_length_outside_the_row_is_cut_to_it(road):
    token_ids, lengths = np.full((3, 6), 7), np.array([POISON, -POISON, 0])
    got = run(ngram_match, road, token_ids, lengths, np.ones(3, bool), **LOOKUP)
    assert_same(got, ([[7, 7, 7, -1], [-1] * 4, [-1] * 4], [3, 0, 0]))


@pytest.mark.parametrize("road", BACKENDS)
def test_a_hole_in_the_source_ends_the_count_of_leading_drafts(road):
    token_ids = [[1, 2, PAD_TOKEN, 3, 1]]
    got = run(ngram_match, road, token_ids, [5], [True], **LOOKUP)
    assert_same(got, ([[2, PAD_TOKEN, 3, 1]], [1]))


@pytest.mark.parametrize("road", BACKENDS)
def test_permuting_the_requests_permutes_the_drafts(road, rng):
    args, order = (*oracle.contexts(rng, 7, 20), rng.random(7) < 0.8), rng.permutation(7)
    plain = run(ngram_match, road, *args, **LOOKUP)
    moved = run(ngram_match, road, *(x[order] for x in args), **LOOKUP)
    assert_same(moved, [x[order] for x in plain])


@pytest.mark.parametrize("road", BACKENDS)
def test_an_empty_batch_has_no_drafts(road):
    args = np.zeros((0, 8)), np.zeros(0), np.zeros(0, bool)
    assert [x.shape for x in run(ngram_match, road, *args, **LOOKUP)] == [(0, 4), (0,)]


# The searches of the host: vector code first, linear time where that does not pay.


def contexts_of_every_kind(rng):
    """Yields contexts that span many blocks of the vectorised search."""
    for length in (1, 2, 63, 64, 65, 129, 700):
        yield np.full(length, 7)
        yield np.arange(length) % 5
        for vocabulary in (2, 3, 50):
            yield rng.integers(0, vocabulary, length)
        half = rng.integers(0, 10_000, (length + 1) // 2)
        yield np.concatenate([half, half])[:length]


@pytest.mark.parametrize("min_n, max_n", [(1, 1), (1, 4), (5, 5), (2, 30), (1, 1000)])
def test_both_searches_of_the_host_find_what_the_definition_says(rng, min_n, max_n):
    for tokens in contexts_of_every_kind(rng):
        known, length = tokens.astype(np.int32), len(tokens)
        end = ngram._match_end(known, length, min_n, max_n)
        most = min(max_n, length - 1)
        if most >= min_n:
            assert end == ngram._match_end_in_linear_time(known, length, min_n, most)
        wanted = oracle.draft(tokens.tolist(), num_drafts=1, min_n=min_n, max_n=max_n)
        assert ([] if end < 0 else [tokens[end]]) == wanted


@pytest.mark.parametrize("road", BACKENDS)
def test_host_and_device_agree_on_long_contexts(road, rng):
    contexts = [x for x in contexts_of_every_kind(rng) if len(x) > 100]
    lengths = np.array([len(x) for x in contexts], np.int32)
    token_ids = np.stack([padded(x, 704) for x in contexts]).astype(np.int32)
    kwargs = dict(min_n=2, max_n=16, num_drafts=5)
    got = run(ngram_match, road, token_ids, lengths, np.ones(len(lengths), bool), **kwargs)
    assert_same(got, ngram.propose_batch(token_ids, lengths, max_model_len=1000, **kwargs))


# What is refused, and how the kernel lowers.


@pytest.mark.parametrize(
    "changes, error, words",
    [
        (dict(token_ids=np.zeros(8, np.int32)), ValueError, r"token_ids.*\(8,\).*\[B, S\]"),
        (dict(token_ids=np.zeros((2, 0), np.int32)), ValueError, r"token_ids.*\(2, 0\).*column"),
        (dict(token_ids=np.zeros((2, 8))), TypeError, "token_ids.*float64.*int32"),
        (dict(token_ids=[[1, 2]]), TypeError, "token_ids.*list.*Pass jnp.asarray"),
        (dict(seq_lens=np.ones(3, np.int32)), ValueError, "seq_lens.*Pad or slice"),
        (dict(mask=np.ones(2, np.int32)), TypeError, "mask.*wanted bool"),
        (dict(rows=np.zeros(3, np.int32)), ValueError, "rows.*Pad or slice"),
        (dict(num_drafts=0), ValueError, "num_drafts.*0"),
        (dict(num_drafts=2.5), TypeError, "num_drafts.*2.5.*Pass a plain int"),
        (dict(min_n=0), ValueError, "min_n.*0"),
        (dict(min_n=4), ValueError, "min_n.*4.*max_n.*3.*Lower"),
        (dict(impl="cuda"), ValueError, "impl.*cuda.*auto"),
        (dict(impl="pallas"), NotImplementedError, 'needs a CUDA GPU.*Pass impl="xla"'),
        (dict(max_n=17, token_ids=np.zeros((2, 20), np.int32), impl="interpret"),)
        + (NotImplementedError, 'longer than 16.*Pass impl="xla"'),
    ],
)
def test_what_the_op_cannot_read_is_refused_by_name(changes, error, words, as_users_run_it):
    good = dict(
        token_ids=np.zeros((2, 8), np.int32), seq_lens=np.ones(2, np.int32), mask=np.ones(2, bool)
    )
    with pytest.raises(error, match=f"ngram_match: .*{words}"):
        ngram_match(**{**good, **LOOKUP, **changes})


def test_a_length_and_place_that_do_not_fit_an_int32_are_refused():
    args = np.zeros((1, 50_000), np.int32), np.ones(1, np.int32), np.ones(1, bool)
    with pytest.raises(ValueError, match="max_n.*50000.*wanted at most 42948.*Lower max_n"):
        ngram_match(*args, min_n=1, max_n=50_000, num_drafts=1)


@pytest.fixture
def on_an_h200(monkeypatch):
    """Makes the default device look like a GPU where the kernel wins; nothing can run there."""
    device = SimpleNamespace(platform="gpu", device_kind="NVIDIA H200")
    monkeypatch.setattr(_dispatch, "_default_device", lambda: device)
    monkeypatch.setitem(_dispatch._WINNERS, device.device_kind, {"ngram_match": "triton"})


def test_auto_takes_xla_where_the_kernel_does_not_fit(rng, on_an_h200):
    token_ids, lengths = oracle.contexts(rng, 3, 40)
    kwargs = dict(min_n=1, max_n=20, num_drafts=2)
    op = jax.jit(functools.partial(ngram_match, **kwargs))
    got = op(token_ids, lengths, np.ones(3, bool))
    assert_same(got, defined(token_ids, lengths, np.ones(3, bool), **kwargs))


@pytest.mark.parametrize(
    "lowering, target", [("triton", "__gpu$xla.gpu.triton"), ("mosaic", "mosaic_gpu")]
)
def test_the_kernel_lowers_for_a_gpu_that_is_not_there(lowering, target, on_an_h200):
    device = jax.sharding.AbstractDevice(device_kind="NVIDIA H200", num_cores=None, platform="gpu")
    mesh = jax.sharding.AbstractMesh((), (), abstract_device=device)
    op = jax.jit(functools.partial(ngram_match, **LOOKUP, impl="pallas"))
    args = jnp.ones((9, 64), jnp.int32), jnp.ones(4, jnp.int32), jnp.ones(4, bool)
    with jax.sharding.use_abstract_mesh(mesh), _backend.use_lowering(lowering):
        traced = op.trace(*args, jnp.ones(4, jnp.int32))
        module = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert module.count("custom_call") == module.count(f"custom_call @{target}") == 1
    assert "jspec_ngram_match" in module
