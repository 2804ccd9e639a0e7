"""Draft length policies: all drafts, by batch size, or the highest expected throughput.

`ByThroughput` estimates the acceptance of each draft from the outcomes of earlier ones, verified or
not, and the latency of each shape from measured passes. Policies run on the host, between steps.
"""

import bisect
from collections.abc import Collection, Mapping, Sequence
from itertools import accumulate
from typing import NamedTuple

from jspec.runtime.cost_model import Acceptance, Calibration, LatencyModel, PendingDraft
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

_PRIOR_RATE = 0.3
"""Acceptance rate that a drafter is assumed to have before the first outcome."""
_MARGIN = 0.05
"""Least expected gain for which drafts are verified: less is within the error of estimates."""
_POOL_MEMORY = 40.0
"""Outcomes that the estimate for new requests remembers."""


class Policy:
    """Chooses how many tokens are drafted and verified; verifies every draft unless overridden.

    Attributes:
      levels: every number of drafts that a step may make, ascending.
    """

    levels: tuple[int, ...]

    @property
    def has_costs(self) -> bool:
        """False until `take_costs` was called, where the policy depends on latencies."""
        return True

    def take_costs(self, passes: Mapping[int, float], drafts: Mapping[int, float]) -> None:
        """Sets the latencies to start from; see `LatencyModel`."""

    def start(self, slot: int) -> None:
        """Resets the estimates of a slot for a new request."""

    def verify(self, offers: Mapping[int, int]) -> Mapping[int, int]:
        """Chooses how many drafts of each request are verified in a step that reads no prompt.

        Args:
          offers: by slot: available drafts.
        """
        return offers

    def draft(self, slots: Collection[int]) -> int:
        """Chooses how many tokens are drafted for the next step."""
        raise NotImplementedError

    def observe(
        self, slot: int, kept: Sequence[int], drafts: Sequence[int], parents: Sequence[int] | None
    ) -> None:
        """Updates the estimates with the result of a step for a request.

        Args:
          slot: the request's.
          kept: its new tokens; none after a stop token.
          drafts: drafts of the tokens after them.
          parents: where these form a tree: index of each draft's parent.
        """

    def clock(self, num_rows: int, num_drafts: int, seconds: float) -> None:
        """Updates the estimates with the latency of a step that read no prompt."""


