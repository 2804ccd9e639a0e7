"""The Llama family (Llama, SmolLM2, Qwen2, Qwen3) over a paged cache.

Source: arXiv 2302.13971 (Llama), 2407.10671 (Qwen2), 2505.09388 (Qwen3).
"""

from typing import Literal, TypeAlias

import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from jspec.axes import AnyArray
from jspec.config import CacheConfig
from jspec.models import weights
from jspec.models.config import ModelConfig
from jspec.models.kv_cache import KVCache, init_cache
from jspec.models.layers import (
    MLP,
    Attention,
    Embeds,
    Place,
    RMSNorm,
    Rope,
    Rules,
    embed,
    head_logits,
    rope_table,
    rows,
)
from jspec.state import PagedView, Params

HiddenId: TypeAlias = int | Literal["norm"]
"""Residual stream after that many layers (0 = the embedding), or the final norm's output."""


class DecoderLayer(nnx.Module):
    """Attention and MLP, each after a norm and added to the residual stream.

    Args:
      config: shape of the layer.
      dtype: of the weights.
      input_norm: whether attention reads its input through a norm.
    """

    def __init__(self, config: ModelConfig, dtype: DTypeLike, *, input_norm: bool = True):
        self.has_input_norm = input_norm
        if input_norm:
            self.input_norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype)
        self.attention = Attention(config, dtype)
        self.post_norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype)
        self.mlp = MLP(config, dtype)

    @staticmethod
    def rules(config: ModelConfig, name: str, path: tuple[str, ...]) -> Rules:
        """Places the tensors of layer `name` below `path`."""
        return {
            f"{name}.input_layernorm.weight": Place((*path, "input_norm", "weight")),
            f"{name}.post_attention_layernorm.weight": Place((*path, "post_norm", "weight")),
            **Attention.rules(config, f"{name}.self_attn", (*path, "attention")),
            **MLP.rules(config, f"{name}.mlp", (*path, "mlp")),
        }

    def __call__(
        self, x: Float[Array, "T D"], rope: Rope, view: PagedView, cache: KVCache, layer: int
    ) -> tuple[Float[Array, "T D"], KVCache]:
        normed = self.input_norm(x) if self.has_input_norm else x
        out, cache = self.attention(normed, rope, view, cache, layer)
        x = x + out
        return x + self.mlp(self.post_norm(x)), cache


class Llama(nnx.Module):
    """Embedding, decoder layers, final norm and head."""

    def __init__(self, config: ModelConfig, dtype: DTypeLike):
        V, D = config.vocab_rows, config.hidden_size
        self.config = config
        self.embed = nnx.Param(jnp.zeros((V, D), dtype))
        self.layers = nnx.Dict(
            {str(i): DecoderLayer(config, dtype) for i in range(config.num_layers)}
        )
        self.norm = RMSNorm(D, config.rms_norm_eps, dtype)
        if not config.tie_embeddings:
            self.head = nnx.Param(jnp.zeros((V, D), dtype))

    def __call__(
        self,
        token_ids: Int[AnyArray, "T"],
        view: PagedView,
        cache: KVCache,
        embeds: Embeds | None = None,
    ) -> tuple[dict[HiddenId, Float[Array, "T D"]], KVCache]:
        """Returns the residual stream after each layer, the final norm's output, and the cache."""
        config = self.config
        x = embed(self.embed[...], token_ids, embeds, vocab_size=config.vocab_size)  # [T, D]
        rope = rope_table(config.rope, config.head_dim, view.rope_positions)
        hidden: dict[HiddenId, Array] = {0: x}
        for i in range(config.num_layers):
            x, cache = self.layers[str(i)](x, rope, view, cache, i)
            hidden[i + 1] = x
        hidden["norm"] = self.norm(x)
        return hidden, cache

    def logits(self, hidden: Float[Array, "R D"]) -> Float[Array, "R Vp"]:
        """Scores every token after rows of the final norm's output, in float32."""
        head = self.embed if self.config.tie_embeddings else self.head
        return head_logits(hidden, head[...], num_ids=self.config.vocab_size)


def init_pages(config: ModelConfig, cache: CacheConfig) -> KVCache:
    """Allocates the KV pages of a decoder: an empty cache of its layers and heads.

    Args:
      config: shape of the decoder.
      cache: pages, slots per page and element type.
    """
    return init_cache(
        cache,
        num_layers=config.num_layers,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
    )


def init_params(config: ModelConfig, key: Array, dtype: DTypeLike) -> Params:
    """Draws random params; see `jspec.models.weights.draw`."""
    return weights.draw(Llama, config, key, dtype)


def rules(config: ModelConfig) -> Rules:
    """Returns where each tensor of a Hugging Face checkpoint goes."""
    table: Rules = {
        "model.embed_tokens.weight": Place(("embed",)),
        "model.norm.weight": Place(("norm", "weight")),
        "lm_head.weight": None if config.tie_embeddings else Place(("head",)),
    }
    for i in range(config.num_layers):
        table |= DecoderLayer.rules(config, f"model.layers.{i}", ("layers", str(i)))
    return table


def forward(
    config: ModelConfig,
    params: Params,
    token_ids: Int[AnyArray, "T"],
    view: PagedView,
    cache: KVCache,
    *,
    logit_rows: Int[AnyArray, "R"],
    hidden_layers: tuple[HiddenId, ...] = (),
) -> tuple[Float[Array, "R V"], Float[Array, "T Dh"] | None, KVCache]:
    """Runs the model over T rows of B requests: prompt chunks, single tokens, drafts.

    A pure function to call under the caller's jit, with `config` and `hidden_layers` static and
    `cache` donated.

    Args:
      config: shape of the model.
      params: as `init_params` or `jspec.load` make them.
      token_ids: the rows' tokens; an id outside the vocabulary (PAD) embeds as zeros.
      view: where the rows lie in the cache. Its `slots` are written, then attended to.
      cache: earlier keys and values of the requests; `init_pages` makes an empty one.
      logit_rows: rows whose logits are wanted; PAD gives logits of 0.
      hidden_layers: hidden states wanted, side by side in this order: n = residual stream after
        n layers (0 = the embedding), "norm" = after the final norm.

    Returns:
      (logits, hidden, cache): float32 logits; hidden states in the dtype of the params, width
      `len(hidden_layers) * D`, None if none is wanted; the cache with this pass's rows.

    Raises:
      ValueError: `hidden_layers` names a layer that is not there, or `cache` was made for another
        model.
    """
    L = config.num_layers
    unknown = [i for i in hidden_layers if i != "norm" and i not in range(L + 1)]
    if unknown:
        raise ValueError(
            f"forward: `hidden_layers` has {unknown}, wanted 0 (the embedding) to {L} (the last "
            "layer) or 'norm'. Count layers from 1."
        )
    wanted = (L, config.num_kv_heads, config.head_dim)
    if (cache.k.shape[0], *cache.k.shape[3:]) != wanted:
        raise ValueError(
            f"forward: `cache` has shape {cache.k.shape} (L, P, S, n, d), wanted L, n, d = "
            f"{wanted}. Make it with jspec.models.llama.init_pages(config, ...)."
        )
    model = weights.bind(Llama, config, params)
    hidden, cache = model(token_ids, view, cache)
    picked = [hidden[i] for i in hidden_layers]
    logits = model.logits(rows(hidden["norm"], logit_rows))[:, : config.vocab_size]
    return logits, jnp.concatenate(picked, axis=-1) if picked else None, cache
