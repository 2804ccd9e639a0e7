"""A paged store of hidden states: one stack of layers a token, in the pages of the KV cache."""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jspec._checks import check_at_least
from jspec.axes import PAD_SLOT, AnyArray
from jspec.config import CacheConfig
from jspec.metadata import next_power_of_2
from jspec.state import pytree, static


@pytree
class HiddenCache:
    """Hidden states of some layers; a step donates it and gets it back, updated in place.

    Slot s lies in page `s // S` at place `s % S`, as in the KV cache.

    Attributes:
      pages: the layers' states, side by side in the order in which they are configured.
      max_model_len: most tokens a request may have.
    """

    pages: Float[Array, "P S L D"]
    max_model_len: int = static()

    @property
    def page_size(self) -> int:
        """Slots per page (S)."""
        return self.pages.shape[1]


def init_hidden_cache(cache: CacheConfig, *, num_layers: int, hidden_size: int) -> HiddenCache:
    """Allocates an empty store, with a page for each page of KV.

    Args:
      cache: pages, slots per page and element type.
      num_layers: layers whose states are stored (L).
      hidden_size: width of a layer's state (D).

    Raises:
      ValueError: a size is below 1.

    Example:
      >>> pages = CacheConfig(num_pages=4, page_size=2, max_model_len=8)
      >>> init_hidden_cache(pages, num_layers=3, hidden_size=16).pages.shape
      (4, 2, 3, 16)
    """
    check_at_least("init_hidden_cache", 1, num_layers=num_layers, hidden_size=hidden_size)
    shape = (cache.num_pages, cache.page_size, num_layers, hidden_size)
    return HiddenCache(pages=jnp.zeros(shape, cache.dtype), max_model_len=cache.max_model_len)


def write(
    cache: HiddenCache, states: Float[AnyArray, "T L D"], slots: Int[AnyArray, "T"]
) -> HiddenCache:
    """Writes a token's states to each slot.

    Args:
      cache: donated by the enclosing jit for an update in place.
      states: are converted to the element type of the store.
      slots: no two equal; PAD_SLOT and slots beyond the store write nothing.

    Source: vLLM 0.20.0 model_executor/models/extract_hidden_states.py, where slot -1 is the last.
    """
    P, S, L, D = cache.pages.shape
    states, slots = jnp.asarray(states), jnp.asarray(slots)
    if len(slots) == 1:
        # XLA on a CPU would copy the whole store for a scatter of one row: see `kv_cache.write`.
        slots = jnp.concatenate([slots, jnp.full(1, PAD_SLOT, slots.dtype)])
        states = jnp.concatenate([states, states])
    flat = cache.pages.reshape(P * S, L, D)
    flat = flat.at[slots].set(states.astype(flat.dtype), mode="drop", wrap_negative_indices=False)
    return HiddenCache(pages=flat.reshape(P, S, L, D), max_model_len=cache.max_model_len)


def read(
    cache: HiddenCache, block_table_row: Int[AnyArray, "M"], num_tokens: int
) -> Float[np.ndarray, "n L D"]:
    """Reads the states of a request's first tokens; row i is token i.

    Waits for the device. Read before a page of the request goes to another one.

    Args:
      cache: of the newest state (`state.memory`): a step consumes the one before.
      block_table_row: pages of the request in order.
      num_tokens: computed tokens (n): `seq_lens` of the last step less its `num_rejected`. The
        newest token, which nothing has run yet, has no states, and rejected drafts are not part of
        the request: the next step writes over theirs.

    Returns:
      The states in the store's element type, on the host.

    Raises:
      ValueError: there are no such tokens, or the pages do not reach that far.
    """
    P, S, L, D = cache.pages.shape
    if not 0 <= num_tokens <= cache.max_model_len:
        raise ValueError(
            f"read: `num_tokens` is {num_tokens}, wanted 0 to max_model_len = "
            f"{cache.max_model_len}. Pass the tokens that the target has run."
        )
    count = -(-num_tokens // S)
    pages = np.asarray(block_table_row)[:count]
    if len(pages) < count or ((pages < 0) | (pages >= P)).any():
        raise ValueError(
            f"read: `block_table_row` starts with {pages.tolist()}, wanted {count} pages from 0 to "
            f"{P - 1} for {num_tokens} tokens, {S} a page. Pass the row that the request ran with."
        )
    # Some pages too many, so that few sizes are compiled.
    padded = np.zeros(next_power_of_2(count), np.int32)
    padded[:count] = pages
    states = np.asarray(_gather(cache.pages, padded))  # [pages, S, L, D]
    return states.reshape(-1, L, D)[:num_tokens]


@jax.jit
def _gather(pages: Float[Array, "P S L D"], index: Int[Array, "X"]) -> Float[Array, "X S L D"]:
    return pages.at[index].get(mode="clip", wrap_negative_indices=False)
