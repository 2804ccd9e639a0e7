"""The registry: every method that jspec can draft with."""

import difflib
from typing import Any

from jspec.proposers import ngram, ngram_gpu, suffix
from jspec.proposers.base import Proposer

REGISTRY: dict[str, Proposer] = {
    module.PROPOSER.name: module.PROPOSER
    for module in (
        ngram,
        ngram_gpu,
        suffix,
    )
}

_BY_CONFIG = {proposer.Config: proposer for proposer in REGISTRY.values()}


def find(method: str) -> Proposer:
    """Returns the proposer that users call `method`.

    Raises:
      KeyError: no such method; the nearest names are offered.
    """
    if method not in REGISTRY:
        near = difflib.get_close_matches(str(method).lower(), REGISTRY, n=3, cutoff=0.4)
        hint = f"Did you mean {' or '.join(map(repr, near))}? " if near else ""
        raise KeyError(f"method {method!r} is unknown. {hint}Methods: {', '.join(REGISTRY)}.")
    return REGISTRY[method]


def of(config: Any) -> Proposer:
    """Returns the proposer whose Config class `config` is an instance of."""
    proposer = _BY_CONFIG.get(type(config))
    if proposer is None:
        wanted = ", ".join(p.Config.__name__ for p in REGISTRY.values())
        raise TypeError(
            f"config is a {type(config).__name__}, wanted one of {wanted}. "
            "Build it from jspec, for example jspec.NgramConfig(num_drafts=5)."
        )
    return proposer
