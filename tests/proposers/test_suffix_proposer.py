"""Suffix decoding in a serving loop: what each step adds, and what it drafts from."""

import dataclasses

import numpy as np
import pytest

import jspec
from jspec.axes import PAD_TOKEN
from jspec.suffix import SuffixDecodingCache
from tests.suffix.test_suffix import paths
from tests.support.steps import Row, make_step

LIMITS = jspec.CacheConfig(num_pages=8, page_size=8, max_model_len=64)
CONFIG = jspec.SuffixConfig(num_drafts=6, max_tree_depth=8, max_spec_offset=4.0)


def start(config=CONFIG, cache=LIMITS, **prompts):
    """A state whose slots 0, 1, ... hold the prompts in their order."""
    state = jspec.init(config, cache=cache, max_requests=4)
    for slot, prompt in enumerate(prompts.values()):
        state = jspec.admit(state, slot, prompt)
    return state


def step(state, *rows):
    """Runs rows of different requests; returns the state and each row's drafts."""
    scheduled, verified = make_step(
        rows,
        num_requests=4,
        num_rows=40,
        width=state.config.num_drafts + 1,
        pages_per_request=state.cache.pages_per_request,
        poison=True,
    )
    state, drafts = jspec.step(state, scheduled, verified)
    live = np.arange(state.config.num_drafts)[None] < drafts.num_drafts[:, None]
    assert (drafts.tokens[~live] == PAD_TOKEN).all() and not drafts.num_drafts[len(rows) :].any()
    pairs = zip(drafts.tokens, drafts.num_drafts, strict=True)
    return state, [tokens[:count].tolist() for tokens, count in pairs][: len(rows)]


def cache_of(state) -> SuffixDecodingCache:
    return state.memory.cache


def own_text(state, slot):
    cache = cache_of(state)
    return cache._text(cache._own[state.memory.requests[slot]]).tolist()


def test_drafts_are_those_of_the_cache_with_a_length_of_their_own():
    state = start(a=[1, 2, 3, 4, 1, 2], b=[5, 6], c=[7, 7, 7])
    plain = SuffixDecodingCache(8)
    wanted = []
    rows = [
        Row(0, [1, 2, 3, 4, 1, 2], kept=[3]),
        Row(1, [5, 6], kept=[5]),
        Row(2, [7] * 3, [7], [7, 7]),
    ]
    for row in rows:
        plain.start_request(row.slot, row.context)
    for row in rows:
        plain.add_active_response(row.slot, row.kept)
        text = [*row.context, *row.kept]
        wanted.append(plain.speculate(row.slot, text, 6, 1.0, 4.0).token_ids)
    _, drafts = step(state, *rows)
    assert drafts == wanted and len(set(map(len, drafts))) > 1


def test_a_row_is_added_before_the_next_row_drafts():
    """Row 1 drafts what row 0 said in the same step; the other way round it could not."""
    rows = [Row(0, [9], kept=[1]), Row(1, [8], kept=[1])]
    state = start(a=[9], b=[8])
    state, _ = step(state, *rows)
    first = Row(0, [9, 1], [], [2])
    state, _ = step(state, first)
    state, drafts = step(state, Row(0, [9, 1, 2], kept=[3]), Row(1, [8, 1], kept=[2]))
    assert drafts == [[], [3]]


def test_accepted_drafts_are_added_once_and_rejected_ones_never():
    state = start(a=[1, 2, 3])
    state, _ = step(state, Row(0, [1, 2, 3], kept=[4], start=0))
    state, _ = step(state, Row(0, [1, 2, 3, 4], drafts=[5, 6, 7], kept=[5, 9]))
    assert own_text(state, 0) == [1, 2, 3, 4, 5, 9]
    assert cache_of(state).num_cached_tokens == 3


def test_a_prefill_chunk_adds_and_drafts_nothing():
    prompt = [1, 2, 3, 1, 2, 3]
    state = start(a=prompt)
    state, drafts = step(state, Row(0, prompt[:3], kept=[1], start=0, backup=prompt[3]))
    assert drafts == [[]] and own_text(state, 0) == prompt
    state, drafts = step(state, Row(0, prompt, kept=[1], start=3))
    assert drafts[0][:2] == [2, 3] and own_text(state, 0) == [*prompt, 1]


def test_a_request_that_runs_old_tokens_again_keeps_its_text():
    """A preempted request whose slot stayed: its keys are computed again, its tree is whole."""
    state = start(a=[1, 2, 3])
    state, _ = step(state, Row(0, [1, 2, 3], kept=[1], start=0))
    state, _ = step(state, Row(0, [1, 2, 3, 1], kept=[2]))
    text = [1, 2, 3, 1, 2]
    state, drafts = step(state, Row(0, text[:4], kept=[6], start=0, backup=2))
    assert drafts == [[]]
    state, drafts = step(state, Row(0, text, kept=[3], start=0))
    assert own_text(state, 0) == [*text, 3] and drafts[0][:2] == [1, 2]
    assert cache_of(state).num_cached_tokens == 3


