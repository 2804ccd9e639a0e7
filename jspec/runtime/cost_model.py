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
_FEWEST = 3
"""Fewest measurements whose median one outlier does not change much."""


@dataclass
class PendingDraft:
    """Drafts of a step that are compared with the request's next tokens, verified or not.

    Attributes:
      tokens: the drafts.
      parents: index of each draft's parent, PAD = the root; None = the draft before.
      at: index of the deepest draft that matched so far.
      depth: how many matched.
    """

    tokens: Sequence[int]
    parents: Sequence[int] | None = None
    at: int = PAD_TOKEN
    depth: int = 0

    def follow(self, token: int) -> bool | None:
        """Returns whether the next token was drafted; None where no draft is left for it."""
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
    """Estimates the acceptance rate of each draft position, given that those before were accepted.

    Attributes:
      prior: rates before the first outcome.
      memory: number of outcomes of a position that count; older ones decay.
      rates: the estimates.
      survival: estimated probability that a position and all before it are accepted.
    """

    prior: Sequence[float]
    memory: float
    _matched: list[float] = field(init=False)
    _seen: list[float] = field(init=False)

    def __post_init__(self):
        self._matched = [_PRIOR_OUTCOMES * rate for rate in self.prior]
        self._seen = [_PRIOR_OUTCOMES] * len(self.prior)
        self._update()

    def add(self, position: int, is_match: bool) -> None:
        """Adds an outcome."""
        keep = 1 - 1 / self.memory
        self._matched[position] = keep * self._matched[position] + is_match
        self._seen[position] = keep * self._seen[position] + 1
        self._update()

    def _update(self) -> None:
        self.rates = [m / s for m, s in zip(self._matched, self._seen, strict=True)]
        self.survival = list(accumulate(self.rates, lambda a, b: a * b))


class Calibration:
    """Corrects the expected number of accepted drafts by the observed one.

    Drafts are verified where their estimated rates are high, so these are too high on average.
    """

    def __init__(self):
        self._expected = self._accepted = _PRIOR_TOKENS

    @property
    def factor(self) -> float:
        """Ratio of accepted to expected drafts, at most 1."""
        return min(1.0, self._accepted / self._expected)

    def add(self, expected: float, accepted: int) -> None:
        """Adds the verified drafts of a request in a step."""
        keep = 1 - 1 / _CALIBRATION_MEMORY
        self._expected = keep * self._expected + expected
        self._accepted = keep * self._accepted + accepted


class LatencyModel:
    """Estimates latencies: the first measurement times the median ratio of later steps to it.

    A shape that has not run recently gets the median ratio of the others.

    Args:
      passes: by number of rows: latency of a pass without drafting.
      drafts: by number of drafts: additional latency of drafting.
    """

    def __init__(self, passes: Mapping[int, float], drafts: Mapping[int, float]):
        self._passes = dict(passes)
        ascending = sorted(drafts)
        monotone = accumulate((drafts[count] for count in ascending), max)  # a decrease is noise
        self._drafts = dict(zip(ascending, monotone, strict=True))
        self._latest: deque[tuple[int, float]] = deque(maxlen=_WINDOW)  # (rows, relative time)
        self._drift = 1.0
        self._relative = dict.fromkeys(self._passes, 1.0)

    def run(self, num_rows: int) -> float:
        """Estimates the latency of a pass without drafting."""
        return self._passes[num_rows] * self._relative[num_rows]

    def draft(self, num_drafts: int) -> float:
        """Estimates the additional latency of drafting."""
        return self._drafts[num_drafts] * self._drift

    def observe(self, num_rows: int, num_drafts: int, seconds: float) -> None:
        """Adds the latency of a step."""
        expected = self._passes[num_rows] + self._drafts[num_drafts]
        self._latest.append((num_rows, seconds / expected))
        if len(self._latest) < _FEWEST:
            return
        self._drift = statistics.median(ratio for _, ratio in self._latest)
        for rows in self._passes:
            own = [ratio for at, ratio in self._latest if at == rows]
            self._relative[rows] = statistics.median(own) if len(own) >= _FEWEST else self._drift
