"""An independent, smaller model of the same vocabulary that drafts token by token.

It reads tokens alone: the first pass runs the accepted tokens and the next one at their own
positions. Source: vLLM v1/spec_decode/draft_model.py; arXiv 2211.17192.
"""

from dataclasses import dataclass

from jax import Array
from jax.typing import DTypeLike

from jspec.cache import KVCache, init_cache
from jspec.config import CacheConfig, ModelConfig
from jspec.models import llama
from jspec.proposers import _draft
from jspec.proposers._draft import DraftingConfig, DraftModel
from jspec.proposers.base import Proposer
from jspec.state import Batch, Drafts, Params


@dataclass(frozen=True, kw_only=True)
class DraftModelConfig(DraftingConfig):
    """Chooses the model that drafts.

    Attributes:
      model: its shape; its vocabulary is the target's.
    """

    model: ModelConfig

    @property
    def vocab_size(self) -> int:
        """Tokens of drafter and target (V)."""
        return self.model.vocab_size

    @classmethod
    def tiny(cls):
        """Returns a config that tests can afford."""
        return cls(num_drafts=3, model=ModelConfig.tiny())


def init(
    config: DraftModelConfig, params: Params, cache: CacheConfig, max_requests: int
) -> KVCache:
    """Allocates the drafter's own KV pages, one for each of the target's."""
    del params, max_requests
    model = config.model
    return init_cache(
        cache,
        num_layers=model.num_layers,
        num_kv_heads=model.num_kv_heads,
        head_dim=model.head_dim,
    )


def propose(
    config: DraftModelConfig, params: Params, memory: KVCache, batch: Batch, columns: int
) -> tuple[KVCache, Drafts]:
    """Runs the step's accepted tokens and the next one, then one drafted token at a time."""
    model = llama.build(config.model, params)

    def run(token_ids, hidden, view, cache, embeds):
        states, cache = model(token_ids, view, cache, embeds)
        return states["norm"], None, cache

    return _draft.chain(
        DraftModel(run=run, logits=model.logits, vocab_size=config.vocab_size),
        config,
        batch,
        memory,
        page_size=memory.page_size,
        max_model_len=memory.max_model_len,
        steps=columns,
        shift=False,
    )


def init_params(config: DraftModelConfig, key: Array, dtype: DTypeLike) -> Params:
    """Draws random params, for tests and benchmarks."""
    return llama.init_params(config.model, key, dtype)


PROPOSER = Proposer(
    name="draft_model",
    Config=DraftModelConfig,
    init=init,
    propose=propose,
    init_params=init_params,
)
