"""Draft length policies: all drafts, by batch size, or the highest expected throughput.

`Adaptive` estimates the acceptance of each draft from the outcomes of earlier ones, verified or
not, and the latency of each shape from measured passes. All of it runs on the host, between steps.
"""

import bisect
from collections.abc import Collection, Mapping, Sequence
from itertools import accumulate
from typing import NamedTuple, Protocol

from jspec.runtime.cost_model import Acceptance, Calibration, Guess, LatencyModel
from jspec.runtime.draft_length import Adaptive, BatchSizeSchedule, Costs, Drafting

__all__ = [
    "Adaptive",
    "BatchSizeSchedule",
    "ByBatchSize",
    "ByThroughput",
    "Costs",
    "Drafting",
    "Policy",
    "policy",
]

_FIRST_CHANCE = 0.4
"""Acceptance rate of a drafter about which nothing is known yet."""
_MARGIN = 0.05
"""Least expected gain for which drafts are verified: less is within the error of estimates."""
_POOL_MEMORY = 40.0
"""Outcomes that the estimate for new requests remembers."""


class Policy(Protocol):
    """What the scheduler asks how much to draft and to verify.

    Attributes:
      levels: every number of drafts that a step may make, ascending.
      has_costs: False until it has the latencies of passes that it chooses by.
    """

    levels: tuple[int, ...]

    @property
    def has_costs(self) -> bool:
        """See above."""
        ...

    def take_costs(self, passes: Mapping[int, float], drafts: Mapping[int, float]) -> None:
        """Takes over what was measured; see `LatencyModel`."""

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
        """Takes the result of a step for a request.

        Args:
          slot: the request's.
          kept: the tokens that it got; none after a stop token.
          drafts: drafts of the tokens after them.
          parents: where these form a tree: which of them each one follows.
        """

    def clock(self, num_rows: int, num_drafts: int, seconds: float) -> None:
        """Takes over how long a step without prompts took."""


def policy(
    drafting: Drafting | None,
    *,
    num_drafts: int,
    max_requests: int,
    tree_depth: int | None = None,
) -> Policy:
    """Makes the policy that users ask for; None is `Adaptive()`.

    Args:
      drafting: what the user passed.
      num_drafts: most drafts of a request (K).
      max_requests: requests that run at the same time.
      tree_depth: where drafts form trees: most of them that can be kept.

    Raises:
      TypeError: `drafting` is none of these. ValueError: it does not fit the drafter.
    """
    if drafting is None:
        drafting = Adaptive()
    if isinstance(drafting, str) and drafting == "fixed":
        return ByBatchSize((num_drafts,) * max_requests)
    if isinstance(drafting, BatchSizeSchedule):
        return ByBatchSize(drafting.table(max_requests, num_drafts))
    if isinstance(drafting, Adaptive):
        return ByThroughput(
            drafting, num_drafts=num_drafts, max_requests=max_requests, tree_depth=tree_depth
        )
    raise TypeError(
        f"generate: `drafting` is {drafting!r}, wanted a jspec.Adaptive, a "
        "jspec.BatchSizeSchedule, 'fixed' or None. Pass drafting='fixed' to verify num_drafts "
        "tokens in every step, or leave it out for jspec.Adaptive()."
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

    def take_costs(self, passes: Mapping[int, float], drafts: Mapping[int, float]) -> None:
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


class ByThroughput:
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
            levels = (0, num_drafts) if is_tree else tuple(sorted({0, num_drafts // 3, num_drafts}))
        if levels[-1] > num_drafts or (is_tree and set(levels) - {0, num_drafts}):
            raise ValueError(
                f"Adaptive: `levels` is {levels}, but this drafter drafts "
                f"{'a tree of ' if is_tree else 'at most '}{num_drafts} tokens"
                f"{', all of it or none' if is_tree else ''}. Lower the levels, or leave them "
                "out."
            )
        self.levels: tuple[int, ...] = levels
        self.sizes = [max_requests * (1 + level) for level in sorted({0, *levels})]
        self.is_tree = is_tree
        self.memory = drafting.memory
        self.probe_share = drafting.probe_share
        self.costs: LatencyModel | None = None
        self.is_measured = drafting.costs is None
        if drafting.costs is not None:
            missing = set(self.sizes) - set(drafting.costs.passes)
            if missing or set(self.levels) - set(drafting.costs.drafts):
                raise ValueError(
                    f"Adaptive: `costs` has passes of {sorted(drafting.costs.passes)} rows and "
                    f"{sorted(drafting.costs.drafts)} drafts, wanted {self.sizes} and "
                    f"{list(self.levels)}. Add what is missing, or leave costs out to measure."
                )
        self._pool = Acceptance([_FIRST_CHANCE] * (tree_depth or num_drafts), _POOL_MEMORY)
        self._requests: dict[int, Acceptance] = {}
        self._guesses: dict[int, list[Guess]] = {}
        self._calibration = Calibration()
        self._expected: dict[int, float] = {}
        self._allowance = 0.0
        self._drafted = self.levels[-1]
        if drafting.costs is not None:
            self.take_costs(drafting.costs.passes, drafting.costs.drafts)

    @property
    def has_costs(self) -> bool:
        """See `Policy`."""
        return self.costs is not None

    def take_costs(self, passes: Mapping[int, float], drafts: Mapping[int, float]) -> None:
        """Starts with costs, those that the loop measured or the user's."""
        self.costs = LatencyModel(passes, drafts)
        if self.probe_share:  # the first step makes all drafts
            self._allowance = self.costs.draft(self.levels[-1]) - self.costs.draft(self.levels[0])

    def start(self, slot: int) -> None:
        """Starts from what is known about other requests."""
        self._requests[slot] = Acceptance(self._pool.chances, self.memory)
        self._guesses[slot] = []

    def verify(self, offers: Mapping[int, int]) -> Mapping[int, int]:
        """Verifies the most likely drafts, as many as give the best expected throughput."""
        chosen = dict.fromkeys(offers, 0)
        self._expected = dict.fromkeys(offers, 0.0)
        units = self._units(offers)
        if not units:
            return chosen
        _, count = self._best(len(offers), units, self._costs.draft(self._drafted))
        for unit in units[:count]:
            chosen[unit.slot] += unit.num_rows
            self._expected[unit.slot] += unit.tokens
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
        """Compares earlier drafts with the new tokens and counts which were right.

        Like every counter, this sees only tokens that the request got.
        """
        expected = self._expected.pop(slot, 0.0)
        if expected and kept:
            self._calibration.add(expected, len(kept) - 1)
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
    def _costs(self) -> "LatencyModel":
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
        factor = self._calibration.factor
        tokens = list(
            accumulate((factor * unit.tokens for unit in units), initial=float(num_requests))
        )
        rows = list(accumulate((unit.num_rows for unit in units), initial=num_requests))
        slowest = self._costs.run(self.sizes[0])
        best, count = num_requests / (slowest + draft), 0
        for size in self.sizes[1:]:
            fitting = bisect.bisect_right(rows, size) - 1
            slowest = max(slowest, self._costs.run(size))  # more rows never take less: noise
            rate = tokens[fitting] / (slowest + draft) / (1 + _MARGIN)
            if rate > best:
                best, count = rate, fitting
        return best, count


class _Unit(NamedTuple):
    tokens: float
    num_rows: int
    slot: int
