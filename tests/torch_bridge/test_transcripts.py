"""Recorded runs of speculative decoding, drafted by the PyTorch classes as a runner calls them."""

import json
from types import SimpleNamespace

import jax
import numpy as np
import pytest

torch = pytest.importorskip("torch")

import torch_bridge
from jspec.axes import PAD_SLOT, PAD_TOKEN
from tests.support import (
    recordings,
    transcripts,
)
from tests.support.torch_runner import Request, common_attn_metadata, vllm_config
from tests.test_transcripts import load

pytestmark = pytest.mark.any_device

DEVICE = torch.device("cuda:0" if jax.default_backend() == "gpu" else "cpu")


class BridgeRecorder(transcripts.Recorder):
    """The loop whose drafts a PyTorch class makes; `jspec.step` runs beside it, to compare."""

    proposer: "torch_bridge.EagleProposer"
    is_padded: bool
    num_compared = 0

    def _draft(self, scheduled, verified):
        drafts = super()._draft(scheduled, verified)
        step, kept = jax.device_get((scheduled, verified))
        num_requests = int((step.request_slot != PAD_SLOT).sum())
        tokens = kept.tokens[:num_requests]
        sampled = [[t for t in row if t != PAD_TOKEN] for row in tokens.tolist()]
        discard = step.discard[:num_requests]
        sampled = [[] if skip else row for row, skip in zip(sampled, discard, strict=True)]
        with torch.inference_mode():
            got = self._as_runner(step, tokens, sampled, discard)
        wanted = np.asarray(drafts.tokens)[:num_requests]
        assert got.dtype == torch.int64 and got.shape == wanted.shape
        compared = ~discard[:, None] & np.ones_like(wanted, bool)
        if isinstance(self.proposer, torch_bridge.MedusaProposer):
            compared &= wanted != PAD_TOKEN  # nothing that it is told says where a request ends
        np.testing.assert_array_equal(got.cpu().numpy()[compared], wanted[compared])
        with torch.inference_mode():
            got.fill_(-1)  # as the runner may
        type(self).num_compared += compared.sum()
        return drafts

    def _as_runner(self, step, tokens, sampled, discard):
        num_requests = len(sampled)
        running = [self.scheduler.running[int(s)] for s in step.request_slot[:num_requests]]
        names = [str(request.index) for request in running]
        requests = {
            name: Request(request.tokens + new, request.num_computed)
            for name, request, new in zip(names, running, sampled, strict=True)
        }
        input_batch = SimpleNamespace(
            num_reqs=num_requests,
            req_ids=names,
            vocab_size=self.model.config.vocab_size,
            num_tokens_no_spec=np.array([len(requests[name].tokens) for name in names]),
        )
        start = step.query_start[: num_requests + 1]
        counts = step.num_drafts[:num_requests]
        cad = common_attn_metadata(
            *(start, step.seq_lens[:num_requests], step.block_table[:num_requests]),
            page_size=self.state.cache.page_size,
            device=DEVICE,
        )
        num_rows = cad.num_actual_tokens
        ids = torch.tensor(step.token_ids[:num_rows], device=DEVICE)
        positions = torch.tensor(step.positions[:num_rows], device=DEVICE).long()
        hidden = None if step.hidden is None else torch.tensor(step.hidden[:num_rows]).to(DEVICE)
        proposer, rows, rejected, indices = self.proposer, slice(None), None, None
        if isinstance(proposer, torch_bridge.MedusaProposer):
            kept = [max(len(new), 1) for new in sampled]
            last = start[1:] - 1 - np.where(counts > 0, counts + 1 - kept, 0)
            return proposer.propose(target_hidden_states=hidden[torch.tensor(last)])
        if self.is_padded:
            next_ids, valid = proposer.prepare_next_token_ids_padded(
                cad,
                torch.tensor(tokens, device=DEVICE),
                requests,
                input_batch,
                torch.tensor(discard, device=DEVICE),
            )
            if counts.any():
                cu = torch.tensor(np.cumsum(counts, dtype=np.int32), device=DEVICE)
                spec = SimpleNamespace(cu_num_draft_tokens=cu, num_draft_tokens=counts.tolist())
                cad, indices, rejected = proposer.prepare_inputs_padded(cad, spec, valid)
        else:
            num_scheduled = dict(zip(names, np.diff(start).tolist(), strict=True))
            next_ids = proposer.prepare_next_token_ids_cpu(
                sampled, requests, input_batch, num_scheduled
            )
            if counts.any():
                cad, rows = proposer.prepare_inputs(cad, sampled, counts.tolist())
        return proposer.propose(
            target_token_ids=ids[rows],
            target_positions=positions[rows],
            target_hidden_states=None if hidden is None else hidden[rows],
            next_token_ids=next_ids,
            token_indices_to_sample=indices,
            common_attn_metadata=cad,
            sampling_metadata=None,
            num_rejected_tokens_gpu=rejected,
        )


CLASSES = {
    "draft_model": torch_bridge.DraftModelProposer,
    "eagle": torch_bridge.EagleProposer,
    "eagle3": torch_bridge.EagleProposer,
    "dflash": torch_bridge.DFlashProposer,
    "medusa": torch_bridge.MedusaProposer,
}


def forms(name):
    """Both forms of a runner's step, for one run of a method that reads hidden states."""
    runs = [run for run in recordings.runs() if recordings.settings(run)["method"] == "eagle3"]
    return (True, False) if name in runs[:1] else (True,)


@recordings.each_run()
def test_a_recorded_run_drafts_the_same_through_torch(name, monkeypatch):
    for is_padded in forms(name):
        replay_through_torch(name, is_padded, monkeypatch)


def replay_through_torch(name, is_padded, monkeypatch):
    case = recordings.settings(name)
    model, drafter = load(name)
    # An unfinished prompt continues from its last token in the padded form, as recorded, so the
    # prompts are read whole there.
    data = recordings.expected(name)
    longest = max(len(data[f"prompt_{i}"]) for i in range(case["num_prompts"]))
    sizes = {"chunk_size": 3 * longest} if is_padded else {}  # of three requests at once

    class Recorder(BridgeRecorder):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            limits = self.state.cache
            config = vllm_config(
                case["method"],
                case["num_speculative_tokens"],
                path=recordings.MODELS / case["draft"],
                hf_config=json.loads(
                    (recordings.MODELS / case["target"] / "config.json").read_text()
                ),
                max_model_len=limits.max_model_len,
                max_requests=3,
                num_pages=limits.num_pages,
                page_size=limits.page_size,
            )
            self.is_padded = is_padded
            self.proposer = CLASSES[case["method"]](config, DEVICE)
            self.proposer.load_model(recordings.MODELS / case["target"])

    monkeypatch.setattr(transcripts, "Recorder", Recorder)
    transcript = transcripts.replay(name, model, *drafter, **sizes)
    assert min(transcript.num_compared, Recorder.num_compared) > transcript.num_skipped
    assert (transcript.num_chunks > 0) is not is_padded
