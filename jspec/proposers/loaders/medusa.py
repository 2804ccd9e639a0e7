"""The config.json of Medusa heads, in both published layouts.

Source: vLLM transformers_utils/configs/medusa.py; FasterDecoding's Medusa.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from jspec._checks import check_above_0, warn
from jspec.checkpoint import Checkpoint, Model, check_layers
from jspec.models import medusa
from jspec.models.medusa import HeadsConfig
from jspec.models.options import flag, size
from jspec.tree import Tree


def heads_config(
    checkpoint: Checkpoint, target: Model, *, num_drafts: int | None, tree: Tree | None
) -> HeadsConfig:
    """Reads the heads' shape off config.json and, where that is silent, the tensors.

    Args:
      checkpoint: of the heads.
      target: the model that they draft for.
      num_drafts: heads that are wanted, None = as many as config.json or the tensors say.
      tree: nodes that are wanted, a level for each head.

    Raises:
      ValueError: the heads are for a target of another size, there are fewer than wanted, or a
        value is not supported.
    """
    config, wanted = checkpoint.config, target.config
    tensors = {medusa.short_name(name): tensor for name, tensor in checkpoint.tensors()}
    for field in ("hidden_size", "vocab_size"):
        got, of_target = size(config, field, getattr(wanted, field)), getattr(wanted, field)
        if got != of_target:
            raise ValueError(
                f"medusa: the heads' {field} is {got}, the target's {of_target}. Load the heads "
                "that were trained for this target, or the target that these were trained for."
            )
    layers_key, num_layers = _number(config, "layers")
    num_layers = num_layers or medusa.count_layers(tensors)
    check_layers("medusa", num_layers, tensors, layers_key)
    truncated = size(config, "truncated_vocab_size", wanted.vocab_size)
    if truncated > wanted.vocab_size:
        raise ValueError(
            f"medusa: truncated_vocab_size is {truncated}, above the target's vocab_size = "
            f"{wanted.vocab_size}. Take config.json and weights from the same heads."
        )
    logit_scale = config.get("logit_scale")
    logit_scale = 1.0 if logit_scale is None else logit_scale
    check_above_0("medusa", logit_scale=logit_scale)
    return HeadsConfig(
        hidden_size=wanted.hidden_size,
        vocab_size=wanted.vocab_size,
        num_heads=_num_heads(config, medusa.count_heads(tensors), num_drafts, tree),
        num_layers=num_layers,
        bias=_bias(config, tensors),
        shared_head=_shares_head(config, tensors, num_layers),
        draft_vocab_size=None if truncated == wanted.vocab_size else truncated,
        logit_scale=float(logit_scale),
    )


def reasons(checkpoint: Checkpoint, model: HeadsConfig) -> list[str]:
    """Lists what config.json and tensors say differently, a sentence each."""
    shapes = {medusa.short_name(name): list(x.shape) for name, x in checkpoint.tensors()}
    told, found = [], medusa.count_layers(shapes)
    if found != model.num_layers:
        told.append(
            f"By config.json a head has {model.num_layers} residual blocks (num_hidden_layers or "
            f"medusa_num_layers), and the tensors are of {found}."
        )
    if model.bias and not any(name.endswith(".bias") for name in shapes):
        told.append("medusa_fc_bias is True in config.json, and no block has a bias.")
    rows = [model.head_rows, model.hidden_size]
    wrong = [n for n in shapes if medusa.is_head(n, model.num_layers) and shapes[n] != rows]
    if wrong:
        told.append(
            f"vocab_size (or truncated_vocab_size) is {rows[0]} and hidden_size {rows[1]}, and "
            f"{wrong[0]} is {shapes[wrong[0]]}."
        )
    return told


def _num_heads(
    config: Mapping[str, Any], found: int, num_drafts: int | None, tree: Tree | None
) -> int:
    key, stated = _number(config, "heads")
    wanted = tree.depth if tree else num_drafts or stated or found
    if wanted > found:
        what = f"`num_drafts` is {wanted}" if num_drafts else f"{key} is {wanted} in config.json"
        what = f"`tree` has {wanted} levels" if tree else what
        raise ValueError(
            f"medusa: {what}, and the checkpoint has {found} heads, one for each level of drafts. "
            f"Pass {'a tree of that depth' if tree else f'num_drafts={found}'} or less."
        )
    if stated not in (None, found) and not (num_drafts or tree):
        warn(
            f"config.json says {key} {stated}, and the checkpoint has {found} heads. The first "
            f"{wanted} are used, as in vLLM. Correct {key}, or pass num_drafts={found} for all."
        )
    return wanted


def _bias(config: Mapping[str, Any], tensors: Mapping[str, np.ndarray]) -> bool:
    has_bias = any(name.endswith(".bias") for name in tensors)
    stated = flag(config, "medusa_fc_bias", has_bias)
    if has_bias and not stated:
        warn(
            "config.json says medusa_fc_bias False, and the heads have biases. The tensors count. "
            "Correct medusa_fc_bias in config.json."
        )
    return stated or has_bias


def _shares_head(
    config: Mapping[str, Any], tensors: Mapping[str, np.ndarray], num_layers: int
) -> bool:
    """Returns whether one output matrix serves all heads."""
    own_heads = any(name.startswith("lm_heads.") for name in tensors) or not any(
        name.startswith("blocks.") or name == "lm_head.weight" for name in tensors
    )
    shared = flag(config, "original_lm_head", not own_heads)
    matrices = [tensors[name] for name in sorted(tensors) if medusa.is_head(name, num_layers)]
    if shared and any(not np.array_equal(matrices[0], matrix) for matrix in matrices[1:]):
        warn(
            f"config.json says original_lm_head True, and the checkpoint has {len(matrices)} "
            "output matrices that differ. The first serves all heads, as in vLLM. Correct "
            "original_lm_head in config.json."
        )
    if not own_heads and not shared:
        warn(
            "config.json says original_lm_head False, and the checkpoint has no matrix for each "
            "head. One serves all. Correct original_lm_head in config.json."
        )
    return shared or not own_heads


def _number(config: Mapping[str, Any], what: str) -> tuple[str, int | None]:
    """Reads the number of heads or layers: its key and its value.

    config.json may have the base model's numbers, too. Any key with "num" and `what` in it may be
    the one: those of Medusa come first, then vLLM's.
    """
    keys = [key for key in config if "num" in key and what in key and config[key] is not None]
    plain = "num_heads" if what == "heads" else "num_hidden_layers"
    keys = [k for k in keys if "medusa" in k] or [k for k in keys if k == plain] or keys
    if any(config[key] != config[keys[0]] for key in keys):
        raise ValueError(
            f"medusa: config.json has {', '.join(f'{key} = {config[key]}' for key in keys)}, and "
            f"each may be the number of {what}. Add medusa_num_{what} to say which."
        )
    return (keys[0], size(config, keys[0])) if keys else (f"medusa_num_{what}", None)
