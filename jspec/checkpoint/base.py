"""What every checkpoint reader returns, whatever the file format."""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np


class Checkpoint(NamedTuple):
    """A model on disk, in Hugging Face terms.

    Attributes:
      config: content of a Hugging Face config.json.
      names: of all tensors.
      tensors: yields (Hugging Face name, array) one by one; each call starts over. An array may
        be a lazy view of the file, so a consumer that only looks at shapes reads no data.
      tokenizer_json: content of a Hugging Face tokenizer.json, None where there is none.
      chat_template: Jinja template of the chat form, None where there is none.
      stop_ids: tokens that end a text.
      files: names of all files of the folder; empty for other forms.
    """

    config: dict[str, Any]
    names: tuple[str, ...]
    tensors: Callable[[], Iterator[tuple[str, np.ndarray]]]
    tokenizer_json: str | None
    chat_template: str | None
    stop_ids: tuple[int, ...]
    files: tuple[str, ...] = ()
