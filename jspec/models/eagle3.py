"""The EAGLE-3 head: decoder layers over token embeddings and fused target hidden states.

The first layer reads an embedding and a hidden state side by side; the residual stream carries the
hidden state alone. Source: arXiv 2503.01840, section 3.1.
"""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from jspec._checks import check_at_least
from jspec.axes import AnyArray
from jspec.models.config import ModelConfig
from jspec.models.kv_cache import KVCache
from jspec.models.layers import (
    MLP,
    Attention,
    DraftDecoder,
    Embeds,
    Place,
    RMSNorm,
    Rope,
    Rules,
)
from jspec.models.llama import DecoderLayer
from jspec.state import PagedView


@dataclass(frozen=True, kw_only=True)
class Eagle3ModelConfig:
    """Shapes an EAGLE-3 head.

    Attributes:
      decoder: its layers and its embedding; the vocabulary is the target's (V).
      draft_vocab_size: tokens that it can draft (Vd).
      padded_draft_vocab_size: rows of the head where some pad it, as `padded_vocab_size` of
        ModelConfig; None = `draft_vocab_size`.
      target_size: width of the target's hidden states (Dt).
      num_fused: hidden states of the target that are fused into one; 0 = it reads one as it is.
      norm_before_fc: they are normed together before they are fused.
      fc_norm: each of them is normed on its own before they are fused (EAGLE-3.1).
      norm_before_residual: the residual stream starts from the normed hidden state.
      norm_output: the final norm's output is fed back, not the residual stream (EAGLE-3.1).

    Raises:
      ValueError: the draft vocabulary is empty or larger than the target's, a hidden state that is
        not fused has another width than the layers, or options exclude each other.
    """

    decoder: ModelConfig
    draft_vocab_size: int
    padded_draft_vocab_size: int | None = None
    target_size: int
    num_fused: int = 3
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_before_residual: bool = False
    norm_output: bool = False

    def __post_init__(self):
        V, D = self.decoder.vocab_size, self.decoder.hidden_size
        if not 1 <= self.draft_vocab_size <= V:
            raise ValueError(
                f"eagle3: `draft_vocab_size` is {self.draft_vocab_size}, wanted 1 to the "
                f"vocab_size, {V}. Take config.json and weights from the same model."
            )
        if self.padded_draft_vocab_size is not None:
            padded = {"padded_draft_vocab_size": self.padded_draft_vocab_size}
            check_at_least("eagle3", self.draft_vocab_size, **padded)
        if not self.num_fused and self.target_size != D:
            raise ValueError(
                f"eagle3: use_aux_hidden_state is false, and the target's hidden states have width "
                f"{self.target_size}, wanted the head's {D}: nothing adapts them. Take a head that "
                "was trained for this target."
            )
        if self.norm_before_fc and self.fc_norm:
            raise ValueError(
                "eagle3: norm_before_fc and fc_norm are both true, wanted one of them. Set the one "
                "to false that the checkpoint has no weights for."
            )

    @property
    def head_rows(self) -> int:
        """Rows of the head, padding included."""
        return self.padded_draft_vocab_size or self.draft_vocab_size

    @property
    def input_size(self) -> int:
        """Width of what is read of the target."""
        return max(self.num_fused, 1) * self.target_size


class FirstLayer(nnx.Module):
    """A decoder layer whose attention reads an embedding and a hidden state side by side."""

    def __init__(self, config: Eagle3ModelConfig, dtype: DTypeLike):
        decoder = config.decoder
        D, eps = decoder.hidden_size, decoder.rms_norm_eps
        self.norm_before_residual = config.norm_before_residual
        self.input_norm = RMSNorm(D, eps, dtype)
        self.hidden_norm = RMSNorm(D, eps, dtype)
        self.attention = Attention(decoder, dtype, input_size=2 * D)
        self.post_norm = RMSNorm(D, eps, dtype)
        self.mlp = MLP(decoder, dtype)

    def __call__(
        self,
        embedded: Float[Array, "T D"],
        hidden: Float[Array, "T D"],
        rope: Rope,
        view: PagedView,
        cache: KVCache,
    ) -> tuple[Float[Array, "T D"], KVCache]:
        normed = self.hidden_norm(hidden)
        x = jnp.concatenate([self.input_norm(embedded), normed], axis=-1)  # [T, 2 D]
        out, cache = self.attention(x, rope, view, cache, 0)
        x = (normed if self.norm_before_residual else hidden) + out
        return x + self.mlp(self.post_norm(x)), cache


