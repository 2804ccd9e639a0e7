"""Cached responses on disk: an npz file of tokens, whatever the layout of the tables is."""

import json
import os
import zipfile
import zlib
from collections.abc import Hashable, Mapping
from os import PathLike
from pathlib import Path

import numpy as np
from jaxtyping import Int32

from jspec.suffix.tables import END

_FORMAT = "jspec suffix cache 1"


def write(path: str | PathLike[str], responses: Mapping[Hashable, Int32[np.ndarray, "n"]]) -> None:
    """Writes responses by request, in their order; replaces the file when all is written.

    Raises:
      TypeError: an id is neither str nor int.
    """
    for req_id in responses:
        if not isinstance(req_id, str | int):
            raise TypeError(
                f"save: request id {req_id!r} is a {type(req_id).__name__}, wanted str or int: "
                "others cannot be read back. Evict that response, or use other ids."
            )
    arrays = {
        "format": np.array(_FORMAT),
        "ids": np.array(json.dumps(list(responses))),
        "lengths": np.array([len(tokens) for tokens in responses.values()], np.int64),
        "tokens": np.concatenate([np.empty(0, np.int32), *responses.values()]),
    }
    path = Path(path)
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    try:
        with partial.open("wb") as file:
            np.savez_compressed(file, **arrays)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def read(path: str | PathLike[str]) -> dict[Hashable, Int32[np.ndarray, "n"]]:
    """Reads what `write` wrote.

    Raises:
      FileNotFoundError: no file is there.
      ValueError: the file is none of ours or damaged.
    """
    if not os.path.isfile(path):
        raise FileNotFoundError(
            f"load: {os.fspath(path)!r} is no file. Pass one that SuffixDecodingCache.save wrote, "
            "or start without one."
        )
    try:
        with open(path, "rb") as file, np.load(file, allow_pickle=False) as archive:
            arrays = {name: archive[name] for name in ("format", "ids", "lengths", "tokens")}
        if str(arrays["format"]) != _FORMAT:
            raise ValueError(f"its format is {str(arrays['format'])!r}, wanted {_FORMAT!r}")
        ids, lengths, tokens = json.loads(str(arrays["ids"])), arrays["lengths"], arrays["tokens"]
        if tokens.dtype != np.int32 or tokens.ndim != 1 or (tokens == END).any():
            raise ValueError("its tokens are no vector of int32 ids")
        if lengths.dtype != np.int64 or lengths.ndim != 1 or (lengths < 0).any():
            raise ValueError("its lengths are no vector of counts")
        if len(set(ids)) != len(ids) or len(ids) != len(lengths) or lengths.sum() != len(tokens):
            raise ValueError("its ids, lengths and tokens do not belong together")
    except (ValueError, KeyError, TypeError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise ValueError(
            f"load: {os.fspath(path)} is not a whole suffix cache: {error}. Pass a file that "
            "SuffixDecodingCache.save wrote, or start without one."
        ) from error
    ends = np.cumsum(lengths)
    return {i: tokens[end - n : end] for i, n, end in zip(ids, lengths, ends, strict=True)}
