"""The Llama family (Llama, SmolLM2, Qwen2, Qwen3) over a paged cache."""

import functools
from typing import Literal, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from jspec.cache import KVCache
from jspec.config import ModelConfig
from jspec.models.layers import MLP, Attention, Place, RMSNorm, Rules, rope_table
from jspec.state import PagedView, Params

HiddenId: TypeAlias = int | Literal["norm"]
"""Residual stream after that many layers (0 = the embedding), or the output of the final norm."""


class DecoderLayer(nnx.Module):
    """Attention and MLP, each behind a norm and added to the residual stream."""

    def __init__(self, config: ModelConfig, dtype):
        self.input_norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype)
        self.attention = Attention(config, dtype)
        self.post_norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype)
        self.mlp = MLP(config.hidden_size, config.intermediate_size, dtype)

    def __call__(self, x, rope, view: PagedView, cache: KVCache, layer: int):
        out, cache = self.attention(self.input_norm(x), rope, view, cache, layer)
        x = x + out
        return x + self.mlp(self.post_norm(x)), cache


class Llama(nnx.Module):
    """A decoder with its embedding and its head."""

    def __init__(self, config: ModelConfig, dtype):
        V, D = config.vocab_size, config.hidden_size
        self.config = config
        self.embed = nnx.Param(jnp.zeros((V, D), dtype))
        self.layers = nnx.Dict(
            {str(i): DecoderLayer(config, dtype) for i in range(config.num_layers)}
        )
        self.norm = RMSNorm(D, config.rms_norm_eps, dtype)
        if not config.tie_embeddings:
            self.head = nnx.Param(jnp.zeros((V, D), dtype))

    def __call__(self, token_ids, view: PagedView, cache: KVCache, *, logit_rows, hidden_layers):
        config = self.config
        x = (
            self.embed[...]
            .at[token_ids]
            .get(mode="fill", fill_value=0, wrap_negative_indices=False)
        )
        rope = rope_table(config.rope, config.head_dim, view.positions)
        hidden: dict[HiddenId, Array] = {0: x}
        for i in range(config.num_layers):
            x, cache = self.layers[str(i)](x, rope, view, cache, i)
            hidden[i + 1] = x
        x = hidden["norm"] = self.norm(x)
        head = self.embed if config.tie_embeddings else self.head
        rows = x.at[logit_rows].get(mode="fill", fill_value=0, wrap_negative_indices=False)
        logits = jax.lax.dot_general(
            rows, head[...], (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32
        )
        picked = [hidden[i] for i in hidden_layers]
        return logits, jnp.concatenate(picked, axis=-1) if picked else None, cache


@functools.lru_cache
def _abstract(config: ModelConfig, dtype: str):
    graphdef, state = nnx.split(nnx.eval_shape(lambda: Llama(config, jnp.dtype(dtype))))
    return graphdef, nnx.to_pure_dict(state)


def abstract_params(config: ModelConfig, dtype) -> Params:
    """Returns the shapes of the params: what a checkpoint is checked against."""
    return jax.tree.map(lambda leaf: leaf, _abstract(config, jnp.dtype(dtype).name)[1])


def rules(config: ModelConfig) -> Rules:
    """Returns where each tensor of a Hugging Face checkpoint goes."""
    table: Rules = {
        "model.embed_tokens.weight": Place(("embed",)),
        "model.norm.weight": Place(("norm", "weight")),
        "lm_head.weight": None if config.tie_embeddings else Place(("head",)),
    }
    for i in range(config.num_layers):
        name, path = f"model.layers.{i}", ("layers", str(i))
        table |= {
            f"{name}.input_layernorm.weight": Place((*path, "input_norm", "weight")),
            f"{name}.post_attention_layernorm.weight": Place((*path, "post_norm", "weight")),
            **Attention.rules(config, f"{name}.self_attn", (*path, "attention")),
            **MLP.rules(
                config.hidden_size, config.intermediate_size, f"{name}.mlp", (*path, "mlp")
            ),
        }
    return table


def init_params(config: ModelConfig, key: Array, dtype) -> Params:
    """Draws random params."""
    shapes = abstract_params(config, dtype)
    leaves, tree = jax.tree.flatten(shapes)
    keys = jax.random.split(key, len(leaves))
    return jax.tree.unflatten(
        tree,
        [
            jnp.ones(leaf.shape, leaf.dtype)
            if leaf.ndim == 1
            else jax.random.normal(k, leaf.shape, leaf.dtype) * leaf.shape[-1] ** -0.5
            for k, leaf in zip(keys, leaves, strict=True)
        ],
    )


def forward(
    config: ModelConfig,
    params: Params,
    token_ids: Int[Array, "T"],
    view: PagedView,
    cache: KVCache,
    *,
    logit_rows: Int[Array, "R"],
    hidden_layers: tuple[HiddenId, ...] = (),
) -> tuple[Float[Array, "R V"], Float[Array, "T Dh"] | None, KVCache]:
    """Runs the model over the rows of a step."""
    model = nnx.merge(_abstract(config, "float32")[0], params)
    return model(token_ids, view, cache, logit_rows=logit_rows, hidden_layers=hidden_layers)
