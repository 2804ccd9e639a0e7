"""What speculation earned: counts of a step, a log line, Prometheus counters, histories.

Source: vLLM v1/spec_decode/metrics.py.
"""

import itertools
import logging
import operator
import time
from collections import defaultdict, deque
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, SupportsIndex
from weakref import WeakKeyDictionary

from prometheus_client import REGISTRY, CollectorRegistry, Counter

from jspec.config import check_at_least

_TOTALS = (
    ("vllm:spec_decode_num_drafts", "Number of spec decoding drafts."),
    ("vllm:spec_decode_num_draft_tokens", "Number of draft tokens."),
    ("vllm:spec_decode_num_accepted_tokens", "Number of accepted tokens."),
)
_PER_POS = (
    "vllm:spec_decode_num_accepted_tokens_per_pos",
    "Accepted tokens per draft position.",
)

logger = logging.getLogger(__name__)


def _ratio(numerator: int, denominator: int) -> float:
    return numerator / denominator if denominator else 0.0


@dataclass
class SpecDecodingStats:
    """Counts drafts and accepted tokens, for one step or a window of steps.

    A draft is what one request had verified in one step; callers leave out requests without one.

    Attributes:
      num_spec_tokens: most tokens a draft may have (K).
      num_drafts: drafts observed.
      num_draft_tokens: tokens in them.
      num_accepted_tokens: tokens of them that the target kept; bonus tokens do not count.
      num_accepted_tokens_per_pos: entry i: drafts whose first i + 1 tokens were all kept [K];
        zeros where it is left out.
    """

    num_spec_tokens: int
    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_accepted_tokens_per_pos: list[int] = field(default_factory=list)

    def __post_init__(self):
        check_at_least("SpecDecodingStats", 0, num_spec_tokens=self.num_spec_tokens)
        per_pos = self.num_accepted_tokens_per_pos or [0] * self.num_spec_tokens
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

        Args:
          num_draft_tokens: tokens that were verified.
          num_accepted_tokens: tokens that were kept, the bonus token not included.

        Raises:
          TypeError: a count is no integer.
          ValueError: a count is negative, or more tokens were accepted than drafted or than K.

        Example:
          >>> stats = SpecDecodingStats.new(3)
          >>> stats.observe_draft(3, 2)
          >>> stats.num_accepted_tokens_per_pos, stats.mean_acceptance_length
          ([1, 1, 0], 3.0)
        """
        drafted = operator.index(num_draft_tokens)
        accepted = operator.index(num_accepted_tokens)
        if not 0 <= accepted <= min(drafted, self.num_spec_tokens):
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
          ValueError: `other` has another number of positions; nothing changes.
        """
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
        """Tokens that a draft yields on average, the bonus token included; 0.0 without drafts."""
        return 1 + _ratio(self.num_accepted_tokens, self.num_drafts) if self.num_drafts else 0.0

    @property
    def acceptance_rate(self) -> float:
        """Share of draft tokens that were kept, 0 to 1; 0.0 without draft tokens."""
        return _ratio(self.num_accepted_tokens, self.num_draft_tokens)

    @property
    def acceptance_rate_per_pos(self) -> list[float]:
        """Share of drafts kept up to and including each position [K]; 0.0 without drafts."""
        return [_ratio(count, self.num_drafts) for count in self.num_accepted_tokens_per_pos]

    @property
    def acceptance_histogram(self) -> list[int]:
        """Number of drafts of which exactly 0, 1, ..., K tokens were kept [K + 1].

        In: 4 drafts, per position [3 1 0]. Out: [1 2 1 0].
        """
        reached = [self.num_drafts, *self.num_accepted_tokens_per_pos, 0]
        return [here - further for here, further in itertools.pairwise(reached)]


