"""Scheduling on the host: admits requests, selects the rows of each step, stores its tokens."""

import dataclasses
import math
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import jax
import numpy as np

from jspec._boundary import empty_step, full
from jspec._checks import check_at_least
from jspec.axes import PAD_SLOT, PAD_TOKEN
from jspec.checkpoint import Model
from jspec.config import CacheConfig
from jspec.metadata import check_prompt
from jspec.metrics import SpecDecodingStats
from jspec.runtime import policies
from jspec.runtime.policies import Drafting
from jspec.state import Drafts, Scheduled

OnTokens = Callable[[int, list[int], int], None]
"""Called as `(prompt index, new tokens, num_accepted)`: the first `num_accepted` of the tokens are
accepted drafts. Over a run these sum up to `Report.stats.num_accepted_tokens`."""


class Generation(NamedTuple):
    """The continuation of a prompt.

    Attributes:
      tokens: the new tokens, the stop token included.
      reason: why it ended: a stop token, or the length limit.
    """

    tokens: list[int]
    reason: Literal["stop", "length"]


@dataclass
class Request:
    """A prompt that waits or is decoded.

    Attributes:
      index: of the prompt.
      tokens: all known tokens, the newest sampled one included.
      num_prompt: how many of them are the prompt.
      end: most tokens it may have.
      slot: its memory row, while it runs.
      pages: its KV pages, while it runs.
      num_computed: leading tokens whose keys and values are stored.
      drafts: draft tokens to verify in the next step.
      parents: where these form a tree: index of each draft's parent.
    """

    index: int
    tokens: list[int]
    num_prompt: int
    end: int
    slot: int = PAD_SLOT
    pages: list[int] = field(default_factory=list)
    num_computed: int = 0
    drafts: list[int] = field(default_factory=list)
    parents: list[int] | None = None


class RequestRows(NamedTuple):
    """One request's rows of a step: tokens from position `start` on, then drafts.

    `backup` is the next prompt token where the chunk ends inside the prompt, so that nothing is
    sampled; else PAD. `parents` are the indices of the drafts' parents in a tree.
    """

    slot: int
    token_ids: list[int]
    start: int
    num_drafts: int
    pages: Sequence[int]
    backup: int = PAD_TOKEN
    parents: Sequence[int] = ()

    @property
    def reads_prompt(self) -> bool:
        """Whether the rows are a chunk of a prompt: more than one token beside the drafts."""
        return len(self.token_ids) - self.num_drafts > 1


