"""expand_dflash: recorded cases, plain loops, the limits of a model and of a table, padding."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jspec.axes import PAD_SLOT
from jspec.pallas import expand_dflash
from tests.support import recordings
from tests.support.op_runs import BACKENDS, POISON, assert_same, bucket, padded, run
from tests.support.oracles import ops

STATIC = dict(num_drafts=3, page_size=4, mask_token=7, pad_token=3)


def draw(rng, B: int, T: int, M: int, longest: int = 6):
    """A ragged context of B requests in T rows, with rejected tails; rows left over are poison."""
    query_len = rng.integers(1, longest + 1, B)
    query_len[-1] = min(query_len[-1], 1)
    query_start = np.cumsum([0, *query_len])
    positions = np.full(T, POISON)
    for begin, length in zip(query_start, query_len, strict=False):
        positions[begin : begin + length] = rng.integers(0, 20) + np.arange(length)
    next_token, table = rng.integers(1000, 1999, B), rng.integers(0, 50, (B, M))
    return next_token, positions, query_start, table, rng.integers(0, query_len)


@pytest.mark.parametrize("road", BACKENDS)
@recordings.each_case("copy_and_expand_dflash_inputs")
def test_every_recorded_case_comes_out_exactly(road, case):
    _, given, want, scalars = case
    family = "copy_and_expand_dflash_inputs"  # padded alike, so that few kernels are compiled
    pad = recordings.largest(family, "in.next_token_ids") + 1
    num_rows = bucket(len(given["target_positions"]))
    widest = recordings.largest(family, "in.block_table", axis=1)
    B, T = len(given["next_token_ids"]), len(given["target_positions"])
    W = scalars["num_speculative_tokens"] + 1
    assert scalars["has_num_rejected"] == ("num_rejected_tokens" in given)
    rejected = given.get("num_rejected_tokens", np.zeros(B, int))
    table = given["block_table"]
    is_narrow = (given["target_positions"].max() + W) // scalars["block_size"] >= table.shape[1]
    if not is_narrow:  # as wide as the others; a narrow one stays, as its last page answers
        table = np.pad(table, [(0, 0), (0, widest - table.shape[1])], constant_values=POISON)
    rows = run(
        expand_dflash,
        road,
        padded(given["next_token_ids"], pad),
        padded(given["target_positions"], num_rows),
        padded(given["query_start_loc"], pad + 1, value=given["query_start_loc"][-1]),
        padded(table, pad, table.shape[1]),
        padded(rejected, pad),
        num_drafts=W - 1,
        page_size=scalars["block_size"],
        mask_token=scalars["parallel_drafting_token_id"],
    )
    np.testing.assert_array_equal(rows.token_ids[: B * W], want["input_ids"][: B * W])
    np.testing.assert_array_equal(rows.query_positions[: B * W], want["query_positions"][: B * W])
    np.testing.assert_array_equal(rows.query_slots[: B * W], want["query_slot_mapping"][: B * W])
    np.testing.assert_array_equal(rows.context_positions[:T], want["context_positions"][:T])
    np.testing.assert_array_equal(rows.context_slots[:T], want["context_slot_mapping"][:T])
    index = want["token_indices"][: B * (W - 1)].reshape(B, -1)
    np.testing.assert_array_equal(rows.sample_index[:B], index)

    assert not rows.token_ids[B * W :].any() and not rows.query_positions[B * W :].any()
    assert not rows.context_positions[T:].any()
    assert (rows.query_slots[B * W :] == PAD_SLOT).all()
    assert (rows.context_slots[T:] == PAD_SLOT).all()


@pytest.mark.parametrize("road", BACKENDS)
def test_query_rows_count_on_from_the_last_accepted_position(road):
    context = [50, 60], [0, 1, 2, 6, 7], [0, 3, 5], [[3, 4, 0], [8, 9, 10]]
    static = dict(num_drafts=2, page_size=4, mask_token=99)
    rows = run(expand_dflash, road, *context, [0, 0], **static)
    want = {
        "token_ids": [50, 99, 99, 60, 99, 99],
        "query_positions": [3, 4, 5, 8, 9, 10],
        "query_slots": [15, 16, 17, 40, 41, 42],
        "context_positions": [0, 1, 2, 6, 7],
        "context_slots": [12, 13, 14, 38, 39],
        "sample_index": [1, 2, 4, 5],
    }
    assert_same(rows, want)
    rows = run(expand_dflash, road, *context, [1, 0], **static)
    assert rows.query_positions.tolist() == [2, 3, 4, 8, 9, 10]


@pytest.mark.parametrize("road", ["xla", "interpret"])
def test_without_rejected_counts_nothing_was_rejected(road, rng):
    *context, _ = draw(rng, 3, 15, 5)
    plain = run(expand_dflash, road, *context, **STATIC)
    assert_same(plain, run(expand_dflash, road, *context, [0, 0, 0], **STATIC)._asdict())


@pytest.mark.parametrize("road", BACKENDS)
@pytest.mark.parametrize(
    "B,T,M,max_model_len", [(1, 1, 1, None), (5, 31, 4, 18), (130, 800, 9, None)]
)
def test_any_size_matches_the_loop(road, B, T, M, max_model_len, rng):
    args, static = draw(rng, B, T, M), STATIC | {"max_model_len": max_model_len}
    assert_same(run(expand_dflash, road, *args, **static), ops.expand_dflash(*args, **static))


@pytest.mark.parametrize("road", BACKENDS)
@given(data=st.data())
def test_any_ragged_context_matches_the_loop(road, data):
    query_len = data.draw(st.lists(st.integers(0, 4), min_size=5, max_size=5))
    rejected = [data.draw(st.integers(0, length)) for length in query_len]
    pages = st.lists(st.integers(-1, 9), min_size=3, max_size=3)
    table = data.draw(st.lists(pages, min_size=5, max_size=5))
    args = list(range(900, 905)), list(range(20)), np.cumsum([0, *query_len]), table, rejected
    static = STATIC | {"max_model_len": data.draw(st.sampled_from([None, 9]))}
    assert_same(run(expand_dflash, road, *args, **static), ops.expand_dflash(*args, **static))


@pytest.mark.parametrize("road", BACKENDS)
def test_past_the_model_limit_rows_keep_the_last_position_and_no_slot(road):
    args = [5], [6, 7, 8], [0, 3], [[2, 4, 6]], [1]
    rows = run(expand_dflash, road, *args, **STATIC, max_model_len=10)
    assert rows.query_positions.tolist() == [8, 9, 9, 9]
    assert rows.query_slots.tolist() == [24, 25, PAD_SLOT, PAD_SLOT]
    assert rows.context_slots.tolist() == [18, 19, PAD_SLOT]


@pytest.mark.parametrize("road", BACKENDS)
def test_permuting_the_requests_permutes_their_query_rows(road, rng):
    args, order = draw(rng, 4, 20, 5), [2, 0, 3, 1]
    next_token, positions, query_start, table, rejected = args
    parts = np.split(positions, query_start[1:])
    moved_positions = np.concatenate([*(parts[r] for r in order), parts[-1]])
    moved_start = np.cumsum([0, *np.diff(query_start)[order]])
    moved = next_token[order], moved_positions, moved_start, table[order], rejected[order]
    plain = run(expand_dflash, road, *args, **STATIC)
    permuted = run(expand_dflash, road, *moved, **STATIC)
    for name in ("token_ids", "query_positions", "query_slots"):
        x, y = getattr(plain, name), getattr(permuted, name)
        np.testing.assert_array_equal(y.reshape(4, -1), x.reshape(4, -1)[order], err_msg=name)


@pytest.mark.parametrize("road", BACKENDS)
@pytest.mark.parametrize("B,T", [(0, 4), (3, 0), (0, 0)])
def test_a_step_without_requests_or_rows_is_all_padding(road, B, T):
    args = np.ones(B), np.ones(T), np.zeros(B + 1), np.ones((B, 2)), np.zeros(B)
    want = ops.expand_dflash(*(x.astype(int).tolist() for x in args), **STATIC)
    assert_same(run(expand_dflash, road, *args, **STATIC), want)
