"""Suffix decoding: drafts what most often followed the end of the context, in any request so far.

A request drafts from its own prompt and response and from the responses of all requests before it,
as far as counts make a token probable: the length of a draft differs from row to row. No weights,
no device. Source: arXiv 2411.04975; vLLM v1/spec_decode/suffix_decoding.py.
"""

import math
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
from jaxtyping import Int32
from numba import int32, int64

from jspec._checks import check_at_least
from jspec._numba import njit
from jspec.axes import PAD_TOKEN
from jspec.config import CacheConfig
from jspec.proposers import _host
from jspec.proposers.base import Proposer
from jspec.state import Batch, Drafts
from jspec.suffix import SuffixDecodingCache


@dataclass(frozen=True, kw_only=True)
class SuffixConfig(_host.HasVocabulary):
    """Chooses how sure a draft must be and how much is remembered.

    Attributes:
      num_drafts: most drafts a request gets (K); None = max_tree_depth.
      max_tree_depth: longest path that is counted, match and draft together, in tokens.
      max_spec_factor: a match of m tokens drafts at most `factor * m + offset` tokens.
      max_spec_offset: see there.
      min_token_prob: a draft ends before a token that is less probable.
      max_cached_requests: responses that all requests draft from; the oldest is forgotten first.
        0 = each request drafts from its own text alone, -1 = no limit.
      max_cached_tokens: most tokens of these responses together; None = no limit.
      max_bytes: size of the trees beyond which responses are forgotten; None = no limit.
      warm_start: path of a cache to start from, which `SuffixDecodingCache.save` wrote.
      vocab_size: ids at or above it count as PAD and are never drafted; None = no bound.

    Raises:
      ValueError: a value is out of range.

    Example:
      >>> SuffixConfig(max_tree_depth=16).num_drafts
      16
    """

    num_drafts: int | None = None
    max_tree_depth: int = 24
    max_spec_factor: float = 1.0
    max_spec_offset: float = 0.0
    min_token_prob: float = 0.1
    max_cached_requests: int = 10_000
    max_cached_tokens: int | None = None
    max_bytes: int | None = None
    warm_start: str | None = None
    vocab_size: int | None = None

    def __post_init__(self):
        owner = type(self).__name__
        check_at_least(owner, 1, max_tree_depth=self.max_tree_depth)
        check_at_least(owner, -1, max_cached_requests=self.max_cached_requests)
        if self.num_drafts is None:
            object.__setattr__(self, "num_drafts", self.max_tree_depth)
        optional = ("num_drafts", "max_cached_tokens", "max_bytes", "vocab_size")
        given = {name: getattr(self, name) for name in optional if getattr(self, name) is not None}
        check_at_least(owner, 1, **given)
        for name, low, high in (
            ("max_spec_factor", 0.0, math.inf),
            ("max_spec_offset", -math.inf, math.inf),
            ("min_token_prob", 0.0, 1.0),
        ):
            value = getattr(self, name)
            if not isinstance(value, int | float) or not low <= value <= high:
                raise ValueError(
                    f"{owner}: `{name}` is {value!r}, wanted a number from {low} to {high}."
                )
        if self.warm_start is not None and self.max_cached_requests == 0:
            raise ValueError(
                f"{owner}: `warm_start` is {self.warm_start!r}, but max_cached_requests = 0 keeps "
                "no responses. Raise max_cached_requests, or leave warm_start out."
            )

    @property
    def most_drafts(self) -> int:
        """`num_drafts`, which is None in the signature alone."""
        return cast(int, self.num_drafts)

    @classmethod
    def tiny(cls):
        """Returns a config that finds matches in short random contexts."""
        return cls(num_drafts=3, max_tree_depth=8, max_spec_offset=1.0, vocab_size=16)


@dataclass(eq=False)
class Memory:
    """The trees, on the host: one opaque leaf to JAX, rewritten by every call.

    Attributes:
      cache: of all requests; `memory.cache.save(path)` keeps it for a warm start.
      requests: id of the request in each slot, by which `cache` knows it.
      num_known: int32 [max_requests]; tokens of each request that are in its tree, 0 = no request.
      max_model_len: most tokens of a request.
      next_id: for the next request that comes.
    """

    cache: SuffixDecodingCache
    requests: list[int | None]
    num_known: np.ndarray
    max_model_len: int
    next_id: int = 0


def init(config: SuffixConfig, params: Any, cache: CacheConfig, max_requests: int) -> Memory:
    """Makes the trees, or reads them; compiles: seconds the first time, then from disk.

    Raises:
      ValueError, OSError: `config.warm_start` is no suffix cache or cannot be read.
    """
    del params
    _collect.compile(_COLLECT_TYPES)
    _cut.compile(_CUT_TYPES)
    limits = {
        "max_tree_depth": config.max_tree_depth,
        "max_cached_requests": config.max_cached_requests,
        "max_cached_tokens": config.max_cached_tokens,
        "max_bytes": config.max_bytes,
    }
    if config.warm_start is None:
        trees = SuffixDecodingCache(**limits)
    else:
        trees = SuffixDecodingCache.load(config.warm_start, **limits)
    return Memory(
        cache=trees,
        requests=[None] * max_requests,
        num_known=np.zeros(max_requests, np.int32),
        max_model_len=cache.max_model_len,
        next_id=1 + max((i for i in trees.cached_requests if isinstance(i, int)), default=-1),
    )


