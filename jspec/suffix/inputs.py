"""Tokens as callers give them, checked and copied into the one type that is compiled for."""

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
from jaxtyping import Int32

from jspec.suffix.tables import END

TokenIds: TypeAlias = Int32[np.ndarray, "n"] | Sequence[int]


def as_tokens(owner: str, name: str, tokens: TokenIds) -> Int32[np.ndarray, "n"]:
    """Copies tokens, or raises a ValueError that says what came.

    Arrays have to be what they should be; integers in a list are converted.
    """
    if isinstance(tokens, np.ndarray):
        if tokens.ndim != 1 or tokens.dtype != np.int32 or not tokens.flags.c_contiguous:
            raise ValueError(
                f"{owner}: `{name}` is {tokens.dtype} of shape {tokens.shape}, wanted a contiguous "
                f"int32 [n]. Convert it first: np.ascontiguousarray({name}, np.int32)."
            )
        array = tokens.copy()
    else:
        try:
            given = np.array(tokens)
        except ValueError:  # rows of different lengths
            given = np.array(tokens, object)
        if given.size and (given.dtype.kind not in "iu" or given.ndim != 1):
            raise ValueError(
                f"{owner}: `{name}` is {given.dtype} of shape {given.shape}, wanted integers [n]. "
                "Encode text with the model's tokenizer first."
            )
        array = given.astype(np.int32)
        if not np.array_equal(array, given):
            raise ValueError(f"{owner}: `{name}` has ids beyond int32, wanted token ids [n].")
    return array


def as_text(owner: str, name: str, tokens: TokenIds) -> Int32[np.ndarray, "n"]:
    """Copies tokens that will be stored, where one id has a meaning of its own."""
    array = as_tokens(owner, name, tokens)
    if END in array.tolist():  # for a few tokens several times as fast as numpy's comparison
        raise ValueError(f"{owner}: `{name}` contains {END}, which marks the end of a text.")
    return array
