"""Values of a config.json: their types, and what to do where two of them disagree."""

from collections.abc import Mapping
from typing import Any

from jspec._checks import check_bool, same_value, warn


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
    differ = [f"{key} {other!r}" for key, other in others if not same_value(value, other)]
    if differ:
        warn(
            f"config.json says {first} {value!r} and {' and '.join(differ)}, which mean the same "
            f"setting. {first} is used, as in {reader}. Remove what is wrong from config.json."
        )
    return value


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
