"""What host drafters share: which ids count as tokens, and how they read a step."""

import numpy as np
from jax.core import Tracer

from jspec.axes import INT32_MAX, PAD_TOKEN
from jspec.state import Batch


class HasVocabulary:
    """What follows from a config's `vocab_size`."""

    vocab_size: int | None

    @property
    def id_limit(self) -> int:
        """Ids at or above it, like negative ones, count as PAD."""
        return INT32_MAX if self.vocab_size is None else self.vocab_size


def read_step(method: str, batch: Batch) -> list[np.ndarray]:
    """Copies what a step tells about known tokens to the host.

    Args:
      method: the drafter's name, for the error.
      batch: numpy leaves, or JAX arrays, which are waited for.

    Returns:
      request_slot, query_start, last_index, token_ids, place of each row in its request,
      next_token, num_valid: int32, writable. numba compiles read-only arrays, which JAX hands
      out, as types of their own.

    Raises:
      TypeError: called inside jit.
    """
    if any(isinstance(field, Tracer) for field in vars(batch).values()):
        raise TypeError(
            f"{method}: `batch` holds traced arrays, but this drafter runs on the host. Call it "
            "outside of jit with numpy arrays, or draft with method 'ngram_gpu' (NgramGPUConfig)."
        )
    place = batch.positions if batch.token_index is None else batch.token_index
    fields = (
        *(batch.request_slot, batch.query_start, batch.last_index),
        *(batch.token_ids, place, batch.next_token, batch.num_valid),
    )
    return [np.array(field, np.int32) for field in fields]


def in_vocabulary(tokens: np.ndarray, limit: int) -> np.ndarray:
    """Returns int32 tokens with PAD for every id outside the vocabulary."""
    tokens = np.asarray(tokens, np.int32)
    return np.where((tokens >= 0) & (tokens < limit), tokens, np.int32(PAD_TOKEN))
