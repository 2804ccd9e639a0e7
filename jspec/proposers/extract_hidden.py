"""Keeps the target's hidden states, to train drafters or for another process.

The states of chosen layers go to pages beside the KV cache, in which `hidden_cache.read` finds them
by request. As a drafter must draft, the newest token is given back as a guess of the one after it.
Source: vLLM 0.20.0 v1/spec_decode/extract_hidden_states.py.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax.typing import DTypeLike

from jspec import metadata
from jspec._checks import check_at_least
from jspec.axes import PAD_TOKEN
from jspec.checkpoint import Checkpoint, Model
from jspec.config import CacheConfig
from jspec.models import hidden_cache
from jspec.models.hidden_cache import HiddenCache
from jspec.models.llama import HiddenId
from jspec.proposers import _draft
from jspec.proposers.base import Drafter, Proposer, Reads
from jspec.state import Batch, Drafts, Params


@dataclass(frozen=True, kw_only=True)
class ExtractHiddenStatesConfig:
    """Chooses the layers whose states are kept; their element type is the `CacheConfig`'s.

    Attributes:
      hidden_layers: n = residual stream after n layers of the target (0 = the embedding), "norm" =
        after its final norm; stored in this order.
      hidden_size: width of the target (D).
      vocab_size: tokens of the target (V).
      num_drafts: 1: the newest token once more.

    Raises:
      ValueError: no layer, a layer that is none or comes twice, a size below 1, or another number
        of drafts.
    """

    hidden_layers: tuple[HiddenId, ...]
    hidden_size: int
    vocab_size: int
    num_drafts: int = 1

    def __post_init__(self):
        owner = type(self).__name__
        check_at_least(
            owner,
            1,
            hidden_size=self.hidden_size,
            vocab_size=self.vocab_size,
            num_drafts=self.num_drafts,
        )
        if self.num_drafts != 1:
            raise ValueError(
                f"{owner}: `num_drafts` is {self.num_drafts}, wanted 1: states are kept, and the "
                "one draft is a filler. Pass num_drafts=1."
            )
        layers = self.hidden_layers
        if not isinstance(layers, tuple) or not layers:
            raise ValueError(
                f"{owner}: `hidden_layers` is {layers!r}, wanted a tuple of layers, for example "
                "(2, 16, 29) or ('norm',)."
            )
        for layer in layers:
            if layer != "norm":
                check_at_least(owner, 0, hidden_layers=layer)
        if len(set(layers)) < len(layers):
            raise ValueError(f"{owner}: `hidden_layers` is {layers!r}. Name each layer once.")

    @classmethod
    def tiny(cls):
        """Returns a config that tests can afford."""
        return cls(hidden_layers=(2, 0, "norm"), hidden_size=8, vocab_size=64)


def init(
    config: ExtractHiddenStatesConfig, params: Params, cache: CacheConfig, max_requests: int
) -> HiddenCache:
    """Allocates a page of states for each page of KV."""
    del params, max_requests
    return hidden_cache.init_hidden_cache(
        cache, num_layers=len(config.hidden_layers), hidden_size=config.hidden_size
    )


def propose(
    config: ExtractHiddenStatesConfig,
    params: Params,
    memory: HiddenCache,
    batch: Batch,
    num_drafts: int,
) -> tuple[HiddenCache, Drafts]:
    """Stores the states of the step's rows at their slots; drafts the newest token again."""
    del params
    view = metadata.paged_view(
        batch, page_size=memory.page_size, max_model_len=memory.max_model_len
    )
    states = jnp.asarray(batch.hidden).reshape(
        -1, len(config.hidden_layers), config.hidden_size
    )  # [T, L D] -> [T, L, D]
    memory = hidden_cache.write(memory, states, view.slots)
    fits = _draft.next_position(batch) + 1 < memory.max_model_len
    drafts = (batch.num_valid > 0) & fits  # [B]
    tokens = jnp.where(drafts, batch.next_token, PAD_TOKEN)[:, None]  # [B] -> [B, 1]
    return memory, Drafts(
        tokens=tokens[:, :num_drafts], num_drafts=jnp.where(drafts, jnp.int32(num_drafts), 0)
    )


def reads(config: ExtractHiddenStatesConfig) -> Reads:
    """Asks for the chosen layers' hidden states."""
    return Reads(
        hidden_layers=config.hidden_layers,
        hidden_size=len(config.hidden_layers) * config.hidden_size,
    )


def recognises(config: Mapping[str, Any], names: Collection[str]) -> bool:
    """Tells the config by its architecture; there are no tensors."""
    del names
    return config.get("architectures") == ["ExtractHiddenStatesModel"]


def load(
    checkpoint: Checkpoint, target: Model, *, dtype: DTypeLike, num_drafts: int | None = None
) -> Drafter:
    """Reads the layers off a config.json; nothing else is in the folder.

    Args:
      checkpoint: its folder.
      target: the model whose states are kept.
      dtype: not used, as there are no weights.
      num_drafts: 1.

    Raises:
      ValueError: config.json names no layers, or some that the target does not have.
    """
    del dtype
    key = "eagle_aux_hidden_state_layer_ids"
    layers = checkpoint.config.get(key)
    if not isinstance(layers, list) or not layers:
        raise ValueError(
            f"extract_hidden_states: {key} in config.json is {layers!r}, wanted a list of at least "
            "one layer. Add it: n = after n layers of the target."
        )
    unknown = [n for n in layers if n != "norm" and n not in range(target.config.num_layers + 1)]
    if unknown:
        raise ValueError(
            f"extract_hidden_states: {key} has {unknown}, wanted 0 (the embedding) to "
            f"{target.config.num_layers} (the last layer of the target) or 'norm'. Correct "
            "config.json, or load the target that it was made for."
        )
    config = ExtractHiddenStatesConfig(
        hidden_layers=tuple(layers),
        hidden_size=target.config.hidden_size,
        vocab_size=target.config.vocab_size,
        num_drafts=1 if num_drafts is None else num_drafts,
    )
    return Drafter(config, None)


PROPOSER = Proposer(
    name="extract_hidden_states",
    Config=ExtractHiddenStatesConfig,
    init=init,
    propose=propose,
    reads=reads,
    recognises=recognises,
    load=load,
)
