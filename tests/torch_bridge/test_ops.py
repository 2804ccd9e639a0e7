"""`torch_bridge.ops` against recordings: results, writes in place, first passes, wide integers."""

import dataclasses
from types import SimpleNamespace

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from jspec import metadata as jspec_metadata
from jspec.axes import INT32_MAX
from tests.support import recordings
from tests.support.op_runs import POISON
from tests.support.torch_golden import (
    counts,
    device,
    ints,
    longs,
    metadata,
    same,
    tensors,
)
from torch_bridge import ops

pytestmark = pytest.mark.any_device


# --- the five kernels


@recordings.each_case("eagle_step_slot_mapping")
def test_recorded_steps_are_written_in_place(case):
    _, given, want, scalars = case
    given = tensors(given)
    positions, seq_lens = given["positions"], given["seq_lens"]
    table = given["block_table"][:, : scalars["block_table_cols"]]  # a view with wider rows
    aliases = scalars["steps"] is not None
    clamped = positions if aliases else torch.full_like(positions, -777777)
    slots = torch.full((want["slot_mapping"].shape[-1],), -777777, device=device())
    for step in range(scalars["steps"] or 1):
        ops.eagle_step_update_slot_mapping_and_metadata(
            positions_1d=positions,
            block_table_tensor=table,
            seq_lens=seq_lens,
            block_size=scalars["block_size"],
            max_model_len=scalars["max_model_len"],
            out_clamped_positions=clamped,
            out_slot_mapping=slots,
            input_batch_size=scalars["input_batch_size"],
        )
        now = {name: x[step] if aliases else x for name, x in want.items()}
        same(clamped, now["clamped_positions"])
        same(slots, now["slot_mapping"])  # cells past the padded batch keep what they held
        same(seq_lens, now["seq_lens"])


@recordings.each_case("eagle_prepare_inputs_padded")
def test_recorded_rows_to_sample_from_come_out(case):
    _, given, want, scalars = case
    assert not scalars
    index, num_rejected = ops.eagle_prepare_inputs_padded(**tensors(given))
    same(index, want["token_indices_to_sample"])
    same(num_rejected, want["num_rejected_tokens"])


@recordings.each_case("eagle_prepare_next_token_padded")
def test_recorded_next_tokens_come_out(case):
    _, given, want, scalars = case
    given = tensors(given)
    given["sampled_token_ids"] = given["sampled_token_ids"][:, : scalars["width"]]
    token, count = ops.eagle_prepare_next_token_padded(**given, vocab_size=scalars["vocab_size"])
    same(token, want["next_token_ids"])
    same(count, want["valid_sampled_tokens_count"])


@recordings.each_case("copy_and_expand_eagle_inputs")
def test_recorded_rows_with_room_for_drafts_come_out(case):
    _, given, want, scalars = case
    last, start = given["query_end_loc"], given["query_start_loc"]
    scalars = dict(scalars)
    live = scalars.pop("total_output_tokens")
    slots, shift = scalars["num_padding_slots_per_request"], scalars["shift_input_ids"]
    rows = ops.copy_and_expand_eagle_inputs(**tensors(given), **scalars)
    assert len(rows.input_ids) == live
    for ours, theirs in (
        ("input_ids", "input_ids"),
        ("positions", "positions"),
        ("is_rejected_token_mask", "is_rejected_token_mask"),
        ("is_masked_token_mask", "is_masked_token_mask"),
    ):
        same(getattr(rows, ours), want[theirs][:live])
    index = want["new_token_indices"][: len(last) * slots]
    # Where even the first token of a shifted request was rejected the original writes no index.
    written = index != -7777
    expected = np.repeat(last >= start[:-1] + shift - 1, slots)
    expected[np.arange(len(expected)) % slots > 0] = True
    np.testing.assert_array_equal(written, expected)
    assert rows.new_token_indices.dtype == torch.int32
    np.testing.assert_array_equal(rows.new_token_indices.cpu().numpy()[written], index[written])
    if shift:
        same(rows.hidden_state_mapping, want["hidden_state_mapping"])
    else:
        assert rows.hidden_state_mapping is None


