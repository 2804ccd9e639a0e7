"""sample_index: the row each request samples from, and how many rows after it were rejected."""

import jax
import jax.numpy as jnp
from jaxtyping import Int

from jspec.axes import AnyArray, Impl
from jspec.pallas import _backend, _dispatch


def sample_index(
    cu_num_drafts: Int[AnyArray, "B"],
    num_valid: Int[AnyArray, "B"],
    query_start: Int[AnyArray, "B+1"],
    *,
    impl: Impl = "auto",
) -> tuple[Int[AnyArray, "B"], Int[AnyArray, "B"]]:
    """Finds each request's last accepted row, and counts the rejected rows after it.

    Nothing is clamped: a request that verified drafts and keeps no token (`num_valid` 0) has every
    row rejected, and its index is the row before its first (-1 for the first request).

    Args:
      cu_num_drafts: drafts verified up to and including each request.
      num_valid: tokens that each request keeps, of `next_token`.
      query_start: first row of each request, and the end of the last.
      impl: implementation; "auto" on numpy arrays alone computes and returns numpy.

    Returns:
      (last_index, num_rejected), int32: row of the last accepted token; rejected rows, 0 where
      nothing was drafted.

    Raises:
      TypeError, ValueError: an argument of a wrong dtype or shape.
      NotImplementedError: a kernel was asked for that cannot run here.

    Source: vLLM 0.20.0 v1/spec_decode/utils.py, eagle_prepare_inputs_padded_kernel.

    Example:
      >>> import numpy as np
      >>> cu_num_drafts = np.array([3, 3, 5], np.int32)
      >>> num_valid = np.array([2, 1, 3], np.int32)
      >>> sample_index(cu_num_drafts, num_valid, np.array([0, 4, 10, 13], np.int32))
      (array([ 1,  9, 12], dtype=int32), array([2, 0, 0], dtype=int32))
    """
    host = _dispatch.on_host(impl, cu_num_drafts, num_valid, query_start)
    sizes = _dispatch.check_arrays(sample_index, cu_num_drafts, num_valid, query_start, host=host)
    if host:
        return _reference(cu_num_drafts, num_valid, query_start)
    how = _dispatch.choose(impl, "sample_index", num_cells=sizes["B"])
    args = jnp.asarray(cu_num_drafts), jnp.asarray(num_valid), jnp.asarray(query_start)
    if how == "xla":
        return _reference(*args)
    out = jax.ShapeDtypeStruct((sizes["B"],), jnp.int32)
    return _backend.launch(
        _kernel, sizes["B"], args, (out, out), name="jspec_sample_index", how=how
    )


def _reference(cu_num_drafts, num_valid, query_start):
    xp = cu_num_drafts.__array_namespace__()
    num_drafts = xp.diff(cu_num_drafts, prepend=0).astype(xp.int32)  # [B]
    num_rejected = xp.where(num_drafts > 0, num_drafts + 1 - num_valid.astype(xp.int32), 0)
    return query_start[1:].astype(xp.int32) - 1 - num_rejected, num_rejected


def _kernel(
    request,
    cu_num_drafts_ref,  # [B]
    num_valid_ref,  # [B]
    query_start_ref,  # [B + 1]
    last_index_ref,  # [B] out
    num_rejected_ref,  # [B] out
):
    before = jnp.where(request > 0, cu_num_drafts_ref[jnp.maximum(request - 1, 0)], 0)
    num_drafts = (cu_num_drafts_ref[request] - before).astype(jnp.int32)
    kept = num_valid_ref[request].astype(jnp.int32)
    num_rejected = jnp.where(num_drafts > 0, num_drafts + 1 - kept, 0)
    last_index_ref[request] = query_start_ref[request + 1].astype(jnp.int32) - 1 - num_rejected
    num_rejected_ref[request] = num_rejected
