"""A proposer is a value: five functions and a name. Adding one is a file and a registry line."""

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

from jspec.state import Batch, Drafts, Memory, Params


class Proposer(NamedTuple):
    """How one method drafts.

    Attributes:
      name: what users write, `method="eagle3"`.
      Config: frozen dataclass with `num_drafts`, `vocab_size` (None = unbounded) and a classmethod
        `tiny()` that the contract tests build from.
      init: `(config, params, cache, max_requests) -> memory`; cache is a CacheConfig.
      propose: `(config, params, memory, batch) -> (memory, drafts)`; pure and traceable for
        kind "device". Never writes to its arguments, "host" memory excepted.
      admit: `(config, memory, slot, tokens, num_tokens) -> memory`, or None where a request
        needs no row. Device: tokens is int32 [max_model_len], PAD after `num_tokens`.
      release: `(config, memory, slot) -> memory`, or None.
      kind: "device" runs under jit; "host" works on numpy arrays, outside of it.
      shares_across_requests: a row's drafts may depend on the rows before it.
      model_free: drafts from token ids alone, with `params` None.
    """

    name: str
    Config: type
    init: Callable[..., Memory]
    propose: Callable[[Any, Params, Memory, Batch], tuple[Memory, Drafts]]
    admit: Callable[..., Memory] | None = None
    release: Callable[..., Memory] | None = None
    kind: Literal["device", "host"] = "device"
    shares_across_requests: bool = False
    model_free: bool = False
