"""Steps that `jspec.warmup` compiled for a state; another one warns or raises.

A jitted function runs its Python body only where JAX traces it for new shapes, right before it
compiles. So `check` stands in that body, and costs nothing in a step that is compiled. What is
traced already, by another state or by a caller's own jit, passes unseen: most of it is compiled.
"""

import dataclasses
import sys
import threading
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import jax

from jspec.state import Params, Scheduled, State, Verified, Warmed

_running = threading.local()
"""`record` of the state whose step runs in this thread."""

_FIXES = {
    "token_ids": "Pad the rows up to a size of Buckets.tokens, or add this one there.",
    "positions": "Positions of three axes are warmed by Buckets(axes=3), others by axes=1.",
    "query_start": "Pad the requests up to a size of Buckets.requests, or add this one there.",
    "block_table": "Pad it with -1 to cache.pages_per_request columns.",
    "hidden": "Convert it, or name its dtype in Buckets.hidden_dtype.",
    "embeds": "Pass Buckets(embeds=True), with their dtype as hidden_dtype.",
    "max_drafts": "Pass it in every step and Buckets(max_drafts=True), or in none.",
    "verified.tokens": "Pad it with -1 to num_drafts + 1 columns.",
    "num_drafts=": "Add it to Buckets.num_drafts.",
    "params": "Call jspec.warmup again: the weights are others than those of the warmed state.",
}


def forms_of(
    params: Params, step: Scheduled, verified: Verified | None, num_drafts: int
) -> dict[str, Any]:
    """Names what an executable depends on, beside a state's config and memory.

    Args:
      params: weights.
      step: Scheduled, or the Batch that it became.
      verified: of a Scheduled.
      num_drafts: columns of the drafts.
    """
    fields = {field.name: getattr(step, field.name) for field in dataclasses.fields(step)}
    if verified is not None:
        fields["verified.tokens"] = verified.tokens
    forms = {name: None if x is None else (x.dtype.name, x.shape) for name, x in fields.items()}
    leaves, structure = jax.tree.flatten(params)
    weights = structure, tuple((leaf.dtype.name, leaf.shape) for leaf in leaves)
    return forms | {_COLUMNS: num_drafts, "params": weights}


def note(state: State, owner: str, forms: Mapping[str, Any]) -> None:
    """Records that a call of `owner` with these forms is compiled."""
    known = state.warmed.forms.setdefault(owner, [])
    if forms not in known:
        known.append(forms)


def call(state: State, is_traced: bool, function: Callable, *step: Any, num_drafts: int) -> Any:
    """Calls a jitted function on a state; `check` in its body knows then whose step it is.

    Args:
      state: whose config, params and memory are the first arguments.
      is_traced: the call is part of a caller's jit, which compiles when it likes.
      function: `_step` or `_propose` of the api.
      *step: its further arguments.
      num_drafts: static.
    """
    arguments = (state.config, state.params, state.memory, *step)
    if is_traced or not state.warmed.forms:
        return function(*arguments, num_drafts=num_drafts)
    _running.record = state.warmed
    try:
        return function(*arguments, num_drafts=num_drafts)
    finally:
        _running.record = None


def check(owner: str, *step: Any) -> None:
    """Refuses, or warns of, a step of a warmed state that is about to be compiled.

    Args:
      owner: "step" or "propose".
      *step: arguments of `forms_of`.

    Raises:
      ValueError: the state was warmed with `strict`, and not for this step.
    """
    record: Warmed | None = getattr(_running, "record", None)
    if record is None:
        return
    forms, warmed = forms_of(*step), record.forms[owner]
    if forms in warmed:  # JAX forgot what it had compiled
        return
    differing = min(([n for n in forms if forms[n] != other[n]] for other in warmed), key=len)
    name = differing[0]
    others = f" (and so {', '.join(differing[1:])})" if differing[1:] else ""
    known = "; ".join(sorted({_shown(other[name]) for other in warmed}))
    message = (
        f"{owner}: `{name}` is {_shown(forms[name])}{others}, and jspec.warmup compiled {known}. "
        f"{_FIXES.get(name, 'Pass the fields that the warmed steps have.')}"
    )
    if record.strict:
        raise ValueError(message)
    warnings.warn(f"{message} Until then this step compiles.", UserWarning, _level_of_user())


_COLUMNS = "num_drafts="


def _shown(form: Any) -> str:
    if isinstance(form, tuple):
        kind, shape = form
        return f"{kind} {list(shape)}" if isinstance(kind, str) else "of another form"
    return str(form)


def _level_of_user() -> int:
    """Counts the frames from `check` up to the one that called the api."""
    frame, level = sys._getframe(1), 1
    while frame.f_back is not None and frame.f_code is not call.__code__:
        frame, level = frame.f_back, level + 1
    return level + 2
