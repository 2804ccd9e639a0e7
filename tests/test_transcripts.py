"""Whole recorded runs of speculative decoding, replayed draft by draft."""

import functools

import pytest

import jspec
from tests.support import recordings
from tests.support.transcripts import compare, compare_verification, record, target_logits

pytestmark = pytest.mark.any_device


@functools.cache
def load(name):
    """Loads target and drafter of a recorded run."""
    case = recordings.settings(name)
    target = jspec.load(recordings.MODELS / case["target"], "float32")
    path, num_drafts = recordings.MODELS / case["draft"], case["num_speculative_tokens"]
    method = case["method"]
    return target, jspec.load(path, target=target, method=method, num_drafts=num_drafts)


@functools.cache
def run_of(name, with_logits):
    model, drafter = load(name)
    return record(name, model, *drafter, with_logits=with_logits)


@pytest.mark.parametrize(
    "with_logits", [pytest.param(False, marks=pytest.mark.slow), True], ids=["tokens", "gaps"]
)
@recordings.each_run()
def test_a_recorded_run_is_repeated_step_by_step(name, with_logits):
    run = run_of(name, with_logits)
    transcript = compare(run)
    assert transcript.num_compared > transcript.num_skipped
    if not transcript.num_skipped:
        assert transcript.acceptance_length == transcript.recorded_acceptance_length > 1
    assert transcript.num_chunks > 0 and transcript.most_at_once == min(3, len(run.texts))


@functools.cache
def target_logits_of(name):
    model, _ = load(name)
    return target_logits(name, model)


@recordings.each_run()
def test_the_target_verifies_each_recorded_step_with_the_recorded_gaps(name):
    compare_verification(name, target_logits_of(name))


@recordings.of_this_repository
@pytest.mark.parametrize("name", recordings.runs())
def test_no_draft_of_a_recorded_run_lies_behind_a_near_tie(name):
    transcript = compare(run_of(name, True))
    assert transcript.num_skipped == 0 and transcript.num_compared > 150
    assert transcript.acceptance_length > 2
