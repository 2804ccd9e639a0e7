"""How many drafts a step makes and verifies: all, by the number of requests, or what pays.

Speculation pays where the tokens that a pass yields grow faster than its time. `Adaptive` estimates
both: the chance of each draft from what became of earlier ones, verified or not, and the time from
passes that were measured. All of it runs on the host, between two steps.
"""

import bisect
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple, Protocol

from jspec.earnings import Acceptance, Guess, Meter

_FIRST_CHANCE = 0.7
"""Of a draft about which nothing is known yet: worth a try."""
_POOL_MEMORY = 40.0
"""Outcomes that the estimate for new requests remembers."""


@dataclass(frozen=True)
class BatchSizeSchedule:
    """Drafts fewer tokens where more requests run together.

    Attributes:
      ranges: `(first batch size, last batch size, num_drafts)` of each range, ascending from 1 on.
        Sizes between two ranges and after the last keep the number before them.

    Raises:
      ValueError: the ranges are no such list.

    Example:
      >>> BatchSizeSchedule([(1, 2, 3), (4, 5, 0)]).table(max_requests=6, num_drafts=5)
      (3, 3, 3, 0, 0, 0)

    Source: vLLM v1/spec_decode/dynamic/utils.py.
    """

    ranges: Sequence[tuple[int, int, int]]

    def __post_init__(self):
        ranges = self.ranges
        entries = list(ranges) if isinstance(ranges, list | tuple) else []
        fits = bool(entries) and all(
            isinstance(entry, list | tuple)
            and len(entry) == 3
            and all(type(number) is int for number in entry)
            and 1 <= entry[0] <= entry[1]
            and entry[2] >= 0
            for entry in entries
        )
        ends = [0, *(entry[1] for entry in entries)] if fits else []
        fits = fits and all(entry[0] > end for entry, end in zip(entries, ends, strict=False))
        if not fits or entries[0][0] != 1:
            raise ValueError(
                f"BatchSizeSchedule: `ranges` is {ranges!r}, wanted (first, last, num_drafts) of "
                "each range of batch sizes, ascending without overlap from batch size 1 on. Write "
                "for example [(1, 16, 3), (17, 128, 1)]."
            )
        object.__setattr__(self, "ranges", tuple(map(tuple, entries)))

    def table(self, max_requests: int, num_drafts: int) -> tuple[int, ...]:
        """Lists the drafts for 1, 2, ..., `max_requests` requests, at most `num_drafts`."""
        counts = []
        for size in range(1, max_requests + 1):
            count = next(k for first, _, k in reversed(self.ranges) if first <= size)
            counts.append(min(count, num_drafts))
        return tuple(counts)


@dataclass(frozen=True)
class Costs:
    """What passes take, in any unit.

    Attributes:
      passes: by number of rows: the target's pass, and the drafter's where it drafts nothing.
      drafts: by number of drafts: what the drafter takes on top of that.

    Raises:
      ValueError: a pass takes no time, or a draft a negative one.
    """

    passes: Mapping[int, float]
    drafts: Mapping[int, float]

    def __post_init__(self):
        if not all(cost > 0 for cost in self.passes.values()) or not all(
            cost >= 0 for cost in self.drafts.values()
        ):
            raise ValueError(
                f"Costs: `passes` is {dict(self.passes)} and `drafts` {dict(self.drafts)}, wanted "
                "passes above 0 and drafts of at least 0. Give each number of rows its time."
            )


@dataclass(frozen=True, kw_only=True)
class Adaptive:
    """Drafts and verifies what gives the most tokens a second.

    Attributes:
      levels: numbers of drafts to choose from, ascending; by default none, half and all. Each is
        another executable. Trees are drafted whole or not at all.
      costs: what passes take; None = the loop measures it, before it starts and on the way.
      memory: about how many outcomes of each draft position the estimate remembers.
      probe_share: share of the time for drafts that are not expected to pay, so that the loop
        notices when they would.

    Raises:
      ValueError: a value is out of range.
    """

    levels: tuple[int, ...] | None = None
    costs: Costs | None = None
    memory: float = 4.0
    probe_share: float = 0.02

    def __post_init__(self):
        levels = self.levels
        if levels is not None and not (
            isinstance(levels, tuple)
            and all(type(level) is int and level >= 0 for level in levels)
            and list(levels) == sorted(set(levels))
            and levels[-1:] > (0,)
        ):
            raise ValueError(
                f"Adaptive: `levels` is {levels!r}, wanted ascending numbers of drafts. Write for "
                "example (0, 2, 5), or leave levels out."
            )
        for name, low, high in (("memory", 1.0, 1e6), ("probe_share", 0.0, 1.0)):
            value = getattr(self, name)
            if not isinstance(value, int | float) or not low <= value <= high:
                raise ValueError(
                    f"Adaptive: `{name}` is {value!r}, wanted a number from {low:g} to {high:g}. "
                    f"Leave {name} out for the default."
                )


