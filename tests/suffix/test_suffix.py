"""The suffix cache equals its original on every recorded call, and plain counting on all others."""

import builtins
import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jspec._numba import entry
from jspec.suffix import SuffixDecodingCache, SuffixDecodingDraft
from jspec.suffix import paths as paths_module
from jspec.suffix import tables as t
from tests.support import recordings
from tests.support.oracles import suffix as oracle
from tests.support.suffix_trees import paths, text

METHODS = {
    "start": "start_request",
    "add": "add_active_response",
    "stop": "stop_request",
    "evict": "evict_cached_response",
    "speculate": "speculate",
}


@pytest.fixture(scope="module", autouse=True)
def compiled():
    SuffixDecodingCache()


def run(cache, op):
    """Plays one recorded operation and checks its result."""
    name, *arguments = op
    if name == "state":
        active, cached = arguments
        assert sorted(cache.active_requests) == active and list(cache.cached_requests) == cached
    elif name == "expect_error":
        method, *arguments, error = arguments
        if error is None:
            getattr(cache, METHODS[method])(*arguments)
        else:
            with pytest.raises(getattr(builtins, error), match="active|cached"):
                getattr(cache, METHODS[method])(*arguments)
    elif name == "speculate":
        req_id, context, options, wanted = arguments
        got = cache.speculate(req_id, context, **options)
        assert got.token_ids == wanted["token_ids"] and got.parents == wanted["parents"]
        assert got.match_len == wanted["match_len"]
        np.testing.assert_allclose(got.probs, wanted["probs"], rtol=0, atol=1e-5)
        assert abs(got.score - wanted["score"]) <= 1e-5
    else:
        getattr(cache, METHODS[name])(*arguments)


@recordings.each_document("suffix_decoding.json.gz")
def test_every_recorded_call_gives_what_the_original_gave(case):
    cache = SuffixDecodingCache(case["max_tree_depth"], case["max_cached_requests"])
    for op in case["ops"]:
        run(cache, op)
    paths(cache)


@recordings.of_this_repository
def test_the_recordings_hold_what_they_are_said_to_hold():
    lifecycles = [case["ops"] for case in recordings.documents("suffix_decoding.json.gz")]
    calls = [op for ops in lifecycles for op in ops if op[0] == "speculate"]
    assert len(lifecycles) == 72 and len(calls) == 1222
    assert sum(bool(op[-1]["token_ids"]) for op in calls) == 837
    assert sum(op[3]["use_tree_spec"] for op in calls) == 417


@recordings.each_document("suffix_proposer.json.gz")
def test_the_recorded_drafts_of_a_serving_loop_come_out_with_its_own_lifecycle(case):
    """The original restarts a request that was away from its prompt alone, as is done here."""
    depth, limit = case["max_tree_depth"], case["max_model_len"]
    cache = SuffixDecodingCache(depth, case["max_cached_requests"])
    for step in case["steps"]:
        assert list(map(len, step["tokens"])) == step["num_tokens"]
        for i, req_id in enumerate(step["req_ids"]):
            tokens, drafts = step["tokens"][i], step["drafts"][i]
            if not step["sampled"][i] or len(tokens) >= limit:
                assert drafts == []
                continue
            if req_id not in cache.active_requests:
                if req_id in cache.cached_requests:
                    cache.evict_cached_response(req_id)
                cache.start_request(req_id, tokens[: step["prompt_lens"][i]])
            cache.add_active_response(req_id, step["sampled"][i])
            got = cache.speculate(
                req_id,
                tokens[-depth:],
                max_spec_tokens=min(case["num_speculative_tokens"], limit - len(tokens) - 1),
                max_spec_factor=case["max_spec_factor"],
                min_token_prob=case["min_token_prob"],
            )
            assert got.token_ids == drafts
        for req_id in set(cache.active_requests) - set(step["req_ids"]):
            cache.stop_request(req_id)
        assert sorted(cache.active_requests) == step["active_after"]
        assert list(cache.cached_requests) == step["cached_after"]


def test_case_c33_the_most_frequent_continuation_comes_first():
    cache = SuffixDecodingCache(24)
    for req_id, response in enumerate([[1, 2, 3], [1, 2, 3], [1, 2, 4]]):
        cache.start_request(req_id, [])
        cache.add_active_response(req_id, response)
        cache.stop_request(req_id)
    cache.start_request("new", [])
    cache.add_active_response("new", [1, 2])
    assert cache.speculate("new", [1, 2], min_token_prob=0.1).token_ids == [3]
    assert cache.speculate("new", [1, 2], min_token_prob=0.99).token_ids == []
    alone = SuffixDecodingCache(24, 0)
    alone.start_request("new", [1, 2, 3, 4, 5])
    alone.add_active_response("new", [1, 2])
    assert alone.speculate("new", [1, 2]).token_ids[0] == 3
    assert not alone.cached_requests


