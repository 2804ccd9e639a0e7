"""EAGLE-1 heads on disk, in the layout of SafeAILab's EAGLE.

Source: vLLM model_executor/models/llama_eagle.py.
"""

import dataclasses
from collections.abc import Callable, Collection, Mapping
from typing import Any, Literal

from jax.typing import DTypeLike

from jspec._checks import warn
from jspec.checkpoint import Checkpoint, Model, check_layers
from jspec.checkpoint.agreement import by_tensors, decoder_reasons
from jspec.models import eagle
from jspec.models.eagle import Eagle, EagleModelConfig
from jspec.models.layers import Place, Rules
from jspec.models.options import flag
from jspec.proposers.base import Drafter, refuse_axes
from jspec.proposers.loaders.common import EMBED, HEAD, check_fits, read_weights
from jspec.proposers.loaders.hf_config import architectures
from jspec.tree import DynamicTree, Tree

_OF_OTHERS = ("midlayer.", "hidden_norm", "d2t", "mask_hidden")
"""Parts of tensor names that EAGLE-3 and DFlash heads have and EAGLE-1 heads have not."""

_NO_PLACE = {
    "layers.0.input_layernorm.weight": "the first layer of an EAGLE-1 head reads its input as it "
    "is. Remove the tensor, or load the head by the method that it was trained for",
    HEAD: "an EAGLE-1 head is scored by its target's lm_head. Remove the tensor, or load a head "
    "that has its own by the method that it was trained for (eagle3)",
}


def recognises(config: Mapping[str, Any], names: Collection[str]) -> bool:
    """Tells an EAGLE-1 head from other heads: by `architectures`, and by tensor names.

    The config of a published head is a plain Llama's.
    """
    if any(part in name for name in names for part in _OF_OTHERS):
        return False
    named = architectures(config)
    if any("Eagle3" in name for name in named):
        return False
    return "fc.weight" in names or any(name.startswith("Eagle") for name in named)


def load(
    Config: Callable[..., Any],
    checkpoint: Checkpoint,
    target: Model,
    *,
    dtype: DTypeLike,
    num_drafts: int | None = None,
    draft_sampling: Literal["greedy", "probabilistic"] = "greedy",
    tree: Tree | DynamicTree | None = None,
) -> Drafter:
    """Loads a head; an embedding of its own is kept where it differs from the target's.

    Args:
      Config: makes the drafter's config.
      checkpoint: the head's folder.
      target: the model that the head was trained for.
      dtype: of the head's weights.
      num_drafts: most drafts a request gets (K), by default 5.
      draft_sampling: as in `EagleConfig`.
      tree: guesses to make in place of a chain.

    Raises:
      ValueError: the head is for a target of another size, or has tensors that EAGLE-1 has not, or
        lacks some (all are listed).
    """
    if tree is not None:
        refuse_axes("eagle with a tree", target.config)
    hf, names = by_tensors(checkpoint.config, checkpoint.names), checkpoint.names
    model = EagleModelConfig.from_hf({**hf, "architectures": None})
    model = dataclasses.replace(model, fc_bias=_fc_bias(hf, names), tie_embeddings=False)
    check_fits("eagle", target, hidden_size=model.hidden_size, vocab_size=model.vocab_size)
    for name, why in _NO_PLACE.items():
        if name in names:
            raise ValueError(f"eagle: the checkpoint has {name}, but {why}.")
    check_layers("eagle", model.num_layers, names)
    if num_drafts is None:
        num_drafts = 5 if tree is None else tree.num_nodes
    params = read_weights(
        "eagle",
        Eagle,
        model,
        checkpoint,
        target,
        dtype,
        rules=eagle.rules(model),
        reasons=lambda: decoder_reasons(hf, model, checkpoint),
    )
    config = Config(num_drafts=num_drafts, tree=tree, draft_sampling=draft_sampling, model=model)
    return Drafter(config, params)


def rules(config: Any, names: Collection[str]) -> Rules:
    """Returns where each tensor of a checkpoint is in the params."""
    del names
    return eagle.rules(config.model) | {EMBED: Place(("embed",))}


def _fc_bias(hf: Mapping[str, Any], names: Collection[str]) -> bool:
    """Returns whether the fusing projection has a bias: the tensors say it, and `bias` may."""
    has_bias = "fc.bias" in names
    if flag(hf, "bias", has_bias) != has_bias:
        warn(
            f"config.json says bias {hf['bias']}, and the head has {'an' if has_bias else 'no'} "
            "fc.bias. The tensors count. Correct bias in config.json."
        )
    return has_bias