class Scheduler:
    """Admits prompts while slots and pages are free, and holds the state of each request.

    A step has one of a few shapes (flat rows, most logits rows a request), each an executable: one
    row a request; one shape for each number of drafts that `drafting` may choose, of which a step
    takes the smallest that holds its drafts; and one for chunks of prompts.

    Args:
      prompts: token ids.
      limits: page pool and longest request.
      max_requests: requests that run at the same time.
      max_tokens: most tokens to add to a prompt.
      num_drafts: most drafts of a request (K).
      chunk_size: most rows of a step that reads prompts.
      stop_ids: ids that end a request.
      tree_depth: where drafts form trees: most of them that can be accepted in a step.
      drafting: how many tokens are drafted and verified; as `jspec.generate`.

    Attributes:
      num_drafts: tokens to draft after the step that was scheduled last.
    """

    def __init__(
        self,
        prompts: Sequence[Sequence[int]],
        limits: CacheConfig,
        *,
        max_requests: int,
        max_tokens: int,
        num_drafts: int,
        chunk_size: int,
        stop_ids: Collection[int],
        tree_depth: int | None = None,
        drafting: Drafting | None = None,
    ):
        self.policy = policies.policy(
            drafting, num_drafts=num_drafts, max_requests=max_requests, tree_depth=tree_depth
        )
        self.num_drafts = num_drafts
        self.limits = limits
        self.is_tree = tree_depth is not None
        self.max_requests = max_requests
        self.width = num_drafts + 1
        self.stop_ids = frozenset(stop_ids)
        most = max_requests * self.width
        sizes = [max_requests * (1 + level) for level in self.policy.levels if level]
        self.shapes = [(max_requests, 1), *((size, self.width) for size in sizes)]
        self.shapes.append((max(chunk_size, most), self.width))
        self.free_pages = list(range(limits.num_pages))
        self.waiting = deque(
            Request(i, list(p), len(p), min(len(p) + max_tokens, limits.max_model_len))
            for i, p in enumerate(prompts)
        )
        self.running: dict[int, Request] = {}
        self.generations = [Generation([], "length") for _ in prompts]
        self.stats = SpecDecodingStats.new(num_drafts if tree_depth is None else tree_depth)

    def admit(self) -> list[Request]:
        """Starts waiting requests while slots and pages are free; all pages are reserved."""
        admitted = []
        slots = [slot for slot in range(self.max_requests) if slot not in self.running]
        while self.waiting and slots:
            request = self.waiting[0]
            num_pages = math.ceil(request.end / self.limits.page_size)
            if num_pages > len(self.free_pages):
                break
            self.waiting.popleft()
            request.slot = slots.pop(0)
            request.pages = [self.free_pages.pop() for _ in range(num_pages)]
            self.running[request.slot] = request
            self.policy.start(request.slot)
            admitted.append(request)
        return admitted

    def schedule(self) -> tuple[list[RequestRows], tuple[int, int]]:
        """Selects a step's rows, those of decoding requests first, and its shape."""
        budget = self.shapes[-1][0]
        offers = {slot: self._count_drafts(request) for slot, request in self.running.items()}
        has_prompt = any(len(r.tokens) - r.num_computed > 1 for r in self.running.values())
        if not has_prompt:  # else verification is free: the step has the shape of a chunk anyway
            offers = self.policy.verify(offers)
        rows = []
        for request in sorted(self.running.values(), key=lambda r: len(r.tokens) - r.num_computed):
            pending = request.tokens[request.num_computed :]
            chunk = pending[:budget]
            if not chunk:
                break
            drafts, backup, parents = [], PAD_TOKEN, ()
            if len(chunk) < len(pending):
                backup = pending[len(chunk)]
            else:
                drafts = request.drafts[: min(offers[request.slot], budget - 1)]
                parents = (request.parents or ())[: len(drafts)]
            budget -= len(chunk) + len(drafts)
            rows.append(
                RequestRows(
                    slot=request.slot,
                    token_ids=chunk + drafts,
                    start=request.num_computed,
                    num_drafts=len(drafts),
                    pages=request.pages,
                    backup=backup,
                    parents=parents,
                )
            )
        self.num_drafts = self.policy.draft([row.slot for row in rows])
        if has_prompt:
            return rows, self.shapes[-1]
        num_rows = sum(len(row.token_ids) for row in rows)
        if num_rows == len(rows):
            return rows, self.shapes[0]
        return rows, next(shape for shape in self.shapes[1:] if shape[0] >= num_rows)

    def _count_drafts(self, request: Request) -> int:
        """Counts the drafts before `end`, with room for one more token of the target."""
        room = request.end - len(request.tokens) - 1
        if request.parents is not None:
            room = _count_nodes(request.parents, room)
        return min(len(request.drafts), room)

    def keep(
        self,
        rows: Sequence[RequestRows],
        verified: np.ndarray,
        drafts: Drafts,
        on_tokens: OnTokens | None = None,
    ) -> list[int]:
        """Adds a step's tokens to its requests, and counts them.

        A request ends with its first stop token; tokens after it are dropped and not counted.

        Args:
          rows: as `schedule` returned them.
          verified: int32 [B, W]; kept tokens, PAD after them.
          drafts: for the next step, on the host.
          on_tokens: called for each request with new tokens.

        Returns:
          The slots of requests that ended.
        """
        ended = []
        for b, row in enumerate(rows):
            request = self.running[row.slot]
            request.num_computed += len(row.token_ids) - row.num_drafts
            if row.backup != PAD_TOKEN:
                continue
            kept = [int(token) for token in verified[b] if token != PAD_TOKEN]
            num_drafts = row.num_drafts
            stop = next((i for i, token in enumerate(kept) if token in self.stop_ids), None)
            if stop is not None and stop + 1 < len(kept):  # ends inside its drafts
                kept = kept[: stop + 1]
                num_drafts = _count_nodes(row.parents, stop) if row.parents else stop
            num_accepted = len(kept) - 1  # the last token counts as the target's own
            if row.num_drafts:
                self.stats.observe_draft(num_drafts, num_accepted)
            request.num_computed += num_accepted
            request.tokens += kept
            request.drafts = drafts.tokens[b, : drafts.num_drafts[b]].tolist()
            if drafts.parents is not None:
                request.parents = drafts.parents[b, : drafts.num_drafts[b]].tolist()
            self.policy.observe(row.slot, kept, request.drafts, request.parents)
            if on_tokens:
                on_tokens(request.index, kept, num_accepted)
            if stop is not None or len(request.tokens) >= request.end:
                output = request.tokens[request.num_prompt :]
                reason = "length" if stop is None else "stop"
                self.generations[request.index] = Generation(output, reason)
                self.free_pages += request.pages
                del self.running[row.slot]
                ended.append(row.slot)
        return ended

    def pack(self, rows: Sequence[RequestRows], num_rows: int) -> Scheduled:
        """Packs a step's rows, padded to one of the shapes."""
        return pack(
            rows,
            num_rows=num_rows,
            num_requests=self.max_requests,
            pages_per_request=self.limits.pages_per_request,
            num_nodes=self.width - 1 if self.is_tree else None,
        )


