"""Medusa heads: residual blocks over the target's last hidden state, each guessing one token ahead.

Head i guesses the token i + 2 places after the row that it reads; the target itself gives the one
in between. Source: arXiv 2401.10774, section 3.1.
"""

import re
from collections.abc import Collection
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from jspec._checks import check_above_0, check_at_least
from jspec.models.layers import Place, Rules, head_logits

_HEAD = re.compile(
    r"blocks\.(\d+)\.layers\.\d+\.(?:weight|bias)"
    r"|lm_heads\.(\d+)\.weight"
    r"|(\d+)\.\d+\.(?:weight|linear\.(?:weight|bias))"
)
_BLOCK = re.compile(r"(?:blocks\.\d+\.layers\.(\d+)|\d+\.(\d+)\.linear)\.weight")
TOKEN_MAP = "token_map"
"""Tensor with the target's id of each row of a truncated head."""


@dataclass(frozen=True, kw_only=True)
class HeadsConfig:
    """Shapes Medusa heads.

    Attributes:
      hidden_size: width of the target's hidden states (D).
      vocab_size: tokens of the target (V).
      num_heads: tokens that are guessed at once.
      num_layers: residual blocks of a head.
      bias: blocks have one.
      shared_head: one output matrix serves all heads; otherwise each has its own.
      draft_vocab_size: tokens that a head can draft (V'), None = all of the vocabulary.
      padded_vocab_size: rows of an output matrix where some pad it, as in ModelConfig; None = one
        for each token that a head can draft.
      logit_scale: factor of the logits.

    Raises:
      ValueError: a size is below 1, or the drafter has more tokens than the target.
    """

    hidden_size: int
    vocab_size: int
    num_heads: int
    num_layers: int = 1
    bias: bool = False
    shared_head: bool = False
    draft_vocab_size: int | None = None
    padded_vocab_size: int | None = None
    logit_scale: float = 1.0

    def __post_init__(self):
        sizes = ("hidden_size", "vocab_size", "num_heads", "num_layers")
        check_at_least("HeadsConfig", 1, **{name: getattr(self, name) for name in sizes})
        check_above_0("HeadsConfig", logit_scale=self.logit_scale)
        if self.draft_vocab_size is not None:
            check_at_least("HeadsConfig", 1, draft_vocab_size=self.draft_vocab_size)
            if self.draft_vocab_size > self.vocab_size:
                raise ValueError(
                    f"HeadsConfig: `draft_vocab_size` is {self.draft_vocab_size}, above the "
                    f"target's vocab_size = {self.vocab_size}. Pass at most that, or None for all."
                )
        if self.padded_vocab_size is not None:
            padded = {"padded_vocab_size": self.padded_vocab_size}
            check_at_least("HeadsConfig", self.num_ids, **padded)

    @property
    def num_ids(self) -> int:
        """Tokens that a head can draft (V')."""
        return self.vocab_size if self.draft_vocab_size is None else self.draft_vocab_size

    @property
    def head_rows(self) -> int:
        """Rows of an output matrix, padding included."""
        return self.padded_vocab_size or self.num_ids

    @classmethod
    def tiny(cls):
        """Returns heads that tests can afford."""
        return cls(hidden_size=32, vocab_size=64, num_heads=3, bias=True)


class ResidualBlock(nnx.Module):
    """A layer that adds to its input: x + silu(W x + b)."""

    def __init__(self, config: HeadsConfig, dtype: DTypeLike):
        D = config.hidden_size
        self.fc = nnx.Param(jnp.zeros((D, D), dtype))
        if config.bias:
            self.fc_bias = nnx.Param(jnp.zeros(D, dtype))
        self.has_bias = config.bias

    def __call__(self, x: Float[Array, "B D"]) -> Float[Array, "B D"]:
        out = x @ self.fc[...]
        if self.has_bias:
            out += self.fc_bias[...][None]
        return x + jax.nn.silu(out)


