"""The DFlash drafter: a block of mask tokens that sees the target's hidden states as its context.

Hidden states of the context become keys and values of every layer without a pass through the
layers; only the block (the next token and mask tokens) runs. Source: arXiv 2602.06036; vLLM
model_executor/models/qwen3_dflash.py.
"""

import dataclasses
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from jspec._checks import check_at_least
from jspec.axes import AnyArray
from jspec.models import kv_cache as kv
from jspec.models.config import ModelConfig
from jspec.models.dflash2 import ConvLayer, RefineConfig, Selector
from jspec.models.kv_cache import KVCache
from jspec.models.layers import (
    Attention,
    DraftDecoder,
    Place,
    RMSNorm,
    Rope,
    Rules,
    rotate,
)
from jspec.models.llama import DecoderLayer, HiddenId
from jspec.state import PagedView


class AttentionMask(NamedTuple):
    """What a row of the block sees in one layer; see `PagedView`."""

    causal: bool = False
    window: int | None = None


@dataclass(frozen=True, kw_only=True)
class BlockConfig:
    """Shapes a DFlash drafter.

    Attributes:
      decoder: its layers and its embedding; the vocabulary is the target's (V).
      hidden_layers: hidden states of the target that are fused, in the order of the weights.
      target_size: width of each (Dt).
      fuse: a projection makes one hidden state of them; False = there is one, read as it is.
      masks: what rows see, layer by layer.
      draft_vocab_size: tokens that it can draft (Vd).
      padded_draft_vocab_size: rows of the head where some pad it, as `padded_vocab_size` of
        ModelConfig; None = `draft_vocab_size`.
      refine: convolutions and candidate selection of DFlash2; None = plain DFlash.

    Raises:
      ValueError: a size is below 1, a layer has no mask, a hidden state that is read as it is has
        another width than the layers, or the draft vocabulary does not fit.
    """

    decoder: ModelConfig
    hidden_layers: tuple[HiddenId, ...]
    target_size: int
    fuse: bool = True
    masks: tuple[AttentionMask, ...]
    draft_vocab_size: int
    padded_draft_vocab_size: int | None = None
    refine: RefineConfig | None = None

    def __post_init__(self):
        check_at_least(
            "dflash",
            1,
            target_hidden_size=self.target_size,
            draft_vocab_size=self.draft_vocab_size,
            num_target_layer_ids=len(self.hidden_layers),
        )
        V, D = self.decoder.vocab_size, self.decoder.hidden_size
        if len(self.masks) != self.decoder.num_layers:
            raise ValueError(
                f"dflash: {len(self.masks)} masks for {self.decoder.num_layers} layers, wanted "
                "one each. Correct layer_types in config.json."
            )
        if self.draft_vocab_size > V or (self.refine and self.draft_vocab_size != V):
            raise ValueError(
                f"dflash: `draft_vocab_size` is {self.draft_vocab_size}, wanted "
                f"{'' if self.refine else 'at most '}the vocab_size, {V}. Take config.json and "
                "weights from the same model."
            )
        if self.padded_draft_vocab_size is not None:
            padded = {"padded_draft_vocab_size": self.padded_draft_vocab_size}
            check_at_least("dflash", self.draft_vocab_size, **padded)
        if not self.fuse and self.input_size != D:
            raise ValueError(
                f"dflash: use_aux_hidden_state is false, and what is read of the target has width "
                f"{self.input_size}, wanted the drafter's {D}: nothing adapts it. Take a drafter "
                "that was trained for this target."
            )

    @property
    def head_rows(self) -> int:
        """Rows of the head, padding included."""
        return self.padded_draft_vocab_size or self.draft_vocab_size

    @property
    def input_size(self) -> int:
        """Width of what is read of the target."""
        return len(self.hidden_layers) * self.target_size

    @classmethod
    def tiny(cls, **changes: Any) -> "BlockConfig":
        """Makes a drafter that tests can afford: a full layer and a sliding one.

        Args:
          **changes: fields that differ.
        """
        decoder = ModelConfig.tiny(qk_norm=True)
        fields: dict[str, Any] = {
            "decoder": decoder,
            "hidden_layers": (1, 2),
            "target_size": decoder.hidden_size,
            "masks": (AttentionMask(), AttentionMask(causal=True, window=6)),
            "draft_vocab_size": decoder.vocab_size,
        }
        return cls(**fields | changes)


