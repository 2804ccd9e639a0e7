"""The EAGLE-1 head: a token's embedding fused with the target's hidden state, then decoder layers.

Source: arXiv 2401.15077 section 4.1; vLLM model_executor/models/llama_eagle.py.
"""

from dataclasses import dataclass

import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from jspec.axes import AnyArray
from jspec.models.config import ModelConfig
from jspec.models.kv_cache import KVCache
from jspec.models.layers import DraftDecoder, Embeds, Rules, projection_rules
from jspec.models.llama import DecoderLayer
from jspec.state import PagedView


@dataclass(frozen=True, kw_only=True)
class EagleModelConfig(ModelConfig):
    """Shapes a head; vocabulary and width are the target's.

    Attributes:
      fc_bias: the fusing projection has a bias.
    """

    fc_bias: bool = False


class Eagle(DraftDecoder):
    """Fusing projection and decoder layers between the target's embedding and head.

    The attention of the first layer reads the fused input as it is, without a norm.
    """

    def __init__(self, config: EagleModelConfig, dtype: DTypeLike):
        super().__init__(config, dtype)
        D = config.hidden_size
        self.fc = nnx.Param(jnp.zeros((2 * D, D), dtype))
        self.has_bias = config.fc_bias
        if config.fc_bias:
            self.fc_bias = nnx.Param(jnp.zeros(D, dtype))
        layers = range(config.num_layers)
        self.layers = nnx.Dict(
            {str(i): DecoderLayer(config, dtype, input_norm=i > 0) for i in layers}
        )

    def __call__(
        self,
        token_ids: Int[AnyArray, "T"],
        hidden: Float[AnyArray, "T D"],
        view: PagedView,
        cache: KVCache,
        embeds: Embeds | None = None,
    ) -> tuple[Float[Array, "T D"], Float[Array, "T D"], KVCache]:
        """Runs T rows: token i + 1 with the hidden state at i, at position i.

        Args:
          token_ids: an id outside the vocabulary embeds as zeros.
          hidden: of the target, after its final norm; in the draft loop the head's own output.
          view: where the rows lie in the cache.
          cache: earlier keys and values.
          embeds: input embeddings of some rows in place of their tokens' own.

        Returns:
          (out, feedback, cache): what `logits` reads; the `hidden` of the next pass, which is the
          same, without a norm; the cache with this pass's rows.
        """
        fc = self.fc[...]
        token = self.embedded(token_ids, embeds, fc.dtype)
        # Hidden states are the target's, whose dtype may be another.
        x = jnp.concatenate([token, jnp.asarray(hidden).astype(fc.dtype)], -1)
        x = x @ fc  # [T, 2 D] -> [T, D]
        if self.has_bias:
            x += self.fc_bias[...][None]
        rope = self.rope(view.rope_positions)
        for i in range(self.decoder.num_layers):
            x, cache = self.layers[str(i)](x, rope, view, cache, i)
        return x, x, cache


def rules(config: EagleModelConfig) -> Rules:
    """Returns where each tensor of a checkpoint goes; embedding and head have none here."""
    table = projection_rules("{}", ("fc",), {"fc": config.hidden_size}, bias=config.fc_bias)
    for i in range(config.num_layers):
        table |= DecoderLayer.rules(config, f"layers.{i}", ("layers", str(i)))
    del table["layers.0.input_layernorm.weight"]
    return table
