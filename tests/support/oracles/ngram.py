"""Prompt lookup as it is defined: plain loops over slices, no search structure."""

import itertools
from collections.abc import Sequence

import numpy as np


def draft(
    tokens: Sequence[int], *, num_drafts: int, min_n: int, max_n: int, max_model_len: int = 10**9
) -> list[int]:
    """Copies what followed the earliest of the longest earlier matches of the last tokens."""
    tokens = list(tokens)
    room = max(0, min(num_drafts, max_model_len - len(tokens)))
    for n in range(min(max_n, len(tokens) - 1), min_n - 1, -1):
        for start in range(len(tokens) - n):
            if tokens[start : start + n] == tokens[-n:]:
                copied = tokens[start + n :][:room]
                return list(itertools.takewhile(lambda token: token >= 0, copied))
    return []


def contexts(rng: np.random.Generator, num_rows: int, width: int) -> tuple[np.ndarray, np.ndarray]:
    """Random histories full of repetition, and lengths; what lies behind a length misleads."""
    lengths = rng.integers(1, width + 1, num_rows).astype(np.int32)
    return rng.integers(0, 3, (num_rows, width)).astype(np.int32), lengths
