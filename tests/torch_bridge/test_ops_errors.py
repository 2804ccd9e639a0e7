"""Errors of `torch_bridge.ops` name the invalid argument."""

import pytest

torch = pytest.importorskip("torch")

from tests.support.batches import unchecked
from tests.support.torch_golden import device, ints, longs, metadata
from torch_bridge import ops

pytestmark = pytest.mark.any_device


def good_step(**changes):
    arguments = {
        "positions_1d": longs(1, 2),
        "block_table_tensor": ints(1, 2, 3, 4).view(2, 2),
        "seq_lens": ints(2, 3),
        "block_size": 4,
        "max_model_len": 64,
        "out_clamped_positions": longs(0, 0),
        "out_slot_mapping": longs(0, 0, 0),
        "input_batch_size": 3,
    }
    arguments |= changes
    ops.eagle_step_update_slot_mapping_and_metadata(**arguments)


def good_pass(**changes):
    arguments = {
        "target_token_ids": ints(1, 2, 3),
        "next_token_ids": ints(4, 5),
        "target_positions": longs(0, 1, 2),
        "target_hidden_states": torch.zeros(3, 4, device=device()),
        "token_indices_to_sample": None,
        "cad": metadata([0, 2, 3], [2, 1]),
        "num_rejected_tokens_gpu": None,
        "block_size": 4,
        "max_model_len": 8,
        "extra_slots_per_request": 2,
        "parallel_drafting_hidden_state_tensor": torch.zeros(4, device=device()),
    }
    ops.set_inputs_first_pass(**(arguments | changes))


BAD = [
    (good_step, {"positions_1d": torch.zeros(2)}, TypeError, "positions_1d.*float32.*int32"),
    (good_step, {"positions_1d": [1, 2]}, TypeError, "positions_1d.*list.*as_tensor"),
    (good_step, {"positions_1d": torch.zeros(2, 1, dtype=torch.int64)}, ValueError, "positions_1d"),
    (good_step, {"seq_lens": torch.ones(1, dtype=torch.int32)}, ValueError, "seq_lens.*2 or more"),
    (good_step, {"seq_lens": torch.ones(2)}, TypeError, "seq_lens.*float32"),
    (
        good_step,
        {"block_table_tensor": torch.ones(1, 2, dtype=torch.int32)},
        ValueError,
        "block_table_tensor.*B = 2.*positions_1d",
    ),
    (
        good_step,
        {"block_table_tensor": torch.ones(2, 0, dtype=torch.int32)},
        ValueError,
        "block_table_tensor.*column",
    ),
    (
        good_step,
        {"out_slot_mapping": torch.zeros(2, dtype=torch.int64)},
        ValueError,
        "out_slot_mapping.*3 or more",
    ),
    (
        good_step,
        {"out_clamped_positions": torch.zeros(1, dtype=torch.int64)},
        ValueError,
        "out_clamped_positions",
    ),
    (good_step, {"input_batch_size": 1}, ValueError, "input_batch_size.*at least 2"),
    (good_step, {"block_size": 0}, ValueError, "block_size.*at least 1"),
    (good_step, {"max_model_len": 2.5}, TypeError, "max_model_len.*integer"),
    (good_pass, {"block_size": -1}, ValueError, "block_size"),
    (good_pass, {"target_token_ids": torch.zeros(3)}, TypeError, "target_token_ids"),
    (
        good_pass,
        {"next_token_ids": torch.zeros(3, dtype=torch.int32)},
        ValueError,
        "query_start_loc.*next_token_ids",
    ),
    (good_pass, {"target_positions": torch.zeros(2).long()}, ValueError, "target_positions"),
    (good_pass, {"target_hidden_states": None}, TypeError, "target_hidden_states.*NoneType"),
    (good_pass, {"target_hidden_states": torch.zeros(2, 4)}, ValueError, "target_hidden_states"),
    (
        good_pass,
        {"target_hidden_states": torch.zeros(3, 4, dtype=torch.float64)},
        TypeError,
        "target_hidden_states.*float64",
    ),
    (
        good_pass,
        {"parallel_drafting_hidden_state_tensor": None},
        ValueError,
        "parallel_drafting_hidden_state_tensor.*mask vector",
    ),
    (
        good_pass,
        {"num_rejected_tokens_gpu": torch.zeros(1, dtype=torch.int32)},
        ValueError,
        "num_rejected_tokens_gpu",
    ),
    (good_pass, {"extra_slots_per_request": 0}, ValueError, "extra_slots_per_request.*at least 1"),
    (
        good_pass,
        {"extra_slots_per_request": 1, "target_positions": torch.zeros(2).long()},
        ValueError,
        "target_positions.*T = 3",
    ),
]


@pytest.mark.parametrize(
    "call, changes, error, words",
    BAD,
    ids=lambda x: next(iter(x), "") if isinstance(x, dict) else "",
)
def test_what_does_not_fit_is_named(call, changes, error, words):
    call()
    moved = {k: x.to(device()) if isinstance(x, torch.Tensor) else x for k, x in changes.items()}
    with unchecked(), pytest.raises(error, match=words):
        call(**moved)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("added", [1, 2])
