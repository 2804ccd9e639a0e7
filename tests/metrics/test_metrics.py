"""Metrics: recorded log lines and counters, ratios of nothing, what is refused."""

import re
from collections import Counter

import numpy as np
import prometheus_client
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry

from jspec.metrics import (
    AcceptanceHistory,
    SpecDecodingLogging,
    SpecDecodingProm,
    SpecDecodingStats,
)
from tests.support import recordings
from tests.support.batches import unchecked

LABELS = ["model_name", "engine"]


class Clock:
    def __init__(self):
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def stats_of(num_spec_tokens: int, drafts) -> SpecDecodingStats:
    stats = SpecDecodingStats.new(num_spec_tokens)
    for drafted, accepted in drafts:
        stats.observe_draft(drafted, accepted)
    return stats


def line_of(log: SpecDecodingLogging) -> str:
    lines = []
    log.log(lambda line, *args: lines.append(line % args))
    (line,) = lines
    return line


def samples(registry: CollectorRegistry) -> dict[tuple[str, frozenset], float]:
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in registry.collect()
        for sample in family.samples
        if not sample.name.endswith("_created")
    }


def is_refused(case) -> bool:
    """Whether a draft of the case is recorded as an error, behind which the counts differ."""
    return any(step["error"] for step in case["stats_per_step"])


@recordings.each_document("metrics.json", only=lambda case: not is_refused(case))
def test_counts_log_lines_and_counters_are_the_recorded_ones(case):
    clock, registry = Clock(), CollectorRegistry()
    log = SpecDecodingLogging(clock=clock)
    engines = {engine: ["m", str(engine)] for engine in case["engines"]}
    prom = SpecDecodingProm(case["num_spec_tokens"], LABELS, engines, registry=registry)
    recorded_logs = {entry["after_step"]: entry for entry in case["logs"]}
    assert max(recorded_logs, default=0) < len(case["steps"])
    for index, (step, recorded) in enumerate(
        zip(case["steps"], case["stats_per_step"], strict=True)
    ):
        stats = stats_of(case["num_spec_tokens"], step["observe"])
        assert recorded.pop("error") is None
        assert {name: getattr(stats, name) for name in recorded} == recorded
        log.observe(stats)
        prom.observe(stats, step["engine"])
        if index in recorded_logs:
            entry = recorded_logs[index]
            clock.now += case["elapsed_s"]
            assert entry["error"] is None
            calls, more = [], []
            log.log(lambda line, *args, calls=calls: calls.append((line, args)))
            log.log(lambda *args, more=more: more.append(args))
            ((line, args),) = calls
            assert len(more) == case["log_calls_when_nothing_observed"]
            assert line % args == entry["line"].replace("nan", "n/a")
            for got, want in zip(args, entry["args"], strict=True):
                if want is None:
                    assert got == "n/a"
                elif isinstance(want, str):
                    assert got == want.replace("nan", "n/a")
                else:
                    assert got == pytest.approx(want, rel=1e-12)  # float64
    assert samples(registry) == {
        (name, frozenset(labels.items())): value
        for name, labels, value in case["prometheus_samples"]
    }


@recordings.each_document("metrics.json", only=is_refused)
def test_a_refused_draft_changes_nothing(case):
    """Recorded is an AssertionError after the totals had changed."""
    most = case["num_spec_tokens"]
    for step, recorded in zip(case["steps"], case["stats_per_step"], strict=True):
        stats, kept = SpecDecodingStats.new(most), []
        for drafted, accepted in step["observe"]:
            if accepted > min(drafted, most):
                with pytest.raises(ValueError, match="bonus token"):
                    stats.observe_draft(drafted, accepted)
            else:
                stats.observe_draft(drafted, accepted)
                kept.append((drafted, accepted))
        assert stats == stats_of(most, kept)
        error = None if len(kept) == len(step["observe"]) else "AssertionError"
        assert recorded["error"] == error


@pytest.mark.parametrize(
    "drafted, accepted, error",
    [(2, 3, ValueError), (5, 5, ValueError), (2, -1, ValueError), (-1, -1, ValueError)]
    + [(2.0, 1, TypeError), (2, None, TypeError), (True, 1, TypeError), (2, False, TypeError)]
    + [(float("nan"), 1, TypeError), (2, np.float32(1), TypeError), (2, np.True_, TypeError)]
    + [(np.int64(2), np.int32(3), ValueError), (np.ones(2, int), 1, TypeError)],
)
def test_impossible_counts_are_refused_by_stats_and_history(drafted, accepted, error):
    stats, history = SpecDecodingStats.new(4), AcceptanceHistory(4)
    with unchecked():
        with pytest.raises(error, match="observe_draft: `num_.*Pass"):
            stats.observe_draft(drafted, accepted)
        with pytest.raises(error, match="Pass"):
            history.observe("a", drafted, accepted)
        with pytest.raises(TypeError, match="unhashable"):
            history.observe(["no id"], 1, 1)
    assert stats == history.total == SpecDecodingStats.new(4)
    with pytest.raises(KeyError, match="observe"):
        history.steps("a")