class AcceptanceHistory:
    """Remembers how many tokens each draft of each request got, in order.

    A history lives from a request's first draft until `pop`; the totals stay.

    Attributes:
      total: counts over all requests, popped ones included.

    Args:
      num_spec_tokens: most tokens a draft may have (K).
      max_steps: drafts kept per request, the newest ones; None keeps all.

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
        self._steps: dict[Hashable, deque[tuple[int, int]]] = defaultdict(
            lambda: deque(maxlen=max_steps)
        )

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
        self.total.observe_draft(num_draft_tokens, num_accepted_tokens)
        self._steps[request_id].append(
            (operator.index(num_draft_tokens), operator.index(num_accepted_tokens))
        )

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


class SpecDecodingLogging:
    """Sums steps into a window and writes it as one line of the log.

    Attributes:
      window: counts since the last line; None where nothing was observed.
      last_log_time: clock reading that throughputs count from, in seconds.

    Args:
      clock: returns seconds, never backwards.
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
          ValueError: `stats` has another number of positions than the window; nothing changes.
        """
        if self.window is None:
            self.window = SpecDecodingStats.new(stats.num_spec_tokens)
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


_registered: WeakKeyDictionary[CollectorRegistry, dict[tuple[str, ...], Any]] = WeakKeyDictionary()
"""Our counters by registry and name: Prometheus refuses to register a name twice."""


class SpecDecodingProm:
    """Exports the counts of each engine as Prometheus counters.

    The names are vLLM's, so its dashboards work unchanged. Two instances on one registry share
    their counters.

    Args:
      num_spec_tokens: K, positions to export; None turns the instance off: it registers nothing.
        A config with `num_drafts` or `num_speculative_tokens` will do.
      labelnames: labels of every counter.
      per_engine_labelvalues: engine index to the values of `labelnames`.
      registry: where to register; None is the default registry of the process.

    Raises:
      ValueError: K is below 1, an engine has too few or too many label values, or another library
        or other label names hold a counter's name.

    Example:
      >>> registry = CollectorRegistry()
      >>> prom = SpecDecodingProm(3, ["engine"], {0: ["0"]}, registry=registry)
      >>> prom.observe(SpecDecodingStats(3, 1, 3, 2, [1, 1, 0]), engine_idx=0)
      >>> registry.get_sample_value("vllm:spec_decode_num_drafts_total", {"engine": "0"})
      1.0
    """

    _counter_cls: Any = Counter  # replaced where metrics leave the process another way, as in Ray

    def __init__(
        self,
        num_spec_tokens: Any,
        labelnames: Sequence[str],
        per_engine_labelvalues: Mapping[int, Sequence[object]],
        *,
        registry: CollectorRegistry | None = None,
    ):
        self._enabled = num_spec_tokens is not None
        if not self._enabled:
            return
        for name in ("num_drafts", "num_speculative_tokens"):
            num_spec_tokens = getattr(num_spec_tokens, name, num_spec_tokens)
        check_at_least("SpecDecodingProm", 1, num_spec_tokens=num_spec_tokens)
        for engine, values in per_engine_labelvalues.items():
            if len(values) != len(labelnames):
                raise ValueError(
                    f"SpecDecodingProm: `per_engine_labelvalues[{engine!r}]` is {values!r}, wanted "
                    f"{len(labelnames)} values. Pass one for each of {list(labelnames)}."
                )
        totals = [self._counter(*total, labelnames, registry) for total in _TOTALS]
        per_pos = self._counter(*_PER_POS, [*labelnames, "position"], registry)
        # A labelled counter exports nothing before its first use: name every child now, at 0.
        self._engines = {
            engine: [total.labels(*values) for total in totals]
            + [per_pos.labels(*values, str(position)) for position in range(num_spec_tokens)]
            for engine, values in per_engine_labelvalues.items()
        }

    def observe(self, stats: SpecDecodingStats, engine_idx: int = 0) -> None:
        """Adds the counts of a step to an engine's counters.

        Args:
          stats: positions past the exported ones are ignored.
          engine_idx: a key of `per_engine_labelvalues`.

        Raises:
          KeyError: no such engine. ValueError: `stats` has fewer positions than are exported.
            Nothing is counted then.
        """
        if not self._enabled:
            return
        if engine_idx not in self._engines:
            raise KeyError(
                f"SpecDecodingProm: `engine_idx` is {engine_idx!r}, wanted one of "
                f"{list(self._engines)}. Name every engine in per_engine_labelvalues."
            )
        counters = self._engines[engine_idx]
        counts = [
            stats.num_drafts,
            stats.num_draft_tokens,
            stats.num_accepted_tokens,
            *stats.num_accepted_tokens_per_pos,
        ]
        if len(counts) < len(counters):
            wanted = len(counters) - len(_TOTALS)
            raise ValueError(
                f"SpecDecodingProm: `stats` has num_spec_tokens {stats.num_spec_tokens}, wanted "
                f"{wanted} or more. Build it with SpecDecodingStats.new({wanted})."
            )
        for counter, count in zip(counters, counts, strict=False):
            counter.inc(count)

    def _counter(
        self,
        name: str,
        documentation: str,
        labelnames: Sequence[str],
        registry: CollectorRegistry | None,
    ) -> Any:
        where = {} if registry is None else {"registry": registry}
        ours = _registered.setdefault(registry or REGISTRY, {})
        key = (name, *labelnames)
        try:
            ours[key] = self._counter_cls(name, documentation, labelnames=labelnames, **where)
        except ValueError as error:  # the name is taken
            if key not in ours:
                raise ValueError(
                    f"SpecDecodingProm: `registry` refuses {name!r} with labels {key[1:]}: "
                    f"{error}. Pass the labelnames of the instance that is there already, or "
                    "registry=prometheus_client.CollectorRegistry()."
                ) from error
        return ours[key]
