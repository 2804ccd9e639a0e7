"""A config.json that its tensors contradict: refused by its keys, or warned of once."""

import re

import jax
import numpy as np
import pytest

import jspec
from jspec.models import llama
from jspec.models.config import ModelConfig
from tests.support.config_files import MODELS, copy, warned_once
from tests.support.heads import dense_attention, dense_mlp, dense_norm, target
from tests.support.paged import make_view, poisoned_cache


def test_a_head_that_differs_from_a_tied_embedding_is_used(tmp_path):
    folder = copy(tmp_path, "target_llama", tie_word_embeddings=True)
    model, text = warned_once(jspec.load, folder, "float32")
    assert "tie_word_embeddings True" in text and "lm_head.weight differs" in text
    np.testing.assert_array_equal(model.params["head"], target().params["head"])
    drafter, text = warned_once(jspec.load, folder, target=target(), method="draft_model")
    assert not drafter.config.model.tie_embeddings and "lm_head.weight differs" in text


QK_NORMS = {f"model.layers.0.self_attn.{x}_norm.weight": np.ones(16, np.float32) for x in "qk"}
Q_BIAS = {"model.layers.1.self_attn.q_proj.bias": np.ones(64, np.float32)}
MLP_BIAS = {"model.layers.1.mlp.gate_proj.bias": np.ones(48, np.float32)}


