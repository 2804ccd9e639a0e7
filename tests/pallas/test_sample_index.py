"""sample_index: recorded cases, plain loops, padding, and numpy on the host."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jspec.pallas import sample_index
from tests.support import recordings
from tests.support.op_runs import BACKENDS, POISON, assert_same, padded, run
from tests.support.oracles import ops


def draw(rng, B: int):
    """Requests of 0 to 4 drafts, of which none to all were kept, some behind a longer prompt."""
    num_drafts = rng.integers(0, 5, B)
    num_valid = rng.integers(0, num_drafts + 2)
    query_start = np.cumsum([0, *(num_drafts + 1 + rng.integers(0, 2, B) * 7)])
    return np.cumsum(num_drafts), num_valid, query_start


@pytest.mark.parametrize("road", BACKENDS)
@recordings.each_case("eagle_prepare_inputs_padded")
def test_every_recorded_case_comes_out_exactly(road, case):
    _, given, want, scalars = case
    assert not scalars
    most = recordings.largest("eagle_prepare_inputs_padded", "in.cu_num_draft_tokens") + 2
    B, query_start = len(given["cu_num_draft_tokens"]), given["query_start_loc"]
    last_index, num_rejected = run(
        sample_index,
        road,
        padded(given["cu_num_draft_tokens"], most, value=given["cu_num_draft_tokens"][-1]),
        padded(given["valid_sampled_tokens_count"], most),
        padded(query_start, most + 1, value=query_start[-1]),
    )
    np.testing.assert_array_equal(last_index[:B], want["token_indices_to_sample"])
    np.testing.assert_array_equal(num_rejected[:B], want["num_rejected_tokens"])
    assert (last_index[B:] == query_start[-1] - 1).all() and not num_rejected[B:].any()


@pytest.mark.parametrize("road", BACKENDS)
def test_rejected_rows_lie_between_the_index_and_the_end(road):
    got = run(sample_index, road, [2, 2, 5], [1, 1, 4], [0, 3, 4, 8])
    assert_same(got, ([0, 3, 7], [2, 0, 0]))


@pytest.mark.parametrize("road", BACKENDS)
def test_a_request_that_keeps_nothing_points_before_its_first_row(road):
    got = run(sample_index, road, [3, 5], [0, 0], [0, 4, 7])
    assert_same(got, ([-1, 3], [4, 3]))


@pytest.mark.parametrize("road", BACKENDS)
@pytest.mark.parametrize("B", [1, 3, 130])
def test_any_size_matches_the_loop(road, B, rng):
    args = draw(rng, B)
    assert_same(run(sample_index, road, *args), ops.sample_index(*args))


@pytest.mark.parametrize("road", BACKENDS)
@given(rows=st.lists(st.tuples(st.integers(0, 4), st.integers(0, 5)), min_size=5, max_size=5))
def test_any_contents_match_the_loop(road, rows):
    num_drafts = np.array([drafts for drafts, _ in rows])
    args = np.cumsum(num_drafts), [kept for _, kept in rows], np.cumsum([0, *num_drafts + 1])
    assert_same(run(sample_index, road, *args), ops.sample_index(*args))


@pytest.mark.parametrize("road", BACKENDS)
def test_an_empty_batch_has_no_rows(road):
    got = run(sample_index, road, np.zeros(0), np.zeros(0), np.zeros(1))
    assert [x.shape for x in got] == [(0,), (0,)]


def test_numpy_arrays_are_computed_by_numpy_alone(rng):
    args = draw(rng, 7)
    got = sample_index(*args)
    assert all(type(x) is np.ndarray and x.dtype == np.int32 for x in got)
    assert_same(got, ops.sample_index(*args))


def test_numpy_counts_of_a_padded_request_are_its_own(rng):
    num_valid = np.array([2, POISON], np.int32)
    got = sample_index(np.array([3, 3]), num_valid, np.array([0, 4, 4]))
    assert_same(got, ([1, 3], [2, 0]))