@recordings.each_case("copy_and_expand_dflash_inputs")
def test_recorded_blocks_of_query_rows_come_out(case):
    _, given, want, scalars = case
    B, T = len(given["next_token_ids"]), len(given["target_positions"])
    K = scalars["num_speculative_tokens"]
    scalars = dict(scalars)
    assert scalars.pop("has_num_rejected") == ("num_rejected_tokens" in given)
    given = {"num_rejected_tokens": None} | tensors(given)
    given["block_table_tensor"] = given.pop("block_table")
    rows = ops.copy_and_expand_dflash_inputs(**given, **scalars)
    sizes = {"context": T, "query": B * (K + 1), "input": B * (K + 1), "token": B * K}
    for name in rows._fields:
        same(getattr(rows, name), want[name][: sizes[name.split("_")[0]]])


def test_positions_may_be_their_own_output_one_place_further():
    buffer = longs(6, 15, 30, -5)
    slots, lengths = longs(0, 0, 0), ints(7, 16, 31)
    table = ints(4, 9, 2, 7).repeat(3, 1)
    ops.eagle_step_update_slot_mapping_and_metadata(
        buffer[:3], table, lengths, 8, 31, buffer[1:], slots
    )
    assert buffer.tolist() == [6, 7, 16, 0]
    assert slots.tolist() == [39, 16, -1]
    assert lengths.tolist() == [8, 17, 1]


def test_a_block_table_may_have_rows_for_more_requests():
    lengths, clamped, slots = ints(7), longs(0), longs(0)
    table = ints(4, 9, POISON, POISON).view(2, 2)
    ops.eagle_step_update_slot_mapping_and_metadata(longs(6), table, lengths, 8, 31, clamped, slots)
    assert (clamped.tolist(), slots.tolist(), lengths.tolist()) == ([7], [39], [8])


def test_a_step_leaves_lengths_and_positions_behind_the_batch_alone():
    lengths, clamped, slots = ints(7, 50, 60), longs(1, 2, 3), longs(5, 5, 5, 5)
    ops.eagle_step_update_slot_mapping_and_metadata(
        longs(6), ints(4, 9)[None], lengths, 8, 31, clamped, slots, 3
    )
    assert (lengths.tolist(), clamped.tolist()) == ([8, 50, 60], [7, 2, 3])
    assert slots.tolist() == [39, -1, -1, 5]


# --- helpers


@recordings.each_case("slot_mapping_and_metadata")
def test_recorded_slots_and_extended_queries_come_out(case):
    _, given, want, scalars = case
    cad = metadata(
        given["query_start_loc"],
        given["seq_lens"],
        given["block_table"],
        max_seq_len=scalars["max_seq_len"],
    )
    assert counts(cad).items() <= scalars.items()
    before = {f.name: getattr(cad, f.name) for f in dataclasses.fields(cad)}
    values = {name: x.clone() for name, x in before.items() if isinstance(x, torch.Tensor)}
    moved = tensors(given)
    slots = ops.compute_new_slot_mapping(
        cad=cad,
        new_positions=moved["new_positions"],
        is_rejected_token_mask=moved["is_rejected_token_mask"],
        block_size=scalars["block_size"],
        num_new_tokens=scalars["num_new_tokens"],
        max_model_len=scalars["max_model_len"],
    )
    same(slots, want["new_slot_mapping"])
    arange = torch.arange(1 + cad.num_reqs, dtype=torch.int32, device=device())
    new = ops.extend_all_queries_by_N(cad, scalars["num_new_tokens"], arange, slots)
    assert type(new) is type(cad) and new is not cad
    assert new.slot_mapping is slots and new.block_table_tensor is cad.block_table_tensor
    same(new.query_start_loc, want["new_query_start_loc"])
    same(new.seq_lens, want["new_seq_lens"])
    np.testing.assert_array_equal(new.query_start_loc_cpu, want["new_query_start_loc_cpu"])
    assert new.query_start_loc_cpu.dtype == torch.int32
    np.testing.assert_array_equal(new.seq_lens_cpu_upper_bound, want["seq_lens_cpu_upper_bound"])
    wanted = {k[4:]: v for k, v in scalars.items() if k.startswith("new_")}
    assert counts(new) == wanted
    for name, value in before.items():
        assert getattr(cad, name) is value
    for name, value in values.items():
        assert torch.equal(getattr(cad, name), value)