@pytest.mark.parametrize(
    "change, words",
    [
        ({"num_hidden_layers": 9}, "num_hidden_layers is 9 .*tensors of 7 layers"),
        ({"num_hidden_layers": 6}, "num_hidden_layers is 6 .*tensors of 7 layers"),
        (
            {"drop": ["num_key_value_heads"]},
            r"num_key_value_heads is missing .*taken to be 4 \(num_attention_heads\) and head_dim "
            r"is 16 .*which is 64, and model.layers.0.self_attn.k_proj.weight is \[32, 64\]",
        ),
        (
            {"drop": ["head_dim"], "num_attention_heads": 8},
            r"num_attention_heads is 8 .*|head_dim is missing .*taken to be 8",
        ),
        ({"vocab_size": 96}, r"vocab_size is 96 .*model.embed_tokens.weight is \[128, 64\]"),
        ({"intermediate_size": 40}, r"intermediate_size is 40 .*gate_proj.weight is \[48, 64\]"),
        ({"hidden_size": 128}, r"hidden_size is 128 .*gate_proj.weight is \[48, 64\]"),
        ({"attention_bias": True}, "attention_bias is True .*no tensor is a self_attn.q_proj.bias"),
        ({"qkv_bias": True}, "qkv_bias is True .*no tensor is a self_attn.q_proj.bias"),
        ({"mlp_bias": True}, "mlp_bias is True .*no tensor is a mlp.gate_proj.bias"),
        ({"tensors": Q_BIAS}, "attention_bias is False .*there is model.layers.1.*q_proj.bias"),
        ({"tensors": MLP_BIAS}, "mlp_bias is False .*there is model.layers.1.mlp.gate_proj.bias"),
        ({"tensors": QK_NORMS}, "model_type is 'llama' .*there is model.layers.0.*q_norm.weight"),
        ({"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]}, "is 'qwen3' .*q_norm"),
        ({"without": ["lm_head.weight"]}, "tie_word_embeddings is False .*no lm_head.weight"),
    ],
)
def test_a_key_that_the_tensors_contradict_is_named(change, words, tmp_path):
    folder = copy(tmp_path, "target_llama", **change)
    with pytest.raises(ValueError, match=words) as error:
        jspec.load(folder, "float32")
    told, listed = str(error.value).split("Therefore the checkpoint's tensors do not fit")
    assert "\n" not in told and "\n" in listed


@pytest.mark.parametrize(
    "name, layers",
    [("eagle3_llama", 1), ("eagle3_llama_v31", 1), ("peagle_llama", 2), ("eagle1_llama", 1)],
)
def test_a_head_that_states_the_layers_of_its_target_has_those_of_its_tensors(
    name, layers, tmp_path
):
    wanted = jspec.load(MODELS / name, target=target()).config
    for changes in ({"num_hidden_layers": 40}, {"layer_types": ["full_attention"] * 40}):
        folder = copy(tmp_path / str(len(changes)) / next(iter(changes)), name, **changes)
        drafter, text = warned_once(jspec.load, folder, target=target())
        assert drafter.config == wanted
        assert re.search(f"(num_hidden_layers|layer_types of) 40.* tensors of {layers}", text)


@pytest.mark.parametrize(
    "name, of, change, words",
    [
        ("eagle1_llama_fcbias", "target_llama", {"bias": False}, "bias False.*an fc.bias"),
        ("medusa_llama_vllm", "target_llama", {"medusa_fc_bias": False}, "medusa_fc_bias False"),
        ("medusa_llama_vllm", "target_llama", {"num_heads": 2}, "num_heads 2.*has 3 heads"),
        ("medusa_llama_vllm", "target_llama", {"original_lm_head": True}, "3 output matrices"),
        ("peagle_llama", "target_llama", {"without": ["mask_hidden"]}, "ptd_token_id"),
    ],
)
def test_a_setting_that_a_drafters_tensors_contradict_is_warned_of(
    name, of, change, words, tmp_path
):
    folder = copy(tmp_path, name, **change)
    assert re.search(words, warned_once(jspec.load, folder, target=target(of))[1])


@pytest.mark.parametrize(
    "name, of, change, words",
    [
        ("eagle3_llama", "target_llama", {"drop": ["num_key_value_heads"]}, "missing .*k_proj"),
        (
            "eagle3_llama",
            "target_llama",
            {"fc_norm": True},
            "fc_norm is True .*no tensor fc_norm.0",
        ),
        (
            "eagle3_llama",
            "target_llama",
            {"eagle_aux_hidden_state_layer_ids": [1, 2]},
            r"eagle_aux_hidden_state_layer_ids is \[1, 2\] .*fc.weight is \[64, 192\]",
        ),
        ("eagle1_llama", "target_llama", {"attention_bias": True}, "attention_bias is True"),
        ("mimo_mtp", "mimo_mtp", {"num_nextn_predict_layers": 2}, "is 2 .*tensors of 1 layer"),
        ("dflash_qwen3", "target_qwen3", {"intermediate_size": 90}, "intermediate_size is 90"),
        (
            "dflash_qwen3",
            "target_qwen3",
            {"dflash_config": {"mask_token_id": 1, "target_layer_ids": [0, 1]}},
            r"target_layer_ids .*asks for \[64, 128\], and fc.weight is \[64, 192\]",
        ),
        ("dflash_qwen3", "target_qwen3", {"draft_vocab_size": 90}, "draft_vocab_size"),
        ("medusa_llama", "target_llama", {"medusa_num_layers": 2}, "2 residual .* are of 1"),
        ("medusa_llama", "target_llama", {"medusa_num_heads": 9}, "medusa_num_heads is 9.*4 heads"),
        ("draft_llama_small", "target_llama", {"intermediate_size": 9}, "intermediate_size is 9"),
    ],
)
def test_a_size_that_a_drafters_tensors_contradict_is_named(name, of, change, words, tmp_path):
    with pytest.raises(ValueError, match=words):
        jspec.load(copy(tmp_path, name, **change), target=target(of))


# A model with biases everywhere.


def test_a_model_whose_mlp_has_biases_gives_the_logits_of_the_formula(tmp_path, rng):
    config = jspec.load(MODELS / "draft_llama_small", "float32").config
    shapes = {"gate_proj": config.intermediate_size, "up_proj": config.intermediate_size}
    shapes["down_proj"] = config.hidden_size
    biases = {
        f"model.layers.{i}.mlp.{name}.bias": rng.standard_normal(size, np.float32)
        for i in range(config.num_layers)
        for name, size in shapes.items()
    }
    folder = copy(tmp_path, "draft_llama_small", mlp_bias=True, tensors=biases)
    model = jspec.load(folder, "float32")
    config, params = model.config, model.params
    assert config.mlp_bias and ModelConfig.from_hf(config.to_hf()) == config
    ids = np.array([5, 9, 60, 2, 31, 7], np.int32)
    view = make_view(np.arange(2)[None], [0], [6], page_size=4, num_rows=6)
    cache = poisoned_cache(config, num_pages=3, page_size=4)
    rows = np.arange(6, dtype=np.int32)
    forward = jax.jit(llama.forward, static_argnames="config")
    got, _, _ = forward(config, params, ids, view, cache, logit_rows=rows)

    x = np.asarray(params["embed"], np.float64)[ids]
    for i in range(config.num_layers):
        layer = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), params["layers"][str(i)])
        normed = dense_norm(x, layer["input_norm"]["weight"], config.rms_norm_eps)
        x = x + dense_attention(config, layer["attention"], normed)
        normed = dense_norm(x, layer["post_norm"]["weight"], config.rms_norm_eps)
        x = x + dense_mlp(layer["mlp"], normed)
    x = dense_norm(x, np.asarray(params["norm"]["weight"], np.float64), config.rms_norm_eps)
    np.testing.assert_allclose(got, x @ np.asarray(params["head"], np.float64).T, atol=1e-4)


def test_heads_may_have_biases_in_their_mlp(tmp_path):
    for name, layer in (("eagle3_llama", "midlayer"), ("eagle1_llama", "layers.0")):
        sizes = {"gate_proj": 128, "up_proj": 128, "down_proj": 64}
        biases = {f"{layer}.mlp.{p}.bias": np.ones(n, np.float32) for p, n in sizes.items()}
        folder = copy(tmp_path, name, mlp_bias=True, tensors=biases)
        params = jspec.load(folder, target=target()).params
        assert params["layers"]["0"]["mlp"]["gate_up_bias"].shape == (256,)
