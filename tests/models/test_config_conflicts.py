"""A config.json that contradicts itself: refused by both names, or warned of once."""

import pytest

import jspec
from jspec import cli
from jspec._checks import read_json
from jspec.models.config import ModelConfig
from jspec.models.options import agreed
from jspec.models.rope import RopeConfig
from jspec.proposers.eagle3 import Eagle3Config
from jspec.proposers.loaders import dflash
from jspec.runtime.scheduling import limits
from tests.support.config_files import copy, warned_once
from tests.support.heads import checkpoint

HF = {
    "model_type": "llama",
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
}
QWEN2 = HF | {"model_type": "qwen2"}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}
FULL, SLIDES = "full_attention", "sliding_attention"


# Two keys of one config.json.


@pytest.mark.parametrize(
    "changes, same_as, words",
    [
        (
            {"rope_theta": 1e4, "rope_parameters": {"rope_theta": 50.0}},
            {"rope_theta": 50.0},
            ["rope_parameters.rope_theta 50.0", "rope_theta 10000.0"],
        ),
        (
            {"rope_theta": 1e4, "rope_scaling": {"type": "linear", "factor": 2, "rope_theta": 9}},
            {"rope_theta": 9, "rope_scaling": {"type": "linear", "factor": 2}},
            ["rope_scaling.rope_theta 9", "rope_theta 10000.0"],
        ),
        (
            {
                "rope_scaling": {"type": "linear", "factor": 2.0},
                "rope_parameters": {"rope_type": "linear", "factor": 3.0},
            },
            {"rope_scaling": {"type": "linear", "factor": 2.0}},
            ["rope_scaling {'type': 'linear', 'factor': 2.0}", "'factor': 3.0", "transformers"],
        ),
        (
            {"rope_scaling": None, "rope_parameters": {"rope_type": "linear", "factor": 3.0}},
            {"rope_scaling": {"type": "linear", "factor": 3.0}},
            ["rope_scaling None", "rope_parameters {'rope_type': 'linear'", "transformers 5"],
        ),
        (
            {"rope_scaling": {"type": "linear", "factor": 2.0, "low_freq_factor": 1.0}},
            {"rope_scaling": {"type": "linear", "factor": 2.0}},
            ["rope_scaling.rope_type 'linear'", "low_freq_factor"],
        ),
        (
            {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}},
            {"rope_scaling": YARN},
            ["original_max_position_embeddings", "max_position_embeddings 512"],
        ),
        (
            {"rope_scaling": YARN, "max_position_embeddings": 9999},
            {"rope_scaling": YARN},
            ["max_position_embeddings 9999", "stretches 512 positions by 4.0 to 2048"],
        ),
        (
            {"architectures": ["Qwen3ForCausalLM"]},
            {},
            ["model_type 'llama'", "architectures ['Qwen3ForCausalLM']"],
        ),
        (
            {"model_type": "qwen2", "attention_bias": False},
            {"model_type": "qwen2"},
            ["attention_bias False", "model_type 'qwen2'"],
        ),
        (
            {
                "model_type": "qwen2",
                "use_sliding_window": True,
                "sliding_window": 8,
                "max_window_layers": 1,
                "layer_types": [FULL, FULL],
            },
            {"model_type": "qwen2"},
            ["use_sliding_window True", "max_window_layers", "layer_types"],
        ),
    ],
)
def test_where_two_keys_differ_the_one_that_transformers_reads_counts(changes, same_as, words):
    config, text = warned_once(ModelConfig.from_hf, HF | changes)
    assert config == ModelConfig.from_hf(HF | same_as)
    assert all(word in text for word in words)


@pytest.mark.parametrize(
    "changes",
    [
        {"rope_theta": 1000000, "rope_parameters": {"rope_theta": 1e6}},
        {"rope_scaling": {"type": "linear", "rope_type": "linear", "factor": 2.0}},
        {
            "rope_theta": 5e5,
            "rope_scaling": {"type": "linear", "factor": 2.0},
            "rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 5e5},
        },
        {"rope_scaling": YARN},  # the recipe of Qwen's pages
        {"rope_scaling": YARN, "max_position_embeddings": 2048},
        {"rope_scaling": YARN, "original_max_position_embeddings": 512},
        {"architectures": ["LlamaForCausalLM"]},
        {"head_dim": 32},
        {"torch_dtype": "bfloat16", "dtype": "float32"},  # neither is read
    ],
)
def test_keys_that_say_the_same_are_no_conflict(changes):
    ModelConfig.from_hf(HF | changes)


