"""Metrics as Prometheus scrapes them, and as the documents describe them."""

import contextlib
import http.client
import io
import re
from collections import defaultdict

import prometheus_client
import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families

from jspec.metrics import SpecDecodingProm, SpecDecodingStats
from tests.conftest import ROOT
from tests.metrics.test_metrics import LABELS, stats_of

DOC = (ROOT / "docs" / "metrics.md").read_text()


def scrape(port: int) -> dict[str, dict[frozenset, float]]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    connection.request("GET", "/metrics")
    text = connection.getresponse().read().decode()
    connection.close()
    series = defaultdict(dict)
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            series[sample.name][frozenset(sample.labels.items())] = sample.value
    return series


def evaluate(query: str, increase: dict[str, dict[frozenset, float]]) -> dict[frozenset, float]:
    """Evaluates the ratios of the docs as Prometheus would, over the increase of two scrapes."""
    offset, ratio = (1, query[4:]) if query.startswith("1 + ") else (0, query)
    left, right = ratio.split(" / ")
    ignored = re.match(r"ignoring\((\w+)\) group_left ", right)
    right = right[ignored.end() :] if ignored else right

    def vector(text: str) -> dict[frozenset, float]:
        total, by, name = re.fullmatch(
            r"(sum)?(?: by \((\w+)\) )?\(?rate\(([\w:]+)\[5m\]\)\)?", text
        ).groups()
        if not total:
            return increase[name]
        sums = defaultdict(float)
        for labels, value in increase[name].items():
            sums[frozenset(label for label in labels if label[0] == by)] += value
        return sums

    divisors = vector(right)
    values = {}
    for labels, value in vector(left).items():
        key = frozenset(label for label in labels if not ignored or label[0] != ignored[1])
        if key in divisors:  # Prometheus drops what has no partner
            values[labels] = offset + value / divisors[key]
    return values


@pytest.fixture(scope="module")
def scraped():
    """What two engines did between two scrapes: (stats of the engines, increase of the series)."""
    registry = CollectorRegistry()
    engines = {0: ["m", "0"], 1: ["m", "1"]}
    prom = SpecDecodingProm(3, LABELS, engines, registry=registry)
    server, thread = prometheus_client.start_http_server(0, addr="127.0.0.1", registry=registry)
    prom.observe(stats_of(3, [(3, 3)]), 0)  # before the first scrape: must not show in a rate
    before = scrape(server.server_port)
    stats = [stats_of(3, [(3, 2), (3, 0), (1, 1)]), stats_of(3, [(3, 3)])]
    for engine, of_engine in enumerate(stats):
        prom.observe(of_engine, engine)
    after = scrape(server.server_port)
    server.shutdown()
    server.server_close()
    thread.join()
    return stats, {
        name: {labels: value - before[name][labels] for labels, value in series.items()}
        for name, series in after.items()
    }


def test_the_queries_of_the_docs_give_the_ratios(scraped):
    stats, increase = scraped
    total = SpecDecodingStats.new(3)
    for of_engine in stats:
        total.add(of_engine)

    def engine(index, **labels):
        return frozenset({"model_name": "m", "engine": str(index), **labels}.items())

    each = list(enumerate(stats))
    wanted = [
        {engine(i): s.acceptance_rate for i, s in each},
        {engine(i): s.mean_acceptance_length for i, s in each},
        {
            engine(i, position=str(position)): rate
            for i, s in each
            for position, rate in enumerate(s.acceptance_rate_per_pos)
        },
        {frozenset(): total.acceptance_rate},
        {
            frozenset({("position", str(position))}): rate
            for position, rate in enumerate(total.acceptance_rate_per_pos)
        },
    ]
    queries = re.findall(r"```promql\n(.+)\n```", DOC)
    assert [evaluate(query, increase) for query in queries] == wanted


def test_every_exported_counter_is_in_the_docs(scraped):
    _, increase = scraped
    names = {name for name in increase if not name.endswith("_created")}
    assert names == set(re.findall(r"^\| `(vllm:\w+)`", DOC, flags=re.MULTILINE))


@pytest.mark.parametrize("block", re.findall(r"```python\n(.*?)```", DOC, flags=re.DOTALL))
def test_the_examples_of_the_docs_print_what_they_say(block, caplog):
    printed = io.StringIO()
    with caplog.at_level("INFO"), contextlib.redirect_stdout(printed):
        exec(block, {})
    for said in re.findall(r"print\(.*\)  # (.+)", block):
        assert said in printed.getvalue().splitlines()
    if "log.log()" in block:
        (line,) = caplog.messages
        elapsed = r"throughput: \S+"
        (recorded,) = re.findall(r"SpecDecoding metrics: .+", DOC)
        assert re.sub(elapsed, "", line) == re.sub(elapsed, "", recorded)
