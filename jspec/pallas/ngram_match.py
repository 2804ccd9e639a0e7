"""ngram_match: what followed the earliest of the longest earlier matches of each row's suffix."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Bool, Int

from jspec.axes import INT32_MAX, PAD_TOKEN, AnyArray, Impl
from jspec.pallas import _backend, _dispatch

_MAX_N = 16  # the kernel's loops are unrolled
_LANES = 128  # neighbouring cells read neighbouring tokens, in whole programs
_STEPS = 8  # tokens that a cell looks at


def ngram_match(
    token_ids: Int[AnyArray, "R S"],
    seq_lens: Int[AnyArray, "B"],
    mask: Bool[AnyArray, "B"],
    rows: Int[AnyArray, "B"] | None = None,
    *,
    min_n: int,
    max_n: int,
    num_drafts: int,
    impl: Impl = "auto",
) -> tuple[Int[AnyArray, "B K"], Int[AnyArray, "B"]]:
    """Copies what followed the earliest of the longest earlier matches of each row's suffix.

    Args:
      token_ids: known tokens of each memory row, left-aligned; what lies after them is not read.
      seq_lens: known tokens of each request.
      mask: requests that draft.
      rows: memory row of each request; one that does not exist (PAD) drafts nothing. None: request
        b has row b.
      min_n: shortest suffix that may match, in tokens.
      max_n: longest suffix that is compared, in tokens.
      num_drafts: most drafts a request gets (K); the model's length limit is not applied here.
      impl: implementation; the kernel reads the rows in place, and only as far as they are known.

    Returns:
      (drafts, num_valid), int32: PAD where there is no draft; how many drafts lead up to the
      first PAD.

    Raises:
      TypeError, ValueError: an argument of a wrong dtype, shape or size.
      NotImplementedError: a kernel was asked for that cannot run here.

    Source: vLLM 0.20.0 v1/spec_decode/ngram_proposer_gpu.py, NgramGPUKernel.forward.

    Example:
      >>> token_ids = np.array([[1, 2, 9, 1, 2, 8, 1, 2]], np.int32)
      >>> arrays = token_ids, np.array([8], np.int32), np.array([True])
      >>> drafts, num_valid = ngram_match(*arrays, min_n=2, max_n=2, num_drafts=3)
      >>> drafts.tolist(), num_valid.tolist()
      ([[9, 1, 2]], [3])
    """
    sizes = _check(token_ids, seq_lens, mask, rows, min_n, max_n, num_drafts)
    B, width = sizes["B"], sizes["S"]
    max_n = min(max_n, width)
    num_rows = sizes.get("R", B)
    lanes = -(-width // (_STEPS * _LANES)) * _LANES
    how = _dispatch.choose(
        impl,
        "ngram_match",
        num_cells=B * lanes,
        fits=max_n <= _MAX_N and max(num_rows * width, B * lanes) <= INT32_MAX,
        why=f"suffixes longer than {_MAX_N} tokens, or more than {INT32_MAX} tokens in all",
    )
    token_ids, seq_lens = jnp.asarray(token_ids), jnp.asarray(seq_lens).astype(jnp.int32)
    if rows is None:
        row = jnp.arange(B, dtype=jnp.int32)
    else:
        row = jnp.asarray(rows).astype(jnp.int32)
        mask = mask & (row >= 0) & (row < num_rows)
        row = jnp.clip(row, 0, num_rows - 1)

    newest = jnp.where(mask, jnp.clip(seq_lens, 0, width), 0) - 1  # [B]; -1 where nothing is read
    if how == "xla":
        known = token_ids
        if rows is not None:
            known = known.at[row].get(mode="promise_in_bounds")  # [R, S] -> [B, S]
        offset = jnp.arange(max_n, dtype=jnp.int32)[None]
        suffix = _take(token_ids, row, newest[:, None] - offset)  # [B, max_n], newest first
        best = _reference(known, newest, suffix)
    else:
        best = _launch(token_ids, row, newest, max_n=max_n, lanes=lanes, how=how)

    longest, end = best // width, width - 1 - best % width
    offset = jnp.arange(num_drafts, dtype=jnp.int32)[None]
    source = end[:, None] + 1 + offset  # [B, K]
    found = (longest >= min_n)[:, None] & (source <= newest[:, None])
    drafts = jnp.where(found, _take(token_ids, row, source), PAD_TOKEN)
    hole = jnp.where(drafts == PAD_TOKEN, offset, num_drafts)
    return drafts, jnp.min(hole, axis=1)


def _check(token_ids, seq_lens, mask, rows, min_n, max_n, num_drafts) -> dict[str, int]:
    table = (token_ids, "int B S" if rows is None else "int R S")
    arrays: dict[str, Any] = {"token_ids": table, "seq_lens": (seq_lens, "int B")}
    if rows is not None:
        arrays["rows"] = (rows, "int B")
    sizes = _dispatch.check_forms("ngram_match", mask=(mask, "bool B"), **arrays)
    _dispatch.check_sizes("ngram_match", min_n=min_n, max_n=max_n, num_drafts=num_drafts)
    if min_n > max_n:
        raise ValueError(
            f"ngram_match: `min_n` is {min_n}, above `max_n` = {max_n}. Lower min_n or raise max_n."
        )
    width = sizes["S"]
    if (min(max_n, width) + 1) * width > INT32_MAX:
        raise ValueError(
            f"ngram_match: `max_n` is {max_n} for rows of {width} tokens, wanted at most "
            f"{INT32_MAX // width - 1}: length and place of a match share one int32. Lower max_n."
        )
    return sizes


def _take(token_ids, row, columns):
    """Reads columns [B, n] of each request's row, the nearest one where an index lies outside."""
    columns = jnp.clip(columns, 0, token_ids.shape[1] - 1)
    tokens = token_ids.at[row[:, None], columns].get(mode="promise_in_bounds")
    return tokens.astype(jnp.int32)