def test_metadata_of_any_class_comes_back_as_that_class():
    @dataclasses.dataclass(frozen=True)
    class Frozen:
        num_reqs: int
        query_start_loc: torch.Tensor
        query_start_loc_cpu: torch.Tensor
        seq_lens: torch.Tensor
        num_actual_tokens: int = 3
        max_query_len: int = 3
        max_seq_len: int = 9
        slot_mapping: None = None
        mine: str = "kept"

    arguments = 1, ints(0, 3), torch.tensor([0, 3], dtype=torch.int32), ints(9)
    names = [field.name for field in dataclasses.fields(Frozen)]
    frozen = Frozen(*arguments)
    loose = SimpleNamespace(**{name: getattr(frozen, name) for name in names})
    for cad in (frozen, loose):
        new = ops.extend_all_queries_by_N(cad, 2, None, longs(*range(5)))
        assert type(new) is type(cad) and new.mine == "kept"
        assert new.query_start_loc.tolist() == new.query_start_loc_cpu.tolist() == [0, 5]
        assert (new.seq_lens.tolist(), cad.seq_lens.tolist()) == ([11], [9])
        assert counts(new) == {"num_actual_tokens": 5, "max_query_len": 5, "max_seq_len": 11}


def test_trailing_requests_without_rows_are_padding():
    cad = metadata([0, 2, 3, 3], [7, 4, 0], [[1, 2], [3, 4], [5, 6]])
    new = ops.extend_all_queries_by_N(cad, 2, None, longs(*range(7)))
    assert new.query_start_loc.tolist() == new.query_start_loc_cpu.tolist() == [0, 4, 7, 7]
    assert new.seq_lens.tolist() == [9, 6, 0]
    assert new.num_actual_tokens == 7
    positions, rejected = longs(5, 6, 7, 8, 3, 4, 5, 0, 0), torch.zeros(9, dtype=torch.bool)
    slots = ops.compute_new_slot_mapping(cad, positions, rejected.to(device()), 4, 2, 64)
    assert slots.tolist() == [9, 10, 11, 12, 15, 16, 17, -1, -1]


def test_the_last_request_reads_no_page_behind_the_table():
    big = metadata([0, 1, 2, 3, 4], [9] * 4, [[POISON, POISON]] * 4)
    mask = torch.zeros(4, dtype=torch.bool, device=device())
    ops.compute_new_slot_mapping(big, longs(1, 1, 1, 1), mask, 4, 0, 64)
    cad = metadata([0, 1, 2, 3], [9] * 3, [[1, 2], [3, 4], [5, 6]])
    slots = ops.compute_new_slot_mapping(cad, longs(8, 9, 8), mask[:3], 4, 0, 64)
    assert slots.tolist() == [3 * 4, 5 * 4 + 1, -1]  # flat, as recorded; none past the end


@recordings.each_case("update_num_computed_tokens")
def test_recorded_counts_after_a_batch_change_are_written_in_place(case):
    _, given, want, scalars = case
    assert not scalars
    given = tensors(given)
    ops.update_num_computed_tokens_for_batch_change(**given)
    same(given["num_computed_tokens"], want["num_computed_tokens"])
    same(given["num_accepted_tokens"], want["num_accepted_tokens"])


