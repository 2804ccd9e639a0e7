"""What crosses the boundary of a step: frozen pytrees of arrays, with static sizes beside them."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar, dataclass_transform, no_type_check

import jax
from jaxtyping import Bool, Float, Int

from jspec.axes import AnyArray
from jspec.config import CacheConfig

_T = TypeVar("_T")

Params: TypeAlias = Any
"""Nested dict of weights, string keys. May be shared with the target, so it is never donated."""

Memory: TypeAlias = Any
"""What a step rewrites (KV pages, token histories): the pytree that a proposer's `init` made."""


def static(**kwargs) -> Any:
    """Declares a field that a compiled step depends on: hashable, no array."""
    return dataclasses.field(metadata={"static": True}, **kwargs)


@dataclass_transform(frozen_default=True, kw_only_default=True)
def pytree(cls: type[_T]) -> type[_T]:
    """Makes a class a frozen, keyword-only dataclass that JAX can flatten.

    Its annotations are left alone by run-time type checkers: JAX rebuilds pytrees around
    placeholders that are no arrays.
    """
    frozen = dataclass(frozen=True, kw_only=True)(no_type_check(cls))
    return jax.tree_util.register_dataclass(frozen)


class Warmed:
    """What `jspec.warmup` compiled for a state and those that follow from it: host bookkeeping.

    Any two are equal, so that states that differ in it alone are the same to JAX.

    Attributes:
      strict: a step of another form is refused.
      forms: by function: arguments that it is compiled for, see `jspec._warmed.forms_of`.
    """

    def __init__(self):
        self.strict = False
        self.forms: dict[str, list[Mapping[str, Any]]] = {}

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Warmed)

    def __hash__(self) -> int:
        return hash(Warmed)


@pytree
class State:
    """What a proposer carries between steps.

    Attributes:
      config: hashable; a new value recompiles. Holds sizes and choices, never arrays.
      cache: page and length limits that `memory` was made for.
      max_requests: rows of `memory` that belong to requests.
      occupied: host bookkeeping: the rows that `admit` took and `release` has not returned.
      params: weights; never donated.
      memory: donated by `admit`, `propose`, `step` and `release`: the old one is dead afterwards.
      warmed: host bookkeeping of `warmup`; shared by all states that follow from one `init`.
    """

    config: Any = static()
    cache: CacheConfig = static()
    max_requests: int = static()
    occupied: frozenset[int] = static()
    params: Params
    memory: Memory
    warmed: Warmed = static(default_factory=Warmed)


@pytree
class Scheduled:
    """What the target just ran: T flat rows that belong to B requests by `query_start`.

    Padded requests have query length 0 (`query_start` repeats its last value), `seq_lens` 0 and
    `request_slot` PAD. Rows from `query_start[-1]` on are padding and may hold anything.

    Attributes:
      token_ids: the rows' tokens.
      positions: the rows' positions; three axes for M-RoPE. Where that of a request's last kept row
        is below 0, drafters that read positions give it no drafts.
      token_index: place of each row in its request, given exactly when positions have three axes.
      query_start: first row of each request, and the end of the last.
      seq_lens: KV length with all rows of this step, rejected ones included.
      block_table: pages of each request in order; PAD where there is none.
      num_drafts: drafts that this step verified.
      request_slot: persistent row of the request, 0..max_requests-1, from `admit` to `release`. No
        two live requests of a step share one; see docs/data-contract.md, "What is refused".
      backup_token: the known next token where nothing was sampled (the next prompt token of a
        chunked prefill).
      discard: True where sampled tokens must not count (unfinished prefill, padding).
      hidden: target hidden states, where the method reads them.
      embeds: input embeddings that replace token embeddings where `embeds_mask` is True.
      embeds_mask: see `embeds`.
      max_drafts: most drafts wanted for each request; None = as many as the config says.
      temperature: sampling temperature of each request, where drafts are sampled; anything but a
        normal number above 0 (0, negative, NaN, below 1.2e-38) is greedy.
      seed: random seed of each request; goes with `temperature`.
      top_k, top_p, min_p: constraints on what is sampled; they go with `temperature`. See
        `jspec.verification.sampling.constrain`.
      draft_parents: where drafts form trees: the draft that each follows, PAD = the root. Their
        rows' positions count on like a chain's, and parents come before their children.
    """

    token_ids: Int[AnyArray, "T"]
    positions: Int[AnyArray, "*axes T"]
    token_index: Int[AnyArray, "T"] | None = None
    query_start: Int[AnyArray, "B1"]
    seq_lens: Int[AnyArray, "B"]
    block_table: Int[AnyArray, "B M"]
    num_drafts: Int[AnyArray, "B"]
    request_slot: Int[AnyArray, "B"]
    backup_token: Int[AnyArray, "B"]
    discard: Bool[AnyArray, "B"]
    hidden: Float[AnyArray, "T Dh"] | None = None
    embeds: Float[AnyArray, "T D"] | None = None
    embeds_mask: Bool[AnyArray, "T"] | None = None
    max_drafts: Int[AnyArray, "B"] | None = None
    temperature: Float[AnyArray, "B"] | None = None
    seed: Int[AnyArray, "B"] | None = None
    top_k: Int[AnyArray, "B"] | None = None
    top_p: Float[AnyArray, "B"] | None = None
    min_p: Float[AnyArray, "B"] | None = None
    draft_parents: Int[AnyArray, "B X"] | None = None


