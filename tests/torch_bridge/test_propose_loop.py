"""The recorded `propose` calls with the recordings' toy model, through torch tensors."""

from dataclasses import dataclass
from types import SimpleNamespace

import jax
import numpy as np
import pytest

torch = pytest.importorskip("torch")

from jspec import proposers
from jspec.proposers.base import Proposer, Reads
from tests.proposers import test_draft_loop
from tests.support import recordings, toy_loop
from tests.support.torch_runner import CommonAttentionMetadata, vllm_config
from tests.support.toy_loop import Case, assert_as_recorded, named
from torch_bridge import EagleProposer

pytestmark = pytest.mark.any_device

DEVICE = torch.device("cuda:0" if jax.default_backend() == "gpu" else "cpu")


@dataclass(frozen=True)
class ToyConfig:
    """Names a recorded call, whose model drafts."""

    name: str
    num_drafts: int
    vocab_size: int

    @classmethod
    def tiny(cls):
        """Returns the first recorded call."""
        return cls("eagle_k1", 1, 1)


TOY = Proposer(
    name="toy",
    Config=ToyConfig,
    init=lambda config, params, cache, max_requests: (),
    propose=lambda config, params, memory, batch, columns: toy_loop.propose(
        named(config.name), batch, steps=columns
    ),
    reads=lambda config: Reads(
        hidden_layers=(0,) if named(config.name).shift else (), hidden_size=3
    ),
)


class ToyProposer(EagleProposer):
    """The class under test, which lets the toy model draft."""

    methods = ("toy",)


def run(name, monkeypatch, device=DEVICE, **arguments):
    """Makes the recorded call; returns (what the model saw, drafts)."""
    case = named(name)
    monkeypatch.setitem(proposers.REGISTRY, "toy", TOY)
    num_drafts = case.num_speculative_tokens
    config = vllm_config(
        *("toy", num_drafts),
        max_model_len=case.max_model_len,
        page_size=case.block_size,
        max_requests=case.num_requests + 2,
    )
    proposer = ToyProposer(config, device)
    proposer.set_drafter(ToyConfig(name, num_drafts, case.vocab_size), None)
    tensors = {
        key: torch.tensor(value, device=device)
        for key, value in case.inputs.items()
        if key != "parallel_drafting_hidden_state"
    }
    start = torch.tensor(case.start)
    cad = CommonAttentionMetadata(
        query_start_loc=tensors.pop("query_start_loc"),
        query_start_loc_cpu=start,
        seq_lens=tensors.pop("seq_lens"),
        num_reqs=case.num_requests,
        num_actual_tokens=int(start[-1]),
        max_query_len=int(start.diff().max()),
        max_seq_len=int(case.inputs["seq_lens"].max()),
        block_table_tensor=tensors.pop("block_table"),
        slot_mapping=tensors.pop("slot_mapping"),
    )
    lengths = cad.seq_lens.clone()
    drafts = proposer.propose(
        token_indices_to_sample=tensors.pop("token_indices_to_sample", None),
        num_rejected_tokens_gpu=tensors.pop("num_rejected_tokens", None),
        common_attn_metadata=cad,
        sampling_metadata=None,
        **tensors,
        **arguments,
    )
    assert torch.equal(cad.seq_lens, lengths), "the caller's lengths were counted up"
    record = jax.tree.map(np.asarray, proposer._memory)
    tokens = drafts.cpu().numpy()
    return record, SimpleNamespace(tokens=tokens, num_drafts=(tokens >= 0).sum(axis=1))


@recordings.each_case("propose_loop")
def test_every_forward_and_draft_is_as_recorded(case, monkeypatch):
    record, drafts = run(case.name, monkeypatch)
    assert drafts.tokens.dtype == case.want["draft_token_ids"].dtype == np.int64
    assert_as_recorded(Case(case), record, drafts)


@recordings.of_this_repository
@pytest.mark.parametrize("name", test_draft_loop.ONE_OF_EACH_PATH)
def test_a_smaller_number_of_drafts_is_a_prefix(name, monkeypatch):
    for columns in (0, 1):
        _, drafts = run(name, monkeypatch, num_speculative_tokens=columns)
        np.testing.assert_array_equal(drafts.tokens, named(name).drafts[:, :columns])


@pytest.mark.gpu
def test_a_drafter_on_the_cpu_of_a_machine_with_a_gpu_drafts_the_same(monkeypatch):
    assert jax.default_backend() == "gpu"
    name = "eagle_decode_rejected"
    record, drafts = run(name, monkeypatch, device=torch.device("cpu"))
    assert_as_recorded(named(name), record, drafts)