def test_buffers_of_a_batch_change_may_be_longer_than_the_batch_before():
    computed, accepted = ints(50, 60, 70, 80, 7, 7), ints(1, 1, 1)
    ops.update_num_computed_tokens_for_batch_change(
        computed, accepted, ints(2, -1, 3), ints(1, 2, 3), ints(0, 3, 3, 3, 3), ints(999, 5, 51)
    )
    # The last one names a request behind the counts of the batch before: it is as good as new.
    assert computed.tolist() == [73, 5, 51, 80, 7, 7]
    assert accepted.tolist() == [3, 1, 1]


def test_small_helpers_are_those_of_jspec():
    assert ops.next_power_of_2 is jspec_metadata.next_power_of_2
    rates = ops.unconditional_to_conditional_rates([0.8, 0.4, 0.0])
    assert rates == [0.8, 0.5, 0.0]
    assert ops.PADDING_SLOT_ID == -1
    assert all(hasattr(ops, name) for name in ops.__all__)


# --- first passes


def first_pass(given, scalars):
    given = tensors(given)
    cad = metadata(
        given["query_start_loc"].cpu(),
        given["seq_lens"].cpu(),
        given["block_table"].cpu(),
        given["slot_mapping"].cpu(),
    )
    rejected, mask_id = given.get("num_rejected_tokens"), scalars["parallel_drafting_token_id"]
    if scalars["path"] == "dflash":
        rows = ops.set_inputs_first_pass_dflash(
            given["next_token_ids"],
            given["target_positions"],
            cad,
            rejected,
            num_speculative_tokens=scalars["num_speculative_tokens"],
            parallel_drafting_token_id=mask_id,
            block_size=scalars["block_size"],
        )
        return cad, rows
    rows = ops.set_inputs_first_pass(
        given["target_token_ids"],
        given["next_token_ids"],
        given["target_positions"],
        given["target_hidden_states"],
        given.get("token_indices_to_sample"),
        cad,
        rejected,
        block_size=scalars["block_size"],
        max_model_len=scalars["max_model_len"],
        pass_hidden_states_to_model=scalars["path"].startswith("eagle"),
        extra_slots_per_request=scalars["extra_slots_per_request"],
        parallel_drafting_token_id=mask_id,
        parallel_drafting_hidden_state_tensor=given.get("parallel_drafting_hidden_state"),
    )
    return cad, rows