@pytest.mark.parametrize(
    "changes, match",
    [
        (
            {"rope_scaling": {"rope_type": "linear", "type": "yarn", "factor": 2.0}},
            "rope_scaling says rope_type 'linear' and type 'yarn'",
        ),
        ({"rope_scaling": {"factor": 2.0}}, "rope_scaling has factor 2.0 and no rope_type"),
        (
            {"rope_scaling": YARN, "original_max_position_embeddings": 256},
            "original_max_position_embeddings 512 and original_max_position_embeddings 256",
        ),
        ({"layer_types": [FULL]}, "num_hidden_layers is 2, and layer_types has 1"),
        ({"text_config": {"hidden_size": 64}}, "text_config is .'hidden_size': 64."),
        ({"hidden_size": 34}, "hidden_size is 34, wanted a multiple of num_attention_heads = 4"),
        ({"num_key_value_heads": 3}, "num_key_value_heads is 3.*num_attention_heads = 4"),
    ],
)
def test_what_readers_disagree_on_is_refused_with_both_sides(changes, match):
    with pytest.raises(ValueError, match=match):
        ModelConfig.from_hf(HF | changes)


def test_a_key_that_is_there_twice_is_warned_of(tmp_path):
    file = tmp_path / "config.json"
    file.write_text('{"rope_theta": 1, "hidden_size": 2, "rope_theta": 3, "hidden_size": 2}')
    content, text = warned_once(read_json, file)
    assert content == {"rope_theta": 3, "hidden_size": 2}
    assert "rope_theta 1 and again rope_theta 3" in text


def test_a_true_and_a_1_are_not_the_same_value():
    assert agreed({"a": 1, "b": 1.0}, reader="x") == 1
    assert agreed({"a": None, "b": None}, reader="x") is None
    value, text = warned_once(agreed, {"a": 1, "b": True, "c": 2}, reader="x")
    assert value == 1 and "a 1 and b True and c 2" in text


@pytest.mark.parametrize("value", ["7", [7], {"x": 7}, True, -7, 0, 7.5, float("nan")])
@pytest.mark.parametrize(
    "key",
    [
        *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "head_dim"),
        *("num_attention_heads", "num_key_value_heads", "max_position_embeddings"),
        "sliding_window",
    ],
)
def test_a_size_of_another_type_is_refused_by_its_key(key, value):
    with pytest.raises(ValueError, match=f"`{key}` is .*wanted a plain int") as error:
        ModelConfig.from_hf(QWEN2 | {key: value})
    assert "\n" not in str(error.value)


# How far rope scaling stretches the context.


@pytest.mark.parametrize(
    "scaling, positions",
    [
        (None, 512),
        (YARN, 2048),
        (YARN | {"original_max_position_embeddings": 128}, 512),
        ({"rope_type": "linear", "factor": 2.5}, 1280),
        ({"rope_type": "linear", "factor": 1.1}, 563),
        (
            {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            },
            512,
        ),
    ],
)
def test_the_context_is_what_scaling_stretches_it_to(scaling, positions):
    config = ModelConfig.from_hf(HF | {"rope_scaling": scaling})
    assert config.max_positions == positions
    assert ModelConfig.from_hf(config.to_hf()) == config
    assert RopeConfig(kind="linear", factor=1e300).context(10**9) == 2**31 - 1


def test_a_prompt_fits_a_context_that_yarn_stretches(tmp_path):
    model = jspec.load(copy(tmp_path, "draft_llama_small", rope_scaling=YARN), "float32")
    prompt = [3, 4] * 350  # 700 tokens, where max_position_embeddings is 512
    assert limits(model, [prompt], 2, 1, None, 64).max_model_len == 1024
    with pytest.raises(ValueError, match="3000 tokens.*2048.*up to what the model was made for"):
        limits(model, [[3] * 3000], 2, 1, None, 64)
    cache = jspec.CacheConfig(num_pages=400, max_model_len=4096)
    with pytest.raises(ValueError, match="4096, above the 2048.*Lower it, or .*RoPE scaling"):
        limits(model, [prompt], 2, 1, cache, 64)


# Drafters' own settings.


