"""The suffix cache: trees of active requests, and one tree over the responses of all requests.

Source: arXiv 2411.04975; the public interface is that of Arctic Inference's SuffixDecodingCache.
"""

import json
import math
import os
import threading
from collections.abc import Hashable, KeysView, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import numpy as np
from jaxtyping import Int32

from jspec.config import check_at_least
from jspec.suffix import drafting, forest
from jspec.suffix.forest import GROUPS, LENGTH, LIVE, NODES, NONE, PAGE, PAGES, SEQUENCES

_FORMAT = "jspec-suffix-cache-1"
_MAX_ROWS = 2**31 - 1  # of a table, or places: they are int32
_CHUNK = 256  # tokens added at a time: the rows reserved for them bound what a call may waste

TokenIds = Int32[np.ndarray, "n"] | Sequence[int]


@dataclass
class SuffixDecodingDraft:
    """What is likely to come next.

    Attributes:
      token_ids: the draft.
      parents: index of each token's parent in `token_ids`; -1 where it follows the context.
      probs: share of the occurrences of the match that went on like this, per token.
      score: sum of `probs`, the expected number of accepted tokens.
      match_len: tokens at the end of the context that were found before.
    """

    token_ids: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    probs: list[float] = field(default_factory=list)
    score: float = 0.0
    match_len: int = 0


