"""Replays recorded runs of speculative decoding, step by step, and compares all that they hold."""

import contextlib
import dataclasses
import json
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest

from jspec import metadata, proposers
from jspec.axes import PAD_SLOT, PAD_TOKEN
from jspec.cache import KVCache
from jspec.checkpoint import Model
from jspec.decode import Engine
from jspec.proposers import _draft
from jspec.proposers._draft import DraftModel
from jspec.state import Batch, Drafts
from tests.conftest import GOLDEN

NEAR_TIE = 1e-3  # gap of the two best logits below which another choice is excused
GAP_TOLERANCE = 1e-3  # of gaps, float32, as the recordings' README says


class Step(NamedTuple):
    """What one prompt saw of a pass: tokens that it verified and kept, then its next drafts."""

    verified: list[int]
    kept: list[int]
    drafts: list[int]
    gaps: np.ndarray | None


class Transcript(NamedTuple):
    """How a replay went; it raised where something differed.

    Attributes:
      num_compared: drafts that were compared.
      num_skipped: drafts behind a near tie that were not.
      num_chunks: parts of prompts that were read before the last one.
      most_at_once: requests in one pass.
      acceptance_length: mean tokens of a step.
      recorded_acceptance_length: of the recording.
    """

    num_compared: int
    num_skipped: int
    num_chunks: int
    most_at_once: int
    acceptance_length: float
    recorded_acceptance_length: float


