"""Default drafting is never slower than plain decoding: recorded text with simulated times.

The texts are SmolLM2-135M's own (float32) for the demo's prompts and four more questions, greedy
and at temperature 0.8, cut at 64 tokens. The time of a pass is that on two CPU cores.
"""

import functools
import itertools
import json
from pathlib import Path

import numpy as np
import pytest

import jspec
from jspec.axes import PAD_SLOT, PAD_TOKEN
from jspec.checkpoint import Model
from jspec.models.config import ModelConfig
from jspec.runtime import engine
from jspec.runtime.engine import Engine
from jspec.runtime.target import TargetOutput
from jspec.state import Verified

TEXTS = Path(__file__).parent / "smollm2_texts.jsonl"
NUM_TOKENS = 64
END = 2
LOOKUP = {"num_drafts": 7, "prompt_lookup_min": 2, "prompt_lookup_max": 4}
DRAFTERS = {
    "ngram": jspec.NgramConfig(**LOOKUP),
    "ngram_gpu": jspec.NgramConfig(**LOOKUP),  # the same drafts; on the device they take time
    "suffix": jspec.SuffixConfig(num_drafts=7),
}
# Milliseconds of the target by rows, and of a drafter on the device by requests.
ROWS, PASS = (1, 3, 6, 8, 24, 48, 64), (25.0, 40.0, 48.0, 52.0, 100.0, 185.0, 240.0)
RECORD, LOOK_UP = {1: 0.15, 8: 0.2}, {1: 0.2, 8: 0.4}


class Clock:
    """Stands for the module `time`: a second passes when somebody adds it."""

    now = 0.0

    def perf_counter(self):
        return self.now


class Replayed(Engine):
    """The loop, with recorded tokens in the target's place and counted time.

    Args:
      noise: deviation of the logarithm of what a pass takes.
    """

    def __init__(self, clock, records, config, max_requests, *, on_device, noise, drafting):
        self.clock, self.outputs = clock, [record["output"] for record in records]
        self.rng, self.noise = np.random.default_rng(0), noise
        sizes = ModelConfig.tiny(vocab_size=49152, max_positions=512)
        super().__init__(
            Model(sizes, {"embed": np.zeros((1, 1), np.float32)}, None, None, ()),
            [record["prompt"] for record in records],
            config,
            max_tokens=NUM_TOKENS,
            max_requests=max_requests,
            stop_ids=[END],
            drafting=drafting,
        )
        self.on_host = not on_device

    def _run_target(self, scheduled, width):
        milliseconds = np.interp(scheduled.token_ids.size, ROWS, PASS)
        self.clock.now += milliseconds * self.rng.lognormal(0, self.noise)
        tokens = np.full((self.scheduler.max_requests, self.scheduler.width), PAD_TOKEN, np.int32)
        for b, slot in enumerate(scheduled.request_slot):
            if slot == PAD_SLOT or scheduled.discard[b]:
                continue
            request = self.scheduler.running[int(slot)]
            written = self.outputs[request.index][len(request.tokens) - request.num_prompt :]
            end, count = scheduled.query_start[b + 1], scheduled.num_drafts[b]
            drafts = scheduled.token_ids[end - count : end].tolist()
            right = [a == b for a, b in zip(drafts, written, strict=False)]
            kept = written[: len(list(itertools.takewhile(bool, right))) + 1]
            tokens[b, : len(kept)] = kept
        return Verified(tokens=tokens), TargetOutput(None)

    def _draft(self, scheduled, verified):
        if not self.on_host:
            costs = LOOK_UP if self.scheduler.num_drafts else RECORD
            self.clock.now += costs[self.scheduler.max_requests]
        return super()._draft(scheduled, verified)


@functools.cache
def records():
    return [json.loads(line) for line in TEXTS.read_text().splitlines()]


def tokens_per_second(monkeypatch, kind, temperature, max_requests, config, **options):
    """Decodes four texts of a kind one after the other, or eight of them together."""
    some = [r for r in records() if (r["kind"], r["temperature"]) == (kind, temperature)]
    clock = Clock()
    monkeypatch.setattr(engine, "time", clock)
    count = 4 if max_requests == 1 else 8
    options = {"on_device": False, "noise": 0.0, "drafting": None} | options
    loop = Replayed(clock, some[:count], config, max_requests, **options)
    loop.warmup()
    report = loop.run()
    assert [g.tokens for g in report.generations] == [r["output"] for r in some[:count]]
    return report.tokens_per_second


@functools.cache
def plain(kind, temperature, max_requests):
    never = jspec.BatchSizeSchedule([(1, 1, 0)])
    with pytest.MonkeyPatch.context() as patch:
        return tokens_per_second(
            *(patch, kind, temperature, max_requests, jspec.NgramConfig(num_drafts=1)),
            drafting=never,
        )


CELLS = list(itertools.product(("copy", "humaneval", "chat"), (0.0, 0.8), (1, 8)))


@pytest.mark.parametrize("name", DRAFTERS)
def test_no_kind_of_text_decodes_slower_than_without_drafts(name, monkeypatch):
    for cell in CELLS:
        options = {"on_device": name == "ngram_gpu"}
        speed = tokens_per_second(monkeypatch, *cell, DRAFTERS[name], **options)
        assert speed > 0.97 * plain(*cell), cell


@pytest.mark.parametrize("max_requests", [1, 8])
def test_times_that_vary_by_a_tenth_mislead_the_loop_little(max_requests, monkeypatch):
    """The sum of some 65 such passes varies by 1.2 %."""
    cell = ("chat", 0.0, max_requests)
    speed = tokens_per_second(monkeypatch, *cell, DRAFTERS["ngram"], noise=0.1)
    assert speed > 0.95 * plain(*cell)


@pytest.mark.parametrize("name", DRAFTERS)
def test_copied_text_decodes_two_and_a_half_times_as_fast(name, monkeypatch):
    cell = ("copy", 0.0, 1)
    options = {"on_device": name == "ngram_gpu"}
    speed = tokens_per_second(monkeypatch, *cell, DRAFTERS[name], **options)
    assert speed > 2.5 * plain(*cell)


def test_verifying_all_drafts_is_slower_where_text_does_not_repeat(monkeypatch):
    """So the cells above can fail."""
    cell = ("chat", 0.8, 1)
    speed = tokens_per_second(monkeypatch, *cell, DRAFTERS["suffix"], drafting="fixed")
    assert speed < 0.9 * plain(*cell)