class Head(DraftDecoder):
    """Fusion of hidden states, decoder layers, final norm and a head over the draft vocabulary."""

    def __init__(self, config: Eagle3ModelConfig, dtype: DTypeLike):
        decoder, num_ids = config.decoder, config.draft_vocab_size
        super().__init__(decoder, dtype, num_ids=num_ids, head_rows=config.head_rows)
        D, eps = decoder.hidden_size, decoder.rms_norm_eps
        self.config = config
        if config.num_fused:
            self.fc = nnx.Param(jnp.zeros((config.input_size, D), dtype))
            if config.norm_before_fc:
                self.fc_norm = RMSNorm(config.input_size, eps, dtype)
            if config.fc_norm:
                norms = range(config.num_fused)
                self.fc_norms = nnx.Dict(
                    {str(j): RMSNorm(config.target_size, eps, dtype) for j in norms}
                )
        layers: dict[str, Any] = {"0": FirstLayer(config, dtype)}
        for i in range(1, decoder.num_layers):
            layers[str(i)] = DecoderLayer(decoder, dtype)
        self.layers = nnx.Dict(layers)
        self.norm = RMSNorm(D, eps, dtype)

    def fuse(self, hidden: Float[AnyArray, "T Dh"]) -> Float[Array, "T D"]:
        """Makes one hidden state of the target's, once a step; what is fed back is not fused.

        Args:
          hidden: hidden states of the target side by side, lowest layer first.
        """
        x = jnp.asarray(hidden).astype(self.norm.weight[...].dtype)
        if not self.config.num_fused:
            return x
        if self.config.norm_before_fc:
            x = self.fc_norm(x)
        if self.config.fc_norm:
            parts = jnp.split(x, self.config.num_fused, axis=-1)
            x = jnp.concatenate(
                [self.fc_norms[str(j)](part) for j, part in enumerate(parts)], axis=-1
            )
        return x @ self.fc[...]

    def __call__(
        self,
        token_ids: Int[AnyArray, "T"],
        hidden: Float[Array, "T D"],
        view: PagedView,
        cache: KVCache,
        embeds: Embeds | None = None,
    ) -> tuple[Float[Array, "T D"], Float[Array, "T D"], KVCache]:
        """Runs T rows that pair a token with the hidden state before it.

        Args:
          token_ids: token t + 1 of each row t.
          hidden: hidden state of token t: fused from the target's, or fed back.
          view: where the rows lie in the cache.
          cache: earlier keys and values.
          embeds: input embeddings that replace those of the tokens.

        Returns:
          (out, feedback, cache): what `logits` reads, and the hidden state to feed back.
        """
        rope = self.rope(view.rope_positions)
        embedded = self.embedded(token_ids, embeds, hidden.dtype)
        x, cache = self.layers["0"](embedded, hidden, rope, view, cache)
        for i in range(1, self.decoder.num_layers):
            x, cache = self.layers[str(i)](x, rope, view, cache, i)
        out = self.norm(x)
        return out, out if self.config.norm_output else x, cache


def rules(config: Eagle3ModelConfig, tensors: Collection[str]) -> Rules:
    """Returns where each tensor of a checkpoint goes.

    Args:
      config: shape of the head.
      tensors: names in the checkpoint, which spell the first layer in one of two ways.

    Source: vLLM model_executor/models/llama_eagle3.py, load_weights.
    """
    decoder = config.decoder
    name = "midlayer" if any(name.startswith("midlayer.") for name in tensors) else "layers.0"
    path = ("layers", "0")
    table: Rules = {
        "embed_tokens.weight": Place(("embed",)),
        "norm.weight": Place(("norm", "weight")),
        "lm_head.weight": Place(("head",)),
        "fc.weight": Place(("fc",), transpose=True) if config.num_fused else None,
        **dict.fromkeys(("d2t", "t2d", "mask_hidden")),  # no part of the module
        **DecoderLayer.rules(decoder, name, path),
        f"{name}.hidden_norm.weight": Place((*path, "hidden_norm", "weight")),
    }
    if config.num_fused and config.norm_before_fc:
        table["input_norm.weight"] = Place(("fc_norm", "weight"))
    if config.num_fused and config.fc_norm:
        for j in range(config.num_fused):
            table[f"fc_norm.{j}.weight"] = Place(("fc_norms", str(j), "weight"))
    for i in range(1, decoder.num_layers):
        table |= DecoderLayer.rules(decoder, f"layers.{i}", ("layers", str(i)))
        table[f"layers.{i}.hidden_norm.weight"] = None  # allocated by some trainers, never applied
    return table
