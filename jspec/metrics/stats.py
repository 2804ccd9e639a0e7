"""Counts of drafts and accepted tokens: of a step, of a window of steps, of each request."""

import itertools
import operator
from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import SupportsIndex

from jspec._checks import check_at_least


def _count(owner: str, name: str, value: SupportsIndex) -> int:
    """Returns a count as a plain int, or raises for what is no integer or negative."""
    try:
        count = operator.index(value)
    except TypeError:
        count = None
    if count is None or isinstance(value, bool):
        raise TypeError(f"{owner}: `{name}` is {value!r}, wanted an integer. Pass int({name}).")
    if count < 0:
        raise ValueError(f"{owner}: `{name}` is {count}, wanted 0 or more. Pass what was counted.")
    return count


def _ratio(numerator: int, denominator: int) -> float:
    return numerator / denominator if denominator else 0.0


@dataclass
class SpecDecodingStats:
    """Counts drafts and accepted tokens, for one step or a window of steps.

    A draft is what one request had verified in one step; callers leave out requests without one.
    Only what the request got is counted: see `observe_draft`.

    Attributes:
      num_spec_tokens: most tokens of a draft that can be accepted (K).
      num_drafts: drafts observed.
      num_draft_tokens: tokens in them.
      num_accepted_tokens: accepted tokens; bonus tokens do not count.
      num_accepted_tokens_per_pos: entry i: drafts whose first i + 1 tokens were all accepted [K];
        zeros where it is left out.

    Raises:
      ValueError: `num_spec_tokens` is no integer or negative, or there is not one entry for each
        position.
    """

    num_spec_tokens: int
    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_accepted_tokens_per_pos: list[int] = field(default_factory=list)

    def __post_init__(self):
        check_at_least("SpecDecodingStats", 0, num_spec_tokens=self.num_spec_tokens)
        per_pos = list(self.num_accepted_tokens_per_pos) or [0] * self.num_spec_tokens
        if len(per_pos) != self.num_spec_tokens:
            raise ValueError(
                f"SpecDecodingStats: `num_accepted_tokens_per_pos` has {len(per_pos)} entries, "
                f"wanted num_spec_tokens = {self.num_spec_tokens}. Leave it out to start from 0."
            )
        self.num_accepted_tokens_per_pos = per_pos

    @classmethod
    def new(cls, num_spec_tokens: int) -> "SpecDecodingStats":
        """Starts from zero, with positions for drafts of up to `num_spec_tokens` tokens.

        Raises:
          ValueError: `num_spec_tokens` is no integer or negative.
        """
        return cls(num_spec_tokens)

    def observe_draft(
        self, num_draft_tokens: SupportsIndex, num_accepted_tokens: SupportsIndex
    ) -> None:
        """Counts one draft. A refused one changes nothing.

        Where a request ends inside a draft, its last token counts as the bonus token, and that
        draft token and those after it count nowhere: pass n - 1 twice for a request that got n
        tokens. So passes with drafts gave `num_drafts + num_accepted_tokens` tokens in all.

        Args:
          num_draft_tokens: tokens that were verified, as far as they count; of trees all nodes.
          num_accepted_tokens: tokens that the request got, minus one: the bonus token.

        Raises:
          TypeError: a count is no integer.
          ValueError: a count is negative, or more tokens were accepted than drafted or than K.

        Example:
          >>> stats = SpecDecodingStats.new(3)
          >>> stats.observe_draft(3, 2)
          >>> stats.num_accepted_tokens_per_pos, stats.mean_acceptance_length
          ([1, 1, 0], 3.0)
        """
        drafted = _count("observe_draft", "num_draft_tokens", num_draft_tokens)
        accepted = _count("observe_draft", "num_accepted_tokens", num_accepted_tokens)
        if accepted > min(drafted, self.num_spec_tokens):
            raise ValueError(
                f"observe_draft: `num_accepted_tokens` is {accepted}, wanted 0 to "
                f"{min(drafted, self.num_spec_tokens)}: {drafted} tokens were drafted and "
                f"num_spec_tokens is {self.num_spec_tokens}. Pass the number of tokens that the "
                "request got minus one (the bonus token), and leave out requests that got none."
            )
        self.num_drafts += 1
        self.num_draft_tokens += drafted
        self.num_accepted_tokens += accepted
        for position in range(accepted):
            self.num_accepted_tokens_per_pos[position] += 1

    def add(self, other: "SpecDecodingStats") -> None:
        """Adds the counts of `other`.

        Raises:
          TypeError, ValueError: `other` has another number of positions, or its counts are no
            integers, negative or contradict each other; nothing changes.
        """
        other = checked("SpecDecodingStats.add", other)
        if other.num_spec_tokens != self.num_spec_tokens:
            raise ValueError(
                f"SpecDecodingStats.add: `other` has num_spec_tokens {other.num_spec_tokens}, "
                f"wanted {self.num_spec_tokens}. Build both with the largest K in use."
            )
        self.num_drafts += other.num_drafts
        self.num_draft_tokens += other.num_draft_tokens
        self.num_accepted_tokens += other.num_accepted_tokens
        for position, count in enumerate(other.num_accepted_tokens_per_pos):
            self.num_accepted_tokens_per_pos[position] += count

    @property
    def mean_acceptance_length(self) -> float:
        """Mean tokens of a pass with drafts, the bonus token included; 0.0 without drafts.

        Passes without drafts do not count here; `Report.tokens_per_step` has them.
        """
        return 1 + _ratio(self.num_accepted_tokens, self.num_drafts) if self.num_drafts else 0.0

    @property
    def acceptance_rate(self) -> float:
        """Share of draft tokens that were accepted, 0 to 1; 0.0 without draft tokens."""
        return _ratio(self.num_accepted_tokens, self.num_draft_tokens)

    @property
    def acceptance_rate_per_pos(self) -> list[float]:
        """Share of drafts accepted up to and including each position [K]; 0.0 without drafts."""
        return [_ratio(count, self.num_drafts) for count in self.num_accepted_tokens_per_pos]

    @property
    def acceptance_histogram(self) -> list[int]:
        """Number of drafts of which exactly 0, 1, ..., K tokens were accepted [K + 1].

        In: 4 drafts, per position [3 1 0]. Out: [1 2 1 0].
        """
        reached = [self.num_drafts, *self.num_accepted_tokens_per_pos, 0]
        return [here - further for here, further in itertools.pairwise(reached)]


