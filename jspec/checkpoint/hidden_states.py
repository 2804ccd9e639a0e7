"""One request's hidden states in a safetensors file, for training or another process."""

import json
from os import PathLike
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from jspec.models.llama import HiddenId


class HiddenStates(NamedTuple):
    """The target's hidden states of a request's tokens.

    Attributes:
      states: row i is token i; layers in the order of `layers`.
      layers: n = residual stream after n layers, "norm" = after the final norm.
      token_ids: the tokens, or None.
    """

    states: Float[np.ndarray, "n L D"]
    layers: tuple[HiddenId, ...]
    token_ids: Int[np.ndarray, "n"] | None = None


def save_hidden_states(path: str | PathLike[str], hidden: HiddenStates) -> None:
    """Writes a safetensors file: `hidden_states` [n, L, D] and, where given, `token_ids` [n].

    The layers are in the file's metadata, as JSON under "layers".

    Args:
      path: of the file; one that is there is written over.
      hidden: states as `jspec.models.hidden_cache.read` returns them, in their dtype.

    Raises:
      ValueError: shapes of states, layers and tokens contradict each other.
    """
    states, layers, token_ids = hidden
    if states.ndim != 3 or states.shape[1] != len(layers):
        raise ValueError(
            f"save_hidden_states: `states` has shape {states.shape}, wanted [n, {len(layers)}, D] "
            f"for the layers {list(layers)}. Pass the layers that the drafter was configured with."
        )
    tensors = {"hidden_states": np.ascontiguousarray(states)}
    if token_ids is not None:
        token_ids = np.asarray(token_ids, np.int32)
        if token_ids.shape != states.shape[:1]:
            raise ValueError(
                f"save_hidden_states: `token_ids` has shape {token_ids.shape}, wanted "
                f"[{len(states)}], a token a row. Leave the newest token out: it has not been run."
            )
        tensors["token_ids"] = token_ids
    save_file(tensors, path, metadata={"layers": json.dumps(layers)})


def read_hidden_states(path: str | PathLike[str]) -> HiddenStates:
    """Reads a file of `save_hidden_states` back.

    Raises:
      FileNotFoundError: there is no such file.
      ValueError: it is damaged, or another kind of file.
    """
    try:
        with safe_open(path, framework="numpy") as file:
            layers = json.loads((file.metadata() or {})["layers"])
            tensors = file.get_tensors()
        states = tensors["hidden_states"]
    except (SafetensorError, KeyError, ValueError) as error:
        raise ValueError(
            f"{path} holds no hidden states of save_hidden_states ({error!r}). Write it again."
        ) from error
    return HiddenStates(states, tuple(layers), tensors.get("token_ids"))
