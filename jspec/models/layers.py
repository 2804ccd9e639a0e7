"""Building blocks of decoder models: norm, rotation, attention, MLP.

Weights of a projection are [in, out]: a product of few rows reads them in memory order.
"""

import math
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from jspec import cache as kv
from jspec.cache import KVCache
from jspec.config import ModelConfig, RopeConfig
from jspec.state import PagedView


class Place(NamedTuple):
    """Where a checkpoint tensor goes.

    Attributes:
      path: keys of the leaf in the params.
      columns: first and last + 1 column of a fused leaf that the tensor fills; None = all.
      transpose: the leaf is [in, out], the tensor [out, in].
    """

    path: tuple[str, ...]
    columns: tuple[int, int] | None = None
    transpose: bool = False


Rules: TypeAlias = dict[str, Place | None]
"""Checkpoint tensor name -> its place; None = may be there and is not read."""


def fused_rules(name: str, path: tuple[str, ...], sizes: dict[str, int], *, bias: bool) -> Rules:
    """Places tensors side by side in one projection.

    Args:
      name: tensor name with `{}` for the part, "model.layers.0.mlp.{}_proj".
      path: keys of the weight; the bias has the same with "_bias" appended.
      sizes: part -> its columns, in order.
      bias: whether the parts have one.
    """
    rules: Rules = {}
    start = 0
    for part, size in sizes.items():
        columns = (start, start := start + size)
        rules[f"{name.format(part)}.weight"] = Place(path, columns, transpose=True)
        if bias:
            rules[f"{name.format(part)}.bias"] = Place((*path[:-1], f"{path[-1]}_bias"), columns)
    return rules


class RMSNorm(nnx.Module):
    """Scales each vector to unit mean square, then by a learned weight."""

    def __init__(self, size: int, eps: float, dtype):
        self.weight = nnx.Param(jnp.ones(size, dtype))
        self.eps = eps

    def __call__(self, x: Float[Array, "... D"]) -> Float[Array, "... D"]:
        wide = x.astype(jnp.float32)
        scale = jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + self.eps)
        weight = self.weight[...].reshape((1,) * (x.ndim - 1) + (-1,))
        return (wide * scale).astype(x.dtype) * weight


def rope_frequencies(rope: RopeConfig, head_dim: int) -> np.ndarray:
    """Returns the angle that each pair of lanes turns per position, float32 [head_dim / 2]."""
    exponent = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
    inverse = (np.float32(1) / np.float32(rope.theta) ** exponent).astype(np.float32)
    if rope.kind == "linear":
        return inverse / np.float32(rope.factor)
    if rope.kind == "llama3":
        low, high, length = rope.low_freq_factor, rope.high_freq_factor, rope.original_max_len
        wavelength = 2 * math.pi / inverse
        blend = (length / wavelength - low) / (high - low) if high != low else 0 * inverse
        keep = np.where(
            wavelength < length / high, 1, np.where(wavelength > length / low, 0, blend)
        )
        return (keep * inverse + (1 - keep) * inverse / rope.factor).astype(np.float32)
    return inverse


def rope_table(
    rope: RopeConfig, head_dim: int, positions: Int[Array, "T"]
) -> tuple[Float[Array, "T half"], Float[Array, "T half"]]:
    """Returns cosine and sine of each position's angles, float32."""
    angle = positions.astype(jnp.float32)[:, None] * rope_frequencies(rope, head_dim)[None]
    return jnp.cos(angle), jnp.sin(angle)


def rotate(x: Float[Array, "T heads d"], cos: Array, sin: Array) -> Float[Array, "T heads d"]:
    """Rotates lane i with lane i + d / 2 (the "rotate half" form)."""
    a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    cos, sin = cos[:, None], sin[:, None]
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)


class Attention(nnx.Module):
    """Grouped-query self-attention over a paged cache; query, key and value weights are fused."""

    def __init__(self, config: ModelConfig, dtype, input_size: int | None = None):
        N, n, d = config.num_heads, config.num_kv_heads, config.head_dim
        D = config.hidden_size
        self.config = config
        self.qkv = nnx.Param(jnp.zeros((input_size or D, (N + 2 * n) * d), dtype))
        self.o = nnx.Param(jnp.zeros((N * d, D), dtype))
        if config.qkv_bias:
            self.qkv_bias = nnx.Param(jnp.zeros((N + 2 * n) * d, dtype))
        if config.o_bias:
            self.o_bias = nnx.Param(jnp.zeros(D, dtype))
        if config.qk_norm:
            self.q_norm = RMSNorm(d, config.rms_norm_eps, dtype)
            self.k_norm = RMSNorm(d, config.rms_norm_eps, dtype)

    @staticmethod
    def rules(config: ModelConfig, name: str, path: tuple[str, ...]) -> Rules:
        """Places the tensors `{name}.q_proj.weight` and so on below `path`."""
        N, n, d = config.num_heads, config.num_kv_heads, config.head_dim
        qkv = {"q": N * d, "k": n * d, "v": n * d}
        rules = fused_rules(f"{name}.{{}}_proj", (*path, "qkv"), qkv, bias=config.qkv_bias)
        out = {"o": config.hidden_size}
        rules |= fused_rules(f"{name}.{{}}_proj", (*path, "o"), out, bias=config.o_bias)
        if config.qk_norm:
            rules[f"{name}.q_norm.weight"] = Place((*path, "q_norm", "weight"))
            rules[f"{name}.k_norm.weight"] = Place((*path, "k_norm", "weight"))
        return rules

    def __call__(
        self,
        x: Float[Array, "T D"],
        rope: tuple[Array, Array],
        view: PagedView,
        cache: KVCache,
        layer: int,
    ) -> tuple[Float[Array, "T D"], KVCache]:
        N, n, d = self.config.num_heads, self.config.num_kv_heads, self.config.head_dim
        qkv = x @ self.qkv[...]
        if self.config.qkv_bias:
            qkv += self.qkv_bias[...]
        q, k, v = jnp.split(qkv.reshape(-1, N + 2 * n, d), (N, N + n), axis=1)
        if self.config.qk_norm:
            q, k = self.q_norm(q), self.k_norm(k)
        cache = kv.write(cache, layer, rotate(k, *rope), v, view.slots)
        out = kv.attend(rotate(q, *rope), cache, layer, view, scale=d**-0.5)
        out = out.reshape(-1, N * d) @ self.o[...]
        if self.config.o_bias:
            out += self.o_bias[...]
        return out, cache


class MLP(nnx.Module):
    """SwiGLU feed-forward block; gate and up weights are fused."""

    def __init__(self, hidden_size: int, intermediate_size: int, dtype):
        self.gate_up = nnx.Param(jnp.zeros((hidden_size, 2 * intermediate_size), dtype))
        self.down = nnx.Param(jnp.zeros((intermediate_size, hidden_size), dtype))

    @staticmethod
    def rules(hidden_size: int, intermediate_size: int, name: str, path: tuple[str, ...]) -> Rules:
        """Places the tensors `{name}.gate_proj.weight` and so on below `path`."""
        name = f"{name}.{{}}_proj"
        gate_up = {"gate": intermediate_size, "up": intermediate_size}
        return fused_rules(name, (*path, "gate_up"), gate_up, bias=False) | fused_rules(
            name, (*path, "down"), {"down": hidden_size}, bias=False
        )

    def __call__(self, x: Float[Array, "T D"]) -> Float[Array, "T D"]:
        gate, up = jnp.split(x @ self.gate_up[...], 2, axis=-1)
        return (jax.nn.silu(gate) * up) @ self.down[...]
