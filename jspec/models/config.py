"""Shapes of a decoder, from and to config.json."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path
from typing import Any, Self

from jspec._checks import check_above_0, check_at_least, read_json, warn
from jspec.models.hf_decoder import (
    CLASS_NAMES,
    QKV_BIAS_ONLY,
    biases,
    check_architecture,
    refuse_unsupported,
)
from jspec.models.options import flag, size
from jspec.models.rope import RopeConfig

_MAX_POSITIONS = "max_position_embeddings"


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Shapes a decoder of the Llama family: Llama, SmolLM2, MiMo, Qwen2, Qwen3.

    Attributes:
      vocab_size: tokens (V).
      padded_vocab_size: rows of the embedding and of the head where some pad them, so that they
        can be sharded; None = `vocab_size`. The rows after `vocab_size` are never read and never
        drafted, whatever they hold.
      hidden_size: width of the residual stream (D).
      intermediate_size: width of the MLP.
      num_layers: decoder layers (L).
      num_heads: query heads (N).
      num_kv_heads: key/value heads (n), a divisor of `num_heads`.
      head_dim: size of one head (d), even.
      rms_norm_eps: added to the mean square in every RMSNorm.
      rope: rotary position embedding.
      tie_embeddings: the head is the embedding.
      qkv_bias: query, key and value projections have a bias.
      o_bias: the output projection of attention has a bias.
      mlp_bias: the projections of the MLP have a bias.
      qk_norm: each query and key head is normed before rotation.
      max_positions: longest context that the model was made for, in tokens.
      eos_token_ids: tokens that end a text.
      model_type: what config.json calls the model, for messages: equal configs may differ in it.

    Raises:
      ValueError: a size is below 1, the padded vocabulary is below the other, heads do not divide,
        or M-RoPE's sections are no half of one.
    """

    vocab_size: int
    padded_vocab_size: int | None = None
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
    mlp_bias: bool = False
    qk_norm: bool = False
    max_positions: int = 8192
    eos_token_ids: tuple[int, ...] = ()
    model_type: str = field(default="llama", compare=False)

    def __post_init__(self):
        sizes = ("vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads")
        sizes += ("num_kv_heads", "head_dim", "max_positions")
        check_at_least("ModelConfig", 1, **{name: getattr(self, name) for name in sizes})
        if self.padded_vocab_size is not None:
            padded = {"padded_vocab_size": self.padded_vocab_size}
            check_at_least("ModelConfig", self.vocab_size, **padded)
        for token in self.eos_token_ids:
            check_at_least("ModelConfig", 0, eos_token_id=token)
        check_above_0("ModelConfig", rms_norm_eps=self.rms_norm_eps)
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"ModelConfig: num_kv_heads is {self.num_kv_heads}, wanted a divisor of num_heads "
                f"= {self.num_heads}: each key/value head serves equally many query heads."
            )
        if self.head_dim % 2:
            raise ValueError(
                f"ModelConfig: head_dim is {self.head_dim}, wanted an even number: rotation pairs "
                "the lanes of a head."
            )
        sections = self.rope.mrope_section
        if sections is not None and sum(sections) != self.head_dim // 2:
            raise ValueError(
                f"ModelConfig: mrope_section is {sections}, {sum(sections)} frequencies, wanted "
                f"{self.head_dim // 2} together: half of head_dim = {self.head_dim}."
            )

    @property
    def vocab_rows(self) -> int:
        """Rows of the embedding and of the head, padding included."""
        return self.padded_vocab_size or self.vocab_size

    @classmethod
    def from_hf(cls, source: Mapping[str, Any] | str | PathLike[str]) -> Self:
        """Reads a Hugging Face config.json.

        Args:
          source: its content, its path, or the folder that it lies in.

        Raises:
          ValueError: the model type, the kind of rope or an option is not supported, or a size is
            missing. NotImplementedError: XD-RoPE.
        """
        config = _read_hf(source)
        model_type = config.get("model_type")
        if model_type not in tuple(CLASS_NAMES):
            raise ValueError(
                f"ModelConfig: model_type {model_type!r} is not supported, wanted one of "
                f"{', '.join(CLASS_NAMES)}."
            )
        check_architecture(config)
        num_layers = size(config, "num_hidden_layers")
        refuse_unsupported(config, num_layers)
        heads, hidden_size = size(config, "num_attention_heads"), size(config, "hidden_size")
        kv_heads = size(config, "num_key_value_heads", heads)
        if heads % kv_heads:
            raise ValueError(
                f"ModelConfig: num_key_value_heads is {kv_heads}, wanted a divisor of "
                f"num_attention_heads = {heads}: each key/value head serves equally many query "
                "heads. Correct config.json."
            )
        if config.get("head_dim") is None and hidden_size % heads:
            raise ValueError(
                f"ModelConfig: hidden_size is {hidden_size}, wanted a multiple of "
                f"num_attention_heads = {heads}, as head_dim is missing. Add it to config.json."
            )
        qkv_bias, o_bias, mlp_bias = biases(config)
        rope = RopeConfig.from_hf(config)
        stated = size({"max_position_embeddings": cls.max_positions, **config}, _MAX_POSITIONS)
        if rope.kind == "yarn" and stated > rope.context(stated):
            warn(
                f"config.json says {_MAX_POSITIONS} {stated}, and YaRN stretches "
                f"{rope.original_max_len} positions by {rope.factor} to {rope.context(stated)}. "
                "YaRN counts, as in transformers. Correct the one that is wrong."
            )
        eos = config.get("eos_token_id")
        return cls(
            vocab_size=size(config, "vocab_size"),
            hidden_size=hidden_size,
            intermediate_size=size(config, "intermediate_size"),
            num_layers=num_layers,
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=size(config, "head_dim", hidden_size // heads),
            rms_norm_eps=config.get("rms_norm_eps", cls.rms_norm_eps),
            rope=rope,
            tie_embeddings=flag(config, "tie_word_embeddings"),
            qkv_bias=qkv_bias,
            o_bias=o_bias,
            mlp_bias=mlp_bias,
            qk_norm=model_type == "qwen3",
            max_positions=rope.context(stated),
            eos_token_ids=() if eos is None else tuple(eos) if isinstance(eos, list) else (eos,),
            model_type=model_type,
        )

    def to_hf(self) -> dict[str, Any]:
        """Writes the Hugging Face config.json that `from_hf` reads as this config.

        Raises:
          ValueError: no config.json says all of it.

        Example:
          >>> ModelConfig.tiny().to_hf()["architectures"]
          ['LlamaForCausalLM']
        """
        model_type = "qwen3" if self.qk_norm else self.model_type
        stops = list(self.eos_token_ids)
        config = {
            "architectures": [f"{CLASS_NAMES.get(model_type)}ForCausalLM"],
            "model_type": model_type,
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "rms_norm_eps": self.rms_norm_eps,
            _MAX_POSITIONS: self.rope.before_scaling(self.max_positions),
            "tie_word_embeddings": self.tie_embeddings,
            "eos_token_id": stops[0] if len(stops) == 1 else stops or None,
            **self.rope.to_hf(),
        }
        if model_type not in QKV_BIAS_ONLY:
            config["attention_bias"] = self.o_bias
        if self.mlp_bias:
            config["mlp_bias"] = True
        if self.qkv_bias != (self.o_bias or model_type in QKV_BIAS_ONLY):
            config["qkv_bias"] = self.qkv_bias
        if type(self).from_hf(config) != self:
            raise ValueError(
                f"ModelConfig: a {self.model_type} with qk_norm={self.qk_norm}, "
                f"qkv_bias={self.qkv_bias}, o_bias={self.o_bias} and padded_vocab_size="
                f"{self.padded_vocab_size} has no config.json. Keep it as jspec.save writes it."
            )
        return config

    @classmethod
    def tiny(cls, **changes: Any) -> Self:
        """Makes a model that tests can afford: two layers of width 32.

        Args:
          **changes: fields that differ.

        Example:
          >>> ModelConfig.tiny(num_layers=3).num_layers
          3
        """
        sizes: dict[str, Any] = {
            "vocab_size": 64,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_layers": 2,
            "num_heads": 4,
            "num_kv_heads": 2,
            "head_dim": 8,
        }
        return cls(**sizes | changes)


def _read_hf(source: Mapping[str, Any] | str | PathLike[str]) -> Mapping[str, Any]:
    if isinstance(source, Mapping):
        return source
    path = Path(source)
    return read_json(path / "config.json" if path.is_dir() else path)
