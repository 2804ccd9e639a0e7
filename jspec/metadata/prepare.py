"""From the target's step to the drafter's batch: checks, `prepare`, views of the paged cache."""

import dataclasses
from typing import Any, no_type_check

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

from jspec._numba import njit
from jspec.axes import INT32_MAX, PAD_SLOT, PAD_TOKEN, AnyArray
from jspec.metadata.attention_metadata import request_of
from jspec.pallas._lookup import is_page
from jspec.pallas.next_token import next_token
from jspec.pallas.sample_index import sample_index
from jspec.state import Batch, PagedView, Scheduled, Verified


def prepare(scheduled: Scheduled, verified: Verified, *, vocab_size: int | None = None) -> Batch:
    """Joins what the target ran with what the verifier kept.

    Works inside jit, on JAX arrays, and on numpy arrays (which stay on the host).

    In (one request, two drafts verified, one kept): query_start [0 3], num_drafts [2],
    tokens [[7 9 -1]]. Out: next_token [9], num_valid [2], num_rejected [1], last_index [1].

    Args:
      scheduled: the step; see `Scheduled` for padding.
      verified: kept tokens [B, W]; any negative id counts as PAD.
      vocab_size: ids at or above it count as PAD; None = no bound.

    Returns:
      The batch. A row that is discarded, padded or without a valid token has `num_valid` 0 and
      continues from `backup_token`; `last_index` never leaves the request.

    Raises:
      TypeError, ValueError: a field of a wrong dtype or shape.

    Source: vLLM v1/spec_decode/llm_base_proposer.py, prepare_next_token_ids_padded and
      prepare_inputs_padded; the clamps are ours.
    """
    check_scheduled(scheduled)
    check_verified(verified, scheduled)
    return prepare_checked(scheduled, verified, vocab_size=vocab_size)


def prepare_checked(
    scheduled: Scheduled, verified: Verified, *, vocab_size: int | None = None
) -> Batch:
    """Is `prepare` for a step that `check_scheduled` and `check_verified` passed."""
    of_verified = (
        *(verified.tokens, scheduled.discard, scheduled.backup_token),
        *(scheduled.num_drafts, scheduled.query_start, scheduled.request_slot),
    )
    limit = INT32_MAX if vocab_size is None else vocab_size
    num_rows = scheduled.token_ids.shape[0]
    if isinstance(scheduled.token_ids, np.ndarray) and isinstance(verified.tokens, np.ndarray):
        joined = np.empty((4, scheduled.query_start.shape[0] - 1), np.int32)
        _join_on_host(*map(np.ascontiguousarray, of_verified), num_rows, limit, joined)
    else:
        joined = _join(*of_verified, num_rows=num_rows, vocab_size=limit)
    fields = {name: getattr(scheduled, name) for name in _FIELDS[Scheduled]}
    return Batch(**fields, **dict(zip(_JOINED, joined, strict=True)))


_JOINED = ("next_token", "last_index", "num_valid", "num_rejected")


def _join(tokens, discard, backup, num_drafts, query_start, slot, *, num_rows, vocab_size):
    """Computes the `_JOINED` fields in JAX."""
    first, end = query_start[:-1], query_start[1:]
    is_empty = (end <= first) | (slot < 0)
    token, num_valid = next_token(
        jnp.where(tokens < 0, PAD_TOKEN, tokens), discard | is_empty, backup, vocab_size=vocab_size
    )
    cu_num_drafts = jnp.cumsum(num_drafts, dtype=jnp.int32)
    last_index, _ = sample_index(cu_num_drafts, num_valid, query_start)
    last_index = jnp.maximum(last_index, first)  # a row without a valid token stays in its request
    last_index = jnp.clip(jnp.minimum(last_index, end - 1), 0, num_rows - 1)
    return token, last_index, num_valid, jnp.where(is_empty, 0, end - 1 - last_index)


