"""Every field of the runner's metadata, by call: carried, new, left out or refused."""

import dataclasses
from types import SimpleNamespace

import jax
import pytest

torch = pytest.importorskip("torch")

import jspec
from jspec.proposers import eagle
from tests.support.torch_golden import device, ints, longs, metadata
from tests.support.torch_runner import (
    CommonAttentionMetadata,
    vllm_config,
    with_every_field,
)
from torch_bridge import EagleProposer, MedusaProposer, ops
from torch_bridge.proposers.prepare import Preparing

pytestmark = pytest.mark.any_device

FIELDS = [field.name for field in dataclasses.fields(CommonAttentionMetadata)]
LEFT_OUT = {
    name: None
    for name in (
        *("logits_indices_padded", "num_logits_indices", "max_logits_per_req"),
        *("encoder_seq_lens", "encoder_seq_lens_cpu", "dcp_local_seq_lens_cpu"),
        *("dcp_local_seq_lens_cpu_upper_bound", "positions", "is_prefilling", "req_idx"),
        *("mm_req_doc_ranges", "rswa_prefix_lens", "replayssm_decode_base_cpu"),
        *("_num_computed_tokens_cache", "_token_to_req_indices_cache"),
    )
}


def given():
    """A pass of two requests: rows [3 1], lengths [17 14]; the last one is padding."""
    table = [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9], [10, 11, 12, 13, 14]]
    return with_every_field(metadata([0, 3, 4, 4], [17, 14, 0], table, slots=[14, 15, 16, 33]))


def preparing():
    it = Preparing()
    it.device, it.max_model_len = device(), 64
    return it


def padded(cad):
    drafts = SimpleNamespace(cu_num_draft_tokens=ints(2, 2, 2))
    return preparing().prepare_inputs_padded(cad, drafts, ints(1, 1, 0))[0]


def unpadded(cad):
    return preparing().prepare_inputs(cad, [[1], [2], []], [2, 0, 0])[0]


def extended(cad):
    return ops.extend_all_queries_by_N(cad, 2, None, longs(*range(8)))


def expanded(cad):
    return ops.set_inputs_first_pass(
        *(ints(1, 2, 3, 4), ints(5, 6, 0), longs(14, 15, 16, 13), None, None, cad, ints(1, 0, 0)),
        block_size=4,
        max_model_len=64,
        pass_hidden_states_to_model=False,
    ).cad


def block(cad):
    return ops.set_inputs_first_pass_dflash(
        *(ints(5, 6, 0), longs(14, 15, 16, 13), cad, ints(1, 0, 0)),
        num_speculative_tokens=2,
        parallel_drafting_token_id=9,
        block_size=4,
    ).cad


# What a call writes; None leaves a field out, and what is not here goes along as it is.
WRITTEN = {
    padded: LEFT_OUT
    | {"num_actual_tokens": 4, "max_query_len": 3, "slot_mapping": [14, 15, 16, 33]}
    | {"causal": True},
    unpadded: LEFT_OUT
    | {"query_start_loc": [0, 1, 2, 2], "query_start_loc_cpu": [0, 1, 2, 2]}
    | {"seq_lens": [15, 14, 0], "_seq_lens_cpu": [15, 14, 0]}
    | {"seq_lens_cpu_upper_bound": [15, 14, 0], "num_actual_tokens": 2, "max_seq_len": 15}
    | {"slot_mapping": [14, 33], "causal": True},
    extended: {"query_start_loc": [0, 5, 8, 8], "query_start_loc_cpu": [0, 5, 8, 8]}
    | {"seq_lens": [19, 16, 0], "num_actual_tokens": 8, "max_query_len": 5, "max_seq_len": 19}
    | {"slot_mapping": [*range(8)]},
    expanded: {"query_start_loc": [0, 4, 6, 6], "query_start_loc_cpu": [0, 4, 6, 6]}
    | {"seq_lens": [18, 15, 0], "num_actual_tokens": 6, "max_query_len": 4, "max_seq_len": 18}
    | {"slot_mapping": [14, 15, 16, -1, 33, 34, -1]},
    block: LEFT_OUT
    | {"query_start_loc": [0, 3, 6, 6], "query_start_loc_cpu": [0, 3, 6, 6]}
    | {"seq_lens": [19, 17, 0], "seq_lens_cpu_upper_bound": [20, 17, 0]}
    | dict.fromkeys(["_seq_lens_cpu", "_num_computed_tokens_cpu", "dcp_local_seq_lens"])
    | {"num_actual_tokens": 6, "max_query_len": 3, "max_seq_len": 20, "causal": False}
    | {"slot_mapping": [16, 17, 18, 34, 35, 36, -1, -1, -1]},
}