NAN = float("nan")
CONTRADICTIONS = [
    (dict(num_drafts=-1), ValueError, "`num_drafts` is -1"),
    (dict(num_accepted_tokens=-1), ValueError, "`num_accepted_tokens` is -1, wanted 0 or more"),
    (dict(num_accepted_tokens=7), ValueError, "`num_accepted_tokens` is 7, wanted at most"),
    (dict(num_draft_tokens=2.0), TypeError, "`num_draft_tokens` is 2.0, wanted an integer"),
    (dict(num_draft_tokens=NAN), TypeError, "`num_draft_tokens` is nan"),
    (dict(num_drafts=True), TypeError, "`num_drafts` is True"),
    (dict(num_drafts=0), ValueError, "`num_draft_tokens` is 6, wanted 0: num_drafts is 0"),
    (dict(num_accepted_tokens_per_pos=[2, 1]), ValueError, "2 entries, wanted num_spec_tokens = 3"),
    (dict(num_accepted_tokens_per_pos=[2, 1, 1]), ValueError, "a sum of num_accepted_tokens = 3"),
    (
        dict(num_accepted_tokens_per_pos=[1, 2, 0]),
        ValueError,
        r"is \[1, 2, 0\], wanted counts from",
    ),
    (dict(num_accepted_tokens_per_pos=[3, 0, 0]), ValueError, "num_drafts = 2 on that never rise"),
    (dict(num_accepted_tokens_per_pos=[4, -1, 0]), ValueError, r"_per_pos\[1\]` is -1"),
    (dict(num_accepted_tokens_per_pos=[2, 1, 0.0]), TypeError, r"_per_pos\[2\]` is 0.0"),
    (dict(num_spec_tokens=-3), ValueError, "`num_spec_tokens` is -3"),
]


@pytest.mark.parametrize("changes, error, word", CONTRADICTIONS)
def test_every_counter_checks_all_counts_before_it_adds_one(changes, error, word):
    good, bad = stats_of(3, [(3, 2), (3, 1)]), stats_of(3, [(3, 2), (3, 1)])
    for name, value in changes.items():
        setattr(bad, name, value)
    total, empty, log = stats_of(3, [(3, 3)]), SpecDecodingLogging(), SpecDecodingLogging()
    log.observe(good)
    registry = CollectorRegistry()
    prom = SpecDecodingProm(3, LABELS, {0: ["m", "0"]}, registry=registry)
    with unchecked():
        for add in (total.add, empty.observe, log.observe, prom.observe):
            with pytest.raises(error, match=f"^SpecDecoding.*{word}") as raised:
                add(bad)
            assert "\n" not in str(raised.value)
    assert total == stats_of(3, [(3, 3)])
    assert empty.window is None and log.window == good
    assert set(samples(registry).values()) == {0.0}
    for add in (total.add, empty.observe, log.observe, prom.observe):
        add(good)
    assert total.num_accepted_tokens == 6 and sum(samples(registry).values()) == 2 + 6 + 3 + 3


def test_counts_of_numpy_are_counted_as_plain_integers():
    stats, history = SpecDecodingStats.new(3), AcceptanceHistory(3)
    with unchecked():
        stats.observe_draft(np.int64(3), np.uint8(2))
        history.observe("a", np.int32(3), np.int16(2))
        log = SpecDecodingLogging()
        per_pos = np.array([1, 1, 0])
        log.observe(SpecDecodingStats(3, np.int64(1), np.int64(3), np.int64(2), per_pos))
    assert stats == history.total == log.window == SpecDecodingStats(3, 1, 3, 2, [1, 1, 0])
    assert [type(x) for x in (*history.pop("a")[0], log.window.num_drafts)] == [int] * 3


def test_counts_do_not_share_the_list_that_they_were_made_from():
    per_pos = [1, 1, 0]
    stats, other = SpecDecodingStats(3, 1, 3, 2, per_pos), SpecDecodingStats(3, 1, 3, 2, per_pos)
    stats.observe_draft(3, 3)
    stats.add(stats)
    assert stats.num_accepted_tokens_per_pos == [4, 4, 2]
    assert other.num_accepted_tokens_per_pos == per_pos == [1, 1, 0]