@njit()
@no_type_check  # numba compiles the function as it is written
def _join_on_host(
    tokens, discard, backup, num_drafts, query_start, slot, num_rows, vocab_size, joined
):
    """Computes the `_JOINED` fields in a loop: a dozen numpy calls take five times as long."""
    for b in range(slot.size):
        first, end = query_start[b], query_start[b + 1]
        is_empty = end <= first or slot[b] < 0
        token, num_valid = backup[b], 0
        if not (discard[b] or is_empty):
            for entry in tokens[b]:
                if 0 <= entry < vocab_size:
                    token = entry
                    num_valid += 1
        last = end - 1
        if num_drafts[b] > 0:
            last -= num_drafts[b] + 1 - num_valid
        last = min(max(last, first), end - 1)  # a row without a valid token stays in its request
        last = min(max(last, 0), num_rows - 1)
        joined[0, b], joined[1, b], joined[2, b] = token, last, num_valid
        joined[3, b] = 0 if is_empty else end - 1 - last


def row_request(
    query_start: Int[AnyArray, "B1"], num_rows: int
) -> tuple[Int[Array, "T"], Bool[Array, "T"]]:
    """Finds the request of each flat row.

    In: query_start [0 2 2 5], num_rows 6. Out: request [0 0 2 2 2 2], live [1 1 1 1 1 0].

    Args:
      query_start: int32; first row of each request, and the end of the last.
      num_rows: T.

    Returns:
      (request, live): index of the request (clamped for padding rows), whether the row is one.
    """
    rows = jnp.arange(num_rows, dtype=jnp.int32)
    request = request_of(jnp.asarray(query_start), rows)
    return jnp.clip(request, 0, query_start.shape[0] - 2), rows < query_start[-1]


def paged_view(
    scheduled: Scheduled, *, page_size: int, max_model_len: int, causal: bool = True
) -> PagedView:
    """Places the rows of a step in a paged cache.

    A row that is padding, lies at or past `max_model_len`, or beyond its block table gets PAD and
    writes nothing: it never lands on a neighbour's page.

    Args:
      scheduled: the step.
      page_size: S, slots per page.
      max_model_len: positions at or above it are not stored.
      causal: whether a row sees only rows up to its own position.
    """
    index = scheduled.positions if scheduled.token_index is None else scheduled.token_index
    request, live = row_request(scheduled.query_start, index.shape[0])
    page = index // page_size
    page_id = (
        jnp.asarray(scheduled.block_table)
        .at[request, page]
        .get(mode="fill", fill_value=PAD_SLOT, wrap_negative_indices=False)
    )
    stored = live & (index >= 0) & (index < max_model_len) & is_page(page_id, page_size)
    return PagedView(
        block_table=scheduled.block_table,
        seq_lens=scheduled.seq_lens,
        positions=index,
        axes=None if scheduled.token_index is None else scheduled.positions,
        slots=jnp.where(stored, page_id * page_size + index % page_size, PAD_SLOT),
        query_start=scheduled.query_start,
        causal=causal,
    )


