"""A proposer is a value: a few functions and a name. Adding one is a file and a registry line."""

from collections.abc import Callable, Collection, Mapping
from typing import Any, Literal, NamedTuple

from jspec.models.config import ModelConfig
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
      propose: `(config, params, memory, batch, columns) -> (memory, drafts)`; pure and traceable
        for kind "device". Never writes to its arguments, "host" memory excepted. `columns` is
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
