"""Loading EAGLE-3 heads: what is shared, what config.json and tensors decide, what is refused."""

import contextlib
import dataclasses
import json

import jax.numpy as jnp
import numpy as np
import pytest

import jspec
from jspec.models import eagle3, weights
from jspec.proposers import _draft
from jspec.proposers.eagle3 import PROPOSER, Eagle3Config, draft_model
from jspec.proposers.loaders.eagle3 import recognises
from tests.conftest import GOLDEN
from tests.support.heads import checkpoint, target
from tests.support.steps import make_step

pytestmark = pytest.mark.any_device

HEADS = [
    "eagle3_llama",
    "eagle3_llama_aux",
    "eagle3_llama_fullvocab",
    "eagle3_llama_v31",
    "peagle_llama",
]
EMBED, HEAD = "embed_tokens.weight", "lm_head.weight"
NO_ROWS = {"num_requests": 1, "num_rows": 1, "width": 2, "pages_per_request": 1}


def load(given, **kwargs):
    given = checkpoint(given) if isinstance(given, str) else given
    return PROPOSER.load(given, target(), **{"dtype": "float32"} | kwargs)


def test_what_is_the_targets_is_shared_and_what_is_not_is_kept():
    params = load("eagle3_llama").params
    assert params["embed"] is target().params["embed"]  # the checkpoint has none
    assert params["head"].shape == (96, 64)
    embed, head = (np.asarray(target().params[name]) for name in ("embed", "head"))
    same = load(checkpoint("eagle3_llama_fullvocab", **{EMBED: embed, HEAD: head})).params
    assert same["embed"] is target().params["embed"] and same["head"] is target().params["head"]
    other = load(checkpoint("eagle3_llama_fullvocab", **{EMBED: embed + 1, HEAD: head + 1})).params
    np.testing.assert_array_equal(other["embed"], embed + 1)
    np.testing.assert_array_equal(other["head"], head + 1)


def test_a_head_without_lm_head_is_scored_by_the_targets():
    full = "eagle3_llama_fullvocab"
    params = load(checkpoint(full, drop=[HEAD])).params
    assert params["head"] is target().params["head"]
    config = dataclasses.replace(target().config, tie_embeddings=True)
    tied = {name: leaf for name, leaf in target().params.items() if name != "head"}
    tied = target()._replace(config=config, params=tied)
    params = PROPOSER.load(checkpoint(full, drop=[HEAD, EMBED]), tied, dtype="float32").params
    assert params["head"] is params["embed"] is tied.params["embed"]


def test_an_embedding_of_another_width_than_the_targets_is_kept(rng):
    """A head of width 48 for a target of width 64, as its own config.json says."""
    config = {
        **checkpoint("eagle3_llama").config,
        "hidden_size": 48,
        "target_hidden_size": 64,
        "head_dim": 16,
    }
    model = Eagle3Config.from_hf(config, [], num_layers=7).model
    tensors = {
        name: rng.standard_normal(shape, np.float32) for name, shape in wanted_tensors(model)
    }
    tensors["d2t"] = np.arange(96)[::-1] - np.arange(96)
    given = checkpoint("eagle3_llama")._replace(
        config=config, names=tuple(tensors), tensors=lambda: tensors.items()
    )
    params = load(given).params
    np.testing.assert_array_equal(params["embed"], tensors[EMBED])
    assert params["fc"].shape == (192, 48) and params["head"].shape == (96, 48)
    del tensors[EMBED]
    with pytest.raises(ValueError, match="no embed_tokens.weight.*width 48.*64.*complete"):
        load(given)


def wanted_tensors(model):
    """Name and shape of each tensor that a checkpoint of this shape has."""
    template = weights.abstract(eagle3.Head, model, "float32")
    for name, place in eagle3.rules(model, []).items():
        if place is not None:
            shape = template
            for key in place.path:
                shape = shape[key]
            start, end = place.columns or (0, shape.shape[-1])
            shape = (*shape.shape[:-1], end - start)
            yield name, shape[::-1] if place.transpose else shape


def test_ties_go_to_the_lowest_target_id_whatever_the_order_of_draft_ids(rng):
    """Target ids 100, 7, 50, ...: equal logits of draft ids 0, 1 and 2 mean token 7."""
    original = dict(checkpoint("eagle3_llama").tensors())
    ids = rng.permutation(128)[:96]
    ids[:3] = sorted(set(range(128)) - set(ids))[:3][::-1]
    head = np.array(original[HEAD])
    head[1:3] = head[0]
    tables = {"d2t": ids - np.arange(96), "t2d": np.isin(np.arange(128), ids)}
    shuffled = checkpoint("eagle3_llama", **tables, **{HEAD: head})
    config, params = load(shuffled)
    assert params["target_ids"].dtype == np.int32
    np.testing.assert_array_equal(params["target_ids"], np.sort(ids))
    wanted = np.zeros((128, 64), np.float32)
    wanted[ids] = head
    np.testing.assert_array_equal(params["head"], wanted[np.sort(ids)])
    out = np.float32(head[:1]) * 100
    model = draft_model(config, params)
    batch = jspec.prepare(*make_step([], **NO_ROWS), vocab_size=128)
    token, _ = _draft.pick(model, config, model.logits(jnp.asarray(out)), batch, 0)
    assert token.tolist() == [ids[:3].min()]


