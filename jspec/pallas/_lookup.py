"""What several ops share: the request of a row and the slot of a position, as kernels read them."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jspec.axes import PAD_SLOT


def request_of(cell: Any, query_start: Any, *, num_requests: int, extra: int = 0) -> Any:
    """Finds the request that a row belongs to; `num_requests` past the last one.

    A binary search by halving steps: the answer is how many requests end at or before `cell`,
    where request r ends at `query_start[r + 1] + (r + 1) * extra`.

    Args:
      cell: row index, a scalar or a vector.
      query_start: flat ref, [B + 1].
      num_requests: B, at least 1.
      extra: rows that every request has beyond its query length.
    """
    ended = jnp.zeros_like(cell)
    for bit in reversed(range(num_requests.bit_length())):
        probe = jnp.minimum(ended + (1 << bit), num_requests)
        end = query_start[probe].astype(cell.dtype) + probe * extra
        ended = jnp.where(end <= cell, probe, ended)
    return ended


def split(index: Any, size: int) -> tuple[Any, Any]:
    """Returns (index // size, index % size) of an index that is at least 0, in its own dtype."""
    size = index.dtype.type(size)
    return lax.div(index, size), lax.rem(index, size)


def is_page(page: Any, page_size: int) -> Any:
    """Whether a page id is none of the padding, nor so large that slots of its dtype would wrap."""
    return (page >= 0) & (page < jnp.iinfo(page.dtype).max // page_size)


def slot_of(
    position: Any, request: Any, block_table: Any, *, num_pages: int, page_size: int
) -> Any:
    """Looks up the cache slot of a position; past the table the last page answers.

    Args:
      position: at least 0; a scalar or a vector. Its dtype is the slot's.
      request: row of the table, like `position`.
      block_table: flat ref, [B * M].
      num_pages: columns of the table (M).
      page_size: slots a page.

    Returns:
      The slot; PAD_SLOT where the page is PAD, or no page: see `is_page`.
    """
    column, offset = split(position, page_size)
    column = jnp.clip(column, 0, num_pages - 1).astype(jnp.int32)
    page = block_table[request * num_pages + column].astype(position.dtype)
    return jnp.where(is_page(page, page_size), page * page_size + offset, PAD_SLOT)


def filled(output: jax.ShapeDtypeStruct, value: int) -> jax.Array:
    """Makes an output that holds nothing but padding, where there is no request or no row."""
    return jnp.full(output.shape, value, output.dtype)
