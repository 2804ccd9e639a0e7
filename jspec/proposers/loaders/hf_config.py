"""What drafters' config.json files state in more than one place."""

from collections.abc import Collection, Mapping
from typing import Any

from jspec._checks import check_at_least, check_bool
from jspec.models.options import agreed, section

LAYER_IDS = "eagle_aux_hidden_state_layer_ids"
"""Key with the layers of the target whose hidden states are read."""


def setting(hf_config: Mapping[str, Any], key: str, *places: str, default: Any = None) -> Any:
    """Returns a setting of a drafter's config.json, with a warning where two places differ.

    Args:
      hf_config: its content.
      key: name of the setting. An empty list of layers says nothing.
      *places: objects that may have it, in order of precedence; "" is the top level.
      default: where none has it.
    """
    stated = {}
    for place in places:
        value = (section(hf_config, place) if place else hf_config).get(key)
        is_silent = value == [] and key.endswith("layer_ids")
        stated[f"{place}.{key}" if place else key] = None if is_silent else value
    value = agreed(stated, reader="vLLM")
    return default if value is None else value


def switch(
    owner: str, hf_config: Mapping[str, Any], key: str, *places: str, default: bool = False
) -> bool:
    """Returns a setting that is on or off, see `setting`.

    Raises:
      ValueError: it is something else.
    """
    value = setting(hf_config, key, *places, default=default)
    check_bool(owner, **{key: value})
    return value


def mask_token_of(hf_config: Mapping[str, Any], vocab_size: int | None = None) -> int:
    """Finds the token of rows that are drafted in parallel in a drafter's config.json.

    Args:
      hf_config: its content.
      vocab_size: tokens that have an embedding, where that is known.

    Returns:
      The first of `dflash_config.mask_token_id`, `mask_token_id`, `pard_token` and `ptd_token_id`
      that is there, with a warning where they differ; 0 is a token like any other.

    Raises:
      ValueError: there is none, or it is no token id.

    Source: vLLM v1/spec_decode/llm_base_proposer.py, the parallel drafting token.

    Example:
      >>> mask_token_of({"pard_token": 8})
      8
    """
    places = {
        "dflash_config.mask_token_id": section(hf_config, "dflash_config").get("mask_token_id"),
        **{key: hf_config.get(key) for key in ("mask_token_id", "pard_token", "ptd_token_id")},
    }
    token = agreed(places, reader="vLLM")
    if token is None:
        raise ValueError(
            "config.json names no mask token, which drafting in parallel needs: wanted one of "
            f"{', '.join(places)}. Add the id that the drafter was trained with, or draft one "
            "token after the other (parallel_drafting=False)."
        )
    for name, value in places.items():
        if value is not None:
            check_at_least("config.json", 0, **{name: value})
            if vocab_size is not None and value >= vocab_size:
                raise ValueError(
                    f"config.json: {name}, the mask token, is {value}, wanted an id below the "
                    f"vocab_size, {vocab_size}. Take the drafter that was trained for this target."
                )
    return token


# What a speculators config states for the layers of the drafter.
_OF_LAYERS = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "head_dim"),
    *("num_attention_heads", "num_key_value_heads", "rms_norm_eps", "max_position_embeddings"),
    *("rope_theta", "rope_scaling", "rope_parameters", "attention_bias", "mlp_bias", "hidden_act"),
    *("layer_types", "sliding_window", "use_sliding_window", "max_window_layers"),
)


def unnested(owner: str, hf_config: Mapping[str, Any], own: Collection[str]) -> dict[str, Any]:
    """Returns a config.json of the speculators format with the sizes of the layers beside the rest.

    Args:
      owner: the method.
      hf_config: its content.
      own: options of the drafter itself, which count at the top level. Those of the layers count in
        `transformer_layer_config`. Where the other place differs, there is a warning.

    Raises:
      ValueError: there is no `transformer_layer_config`.

    Source: vLLM transformers_utils/configs/speculators/base.py.
    """
    layer = hf_config.get("transformer_layer_config")
    if not isinstance(layer, Mapping):
        raise ValueError(
            f"{owner}: transformer_layer_config is {layer!r}, wanted an object with the drafter's "
            "sizes. Fetch config.json again."
        )
    merged = {**layer, **{key: x for key, x in hf_config.items() if x is not None}}
    for key in (*own, *_OF_LAYERS):
        places = {key: hf_config.get(key), f"transformer_layer_config.{key}": layer.get(key)}
        order = list(places.items())
        value = agreed(dict(order if key in own else order[::-1]), reader="vLLM")
        if value is not None:
            merged[key] = value
    return merged


def num_drafts_of(hf_config: Mapping[str, Any]) -> int:
    """Returns how many drafts a drafter's config.json asks for (speculators format), or else 5.

    Raises:
      ValueError: the number, or what it stands in, is malformed.
    """
    methods = section(hf_config, "speculators_config").get("proposal_methods") or [{}]
    if not isinstance(methods, list) or not isinstance(methods[0], Mapping):
        raise ValueError(
            f"config.json: speculators_config.proposal_methods is {methods!r}, wanted a list of "
            "objects. Fetch config.json again, or remove it and pass num_drafts=."
        )
    number = methods[0].get("speculative_tokens")
    if number is None:
        return 5
    check_at_least("config.json", 1, speculative_tokens=number)
    return number


def architectures(hf_config: Mapping[str, Any]) -> list[str]:
    """Returns the class names that a config.json states, none where it states none.

    Raises:
      ValueError: they are no list of names.
    """
    named = hf_config.get("architectures") or []
    if not isinstance(named, list) or not all(isinstance(name, str) for name in named):
        raise ValueError(
            f"config.json: architectures is {named!r}, wanted a list of names. Take config.json "
            "from where the weights are from."
        )
    return named