def test_a_table_that_covers_the_whole_vocabulary_is_sorted_away(rng):
    full = "eagle3_llama_fullvocab"
    order = rng.permutation(128)
    tensors = dict(checkpoint(full).tensors())
    table = {"d2t": order - np.arange(128)}
    config, params = load(checkpoint(full, **table, **{HEAD: tensors[HEAD][order]}))
    assert "target_ids" not in params
    np.testing.assert_array_equal(params["head"], tensors[HEAD].astype(np.float32))
    identity = load(checkpoint(full, d2t=np.zeros(128, np.int64))).params
    np.testing.assert_array_equal(identity["head"], params["head"])
    assert config.model.draft_vocab_size == config.vocab_size == 128


def test_a_head_may_have_another_dtype_than_its_target():
    low = target(dtype="bfloat16")
    config, params = PROPOSER.load(checkpoint("eagle3_llama"), low, dtype="float32")
    assert params["fc"].dtype == np.float32 and params["embed"].dtype == jnp.bfloat16
    run = {"max_tokens": 12, "stop_ids": (), "drafting": "fixed"}
    report = jspec.generate(low, [[5, 6, 7, 8], [9, 4]], config, params, **run)
    assert report.stats.num_accepted_tokens > 0


def test_layers_of_the_target_are_read_lowest_first():
    ids = [6, 1, 3]  # the published order does not matter: the target gives them as it runs
    for config in (
        {"eagle_aux_hidden_state_layer_ids": ids},
        {"eagle_config": {"eagle_aux_hidden_state_layer_ids": ids}},
    ):
        reads = PROPOSER.reads(load(checkpoint("eagle3_llama", config=config)).config)
        assert (reads.hidden_layers, reads.hidden_size) == ((1, 3, 6), 192)
    assert load("eagle3_llama").config.hidden_layers == (2, 3, 4)  # 2, L // 2, L - 3
    single = {"eagle_aux_hidden_state_layer_ids": [7], "num_aux_hidden_states": 1}
    fc = np.ones((64, 64), np.float32)
    config, params = load(checkpoint("eagle3_llama", config=single, **{"fc.weight": fc}))
    assert config.hidden_layers == (7,) and params["fc"].shape == (64, 64)


def test_a_head_that_fuses_nothing_reads_the_final_hidden_state():
    for drop in ([], ["fc.weight"]):
        given = checkpoint(
            "eagle3_llama", drop=drop, config={"eagle_config": {"use_aux_hidden_state": False}}
        )
        warned = pytest.warns(UserWarning, match="use_aux_hidden_state False.*fc.weight")
        with contextlib.nullcontext() if drop else warned:
            config, params = load(given)
        reads = PROPOSER.reads(config)
        assert (reads.hidden_layers, reads.hidden_size) == (("norm",), 64)
        assert "fc" not in params


def test_the_speculators_form_of_config_json_is_read():
    flat = checkpoint("eagle3_llama_aux").config
    own = ("draft_vocab_size", "eagle_aux_hidden_state_layer_ids")
    config = {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_config": {"proposal_methods": [{"speculative_tokens": 3}]},
        "target_hidden_size": None,
        "transformer_layer_config": {
            key: value
            for key, value in flat.items()
            if key not in (*own, "norm_before_residual", "architectures")
        },
        **{key: flat[key] for key in own},
    }
    given = checkpoint("eagle3_llama_aux")._replace(config=config)
    drafter = load(given)
    assert drafter.config == dataclasses.replace(load("eagle3_llama_aux").config, num_drafts=3)
    assert drafter.config.model.norm_before_residual  # the default of this form alone
    assert not load("eagle3_llama").config.model.norm_before_residual
    assert not load(
        given._replace(config=config | {"norm_before_residual": False})
    ).config.model.norm_before_residual
    assert load(given, num_drafts=2).config.num_drafts == 2
    assert recognises(config, []) and recognises({"speculators_model_type": "eagle3"}, [])
    del config["transformer_layer_config"]
    with pytest.raises(ValueError, match="transformer_layer_config is None.*Fetch"):
        load(given)


def test_queries_and_keys_are_normed_where_the_checkpoint_has_the_weights():
    norms = {f"midlayer.self_attn.{x}_norm.weight": np.ones(16, np.float32) for x in "qk"}
    config, params = load(checkpoint("eagle3_llama", config={"model_type": "qwen3"}, **norms))
    assert config.model.decoder.qk_norm
    assert params["layers"]["0"]["attention"]["q_norm"]["weight"].shape == (16,)
    assert not load(
        checkpoint("eagle3_llama", config={"model_type": "qwen3"})
    ).config.model.decoder.qk_norm


