"""Verification: which drafts the target agrees with."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jspec.axes import PAD_TOKEN
from jspec.state import Verified


def greedy(
    logits: Float[Array, "B W V"],
    drafts: Int[Array, "B K"],
    num_drafts: Int[Array, "B"],
) -> tuple[Verified, Int[Array, "B"]]:
    """Keeps the longest prefix of drafts that equals the target's greedy choice.

    In: argmax of logits [[5 6 7]], drafts [[5 9]]. Out: tokens [[5 6 -1]], num_accepted [1].

    Args:
      logits: row j is the target's prediction after j drafts; W = K + 1.
      drafts: PAD after the last; an id that is no token is never accepted.
      num_drafts: drafts of each request; later columns are ignored.

    Returns:
      (verified, num_accepted): accepted drafts and then the target's own next token, PAD after
      it; how many drafts were accepted. The lowest id wins ties.

    Source: vLLM v1/sample/rejection_sampler.py, rejection_greedy_sample_kernel.
    """
    if logits.ndim != 3 or drafts.shape != (logits.shape[0], logits.shape[1] - 1):
        raise ValueError(
            f"greedy: `logits` has shape {logits.shape} and `drafts` {drafts.shape}, wanted "
            "[B, K + 1, V] and [B, K]. Gather one logits row per draft and one after the last."
        )
    chosen = jnp.argmax(logits, axis=-1).astype(jnp.int32)  # [B, W, V] -> [B, W]
    column = jnp.arange(logits.shape[1], dtype=jnp.int32)[None]  # [1, W]
    matches = (drafts == chosen[:, :-1]) & (column[:, :-1] < num_drafts[:, None])
    num_accepted = jnp.cumprod(matches, axis=1, dtype=jnp.int32).sum(axis=1)  # [B, K] -> [B]
    tokens = jnp.where(column <= num_accepted[:, None], chosen, PAD_TOKEN)
    return Verified(tokens=tokens), num_accepted
