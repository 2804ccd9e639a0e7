"""What DFlash2 adds to a DFlash drafter: convolutions over the block, and a choice of candidates.

Mask rows of a block are filled in without knowing each other's tokens. The convolutions mix
neighbouring rows; the selector then rescores the best tokens of each place by the token picked at
the place before. Source: z-lab's dflash 0.1.0, model.py, DFlash2DraftModel.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from jspec._checks import check_at_least
from jspec.axes import AnyArray
from jspec.models.config import ModelConfig
from jspec.models.kv_cache import KVCache
from jspec.models.layers import MLP, Attention, Place, RMSNorm, Rope, Rules, rows
from jspec.state import PagedView


@dataclass(frozen=True, kw_only=True)
class RefineConfig:
    """Sizes the convolutions and the selector.

    Attributes:
      num_taps: rows that a convolution reads, its own and those before it.
      group_size: lanes that share the computed part of a kernel; divides the hidden size.
      rank: width of the codes that pairs of tokens are scored by.
      top_k: candidates of each place.

    Raises:
      ValueError: a size is below 1.
    """

    num_taps: int
    group_size: int
    rank: int
    top_k: int

    def __post_init__(self):
        check_at_least(
            "dflash_config",
            1,
            conv_kernel_size=self.num_taps,
            conv_group_size=self.group_size,
            selector_rank=self.rank,
            selector_top_k=self.top_k,
        )


class BlockConv(nnx.Module):
    """Causal convolutions before and after a sublayer, over the rows of one block.

    A kernel is a learned one plus one that is computed from the row, a number per tap and group of
    lanes. Both convolutions' kernels are computed from the sublayer's input.
    """

    def __init__(self, hidden_size: int, config: RefineConfig, dtype: DTypeLike):
        self.config = config
        num_groups = hidden_size // config.group_size
        self.base = nnx.Param(jnp.zeros((2, config.num_taps, hidden_size), dtype))
        self.kernel = nnx.Param(jnp.zeros((hidden_size, 2 * config.num_taps * num_groups), dtype))

    @staticmethod
    def rules(name: str, path: tuple[str, ...]) -> Rules:
        """Places the tensors `{name}.base_kernel` and so on below `path`."""
        return {
            f"{name}.base_kernel": Place((*path, "base")),
            f"{name}.kernel_projection.weight": Place((*path, "kernel"), transpose=True),
        }

    def kernels(self, x: Float[Array, "R D"]) -> Float[Array, "2 R taps D"]:
        """Computes each row's kernels: of the convolution before the sublayer, and after it."""
        taps, D = self.config.num_taps, x.shape[-1]
        computed = (x @ self.kernel[...]).reshape(-1, 2, taps, D // self.config.group_size)
        computed = jnp.repeat(computed, self.config.group_size, axis=-1)  # [R, 2, taps, D]
        return (self.base[...][None] + computed).swapaxes(0, 1)

    def __call__(
        self, x: Float[Array, "R D"], kernel: Float[Array, "R taps D"], *, width: int
    ) -> Float[Array, "R D"]:
        """Convolves; zeros stand before a block's first row.

        Args:
          x: rows of whole blocks.
          kernel: of each row; tap t reads the row t places before.
          width: rows of a block (W).
        """
        blocks = x.reshape(-1, width, x.shape[-1])  # [B, W, D]
        before = ((0, 0), (self.config.num_taps - 1, 0), (0, 0))
        padded = jnp.pad(blocks, before)
        shifted = [
            padded[:, self.config.num_taps - 1 - tap :][:, :width].reshape(x.shape)
            for tap in range(self.config.num_taps)
        ]
        return jnp.sum(kernel * jnp.stack(shifted, axis=1), axis=1)


class ConvLayer(nnx.Module):
    """A decoder layer with convolutions around its attention and around its MLP."""

    def __init__(self, config: ModelConfig, refine: RefineConfig, dtype: DTypeLike):
        D, eps = config.hidden_size, config.rms_norm_eps
        self.input_norm = RMSNorm(D, eps, dtype)
        self.attention_conv = BlockConv(D, refine, dtype)
        self.attention = Attention(config, dtype)
        self.post_norm = RMSNorm(D, eps, dtype)
        self.mlp_conv = BlockConv(D, refine, dtype)
        self.mlp = MLP(config, dtype)

    @staticmethod
    def rules(name: str, path: tuple[str, ...]) -> Rules:
        """Places the tensors that other decoder layers have not."""
        return BlockConv.rules(
            f"{name}.attention_conv", (*path, "attention_conv")
        ) | BlockConv.rules(f"{name}.mlp_conv", (*path, "mlp_conv"))

    def __call__(
        self,
        x: Float[Array, "R D"],
        rope: Rope,
        view: PagedView,
        cache: KVCache,
        layer: int,
        *,
        width: int,
    ) -> tuple[Float[Array, "R D"], KVCache]:
        normed = self.input_norm(x)
        before, after = self.attention_conv.kernels(normed)
        out = self.attention_conv(normed, before, width=width)
        out, cache = self.attention(out, rope, view, cache, layer)
        x = x + self.attention_conv(out, after, width=width)
        normed = self.post_norm(x)
        before, after = self.mlp_conv.kernels(normed)
        out = self.mlp(self.mlp_conv(normed, before, width=width))
        return x + self.mlp_conv(out, after, width=width), cache


class Selector(nnx.Module):
    """Scores pairs of neighbouring tokens by codes of low rank."""

    def __init__(self, config: ModelConfig, refine: RefineConfig, dtype: DTypeLike):
        V, D = config.vocab_size, config.hidden_size
        self.top_k = min(refine.top_k, V)
        self.projection = nnx.Param(jnp.zeros((D, refine.rank), dtype))
        self.before = nnx.Param(jnp.zeros((V, refine.rank), dtype))
        self.after = nnx.Param(jnp.zeros((V, refine.rank), dtype))

    @staticmethod
    def rules(name: str, path: tuple[str, ...]) -> Rules:
        """Places the tensors `{name}.hidden_projection.weight` and so on below `path`."""
        return {
            f"{name}.hidden_projection.weight": Place((*path, "projection"), transpose=True),
            f"{name}.predecessor_codebook": Place((*path, "before")),
            f"{name}.successor_codebook": Place((*path, "after")),
        }

    def rescore(
        self,
        logits: Float[Array, "B V"],
        hidden: Float[Array, "B D"],
        previous: Int[AnyArray, "B"],
    ) -> Float[Array, "B V"]:
        """Rescores the best tokens of a place; all others get -inf.

        Args:
          logits: of the place.
          hidden: the final norm's output that the logits are of.
          previous: token at the place before.
        """
        unary, candidates = jax.lax.top_k(logits, self.top_k)  # [B, V] -> [B, k]
        code = rows(self.before[...], previous) * (hidden @ self.projection[...])  # [B, rank]
        after = rows(self.after[...], candidates.reshape(-1)).reshape(*candidates.shape, -1)
        pair = jnp.einsum("br,bkr->bk", code, after, preferred_element_type=jnp.float32)
        request = jnp.arange(logits.shape[0], dtype=jnp.int32)[:, None]
        none = jnp.full(logits.shape, -jnp.inf, logits.dtype)
        return none.at[request, candidates].set(unary + pair, mode="drop")