class Policy(Protocol):
    """What the scheduler asks how much to draft and to verify.

    Attributes:
      levels: every number of drafts that a step may make, ascending.
      has_costs: whether it can choose: False until it was told what passes take.
    """

    levels: tuple[int, ...]

    @property
    def has_costs(self) -> bool:
        """See above."""
        ...

    def take_costs(
        self, passes: Mapping[int, Sequence[float]], drafts: Mapping[int, float]
    ) -> None:
        """Takes over what was measured; see `Meter`."""

    def start(self, slot: int) -> None:
        """Forgets the request that held a slot before."""

    def verify(self, offers: Mapping[int, int]) -> Mapping[int, int]:
        """Chooses how many of its drafts each request has verified in a step without prompts.

        Args:
          offers: by slot: drafts that there are.
        """
        ...

    def draft(self, slots: Collection[int]) -> int:
        """Chooses how many tokens the drafter drafts for the next step."""
        ...

    def observe(
        self, slot: int, kept: Sequence[int], drafts: Sequence[int], parents: Sequence[int] | None
    ) -> None:
        """Takes over what a step gave a request.

        Args:
          slot: the request's.
          kept: its new tokens.
          drafts: guesses at the tokens after them.
          parents: where these form a tree: which of them each one follows.
        """

    def clock(self, num_rows: int, num_drafts: int, seconds: float) -> None:
        """Takes over how long a step without prompts took."""


def policy(
    drafting: BatchSizeSchedule | Adaptive | None,
    *,
    num_drafts: int,
    max_requests: int,
    tree_depth: int | None = None,
) -> Policy:
    """Makes the policy that users ask for; None drafts and verifies all that can be drafted.

    Args:
      drafting: what the user passed.
      num_drafts: most drafts of a request (K).
      max_requests: requests that run at the same time.
      tree_depth: where drafts form trees: most of them that can be kept.

    Raises:
      TypeError: `drafting` is none of these. ValueError: it does not fit the drafter.
    """
    if drafting is None:
        return ByBatchSize((num_drafts,) * max_requests)
    if isinstance(drafting, BatchSizeSchedule):
        return ByBatchSize(drafting.table(max_requests, num_drafts))
    if isinstance(drafting, Adaptive):
        return ByEarnings(
            drafting, num_drafts=num_drafts, max_requests=max_requests, tree_depth=tree_depth
        )
    raise TypeError(
        f"generate: `drafting` is {drafting!r}, wanted a jspec.Adaptive, a jspec.BatchSizeSchedule "
        "or None. Pass drafting=jspec.BatchSizeSchedule([(1, 16, 3)]) for a schedule."
    )


class ByBatchSize:
    """Drafts by the number of running requests, and verifies every draft.

    Args:
      table: drafts for 1, 2, ... requests.
    """

    has_costs = True

    def __init__(self, table: Sequence[int]):
        self.table = table
        self.levels = tuple(sorted(set(table)))

    def take_costs(
        self, passes: Mapping[int, Sequence[float]], drafts: Mapping[int, float]
    ) -> None:
        """See `Policy`."""

    def start(self, slot: int) -> None:
        """See `Policy`."""

    def verify(self, offers: Mapping[int, int]) -> Mapping[int, int]:
        """See `Policy`."""
        return offers

    def draft(self, slots: Collection[int]) -> int:
        """See `Policy`."""
        return self.table[len(slots) - 1]

    def observe(
        self, slot: int, kept: Sequence[int], drafts: Sequence[int], parents: Sequence[int] | None
    ) -> None:
        """See `Policy`."""

    def clock(self, num_rows: int, num_drafts: int, seconds: float) -> None:
        """See `Policy`."""


