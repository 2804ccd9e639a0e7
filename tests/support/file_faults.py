"""Faults that a model folder may have in its files."""

import json
import os
from pathlib import Path

import numpy as np
from numpy.random import Generator
from safetensors.numpy import save_file

from tests.support.faults import Fault, Folder, any_tensor, edit_header

_INDEX = "model.safetensors.index.json"

# The file of weights


def truncate(folder: Folder, rng: Generator) -> str | None:
    part = rng.random()

    def cut(path: Path) -> None:
        file = path / folder.file
        os.truncate(file, int(part * file.stat().st_size))

    folder.after, folder.keys = cut, [folder.file]
    return f"cut at {part:.0%}"


def header_length(folder: Folder, rng: Generator) -> str | None:
    by = int(rng.choice([-8, -1, 1, 8, 1000, 2**40, -(2**30)]))

    def change(path: Path) -> None:
        content = bytearray((path / folder.file).read_bytes())
        length = int.from_bytes(content[:8], "little")
        content[:8] = ((length + by) % 2**64).to_bytes(8, "little")
        (path / folder.file).write_bytes(content)

    folder.after, folder.keys = change, [folder.file]
    return f"header length {by:+}"


def header_value(folder: Folder, rng: Generator) -> str | None:
    name = any_tensor(folder, rng)
    changes = [("dtype", "F12"), ("dtype", 3), ("shape", [-1]), ("shape", "x"), ("shape", [3])]
    changes += [("data_offsets", [0, 1]), ("data_offsets", [8]), ("data_offsets", None)]
    key, value = changes[rng.integers(len(changes))]
    folder.after = edit_header(name, key, value, folder.file)
    folder.keys = [name, folder.file]
    return f"header of {name}: {key} {value}"


def flip_bytes(folder: Folder, rng: Generator) -> str | None:
    """Overwrites some bytes of the header."""
    places, values = rng.integers(8, 400, 3).tolist(), rng.integers(0, 256, 3).tolist()

    def flip(path: Path) -> None:
        content = bytearray((path / folder.file).read_bytes())
        for at, value in zip(places, values, strict=True):
            content[at] = value
        (path / folder.file).write_bytes(content)

    folder.after, folder.keys = flip, [folder.file, *folder.tensors]
    return f"bytes {places} of the header"


# The folder


def _others(folder: Folder) -> dict[str, np.ndarray]:
    return {name: x[::-1].copy() if x.ndim else x for name, x in folder.tensors.items()}


def second_file(folder: Folder, rng: Generator) -> str | None:
    names = ["consolidated.safetensors", "model-00001-of-00001.safetensors", "pytorch_model.bin"]
    names += ["model.safetensors", "medusa_lm_head.safetensors", "adapter_model.safetensors"]
    name = names[rng.integers(len(names))]
    if name == folder.file:
        return None
    folder.after = lambda path: save_file(_others(folder), path / name)
    folder.keys, folder.told = [name], True
    return f"{name} with other weights beside it"


def shards_beside(folder: Folder, rng: Generator) -> str | None:
    def add(path: Path) -> None:
        save_file(_others(folder), path / "model-00001-of-00001.safetensors")
        index = {"weight_map": dict.fromkeys(folder.tensors, "model-00001-of-00001.safetensors")}
        (path / _INDEX).write_text(json.dumps(index))

    folder.after, folder.keys, folder.told = add, [_INDEX], True
    return "shards with other weights beside it"


def adapter(folder: Folder, rng: Generator) -> str | None:
    adapter = {"peft_type": "LORA", "base_model_name_or_path": "x"}
    folder.after = lambda path: (path / "adapter_config.json").write_text(json.dumps(adapter))
    folder.keys, folder.told = ["adapter_config.json"], True
    return "adapter_config.json beside it"


def wrong_index(folder: Folder, rng: Generator) -> str | None:
    """Writes two shards, and an index that does not say what is in them."""
    how = ["moved", "unknown", "unlisted", "twice", "no shard", "no map"][rng.integers(6)]
    names = sorted(folder.tensors)
    halves = [names[::2], names[1::2]]
    files = [f"model-0000{i}-of-00002.safetensors" for i in (1, 2)]
    weight_map = {name: files[i] for i in (0, 1) for name in halves[i]}
    if len(names) < 3:
        return None
    if how == "moved":
        weight_map[names[0]] = files[1]
    elif how == "unknown":
        weight_map["model.extra"] = files[0]
    elif how == "unlisted":
        del weight_map[names[0]]
    elif how == "no shard":
        weight_map[names[0]] = "model-00003-of-00002.safetensors"
    folder.keys, folder.told = [_INDEX, *files, names[0]], True

    def split(path: Path) -> None:
        (path / folder.file).unlink()
        for file, half in zip(files, halves, strict=True):
            save_file({name: folder.tensors[name] for name in half}, path / file)
        if how == "twice":
            again = {n: folder.tensors[n] for n in [*halves[1], names[0]]}
            again[names[0]] = _others(folder)[names[0]]
            save_file(again, path / files[1])
        content = {} if how == "no map" else {"weight_map": weight_map}
        (path / _INDEX).write_text(json.dumps(content))

    folder.after = split
    return f"two shards, index: {how}"


def dangling_link(folder: Folder, rng: Generator) -> str | None:
    name = ["config.json", folder.file, "generation_config.json", _INDEX][rng.integers(4)]

    def link(path: Path) -> None:
        (path / name).unlink(missing_ok=True)
        (path / name).symlink_to("../../blobs/0123")

    folder.after, folder.keys, folder.told = link, [name], True
    return f"{name} is a dangling link"


def pointer(folder: Folder, rng: Generator) -> str | None:
    name = ["config.json", folder.file, "generation_config.json", "tokenizer.json"][rng.integers(4)]
    text = "version https://git-lfs.github.com/spec/v1\noid sha256:0123\nsize 12345\n"
    folder.after = lambda path: (path / name).write_text(text)
    folder.keys, folder.told = [name, "git lfs pull"], True
    return f"{name} is a pointer"


def in_a_subfolder(folder: Folder, rng: Generator) -> str | None:
    def move(path: Path) -> None:
        (path / "inner").mkdir()
        for file in ("config.json", folder.file):
            (path / file).rename(path / "inner" / file)

    folder.after, folder.keys = move, ["inner"]
    return "a folder deeper"


def folder_for_file(folder: Folder, rng: Generator) -> str | None:
    name = ["config.json", folder.file][rng.integers(2)]

    def replace(path: Path) -> None:
        (path / name).unlink()
        (path / name).mkdir()

    folder.after, folder.keys = replace, [name]
    return f"{name} is a folder"


def missing_file(folder: Folder, rng: Generator) -> str | None:
    name = ["config.json", folder.file][rng.integers(2)]
    folder.after, folder.keys = lambda path: (path / name).unlink(), [name, "model.safetensors"]
    return f"without {name}"


def broken_json(folder: Folder, rng: Generator) -> str | None:
    part = rng.random()

    def cut(path: Path) -> None:
        text = (path / "config.json").read_text()
        (path / "config.json").write_text(text[: int(part * len(text))])

    folder.after, folder.keys = cut, ["config.json"]
    return f"config.json cut at {part:.0%}"


FAULTS: tuple[Fault, ...] = (
    truncate,
    header_length,
    header_value,
    flip_bytes,
    second_file,
    shards_beside,
    adapter,
    wrong_index,
    dangling_link,
    pointer,
    in_a_subfolder,
    folder_for_file,
    missing_file,
    broken_json,
)
