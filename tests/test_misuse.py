"""Drafters with steps and settings that no engine should pass."""

import dataclasses
import json
import os
import subprocess
import sys

import jax
import numpy as np
import pytest

import jspec
from jspec import proposers
from jspec.axes import PAD_TOKEN
from tests.conftest import GOLDEN
from tests.proposers import test_contract as contract
from tests.proposers import test_tree_contract as trees
from tests.proposers.test_contract import (
    CACHE,
    NAMES,
    ROWS,
    WITH_WEIGHTS,
    T,
    assert_same,
    fitted,
    fresh,
    layout,
)
from tests.support.counting import backend_compiles
from tests.support.heads import target as recorded_target

POSITIONED = ["ngram", "ngram_gpu", *(n for n in WITH_WEIGHTS if n != "extract_hidden_states")]


@pytest.fixture(params=[*POSITIONED, *(f"{name}, tree" for name in trees.TREES)])
def name(request, monkeypatch):
    """A method; of a tree, with a tree in its config."""
    method, _, tree = request.param.partition(", ")
    if tree:
        monkeypatch.setattr(contract, "tiny", trees.tiny)
    return method


def pages_of_others(memory, slot):
    """The KV pages of a memory that are not a request's."""
    per_request = CACHE.pages_per_request
    return [
        np.delete(leaf, np.arange(per_request) + slot * per_request, axis=1)
        for leaf in map(np.asarray, jax.tree.leaves(memory))
        if leaf.ndim == 5
    ]


@pytest.mark.parametrize("below", [7, 20, 2**31 - 1])
def test_a_request_below_position_0_drafts_nothing_and_spoils_nothing(name, below):
    wanted = contract.drafts_of(fresh(name))
    state = fresh(name)
    scheduled, verified = layout(state, fitted(state, ROWS))
    start, end = scheduled.query_start[1:3]
    positions = np.array(scheduled.positions)
    positions[start:end] = -1 - np.arange(below, below - (end - start), -1)
    after, _ = jspec.step(fresh(name), scheduled, verified)
    pages = pages_of_others(after.memory, ROWS[1].slot)
    scheduled = dataclasses.replace(scheduled, positions=positions)
    after, drafts = jspec.step(state, scheduled, verified)
    drafts = jax.tree.map(np.asarray, drafts)
    assert drafts.num_drafts[1] == 0 and (drafts.tokens[1] == PAD_TOKEN).all()
    others = [0, 2, 3]
    contract.assert_same(*(jax.tree.map(lambda x: x[others], d) for d in (drafts, wanted)))
    for got, page in zip(pages_of_others(after.memory, ROWS[1].slot), pages, strict=True):
        np.testing.assert_allclose(got, page, atol=1e-5)


@pytest.mark.parametrize("name", NAMES)
def test_arrays_on_the_host_that_contradict_each_other_are_refused_by_name(name):
    state = fresh(name)
    held = proposers.of(state.config).admit is not None
    scheduled, verified = layout(state, fitted(state, ROWS))

    def refused(words, **changed):
        arrays = {k: np.array(getattr(scheduled, k)) for k in changed}
        for field, (index, value) in changed.items():
            arrays[field][index] = value
        step = dataclasses.replace(scheduled, **arrays)
        with backend_compiles() as compiled, pytest.raises(ValueError, match=words):
            jspec.step(state, step, verified)
        if "request_slot" not in changed:
            with pytest.raises(ValueError, match=words.replace("step:", "prepare:")):
                jspec.prepare(step, verified)
            return
        batch = jspec.prepare(step, verified, vocab_size=state.config.vocab_size)
        with pytest.raises(ValueError, match=words.replace("step:", "propose:")):
            jspec.propose(state, batch)
        assert not compiled

    refused(r"step: `request_slot` of request 1 is 99, wanted 0 to 4", request_slot=(1, 99))
    refused("step: `request_slot` is 2 for request 0 and for request 1", request_slot=(1, 2))
    if held:
        refused("`request_slot` of request 2 is 4, .*admit", request_slot=(2, 4))
    for index, start in ((0, 1), (1, 20), (-1, T + 1)):
        refused(rf"step: `query_start` is .*\b{start}\b.*, wanted 0", query_start=(index, start))
    refused("step: `seq_lens` of request 0 is 1, wanted at least its", seq_lens=(0, 1))
    refused("step: `num_drafts` of request 2 is 1, wanted 0 to 0", num_drafts=(2, 1))
    refused("step: `num_drafts` of request 0 is -1", num_drafts=(0, -1))
    assert_same(contract.drafts_of(state), contract.drafts_of(fresh(name)))