@st.composite
def lifecycles(draw):
    """Operations on a few requests whose texts repeat each other."""
    tokens = st.lists(st.integers(0, draw(st.sampled_from([1, 2, 4]))), max_size=12)
    ops = []
    for _ in range(draw(st.integers(1, 40))):
        kind = draw(st.sampled_from(["start", "add", "add", "stop", "evict", "draft", "draft"]))
        ops.append((kind, draw(st.integers(0, 3)), draw(tokens)))
    limits = st.tuples(
        st.sampled_from([-1, 0, 1, 4, 30]),
        st.sampled_from([-1.0, 0.0, 0.3, 1.0, 1.7, 4.0]),
        st.sampled_from([-1.0, 0.0, 0.5, 2.0]),
        st.sampled_from([0.0, 0.1, 0.25, 1 / 3, 0.5, 1.0]),
    )
    return draw(st.sampled_from([1, 2, 3, 8])), draw(st.sampled_from([-1, 0, 1, 2])), ops, limits


@settings(max_examples=150)
@given(lifecycles(), st.data())
def test_any_lifecycle_drafts_as_plain_counting_does(lifecycle, data):
    depth, max_cached, ops, limits = lifecycle
    cache, plain = SuffixDecodingCache(depth, max_cached), oracle.Cache(depth, max_cached)
    for kind, req_id, tokens in ops:
        if kind == "start" and req_id not in plain.own:
            cache.start_request(req_id, tokens)
            plain.start_request(req_id, tokens)
        elif kind == "evict" and req_id in plain.cached:
            cache.evict_cached_response(req_id)
            plain.evict_cached_response(req_id)
        elif kind == "stop" and req_id in plain.own:
            cache.stop_request(req_id)
            plain.stop_request(req_id)
        elif kind == "add" and req_id in plain.own:
            cache.add_active_response(req_id, tokens)
            plain.add_active_response(req_id, tokens)
        elif kind == "draft" and req_id in plain.own:
            context = (plain.own[req_id].sequences.get(0, []) + tokens)[-2 * depth :]
            drawn = data.draw(limits)
            got = cache.speculate(req_id, context, *drawn)
            ids, probs, score, match_len = plain.speculate(req_id, context, *drawn)
            assert got.token_ids == ids and got.match_len == match_len
            assert got.probs == [float(p) for p in probs] and got.score == float(score)
    assert list(cache.cached_requests) == plain.cached
    assert paths(cache) == plain.shared.count
    assert cache.num_cached_tokens == sum(map(len, plain.shared.sequences.values()))
    for req_id, sequence in cache._own.items():
        root = cache._forest.sequences[sequence, t.ROOT]
        assert paths(cache, root) == plain.own[req_id].count


def test_a_long_run_stays_flat_and_ends_with_the_tree_of_what_is_left(rng):
    cache = SuffixDecodingCache(12, 8)
    sizes = []
    for req_id in range(160):
        cache.start_request(req_id, text(rng, 60))
        response = text(rng, 120)
        for start in range(0, 120, 5):
            cache.add_active_response(req_id, response[start : start + 5])
        cache.stop_request(req_id)
        sizes.append(cache.num_bytes)
    assert sizes[-1] < 1.3 * sizes[20]  # a table or two grew once more, for an unusual text
    left = [cache._text(row) for row in cache._shared.values()]
    scratch = SuffixDecodingCache(12)
    for req_id, response in enumerate(left):
        scratch.start_request(req_id, [])
        scratch.add_active_response(req_id, response)
    assert paths(cache) == paths(scratch)
    for req_id in list(cache.cached_requests):
        cache.evict_cached_response(req_id)
    assert cache.num_nodes == 1 and cache.num_cached_tokens == 0
    used = cache._forest.used
    assert used[:4, t.LIVE].tolist() == [1, 0, 0, 1]  # the shared tree's root
    assert used[t.PAGES, t.TOP] < 60  # of the 1000 and more that 160 requests took


def test_stopping_a_request_gives_all_its_rows_back(rng):
    cache = SuffixDecodingCache(8)
    before = cache._forest.used[:4, t.LIVE].tolist()
    cache.start_request("a", text(rng, 500))
    assert cache.num_nodes > 500
    cache.stop_request("a")
    cache.evict_cached_response("a")
    assert cache._forest.used[:4, t.LIVE].tolist() == before


def test_the_oldest_responses_go_beyond_a_limit_of_tokens(rng):
    cache = SuffixDecodingCache(8, max_cached_tokens=250)
    for req_id in range(5):
        cache.start_request(req_id, [])
        cache.add_active_response(req_id, text(rng, 100))
        assert cache.num_cached_tokens <= 250
    assert list(cache.cached_requests) == [3, 4]
    cache.start_request("long", [])
    cache.add_active_response("long", text(rng, 1000))
    assert list(cache.cached_requests) == ["long"]  # the newest stays
    cache.add_active_response(4, [1, 2, 3])  # one that is active and evicted
    assert list(cache.cached_requests) == ["long"] and 4 in cache.active_requests