@recordings.each_case("set_inputs_first_pass")
def test_recorded_first_passes_come_out(case):
    _, given, want, scalars = case
    cad, rows = first_pass(given, scalars)
    num_tokens, index, new = rows[:3]
    assert num_tokens == scalars["num_tokens"]
    same(index, want["token_indices_to_sample"])
    ids = want["input_ids"][:num_tokens]
    same(rows.input_ids, np.where(ids == -4242, np.int32(-1), ids))  # never written: ours is -1
    same(rows.positions, want["positions"][:num_tokens])
    same(new.query_start_loc, want["query_start_loc"])
    np.testing.assert_array_equal(new.query_start_loc_cpu, want["query_start_loc_cpu"])
    same(new.seq_lens, want["seq_lens"])
    np.testing.assert_array_equal(new.seq_lens_cpu_upper_bound, want["seq_lens_cpu_upper_bound"])
    assert new.seq_lens_cpu_upper_bound.dtype == torch.int32
    same(new.slot_mapping, want["slot_mapping"])
    assert counts(new).items() <= scalars.items()
    assert new.causal == scalars["causal"]
    assert (new is cad) == (scalars["path"] == "eagle" or num_tokens == len(given["slot_mapping"]))
    if scalars["path"] == "dflash":
        same(rows.context_positions, want["context_positions"])
        same(rows.context_slot_mapping, want["context_slot_mapping"])
        return
    hidden = want["hidden_states"][:num_tokens]
    if rows.hidden_states is None:
        assert (hidden == -4242).all()
    else:
        written = (hidden != -4242).all(axis=1)
        got = rows.hidden_states.cpu().numpy()
        np.testing.assert_array_equal(got[written], hidden[written])  # float32, exact
    for name in ("is_rejected_token_mask", "is_masked_token_mask"):
        if name in want:
            same(getattr(rows, name), want[name])
        else:
            assert getattr(rows, name) is None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_hidden_states_keep_their_dtype_and_bits(dtype):
    hidden = torch.randn(5, 3, device=device()).to(dtype)
    mask = torch.tensor([7.0, 8.0, 9.0], device=device()).to(dtype)
    arguments = ints(1, 2, 3, 4, 5), ints(8, 9), longs(0, 1, 2, 0, 1)
    cad = metadata([0, 3, 5], [3, 2])
    rows = ops.set_inputs_first_pass(
        *arguments,
        hidden,
        None,
        cad,
        ints(1, 0),
        block_size=4,
        max_model_len=64,
        extra_slots_per_request=2,
        parallel_drafting_hidden_state_tensor=mask,
    )
    assert rows.is_masked_token_mask.tolist() == [0, 0, 1, 0, 0, 0, 1]
    want = torch.stack([*hidden[:2], mask, hidden[2] * 0, *hidden[3:], mask])
    assert rows.hidden_states.dtype == dtype
    assert torch.equal(rows.hidden_states[[0, 1, 2, 4, 5, 6]], want[[0, 1, 2, 4, 5, 6]])
    plain = ops.set_inputs_first_pass(
        *arguments, hidden, None, cad, None, block_size=4, max_model_len=64
    )
    assert torch.equal(plain.hidden_states, hidden)
    assert plain.hidden_states.data_ptr() != hidden.data_ptr()
    assert plain.positions.data_ptr() != arguments[2].data_ptr()


def test_positions_with_three_axes_pass_where_no_row_is_added():
    positions = torch.arange(15, device=device()).view(3, 5)
    rows = ops.set_inputs_first_pass(
        ints(1, 2, 3, 4, 5),
        ints(8, 9),
        positions,
        torch.zeros(5, 2, device=device()),
        ints(1, 4),
        metadata([0, 3, 5], [3, 2]),
        None,
        block_size=4,
        max_model_len=64,
    )
    same(rows.positions, positions.cpu().numpy())
    assert rows.input_ids[[0, 1, 3, 4]].tolist() == [2, 8, 5, 9]
    assert rows.token_indices_to_sample.tolist() == [1, 4]


def test_int64_beyond_32_bits_never_turns_negative():
    huge = 2**31 + 5
    slots, clamped, lengths = longs(0, 0), longs(0, 0), ints(7, 7)
    ops.eagle_step_update_slot_mapping_and_metadata(
        longs(huge, 2**40), ints(1, 2, 3, 4).view(2, 2), lengths, 4, 2**31 - 1, clamped, slots
    )
    assert (clamped.tolist(), slots.tolist(), lengths.tolist()) == ([0, 0], [-1, -1], [1, 1])
    cad = metadata([0, 1], [9], [[1, 2]])
    no = torch.zeros(1, dtype=torch.bool, device=device())
    assert ops.compute_new_slot_mapping(cad, longs(huge), no, 4, 0, 64).tolist() == [-1]
    token, count = ops.eagle_prepare_next_token_padded(longs(3, huge)[None], no, longs(5), 100)
    assert (token.tolist(), count.tolist()) == ([3], [1])
    rows = ops.copy_and_expand_eagle_inputs(
        ints(1, 2), longs(huge, huge + 1), ints(3), ints(0, 2), ints(1), 0, 7, 2, False
    )
    assert (rows.positions.diff() == 1).all() and (rows.positions > INT32_MAX - 100).all()
    block = ops.copy_and_expand_dflash_inputs(
        ints(3), longs(huge, huge + 1), ints(0, 2), ints(1, 2)[None], None, 7, 4, 3
    )
    assert (block.query_positions > INT32_MAX - 100).all()
