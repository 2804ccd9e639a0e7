"""First passes against the recordings and plain loops, and what they refuse."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jspec.metadata import (
    compute_new_slot_mapping,
    prepare_inputs,
    set_inputs_first_pass,
    set_inputs_first_pass_dflash,
)
from tests.support import recordings
from tests.support.batches import (
    POISON,
    SHAPE,
    assert_counts,
    ints,
    metadata_of,
    padded,
    unchecked,
)
from tests.support.oracles import metadata as oracle


def first_pass_of(given_, scalars):
    metadata = metadata_of(
        given_["query_start_loc"], given_["seq_lens"], given_["block_table"], given_["slot_mapping"]
    )
    arrays = {
        "positions": given_["target_positions"],
        "next_token": given_["next_token_ids"],
        "metadata": metadata,
        "num_rejected": given_.get("num_rejected_tokens"),
    }
    if scalars["path"] == "dflash":
        block = functools.partial(
            set_inputs_first_pass_dflash,
            num_drafts=scalars["num_speculative_tokens"],
            mask_token=scalars["parallel_drafting_token_id"],
            page_size=scalars["block_size"],
        )
        return jax.jit(block)(**arrays)
    shift = scalars["path"].startswith("eagle")
    rows = functools.partial(
        set_inputs_first_pass,
        num_slots=scalars["extra_slots_per_request"],
        shift=shift,
        mask_token=scalars["parallel_drafting_token_id"],
        page_size=scalars["block_size"],
        max_model_len=scalars["max_model_len"],
    )
    return jax.jit(rows)(
        token_ids=given_["target_token_ids"],
        hidden=given_["target_hidden_states"] if shift else None,
        mask_hidden=given_.get("parallel_drafting_hidden_state"),
        **arrays,
    )


@recordings.each_case("set_inputs_first_pass", as_int32=True)
def test_first_passes_are_the_recorded_ones(case):
    _, given_, want, scalars = case
    if "token_indices_to_sample" in given_:  # says the same as the rejected rows that we take
        last = given_["query_start_loc"][1:] - 1 - given_["num_rejected_tokens"]
        np.testing.assert_array_equal(last, given_["token_indices_to_sample"])
    rows = first_pass_of(given_, scalars)
    num_tokens, T = scalars["num_tokens"], len(given_["target_token_ids"])
    assert rows.token_ids.shape == rows.metadata.slots.shape == (num_tokens,)
    path, R = scalars["path"], len(given_["next_token_ids"])
    slots = 1 if path in ("eagle", "draft_model") else scalars["num_speculative_tokens"]
    assert scalars["extra_slots_per_request"] == slots
    net = scalars["net_num_new_slots_per_request"]
    assert num_tokens == (R * (net + 1) if path == "dflash" else T + R * net)
    ids = want["input_ids"][:num_tokens]
    ids = np.where(ids == -4242, -1, ids)  # never written: ours is PAD
    np.testing.assert_array_equal(rows.token_ids, ids)
    np.testing.assert_array_equal(rows.positions, want["positions"][:num_tokens])
    np.testing.assert_array_equal(
        np.ravel(rows.sample_index), want["token_indices_to_sample"], err_msg="sample_index"
    )
    np.testing.assert_array_equal(rows.metadata.query_start, want["query_start_loc"])
    np.testing.assert_array_equal(rows.metadata.seq_lens, want["seq_lens"])
    np.testing.assert_array_equal(rows.metadata.slots, want["slot_mapping"])
    assert_counts(rows.metadata, scalars)
    assert rows.metadata.causal == scalars["causal"]
    hidden = want["hidden_states"][:num_tokens]
    if rows.hidden is None:
        assert (hidden == -4242).all()
    else:
        written = (hidden != -4242).all(axis=1)
        np.testing.assert_array_equal(rows.hidden[written], hidden[written])  # float32, exact
    for ours, theirs in (
        ("rejected_mask", "is_rejected_token_mask"),
        ("masked_mask", "is_masked_token_mask"),
        ("context_positions", "context_positions"),
        ("context_slots", "context_slot_mapping"),
    ):
        if theirs in want:
            np.testing.assert_array_equal(getattr(rows, ours), want[theirs], err_msg=ours)
        else:
            assert getattr(rows, ours) is None


def test_ids_move_left_inside_each_request():
    rows = set_inputs_first_pass(
        ints(1, 10, 11, 20, 21, 22),
        ints(0, 0, 1, 0, 1, 2),
        ints(2, 12, 23),
        metadata_of([0, 1, 3, 6], [1, 2, 3]),
        page_size=4,
        max_model_len=64,
    )
    assert rows.token_ids.tolist() == [2, 11, 12, 21, 22, 23]
    assert rows.sample_index.tolist() == [[0], [2], [5]]


def test_the_next_token_takes_the_place_behind_the_last_accepted_one():
    rows = set_inputs_first_pass(
        ints(10, 11, 12, 20),
        ints(0, 1, 2, 0),
        ints(99, 21),
        metadata_of([0, 3, 4], [3, 1]),
        num_rejected=ints(1, 0),
        page_size=4,
        max_model_len=64,
    )
    assert rows.sample_index.tolist() == [[1], [3]]
    assert rows.token_ids[jnp.array([0, 1, 3])].tolist() == [11, 99, 21]  # row 2 was rejected


def test_a_request_whose_rows_were_all_rejected_stays_out_of_its_neighbours():
    rows = set_inputs_first_pass(
        ints(1, 2, 3, 4),
        ints(0, 1, 0, 1),
        ints(8, 9),
        metadata_of([0, 2, 4], [2, 2]),
        num_rejected=ints(0, 2),
        page_size=4,
        max_model_len=64,
    )
    assert rows.token_ids[:2].tolist() == [2, 8]
    assert rows.sample_index.tolist() == [[1], [2]]


REQUESTS = st.lists(
    st.integers(1, 5).flatmap(
        lambda n: st.tuples(
            st.lists(st.integers(0, 99), min_size=n, max_size=n),
            st.integers(0, 12),
            st.integers(0, n - 1),
            st.integers(0, 99),
        )
    ),
    max_size=5,
)


def poisoned_step(requests):
    """Pads (ids, first position, rejected, next token) of each request to SHAPE, misleadingly."""
    lengths = [len(ids) for ids, _, _, _ in requests]
    table = [[20 + r, 40 + r, -1] for r in range(len(requests))]
    metadata = padded(lengths, table, width=3, **SHAPE)

    def full(values, size):
        return ints(*values, *[POISON] * (size - len(values)))

    ids = full([token for ids, *_ in requests for token in ids], 27)
    positions = full([at + i for ids, at, _, _ in requests for i in range(len(ids))], 27)
    next_token = full([token for *_, token in requests], 6)
    num_rejected = full([rejected for *_, rejected, _ in requests], 6)
    hidden = np.arange(27, dtype=np.float32)[:, None] + np.float32([[0.25, 0.5]])
    hidden[sum(lengths) :] = np.nan
    return lengths, table, metadata, ids, positions, next_token, num_rejected, hidden


@functools.cache
def jitted(function, **static):
    return jax.jit(functools.partial(function, page_size=4, max_model_len=9, **static))


@given(REQUESTS)
def test_a_shifted_first_pass_of_a_padded_batch_matches_the_loop(requests):
    lengths, _, metadata, ids, positions, next_token, num_rejected, _ = poisoned_step(requests)
    rows = jitted(set_inputs_first_pass)(
        ids, positions, next_token, metadata, num_rejected=num_rejected
    )
    start = 0
    for r, (tokens, _, rejected, token) in enumerate(requests):
        kept = tokens[1 : len(tokens) - rejected] + [token]
        assert rows.token_ids[start : start + len(kept)].tolist() == kept
        assert rows.sample_index[r].tolist() == [start + len(kept) - 1]
        start += len(tokens)
    assert rows.token_ids[start:].tolist() == [-1] * (27 - start)
    assert rows.sample_index[len(requests) :].tolist() == [[0]] * (6 - len(requests))
    jax.tree.map(np.testing.assert_array_equal, rows.metadata, metadata)


@pytest.mark.parametrize("num_slots, shift", [(1, False), (3, True), (2, False)])
@given(REQUESTS)
def test_an_expanded_first_pass_of_a_padded_batch_matches_the_loop(num_slots, shift, requests):
    lengths, table, metadata, ids, positions, next_token, num_rejected, hidden = poisoned_step(
        requests
    )
    mask_hidden = np.float32([7.0, 8.0])
    rows = jitted(set_inputs_first_pass, num_slots=num_slots, shift=shift, mask_token=77)(
        ids,
        positions,
        next_token,
        metadata,
        hidden=hidden if shift else None,
        num_rejected=num_rejected,
        mask_hidden=mask_hidden,
    )
    want, sources, sampled = oracle.first_pass(
        requests, num_slots=num_slots, shift=shift, mask_token=77
    )
    num_live, num_rows = len(want), 27 + 6 * (num_slots - shift)
    got = zip(
        *(
            side[:num_live].tolist()
            for side in (rows.token_ids, rows.positions, rows.rejected_mask, rows.masked_mask)
        ),
        strict=True,
    )
    assert list(got) == want
    assert rows.sample_index.tolist() == sampled + [[0] * num_slots] * (6 - len(requests))
    slots = oracle.new_slots(
        lengths,
        table,
        [position for _, position, _, _ in want],
        [rejected for _, _, rejected, _ in want],
        page_size=4,
        num_new=num_slots - shift,
        max_model_len=9,
    )
    assert rows.metadata.slots.tolist() == slots + [-1] * (num_rows - num_live)
    if shift:
        row = 0
        for begin, length in zip(np.cumsum([0, *lengths]), lengths, strict=False):
            for _ in range(length + num_slots - 1):
                source, masked = sources[row], want[row][3]
                expected = hidden[begin + source] if source is not None else np.zeros(2)
                expected = mask_hidden if masked else expected
                np.testing.assert_array_equal(rows.hidden[row], expected)
                row += 1
        assert not np.asarray(rows.hidden[num_live:]).any(), "padding reaches no hidden state"


@given(REQUESTS)
def test_a_block_behind_a_padded_batch_matches_the_loop(requests):
    lengths, table, metadata, _, positions, next_token, num_rejected, _ = poisoned_step(requests)
    rows = jitted(set_inputs_first_pass_dflash, num_drafts=2, mask_token=77)(
        positions, next_token, metadata, num_rejected=num_rejected
    )
    live, pads = len(requests), 6 - len(requests)
    assert rows.token_ids[: 3 * live].tolist() == [
        token for *_, next_ in requests for token in (next_, 77, 77)
    ]
    slots = [
        oracle.slot(pages, at + len(ids) - rejected + q, 4, 9)
        for (ids, at, rejected, _), pages in zip(requests, table, strict=True)
        for q in range(3)
    ]
    assert rows.metadata.slots.tolist() == slots + [-1] * 3 * pads
    starts = [3 * r for r in range(live + 1)]
    assert rows.metadata.query_start.tolist() == starts + [3 * live] * pads
    seq_lens = [8 * len(ids) + len(ids) - rejected + 3 for ids, _, rejected, _ in requests]
    assert rows.metadata.seq_lens.tolist() == seq_lens + [0] * pads
    assert not rows.metadata.causal


def test_permuted_requests_give_permuted_rows():
    requests = [([1, 2, 3], 4, 1, 50), ([9], 0, 0, 60), ([5, 6], 7, 1, 70)]
    order = [2, 0, 1]

    def rows_of(requests, tables):
        lengths = [len(ids) for ids, *_ in requests]
        rows = jitted(set_inputs_first_pass, num_slots=2)(
            ints(*(token for ids, *_ in requests for token in ids)),
            ints(*(at + i for ids, at, *_ in requests for i in range(len(ids)))),
            ints(*(token for *_, token in requests)),
            metadata_of(np.cumsum([0, *lengths]), [n + 5 for n in lengths], tables),
            num_rejected=ints(*(rejected for *_, rejected, _ in requests)),
        )
        start = np.asarray(rows.metadata.query_start)
        return [
            (rows.token_ids[a:b].tolist(), rows.metadata.slots[a:b].tolist())
            for a, b in zip(start, start[1:], strict=False)
        ]

    tables = np.arange(12, dtype=np.int32).reshape(3, 4)
    straight = rows_of(requests, tables)
    assert rows_of([requests[i] for i in order], tables[order]) == [straight[i] for i in order]


def test_positions_with_three_axes_pass_where_no_row_is_added():
    positions = np.arange(6, dtype=np.int32).reshape(3, 2)
    rows = set_inputs_first_pass(
        ints(1, 2), positions, ints(3), metadata_of([0, 2], [2]), page_size=4, max_model_len=64
    )
    np.testing.assert_array_equal(rows.positions, positions)


def test_wide_integers_stay_wide_where_x64_is_on():
    with jax.enable_x64(True):
        metadata = metadata_of([0, 1], [6], [[2, 5]])
        positions = np.array([5, 6, 7, 8])
        slots = compute_new_slot_mapping(metadata, positions, np.zeros(4, bool), 4, 3, 8)
        assert slots.dtype == jnp.int64
        assert slots.tolist() == [21, 22, 23, -1]
        rows = set_inputs_first_pass(
            np.array([7]), np.array([5]), np.array([9]), metadata, page_size=4, max_model_len=8
        )
        assert rows.token_ids.tolist() == [9]
        kept, _ = prepare_inputs(metadata, np.array([1]), np.array([0]))
        assert kept.query_start.dtype == jnp.int32


def good_call(**changes):
    arguments = {
        "token_ids": ints(1, 2, 3),
        "positions": ints(0, 1, 2),
        "next_token": ints(4, 5),
        "metadata": metadata_of([0, 2, 3], [2, 1]),
        "hidden": np.zeros((3, 4), np.float32),
        "num_slots": 2,
        "mask_hidden": np.zeros(4, np.float32),
        "page_size": 4,
        "max_model_len": 8,
    }
    return set_inputs_first_pass(**(arguments | changes))


@pytest.mark.parametrize(
    "changes, error, words",
    [
        ({"token_ids": np.zeros(3, np.float32)}, TypeError, "token_ids.*int32"),
        ({"token_ids": [1, 2, 3]}, TypeError, "token_ids"),
        ({"token_ids": np.zeros(3, np.int64)}, TypeError, "token_ids.*int64.*astype"),
        ({"token_ids": ints(1, 2)}, ValueError, "token_ids"),
        ({"positions": np.zeros((3, 3), np.int32)}, ValueError, "positions"),
        ({"next_token": ints(4)}, ValueError, "next_token"),
        ({"num_rejected": ints(0, 0, 0)}, ValueError, "num_rejected"),
        ({"hidden": np.zeros((2, 4), np.float32)}, ValueError, "hidden.*same rows"),
        ({"hidden": np.zeros((3, 4), np.int32)}, TypeError, "hidden.*float"),
        ({"shift": False}, ValueError, "hidden.*shift=True"),
        ({"mask_hidden": None}, ValueError, "mask_hidden.*None.*mask vector"),
        ({"mask_hidden": np.zeros(3, np.float32)}, ValueError, "mask_hidden.*shape"),
        ({"num_slots": 0}, ValueError, "num_slots"),
        ({"page_size": 0}, ValueError, "page_size"),
        ({"max_model_len": 2.0}, TypeError, "max_model_len"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_first_pass_names_what_does_not_fit(changes, error, words):
    jax.eval_shape(good_call)
    with unchecked(), pytest.raises(error, match=words):
        good_call(**changes)


def test_a_block_without_drafts_is_refused():
    metadata = metadata_of([0, 2, 3], [2, 1])
    with pytest.raises(ValueError, match="num_drafts"):
        set_inputs_first_pass_dflash(
            ints(0, 1, 2), ints(4, 5), metadata, num_drafts=0, mask_token=7, page_size=4
        )
