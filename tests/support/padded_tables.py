"""Pads embedding and head of a drafter, as sharding needs it, with rows that must never be read."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

POISON = np.float32([np.inf, 1e30, np.nan, -1e30])
"""Rows of padding hold one of these each; the first would be the best token of any head."""


def padded_config(config: Any) -> Any:
    """States the padding in every part of a config whose tables may have some."""
    changes: dict[str, Any] = {}
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if dataclasses.is_dataclass(value):
            changes[field.name] = padded_config(value)
        if field.name == "padded_vocab_size":
            changes[field.name] = getattr(config, "num_ids", config.vocab_size) + len(POISON)
        if field.name == "padded_draft_vocab_size":
            changes[field.name] = config.draft_vocab_size + len(POISON)
    return dataclasses.replace(config, **changes)


def padded_params(params: Any) -> Any:
    """Pads the tables of params as a padded config wants them."""

    def pad(path: Any, leaf: Any) -> Any:
        if path[-1].key not in ("embed", "head"):
            return leaf
        rows = np.broadcast_to(POISON[:, None], (len(POISON), leaf.shape[1]))
        return jnp.concatenate([leaf, jnp.asarray(rows, leaf.dtype)])

    return jax.tree.map_with_path(pad, params)
