"""Modules that predict one more token from a target's hidden state (MTP), as MiMo has them.

A module is a norm for the hidden state, one for the embedding, a projection of both side by side,
a decoder layer and a norm. Embedding and head are the target's. Source: arXiv 2412.19437 section
2.2; vLLM model_executor/models/mimo_mtp.py.
"""

import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from jspec.axes import AnyArray
from jspec.models.config import ModelConfig
from jspec.models.kv_cache import KVCache
from jspec.models.layers import (
    DraftDecoder,
    Embeds,
    Place,
    RMSNorm,
    Rope,
    Rules,
    projection_rules,
)
from jspec.models.llama import DecoderLayer
from jspec.state import PagedView


class MTPModule(nnx.Module):
    """One module: its output is what the head reads, and the hidden state of the next token."""

    def __init__(self, config: ModelConfig, dtype: DTypeLike):
        D = config.hidden_size
        self.hidden_norm = RMSNorm(D, config.rms_norm_eps, dtype)
        self.token_norm = RMSNorm(D, config.rms_norm_eps, dtype)
        self.input_proj = nnx.Param(jnp.zeros((2 * D, D), dtype))
        self.layer = DecoderLayer(config, dtype)
        self.final_norm = RMSNorm(D, config.rms_norm_eps, dtype)

    @staticmethod
    def rules(config: ModelConfig, name: str, path: tuple[str, ...]) -> Rules:
        """Places the tensors of module `name` below `path`."""
        D = config.hidden_size
        return {
            f"{name}.hidden_layernorm.weight": Place((*path, "hidden_norm", "weight")),
            f"{name}.token_layernorm.weight": Place((*path, "token_norm", "weight")),
            f"{name}.final_layernorm.weight": Place((*path, "final_norm", "weight")),
            **projection_rules(f"{name}.input_{{}}", (*path, "input_proj"), {"proj": D}),
            **DecoderLayer.rules(config, name, (*path, "layer")),
        }

    def __call__(
        self,
        embedding: Float[Array, "T D"],
        hidden: Float[Array, "T D"],
        rope: Rope,
        view: PagedView,
        cache: KVCache,
        layer: int,
    ) -> tuple[Float[Array, "T D"], KVCache]:
        # The token at position 0 follows nothing that the model has seen.
        is_first = jnp.asarray(view.positions) == 0
        embedding = jnp.where(is_first[:, None], 0, embedding)
        both = jnp.concatenate([self.hidden_norm(hidden), self.token_norm(embedding)], axis=-1)
        x, cache = self.layer(both @ self.input_proj[...], rope, view, cache, layer)
        return self.final_norm(x), cache


class MTP(DraftDecoder):
    """Embedding, modules and head; `config.num_layers` counts the modules."""

    def __init__(self, config: ModelConfig, dtype: DTypeLike):
        super().__init__(config, dtype)
        self.modules = nnx.Dict(
            {str(i): MTPModule(config, dtype) for i in range(config.num_layers)}
        )

    def __call__(
        self,
        index: int,
        token_ids: Int[AnyArray, "T"],
        hidden: Float[Array, "T D"],
        view: PagedView,
        cache: KVCache,
        embeds: Embeds | None = None,
    ) -> tuple[Float[Array, "T D"], Float[Array, "T D"], KVCache]:
        """Runs one module.

        Args:
          index: of the module; its keys and values lie in that layer of the cache.
          token_ids: the token after each row's position.
          hidden: hidden state at each row's position: the target's, or the last module's output.
          view: where the rows lie.
          cache: keys and values of all modules.
          embeds: what stands in for tokens' own embeddings.

        Returns:
          (out, feedback, cache): what `logits` reads; the `hidden` of the next module, which is
          the same; the cache with this pass's rows.
        """
        module = self.modules[str(index)]
        dtype = module.input_proj[...].dtype
        x = self.embedded(token_ids, embeds, dtype)
        # Hidden states are the target's, whose dtype may be another.
        hidden = jnp.asarray(hidden).astype(dtype)
        out, cache = module(x, hidden, self.rope(view.rope_positions), view, cache, index)
        return out, out, cache


def rules(config: ModelConfig) -> Rules:
    """Returns where each tensor of the modules goes in params without embedding and head."""
    table: Rules = {}
    for i in range(config.num_layers):
        table |= MTPModule.rules(config, f"model.mtp_layers.{i}", ("modules", str(i)))
    return table
