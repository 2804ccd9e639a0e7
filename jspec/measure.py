"""What a run of the loop amounts to: the numbers that the command line and benchmarks print."""

from collections.abc import Sequence
from typing import Any

from jspec.checkpoint import Model
from jspec.config import CacheConfig
from jspec.decode import Engine, Report, generate_plain
from jspec.scheduling import OnTokens
from jspec.state import Params


def identical(report: Report, plain: Report) -> bool:
    """Tells whether two runs continued every prompt with the same tokens."""
    return report.generations == plain.generations


def summary(method: str, num_drafts: int, report: Report, plain: Report | None = None) -> dict:
    """Sums a run up as plain numbers, ready for JSON.

    Args:
      method: the drafter's name, "none" for plain decoding.
      num_drafts: K; 0 for plain decoding.
      report: the run.
      plain: plain decoding of the same prompts, where it was run.

    Returns:
      Counts, rates and speeds. Acceptance length counts the target's own token, so plain
      decoding has 1.0; a rate without a draft is 0.0; what was not measured is None.
    """
    stats = report.stats
    drafts, drafted = stats.num_drafts, stats.num_draft_tokens
    by_position = stats.num_accepted_tokens_per_pos if num_drafts else []
    result: dict[str, Any] = {
        "method": method,
        "num_drafts": num_drafts,
        "prompts": len(report.generations),
        "tokens": report.num_tokens,
        "steps": report.num_steps,
        "draft_tokens": drafted,
        "accepted_tokens": stats.num_accepted_tokens,
        "acceptance_rate": stats.num_accepted_tokens / drafted if drafted else 0.0,
        "mean_acceptance_length": 1 + stats.num_accepted_tokens / drafts if drafts else 1.0,
        "acceptance_per_position": [count / drafts if drafts else 0.0 for count in by_position],
        "tokens_per_second": report.tokens_per_second,
        "plain_tokens_per_second": None,
        "speedup": None,
        "identical_to_plain": None,
    }
    if plain is not None:
        result["plain_tokens_per_second"] = plain.tokens_per_second
        if plain.tokens_per_second:  # 0.0 where every prompt ended with its first token
            result["speedup"] = report.tokens_per_second / plain.tokens_per_second
        result["identical_to_plain"] = identical(report, plain)
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
) -> Report:
    """Decodes prompts with everything compiled before the clock starts.

    Args:
      model: the target.
      prompts: token ids.
      config: the drafter's; None for plain decoding.
      params: the drafter's weights.
      max_tokens: most tokens to add to each prompt.
      cache: sizes; runs that are compared take the same.
      max_requests: prompts decoded at the same time (with a drafter).
      on_tokens: see `jspec.generate`.
    """
    sizes = {"max_tokens": max_tokens, "cache": cache}
    if config is None:
        generate_plain(model, [[0, 0]], max_tokens=2, cache=cache, stop_ids=())
        return generate_plain(model, prompts, on_tokens=on_tokens, **sizes)
    engine = Engine(model, prompts, config, params, max_requests=max_requests, **sizes)
    engine.warmup()
    return engine.run(on_tokens)