class Recorder(Engine):
    """The loop itself, which also notes each prompt's steps.

    Args:
      with_logits: drafts outside of `jspec.step`, to see the logits behind each draft.
    """

    def __init__(self, *args: Any, with_logits: bool = False, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.steps: list[list[Step]] = [[] for _ in self.scheduler.generations]
        self.num_chunks = self.most_at_once = 0
        self.step_with_logits = step_with_logits(self.state.config) if with_logits else None

    def _draft(self, scheduled, verified):
        gaps = None
        if self.step_with_logits is None:
            drafts = super()._draft(scheduled, verified)
        else:
            memory, drafts = self.step_with_logits(
                self.state.params, self.state.memory, scheduled, verified
            )
            self.state = dataclasses.replace(self.state, memory=memory)
            best = np.sort(drafts.probs, axis=-1)
            gaps = best[..., -1] - best[..., -2]  # [B, K, V] -> [B, K]
        on_host = jax.device_get(scheduled)
        live = [b for b, slot in enumerate(on_host.request_slot) if slot != PAD_SLOT]
        self.most_at_once = max(self.most_at_once, len(live))
        for b in live:
            if on_host.discard[b]:
                self.num_chunks += 1
                continue
            end, count = on_host.query_start[b + 1], on_host.num_drafts[b]
            tokens, num_drafts = np.asarray(drafts.tokens[b]), drafts.num_drafts[b]
            kept = np.asarray(verified.tokens[b])
            request = self.scheduler.running[int(on_host.request_slot[b])]
            self.steps[request.index].append(
                Step(
                    verified=on_host.token_ids[end - count : end].tolist(),
                    kept=kept[kept != PAD_TOKEN].tolist(),
                    drafts=tokens[:num_drafts].tolist(),
                    gaps=None if gaps is None else gaps[b],
                )
            )
        return drafts


@contextlib.contextmanager
def picking(pick: Any):
    """Picks drafts with `pick`; what it returns beside a token travels to `Drafts.probs`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_draft, "pick", pick)
        yield


def step_with_logits(config: Any):
    """Returns `jspec.step`'s body, whose `Drafts.probs` are the logits of each (greedy) draft.

    For drafters that pick with `_draft.pick`. The logits are those of draft ids where the drafter
    has a vocabulary of its own.
    """
    pick = _draft.pick

    def pick_and_tell(model, config, logits, batch, index):
        return pick(model, config, logits, batch, index)[0], logits

    @jax.jit  # of a new function, so that no executable of `jspec.step` is taken, or left behind
    def step(params, memory, scheduled, verified):
        batch = metadata.prepare(scheduled, verified, vocab_size=config.vocab_size)
        with picking(pick_and_tell):
            return proposers.propose(config, params, memory, batch)

    return step


def chain_with_outputs(
    model: DraftModel, config: Any, batch: Batch, cache: KVCache, *, steps: int
) -> tuple[Drafts, jax.Array, jax.Array]:
    """Drafts a greedy chain that reads hidden states, and returns what each draft was picked from.

    Returns:
      (drafts, out [B, K, D], logits [B, K, V']): what `model.run` gave, and its scores.
    """
    pick = _draft.pick

    def pick_and_tell(_, config, out, batch, index):
        return pick(model, config, model.logits(out), batch, index)[0], out

    with picking(pick_and_tell):
        _, drafts = _draft.chain(
            model._replace(logits=lambda out: out),
            config,
            batch,
            cache,
            page_size=cache.page_size,
            max_model_len=cache.max_model_len,
            steps=steps,
            shift=True,
        )
    out = drafts.probs
    logits = model.logits(out.reshape(-1, out.shape[-1]))
    return drafts, out, logits.reshape(*out.shape[:2], -1)


def load_case(name: str) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Reads the settings and the arrays of a recorded run."""
    folder = GOLDEN / "models" / name
    return json.loads((folder / "case.json").read_text()), dict(np.load(folder / "expected.npz"))


def replay(
    name: str, model: Model, config: Any, params: Any, *, with_logits: bool = False, **engine: Any
) -> Transcript:
    """Decodes the prompts of a recorded run together and compares every step of every prompt.

    Args:
      name: folder of the recording.
      model: its target.
      config: its drafter's; `num_drafts` as recorded.
      params: the drafter's weights.
      with_logits: also compares the gap between the two best logits of each draft.
      **engine: of `Engine`; by default three prompts at once, which are read in chunks.
    """
    case, data = load_case(name)
    assert config.num_drafts == case["num_speculative_tokens"]
    prompts = [data[f"prompt_{i}"].tolist() for i in range(case["num_prompts"])]
    longest = max(len(data[f"full_output_{i}"]) for i in range(len(prompts)))
    engine = {"max_requests": 3, "chunk_size": 8, "stop_ids": (), "drafting": "fixed"} | engine
    # So many tokens that the end of a request cuts no recorded step.
    recorder = Recorder(
        *(model, prompts, config, params),
        max_tokens=longest + config.num_drafts + 1,
        with_logits=with_logits,
        **engine,
    )
    report = recorder.run()
    num_compared = num_skipped = num_tokens = num_steps = num_recorded_tokens = 0
    for i in range(len(prompts)):
        recorded = {key: data[f"{key}_{i}"] for key in _FIELDS}
        compared = _compare(f"{name}, prompt {i}", recorder.steps[i], recorded)
        num_compared += compared
        skipped = recorded["draft_tokens"].size - compared
        num_skipped += skipped
        num_steps += len(recorded["accepted"])
        num_recorded_tokens += int(recorded["accepted"].sum()) + len(recorded["accepted"])
        passes = recorder.steps[i][1 : 1 + len(recorded["accepted"])]
        num_tokens += sum(len(step.kept) for step in passes)
        if not skipped:
            tokens, wanted = report.generations[i].tokens, recorded["full_output"].tolist()
            assert tokens[: len(wanted)] == wanted, f"{name}, prompt {i}: another output"
            assert wanted[: case["max_new_tokens"]] == recorded["output"].tolist()
    return Transcript(
        num_compared=num_compared,
        num_skipped=num_skipped,
        num_chunks=recorder.num_chunks,
        most_at_once=recorder.most_at_once,
        acceptance_length=num_tokens / num_steps,
        recorded_acceptance_length=num_recorded_tokens / num_steps,
    )


_FIELDS = (
    *("output", "full_output", "step_start", "draft_tokens", "draft_gap"),
    *("verify_gap", "accepted", "new_tokens"),
)


def _compare(where: str, steps: list[Step], recorded: dict[str, np.ndarray]) -> int:
    """Compares a prompt's steps with the recorded ones; returns how many drafts it compared.

    The pass that reads the end of the prompt drafts for recorded step 0; pass s + 1 verifies step
    s. A near tie ends the comparison, as what follows depends on it.
    """
    assert steps[0].verified == [] and steps[0].kept == recorded["full_output"][:1].tolist(), where
    num_known = num_compared = 0
    for s, wanted in enumerate(recorded["draft_tokens"]):
        at = f"{where}, step {s}"
        num_known += len(steps[s].kept)
        assert num_known == recorded["step_start"][s], at
        tied = np.flatnonzero(recorded["draft_gap"][s] < NEAR_TIE)
        end = tied[0] if len(tied) else len(wanted)
        assert steps[s].drafts[:end] == wanted[:end].tolist(), f"{at}: other drafts"
        if steps[s].gaps is not None:
            np.testing.assert_allclose(
                steps[s].gaps[:end], recorded["draft_gap"][s, :end], atol=GAP_TOLERANCE, err_msg=at
            )
        num_compared += int(end)
        if end < len(wanted) or recorded["verify_gap"][s].min() < NEAR_TIE:
            break
        new = recorded["new_tokens"][s]
        assert steps[s + 1].verified == wanted.tolist(), f"{at}: other drafts were verified"
        assert len(steps[s + 1].kept) - 1 == recorded["accepted"][s], f"{at}: another count"
        assert steps[s + 1].kept == new[new != PAD_TOKEN].tolist(), f"{at}: other tokens"
    return num_compared
