"""Options of sampling, draft length and verification."""

import argparse
from collections.abc import Callable
from typing import Any, get_args

from jspec.runtime.policies import Adaptive
from jspec.runtime.target import Verification
from jspec.verification.sampling_params import sampling_params

_SAMPLING = ("temperature", "seed", "top_k", "top_p", "min_p")


def add_options(add: Callable[..., Any]) -> None:
    """Adds the options of decoding to a command."""
    add("--max-tokens", type=int, default=128, help="most tokens to add (default: 128)")
    add("--batch-size", type=int, default=1, help="prompts decoded together (default: 1)")
    add("--temperature", type=float, help="sample at this temperature (default: greedy)")
    add("--seed", type=int, help="with --temperature: random seed (default: 0)")
    add("--top-k", type=int, help="with --temperature: draw from the K best tokens")
    add("--top-p", type=float, help="with --temperature: draw from the best of this share")
    add("--min-p", type=float, help="with --temperature: least chance, relative to the best")
    add(
        "--verification",
        choices=get_args(Verification),
        help="with --temperature: keep drafts that the target draws, too (match, the default: the "
        "tokens of plain decoding), or by rejection sampling (the same distribution)",
    )
    add(
        "--draft-sampling",
        choices=("greedy", "probabilistic"),
        help="with --temperature and --drafter: draft the best tokens (default), or draw them, of "
        "which rejection sampling keeps more",
    )
    add(
        "--adaptive",
        action=argparse.BooleanOptionalAction,
        help="draft for the highest throughput, measured (default), or K tokens in every step",
    )


def check(arguments: argparse.Namespace, num_prompts: int) -> None:
    """Checks the options, before a model is loaded.

    Raises:
      ValueError: one is out of range, or has no effect without `--temperature`.
    """
    for name in ("max_tokens", "batch_size"):
        if getattr(arguments, name) < 1:
            raise ValueError(
                f"--{name.replace('_', '-')} ({name}) is {getattr(arguments, name)}, wanted 1 or "
                "more. Raise it."
            )
    given = [
        name
        for name in (*_SAMPLING, "verification", "draft_sampling")
        if name != "temperature" and getattr(arguments, name) is not None
    ]
    if given and arguments.temperature is None:
        raise ValueError(
            f"--{given[0].replace('_', '-')} has no effect without --temperature: greedy decoding "
            "has nothing to choose from. Pass both, or leave it out."
        )
    if arguments.draft_sampling is not None and not arguments.drafter:
        raise ValueError(
            "--draft-sampling has no effect without --drafter: drafters without weights have no "
            "distribution. Leave it out."
        )
    sampling_params("generate", num_prompts, **_sampling(arguments))


def target_options(arguments: argparse.Namespace) -> dict[str, Any]:
    """Returns the arguments of `jspec.runtime.benchmark.run` with and without a drafter."""
    sizes = {"max_tokens": arguments.max_tokens, "max_requests": arguments.batch_size}
    return sizes | _sampling(arguments)


def drafting_options(arguments: argparse.Namespace) -> dict[str, Any]:
    """Returns the additional arguments of runs with a drafter."""
    is_fixed = arguments.adaptive is False
    options: dict[str, Any] = {"drafting": "fixed" if is_fixed else Adaptive()}
    if arguments.verification is not None:
        options["verification"] = arguments.verification
    return options


def seeds(arguments: argparse.Namespace) -> list[int | None]:
    """Lists the seeds of a prompt's samples; None for greedy decoding."""
    if not arguments.temperature:
        return [None]
    return [(arguments.seed or 0) + n for n in range(arguments.num_samples)]


def keeps_tokens(arguments: argparse.Namespace) -> bool:
    """Whether verification keeps the tokens of plain decoding, not only their distribution."""
    return arguments.verification in (None, "match") or not arguments.temperature


def _sampling(arguments: argparse.Namespace) -> dict[str, Any]:
    return {name: getattr(arguments, name) for name in _SAMPLING}
