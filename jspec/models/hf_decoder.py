"""Settings of a decoder's config.json that several keys decide together.

Where keys disagree, one of them counts as in transformers, with a warning that names both.
"""

import math
from collections.abc import Mapping
from typing import Any

from jspec._checks import warn
from jspec.models.options import flag, size

CLASS_NAMES = {"llama": "Llama", "mimo": "MiMo", "qwen2": "Qwen2", "qwen3": "Qwen3"}
QKV_BIAS_ONLY = ("mimo", "qwen2")

# Options of config.json that we do not implement, and the values that leave a model unchanged.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "attn_logit_softcapping": (None,),
    "final_logit_softcapping": (None,),
    "hidden_act": (None, "silu"),
    "logit_scale": (None, 1.0),
    "partial_rotary_factor": (None, 1.0),
    "quantization_config": (None,),
    "rope_interleaved": (None, False),
    "text_config": (None, {}),
}


def check_architecture(config: Mapping[str, Any]) -> None:
    """Warns where `architectures` names another of our models than `model_type`."""
    named, model_type = config.get("architectures"), config["model_type"]
    names = {f"{name}ForCausalLM": kind for kind, name in CLASS_NAMES.items()}
    named = named if isinstance(named, list) else []
    known = [kind for name, kind in names.items() if name in named]
    if known and model_type not in known:
        warn(
            f"config.json says model_type {model_type!r} and architectures {named}, which is a "
            f"{known[0]}. model_type is used, as in transformers. Correct the one that is wrong."
        )


def refuse_unsupported(config: Mapping[str, Any], num_layers: int) -> None:
    """Raises ValueError for an option that changes a model in a way that we do not implement."""
    for key, neutral in _NEUTRAL.items():
        if config.get(key) not in neutral:
            raise ValueError(
                f"ModelConfig: {key} is {config[key]!r}, which is not supported, wanted "
                f"{neutral[-1]!r}."
            )
    if config.get("layer_types") is None:
        slides = _first_sliding(config) < num_layers
    else:
        slides = "sliding_attention" in layer_kinds(config, num_layers)
    if slides:
        raise ValueError(
            "ModelConfig: some layers use a sliding window "
            f"(sliding_window {config.get('sliding_window')!r}, layer_types "
            f"{config.get('layer_types')!r}), wanted full attention in every layer."
        )


def layer_kinds(config: Mapping[str, Any], num_layers: int) -> list[str]:
    """Returns "full_attention" or "sliding_attention" for each layer of a config.json.

    `layer_types` says it; where it is missing, `use_sliding_window` and `max_window_layers` do.

    Args:
      config: its content.
      num_layers: what its `num_hidden_layers` says.

    Raises:
      ValueError: a kind is unknown, or there are not as many kinds as layers.

    Source: transformers models/qwen2/configuration_qwen2.py.
    """
    first, kinds = _first_sliding(config), config.get("layer_types")
    if kinds is None:
        return ["full_attention" if i < first else "sliding_attention" for i in range(num_layers)]
    known = ("full_attention", "sliding_attention")
    if not isinstance(kinds, list) or any(kind not in known for kind in kinds):
        raise ValueError(
            f"ModelConfig: layer_types is {kinds!r}, wanted a list of {' or '.join(known)}, one a "
            "layer. Take another model, or correct config.json."
        )
    if len(kinds) != num_layers:
        raise ValueError(
            f"ModelConfig: num_hidden_layers is {num_layers}, and layer_types has {len(kinds)} "
            f"entries, wanted one a layer: {kinds}. Correct config.json."
        )
    switched_on = flag(config, "use_sliding_window") and first < num_layers
    if switched_on and "sliding_attention" not in kinds:
        warn(
            f"config.json says use_sliding_window True from layer {first} on (max_window_layers), "
            f"and layer_types {kinds}. layer_types counts, as in transformers. Correct the other."
        )
    return kinds


def _first_sliding(config: Mapping[str, Any]) -> float:
    """Returns the first layer that has a sliding window where `layer_types` does not say it."""
    is_llama = config.get("model_type") == "llama"
    window = size(config, "sliding_window", 0)
    # Qwen states a window size even where it is switched off, and then only late layers have one.
    first = size(config, "max_window_layers", 0 if is_llama else 28, least=0)
    return first if flag(config, "use_sliding_window", is_llama) and window else math.inf


def biases(config: Mapping[str, Any]) -> tuple[bool, bool, bool]:
    """Returns whether q, k and v, the output projection and the MLP have biases."""
    model_type, attention = config["model_type"], flag(config, "attention_bias")
    always = model_type in QKV_BIAS_ONLY
    qkv, mlp = flag(config, "qkv_bias", attention or always), flag(config, "mlp_bias")
    if always and qkv and config.get("attention_bias") is False:
        warn(
            f"config.json says attention_bias False and model_type {model_type!r}, whose q, k and "
            "v always have biases. model_type counts, as in transformers. Remove attention_bias."
        )
    if mlp and model_type != "llama":
        raise ValueError(
            f"ModelConfig: mlp_bias is True, which a {model_type} has not, wanted False. Correct "
            "mlp_bias or model_type in config.json."
        )
    return qkv, attention and not always, mlp
