"""jspec's drafters called as by vLLM's runner, and the custom classes of the plug-in."""

from importlib.metadata import entry_points

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from tests.support.torch_runs import LOOK_UPS, RECORDED, config_for, options_of, run
from torch_bridge import vllm_plugin

METHODS = [*RECORDED, "mtp", *LOOK_UPS]


@pytest.mark.any_device
@pytest.mark.parametrize("release", ["0.20", "0.33"])
@pytest.mark.parametrize("method", METHODS)
def test_a_runner_gets_the_drafts_that_jspec_makes(method, release):
    if (method, release) == ("medusa", "0.33"):
        pytest.skip("0.33 has no Medusa")
    run(method, release=release)


@pytest.mark.any_device
def test_a_runner_that_captures_every_size_compiles_no_drafting_later():
    engine = run("eagle", capture_sizes=(64, 32, 16, 8, 4, 2, 1))
    assert not [name for name in engine.compiled if "jspec_bridge_propose" in name]
    engine = run("eagle", capture_sizes=())
    assert [name for name in engine.compiled if "jspec_bridge_propose" in name]


@pytest.mark.any_device
@pytest.mark.parametrize("method", ["eagle3", "draft_model", "dflash"])
def test_a_runner_with_host_tokens_gets_them_too(method):
    """There an unfinished prompt goes on from its next token, as jspec's do."""
    engine = run(method, chunk_size=16, disable_padded_drafter_batch=True)
    assert not engine.runner.uses_gpu_tokens


@pytest.mark.any_device
@pytest.mark.parametrize("release", ["0.20", "0.33"])
def test_a_runner_has_its_hidden_states_kept(release):
    engine = run("extract_hidden_states", release=release)
    drafter, pages = engine.runner.drafter, np.asarray(engine.state.memory.pages)
    assert drafter.kv_cache_gid == 0 and drafter.block_size == 16
    halves = [drafter.read_hidden_states(range(i, i + 8), 128).numpy() for i in (0, 8)]
    stored = np.concatenate(halves)[: 31 * 8]
    np.testing.assert_array_equal(stored, pages.reshape(31 * 8, 2, 64))
    assert np.abs(stored).sum(axis=(1, 2)).astype(bool).sum() > 100


@pytest.mark.parametrize("method", ["ngram", "suffix"])
def test_a_custom_class_drafts_from_tokens_alone(method):
    name = {"ngram": "CustomNgram", "suffix": "CustomSuffix"}[method]
    model = f"torch_bridge.vllm_plugin.{name}"
    config = config_for("custom_class", num_drafts=4, model=model)
    options = options_of(method)
    if method == "ngram":  # vLLM sets both to 0 for this method
        config.additional_config = {"jspec": options}
        options = {"prompt_lookup_min": 0, "prompt_lookup_max": 0}
    vars(config.speculative_config).update(options)
    run(method, config=config, chunk_size=8)


def custom_suffix(**options):
    config = config_for("custom_class", num_drafts=4, **options)
    return vllm_plugin.CustomSuffix(config)


def hand_over(proposer, *rows):
    """Hands rows of (known tokens, sampled tokens) over; returns drafts and the rows' names."""
    table = np.full((4, 32), 99, np.int32)
    lengths = np.zeros(4, np.int32)
    for i, (known, sampled) in enumerate(rows):
        text = [*known, *sampled]
        table[i, : len(text)], lengths[i] = text, len(text)
    drafts = proposer.propose([sampled for _, sampled in rows], lengths, table, slot_mappings={})
    table.fill(-7)  # the runner's memory, which it goes on writing to
    return drafts, [request.name for request in proposer._rows]


def test_a_suffix_request_is_followed_where_rows_move():
    proposer = custom_suffix()
    _, (a, b, c) = hand_over(proposer, ([1, 2], [3]), ([4, 5, 6], []), ([7], [8, 9]))
    assert len({a, b, c}) == 3
    # The first request has left; the last one took its row; the second one's prompt is read.
    _, names = hand_over(proposer, ([7, 8, 9], [7]), ([4, 5, 6], [4]))
    assert names == [c, b]
    assert set(proposer._proposer.suffix_cache.active_requests) == {b, c}
    # Swapped, with a new one whose prompt begins with the text of another.
    drafts, names = hand_over(
        *(proposer, ([4, 5, 6, 4], [5]), ([7, 8, 9, 7], [8]), ([7, 8, 9, 7, 5], [5]))
    )
    assert names[:2] == [b, c] and names[2] not in (a, b, c)
    assert drafts[:2] == [[6, 4], [9, 7]]


def test_a_suffix_request_with_a_gap_is_a_new_one_with_all_its_text():
    proposer = custom_suffix()
    _, [name] = hand_over(proposer, ([1, 2, 3], [1]))
    drafts, [later] = hand_over(proposer, ([1, 2, 3, 1, 2], [3]))  # nobody handed the 2 over
    assert later != name and drafts == [[1, 2, 3]]


def test_suffix_requests_of_one_text_stay_two():
    proposer = custom_suffix()
    _, names = hand_over(proposer, ([1, 2], [3]), ([1, 2], [3]))
    assert len(set(names)) == 2
    _, again = hand_over(proposer, ([1, 2, 3], [4]), ([1, 2, 3], [5]))
    assert again == names
    _, last = hand_over(proposer, ([1, 2, 3, 5], [6]), ([1, 2, 3, 4], [6]))
    assert last == names[::-1]


def test_an_empty_batch_drafts_nothing():
    assert hand_over(custom_suffix()) == ([], [])


def test_a_custom_class_says_which_options_it_has():
    config = config_for("custom_class")
    config.additional_config = {"jspec": {"prompt_lookup": 3}}
    for proposer in (vllm_plugin.CustomNgram, vllm_plugin.CustomSuffix):
        with pytest.raises(ValueError, match="prompt_lookup, wanted"):
            proposer(config)
    config.additional_config = {}
    assert vllm_plugin.CustomNgram(config)._proposer.min_n == 5


def test_the_plug_in_is_an_entry_point_of_vllms_group():
    (point,) = entry_points(group="vllm.general_plugins", name="jspec")
    assert point.load() is vllm_plugin.register
