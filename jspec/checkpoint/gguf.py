"""GGUF models (llama.cpp): weights, config and tokenizer in Hugging Face terms."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from jspec._checks import check_at_least
from jspec.checkpoint.base import Checkpoint
from jspec.checkpoint.gguf_file import GgufFile, open_gguf
from jspec.text import gguf_text_files

_ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}

_TOP_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}

_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}

_ROPE_DIVISORS = "rope_freqs.weight"


def read_gguf(path: str | Path) -> Checkpoint:
    """Opens a GGUF file of a dense Llama, Qwen2 or Qwen3 model.

    Only the header is read here; `tensors` then reads and dequantises one tensor at a time, to
    float32. Rows of q and k that llama.cpp interleaves for its rotary embedding go back into
    Hugging Face order. A tied model has no `lm_head.weight`.

    Args:
      path: the .gguf file.

    Returns:
      A Checkpoint; `stop_ids` are the eos, eot and eom ids and the well-known end tokens.

    Raises:
      FileNotFoundError: there is no such file.
      ImportError: the `gguf` package is missing.
      ValueError: no GGUF file, a damaged or truncated one, or an architecture, tensor, tensor
        type, RoPE scaling or tokenizer that is not supported.

    Source: ggml docs/gguf.md; llama.cpp convert_hf_to_gguf.py, LlamaModel.permute.

    Example:
      checkpoint = read_gguf("SmolLM2-135M-Instruct.Q4_1.gguf")
      for name, weight in checkpoint.tensors(): ...
    """
    file = open_gguf(Path(path))
    config = _config(file)
    names = _hf_names(file)

    def tensors() -> Iterator[tuple[str, np.ndarray]]:
        for name, hf_name in names.items():
            yield hf_name, _read(file, name, config)

    return Checkpoint(
        config=config,
        names=tuple(names.values()),
        tensors=tensors,
        **gguf_text_files(file.metadata, source=str(file.path))._asdict(),
    )


def _config(file: GgufFile) -> dict[str, Any]:
    """Converts the metadata to the content of a Hugging Face config.json."""
    arch = file.get("general.architecture", str)
    if arch not in _ARCHITECTURES:
        raise ValueError(
            f"{file.path}: architecture {arch!r} is not supported, wanted one of "
            f"{', '.join(_ARCHITECTURES)}. Pass a GGUF file of one of these."
        )
    if file.get("split.count", int, default=1) > 1:
        raise ValueError(
            f"{file.path} is one part of a split model. Join the parts first: "
            "llama-gguf-split --merge FIRST_PART OUTPUT."
        )
    if "token_embd.weight" not in file.tensors:
        raise ValueError(f"{file.path}: tensor token_embd.weight is missing. Pass a whole model.")

    def get(key: str, kind: type = int, default: Any = None) -> Any:
        return file.get(f"{arch}.{key}", kind, default=default)

    hidden_size, num_heads = get("embedding_length"), get("attention.head_count")
    check_at_least(str(file.path), 1, head_count=num_heads)
    head_dim = get("attention.key_length", default=hidden_size // num_heads)
    rotary_dim = get("rope.dimension_count", default=head_dim)
    rope_theta = get("rope.freq_base", float, default=10000.0)
    config = {
        "architectures": [_ARCHITECTURES[arch]],
        "model_type": arch,
        "vocab_size": file.tensors["token_embd.weight"].shape[0],
        "hidden_size": hidden_size,
        "intermediate_size": get("feed_forward_length"),
        "num_hidden_layers": get("block_count"),
        "num_attention_heads": num_heads,
        "num_key_value_heads": get("attention.head_count_kv", default=num_heads),
        "head_dim": head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": get("context_length"),
        "rms_norm_eps": get("attention.layer_norm_rms_epsilon", float),
        "rope_theta": rope_theta,
        "rope_scaling": _rope_scaling(file, arch, rope_theta, rotary_dim),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "bos_token_id": file.find("tokenizer.ggml.bos_token_id", int),
        "eos_token_id": file.find("tokenizer.ggml.eos_token_id", int),
    }
    if "blk.0.ffn_gate.bias" in file.tensors:
        config["mlp_bias"] = True
    if arch != "qwen2":  # whose q, k and v always have a bias, without an option
        config["attention_bias"] = "blk.0.attn_q.bias" in file.tensors
    if rotary_dim != head_dim:
        config["partial_rotary_factor"] = rotary_dim / head_dim
    if window := file.find(f"{arch}.attention.sliding_window", int):
        config |= {"sliding_window": window, "use_sliding_window": True}
    return config


def _rope_scaling(
    file: GgufFile, arch: str, theta: float, rotary_dim: int
) -> dict[str, Any] | None:
    original = file.find(f"{arch}.rope.scaling.original_context_length", int)
    if _ROPE_DIVISORS in file.tensors:
        return _llama3_scaling(file, theta, rotary_dim, original or 8192)
    kind = file.get(f"{arch}.rope.scaling.type", str, default="none")
    if kind == "none":
        return None
    scaling = {"rope_type": kind, "factor": file.get(f"{arch}.rope.scaling.factor", float)}
    return scaling | ({"original_max_position_embeddings": original} if original else {})


def _llama3_scaling(file: GgufFile, theta: float, rotary_dim: int, original: int) -> dict[str, Any]:
    """Infers the `llama3` scaling parameters from a table of frequency divisors.

    A file has the divisors (1 for short wavelengths, `factor` for long ones), not the parameters.
    All published models interpolate between wavelengths `original / 4` and `original`.
    """
    divisors = file.read(_ROPE_DIVISORS)
    low, high, factor = 1.0, 4.0, float(divisors.max())
    turns = original / (2 * np.pi) * theta ** (-np.arange(0, rotary_dim, 2) / rotary_dim)
    blend = np.clip((turns - low) / (high - low), 0, 1)
    wanted = 1 / ((1 - blend) / max(factor, 1) + blend)  # no factor is below 1
    if divisors.shape != wanted.shape or not np.allclose(divisors, wanted, rtol=1e-4):
        raise ValueError(
            f"{file.path}: {_ROPE_DIVISORS} is no llama3 RoPE scaling over {original} positions, "
            "the one frequency table that is supported. Pass the model's Hugging Face folder."
        )
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_position_embeddings": original,
    }


def _hf_names(file: GgufFile) -> dict[str, str]:
    """Maps each tensor of the file to its Hugging Face name, in file order."""
    names, unknown = {}, []
    for name in file.tensors:
        layer = re.fullmatch(r"blk\.(\d+)\.(\w+)\.(weight|bias)", name)
        if name in _TOP_NAMES:
            names[name] = _TOP_NAMES[name]
        elif layer and layer[2] in _LAYER_NAMES:
            names[name] = f"model.layers.{layer[1]}.{_LAYER_NAMES[layer[2]]}.{layer[3]}"
        elif name != _ROPE_DIVISORS:
            unknown.append(name)
    if unknown:
        raise ValueError(
            f"{file.path}: no place in the model for {', '.join(unknown[:5])} "
            f"({len(unknown)} such tensors). Pass a dense Llama, Qwen2 or Qwen3 model."
        )
    return names


def _read(file: GgufFile, name: str, config: dict[str, Any]) -> np.ndarray:
    """Reads one tensor, its rows in Hugging Face order."""
    tensor = file.read(name)
    rotated = re.search(r"\.attn_([qk])\.", name)
    if config["model_type"] != "llama" or not rotated:
        return tensor
    # Lanes of a head: [pair, half] in the file, [half, pair] here.
    num_heads = config["num_attention_heads" if rotated[1] == "q" else "num_key_value_heads"]
    if num_heads < 1 or len(tensor) % (2 * num_heads):
        raise ValueError(
            f"{file.path}: {name} has {len(tensor)} rows, wanted pairs for each of {num_heads} "
            "heads. Fetch the file again."
        )
    lanes = tensor.reshape(num_heads, -1, 2, *tensor.shape[1:])
    return lanes.swapaxes(1, 2).reshape(tensor.shape)