class DFlash(DraftDecoder):
    """Fusion of hidden states, decoder layers, final norm and head."""

    def __init__(self, config: BlockConfig, dtype: DTypeLike):
        decoder, refine, num_ids = config.decoder, config.refine, config.draft_vocab_size
        super().__init__(decoder, dtype, num_ids=num_ids, head_rows=config.head_rows)
        D, eps = decoder.hidden_size, decoder.rms_norm_eps
        self.config = config
        if config.fuse:
            self.fc = nnx.Param(jnp.zeros((config.input_size, D), dtype))
        self.hidden_norm = RMSNorm(D, eps, dtype)
        self.layers = nnx.Dict()
        for i in range(decoder.num_layers):
            self.layers[str(i)] = (
                DecoderLayer(decoder, dtype)
                if refine is None
                else ConvLayer(decoder, refine, dtype)
            )
        self.norm = RMSNorm(D, eps, dtype)
        if refine is not None:
            self.selector = Selector(decoder, refine, dtype)

    def fuse(self, hidden: Float[AnyArray, "T Dh"]) -> Float[Array, "T D"]:
        """Makes the context of the target's hidden states, side by side in their order."""
        x = jnp.asarray(hidden).astype(self.norm.weight[...].dtype)
        return self.hidden_norm(x @ self.fc[...] if self.config.fuse else x)

    def precompute_context_kv(
        self,
        hidden: Float[AnyArray, "T Dh"],
        positions: Int[AnyArray, "T"],
        slots: Int[AnyArray, "T"],
        cache: KVCache,
    ) -> KVCache:
        """Writes the context's keys and values of all layers, which no layer's output enters.

        Args:
          hidden: hidden states of the target side by side, a row per token that it ran.
          positions: place of each row in its request.
          slots: cache slot of each row; PAD writes nothing.
          cache: earlier keys and values.

        Source: vLLM model_executor/models/qwen3_dflash.py, precompute_and_store_context_kv.
        """
        context = self.fuse(hidden)  # [T, D]
        rope = self.rope(positions)
        for i in range(self.decoder.num_layers):
            k, v = _keys_values(self.layers[str(i)].attention, context, rope)
            cache = kv.write(cache, i, k, v, slots)
        return cache

    def __call__(
        self, token_ids: Int[AnyArray, "B W"], view: PagedView, cache: KVCache
    ) -> tuple[Float[Array, "B W D"], KVCache]:
        """Runs a block of rows for each request.

        Args:
          token_ids: the next token, then mask tokens.
          view: where the B * W rows lie, after their request's context.
          cache: holds the context's keys and values.

        Returns:
          (out, cache): what `logits` reads, and the cache with the rows' keys and values.
        """
        B, W = token_ids.shape
        dtype = self.norm.weight[...].dtype
        x = self.embedded(token_ids.reshape(-1), None, dtype)  # [B * W, D]
        rope = self.rope(view.positions)
        for i, mask in enumerate(self.config.masks):
            seen = dataclasses.replace(view, causal=mask.causal, window=mask.window)
            layer = self.layers[str(i)]
            if self.config.refine is None:
                x, cache = layer(x, rope, seen, cache, i)
            else:
                x, cache = layer(x, rope, seen, cache, i, width=W)
        return self.norm(x).reshape(B, W, -1), cache


def _keys_values(
    attention: Attention, x: Float[Array, "T D"], rope: Rope
) -> tuple[Float[Array, "T n d"], Float[Array, "T n d"]]:
    """Projects rows to rotated keys and to values, without queries."""
    config = attention.config
    n, start = config.num_kv_heads, config.num_heads * config.head_dim
    out = x @ attention.qkv[...][:, start:]
    if config.qkv_bias:
        out += attention.qkv_bias[...][None, start:]
    k, v = jnp.split(out.reshape(-1, 2 * n, config.head_dim), 2, axis=1)
    if config.qk_norm:
        k = attention.k_norm(k)
    return rotate(k, rope), v


def rename(name: str) -> str:
    """Returns the name that `rules` has for a tensor, which checkpoints spell in several ways."""
    name = name.removeprefix("model.")
    for theirs, ours in _OTHER_NAMES.items():
        if name.startswith(theirs):
            return ours + name.removeprefix(theirs)
    return name


_OTHER_NAMES = {
    "encoder.fc.": "fc.",
    "encoder.output_norm_enc.": "hidden_norm.",
    "midlayer.": "layers.0.",
}


def rules(config: BlockConfig) -> Rules:
    """Returns where each tensor of a checkpoint goes.

    Args:
      config: shape of the drafter.

    Source: vLLM model_executor/models/qwen3_dflash.py, load_weights.
    """
    table: Rules = {
        "hidden_norm.weight": Place(("hidden_norm", "weight")),
        "norm.weight": Place(("norm", "weight")),
        "t2d": None,  # the inverse of d2t
        "d2t": None,  # see `jspec.proposers.loaders.common.read_weights`
        "embed_tokens.weight": None,
        "lm_head.weight": None,
    }
    if config.fuse:
        table["fc.weight"] = Place(("fc",), transpose=True)
    for i in range(config.decoder.num_layers):
        name, path = f"layers.{i}", ("layers", str(i))
        table |= DecoderLayer.rules(config.decoder, name, path)
        if config.refine is not None:
            table |= ConvLayer.rules(name, path)
    if config.refine is not None:
        table |= Selector.rules("candidate_selector", ("selector",))
    return table
