"""Loading from disk: target models, and drafters that go with a target.

The method is read off the checkpoint: every registered proposer says which ones are its own.
"""

import inspect
import re
from os import PathLike
from pathlib import Path
from typing import Any, overload

from jax.typing import DTypeLike

from jspec import checkpoint as checkpoints
from jspec import proposers
from jspec._checks import check_at_least, check_float_dtype, did_you_mean
from jspec.checkpoint import Checkpoint, Model
from jspec.proposers.base import Drafter, Proposer

_LISTED = 24
"""Names of tensors in an error."""

_COMMON = ("dtype", "num_drafts")
"""Keywords of every proposer's `load`; the others are the method's options."""


@overload
def load(path: str | PathLike[str], dtype: DTypeLike | None = None) -> Model: ...


@overload
def load(
    path: str | PathLike[str],
    dtype: DTypeLike | None = None,
    *,
    target: Model,
    method: str | None = None,
    num_drafts: int | None = None,
    **options: Any,
) -> Drafter: ...


def load(
    path: str | PathLike[str],
    dtype: DTypeLike | None = None,
    *,
    target: Model | None = None,
    method: str | None = None,
    num_drafts: int | None = None,
    **options: Any,
) -> Model | Drafter:
    """Loads a target model, or, with `target`, a drafter for it.

    Args:
      path: a Hugging Face folder (config.json and safetensors), a GGUF file, or `owner/name` or
        `owner/name@revision` of a model on the Hugging Face hub: see `jspec.checkpoint.resolve`.
      dtype: of the weights in memory; what the file holds is converted. By default bfloat16 for a
        target and the target's own for a drafter. Prefer float32 on a CPU, where XLA's bfloat16 is
        several times slower.
      target: the model that the drafter works for. What they share is one buffer: the embedding
        and the head, where the checkpoint has none or the same.
      method: a name in `jspec.REGISTRY`; by default the one that recognises the checkpoint.
      num_drafts: most drafts a request gets (K); by default the checkpoint's own number, else 5.
      **options: further choices of the method, see its page.

    Returns:
      The target; or a Drafter, whose config and params `jspec.init` takes.

    Raises:
      FileNotFoundError: a file is missing, or no model has that name.
      KeyError: no such method.
      TypeError: `path` is no path, `target` no Model, or an option that the method does not have.
      ValueError: a file is damaged, the architecture or an option of it is not supported, tensors
        and config do not fit (all are listed), or the checkpoint is not one method's.

    Example:
      model = jspec.load("path/to/Llama-3.1-8B-Instruct")
      drafter = jspec.load("path/to/EAGLE3-LLaMA3.1-Instruct-8B", target=model)
      jspec.generate(model, prompts, drafter.config, drafter.params, max_tokens=64)
    """
    path = checkpoints.resolve(path)
    if target is None:
        given = {"method": method, "num_drafts": num_drafts} | options
        given = [name for name, value in given.items() if value is not None]
        if given:
            raise ValueError(
                f"load: {', '.join(given)} is a drafter's, and `target` is missing. "
                f"{did_you_mean(given[0], ['dtype', 'target'])}Load the target first and pass "
                "target=model; to load a target, leave out the rest."
            )
        return _load_target(path, "bfloat16" if dtype is None else dtype)
    if not isinstance(target, Model):
        raise TypeError(
            f"load: `target` is a {type(target).__name__}, wanted a Model. Pass what "
            "jspec.load(path) returned for the target."
        )
    if num_drafts is not None:
        check_at_least("load", 1, num_drafts=num_drafts)
    dtype = check_float_dtype("load", target.params["embed"].dtype if dtype is None else dtype)
    proposer = None if method is None else _find(method)
    checkpoint = _open(path)
    if proposer is None:
        proposer = _recognise(checkpoint, path)
    assert proposer.load is not None  # `_find` and `_recognise` return no other
    _check_options(proposer, options)
    _check_positions(proposer, checkpoint.config)
    drafter = proposer.load(checkpoint, target, dtype=dtype, num_drafts=num_drafts, **options)
    most = target.config.max_positions
    if drafter.config.num_drafts >= most:
        says = "is configured for" if num_drafts is None else "is to make"
        raise ValueError(
            f"{path} {says} {drafter.config.num_drafts} drafts (block_size or speculative_tokens, "
            f"or num_drafts=), and its target has {most} positions, which they cannot fill. Pass "
            "num_drafts=, a smaller number."
        )
    return drafter


