"""Comparison of the tokens of two runs, with the differences that rounding may explain."""

import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jspec import metadata
from jspec.checkpoint import Model
from jspec.config import CacheConfig
from jspec.models import llama
from jspec.models.kv_cache import KVCache
from jspec.runtime import scheduling
from jspec.runtime.decode import Report
from jspec.runtime.scheduling import RequestRows
from jspec.state import Params, Scheduled

_CHUNK = 64
"""Rows of a pass."""

_SHOWN = 12
"""Draft positions in a table."""

_ROUNDING = 2.0
"""Rounding error of a logit: so many units in the last place of the weights' dtype."""


def differences(
    model: Model,
    prompts: Sequence[Sequence[int]],
    report: Report,
    plain: Report | None,
    *,
    cache: CacheConfig,
    greedy: bool,
) -> dict[str, Any]:
    """Counts prompts that two runs continued differently, as entries for JSON.

    Args:
      model: the target.
      prompts: token ids of both runs.
      report: a run with drafts.
      plain: plain decoding; None if the runs are equal or not comparable.
      cache: sizes that hold a prompt and its continuation.
      greedy: whether tokens are argmaxes; near-ties of sampled tokens are not counted.

    Returns:
      `differing_prompts`, and `near_ties`: those of them whose first two different tokens have
      logits that differ by no more than the rounding error of the weights' dtype. None = unknown.
    """
    if plain is None:
        return {"differing_prompts": None, "near_ties": None}
    ties = count = 0
    for prompt, ours, theirs in zip(prompts, report.generations, plain.generations, strict=True):
        if ours == theirs:
            continue
        count += 1
        both = zip(ours.tokens, theirs.tokens, strict=False)
        at = next((i for i, (one, other) in enumerate(both) if one != other), None)
        if greedy and at is not None:
            logits = _logits_after(model, [*prompt, *theirs.tokens[:at]], cache)
            ties += _is_near_tie(logits, ours.tokens[at], theirs.tokens[at], model)
    return {"differing_prompts": count, "near_ties": ties if greedy else None}


def exit_code(model: Model, rows: Sequence[Mapping[str, Any]]) -> int:
    """Returns 1 if a run in float32 changed a token, else 0."""
    changed = any(row["identical_to_plain"] is False for row in rows)
    return int(changed and model.params["embed"].dtype == jnp.float32)


def join_positions(cells: Sequence[str]) -> str:
    """Joins the cells of the draft positions, at most the first `_SHOWN`."""
    return " ".join([*cells[:_SHOWN], *(["..."] if len(cells) > _SHOWN else [])])


def _is_near_tie(logits: np.ndarray, one: int, other: int, model: Model) -> bool:
    step = float(jnp.finfo(model.params["embed"].dtype).eps)
    gap = abs(float(logits[one]) - float(logits[other]))
    return gap <= _ROUNDING * step * float(np.abs(logits).max())


def _logits_after(model: Model, tokens: list[int], cache: CacheConfig) -> np.ndarray:
    """Runs the target over a text, and returns the logits of the next token."""
    kv, logits = llama.init_pages(model.config, cache), None
    pages = range(math.ceil(len(tokens) / cache.page_size))
    for start in range(0, len(tokens), _CHUNK):
        scheduled = scheduling.pack(
            [RequestRows(0, tokens[start : start + _CHUNK], start, 0, pages)],
            num_rows=_CHUNK,
            num_requests=1,
            pages_per_request=cache.pages_per_request,
        )
        logits, kv = _run(model.config, model.params, kv, jax.device_put(scheduled))
    return np.asarray(logits)


@functools.partial(jax.jit, static_argnames="config", donate_argnames="cache")
def _run(
    config: Any, params: Params, cache: KVCache, scheduled: Scheduled
) -> tuple[Float[Array, "V"], KVCache]:
    view = metadata.paged_view(
        scheduled, page_size=cache.page_size, max_model_len=cache.max_model_len
    )
    logits, _, cache = llama.forward(
        *(config, params, scheduled.token_ids, view, cache),
        logit_rows=scheduled.query_start[1:] - 1,
    )
    return logits[0], cache
