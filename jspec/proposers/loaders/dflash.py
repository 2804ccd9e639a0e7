"""DFlash drafters on disk: their config.json in its several forms, and their tensors.

Source: vLLM model_executor/models/qwen3_dflash.py, transformers_utils/configs/speculators; z-lab's
dflash 0.1.0, model.py.
"""

from collections.abc import Callable, Collection, Mapping
from typing import Any, Literal

import numpy as np
from jax.typing import DTypeLike

from jspec._checks import check_at_least, check_bool
from jspec.checkpoint import Checkpoint, Model, check_layers
from jspec.models import dflash
from jspec.models.config import ModelConfig
from jspec.models.dflash import AttentionMask, BlockConfig, DFlash
from jspec.models.dflash2 import RefineConfig
from jspec.models.hf_decoder import layer_kinds
from jspec.models.layers import Rules
from jspec.models.llama import HiddenId
from jspec.models.options import agreed, section, size
from jspec.proposers.base import Drafter, refuse_axes
from jspec.proposers.loaders.common import (
    TABLE_RULES,
    check_fits,
    read_weights,
    reasons_of,
    renamed,
)
from jspec.proposers.loaders.hf_config import (
    LAYER_IDS,
    architectures,
    mask_token_of,
    num_drafts_of,
    setting,
    switch,
    unnested,
)

_PLACES = ("dflash_config", "eagle_config", "")
"""Where config.json has settings of the drafter."""

# Settings of DFlash2 in config.json, and our names for them.
_REFINE = {
    "conv_kernel_size": "num_taps",
    "conv_group_size": "group_size",
    "selector_rank": "rank",
    "selector_top_k": "top_k",
}

_WIDEST = 1 << 30
"""A window that hides nothing: positions and it add up to an int32."""

_SETTINGS = {
    *("mask_token_id", "target_layer_ids", LAYER_IDS),
    *("use_aux_hidden_state", "causal", "use_swa", "swa_window_size", "block_size"),
    *_REFINE,
}
"""What we read in `dflash_config`."""

# Options that we do not implement, and the values that leave a drafter unchanged.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "add_swa_attention_sink_bias": (None, False),
    "attention_sink_bias": (None, False),
    "attention_value_scale": (None, 1.0),
    "final_logit_softcapping": (None, 0.0),
    "input_embedding_scale": (None, 1.0),
    "is_neox_style": (None, True),
    "output_multiplier": (None, 1.0),
}


def recognises(config: Mapping[str, Any], names: Collection[str]) -> bool:
    """Tells a DFlash or DFlash2 drafter by `architectures`, `dflash_config` or tensor names."""
    if config.get("speculators_model_type") is not None:
        return config["speculators_model_type"] == "dflash"
    named = architectures(config)
    if any(name.startswith("DFlash") for name in named) or isinstance(
        config.get("dflash_config"), Mapping
    ):
        return True
    return {"fc.weight", "hidden_norm.weight"} <= {dflash.rename(name) for name in names}


def load(
    Config: Callable[..., Any],
    checkpoint: Checkpoint,
    target: Model,
    *,
    dtype: DTypeLike,
    num_drafts: int | None = None,
    draft_sampling: Literal["greedy", "probabilistic"] = "greedy",
) -> Drafter:
    """Loads a drafter in z-lab's layout, in vLLM's or in the speculators format.

    Args:
      Config: makes the drafter's config.
      checkpoint: its folder. An embedding or a head of its own is kept where it differs from the
        target's.
      target: the model that the drafter was trained for.
      dtype: of the drafter's weights.
      num_drafts: most drafts a request gets (K), by default the block size less one.
      draft_sampling: as in `DFlashConfig`.

    Raises:
      ValueError: the drafter is for another target, an option of it is not supported, or tensors
        and config do not fit (all are listed).
    """
    refuse_axes("dflash", target.config)
    if "mask_embedding.pt" in checkpoint.files:
        raise ValueError(
            "dflash: the folder has mask_embedding.pt, an embedding of the mask token beside the "
            "target's, which is not supported. Take another drafter: the mask rows of this one "
            "need it."
        )
    hf = plain(checkpoint.config)
    check_layers("dflash", hf.get("num_hidden_layers"), checkpoint.names)
    checkpoint = renamed(checkpoint, dflash.rename)
    model = _block_config(hf, checkpoint.names, target)
    config = Config(
        num_drafts=_num_drafts(hf) if num_drafts is None else num_drafts,
        draft_sampling=draft_sampling,
        model=model,
        mask_token=mask_token_of(hf, target.config.vocab_size),
    )
    params = read_weights(
        "dflash",
        DFlash,
        model,
        checkpoint,
        target,
        dtype,
        rules=dflash.rules(model),
        reasons=lambda: _reasons(model, checkpoint),
    )
    if model.refine is not None and np.any(dict(checkpoint.tensors()).get("d2t", 0)):
        raise ValueError(
            "dflash: d2t gives the draft ids another order than the target's, which a "
            "candidate_selector does not support. Take a drafter without one or the other."
        )
    return Drafter(config, params)


