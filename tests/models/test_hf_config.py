"""Drafters' config.json files that are damaged: each is refused by the field, not from inside."""

import json
import re
import shutil

import pytest

import jspec
from jspec.proposers.loaders.hf_config import num_drafts_of
from tests.conftest import GOLDEN
from tests.support.heads import target

HEADS = {
    "eagle1_llama": "target_llama",
    "eagle3_llama": "target_llama",
    "peagle_llama": "target_llama",
    "draft_llama_small": "target_llama",
    "mimo_mtp": "mimo_mtp",
    "dflash_qwen3": "target_qwen3",
    "dflash2_qwen3": "target_qwen3",
    "medusa_llama_vllm_trunc": "target_llama",
}
OBJECTS = [3, "x", [1], True]
NO_BOOLS = ["true", 1, [], {}]


def load(tmp_path, name, **changes):
    folder = tmp_path / "head"
    shutil.copytree(GOLDEN / "models" / name, folder)
    config = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps(config))
    return jspec.load(folder, target=target(HEADS[name]))


def check(tmp_path, name, field, value, wanted, **changes):
    changes = changes or {field: value}
    with pytest.raises(ValueError, match=re.escape(field)) as error:
        load(tmp_path, name, **changes)
    assert wanted in str(error.value)


@pytest.mark.parametrize("value", [3, "Llama", {"a": 1}, [None]])
@pytest.mark.parametrize("name", HEADS)
def test_architectures_are_a_list_of_names(tmp_path, name, value):
    check(tmp_path, name, "architectures", value, "a list of names")


@pytest.mark.parametrize("value", OBJECTS)
@pytest.mark.parametrize(
    "name, field",
    [
        ("eagle3_llama", "eagle_config"),
        ("eagle3_llama", "speculators_config"),
        ("peagle_llama", "dflash_config"),
        ("dflash_qwen3", "dflash_config"),
        ("dflash_qwen3", "eagle_config"),
    ],
)
def test_what_should_be_an_object_is_one(tmp_path, name, field, value):
    check(tmp_path, name, field, value, "wanted an object")


@pytest.mark.parametrize("value", NO_BOOLS)
@pytest.mark.parametrize(
    "name, field",
    [
        ("eagle1_llama", "attention_bias"),
        ("eagle1_llama", "tie_word_embeddings"),
        ("draft_llama_small", "qkv_bias"),
        ("eagle3_llama", "norm_before_residual"),
        ("eagle3_llama", "norm_output"),
        ("eagle3_llama", "fc_norm"),
        ("eagle3_llama", "use_aux_hidden_state"),
        ("dflash_qwen3", "is_causal"),
        ("medusa_llama_vllm_trunc", "medusa_fc_bias"),
        ("medusa_llama_vllm_trunc", "original_lm_head"),
    ],
)
def test_a_switch_is_true_or_false(tmp_path, name, field, value):
    field = "causal" if field == "is_causal" else field
    changes = {"is_causal" if field == "causal" else field: value}
    check(tmp_path, name, field, value, "wanted true or false", **changes)


@pytest.mark.parametrize("key", ["causal", "use_aux_hidden_state", "use_swa"])
def test_a_switch_of_dflash_config_is_true_or_false(tmp_path, key):
    settings = {"mask_token_id": 127, "target_layer_ids": [0, 2, 3], key: 1}
    check(tmp_path, "dflash_qwen3", key, 1, "wanted true or false", dflash_config=settings)


@pytest.mark.parametrize(
    "name, field",
    [
        *((name, "rope_theta") for name in ("eagle1_llama", "dflash_qwen3", "mimo_mtp")),
        ("eagle3_llama", "rms_norm_eps"),
        ("medusa_llama_vllm_trunc", "logit_scale"),
    ],
)
@pytest.mark.parametrize("value", [0, -1.0, True, "1", [], float("inf"), float("nan")])
def test_a_scale_is_a_number_above_0(tmp_path, name, field, value):
    field = field.removeprefix("rope_")
    changes = {"rope_theta" if field == "theta" else field: value}
    check(tmp_path, name, field, value, "wanted a number above 0", **changes)


@pytest.mark.parametrize(
    "name, field",
    [
        *((name, "draft_vocab_size") for name in ("eagle3_llama", "peagle_llama", "dflash_qwen3")),
        *((name, "head_dim") for name in ("eagle3_llama", "draft_llama_small", "dflash_qwen3")),
        ("medusa_llama_vllm_trunc", "truncated_vocab_size"),
        ("medusa_llama_vllm_trunc", "num_heads"),
        ("mimo_mtp", "num_nextn_predict_layers"),
        ("dflash_qwen3", "block_size"),
    ],
)
@pytest.mark.parametrize("value", [0, -1, 2.5, True, "4", []])
def test_a_size_is_a_whole_number_above_0(tmp_path, name, field, value):
    check(tmp_path, name, field, value, "wanted a plain int")


@pytest.mark.parametrize(
    "config, words",
    [
        ({"proposal_methods": 3}, "proposal_methods is 3, wanted a list of objects.*num_drafts="),
        ({"proposal_methods": ["x"]}, "proposal_methods is .*wanted a list of objects"),
        ({"proposal_methods": [{"speculative_tokens": 0}]}, "speculative_tokens.*at least 1"),
        ({"proposal_methods": [{"speculative_tokens": "3"}]}, "speculative_tokens.*plain int"),
    ],
)
def test_the_number_of_drafts_is_read_or_refused(config, words):
    with pytest.raises(ValueError, match=words):
        num_drafts_of({"speculators_config": config})
    good = {"proposal_methods": [{"speculative_tokens": 7}]}
    assert num_drafts_of({"speculators_config": good}) == 7
    assert num_drafts_of({"speculators_config": None}) == num_drafts_of({}) == 5


@pytest.mark.parametrize("name", ["eagle3_llama", "dflash_qwen3", "draft_llama_small"])
def test_null_says_nothing(tmp_path, name):
    nulls = ("speculators_model_type", "speculators_config", "eagle_config", "qkv_bias")
    assert load(tmp_path, name, **dict.fromkeys(nulls)).config == (
        jspec.load(GOLDEN / "models" / name, target=target(HEADS[name])).config
    )
