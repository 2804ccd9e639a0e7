"""Timed runs of the decode loop, and their figures for the command line and benchmarks."""

import statistics
import time
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from jspec.checkpoint import Model
from jspec.config import CacheConfig
from jspec.proposers.ngram import NgramConfig
from jspec.runtime.decode import Engine, Report, generate_plain
from jspec.runtime.policies import BatchSizeSchedule
from jspec.runtime.scheduling import OnTokens
from jspec.runtime.target import TargetOutput
from jspec.state import Drafts, Params, Scheduled, Verified


def summary(method: str, num_drafts: int, report: Report, plain: Report | None = None) -> dict:
    """Lists the figures of a run, ready for JSON.

    Args:
      method: the drafter's name, "none" for plain decoding.
      num_drafts: K; 0 for plain decoding.
      report: the run.
      plain: plain decoding of the same prompts, where it was run.

    Returns:
      Counts, rates and throughput. `mean_acceptance_length` is of passes with drafts, 1.0 without
      one, as each pass gives the target's own token; `tokens_per_step` is of all passes. Rates
      without a draft are 0.0; figures that were not measured are None.
    """
    stats = report.stats
    result: dict[str, Any] = {
        "method": method,
        "num_drafts": num_drafts,
        "prompts": len(report.generations),
        "tokens": report.num_tokens,
        "steps": report.num_steps,
        "draft_tokens": stats.num_draft_tokens,
        "accepted_tokens": stats.num_accepted_tokens,
        "acceptance_rate": stats.acceptance_rate,
        "tokens_per_step": report.tokens_per_step,
        "mean_acceptance_length": stats.mean_acceptance_length or 1.0,
        "acceptance_per_position": stats.acceptance_rate_per_pos if num_drafts else [],
        "tokens_per_second": report.tokens_per_second,
        "plain_tokens_per_second": None,
        "speedup": None,
        "identical_to_plain": None,
    }
    if plain is not None:
        result["plain_tokens_per_second"] = plain.tokens_per_second
        if plain.tokens_per_second:  # 0.0 where every prompt ended with its first token
            result["speedup"] = report.tokens_per_second / plain.tokens_per_second
        result["identical_to_plain"] = report.generations == plain.generations
    return result


def run(
    model: Model,
    prompts: Sequence[Sequence[int]],
    config: Any = None,
    params: Params = None,
    *,
    max_tokens: int,
    cache: CacheConfig,
    max_requests: int = 1,
    on_tokens: OnTokens | None = None,
    **options: Any,
) -> Report:
    """Decodes prompts, after a warm-up that is not timed.

    Args:
      model: the target.
      prompts: token ids.
      config: the drafter's; None for plain decoding.
      params: the drafter's weights.
      max_tokens: most tokens to add to each prompt.
      cache: sizes; the same in runs that are compared.
      max_requests: prompts decoded at the same time.
      on_tokens: see `jspec.generate`.
      **options: of sampling and, with a drafter, of drafting and verification: see
        `jspec.generate`.
    """
    sizes = {"max_tokens": max_tokens, "cache": cache}
    if config is None and max_requests == 1:
        first: dict[str, Any] = {name: _of_first(value) for name, value in options.items()}
        first["stop_ids"] = ()
        generate_plain(model, [[0, 0]], max_tokens=2, cache=cache, **first)
        return generate_plain(model, prompts, on_tokens=on_tokens, **sizes, **options)
    if config is None:
        config, options["drafting"] = _NEVER
    engine = Engine(model, prompts, config, params, max_requests=max_requests, **sizes, **options)
    engine.warmup()
    return engine.run(on_tokens)


def _of_first(option: Any) -> Any:
    """Returns an option for the first prompt alone."""
    return option if option is None or np.ndim(option) == 0 else option[:1]


_NEVER = NgramConfig(num_drafts=1), BatchSizeSchedule([(1, 1, 0)])
"""Plain decoding of a batch: a drafter and a policy that always chooses 0 drafts."""


def step_times(
    model: Model,
    prompts: Sequence[Sequence[int]],
    config: Any = None,
    params: Params = None,
    **options: Any,
) -> dict[str, float | None]:
    """Times drafting and verification separately, in a run that waits for the device after each.

    Args, options: as `run`.

    Returns:
      Mean latencies of steps that read no prompt, None without such a step: `draft_ms`, and
      `verify_ms` of the target's pass with verification.
    """
    if config is None:
        config, options["drafting"] = _NEVER
    engine = _Timed(model, prompts, config, params, **options)
    engine.warmup()
    engine.run()
    if not engine.steps:  # every prompt ended with its first token
        return {"draft_ms": None, "verify_ms": None}
    draft, verify = (statistics.fmean(seconds) for seconds in zip(*engine.steps, strict=True))
    return {"draft_ms": 1e3 * draft, "verify_ms": 1e3 * verify}


class _Timed(Engine):
    """An engine that waits for the device after verification and after drafting, and times both."""

    def __init__(self, *args: Any, **options: Any):
        super().__init__(*args, **options)
        self.steps: list[tuple[float, float]] = []
        self._draft_seconds = self._verify_seconds = 0.0

    def step(self, on_tokens: OnTokens | None = None) -> bool:
        """See `Engine`."""
        self._draft_seconds = self._verify_seconds = 0.0
        prompt_seconds = self.report.prompt_seconds
        ran = super().step(on_tokens)
        if ran and self.report.prompt_seconds == prompt_seconds:
            self.steps.append((self._draft_seconds, self._verify_seconds))
        return ran

    def _run_target(self, scheduled: Scheduled, width: int) -> tuple[Verified, TargetOutput]:
        begin = time.perf_counter()
        result = jax.block_until_ready(super()._run_target(scheduled, width))
        self._verify_seconds += time.perf_counter() - begin
        return result

    def _draft(self, scheduled: Scheduled, verified: Verified) -> Drafts:
        begin = time.perf_counter()
        drafts = jax.block_until_ready(super()._draft(scheduled, verified))
        self._draft_seconds += time.perf_counter() - begin
        return drafts
