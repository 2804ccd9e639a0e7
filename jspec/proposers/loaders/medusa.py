"""Medusa heads on disk, in both published layouts.

Source: vLLM transformers_utils/configs/medusa.py; FasterDecoding's Medusa.
"""

from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, Literal

import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jspec._checks import check_above_0, check_at_least, warn
from jspec.checkpoint import Checkpoint, Model, assemble, check_layers
from jspec.checkpoint.agreement import explained
from jspec.checkpoint.sharing import own_or_shared
from jspec.checkpoint.target_ids import TargetIds, read_token_map
from jspec.models import medusa, weights
from jspec.models.layers import Place, Rules, rows
from jspec.models.medusa import TOKEN_MAP, HeadsConfig, Medusa
from jspec.models.options import flag, size
from jspec.proposers.base import Drafter
from jspec.proposers.loaders.common import check_fits, head_of, renamed
from jspec.tree import Tree

_SIZES = ("hidden_size", "vocab_size")


def recognises(config: Mapping[str, Any], names: Collection[str]) -> bool:
    """Tells Medusa heads by their tensors, or by what config.json says."""
    if medusa.count_layers([medusa.short_name(name) for name in names]):
        return True
    return config.get("model_type") == "medusa" or config.get("architectures") == ["MedusaModel"]


def load(
    Config: Callable[..., Any],
    checkpoint: Checkpoint,
    target: Model,
    *,
    dtype: DTypeLike,
    num_drafts: int | None = None,
    draft_sampling: Literal["greedy", "probabilistic"] = "greedy",
    tree: Tree | None = None,
) -> Drafter:
    """Loads heads in the layout of FasterDecoding's Medusa or of vLLM.

    Heads that no draft needs are not read. Where the checkpoint has no output matrix, the target's
    serves all heads.

    Args:
      Config: makes the drafter's config.
      checkpoint: its folder.
      target: the model that the heads were trained for.
      dtype: of the heads' weights.
      num_drafts: most drafts a request gets (K), by default one of each head in config.json.
      draft_sampling: as in `MedusaConfig`.
      tree: as in `MedusaConfig`.

    Raises:
      ValueError: the heads are for a target of another size, there are fewer than drafts, the map
        of a truncated vocabulary is missing or no map, or tensors are missing or unknown (all are
        listed).
    """
    if num_drafts is not None:
        check_at_least("medusa", 1, num_drafts=num_drafts)
    checkpoint = renamed(checkpoint, medusa.short_name)
    model = _heads_config(checkpoint, target, num_drafts=num_drafts, tree=tree)
    token_map = _token_map(checkpoint, model)
    template = weights.abstract(Medusa, model, dtype)
    names, num_layers = checkpoint.names, model.num_layers
    shares = model.shared_head and not any(medusa.is_head(name, num_layers) for name in names)
    if shares:
        del template["head"]

    def tensors() -> Iterator[tuple[str, np.ndarray]]:
        for name, tensor in checkpoint.tensors():
            if token_map is not None and medusa.is_head(name, num_layers):
                tensor = _truncated(tensor, token_map, vocab_size=model.vocab_size)
            yield name, tensor

    with explained(lambda: _reasons(checkpoint, model)):
        params = assemble(template, medusa.rules(model, names), tensors())
    of_target = head_of(target)
    if token_map is not None:
        params["target_ids"] = jnp.asarray(token_map.ids)
        of_target = rows(of_target, params["target_ids"]) if shares else of_target
    if model.shared_head:
        own = None if shares else np.asarray(params["head"])
        params["head"] = own_or_shared(own, of_target, dtype)
    config = Config(num_drafts=num_drafts, model=model, draft_sampling=draft_sampling, tree=tree)
    return Drafter(config, params)


def rules(config: Any, names: Collection[str]) -> Rules:
    """Returns where each tensor of a checkpoint is in the params, by its full name."""
    table = medusa.rules(config.model, [medusa.short_name(name) for name in names])
    table[TOKEN_MAP] = Place(("target_ids",))
    return {name: table.get(medusa.short_name(name)) for name in names}


def _token_map(checkpoint: Checkpoint, model: HeadsConfig) -> TargetIds | None:
    """Reads which of the target's tokens a truncated vocabulary has."""
    ids = dict(checkpoint.tensors()).get(TOKEN_MAP)
    size = model.draft_vocab_size
    if size is None:
        if ids is not None and not np.array_equal(ids, np.arange(model.vocab_size)):
            warn(
                f"medusa: {TOKEN_MAP!r} of {len(ids)} ids is not read: config.json has no "
                "truncated_vocab_size below the target's vocabulary. Set it, or remove the table."
            )
        return None
    if ids is None:
        raise ValueError(
            f"medusa: truncated_vocab_size is {size}, below the target's {model.vocab_size}, and "
            f"the checkpoint has no {TOKEN_MAP!r} that says which tokens they are. Add it to the "
            "checkpoint: the target's id of each row, [truncated_vocab_size]."
        )
    return read_token_map("medusa", TOKEN_MAP, ids, num_ids=size, vocab_size=model.vocab_size)


def _truncated(head: np.ndarray, token_map: TargetIds, *, vocab_size: int) -> np.ndarray:
    """Returns the rows of a head in the order of the target's ids; one of all tokens is cut.

    One of another shape comes back as it is, to be refused by name.
    """
    if head.ndim == 2 and len(head) == len(token_map.ids):
        return head if token_map.order is None else head[token_map.order]
    return head[token_map.ids] if head.ndim == 2 and len(head) == vocab_size else head


def _heads_config(
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
    tensors = dict(checkpoint.tensors())
    given = {field: size(config, field, getattr(wanted, field)) for field in _SIZES}
    check_fits("medusa", target, **given)
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


def _reasons(checkpoint: Checkpoint, model: HeadsConfig) -> list[str]:
    """Lists what config.json and tensors say differently, a sentence each."""
    shapes = {name: list(tensor.shape) for name, tensor in checkpoint.tensors()}
    told, found = [], medusa.count_layers(shapes)
    if found != model.num_layers:
        told.append(
            f"By config.json a head has {model.num_layers} residual blocks (num_hidden_layers or "
            f"medusa_num_layers), and the tensors are of {found}."
        )
    if model.bias and not any(name.endswith(".bias") for name in shapes):
        told.append("medusa_fc_bias is True in config.json, and no block has a bias.")
    shape = [model.head_rows, model.hidden_size]
    wrong = [n for n in shapes if medusa.is_head(n, model.num_layers) and shapes[n] != shape]
    if wrong:
        told.append(
            f"vocab_size (or truncated_vocab_size) is {shape[0]} and hidden_size {shape[1]}, and "
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
