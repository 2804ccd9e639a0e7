"""Model configs from config.json: every accepted form, and every refusal by name."""

import json

import numpy as np
import pytest

from jspec.config import Buckets, CacheConfig
from jspec.models.config import ModelConfig
from jspec.models.layers import rope_frequencies
from jspec.models.rope import RopeConfig

LLAMA = {
    "model_type": "llama",
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def test_what_config_json_leaves_out_takes_the_architectures_defaults():
    assert ModelConfig.from_hf(LLAMA) == ModelConfig(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=96,
        num_layers=3,
        num_heads=4,
        num_kv_heads=4,
        head_dim=16,
    )


def test_smollm2_reads_as_published():
    published = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": 49152,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "hidden_act": "silu",
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-05,
        "rope_interleaved": False,
        "rope_scaling": None,
        "rope_theta": 100000,
        "tie_word_embeddings": True,
        "eos_token_id": 2,
    }
    config = ModelConfig.from_hf(published)
    assert (config.num_kv_heads, config.head_dim, config.tie_embeddings) == (3, 64, True)
    assert config.rope == RopeConfig(theta=100000.0)
    assert config.eos_token_ids == (2,)
    assert config.rms_norm_eps == 1e-5


@pytest.mark.parametrize(
    "changes,qkv_bias,o_bias,qk_norm",
    [
        ({}, False, False, False),
        ({"attention_bias": True}, True, True, False),
        ({"attention_bias": True, "qkv_bias": False}, False, True, False),
        ({"model_type": "qwen2"}, True, False, False),
        ({"model_type": "mimo", "attention_bias": True}, True, False, False),
        ({"model_type": "qwen3"}, False, False, True),
        ({"model_type": "qwen3", "attention_bias": True}, True, True, True),
    ],
)
def test_biases_and_norms_follow_the_model_type(changes, qkv_bias, o_bias, qk_norm):
    config = ModelConfig.from_hf(LLAMA | changes)
    assert (config.qkv_bias, config.o_bias, config.qk_norm) == (qkv_bias, o_bias, qk_norm)


@pytest.mark.parametrize("eos,ids", [(None, ()), (2, (2,)), ([2, 7], (2, 7))])
def test_end_tokens_are_one_or_several(eos, ids):
    assert ModelConfig.from_hf(LLAMA | {"eos_token_id": eos}).eos_token_ids == ids


@pytest.mark.parametrize("where", ["folder", "file"])
def test_a_config_is_read_from_disk(where, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    path = tmp_path if where == "folder" else tmp_path / "config.json"
    assert ModelConfig.from_hf(path) == ModelConfig.from_hf(LLAMA)


@pytest.mark.parametrize(
    "old,new",
    [
        ({"rope_theta": 5e5}, {"rope_theta": 5e5, "rope_type": "default"}),
        (
            {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 4.0}},
            {"rope_theta": 5e5, "rope_type": "linear", "factor": 4.0},
        ),
        ({"rope_theta": 5e5, "rope_scaling": LLAMA3_ROPE}, {"rope_theta": 5e5, **LLAMA3_ROPE}),
    ],
)
def test_both_forms_of_rope_options_mean_the_same(old, new):
    config = ModelConfig.from_hf(LLAMA | old)
    assert config == ModelConfig.from_hf(LLAMA | {"rope_parameters": new})
    assert config.rope.theta == 5e5
    hash(config)  # static in jit


def test_linear_rope_stretches_every_frequency():
    plain, linear = RopeConfig(), RopeConfig(kind="linear", factor=4.0)
    np.testing.assert_allclose(rope_frequencies(linear, 8), rope_frequencies(plain, 8) / 4)
    np.testing.assert_allclose(rope_frequencies(plain, 4), [1.0, 0.01])


@pytest.mark.parametrize("high", [4.0, 1.0])  # 1.0: no frequencies in between
def test_llama3_rope_follows_the_published_rule(high):
    rope = RopeConfig.from_hf({"rope_scaling": LLAMA3_ROPE | {"high_freq_factor": high}})
    for got, inverse in zip(
        rope_frequencies(rope, 128), 10000.0 ** (-np.arange(64) / 64), strict=True
    ):
        wavelength = 2 * np.pi / inverse
        if wavelength < 8192 / high:
            wanted = inverse
        elif wavelength > 8192 / 1.0:
            wanted = inverse / 8
        else:
            smooth = (8192 / wavelength - 1.0) / (high - 1.0)
            wanted = (1 - smooth) * inverse / 8 + smooth * inverse
        assert got == pytest.approx(wanted, rel=1e-5)


