"""The log line: drafts and accepted tokens since the line before."""

import logging
import time
from collections.abc import Callable
from typing import Any

from jspec.metrics.stats import SpecDecodingStats, checked

logger = logging.getLogger(__name__)


class SpecDecodingLogging:
    """Sums steps into a window and writes it as one line of the log.

    Args:
      clock: returns seconds, never backwards.

    Attributes:
      window: counts since the last line; None where nothing was observed.
      last_log_time: clock reading that throughputs count from, in seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self._clock = clock
        self.reset()

    def reset(self) -> None:
        """Empties the window and restarts the clock."""
        self.window: SpecDecodingStats | None = None
        self.last_log_time = self._clock()

    def observe(self, stats: SpecDecodingStats) -> None:
        """Adds the counts of a step; several engines may share one window.

        Raises:
          TypeError, ValueError: `stats` has another number of positions than the window, or as
            `SpecDecodingStats.add`; nothing changes.
        """
        if self.window is None:
            self.window = checked("SpecDecodingLogging.observe", stats)
        else:
            self.window.add(stats)

    def throughput(self) -> tuple[float, float]:
        """Returns (accepted, drafted) tokens per second since the last line.

        Both are 0.0 where nothing was observed, and within one tick of the clock.
        """
        elapsed = self._clock() - self.last_log_time
        if self.window is None or elapsed <= 0:
            return 0.0, 0.0
        return self.window.num_accepted_tokens / elapsed, self.window.num_draft_tokens / elapsed

    def log(self, log_fn: Callable[..., Any] = logger.info) -> None:
        """Writes the window as one line and starts the next; nothing observed, nothing written.

        Args:
          log_fn: called once as `log_fn(format, *args)`. A ratio over zero drafts or zero draft
            tokens reads "n/a".
        """
        window = self.window
        if window is None:
            return
        accepted, drafted = self.throughput()
        length, length_format = window.mean_acceptance_length, "%.2f"
        rate, rate_format = window.acceptance_rate * 100, "%.1f"
        per_pos = [f"{share:.3f}" for share in window.acceptance_rate_per_pos]
        if not window.num_drafts:
            length, length_format = "n/a", "%s"
            per_pos = ["n/a"] * len(per_pos)
        if not window.num_draft_tokens:
            rate, rate_format = "n/a", "%s"
        log_fn(
            f"SpecDecoding metrics: Mean acceptance length: {length_format}, "
            "Accepted throughput: %.2f tokens/s, Drafted throughput: %.2f tokens/s, "
            "Accepted: %d tokens, Drafted: %d tokens, Per-position acceptance rate: %s, "
            f"Avg Draft acceptance rate: {rate_format}%%",
            length,
            accepted,
            drafted,
            window.num_accepted_tokens,
            window.num_draft_tokens,
            ", ".join(per_pos),
            rate,
        )
        self.reset()