@pytest.mark.parametrize("name", HEADS)
def test_a_head_is_recognised_by_its_architecture_or_its_first_layer(name):
    head = checkpoint(name)
    assert recognises(head.config, []) and recognises({}, head.names)
    drafter = jspec.load(GOLDEN / "models" / name, target=target())
    assert isinstance(drafter.config, Eagle3Config)
    for other in ("eagle1_llama", "dflash_qwen3", "target_llama"):
        folder = GOLDEN / "models" / other
        assert not recognises(
            json.loads((folder / "config.json").read_text()), checkpoint(other).names
        )


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"config": {"draft_vocab_size": 0}}, "`draft_vocab_size` is 0, wanted a plain int"),
        ({"config": {"draft_vocab_size": -1}}, "`draft_vocab_size` is -1, wanted a plain int"),
        ({"config": {"draft_vocab_size": 2.5}}, "`draft_vocab_size` is 2.5, wanted a plain int"),
        ({"config": {"draft_vocab_size": 129}}, "`draft_vocab_size` is 129.*128.*same model"),
        ({"config": {"target_hidden_size": 48}}, "target_hidden_size is 48, the target's 64.*Load"),
        ({"config": {"vocab_size": 127}}, "vocab_size is 127, the target's 128.*trained for"),
        ({"config": {"kv_lora_rank": 8}}, "latent attention.*another head"),
        ({"config": {"hidden_act": "gelu"}}, "hidden_act is 'gelu'.*'silu'"),
        (
            {"config": {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 2, 8]}}},
            r"layer_ids is \[1, 2, 8\].*L = 7.*name its layers",
        ),
        ({"config": {"eagle_aux_hidden_state_layer_ids": [1, 1, 2]}}, "different layers"),
        ({"config": {"num_aux_hidden_states": 4}}, r"is 4, and the layers are \[2, 3, 4\].*Name 4"),
        (
            {"config": {"eagle_aux_hidden_state_layer_ids": [1, 2]}},
            r"wrong shape: fc.weight \[64, 192\], wanted \[64, 128\]",
        ),
        (
            {
                "config": {
                    "hidden_size": 48,
                    "target_hidden_size": 64,
                    "use_aux_hidden_state": False,
                }
            },
            "width 64, wanted the head's 48.*trained for",
        ),
        ({"config": {"fc_norm": True, "norm_before_fc": True}}, "both true.*Set the one to false"),
        ({"drop": ["d2t"]}, "no d2t, which maps its 96 draft ids to the target's 128.*complete"),
        ({"drop": [HEAD]}, "no lm_head.weight, which scores its 96 draft ids.*complete"),
        ({"d2t": np.zeros(95, np.int64)}, r"d2t is int64 \[95\], wanted 96 ints.*Fetch"),
        ({"d2t": np.zeros(96)}, r"d2t is float64 \[96\], wanted 96 ints"),
        ({"d2t": np.full(96, 33)}, r"a token of its own for each draft id, 0..127"),
        ({"d2t": -np.arange(96)}, "a token of its own"),
        ({HEAD: np.ones((95, 64))}, r"wrong shape: lm_head.weight \[95, 64\], wanted \[96, 64\]"),
        ({EMBED: np.ones((99, 64))}, r"wrong shape: embed_tokens.weight \[99, 64\]"),
        ({"drop": ["fc.weight"]}, r"missing: fc.weight \[64, 192\]"),
        ({"layers.1.mlp.up_proj.weight": np.ones((9, 9))}, "unknown: layers.1.mlp.up_proj.weight"),
        (
            {"layers.1.mlp.up_proj.weight": np.ones((9, 9)), "config": {"num_hidden_layers": 2}},
            "missing: layers.1.input_layernorm.weight",
        ),
    ],
)
def test_a_head_that_does_not_fit_is_refused(changes, words):
    changes = dict(changes)
    options = {name: changes.pop(name) for name in ("drop", "config") if name in changes}
    with pytest.raises(ValueError, match="(?s)" + words):
        load(checkpoint("eagle3_llama", **options, **changes))


def test_all_tensors_that_do_not_fit_are_listed_at_once():
    given = checkpoint(
        "eagle3_llama", drop=["fc.weight"], extra=np.ones(3), **{HEAD: np.ones((95, 64))}
    )
    with pytest.raises(ValueError) as error:
        load(given)
    for line in ("missing: fc.weight", "unknown: extra [3]", "wrong shape: lm_head.weight"):
        assert line in str(error.value)


def test_params_and_config_that_do_not_belong_together_are_refused():
    config, params = load("eagle3_llama")
    cache = jspec.CacheConfig(num_pages=8, max_model_len=64)
    with pytest.raises(ValueError, match="(?s)missing: target_ids.*one call of jspec.load"):
        jspec.init(config, {"embed": params["embed"]}, cache=cache, max_requests=1)
    with pytest.raises(ValueError, match="hidden_layers.*wanted 3.*Pass one id for each"):
        dataclasses.replace(config, hidden_layers=(1, 2))


@pytest.mark.parametrize("model_type", ["gpt_oss", "qwen2", None])
def test_a_head_has_layers_of_the_llama_form_whatever_its_target_is(model_type):
    config = {"model_type": model_type, "tie_word_embeddings": True}
    assert load(checkpoint("eagle3_llama", config=config)).config == load("eagle3_llama").config
