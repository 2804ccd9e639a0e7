"""Marks for some parameters of a test."""

from collections.abc import Callable, Iterable
from typing import Any

import pytest


def slow_ones(values: Iterable[Any], is_slow: Callable[..., bool]) -> list:
    """Returns the values as parameters; those that `is_slow` says it of are marked slow.

    Tuples are the values of several arguments.
    """
    params = []
    for value in values:
        arguments = value if isinstance(value, tuple) else (value,)
        marks = [pytest.mark.slow] if is_slow(*arguments) else []
        params.append(pytest.param(*arguments, marks=marks))
    return params
