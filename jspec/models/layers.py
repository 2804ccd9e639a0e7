"""Building blocks of decoder models: norm, rotary embedding, attention, MLP, and their weights.

Weights are leaves of a nested dict. Projections are [in, out]: products of few rows, which drafting
and verification are made of, run faster on a CPU that way. Queries, keys and values lie side by
side in one leaf, gate and up too. `rules` of a block says where checkpoint tensors go.
"""

import math
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from jspec.axes import PAD_TOKEN, AnyArray
from jspec.models import kv_cache as kv
from jspec.models.config import ModelConfig
from jspec.models.kv_cache import KVCache
from jspec.models.rope import RopeConfig
from jspec.state import PagedView

Rope: TypeAlias = tuple[Float[Array, "T half"], Float[Array, "T half"]]
"""Cosine and sine of each row's rotation angles, float32; `half` is half a head."""

Embeds: TypeAlias = tuple[Float[AnyArray, "T D"], Bool[AnyArray, "T"]]
"""Input embeddings, and where they replace a token's own."""


class Place(NamedTuple):
    """Where a checkpoint tensor goes.

    Attributes:
      path: keys of the leaf in the params.
      columns: first and end column of a fused leaf that the tensor fills; None = all of them.
      transpose: the leaf is [in, out], the tensor [out, in].
    """

    path: tuple[str, ...]
    columns: tuple[int, int] | None = None
    transpose: bool = False


Rules: TypeAlias = dict[str, Place | None]
"""Checkpoint tensor name -> its place; None = may be there and is not read."""


def projection_rules(
    name: str, path: tuple[str, ...], parts: dict[str, int], *, bias: bool = False
) -> Rules:
    """Places the tensors of a projection side by side in one leaf.

    Args:
      name: tensor name without ".weight", `{}` for the part: "model.layers.0.mlp.{}_proj".
      path: keys of the leaf; the bias has a leaf beside it with "_bias" appended.
      parts: part -> its columns, in their order.
      bias: whether the parts have one.

    Example:
      >>> projection_rules("mlp.{}_proj", ("gate_up",), {"gate": 8, "up": 8})["mlp.up_proj.weight"]
      Place(path=('gate_up',), columns=(8, 16), transpose=True)
    """
    rules: Rules = {}
    start = 0
    for part, size in parts.items():
        columns = (start, start := start + size)
        rules[f"{name.format(part)}.weight"] = Place(path, columns, transpose=True)
        if bias:
            rules[f"{name.format(part)}.bias"] = Place((*path[:-1], f"{path[-1]}_bias"), columns)
    return rules


def rows(x: Float[Array, "X D"], index: Int[AnyArray, "Y"]) -> Float[Array, "Y D"]:
    """Reads rows of x; zeros where there is no such row."""
    return x.at[index].get(mode="fill", fill_value=0, wrap_negative_indices=False)


def embed(
    table: Float[Array, "Vp D"],
    token_ids: Int[AnyArray, "T"],
    embeds: Embeds | None = None,
    *,
    vocab_size: int,
) -> Float[Array, "T D"]:
    """Looks embeddings up; an id outside the vocabulary gives zeros.

    Args:
      table: an embedding per token, then rows that pad it.
      token_ids: tokens.
      embeds: (values, mask): what stands in for the token's own embedding where mask is True.
      vocab_size: tokens (V).
    """
    if table.shape[0] > vocab_size:
        token_ids = jnp.where(token_ids < vocab_size, token_ids, PAD_TOKEN)
    x = rows(table, token_ids)
    if embeds is None:
        return x
    values, mask = embeds
    return jnp.where(jnp.asarray(mask)[:, None], jnp.asarray(values).astype(x.dtype), x)


def head_logits(
    hidden: Float[Array, "R D"], head: Float[Array, "Vp D"], *, num_ids: int
) -> Float[Array, "R Vp"]:
    """Scores every row of a head, in float32; those that pad it get -inf.

    A mask, where a slice would move the scores of a sharded head between devices.

    Args:
      hidden: what the head reads.
      head: a row per id, then rows that pad it.
      num_ids: ids that the head scores: tokens, or those of a draft vocabulary.
    """
    logits = jnp.einsum("rd,vd->rv", hidden, head, preferred_element_type=jnp.float32)
    if head.shape[0] == num_ids:
        return logits
    is_id = jnp.arange(head.shape[0], dtype=jnp.int32) < num_ids
    return jnp.where(is_id[None], logits, -jnp.inf)


class RMSNorm(nnx.Module):
    """Scales vectors to unit mean square, then by a learned weight; statistics in float32."""

    def __init__(self, size: int, eps: float, dtype: DTypeLike):
        self.weight = nnx.Param(jnp.ones(size, dtype))
        self.eps = eps

    def __call__(self, x: Float[Array, "*rows D"]) -> Float[Array, "*rows D"]:
        wide = x.astype(jnp.float32)
        scale = jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + self.eps)
        weight = jnp.expand_dims(self.weight[...], range(x.ndim - 1))
        return (wide * scale).astype(x.dtype) * weight


