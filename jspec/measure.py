"""What a run of the loop amounts to: the numbers that the command line and benchmarks print."""

from typing import Any

from jspec.decode import Report


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
        result["speedup"] = report.tokens_per_second / plain.tokens_per_second
        result["identical_to_plain"] = identical(report, plain)
    return result


def merge(reports: list[Report]) -> Report:
    """Adds runs up into one, generations in order."""
    first, *rest = reports
    total = Report([*first.generations], first.stats, **_times(first))
    for report in rest:
        total.generations += report.generations
        total.stats += report.stats
        for name, value in _times(report).items():
            setattr(total, name, getattr(total, name) + value)
    return total


def _times(report: Report) -> dict[str, Any]:
    names = ("num_steps", "seconds", "prompt_seconds", "draft_seconds")
    return {name: getattr(report, name) for name in names}
