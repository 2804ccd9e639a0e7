"""Rewrites checkpoints that PyTorch pickled as safetensors, which hold no code.

python -m torch_bridge.convert path/to/medusa-heads
"""

import sys
from os import PathLike
from pathlib import Path


def convert_medusa(path: str | PathLike[str]) -> Path:
    """Writes medusa_lm_head.safetensors beside FasterDecoding's medusa_lm_head.pt.

    The file is read with `weights_only=True`, which unpickles tensors and nothing else.

    Args:
      path: the .pt file, or the folder that it lies in.

    Returns:
      The new file. Names, shapes, element types and values are those of the old one.

    Raises:
      ImportError: PyTorch is not installed. FileNotFoundError: there is no such file.
      ValueError: the file holds something other than named tensors.
    """
    try:
        import torch  # pyright: ignore[reportMissingImports]  # an extra
        from safetensors.torch import save_file
    except ImportError as error:
        raise ImportError(
            "convert_medusa: the file is in PyTorch's own format, and torch is not installed. "
            'Install it once, for example with pip install "jspec-decode[torch]".'
        ) from error
    source = Path(path)
    source = source / "medusa_lm_head.pt" if source.is_dir() else source
    if not source.is_file():
        raise FileNotFoundError(
            f"convert_medusa: {source} is missing. Pass the folder of Medusa heads that has it, or "
            "the .pt file itself."
        )
    try:
        tensors = torch.load(source, map_location="cpu", weights_only=True)
    except Exception as error:  # of many kinds, by what is wrong with the file
        raise ValueError(
            f"convert_medusa: {source} is no file of tensors alone ({error}). Fetch it again, and "
            "only from a source that you trust."
        ) from error
    if not isinstance(tensors, dict) or not all(
        isinstance(name, str) and isinstance(tensor, torch.Tensor)
        for name, tensor in tensors.items()
    ):
        raise ValueError(
            f"convert_medusa: {source} is no dict of named tensors. Save the heads' state_dict()."
        )
    target = source.with_suffix(".safetensors")
    # A file may share storage between tensors, which safetensors does not: each gets its own.
    save_file({name: tensor.clone().contiguous() for name, tensor in tensors.items()}, target)
    return target


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python -m torch_bridge.convert path/to/medusa-heads")
    print(convert_medusa(sys.argv[1]))
