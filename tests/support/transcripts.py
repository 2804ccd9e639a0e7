"""Replays recorded runs of speculative decoding, step by step, and compares all that they hold."""

import contextlib
import dataclasses
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest

from jspec import metadata, proposers
from jspec.axes import PAD_SLOT, PAD_TOKEN
from jspec.checkpoint import Model
from jspec.models import llama
from jspec.models.kv_cache import KVCache
from jspec.proposers import _draft
from jspec.proposers._draft import DraftModel
from jspec.runtime.decode import Engine
from jspec.state import Batch, Drafts
from tests.support import recordings
from tests.support.heads import NEAR_TIE, gaps
from tests.support.paged import make_view, poisoned_cache

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
            num_drafts=steps,
            shift=True,
        )
    out = drafts.probs
    logits = model.logits(out.reshape(-1, out.shape[-1]))
    return drafts, out, logits.reshape(*out.shape[:2], -1)


class Recorded(NamedTuple):
    """What a loop did with the prompts of a recorded run.

    Attributes:
      name: of the run.
      steps: of each prompt.
      texts: tokens that each prompt got.
      num_chunks, most_at_once: as in `Transcript`.
    """

    name: str
    steps: list[list[Step]]
    texts: list[list[int]]
    num_chunks: int
    most_at_once: int


def record(
    name: str, model: Model, config: Any, params: Any, *, with_logits: bool = False, **engine: Any
) -> Recorded:
    """Decodes the prompts of a recorded run together.

    Args:
      name: folder of the recording.
      model: its target.
      config: its drafter's; `num_drafts` as recorded.
      params: the drafter's weights.
      with_logits: keeps the gap between the two best logits of each draft.
      **engine: of `Engine`; by default three prompts at once, which are read in chunks.
    """
    case, data = recordings.settings(name), recordings.expected(name)
    assert config.num_drafts == case["num_speculative_tokens"]
    assert case["temperature"] == 0 and not case["stop_on_eos"]
    prompts = [data[f"prompt_{i}"].tolist() for i in range(case["num_prompts"])]
    longest = max(len(data[f"full_output_{i}"]) for i in range(len(prompts)))
    chunk_size = min(8, max(map(len, prompts)) - 1)
    options = {"max_requests": 3, "chunk_size": chunk_size, "stop_ids": (), "drafting": "fixed"}
    engine = options | engine
    # So many tokens that the end of a request cuts no recorded step.
    recorder = Recorder(
        *(model, prompts, config, params),
        max_tokens=longest + config.num_drafts + 1,
        with_logits=with_logits,
        **engine,
    )
    texts = [generation.tokens for generation in recorder.run().generations]
    return Recorded(name, recorder.steps, texts, recorder.num_chunks, recorder.most_at_once)


def compare(run: Recorded) -> Transcript:
    """Compares every step of every prompt with the recording."""
    data, name = recordings.expected(run.name), run.name
    num_compared = num_skipped = num_tokens = num_steps = num_recorded_tokens = 0
    for i, steps in enumerate(run.steps):
        recorded = {key: data[f"{key}_{i}"] for key in _FIELDS}
        compared = _compare(f"{name}, prompt {i}", steps, recorded)
        num_compared += compared
        skipped = recorded["draft_tokens"].size - compared
        num_skipped += skipped
        num_steps += len(recorded["accepted"])
        num_recorded_tokens += int(recorded["accepted"].sum()) + len(recorded["accepted"])
        passes = steps[1 : 1 + len(recorded["accepted"])]
        num_tokens += sum(len(step.kept) for step in passes)
        if not skipped:
            wanted, most = recorded["full_output"].tolist(), len(recorded["output"])
            assert run.texts[i][: len(wanted)] == wanted, f"{name}, prompt {i}: another output"
            assert most == recordings.settings(name)["max_new_tokens"]
            assert recorded["output"].tolist() == run.texts[i][:most]
    return Transcript(
        num_compared=num_compared,
        num_skipped=num_skipped,
        num_chunks=run.num_chunks,
        most_at_once=run.most_at_once,
        acceptance_length=num_tokens / num_steps,
        recorded_acceptance_length=num_recorded_tokens / num_steps,
    )


def replay(name: str, *drafting: Any, **options: Any) -> Transcript:
    """Decodes the prompts of a recorded run and compares every step; arguments as `record`."""
    return compare(record(name, *drafting, **options))


_FIELDS = (
    *("output", "full_output", "step_start", "draft_tokens", "draft_gap"),
    *("verify_gap", "accepted", "new_tokens"),
)
_forward = jax.jit(llama.forward, static_argnames="config")


def target_logits(name: str, model: Model) -> list[np.ndarray]:
    """Runs the target over every recorded step as it was verified, without a cache of before.

    Returns:
      [steps, K + 2, V] of each prompt: after the last token before the known ones, after these, and
      after each draft.
    """
    data, num_prompts = recordings.expected(name), recordings.settings(name)["num_prompts"]
    texts, num_steps = [], []
    for i in range(num_prompts):
        prompt, output = data[f"prompt_{i}"].tolist(), data[f"full_output_{i}"].tolist()
        starts, drafts = data[f"step_start_{i}"].tolist(), data[f"draft_tokens_{i}"].tolist()
        pairs = zip(starts, drafts, strict=True)
        texts += [prompt + output[:start] + tokens for start, tokens in pairs]
        num_steps.append(len(starts))
    K, page_size = data["draft_tokens_0"].shape[1], 16
    pages = -(-max(map(len, texts)) // page_size)
    tables = np.arange(len(texts) * pages, dtype=np.int32).reshape(-1, pages)
    view = make_view(tables, [0] * len(texts), [len(x) for x in texts], page_size=page_size)
    rows = view.query_start[1:, None] + np.arange(-K - 2, 0, dtype=np.int32)
    logits, _, _ = _forward(
        model.config,
        model.params,
        np.concatenate(texts).astype(np.int32),
        view,
        poisoned_cache(model.config, num_pages=tables.size, page_size=page_size),
        logit_rows=rows.reshape(-1),
    )
    logits = np.asarray(logits).reshape(len(texts), K + 2, -1)
    return np.split(logits, np.cumsum(num_steps)[:-1])


def compare_verification(name: str, logits: list[np.ndarray]) -> None:
    """Compares the target's choices and the gaps behind them with the recorded ones."""
    data = recordings.expected(name)
    for i, rows in enumerate(logits):
        best, gap = rows.argmax(-1), gaps(rows)
        recorded = data[f"verify_gap_{i}"]
        clear = recorded >= NEAR_TIE
        np.testing.assert_array_equal(best[:, 1:][clear], data[f"verify_argmax_{i}"][clear])
        np.testing.assert_allclose(gap[:, 1:], recorded, atol=GAP_TOLERANCE)
        kept = [row[: n + 1] for row, n in zip(gap[:, 1:], data[f"accepted_{i}"], strict=True)]
        kept = np.concatenate([gap[0, :1], *kept])
        np.testing.assert_allclose(kept, data[f"output_gap_{i}"], atol=GAP_TOLERANCE)


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
