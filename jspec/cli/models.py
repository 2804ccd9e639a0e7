"""Resolution and loading of `--model`."""

import sys
from pathlib import Path
from typing import Any

from jspec import checkpoint
from jspec.checkpoint import Model
from jspec.demo.assets import fetch_smollm2
from jspec.loading import load
from jspec.saving import restore
from jspec.text import Tokenizer
from jspec.text.chat import choose_template

HELP = "model folder, .gguf file, owner/name on the Hugging Face hub, or smollm2 (fetched)"


def dtype_of(path: Path, dtype: str | None) -> str:
    """Returns the dtype to load a model in: `--dtype`, by default that of a folder's weights.

    Saved folders keep their dtype; GGUF files are quantized. Both default to float32.
    """
    if dtype is not None:
        check_dtype(dtype)
        return dtype
    is_folder = path.is_dir() and not is_saved(path)
    return checkpoint.stored_dtype(checkpoint.read(path)) if is_folder else "float32"


def check_dtype(dtype: str) -> None:
    """Raises ValueError for a `--dtype` that weights cannot have."""
    if dtype not in ("float32", "bfloat16", "float16"):
        raise ValueError(
            f"--dtype is {dtype!r}, wanted float32 or bfloat16 (float16 is taken, too). Pass one "
            "of them."
        )


def find(option: str, name: str) -> Path:
    """Returns the path of a model, as `find_on_disk`; SmolLM2 is fetched."""
    if name == "smollm2":
        return fetch_smollm2(progress=False)
    return find_on_disk(
        option,
        name,
        "Pass a Hugging Face model folder, owner/name of a model on the hub, a .gguf file, a "
        "folder of jspec.save, or smollm2, which is fetched.",
    )


def find_on_disk(option: str, name: str, wanted: str) -> Path:
    """Returns the path of a model or drafter; one of the hub may be fetched.

    Args:
      option: of the command, for messages.
      name: path, or owner/name on the hub.
      wanted: last sentence of an error.

    Raises:
      ValueError, FileNotFoundError: nothing is there.
    """
    path = checkpoint.resolve(name, option)
    if not name or not path.exists():
        raise ValueError(f"{option} {name!r} does not exist. {wanted}")
    if path != Path(name):
        print(f"jspec: {option} {name} is {path}", file=sys.stderr)
    return path


def is_saved(path: Path) -> bool:
    """Whether a folder was written by `jspec.save` (`python -m jspec convert`)."""
    return (path / "jspec.json").is_file()


def open_model(name: str, dtype: str, *, option: str = "--model", quiet: bool = False) -> Model:
    """Loads a model from disk, or SmolLM2; a folder of `jspec.save` keeps its dtype."""
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


def open_tokenizer(model: Model, template: str | None = None) -> Tokenizer:
    """Returns the tokenizer that came with a model.

    Args:
      model: the target.
      template: one of the model's chat templates by name, or a file with another one; None = the
        model's own.

    Raises:
      ValueError: there is no tokenizer, no such template, or the file is no text.
    """
    if model.tokenizer_json is None:
        raise ValueError(
            "the model has no tokenizer.json, so that text cannot be encoded. Put the model's own "
            "tokenizer.json into its folder."
        )
    chat_template = model.chat_template
    if template is not None and Path(template).is_file():
        try:
            chat_template = Path(template).read_text("utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(
                f"--chat-template {template} is no text ({error}). Pass a Jinja template."
            ) from error
    elif template is not None:
        chat_template = choose_template(chat_template, template)
    return Tokenizer.from_json(model.tokenizer_json, chat_template, model.tokenizer_config)
