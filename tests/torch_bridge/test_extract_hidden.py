"""Hidden states stored from torch tensors, and the next tokens for the runner."""

from types import SimpleNamespace

import jax
import numpy as np
import pytest

torch = pytest.importorskip("torch")

from tests.support import recordings
from tests.support.counting import backend_compiles
from tests.support.torch_runner import vllm_config
from torch_bridge import ExtractHiddenStatesProposer

pytestmark = pytest.mark.any_device

DEVICE = torch.device("cuda:0" if jax.default_backend() == "gpu" else "cpu")
LAYERS, SIZE, PAGE = (2, 0), 8, 4


def make(num_drafts=1, hf_config=None, **speculative):
    hf_config = hf_config or {"eagle_aux_hidden_state_layer_ids": list(LAYERS)}
    config = vllm_config(
        "extract_hidden_states", num_drafts, hf_config=hf_config, page_size=PAGE, **speculative
    )
    config.model_config.hf_config = SimpleNamespace(hidden_size=SIZE, vocab_size=64)
    proposer = ExtractHiddenStatesProposer(config, DEVICE)
    proposer.load_model(target_model=None)
    return proposer


def states(rng, num_rows):
    values = rng.normal(size=(len(LAYERS), num_rows, SIZE))
    return list(torch.tensor(values, dtype=torch.float32, device=DEVICE))


def step(proposer, rng, slots, sampled):
    hidden = states(rng, len(slots))
    metadata = SimpleNamespace(slot_mapping=torch.tensor(slots, device=DEVICE))
    with torch.inference_mode():
        drafts = proposer.propose(
            sampled_token_ids=sampled,
            target_hidden_states=hidden,
            common_attn_metadata=metadata,
            slot_mappings=None,
        )
    return drafts, torch.stack(hidden, dim=1).cpu()


def test_states_are_read_back_by_page_and_padding_stores_nothing(rng):
    proposer = make()
    sampled = torch.tensor([[7, 1], [9, -1]], device=DEVICE)
    # Pages 5, 2 hold request 0; a row is padding, and one lies beyond the store.
    drafts, hidden = step(proposer, rng, [20, 21, 22, 23, 8, -1, 10**6], sampled)
    assert torch.equal(proposer.read_hidden_states([5, 2], 5), hidden[:5])
    assert drafts.tolist() == [[7], [9]]
    drafts.fill_(-1)
    assert sampled.tolist() == [[7, 1], [9, -1]], "the draft is a tensor of its own"
    _, later = step(proposer, rng, [9], sampled[:1])
    assert torch.equal(proposer.read_hidden_states([5, 2], 6), torch.cat([hidden[:5], later]))


def test_steps_of_all_sizes_in_a_bucket_compile_nothing(rng):
    proposer = make()
    proposer.dummy_run(8)
    sampled = torch.zeros((1, 1), dtype=torch.int32, device=DEVICE)
    step(proposer, rng, list(range(8)), sampled)
    with backend_compiles() as compiled:
        for size in (5, 6, 7, 8, 5):
            step(proposer, rng, list(range(size)), sampled)
    assert not compiled


@recordings.each_case("extract_hidden_states_next_token")
def test_the_next_token_is_the_recorded_one(case):
    _, given, wanted, scalars = case
    proposer = make()
    backup = given["backup_token_ids"]
    ids = [str(b) for b in range(len(backup))]
    batch = SimpleNamespace(
        num_reqs=len(ids),
        req_ids=ids,
        vocab_size=scalars["vocab_size"],
        num_tokens_no_spec=np.full(len(ids), 3),
    )
    requests = {
        name: SimpleNamespace(get_token_id={2: int(token)}.__getitem__)
        for name, token in zip(ids, backup, strict=True)
    }
    arguments = (
        torch.tensor(given["sampled_token_ids"], device=DEVICE),
        requests,
        batch,
        torch.tensor(given["discard_request_mask"], device=DEVICE),
    )
    for form in (arguments, (None, *arguments)):  # with and without the metadata in front
        token, count = proposer.prepare_next_token_ids_padded(*form)
        np.testing.assert_array_equal(token.cpu(), wanted["next_token_ids"])
        np.testing.assert_array_equal(count.cpu(), wanted["valid_sampled_tokens_count"])
        assert token.dtype == count.dtype == torch.int32


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"num_drafts": 2}, "num_speculative_tokens is 2, wanted 1"),
        ({"disable_padded_drafter_batch": True}, "disable_padded_drafter_batch is set"),
        ({"hf_config": {"hidden_size": 4}}, "no eagle_aux_hidden_state_layer_ids"),
    ],
)
def test_a_configuration_that_does_not_fit_is_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        make(**arguments)


