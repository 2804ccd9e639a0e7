"""Static choices: sizes that a compiled step depends on. Hashable; never an array."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any, Literal, Self, get_args


def check_at_least(owner: str, minimum: int, **fields: int) -> None:
    """Raises ValueError for the first field that is no integer or lies below `minimum`."""
    for name, value in fields.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
            raise ValueError(
                f"{owner}: `{name}` is {value!r}, wanted an integer of at least {minimum}. "
                f"Pass {name}={minimum} or more."
            )


@dataclass(frozen=True, kw_only=True)
class CacheConfig:
    """Sizes the paged KV cache and the longest request.

    Attributes:
      num_pages: pages in the pool (P).
      page_size: slots (tokens) per page (S).
      max_model_len: most tokens a request may have, prompt and output together.
      dtype: element type of keys and values, for example "bfloat16".
    """

    num_pages: int
    page_size: int = 16
    max_model_len: int
    dtype: str = "bfloat16"

    def __post_init__(self):
        check_at_least(
            "CacheConfig",
            1,
            num_pages=self.num_pages,
            page_size=self.page_size,
            max_model_len=self.max_model_len,
        )

    @property
    def pages_per_request(self) -> int:
        """Columns of a block table that reaches `max_model_len` (M)."""
        return -(-self.max_model_len // self.page_size)


@dataclass(frozen=True, kw_only=True)
class Buckets:
    """The batch sizes that `warmup` compiles; calls are padded up to one of them.

    Attributes:
      requests: batch sizes (B), ascending.
      tokens: flat token counts (T), ascending.
    """

    requests: tuple[int, ...]
    tokens: tuple[int, ...]

    def __post_init__(self):
        for name, sizes in (("requests", self.requests), ("tokens", self.tokens)):
            if not sizes or list(sizes) != sorted(set(sizes)) or sizes[0] < 1:
                raise ValueError(
                    f"Buckets: `{name}` is {sizes!r}, wanted ascending sizes of at least 1, "
                    "for example (1, 4, 16)."
                )

    def pairs(self) -> list[tuple[int, int]]:
        """Lists each (requests, tokens) that a step can have: at least a token a request."""
        return [(b, t) for b in self.requests for t in self.tokens if t >= b]


RopeKind = Literal["default", "linear", "llama3"]


@dataclass(frozen=True, kw_only=True)
class RopeConfig:
    """Frequencies of the rotary position embedding.

    Attributes:
      kind: "default"; "linear" divides positions by `factor`; "llama3" stretches the low
        frequencies by `factor` and blends up to the high ones.
      theta: base of the geometric series of frequencies.
      factor: how far the context is stretched.
      low_freq_factor: wavelengths above `original_max_len` over this are stretched (llama3).
      high_freq_factor: wavelengths below `original_max_len` over this are kept (llama3).
      original_max_len: context length before stretching, in tokens (llama3).
    """

    kind: RopeKind = "default"
    theta: float = 10000.0
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 1.0
    original_max_len: int = 0

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> Self:
        """Reads `rope_parameters`, or `rope_theta` with `rope_scaling`, of a config.json.

        Raises:
          ValueError: an unknown kind, or a parameter that the kind needs is missing.
        """
        rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
        kind = rope.get("rope_type", rope.get("type", "default"))
        if kind not in get_args(RopeKind):
            raise ValueError(
                f"RopeConfig: rope type {kind!r} is not supported, wanted one of "
                f"{', '.join(get_args(RopeKind))}. Its parameters: {dict(rope)}."
            )
        if rope.get("partial_rotary_factor", 1.0) != 1.0:
            raise ValueError(
                f"RopeConfig: partial_rotary_factor is {rope['partial_rotary_factor']!r}; only "
                "rotation of the whole head (1.0) is supported."
            )
        theta = rope.get("rope_theta", config.get("rope_theta"))
        fields: dict[str, Any] = {"kind": kind, "theta": 10000.0 if theta is None else float(theta)}
        wanted = {
            "default": {},
            "linear": {"factor": "factor"},
            "llama3": {
                "factor": "factor",
                "low_freq_factor": "low_freq_factor",
                "high_freq_factor": "high_freq_factor",
                "original_max_len": "original_max_position_embeddings",
            },
        }[kind]
        for name, key in wanted.items():
            if key not in rope:
                raise ValueError(
                    f"RopeConfig: rope type {kind!r} needs {key!r}, and the config has only "
                    f"{sorted(rope)}. Add it to rope_parameters (or rope_scaling)."
                )
            fields[name] = rope[key]
        return cls(**fields)


# Options of config.json that change the mathematics and that we do not implement, with the
# values that leave it unchanged.
_UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "mlp_bias": (None, False),
    "partial_rotary_factor": (None, 1.0),
    "quantization_config": (None,),
    "attn_logit_softcapping": (None,),
    "final_logit_softcapping": (None,),
    "logit_scale": (None, 1.0),
    "rope_interleaved": (None, False),
}

_MODEL_TYPES = ("llama", "qwen2", "qwen3")


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Shape of a Llama-family decoder: Llama, SmolLM2, Qwen2, Qwen3.

    Attributes:
      vocab_size: rows of the embedding and of the head (V).
      hidden_size: width of the residual stream (D).
      intermediate_size: width of the MLP.
      num_layers: decoder layers (L).
      num_heads: query heads (N).
      num_kv_heads: key/value heads (n); a divisor of `num_heads`.
      head_dim: size of one head (d).
      rms_norm_eps: added to the mean square in every RMSNorm.
      rope: rotary position embedding.
      tie_embeddings: the head is the embedding.
      qkv_bias: query, key and value projections have a bias.
      o_bias: the output projection of attention has a bias.
      qk_norm: RMSNorm on each query and key head, before rotation.
      max_positions: longest context that the model was made for, in tokens.
      eos_token_ids: tokens that end a text.

    Example:
      >>> ModelConfig.tiny().num_layers
      2
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float = 1e-6
    rope: RopeConfig = RopeConfig()
    tie_embeddings: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    qk_norm: bool = False
    max_positions: int = 8192
    eos_token_ids: tuple[int, ...] = ()

    @classmethod
    def from_hf(cls, source: Mapping[str, Any] | str | PathLike[str]) -> Self:
        config = _read_hf(source)
        model_type = config.get("model_type")
        if model_type not in _MODEL_TYPES:
            raise ValueError(
                f"ModelConfig: model_type {model_type!r} is not supported, wanted one of "
                f"{', '.join(_MODEL_TYPES)}."
            )
        for key, neutral in _UNSUPPORTED.items():
            if config.get(key) not in neutral:
                raise ValueError(f"ModelConfig: {key} is {config[key]!r}, wanted {neutral[-1]!r}.")
        heads = config["num_attention_heads"]
        attention_bias = bool(config.get("attention_bias", False))
        eos = config.get("eos_token_id")
        return cls(
            vocab_size=config["vocab_size"],
            hidden_size=config["hidden_size"],
            intermediate_size=config["intermediate_size"],
            num_layers=config["num_hidden_layers"],
            num_heads=heads,
            num_kv_heads=config.get("num_key_value_heads") or heads,
            head_dim=config.get("head_dim") or config["hidden_size"] // heads,
            rms_norm_eps=config.get("rms_norm_eps", 1e-6),
            rope=RopeConfig.from_hf(config),
            tie_embeddings=bool(config.get("tie_word_embeddings", False)),
            qkv_bias=config.get("qkv_bias", attention_bias or model_type == "qwen2"),
            o_bias=attention_bias and model_type != "qwen2",
            qk_norm=model_type == "qwen3",
            max_positions=config.get("max_position_embeddings", 8192),
            eos_token_ids=() if eos is None else tuple(eos) if isinstance(eos, list) else (eos,),
        )

    @classmethod
    def tiny(cls, **changes: Any) -> Self:
        """Makes a model that tests can afford: two layers of width 32."""
        sizes: dict[str, Any] = dict(
            vocab_size=64,
            hidden_size=32,
            intermediate_size=48,
            num_layers=2,
            num_heads=4,
            num_kv_heads=2,
            head_dim=8,
        )
        return cls(**sizes | changes)


def _read_hf(source: Mapping[str, Any] | str | PathLike[str]) -> Mapping[str, Any]:
    if isinstance(source, Mapping):
        return source
    path = Path(source)
    if path.is_dir():
        path /= "config.json"
    return json.loads(path.read_text())
