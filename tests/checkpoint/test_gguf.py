"""GGUF files: exact weights in Hugging Face order, config, and errors before anything is read."""

import sys
import tracemalloc

import gguf
import numpy as np
import pytest

from jspec.checkpoint import gguf_file
from jspec.checkpoint.gguf import read_gguf
from jspec.text import Tokenizer

Kind = gguf.GGMLQuantizationType
N, n, d, D, F, V = 4, 2, 8, 32, 64, 96

HF_LAYER = {
    "attn_norm.weight": ("input_layernorm.weight", (D,)),
    "attn_q.weight": ("self_attn.q_proj.weight", (N * d, D)),
    "attn_k.weight": ("self_attn.k_proj.weight", (n * d, D)),
    "attn_v.weight": ("self_attn.v_proj.weight", (n * d, D)),
    "attn_output.weight": ("self_attn.o_proj.weight", (D, N * d)),
    "ffn_norm.weight": ("post_attention_layernorm.weight", (D,)),
    "ffn_gate.weight": ("mlp.gate_proj.weight", (F, D)),
    "ffn_up.weight": ("mlp.up_proj.weight", (F, D)),
    "ffn_down.weight": ("mlp.down_proj.weight", (D, F)),
}
HF_BIASES = {
    "attn_q.bias": ("self_attn.q_proj.bias", (N * d,)),
    "attn_k.bias": ("self_attn.k_proj.bias", (n * d,)),
    "attn_v.bias": ("self_attn.v_proj.bias", (n * d,)),
}
HF_NORMS = {
    "attn_q_norm.weight": ("self_attn.q_norm.weight", (d,)),
    "attn_k_norm.weight": ("self_attn.k_norm.weight", (d,)),
}
METADATA = {
    "block_count": 1,
    "context_length": 256,
    "embedding_length": D,
    "feed_forward_length": F,
    "attention.head_count": N,
    "attention.head_count_kv": n,
    "attention.layer_norm_rms_epsilon": 1e-5,
    "rope.freq_base": 50000.0,
}