# A run is how many tokens up to a place equal the end of the suffix, going backwards. Longest
# first, then earliest, is one number, run * S + (S - 1 - place): a single maximum finds both, and
# one comparison with the history shifted by j replaces a window of every length.


def _reference(known, newest, suffix):
    """Returns the best match of each row as that number, [B]."""
    width = known.shape[1]
    place = jnp.arange(width, dtype=jnp.int32)[None]
    same = place < newest[:, None]
    run = jnp.zeros(known.shape, jnp.int32)
    for j in range(suffix.shape[1]):
        equal = known[:, : width - j] == suffix[:, j : j + 1]
        same = same & jnp.pad(equal, ((0, 0), (j, 0)))
        run = run + same.astype(jnp.int32)
    return jnp.max(run * width + (width - 1 - place), axis=1)


def _kernel(
    cell,
    token_ids_ref,  # [R * S]
    row_ref,  # [B]
    newest_ref,  # [B]
    best_ref,  # [B * lanes] out
    *,
    width: int,
    max_n: int,
    lanes: int,
):
    request = lax.div(cell, lanes)
    newest = newest_ref[request]
    start = row_ref[request] * width
    suffix = [token_ids_ref[start + jnp.maximum(newest - j, 0)] for j in range(max_n)]
    best = jnp.zeros_like(cell)
    for step in range(-(-width // lanes)):
        place = lax.rem(cell, lanes) + step * lanes
        same = place < newest
        run = jnp.zeros_like(cell)
        for j in range(max_n):
            # Past the newest token all lanes read one place, so that unknown ones cost no traffic.
            at = jnp.clip(place - j, 0, jnp.maximum(newest, 0))
            same = same & (place >= j) & (token_ids_ref[start + at] == suffix[j])
            run = run + same.astype(jnp.int32)
        best = jnp.maximum(best, run * width + (width - 1 - place))
    best_ref[cell] = best


def _launch(token_ids, row, newest, *, max_n: int, lanes: int, how: _backend.Backend):
    B = row.shape[0]
    (best,) = _backend.launch(
        functools.partial(_kernel, width=token_ids.shape[1], max_n=max_n, lanes=lanes),
        B * lanes,
        (token_ids, row, newest),
        (jax.ShapeDtypeStruct((B, lanes), jnp.int32),),
        name="jspec_ngram_match",
        how=how,
    )
    return jnp.max(best, axis=1)  # [B, lanes] -> [B]
