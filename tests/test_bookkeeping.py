"""Batch bookkeeping against the recordings, the worked cases, and plain loops."""

import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jspec.bookkeeping import (
    PADDING_SLOT_ID,
    CommonAttentionMetadata,
    SpecDecodeMetadata,
    compute_new_slot_mapping,
    extend_all_queries_by_N,
    next_power_of_2,
    prepare_inputs,
    set_inputs_first_pass,
    set_inputs_first_pass_dflash,
    unconditional_to_conditional_rates,
    update_num_computed_tokens_for_batch_change,
)
from tests.conftest import GOLDEN
from tests.oracles import bookkeeping as oracle

POISON = 1_000_003


def ints(*values) -> np.ndarray:
    return np.array(values, np.int32)


def recorded(family: str):
    """Lists the cases of a golden file: (name, inputs, outputs, scalars), integers as int32."""
    with np.load(GOLDEN / f"{family}.npz") as data:
        cases = []
        for index, name in enumerate(data["names"]):
            sides = {"in": {}, "out": {}}
            for key in data.files:
                if key.startswith(f"c{index:03d}."):
                    _, side, field = key.split(".", 2)
                    value = data[key]
                    sides[side][field] = value.astype(np.int32) if value.dtype == "int64" else value
            scalars = json.loads(str(data["scalars"][index]))
            cases.append(pytest.param(sides["in"], sides["out"], scalars, id=str(name)))
    return cases


def metadata_of(query_start, seq_lens, table=None, slots=None, **counts) -> CommonAttentionMetadata:
    query_start, seq_lens = np.asarray(query_start, np.int32), np.asarray(seq_lens, np.int32)
    counts = {
        "num_tokens": query_start[-1],
        "max_query_len": np.diff(query_start).max(),
        "max_seq_len": seq_lens.max(),
    } | counts
    if table is None:
        table = np.zeros((len(seq_lens), 1))
    return CommonAttentionMetadata(
        query_start=query_start,
        seq_lens=seq_lens,
        block_table=np.asarray(table, np.int32),
        slots=np.zeros(query_start[-1], np.int32) if slots is None else slots,
        **{name: np.asarray(count, np.int32) for name, count in counts.items()},
    )


def assert_counts(metadata: CommonAttentionMetadata, scalars) -> None:
    for ours, theirs in (
        ("num_tokens", "num_actual_tokens"),
        ("max_query_len", "max_query_len"),
        ("max_seq_len", "max_seq_len"),
    ):
        assert int(getattr(metadata, ours)) == scalars[theirs], ours


def assert_int32(tree) -> None:
    assert {leaf.dtype for leaf in jax.tree.leaves(tree)} <= {jnp.dtype("int32"), jnp.dtype("bool")}


