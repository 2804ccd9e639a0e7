"""Methods that a runner calls between verification and drafting: recordings, order, ownership."""

import copy
import dataclasses
from types import SimpleNamespace

import jax
import numpy as np
import pytest

torch = pytest.importorskip("torch")

from tests.support import recordings
from tests.support.torch_golden import counts, device, ints, metadata, same, tensors
from tests.support.torch_runner import no_waits
from torch_bridge.proposers.prepare import Preparing

pytestmark = pytest.mark.any_device


class Request:
    """A request as vLLM's runner keeps it: a prompt, and what came out so far."""

    def __init__(self, prompt, output=(), num_computed_tokens: int = 0):
        self.prompt, self.output = prompt, list(output)
        self.num_computed_tokens = num_computed_tokens

    def get_token_id(self, index: int) -> int:
        """Returns the token at a place; -1 behind the last."""
        if self.prompt is None:
            raise ValueError("prompt embeddings have no token ids")
        known = [*self.prompt, *self.output]
        return known[index] if index < len(known) else -1


def preparing() -> Preparing:
    it = Preparing()
    it.device, it.max_model_len = device(), 64
    return it


def batch_of(requests: dict[str, Request], vocab_size: int = 100) -> SimpleNamespace:
    """Makes the input batch of a step whose requests come in the dict's order."""
    lengths = [len(r.prompt or "123") + len(r.output) for r in requests.values()]
    return SimpleNamespace(
        req_ids=list(requests),
        num_reqs=len(requests),
        num_tokens_no_spec=np.array([*lengths, 9, 9], np.int32),  # longer than the batch
        vocab_size=vocab_size,
    )


# --- the next token


@recordings.each_case("eagle_prepare_next_token_padded")
def test_recorded_next_tokens_come_out_of_a_batch(case):
    _, given, want, scalars = case
    backup = given["backup_next_token_ids"]
    names = [f"r{i}" for i in range(len(backup))]
    requests = {name: Request([7, 8, int(b)]) for name, b in zip(names, backup, strict=True)}
    given = tensors(given)
    token, count = preparing().prepare_next_token_ids_padded(
        sampled_token_ids=given["sampled_token_ids"][:, : scalars["width"]],
        requests=requests,
        gpu_input_batch=batch_of(requests, scalars["vocab_size"]),
        discard_request_mask=given["discard_request_mask"],
    )
    same(token, want["next_token_ids"])
    same(count, want["valid_sampled_tokens_count"])


REQUESTS = {"a": Request([1, 2], [3]), "b": Request([4, 5, 6]), "c": Request([7], [8, 9])}


def padded_call(*leading, **changes):
    arguments = {
        "sampled_token_ids": ints(50, -1, -1, -1, 60, 61).view(3, 2),
        "requests": REQUESTS,
        "gpu_input_batch": batch_of(REQUESTS),
        "discard_request_mask": torch.tensor([False, False, True], device=device()),
    } | changes
    return preparing().prepare_next_token_ids_padded(*leading, **arguments)


def test_a_request_that_keeps_nothing_continues_from_its_last_known_token():
    token, count = padded_call()
    assert (token.tolist(), count.tolist()) == ([50, 6, 9], [1, 0, 0])
    assert token.dtype == count.dtype == torch.int32


def test_metadata_in_front_is_taken_and_not_read():
    want = [side.tolist() for side in padded_call()]
    cad = metadata([0, 2, 4, 6], [3, 3, 3])
    positional = (
        ints(50, -1, -1, -1, 60, 61).view(3, 2),
        REQUESTS,
        batch_of(REQUESTS),
        torch.tensor([False, False, True], device=device()),
    )
    it = preparing()
    for got in (
        padded_call(cad),
        padded_call(common_attn_metadata=cad),
        padded_call(None),
        it.prepare_next_token_ids_padded(*positional),
        it.prepare_next_token_ids_padded(cad, *positional),
        it.prepare_next_token_ids_padded(
            cad,
            *positional[:2],
            **{"gpu_input_batch": positional[2], "discard_request_mask": positional[3]},
        ),
    ):
        assert [side.tolist() for side in got] == want


def test_a_discard_mask_may_be_longer_than_the_batch():
    mask = torch.tensor([False, False, True, True, False, True], device=device())
    token, count = padded_call(discard_request_mask=mask)
    assert (token.tolist(), count.tolist()) == ([50, 6, 9], [1, 0, 0])


def test_a_prompt_of_embeddings_raises_as_the_request_does():
    requests = REQUESTS | {"b": Request(None)}
    with pytest.raises(ValueError, match="prompt embeddings"):
        padded_call(requests=requests, gpu_input_batch=batch_of(requests))
    requests = {"b": Request(None)}
    with pytest.raises(ValueError, match="prompt embeddings"):
        preparing().prepare_next_token_ids_cpu([[]], requests, batch_of(requests), {"b": 1})


