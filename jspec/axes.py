"""Axis letters, sentinels and array aliases: the one vocabulary of jspec.

==  =============================  ==  ==========================
B   requests (padded)              D   hidden size
T   flat tokens of a step          N   query heads
K   drafts per request             n   key/value heads
W   K + 1, verified tokens         d   head dimension
V   vocabulary                     L   layers
M   pages per request              P   pages in the cache
R   logits rows                    S   slots per page
==  =============================  ==  ==========================
"""

from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import jax
import numpy as np

PAD_TOKEN = -1
"""No token here: after the last kept token, after the last draft."""

PAD_SLOT = -1
"""No KV slot: a write to it is dropped. Also "no request" in `request_slot`."""

INT32_MAX = 2**31 - 1

Impl: TypeAlias = Literal["auto", "xla", "pallas", "interpret"]
"""Which implementation of an op runs; the same integers come out of all of them."""

if TYPE_CHECKING:
    AnyArray: TypeAlias = Any  # a union would need a cast at every `.at[...]`
else:
    AnyArray: TypeAlias = jax.Array | np.ndarray
    """Where host drafters work on numpy arrays and device drafters on JAX arrays."""