def _open(path: str | PathLike[str]) -> Checkpoint:
    if (Path(path) / "jspec.json").is_file():
        raise ValueError(f"{path} was written by jspec.save. Read it with jspec.restore.")
    return checkpoints.read(path)


def _load_target(path: str | PathLike[str], dtype: DTypeLike) -> Model:
    dtype = check_float_dtype("load", dtype)
    checkpoint = _open(path)
    if not {"model.embed_tokens.weight", "model.norm.weight"} <= set(checkpoint.names):
        methods = [p.name for p in _recognising(checkpoint, path)]
        if methods:
            raise ValueError(
                f"{path} is a drafter ({' or '.join(methods)}), not a target model. Load the "
                "target that it was trained for, and pass target=model with this path."
            )
    return checkpoints.as_model(checkpoint, dtype, source=path)


def _loadable() -> list[Proposer]:
    return [proposer for proposer in proposers.REGISTRY.values() if proposer.load is not None]


def _find(method: str) -> Proposer:
    proposer = proposers.find(method)
    if proposer.load is None:
        raise ValueError(
            f"load: method {method!r} has no weights to load. Build its config: "
            f"jspec.{proposer.Config.__name__}(...). Methods with weights: "
            f"{', '.join(p.name for p in _loadable())}."
        )
    return proposer


def _recognising(checkpoint: Checkpoint, path: str | PathLike[str]) -> list[Proposer]:
    named = checkpoint.config.get("architectures") or []
    if not isinstance(named, list) or not all(isinstance(name, str) for name in named):
        raise ValueError(
            f"{path}: architectures {named!r} are not supported, wanted a list of names. Take "
            "config.json from where the weights are from."
        )
    return [p for p in _loadable() if p.recognises(checkpoint.config, checkpoint.names)]


def _recognise(checkpoint: Checkpoint, path: str | PathLike[str]) -> Proposer:
    found = _recognising(checkpoint, path)
    if len(found) == 1:
        return found[0]
    if found:
        raise ValueError(
            f"{path} may be of method {' or '.join(p.name for p in found)}. Pass method= with one "
            "of them."
        )
    keys = ("architectures", "model_type", "speculators_model_type")
    config = {key: checkpoint.config[key] for key in keys if key in checkpoint.config}
    # Layers are listed together, so that a tensor that does not belong to the others is seen.
    names = list(dict.fromkeys(re.sub(r"\d+", "*", name) for name in checkpoint.names)) or ["none"]
    if len(names) > _LISTED:
        names[_LISTED:] = ["..."]
    raise ValueError(
        f"{path} is no drafter that jspec knows: config.json says {config}, tensors are "
        f"{', '.join(names)}. If it is one of {', '.join(p.name for p in _loadable())}, pass "
        "method=."
    )


def _check_options(proposer: Proposer, options: dict[str, Any]) -> None:
    """Refuses options that the method's `load` does not name."""
    assert proposer.load is not None
    accepted = [
        name
        for name, parameter in inspect.signature(proposer.load).parameters.items()
        if parameter.kind is parameter.KEYWORD_ONLY and name not in _COMMON
    ]
    unknown = [name for name in options if name not in accepted]
    if unknown:
        accepted = ["dtype", "method", "num_drafts", *accepted]
        raise TypeError(
            f"load: method {proposer.name!r} has no option {', '.join(unknown)}. "
            f"{did_you_mean(unknown[0], accepted)}Leave it out; options here: "
            f"{', '.join(accepted)}."
        )


def _check_positions(proposer: Proposer, config: dict[str, Any]) -> None:
    rope = config.get("rope_parameters") or config.get("rope_scaling")
    if isinstance(rope, dict) and "xdrope_section" in rope:
        raise NotImplementedError(
            f"load: method {proposer.name!r} does not support model type "
            f"{config.get('model_type')!r}: its positions have axes of XD-RoPE (xdrope_section "
            f"{rope['xdrope_section']!r}). Draft with a method that has no positions, such as "
            "ngram or suffix."
        )