def test_host_lists_are_refused_where_a_tensor_is_wanted():
    with pytest.raises(TypeError, match="sampled_token_ids.*list.*prepare_next_token_ids_cpu"):
        padded_call(sampled_token_ids=[[50], [51], [52]])
    with pytest.raises(TypeError, match="discard_request_mask.*int32.*bool"):
        padded_call(discard_request_mask=ints(0, 0, 1))
    with pytest.raises(TypeError, match="missing"):
        preparing().prepare_next_token_ids_padded(ints(1)[None], REQUESTS)


def test_on_the_host_an_unfinished_prefill_continues_with_its_next_prompt_token():
    requests = {
        "a": Request([1, 2], [3], num_computed_tokens=2),
        "b": Request([4, 5, 6, 7], num_computed_tokens=1),
        "c": Request([8], num_computed_tokens=1),
    }
    token = preparing().prepare_next_token_ids_cpu(
        sampled_token_ids=[[50, 51], [], np.array([], np.int64)],
        requests=requests,
        gpu_input_batch=batch_of(requests),
        num_scheduled_tokens={"a": 1, "b": 2, "c": 1},
    )
    same(token, np.array([51, 7, -1], np.int32))


# --- the rows


@recordings.each_case("prepare_inputs")
def test_recorded_batches_come_out_with_and_without_rejected_rows(case):
    _, given, want, scalars = case
    cad = metadata(given["query_start_loc"], given["seq_lens"], slots=given["slot_mapping"])
    before, values = vars(cad).copy(), copy.deepcopy(vars(cad))
    assert counts(cad) == scalars["padded"]

    moved = tensors(given)
    drafts = SimpleNamespace(
        cu_num_draft_tokens=moved["num_draft_tokens"].cumsum(0, dtype=torch.int32)
    )
    new, index, num_rejected = preparing().prepare_inputs_padded(
        common_attn_metadata=cad,
        spec_decode_metadata=drafts,
        valid_sampled_tokens_count=moved["num_sampled"],
    )
    same(index, want["padded_token_indices_to_sample"])
    same(num_rejected, want["padded_num_rejected"])
    same(new.query_start_loc, want["padded_query_start_loc"])
    same(new.seq_lens, want["padded_seq_lens"])
    same(new.slot_mapping, want["padded_slot_mapping"])
    assert counts(new) == scalars["padded"] and new.causal

    sampled = [list(range(n)) for n in given["num_sampled"]]
    kept, rows = preparing().prepare_inputs(
        common_attn_metadata=cad,
        sampled_token_ids=sampled,
        num_draft_tokens=given["num_draft_tokens"].tolist(),
    )
    same(rows, want["unpadded_token_indices"])
    same(kept.query_start_loc, want["unpadded_query_start_loc"])
    np.testing.assert_array_equal(kept.query_start_loc_cpu, want["unpadded_query_start_loc"])
    assert kept.query_start_loc_cpu.dtype == torch.int32
    same(kept.seq_lens, want["unpadded_seq_lens"])
    same(kept.slot_mapping, want["unpadded_slot_mapping"])
    assert counts(kept) == scalars["unpadded"] and kept.causal

    for name, value in before.items():  # nothing of the caller's was touched
        assert getattr(cad, name) is value
        if isinstance(value, torch.Tensor):
            assert torch.equal(value, values[name])


def test_rows_of_a_pass_for_graphs_are_cut_to_the_real_ones():
    cad = metadata([0, 3, 5], [9, 9], slots=np.arange(8))  # three rows of padding
    drafts = SimpleNamespace(cu_num_draft_tokens=ints(2, 3))
    new, index, num_rejected = preparing().prepare_inputs_padded(cad, drafts, ints(1, 2))
    assert (index.tolist(), num_rejected.tolist()) == ([0, 4], [2, 0])
    assert new.slot_mapping.tolist() == [0, 1, 2, 3, 4]
    assert (new.num_actual_tokens, new.max_query_len) == (5, 3)
    assert type(new) is type(cad) and new is not cad


def test_metadata_of_another_class_keeps_it_and_its_host_lengths_follow():
    @dataclasses.dataclass(frozen=True)
    class Frozen:
        base: object
        seq_lens_cpu_upper_bound: torch.Tensor
        _seq_lens_cpu: None = None

    plain = metadata([0, 3, 7], [10, 20])
    fields = vars(plain) | {"seq_lens_cpu": plain.seq_lens.cpu(), "mine": "kept"}
    frozen = Frozen(plain, plain.seq_lens.cpu())
    for name, value in fields.items():
        object.__setattr__(frozen, name, value)
    fields |= {"causal": False}
    object.__setattr__(frozen, "causal", False)
    for cad in (SimpleNamespace(**fields), frozen):
        kept, rows = preparing().prepare_inputs(cad, [[1], [1, 2, 3, 4]], [2, 3])
        assert type(kept) is type(cad) and kept.mine == "kept"
        assert rows.tolist() == [0, 3, 4, 5, 6]
        assert kept.query_start_loc.tolist() == [0, 1, 5]
        assert kept.seq_lens.tolist() == kept.seq_lens_cpu.tolist() == [8, 20]
        assert cad.seq_lens_cpu.tolist() == [10, 20]
        assert kept.causal and not cad.causal
    assert kept._seq_lens_cpu.tolist() == kept.seq_lens_cpu_upper_bound.tolist() == [8, 20]