def test_the_bonus_token_counts_in_the_mean_length_and_nowhere_else():
    stats = stats_of(3, [(3, 2), (3, 1)])
    assert stats == SpecDecodingStats(3, 2, 6, 3, [2, 1, 0])
    assert stats.acceptance_rate == 0.5
    assert stats.mean_acceptance_length == 2.5
    assert stats.acceptance_rate_per_pos == [1.0, 0.5, 0.0]


def test_a_draft_shorter_than_k_counts_the_positions_it_has():
    assert stats_of(4, [(2, 2)]).num_accepted_tokens_per_pos == [1, 1, 0, 0]


def test_steps_before_a_line_are_summed_and_the_line_empties_the_window():
    clock = Clock()
    log = SpecDecodingLogging(clock=clock)
    log.observe(stats_of(3, [(3, 2)]))
    step = stats_of(3, [(3, 1)])
    log.observe(step)
    clock.now += 2
    assert log.throughput() == (1.5, 3.0)
    assert log.window == SpecDecodingStats(3, 2, 6, 3, [2, 1, 0])
    assert step == SpecDecodingStats(3, 1, 3, 1, [1, 0, 0]), (
        "the caller's counts are not the window"
    )
    assert "Accepted: 3 tokens, Drafted: 6 tokens" in line_of(log)
    assert log.window is None
    assert log.last_log_time == clock.now


@pytest.mark.parametrize("drafts", [[], [(0, 0)], [(2, 1)]])
def test_no_ratio_of_nothing_reaches_the_text(drafts):
    log = SpecDecodingLogging(clock=Clock())  # the clock stands still: both lines in one tick
    for _ in range(2):
        log.log(lambda *args: pytest.fail("nothing was observed"))
        stats = stats_of(2, drafts)
        log.observe(stats)
        assert log.throughput() == (0.0, 0.0)
        line = line_of(log)
        assert not re.search(r"\b(nan|inf)", line)
        assert line.count("n/a") == {0: 4, 1: 1 if drafts == [(0, 0)] else 0}[len(drafts)]
        if not drafts:
            assert stats.mean_acceptance_length == stats.acceptance_rate == 0.0
            assert stats.acceptance_rate_per_pos == [0.0, 0.0]


def test_a_window_refuses_another_number_of_positions():
    log = SpecDecodingLogging()
    log.observe(stats_of(3, [(3, 3)]))
    with pytest.raises(ValueError, match="num_spec_tokens 2, wanted 3"):
        log.observe(stats_of(2, [(2, 1)]))
    assert log.window == stats_of(3, [(3, 3)])


@pytest.mark.parametrize("num_spec_tokens", [-1, 2.5, True])
def test_stats_name_a_bad_number_of_positions(num_spec_tokens):
    with pytest.raises((TypeError, ValueError), match="num_spec_tokens"):
        SpecDecodingStats.new(num_spec_tokens)
    with pytest.raises(ValueError, match="Leave it out"):
        SpecDecodingStats(2, num_accepted_tokens_per_pos=[1, 1, 1])


@given(
    st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)).map(sorted).map(reversed).map(tuple))
)
def test_the_histogram_counts_drafts_by_accepted_tokens(drafts):
    by_length = Counter(accepted for _, accepted in drafts)
    stats = stats_of(5, drafts)
    assert stats.acceptance_histogram == [by_length[a] for a in range(6)]
    assert sum(stats.acceptance_histogram) == stats.num_drafts


def test_a_history_keeps_the_newest_steps_of_a_request_until_it_is_popped():
    history = AcceptanceHistory(3, max_steps=2)
    for accepted in (0, 1, 2):
        history.observe("a", 3, accepted)
    history.observe("b", 2, 2)
    assert history.steps("a") == [(3, 1), (3, 2)]
    assert history.pop("a") == [(3, 1), (3, 2)]
    with pytest.raises(KeyError, match="'b'"):
        history.pop("a")
    assert history.steps("b") == [(2, 2)]
    assert history.total.acceptance_histogram == [1, 1, 2, 0]
    with pytest.raises(ValueError, match="max_steps"):
        AcceptanceHistory(3, max_steps=0)