class ByEarnings:
    """Chooses what has the best ratio of expected tokens to expected time.

    Args:
      drafting: the user's choices.
      num_drafts, max_requests, tree_depth: as `policy`.

    Attributes:
      levels: see `Policy`.
      sizes: rows that a step without prompts may have, ascending; the first has no draft.
      costs: what passes take; None until they are measured.
    """

    def __init__(
        self,
        drafting: Adaptive,
        *,
        num_drafts: int,
        max_requests: int,
        tree_depth: int | None = None,
    ):
        is_tree = tree_depth is not None
        levels = drafting.levels
        if levels is None:
            levels = (0, num_drafts) if is_tree else tuple(sorted({0, num_drafts // 2, num_drafts}))
        if levels[-1] > num_drafts or (is_tree and set(levels) - {0, num_drafts}):
            raise ValueError(
                f"Adaptive: `levels` is {levels}, but this drafter drafts "
                f"{'a tree of ' if is_tree else 'at most '}{num_drafts} tokens"
                f"{', whole or not at all' if is_tree else ''}. Lower the levels, or leave them "
                "out."
            )
        self.levels: tuple[int, ...] = levels
        self.sizes = [max_requests * (1 + level) for level in sorted({0, *levels})]
        self.is_tree = is_tree
        self.memory = drafting.memory
        self.probe_share = drafting.probe_share
        self.costs: Meter | None = None
        self.is_measured = drafting.costs is None
        if drafting.costs is not None:
            missing = set(self.sizes) - set(drafting.costs.passes)
            if missing or set(self.levels) - set(drafting.costs.drafts):
                raise ValueError(
                    f"Adaptive: `costs` has passes of {sorted(drafting.costs.passes)} rows and "
                    f"{sorted(drafting.costs.drafts)} drafts, wanted {self.sizes} and "
                    f"{list(self.levels)}. Add what is missing, or leave costs out to measure."
                )
            self.costs = Meter(
                {rows: [cost] for rows, cost in drafting.costs.passes.items()},
                drafting.costs.drafts,
            )
        self._pool = Acceptance([_FIRST_CHANCE] * (tree_depth or num_drafts), _POOL_MEMORY)
        self._requests: dict[int, Acceptance] = {}
        self._guesses: dict[int, list[Guess]] = {}
        self._allowance = 0.0
        self._drafted = self.levels[-1]

    @property
    def has_costs(self) -> bool:
        """See `Policy`."""
        return self.costs is not None

    def take_costs(
        self, passes: Mapping[int, Sequence[float]], drafts: Mapping[int, float]
    ) -> None:
        """Starts with costs that the loop measured."""
        self.costs = Meter(passes, drafts)

    def start(self, slot: int) -> None:
        """Starts from what is known about other requests."""
        self._requests[slot] = Acceptance(self._pool.chances, self.memory)
        self._guesses[slot] = []

    def verify(self, offers: Mapping[int, int]) -> Mapping[int, int]:
        """Gives rows to the drafts that are most likely kept, as long as that pays."""
        units = self._units(offers)
        _, count = self._best(len(offers), units, self._costs.draft(self._drafted))
        chosen = dict.fromkeys(offers, 0)
        for unit in units[:count]:
            chosen[unit.slot] += unit.num_rows
        return chosen

    def draft(self, slots: Collection[int]) -> int:
        """Chooses the level with the best expected rate; the largest one, where a probe is due."""
        most = self.levels[-1]
        dearest = self._costs.draft(most) - self._costs.draft(self.levels[0])
        best = self._best_level(slots) if dearest > 0 else most
        extra = self._costs.draft(most) - self._costs.draft(best)
        earned = self.probe_share * self._costs.run(self.sizes[0])
        self._allowance = min(self._allowance + earned, dearest)  # saves up for one probe
        if extra <= self._allowance:
            self._allowance -= extra
            best = most
        self._drafted = best
        return best

    def observe(
        self, slot: int, kept: Sequence[int], drafts: Sequence[int], parents: Sequence[int] | None
    ) -> None:
        """Tells the guesses that were made before from those that came true."""
        for token in kept:
            alive = []
            for guess in self._guesses[slot]:
                depth, is_right = guess.depth, guess.follow(token)
                if is_right is not None:
                    self._requests[slot].add(depth, is_right)
                    self._pool.add(depth, is_right)
                if is_right:
                    alive.append(guess)
            self._guesses[slot] = alive
        if drafts:
            self._guesses[slot].append(Guess(drafts, parents))

    def clock(self, num_rows: int, num_drafts: int, seconds: float) -> None:
        """Keeps the measured costs current."""
        if self.is_measured:
            self._costs.observe(num_rows, num_drafts, seconds)

    @property
    def _costs(self) -> "Meter":
        assert self.costs is not None, "measure first"
        return self.costs

    def _best_level(self, slots: Collection[int]) -> int:
        rates = {}
        for level in self.levels:
            units = self._units(dict.fromkeys(slots, level))
            rates[level], _ = self._best(len(slots), units, self._costs.draft(level))
        return max(self.levels, key=rates.__getitem__)  # of equals the fewest

    def _units(self, offers: Mapping[int, int]) -> list["_Unit"]:
        """Lists what can be verified for itself, best first: a draft of a chain, a whole tree."""
        units = []
        for slot, count in offers.items():
            survival = self._requests[slot].survival
            if not self.is_tree:
                units += [_Unit(survival[i], 1, slot) for i in range(count)]
            elif count:
                units.append(_Unit(sum(survival), count, slot))
        return sorted(units, key=lambda unit: -unit.tokens)  # stable: a chain stays in order

    def _best(self, num_requests: int, units: Sequence["_Unit"], draft: float) -> tuple[float, int]:
        """Returns the best rate and the number of units that it takes; of equals the fewest."""
        tokens = list(accumulate((unit.tokens for unit in units), initial=float(num_requests)))
        rows = list(accumulate((unit.num_rows for unit in units), initial=num_requests))
        best, count, slowest = 0.0, 0, 0.0
        for size in self.sizes:
            fitting = bisect.bisect_right(rows, size) - 1 if size > self.sizes[0] else 0
            slowest = max(slowest, self._costs.run(size))  # more rows never take less: noise
            rate = tokens[fitting] / (slowest + draft)
            if rate > best:
                best, count = rate, fitting
        return best, count


class _Unit(NamedTuple):
    tokens: float
    num_rows: int
    slot: int
