"""The config.json of EAGLE-3 and P-EAGLE heads, of the plain and of the speculators form.

Source: vLLM model_executor/models/llama_eagle3.py, transformers_utils/configs/speculators/algos.py.
"""

import dataclasses
from collections.abc import Collection, Mapping
from typing import Any

from jspec._checks import check_bool, warn
from jspec.checkpoint import Checkpoint
from jspec.checkpoint.agreement import by_tensors, decoder_reasons
from jspec.models.config import ModelConfig
from jspec.models.eagle3 import Eagle3ModelConfig
from jspec.models.llama import HiddenId
from jspec.models.options import agreed, section, size
from jspec.proposers.loaders.hf_config import architectures, unnested

_LAYER_IDS = "eagle_aux_hidden_state_layer_ids"
_SWITCHES = ("norm_before_fc", "fc_norm", "norm_before_residual", "norm_output")


def plain(hf: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns a head's config.json without the nesting of the speculators format."""
    kind = hf.get("speculators_model_type")
    if kind is None:
        return hf
    own = ("draft_vocab_size", "target_hidden_size", _LAYER_IDS, *_SWITCHES)
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
        **{key: _switch(hf, key, False) for key in _SWITCHES},
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
    if not _switch(hf, "use_aux_hidden_state", True):
        return ("norm",)
    L = num_layers
    ids = _option(hf, _LAYER_IDS)
    ids = [2, L // 2, L - 3] if ids is None else ids
    known = isinstance(ids, list) and all(type(i) is int and 0 <= i <= L for i in ids)
    if not known or len(set(ids)) != len(ids):
        raise ValueError(
            f"eagle3: {_LAYER_IDS} is {ids} (by default 2, L // 2, L - 3), wanted different layers "
            f"from 0 (the embedding) to the target's L = {L}. Load the head with the target that "
            "it was trained for, or name its layers in config.json."
        )
    count = _option(hf, "num_aux_hidden_states")
    if count not in (None, len(ids)):
        raise ValueError(
            f"eagle3: num_aux_hidden_states is {count}, and the layers are {ids}. Name {count} "
            f"layers as {_LAYER_IDS} in config.json."
        )
    return tuple(sorted(ids))


def warn_of_unused(checkpoint: Checkpoint, model: Eagle3ModelConfig, *, asked: bool) -> None:
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


def reasons(config: Eagle3ModelConfig, checkpoint: Checkpoint) -> list[str]:
    """Lists what config.json and tensors say differently, a sentence each."""
    hf = {**section(checkpoint.config, "transformer_layer_config"), **checkpoint.config}
    told = decoder_reasons(hf, config.decoder, checkpoint)
    shapes = {name: list(tensor.shape) for name, tensor in checkpoint.tensors()}
    D = config.decoder.hidden_size
    fused = _LAYER_IDS if config.num_fused else "use_aux_hidden_state"
    for key, name, shape in (
        (fused, "fc.weight", [D, config.input_size] if config.num_fused else []),
        ("draft_vocab_size", "lm_head.weight", [config.draft_vocab_size, D]),
    ):
        if shapes.get(name, shape) != shape:
            value = hf.get(key, "missing")
            told.append(f"{key} is {value} in config.json, and {name} is {shapes[name]}.")
    for key, name in (("norm_before_fc", "input_norm.weight"), ("fc_norm", "fc_norm.0.weight")):
        if getattr(config, key) != (name in shapes):
            told.append(
                f"{key} is {getattr(config, key)} by config.json, and there is "
                f"{'a' if name in shapes else 'no'} tensor {name}."
            )
    return told


def _option(hf: Mapping[str, Any], key: str) -> Any:
    """Reads an option at the top level of config.json or in its `eagle_config`."""
    places = {key: hf.get(key), f"eagle_config.{key}": section(hf, "eagle_config").get(key)}
    if key == _LAYER_IDS:
        places = {place: None if value == [] else value for place, value in places.items()}
    return agreed(places, reader="vLLM")


def _switch(hf: Mapping[str, Any], key: str, default: bool) -> bool:
    """Reads an option that is on or off; see `_option`."""
    value = _option(hf, key)
    value = default if value is None else value
    check_bool("eagle3", **{key: value})
    return value
