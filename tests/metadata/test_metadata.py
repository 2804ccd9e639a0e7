"""Batch bookkeeping against the recordings, the worked cases, and plain loops."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jspec.metadata import (
    PADDING_SLOT_ID,
    CommonAttentionMetadata,
    SpecDecodeMetadata,
    compute_new_slot_mapping,
    extend_all_queries_by_N,
    next_power_of_2,
    prepare_inputs,
    set_inputs_first_pass,
    unconditional_to_conditional_rates,
    update_num_computed_tokens_for_batch_change,
)
from tests.support import recordings
from tests.support.batches import (
    POISON,
    SHAPE,
    assert_counts,
    assert_int32,
    ints,
    metadata_of,
    padded,
    unchecked,
)
from tests.support.oracles import metadata as oracle


@pytest.fixture
def without_checker():
    with unchecked():
        yield


# --- SpecDecodeMetadata


@recordings.each_case("spec_decode_metadata_dummy", as_int32=True)
def test_dummy_metadata_is_the_recorded_one(case):
    _, given_, want, scalars = case
    ends = np.cumsum(given_["num_draft_tokens"])[:-1]
    ragged = [list(map(int, row)) for row in np.split(given_["flat_draft_token_ids"], ends)]
    if "raises" in scalars:  # an empty batch: ours is empty metadata
        assert scalars["raises"] == "ValueError"
        metadata = SpecDecodeMetadata.make_dummy([])
        assert metadata.max_spec_len == 0
        assert metadata.num_draft_tokens == ()
        assert {leaf.shape for leaf in jax.tree.leaves(metadata)} == {(0,)}
    else:
        metadata = SpecDecodeMetadata.make_dummy(ragged)
        assert metadata.max_spec_len == scalars["max_spec_len"]
        assert len(want) == 7
        for name, value in want.items():
            np.testing.assert_array_equal(getattr(metadata, name), value, err_msg=name)
    assert_int32(metadata)


def test_dummy_metadata_of_two_requests_without_drafts_holds_no_floats():
    metadata = SpecDecodeMetadata.make_dummy([[], []])
    assert metadata.max_spec_len == 0
    assert metadata.logits_indices.tolist() == [0, 0]
    assert metadata.cu_num_sampled_tokens.tolist() == [1, 2]
    assert_int32(metadata)


def test_a_scheduled_step_is_indexed_for_the_verifier():
    drafts = [[7, 8, 9], [], [5, 6], [], [4]]
    metadata = SpecDecodeMetadata.from_drafts(drafts, [4, 104, 107, 207, 209])
    assert metadata.draft_token_ids.tolist() == [7, 8, 9, 5, 6, 4]
    assert metadata.num_draft_tokens == (3, 0, 2, 0, 1)
    assert metadata.cu_num_draft_tokens.tolist() == [3, 3, 5, 5, 6]
    assert metadata.cu_num_sampled_tokens.tolist() == [4, 5, 8, 9, 11]
    assert metadata.logits_indices.tolist() == [0, 1, 2, 3, 103, 104, 105, 106, 206, 207, 208]
    assert metadata.bonus_logits_indices.tolist() == [3, 4, 7, 8, 10]
    assert metadata.target_logits_indices.tolist() == [0, 1, 2, 5, 6, 9]
    assert_int32(metadata)


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 5)), max_size=7))
def test_verifier_rows_match_the_loop(requests):
    num_drafts = [drafts for drafts, _ in requests]
    ends = np.cumsum([drafts + 1 + before for drafts, before in requests], dtype=np.int32)
    token_ids = np.arange(100, 100 + (ends[-1] if requests else 0))
    drafts = [token_ids[end - n : end].tolist() for n, end in zip(num_drafts, ends, strict=True)]
    metadata = SpecDecodeMetadata.from_drafts(drafts, ends)
    logits, target, bonus = oracle.verifier_rows(num_drafts, ends)
    assert metadata.logits_indices.tolist() == logits
    assert metadata.target_logits_indices.tolist() == target
    assert metadata.bonus_logits_indices.tolist() == bonus
    # A draft sits one token after the row that predicts it.
    rows = np.asarray(metadata.logits_indices)[np.asarray(metadata.target_logits_indices)]
    np.testing.assert_array_equal(token_ids[rows + 1], metadata.draft_token_ids)
    assert_int32(metadata)


@pytest.mark.usefixtures("without_checker")
def test_bad_drafts_and_ends_are_named():
    with pytest.raises(TypeError, match="one list of token ids a request"):
        SpecDecodeMetadata.make_dummy([[1.5]])
    with pytest.raises(TypeError, match="one list of token ids a request"):
        SpecDecodeMetadata.make_dummy([3])
    with pytest.raises(TypeError, match="32-bit"):
        SpecDecodeMetadata.make_dummy([[2**31]])
    with pytest.raises(TypeError, match="cu_num_scheduled_tokens.*float64.*cumsum"):
        SpecDecodeMetadata.from_drafts([[1]], [2.5])
    with pytest.raises(ValueError, match="cu_num_scheduled_tokens.*cumsum"):
        SpecDecodeMetadata.from_drafts([[1], [2]], [2])
    with pytest.raises(ValueError, match="request 1 2 rows, wanted 3"):
        SpecDecodeMetadata.from_drafts([[1], [2, 3]], [2, 4])


def test_metadata_passes_through_jit_and_its_counts_are_static():
    metadata = SpecDecodeMetadata.make_dummy([[1, 2], [], [3]])

    @jax.jit
    def doubled(metadata):
        widest = jnp.zeros(metadata.max_spec_len, jnp.int32)  # a size: only static counts will do
        return dataclasses.replace(metadata, draft_token_ids=metadata.draft_token_ids * 2), widest

    out, widest = doubled(metadata)
    assert out.draft_token_ids.tolist() == [2, 4, 6]
    assert out.num_draft_tokens == (2, 0, 1)
    assert widest.shape == (2,)
    with pytest.raises(dataclasses.FrozenInstanceError):
        out.draft_token_ids = None


# --- slot mapping and extension


@recordings.each_case("slot_mapping_and_metadata", as_int32=True)
def test_slots_and_extended_queries_are_the_recorded_ones(case):
    _, given_, want, scalars = case
    metadata = metadata_of(
        given_["query_start_loc"],
        given_["seq_lens"],
        given_["block_table"],
        max_seq_len=scalars["max_seq_len"],
    )
    assert_counts(metadata, scalars)
    before = jax.tree.map(np.array, metadata)

    @jax.jit
    def extend(metadata, positions, rejected_mask):
        slots = compute_new_slot_mapping(
            metadata,
            positions,
            rejected_mask,
            scalars["block_size"],
            scalars["num_new_tokens"],
            scalars["max_model_len"],
        )
        return extend_all_queries_by_N(metadata, scalars["num_new_tokens"], slots)

    extended = extend(metadata, given_["new_positions"], given_["is_rejected_token_mask"])
    np.testing.assert_array_equal(extended.slots, want["new_slot_mapping"])
    np.testing.assert_array_equal(extended.query_start, want["new_query_start_loc"])
    np.testing.assert_array_equal(extended.query_start, want["new_query_start_loc_cpu"])
    np.testing.assert_array_equal(extended.seq_lens, want["new_seq_lens"])
    assert_counts(extended, {k[4:]: v for k, v in scalars.items() if k.startswith("new_")})
    jax.tree.map(np.testing.assert_array_equal, metadata, before)
    assert_int32(extended)


def test_a_case_of_extended_queries():
    metadata = CommonAttentionMetadata.of(
        ints(0, 3, 5), ints(10, 4), np.zeros((2, 1), np.int32), np.zeros(5, np.int32)
    )
    counts = (metadata.num_tokens, metadata.max_query_len, metadata.max_seq_len)
    assert tuple(map(int, counts)) == (5, 3, 10)
    extended = extend_all_queries_by_N(metadata, 2, np.zeros(9, np.int32))
    assert extended.query_start.tolist() == [0, 5, 9]
    assert extended.seq_lens.tolist() == [12, 6]
    counts = (extended.num_tokens, extended.max_query_len, extended.max_seq_len)
    assert tuple(map(int, counts)) == (9, 5, 12)
    assert metadata.query_start.tolist() == [0, 3, 5]


@pytest.mark.parametrize(
    "rejected, want",
    [([0, 0, 0, 0], [21, 22, 23, -1]), ([0, 0, 1, 0], [21, 22, -1, -1])],
)
def test_a_position_at_the_limit_and_a_rejected_row_get_no_slot(rejected, want):
    metadata = metadata_of([0, 1], [6], [[2, 5]])
    slots = compute_new_slot_mapping(metadata, ints(5, 6, 7, 8), np.array(rejected, bool), 4, 3, 8)
    assert slots.tolist() == want
    assert PADDING_SLOT_ID == -1


def test_a_narrow_table_is_read_flat_by_the_raw_op_and_gives_no_slot_in_a_first_pass():
    metadata = metadata_of([0, 2, 4], [7, 7], [[2], [3]])
    positions = ints(3, 4, 3, 4)
    raw = compute_new_slot_mapping(metadata, positions, np.zeros(4, bool), 4, 0, 64)
    assert raw.tolist() == [2 * 4 + 3, 3 * 4, 3 * 4 + 3, -1]
    ours = set_inputs_first_pass(
        ints(1, 2, 3, 4),
        positions,
        ints(8, 9),
        metadata,
        shift=False,
        page_size=4,
        max_model_len=64,
    )
    assert ours.metadata.slots.tolist() == [11, -1, -1, 15, -1, -1]


@st.composite
def batches(draw):
    """Draws (lengths, table, its width, page_size, max_model_len) of live requests."""
    lengths = draw(st.lists(st.integers(1, 5), max_size=5))
    page_size = draw(st.sampled_from([1, 3, 4]))
    width = draw(st.sampled_from([1, 3]))
    row = st.lists(st.integers(-1, 50), min_size=width, max_size=width)
    table = [draw(row) for _ in lengths]
    return lengths, table, width, page_size, draw(st.integers(1, 20))


@given(batches(), st.integers(0, 2), st.sampled_from([POISON, -1]), st.data())
def test_slots_of_a_padded_batch_match_the_loop(batch, num_new, poison, data):
    lengths, table, width, page_size, max_model_len = batch
    metadata = padded(lengths, table, width=width, **SHAPE)
    num_live = sum(lengths) + num_new * len(lengths)
    num_rows = SHAPE["num_rows"] + num_new * SHAPE["num_requests"]
    places = st.integers(0, min(max_model_len + 5, width * page_size - 1))  # inside the own row
    positions = np.full(num_rows, poison, np.int32)
    positions[:num_live] = data.draw(st.lists(places, min_size=num_live, max_size=num_live))
    rejected = np.array(data.draw(st.lists(st.booleans(), min_size=num_rows, max_size=num_rows)))
    slots = compute_new_slot_mapping(
        metadata, positions, rejected, page_size, num_new, max_model_len
    )
    want = oracle.new_slots(
        lengths,
        table,
        positions.tolist(),
        rejected,
        page_size=page_size,
        num_new=num_new,
        max_model_len=max_model_len,
    )
    assert slots.tolist() == want + [-1] * (num_rows - num_live)
    extended = extend_all_queries_by_N(metadata, num_new, slots)
    ends = np.cumsum([length + num_new for length in lengths], dtype=np.int32).tolist()
    assert extended.query_start.tolist()[1:] == ends + [num_live] * (6 - len(lengths))
    assert extended.seq_lens.tolist() == [9 * n + num_new for n in lengths] + [0] * (
        6 - len(lengths)
    )
    assert int(extended.num_tokens) == num_live
    assert_int32(extended)


# --- batch change


@recordings.each_case("update_num_computed_tokens", as_int32=True)
def test_counts_after_a_batch_change_are_the_recorded_ones(case):
    _, given_, want, _ = case
    computed, accepted = jax.jit(update_num_computed_tokens_for_batch_change)(**given_)
    np.testing.assert_array_equal(computed, want["num_computed_tokens"])
    np.testing.assert_array_equal(accepted, want["num_accepted_tokens"])
    assert_int32((computed, accepted))


@pytest.mark.parametrize("drafts, want", [((3, 2), [23, 50, 12]), ((3, 0), [99, 50, 12])])
def test_a_new_request_and_one_without_drafts_take_the_host_count(drafts, want):
    computed, _ = update_num_computed_tokens_for_batch_change(
        num_computed_tokens=ints(10, 20),
        num_accepted_tokens=ints(1, 1, 1),
        prev_positions=ints(1, -1, 0),
        valid_sampled_token_count=ints(2, 3),
        prev_num_draft_tokens=ints(*drafts),
        cpu_num_computed_tokens=ints(99, 50, 99),
    )
    assert computed.tolist() == want


COUNTS = st.integers(0, 9)


@given(st.data(), st.integers(0, 5), st.integers(1, 6))
def test_counts_after_a_batch_change_match_the_loop(data, num_now, num_before):
    def draw(size, values=COUNTS):
        return ints(*data.draw(st.lists(values, min_size=size, max_size=size)))

    computed, valid, drafted = draw(num_before), draw(num_before), draw(num_before)
    accepted, host = draw(num_now), draw(num_now)
    previous = draw(num_now, st.integers(-3, num_before + 2))  # repeats and strays included
    got = update_num_computed_tokens_for_batch_change(
        computed, accepted, previous, valid, drafted, host
    )
    want = oracle.follow(computed, accepted, previous, valid, drafted, host)
    assert [side.tolist() for side in got] == [list(map(int, side)) for side in want]


# --- prepare_inputs

jitted_prepare_inputs = jax.jit(prepare_inputs)


@recordings.each_case("prepare_inputs", as_int32=True)
def test_rows_without_rejected_drafts_are_the_recorded_ones(case):
    _, given_, want, scalars = case
    metadata = metadata_of(
        given_["query_start_loc"], given_["seq_lens"], slots=given_["slot_mapping"]
    )
    assert_counts(metadata, scalars["padded"])
    kept, token_indices = jitted_prepare_inputs(
        metadata, given_["num_sampled"], given_["num_draft_tokens"]
    )
    num_tokens = int(kept.num_tokens)
    assert token_indices[num_tokens:].tolist() == [-1] * (len(token_indices) - num_tokens)
    assert kept.slots[num_tokens:].tolist() == [-1] * (len(token_indices) - num_tokens)
    np.testing.assert_array_equal(token_indices[:num_tokens], want["unpadded_token_indices"])
    np.testing.assert_array_equal(kept.slots[:num_tokens], want["unpadded_slot_mapping"])
    np.testing.assert_array_equal(kept.query_start, want["unpadded_query_start_loc"])
    np.testing.assert_array_equal(kept.seq_lens, want["unpadded_seq_lens"])
    assert_counts(kept, scalars["unpadded"])
    assert_int32((kept, token_indices))


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4), st.integers(0, 2)), max_size=5))
def test_kept_rows_of_a_padded_batch_match_the_loop(requests):
    num_drafts = [drafts for drafts, _, _ in requests]
    num_sampled = [min(kept, drafts) + 1 for drafts, kept, _ in requests]
    lengths = [drafts + 1 + (0 if drafts else more) for drafts, _, more in requests]
    metadata = padded(lengths, [[0]] * len(lengths), width=1, **SHAPE)
    more = [POISON] * (6 - len(lengths))
    kept, token_indices = jitted_prepare_inputs(
        metadata, ints(*num_sampled, *[2] * len(more)), ints(*num_drafts, *more)
    )
    rows, num_kept = oracle.kept_rows(lengths, num_sampled, num_drafts)
    pads = [-1] * (SHAPE["num_rows"] - len(rows))
    assert token_indices.tolist() == rows + pads
    assert kept.slots.tolist() == rows + pads
    ends = np.cumsum(num_kept, dtype=np.int32).tolist()
    assert kept.query_start.tolist() == [0, *ends] + [len(rows)] * len(more)
    seq_lens = [9 * n - n + k for n, k in zip(lengths, num_kept, strict=True)]
    assert kept.seq_lens.tolist() == seq_lens + [0] * len(more)
    assert int(kept.num_tokens) == len(rows)
    assert int(kept.max_seq_len) == max(seq_lens, default=0)


@pytest.mark.usefixtures("without_checker")
def test_slots_counts_and_rows_name_what_does_not_fit():
    metadata = metadata_of([0, 2, 3], [2, 1])
    with pytest.raises(ValueError, match="query_start"):
        CommonAttentionMetadata.of(ints(0, 1), ints(1, 1), np.zeros((2, 1), np.int32), ints(1))
    with pytest.raises(ValueError, match="metadata.block_table"):
        bad = dataclasses.replace(metadata, block_table=np.zeros((3, 1), np.int32))
        prepare_inputs(bad, ints(1, 1), ints(0, 0))
    with pytest.raises(ValueError, match="slots"):
        extend_all_queries_by_N(metadata, 2, np.zeros(6, np.int32))
    with pytest.raises(ValueError, match="num_new_tokens"):
        extend_all_queries_by_N(metadata, -1, np.zeros(1, np.int32))
    with pytest.raises(ValueError, match="positions"):
        compute_new_slot_mapping(metadata, ints(1, 2), np.zeros(2, bool), 4, 1, 8)
    with pytest.raises(TypeError, match="rejected_mask.*bool"):
        compute_new_slot_mapping(metadata, ints(1, 2, 3), ints(0, 0, 0), 4, 0, 8)
    with pytest.raises(ValueError, match="num_sampled"):
        prepare_inputs(metadata, ints(1), ints(0, 0))
    counts = {"num_computed_tokens": ints(1), "num_accepted_tokens": ints(1)}
    counts |= {"valid_sampled_token_count": ints(1), "prev_num_draft_tokens": ints(1)}
    with pytest.raises(ValueError, match="cpu_num_computed_tokens"):
        update_num_computed_tokens_for_batch_change(
            **counts, prev_positions=ints(0), cpu_num_computed_tokens=ints(1, 2)
        )


# --- numbers


def test_powers_of_two_round_up_and_start_at_one():
    values = [-3, 0, 1, 2, 3, 4, 5, 1023, 1025, 2**31 + 1]
    powers = [1, 1, 1, 2, 4, 4, 8, 1024, 2048, 2**32]
    assert [next_power_of_2(value) for value in values] == powers
    assert next_power_of_2(np.int64(5)) == 8
    with pytest.raises(TypeError):
        next_power_of_2(2.5)


def test_rates_become_conditional_on_the_position_before():
    assert unconditional_to_conditional_rates([]) == []
    rates = unconditional_to_conditional_rates([0.8, 0.4, 0.0, 0.0])
    assert rates == [0.8, 0.5, 0.0, 0.0]
    for bad in (-0.1, 1.5, float("nan")):
        with pytest.raises(ValueError, match=r"rates\[1\].*percentage"):
            unconditional_to_conditional_rates([0.5, bad])
