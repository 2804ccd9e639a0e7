"""Loading models from disk: Hugging Face folders and GGUF files."""

from os import PathLike
from pathlib import Path
from typing import NamedTuple

from jspec.checkpoint.assemble import assemble
from jspec.checkpoint.base import Checkpoint
from jspec.checkpoint.safetensors import read_folder
from jspec.config import ModelConfig
from jspec.models import llama
from jspec.state import Params

__all__ = ["Checkpoint", "Model", "assemble", "load", "read", "read_folder"]


class Model(NamedTuple):
    """A loaded model.

    Attributes:
      config: its shape.
      params: its weights.
      tokenizer_json: content of a Hugging Face tokenizer.json, None where there is none.
      chat_template: Jinja template of the chat form, None where there is none.
      stop_ids: tokens that end a text.
    """

    config: ModelConfig
    params: Params
    tokenizer_json: str | None
    chat_template: str | None
    stop_ids: tuple[int, ...]


def read(path: str | PathLike[str]) -> Checkpoint:
    """Opens a Hugging Face folder or a GGUF file, without reading tensor data."""
    path = Path(path)
    if path.is_dir():
        return read_folder(path)
    if path.suffix == ".gguf" and path.is_file():
        from jspec.checkpoint.gguf import read_gguf  # an optional dependency

        return read_gguf(path)
    raise ValueError(f"{path} is neither a folder nor a .gguf file.")


def load(path: str | PathLike[str], dtype="bfloat16") -> Model:
    """Loads a target model."""
    checkpoint = read(path)
    config = ModelConfig.from_hf(checkpoint.config)
    template = llama.abstract_params(config, dtype)
    params = assemble(template, llama.rules(config), checkpoint.tensors())
    return Model(
        config, params, checkpoint.tokenizer_json, checkpoint.chat_template, checkpoint.stop_ids
    )
