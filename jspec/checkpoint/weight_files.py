"""The weight files of a Hugging Face folder, and errors for folders without any."""

import os
import shlex
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import NamedTuple

from jspec._checks import read_json, warn

SINGLE_FILES = ("model.safetensors", "medusa_lm_head.safetensors")
"""Names of a file that holds all tensors; the second is that of FasterDecoding's Medusa heads."""

INDEX = "model.safetensors.index.json"
"""Index of sharded weights: the shard of each tensor."""

PICKLES = ("pytorch_model.bin", "pytorch_model.bin.index.json", "medusa_lm_head.pt")
"""Weights that PyTorch pickled: a file, an index of shards, Medusa heads."""

_READ = (".json", ".jinja", ".safetensors")
_POINTER = b"version https://git-lfs"


class WeightFiles(NamedTuple):
    """The files that the tensors of a folder are read from.

    Attributes:
      files: in order.
      weight_map: tensor -> name of its shard, None where there is one file.
    """

    files: list[Path]
    weight_map: Mapping[str, str] | None = None


def check_file(file: Path) -> bool:
    """Returns whether a file exists; raises if it is no regular file that can be read.

    Raises:
      FileNotFoundError: it is a broken link. IsADirectoryError: it is a folder.
      PermissionError: it cannot be read. ValueError: it is a pointer of Git LFS.
    """
    if file.is_symlink() and not file.exists():
        raise FileNotFoundError(
            f"{file} is a link to {os.readlink(file)}, which is not there. Fetch the file again; "
            "to copy a folder of links, use cp -rL."
        )
    if not file.exists():
        return False
    if file.is_dir():
        raise IsADirectoryError(f"{file} is a folder, wanted a file. Fetch the file again.")
    try:
        with file.open("rb") as stream:
            start = stream.read(len(_POINTER))
    except PermissionError as error:
        raise PermissionError(
            f"{file} cannot be read: {error.strerror}. Make it readable (chmod u+r), or copy it."
        ) from error
    if start == _POINTER:
        raise ValueError(
            f"{file} is a pointer of Git LFS, not the file itself. Fetch it: git lfs pull, in "
            f"{file.parent}."
        )
    return True


def check_folder(folder: Path) -> None:
    """Checks every file of a folder that jspec reads, and that there is a config.json.

    Raises:
      FileNotFoundError: config.json is missing. And as `check_file`.
    """
    for file in sorted(folder.iterdir()):
        if file.suffix in _READ:
            check_file(file)
    if (folder / "config.json").exists():
        return
    inner = [*folder.glob("*/config.json"), *folder.glob("snapshots/*/config.json")]
    files = sorted(folder.glob("*.gguf"))
    fix = "Pass a Hugging Face model folder: config.json, and model.safetensors or shards with "
    fix += f"{INDEX}."
    if inner:
        fix = f"Pass the folder inside that has one: {', '.join(str(f.parent) for f in inner)}."
    elif files:
        fix = f"Pass the file itself: {', '.join(map(str, files))}."
    elif not any(folder.iterdir()):
        fix = f"The folder is empty. {fix}"
    raise FileNotFoundError(f"{folder / 'config.json'} is missing. {fix}")


def is_pickled(path: Path) -> bool:
    """Whether a folder has weights that PyTorch pickled, and no others."""
    files = {file.name for file in path.iterdir()} if path.is_dir() else set()
    return not files.isdisjoint(PICKLES) and files.isdisjoint((*SINGLE_FILES, INDEX))


def find_weights(folder: Path) -> WeightFiles:
    """Finds the weights as transformers does: one file has priority over shards, over pickles.

    Warns of other weight files, which are not read.

    Raises:
      FileNotFoundError: there are none, or a shard is missing. ValueError: the folder is an
        adapter, or the index lists no shards.
    """
    if (folder / "adapter_config.json").exists():
        raise ValueError(
            f"{folder} has an adapter (adapter_config.json), which is not supported. Merge it into "
            "its base model once (peft: merge_and_unload, save_pretrained), and pass that folder."
        )
    found = WeightFiles([folder / name for name in SINGLE_FILES if (folder / name).exists()][:1])
    if not found.files and (folder / INDEX).exists():
        found = read_shards(folder / INDEX)
    if not found.files:
        raise _no_weights(folder)
    _warn_of_others(folder, found)
    return found


def check_index(folder: Path, found: WeightFiles, names: Mapping[Path, Collection[str]]) -> None:
    """Checks that no tensor is in two files, and warns where the index is wrong.

    Raises:
      ValueError: two files have a tensor of the same name.
    """
    owner: dict[str, str] = {}
    for file, held in names.items():
        for name in held:
            if name in owner:
                raise ValueError(
                    f"{folder}: {owner[name]} and {file.name} both have a tensor {name!r}. Keep it "
                    "in one of them: fetch the shards again, from one revision."
                )
            owner[name] = file.name
    if found.weight_map is None or found.weight_map == owner:
        return
    wrong = sorted(
        name
        for name in owner.keys() | found.weight_map.keys()
        if owner.get(name) != found.weight_map.get(name)
    )
    examples = [
        f"{name} in {found.weight_map.get(name, 'no shard')}, which is in "
        f"{owner.get(name, 'no shard')}"
        for name in wrong[:3]
    ]
    warn(
        f"{folder / INDEX} and its shards differ in {len(wrong)} tensors: it has "
        f"{'; '.join(examples)}. What is in the shards is read. Fetch the folder again."
    )


def read_shards(index: Path) -> WeightFiles:
    """Reads which shards an index lists.

    Raises:
      FileNotFoundError: a shard is missing. ValueError: the index lists none.
    """
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not all(
        isinstance(name, str) for name in weight_map.values()
    ):
        raise ValueError(f"{index} has no weight_map (tensor -> shard). Fetch the file again.")
    files = [index.parent / name for name in sorted(set(weight_map.values()))]
    missing = [file.name for file in files if not check_file(file)]
    if missing:
        raise FileNotFoundError(
            f"{index} lists shards that are not there: {', '.join(missing)}. Fetch them, too."
        )
    return WeightFiles(files, weight_map)


def _warn_of_others(folder: Path, found: WeightFiles) -> None:
    read = {file.name for file in found.files}
    # A pickle of the same name is the source of the file that is read.
    converted = {f"{file.stem}.pt" for file in found.files}
    others = [
        file.name
        for file in sorted(folder.iterdir())
        if file.suffix == ".safetensors" or file.name in PICKLES
        if file.name not in read | converted
    ]
    if found.weight_map is None and (folder / INDEX).exists():
        shards = read_shards(folder / INDEX).files
        others += [INDEX] if {file.name for file in shards} != read else []
    if others:
        warn(
            f"{folder}: {', '.join(others)} not read: the weights are those of "
            f"{', '.join(sorted(read))}, as for transformers. Remove what does not belong to them."
        )


def _no_weights(folder: Path) -> FileNotFoundError:
    if is_pickled(folder):
        pickled = [name for name in PICKLES if (folder / name).exists()]
        source, new = (shlex.quote(f"{folder}{end}") for end in ("", "-safetensors"))
        return FileNotFoundError(
            f"{folder} has no safetensors, only {pickled[0]}, which may hold code. Convert it "
            f"once, with PyTorch: python -m jspec convert {source} {new}"
        )
    found = ", ".join(sorted(file.name for file in folder.iterdir()))
    return FileNotFoundError(
        f"{folder} has neither model.safetensors nor {INDEX}, only: {found}. Save the model in "
        "safetensors form (save_pretrained does)."
    )