def policy(
    drafting: Drafting | None,
    *,
    num_drafts: int,
    max_requests: int,
    tree_depth: int | None = None,
) -> Policy:
    """Makes the policy for `jspec.generate(drafting=...)`; None is `Adaptive()`.

    Args:
      drafting: see `Drafting`.
      num_drafts: most drafts of a request (K).
      max_requests: requests that run at the same time.
      tree_depth: where drafts form trees: most of them that can be kept.

    Raises:
      TypeError: `drafting` is of another type. ValueError: the drafter does not support it.
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


class ByBatchSize(Policy):
    """Drafts by the number of running requests, and verifies every draft.

    Args:
      table: drafts for 1, 2, ... requests.
    """

    def __init__(self, table: Sequence[int]):
        self.table = table
        self.levels = tuple(sorted(set(table)))

    def draft(self, slots: Collection[int]) -> int:
        """See `Policy`."""
        return self.table[len(slots) - 1]


class ByThroughput(Policy):
    """Maximises the ratio of expected tokens to expected latency.

    Args:
      drafting: the options.
      num_drafts, max_requests, tree_depth: as `policy`.

    Attributes:
      levels: see `Policy`.
      sizes: numbers of rows of steps that read no prompt, ascending; the first is without drafts.
      costs: latencies; None until they are measured.
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
        self._pool = Acceptance([_PRIOR_RATE] * (tree_depth or num_drafts), _POOL_MEMORY)
        self._requests: dict[int, Acceptance] = {}
        self._pending: dict[int, list[PendingDraft]] = {}
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
        """See `Policy`."""
        self.costs = LatencyModel(passes, drafts)
        if self.probe_share:  # so that the first step makes all drafts
            self._allowance = self.costs.draft(self.levels[-1]) - self.costs.draft(self.levels[0])

    def start(self, slot: int) -> None:
        """Starts from the estimate over all requests."""
        self._requests[slot] = Acceptance(self._pool.rates, self.memory)
        self._pending[slot] = []

    def verify(self, offers: Mapping[int, int]) -> Mapping[int, int]:
        """Verifies the most probable drafts, as many as maximise the expected throughput."""
        chosen = dict.fromkeys(offers, 0)
        self._expected = dict.fromkeys(offers, 0.0)
        candidates = self._candidates(offers)
        if not candidates:
            return chosen
        _, count = self._best(len(offers), candidates, self._costs.draft(self._drafted))
        for candidate in candidates[:count]:
            chosen[candidate.slot] += candidate.num_rows
            self._expected[candidate.slot] += candidate.tokens
        return chosen

    def draft(self, slots: Collection[int]) -> int:
        """Chooses the level of the highest expected throughput, or the last one for a probe."""
        most = self.levels[-1]
        most_extra = self._costs.draft(most) - self._costs.draft(self.levels[0])
        best = self._best_level(slots) if most_extra > 0 else most
        extra = self._costs.draft(most) - self._costs.draft(best)
        increment = self.probe_share * self._costs.run(self.sizes[0])
        self._allowance = min(self._allowance + increment, most_extra)  # at most one probe
        if extra <= self._allowance:
            self._allowance -= extra
            best = most
        self._drafted = best
        return best

    def observe(
        self, slot: int, kept: Sequence[int], drafts: Sequence[int], parents: Sequence[int] | None
    ) -> None:
        """Compares earlier drafts with the new tokens, verified or not; see `Policy`."""
        expected = self._expected.pop(slot, 0.0)
        if expected and kept:
            self._calibration.add(expected, len(kept) - 1)
        for token in kept:
            matching = []
            for pending in self._pending[slot]:
                depth, is_match = pending.depth, pending.follow(token)
                if is_match is not None:
                    self._requests[slot].add(depth, is_match)
                    self._pool.add(depth, is_match)
                if is_match:
                    matching.append(pending)
            self._pending[slot] = matching
        if drafts:
            self._pending[slot].append(PendingDraft(drafts, parents))

    def clock(self, num_rows: int, num_drafts: int, seconds: float) -> None:
        """Updates latencies that were measured; those of the user stay."""
        if self.is_measured:
            self._costs.observe(num_rows, num_drafts, seconds)

    @property
    def _costs(self) -> LatencyModel:
        assert self.costs is not None, "call take_costs first"
        return self.costs

    def _best_level(self, slots: Collection[int]) -> int:
        rates = {}
        for level in self.levels:
            candidates = self._candidates(dict.fromkeys(slots, level))
            rates[level], _ = self._best(len(slots), candidates, self._costs.draft(level))
        return max(self.levels, key=rates.__getitem__)  # the fewest on ties

    def _candidates(self, offers: Mapping[int, int]) -> list["_Candidate"]:
        """Lists what can be verified, by descending expected tokens: drafts, or whole trees."""
        candidates = []
        for slot, count in offers.items():
            survival = self._requests[slot].survival
            if not self.is_tree:
                candidates += [_Candidate(survival[i], 1, slot) for i in range(count)]
            elif count:
                candidates.append(_Candidate(sum(survival), count, slot))
        return sorted(candidates, key=lambda c: -c.tokens)  # stable: a chain stays in order

    def _best(
        self, num_requests: int, candidates: Sequence["_Candidate"], draft: float
    ) -> tuple[float, int]:
        """Returns the best throughput and how many candidates give it, the fewest on ties."""
        factor = self._calibration.factor
        tokens = list(accumulate((factor * c.tokens for c in candidates), initial=num_requests))
        rows = list(accumulate((c.num_rows for c in candidates), initial=num_requests))
        slowest = self._costs.run(self.sizes[0])
        best, count = num_requests / (slowest + draft), 0
        for size in self.sizes[1:]:
            fitting = bisect.bisect_right(rows, size) - 1
            slowest = max(slowest, self._costs.run(size))  # a lower one is noise
            rate = tokens[fitting] / (slowest + draft) / (1 + _MARGIN)
            if rate > best:
                best, count = rate, fitting
        return best, count


class _Candidate(NamedTuple):
    tokens: float
    num_rows: int
    slot: int
