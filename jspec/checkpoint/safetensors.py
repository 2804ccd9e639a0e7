"""Hugging Face model folders: config.json, safetensors shards, tokenizer.json.

A safetensors file is an 8-byte little-endian length, a JSON header of that length with the dtype,
shape and byte range of each tensor, then the data. We map tensor by tensor, where the safetensors
package maps whole files: pages of tensors that are done with do not stay in memory.
"""

import json
import math
from collections.abc import Iterator
from os import PathLike
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from jspec.checkpoint.base import Checkpoint
from jspec.config import read_json
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

_SINGLE_FILES = ("model.safetensors", "medusa_lm_head.safetensors")
"""Names of a file that holds all tensors; the second is that of FasterDecoding's Medusa heads."""

_WITHOUT_WEIGHTS = ["ExtractHiddenStatesModel"]
"""Architectures of a folder that is all config."""


def read_folder(path: str | PathLike[str]) -> Checkpoint:
    """Opens a Hugging Face model folder.

    Args:
      path: folder with config.json and model.safetensors (Medusa heads: or
        medusa_lm_head.safetensors), or the shards that model.safetensors.index.json lists.
        The files that say what is text are read where they exist: see `jspec.text`.

    Returns:
      The checkpoint. Headers have been checked; no tensor data has been read.

    Raises:
      FileNotFoundError: the folder, its config.json or a weight file is missing.
      ValueError: a file is truncated or not what its name says.
    """
    folder = Path(path)
    config = _read_json(folder / "config.json")
    has_weights = config.get("architectures") != _WITHOUT_WEIGHTS
    headers = {file: _read_header(file) for file in _weight_files(folder)} if has_weights else {}

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


def _read_json(file: Path) -> dict[str, Any]:
    if file.is_file():
        return read_json(file)
    raise FileNotFoundError(
        f"{file} is missing. Pass a Hugging Face model folder: config.json, and "
        "model.safetensors or shards with model.safetensors.index.json."
    )


def _weight_files(folder: Path) -> list[Path]:
    for name in _SINGLE_FILES:
        if (folder / name).is_file():
            return [folder / name]
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        if (pickled := folder / "medusa_lm_head.pt").is_file():
            raise FileNotFoundError(
                f"{folder} has no {pickled.stem}.safetensors, only {pickled.name}, which may "
                f"hold code. Convert it once, with PyTorch: python -m torch_bridge.convert {folder}"
            )
        found = ", ".join(sorted(file.name for file in folder.iterdir())) or "nothing"
        raise FileNotFoundError(
            f"{folder} has neither model.safetensors nor model.safetensors.index.json, only: "
            f"{found}. Save the model in safetensors form (save_pretrained does)."
        )
    weight_map = _read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not all(
        isinstance(name, str) for name in weight_map.values()
    ):
        raise ValueError(f"{index} has no weight_map (tensor -> shard). Fetch the file again.")
    files = [folder / name for name in sorted(set(weight_map.values()))]
    missing = [file.name for file in files if not file.is_file()]
    if missing:
        raise FileNotFoundError(
            f"{index} lists shards that are not there: {', '.join(missing)}. Fetch them, too."
        )
    return files


def _read_header(file: Path) -> dict[str, tuple[np.dtype, tuple[int, ...], int]]:
    """Returns dtype, shape and file offset of each tensor, checked against the file's size."""
    size = file.stat().st_size
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        data = 8 + length
        if size < data:
            raise ValueError(
                f"{file} is truncated or no safetensors file: it has {size} bytes, and its header "
                f"alone should end at {data}. Fetch the file again."
            )
        header = stream.read(length)
    try:
        entries = json.loads(header)
        entries.pop("__metadata__", None)
        fields = {name: _fields(entry) for name, entry in entries.items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(
            f"{file} is no safetensors file: its header cannot be read. Fetch the file again."
        ) from error
    tensors = {}
    for name, (dtype_name, shape, begin, end) in fields.items():
        if data + end > size:
            raise ValueError(
                f"{file} is truncated: tensor {name!r} ends at byte {data + end}, the file at "
                f"{size}. Fetch the file again."
            )
        if dtype_name not in DTYPES:
            raise ValueError(
                f"{file}: tensor {name!r} has dtype {dtype_name}, wanted one of "
                f"{', '.join(DTYPES)}. Convert the checkpoint to one of these first."
            )
        dtype = DTYPES[dtype_name]
        if end - begin != dtype.itemsize * math.prod(shape):
            raise ValueError(
                f"{file}: tensor {name!r} of {dtype_name}{list(shape)} has bytes {begin} to {end}, "
                "which does not match. Fetch the file again."
            )
        tensors[name] = (dtype, shape, data + begin)
    return tensors


def _fields(entry: dict[str, Any]) -> tuple[str, tuple[int, ...], int, int]:
    """Reads a tensor's dtype, shape and byte range; ValueError unless they are what they should."""
    dtype_name, shape, (begin, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
    numbers = [*shape, begin, end]
    if not isinstance(dtype_name, str) or any(type(n) is not int or n < 0 for n in numbers):
        raise ValueError
    return dtype_name, tuple(shape), begin, end


def _view(file: Path, dtype: np.dtype, shape: tuple[int, ...], offset: int) -> np.ndarray:
    if 0 in shape:  # an empty range cannot be mapped
        return np.empty(shape, dtype)
    return np.memmap(file, dtype, "r", offset, shape)
