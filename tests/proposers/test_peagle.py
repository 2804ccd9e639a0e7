"""P-EAGLE: an EAGLE-3 head that drafts all tokens in one pass, against its recording."""

import dataclasses
import functools

import jax
import numpy as np
import pytest

import jspec
from jspec.models import weights
from jspec.models.eagle3 import Head
from jspec.proposers import _draft
from jspec.proposers.eagle3 import PROPOSER, Eagle3Config, draft_model
from jspec.proposers.loaders.hf_config import mask_token_of
from tests.proposers import test_contract as contract
from tests.proposers import test_contract_boundary as boundary
from tests.support import recordings
from tests.support.heads import (
    GAP_TOLERANCE,
    NEAR_TIE,
    PAGE_SIZE,
    TOLERANCE,
    checkpoint,
    gaps,
    recorded_batch,
    recorded_cache,
    target,
    target_of,
)
from tests.support.steps import Row

pytestmark = pytest.mark.any_device

NAME = "peagle_llama"
K = 5


propose = jax.jit(PROPOSER.propose, static_argnums=(0, 4))


def load(given=NAME, **kwargs):
    given = checkpoint(given) if isinstance(given, str) else given
    return PROPOSER.load(given, target(), **{"dtype": "float32", "num_drafts": K} | kwargs)


def fuse(config, params, hidden):
    return weights.bind(Head, config.model, params).fuse(hidden)


@pytest.fixture
def drafter():
    return load()


@functools.cache
def pass_of(name):
    """Runs the one pass: (mask vector, rows, residual stream, logits, drafts, mask token)."""
    data = recordings.expected(name)
    K = len(data["draft_tokens_0"])
    config, params = PROPOSER.load(checkpoint(name), target_of(name), dtype="float32", num_drafts=K)
    assert config.parallel_drafting
    batch = recorded_batch(data, config, "aux_hidden")
    cache = recorded_cache(data, config.model.decoder)

    @jax.jit
    def run(params, batch, cache):
        model = draft_model(config, params)
        rows = _draft.first_pass(
            dataclasses.replace(batch, hidden=fuse(config, params, batch.hidden)),
            num_slots=K,
            shift=True,
            page_size=PAGE_SIZE,
            max_model_len=cache.max_model_len,
            mask_token=model.mask_token,
            mask_hidden=model.mask_hidden,
        )
        out, x, _ = model.run(rows.token_ids, rows.hidden, rows.view, cache, rows.embeds)
        return rows, x, model.logits(out)

    rows, x, logits = run(params, batch, cache)
    _, drafts = propose(config, params, cache, batch, K)
    start = np.asarray(rows.view.query_start)
    return params["mask_hidden"], rows.token_ids, start, x, logits, drafts, config.mask_token


@recordings.each_model("peagle")
def test_the_pass_gives_the_recorded_rows_and_drafts(name):
    data = recordings.expected(name)
    mask_hidden, ids, start, x, logits, drafts, mask_token = pass_of(name)
    K = drafts.tokens.shape[1]
    for i in range(recordings.num_prompts(data)):
        np.testing.assert_allclose(mask_hidden, data[f"mask_feature_{i}"], **TOLERANCE)
        at = slice(*start[i : i + 2])
        np.testing.assert_array_equal(ids[at], data[f"input_ids_{i}"])
        assert (data[f"input_ids_{i}"][1 - K :] == mask_token).all()
        np.testing.assert_allclose(x[at], data[f"out_hidden_{i}"], **TOLERANCE)
        np.testing.assert_allclose(logits[at], data[f"logits_{i}"], **TOLERANCE)
        gap = data[f"draft_gap_{i}"]
        assert gap.min() > NEAR_TIE  # nothing to excuse
        np.testing.assert_allclose(gaps(logits[at][-K:]), gap, **GAP_TOLERANCE)
        np.testing.assert_array_equal(drafts.tokens[i], data[f"draft_tokens_{i}"])


def test_one_draft_is_that_of_the_chain(drafter):
    data = recordings.expected(NAME)
    config, params = drafter.config, drafter.params
    batch = recorded_batch(data, config, "aux_hidden")
    chain = dataclasses.replace(config, parallel_drafting=False)
    results = []
    for form in (config, chain):
        cache = recorded_cache(data, config.model.decoder)
        results.append(propose(form, params, cache, batch, 1))
    (parallel_cache, parallel), (chain_cache, wanted) = results
    np.testing.assert_array_equal(parallel.tokens, wanted.tokens)
    assert parallel.num_drafts.tolist() == [1, 1, 1, 0]
    np.testing.assert_array_equal(parallel_cache.k, chain_cache.k)


def test_decoding_with_it_gives_the_tokens_of_plain_decoding(drafter):
    data = recordings.expected(NAME)
    prompts = [data[f"prompt_{i}"].tolist() for i in range(recordings.num_prompts(data))]
    options = {"max_tokens": 24, "stop_ids": (), "chunk_size": 7}
    plain = jspec.generate_plain(target(), prompts, **options)
    run = options | {"max_requests": 2, "drafting": "fixed"}
    report = jspec.generate(target(), prompts, *drafter, **run)
    assert [g.tokens for g in report.generations] == [g.tokens for g in plain.generations]
    assert report.stats.num_accepted_tokens > report.stats.num_drafts  # more than one a step