def rope_frequencies(rope: RopeConfig, head_dim: int) -> Float[np.ndarray, "half"]:
    """Returns the angle by which each pair of lanes turns per position, in radians, float32.

    Source: RoFormer (arXiv 2104.09864) section 3.2; Llama 3.1's stretching of low frequencies;
      YaRN (arXiv 2309.00071) section 3.2.
    """
    exponent = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
    inverse = np.float32(1) / np.float32(rope.theta) ** exponent
    if rope.kind == "linear":
        return inverse / np.float32(rope.factor)
    if rope.kind == "llama3":
        low, high = rope.low_freq_factor, rope.high_freq_factor
        turns = rope.original_max_len * inverse / (2 * math.pi)  # over the original context
        between = (turns - low) / (high - low) if high != low else np.zeros_like(turns)
        kept = np.select([turns > high, turns < low], [1.0, 0.0], between)
        inverse = kept * inverse + (1 - kept) * inverse / rope.factor
    if rope.kind == "yarn":
        stretched = _yarn_ramp(rope, head_dim)
        inverse = stretched * inverse / rope.factor + (1 - stretched) * inverse
    return inverse.astype(np.float32)


def _yarn_ramp(rope: RopeConfig, head_dim: int) -> Float[np.ndarray, "half"]:
    """Share of each frequency that YaRN stretches: 0 of the fast ones, 1 of the slow ones."""

    def index(turns: float) -> float:
        """Place of the frequency that turns so often over the original context."""
        wavelength = rope.original_max_len / (2 * math.pi * turns)
        return head_dim * math.log(wavelength) / (2 * math.log(rope.theta))

    low, high = index(rope.beta_fast), index(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    high += 0.001 if high == low else 0
    return np.clip((np.arange(head_dim // 2) - low) / (high - low), 0, 1)


def rope_scale(rope: RopeConfig) -> float:
    """Returns the factor of cosine and sine."""
    if rope.kind != "yarn":
        return 1.0
    if rope.attention_factor is not None:
        return rope.attention_factor
    return rope.attn_factor * (0.1 * math.log(max(rope.factor, 1)) + 1)


def rope_axes(rope: RopeConfig, head_dim: int) -> Int[np.ndarray, "half"]:
    """Returns which axis of a position (0..2) each frequency turns by.

    In: mrope_section (2, 1, 1). Out: [0 0 1 2]; interleaved [0 1 2 0].

    Source: Qwen2-VL (arXiv 2409.12191) section 2.1; the interleaved form is Qwen3-VL's.
    """
    place = np.arange(head_dim // 2, dtype=np.int32)
    if rope.mrope_section is None:
        return np.zeros_like(place)
    if not rope.mrope_interleaved:
        return np.repeat(np.arange(3, dtype=np.int32), rope.mrope_section)
    axis = place % 3
    return np.where(place < 3 * np.asarray(rope.mrope_section, np.int32)[axis], axis, 0)


def rope_table(rope: RopeConfig, head_dim: int, positions: Int[AnyArray, "*axes T"]) -> Rope:
    """Returns cosine and sine of each position's angles: once a pass, for all layers.

    Args:
      rope: frequencies.
      head_dim: size of one head (d).
      positions: place of each row in its request, or three axes of it [3, T], of which a rope
        without sections reads the first.
    """
    at = jnp.asarray(positions).astype(jnp.float32)
    if at.ndim == 1:
        at = at[:, None]  # [T, 1]
    else:
        axes = rope_axes(rope, head_dim)
        at = at.at[axes].get(mode="clip", wrap_negative_indices=False).T  # [3, T] -> [T, half]
    angle = at * rope_frequencies(rope, head_dim)[None]  # [T, half]
    scale = rope_scale(rope)
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    return (cos, sin) if scale == 1 else (cos * scale, sin * scale)


def rotate(x: Float[Array, "T heads d"], rope: Rope) -> Float[Array, "T heads d"]:
    """Rotates lane i of each head together with lane i + d / 2 (the "rotate half" form)."""
    cos, sin = (table[:, None] for table in rope)  # [T, half] -> [T, 1, half]
    a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)


class Attention(nnx.Module):
    """Grouped-query self-attention over a paged cache.

    Args:
      config: heads, biases and norms.
      dtype: of the weights.
      input_size: width of the input where it is not `config.hidden_size`.
    """

    def __init__(self, config: ModelConfig, dtype: DTypeLike, input_size: int | None = None):
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
        qkv, o = {"q": N * d, "k": n * d, "v": n * d}, {"o": config.hidden_size}
        rules = projection_rules(
            f"{name}.{{}}_proj", (*path, "qkv"), qkv, bias=config.qkv_bias
        ) | projection_rules(f"{name}.{{}}_proj", (*path, "o"), o, bias=config.o_bias)
        if config.qk_norm:
            for norm in ("q_norm", "k_norm"):
                rules[f"{name}.{norm}.weight"] = Place((*path, norm, "weight"))
        return rules

    def __call__(
        self, x: Float[Array, "T Din"], rope: Rope, view: PagedView, cache: KVCache, layer: int
    ) -> tuple[Float[Array, "T D"], KVCache]:
        """Writes the rows' keys and values to the cache, then attends to it.

        Args:
          x: normed input.
          rope: rotation of each row.
          view: where the rows lie.
          cache: pages of all layers.
          layer: the one of them that is this layer's.
        """
        N, n, d = self.config.num_heads, self.config.num_kv_heads, self.config.head_dim
        qkv = x @ self.qkv[...]
        if self.config.qkv_bias:
            qkv += self.qkv_bias[...][None]
        q, k, v = jnp.split(qkv.reshape(-1, N + 2 * n, d), (N, N + n), axis=1)
        if self.config.qk_norm:
            q, k = self.q_norm(q), self.k_norm(k)
        cache = kv.write(cache, layer, rotate(k, rope), v, view.slots, view.node_slots)
        out = kv.attend(rotate(q, rope), cache, layer, view, scale=d**-0.5)
        out = out.reshape(-1, N * d) @ self.o[...]
        if self.config.o_bias:
            out += self.o_bias[...][None]
        return out, cache


class MLP(nnx.Module):
    """The gated feed-forward block: down(silu(gate(x)) * up(x)), each with or without a bias."""

    def __init__(self, config: ModelConfig, dtype: DTypeLike):
        D, F = config.hidden_size, config.intermediate_size
        self.gate_up = nnx.Param(jnp.zeros((D, 2 * F), dtype))
        self.down = nnx.Param(jnp.zeros((F, D), dtype))
        self.has_bias = config.mlp_bias
        if config.mlp_bias:
            self.gate_up_bias = nnx.Param(jnp.zeros(2 * F, dtype))
            self.down_bias = nnx.Param(jnp.zeros(D, dtype))

    @staticmethod
    def rules(config: ModelConfig, name: str, path: tuple[str, ...]) -> Rules:
        """Places the tensors `{name}.gate_proj.weight` and so on below `path`."""
        D, F = config.hidden_size, config.intermediate_size
        projections, bias = f"{name}.{{}}_proj", config.mlp_bias
        gate_up, down = {"gate": F, "up": F}, {"down": D}
        return projection_rules(
            projections, (*path, "gate_up"), gate_up, bias=bias
        ) | projection_rules(projections, (*path, "down"), down, bias=bias)

    def __call__(self, x: Float[Array, "T D"]) -> Float[Array, "T D"]:
        gate_up = x @ self.gate_up[...]
        if self.has_bias:
            gate_up += self.gate_up_bias[...][None]
        gate, up = jnp.split(gate_up, 2, axis=-1)
        out = (jax.nn.silu(gate) * up) @ self.down[...]
        if self.has_bias:
            out += self.down_bias[...][None]
        return out


class DraftDecoder(nnx.Module):
    """Embedding and head of a drafter, which may be its target's own arrays.

    Args:
      decoder: shape of its layers; the vocabulary is the target's.
      dtype: of the weights.
      num_ids: ids that the head scores, None = the vocabulary's.
      head_rows: rows of the head, None = the embedding's.
    """

    def __init__(
        self,
        decoder: ModelConfig,
        dtype: DTypeLike,
        *,
        num_ids: int | None = None,
        head_rows: int | None = None,
    ):
        V, D = decoder.vocab_rows, decoder.hidden_size
        self.decoder = decoder
        self.num_ids = num_ids or decoder.vocab_size
        self.embed = nnx.Param(jnp.zeros((V, D), dtype))
        self.head = nnx.Param(jnp.zeros((head_rows or V, D), dtype))

    def embedded(
        self, token_ids: Int[AnyArray, "T"], embeds: Embeds | None, dtype: DTypeLike
    ) -> Float[Array, "T D"]:
        """Looks embeddings up, see `embed`; in the dtype of the layers, which may be another."""
        table = self.embed[...]
        return embed(table, token_ids, embeds, vocab_size=self.decoder.vocab_size).astype(dtype)

    def rope(self, positions: Int[AnyArray, "*axes T"]) -> Rope:
        """Returns the rotation of rows at these positions, see `rope_table`."""
        return rope_table(self.decoder.rope, self.decoder.head_dim, positions)

    def logits(self, out: Float[Array, "R D"]) -> Float[Array, "R Vdp"]:
        """Scores every draft id, in float32."""
        head = self.head[...]
        return head_logits(out.astype(head.dtype), head, num_ids=self.num_ids)
