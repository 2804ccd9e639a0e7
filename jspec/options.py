"""Values of a config.json: their types, and what to do where two of them disagree."""

import difflib
import json
import math
import sys
import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any


def warn(message: str) -> None:
    """Warns at the line outside of this project that the call came from."""
    frame, level = sys._getframe(1), 2
    ours = ("jspec", "torch_bridge")
    while frame.f_back and frame.f_globals["__name__"].partition(".")[0] in ours:
        frame, level = frame.f_back, level + 1
    warnings.warn(message, UserWarning, stacklevel=level)


def agreed(stated: Mapping[str, Any], *, reader: str) -> Any:
    """Returns what several keys of a config.json say, with a warning where they differ.

    Args:
      stated: key -> value, in order of precedence; None says nothing.
      reader: the software whose precedence that is.

    Returns:
      The first value that is not None, None where there is none.

    Example:
      >>> agreed({"dtype": None, "torch_dtype": "float32"}, reader="transformers")
      'float32'
    """
    given = [(key, value) for key, value in stated.items() if value is not None]
    if not given:
        return None
    (first, value), *others = given
    differ = [f"{key} {other!r}" for key, other in others if not _same(value, other)]
    if differ:
        warn(
            f"config.json says {first} {value!r} and {' and '.join(differ)}, which mean the same "
            f"setting. {first} is used, as in {reader}. Remove what is wrong from config.json."
        )
    return value


def _same(a: Any, b: Any) -> bool:
    return a == b and isinstance(a, bool) == isinstance(b, bool)


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


def size(config: Mapping[str, Any], key: str, default: int | None = None, least: int = 1) -> int:
    """Returns a size that a config.json states.

    Args:
      config: its content.
      key: name of the size.
      default: where the key is missing or null; None = it has to be there.
      least: smallest value.

    Raises:
      ValueError: it is missing, or no integer of at least `least`.
    """
    value = config.get(key)
    if value is None:
        if default is None:
            raise ValueError(f"config.json: {key!r} is missing. Add it.")
        return default
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(
            f"config.json: `{key}` is {value!r}, wanted a plain int of at least {least}. Correct "
            "it."
        )
    return value


def flag(config: Mapping[str, Any], key: str, default: bool = False) -> bool:
    """Returns what a config.json switches on or off, `default` where it does not say.

    Raises:
      ValueError: something else is there.
    """
    value = config.get(key)
    value = default if value is None else value
    check_bool("config.json", **{key: value})
    return value


def section(config: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """Returns an object inside a config.json, empty where there is none.

    Raises:
      ValueError: something else is there.
    """
    value = config.get(key)
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise ValueError(f"config.json: {key} is {value!r}, wanted an object. Correct config.json.")
    return value


def read_json(file: Path) -> dict[str, Any]:
    """Reads a JSON object; of a key that is there twice the last value counts, with a warning.

    Raises:
      ValueError: the file is no JSON or no object, and is named.
    """

    twice: list[str] = []

    def object_of(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        content: dict[str, Any] = {}
        for key, value in pairs:
            if key in content and not _same(content[key], value):
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


def did_you_mean(name: str, accepted: Iterable[str]) -> str:
    """Returns a sentence that offers the accepted name nearest to an unknown one, or nothing.

    Example:
      >>> did_you_mean("num_draftz", ["dtype", "num_drafts"])
      'Did you mean num_drafts? '
    """
    near = difflib.get_close_matches(name, accepted, n=1)
    return f"Did you mean {near[0]}? " if near else ""