class Head(nnx.Module):
    """Residual blocks, and the output matrix where it is not shared."""

    def __init__(self, config: HeadsConfig, dtype: DTypeLike):
        self.blocks = nnx.Dict(
            {str(j): ResidualBlock(config, dtype) for j in range(config.num_layers)}
        )
        if not config.shared_head:
            self.head = nnx.Param(jnp.zeros((config.head_rows, config.hidden_size), dtype))


class Medusa(nnx.Module):
    """Heads that read the same hidden state and do not read each other."""

    def __init__(self, config: HeadsConfig, dtype: DTypeLike):
        self.config = config
        self.heads = nnx.Dict({str(i): Head(config, dtype) for i in range(config.num_heads)})
        if config.shared_head:
            self.head = nnx.Param(jnp.zeros((config.head_rows, config.hidden_size), dtype))

    def logits(self, hidden: Float[Array, "B D"], index: int) -> Float[Array, "B Vdp"]:
        """Scores the tokens that head `index` guesses from, in float32.

        Args:
          hidden: the target's hidden states, after its final norm.
          index: 0..num_heads-1; other heads are not run.
        """
        own = self.heads[str(index)]
        x = hidden.astype(own.blocks["0"].fc[...].dtype)
        for j in range(self.config.num_layers):
            x = own.blocks[str(j)](x)
        head = self.head[...] if self.config.shared_head else own.head[...]
        logits = head_logits(x.astype(head.dtype), head, num_ids=self.config.num_ids)
        return logits if self.config.logit_scale == 1 else logits * self.config.logit_scale


def short_name(name: str) -> str:
    """Removes the prefix that some files put before each tensor's name."""
    return name.removeprefix("medusa_heads.")


def is_head(name: str, num_layers: int) -> bool:
    """Tells whether a tensor is an output matrix, in either layout."""
    return bool(re.fullmatch(rf"(?:lm_head|lm_heads\.\d+|\d+\.{num_layers})\.weight", name))


def count_heads(names: Collection[str]) -> int:
    """Counts the heads that tensors belong to; 0 where none is of a head."""
    return len({_head_of(name) for name in names} - {None})


def count_layers(names: Collection[str]) -> int:
    """Counts the residual blocks of a head; 0 where the tensors have none."""
    found = [match for name in names if (match := _BLOCK.fullmatch(name))]
    return len({int(match[1] or match[2]) for match in found})


def _head_of(name: str) -> int | None:
    match = _HEAD.fullmatch(name)
    return None if match is None else int(next(filter(None, match.groups())))


def rules(config: HeadsConfig, names: Collection[str]) -> Rules:
    """Returns where each tensor of a checkpoint goes, by the layout that its names are of.

    `blocks.I.layers.J` and `lm_heads.I` are vLLM's names, `I.J.linear` and `I.{last}` those of
    FasterDecoding.

    Args:
      config: what is wanted; tensors of further heads are not read.
      names: of all tensors, see `short_name`.
    """
    blocks, head = "blocks.{}.layers.{}", "lm_heads.{}.weight"
    if not any(name.startswith("blocks.") for name in names):
        blocks, head = "{}.{}.linear", f"{{}}.{config.num_layers}.weight"
    table: Rules = {TOKEN_MAP: None}
    for name in names:
        if (_head_of(name) or 0) >= config.num_heads:
            table[name] = None
    for i in range(config.num_heads):
        path = ("heads", str(i))
        for j in range(config.num_layers):
            leaf = (*path, "blocks", str(j), "fc")
            table[f"{blocks.format(i, j)}.weight"] = Place(leaf, transpose=True)
            if config.bias:
                table[f"{blocks.format(i, j)}.bias"] = Place((*leaf[:-1], "fc_bias"))
        if not config.shared_head:
            table[head.format(i)] = Place((*path, "head"))
    if config.shared_head:
        # One matrix for all heads has a name of its own, or it is that of the first head.
        given = [name for name in names if is_head(name, config.num_layers)]
        table |= dict.fromkeys(given)
        if given:
            table[min(given, key=lambda name: (len(name), name))] = Place(("head",))
    return table
