"""Online estimates of draft acceptance and of step latency."""

import statistics
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from jspec.axes import PAD_TOKEN

_PRIOR_OUTCOMES = 2.0
"""Weight of the prior acceptance rate, in outcomes."""
_PRIOR_TOKENS = 4.0
"""Weight of a calibration factor of 1, in drafts."""
_CALIBRATION_MEMORY = 30.0
"""Verifications that the calibration remembers; older ones decay."""
_WINDOW = 30
"""Newest steps that the latency estimate is made from."""
_ENOUGH = 3
"""Fewest measurements whose median one outlier does not change much."""


@dataclass
class Guess:
    """A draft that is compared with the request's next tokens, whether it was verified or not.

    Attributes:
      tokens: the draft.
      parents: which token each one follows, PAD = the root; None = the one before.
      at: the deepest token that was right so far.
      depth: how many were.
    """

    tokens: Sequence[int]
    parents: Sequence[int] | None = None
    at: int = PAD_TOKEN
    depth: int = 0

    def follow(self, token: int) -> bool | None:
        """Returns whether the next token was drafted; None where the draft has ended before it."""
        if self.parents is None:
            children = list(range(self.at + 1, len(self.tokens))[:1])
        else:
            children = [i for i, parent in enumerate(self.parents) if parent == self.at]
        if not children:
            return None
        for child in children:
            if self.tokens[child] == token:
                self.at, self.depth = child, self.depth + 1
                return True
        return False


@dataclass
class Acceptance:
    """Estimates the acceptance rate of each draft position, given that those before it were right.

    Attributes:
      prior: rates before the first outcome.
      memory: outcomes of a position that count; older ones decay.
    """

    prior: Sequence[float]
    memory: float
    _right: list[float] = field(init=False)
    _seen: list[float] = field(init=False)

    def __post_init__(self):
        self._right = [_PRIOR_OUTCOMES * chance for chance in self.prior]
        self._seen = [_PRIOR_OUTCOMES] * len(self.prior)
        self._update()

    def add(self, position: int, is_right: bool) -> None:
        """Adds an outcome."""
        keep = 1 - 1 / self.memory
        self._right[position] = keep * self._right[position] + is_right
        self._seen[position] = keep * self._seen[position] + 1
        self._update()

    def _update(self) -> None:
        self.chances = [r / s for r, s in zip(self._right, self._seen, strict=True)]
        self.survival = list(accumulate(self.chances, lambda a, b: a * b))


class Calibration:
    """Corrects the expected number of accepted drafts by how many of the verified ones were.

    Drafts are verified where their estimates are high, so that these are too high on average.
    """

    def __init__(self):
        self._expected = self._accepted = _PRIOR_TOKENS

    @property
    def factor(self) -> float:
        """Returns accepted by expected drafts, at most 1."""
        return min(1.0, self._accepted / self._expected)

    def add(self, expected: float, accepted: int) -> None:
        """Adds the drafts that a request had verified in a step."""
        keep = 1 - 1 / _CALIBRATION_MEMORY
        self._expected = keep * self._expected + expected
        self._accepted = keep * self._accepted + accepted


class LatencyModel:
    """Estimates latencies: as measured at first, times the ratio that later steps had to that.

    A shape that has not run recently gets the median ratio of the others.

    Args:
      passes: by number of rows: a pass without drafting.
      drafts: by number of drafts: what drafting takes on top.
    """

    def __init__(self, passes: Mapping[int, float], drafts: Mapping[int, float]):
        self._passes = dict(passes)
        ascending = sorted(drafts)
        monotone = accumulate((drafts[count] for count in ascending), max)  # else it is noise
        self._drafts = dict(zip(ascending, monotone, strict=True))
        self._latest: deque[tuple[int, float]] = deque(maxlen=_WINDOW)  # (rows, relative time)
        self._drift = 1.0
        self._relative = dict.fromkeys(self._passes, 1.0)

    def run(self, num_rows: int) -> float:
        """Estimates a pass without drafting."""
        return self._passes[num_rows] * self._relative[num_rows]

    def draft(self, num_drafts: int) -> float:
        """Estimates drafting."""
        return self._drafts[num_drafts] * self._drift

    def observe(self, num_rows: int, num_drafts: int, seconds: float) -> None:
        """Adds the latency of a step."""
        expected = self._passes[num_rows] + self._drafts[num_drafts]
        self._latest.append((num_rows, seconds / expected))
        if len(self._latest) < _ENOUGH:
            return
        self._drift = statistics.median(ratio for _, ratio in self._latest)
        for rows in self._passes:
            own = [ratio for at, ratio in self._latest if at == rows]
            self._relative[rows] = statistics.median(own) if len(own) >= _ENOUGH else self._drift
