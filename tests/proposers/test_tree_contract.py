"""Drafters of trees do what every drafter must: the contract tests, with a tree in the config."""

import dataclasses

import numpy as np
import pytest

import jspec
from jspec import proposers
from jspec.axes import PAD_SLOT, PAD_TOKEN
from jspec.tree import DynamicTree, Tree
from tests.proposers import test_contract as contract
from tests.proposers import test_contract_boundary as boundary
from tests.support.steps import Row

pytestmark = [pytest.mark.any_device, pytest.mark.slow]

TREES = {
    "eagle": Tree([(0,), (2,), (0, 0), (0, 1), (2, 1), (0, 1, 0)]),
    "eagle3": DynamicTree(top_k=2, depth=3, num_nodes=7),
}
SHARED = [
    contract.test_padding_is_inert_whatever_it_holds,
    contract.test_the_bucket_does_not_change_the_drafts,
    contract.test_permuted_requests_get_permuted_drafts,
    contract.test_rows_that_pad_a_table_are_neither_read_nor_drafted,
    contract.test_fewer_drafts_are_the_first_ones,
    contract.test_a_request_may_ask_for_fewer_drafts,
    contract.test_step_is_prepare_and_propose,
    contract.test_a_request_that_is_discarded_drafts_nothing_and_loses_nothing,
    contract.test_a_released_slot_forgets_its_request,
    boundary.test_a_warmed_bucket_never_compiles_again,
    boundary.test_only_memory_is_donated_and_it_is_rewritten_in_place,
    boundary.test_the_pure_core_scans_under_an_outer_jit_without_the_host,
]


def tiny(name, **changes):
    config = proposers.find(name).Config.tiny()
    tree = TREES[name]
    return dataclasses.replace(config, **{"num_drafts": tree.num_nodes, "tree": tree} | changes)


@pytest.fixture(autouse=True)
def with_trees(monkeypatch):
    monkeypatch.setattr(contract, "tiny", tiny)


@pytest.mark.parametrize("name", TREES)
@pytest.mark.parametrize("test", SHARED, ids=lambda test: test.__name__.removeprefix("test_"))
def test_contract(test, name):
    test(name)


@pytest.mark.parametrize("name", TREES)
def test_contract_of_parents(name):
    """They come before their children, and there is one wherever there is a draft."""
    drafts = contract.drafts_of(contract.fresh(name))
    K = TREES[name].num_nodes
    assert drafts.parents.shape == (contract.B, K) and drafts.parents.dtype == np.int32
    assert drafts.num_drafts.tolist() == [K, K, K, 0]
    depths = np.zeros((contract.B, K), int)
    for b, node in np.ndindex(3, K):
        parent = drafts.parents[b, node]
        assert PAD_TOKEN <= parent < node
        depths[b, node] = 1 if parent == PAD_TOKEN else depths[b, parent] + 1
        assert node == 0 or depths[b, node] >= depths[b, node - 1]
        siblings = drafts.tokens[b, :node][drafts.parents[b, :node] == parent]
        assert drafts.tokens[b, node] not in siblings
    assert (drafts.parents[3] == PAD_TOKEN).all()


@pytest.mark.parametrize("name", TREES)
def test_no_node_goes_past_the_longest_request_or_its_pages(name):
    limit = contract.CACHE.max_model_len
    whole = TREES[name].num_nodes
    for room in (0, 1, 2):
        context = [4, 5, 6] * limit
        context = context[: limit - 1 - room]  # and one token that is kept
        state = jspec.admit(contract.empty(name), 0, context)
        row = Row(slot=0, context=context, kept=[4], start=0)
        got = contract.drafts_of(state, [row], num_rows=limit)
        count = got.num_drafts[0]
        depths = np.asarray(jspec.metadata.ancestors(got.parents, depth=3)).sum(axis=2)[0]
        assert (count == 0) == (room == 0) and count < whole
        assert depths[:count].max(initial=0) == room
        assert (got.tokens[0, count:] == PAD_TOKEN).all()


@pytest.mark.parametrize("name", TREES)
def test_a_tree_is_as_deep_as_a_chain_would_be_long_where_pages_end(name):
    context = [4, 5, 6, 4, 5, 6, 4]
    row = Row(slot=0, context=context, kept=[4], start=0)
    chain = proposers.find(name).Config.tiny()
    deepest = []
    for config in (chain, tiny(name)):
        state = jspec.init(config, contract.weights(config), cache=contract.CACHE, max_requests=5)
        state = jspec.admit(state, 0, context)
        scheduled, verified = contract.layout(state, [row])
        table = scheduled.block_table.copy()
        table[0, 2:] = PAD_SLOT  # two pages of four tokens
        _, got = jspec.step(state, dataclasses.replace(scheduled, block_table=table), verified)
        count = int(got.num_drafts[0])
        if got.parents is not None:
            depths = np.asarray(jspec.metadata.ancestors(got.parents, depth=3)).sum(axis=2)[0]
            count = depths[:count].max()
        deepest.append(count)
    assert deepest == [2, 2]
