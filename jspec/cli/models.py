"""Models that the words of a command name."""

from pathlib import Path
from typing import Any

from jspec import checkpoint
from jspec.checkpoint import Model
from jspec.checkpoint.tokenizer import Tokenizer
from jspec.demo.assets import fetch_smollm2
from jspec.loading import load
from jspec.saving import restore


def dtype_of(path: Path) -> str:
    """Returns the dtype of a folder's weights; float32 for a GGUF file, whose are quantized."""
    return checkpoint.stored_dtype(checkpoint.read(path)) if path.is_dir() else "float32"


def check_dtype(dtype: str) -> None:
    """Raises ValueError for a `--dtype` that weights cannot have."""
    if dtype not in ("float32", "bfloat16", "float16"):
        raise ValueError(
            f"--dtype is {dtype!r}, wanted float32 or bfloat16 (float16 is taken, too). Pass one "
            "of them."
        )


def find(option: str, name: str) -> Path:
    """Returns where a model lies on disk; SmolLM2 is fetched.

    Raises:
      ValueError: nothing is there.
    """
    if name == "smollm2":
        return fetch_smollm2(progress=False)
    if not name or not Path(name).exists():
        raise ValueError(
            f"{option} {name!r} does not exist. Pass a Hugging Face model folder, a .gguf file, a "
            "folder of jspec.save, or smollm2, which is fetched."
        )
    return Path(name)


def is_saved(path: Path) -> bool:
    """Whether a folder was written by `jspec.save` (`python -m jspec convert`)."""
    return (path / "jspec.json").is_file()


def open_model(name: str, dtype: str, *, option: str = "--model", quiet: bool = False) -> Model:
    """Loads a model from disk, or SmolLM2 from where it is published.

    A folder of `jspec.save` keeps the dtype that it was saved in.
    """
    check_dtype(dtype)
    if name == "smollm2":
        fetch_smollm2(progress=not quiet)
    path = find(option, name)
    model: Any = restore(path) if is_saved(path) else load(path, dtype)
    if not isinstance(model, Model):
        raise ValueError(
            f"{option} {name} holds a drafter, wanted a target model. Pass the model that it "
            f"drafts for, and --drafter {name}."
        )
    return model


def open_tokenizer(model: Model) -> Tokenizer:
    """Returns the tokenizer that came with a model."""
    if model.tokenizer_json is None:
        raise ValueError(
            "the model has no tokenizer.json, so that text cannot be encoded. Put the model's own "
            "tokenizer.json into its folder."
        )
    return Tokenizer.from_json(model.tokenizer_json, model.chat_template)