def taken(value):
    return value.tolist() if hasattr(value, "tolist") else value


@pytest.mark.parametrize("call", WRITTEN)
def test_every_field_is_carried_made_anew_or_left_out(call):
    cad = given()
    assert all(getattr(cad, name) is not None for name in FIELDS)
    before = {name: getattr(cad, name) for name in FIELDS}
    values = {name: taken(value) for name, value in before.items()}
    new, written = call(cad), WRITTEN[call]
    assert type(new) is type(cad) and new is not cad
    for name in FIELDS:
        if name in written:
            assert taken(getattr(new, name)) == written[name], name
        else:
            assert getattr(new, name) is before[name], name
        assert getattr(cad, name) is before[name] and taken(before[name]) == values[name], name


@pytest.mark.parametrize("call", WRITTEN)
def test_a_field_that_the_caller_has_not_set_stays_unset(call):
    filled = given()
    cad = dataclasses.replace(filled, **dict.fromkeys(FIELDS[FIELDS.index("causal") + 1 :]))
    new = call(cad)
    unset = [name for name in FIELDS[FIELDS.index("causal") + 1 :] if getattr(new, name) is None]
    told = {"_seq_lens_cpu", "seq_lens_cpu_upper_bound"} if call is unpadded else set()
    assert set(FIELDS[FIELDS.index("causal") + 1 :]) - set(unset) == told


@pytest.mark.parametrize("call", WRITTEN)
def test_an_object_with_some_of_the_fields_gets_no_others_and_keeps_its_own(call):
    names = [*FIELDS[: FIELDS.index("causal")], "positions"]
    cad = SimpleNamespace(**{name: getattr(given(), name) for name in names}, mine="kept")
    new = call(cad)
    assert new.mine == "kept"
    assert vars(new).keys() - {"causal"} == vars(cad).keys()
    assert (new.positions is None) == ("positions" in WRITTEN[call])


def test_a_first_pass_without_more_rows_hands_the_metadata_on():
    cad = given()
    rows = ops.set_inputs_first_pass(
        *(ints(1, 2, 3, 4), ints(5, 6, 0), longs(14, 15, 16, 13)),
        *(torch.zeros(4, 2, device=device()), None, cad, ints(1, 0, 0)),
        block_size=4,
        max_model_len=64,
    )
    assert rows.cad is cad


def eagle_arguments(cad):
    return {
        "target_token_ids": ints(1, 2, 3, 4),
        "target_positions": longs(14, 15, 16, 13),
        "target_hidden_states": torch.ones(4, 32, device=device()),
        "next_token_ids": ints(5, 6, 0),
        "token_indices_to_sample": None,
        "common_attn_metadata": cad,
    }


def test_propose_writes_no_field_and_refuses_pages_that_are_split_over_ranks():
    config = jspec.EagleConfig.tiny()
    drafter = EagleProposer(vllm_config("eagle", 3, max_model_len=64, page_size=4), device())
    drafter.set_drafter(config, eagle.PROPOSER.init_params(config, jax.random.key(0), "float32"))
    cad = given()
    with pytest.raises(NotImplementedError, match="common_attn_metadata.dcp_local.*split over"):
        drafter.propose(**eagle_arguments(cad))
    cad = dataclasses.replace(cad, dcp_local_seq_lens=None)
    before = {name: (getattr(cad, name), taken(getattr(cad, name))) for name in FIELDS}
    drafter.propose(**eagle_arguments(cad))
    for name, (value, copied) in before.items():
        assert getattr(cad, name) is value and taken(value) == copied, name


@pytest.mark.parametrize("name", ["decode_context_parallel_size", "prefill_context_parallel_size"])
def test_context_parallelism_is_refused_at_construction(name):
    config = vllm_config("eagle", 3)
    setattr(config.parallel_config, name, 2)
    with pytest.raises(NotImplementedError, match=f"EagleProposer: `parallel_config.{name}`"):
        EagleProposer(config, device())
    config.speculative_config.method = "medusa"
    MedusaProposer(config, device())  # which has no pages
