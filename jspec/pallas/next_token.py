"""next_token: the token each request continues from after verification."""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Bool, Int

from jspec.axes import PAD_TOKEN, AnyArray, Impl
from jspec.pallas import _backend, _dispatch

_MAX_WIDTH = 64  # the kernel's loop over a row is unrolled


def next_token(
    sampled: Int[AnyArray, "B W"],
    discard: Bool[AnyArray, "B"],
    backup: Int[AnyArray, "B"],
    *,
    vocab_size: int,
    impl: Impl = "auto",
) -> tuple[Int[AnyArray, "B"], Int[AnyArray, "B"]]:
    """Picks the token each request continues from, and counts the tokens it keeps.

    An entry is valid unless it is PAD_TOKEN or at least `vocab_size`; a hole between valid entries
    is skipped, and a negative id other than PAD_TOKEN counts as valid.

    Args:
      sampled: verified tokens; PAD_TOKEN after the last kept one.
      discard: True for a request whose tokens must not count (unfinished prefill, padding).
      backup: the token of a request that keeps none.
      vocab_size: ids from here on are invalid.
      impl: implementation; "auto" on numpy arrays alone computes and returns numpy.

    Returns:
      (token, num_valid), int32: the last valid token or the backup; the number of valid tokens
      (accepted drafts and one more), 0 where discarded.

    Raises:
      TypeError, ValueError: an argument of a wrong dtype or shape.
      NotImplementedError: a kernel was asked for that cannot run here.

    Source: vLLM 0.20.0 v1/spec_decode/utils.py, eagle_prepare_next_token_padded_kernel.

    Example:
      >>> import numpy as np
      >>> sampled = np.array([[5, 7, -1], [-1, -1, -1], [9, 200, 3]], np.int32)
      >>> backup = np.array([70, 71, 72], np.int32)
      >>> next_token(sampled, np.array([False, False, False]), backup, vocab_size=100)
      (array([ 7, 71,  3], dtype=int32), array([2, 0, 2], dtype=int32))
    """
    host = _dispatch.on_host(impl, sampled, discard, backup)
    sizes = _dispatch.check_arrays(next_token, sampled, discard, backup, host=host)
    _dispatch.check_sizes("next_token", vocab_size=vocab_size)
    if host:
        return _reference(sampled, discard, backup, vocab_size=vocab_size)
    how = _dispatch.choose(
        impl,
        "next_token",
        num_cells=sizes["B"],
        fits=sizes["W"] <= _MAX_WIDTH,
        why=f"rows wider than {_MAX_WIDTH}",
    )
    args = jnp.asarray(sampled), jnp.asarray(discard), jnp.asarray(backup)
    if how == "xla":
        return _reference(*args, vocab_size=vocab_size)
    kernel = functools.partial(_kernel, width=sizes["W"], vocab_size=vocab_size)
    out = jax.ShapeDtypeStruct((sizes["B"],), jnp.int32)
    return _backend.launch(kernel, sizes["B"], args, (out, out), name="jspec_next_token", how=how)


def _reference(sampled, discard, backup, *, vocab_size: int):
    xp = sampled.__array_namespace__()
    lane = xp.arange(sampled.shape[1], dtype=xp.int32)[None]
    valid = (sampled != PAD_TOKEN) & (sampled < vocab_size) & ~discard[:, None]  # [B, W]
    last = xp.max(xp.where(valid, lane, -1), axis=1)  # [B, W] -> [B]
    token = xp.sum(xp.where(lane == last[:, None], sampled, 0), axis=1, dtype=xp.int32)
    num_valid = xp.sum(valid, axis=1, dtype=xp.int32)
    return xp.where(last >= 0, token, backup.astype(xp.int32)), num_valid


def _kernel(
    request,
    sampled_ref,  # [B * W]
    discard_ref,  # [B]
    backup_ref,  # [B]
    token_ref,  # [B] out
    num_valid_ref,  # [B] out
    *,
    width: int,
    vocab_size: int,
):
    keep = ~discard_ref[request]
    token = backup_ref[request].astype(jnp.int32)
    num_valid = jnp.zeros_like(token)
    for lane in range(width):
        entry = sampled_ref[request * width + lane]
        valid = keep & (entry != PAD_TOKEN) & (entry < vocab_size)
        token = jnp.where(valid, entry.astype(jnp.int32), token)
        num_valid += valid.astype(jnp.int32)
    token_ref[request] = token
    num_valid_ref[request] = num_valid
