"""The result of every checkpoint reader, in Hugging Face terms."""

import collections
from collections.abc import Callable, Collection, Iterator
from typing import Any, NamedTuple

import numpy as np

from jspec.text import ChatTemplate


class Checkpoint(NamedTuple):
    """A model on disk, in Hugging Face terms.

    Attributes:
      config: content of a Hugging Face config.json.
      names: of all tensors.
      tensors: yields (Hugging Face name, array) one by one; each call starts over. An array may
        be a lazy view of the file, so a consumer that only looks at shapes reads no data.
      tokenizer_json, chat_template, stop_ids, tokenizer_config: see `jspec.text.TextFiles`.
      files: names of all files of the folder; empty for other formats.
    """

    config: dict[str, Any]
    names: tuple[str, ...]
    tensors: Callable[[], Iterator[tuple[str, np.ndarray]]]
    tokenizer_json: str | None
    chat_template: ChatTemplate | None
    stop_ids: tuple[int, ...]
    files: tuple[str, ...] = ()
    tokenizer_config: dict[str, Any] | None = None


def stored_dtype(checkpoint: Checkpoint) -> str:
    """Returns the float dtype of most parameters of a folder.

    Args:
      checkpoint: of a Hugging Face folder, whose tensors are not read here.

    Returns:
      "bfloat16", "float16", or else "float32".
    """
    sizes = collections.Counter({"float32": 0})
    for _, tensor in checkpoint.tensors():
        sizes[tensor.dtype.name] += tensor.size
    return max(("float32", "bfloat16", "float16"), key=lambda name: sizes[name])


_LISTED = 1000
"""Up to so many layers `assemble` lists missing tensors by name instead."""


def check_layers(
    owner: str, num_layers: Any, tensors: Collection[Any], key: str = "num_hidden_layers"
) -> None:
    """Refuses more layers than tensors, before shapes of each layer are made.

    Args:
      owner: name of the checkpoint, for messages.
      num_layers: of the config; other types than int are left to other checks.
      tensors: all tensors of the checkpoint.
      key: of the config that holds `num_layers`.

    Raises:
      ValueError: there are fewer tensors than layers, and more than a thousand layers.
    """
    if isinstance(num_layers, int) and num_layers > max(len(tensors), _LISTED):
        raise ValueError(
            f"{owner}: the config says {num_layers} layers ({key}), and the checkpoint has "
            f"{len(tensors)} tensors, fewer than one for each. Take weights and config from the "
            "same model."
        )
