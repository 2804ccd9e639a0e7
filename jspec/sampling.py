"""Drawing tokens at a temperature, so that a request's draws depend on nothing but the request."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jspec.axes import AnyArray


def draw(
    logits: Float[Array, "B V"],
    temperature: Float[AnyArray, "B"],
    seed: Int[AnyArray, "B"],
    position: Int[AnyArray, "B"],
    *,
    stream: int,
) -> Int[Array, "B"]:
    """Draws a token from each row's softmax; neither its neighbours nor the bucket matter.

    Args:
      logits: scores of every token.
      temperature: 0 takes the best token, the lowest id on ties.
      seed: of the request.
      position: place of the drawn token in its request; a place draws once a stream.
      stream: who draws: drafts and verification must not share their random numbers.

    Source: the Gumbel-max trick, arXiv 1611.01144.
    """

    def noise(seed: Array, position: Array) -> Array:
        key = jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), position), stream)
        return jax.random.gumbel(key, logits.shape[1:], jnp.float32)

    temperature = jnp.asarray(temperature, jnp.float32)[:, None]
    scaled = logits.astype(jnp.float32) / jnp.where(temperature > 0, temperature, 1)
    noisy = scaled + jax.vmap(noise)(jnp.asarray(seed), jnp.asarray(position))
    return jnp.argmax(jnp.where(temperature > 0, noisy, scaled), axis=-1).astype(jnp.int32)


def distribution(
    logits: Float[Array, "B V"], temperature: Float[AnyArray, "B"]
) -> Float[Array, "B V"]:
    """Returns what `draw` draws from; at temperature 0 all mass lies on the best token."""
    temperature = jnp.asarray(temperature, jnp.float32)[:, None]
    logits = logits.astype(jnp.float32)
    best = jax.nn.one_hot(jnp.argmax(logits, axis=-1), logits.shape[-1], dtype=jnp.float32)
    tempered = jax.nn.softmax(logits / jnp.where(temperature > 0, temperature, 1), axis=-1)
    return jnp.where(temperature > 0, tempered, best)
