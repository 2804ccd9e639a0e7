"""Seeded sampling: tokens are functions of a request's seed and positions, not of its batch."""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from jspec.axes import AnyArray


def draw(
    logits: Float[Array, "B V"],
    temperature: Float[AnyArray, "B"],
    seed: Int[AnyArray, "B"],
    position: Int[AnyArray, "B"],
    *,
    stream: int,
) -> Int[Array, "B"]:
    """Samples a token from each row's softmax, independently of other rows and of padding.

    Args:
      logits: scores of every token.
      temperature: anything but a normal number above 0 takes the argmax, the lowest id on ties: 0,
        negative, NaN, below 1.2e-38 (some devices flush such numbers to 0).
      seed: of the request.
      position: of the sampled token in its request; used once per stream.
      stream: random stream: drafts and verification must not share their random numbers.

    Returns:
      A token of each row; 0 of a row with NaN.

    Source: the Gumbel-max trick, arXiv 1611.01144.
    """
    scores, is_random = _scores(logits, temperature)
    noisy = scores + gumbel(seed, position, logits.shape[1], stream=stream)
    return jnp.argmax(jnp.where(is_random, noisy, scores), axis=-1).astype(jnp.int32)


def gumbel(
    seed: Int[AnyArray, "B"], position: Int[AnyArray, "B"], size: int, *, stream: int
) -> Float[Array, "B size"]:
    """Returns the finite Gumbel noise that `draw` adds to each row's scores.

    Args:
      seed, position, stream: as `draw`.
      size: tokens (V).
    """

    def noise(key: Array) -> Array:
        return jax.random.gumbel(key, (size,), jnp.float32)

    return jax.vmap(noise)(keys(seed, position, stream=stream))


def keys(seed: Int[AnyArray, "B"], position: Int[AnyArray, "B"], *, stream: int) -> Array:
    """Returns the random key of each row; `seed`, `position`, `stream`: as `draw`."""

    def one(seed: Array, position: Array) -> Array:
        return jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), position), stream)

    return jax.vmap(one)(jnp.asarray(seed), jnp.asarray(position))


def constrain(
    logits: Float[Array, "B V"],
    temperature: Float[AnyArray, "B"],
    top_k: Int[AnyArray, "B"] | None = None,
    top_p: Float[AnyArray, "B"] | None = None,
    min_p: Float[AnyArray, "B"] | None = None,
) -> Float[Array, "B V"]:
    """Masks logits by min-p, then top-k, then top-p, as vLLM does.

    In: probabilities [[.4 .3 .2 .1]], temperature [1], top_p [.7]. Out: ids 2 and 3 get -inf.

    Args:
      logits: scores of every token.
      temperature: that the constraints are evaluated at, as `draw`. Greedy rows are unchanged: no
        constraint excludes the argmax.
      top_k: keeps that many tokens and ties of the last of them; below 1 and above V keep all.
      top_p: keeps the fewest most probable tokens whose probabilities sum up to it, the lowest ids
        first on ties, and at least one; 0, 1 and numbers outside 0..1 keep all.
      min_p: keeps tokens with at least this fraction of the highest probability; 0 keeps all.

    Returns:
      The logits, not divided by the temperature, with -inf for excluded tokens, for `draw` and
      `distribution` with the same temperature.

    Source: vLLM v1/sample/logits_processor/builtin.py, MinPLogitsProcessor, and
      v1/sample/ops/topk_topp_sampler.py, apply_top_k_top_p.
    """
    V = logits.shape[1]
    scores, is_random = _scores(logits, temperature)
    if min_p is not None:
        probs = jax.nn.softmax(scores, axis=-1)
        least = jnp.asarray(min_p, jnp.float32)[:, None] * probs.max(axis=-1, keepdims=True)
        scores = jnp.where(probs < least, -jnp.inf, scores)
    if top_k is not None or top_p is not None:
        order = jnp.argsort(scores, axis=-1, descending=True, stable=True)
        ranked = jnp.take_along_axis(scores, order, axis=-1, mode="clip")  # best first
        if top_k is not None:
            k = jnp.asarray(top_k)[:, None]
            last = jnp.where((k > 0) & (k < V), k, V) - 1
            lowest = jnp.take_along_axis(ranked, last, axis=-1, mode="clip")
            ranked = jnp.where(ranked < lowest, -jnp.inf, ranked)
        if top_p is not None:
            p = jnp.asarray(top_p, jnp.float32)[:, None]
            rest = jax.lax.cumsum(jax.nn.softmax(ranked, axis=-1), axis=1, reverse=True)
            excluded = ((p > 0) & (p < 1) & (rest <= 1 - p)).at[:, 0].set(False)
            ranked = jnp.where(excluded, -jnp.inf, ranked)
        row = jnp.arange(len(order), dtype=order.dtype)[:, None]
        scores = scores.at[row, order].set(ranked, mode="drop", unique_indices=True)
    return jnp.where(is_random & (scores == -jnp.inf), -jnp.inf, logits)


def distribution(
    logits: Float[Array, "B V"], temperature: Float[AnyArray, "B"]
) -> Float[Array, "B V"]:
    """Returns the distribution that `draw` samples from: one-hot at the argmax for greedy rows."""
    scores, is_random = _scores(logits, temperature)
    one_hot = jax.nn.one_hot(jnp.argmax(scores, axis=-1), scores.shape[-1], dtype=jnp.float32)
    softmax = jax.nn.softmax(scores, axis=-1)
    return jnp.where(is_random & ~jnp.isnan(softmax), softmax, one_hot)


def draws(temperature: Float[AnyArray, "..."]) -> Bool[Array, "..."]:
    """Returns True where tokens are sampled, False where greedy. `temperature`: as `draw`."""
    return jnp.asarray(temperature, jnp.float32) >= np.finfo(np.float32).tiny


def _scores(
    logits: Float[Array, "B V"], temperature: Float[AnyArray, "B"]
) -> tuple[Float[Array, "B V"], Bool[Array, "B 1"]]:
    """Divides by the temperature, with a highest score of 0 so that nothing overflows."""
    temperature = jnp.asarray(temperature, jnp.float32)[:, None]
    is_random = draws(temperature)
    logits = logits.astype(jnp.float32)
    scores = logits - jnp.max(logits, axis=-1, keepdims=True)
    return scores / jnp.where(is_random, temperature, 1), is_random
