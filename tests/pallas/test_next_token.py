"""next_token: recorded cases, plain loops, padding, and numpy on the host."""

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jspec.axes import PAD_TOKEN
from jspec.pallas import next_token
from tests.support import recordings
from tests.support.op_runs import BACKENDS, KERNELS, POISON, assert_same, padded, run
from tests.support.oracles import ops

VOCAB = 10


def draw(rng, B: int, W: int):
    """Rows with holes, ids past the vocabulary and other negative ids than PAD."""
    sampled = rng.integers(-3, VOCAB + 3, (B, W))
    return sampled, rng.random(B) < 0.25, rng.integers(0, VOCAB, B)


@pytest.mark.parametrize("road", BACKENDS)
@recordings.each_case("eagle_prepare_next_token_padded")
def test_every_recorded_case_comes_out_exactly(road, case):
    _, given, want, scalars = case
    family = "eagle_prepare_next_token_padded"  # padded alike, so that few kernels are compiled
    most = recordings.largest(family, "in.sampled_token_ids") + 2
    widest = recordings.largest(family, "in.sampled_token_ids", axis=1)
    B = len(given["discard_request_mask"])
    sampled = given["sampled_token_ids"][:, : scalars["width"]]
    token, num_valid = run(
        next_token,
        road,
        padded(padded(sampled, B, widest, value=PAD_TOKEN), most, widest),
        padded(given["discard_request_mask"], most, value=True),
        padded(given["backup_next_token_ids"], most),
        vocab_size=scalars["vocab_size"],
        eager=True,
    )
    np.testing.assert_array_equal(token[:B], want["next_token_ids"])
    np.testing.assert_array_equal(num_valid[:B], want["valid_sampled_tokens_count"])
    assert (token[B:] == POISON).all() and not num_valid[B:].any()


@pytest.mark.parametrize("road", BACKENDS)
def test_the_last_valid_entry_counts_even_after_a_hole(road):
    sampled = [[5, 7, -1], [9, -1, -1], [-1, -1, -1], [3, 200, 4]]
    got = run(next_token, road, sampled, [False] * 4, [11, 12, 13, 14], vocab_size=100)
    assert_same(got, ([7, 9, 13, 4], [2, 1, 0, 2]))


@pytest.mark.parametrize("road", BACKENDS)
@pytest.mark.parametrize("B,W", [(1, 1), (3, 6), (130, 5)])
def test_any_size_matches_the_loop(road, B, W, rng):
    sampled, discard, backup = draw(rng, B, W)
    want = ops.next_token(sampled, discard, backup, vocab_size=VOCAB)
    assert_same(run(next_token, road, sampled, discard, backup, vocab_size=VOCAB), want)


@pytest.mark.parametrize("road", BACKENDS)
@given(data=st.data())
def test_any_contents_match_the_loop(road, data):
    ids = st.sampled_from([PAD_TOKEN, -2, 0, 1, VOCAB - 1, VOCAB, POISON])
    sampled = data.draw(st.lists(st.lists(ids, min_size=3, max_size=3), min_size=5, max_size=5))
    discard = data.draw(st.lists(st.booleans(), min_size=5, max_size=5))
    backup = [70, 71, 72, 73, 74]
    want = ops.next_token(sampled, discard, backup, vocab_size=VOCAB)
    assert_same(run(next_token, road, sampled, discard, backup, vocab_size=VOCAB), want)


@pytest.mark.parametrize("road", BACKENDS)
def test_permuting_the_requests_permutes_the_tokens(road, rng):
    args, order = draw(rng, 7, 5), rng.permutation(7)
    plain = run(next_token, road, *args, vocab_size=VOCAB)
    moved = run(next_token, road, *(x[order] for x in args), vocab_size=VOCAB)
    assert_same(moved, [x[order] for x in plain])


@pytest.mark.parametrize("road", BACKENDS)
def test_an_empty_batch_has_no_tokens(road):
    sampled, discard = np.zeros((0, 3)), np.zeros(0, bool)
    got = run(next_token, road, sampled, discard, np.zeros(0), vocab_size=VOCAB)
    assert [x.shape for x in got] == [(0,), (0,)]


def test_numpy_arrays_are_computed_by_numpy_alone(rng):
    sampled, discard, backup = draw(rng, 7, 5)
    got = next_token(sampled, discard, backup, vocab_size=VOCAB)
    assert all(type(x) is np.ndarray and x.dtype == np.int32 for x in got)
    assert_same(got, ops.next_token(sampled, discard, backup, vocab_size=VOCAB))


def test_one_jax_array_among_numpy_ones_makes_jax_compute(rng):
    sampled, discard, backup = draw(rng, 7, 5)
    args = sampled.astype(np.int32), discard, jnp.asarray(backup, jnp.int32)
    got = next_token(*args, vocab_size=VOCAB)
    assert all(isinstance(x, jnp.ndarray) for x in got)
    assert_same(got, ops.next_token(sampled, discard, backup, vocab_size=VOCAB))


@pytest.mark.parametrize("road", KERNELS)
def test_a_kernel_refuses_rows_that_it_would_unroll_too_far(road):
    args = np.zeros((1, 65)), np.zeros(1, bool), np.zeros(1)
    with pytest.raises(NotImplementedError, match='wider than 64.*Pass impl="xla"'):
        run(next_token, road, *args, vocab_size=VOCAB)