def check_scheduled(scheduled: Any) -> None:
    """Raises TypeError or ValueError, naming the field, unless shapes and dtypes fit together.

    A `Batch` is checked whole.
    """
    names = _FIELDS.get(type(scheduled))
    if names is None:
        raise TypeError(
            f"`scheduled` is a {type(scheduled).__name__}, wanted a jspec.Scheduled. Put what the "
            "target ran into one."
        )
    signature = tuple(_signature(getattr(scheduled, name)) for name in names)
    if signature in _checked:
        return
    owner = type(scheduled).__name__
    fields = {name: getattr(scheduled, name) for name in names}
    fields = {k: v for k, v in fields.items() if v is not None or k not in _OPTIONAL}
    for name, value in fields.items():
        _check_is_array(owner, name, value)
    start = scheduled.query_start.shape
    if len(start) != 1 or start[0] < 2:
        raise ValueError(
            f"{owner}: `query_start` has shape {start}, wanted [B + 1] with B >= 1: the first "
            "row of each request and the end of the last, for example [0, 3, 7]."
        )
    B, T = start[0] - 1, scheduled.token_ids.shape[0] if scheduled.token_ids.ndim else 0
    shapes: dict[str, tuple[int | str, ...]] = {
        "token_ids": (T or "T",),
        "positions": (T,) if scheduled.positions.ndim == 1 else (3, T),
        "query_start": (B + 1,),
        "block_table": (B, "M"),
        "token_index": (T,),
        "hidden": (T, "D"),
        "embeds": (T, "D"),
        "embeds_mask": (T,),
        "draft_parents": (B, "X"),
    }
    for name, value in fields.items():
        _check_field(owner, name, value, shapes.get(name, (B,)))
    if (scheduled.positions.ndim == 2) != (scheduled.token_index is not None):
        raise ValueError(
            "Scheduled: `token_index` goes with `positions` of three axes, and only with them. "
            "Pass token_index [T] (place of each row in its request) beside positions [3, T]."
        )
    if (scheduled.embeds is None) != (scheduled.embeds_mask is None):
        raise ValueError("Scheduled: pass `embeds` and `embeds_mask` together, or neither.")
    if (scheduled.temperature is None) != (scheduled.seed is None):
        raise ValueError("Scheduled: pass `temperature` and `seed` together, or neither.")
    for name in ("top_k", "top_p", "min_p"):
        if getattr(scheduled, name) is not None and scheduled.temperature is None:
            raise ValueError(
                f"Scheduled: `{name}` goes with `temperature`. Pass temperature and seed, too."
            )
    _checked.add(signature)


def check_counts(owner: str, scheduled: Scheduled) -> None:
    """Raises ValueError, naming the request, where counts of a step contradict each other.

    Looks at numpy arrays alone: values on a device are not waited for.

    Args:
      owner: the function that was called, for messages.
      scheduled: a step that `check_scheduled` passed.
    """
    start, seq_lens, count = scheduled.query_start, scheduled.seq_lens, scheduled.num_drafts
    if not type(start) is type(seq_lens) is type(count) is np.ndarray:
        return
    starts, num_rows = start.tolist(), scheduled.token_ids.shape[0]
    if starts[0] != 0 or starts[-1] > num_rows or starts != sorted(starts):
        raise ValueError(
            f"{owner}: `query_start` is {start}, wanted 0 first, then the end of each request's "
            f"rows, ascending up to {num_rows} rows at most. A padded request repeats the last "
            "value."
        )
    if len(starts) > _MANY_REQUESTS:  # where one look at all is faster than one at each
        rows = start[1:] - start[:-1]
        signs = (seq_lens - rows) | count | (rows - count - (rows > 0))
        if np.bitwise_or.reduce(signs) >= 0:
            return
    slots = scheduled.request_slot
    for b, (total, drafts) in enumerate(zip(seq_lens.tolist(), count.tolist(), strict=True)):
        rows = starts[b + 1] - starts[b]
        if rows <= total and 0 <= drafts < rows:
            continue
        if rows == 0 or (isinstance(slots, np.ndarray) and slots[b] < 0):
            continue  # a padded request, whatever it holds
        if rows > total:
            raise ValueError(
                f"{owner}: `seq_lens` of request {b} is {total}, wanted at least its {rows} rows "
                "in this step: it counts the tokens of the request with them."
            )
        raise ValueError(
            f"{owner}: `num_drafts` of request {b} is {drafts}, wanted 0 to {rows - 1}: the drafts "
            f"among its {rows} rows come after one token or more that was known."
        )


