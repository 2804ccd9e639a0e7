"""Checks that every room uses: of sizes, numbers and JSON files."""

import difflib
import json
import math
import sys
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import jax.numpy as jnp
from jax.typing import DTypeLike


def check_at_least(owner: str, minimum: int, **fields: int) -> None:
    """Raises ValueError for the first field that is no integer or lies below `minimum`."""
    for name, value in fields.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
            raise ValueError(
                f"{owner}: `{name}` is {value!r}, wanted a plain int of at least {minimum}. "
                f"Pass {name}={minimum} or more."
            )


def check_float_dtype(owner: str, dtype: DTypeLike) -> str:
    """Returns the name of a type that weights and caches may have, or raises ValueError."""
    try:
        name = jnp.dtype(dtype).name
    except TypeError:
        name = ""
    if dtype is None or name not in _FLOAT_DTYPES:
        raise ValueError(
            f"{owner}: `dtype` is {dtype!r}, wanted one of {', '.join(_FLOAT_DTYPES)}. "
            "Pass dtype='bfloat16', or 'float32' on a CPU."
        )
    return name


_FLOAT_DTYPES = ("bfloat16", "float16", "float32")


def check_above_0(owner: str, **fields: float) -> None:
    """Raises ValueError for the first field that is no number above 0."""
    for name, value in fields.items():
        # The comparison refuses NaN, too; JSON may say Infinity.
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not (is_number and 0 < value < math.inf):
            raise ValueError(
                f"{owner}: {name} is {value!r}, wanted a number above 0. Correct it in config.json."
            )


def check_bool(owner: str, **fields: bool) -> None:
    """Raises ValueError for the first field that is neither true nor false."""
    for name, value in fields.items():
        if not isinstance(value, bool):
            raise ValueError(
                f"{owner}: {name} is {value!r}, wanted true or false. Correct it in config.json."
            )


def warn(message: str) -> None:
    """Warns at the line outside of this project that the call came from."""
    frame, level = sys._getframe(1), 2
    ours = ("jspec", "torch_bridge")
    while frame.f_back and frame.f_globals["__name__"].partition(".")[0] in ours:
        frame, level = frame.f_back, level + 1
    warnings.warn(message, UserWarning, stacklevel=level)


def did_you_mean(name: str, accepted: Iterable[str]) -> str:
    """Returns a sentence that offers the accepted name nearest to an unknown one, or nothing.

    Example:
      >>> did_you_mean("num_draftz", ["dtype", "num_drafts"])
      'Did you mean num_drafts? '
    """
    near = difflib.get_close_matches(name, accepted, n=1)
    return f"Did you mean {near[0]}? " if near else ""


def read_json(file: Path) -> dict[str, Any]:
    """Reads a JSON object; of a key that is there twice the last value counts, with a warning.

    Raises:
      ValueError: the file is no JSON or no object, and is named.
    """

    twice: list[str] = []

    def object_of(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        content: dict[str, Any] = {}
        for key, value in pairs:
            if key in content and not same_value(content[key], value):
                twice.append(f"{key} {content[key]!r} and again {key} {value!r}")
            content[key] = value
        return content

    try:
        content = json.loads(file.read_text("utf-8"), object_pairs_hook=object_of)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file} is not JSON ({error}). Fetch the file again.") from error
    if not isinstance(content, dict):
        raise ValueError(
            f"{file} holds a {type(content).__name__}, wanted an object. Fetch the file again."
        )
    if twice:
        warn(
            f"{file} says {', '.join(twice)}. The last one is used, as in transformers. Remove the "
            "wrong one."
        )
    return content


def same_value(a: Any, b: Any) -> bool:
    return a == b and isinstance(a, bool) == isinstance(b, bool)