def test_two_instances_on_a_registry_share_their_counters():
    registry = CollectorRegistry()
    first = SpecDecodingProm(2, LABELS, {0: ["m", "0"]}, registry=registry)
    second = SpecDecodingProm(3, LABELS, {0: ["m", "0"], 1: ["m", "1"]}, registry=registry)
    first.observe(stats_of(2, [(2, 2)]))
    second.observe(stats_of(3, [(3, 1)]))
    labels = {"model_name": "m", "engine": "0"}
    name = "vllm:spec_decode_num_accepted_tokens"
    assert registry.get_sample_value(f"{name}_total", labels) == 3
    assert registry.get_sample_value(f"{name}_per_pos_total", {**labels, "position": "0"}) == 2
    other = CollectorRegistry()
    SpecDecodingProm(2, LABELS, {0: ["m", "0"]}, registry=other)
    assert other.get_sample_value(f"{name}_total", labels) == 0


def test_the_default_registry_takes_a_second_instance():
    for _ in range(2):
        SpecDecodingProm(1, LABELS, {0: ["test", "0"]}).observe(stats_of(1, [(1, 1)]))
    value = prometheus_client.REGISTRY.get_sample_value(
        "vllm:spec_decode_num_drafts_total", {"model_name": "test", "engine": "0"}
    )
    assert value == 2


def test_counters_that_were_unregistered_are_registered_anew():
    registry = CollectorRegistry()
    prom = SpecDecodingProm(1, ["engine"], {0: ["0"]}, registry=registry)
    prom.observe(stats_of(1, [(1, 1)]))
    for collector in list(registry._collector_to_names):
        registry.unregister(collector)
    SpecDecodingProm(1, ["engine"], {0: ["0"]}, registry=registry)
    assert registry.get_sample_value("vllm:spec_decode_num_drafts_total", {"engine": "0"}) == 0


def test_a_name_that_is_taken_by_others_or_with_other_labels_is_refused():
    registry = CollectorRegistry()
    prometheus_client.Counter("vllm:spec_decode_num_drafts", "Theirs.", registry=registry)
    with pytest.raises(ValueError, match="registry="):
        SpecDecodingProm(1, LABELS, {0: ["m", "0"]}, registry=registry)
    registry = CollectorRegistry()
    SpecDecodingProm(1, LABELS, {0: ["m", "0"]}, registry=registry)
    with pytest.raises(ValueError, match="labelnames"):
        SpecDecodingProm(1, ["engine"], {0: ["0"]}, registry=registry)


def test_without_drafts_nothing_is_registered_and_observe_does_nothing():
    registry = CollectorRegistry()
    prom = SpecDecodingProm(None, LABELS, {0: ["m", "0"]}, registry=registry)
    prom.observe(stats_of(3, [(3, 3)]), engine_idx=7)
    assert samples(registry) == {}


class DraftConfig:
    num_drafts = 2


class ForeignConfig:
    num_speculative_tokens = 2


@pytest.mark.parametrize("config", [2, DraftConfig(), ForeignConfig()])
def test_the_number_of_positions_is_read_from_a_number_or_a_config(config):
    registry = CollectorRegistry()
    SpecDecodingProm(config, ["engine"], {0: ["0"]}, registry=registry)
    positions = [dict(labels)["position"] for name, labels in samples(registry) if "pos" in name]
    assert sorted(positions) == ["0", "1"]


def test_counters_name_what_they_refuse_and_count_nothing_then():
    registry = CollectorRegistry()
    prom = SpecDecodingProm(3, LABELS, {0: ["m", "0"]}, registry=registry)
    with pytest.raises(KeyError, match="engine_idx"):
        prom.observe(stats_of(3, [(3, 3)]), engine_idx=1)
    with pytest.raises(ValueError, match="3 or more"):
        prom.observe(stats_of(2, [(2, 2)]))
    assert set(samples(registry).values()) == {0.0}
    prom.observe(stats_of(4, [(4, 4)]))
    assert sum(samples(registry).values()) == 1 + 4 + 4 + 3, "positions past K are not exported"
    with pytest.raises(ValueError, match="per_engine_labelvalues"):
        SpecDecodingProm(3, LABELS, {0: ["m"]}, registry=registry)
    with pytest.raises(ValueError, match="num_spec_tokens"):
        SpecDecodingProm(0, LABELS, {0: ["m", "0"]}, registry=registry)


def test_a_replaced_counter_class_is_asked_for_names_and_labels_only():
    asked = []

    class Elsewhere:
        def __init__(self, name, documentation, labelnames):
            asked.append((name, list(labelnames)))

        def labels(self, *values):
            return self

    class Prom(SpecDecodingProm):
        _counter_cls = Elsewhere

    Prom(1, ["engine"], {0: ["0"]})
    prefix = "vllm:spec_decode_num_"
    totals = [(prefix + name, ["engine"]) for name in ("drafts", "draft_tokens", "accepted_tokens")]
    assert asked == [*totals, (f"{prefix}accepted_tokens_per_pos", ["engine", "position"])]