def check_verified(verified: Any, scheduled: Scheduled) -> None:
    """Raises TypeError or ValueError unless `verified` has a row for each request."""
    if not isinstance(verified, Verified):
        raise TypeError(
            f"`verified` is a {type(verified).__name__}, wanted a jspec.Verified. Put what the "
            "verifier kept into one."
        )
    num_requests = scheduled.query_start.shape[0] - 1
    signature = (num_requests, _signature(verified.tokens))
    if signature not in _checked:
        _check_is_array("Verified", "tokens", verified.tokens)
        _check_field("Verified", "tokens", verified.tokens, (num_requests, "W"))
        _checked.add(signature)


_FIELDS = {cls: tuple(f.name for f in dataclasses.fields(cls)) for cls in (Scheduled, Batch)}
_OPTIONAL = {field.name for field in dataclasses.fields(Scheduled) if field.default is None}
_DTYPES = {
    "discard": "bool",
    "embeds": "float",
    "embeds_mask": "bool",
    "hidden": "float",
    "min_p": "float",
    "temperature": "float",
    "top_p": "float",
}


def check_prompt(
    owner: str, tokens: Any, *, max_len: int, vocab_size: int | None
) -> Int[np.ndarray, "n"]:
    """Returns a prompt as int32, or raises a ValueError that names the offending token."""
    try:
        array = np.asarray(tokens)
    except ValueError:  # lists of unequal lengths
        array = np.asarray(tokens, object)
    if array.size == 0:
        raise ValueError(
            f"{owner}: the prompt is empty, wanted at least one token. Leave it out, or start it "
            "with the model's first token (BOS)."
        )
    if array.ndim != 1 or not np.issubdtype(array.dtype, np.integer):
        raise ValueError(
            f"{owner}: the prompt is {array.dtype} of shape {array.shape}, wanted token ids [n]. "
            "Encode text with the model's tokenizer first."
        )
    if len(array) > max_len:
        raise ValueError(
            f"{owner}: the prompt has {len(array)} tokens, wanted at most max_model_len = "
            f"{max_len}. Shorten it, or raise CacheConfig.max_model_len, up to what the model was "
            "made for."
        )
    limit = INT32_MAX if vocab_size is None else vocab_size
    bad = (array < 0) | (array >= limit)
    if bad.any():
        where = int(np.argmax(bad))
        raise ValueError(
            f"{owner}: prompt token {where} is {array[where]}, wanted 0 <= id < {limit}, the "
            "vocabulary size. Use the target's own tokenizer."
        )
    return array.astype(np.int32)


_MANY_REQUESTS = 32
_checked: set[Any] = set()  # signatures that passed: a serving loop repeats a few of them


def _signature(array: Any) -> Any:
    if array is None:
        return None
    return getattr(array, "shape", None), getattr(array, "dtype", None)


def _check_is_array(owner: str, name: str, value: Any) -> None:
    if not isinstance(value, (jax.Array, np.ndarray)):
        raise TypeError(
            f"{owner}: `{name}` is {value!r:.60} ({type(value).__name__}), wanted a numpy or JAX "
            f"array. Make one first, for example np.asarray({name}, np.int32)."
        )


def _check_field(owner: str, name: str, array: AnyArray, shape: tuple[int | str, ...]) -> None:
    wanted = ", ".join(map(str, shape))
    fits = len(array.shape) == len(shape) and all(
        w == s if isinstance(w, int) else s > 0 for w, s in zip(shape, array.shape, strict=True)
    )
    if not fits:
        raise ValueError(
            f"{owner}: `{name}` has shape {tuple(array.shape)}, wanted [{wanted}]. "
            "Every field has one entry a request (B) or one a row (T); pad with query length 0."
        )
    kind = _DTYPES.get(name, "int32")
    is_float = jnp.issubdtype(array.dtype, jnp.floating)
    # int64 is refused in every mode of JAX: where it is 32 bits wide, large values would wrap.
    ok = is_float if kind == "float" else array.dtype == kind
    if not ok:
        raise TypeError(
            f"{owner}: `{name}` has dtype {array.dtype}, wanted {kind}. "
            f"Convert it first, for example {name}.astype({kind!r})."
        )
