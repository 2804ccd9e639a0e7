"""Every counter counts the tokens that requests got, and nothing after the one that ends them."""

import numpy as np
import pytest
from prometheus_client import CollectorRegistry

import jspec
from jspec.axes import PAD_TOKEN
from jspec.metrics import SpecDecodingLogging, SpecDecodingProm, SpecDecodingStats
from jspec.models.config import ModelConfig
from jspec.proposers.base import Drafter
from jspec.proposers.draft_model import DraftModelConfig
from jspec.runtime import benchmark
from jspec.runtime.policies import Adaptive, Costs
from jspec.runtime.scheduling import Scheduler
from jspec.state import Drafts
from tests.runtime.test_lossless import CACHE, OPTIONS, PROMPTS, plain, target
from tests.runtime.test_sampled_decode import MIXED, twin
from tests.runtime.test_tree_decode import UNEVEN, tree_pair
from tests.support.marks import slow_ones

pytestmark = pytest.mark.usefixtures("quick_compilation")

K = 4
STOP = 9
LEVELS = (0, 2, 5)
FREE = Costs(passes={4: 1.0, 12: 1.0, 24: 1.0}, drafts=dict.fromkeys(LEVELS, 0.0))

# What verification kept, what the request got, and (drafted, accepted) of a pass over five drafts.
PASSES = [
    ([1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 5, 6], (5, 5)),
    ([1, STOP, 3, 4, 5, 6], [1, STOP], (1, 1)),
    ([1, STOP, 3, 4], [1, STOP], (1, 1)),
    ([1, STOP], [1, STOP], (5, 1)),
    ([STOP, 2, 3, 4, 5, 6], [STOP], (0, 0)),
    ([STOP], [STOP], (5, 0)),
    ([1, 2, 3, 4, STOP, 6], [1, 2, 3, 4, STOP], (4, 4)),
    ([1, 2, 3, 4, 5, STOP], [1, 2, 3, 4, 5, STOP], (5, 5)),
    ([1, STOP, STOP], [1, STOP], (1, 1)),
]


def keep(passes, *, num_drafts=5, parents=None, tree_depth=None, drafting="fixed"):
    """Runs one step of a scheduler on the host; returns its counts and what it handed out."""
    scheduler = Scheduler(
        [[7]] * len(passes),
        jspec.CacheConfig(num_pages=64, page_size=4, max_model_len=32),
        **{"max_requests": len(passes), "max_tokens": 20, "chunk_size": 8, "stop_ids": (STOP,)},
        **{"num_drafts": num_drafts, "tree_depth": tree_depth, "drafting": drafting},
    )
    for request in scheduler.admit():
        request.drafts, request.parents = [1] * num_drafts, parents
    rows, _ = scheduler.schedule()
    assert [row.num_drafts for row in rows] == [num_drafts] * len(passes)
    verified = np.full((len(passes), num_drafts + 1), PAD_TOKEN, np.int32)
    for b, kept in enumerate(passes):
        verified[b, : len(kept)] = kept
    nothing = np.zeros((len(passes), 0), np.int32)
    drafts = Drafts(tokens=nothing, num_drafts=np.zeros(len(passes), np.int32))
    handed_out = []
    scheduler.keep(rows, verified, drafts, lambda *result: handed_out.append(result))
    return scheduler.stats, handed_out


@pytest.mark.parametrize("kept, got, counts", PASSES)
def test_a_pass_counts_what_the_request_got(kept, got, counts):
    stats, handed_out = keep([kept])
    wanted = SpecDecodingStats.new(5)
    wanted.observe_draft(*counts)
    assert stats == wanted
    assert stats.mean_acceptance_length == len(got)
    assert handed_out == [(0, got, len(got) - 1)]


@pytest.mark.parametrize("drafting", ["fixed", Adaptive(levels=LEVELS, costs=FREE)])
def test_requests_of_a_batch_are_counted_each_up_to_its_own_end(drafting):
    some = PASSES[:4]
    stats, handed_out = keep([kept for kept, _, _ in some], drafting=drafting)
    wanted = SpecDecodingStats.new(5)
    for _, _, counts in some:
        wanted.observe_draft(*counts)
    assert stats == wanted
    assert handed_out == [(b, got, len(got) - 1) for b, (_, got, _) in enumerate(some)]
    assert stats.num_drafts + stats.num_accepted_tokens == sum(len(got) for _, got, _ in some)


@pytest.mark.parametrize(
    "kept, counts",
    [
        ([1, 2, 3, 4], (7, 3)),
        ([1, 2], (7, 1)),
        ([1, STOP], (7, 1)),
        ([1, 2, STOP, 4], (6, 2)),  # three nodes on the first level, three on the second
        ([1, STOP, 3], (3, 1)),
        ([STOP, 2, 3], (0, 0)),
    ],
)
def test_of_a_tree_the_levels_before_the_last_token_count(kept, counts):
    assert UNEVEN.num_per_level == (3, 3, 1)
    tree = {"num_drafts": 7, "parents": UNEVEN.parents.tolist(), "tree_depth": 3}
    stats, _ = keep([kept], **tree)
    wanted = SpecDecodingStats.new(3)
    wanted.observe_draft(*counts)
    assert stats == wanted


