"""Weights that a drafter is started with: what fits its config, and what is refused by name."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jspec
from jspec import proposers
from tests.support.counting import backend_compiles
from tests.support.padded_tables import padded_config, padded_params
from tests.support.steps import Row, make_step

pytestmark = pytest.mark.any_device

CACHE = jspec.CacheConfig(num_pages=32, page_size=4, max_model_len=32, dtype="float32")
WITH_WEIGHTS = [name for name, p in proposers.REGISTRY.items() if p.init_params]
WITHOUT = [name for name, p in proposers.REGISTRY.items() if not p.init_params]
READING = [name for name in WITH_WEIGHTS if name != "draft_model"] + ["extract_hidden_states"]
TABLES = ("embed", "head")
WITH_TABLES = ["eagle3", "dflash", "medusa"]


def weights(config, dtype="float32"):
    init_params = proposers.of(config).init_params
    return init_params and init_params(config, jax.random.key(0), dtype)


def start(config, params, cache=CACHE):
    state = jspec.init(config, params, cache=cache, max_requests=2)
    return jspec.admit(jspec.admit(state, 0, [8]), 1, [5, 6, 7])


def step(config):
    return make_step(
        [Row(slot=1, context=[5, 6, 7], kept=[9], start=0), Row(slot=0, context=[8], kept=[4])],
        num_requests=2,
        num_rows=6,
        width=config.num_drafts + 1,
        pages_per_request=CACHE.pages_per_request,
        reads=proposers.of(config).reads(config),
    )


@pytest.mark.parametrize("name", WITH_WEIGHTS)
def test_weights_that_do_not_fit_the_config_are_refused_by_name(name):
    config = proposers.find(name).Config.tiny()
    params = weights(config)
    first = min(params)

    def refused(changed, error, words):
        with pytest.raises(error, match="(?s)" + words):
            start(config, changed)

    refused(None, ValueError, f"`params` is None.*weights of {name}.*jspec.load")
    refused([1, 2], TypeError, f"`params` is a list.*nested dict.*{name}.*jspec.load")
    refused(start(config, params), TypeError, "`params` is a State.*jspec.load")
    refused({**params, first: None}, TypeError, f"`params/{first}` is a NoneType.*jspec.load")
    refused({}, ValueError, f"does not fit the config of {name}.*missing: {first}.*jspec.load")
    refused({**params, "extra": np.ones(3)}, ValueError, r"unknown: extra \[3\]")
    cut = jax.tree.map(lambda leaf: leaf[1:], params)
    refused(cut, ValueError, rf"wrong shape: {first}\S* \[.*\], wanted \[.*jspec.load")
    wide = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), params)
    refused(wide, TypeError, "has dtype float64, wanted .*Convert it")
    assert start(config, jax.tree.map(np.asarray, params)).params.keys() == params.keys()


@pytest.mark.parametrize("name", WITH_WEIGHTS)
def test_pure_refuses_weights_that_do_not_fit_the_config_when_it_is_traced(name):
    config = proposers.find(name).Config.tiny()
    params = weights(config)
    memory, batch = start(config, params).memory, jspec.prepare(*step(config))
    first = min(params)

    def traced(changed):
        return jax.eval_shape(jspec.pure(config), changed, memory, batch)

    assert traced(params)[1].tokens.shape == (2, config.num_drafts)
    with pytest.raises(ValueError, match=f"pure: .*fit the config of {name}.*\n.*: {first}"):
        traced({key: leaf for key, leaf in params.items() if key != first})
    with pytest.raises(ValueError, match="pure: (?s:.*)unknown: extra"):
        traced({**params, "extra": np.ones(3)})
    with pytest.raises(ValueError, match="pure: (?s:.*)head.*padded_vocab_size"):
        traced(padded_params(params))
    with pytest.raises(TypeError, match="pure: .*has dtype uint8, wanted "):
        traced(jax.tree.map(lambda leaf: leaf.astype(jnp.uint8), params))
    with pytest.raises(ValueError, match=f"pure: `params` is None.*{name}"):
        traced(None)


def with_a_table(name):
    """A method over a draft vocabulary: every second token can be drafted."""
    config = proposers.find(name).Config.tiny()
    if name != "eagle3":
        model = dataclasses.replace(config.model, draft_vocab_size=config.vocab_size // 2)
        config = dataclasses.replace(config, model=model)
    return config, weights(config)


@pytest.mark.parametrize("name", WITH_TABLES)
def test_a_table_of_token_ids_that_leads_out_of_the_vocabulary_is_refused(name):
    config, params = with_a_table(name)
    ids = np.asarray(params["target_ids"])
    start(config, params)

    def refused(changed, words):
        with pytest.raises(ValueError, match=words):
            start(config, {**params, "target_ids": np.asarray(changed, np.int32)})

    V = config.vocab_size
    refused([*ids[:-1], V], f"`params/target_ids` has {V} at {len(ids) - 1}, wanted .* to {V - 1}")
    refused([-1, *ids[1:]], "`params/target_ids` has -1 at 0")
    refused([*ids[:1], ids[0], *ids[2:]], f"has {ids[0]} after {ids[0]} at 1, wanted ascending")
    refused(ids[::-1], "wanted ascending token ids")


def test_restore_checks_the_table_and_keeps_what_the_config_says_of_padding(tmp_path):
    config, params = with_a_table("medusa")
    config, params = padded_config(config), padded_params(params)
    jspec.save(tmp_path / "padded", jspec.Drafter(config, params))
    assert jspec.restore(tmp_path / "padded").config == config
    outside = {**params, "target_ids": params["target_ids"].at[3].set(config.vocab_size)}
    jspec.save(tmp_path / "outside", jspec.Drafter(config, outside))
    with pytest.raises(ValueError, match=r"outside: `params/target_ids` has 64 at 3, wanted"):
        jspec.restore(tmp_path / "outside")
    ints = {**params, "target_ids": params["target_ids"].astype(jnp.float32)}
    jspec.save(tmp_path / "ints", jspec.Drafter(config, ints))
    with pytest.raises(
        TypeError, match="ints: `params/target_ids` has dtype float32, wanted int32"
    ):
        jspec.restore(tmp_path / "ints")


@pytest.mark.parametrize("sampling", ["greedy", "probabilistic"])
@pytest.mark.parametrize("name", WITH_TABLES)
def test_drafts_end_where_a_traced_table_leads_out_of_the_vocabulary(name, sampling):
    config, params = with_a_table(name)
    config = dataclasses.replace(config, draft_sampling=sampling)
    memory = start(config, params).memory
    batch = jspec.prepare(*step(config))
    draft = jax.jit(jspec.pure(config))
    table, V = params["target_ids"], config.vocab_size
    wanted = draft(params, memory, batch)[1]
    first = np.asarray(wanted.tokens)[:, 0]
    assert (first >= 0).all()
    for outside in (-1, V, 2**31 - 1, -(2**31)):
        bad = jnp.where(table == first[0], outside, table)
        drafts = draft({**params, "target_ids": bad}, memory, batch)[1]
        tokens = np.asarray(drafts.tokens)
        assert tokens[0].tolist() == [-1] * config.num_drafts and drafts.num_drafts[0] == 0
        assert (tokens < V).all() and first[0] not in tokens
        if drafts.probs is not None:
            assert not np.asarray(drafts.probs)[0].any()


@pytest.mark.parametrize("name", WITHOUT)
def test_weights_of_a_drafter_without_any_are_refused(name):
    config = proposers.find(name).Config.tiny()
    with pytest.raises(ValueError, match=f"{name} has no weights. Leave params out"):
        start(config, {"embed": np.ones(3, np.float32)})


@pytest.mark.parametrize("name", WITH_WEIGHTS)
def test_tables_of_the_target_may_have_another_dtype_than_the_weights(name):
    config = proposers.find(name).Config.tiny()
    exact = jax.tree.map(lambda x: x.astype(jnp.bfloat16).astype(x.dtype), weights(config))
    scheduled, verified = step(config)
    _, wanted = jspec.step(start(config, exact), scheduled, verified)
    if name == "draft_model":  # shares no table
        return
    mixed = {k: x.astype(jnp.bfloat16) if k in TABLES else x for k, x in exact.items()}
    _, got = jspec.step(start(config, mixed), scheduled, verified)
    np.testing.assert_array_equal(got.num_drafts, wanted.num_drafts)
    assert np.asarray(got.tokens).max() < config.vocab_size


@pytest.mark.parametrize("name", READING)
def test_a_bucket_names_the_dtype_of_the_targets_hidden_states(name):
    config = proposers.find(name).Config.tiny()
    state = start(config, weights(config))
    buckets = jspec.Buckets(requests=(2,), tokens=(6,), hidden_dtype="bfloat16")
    jspec.warmup(state, buckets)
    scheduled, verified = step(config)
    scheduled = dataclasses.replace(scheduled, hidden=scheduled.hidden.astype(jnp.bfloat16))
    with backend_compiles() as compiled:
        jspec.step(state, scheduled, verified)
    assert not compiled


def test_a_hidden_dtype_that_is_none_is_refused():
    with pytest.raises(ValueError, match="Buckets: `dtype` is 'int8'.*Pass"):
        jspec.Buckets(requests=(2,), tokens=(6,), hidden_dtype="int8")
