"""Suffix decoding as a PyTorch runner calls it: recordings, preemption, limits, threads."""

from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import numpy as np
import pytest

from tests.support import recordings

torch = pytest.importorskip("torch")

from torch_bridge.proposers import suffix as bridge


def config(*, max_model_len=64, num_speculative_tokens=None, **options):
    options = {f"suffix_decoding_{name}": value for name, value in options.items()}
    return SimpleNamespace(
        speculative_config=SimpleNamespace(
            method="suffix", num_speculative_tokens=num_speculative_tokens, **options
        ),
        model_config=SimpleNamespace(max_model_len=max_model_len),
    )


def batch_of(req_ids, prompt_lens, tokens, width=64, as_tensor=False):
    """What is read of vLLM's input batch; behind the known tokens lies rubbish."""
    table = np.full((len(req_ids) + 2, width), -7, np.int32)
    for row, known in zip(table, tokens, strict=False):
        row[: len(known)] = known
    lengths = np.array([*map(len, tokens), 0, 0], np.int32)
    return SimpleNamespace(
        req_ids=list(req_ids),
        req_id_to_index={req_id: i for i, req_id in enumerate(req_ids)},
        num_tokens_no_spec=lengths,
        num_prompt_tokens=np.array([*prompt_lens, 0, 0], np.int32),
        token_ids_cpu=torch.from_numpy(table) if as_tensor else table,
    )


@pytest.fixture(scope="module")
def options():
    """Of a drafter that is made of the defaults, but drafts more for a short match."""
    return dict(max_tree_depth=8, max_spec_factor=4.0)


@pytest.mark.parametrize("as_tensor", [False, True])
@recordings.each_document("suffix_proposer.json.gz")
def test_the_recorded_runs_are_reproduced_with_their_lifecycles(case, as_tensor):
    names = (
        *("num_speculative_tokens", "max_tree_depth", "max_spec_factor", "min_token_prob"),
        *("max_cached_requests", "max_model_len"),
    )
    proposer = bridge.SuffixDecodingProposer(config(**{name: case[name] for name in names}))
    for step in case["steps"]:
        batch = batch_of(
            step["req_ids"],
            step["prompt_lens"],
            step["tokens"],
            width=case["max_model_len"] + 8,
            as_tensor=as_tensor,
        )
        drafts = proposer.propose(batch, step["sampled"], slot_mappings=None)
        assert drafts == step["drafts"]
        assert sorted(proposer.suffix_cache.active_requests) == step["active_after"]
        assert list(proposer.suffix_cache.cached_requests) == step["cached_after"]


def test_a_preempted_request_starts_again_from_its_prompt(options):
    proposer = bridge.SuffixDecodingProposer(config(**options))
    prompt, said = [1, 2, 3], [4, 5, 6, 4]
    proposer.propose(batch_of("a", [3], [[*prompt, *said]]), [said])
    proposer.propose(batch_of("b", [1], [[9, 8]]), [[8]])
    assert set(proposer.suffix_cache.active_requests) == {"b"}
    assert list(proposer.suffix_cache.cached_requests) == ["a", "b"]
    text = [*prompt, *said, 5]
    # 4 5 6 was said before it was stopped, and is known no more: (4, 5) is followed by nothing.
    assert proposer.propose(batch_of("ab", [3, 1], [text, [9, 8]]), [[5], []]) == [[], []]
    assert list(proposer.suffix_cache.cached_requests) == ["b", "a"]
    assert proposer.suffix_cache.num_cached_tokens == 2


def test_drafts_are_lists_of_the_callers_own(options):
    proposer = bridge.SuffixDecodingProposer(config(**options))
    batch = batch_of(["a"], [6], [[1, 2, 3, 4, 1, 2, 3]])
    (first,) = proposer.propose(batch, [[3]])
    assert first[:2] == [4, 1]
    first.clear()
    (second,) = proposer.propose(batch_of(["a"], [6], [[1, 2, 3, 4, 1, 2, 3, 4]]), [np.array([4])])
    assert second[:2] == [1, 2]


@pytest.mark.parametrize("columns", [0, 1, 3, None])
def test_a_step_may_draft_fewer_tokens(options, columns):
    proposer = bridge.SuffixDecodingProposer(config(num_speculative_tokens=5, **options))
    assert proposer.load_model(None) is None
    text = [1, 2, 3, 4, 5, 6, 7, 1, 2, 3]
    batch = batch_of(["a"], [9], [text])
    first = () if columns is None else (columns,)
    assert proposer.propose(*first, batch, [[3]]) == [[4, 5, 6, 7, 1][:columns]]
    with pytest.raises(ValueError, match="num_speculative_tokens.*6.*0 to 5"):
        proposer.propose(6, batch, [[3]])


def test_a_draft_goes_as_deep_as_the_tree_and_ends_before_the_limit(options):
    text = [1, 2, 3, 4, 5, 6, 7, 8, 1, 2]
    for limit, wanted in ((64, [3, 4, 5, 6, 7, 8]), (14, [3, 4, 5]), (11, []), (10, []), (9, [])):
        proposer = bridge.SuffixDecodingProposer(config(max_model_len=limit, **options))
        assert proposer.num_speculative_tokens == 8
        assert proposer.propose(batch_of(["a"], [9], [text]), [[2]]) == [wanted]


def test_the_defaults_are_those_of_the_original():
    proposer = bridge.SuffixDecodingProposer(config())
    cache = proposer.suffix_cache
    assert (proposer.max_tree_depth, proposer.num_speculative_tokens) == (24, 24)
    assert (proposer.max_spec_factor, proposer.min_token_prob) == (1.0, 0.1)
    assert (cache.max_tree_depth, cache.max_cached_requests) == (24, 10_000)


@pytest.mark.parametrize(
    "name, value",
    [
        ("max_tree_depth", 0),
        ("max_cached_requests", -2),
        ("max_spec_factor", -0.5),
        ("max_spec_factor", "1"),
        ("min_token_prob", 1.5),
        ("min_token_prob", float("nan")),
    ],
)
def test_a_value_out_of_range_is_refused_by_name(name, value):
    words = f"SuffixDecodingProposer: `suffix_decoding_{name}` is {value!r}"
    with pytest.raises(ValueError, match=words):
        bridge.SuffixDecodingProposer(config(**{name: value}))


@pytest.mark.parametrize(
    "changes, words",
    [
        (dict(num_speculative_tokens=0), "num_speculative_tokens.*0"),
        (dict(max_model_len=None), "max_model_len.*missing"),
    ],
)
def test_a_size_that_cannot_work_is_refused_by_name(changes, words):
    with pytest.raises(ValueError, match=f"SuffixDecodingProposer: .*{words}"):
        bridge.SuffixDecodingProposer(config(**changes))


def test_two_threads_draft_with_a_proposer_each(options):
    def work(seed):
        rng = np.random.default_rng(seed)
        proposer = bridge.SuffixDecodingProposer(config(max_model_len=4096, **options))
        text, drafts = [1, 2], []
        for _ in range(400):
            kept = rng.integers(0, 3, 2).tolist()
            text = [*text, *kept]
            batch = batch_of(["a"], [2], [text], width=1024)
            drafts += proposer.propose(batch, [kept])
        return drafts

    wanted = [work(seed) for seed in (1, 2)]
    assert wanted[0] != wanted[1]
    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(work, (1, 2))) == wanted