def always_right():
    model = target(ModelConfig.tiny())
    config = DraftModelConfig(num_drafts=K, model=model.config)
    return model, Drafter(config, model.params)


def exported(stats):
    """The counters that Prometheus would scrape: drafts, drafted, accepted, by position."""
    registry = CollectorRegistry()
    SpecDecodingProm(stats.num_spec_tokens, ["engine"], {0: ["0"]}, registry=registry).observe(
        stats
    )
    name, labels = "vllm:spec_decode_num", {"engine": "0"}
    totals = [
        registry.get_sample_value(f"{name}_{kind}_total", labels)
        for kind in ("drafts", "draft_tokens", "accepted_tokens")
    ]
    per_pos = [
        registry.get_sample_value(
            f"{name}_accepted_tokens_per_pos_total", labels | {"position": str(position)}
        )
        for position in range(stats.num_spec_tokens)
    ]
    return [*totals, per_pos]


def test_a_stop_token_second_among_drafts_that_are_all_right_gives_a_length_of_two():
    """In the counts, the log line, Prometheus, and the figures of the command line."""
    model, drafter = always_right()
    texts = [generation.tokens for generation in plain(model.config)]
    index = next(i for i, text in enumerate(texts) if text[2] not in text[:2])
    options = OPTIONS | {"stop_ids": (texts[index][2],)}
    handed_out = []
    report = jspec.generate(
        *(model, [PROMPTS[index]], *drafter),
        **options,
        on_tokens=lambda *result: handed_out.append(result),
    )
    assert report.generations == [(texts[index][:3], "stop")]
    assert handed_out == [(0, texts[index][:1], 0), (0, texts[index][1:3], 1)]
    assert report.stats == SpecDecodingStats(K, 1, 1, 1, [1, 0, 0, 0])
    assert exported(report.stats) == [1, 1, 1, [1, 0, 0, 0]]
    log, lines = SpecDecodingLogging(), []
    log.observe(report.stats)
    log.log(lambda line, *args: lines.append(line % args))
    assert "acceptance length: 2.00," in lines[0] and "rate: 100.0%" in lines[0]
    assert "Accepted: 1 tokens, Drafted: 1 tokens" in lines[0]
    numbers = benchmark.summary("draft_model", K, report)
    assert numbers["mean_acceptance_length"] == 2.0 and numbers["acceptance_rate"] == 1.0
    assert numbers["acceptance_per_position"] == [1, 0, 0, 0]
    assert numbers["tokens_per_step"] == 3 / numbers["steps"]


def loop(name):
    """A loop by name: model, drafter, options of it and of plain decoding."""
    if name == "tree":
        return *tree_pair("eagle", UNEVEN), {}, {}
    if name == "sampled":
        numbers = {key: MIXED[key] for key in ("temperature", "seed")}
        return *twin(), numbers | {"verification": "rejection"}, numbers
    if name == "adaptive":
        costs = Costs({3: 1.0, 6: 1.1, 15: 1.2}, {0: 0.0, 1: 0.1, 4: 0.1})
        return *always_right(), {"drafting": Adaptive(costs=costs)}, {}
    return *always_right(), {}, {}


@pytest.mark.parametrize(
    "name",
    slow_ones(
        ["chain", "adaptive", "tree", "sampled"], lambda name: name in ("adaptive", "sampled")
    ),
)
def test_tokens_are_passes_and_accepted_drafts_however_requests_end(name):
    """By stop tokens inside drafts, by max_tokens and by the longest length of a request."""
    model, drafter, options, of_plain = loop(name)
    counts = []
    for stop_ids in ((), (2,)):
        passes = []
        changed = OPTIONS | {"stop_ids": stop_ids}
        report = jspec.generate(
            *(model, PROMPTS, *drafter),
            **changed | options,
            on_tokens=lambda *result, passes=passes: passes.append(result),
        )
        stats = report.stats
        if name != "sampled":  # there the tokens have plain sampling's distribution
            same = {key: changed[key] for key in ("max_tokens", "cache", "stop_ids")}
            wanted = jspec.generate_plain(model, PROMPTS, **same, **of_plain)
            assert report.generations == wanted.generations
        assert report.num_tokens == len(passes) + stats.num_accepted_tokens
        assert stats.num_accepted_tokens == sum(accepted for _, _, accepted in passes)
        assert all(len(tokens) == accepted + 1 for _, tokens, accepted in passes)
        drafts, drafted, accepted, per_pos = exported(stats)
        assert sum(per_pos) == accepted <= drafted and drafts <= len(passes)
        if name != "tree":  # a target that drafts for itself is always right
            assert drafted == accepted > 0
        lengths = [len(p) + len(g.tokens) for p, g in zip(PROMPTS, report.generations, strict=True)]
        assert max(lengths) <= CACHE.max_model_len
        counts.append((report.generations, stats))
    reasons = {generation.reason for generations, _ in counts for generation in generations}
    assert reasons == {"stop", "length"}