def checked(owner: str, stats: SpecDecodingStats) -> SpecDecodingStats:
    """Copies counts that were checked: all integers, none negative, no two that disagree.

    Raises:
      TypeError, ValueError: they are no such counts.
    """
    num_positions = _count(owner, "num_spec_tokens", stats.num_spec_tokens)
    drafts = _count(owner, "num_drafts", stats.num_drafts)
    drafted = _count(owner, "num_draft_tokens", stats.num_draft_tokens)
    accepted = _count(owner, "num_accepted_tokens", stats.num_accepted_tokens)
    name = "num_accepted_tokens_per_pos"
    per_pos = [
        _count(owner, f"{name}[{i}]", count)
        for i, count in enumerate(stats.num_accepted_tokens_per_pos)
    ]
    wanted = None
    if drafted and not drafts:
        wanted = f"`num_draft_tokens` is {drafted}, wanted 0: num_drafts is 0"
    elif accepted > drafted:
        wanted = f"`num_accepted_tokens` is {accepted}, wanted at most num_draft_tokens = {drafted}"
    elif len(per_pos) != num_positions:
        wanted = f"`{name}` has {len(per_pos)} entries, wanted num_spec_tokens = {num_positions}"
    elif sum(per_pos) != accepted:
        wanted = f"`{name}` is {per_pos}, wanted a sum of num_accepted_tokens = {accepted}"
    elif any(here < further for here, further in itertools.pairwise([drafts, *per_pos])):
        wanted = (
            f"`{name}` is {per_pos}, wanted counts from num_drafts = {drafts} on that never rise"
        )
    if wanted:
        raise ValueError(f"{owner}: {wanted}. Count every draft with observe_draft.")
    return SpecDecodingStats(num_positions, drafts, drafted, accepted, per_pos)


class AcceptanceHistory:
    """Remembers how many tokens each draft of each request got, in order.

    A history lives from a request's first draft until `pop`; the totals stay.

    Args:
      num_spec_tokens: most tokens a draft may have (K).
      max_steps: drafts kept per request, the newest ones; None keeps all.

    Attributes:
      total: counts over all requests, popped ones included.

    Example:
      >>> history = AcceptanceHistory(3)
      >>> history.observe("a", 3, 2)
      >>> history.observe("a", 3, 0)
      >>> history.pop("a"), history.total.acceptance_histogram
      ([(3, 2), (3, 0)], [1, 0, 1, 0])
    """

    def __init__(self, num_spec_tokens: int, *, max_steps: int | None = None):
        if max_steps is not None:
            check_at_least("AcceptanceHistory", 1, max_steps=max_steps)
        self.total = SpecDecodingStats.new(num_spec_tokens)
        self._max_steps = max_steps
        self._steps: dict[Hashable, deque[tuple[int, int]]] = {}

    def observe(
        self,
        request_id: Hashable,
        num_draft_tokens: SupportsIndex,
        num_accepted_tokens: SupportsIndex,
    ) -> None:
        """Adds one draft of a request; see `SpecDecodingStats.observe_draft`.

        Raises:
          TypeError, ValueError: as `observe_draft`; nothing changes.
        """
        steps = self._steps.get(request_id, deque(maxlen=self._max_steps))
        self.total.observe_draft(num_draft_tokens, num_accepted_tokens)
        steps.append((operator.index(num_draft_tokens), operator.index(num_accepted_tokens)))
        self._steps[request_id] = steps

    def steps(self, request_id: Hashable) -> list[tuple[int, int]]:
        """Lists (drafted, accepted) of each draft of a request, oldest first.

        Raises:
          KeyError: no draft of the request was observed, or it was popped.
        """
        if request_id not in self._steps:
            raise KeyError(
                f"request {request_id!r} has no history here. It starts with the request's first "
                f"`observe` and ends with `pop`; known now: {list(self._steps)[:8]}."
            )
        return list(self._steps[request_id])

    def pop(self, request_id: Hashable) -> list[tuple[int, int]]:
        """Returns a request's history and forgets it.

        Raises:
          KeyError: as `steps`.
        """
        steps = self.steps(request_id)
        del self._steps[request_id]
        return steps
