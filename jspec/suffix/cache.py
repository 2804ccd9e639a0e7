"""The suffix cache: a tree for each active request, and one over the responses of all of them.

Source: arXiv 2411.04975; the interface is that of Arctic Inference's SuffixDecodingCache.
"""

import threading
from collections.abc import Hashable, KeysView, Sequence
from dataclasses import dataclass, field
from os import PathLike
from typing import Self

import numpy as np
from jaxtyping import Int32

from jspec._checks import check_at_least
from jspec.suffix import compiled, files
from jspec.suffix.inputs import TokenIds, as_text, as_tokens
from jspec.suffix.tables import (
    FIRST_PAGE,
    GROUPS,
    LENGTH,
    LIVE,
    NEXT_PAGE,
    NODES,
    NONE,
    PAGE,
    PAGES,
    ROOT,
    SEQUENCES,
    grown_by,
    new_forest,
    rows_needed,
)

_CHUNK = 256  # tokens added by one call: the tables have room to spare for the worst of them
_NOBODY = object()


@dataclass
class SuffixDecodingDraft:
    """What is likely to come next.

    Attributes:
      token_ids: the draft.
      parents: index of each token's parent in `token_ids`; -1 where it follows the context.
      probs: how probable each token is, by the counts of what followed the match so far.
      score: sum of `probs`: the expected number of accepted tokens.
      match_len: tokens at the end of the context that were found.
    """

    token_ids: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    probs: list[float] = field(default_factory=list)
    score: float = 0.0
    match_len: int = 0


