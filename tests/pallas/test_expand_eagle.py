"""expand_eagle: recorded cases, plain loops, padded requests, where hidden states go."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jspec.axes import PAD_SLOT
from jspec.pallas import expand_eagle
from tests.support import recordings
from tests.support.op_runs import BACKENDS, POISON, assert_same, bucket, padded, run
from tests.support.oracles import ops


def draw(rng, B: int, T: int, longest: int = 6):
    """A ragged step of B requests in T rows, with rejected tails; rows left over are poison."""
    query_len = rng.integers(1, longest + 1, B)
    query_len[-1] = min(query_len[-1], 1)
    query_start = np.cumsum([0, *query_len])
    assert query_start[-1] <= T
    positions = np.full(T, POISON)
    for r, (begin, length) in enumerate(zip(query_start, query_len, strict=False)):
        positions[begin : begin + length] = 10 * r + np.arange(length)
    token_ids = rng.integers(100, 999, T)
    token_ids[query_start[-1] :] = POISON
    last_index = query_start[1:] - 1 - rng.integers(0, query_len)
    return token_ids, positions, rng.integers(1000, 1999, B), query_start, last_index


MASK, PAD = -5, -6  # stand-ins for each case's own ids, so that its kernel need not compile anew


@pytest.mark.parametrize("road", BACKENDS)
@recordings.each_case("copy_and_expand_eagle_inputs")
def test_every_recorded_case_comes_out_exactly(road, case):
    _, given, want, scalars = case
    family = "copy_and_expand_eagle_inputs"  # padded alike, so that few kernels are compiled
    T = bucket(len(given["target_token_ids"]))
    B = recordings.largest(family, "in.query_end_loc") + 1
    query_start, last_index = given["query_start_loc"], given["query_end_loc"]
    shift, num_slots = bool(scalars["shift_input_ids"]), scalars["num_padding_slots_per_request"]
    rows = run(
        expand_eagle,
        road,
        padded(given["target_token_ids"], T),
        padded(given["target_positions"], T),
        padded(given["next_token_ids"], B),
        padded(query_start, B + 1, value=query_start[-1]),
        padded(last_index, B),
        num_slots=num_slots,
        shift=shift,
        mask_token=MASK,
        pad_token=PAD,
    )
    token_ids = np.where(
        rows.token_ids == MASK, scalars["parallel_drafting_token_id"], rows.token_ids
    )
    token_ids = np.where(rows.token_ids == PAD, scalars["padding_token_id"], token_ids)
    live, num_requests = scalars["total_output_tokens"], len(last_index)
    np.testing.assert_array_equal(token_ids[:live], want["input_ids"][:live])
    np.testing.assert_array_equal(rows.positions[:live], want["positions"][:live])
    np.testing.assert_array_equal(rows.rejected_mask[:live], want["is_rejected_token_mask"][:live])
    np.testing.assert_array_equal(rows.masked_mask[:live], want["is_masked_token_mask"][:live])
    index = want["new_token_indices"][: num_requests * num_slots].reshape(-1, num_slots)
    # Where even the first token of a shifted request was rejected there is no next token to index.
    written = index != -7777
    assert written[:, 1:].all()
    np.testing.assert_array_equal(written[:, 0], last_index >= query_start[:-1] + shift - 1)
    np.testing.assert_array_equal(rows.sample_index[:num_requests][written], index[written])
    mapping = want["hidden_state_mapping"] if shift else PAD_SLOT
    np.testing.assert_array_equal(rows.hidden_index[: query_start[-1]], mapping)

    assert (rows.token_ids[live:] == PAD).all()
    assert not rows.positions[live:].any() and not rows.sample_index[num_requests:].any()
    assert rows.rejected_mask[live:].all() and not rows.masked_mask[live:].any()
    assert (rows.hidden_source[live:] == PAD_SLOT).all()
    assert (rows.hidden_index[query_start[-1] :] == PAD_SLOT).all()


@pytest.mark.parametrize("road", BACKENDS)
def test_shifted_requests_get_the_next_token_and_masks_behind_the_accepted_ones(road):
    args = [10, 11, 12, 13, 20, 21], [4, 5, 6, 7, 0, 1], [100, 200], [0, 4, 6], [1, 5]
    rows = run(expand_eagle, road, *args, num_slots=3, shift=True, mask_token=99)
    want = {
        "token_ids": [11, 100, 99, 99, 0, 0, 21, 200, 99, 99],
        "positions": [4, 5, 6, 7, 0, 0, 0, 1, 2, 3],
        "rejected_mask": [i in (4, 5) for i in range(10)],
        "masked_mask": [i in (2, 3, 8, 9) for i in range(10)],
        "sample_index": [1, 2, 3, 7, 8, 9],
        "hidden_index": [0, 1, 2, 3, 6, 7],
        "hidden_source": [0, 1, -1, -1, -1, -1, 4, 5, -1, -1],
    }
    assert_same(rows, want)


@pytest.mark.parametrize("road", BACKENDS)
def test_a_draft_model_gets_each_request_whole_with_one_row_more(road):
    args = [10, 11, 12, 20, 21, 22], [0, 1, 2, 7, 8, 9], [100, 200], [0, 3, 6], [2, 4]
    rows = run(expand_eagle, road, *args, num_slots=1, shift=False, mask_token=99)
    want = {
        "token_ids": [10, 11, 12, 100, 20, 21, 200, 0],
        "positions": [0, 1, 2, 3, 7, 8, 9, 0],
        "rejected_mask": [i == 7 for i in range(8)],
        "masked_mask": [False] * 8,
        "sample_index": [3, 6],
        "hidden_index": [PAD_SLOT] * 6,
        "hidden_source": [PAD_SLOT] * 8,
    }
    assert_same(rows, want)


@pytest.mark.parametrize("road", BACKENDS)
@pytest.mark.parametrize(
    "B,T,num_slots,shift", [(1, 1, 1, True), (5, 31, 4, True), (130, 800, 3, False)]
)
def test_any_size_matches_the_loop(road, B, T, num_slots, shift, rng):
    args = draw(rng, B, T)
    static = dict(num_slots=num_slots, shift=shift, mask_token=7, pad_token=3)
    assert_same(run(expand_eagle, road, *args, **static), ops.expand_eagle(*args, **static))


@pytest.mark.parametrize("road", BACKENDS)
@given(data=st.data())
def test_any_ragged_step_matches_the_loop(road, data):
    query_len = data.draw(st.lists(st.integers(0, 4), min_size=5, max_size=5))
    query_start = np.cumsum([0, *query_len])
    rejected = [data.draw(st.integers(0, length)) for length in query_len]
    args = range(100, 120), range(40, 60), range(900, 905), query_start
    args = *map(list, args), query_start[1:] - 1 - rejected
    for static in (dict(num_slots=3, shift=True), dict(num_slots=1, shift=True)):
        want = ops.expand_eagle(*args, **static, mask_token=7)
        assert_same(run(expand_eagle, road, *args, **static, mask_token=7), want)


@pytest.mark.parametrize("road", BACKENDS)
def test_a_padded_request_between_two_others_leaves_their_rows_alone(road, rng):
    args = draw(rng, 2, 12)
    static = dict(num_slots=3, shift=True, mask_token=7)
    token_ids, positions, next_token, query_start, last_index = args
    between = (
        token_ids,
        positions,
        np.insert(next_token, 1, POISON),
        np.insert(query_start, 1, query_start[1]),
        np.insert(last_index, 1, POISON),
    )
    plain = run(expand_eagle, road, *args, **static)
    mixed = run(expand_eagle, road, *between, **static)
    cut = query_start[1] + 2  # where the first request's rows end; the padded one's two follow
    for name in ("token_ids", "positions", "rejected_mask", "masked_mask", "hidden_source"):
        x, y = getattr(plain, name), getattr(mixed, name)
        np.testing.assert_array_equal(np.delete(y, [cut, cut + 1]), x, err_msg=name)
    assert mixed.rejected_mask[cut : cut + 2].all() and not mixed.sample_index[1].any()


@pytest.mark.parametrize("road", BACKENDS)
@pytest.mark.parametrize("B,T", [(0, 4), (3, 0), (0, 0)])
def test_a_step_without_requests_or_rows_is_all_padding(road, B, T):
    args = np.ones(T), np.ones(T), np.ones(B), np.zeros(B + 1), np.zeros(B)
    static = dict(num_slots=2, shift=False, mask_token=7, pad_token=3)
    want = ops.expand_eagle(*(x.astype(int).tolist() for x in args), **static)
    assert_same(run(expand_eagle, road, *args, **static), want)
