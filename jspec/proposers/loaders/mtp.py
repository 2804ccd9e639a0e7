"""MiMo's MTP modules on disk: beside their target's tensors, or alone.

Source: vLLM model_executor/models/mimo_mtp.py.
"""

import dataclasses
from collections.abc import Callable, Collection, Mapping
from typing import Any, Literal

from jax.typing import DTypeLike

from jspec._checks import check_at_least
from jspec.checkpoint import Checkpoint, Model, check_layers
from jspec.checkpoint.agreement import decoder_reasons
from jspec.models import mtp
from jspec.models.config import ModelConfig
from jspec.models.layers import Place, Rules
from jspec.models.llama import HiddenId
from jspec.models.mtp import MTP
from jspec.proposers.base import Drafter
from jspec.proposers.loaders.common import HEAD, check_fits, read_weights
from jspec.proposers.loaders.hf_config import architectures

_EMBED = "model.embed_tokens.weight"

_OF_MODULES = ("mtp_layers.", "mtp_block.", "mtp_linear_proj.", ".eh_proj.")
"""Parts of tensor names that MTP modules have; the first is MiMo's."""

_NUM_MODULES = "num_nextn_predict_layers"
_ARCHITECTURES = ("MiMoForCausalLM", "MiMoMTPModel")


def recognises(config: Mapping[str, Any], names: Collection[str]) -> bool:
    """Tells a checkpoint with MTP modules, of any architecture, by its tensor names."""
    del config
    return any(name.startswith("mtp.") or any(m in name for m in _OF_MODULES) for name in names)


def load(
    Config: Callable[..., Any],
    checkpoint: Checkpoint,
    target: Model,
    *,
    dtype: DTypeLike,
    num_drafts: int | None = None,
    draft_sampling: Literal["greedy", "probabilistic"] = "greedy",
    hidden_layer: HiddenId | None = None,
) -> Drafter:
    """Loads the modules; embedding and head are the target's where they do not differ.

    Args:
      Config: makes the drafter's config.
      checkpoint: the target's own folder, or one with the modules alone.
      target: the model that they were trained with.
      dtype: of the modules' weights.
      num_drafts: most drafts a request gets (K), by default one for each module.
      draft_sampling: as in `MTPConfig`.
      hidden_layer: as in `MTPConfig`, by default the residual stream before the final norm.

    Raises:
      ValueError: the modules are of another architecture or for a target of another size, or
        tensors are missing or unknown (all are listed).
    """
    hf = checkpoint.config
    named = architectures(hf)
    if hf.get("model_type") not in ("mimo", "mimo_mtp") or not set(named) <= set(_ARCHITECTURES):
        raise ValueError(
            f"mtp: architectures {named} of model_type {hf.get('model_type')!r} are not "
            f"supported, wanted {' or '.join(_ARCHITECTURES)} of model_type 'mimo'. Draft with "
            "another method, for example ngram or suffix."
        )
    num_modules: Any = hf.get(_NUM_MODULES)
    check_at_least("mtp: config.json", 1, **{_NUM_MODULES: num_modules})
    shape = {"model_type": "mimo", "num_hidden_layers": num_modules, "layer_types": None}
    model = ModelConfig.from_hf({**hf, **shape, "architectures": None})
    model = dataclasses.replace(model, tie_embeddings=False)
    check_fits("mtp", target, hidden_size=model.hidden_size, vocab_size=model.vocab_size)
    check_layers("mtp", num_modules, checkpoint.names, _NUM_MODULES)
    if hidden_layer is None:
        hidden_layer = target.config.num_layers
    if hidden_layer != "norm" and hidden_layer not in range(target.config.num_layers + 1):
        raise ValueError(
            f"mtp: `hidden_layer` is {hidden_layer!r}, wanted 0 (the target's embedding) to "
            f"{target.config.num_layers} (its last layer) or 'norm'."
        )
    names = [name for name in checkpoint.names if _OF_MODULES[0] in name]
    read = (*names, _EMBED, HEAD)
    params = read_weights(
        "mtp",
        MTP,
        model,
        checkpoint._replace(
            tensors=lambda: ((name, x) for name, x in checkpoint.tensors() if name in read)
        ),
        target,
        dtype,
        rules=mtp.rules(model),
        reasons=lambda: decoder_reasons(
            hf,
            model,
            checkpoint,
            layers_key=_NUM_MODULES,
            layers=r"mtp_layers\.(\d+)\.",
            names=names,
        ),
        embed=_EMBED,
    )
    config = Config(
        num_drafts=num_modules if num_drafts is None else num_drafts,
        draft_sampling=draft_sampling,
        model=model,
        hidden_layer=hidden_layer,
    )
    return Drafter(config, params)


def rules(config: Any, names: Collection[str]) -> Rules:
    """Returns where each tensor of a checkpoint is in the params."""
    del names
    return mtp.rules(config.model) | {_EMBED: Place(("embed",)), HEAD: Place(("head",))}