class SuffixDecodingCache:
    """Remembers what requests said, and drafts from it.

    A request has a tree over its own text, prompt and response, from `start_request` to
    `stop_request`. Responses also enter a tree that all requests draft from, where they stay until
    they are evicted: the oldest first, as soon as one of the limits is passed.

    Args:
      max_tree_depth: longest path that is counted, match and draft together, in tokens.
      max_cached_requests: most responses in the shared tree; 0 = no shared tree, -1 = no limit.
      max_cached_tokens: most tokens of these responses together; None = no limit. The newest
        response stays, whatever its length.
      max_bytes: the tables grow beyond this size for the text of active requests alone: before
        that, responses are evicted. None = no limit.

    Raises:
      ValueError: a limit is out of range.

    Example:
      >>> cache = SuffixDecodingCache(max_tree_depth=8)
      >>> cache.start_request("a", [1, 2, 3, 4, 1, 2])
      >>> cache.speculate("a", [4, 1, 2], max_spec_tokens=2).token_ids
      [3, 4]
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
        limits = {"max_cached_tokens": max_cached_tokens, "max_bytes": max_bytes}
        given = {name: limit for name, limit in limits.items() if limit is not None}
        check_at_least(owner, 1, max_tree_depth=max_tree_depth, **given)
        check_at_least(owner, -1, max_cached_requests=max_cached_requests)
        compiled.compile_all()
        self.max_tree_depth = max_tree_depth
        self.max_cached_requests = max_cached_requests
        self.max_cached_tokens = max_cached_tokens
        self.max_bytes = max_bytes
        self._forest = new_forest(max_tree_depth)
        self._draft = np.empty(max_tree_depth, np.int32), np.empty(max_tree_depth, np.float32)
        self._own: dict[Hashable, int] = {}  # request -> sequence
        self._shared: dict[Hashable, int] = {}  # likewise, the oldest first
        self._num_cached_tokens = 0
        # Compiled code runs without the interpreter lock: threads would meet in the tables.
        self._lock = threading.RLock()
        anchor = self._new_sequence()  # keeps the shared tree's root
        self._shared_root = int(self._forest.sequences[anchor, ROOT])

    @property
    def active_requests(self) -> KeysView[Hashable]:
        """Requests between `start_request` and `stop_request`."""
        return self._own.keys()

    @property
    def cached_requests(self) -> KeysView[Hashable]:
        """Requests whose response is in the shared tree, oldest first."""
        return self._shared.keys()

    @property
    def num_cached_tokens(self) -> int:
        """Counts the tokens of the responses in the shared tree."""
        return self._num_cached_tokens

    @property
    def num_nodes(self) -> int:
        """Counts the nodes of all trees."""
        return int(self._forest.used[NODES, LIVE])

    @property
    def num_bytes(self) -> int:
        """Sums the sizes of the tables, with the rows that later text will use again."""
        return sum(table.nbytes for table in self._forest)

    def start_request(self, req_id: Hashable, prompt_token_ids: TokenIds) -> None:
        """Starts a request's own tree with its prompt, and its response in the shared tree.

        Args:
          req_id: any hashable; a cached response under the same id is evicted.
          prompt_token_ids: int32 [n].

        Raises:
          ValueError: the request is active, or the tokens are not a vector of int32.
        """
        with self._lock:
            if req_id in self._own:
                raise ValueError(
                    f"start_request: {req_id!r} is active already. Call stop_request({req_id!r}) "
                    "first, or pass another id."
                )
            prompt = as_text("start_request", "prompt_token_ids", prompt_token_ids)
            self._own[req_id] = self._new_sequence()
            self._extend(self._own[req_id], prompt)
            if self.max_cached_requests != 0:
                if req_id in self._shared:
                    self.evict_cached_response(req_id)
                self._share(req_id)

    def add_active_response(self, req_id: Hashable, token_ids: TokenIds) -> None:
        """Appends tokens to a response, for the request's own drafts and those of all others.

        Args:
          req_id: an active request.
          token_ids: int32 [n]; every token once, accepted drafts included.

        Raises:
          ValueError: the request is not active, or the tokens are not a vector of int32.
        """
        with self._lock:
            own = self._active("add_active_response", req_id)
            tokens = as_text("add_active_response", "token_ids", token_ids)
            self._extend(own, tokens, response_of=req_id)

    def stop_request(self, req_id: Hashable) -> None:
        """Forgets a request's own tree; its response stays in the shared one.

        Raises:
          ValueError: the request is not active.
        """
        with self._lock:
            compiled.remove_tree(*self._forest, self._active("stop_request", req_id))
            del self._own[req_id]

    def evict_cached_response(self, req_id: Hashable) -> None:
        """Takes a response out of the shared tree; what is added to it later stays out, too.

        Raises:
          ValueError: the request has no response there.
        """
        with self._lock:
            if req_id not in self._shared:
                raise ValueError(
                    f"evict_cached_response: {req_id!r} is not cached. `cached_requests` has the "
                    f"{len(self._shared)} ids that are."
                )
            sequence = self._shared.pop(req_id)
            self._num_cached_tokens -= int(self._forest.sequences[sequence, LENGTH])
            compiled.remove_sequence(*self._forest, sequence)

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
        """Drafts what follows a context, from the request's own tree or the shared one.

        Args:
          req_id: an active request.
          context: int32 [n]; the newest tokens, the newest last. All n together are not looked
            up, so that one alone gives no draft.
          max_spec_tokens: most tokens to draft; None = max_tree_depth.
          max_spec_factor: a match of m tokens drafts at most `factor * m + offset` tokens.
          max_spec_offset: see there.
          min_token_prob: a draft ends before a token that is less probable.
          use_tree_spec: draft a tree of alternatives, instead of the most frequent path.

        Returns:
          The draft with the highest score; an empty one where nothing is found.

        Raises:
          ValueError: the request is not active, or the context is not a vector of int32.
        """
        with self._lock:
            own = self._active("speculate", req_id)
            context = as_tokens("speculate", "context", context)
            if len(context) > self.max_tree_depth:
                context = context[-self.max_tree_depth :]
            most = self.max_tree_depth if max_spec_tokens is None else max_spec_tokens
            where = (own, self._shared_root, context)
            # Of the compiled types: others would be compiled anew.
            limits = (most, float(max_spec_factor), float(max_spec_offset), float(min_token_prob))
            if use_tree_spec:
                *lists, score, match_len = compiled.speculate_tree(*self._forest, *where, *limits)
                ids, parents, probs = (array.tolist() for array in lists)
                return SuffixDecodingDraft(ids, parents, probs, score, match_len)
            tokens, probs = self._draft
            arguments = (*self._forest, tokens, probs, *limits, *where)
            count, score, match_len = compiled.speculate(*arguments)
            if count == 0:
                return SuffixDecodingDraft(match_len=match_len)
            ids, parents = tokens[:count].tolist(), list(range(-1, count - 1))
            return SuffixDecodingDraft(ids, parents, probs[:count].tolist(), score, match_len)

    def advance(
        self,
        req_ids: Sequence[Hashable | None],
        new_tokens: Int32[np.ndarray, "T"],
        new_start: Int32[np.ndarray, "B1"],
        room: Int32[np.ndarray, "B"],
        *,
        num_drafts: int,
        max_spec_factor: float = 1.0,
        max_spec_offset: float = 0.0,
        min_token_prob: float = 0.1,
    ) -> tuple[Int32[np.ndarray, "B K"], Int32[np.ndarray, "B"]]:
        """Adds a step's tokens and drafts for each request, in one compiled call.

        Row by row: the tokens of row i are known before row i + 1 drafts. The context of a draft
        is all that the request's own tree holds.

        Args:
          req_ids: active requests; None for padding, which drafts nothing.
          new_tokens: the tokens of all rows, row after row.
          new_start: first of each row's tokens, and the end of the last.
          room: most drafts of each row.
          num_drafts: columns of the result (K).
          max_spec_factor: see `speculate`.
          max_spec_offset: likewise.
          min_token_prob: likewise.

        Returns:
          (tokens, num_drafts): drafts, in `tokens` what is beyond `num_drafts` is undefined.

        Raises:
          ValueError: a request is not active, the tokens are not a vector of int32, or the sizes
            do not fit together.
        """
        new_tokens = as_text("advance", "new_tokens", new_tokens)
        new_start, room = np.array(new_start, np.int32), np.array(room, np.int32)
        num_new, B = np.diff(new_start), len(req_ids)
        ends = new_start[:1].tolist() + new_start[-1:].tolist()
        if room.shape != (B,) or num_new.shape != (B,) or ends != [0, len(new_tokens)]:
            raise ValueError(
                f"advance: `room` has shape {room.shape} and `new_start` {new_start.shape} with "
                f"the ends {ends}, wanted [{B}] and [{B + 1}] with the ends 0 and "
                f"{len(new_tokens)}, which is how many new tokens there are."
            )
        if (num_new < 0).any():
            raise ValueError(f"advance: `new_start` is {new_start}, wanted ascending row starts.")
        tokens, counts = np.empty((B, num_drafts), np.int32), np.zeros(B, np.int32)
        limits = (float(max_spec_factor), float(max_spec_offset), float(min_token_prob))
        with self._lock:
            own = [NONE if r is None else self._active("advance", r) for r in req_ids]
            self._reserve(2 * len(new_tokens), 2 * B)
            shared = [NONE if r is None else self._shared.get(r, NONE) for r in req_ids]
            rows = np.array(own, np.int32), np.array(shared, np.int32)
            step = (*rows, new_start, new_tokens, room, self._shared_root, *limits, tokens, counts)
            compiled.advance(*self._forest, *step)
            self._num_cached_tokens += int(num_new[rows[1] != NONE].sum())
            self._evict_beyond_limits()
        return tokens, counts

    def save(self, path: str | PathLike[str]) -> None:
        """Writes the cached responses to a file, from which `load` makes a cache again.

        Args:
          path: of the file to write; the one before is replaced when the new one is complete.

        Raises:
          TypeError: the id of a response is neither str nor int.
        """
        with self._lock:
            responses = {req_id: self._text(row) for req_id, row in self._shared.items()}
        files.write(path, responses)

    @classmethod
    def load(cls, path: str | PathLike[str], *args, **kwargs) -> Self:
        """Makes a cache that knows the responses of a file.

        Counts are those of the cache that was saved. Among continuations that are equally
        frequent, the order is that of a cache which saw the responses one after the other.

        Args:
          path: a file that `save` wrote.
          *args: limits of the new cache, as of the class; beyond them the oldest are left out.
          **kwargs: likewise.

        Raises:
          ValueError: the file is none of ours or damaged.
        """
        cache = cls(*args, **kwargs)
        responses = files.read(path)
        if cache.max_cached_requests >= 0:
            oldest = max(0, len(responses) - cache.max_cached_requests)
            responses = dict(list(responses.items())[oldest:])
        for req_id, tokens in responses.items():
            cache._share(req_id)
            cache._extend(NONE, tokens, response_of=req_id)
        return cache

    def _active(self, owner: str, req_id: Hashable) -> int:
        sequence = self._own.get(req_id)
        if sequence is None:
            raise ValueError(
                f"{owner}: {req_id!r} is not active. Call start_request({req_id!r}, prompt) first."
            )
        return sequence

    def _new_sequence(self, root: int = NONE) -> int:
        self._reserve(0, 1)
        return compiled.new_sequence(*self._forest, root)

    def _share(self, req_id: Hashable) -> None:
        self._shared[req_id] = self._new_sequence(self._shared_root)
        while 0 <= self.max_cached_requests < len(self._shared):
            self.evict_cached_response(next(iter(self._shared)))

    def _extend(
        self, own: int, tokens: Int32[np.ndarray, "n"], *, response_of: Hashable = _NOBODY
    ) -> None:
        """Adds tokens to a sequence (NONE = none) and to a request's cached response."""
        for start in range(0, len(tokens), _CHUNK):
            chunk = tokens[start : start + _CHUNK]
            shared = self._shared.get(response_of, NONE)
            while not compiled.extend(*self._forest, own, shared, chunk):
                self._reserve(2 * len(chunk), 2)
                shared = self._shared.get(response_of, NONE)
            if shared != NONE:
                self._num_cached_tokens += len(chunk)
                self._evict_beyond_limits()

    def _evict_beyond_limits(self) -> None:
        limit = self.max_cached_tokens
        while limit is not None and self._num_cached_tokens > limit and len(self._shared) > 1:
            self.evict_cached_response(next(iter(self._shared)))

    def _reserve(self, num_tokens: int, num_sequences: int) -> None:
        """Makes room in the tables, by eviction where they are as large as they may be."""
        for kind in (NODES, GROUPS, PAGES, SEQUENCES):
            needed = rows_needed(kind, self.max_tree_depth, num_tokens, num_sequences)
            while (size := len(self._forest[kind])) < self._forest.used[kind, LIVE] + needed:
                larger = max(2 * size, int(self._forest.used[kind, LIVE]) + needed)
                limit = self.max_bytes
                if limit is not None and self._shared:
                    if self.num_bytes + grown_by(self._forest, kind, larger) > limit:
                        self.evict_cached_response(next(iter(self._shared)))
                        continue
                self._forest = compiled.grow(self._forest, kind, larger)

    def _text(self, sequence: int) -> Int32[np.ndarray, "n"]:
        """Reads a sequence's tokens."""
        pages, row = self._forest.pages, self._forest.sequences[sequence]
        page, parts = row[FIRST_PAGE], [np.empty(0, np.int32)]
        while page != NONE:
            parts.append(pages[page, :PAGE])
            page = pages[page, NEXT_PAGE]
        return np.concatenate(parts)[: row[LENGTH]]
