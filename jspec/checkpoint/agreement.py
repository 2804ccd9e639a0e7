"""Contradictions between a checkpoint's tensors and its config.json."""

import dataclasses
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np

from jspec._checks import warn
from jspec.checkpoint.base import Checkpoint
from jspec.models.config import ModelConfig
from jspec.models.options import size

_EMBED, _HEAD = "model.embed_tokens.weight", "lm_head.weight"
_NUM_LAYERS = "num_hidden_layers"
_BLOCK_ROWS = 4096

# Keys of config.json whose product is the size of an axis of a tensor.
_SIZES = (
    (("vocab_size",), "embed_tokens.weight", 0),
    (("hidden_size",), "mlp.gate_proj.weight", 1),
    (("intermediate_size",), "mlp.gate_proj.weight", 0),
    (("num_attention_heads", "head_dim"), "self_attn.q_proj.weight", 0),
    (("num_key_value_heads", "head_dim"), "self_attn.k_proj.weight", 0),
    (("head_dim",), "self_attn.q_norm.weight", 0),
)


_DEFAULTS = {
    "num_key_value_heads": "num_attention_heads",
    "head_dim": "hidden_size // num_attention_heads",
}
"""Defaults of sizes that a config.json leaves out."""


def model_config(checkpoint: Checkpoint) -> ModelConfig:
    """Reads the shape of a language model from its config.json.

    If it ties the head to the embedding, and the checkpoint has a different head, that head is used
    with a warning, as in transformers 5.

    Raises:
      ValueError: as `ModelConfig.from_hf`.
    """
    config = ModelConfig.from_hf(checkpoint.config)
    if config.tie_embeddings and _HEAD in checkpoint.names and _head_differs(checkpoint):
        warn(
            f"config.json says tie_word_embeddings True, and {_HEAD} differs from {_EMBED}. "
            f"{_HEAD} is used, as in transformers 5. Set tie_word_embeddings to false."
        )
        config = dataclasses.replace(config, tie_embeddings=False)
    return config


def _head_differs(checkpoint: Checkpoint) -> bool:
    tables: dict[str, np.ndarray] = {}
    for name, tensor in checkpoint.tensors():
        if name in (_EMBED, _HEAD):
            tables[name] = tensor
        if len(tables) == 2:
            break
    if len(tables) < 2 or tables[_EMBED].shape != tables[_HEAD].shape:
        return len(tables) == 2
    embed, head = tables[_EMBED], tables[_HEAD]
    blocks = (slice(i, i + _BLOCK_ROWS) for i in range(0, len(embed), _BLOCK_ROWS))
    return not all(np.array_equal(embed[block], head[block]) for block in blocks)


def by_tensors(hf: Mapping[str, Any], names: Collection[str]) -> Mapping[str, Any]:
    """Returns a head's config.json with no more layers than its tensors have.

    Some heads state the number of layers of their target; a warning tells of it.

    Args:
      hf: content of config.json.
      names: of the tensors.
    """
    layers, stated, kinds = layers_of(names), size(hf, _NUM_LAYERS), hf.get("layer_types")
    found = len(layers)
    kinds = kinds if isinstance(kinds, list) else []
    if not found or layers != set(range(found)) or found >= max(stated, len(kinds)):
        return hf
    what = f"{_NUM_LAYERS} {stated}" if stated > found else f"layer_types of {len(kinds)} layers"
    warn(
        f"config.json says {what}, and the head has tensors of {found}. The tensors count: the "
        "other number may be its target's. Correct config.json."
    )
    return {**hf, _NUM_LAYERS: found, "layer_types": kinds[:found] or hf.get("layer_types")}


def layers_of(names: Collection[str], pattern: str = r"(?:^|\.)layers\.(\d+)\.") -> set[int]:
    """Returns the indices of layers that tensors belong to; `midlayer` is the first."""
    found = {int(match[1]) for name in names if (match := re.search(pattern, name))}
    return found | {0 for name in names if name.startswith("midlayer.")}


@contextmanager
def explained(reasons: Callable[[], list[str]]) -> Iterator[None]:
    """Puts contradictions between config.json and tensors before an error about tensors.

    Args:
      reasons: makes a sentence for each contradiction; called after an error only.
    """
    try:
        yield
    except ValueError as error:
        found = " ".join(reasons())
        raise (ValueError(f"{found} Therefore {error}") if found else error) from None


def decoder_reasons(
    hf: Mapping[str, Any],
    config: ModelConfig,
    checkpoint: Checkpoint,
    *,
    layers_key: str = _NUM_LAYERS,
    layers: str = r"(?:^|\.)layers\.(\d+)\.",
    names: Collection[str] = (),
) -> list[str]:
    """Lists contradictions between a decoder's config.json and its tensors, a sentence each.

    Args:
      hf: content of config.json.
      config: as read from it.
      checkpoint: has the tensors.
      layers_key: key with the number of layers.
      layers: pattern that finds the index of its layer in a tensor's name.
      names: of the decoder's tensors, where the checkpoint has others, too.
    """
    shapes = {name: tensor.shape for name, tensor in checkpoint.tensors()}
    if names:
        shapes = {name: shape for name, shape in shapes.items() if name in names}
    reasons = []
    found = layers_of(shapes, layers)
    if found != set(range(config.num_layers)):
        reasons.append(
            f"{_stated(hf, layers_key, config.num_layers)}, and there are tensors of {len(found)} "
            f"layer{'' if len(found) == 1 else 's'}."
        )
    values = {
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
    }
    for keys, suffix, axis in _SIZES:
        wanted = int(np.prod([values[key] for key in keys]))
        for name, shape in shapes.items():
            if name.endswith(suffix) and len(shape) > axis and shape[axis] != wanted:
                sizes = " and ".join(_stated(hf, key, values[key]) for key in keys)
                reasons.append(f"{sizes}, which is {wanted}, and {name} is {list(shape)}.")
                break
    qkv_key = "attention_bias" if hf.get("qkv_bias") is None else "qkv_bias"
    for key, has, suffix in (
        (qkv_key, config.qkv_bias, "self_attn.q_proj.bias"),
        ("attention_bias", config.o_bias, "self_attn.o_proj.bias"),
        ("mlp_bias", config.mlp_bias, "mlp.gate_proj.bias"),
        ("model_type", config.qk_norm, "self_attn.q_norm.weight"),
    ):
        those = [name for name in shapes if name.endswith(suffix)]
        if has != bool(those):
            what = f"there is {those[0]}" if those else f"no tensor is a {suffix}"
            reasons.append(f"{_stated(hf, key, has)}, and {what}.")
    if not config.tie_embeddings and _EMBED in shapes and _HEAD not in shapes:
        reasons.append(f"{_stated(hf, 'tie_word_embeddings', False)}, and there is no {_HEAD}.")
    return reasons


def _stated(hf: Mapping[str, Any], key: str, value: Any) -> str:
    if hf.get(key) is None:
        by = _DEFAULTS.get(key, "the default")
        return f"{key} is missing in config.json and taken to be {value!r} ({by})"
    return f"{key} is {hf[key]!r} in config.json"
