"""Loading models from disk: Hugging Face folders and GGUF files."""

from os import PathLike
from pathlib import Path
from typing import NamedTuple

from jax.typing import DTypeLike

from jspec.checkpoint.assemble import assemble
from jspec.checkpoint.base import Checkpoint
from jspec.checkpoint.safetensors import read_folder
from jspec.config import ModelConfig, check_float_dtype
from jspec.models import llama
from jspec.state import Params

__all__ = ["Checkpoint", "Model", "assemble", "load", "read", "read_folder"]

_ARCHITECTURES = ("LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")


class Model(NamedTuple):
    """A target model, ready to run.

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
    """Opens a Hugging Face folder or a GGUF file; tensor data is read later, on demand.

    Args:
      path: a folder, or a file that ends in .gguf.

    Raises:
      FileNotFoundError: nothing is there, or the folder lacks files.
      ValueError: another kind of file, or a damaged one.
    """
    path = Path(path)
    if path.is_dir():
        return read_folder(path)
    if not path.exists():
        raise FileNotFoundError(
            f"{path} does not exist. Pass a Hugging Face model folder or a .gguf file."
        )
    if path.suffix != ".gguf":
        raise ValueError(f"{path} is neither a folder nor a .gguf file. Pass one of these.")
    from jspec.checkpoint.gguf import read_gguf  # the rest of jspec does without its packages

    return read_gguf(path)


def load(path: str | PathLike[str], dtype: DTypeLike = "bfloat16") -> Model:
    """Loads a target model of the Llama family.

    Args:
      path: a Hugging Face folder (config.json and safetensors), or a GGUF file.
      dtype: of the weights in memory; what the file holds is converted. Prefer float32 on a CPU,
        where XLA's bfloat16 is several times slower.

    Raises:
      FileNotFoundError: a file is missing.
      ValueError: a file is damaged, the architecture, an option of it or `dtype` is not
        supported, or tensors and config do not fit (all are listed).

    Example:
      model = jspec.load("path/to/Llama-3.2-1B", "float32")
    """
    dtype = check_float_dtype("load", dtype)
    checkpoint = read(path)
    named = checkpoint.config.get("architectures") or [_ARCHITECTURES[0]]
    if not isinstance(named, list) or not any(name in _ARCHITECTURES for name in named):
        raise ValueError(
            f"{path}: architectures {named} are not supported, wanted one of "
            f"{', '.join(_ARCHITECTURES)}. A draft head is no target: its own config loads it."
        )
    config = ModelConfig.from_hf(checkpoint.config)
    params = assemble(
        llama.abstract_params(config, dtype), llama.rules(config), checkpoint.tensors()
    )
    return Model(
        config, params, checkpoint.tokenizer_json, checkpoint.chat_template, checkpoint.stop_ids
    )
