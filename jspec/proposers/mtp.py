"""The multi-token-prediction modules that a target brings with it (MTP), as MiMo has them.

A module pairs token i + 1 with the target's hidden state at i, and goes on from its own output;
several modules draft in turn. Source: arXiv 2412.19437 section 2.2; vLLM
model_executor/models/mimo_mtp.py.
"""

from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

from jax import Array

from jspec.config import CacheConfig
from jspec.models import weights
from jspec.models.config import ModelConfig
from jspec.models.kv_cache import KVCache
from jspec.models.llama import HiddenId
from jspec.models.mtp import MTP
from jspec.proposers import _draft, _in_turn
from jspec.proposers._config import DraftingConfig
from jspec.proposers._draft import DraftModel
from jspec.proposers.base import Proposer, Reads, init_pages, init_params
from jspec.proposers.loaders import mtp as loader
from jspec.state import Batch, Drafts, Params

Memory: TypeAlias = KVCache | _in_turn.Memory
"""Keys and values; with several modules, what they pass on from step to step, too."""


@dataclass(frozen=True, kw_only=True)
class MTPConfig(DraftingConfig):
    """Chooses the modules that draft.

    Attributes:
      model: shape of a module's decoder layer; `num_layers` counts the modules, and vocabulary and
        width are the target's.
      hidden_layer: the hidden state of the target that they read: residual stream after that many
        layers, or "norm" = after the final norm.
    """

    model: ModelConfig
    hidden_layer: HiddenId

    @classmethod
    def tiny(cls):
        """Returns a config that tests can afford: two modules, so that they draft in turn."""
        return cls(num_drafts=4, model=ModelConfig.tiny(num_layers=2), hidden_layer=2)


def init(config: MTPConfig, params: Params, cache: CacheConfig, max_requests: int) -> Memory:
    """Allocates the modules' own KV pages, one for each of the target's."""
    pages = init_pages(config, params, cache, max_requests)
    if config.model.num_layers == 1:
        return pages
    return _in_turn.init(
        pages,
        max_requests=max_requests,
        hidden_size=config.model.hidden_size,
        dtype=params["modules"]["0"]["input_proj"].dtype,
    )


def forget(config: MTPConfig, memory: Memory, slot: Array, *prompt: Array) -> Memory:
    """Empties a request's row."""
    del config, prompt
    return memory if isinstance(memory, KVCache) else _in_turn.forget(memory, slot)


def draft_models(config: MTPConfig, params: Params) -> list[DraftModel]:
    """Binds each module to its weights, as the draft loop calls it."""
    model = weights.bind(MTP, config.model, params)
    bound = [partial(model, index) for index in range(config.model.num_layers)]
    return [DraftModel(run, model.logits, config.vocab_size) for run in bound]


def propose(
    config: MTPConfig, params: Params, memory: Memory, batch: Batch, num_drafts: int
) -> tuple[Memory, Drafts]:
    """Runs the step's rows with their hidden states, then one drafted token at a time."""
    models = draft_models(config, params)
    if not isinstance(memory, KVCache):
        return _in_turn.in_turn(models, config, batch, memory, num_drafts=num_drafts)
    return _draft.chain(
        models[0],
        config,
        batch,
        memory,
        num_drafts=num_drafts,
        shift=True,
    )


PROPOSER = Proposer(
    name="mtp",
    Config=MTPConfig,
    init=init,
    propose=propose,
    admit=forget,
    release=forget,
    reads=lambda config: Reads(
        hidden_layers=(config.hidden_layer,),
        hidden_size=config.decoder.hidden_size,
        sampling=config.samples,
        embeds_size=config.decoder.hidden_size,
    ),
    init_params=partial(init_params, MTP),
    recognises=loader.recognises,
    load=partial(loader.load, MTPConfig),
    rules=loader.rules,
)
