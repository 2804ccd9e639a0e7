"""Hugging Face model folders: config.json, safetensors shards, tokenizer.json.

The safetensors package parses and checks headers: a length of 8 bytes, JSON of that length, then
the data without gaps. Tensors are memory-mapped one by one, where the package maps whole files or
copies: reading shapes reads no data, and pages of tensors that are no longer used are freed.
"""

import math
from collections.abc import Iterator
from os import PathLike
from pathlib import Path

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open

from jspec._checks import read_json
from jspec.checkpoint.base import Checkpoint
from jspec.checkpoint.weight_files import WeightFiles, check_folder, check_index, find_weights
from jspec.text import read_text_files

DTYPES: dict[str, np.dtype] = {
    "F64": np.dtype("<f8"),
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "I64": np.dtype("<i8"),
    "I32": np.dtype("<i4"),
    "I16": np.dtype("<i2"),
    "I8": np.dtype("i1"),
    "U8": np.dtype("u1"),
    "BOOL": np.dtype("?"),
}

_WITHOUT_WEIGHTS = ["ExtractHiddenStatesModel"]
"""Architectures of a folder without weights."""


def read_folder(path: str | PathLike[str]) -> Checkpoint:
    """Opens a Hugging Face model folder.

    Args:
      path: folder with config.json and model.safetensors (Medusa heads: or
        medusa_lm_head.safetensors), or the shards that model.safetensors.index.json lists.
        Files of tokenizer and generation are read where they exist: see `jspec.text`. One file has
        priority over shards, as in transformers. Other weight files, and an index that its shards
        contradict, cause a warning.

    Returns:
      The checkpoint. Headers have been checked; no tensor data has been read.

    Raises:
      FileNotFoundError: the folder, its config.json or a weight file is missing, or a broken link.
      ValueError: a file is truncated or has another format, the folder is an adapter, or two shards
        have the same tensor.
    """
    folder = Path(path)
    check_folder(folder)
    config = read_json(folder / "config.json")
    has_weights = config.get("architectures") != _WITHOUT_WEIGHTS
    found = find_weights(folder) if has_weights else WeightFiles([])
    headers = {file: _read_header(file) for file in found.files}
    check_index(folder, found, headers)

    def tensors() -> Iterator[tuple[str, np.ndarray]]:
        for file, header in headers.items():
            for name, (dtype, shape, offset) in header.items():
                yield name, _view(file, dtype, shape, offset)

    return Checkpoint(
        config=config,
        names=tuple(name for header in headers.values() for name in header),
        tensors=tensors,
        **read_text_files(folder, config)._asdict(),
        files=tuple(sorted(file.name for file in folder.iterdir())),
    )


def _read_header(file: Path) -> dict[str, tuple[np.dtype, tuple[int, ...], int]]:
    """Returns dtype, shape and file offset of each tensor.

    Raises:
      ValueError: the file is damaged, or a dtype is not supported.
    """
    try:
        with safe_open(file, framework="numpy") as opened:
            names = opened.offset_keys()
            parts = {name: opened.get_slice(name) for name in names}
    except SafetensorError as error:
        why = str(error).removeprefix("Error while deserializing header: ")
        raise ValueError(
            f"{file} is truncated or no safetensors file: {why}. Fetch the file again."
        ) from error
    with file.open("rb") as stream:
        offset = 8 + int.from_bytes(stream.read(8), "little")
    tensors = {}
    for name, part in parts.items():
        kind, shape = part.get_dtype(), tuple(part.get_shape())
        if kind not in DTYPES:
            raise ValueError(
                f"{file}: tensor {name!r} has dtype {kind}, wanted one of {', '.join(DTYPES)}. "
                "Convert the checkpoint to one of these first."
            )
        tensors[name] = (DTYPES[kind], shape, offset)
        offset += DTYPES[kind].itemsize * math.prod(shape)  # the library has refused gaps
    return tensors


def _view(file: Path, dtype: np.dtype, shape: tuple[int, ...], offset: int) -> np.ndarray:
    if 0 in shape:  # an empty range cannot be mapped
        return np.empty(shape, dtype)
    return np.memmap(file, dtype, "r", offset, shape)