PARALLEL = dataclasses.replace(Eagle3Config.tiny(), parallel_drafting=True, mask_token=63)
RULES = [
    contract.test_padding_is_inert_whatever_it_holds,
    contract.test_the_bucket_does_not_change_the_drafts,
    contract.test_permuted_requests_get_permuted_drafts,
    contract.test_fewer_drafts_are_the_first_ones,
    contract.test_a_request_may_ask_for_fewer_drafts,
    contract.test_step_is_prepare_and_propose,
    contract.test_a_request_that_is_discarded_drafts_nothing_and_loses_nothing,
    contract.test_no_draft_goes_past_the_longest_request,
    boundary.test_a_warmed_bucket_never_compiles_again,
    boundary.test_only_memory_is_donated_and_it_is_rewritten_in_place,
    boundary.test_the_pure_core_scans_under_an_outer_jit_without_the_host,
]


@pytest.fixture
def parallel_contract(monkeypatch):
    """The contract's helpers, over the parallel form."""
    monkeypatch.setattr(
        contract, "tiny", lambda name, **changes: dataclasses.replace(PARALLEL, **changes)
    )


@pytest.mark.slow
@pytest.mark.usefixtures("parallel_contract")
@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_the_contract_of_drafters_holds(rule):
    rule("eagle3")


@pytest.mark.usefixtures("parallel_contract")
def test_rows_of_rejected_and_masked_tokens_leave_no_trace():
    """A step behind rejected drafts drafts like one that reads the same text afresh."""
    context, slot = contract.CONTEXTS[3], 3
    state = contract.fresh("eagle3", slots=[slot])
    read = Row(slot=slot, context=context, kept=[1], start=0)
    state, _ = jspec.step(state, *contract.layout(state, [read]))
    verify = Row(slot=slot, context=[*context, 1], drafts=[7, 8, 9], kept=[7, 2])
    state, drafts = jspec.step(state, *contract.layout(state, [verify]))
    whole = Row(slot=slot, context=[*context, 1, 7], kept=[2], start=0)
    fresh = contract.drafts_of(contract.fresh("eagle3", slots=[slot]), [whole])
    contract.assert_same(jax.tree.map(np.asarray, drafts), fresh)
    assert fresh.num_drafts[0] == PARALLEL.num_drafts


@pytest.mark.parametrize(
    "config, token",
    [
        ({"dflash_config": {"mask_token_id": 7}, "pard_token": 7}, 7),
        ({"dflash_config": {"block_size": 4}, "ptd_token_id": 9}, 9),
        ({"mask_token_id": 6}, 6),
        ({"dflash_config": {"mask_token_id": 0}}, 0),
        ({"pard_token": None, "ptd_token_id": 0}, 0),
    ],
)
def test_the_mask_token_has_four_names(config, token):
    assert mask_token_of(config) == token


@pytest.mark.parametrize(
    "config, token",
    [
        ({"dflash_config": {"mask_token_id": 7}, "pard_token": 8, "ptd_token_id": 9}, 7),
        ({"pard_token": 8, "ptd_token_id": 9}, 8),
        ({"mask_token_id": 6, "pard_token": 8}, 6),
        ({"dflash_config": {"mask_token_id": 0}, "pard_token": 8}, 0),
    ],
)
def test_of_several_mask_tokens_the_first_one_counts_with_a_warning(config, token):
    with pytest.warns(UserWarning, match=f"mask_token_id {token}|pard_token {token}"):
        assert mask_token_of(config) == token


def test_a_config_without_a_mask_token_is_refused():
    with pytest.raises(
        ValueError, match="dflash_config.mask_token_id.*pard_token.*ptd_token_id.*Add"
    ):
        mask_token_of({"dflash_config": {}})
    for token in (-1, 2.5, True):
        with pytest.raises(ValueError, match=f"`pard_token` is {token}, wanted a plain int"):
            mask_token_of({"pard_token": token})


def test_the_checkpoint_or_the_caller_chooses_the_form():
    assert load().config.parallel_drafting
    chain = load(parallel_drafting=False)
    assert not chain.config.parallel_drafting and "mask_hidden" not in chain.params
    without = checkpoint(NAME, drop=["mask_hidden"])
    assert not load(without, parallel_drafting=False).config.parallel_drafting
    with pytest.warns(UserWarning, match="names ptd_token_id.*no mask_hidden"):
        assert not load(without).config.parallel_drafting


def test_a_head_that_fuses_nothing_keeps_its_mask_vector_as_it_is(rng):
    mask = rng.standard_normal((1, 64), np.float32)
    config = {"eagle_config": {"use_aux_hidden_state": False}}
    given = checkpoint(NAME, config=config, mask_hidden=mask, drop=["fc.weight"])
    params = load(given).params
    np.testing.assert_array_equal(params["mask_hidden"], mask[0])


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"drop": ["mask_hidden"]}, "no mask_hidden.*pass parallel_drafting=False"),
        ({"mask_hidden": np.ones((1, 1, 64))}, r"mask_hidden is float64 \[1, 1, 64\].*192.*same"),
        ({"mask_hidden": np.ones((1, 1, 192), np.uint8)}, r"mask_hidden is uint8 .*192 floats"),
        ({"config": {"ptd_token_id": None}}, "ptd_token_id.*Add"),
        ({"config": {"ptd_token_id": 128}}, "ptd_token_id, the mask token, is 128.*128.*trained"),
    ],
)
def test_a_head_that_cannot_draft_in_parallel_is_refused(changes, words):
    with pytest.raises(ValueError, match="(?s)" + words):
        load(checkpoint(NAME, **changes), parallel_drafting=True)


def test_params_without_the_mask_vector_are_refused(drafter):
    params = {name: leaf for name, leaf in drafter.params.items() if name != "mask_hidden"}
    cache = jspec.CacheConfig(num_pages=8, max_model_len=64)
    with pytest.raises(ValueError, match="(?s)missing: mask_hidden.*one call of jspec.load"):
        jspec.init(drafter.config, params, cache=cache, max_requests=1)