def test_a_request_without_drafts_keeps_all_rows_whatever_it_sampled():
    kept, rows = preparing().prepare_inputs(metadata([0, 4, 6], [4, 9]), [[], [5]], [0, 1])
    assert rows.tolist() == [0, 1, 2, 3, 4]
    assert (kept.query_start_loc.tolist(), kept.seq_lens.tolist()) == ([0, 4, 5], [4, 8])


def test_a_request_that_kept_nothing_keeps_no_row():
    kept, rows = preparing().prepare_inputs(metadata([0, 3, 4], [9, 4]), [[], [5]], [2, 0])
    assert rows.tolist() == [3]
    assert (kept.query_start_loc.tolist(), kept.seq_lens.tolist()) == ([0, 0, 1], [6, 4])


def test_an_empty_batch_stays_empty():
    it, cad = preparing(), metadata([0], [])
    none = SimpleNamespace(cu_num_draft_tokens=ints())
    new, index, num_rejected = it.prepare_inputs_padded(cad, none, ints())
    assert (len(index), len(num_rejected), new.num_actual_tokens, new.max_query_len) == (0,) * 4
    kept, rows = it.prepare_inputs(cad, [], [])
    assert (len(rows), kept.num_actual_tokens, kept.max_seq_len) == (0, 0, 0)
    assert kept.query_start_loc.tolist() == [0]
    batch = batch_of({})
    assert len(it.prepare_next_token_ids_cpu([], {}, batch, {})) == 0
    token, count = it.prepare_next_token_ids_padded(
        ints().view(0, 2), {}, batch, torch.zeros(4, dtype=torch.bool, device=device())
    )
    assert (len(token), len(count)) == (0, 0)


def test_lists_that_do_not_fit_are_named():
    it, cad = preparing(), metadata([0, 3, 4], [9, 4])
    with pytest.raises(ValueError, match="sampled_token_ids.*1 entries, wanted 2"):
        it.prepare_inputs(cad, [[1]], [2, 0])
    with pytest.raises(ValueError, match="num_draft_tokens.*3 entries, wanted 2"):
        it.prepare_inputs(cad, [[1], [2]], [2, 0, 0])
    with pytest.raises(ValueError, match="request 0 has 3 rows, 2 drafts and 4 sampled"):
        it.prepare_inputs(cad, [[1, 2, 3, 4], [2]], [2, 0])
    with pytest.raises(ValueError, match="request 1 has 1 rows, 5 drafts"):
        it.prepare_inputs(cad, [[1], [2]], [2, 5])
    with pytest.raises(ValueError, match="cu_num_draft_tokens.*1 entries, wanted 2"):
        drafts = SimpleNamespace(cu_num_draft_tokens=ints(1))
        it.prepare_inputs_padded(cad, drafts, ints(1, 1))


def test_results_are_writable_behind_inference_mode():
    with torch.inference_mode():
        token, count = padded_call()
        cad = metadata([0, 3, 5], [9, 9])
        drafts = SimpleNamespace(cu_num_draft_tokens=ints(2, 3))
        _, index, num_rejected = preparing().prepare_inputs_padded(cad, drafts, ints(1, 2))
    assert (token.tolist(), index.tolist(), num_rejected.tolist()) == ([50, 6, 9], [0, 4], [2, 0])
    for x in (token, count, index, num_rejected):
        x.fill_(-1)
    token, _ = padded_call()
    assert token.tolist() == [50, 6, 9]


@pytest.mark.gpu
def test_the_padded_pair_waits_for_nothing():
    assert jax.default_backend() == "gpu"
    cad = metadata([0, 2, 4, 6], [9, 9, 9])
    drafts = SimpleNamespace(cu_num_draft_tokens=ints(1, 2, 3))
    sampled, mask = ints(50, -1, -1, -1, 60, 61).view(3, 2), torch.tensor([False] * 3).cuda()
    batch, it = batch_of(REQUESTS), preparing()

    def step():
        token, count = it.prepare_next_token_ids_padded(sampled, REQUESTS, batch, mask)
        return token, *it.prepare_inputs_padded(cad, drafts, count)[1:]

    want = [x.tolist() for x in step()]
    torch.cuda.synchronize()
    with no_waits():
        outputs = step()
    assert [x.tolist() for x in outputs] == want == [[50, 6, 61], [0, 1, 5], [1, 2, 0]]
