"""Options of draft length; `jspec.runtime.policies` implements them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias


@dataclass(frozen=True)
class BatchSizeSchedule:
    """Drafts fewer tokens where more requests run together.

    Attributes:
      ranges: `(first batch size, last batch size, num_drafts)` of each range, ascending from 1 on.
        Sizes between two ranges and after the last keep the number before them.

    Raises:
      ValueError: the ranges have another form or order.

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
    """Latencies, in any unit.

    Attributes:
      passes: by number of rows: of the target and of a drafter that makes no drafts.
      drafts: by number of drafts: what drafting adds.

    Raises:
      ValueError: a pass is not above 0, or a draft is negative.
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
    """Drafts and verifies the number of tokens of the highest expected throughput.

    Attributes:
      levels: numbers of drafts to choose from, ascending; by default none, a third and all. Each
        is an executable of its own. A tree is drafted as a whole: its levels are 0 and all nodes.
      costs: latencies; None = measured by the loop, before the first step and in every step.
      memory: about how many outcomes of each draft position the estimate remembers.
      probe_share: share of the time for drafts whose expected gain is negative, so that a change
        in acceptance is noticed.

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


Drafting: TypeAlias = Adaptive | BatchSizeSchedule | Literal["fixed"]
"""What `jspec.generate(drafting=...)` takes: "fixed" drafts and verifies `num_drafts` tokens in
every step."""