@pytest.mark.parametrize("kind", ["list", "sparse", "nested", "meta", "ints"])
def test_states_of_another_kind_are_refused_in_both_forms_of_the_first_pass(kind, added):
    states = torch.zeros(3, 4, device=device())
    states = {
        "list": lambda: [states],
        "sparse": states.to_sparse,
        "nested": lambda: torch.nested.nested_tensor([states[:1], states[1:]]),
        "meta": lambda: states.to("meta"),
        "ints": states.int,
    }[kind]()
    with unchecked(), pytest.raises((TypeError, ValueError), match="`target_hidden_states` "):
        good_pass(target_hidden_states=states, extra_slots_per_request=added)


@pytest.mark.parametrize("op", ["set_inputs_first_pass", "set_inputs_first_pass_dflash"])
@pytest.mark.parametrize(
    "name, value, words",
    [
        ("query_start_loc", None, "is a NoneType"),
        ("seq_lens", 3, "is a int"),
        ("block_table_tensor", torch.tensor(3), r"has shape \(\)"),
        ("seq_lens", torch.ones(2).int().to_sparse(), "is sparse"),
        ("query_start_loc_cpu", [0, 2, 3], "is a list"),
        ("query_start_loc_cpu", torch.tensor([0, 2]), "wanted 3 entries"),
        ("query_start_loc_cpu", torch.tensor([[0, 2, 3]]), "wanted 3 entries"),
        ("query_start_loc_cpu", torch.tensor([0, 2, 3]).to("meta"), "is on meta"),
        ("num_reqs", None, "is None, wanted an int"),
    ],
)
def test_metadata_that_does_not_fit_is_named(op, name, value, words):
    cad = metadata([0, 2, 3], [2, 1])
    value = value.to(device()) if name[-3:] != "cpu" and isinstance(value, torch.Tensor) else value
    setattr(cad, name, value)

    def dflash():
        drafts = dict(num_speculative_tokens=2, parallel_drafting_token_id=7, block_size=4)
        ops.set_inputs_first_pass_dflash(ints(4, 5), longs(0, 1, 2), cad, None, **drafts)

    call = dflash if op.endswith("dflash") else lambda: good_pass(cad=cad)
    with unchecked(), pytest.raises((TypeError, ValueError), match=f"{op}: .*`{name}`.*{words}"):
        call()


def test_other_arguments_that_do_not_fit_are_named():
    cad, no = metadata([0, 1], [9], [[1, 2]]), torch.zeros(2, dtype=torch.bool, device=device())
    with pytest.raises(ValueError, match="new_positions.*1 requests"):
        ops.compute_new_slot_mapping(cad, longs(1), no[:1], 4, 2, 64)
    with pytest.raises(ValueError, match="is_rejected_token_mask"):
        ops.compute_new_slot_mapping(cad, longs(1), no, 4, 0, 64)
    with pytest.raises(ValueError, match="`N` is -1.*at least 0"):
        ops.extend_all_queries_by_N(cad, -1, None, longs())
    with pytest.raises(TypeError, match="discard_request_mask.*int32.*bool"):
        ops.eagle_prepare_next_token_padded(ints(1)[None], ints(0), ints(5), 100)
    with pytest.raises(ValueError, match="backup_next_token_ids.*0 entries"):
        ops.eagle_prepare_next_token_padded(ints(1)[None], no, ints(), 100)
    with pytest.raises(ValueError, match="vocab_size"):
        ops.eagle_prepare_next_token_padded(ints(1)[None], no, ints(5), 0)
    with pytest.raises(ValueError, match="num_padding_slots_per_request"):
        one = ints(1)
        ops.copy_and_expand_eagle_inputs(one, one, one, ints(0, 1), ints(0), 0, 7, 0, False)
    with pytest.raises(ValueError, match="num_speculative_tokens"):
        ops.copy_and_expand_dflash_inputs(one, one, ints(0, 1), one[None], None, 7, 4, 0)
    with pytest.raises(ValueError, match="num_computed_tokens.*1 entries.*2 or more"):
        two = ints(0, 0)
        ops.update_num_computed_tokens_for_batch_change(ints(1), two, two, two, two, two)


def test_a_tensor_on_another_device_is_named():
    elsewhere = torch.zeros(3, dtype=torch.int32, device="meta")
    with pytest.raises(ValueError, match="valid_sampled_tokens_count.*meta.*Move it"):
        ops.eagle_prepare_inputs_padded(ints(1, 2), elsewhere, ints(0, 1, 2))
    with pytest.raises(ValueError, match="query_start_loc.*meta.*Move it"):
        one = ints(1)
        ops.copy_and_expand_eagle_inputs(one, one, one, elsewhere[:2], ints(0), 0, 7, 1, False)
