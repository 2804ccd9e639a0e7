"""`python -m jspec bench-drafts`: replays recorded requests with every drafter without weights."""

import argparse
import json
from pathlib import Path
from typing import Any

import jax

from jspec.cli import drafters
from jspec.runtime import replay

HELP = "replay recorded requests through every drafter without weights"

EXAMPLES = """examples:
  python -m jspec bench-drafts requests.jsonl
  python -m jspec bench-drafts requests.jsonl --method ngram --method suffix --json
"""

_FIGURES = ("acceptance_length", "acceptance_rate", "drafted_share", "draft_us_per_token")


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of the command."""
    add = parser.add_argument
    add("file", help='JSON lines: {"prompt": [ids], "output": [ids], "segment": "chat"}')
    add("--method", action="append", help="replay this one; may be given several times")
    drafters.add_options(add)
    add("--max-requests", type=int, default=8, help="requests at the same time (default: 8)")
    add("--json", action="store_true", help="print one JSON object and nothing else")


def run(arguments: argparse.Namespace) -> int:
    """Runs the command, and returns its exit code."""
    methods = arguments.method or replay.model_free()
    configs = {
        method: drafters.without_weights(method, arguments, others=methods) for method in methods
    }
    if not Path(arguments.file).is_file():
        raise ValueError(
            f"{arguments.file} is no file, wanted JSON lines, which are read once for each "
            "drafter. Write recorded requests to a file, see python -m jspec bench-drafts --help."
        )
    longest = max((r.num_tokens for r in replay.read_records(arguments.file)), default=0)
    if not longest:
        raise ValueError(
            f"{arguments.file} holds no request, wanted one a line. Add some, see python -m jspec "
            "bench-drafts --help."
        )
    by_method = {
        method: replay.replay(
            replay.read_records(arguments.file),
            config,
            max_model_len=longest,
            max_requests=arguments.max_requests,
        )
        for method, config in configs.items()
    }
    segments = next(iter(by_method.values()))
    if arguments.json:
        numbers = {name: _segment(name, by_method) for name in segments}
        print(json.dumps({"device": jax.devices()[0].device_kind, "segments": numbers}))
        return 0
    for name in segments:
        _print_segment(name, _segment(name, by_method))
    return 0


def _segment(name: str, by_method: dict[str, dict[str, replay.Tally]]) -> dict[str, Any]:
    """Collects the results of every drafter in a segment."""
    tallies = {method: segments[name] for method, segments in by_method.items()}
    any_tally = next(iter(tallies.values()))
    return {
        "requests": any_tally.num_requests,
        "tokens": any_tally.num_tokens,
        "winner": replay.winner(tallies),
        "drafters": {
            method: {name: getattr(tally, name) for name in _FIGURES}
            for method, tally in tallies.items()
        },
    }


def _print_segment(name: str, numbers: dict[str, Any]) -> None:
    print(f"{name}: {numbers['requests']} requests, {numbers['tokens']} tokens after their first")
    print(
        f"  {'':14}{'tokens a step':>15}{'steps with drafts':>19}{'accepted':>10}{'us a token':>12}"
    )
    for method, row in numbers["drafters"].items():
        print(
            f"  {method:14}{row['acceptance_length']:15.2f}{row['drafted_share']:19.0%}"
            f"{row['acceptance_rate']:10.0%}{row['draft_us_per_token']:12.1f}"
        )
    winner = numbers["winner"]
    print(f"  winner: {winner}\n" if winner else "  no winner: no draft was ever accepted\n")