@pytest.mark.parametrize(
    "changes, hidden_layers",
    [
        (
            {
                "eagle_aux_hidden_state_layer_ids": [1, 2, 3],
                "eagle_config": {"eagle_aux_hidden_state_layer_ids": [4, 5, 6]},
            },
            (1, 2, 3),
        ),
        ({"eagle_config": {"use_aux_hidden_state": False}, "use_aux_hidden_state": True}, None),
    ],
)
def test_an_eagle3_setting_in_two_places_counts_at_the_top_level(changes, hidden_layers):
    hf = checkpoint("eagle3_llama").config
    config, text = warned_once(Eagle3Config.from_hf, hf | changes, [], num_layers=7)
    assert config.hidden_layers == (hidden_layers or (2, 3, 4))
    assert "eagle_config." in text and "as in vLLM" in text


@pytest.mark.parametrize("place", ["top", "eagle_config"])
def test_an_empty_list_of_layers_says_nothing(place):
    ids = {"eagle_aux_hidden_state_layer_ids": []}
    hf = checkpoint("eagle3_llama").config | (ids if place == "top" else {place: ids})
    assert Eagle3Config.from_hf(hf, [], num_layers=7).hidden_layers == (2, 3, 4)
    assert dflash._hidden_layers(ids, 2, 5) == dflash._hidden_layers({}, 2, 5)


def speculators(kind, layer, **stated):
    return {"speculators_model_type": kind, "transformer_layer_config": layer, **stated}


@pytest.mark.parametrize("kind, default", [("eagle3", True), ("peagle", False)])
def test_norm_before_residual_has_the_default_of_its_format(kind, default):
    flat = {k: v for k, v in checkpoint("peagle_llama").config.items() if k[:4] != "norm"}
    config = Eagle3Config.from_hf(speculators(kind, flat), ["mask_hidden"], num_layers=7)
    assert config.model.norm_before_residual is default
    stated = speculators(kind, flat, norm_before_residual=not default)
    config = Eagle3Config.from_hf(stated, ["mask_hidden"], num_layers=7)
    assert config.model.norm_before_residual is not default


def test_sizes_of_the_speculators_format_count_where_the_layers_are():
    flat = checkpoint("eagle3_llama").config
    hf = speculators("eagle3", flat, intermediate_size=999)
    config, text = warned_once(Eagle3Config.from_hf, hf, [], num_layers=7)
    assert config.model.decoder.intermediate_size == 128
    assert "transformer_layer_config.intermediate_size 128 and intermediate_size 999" in text
    hf = speculators("eagle3", flat, draft_vocab_size=50)  # an option of the head itself
    config, text = warned_once(Eagle3Config.from_hf, hf, [], num_layers=7)
    assert config.model.draft_vocab_size == 50
    assert "draft_vocab_size 50 and transformer_layer_config.draft_vocab_size 96" in text


@pytest.mark.parametrize(
    "config, layers",
    [
        ({"eagle_aux_hidden_state_layer_ids": [1, 2], "target_layer_ids": [0, 2]}, (1, 2)),
        ({"dflash_config": {"target_layer_ids": [0, 2]}, "target_layer_ids": [0, 3]}, (1, 3)),
    ],
)
def test_layer_ids_of_a_block_that_differ_are_warned_of(config, layers):
    got, text = warned_once(dflash._hidden_layers, config, 2, 5)
    assert got == layers and "target_layer_ids" in text


@pytest.mark.parametrize(
    "config, words",
    [
        (
            {"is_causal": True, "dflash_config": {"causal": False}},
            "is_causal True and causal False",
        ),
        (
            {
                "layer_types": [SLIDES, FULL],
                "sliding_window": 9,
                "dflash_config": {"swa_window_size": 4},
            },
            "swa_window_size 4 and sliding_window 9",
        ),
    ],
)
def test_masks_of_a_block_that_differ_are_warned_of(config, words):
    assert words in warned_once(dflash._masks, config, 2)[1]


def test_a_block_size_in_two_places_is_warned_of():
    hf = {"block_size": 8, "dflash_config": {"block_size": 4}}
    number, text = warned_once(dflash._num_drafts, hf)
    assert number == 3 and "dflash_config.block_size 4 and block_size 8" in text


# Options of calls.


def test_an_unknown_word_of_a_command_offers_the_nearest(capsys):
    with pytest.raises(SystemExit):
        cli.main(["generate", "--model", "x", "--prompt", "a", "--num-draftz", "3"])
    assert "--num-draftz 3. Did you mean --num-drafts?" in capsys.readouterr().err
