"""The GGUF container: metadata, offsets of tensors, and their rows as float32.

The header is parsed here; the `gguf` package dequantises. Its own reader makes an array object of
every token of the vocabulary (2 s for 49,152 of them), and does not detect truncated files.
"""

import functools
import math
import mmap
import struct
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

_SCALARS = {  # ggml's type number -> struct code
    0: "<B",
    1: "<b",
    2: "<H",
    3: "<h",
    4: "<I",
    5: "<i",
    6: "<f",
    7: "<?",
    10: "<Q",
    11: "<q",
    12: "<d",
}
_FLOAT32, _STRING, _ARRAY = 6, 8, 9

_CHUNK_BYTES = 1 << 18  # quantised rows at a time: the temporaries of dequantising stay small


class Tensor(NamedTuple):
    """Location and format of a tensor in the file.

    Attributes:
      shape: row-major, as in numpy and Hugging Face; the file has it reversed.
      type_id: ggml's number of the block format.
      start: first byte in the file.
      row_bytes: bytes of a row (the last axis).
    """

    shape: tuple[int, ...]
    type_id: int
    start: int
    row_bytes: int


class GgufFile(NamedTuple):
    """The header of a GGUF file; tensor data stays on disk until `read`."""

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, Tensor]

    def get(self, key: str, kind: type, *, default: Any = None) -> Any:
        """Returns a metadata value of type `kind`.

        Raises:
          ValueError: it has another type, or is missing and has no default.
        """
        value = self.metadata.get(key, default)
        if not isinstance(value, kind):
            came = "missing" if value is None else repr(value)
            raise ValueError(
                f"{self.path}: metadata `{key}` is {came}, wanted one {kind.__name__}. "
                "Convert the model again with a current llama.cpp."
            )
        return value

    def find(self, key: str, kind: type) -> Any:
        """Returns a metadata value of type `kind`, None where it is missing."""
        return self.get(key, kind) if key in self.metadata else None

    def read(self, name: str) -> np.ndarray:
        """Reads one tensor as float32, a chunk of rows at a time."""
        gguf, tensor = _gguf(), self.tensors[name]
        kind = gguf.GGMLQuantizationType(tensor.type_id)
        out = np.empty(tensor.shape, np.float32)
        rows = out.reshape(-1, tensor.shape[-1])
        step = max(1, _CHUNK_BYTES // tensor.row_bytes)
        # Plain reads: the pages of a mapped file would count as this process's memory.
        with self.path.open("rb") as handle:
            handle.seek(tensor.start)
            for chunk in (rows[i : i + step] for i in range(0, len(rows), step)):
                raw = np.fromfile(handle, np.uint8, len(chunk) * tensor.row_bytes)
                chunk[:] = gguf.quants.dequantize(raw.reshape(len(chunk), -1), kind)
        return out


def open_gguf(path: Path) -> GgufFile:
    """Reads the header and checks that each tensor lies in the file and can be dequantised.

    Raises:
      FileNotFoundError: there is no such file.
      ImportError: the `gguf` package is missing.
      ValueError: no GGUF file, a damaged or truncated one, or an unsupported tensor type.

    Source: ggml docs/gguf.md.
    """
    if not path.is_file():
        raise FileNotFoundError(f"no GGUF file at {path}. Pass the path of a .gguf file.")
    file_bytes = path.stat().st_size
    if file_bytes < 24:
        raise _truncated(path, file_bytes, "its header has at least 24 bytes")
    with path.open("rb") as handle, mmap.mmap(handle.fileno(), 0, access=mmap.ACCESS_READ) as data:
        if data[:4] != b"GGUF":
            raise ValueError(
                f"{path} starts with {data[:4]!r}, wanted b'GGUF': it is no GGUF file. Pass a "
                ".gguf file; a Hugging Face folder is read by its config.json."
            )
        header = _Header(path, data, offset=4)
        version = header.scalar("<I")
        if version not in (2, 3):
            raise ValueError(
                f"{path}: GGUF version {version} is not supported, wanted 2 or 3, little-endian. "
                "Convert the model again with a current llama.cpp."
            )
        num_tensors, num_values = header.scalar("<Q"), header.scalar("<Q")
        metadata = {header.text(): header.value(header.scalar("<I")) for _ in range(num_values)}
        tensors = dict(header.tensor() for _ in range(num_tensors))
    file = GgufFile(path, metadata, tensors)
    alignment = file.get("general.alignment", int, default=32)
    if alignment < 1:
        raise _damaged(path, f"alignment {alignment}")
    data_start = -(-header.offset // alignment) * alignment
    for name, tensor in tensors.items():
        row_bytes = _row_bytes(path, name, tensor)
        start = data_start + tensor.start
        end = start + math.prod(tensor.shape[:-1]) * row_bytes
        if end > file_bytes:
            raise _truncated(path, file_bytes, f"tensor {name} ends at byte {end}")
        tensors[name] = tensor._replace(start=start, row_bytes=row_bytes)
    return file


class _Header:
    """Parses the header; lengths are checked against the file before anything is allocated."""

    def __init__(self, path: Path, data: mmap.mmap, offset: int):
        self.path = path
        self.data = data
        self.offset = offset

    def take(self, num_bytes: int) -> int:
        """Advances by `num_bytes` and returns the offset before."""
        start = self.offset
        if num_bytes > len(self.data) - start:
            raise _truncated(
                self.path, len(self.data), f"its header goes on for {num_bytes} bytes at {start}"
            )
        self.offset += num_bytes
        return start

    def scalar(self, form: str) -> Any:
        return struct.unpack_from(form, self.data, self.take(struct.calcsize(form)))[0]

    def text(self) -> str:
        start = self.take(self.scalar("<Q"))
        try:
            return self.data[start : self.offset].decode()
        except UnicodeDecodeError as error:
            raise _damaged(self.path, f"text at byte {start} is not UTF-8") from error

    def value(self, type_id: int) -> Any:
        if type_id == _STRING:
            return self.text()
        if type_id == _ARRAY:
            item_id, length = self.scalar("<I"), self.scalar("<Q")
            if item_id not in _SCALARS:
                return [self.value(item_id) for _ in range(length)]
            dtype = np.dtype(_SCALARS[item_id])
            start = self.take(length * dtype.itemsize)
            return np.frombuffer(self.data[start : self.offset], dtype).tolist()
        if type_id == _FLOAT32:
            # The shortest decimal that rounds to it: 1e-05 rather than 9.999999747378752e-06.
            return float(str(np.float32(self.scalar("<f"))))
        if type_id in _SCALARS:
            return self.scalar(_SCALARS[type_id])
        raise _damaged(self.path, f"metadata type {type_id} before byte {self.offset} is unknown")

    def tensor(self) -> tuple[str, Tensor]:
        """Reads one entry of the tensor list; `start` is relative to the tensor data."""
        name = self.text()
        shape = [self.scalar("<Q") for _ in range(self.scalar("<I"))]
        return name, Tensor(
            shape=tuple(reversed(shape)),
            type_id=self.scalar("<I"),
            start=self.scalar("<Q"),
            row_bytes=0,
        )


def _truncated(path: Path, file_bytes: int, why: str) -> ValueError:
    return ValueError(
        f"{path} is truncated: {why}, but the file has {file_bytes} bytes. Download it again."
    )


def _damaged(path: Path, why: str) -> ValueError:
    return ValueError(f"{path} is damaged: {why}. Download it again.")


def _row_bytes(path: Path, name: str, tensor: Tensor) -> int:
    gguf = _gguf()
    known = {kind.value: kind for kind in gguf.GGMLQuantizationType}
    kind = known.get(tensor.type_id)
    if kind is None or not _dequantizes(kind):
        supported = ", ".join(kind.name for kind in known.values() if _dequantizes(kind))
        raise ValueError(
            f"{path}: tensor {name} has type {kind.name if kind else tensor.type_id}, wanted one "
            f"of {supported}. Quantise the model to one of these, for example Q8_0."
        )
    block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    if not tensor.shape or tensor.shape[-1] % block:
        raise _damaged(
            path, f"tensor {name} of type {kind.name} has shape {tensor.shape}, rows of {block}n"
        )
    return tensor.shape[-1] // block * block_bytes


@functools.cache
def _dequantizes(kind: Any) -> bool:
    gguf = _gguf()
    try:
        gguf.quants.dequantize(np.zeros((1, gguf.GGML_QUANT_SIZES[kind][1]), np.uint8), kind)
    except NotImplementedError:
        return False
    return True


def _gguf() -> Any:
    try:
        import gguf
        import gguf.quants
    except ImportError as error:
        raise ImportError(
            "reading a GGUF file needs the `gguf` package. Run: pip install 'jspec-decode[demo]'"
        ) from error
    return gguf
