"""Tables of a draft vocabulary: the target id of each draft id.

`d2t` [Vd] holds target id - draft id; its inverse `t2d` [V] is True for the target ids in it.
Medusa's `token_map` [Vd] holds target ids.
"""

from typing import NamedTuple

import numpy as np
from jaxtyping import Int

from jspec._checks import warn


class TargetIds(NamedTuple):
    """A draft vocabulary, ordered so that the lowest target id wins among equal logits.

    Attributes:
      ids: [Vd] int32 target ids, ascending.
      order: [Vd] the draft id of each, None where draft ids are in this order already.
    """

    ids: Int[np.ndarray, "Vd"]
    order: Int[np.ndarray, "Vd"] | None


def read_d2t(
    owner: str, d2t: np.ndarray | None, t2d: np.ndarray | None, *, num_ids: int, vocab_size: int
) -> TargetIds:
    """Reads a table of offsets, and compares it with its inverse.

    Warns of a table of zeros, which may never have been filled.

    Args:
      owner: name of the drafter, for messages.
      d2t: [Vd] ints, target id - draft id; None = zeros.
      t2d: [V] bools, or ints of 0 and 1; None where the checkpoint has none.
      num_ids: draft ids (Vd).
      vocab_size: target ids (V).

    Raises:
      ValueError: a table has another shape or dtype, two draft ids have the same target id, a
        target id is outside the vocabulary, or the tables contradict each other.

    Example:
      In: d2t [0 2 3]  Out: ids [0 3 5]
    """
    d2t = np.zeros(num_ids, np.int64) if d2t is None else np.asarray(d2t)
    if d2t.shape != (num_ids,) or not np.issubdtype(d2t.dtype, np.integer):
        raise ValueError(
            f"{owner}: d2t is {d2t.dtype} {list(d2t.shape)}, wanted {num_ids} ints, one for each "
            "draft id (draft_vocab_size, rows of lm_head). Fetch the checkpoint again."
        )
    offsets = d2t.astype(np.int64)
    ids = offsets + np.arange(num_ids)
    bad = _first_invalid(ids, vocab_size)
    if bad is not None:
        absolute = _first_invalid(offsets, vocab_size) is None
        fix = (
            "It may hold target ids, where target id - draft id is wanted: subtract "
            f"0..{num_ids - 1} from it."
            if absolute
            else "Fetch the checkpoint again."
        )
        raise ValueError(
            f"{owner}: d2t leads from draft id {bad} to {bad} + {offsets[bad]} = {ids[bad]}, "
            f"wanted a token of its own for each draft id, 0..{vocab_size - 1}. {fix}"
        )
    if t2d is not None:
        _check_inverse(owner, ids, np.asarray(t2d), vocab_size)
    elif num_ids < vocab_size and not offsets.any():
        warn(
            f"{owner}: d2t is all zeros, so that the {num_ids} draft ids are the target's first "
            "ones. If that is not meant, the table was never filled: fetch the checkpoint again."
        )
    return _ordered(ids)


def read_token_map(
    owner: str, name: str, table: np.ndarray, *, num_ids: int, vocab_size: int
) -> TargetIds:
    """Reads a table of target ids.

    Raises:
      ValueError: its shape or dtype is another, or its ids are not distinct target ids.
    """
    ids = np.asarray(table)
    if ids.shape != (num_ids,) or not np.issubdtype(ids.dtype, np.integer):
        raise ValueError(
            f"{owner}: {name!r} is {ids.dtype}{list(ids.shape)}, wanted {num_ids} different ids "
            f"(truncated_vocab_size) from 0 to {vocab_size - 1}. Take weights and config.json from "
            "the same heads."
        )
    ids = ids.astype(np.int64)
    bad = _first_invalid(ids, vocab_size)
    if bad is not None:
        raise ValueError(
            f"{owner}: {name!r} has {ids[bad]} in row {bad}, wanted {num_ids} different ids from 0 "
            f"to {vocab_size - 1}. Take weights and config.json from the same heads."
        )
    return _ordered(ids)


def _first_invalid(ids: np.ndarray, vocab_size: int) -> int | None:
    """Returns the index of the first id outside the vocabulary or repeated; None: all are valid."""
    _, first = np.unique(ids, return_index=True)
    wrong = (ids < 0) | (ids >= vocab_size)
    wrong[np.setdiff1d(np.arange(len(ids)), first)] = True
    return int(wrong.argmax()) if wrong.any() else None


def _check_inverse(owner: str, ids: np.ndarray, t2d: np.ndarray, vocab_size: int) -> None:
    fix = "Fetch the checkpoint again, or remove the one that is wrong."
    is_mask = t2d.dtype == bool or (
        np.issubdtype(t2d.dtype, np.integer) and ((t2d == 0) | (t2d == 1)).all()
    )
    if t2d.shape != (vocab_size,) or not is_mask:
        raise ValueError(
            f"{owner}: t2d is {t2d.dtype} {list(t2d.shape)}, wanted {vocab_size} bools, one for "
            f"each target id. {fix}"
        )
    marked = np.zeros(vocab_size, bool)
    marked[ids] = True
    differ = np.flatnonzero(marked != t2d.astype(bool))
    if len(differ):
        token = differ[0]
        raise ValueError(
            f"{owner}: d2t and t2d contradict each other in {len(differ)} target ids: d2t leads "
            f"{'to' if marked[token] else 'not to'} {token}, and t2d has {bool(t2d[token])} "
            f"there. {fix}"
        )


def _ordered(ids: np.ndarray) -> TargetIds:
    order = np.argsort(ids)
    is_sorted = bool((order == np.arange(len(ids))).all())
    return TargetIds(ids[order].astype(np.int32), None if is_sorted else order)
