"""first_token: what a method that samples one token a request continues from, as vLLM counts it."""

from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Int

from jspec.axes import AnyArray


def first_token(
    sampled: Int[AnyArray, "B W"],
    discard: Bool[AnyArray, "B"],
    backup: Int[AnyArray, "B"],
    *,
    vocab_size: int,
) -> tuple[Int[AnyArray, "B"], Int[AnyArray, "B"]]:
    """Picks the first sampled token of each request, or the backup where it is none.

    Unlike `jspec.pallas.next_token` it looks at one column, any negative id is none, and a request
    that is discarded still counts its token. `jspec.prepare` does not: it is here for parity.

    In: sampled [[5] [5] [-2]], discard [0 1 0], backup [7 8 9], vocab_size 100.
    Out: token [5 8 9], num_valid [1 1 0].

    Args:
      sampled: columns after the first are not read.
      discard: True for a request that continues from its backup in any case.
      backup: the last known token of each request.
      vocab_size: ids from here on are none.

    Returns:
      (token, num_valid), int32: the token to continue from; 1 where the first one is in the
      vocabulary, else 0. numpy where all arguments are.

    Raises:
      ValueError: `sampled` is not [B, W] with W of at least 1.

    Source: vLLM 0.20.0 v1/spec_decode/extract_hidden_states.py, prepare_next_token_ids_padded.
    """
    if sampled.ndim != 2 or not sampled.shape[1]:
        raise ValueError(
            f"first_token: `sampled` has shape {tuple(sampled.shape)}, wanted [B, W] with W >= 1. "
            "Pass one row a request, for example sampled[:, None]."
        )
    on_host = all(isinstance(array, np.ndarray) for array in (sampled, discard, backup))
    xp: Any = np if on_host else jnp
    first = xp.asarray(sampled)[:, 0].astype(np.int32)  # [B, W] -> [B]
    is_token = (first >= 0) & (first < vocab_size)
    token = xp.where(is_token & ~xp.asarray(discard), first, xp.asarray(backup).astype(np.int32))
    return token, is_token.astype(np.int32)
