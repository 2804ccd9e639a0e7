"""Whole recorded runs of speculative decoding, replayed draft by draft."""

import functools

import pytest

import jspec
from tests.conftest import GOLDEN
from tests.transcripts import load_case, replay

pytestmark = pytest.mark.any_device

CASES = [
    "e2e_llama_draft",
    "e2e_llama_eagle1",
    "e2e_llama_eagle3",
    "e2e_llama_medusa",
    "e2e_qwen3_dflash",
]


@functools.cache
def load(name):
    """Loads target and drafter of a recorded run."""
    case, _ = load_case(name)
    target = jspec.load(GOLDEN / "models" / case["target"], "float32")
    path, num_drafts = GOLDEN / "models" / case["draft"], case["num_speculative_tokens"]
    method = case["method"]
    return target, jspec.load(path, target=target, method=method, num_drafts=num_drafts)


@pytest.mark.parametrize("with_logits", [False, True], ids=["tokens", "gaps"])
@pytest.mark.parametrize("name", CASES)
def test_a_recorded_run_is_repeated_step_by_step(name, with_logits):
    model, drafter = load(name)
    transcript = replay(name, model, *drafter, with_logits=with_logits)
    assert transcript.num_skipped == 0, f"{transcript.num_skipped} drafts behind near ties"
    assert transcript.num_compared > 150
    assert transcript.acceptance_length == transcript.recorded_acceptance_length > 2
    assert transcript.num_chunks > 0 and transcript.most_at_once == 3