def interleaved(weight, num_heads):
    """The rows of q or k as llama.cpp's RoPE wants them: lane i and lane i + d/2 are neighbours."""
    out, lanes = np.empty_like(weight), len(weight) // num_heads
    for head in range(num_heads):
        for pair in range(lanes // 2):
            for half in range(2):
                source = head * lanes + half * (lanes // 2) + pair
                out[head * lanes + 2 * pair + half] = weight[source]
    return out


def write(path, tensors, metadata=(), *, arch="llama", endian=gguf.GGUFEndian.LITTLE):
    """Writes a GGUF file of `{name: array or (bytes, kind)}`; None in metadata removes a key."""
    writer = gguf.GGUFWriter(path, arch, endianess=endian)
    own = {f"{arch}.{key}": value for key, value in METADATA.items()} | dict(metadata)
    for key, value in own.items():
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        elif value is not None:
            writer.add_array(key, value)
    for name, tensor in tensors.items():
        raw, kind = tensor if isinstance(tensor, tuple) else (tensor, None)
        writer.add_tensor(name, raw, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def draw(rng, *shape):
    return rng.standard_normal(shape).astype(np.float32)


@pytest.fixture
def embedding(rng):
    return {"token_embd.weight": draw(rng, V, D)}


@pytest.fixture
def path(tmp_path):
    return tmp_path / "model.gguf"


@pytest.mark.parametrize(
    "arch,extra", [("llama", HF_BIASES), ("qwen2", HF_BIASES), ("qwen3", HF_NORMS)]
)
@pytest.mark.parametrize("tied", [True, False])
def test_a_file_gives_back_the_hugging_face_tensors_exactly(arch, extra, tied, path, rng):
    wanted = {
        "model.embed_tokens.weight": draw(rng, V, D),
        "model.norm.weight": draw(rng, D),
    }
    stored = {
        "token_embd.weight": wanted["model.embed_tokens.weight"],
        "output_norm.weight": wanted["model.norm.weight"],
    }
    if not tied:
        wanted["lm_head.weight"] = stored["output.weight"] = draw(rng, V, D)
    for name, (hf_name, shape) in (HF_LAYER | extra).items():
        weight = wanted[f"model.layers.0.{hf_name}"] = draw(rng, *shape)
        if arch == "llama" and name.startswith(("attn_q.", "attn_k.")):
            weight = interleaved(weight, N if name.startswith("attn_q.") else n)
        stored[f"blk.0.{name}"] = weight

    checkpoint = read_gguf(write(path, stored, arch=arch))

    for _ in range(2):  # each call of `tensors` starts over
        got = dict(checkpoint.tensors())
        assert got.keys() == wanted.keys()
        for name, weight in wanted.items():
            assert got[name].dtype == np.float32
            np.testing.assert_array_equal(got[name], weight, err_msg=name)
    assert checkpoint.config["tie_word_embeddings"] is tied


def test_quantised_rows_of_q_are_put_in_order_too(path, rng, embedding):
    weight = draw(rng, N * d, D)
    raw = gguf.quants.quantize(interleaved(weight, N), Kind.Q8_0)
    write(path, embedding | {"blk.0.attn_q.weight": (raw, Kind.Q8_0)})
    got = dict(read_gguf(path).tensors())["model.layers.0.self_attn.q_proj.weight"]
    wanted = gguf.quants.dequantize(gguf.quants.quantize(weight, Kind.Q8_0), Kind.Q8_0)
    np.testing.assert_array_equal(got, wanted)


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"])
def test_a_quantised_tensor_reads_back_within_its_step(kind, path, rng):
    weight = draw(rng, V, 256)
    raw = gguf.quants.quantize(weight, Kind[kind])
    write(path, {"token_embd.weight": (raw, Kind[kind])})
    ((_, got),) = read_gguf(path).tensors()
    np.testing.assert_array_equal(got, gguf.quants.dequantize(raw, Kind[kind]))
    # float32; values lie within about +-4, and 4 bits leave steps of half a unit
    np.testing.assert_allclose(got, weight, rtol=0, atol=0.5)


@pytest.mark.parametrize("kind", ["Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS"])
def test_a_type_without_a_writer_reads_as_the_gguf_package_does(kind, path, rng, monkeypatch):
    monkeypatch.setattr(gguf_file, "_CHUNK_BYTES", 1000)  # several chunks, the last one short
    block, block_bytes = gguf.GGML_QUANT_SIZES[Kind[kind]]
    row_bytes = 512 // block * block_bytes
    # Bytes below 64, so that the half-precision scales among them are small and finite.
    raw = rng.integers(0, 64, (V + 1, row_bytes), dtype=np.uint8)
    write(path, {"token_embd.weight": (raw, Kind[kind])})
    ((_, got),) = read_gguf(path).tensors()
    assert got.shape == (V + 1, 512)
    np.testing.assert_array_equal(got, gguf.quants.dequantize(raw, Kind[kind]))


def test_the_metadata_becomes_a_hugging_face_config(path, embedding):
    write(
        path,
        embedding | {"blk.0.attn_q.bias": np.zeros(N * d, np.float32)},
        {
            "llama.attention.key_length": d,
            "tokenizer.ggml.bos_token_id": 1,
            "tokenizer.ggml.eos_token_id": 2,
            "tokenizer.chat_template": "<|im_start|>",
        },
    )
    checkpoint = read_gguf(path)
    assert checkpoint.config == {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": V,
        "hidden_size": D,
        "intermediate_size": F,
        "num_hidden_layers": 1,
        "num_attention_heads": N,
        "num_key_value_heads": n,
        "head_dim": d,
        "hidden_act": "silu",
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-5,  # exactly, though the file holds it as float32
        "rope_theta": 50000.0,
        "rope_scaling": None,
        "tie_word_embeddings": True,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "attention_bias": True,
    }
    assert checkpoint.chat_template == "<|im_start|>"
    assert checkpoint.tokenizer_json is None


def test_options_that_change_the_model_are_not_lost(path, embedding):
    metadata = {"llama.rope.dimension_count": 4, "llama.attention.sliding_window": 128}
    config = read_gguf(write(path, embedding, metadata)).config
    assert config["partial_rotary_factor"] == 0.5
    assert config["sliding_window"] == 128
    assert config["use_sliding_window"]


def test_every_known_end_of_text_stops_generation(path, embedding):
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": ["<|endoftext|>", "a", "<|im_end|>", "end", "b"],
        "tokenizer.ggml.token_type": [3, 1, 3, 3, 1],
        "tokenizer.ggml.merges": ["a b"],
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.eot_token_id": 3,
    }
    checkpoint = read_gguf(write(path, embedding, metadata))
    assert checkpoint.stop_ids == (0, 2, 3)
    assert checkpoint.tokenizer_json is not None


@pytest.mark.parametrize(
    "metadata,wanted",
    [
        ({"type": "none"}, None),
        ({"type": "linear", "factor": 4.0}, {"rope_type": "linear", "factor": 4.0}),
        (
            {"type": "yarn", "factor": 4.0, "original_context_length": 64},
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
        ),
    ],
)
def test_rope_scaling_is_read_from_the_metadata(metadata, wanted, path, embedding):
    write(path, embedding, {f"llama.rope.scaling.{key}": v for key, v in metadata.items()})
    assert read_gguf(path).config["rope_scaling"] == wanted


def llama3_divisors(theta, lanes, factor, original):
    """The definition, one frequency at a time (low_freq_factor 1, high_freq_factor 4)."""
    divisors = []
    for i in range(lanes // 2):
        wavelength = 2 * np.pi * theta ** (2 * i / lanes)
        if wavelength < original / 4:
            divisors.append(1.0)
        elif wavelength > original:
            divisors.append(factor)
        else:
            smooth = (original / wavelength - 1) / 3
            divisors.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(divisors, np.float32)


def test_llama3_scaling_is_found_from_the_frequency_table(path, embedding):
    metadata = {"llama.rope.freq_base": 5e5, "llama.attention.key_length": 128}
    table = {"rope_freqs.weight": llama3_divisors(5e5, 128, 8.0, 8192)}
    checkpoint = read_gguf(write(path, embedding | table, metadata))
    assert checkpoint.config["rope_scaling"] == {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    assert [name for name, _ in checkpoint.tensors()] == ["model.embed_tokens.weight"]


def test_another_frequency_table_is_refused(path, embedding):
    table = {"rope_freqs.weight": np.linspace(1, 8, d // 2, dtype=np.float32)}
    with pytest.raises(ValueError, match="no llama3 RoPE scaling"):
        read_gguf(write(path, embedding | table))


def test_reading_needs_little_more_memory_than_the_tensor(path, rng):
    weight = draw(rng, 16384, 128)  # 8 MB
    raw = gguf.quants.quantize(weight, Kind.Q4_1)
    checkpoint = read_gguf(write(path, {"token_embd.weight": (raw, Kind.Q4_1)}))
    tracemalloc.start()
    for _ in checkpoint.tensors():
        pass
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 1.6 * weight.nbytes


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"nothing\.gguf"):
        read_gguf(tmp_path / "nothing.gguf")


def test_another_kind_of_file_is_recognised(path):
    path.write_bytes(b"PK\x03\x04" + bytes(100))
    with pytest.raises(ValueError, match="no GGUF file"):
        read_gguf(path)


def test_a_file_cut_anywhere_is_refused_before_reading(path, embedding):
    whole = write(path, embedding, {"tokenizer.ggml.tokens": ["ab", "c"]}).read_bytes()
    data_start = len(whole) - embedding["token_embd.weight"].nbytes
    for length in [0, 3, *range(4, data_start, 7), data_start, len(whole) - 1]:
        path.write_bytes(whole[:length])
        with pytest.raises(ValueError, match="truncated"):
            read_gguf(path)


def test_a_truncated_tensor_is_named(path, embedding):
    write(path, embedding)
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ValueError, match=r"token_embd\.weight ends at byte .* Download"):
        read_gguf(path)


def test_damaged_headers_raise_value_errors_only(path, embedding, rng):
    whole = write(path, embedding, {"tokenizer.chat_template": "x"}).read_bytes()
    data_start = len(whole) - embedding["token_embd.weight"].nbytes
    num_refused = 0
    for _ in range(300):
        damaged = bytearray(whole)
        for at in rng.integers(4, data_start, 3):
            damaged[at] = rng.integers(256)
        path.write_bytes(damaged)
        try:
            read_gguf(path)
        except ValueError:
            num_refused += 1
    assert num_refused > 100


def test_a_big_endian_file_is_refused(path, embedding):
    write(path, embedding, endian=gguf.GGUFEndian.BIG)
    with pytest.raises(ValueError, match="little-endian"):
        read_gguf(path)


def test_an_unknown_architecture_lists_the_known_ones(path, embedding):
    write(path, embedding, arch="mamba")
    with pytest.raises(ValueError, match="'mamba' is not supported.*llama, qwen2, qwen3"):
        read_gguf(path)


def test_an_unsupported_tensor_type_lists_the_supported_ones(path, embedding):
    write(path, embedding | {"output.weight": np.zeros((V, D), np.int8)})
    with pytest.raises(ValueError, match=r"output\.weight has type I8.*F32, F16.*Q4_1.*Q6_K"):
        read_gguf(path)


def test_a_tensor_type_of_the_future_is_named_by_number(path, embedding):
    write(path, embedding)
    whole = path.read_bytes()
    at = whole.index(b"token_embd.weight") + len("token_embd.weight") + 4 + 2 * 8
    path.write_bytes(whole[:at] + b"\xc8" + whole[at + 1 :])
    with pytest.raises(ValueError, match=r"token_embd\.weight has type 200"):
        read_gguf(path)


def test_a_tensor_without_a_place_is_named(path, embedding):
    write(path, embedding | {"blk.0.ffn_gate_exps.weight": np.zeros((2, 2), np.float32)})
    with pytest.raises(ValueError, match=r"no place .* blk\.0\.ffn_gate_exps\.weight.*dense"):
        read_gguf(path)


@pytest.mark.parametrize("value", [None, [4, 2]])
def test_a_missing_or_per_layer_option_is_named(value, path, embedding):
    write(path, embedding, {"llama.attention.head_count": value})
    with pytest.raises(ValueError, match=r"`llama\.attention\.head_count`.*wanted one int"):
        read_gguf(path)


def test_a_part_of_a_split_model_says_how_to_join(path, embedding):
    write(path, embedding, {"split.count": 2})
    with pytest.raises(ValueError, match="llama-gguf-split --merge"):
        read_gguf(path)


def test_a_file_without_an_embedding_is_refused(path, rng):
    write(path, {"output_norm.weight": draw(rng, D)})
    with pytest.raises(ValueError, match=r"token_embd\.weight is missing"):
        read_gguf(path)


def test_without_the_gguf_package_the_extra_is_named(path, embedding, monkeypatch):
    write(path, embedding)
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(ImportError, match=r"pip install 'jspec-decode\[demo\]'"):
        read_gguf(path)


@pytest.mark.parametrize(
    "key,value",
    [
        ("tokenizer.ggml.eos_token_id", "2"),
        ("tokenizer.ggml.eot_token_id", [2]),
        ("tokenizer.ggml.tokens", 5),
        ("tokenizer.chat_template", 5),
        ("llama.rope.scaling.type", 1),
        ("llama.attention.sliding_window", "8"),
        ("llama.attention.head_count", 0),
    ],
)
def test_metadata_of_another_type_is_named(key, value, path, embedding):
    write(path, embedding, {key: value})
    with pytest.raises(ValueError, match=f"{key.removeprefix('llama.attention.')}.*wanted"):
        read_gguf(path)


def test_a_sentencepiece_vocabulary_loads(path, embedding):
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a", "▁a"]
    metadata = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": [0.0] * 259 + [-1.0, -2.0, -3.0],
        "tokenizer.ggml.token_type": [2, 3, 3] + [6] * 256 + [1, 1, 1],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.add_bos_token": True,
        "tokenizer.chat_template": "{{ bos_token }}a",
    }
    checkpoint = read_gguf(write(path, embedding, metadata))
    tokenizer = Tokenizer.from_json(
        checkpoint.tokenizer_json, checkpoint.chat_template, checkpoint.tokenizer_config
    )
    assert tokenizer.encode("aa a", add_special=True) == [1, 261, 260, 261]
    assert tokenizer.chat("a") == [1, 261]
    assert checkpoint.stop_ids == (2,)
