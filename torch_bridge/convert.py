"""Rewrites checkpoints that PyTorch pickled as safetensors, which hold no code.

python -m jspec convert calls it for a folder that has pickles alone.
"""

import json
import shutil
from collections.abc import Callable
from os import PathLike
from pathlib import Path
from typing import Any

from jspec._checks import read_json
from jspec.checkpoint.new_folder import new_folder
from jspec.checkpoint.weight_files import INDEX, PICKLES, check_file, read_shards


def convert_folder(source: str | PathLike[str], destination: str | PathLike[str]) -> Path:
    """Writes a model folder again, with safetensors in place of pickles.

    pytorch_model.bin becomes model.safetensors, its shards become shards with an index, and
    medusa_lm_head.pt becomes medusa_lm_head.safetensors. All other files are copied. Pickles are
    read with `weights_only=True`, which unpickles tensors and nothing else.

    Args:
      source: the folder.
      destination: folder to make; it must not exist. It is written atomically.

    Returns:
      The new folder. Names, shapes, element types and values are those of the old one.

    Raises:
      ImportError: PyTorch is not installed. FileExistsError: something is at `destination`.
      FileNotFoundError: there is no pickle, or a shard is missing.
      ValueError: a file holds something other than named tensors.
    """
    source, destination = Path(source), Path(destination)
    _torch("convert_folder")
    files, index = _pickles(source)
    with new_folder(destination) as partial:
        for file, name in files.items():
            _rewrite(source / file, partial / name)
        if index is not None:
            (partial / INDEX).write_text(json.dumps(index, indent=2) + "\n", "utf-8")
        for file in source.iterdir():
            if file.name in (*files, *PICKLES) or file.is_dir():
                continue
            check_file(file)
            shutil.copyfile(file, partial / file.name)
    return destination


def convert_medusa(path: str | PathLike[str]) -> Path:
    """Writes medusa_lm_head.safetensors beside FasterDecoding's medusa_lm_head.pt.

    Args:
      path: the .pt file, or the folder that it lies in.

    Returns:
      The new file. Names, shapes, element types and values are those of the old one.

    Raises:
      ImportError: PyTorch is not installed. FileNotFoundError: there is no such file.
      ValueError: the file holds something other than named tensors.
    """
    _torch("convert_medusa")
    source = Path(path)
    source = source / "medusa_lm_head.pt" if source.is_dir() else source
    if not check_file(source):
        raise FileNotFoundError(
            f"convert_medusa: {source} is missing. Pass the folder of Medusa heads that has it, or "
            "the .pt file itself."
        )
    target = source.with_suffix(".safetensors")
    _rewrite(source, target)
    return target


def _torch(caller: str) -> tuple[Any, Callable[..., None]]:
    """Imports torch and the function that writes its tensors."""
    try:
        import torch  # pyright: ignore[reportMissingImports]  # an extra
        from safetensors.torch import save_file
    except ImportError as error:
        raise ImportError(
            f"{caller}: the file is in PyTorch's own format, and torch is not installed. "
            'Install it once, for example with pip install "jspec-decode[torch]".'
        ) from error
    return torch, save_file


def _pickles(source: Path) -> tuple[dict[str, str], dict[str, Any] | None]:
    """Maps the pickles of a folder to the files that they become; with the index of shards."""
    whole, index, medusa = PICKLES
    for pickled, name in ((whole, "model.safetensors"), (medusa, "medusa_lm_head.safetensors")):
        if check_file(source / pickled):
            return {pickled: name}, None
    if not check_file(source / index):
        raise FileNotFoundError(f"convert: {source} has none of {', '.join(PICKLES)}.")
    shards, weight_map = read_shards(source / index)
    of = f"of-{len(shards):05}.safetensors"
    files = {shard.name: f"model-{i:05}-{of}" for i, shard in enumerate(shards, 1)}
    new_map = {tensor: files[shard] for tensor, shard in (weight_map or {}).items()}
    return files, read_json(source / index) | {"weight_map": new_map}


def _rewrite(source: Path, target: Path) -> None:
    """Writes the tensors of a pickle as safetensors."""
    torch, save_file = _torch("convert")
    try:
        tensors = torch.load(source, map_location="cpu", weights_only=True)
    except Exception as error:  # of many kinds, by what is wrong with the file
        why = str(error).split("\n")[0]
        raise ValueError(
            f"{source} is no file of tensors alone ({why}). Fetch it again, and only from a "
            "source that you trust."
        ) from error
    if not isinstance(tensors, dict) or not all(
        isinstance(name, str) and isinstance(tensor, torch.Tensor)
        for name, tensor in tensors.items()
    ):
        raise ValueError(f"{source} is no dict of named tensors. Save the model's state_dict().")
    own: dict[int, str] = {}
    for name, tensor in tensors.items():
        tensor = tensor.detach().contiguous()
        # A pickle may share storage between tensors, which safetensors does not.
        shares = own.setdefault(tensor.untyped_storage().data_ptr(), name) != name
        tensors[name] = tensor.clone() if shares else tensor
    save_file(tensors, target, metadata={"format": "pt"})  # what transformers looks for