def test_a_request_that_is_admitted_again_brings_its_response_as_prompt():
    state = start(a=[1, 2, 3])
    state, _ = step(state, Row(0, [1, 2, 3], kept=[1], start=0))
    state = jspec.release(state, 0)
    state = jspec.admit(state, 0, [1, 2, 3, 1])
    state, drafts = step(state, Row(0, [1, 2, 3, 1], kept=[2], start=0))
    assert own_text(state, 0) == [1, 2, 3, 1, 2] and drafts[0][:2] == [3, 1]


def test_rows_behind_a_gap_are_left_out():
    state = start(a=[1, 2, 1])
    state, drafts = step(state, Row(0, [1, 2, 1, 5, 1], kept=[2]))
    assert drafts == [[]] and own_text(state, 0) == [1, 2, 1]


def test_a_response_outlives_its_request_and_an_abort():
    state = start(a=[9], b=[8])
    state, _ = step(state, Row(0, [9], kept=[1], start=0), Row(1, [8], kept=[4], start=0))
    state, _ = step(state, Row(0, [9, 1], kept=[2]), Row(1, [8, 4], [5], [5, 6]))
    state = jspec.release(state, 0)
    state = jspec.release(state, 1)  # in the middle of its response
    assert not cache_of(state).active_requests and len(cache_of(state).cached_requests) == 2
    state = jspec.admit(state, 0, [7, 1])  # the same slot, another request
    state, drafts = step(state, Row(0, [7, 1], kept=[4], start=0))
    state, drafts = step(state, Row(0, [7, 1, 4], kept=[5]))
    assert drafts == [[6]]
    assert set(paths(cache_of(state))) >= {(1, 2), (4, 5, 6), (4, 5)}


def test_slots_that_no_request_holds_are_refused_and_leave_the_trees_alone():
    state = jspec.release(start(a=[1, 2, 1], b=[3, 3]), 1)
    before = cache_of(state).num_nodes
    for slot in (1, 3):
        with pytest.raises(ValueError, match=f"`request_slot` of request 0 is {slot}, .*admit"):
            step(state, Row(slot, [3, 3], kept=[3]))
    assert cache_of(state).num_nodes == before


def test_the_longest_request_leaves_one_draft_less_than_the_limit():
    text = [1, 2] * 32
    for known, wanted in ((58, 5), (62, 1), (63, 0), (64, 0)):
        config = dataclasses.replace(CONFIG, max_spec_offset=10.0, max_tree_depth=24, num_drafts=8)
        state = start(config, a=text[: known - 1])
        _, drafts = step(state, Row(0, text[: known - 1], kept=[text[known - 1]]))
        assert len(drafts[0]) == wanted


def test_ids_outside_the_vocabulary_are_never_drafted():
    config = dataclasses.replace(CONFIG, vocab_size=10)
    state = start(config, a=[1, 2, 3])
    state, _ = step(state, Row(0, [1, 2, 3], [11, 4], [11, 4, 1], start=0))  # an engine's mistake
    state, drafts = step(state, Row(0, [1, 2, 3, 11, 4, 1], kept=[2], start=5))
    assert all(token < 10 for token in drafts[0])


def test_old_responses_make_room_for_new_ones():
    config = dataclasses.replace(CONFIG, max_cached_requests=2)
    state = start(config, a=[1], b=[2], c=[3])
    assert list(cache_of(state).cached_requests) == [1, 2]
    state, _ = step(state, *[Row(s, [s + 1], kept=[s + 5], start=0) for s in range(3)])
    assert cache_of(state).num_cached_tokens == 2 and own_text(state, 0) == [1, 5]


def test_a_warm_start_drafts_what_an_earlier_process_served(tmp_path):
    state = start(a=[9])
    for context, kept in (([9], [1]), ([9, 1], [2]), ([9, 1, 2], [3])):
        state, _ = step(state, Row(0, context, kept=kept))
    path = tmp_path / "cache.npz"
    state.memory.cache.save(path)
    state = start(dataclasses.replace(CONFIG, warm_start=str(path)), a=[7, 1])
    assert list(cache_of(state).cached_requests) == [0, 1]
    _, drafts = step(state, Row(0, [7, 1], kept=[2], start=0))
    assert drafts == [[3]]
    with pytest.raises(FileNotFoundError):
        start(dataclasses.replace(CONFIG, warm_start=str(tmp_path / "nothing")))


@pytest.mark.parametrize(
    "name, value",
    [
        ("num_drafts", 0),
        ("max_tree_depth", 0),
        ("max_spec_factor", -0.1),
        ("max_spec_factor", float("nan")),
        ("max_spec_offset", "1"),
        ("min_token_prob", 1.1),
        ("max_cached_requests", -2),
        ("max_cached_tokens", 0),
        ("max_bytes", 0),
        ("vocab_size", 0),
    ],
)
def test_a_value_out_of_range_is_refused_by_name(name, value):
    with pytest.raises(ValueError, match=f"SuffixConfig: `{name}` is"):
        jspec.SuffixConfig(**{name: value})


def test_a_warm_start_without_a_shared_tree_is_refused():
    with pytest.raises(ValueError, match="max_cached_requests = 0"):
        jspec.SuffixConfig(warm_start="cache.npz", max_cached_requests=0)


def test_drafts_go_as_deep_as_the_tree_unless_told_otherwise():
    assert jspec.SuffixConfig().num_drafts == 24
    assert jspec.SuffixConfig(max_tree_depth=5).num_drafts == 5
