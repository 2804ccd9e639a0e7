"""What loading has in common for all methods: checks against the target, and shared tables."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike

from jspec.checkpoint import Checkpoint, Model, assemble
from jspec.checkpoint.agreement import decoder_reasons, explained
from jspec.checkpoint.sharing import own_or_shared
from jspec.checkpoint.target_ids import read_d2t
from jspec.models import weights
from jspec.models.config import ModelConfig
from jspec.models.layers import Place, Rules
from jspec.models.options import section
from jspec.state import Params

EMBED, HEAD = "embed_tokens.weight", "lm_head.weight"
TABLE_RULES: Rules = {
    EMBED: Place(("embed",)),
    HEAD: Place(("head",)),
    "d2t": Place(("target_ids",)),
}
"""Where the tables that `read_weights` compares with the target's are in the params."""

_OF_TARGET = {"target_hidden_size": "hidden_size", "num_target_layers": "num_layers"}
"""What config.json files of drafters call sizes of the target."""


def check_fits(method: str, target: Model, **sizes: int) -> None:
    """Refuses a drafter of another target.

    Args:
      method: its name, for messages.
      target: the model that it is to draft for.
      **sizes: what its config.json says, by the key there: `vocab_size`, `hidden_size`,
        `target_hidden_size`, `num_target_layers`.

    Raises:
      ValueError: one of them is not the target's.
    """
    for name, size in sizes.items():
        wanted = getattr(target.config, _OF_TARGET.get(name, name))
        if size != wanted:
            raise ValueError(
                f"{method}: the drafter's {name} is {size}, the target's {wanted}. Load the "
                "drafter that was trained for this target, or the target that it was trained for."
            )


def renamed(checkpoint: Checkpoint, rename: Callable[[str], str]) -> Checkpoint:
    """Returns a checkpoint whose tensors have the names that rules are written for."""
    return checkpoint._replace(
        names=tuple(map(rename, checkpoint.names)),
        tensors=lambda: ((rename(name), tensor) for name, tensor in checkpoint.tensors()),
    )


def head_of(target: Model) -> jax.Array:
    """Returns the target's head, which is its embedding where both are tied."""
    return target.params["embed" if target.config.tie_embeddings else "head"]


def reasons_of(
    decoder: ModelConfig,
    checkpoint: Checkpoint,
    wanted: Mapping[str, tuple[str, Any]],
    **forced: Any,
) -> list[str]:
    """Lists what a drafter's config.json and its tensors say differently, a sentence each.

    Args:
      decoder: shape of its layers.
      checkpoint: has config.json and the tensors.
      wanted: end of a tensor's name -> the key of config.json that it depends on, and its shape.
      **forced: what counts in place of config.json.
    """
    hf = {**section(checkpoint.config, "transformer_layer_config"), **checkpoint.config, **forced}
    told = decoder_reasons(hf, decoder, checkpoint)
    shapes = {name: list(tensor.shape) for name, tensor in checkpoint.tensors()}
    for suffix, (key, shape) in wanted.items():
        found = [name for name in shapes if name.endswith(suffix) and shapes[name] != shape]
        if found:
            value = f" is {hf[key]} and" if key in hf else ""
            told.append(f"{key}{value} asks for {shape}, and {found[0]} is {shapes[found[0]]}.")
    return told


def read_weights(
    method: str,
    module: type[nnx.Module],
    config: Any,
    checkpoint: Checkpoint,
    target: Model,
    dtype: DTypeLike,
    *,
    rules: Rules,
    reasons: Callable[[], list[str]],
    embed: str = EMBED,
) -> Params:
    """Loads a drafter's weights; embedding and head are the target's own where they are the same.

    Where the tables `d2t` and `t2d` give draft ids another order than the target's, the rows of the
    head are sorted, so that the lowest of the target's ids wins among equal logits.

    Args:
      method: its name, for messages.
      module: the drafter's decoder, made as `module(config, dtype)`.
      config: its shape.
      checkpoint: tensors of the drafter and no others.
      target: the model that it drafts for.
      dtype: of weights that the target does not share.
      rules: where each tensor goes, embedding and head aside.
      reasons: what config.json and tensors say differently, see `explained`.
      embed: name of the embedding's tensor.

    Raises:
      ValueError: tensors and config do not fit (all are listed), or a table is missing that the
        target's cannot stand in for.
    """
    template = weights.abstract(module, config, dtype)
    (num_ids, width), V = template["head"].shape, target.config.vocab_size
    own = {name: x for name, x in checkpoint.tensors() if name in (embed, HEAD, "d2t", "t2d")}
    _check_complete(method, own, target, num_ids=num_ids, width=width)
    rules = dict(rules)
    for name, leaf in ((embed, "embed"), (HEAD, "head")):
        if name in own and own[name].shape != template[leaf].shape:
            rules[name] = Place((leaf,))  # to be listed with other tensors
        else:
            rules[name] = None
            del template[leaf]
    with explained(reasons):
        params = assemble(template, rules, checkpoint.tensors())
    head = own.get(HEAD)
    if not own.keys().isdisjoint(("d2t", "t2d")):
        ids, order = read_d2t(method, own.get("d2t"), own.get("t2d"), num_ids=num_ids, vocab_size=V)
        if order is not None:
            head = np.asarray(head_of(target) if head is None else head)[order]
        if num_ids < V:
            params["target_ids"] = jnp.asarray(ids)
    params["embed"] = own_or_shared(own.get(embed), target.params["embed"], dtype)
    params["head"] = own_or_shared(head, head_of(target), dtype)
    return params


def _check_complete(
    method: str, own: Mapping[str, np.ndarray], target: Model, *, num_ids: int, width: int
) -> None:
    """Refuses a checkpoint without a table that the target's cannot stand in for."""
    V, D = target.config.vocab_size, target.config.hidden_size
    for name, needed, why in (
        ("d2t", num_ids < V, f"maps its {num_ids} draft ids to the target's {V}"),
        (EMBED, width != D, f"has its width {width}, where the target's embedding has {D}"),
        (
            HEAD,
            (num_ids, width) != (V, D),
            f"scores its {num_ids} draft ids from width {width}, where the target's has shape "
            f"{[V, D]}",
        ),
    ):
        if needed and name not in own:
            raise ValueError(
                f"{method}: the checkpoint has no {name}, which {why} (by draft_vocab_size and "
                "hidden_size in config.json). Load a complete checkpoint."
            )
