"""Recorded values that no test may see, each with its reason.

`tests/mutations.py` reads this table: every other recorded value turns a test red if it changes.
A value is named by its file, its case (of models: nothing) and its key.
"""

import re
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from tests import recordings

Where = Callable[[np.ndarray, recordings.Values], np.ndarray]


class Excuse(NamedTuple):
    """Values that are not compared.

    Attributes:
      pattern: of "file:case:key".
      reason: why.
      where: `(array, arrays of the case) -> bool array`, the cells that are meant; all by default.
    """

    pattern: str
    reason: str
    where: Where | None = None


def _not_written(array: np.ndarray, _: recordings.Values) -> np.ndarray:
    return np.isin(array, recordings.SENTINELS)


def _behind(name: str, axis: int = 0) -> Where:
    def where(array: np.ndarray, case: recordings.Values) -> np.ndarray:
        return np.arange(array.shape[axis]) >= case[name]

    return where


NOT_COMPARED = (
    Excuse(r".*\.npz:.*:out\..*", "a sentinel: the original did not write the cell", _not_written),
)


def excuses(label: str) -> list[Excuse]:
    """Returns the entries that a value's "file:case:key" falls under."""
    return [excuse for excuse in NOT_COMPARED if re.fullmatch(excuse.pattern, label)]


def excused_cells(label: str, array: np.ndarray, case: recordings.Values) -> np.ndarray:
    """Returns which cells of an array are not compared."""
    out = np.zeros(array.shape, bool)
    for excuse in excuses(label):
        out |= True if excuse.where is None else excuse.where(array, case)
    return out


def is_excused(label: str) -> Any:
    """Whether a value that is no array is not compared."""
    return any(excuse.where is None for excuse in excuses(label))
