"""EAGLE-3 and P-EAGLE heads on disk; config.json in the plain or the speculators form.

Source: vLLM model_executor/models/llama_eagle3.py, transformers_utils/configs/speculators/algos.py.
"""

import dataclasses
from collections.abc import Collection, Mapping
from typing import Any, Literal

import numpy as np
from jax.typing import DTypeLike

from jspec._checks import warn
from jspec.checkpoint import Checkpoint, Model, check_layers
from jspec.checkpoint.agreement import by_tensors
from jspec.checkpoint.assemble import is_float
from jspec.models import eagle3, weights
from jspec.models.config import ModelConfig
from jspec.models.eagle3 import Eagle3ModelConfig, Head
from jspec.models.layers import Rules
from jspec.models.llama import HiddenId
from jspec.models.options import size
from jspec.proposers.base import Drafter, refuse_axes
from jspec.proposers.loaders.common import TABLE_RULES, check_fits, read_weights, reasons_of
from jspec.proposers.loaders.hf_config import LAYER_IDS, architectures, setting, switch, unnested
from jspec.tree import DynamicTree, Tree

_PLACES = ("", "eagle_config")
"""Where config.json has options of the head."""

_SWITCHES = ("norm_before_fc", "fc_norm", "norm_before_residual", "norm_output")


def recognises(config: Mapping[str, Any], names: Collection[str]) -> bool:
    """Tells an EAGLE-3 or P-EAGLE head by `architectures`, or else by its first layer."""
    named = [name.lower() for name in architectures(config)]
    return (
        any("eagle3" in name or "peagle" in name for name in named)
        or config.get("speculators_model_type") in ("eagle3", "peagle")
        or not {"midlayer.hidden_norm.weight", "layers.0.hidden_norm.weight"}.isdisjoint(names)
    )


def load(
    Config: Any,
    checkpoint: Checkpoint,
    target: Model,
    *,
    dtype: DTypeLike,
    num_drafts: int | None = None,
    draft_sampling: Literal["greedy", "probabilistic"] = "greedy",
    parallel_drafting: bool | None = None,
    tree: Tree | DynamicTree | None = None,
) -> Drafter:
    """Loads a head; an embedding or a head of its own is kept where it differs from the target's.

    Args:
      Config: class of the drafter's config.
      checkpoint: its folder.
      target: the model that the head was trained for.
      dtype: of the head's weights.
      num_drafts: most drafts a request gets (K); by default what config.json asks for, else 5.
      draft_sampling: as in `Eagle3Config`.
      parallel_drafting: whether to draft all tokens in one pass; by default if the checkpoint was
        trained for it, which its `mask_hidden` shows.
      tree: guesses to make in place of a chain.

    Raises:
      ValueError: the head is for another target, an option is not supported, or a tensor is
        missing or does not fit (all are listed).
    """
    config = Config.from_hf(
        checkpoint.config,
        checkpoint.names,
        num_layers=target.config.num_layers,
        num_drafts=num_drafts,
        draft_sampling=draft_sampling,
        parallel_drafting=parallel_drafting,
        tree=tree,
    )
    model = config.model
    if config.parallel_drafting:
        refuse_axes("eagle3 with parallel_drafting", target.config)
    if tree is not None:
        refuse_axes("eagle3 with a tree", target.config)
    _warn_of_unused(checkpoint, model, asked=parallel_drafting is not None)
    check_layers("eagle3", model.decoder.num_layers, checkpoint.names)
    check_fits("eagle3", target, target_hidden_size=model.target_size, vocab_size=config.vocab_size)
    mask = _mask_hidden(checkpoint, config) if config.parallel_drafting else None
    params = read_weights(
        "eagle3",
        Head,
        model,
        checkpoint,
        target,
        dtype,
        rules=eagle3.rules(model, checkpoint.names),
        reasons=lambda: _reasons(model, checkpoint),
    )
    if mask is not None:
        head = weights.bind(Head, model, params)
        params["mask_hidden"] = head.fuse(np.asarray(mask).reshape(1, -1))[0]  # [1, Dh] -> [D]
    return Drafter(config, params)


def rules(config: Any, names: Collection[str]) -> Rules:
    """Returns where each tensor of a checkpoint is in the params."""
    return eagle3.rules(config.model, names) | TABLE_RULES