@pytest.mark.parametrize("field, value", [("seq_lens", 0), ("num_drafts", 1), ("num_drafts", -1)])
def test_the_last_of_many_requests_is_looked_at_like_the_first(field, value):
    rows = [dataclasses.replace(ROWS[2], slot=slot) for slot in range(64)]
    sizes = {"num_requests": 65, "num_rows": 80, "width": 4, "pages_per_request": 1}
    scheduled, verified = contract.make_step(rows, **sizes, poison=True)
    assert jspec.prepare(scheduled, verified).num_valid.tolist() == [1] * 64 + [0]
    values = np.array(getattr(scheduled, field))
    values[63] = value
    with pytest.raises(ValueError, match=f"`{field}` of request 63 is {value}, wanted"):
        jspec.prepare(dataclasses.replace(scheduled, **{field: values}), verified)


@pytest.mark.parametrize("name", [n for n in NAMES if n in contract.DEVICE])
@pytest.mark.parametrize("slot", [99, 5, 2**31 - 1])
def test_a_slot_on_the_device_that_is_none_leaves_the_others_alone(name, slot):
    wanted = contract.drafts_of(fresh(name))
    state = fresh(name)
    scheduled, verified = layout(state, fitted(state, ROWS))
    slots = np.array(scheduled.request_slot)
    slots[1] = slot
    scheduled = dataclasses.replace(scheduled, request_slot=jax.numpy.asarray(slots))
    _, drafts = jspec.step(state, scheduled, verified)
    drafts = jax.tree.map(np.asarray, drafts)
    others = [0, 2, 3]
    assert_same(*(jax.tree.map(lambda x: x[others], d) for d in (drafts, wanted)))
    if name == "ngram_gpu":
        assert drafts.num_drafts[1] == 0 and (drafts.tokens[1] == PAD_TOKEN).all()


@pytest.mark.parametrize("name", [n for n in NAMES if n in contract.DEVICE])
def test_two_requests_in_one_slot_of_the_device_leave_a_third_alone(name):
    wanted = contract.drafts_of(fresh(name))
    twice = [ROWS[0], ROWS[1], dataclasses.replace(ROWS[2], slot=ROWS[1].slot)]
    state = fresh(name)
    step = jax.tree.map(jax.numpy.asarray, layout(state, fitted(state, twice)))
    drafts = jax.tree.map(np.asarray, jspec.step(state, *step)[1])
    first = (jax.tree.map(lambda x: x[[0, 3]], d) for d in (drafts, wanted))
    contract.assert_same(*first)
    assert (drafts.tokens[1:3] < contract.tiny(name).vocab_size).all()


@pytest.mark.parametrize(
    "folder,target",
    [
        ("eagle1_llama", "target_llama"),
        ("eagle3_llama_fullvocab", "target_llama"),
        ("medusa_llama_vllm", "target_llama"),
        ("dflash_qwen3", "target_qwen3"),
        ("mimo_mtp", "mimo_mtp"),
    ],
)
def test_a_drafter_of_shared_weights_leaves_its_target_alive(folder, target):
    model = recorded_target(target)
    before = {key: np.asarray(model.params[key]) for key in ("embed", "head")}
    drafter = jspec.load(GOLDEN / "models" / folder, target=model)
    shared = [x for x in jax.tree.leaves(drafter.params) if x is model.params["embed"]]
    cache = jspec.CacheConfig(num_pages=16, page_size=4, max_model_len=32, dtype="float32")
    state = jspec.init(drafter.config, drafter.params, cache=cache, max_requests=2)
    state = jspec.admit(state, 0, [1, 2, 3])
    reads = proposers.of(drafter.config).reads(drafter.config)
    step = contract.make_step(
        [contract.Row(slot=0, context=[1, 2, 3], kept=[4], start=0)],
        num_requests=2,
        num_rows=8,
        width=drafter.config.num_drafts + 1,
        pages_per_request=cache.pages_per_request,
        reads=reads,
    )
    state, drafts = jspec.step(state, *step)
    state = jspec.release(state, 0)
    assert shared or folder == "medusa_llama_vllm"  # which has no embedding
    assert int(drafts.num_drafts[0]) > 0
    del state, drafter
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(model.params))
    for key, table in before.items():
        np.testing.assert_array_equal(model.params[key], table)
    assert jspec.generate_plain(model, [[1, 2, 3]], max_tokens=2).num_tokens == 2


WIDE = ["eagle", "eagle3", "mtp", "dflash", "draft_model", "medusa", "eagle3, sampled"]


@pytest.mark.slow
def test_drafts_are_the_same_where_jax_counts_in_64_bits():
    code = (
        "import json, sys, jax\n"
        "from tests.proposers import test_contract as contract\n"
        "assert jax.config.jax_enable_x64\n"
        "drafts = {n: contract.drafts_of(contract.fresh(n)) for n in sys.argv[1:]}\n"
        "print(json.dumps({n: [str(d.tokens.dtype), d.tokens.tolist()] for n, d in "
        "drafts.items()}))\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", code, *WIDE],
        capture_output=True,
        text=True,
        check=True,
        env=os.environ | {"JAX_ENABLE_X64": "1"},
        cwd=os.path.dirname(os.path.dirname(__file__)),
    )
    wanted = {n: ["int32", contract.drafts_of(fresh(n)).tokens.tolist()] for n in WIDE}
    assert json.loads(ended.stdout) == wanted