def test_tables_stop_growing_at_a_limit_of_bytes(rng):
    limit = 1_500_000
    cache = SuffixDecodingCache(8, max_bytes=limit)
    for req_id in range(60):
        cache.start_request(req_id, rng.integers(0, 1000, 50).tolist())
        cache.add_active_response(req_id, rng.integers(0, 1000, 1000).tolist())
        cache.stop_request(req_id)
        assert cache.num_bytes <= limit
    assert 1 < len(cache.cached_requests) < 60
    assert list(cache.cached_requests)[-1] == 59
    cache.start_request("active", rng.integers(0, 1000, 60_000).tolist())  # is kept in any case
    assert cache.num_bytes > limit and list(cache.cached_requests) == ["active"]
    assert cache.num_nodes > 60_000


@pytest.mark.parametrize(
    "tokens, word",
    [
        (np.zeros((2, 2), np.int32), "int32"),
        (np.zeros(2, np.int64), "int64.*int32"),
        (np.zeros(4, np.int32)[::2], "contiguous"),
        ([[1, 2]], "integers"),
        ([[1, 2], [3]], "integers"),
        ([2**70], "integers"),
        ([1.5], "integers"),
        (["a"], "integers"),
        ([2**31], "int32"),
    ],
)
def test_tokens_that_are_none_are_refused_and_nothing_changes(tokens, word):
    cache = SuffixDecodingCache(4)
    cache.start_request("a", [1, 2, 1])
    for call in (
        lambda: cache.start_request("b", tokens),
        lambda: cache.add_active_response("a", tokens),
        lambda: cache.speculate("a", tokens),
    ):
        with pytest.raises(ValueError, match=word):
            call()
    assert list(cache.active_requests) == ["a"] == list(cache.cached_requests)
    assert cache.speculate("a", [2, 1]).token_ids == [2]


def test_the_mark_of_an_end_is_no_token():
    cache = SuffixDecodingCache(4)
    cache.start_request("a", [1, 2, 1])
    with pytest.raises(ValueError, match="marks the end"):
        cache.add_active_response("a", [3, t.END])
    with pytest.raises(ValueError, match="marks the end"):
        cache.start_request("b", [t.END])
    assert list(cache.active_requests) == ["a"] and cache.num_cached_tokens == 0
    assert cache.speculate("a", [2, 1, t.END]) == SuffixDecodingDraft()


def test_a_step_whose_sizes_do_not_fit_is_refused_and_adds_nothing():
    cache = SuffixDecodingCache(4)
    cache.start_request("a", [1, 2, 1])

    def advance(req_ids=("a", None), new_tokens=(2,), new_start=(0, 1, 1), room=(4, 4)):
        arrays = (np.array(x, np.int32) for x in (new_tokens, new_start, room))
        return cache.advance(req_ids, *arrays, num_drafts=3)

    for change, word in (
        ({"new_start": (0, 1)}, "new_start"),
        ({"new_start": (0, 1, 2)}, "new_start"),
        ({"new_start": (0, 2, 1)}, "ascending"),
        ({"new_start": ()}, "new_start"),
        ({"room": (4,)}, "room"),
        ({"req_ids": ("a", "b")}, "'b' is not active"),
        ({"new_tokens": (t.END,)}, "marks the end"),
    ):
        with pytest.raises(ValueError, match=word):
            advance(**change)
    assert cache.num_cached_tokens == 0
    tokens, counts = advance()
    assert tokens[0, : counts[0]].tolist() == [1, 2] and counts[1] == 0


def test_limits_out_of_range_are_refused_by_name():
    for kwargs in (
        {"max_tree_depth": 0},
        {"max_cached_requests": -2},
        {"max_cached_tokens": 0},
        {"max_bytes": 0},
    ):
        with pytest.raises(ValueError, match=next(iter(kwargs))):
            SuffixDecodingCache(**kwargs)


def test_arrays_lists_and_read_only_arrays_are_the_same_text():
    frozen = np.array([1, 2, 3, 1, 2], np.int32)
    frozen.flags.writeable = False
    drafts = []
    for prompt in (frozen, frozen.copy(), frozen.tolist()):
        cache = SuffixDecodingCache(4)
        cache.start_request("a", prompt)
        drafts.append(cache.speculate("a", prompt))
    assert drafts[0] == drafts[1] == drafts[2]
    assert drafts[0] == SuffixDecodingDraft([3, 1], [-1, 0], [0.5, 0.5], 1.0, 2)


def test_compiled_code_is_stored_under_the_text_of_all_its_parts():
    def function():
        pass

    names = set()
    for sources in ((paths_module,), (t,), (t, paths_module)):
        names.add(entry(*sources)(function).py_func.__qualname__)
    assert len(names) == 3


def test_threads_may_share_a_cache(rng):
    cache = SuffixDecodingCache(8, 4)
    texts = [text(rng, 400) for _ in range(4)]
    failures = []

    def serve(thread):
        for i in range(20):
            req_id = (thread, i)
            cache.start_request(req_id, texts[thread])
            cache.add_active_response(req_id, texts[thread][:50])
            draft = cache.speculate(req_id, texts[thread][20:40], 8)
            if not draft.token_ids:
                failures.append(req_id)
            cache.stop_request(req_id)

    threads = [threading.Thread(target=serve, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures and not cache.active_requests and len(cache.cached_requests) == 4
    paths(cache)