def propose(
    config: SuffixConfig, params: Any, memory: Memory, batch: Batch, num_drafts: int
) -> tuple[Memory, Drafts]:
    """Adds the tokens of a step to the trees and drafts; row i is added before row i + 1 drafts.

    Args, Raises: as `jspec.proposers.ngram.propose`.

    Returns:
      (memory, drafts): numpy int32. A row without a kept token drafts nothing; with n known tokens,
      the newest included, there are at most max_model_len - n - 1 drafts.
    """
    del params, num_drafts
    slot, query_start, *rest = _host.read_step("suffix", batch)
    new_start, room = np.zeros_like(query_start), np.zeros_like(slot)
    new_tokens = np.empty(batch.token_ids.size + slot.size, np.int32)
    limits = (memory.max_model_len, config.id_limit)
    known = memory.num_known
    _collect(slot, query_start, *rest, *limits, known, new_tokens, new_start, room)
    tokens, count = memory.cache.advance(
        [memory.requests[s] if 0 <= s < known.size else None for s in slot.tolist()],
        new_tokens[: new_start[-1]],
        new_start,
        room,
        num_drafts=config.most_drafts,
        max_spec_factor=config.max_spec_factor,
        max_spec_offset=config.max_spec_offset,
        min_token_prob=config.min_token_prob,
    )
    _cut(tokens, count)
    return memory, Drafts(tokens=tokens, num_drafts=count)


def admit(
    config: SuffixConfig, memory: Memory, slot: int, tokens: Int32[np.ndarray, "n"], num_tokens: int
) -> Memory:
    """Starts a request with its whole prompt, under an id that none had before."""
    memory = release(config, memory, slot)
    prompt = _host.in_vocabulary(tokens[:num_tokens], config.id_limit)
    memory.cache.start_request(memory.next_id, prompt)
    memory.requests[slot], memory.num_known[slot] = memory.next_id, num_tokens
    memory.next_id += 1
    return memory


def release(config: SuffixConfig, memory: Memory, slot: int) -> Memory:
    """Forgets a request's own tree; its response stays, for others to draft from."""
    del config
    request = memory.requests[slot]
    if request is not None:
        memory.cache.stop_request(request)
        memory.requests[slot], memory.num_known[slot] = None, 0
    return memory


_VECTOR, _TABLE = int32[::1], int32[:, ::1]
_COLLECT_TYPES = (*[_VECTOR] * 7, int64, int64, *[_VECTOR] * 4)
_CUT_TYPES = (_TABLE, _VECTOR)


@njit()
def _collect(
    slot,  # [B]
    query_start,  # [B + 1]
    last_index,  # [B]
    token_ids,  # [T]
    position,  # [T]
    next_token,  # [B]
    num_valid,  # [B]
    max_model_len,
    id_limit,
    num_known,  # [max_requests] out
    new_tokens,  # [T + B] out: tokens that the trees do not have, row after row
    new_start,  # [B + 1] out
    room,  # [B] out: most drafts; stays 0 where nothing is drafted
):
    at = 0
    for b in range(slot.size):
        new_start[b + 1] = at
        end = min(last_index[b] + 1, query_start[b + 1], token_ids.size)
        if not 0 <= slot[b] < num_known.size or not 0 <= query_start[b] < end:
            continue
        known = num_known[slot[b]]
        if known == 0:
            continue
        # A row that was run before brings nothing new, and one after a gap cannot be placed.
        for t in range(query_start[b], end):
            if position[t] == known:
                new_tokens[at] = token_ids[t] if 0 <= token_ids[t] < id_limit else PAD_TOKEN
                at, known = at + 1, known + 1
        if num_valid[b] > 0 and position[end - 1] + 1 <= known:
            if position[end - 1] + 1 == known:
                new_tokens[at] = next_token[b] if 0 <= next_token[b] < id_limit else PAD_TOKEN
                at, known = at + 1, known + 1
            room[b] = max(0, max_model_len - known - 1)
        num_known[slot[b]] = known
        new_start[b + 1] = at


@njit()
def _cut(tokens, num_drafts):
    """Ends each row at its first id that is none, and pads what follows."""
    for b in range(num_drafts.size):
        for k in range(num_drafts[b]):
            if tokens[b, k] < 0:
                num_drafts[b] = k
                break
        tokens[b, num_drafts[b] :] = PAD_TOKEN


PROPOSER = Proposer(
    name="suffix",
    Config=SuffixConfig,
    init=init,
    propose=propose,
    admit=admit,
    release=release,
    kind="host",
    shares_across_requests=True,
)
