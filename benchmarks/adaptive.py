"""Default draft length against plain decoding on this CPU, by kind of text, batch and drafter.

    python benchmarks/adaptive.py --output benchmarks/results/adaptive-cpu.json
    python benchmarks/adaptive.py --cells copy-1-0,chat-8-0.8 --rounds 3

A cell is KIND-BATCH-TEMPERATURE. In each, plain decoding and the drafters without weights decode
the same prompts with interleaved steps, so that other work on the machine affects all of them
equally. Compilation, measurements and prefill are not counted. The medians of the rounds are
compared.
"""

import argparse
import contextlib
import itertools
import json
import os
import platform
import statistics
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import jax

from jspec import proposers
from jspec._user_cache import cache_folder
from jspec.checkpoint import Model
from jspec.cli.models import open_tokenizer
from jspec.config import CacheConfig
from jspec.demo.assets import fetch_smollm2
from jspec.demo.prompts import demo_prompts
from jspec.loading import load
from jspec.runtime import benchmark, scheduling
from jspec.runtime.engine import Report

KINDS, BATCHES, TEMPERATURES = ("copy", "humaneval", "chat"), (1, 8), (0.0, 0.8)
LOOKUP = {"num_drafts": 7, "prompt_lookup_min": 2, "prompt_lookup_max": 4}  # the commands' defaults
DRAFTERS = {"ngram": LOOKUP, "ngram_gpu": LOOKUP, "suffix": {"num_drafts": 7}}
QUESTIONS = (  # with the four of the demo a batch of eight different ones
    "Why is the sky blue during the day and red at sunset?",
    "Give me three tips for learning a new language.",
    "What should I pack for a weekend hike in the mountains?",
    "Explain how a bicycle stays upright while it is moving.",
)


class Cell(NamedTuple):
    """One comparison: kind of prompts, batch size and temperature."""

    kind: str
    batch: int
    temperature: float

    def __str__(self) -> str:
        return f"{self.kind}-{self.batch}-{self.temperature:g}"


CELLS = {
    str(cell): cell
    for cell in itertools.starmap(Cell, itertools.product(KINDS, BATCHES, TEMPERATURES))
}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--cells", default=",".join(CELLS), help="some of: %(default)s")
    parser.add_argument("--rounds", type=int, default=5, help="runs of each (default: 5)")
    parser.add_argument("--prompts", type=int, default=2, help="prompts at batch 1 (default: 2)")
    parser.add_argument("--max-tokens", type=int, default=64, help="tokens to add (default: 64)")
    parser.add_argument("--output", type=Path, help="JSON file to write")
    arguments = parser.parse_args()
    names = arguments.cells.split(",")
    unknown = set(names) - set(CELLS)
    if unknown:
        parser.error(f"--cells has {', '.join(sorted(unknown))}, wanted some of {', '.join(CELLS)}")
    jax.config.update("jax_compilation_cache_dir", str(cache_folder() / "compiled"))

    model = load(fetch_smollm2(), "float32")
    tokenizer = open_tokenizer(model)
    suite: dict[str, list[list[int]]] = {kind: [] for kind in KINDS}
    for prompt in demo_prompts():
        suite[prompt.kind].append(tokenizer.chat(prompt.text))
    suite["chat"] += map(tokenizer.chat, QUESTIONS)
    everything = list(itertools.chain(*suite.values()))
    begin = time.perf_counter()
    rows = []
    for cell in map(CELLS.__getitem__, names):
        count = arguments.prompts if cell.batch == 1 else cell.batch
        cache = scheduling.limits(model, everything, arguments.max_tokens, cell.batch, None, 1)
        rows += compare(model, cell, suite[cell.kind][:count], cache, arguments)
        print(
            f"{cell}:",
            ", ".join(f"{row['drafter']} {row['ratio']:.2f}" for row in rows[-len(DRAFTERS) :]),
            flush=True,
        )
    results = {
        "command": f"python benchmarks/adaptive.py --rounds {arguments.rounds} "
        f"--prompts {arguments.prompts} --max-tokens {arguments.max_tokens}",
        "device": f"{cpu()}, {os.cpu_count()} threads",
        "versions": {"python": platform.python_version(), "jax": jax.__version__},
        "model": "SmolLM2-135M-Instruct, float32",
        "drafters": DRAFTERS,
        "seconds": round(time.perf_counter() - begin),
        "cells": rows,
    }
    print("\n".join(table(rows)))
    if arguments.output:
        arguments.output.write_text(json.dumps(results, indent=2) + "\n")


