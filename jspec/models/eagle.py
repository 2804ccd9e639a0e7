"""The EAGLE-1 head: a token's embedding fused with the target's hidden state, then decoder layers.

Source: arXiv 2401.15077 section 4.1; vLLM model_executor/models/llama_eagle.py.
"""

from dataclasses import dataclass

import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from jspec.axes import AnyArray
from jspec.models import weights
from jspec.models.config import ModelConfig
from jspec.models.kv_cache import KVCache
from jspec.models.layers import (
    MLP,
    Attention,
    Embeds,
    RMSNorm,
    Rope,
    Rules,
    embed,
    head_logits,
    projection_rules,
    rope_table,
)
from jspec.models.llama import DecoderLayer
from jspec.state import PagedView, Params


@dataclass(frozen=True, kw_only=True)
class EagleModelConfig(ModelConfig):
    """Shapes a head; vocabulary and width are the target's.

    Attributes:
      fc_bias: the fusing projection has a bias.
    """

    fc_bias: bool = False


class FirstLayer(nnx.Module):
    """A decoder layer whose attention reads the fused input as it is, without a norm."""

    def __init__(self, config: ModelConfig, dtype: DTypeLike):
        self.attention = Attention(config, dtype)
        self.post_norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype)
        self.mlp = MLP(config, dtype)

    @staticmethod
    def rules(config: ModelConfig, name: str, path: tuple[str, ...]) -> Rules:
        """Places the tensors of layer `name` below `path`."""
        rules = DecoderLayer.rules(config, name, path)
        del rules[f"{name}.input_layernorm.weight"]
        return rules

    def __call__(
        self, x: Float[Array, "T D"], rope: Rope, view: PagedView, cache: KVCache, layer: int
    ) -> tuple[Float[Array, "T D"], KVCache]:
        out, cache = self.attention(x, rope, view, cache, layer)
        x = x + out
        return x + self.mlp(self.post_norm(x)), cache


class Eagle(nnx.Module):
    """Fusing projection and decoder layers between the target's embedding and head."""

    def __init__(self, config: EagleModelConfig, dtype: DTypeLike):
        V, D = config.vocab_rows, config.hidden_size
        self.config = config
        self.embed = nnx.Param(jnp.zeros((V, D), dtype))
        self.fc = nnx.Param(jnp.zeros((2 * D, D), dtype))
        if config.fc_bias:
            self.fc_bias = nnx.Param(jnp.zeros(D, dtype))
        self.layers = nnx.Dict(
            {
                str(i): (DecoderLayer if i else FirstLayer)(config, dtype)
                for i in range(config.num_layers)
            }
        )
        self.head = nnx.Param(jnp.zeros((V, D), dtype))

    def __call__(
        self,
        token_ids: Int[AnyArray, "T"],
        hidden: Float[AnyArray, "T D"],
        view: PagedView,
        cache: KVCache,
        embeds: Embeds | None = None,
    ) -> tuple[Float[Array, "T D"], KVCache]:
        """Runs T rows: token i + 1 with the hidden state at i, at position i.

        Args:
          token_ids: an id outside the vocabulary embeds as zeros.
          hidden: of the target, after its final norm; in the draft loop the head's own output.
          view: where the rows lie in the cache.
          cache: earlier keys and values.
          embeds: input embeddings of some rows in place of their tokens' own.

        Returns:
          (out, cache): what `logits` reads and the next pass takes as `hidden`: no norm.
        """
        fc = self.fc[...]
        token = embed(self.embed[...], token_ids, embeds, vocab_size=self.config.vocab_size)
        # Embedding and hidden states are the target's, whose dtype may be another.
        x = jnp.concatenate([token.astype(fc.dtype), jnp.asarray(hidden).astype(fc.dtype)], -1)
        x = x @ fc  # [T, 2 D] -> [T, D]
        if self.config.fc_bias:
            x += self.fc_bias[...][None]
        rope = rope_table(self.config.rope, self.config.head_dim, view.rope_positions)
        for i in range(self.config.num_layers):
            x, cache = self.layers[str(i)](x, rope, view, cache, i)
        return x, cache

    def logits(self, out: Float[Array, "R D"]) -> Float[Array, "R Vp"]:
        """Scores every token with the target's head, in float32."""
        head = self.head[...]
        return head_logits(out.astype(head.dtype), head, num_ids=self.config.vocab_size)


def abstract_params(config: EagleModelConfig, dtype: DTypeLike) -> Params:
    """Returns the params' shapes; see `jspec.models.weights.abstract`."""
    return weights.abstract(Eagle, config, dtype)


def init_params(config: EagleModelConfig, key: Array, dtype: DTypeLike) -> Params:
    """Draws random params; see `jspec.models.weights.draw`."""
    return weights.draw(Eagle, config, key, dtype)


def build(config: EagleModelConfig, params: Params) -> Eagle:
    """Puts the head together from its weights."""
    return weights.bind(Eagle, config, params)


def rules(config: EagleModelConfig) -> Rules:
    """Returns where each tensor of a checkpoint goes; embedding and head have none here."""
    table = projection_rules("{}", ("fc",), {"fc": config.hidden_size}, bias=config.fc_bias)
    for i in range(config.num_layers):
        layer = DecoderLayer if i else FirstLayer
        table |= layer.rules(config, f"layers.{i}", ("layers", str(i)))
    return table