def plain(hf: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns a head's config.json without the nesting of the speculators format."""
    kind = hf.get("speculators_model_type")
    if kind is None:
        return hf
    own = ("draft_vocab_size", "target_hidden_size", LAYER_IDS, *_SWITCHES)
    return {"norm_before_residual": kind == "eagle3", **unnested("eagle3", hf, own)}


def model_config(
    hf: Mapping[str, Any], tensors: Collection[str], *, num_fused: int
) -> Eagle3ModelConfig:
    """Reads the shape of a head.

    Args:
      hf: content of config.json, see `plain`.
      tensors: names in the checkpoint; whether queries and keys are normed shows there alone, and
        how many layers there are shows there, too.
      num_fused: see `Eagle3ModelConfig`.

    Raises:
      ValueError: a size is missing or an option is not supported.
    """
    if hf.get("kv_lora_rank") is not None:
        raise ValueError(
            f"eagle3: {hf.get('architectures')} has latent attention (kv_lora_rank), which is not "
            "supported, wanted layers of the Llama family. Take another head."
        )
    # Heads state the model type of their target, and are of the Llama form all the same.
    forced = {"model_type": "llama", "tie_word_embeddings": False, "architectures": None}
    llama = ModelConfig.from_hf({**by_tensors(hf, tensors), **forced})
    qk_norm = any(name.endswith(".q_norm.weight") for name in tensors)
    return Eagle3ModelConfig(
        decoder=dataclasses.replace(llama, qk_norm=qk_norm),
        draft_vocab_size=size(hf, "draft_vocab_size", llama.vocab_size),
        target_size=size(hf, "target_hidden_size", llama.hidden_size),
        num_fused=num_fused,
        **{key: switch("eagle3", hf, key, *_PLACES) for key in _SWITCHES},
    )


def hidden_layers(hf: Mapping[str, Any], num_layers: int) -> tuple[HiddenId, ...]:
    """Returns which hidden states of its target a head reads, in their order.

    Args:
      hf: content of config.json, see `plain`. An empty list of layers says nothing.
      num_layers: layers of the target (L).

    Raises:
      ValueError: a layer is not there or named twice, or there are more or fewer than the head has
        weights for.
    """
    if not switch("eagle3", hf, "use_aux_hidden_state", *_PLACES, default=True):
        return ("norm",)
    L = num_layers
    ids = setting(hf, LAYER_IDS, *_PLACES, default=[2, L // 2, L - 3])
    known = isinstance(ids, list) and all(type(i) is int and 0 <= i <= L for i in ids)
    if not known or len(set(ids)) != len(ids):
        raise ValueError(
            f"eagle3: {LAYER_IDS} is {ids} (by default 2, L // 2, L - 3), wanted different layers "
            f"from 0 (the embedding) to the target's L = {L}. Load the head with the target that "
            "it was trained for, or name its layers in config.json."
        )
    count = setting(hf, "num_aux_hidden_states", *_PLACES)
    if count not in (None, len(ids)):
        raise ValueError(
            f"eagle3: num_aux_hidden_states is {count}, and the layers are {ids}. Name {count} "
            f"layers as {LAYER_IDS} in config.json."
        )
    return tuple(sorted(ids))


def _mask_hidden(checkpoint: Checkpoint, config: Any) -> np.ndarray:
    """Returns the hidden state that drafting in parallel starts from, before it is fused."""
    mask = dict(checkpoint.tensors()).get("mask_hidden")
    if mask is None:
        raise ValueError(
            "eagle3: the checkpoint has no mask_hidden, which drafting in parallel starts from. "
            "Load a complete checkpoint, or pass parallel_drafting=False."
        )
    if mask.size != config.model.input_size or not is_float(mask):
        raise ValueError(
            f"eagle3: mask_hidden is {mask.dtype} {list(mask.shape)}, wanted "
            f"{config.model.input_size} floats, as wide as what the head reads of the target "
            f"({config.hidden_layers}, by use_aux_hidden_state and {LAYER_IDS}). Take weights and "
            "config.json from the same head."
        )
    return mask


def _warn_of_unused(checkpoint: Checkpoint, model: Eagle3ModelConfig, *, asked: bool) -> None:
    """Warns where config.json leaves tensors unread, or is of a head with some that are missing.

    Args:
      checkpoint: the head's.
      model: its shape.
      asked: the caller says whether the head drafts in parallel.
    """
    hf, names = checkpoint.config, checkpoint.names
    if not model.num_fused and "fc.weight" in names:
        warn(
            "config.json says use_aux_hidden_state False, and the head has fc.weight, which fuses "
            "hidden states. config.json counts, as in vLLM. Correct it if the head was trained "
            "with fused states."
        )
    if asked or "mask_hidden" in names:
        return
    named = [name for name in architectures(hf) if "peagle" in name.lower()]
    named += ["ptd_token_id"] if hf.get("ptd_token_id") is not None else []
    named += ["peagle"] if hf.get("speculators_model_type") == "peagle" else []
    if named:
        warn(
            f"config.json names {named[0]}, a head that drafts in parallel, and the checkpoint has "
            "no mask_hidden, which that starts from. It drafts one token after the other. Load a "
            "complete checkpoint, or pass parallel_drafting=False."
        )


def _reasons(config: Eagle3ModelConfig, checkpoint: Checkpoint) -> list[str]:
    """Lists what config.json and tensors say differently, a sentence each."""
    D = config.decoder.hidden_size
    wanted = {
        "fc.weight": (LAYER_IDS, [D, config.input_size])
        if config.num_fused
        else ("use_aux_hidden_state", "none"),
        "lm_head.weight": ("draft_vocab_size", [config.draft_vocab_size, D]),
    }
    told = reasons_of(config.decoder, checkpoint, wanted)
    for key, name in (("norm_before_fc", "input_norm.weight"), ("fc_norm", "fc_norm.0.weight")):
        if getattr(config, key) != (name in checkpoint.names):
            told.append(
                f"{key} is {getattr(config, key)} by config.json, and there is "
                f"{'a' if name in checkpoint.names else 'no'} tensor {name}."
            )
    return told
