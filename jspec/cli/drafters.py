"""Options of the drafter; its resolution and loading."""

import argparse
import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from jspec import proposers
from jspec.checkpoint import Model
from jspec.cli import models
from jspec.loading import load
from jspec.proposers.base import Drafter
from jspec.runtime import replay
from jspec.saving import restore
from jspec.suffix import files

HELP = "folder, .gguf file, or owner/name on the Hugging Face hub"

# Options that set a field of a drafter's config: that field, and the option's default; None = the
# config's own default.
_OPTIONS: dict[str, tuple[str, Any]] = {
    "num_drafts": ("num_drafts", 7),
    "min_n": ("prompt_lookup_min", 2),
    "max_n": ("prompt_lookup_max", 4),
    "min_prob": ("min_token_prob", None),
    "spec_factor": ("max_spec_factor", None),
    "warm_start": ("warm_start", None),
}


def add_options(add: Callable[..., Any]) -> None:
    """Adds the options of drafters to a command."""
    add("--num-drafts", type=int, metavar="K", help="most drafts per step (default: 7)")
    add("--min-n", type=int, help="ngram: shortest n-gram to look up (default: 2, at most --max-n)")
    add("--max-n", type=int, help="ngram: longest n-gram to look up (default: 4, at least --min-n)")
    add("--min-prob", type=float, help="suffix: least probability of a draft (default: 0.1)")
    add("--spec-factor", type=float, help="suffix: drafts per matched token (default: 1.0)")
    add("--warm-start", metavar="FILE", help="suffix: cache of responses to start from")


def without_weights(method: str, arguments: argparse.Namespace, others: Sequence[str] = ()) -> Any:
    """Builds a drafter's config before anything is loaded; None for plain decoding.

    Raises:
      KeyError: no such method.
      FileNotFoundError, ValueError: `--warm-start` is no cache of responses.
      ValueError: the method needs weights, or an option was given that affects neither it nor one
        of `others`.
    """
    options = _options_of(method)
    effective = options.union(*map(_options_of, others))
    _check_effect(arguments, effective, f"--method {method}", options)
    if method == "none":
        return None
    if arguments.warm_start is not None:
        files.read(arguments.warm_start)  # an error comes before a model is loaded
    fields = {}
    for option in options:
        field, default = _OPTIONS[option]
        given = getattr(arguments, option)
        value = default if given is None else given
        if value is not None:
            fields[field] = value
    # A default bound is moved to the other one, if that alone was passed and contradicts it.
    if arguments.min_n is not None and arguments.max_n is None and "max_n" in options:
        fields["prompt_lookup_max"] = max(fields["prompt_lookup_max"], arguments.min_n)
    elif arguments.max_n is not None and arguments.min_n is None and "min_n" in options:
        fields["prompt_lookup_min"] = min(fields["prompt_lookup_min"], arguments.max_n)
    return proposers.find(method).Config(**fields)


def find(option: str, name: str) -> Path:
    """Returns the path of a drafter, as `jspec.cli.models.find_on_disk`."""
    wanted = "a folder of a draft head or a draft model, owner/name of one on the hub, or a .gguf"
    return models.find_on_disk(option, name, f"Pass {wanted} file.")


def check_method(arguments: argparse.Namespace) -> None:
    """Raises KeyError or ValueError for a `--method` that is unknown or lacks `--target`."""
    if arguments.method is not None:
        proposers.find(arguments.method)
        if arguments.target is None:
            raise ValueError("--method has no effect without --target. Leave it out.")


def check(arguments: argparse.Namespace) -> None:
    """Checks the options given with `--drafter`, before its target is loaded.

    Raises:
      ValueError: the method has no weights, or an option has no effect.
    """
    method = arguments.method
    if method == "none" or (method and proposers.find(method).model_free):
        raise ValueError(
            f"--method {method} drafts without weights, and --drafter was given. Leave one out."
        )
    _check_effect(arguments, {"num_drafts"}, "--drafter", {"num_drafts"})


def from_disk(
    path: Path, arguments: argparse.Namespace, target: Model, method: str | None, **options: Any
) -> Drafter:
    """Loads the drafter of `--drafter` from the path that `find` returned."""
    if arguments.draft_sampling is not None:
        options["draft_sampling"] = arguments.draft_sampling
    return open_drafter(path, target, method=method, num_drafts=arguments.num_drafts, **options)


def open_drafter(
    path: str | Path,
    target: Model,
    *,
    method: str | None = None,
    num_drafts: int | None = None,
    **options: Any,
) -> Drafter:
    """Loads a drafter from a folder, a .gguf file or a folder of `jspec.save`.

    Raises:
      ValueError: a saved folder is of another method, holds a target, or was given options, which
        are those that it was saved with. And as `jspec.load` and `jspec.restore`.
    """
    if not models.is_saved(Path(path)):
        return load(path, target=target, method=method, num_drafts=num_drafts, **options)
    if num_drafts is not None or options:
        raise ValueError(
            f"{path} is a saved drafter, which keeps the options that it was saved with. Leave "
            "--num-drafts, --tree and --draft-sampling out, or load what it was converted from."
        )
    saved = restore(path, target)
    if isinstance(saved, Model):
        raise ValueError(
            f"{path} holds a target model. Convert the draft model with --target, or load what it "
            "was converted from."
        )
    name = proposers.of(saved.config).name
    if method not in (None, name):
        raise ValueError(f"{path} is of method {name}, not {method}. Leave the method out.")
    return saved


def _check_effect(
    arguments: argparse.Namespace, effective: set[str], owner: str, options: set[str]
) -> None:
    for option in _OPTIONS:
        if getattr(arguments, option) is not None and option not in effective:
            known = ", ".join(_spell(o) for o in _OPTIONS if o in options)
            raise ValueError(
                f"{_spell(option)} has no effect with {owner}. Leave it out"
                + (f"; options that have: {known}." if known else ".")
            )


def _options_of(method: str) -> set[str]:
    if method == "none":
        return set()
    proposer = proposers.find(method)
    if not proposer.model_free:
        raise ValueError(
            f"--method {method} needs weights. Run python -m jspec generate with --drafter PATH; "
            f"without weights draft {', '.join(replay.model_free())}."
        )
    fields = {field.name for field in dataclasses.fields(proposer.Config)}
    return {option for option, (field, _) in _OPTIONS.items() if field in fields}


def _spell(option: str) -> str:
    return f"--{option.replace('_', '-')}"
