"""Embedding and head that a drafter shares with its target, as one buffer."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike

from jspec.checkpoint.assemble import is_float

_BLOCK_BYTES = 1 << 25
"""Memory of a comparison, beside the two tables."""


def own_or_shared(own: np.ndarray | None, shared: jax.Array, dtype: DTypeLike) -> jax.Array:
    """Returns the target's table if the drafter has none or an equal one, else the drafter's own.

    Args:
      own: [V, D] the table in the drafter's checkpoint, None where it has none.
      shared: [V, D] the target's.
      dtype: of the drafter's weights.

    Returns:
      `shared` itself, not a copy, unless `own`, cast to its dtype, differs in a bit or in shape:
      then `own` in the drafter's `dtype`, on the same devices.

    Raises:
      ValueError: `own` is quantized.

    Source: vLLM v1/spec_decode/llm_base_proposer.py, _maybe_share_embeddings, _maybe_share_lm_head.
    """
    if own is not None and not is_float(own):
        raise ValueError(
            f"the checkpoint's embedding or lm_head, {list(own.shape)}, has dtype {own.dtype}, "
            "wanted floats. Take a checkpoint that is not quantized."
        )
    if own is None or (own.shape == shared.shape and _same_bits(own, shared)):
        return shared
    return jax.device_put(own.astype(dtype), shared.sharding)


def _same_bits(own: np.ndarray, shared: jax.Array) -> bool:
    """Compares in blocks, so that neither table is copied as a whole."""
    if not own.size:
        return True
    row_bytes = max(1, own[:1].size * shared.dtype.itemsize)
    step = max(1, _BLOCK_BYTES // row_bytes)
    return all(
        bool(_same_block(shared, own[start : start + step].astype(shared.dtype), np.int32(start)))
        for start in range(0, len(own), step)
    )


@jax.jit
def _same_block(shared: jax.Array, block: jax.Array, start: jax.Array) -> jax.Array:
    bits = jnp.dtype(f"uint{8 * shared.dtype.itemsize}")
    part = lax.dynamic_slice_in_dim(shared, start, len(block))
    return (lax.bitcast_convert_type(part, bits) == lax.bitcast_convert_type(block, bits)).all()