def rules(config: Any, names: Collection[str]) -> Rules:
    """Returns where each tensor of a checkpoint is in the params, by its full name."""
    table = dflash.rules(config.model) | TABLE_RULES
    return {name: table.get(dflash.rename(name)) for name in names}


def plain(hf: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns a config.json without the nesting of the speculators format.

    Raises:
      ValueError: something that the format prescribes is missing.
    """
    if hf.get("speculators_model_type") is None:
        return hf
    ids = hf.get("aux_hidden_state_layer_ids")
    if ids is None:
        raise ValueError(
            "dflash: config.json is of the speculators format and has no "
            "aux_hidden_state_layer_ids. Fetch config.json again."
        )
    names = ("aux_hidden_state_layer_ids", LAYER_IDS)
    ids = agreed({name: hf.get(name) for name in names}, reader="vLLM")
    own = ("draft_vocab_size", "target_hidden_size")
    return {**unnested("dflash", hf, own), LAYER_IDS: ids}


def _num_drafts(hf: Mapping[str, Any]) -> int:
    """Returns how many drafts a drafter was made for: by its block size, if it has one."""
    block_size = setting(hf, "block_size", *_PLACES)
    if block_size is not None:
        check_at_least("dflash", 2, block_size=block_size)
        return block_size - 1
    return num_drafts_of(hf)


def _block_config(hf: Mapping[str, Any], names: Collection[str], target: Model) -> BlockConfig:
    """Reads the shape of a drafter.

    Args:
      hf: config.json, see `plain`.
      names: tensors in the checkpoint, see `dflash.rename`.
      target: the model that it drafts for.

    Raises:
      ValueError: a size is missing, an option is not supported, or the drafter does not fit the
        target.
    """
    _refuse_unsupported(hf, names)
    # Layers are Qwen3's whatever the target is; what they see is read by `_masks`.
    forced: dict[str, Any] = {"model_type": "qwen3", "tie_word_embeddings": False}
    forced |= {"layer_types": None, "use_sliding_window": False, "sliding_window": None}
    forced |= {"architectures": None}
    ropes = (section(hf, "rope_parameters"), section(hf, "rope_scaling"), hf)
    if all(place.get("rope_theta") is None for place in ropes):
        forced["rope_theta"] = 1e6
    decoder = ModelConfig.from_hf({**hf, **forced})
    target_size = size(hf, "target_hidden_size", decoder.hidden_size)
    check_fits(
        "dflash",
        target,
        num_target_layers=size(hf, "num_target_layers", target.config.num_layers),
        vocab_size=decoder.vocab_size,
        target_hidden_size=target_size,
    )
    draft_vocab_size = size(hf, "draft_vocab_size", decoder.vocab_size)
    refine = None
    sizes = {key: setting(hf, key, *_PLACES) for key in _REFINE}
    if any(size is not None for size in sizes.values()):
        check_at_least("dflash", 1, **sizes)
        refine = RefineConfig(**{ours: sizes[key] for key, ours in _REFINE.items()})
        if decoder.hidden_size % refine.group_size:
            raise ValueError(
                f"dflash: conv_group_size is {refine.group_size}, wanted a divisor of hidden_size, "
                f"{decoder.hidden_size}. Take config.json and weights from the same model."
            )
    return BlockConfig(
        decoder=decoder,
        hidden_layers=_hidden_layers(hf, decoder.num_layers, target.config.num_layers),
        target_size=target_size,
        fuse=switch("dflash", hf, "use_aux_hidden_state", *_PLACES, default=True),
        masks=_masks(hf, decoder.num_layers),
        draft_vocab_size=draft_vocab_size,
        refine=refine,
    )


def _reasons(config: BlockConfig, checkpoint: Checkpoint) -> list[str]:
    """Lists what config.json and tensors say differently, a sentence each."""
    D, refine = config.decoder.hidden_size, config.refine
    ids = f"target_layer_ids (or {LAYER_IDS}, or use_aux_hidden_state)"
    wanted = {"fc.weight": (ids, [D, config.input_size] if config.fuse else "none")}
    if refine is not None:
        kernels = 2 * refine.num_taps * (D // refine.group_size)
        wanted |= {
            "attention_conv.base_kernel": ("conv_kernel_size", [2, refine.num_taps, D]),
            "attention_conv.kernel_projection.weight": ("conv_group_size", [kernels, D]),
            "selector.hidden_projection.weight": ("selector_rank", [refine.rank, D]),
        }
    return reasons_of(config.decoder, checkpoint, wanted, model_type="qwen3")


def _hidden_layers(
    hf: Mapping[str, Any], num_layers: int, num_target_layers: int
) -> tuple[HiddenId, ...]:
    """Returns which hidden states of the target are fused: n = after n layers.

    `target_layer_ids` count layers from 0 and mean what comes out of them: in [0 2], out (1, 3).
    """
    if not switch("dflash", hf, "use_aux_hidden_state", *_PLACES, default=True):
        return ("norm",)
    name, most, ids = LAYER_IDS, num_target_layers, setting(hf, LAYER_IDS, *_PLACES)
    outputs = setting(hf, "target_layer_ids", *_PLACES)
    if ids is None:
        name, most, ids = "target_layer_ids", num_target_layers - 1, outputs
    elif isinstance(outputs, list) and all(type(i) is int for i in outputs):
        both = {LAYER_IDS: ids, "target_layer_ids + 1": [i + 1 for i in outputs]}
        agreed(both, reader="vLLM")
    if ids is None:
        # Spread evenly from the second layer to the fourth last.
        first, span = 1, num_target_layers - 4
        steps = num_layers - 1
        ids = [round(first + i * span / steps) for i in range(num_layers)] if steps else None
        ids = ids or [num_target_layers // 2]
    known = isinstance(ids, list | tuple) and all(type(i) is int and 0 <= i <= most for i in ids)
    if not known:
        raise ValueError(
            f"dflash: {name} is {ids!r}, wanted layers from 0 to {most}. Load the drafter with the "
            "target that it was trained for."
        )
    return tuple(ids) if most == num_target_layers else tuple(i + 1 for i in ids)


def _masks(hf: Mapping[str, Any], num_layers: int) -> tuple[AttentionMask, ...]:
    """Returns what rows see in each layer.

    A window: in layers that `layer_types` calls sliding, in all where `use_swa` is set and none is.
    Causal: by `is_causal`, else by `causal`, else where `layer_types` calls a layer sliding.
    """
    kinds = layer_kinds({**hf, "model_type": "qwen3"}, num_layers)
    sliding = [kind == "sliding_attention" for kind in kinds]
    windowed = sliding
    if not any(sliding) and switch("dflash", hf, "use_swa", *_PLACES):
        windowed = [True] * num_layers
    window = setting(hf, "swa_window_size", *_PLACES)
    if any(windowed):
        if hf.get("use_sliding_window") is not False and (window is None or any(sliding)):
            places = {"swa_window_size": window, "sliding_window": hf.get("sliding_window")}
            window = agreed(places, reader="vLLM")
        if window is None:
            raise ValueError(
                f"dflash: layers slide (layer_types {kinds}, or use_swa), and a window is missing: "
                f"use_sliding_window is {hf.get('use_sliding_window')}, sliding_window is "
                f"{hf.get('sliding_window')} and swa_window_size is missing. Set "
                "dflash_config.swa_window_size in config.json."
            )
        check_at_least("dflash", 1, sliding_window=window)
        window = min(window, _WIDEST)
    causal = section(hf, "dflash_config").get("causal")
    places = {"is_causal": hf.get("is_causal"), "causal": causal}
    check_bool("dflash", **{key: value for key, value in places.items() if value is not None})
    forced = agreed(places, reader="vLLM")
    return tuple(
        AttentionMask(
            causal=slides if forced is None else forced,
            window=window if has_window else None,
        )
        for slides, has_window in zip(sliding, windowed, strict=True)
    )


def _refuse_unsupported(hf: Mapping[str, Any], names: Collection[str]) -> None:
    settings = section(hf, "dflash_config")
    for key, neutral in _NEUTRAL.items():
        for value in (settings.get(key), hf.get(key)):
            if value not in neutral:
                raise ValueError(
                    f"dflash: {key} is {value!r}, which is not supported, wanted {neutral[-1]!r}. "
                    "Take another drafter."
                )
    unknown = sorted(
        key
        for key, value in settings.items()
        if value is not None and key not in _SETTINGS and key not in _NEUTRAL
    )
    if unknown:
        raise ValueError(
            f"dflash: dflash_config has {unknown}, which is not supported, wanted some of "
            f"{sorted(_SETTINGS)}. Take another drafter."
        )
    named = architectures(hf)
    if any("Beam" in name for name in named):
        raise ValueError(
            f"dflash: architectures {named} pick candidates by beam search, which is not "
            "supported, wanted DFlashDraftModel or DFlash2DraftModel. Take another drafter."
        )
    if any("mask_hidden" in name for name in names):
        raise ValueError(
            "dflash: the checkpoint has mask_hidden, which no DFlash drafter reads: its mask rows "
            "are embeddings. Load the folder by the method that it was trained for."
        )