def _count_nodes(parents: Sequence[int], depth: int) -> int:
    """Counts the nodes of a tree, given level by level, that are at most `depth` deep."""
    depths = []
    for parent in parents:
        depths.append(1 if parent == PAD_TOKEN else depths[parent] + 1)
    return sum(d <= depth for d in depths)


def pack(
    rows: Sequence[RequestRows],
    *,
    num_rows: int,
    num_requests: int,
    pages_per_request: int,
    num_nodes: int | None = None,
) -> Scheduled:
    """Packs requests into flat arrays on the host, padded to a bucket.

    Args:
      rows: of the requests.
      num_rows, num_requests, pages_per_request: sizes of the arrays.
      num_nodes: where drafts form trees: most nodes of a request.
    """
    step = empty_step(num_rows, num_requests, pages_per_request)
    if num_nodes is not None:
        step = dataclasses.replace(step, draft_parents=full(PAD_TOKEN, num_requests, num_nodes))
    at = 0
    for b, row in enumerate(rows):
        end = at + len(row.token_ids)
        step.token_ids[at:end] = row.token_ids
        step.positions[at:end] = np.arange(row.start, row.start + end - at)
        at = end
        step.query_start[b + 1 :] = end
        step.seq_lens[b] = row.start + len(row.token_ids)
        step.block_table[b, : len(row.pages)] = row.pages
        step.num_drafts[b], step.request_slot[b] = row.num_drafts, row.slot
        step.backup_token[b], step.discard[b] = row.backup, row.backup != PAD_TOKEN
        if step.draft_parents is not None:
            step.draft_parents[b, : len(row.parents)] = row.parents
    return step


def limits(
    model: Model,
    prompts: Sequence[Sequence[int]],
    max_tokens: int,
    max_requests: int,
    cache: CacheConfig | None,
    chunk_size: int,
    *,
    vocab_size: int | None = None,
    num_drafts: int = 0,
) -> CacheConfig:
    """Checks the arguments; returns `cache`, or the smallest sizes for the prompts without one.

    Args:
      vocab_size: the drafter's, where it has one; it may be smaller than the target's.
      num_drafts: most drafts that can follow each other.
    """
    check_at_least(
        "generate", 1, max_tokens=max_tokens, max_requests=max_requests, chunk_size=chunk_size
    )
    context = cache.max_model_len if cache else model.config.max_positions
    if context > model.config.max_positions:
        raise ValueError(
            f"generate: cache.max_model_len is {context}, above the {model.config.max_positions} "
            "positions that the model was made for. Lower it, or load the model with RoPE scaling "
            "(yarn) in its config.json, which stretches them."
        )
    vocab_size = min(model.config.vocab_size, vocab_size or model.config.vocab_size)
    for i, prompt in enumerate(prompts):
        check_prompt(f"generate: prompts[{i}]", prompt, max_len=context, vocab_size=vocab_size)
        if len(prompt) == context:
            raise ValueError(
                f"generate: prompts[{i}]: the prompt has {context} tokens, which is max_model_len: "
                "no token can be added. Shorten it, or raise CacheConfig.max_model_len."
            )
    longest = max((min(len(p) + max_tokens, context) for p in prompts), default=1)
    # Powers of two, so that calls of similar sizes share their executables.
    size = min(context, max(64, 1 << (longest - 1).bit_length())) if cache is None else context
    if num_drafts >= size:
        raise ValueError(
            f"generate: `num_drafts` is {num_drafts}, and requests have at most {size} tokens "
            "(max_model_len), which drafts cannot fill. Lower num_drafts."
        )
    if cache is None:
        num_pages = math.ceil(size / 16) * max_requests
        dtype = str(jax.tree.leaves(model.params)[0].dtype)
        return CacheConfig(num_pages=num_pages, max_model_len=size, dtype=dtype)
    needed = math.ceil(longest / cache.page_size)
    if needed > cache.num_pages:
        raise ValueError(
            f"generate: the cache has {cache.num_pages} pages of {cache.page_size} tokens, but the "
            f"longest request ({longest} tokens) takes {needed}. Raise CacheConfig.num_pages or "
            "lower max_tokens."
        )
    return cache
