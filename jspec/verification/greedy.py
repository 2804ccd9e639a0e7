"""Verification by exact match: a draft is kept if it equals the target's own token."""

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
      drafts: PAD after the last; an id outside the vocabulary is never accepted.
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
    return chain(jnp.argmax(logits, axis=-1).astype(jnp.int32), drafts, num_drafts)


def chain(
    chosen: Int[Array, "B W"], drafts: Int[Array, "B K"], num_drafts: Int[Array, "B"]
) -> tuple[Verified, Int[Array, "B"]]:
    """Keeps the longest prefix of drafts that equals the target's tokens.

    Args:
      chosen: entry j is the target's token after j drafts: its argmax, or one sampled from its
        distribution. Either way the kept tokens are those of decoding without drafts.
      drafts, num_drafts: as `greedy`.

    Returns:
      As `greedy`.
    """
    column = jnp.arange(chosen.shape[1], dtype=jnp.int32)[None]  # [1, W]
    matches = (drafts == chosen[:, :-1]) & (column[:, :-1] < num_drafts[:, None])
    num_accepted = jnp.cumprod(matches, axis=1, dtype=jnp.int32).sum(axis=1)  # [B, K] -> [B]
    tokens = jnp.where(column <= num_accepted[:, None], chosen, PAD_TOKEN)
    return Verified(tokens=tokens), num_accepted


def tree(
    chosen: Int[Array, "B X1"],
    drafts: Int[Array, "B X"],
    parents: Int[Array, "B X"],
    num_drafts: Int[Array, "B"],
    *,
    depth: int,
) -> tuple[Verified, Int[Array, "B J"], Int[Array, "B"]]:
    """Keeps the path of a tree of drafts whose nodes equal the target's tokens.

    In: chosen [[5 6 7 8]], drafts [[4 5 6]], parents [[-1 -1 1]], depth 2.
    Out: tokens [[5 7 -1]], path [[1 -1]], num_accepted [1]: the target's token after node 1 is 7.

    Args:
      chosen: the target's token after the root, then after each node; X1 = X + 1. Its argmax, or
        one sampled from its distribution there: either is lossless for drafts that depend on the
        context alone, as the kept tokens are those of decoding without drafts.
      drafts: a token per node; PAD is never accepted.
      parents: node that each node follows; PAD for the root.
      num_drafts: nodes of each request; later columns are ignored.
      depth: most tokens from the root to a node (J).

    Returns:
      (verified, path, num_accepted): tokens [B, J + 1], accepted drafts and then the target's own
      next token, PAD after it; accepted nodes [B, J], PAD after the last; how many there are. Of
      equal siblings the first is taken.

    Raises:
      ValueError: the shapes contradict each other.
    """
    B, X = drafts.shape
    if chosen.shape != (B, X + 1) or parents.shape != (B, X):
        raise ValueError(
            f"tree: `chosen` has shape {chosen.shape}, `drafts` {drafts.shape} and `parents` "
            f"{parents.shape}, wanted [B, X + 1], [B, X] and [B, X]. Choose one token after the "
            "root and one after each node."
        )
    is_node = jnp.arange(X, dtype=jnp.int32)[None] < num_drafts[:, None]
    at = jnp.full(B, PAD_TOKEN, jnp.int32)  # the root
    on_path = jnp.ones(B, bool)
    token = chosen[:, 0]
    tokens, path = [token], []
    for _ in range(depth):
        matches = is_node & (parents == at[:, None]) & (drafts == token[:, None])
        on_path &= matches.any(axis=1)
        at = jnp.where(on_path, jnp.argmax(matches, axis=1).astype(jnp.int32), PAD_TOKEN)
        token = jnp.take_along_axis(chosen, at[:, None] + 1, axis=1, mode="clip")[:, 0]
        tokens.append(jnp.where(on_path, token, PAD_TOKEN))
        path.append(at)
    nodes = jnp.stack(path, axis=1)  # [B, J]
    num_accepted = (nodes != PAD_TOKEN).sum(axis=1, dtype=jnp.int32)
    return Verified(tokens=jnp.stack(tokens, axis=1)), nodes, num_accepted