def test_hidden_states_that_do_not_fit_are_refused(rng):
    proposer = make()
    sampled = torch.zeros((1, 1), dtype=torch.int32, device=DEVICE)
    metadata = SimpleNamespace(slot_mapping=torch.zeros(3, dtype=torch.int64, device=DEVICE))
    for wrong in (states(rng, 3)[:1], [*states(rng, 3)[:1], *states(rng, 2)[:1]]):
        with pytest.raises(ValueError, match="`target_hidden_states` has shapes"):
            proposer.propose(sampled, wrong, metadata)


@pytest.mark.parametrize(
    "name, value, error",
    [
        ("sampled_token_ids", [[1]], TypeError),
        ("sampled_token_ids", torch.zeros(1, dtype=torch.int32), ValueError),
        ("sampled_token_ids", torch.zeros((1, 1), dtype=torch.int32, device="meta"), ValueError),
        ("target_hidden_states", [], ValueError),
        ("target_hidden_states", None, TypeError),
        ("target_hidden_states", [None, None], TypeError),
        ("common_attn_metadata", None, TypeError),
        ("slot_mapping", None, TypeError),
        ("slot_mapping", torch.zeros(3), TypeError),
        ("slot_mapping", torch.zeros(2, dtype=torch.int64), ValueError),
    ],
)
def test_an_argument_that_does_not_fit_is_named(rng, name, value, error):
    proposer = make()
    slots = torch.zeros(3, dtype=torch.int64, device=DEVICE)
    given = {
        "sampled_token_ids": torch.zeros((1, 1), dtype=torch.int32, device=DEVICE),
        "target_hidden_states": states(rng, 3),
        "common_attn_metadata": SimpleNamespace(slot_mapping=slots),
    }
    assert proposer.propose(1, *given.values()).shape == (1, 1)
    if isinstance(value, torch.Tensor) and not value.is_meta:
        value = value.to(DEVICE)
    if name == "slot_mapping":
        name, value = "common_attn_metadata", SimpleNamespace(slot_mapping=value)
    with pytest.raises(error, match="ExtractHiddenStatesProposer: `"):
        proposer.propose(**given | {name: value})


@pytest.mark.parametrize(
    "row, error", [([0.5], TypeError), (None, TypeError), ([[0]], ValueError), (3, ValueError)]
)
def test_pages_to_read_that_are_no_row_are_refused(rng, row, error):
    proposer = make()
    with pytest.raises(error, match="ExtractHiddenStatesProposer: `block_table_row`"):
        proposer.read_hidden_states(row, 2)


def test_a_discard_mask_has_an_entry_for_each_request():
    proposer, requests = make(), {"a": SimpleNamespace(get_token_id=lambda index: 40 + index)}
    batch = SimpleNamespace(num_reqs=1, req_ids=["a"], vocab_size=64, num_tokens_no_spec=[3])
    sampled = torch.tensor([[5, 6]], device=DEVICE)
    for size in (1, 4):
        mask = torch.ones(size, dtype=torch.bool, device=DEVICE)
        token, _ = proposer.prepare_next_token_ids_padded(
            None, sampled, requests, batch, discard_request_mask=mask
        )
        assert token.tolist() == [42]
    with pytest.raises(ValueError, match="`discard_request_mask` has 0 entries, wanted 1 or more"):
        proposer.prepare_next_token_ids_padded(sampled, requests, batch, mask[:0])