@pytest.fixture
def unchecked():
    """Turns the test-time shape checker off, to meet the library's own errors."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


# --- SpecDecodeMetadata


@pytest.mark.parametrize("given_, want, scalars", recorded("spec_decode_metadata_dummy"))
def test_dummy_metadata_is_the_recorded_one(given_, want, scalars):
    ends = np.cumsum(given_["num_draft_tokens"])[:-1]
    ragged = [list(map(int, row)) for row in np.split(given_["flat_draft_token_ids"], ends)]
    if "raises" in scalars:  # an empty batch: ours is empty metadata
        metadata = SpecDecodeMetadata.make_dummy([])
        assert metadata.max_spec_len == 0
        assert metadata.num_draft_tokens == ()
        assert {leaf.shape for leaf in jax.tree.leaves(metadata)} == {(0,)}
    else:
        metadata = SpecDecodeMetadata.make_dummy(ragged)
        assert metadata.max_spec_len == scalars["max_spec_len"]
        assert metadata.num_draft_tokens == tuple(want.pop("num_draft_tokens"))
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


@pytest.mark.usefixtures("unchecked")
def test_bad_drafts_and_ends_are_named():
    with pytest.raises(TypeError, match="one list of token ids a request"):
        SpecDecodeMetadata.make_dummy([[1.5]])
    with pytest.raises(TypeError, match="one list of token ids a request"):
        SpecDecodeMetadata.make_dummy([3])
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


@pytest.mark.parametrize("given_, want, scalars", recorded("slot_mapping_and_metadata"))
def test_slots_and_extended_queries_are_the_recorded_ones(given_, want, scalars):
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


def padded(lengths, table, *, width: int, num_requests: int, num_rows: int):
    """Pads a batch with requests and rows whose contents mislead; their lengths are 0."""
    start = np.cumsum([0, *lengths], dtype=np.int32)
    more = num_requests - len(lengths)
    return CommonAttentionMetadata(
        query_start=np.pad(start, (0, more), mode="edge"),
        seq_lens=np.array([9 * length for length in lengths] + [0] * more, np.int32),
        block_table=np.array([*table, *[[POISON] * width] * more], np.int32).reshape(-1, width),
        slots=np.array([*range(start[-1]), *[POISON] * (num_rows - start[-1])], np.int32),
        num_tokens=np.int32(start[-1]),
        max_query_len=np.int32(max(lengths, default=0)),
        max_seq_len=np.int32(9 * max(lengths, default=0)),
    )


# Few shapes, so that few programs are compiled: up to 5 requests and 25 rows are padded to these.
SHAPE = {"num_requests": 6, "num_rows": 27}


@given(batches(), st.integers(0, 2), st.data())
def test_slots_of_a_padded_batch_match_the_loop(batch, num_new, data):
    lengths, table, width, page_size, max_model_len = batch
    metadata = padded(lengths, table, width=width, **SHAPE)
    num_live = sum(lengths) + num_new * len(lengths)
    num_rows = SHAPE["num_rows"] + num_new * SHAPE["num_requests"]
    places = st.integers(0, min(max_model_len + 5, width * page_size - 1))  # inside the own row
    positions = np.full(num_rows, POISON, np.int32)
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


@pytest.mark.parametrize("given_, want, _", recorded("update_num_computed_tokens"))
def test_counts_after_a_batch_change_are_the_recorded_ones(given_, want, _):
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


@pytest.mark.parametrize("given_, want, scalars", recorded("prepare_inputs"))
def test_rows_without_rejected_drafts_are_the_recorded_ones(given_, want, scalars):
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


# --- first pass


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


@pytest.mark.parametrize("given_, want, scalars", recorded("set_inputs_first_pass"))
def test_first_passes_are_the_recorded_ones(given_, want, scalars):
    if "token_indices_to_sample" in given_:  # says the same as the rejected rows that we take
        last = given_["query_start_loc"][1:] - 1 - given_["num_rejected_tokens"]
        np.testing.assert_array_equal(last, given_["token_indices_to_sample"])
    rows = first_pass_of(given_, scalars)
    num_tokens = scalars["num_tokens"]
    assert rows.token_ids.shape == rows.metadata.slots.shape == (num_tokens,)
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
        rows = set_inputs_first_pass(
            ints(*(token for ids, *_ in requests for token in ids)),
            ints(*(at + i for ids, at, *_ in requests for i in range(len(ids)))),
            ints(*(token for *_, token in requests)),
            metadata_of(np.cumsum([0, *lengths]), [n + 5 for n in lengths], tables),
            num_rejected=ints(*(rejected for *_, rejected, _ in requests)),
            num_slots=2,
            page_size=4,
            max_model_len=64,
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


def test_a_first_pass_inside_jit_is_the_one_outside():
    requests = [([1, 2, 3], 4, 1, 50), ([9], 0, 0, 60)]
    _, _, metadata, ids, positions, next_token, num_rejected, hidden = poisoned_step(requests)
    hidden = np.nan_to_num(hidden)

    def expand(*args):
        return set_inputs_first_pass(
            *args,
            hidden=hidden,
            num_rejected=num_rejected,
            num_slots=3,
            mask_hidden=np.float32([7, 8]),
            page_size=4,
            max_model_len=9,
        )

    def block(*args):
        return set_inputs_first_pass_dflash(
            *args[1:], num_rejected=num_rejected, num_drafts=2, mask_token=77, page_size=4
        )

    for function in (expand, block, lambda *args: prepare_inputs(args[-1], next_token, next_token)):
        args = (ids, positions, next_token, metadata)
        jax.tree.map(np.testing.assert_array_equal, jax.jit(function)(*args), function(*args))


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


# --- refusals


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


@pytest.mark.usefixtures("unchecked")
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
    good_call()
    with pytest.raises(error, match=words):
        good_call(**changes)


@pytest.mark.usefixtures("unchecked")
def test_other_bookkeeping_names_what_does_not_fit():
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
    with pytest.raises(ValueError, match="num_drafts"):
        set_inputs_first_pass_dflash(
            ints(0, 1, 2), ints(4, 5), metadata, num_drafts=0, mask_token=7, page_size=4
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
