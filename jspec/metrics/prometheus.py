"""Prometheus counters of speculation, under the names that dashboards know."""

from collections.abc import Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

from prometheus_client import REGISTRY, CollectorRegistry, Counter

from jspec._checks import check_at_least
from jspec.metrics.stats import SpecDecodingStats, checked

_TOTALS = (
    ("vllm:spec_decode_num_drafts", "Number of spec decoding drafts."),
    ("vllm:spec_decode_num_draft_tokens", "Number of draft tokens."),
    ("vllm:spec_decode_num_accepted_tokens", "Number of accepted tokens."),
)
_PER_POS = (
    "vllm:spec_decode_num_accepted_tokens_per_pos",
    "Accepted tokens per draft position.",
)

_registered: WeakKeyDictionary[CollectorRegistry, dict[tuple, Any]] = WeakKeyDictionary()
"""Our counters by registry, class, name and labels: Prometheus refuses to register a name twice."""


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
          KeyError: no such engine.
          TypeError, ValueError: `stats` has fewer positions than are exported, or as
            `SpecDecodingStats.add`. Nothing is counted then.
        """
        if not self._enabled:
            return
        if engine_idx not in self._engines:
            raise KeyError(
                f"SpecDecodingProm: `engine_idx` is {engine_idx!r}, wanted one of "
                f"{list(self._engines)}. Name every engine in per_engine_labelvalues."
            )
        stats = checked("SpecDecodingProm.observe", stats)
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
        key = (self._counter_cls, name, *labelnames)
        try:
            ours[key] = self._counter_cls(name, documentation, labelnames=labelnames, **where)
        except ValueError as error:  # the name is taken
            if key not in ours:
                raise ValueError(
                    f"SpecDecodingProm: `registry` refuses {name!r} with labels {key[2:]}: "
                    f"{error}. Pass the labelnames of the instance that is there already, or "
                    "registry=prometheus_client.CollectorRegistry()."
                ) from error
        return ours[key]