@pytree
class Verified:
    """What the verifier kept.

    Attributes:
      tokens: left-aligned: accepted drafts, then the bonus or recovered token; PAD after it.
    """

    tokens: Int[AnyArray, "B W"]


@pytree
class Batch(Scheduled):
    """A step that is ready to draft from: `Scheduled` and what `prepare` adds.

    Attributes:
      next_token: the token each request continues from.
      last_index: row of the last accepted token; inside the request (0 for padding).
      num_valid: tokens that this step kept; 0 for a discarded or padded row, which drafts nothing.
      num_rejected: rows after `last_index` that hold rejected drafts.
    """

    next_token: Int[AnyArray, "B"]
    last_index: Int[AnyArray, "B"]
    num_valid: Int[AnyArray, "B"]
    num_rejected: Int[AnyArray, "B"]


@pytree
class PagedView:
    """Where the rows of a pass live in a paged cache.

    Attributes:
      block_table: pages of each request in order.
      seq_lens: KV length of each request with the rows of this pass.
      positions: place of each row in its request; decides what a causal row may see.
      axes: positions that rows are rotated by, where these are others: three axes for M-RoPE.
      slots: cache slot that each row writes; PAD writes nothing.
      query_start: first row of each request, and the end of the last.
      causal: whether a row sees only rows up to its own position.
      window: a row sees only rows less than this many positions away; None = any.
      node_slots: place of each tree node in `KVCache.node_k`, flat: request * X + node; PAD for
        ordinary rows. None in passes without trees.
      visible: nodes of its request that a row sees beside the pages; goes with `node_slots`.
    """

    block_table: Int[AnyArray, "B M"]
    seq_lens: Int[AnyArray, "B"]
    positions: Int[AnyArray, "T"]
    slots: Int[AnyArray, "T"]
    query_start: Int[AnyArray, "B1"]
    axes: Int[AnyArray, "axes T"] | None = None
    causal: bool = static(default=True)
    window: int | None = static(default=None)
    node_slots: Int[AnyArray, "T"] | None = None
    visible: Bool[AnyArray, "T X"] | None = None

    @property
    def rope_positions(self) -> Int[AnyArray, "*axes T"]:
        """Positions that rows are rotated by."""
        return self.positions if self.axes is None else self.axes


@pytree
class Drafts:
    """The drafts of a step.

    Attributes:
      tokens: PAD after the last draft of a row.
      num_drafts: drafts per request; 0 where a row has none.
      probs: the drafter's distribution of each draft, where the config asks for it.
      parents: index of each draft's parent in its row (PAD = the root), for trees.
    """

    tokens: Int[AnyArray, "B K"]
    num_drafts: Int[AnyArray, "B"]
    probs: Float[AnyArray, "B K V"] | None = None
    parents: Int[AnyArray, "B K"] | None = None
