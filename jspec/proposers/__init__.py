"""The registry: every method that jspec can draft with."""

import difflib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jspec.axes import PAD_TOKEN
from jspec.proposers import (
    dflash,
    draft_model,
    eagle,
    eagle3,
    extract_hidden,
    medusa,
    mtp,
    ngram,
    ngram_gpu,
    suffix,
)
from jspec.proposers.base import Proposer
from jspec.state import Batch, Drafts, Memory, Params

REGISTRY: dict[str, Proposer] = {
    module.PROPOSER.name: module.PROPOSER
    for module in (
        ngram,
        ngram_gpu,
        suffix,
        eagle,
        eagle3,
        mtp,
        dflash,
        draft_model,
        medusa,
        extract_hidden,
    )
}


def find(method: str) -> Proposer:
    """Returns the proposer that users call `method`.

    Raises:
      KeyError: no such method; the nearest names are offered.
    """
    if not isinstance(method, str) or method not in REGISTRY:
        near = difflib.get_close_matches(str(method).lower(), REGISTRY, n=3, cutoff=0.4)
        hint = f"Did you mean {' or '.join(map(repr, near))}? " if near else ""
        raise KeyError(f"method {method!r} is unknown. {hint}Methods: {', '.join(REGISTRY)}.")
    return REGISTRY[method]


def of(config: Any) -> Proposer:
    """Returns the proposer whose Config class `config` is an instance of."""
    for proposer in REGISTRY.values():  # read at each call: users may add a method of their own
        if proposer.Config is type(config):
            return proposer
    wanted = ", ".join(p.Config.__name__ for p in REGISTRY.values())
    raise TypeError(
        f"config is a {type(config).__name__}, wanted one of {wanted}. "
        "Build it from jspec, for example jspec.NgramConfig(num_drafts=5)."
    )


def propose(
    config: Any, params: Params, memory: Memory, batch: Batch, *, num_drafts: int | None = None
) -> tuple[Memory, Drafts]:
    """Drafts with the proposer that `config` belongs to: the pure core.

    Args:
      config: static.
      params: its weights.
      memory: donated by the enclosing jit; of a host drafter rewritten in place.
      batch: the step; `max_drafts` caps each request.
      num_drafts: static; most drafts of a request, by default the config's.

    Returns:
      (memory, drafts).
    """
    most: int = config.num_drafts if num_drafts is None else num_drafts
    memory, drafts = of(config).propose(config, params, memory, batch, most)
    if most == drafts.tokens.shape[1] and batch.max_drafts is None:
        return memory, drafts
    return memory, _cut(drafts, most, batch.max_drafts)


def _cut(drafts: Drafts, num_drafts: int, max_drafts: Any) -> Drafts:
    """Keeps the first drafts of each request."""
    xp: Any = jnp if isinstance(drafts.tokens, jax.Array) else np
    count = xp.minimum(drafts.num_drafts, np.int32(num_drafts))
    if max_drafts is not None:
        count = xp.minimum(count, xp.maximum(max_drafts, np.int32(0)))
    kept = xp.arange(num_drafts, dtype=np.int32)[None] < count[:, None]
    tokens, parents, probs = (
        None if leaf is None else leaf[:, :num_drafts]
        for leaf in (drafts.tokens, drafts.parents, drafts.probs)
    )
    return Drafts(
        tokens=xp.where(kept, tokens, np.int32(PAD_TOKEN)),
        num_drafts=count,
        probs=None if probs is None else xp.where(kept[:, :, None], probs, np.float32(0)),
        parents=None if parents is None else xp.where(kept, parents, np.int32(PAD_TOKEN)),
    )
