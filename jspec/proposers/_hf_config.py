"""What drafters' config.json files state in more than one place."""

from collections.abc import Mapping
from typing import Any

from jspec.config import check_at_least, section


def mask_token_of(hf_config: Mapping[str, Any]) -> int:
    """Finds the token of rows that are drafted in parallel in a drafter's config.json.

    Args:
      hf_config: its content.

    Returns:
      The first of `dflash_config.mask_token_id`, `mask_token_id`, `pard_token` and `ptd_token_id`
      that is there; 0 is a token like any other.

    Raises:
      ValueError: there is none, or it is no token id.

    Source: vLLM v1/spec_decode/llm_base_proposer.py, the parallel drafting token.

    Example:
      >>> mask_token_of({"pard_token": 8, "ptd_token_id": 9})
      8
    """
    places = (
        ("dflash_config.mask_token_id", section(hf_config, "dflash_config").get("mask_token_id")),
        *((key, hf_config.get(key)) for key in ("mask_token_id", "pard_token", "ptd_token_id")),
    )
    for name, token in places:
        if token is not None:
            check_at_least("config.json", 0, **{name: token})
            return token
    raise ValueError(
        "config.json names no mask token, which drafting in parallel needs: wanted one of "
        f"{', '.join(name for name, _ in places)}. Add the id that the drafter was trained with, "
        "or draft one token after the other (parallel_drafting=False)."
    )


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