@pytest.mark.parametrize(
    "changes,match",
    [
        ({"model_type": "gemma3"}, "wanted one of llama, mimo, qwen2, qwen3"),
        ({"model_type": None}, "wanted one of llama, mimo, qwen2, qwen3"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'.*wanted 'silu'"),
        ({"model_type": "qwen2", "mlp_bias": True}, "mlp_bias is True, which a qwen2 has not"),
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantization_config"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"sliding_window": 4096}, "full attention in every layer"),
        ({"layer_types": ["full_attention"] * 2 + ["sliding_attention"]}, "full attention"),
        ({"layer_types": ["full_attention"] * 2}, "num_hidden_layers is 3.*layer_types has 2"),
        ({"hidden_size": None}, "'hidden_size' is missing"),
        ({"num_key_value_heads": 3}, "divisor of num_attention_heads = 4"),
        ({"hidden_size": 66}, "hidden_size is 66, wanted a multiple.*head_dim is missing"),
        ({"head_dim": 15}, "even number"),
        ({"num_hidden_layers": 0}, "`num_hidden_layers` is 0, wanted .* at least 1"),
        ({"vocab_size": 12.5}, "`vocab_size` is 12.5"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 4.0}}, "default, linear, llama3"),
        ({"rope_scaling": {"rope_type": "linear"}}, "needs .'factor'."),
        ({"rope_scaling": {"rope_type": "linear", "factor": 0.0}}, "number above 0"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, "must serve all layers"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "only whole heads"),
        ({"num_attention_heads": 0}, "`num_attention_heads` is 0"),
        ({"num_attention_heads": "4"}, "`num_attention_heads` is '4'"),
        ({"hidden_size": [64]}, "`hidden_size` is .64."),
        ({"rms_norm_eps": None}, "rms_norm_eps is None, wanted a number above 0"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps is nan"),
        ({"eos_token_id": {}}, "eos_token_id"),
        ({"eos_token_id": [2, "3"]}, "`eos_token_id` is '3'"),
        ({"layer_types": "full_attention"}, "layer_types is 'full_attention', wanted a list"),
        ({"layer_types": [["full_attention"]] * 3}, "layer_types is .*wanted a list"),
        ({"sliding_window": 8, "max_window_layers": "2"}, "`max_window_layers` is '2'"),
        ({"rope_scaling": "linear"}, "rope_scaling is 'linear', wanted an object"),
        ({"rope_scaling": {"rope_type": ["linear"]}}, "default, linear, llama3"),
        ({"rope_scaling": {"rope_type": "linear", "factor": "2"}}, "factor is '2'"),
        ({"rope_theta": [1e4]}, "theta is .10000.0., wanted a number"),
        ({"rope_scaling": LLAMA3_ROPE | {"low_freq_factor": "1"}}, "low_freq_factor is '1'"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(changes, match):
    with pytest.raises(ValueError, match=match):
        ModelConfig.from_hf(LLAMA | changes)


@pytest.mark.parametrize(
    "changes",
    [
        {"sliding_window": None},
        {"model_type": "qwen2", "sliding_window": 4096, "use_sliding_window": False},
        {"model_type": "qwen2", "sliding_window": 4096, "max_window_layers": 28},
        {
            "model_type": "qwen2",
            "sliding_window": 64,
            "use_sliding_window": True,
            "max_window_layers": 3,
        },
        {"sliding_window": 64, "layer_types": ["full_attention"] * 3},
    ],
)
def test_a_sliding_window_that_no_layer_uses_is_accepted(changes):
    assert ModelConfig.from_hf(LLAMA | changes).num_layers == 3


def test_a_window_in_late_layers_is_refused():
    window = {"sliding_window": 64, "use_sliding_window": True, "max_window_layers": 2}
    with pytest.raises(ValueError, match="sliding_window 64"):
        ModelConfig.from_hf(LLAMA | {"model_type": "qwen2"} | window)


@pytest.mark.parametrize("text", ["", "{", "[]", "[" * 100_000])
def test_a_config_that_is_no_object_is_refused_with_its_path(text, tmp_path):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ValueError, match=r"config\.json.*Fetch the file again"):
        ModelConfig.from_hf(tmp_path)


@pytest.mark.parametrize("dtype", ["int8", "bf16", "float64", None, 3])
def test_a_cache_holds_floats_of_known_types(dtype):
    with pytest.raises(ValueError, match="CacheConfig: `dtype` is .*bfloat16, float16, float32"):
        CacheConfig(num_pages=1, max_model_len=8, dtype=dtype)


def test_a_cache_type_has_one_spelling():
    by_type, by_name = (
        CacheConfig(num_pages=1, max_model_len=8, dtype=dtype) for dtype in (np.float32, "float32")
    )
    assert by_type == by_name and by_type.dtype == "float32"


@pytest.mark.parametrize(
    "requests,tokens,match",
    [
        ((4, 1), (8,), "`requests` is .4, 1., wanted a tuple of ascending ints"),
        ((1,), (8, 8), "`tokens` is .8, 8."),
        ((1.0, 2.0), (4,), "`requests`"),
        (4, (8,), "`requests` is 4"),
        ((1,), (), "`tokens` is"),
        ((1, 8), (4,), "`tokens` ends at 4, below the 8 requests"),
    ],
)
def test_buckets_that_leave_a_step_without_a_shape_are_refused(requests, tokens, match):
    with pytest.raises(ValueError, match=match):
        Buckets(requests=requests, tokens=tokens)
