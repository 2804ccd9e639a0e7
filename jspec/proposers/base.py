"""A proposer is a value: a few functions and a name. Adding one is a file and a registry line."""

from collections.abc import Callable, Collection, Mapping
from typing import Any, Literal, NamedTuple

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array
from jax.typing import DTypeLike

from jspec.config import CacheConfig
from jspec.models import llama, weights
from jspec.models.config import ModelConfig
from jspec.models.kv_cache import KVCache
from jspec.models.layers import Rules
from jspec.models.llama import HiddenId
from jspec.state import Batch, Drafts, Memory, Params
from jspec.tree import DynamicTree, Tree


class Reads(NamedTuple):
    """What a drafter reads of a step beyond the fields that every step has.

    Attributes:
      hidden_layers: hidden states of the target, side by side in `Scheduled.hidden`.
      hidden_size: width of `Scheduled.hidden`; 0 where none is read.
      sampling: `Scheduled.temperature` and `seed`, too.
      embeds_size: width of `Scheduled.embeds`; 0 where token embeddings are not replaced.
    """

    hidden_layers: tuple[HiddenId, ...] = ()
    hidden_size: int = 0
    sampling: bool = False
    embeds_size: int = 0


class Drafter(NamedTuple):
    """A drafter from disk: what `jspec.init` takes.

    Attributes:
      config: a proposer's config.
      params: its weights; those that the target shares are the target's own arrays.
    """

    config: Any
    params: Params


class Proposer(NamedTuple):
    """How one method drafts.

    Attributes:
      name: what users write, `method="eagle3"`.
      Config: frozen dataclass with `num_drafts`, `vocab_size` (None = unbounded) and a classmethod
        `tiny()` that the contract tests build from.
      init: `(config, params, cache, max_requests) -> memory`; cache is a CacheConfig.
      propose: `(config, params, memory, batch, num_drafts) -> (memory, drafts)`; pure and traceable
        for kind "device". Never writes to its arguments, "host" memory excepted. `num_drafts` is
        static, 0..config.num_drafts: drafts that are wanted; what is more gets cut.
      admit: `(config, memory, slot, tokens, num_tokens) -> memory`, or None where a request
        needs no row. Device: tokens is int32 [max_model_len], PAD after `num_tokens`.
      release: `(config, memory, slot) -> memory`, or None.
      kind: "device" runs under jit; "host" works on numpy arrays, outside of it.
      shares_across_requests: a row's drafts may depend on the rows before it.
      reads: `(config) -> Reads`.
      tree: `(config) -> Tree, DynamicTree or None`: the form of its drafts, None = chains.
      init_params: `(config, key, dtype) -> params`, random; None for a drafter without weights.
      recognises: `(config.json, tensor names) -> bool`: a checkpoint is this method's.
      load: `(checkpoint, target, *, dtype, num_drafts, **options) -> Drafter`.
      rules: `(config, tensor names) -> Rules`: where the tensors of a checkpoint with these names
        are in the params of `load`, tables that the target may share included; for writing them
        back. None = they are not.
    """

    name: str
    Config: type
    init: Callable[..., Memory]
    propose: Callable[[Any, Params, Memory, Batch, int], tuple[Memory, Drafts]]
    admit: Callable[..., Memory] | None = None
    release: Callable[..., Memory] | None = None
    kind: Literal["device", "host"] = "device"
    shares_across_requests: bool = False
    reads: Callable[[Any], Reads] = lambda config: Reads()
    tree: Callable[[Any], Tree | DynamicTree | None] = lambda config: None
    init_params: Callable[..., Params] | None = None
    recognises: Callable[[Mapping[str, Any], Collection[str]], bool] = lambda config, names: False
    load: Callable[..., Drafter] | None = None
    rules: Callable[[Any, Collection[str]], Rules] | None = None

    @property
    def model_free(self) -> bool:
        """Whether it drafts from token ids alone, with `params` None."""
        return self.init_params is None and not self.reads(self.Config.tiny()).hidden_layers


def init_pages(config: Any, params: Params, cache: CacheConfig, max_requests: int) -> KVCache:
    """Allocates KV pages of the drafter's own, one for each of the target's: `Proposer.init`."""
    del params, max_requests
    return llama.init_pages(config.decoder, cache)


def init_params(
    module: type[nnx.Module],
    config: Any,
    key: Array,
    dtype: DTypeLike,
    *,
    num_ids: int | None = None,
) -> Params:
    """Draws random params of `module`, for tests and benchmarks.

    Args:
      module: made as `module(config.model, dtype)`.
      config: a proposer's.
      key: random key, consumed.
      dtype: of the weights.
      num_ids: tokens of a draft vocabulary, which lie evenly in the target's.
    """
    params, V = weights.draw(module, config.model, key, dtype), config.vocab_size
    if num_ids not in (None, V):
        params["target_ids"] = jnp.asarray(np.arange(num_ids) * V // num_ids, jnp.int32)
    return params


def refuse_axes(method: str, *models: ModelConfig) -> None:
    """Raises NotImplementedError for a model whose positions have three axes (M-RoPE).

    Args:
      method: what cannot draft with them: it adds rows to a step, which have no such position.
      models: the drafter's, and the target's where it is known.
    """
    for model in models:
        if model.rope.mrope_section is not None:
            raise NotImplementedError(
                f"{method}: model type {model.model_type!r} has positions of three axes (M-RoPE, "
                f"mrope_section {model.rope.mrope_section}), and this method adds rows that have "
                "none. Draft with a chain that reads hidden states (eagle, eagle3, mtp)."
            )
