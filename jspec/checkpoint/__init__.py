"""Loading models from disk: Hugging Face folders and GGUF files."""

from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple

from jax.typing import DTypeLike

from jspec._checks import check_float_dtype
from jspec.checkpoint.agreement import decoder_reasons, explained, model_config
from jspec.checkpoint.assemble import assemble
from jspec.checkpoint.base import Checkpoint, check_layers, stored_dtype
from jspec.checkpoint.hub import resolve
from jspec.checkpoint.safetensors import read_folder
from jspec.checkpoint.weight_files import check_file
from jspec.models import llama, weights
from jspec.models.config import ModelConfig
from jspec.state import Params
from jspec.text import ChatTemplate, TextFiles

__all__ = [
    "Checkpoint",
    "Model",
    "as_model",
    "assemble",
    "check_layers",
    "read",
    "read_folder",
    "resolve",
    "stored_dtype",
]

_ARCHITECTURES = ("LlamaForCausalLM", "MiMoForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")

_DRAFTER_PREFIX = "model.mtp_layers."
"""Prefix of the tensors of a drafter inside the model's own checkpoint (MiMo's MTP modules)."""


class Model(NamedTuple):
    """A target model, ready to run.

    Attributes:
      config: its shape.
      params: its weights.
      tokenizer_json, chat_template, stop_ids, tokenizer_config: see `jspec.text.TextFiles`.
    """

    config: ModelConfig
    params: Params
    tokenizer_json: str | None
    chat_template: ChatTemplate | None
    stop_ids: tuple[int, ...]
    tokenizer_config: dict[str, Any] | None = None


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
    if not check_file(path):
        raise FileNotFoundError(
            f"{path} does not exist. Pass a Hugging Face model folder or a .gguf file."
        )
    if path.suffix != ".gguf":
        raise ValueError(f"{path} is neither a folder nor a .gguf file. Pass one of these.")
    from jspec.checkpoint.gguf import read_gguf  # needs optional packages

    return read_gguf(path)


def as_model(
    checkpoint: Checkpoint,
    dtype: DTypeLike,
    *,
    source: str | PathLike[str],
    config: ModelConfig | None = None,
) -> Model:
    """Loads a model of the Llama family from an open checkpoint.

    Args:
      checkpoint: from `read`.
      dtype: of the weights in memory; what the file holds is converted.
      source: name of the checkpoint, for messages.
      config: of `model_config`, if it was called already.

    Raises:
      ValueError: the architecture, an option of it or `dtype` is not supported, or tensors and
        config contradict each other (all contradictions are listed).
    """
    dtype = check_float_dtype("load", dtype)
    named = checkpoint.config.get("architectures") or [_ARCHITECTURES[0]]
    if not isinstance(named, list) or not any(name in _ARCHITECTURES for name in named):
        raise ValueError(
            f"{source}: architectures {named} are not supported, wanted one of "
            f"{', '.join(_ARCHITECTURES)}. A draft head is no target: load it with target=."
        )
    config = model_config(checkpoint) if config is None else config
    check_layers(str(source), config.num_layers, checkpoint.names)
    rules = llama.rules(config)
    rules |= {name: None for name in checkpoint.names if name.startswith(_DRAFTER_PREFIX)}
    with explained(lambda: decoder_reasons(checkpoint.config, config, checkpoint)):
        params = assemble(weights.abstract(llama.Llama, config, dtype), rules, checkpoint.tensors())
    return Model(config, params, **{name: getattr(checkpoint, name) for name in TextFiles._fields})