class SuffixDecodingCache:
    """Remembers what requests said, and drafts from it.

    A request has a tree of its own text, prompt and response, from `start_request` to
    `stop_request`. Responses also go to one tree that all requests draft from, until they are
    evicted: the oldest first, beyond any of the limits.

    Args:
      max_tree_depth: longest path that is counted, match and draft together, in tokens.
      max_cached_requests: most responses in the shared tree; 0 = no shared tree, -1 = no limit.
      max_cached_tokens: most tokens of those responses together; None = no limit. The newest
        response stays, whatever its length.
      max_bytes: size at which the tables stop to grow as long as a response is left to evict; None
        = no limit. The text of active requests is kept in any case.

    Raises:
      ValueError: a limit is out of range.

    Example:
      >>> cache = SuffixDecodingCache(max_tree_depth=8)
      >>> cache.start_request("a", [1, 2, 3, 4, 1, 2])
      >>> cache.speculate("a", [4, 1, 2], max_spec_tokens=2)
      SuffixDecodingDraft(token_ids=[3, 4], parents=[-1, 0], probs=[0.5, 0.5], score=1.0, match_len=2)
    """

    def __init__(
        self,
        max_tree_depth: int = 24,
        max_cached_requests: int = 10_000,
        *,
        max_cached_tokens: int | None = None,
        max_bytes: int | None = None,
    ):
        owner = type(self).__name__
        check_at_least(owner, 1, max_tree_depth=max_tree_depth)
        check_at_least(owner, -1, max_cached_requests=max_cached_requests)
        given = {"max_cached_tokens": max_cached_tokens, "max_bytes": max_bytes}
        check_at_least(owner, 1, **{k: v for k, v in given.items() if v is not None})
        self.max_tree_depth = max_tree_depth
        self.max_cached_requests = max_cached_requests
        self.max_cached_tokens = max_cached_tokens
        self.max_bytes = max_bytes
        self._forest = forest.empty(max_tree_depth)
        self._own: dict[Hashable, int] = {}  # sequences, by request
        self._shared: dict[Hashable, int] = {}  # oldest first
        self._num_cached_tokens = 0
        # The compiled code runs without the interpreter lock, so threads need one of ours.
        self._lock = threading.RLock()
        self._reserve(num_sequences=1)
        self._shared_root = drafting.new_root(self._forest)

    @property
    def active_requests(self) -> KeysView[Hashable]:
        """Requests between `start_request` and `stop_request`."""
        return self._own.keys()

    @property
    def cached_requests(self) -> KeysView[Hashable]:
        """Requests whose response is in the shared tree, oldest first."""
        return self._shared.keys()

    @property
    def num_nodes(self) -> int:
        """Counts the nodes of all trees."""
        return int(self._forest.used[NODES, LIVE])

    @property
    def num_cached_tokens(self) -> int:
        """Counts the tokens of the responses in the shared tree."""
        return self._num_cached_tokens

    @property
    def num_bytes(self) -> int:
        """Sums the sizes of the tables, free rows included: they are kept for later requests."""
        return sum(table.nbytes for table in self._forest)

    def start_request(self, req_id: Hashable, prompt_token_ids: TokenIds) -> None:
        """Starts a tree for a request, and its response in the shared tree.

        Args:
          req_id: any hashable; a cached response of the same id is evicted.
          prompt_token_ids: int32 [n].

        Raises:
          ValueError: the request is active, or the tokens are no int32 vector.
        """
        with self._lock:
            if req_id in self._own:
                raise ValueError(
                    f"start_request: {req_id!r} is active. Call stop_request({req_id!r}) first, or "
                    "pass another id."
                )
            prompt = _as_tokens("start_request", "prompt_token_ids", prompt_token_ids)
            self._reserve(num_sequences=2)
            root = drafting.new_root(self._forest)
            self._own[req_id] = drafting.new_sequence(self._forest, root)
            self._extend(self._own[req_id], prompt)
            if self.max_cached_requests != 0:
                if req_id in self._shared:
                    self.evict_cached_response(req_id)
                self._share(req_id)

    def add_active_response(self, req_id: Hashable, token_ids: TokenIds) -> None:
        """Appends tokens to a request's response, for its own drafts and those of all others.

        Args:
          req_id: an active request.
          token_ids: int32 [n]; all tokens that are new, accepted drafts included.

        Raises:
          ValueError: the request is not active, or the tokens are no int32 vector.
        """
        with self._lock:
            self._check_active("add_active_response", req_id)
            tokens = _as_tokens("add_active_response", "token_ids", token_ids)
            self._extend(self._own[req_id], tokens)
            if req_id in self._shared:
                self._extend(self._shared[req_id], tokens, keep=req_id)
                self._num_cached_tokens += len(tokens)
                self._evict_beyond_limits()

    def stop_request(self, req_id: Hashable) -> None:
        """Forgets a request's own tree; its response stays in the shared one.

        Raises:
          ValueError: the request is not active.
        """
        with self._lock:
            self._check_active("stop_request", req_id)
            drafting.remove_tree(self._forest, self._own.pop(req_id))

    def evict_cached_response(self, req_id: Hashable) -> None:
        """Takes a response out of the shared tree; what it says from now on stays out, too.

        Raises:
          ValueError: no response of that id is cached.
        """
        with self._lock:
            if req_id not in self._shared:
                raise ValueError(
                    f"evict_cached_response: {req_id!r} is not cached; `cached_requests` lists the "
                    f"{len(self._shared)} that are."
                )
            sequence = self._shared.pop(req_id)
            self._num_cached_tokens -= int(self._forest.sequences[sequence, LENGTH])
            drafting.remove_sequence(self._forest, sequence)

    def speculate(
        self,
        req_id: Hashable,
        context: TokenIds,
        max_spec_tokens: int | None = None,
        max_spec_factor: float = 1.0,
        max_spec_offset: float = 0.0,
        min_token_prob: float = 0.1,
        use_tree_spec: bool = False,
    ) -> SuffixDecodingDraft:
        """Drafts what follows a context, from the request's own tree or from the shared one.

        Args:
          req_id: an active request.
          context: int32 [n]; the last tokens, oldest first. One token alone matches nothing.
          max_spec_tokens: most tokens to draft; None = max_tree_depth.
          max_spec_factor: a match of m tokens drafts at most `factor * m + offset` tokens.
          max_spec_offset: see `max_spec_factor`.
          min_token_prob: a token less probable than this ends the draft.
          use_tree_spec: draft a tree of alternatives instead of the most frequent path.

        Returns:
          The draft of the highest score; empty where nothing matches or is probable enough.

        Raises:
          ValueError: the request is not active, or the context is no int32 vector.
        """
        with self._lock:
            self._check_active("speculate", req_id)
            context = _as_tokens("speculate", "context", context)[-self.max_tree_depth :]
            most = self.max_tree_depth if max_spec_tokens is None else max_spec_tokens
            options = (most, float(max_spec_factor), float(max_spec_offset), float(min_token_prob))
            where = (self._forest, self._own[req_id], self._shared_root, context, options)
            if use_tree_spec:
                tokens, parents, probs, score, match_len = drafting.speculate_tree(*where)
                ids = tokens.tolist(), parents.tolist(), probs.tolist()
                return SuffixDecodingDraft(*ids, float(score), match_len)
            size = max(0, min(most, self.max_tree_depth))
            tokens, probs = np.empty(size, np.int32), np.empty(size, np.float32)
            num_drafts, score, match_len = drafting.speculate(*where, tokens, probs)
        return SuffixDecodingDraft(
            tokens[:num_drafts].tolist(),
            list(range(-1, num_drafts - 1)),
            probs[:num_drafts].tolist(),
            float(score),
            match_len,
        )

    def _check_active(self, owner: str, req_id: Hashable) -> None:
        if req_id not in self._own:
            raise ValueError(
                f"{owner}: {req_id!r} is not active. Call start_request({req_id!r}, prompt) first."
            )

    def _share(self, req_id: Hashable) -> None:
        self._shared[req_id] = drafting.new_sequence(self._forest, self._shared_root)
        while 0 <= self.max_cached_requests < len(self._shared):
            self.evict_cached_response(next(iter(self._shared)))

    def _evict_beyond_limits(self) -> None:
        limit = self.max_cached_tokens
        while limit is not None and self._num_cached_tokens > limit and len(self._shared) > 1:
            self.evict_cached_response(next(iter(self._shared)))

    def _extend(self, sequence: int, tokens: np.ndarray, keep: Hashable = None) -> None:
        for start in range(0, len(tokens), _CHUNK):
            chunk = tokens[start : start + _CHUNK]
            self._reserve(num_tokens=len(chunk), keep=keep)
            drafting.extend(self._forest, sequence, chunk)

    def _reserve(self, *, num_tokens: int = 0, num_sequences: int = 0, keep: Hashable = None):
        """Makes room for tokens, each in one tree, and for new sequences."""
        nodes = num_tokens * self.max_tree_depth
        pages = num_tokens // PAGE + 2
        needed = (nodes + num_sequences, nodes, pages, num_sequences)
        for kind, count in zip((NODES, GROUPS, PAGES, SEQUENCES), needed):
            while len(self._forest[kind]) - self._forest.used[kind, LIVE] < count:
                self._forest = forest.grow(self._forest, kind, max(64, int(count), int(len(self._forest[kind])*1.25), int(self._forest.used[kind, LIVE])+count))


def _as_tokens(owner, name, tokens):
    return np.array(tokens, np.int32)