def compare(
    model: Model, cell: Cell, prompts: list[list[int]], cache: CacheConfig, arguments: Any
) -> list[dict[str, Any]]:
    """Interleaves the steps of plain decoding and of the drafters."""
    configs = {"plain": None} | {
        name: proposers.find(name).Config(**options) for name, options in DRAFTERS.items()
    }
    options: dict[str, Any] = {"max_tokens": arguments.max_tokens, "cache": cache}
    if cell.temperature:
        options |= {"temperature": cell.temperature, "seed": list(range(len(prompts)))}
    speeds: dict[str, list[float]] = {name: [] for name in configs}
    last: dict[str, Report] = {}
    for _ in range(arguments.rounds):
        turns = Turns(list(configs))
        clocks = {name: Clock(turns, name, cell.batch) for name in configs}

        def decode(name: str, turns: Turns = turns, clocks: dict[str, "Clock"] = clocks) -> Report:
            with turns.of(name):
                return benchmark.run(
                    *(model, prompts, configs[name]),
                    max_requests=cell.batch,
                    on_tokens=clocks[name],
                    **options,
                )

        with ThreadPoolExecutor(len(configs)) as pool:
            last = dict(zip(configs, pool.map(decode, configs), strict=True))
        for name, clock in clocks.items():
            speeds[name].append(clock.tokens / clock.seconds)
    median = {name: statistics.median(turns) for name, turns in speeds.items()}
    rows = []
    for name in DRAFTERS:
        numbers = benchmark.summary(name, LOOKUP["num_drafts"], last[name], last["plain"])
        keys = ("tokens_per_step", "draft_tokens", "accepted_tokens", "identical_to_plain")
        rows.append(
            cell._asdict()
            | {"drafter": name, "ratio": median[name] / median["plain"]}
            | {"tokens_per_second": median[name], "plain_tokens_per_second": median["plain"]}
            | {key: numbers[key] for key in keys}
            | {"rounds": {n: [round(s, 2) for s in speeds[n]] for n in (name, "plain")}}
        )
    return rows


class Turns:
    """Lets one thread run at a time, in a fixed order."""

    def __init__(self, names: Sequence[str]):
        self._ring = deque(names)
        self._changed = threading.Condition()

    def wait(self, name: str) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._ring[0] == name)

    def give(self, name: str) -> None:
        with self._changed:
            assert self._ring[0] == name
            self._ring.rotate(-1)
            self._changed.notify_all()

    @contextlib.contextmanager
    def of(self, name: str) -> Iterator[None]:
        """Runs in its turn."""
        self.wait(name)
        try:
            yield
        finally:
            with self._changed:
                self._ring.remove(name)
                self._changed.notify_all()


class Clock:
    """Counts the tokens after the first of each prompt, and the time of passes without prefill.

    Those are the passes after the first token of each request in the batch. Called with the new
    tokens of a step, it returns after the others have run a step each.
    """

    def __init__(self, turns: Turns, name: str, batch: int):
        self.turns, self.name, self.batch = turns, name, batch
        self.tokens, self.seconds = 0, 0.0
        self._started: set[int] = set()
        self._begin = time.perf_counter()

    def __call__(self, index: int, tokens: list[int], num_accepted: int) -> None:
        seconds = time.perf_counter() - self._begin
        if index in self._started and len(self._started) >= self.batch:
            self.seconds += seconds
        self.tokens += len(tokens) - (index not in self._started)
        self._started.add(index)
        self.turns.give(self.name)
        self.turns.wait(self.name)
        self._begin = time.perf_counter()


def table(rows: list[dict[str, Any]]) -> list[str]:
    """Writes the ratios as Markdown, a line a cell."""
    lines = [
        f"| prompts | batch | temperature | plain, tokens/s | {' | '.join(DRAFTERS)} |",
        f"| --- |{' ---: |' * (3 + len(DRAFTERS))}",
    ]
    for _, cell in itertools.groupby(rows, lambda r: (r["kind"], r["batch"], r["temperature"])):
        first, *rest = cell
        ratios = " | ".join(f"{row['ratio']:.2f}" for row in (first, *rest))
        lines.append(
            f"| {first['kind']} | {first['batch']} | {first['temperature']:g} | "
            f"{first['plain_tokens_per_second']:.1f} | {ratios} |"
        )
    return lines


def cpu() -> str:
    with open("/proc/cpuinfo") as lines:
        return next((line.split(":")[1].strip() for line in lines if "model name" in line), "?")


if __name__ == "__main__":
    main()
