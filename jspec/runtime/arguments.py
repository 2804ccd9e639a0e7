"""Checks of the decode loop's arguments; each error names the argument, in one line."""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from jspec.checkpoint import Model
from jspec.config import CacheConfig


def check_call(
    model: Any, prompts: Any, cache: Any, stop_ids: Any
) -> tuple[list[Sequence[int]], frozenset[int]]:
    """Checks the arguments of `generate` that are neither sizes nor the drafter's.

    Returns:
      (prompts, stop_ids): the prompts as a list, whose tokens are checked by `scheduling.limits`;
      the ids that end a request.

    Raises:
      TypeError: an argument is of another type. ValueError: a stop id is outside the vocabulary.
    """
    if not isinstance(model, Model):
        raise TypeError(
            f"generate: `model` is a {type(model).__name__}, wanted a Model. Pass what "
            "jspec.load(path) returned for the target."
        )
    if isinstance(prompts, str) or not isinstance(prompts, Iterable):
        raise TypeError(
            f"generate: `prompts` is {prompts!r}, wanted a list of prompts, each a list of token "
            "ids. Encode text with the model's tokenizer first, and pass [ids]."
        )
    if cache is not None and not isinstance(cache, CacheConfig):
        raise TypeError(
            f"generate: `cache` is {cache!r}, wanted a CacheConfig or None. Pass "
            "jspec.CacheConfig(num_pages=..., max_model_len=...), or leave it out."
        )
    return list(prompts), _check_stop_ids(model, stop_ids)


def check_on_tokens(on_tokens: Any) -> None:
    """Raises TypeError for a callback that cannot be called."""
    if on_tokens is not None and not callable(on_tokens):
        raise TypeError(
            f"generate: `on_tokens` is {on_tokens!r}, wanted a function of (index, tokens, "
            "num_accepted). Pass one, or leave it out."
        )


def _check_stop_ids(model: Model, stop_ids: Any) -> frozenset[int]:
    if stop_ids is None:
        return frozenset(model.stop_ids)
    if isinstance(stop_ids, str) or not isinstance(stop_ids, Iterable):
        raise TypeError(
            f"generate: `stop_ids` is {stop_ids!r}, wanted a list of token ids. Pass several, one "
            "as [id], none as []."
        )
    ids = list(stop_ids)
    for token in ids:
        if isinstance(token, bool) or not isinstance(token, (int, np.integer)):
            raise TypeError(
                f"generate: `stop_ids` has {token!r}, wanted token ids. Encode text with the "
                "model's tokenizer first."
            )
        if not 0 <= token < model.config.vocab_size:
            raise ValueError(
                f"generate: `stop_ids` has {token}, wanted 0 <= id < {model.config.vocab_size}, "
                "the vocabulary size. Use the model's own tokenizer."
            )
    return frozenset(map(int, ids))
