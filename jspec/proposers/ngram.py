"""N-gram lookup on the CPU: find the longest repeated suffix, draft what followed it before.

Among equally long matches the earliest wins. No weights, no device. Source: vLLM
v1/spec_decode/ngram_proposer.py; the idea is prompt lookup decoding.
"""

import threading
from dataclasses import dataclass
from typing import Any, cast

import numba
import numpy as np
from jaxtyping import Int32
from numba import int32, int64

from jspec._checks import check_at_least
from jspec._numba import njit as _njit
from jspec.axes import PAD_TOKEN
from jspec.config import CacheConfig
from jspec.proposers import _host
from jspec.proposers.base import Proposer
from jspec.state import Batch, Drafts

_DEFAULT_LOOKUP = 5
# A search costs 0.2 ns a token on most text, 1 to 5 on the worst; waking threads costs tens of
# microseconds on an idle machine and a scheduler's time slice, many milliseconds, on a busy one.
_MIN_PARALLEL_TOKENS = 2**23
_BLOCK = 64  # tokens that are compared at once


@dataclass(frozen=True, kw_only=True)
class NgramConfig(_host.HasVocabulary):
    """Chooses how long a suffix is looked up and how much is drafted from its match.

    Attributes:
      num_drafts: most drafts a request gets (K).
      prompt_lookup_min: shortest suffix that may match, in tokens. None takes the other bound,
        or 5 when both are None.
      prompt_lookup_max: longest suffix that is compared, in tokens. None likewise.
      vocab_size: ids at or above it count as PAD and are never drafted; None = no bound.

    Raises:
      ValueError: a size below 1, or a minimum above the maximum.

    Example:
      >>> NgramConfig(num_drafts=3, prompt_lookup_max=4).prompt_lookup_min
      4
    """

    num_drafts: int
    prompt_lookup_min: int | None = None
    prompt_lookup_max: int | None = None
    vocab_size: int | None = None

    def __post_init__(self):
        owner = type(self).__name__
        optional = ("prompt_lookup_min", "prompt_lookup_max", "vocab_size")
        given = {name: getattr(self, name) for name in optional if getattr(self, name) is not None}
        check_at_least(owner, 1, num_drafts=self.num_drafts, **given)
        low, high = self.prompt_lookup_min, self.prompt_lookup_max
        if low is None:
            low = _DEFAULT_LOOKUP if high is None else high
        if high is None:
            high = low
        check_bounds(owner, "prompt_lookup_min", low, "prompt_lookup_max", high)
        object.__setattr__(self, "prompt_lookup_min", low)
        object.__setattr__(self, "prompt_lookup_max", high)

    @property
    def bounds(self) -> tuple[int, int]:
        """Shortest and longest suffix that is looked up, in tokens."""
        return cast(tuple[int, int], (self.prompt_lookup_min, self.prompt_lookup_max))

    @classmethod
    def tiny(cls):
        """Returns a config that finds matches in short random contexts."""
        return cls(num_drafts=3, prompt_lookup_min=1, prompt_lookup_max=3, vocab_size=16)


@dataclass(eq=False)
class Memory:
    """Token histories on the host: one opaque leaf to JAX, rewritten by `admit` and `propose`.

    Attributes:
      history: int32 [max_requests, max_model_len]; the known tokens of each request by position,
        ids outside the vocabulary stored as PAD.
    """

    history: np.ndarray


def init(config: NgramConfig, params: Any, cache: CacheConfig, max_requests: int) -> Memory:
    """Allocates the histories and compiles the search: seconds the first time, then from disk."""
    del config, params
    _record.compile(_RECORD_TYPES)
    _search_serially.compile(_SEARCH_TYPES)
    _search_in_parallel.compile(_SEARCH_TYPES)
    return Memory(np.full((max_requests, cache.max_model_len), PAD_TOKEN, np.int32))


def propose(
    config: NgramConfig, params: Any, memory: Memory, batch: Batch, num_drafts: int
) -> tuple[Memory, Drafts]:
    """Records the tokens of a step and drafts from each request's own history.

    Args:
      config: static choices.
      params: unused.
      memory: rewritten in place and returned.
      batch: numpy leaves; JAX arrays are copied to the host.
      num_drafts: unused: the caller truncates drafts to it.

    Returns:
      (memory, drafts): numpy int32. A row without a kept token or without a match has none; with
      n known tokens, the newest included, there are at most max_model_len - n.

    Raises:
      TypeError: called inside jit.
    """
    del params, num_drafts
    slot, *rest = _host.read_step("ngram", batch)
    lengths = np.zeros_like(slot)
    _record(memory.history, slot, *rest, config.id_limit, lengths)
    tokens, count = _search(
        memory.history,
        slot,
        lengths,
        num_drafts=config.num_drafts,
        bounds=config.bounds,
        max_model_len=memory.history.shape[1],
    )
    return memory, Drafts(tokens=tokens, num_drafts=count)


def admit(
    config: NgramConfig, memory: Memory, slot: int, tokens: Int32[np.ndarray, "n"], num_tokens: int
) -> Memory:
    """Fills a request's row with its whole prompt; nothing of an earlier request stays."""
    row = memory.history[slot]
    row[num_tokens:] = PAD_TOKEN
    row[:num_tokens] = _host.in_vocabulary(tokens[:num_tokens], config.id_limit)
    return memory


def propose_batch(
    histories: Int32[np.ndarray, "B S"],
    lengths: Int32[np.ndarray, "B"],
    *,
    num_drafts: int,
    min_n: int,
    max_n: int,
    max_model_len: int,
) -> tuple[Int32[np.ndarray, "B K"], Int32[np.ndarray, "B"]]:
    """Drafts for a batch of token histories, in time linear in their lengths.

    In: histories [[1 2 9 1 2 8 1 2]], lengths [8], min_n = max_n = 2, K = 3.
    Out: tokens [[9 1 2]], num_drafts [3].

    Args:
      histories: known tokens of each request, left-aligned; a negative id ends a draft.
      lengths: known tokens of each row, the newest included; 0 drafts nothing.
      num_drafts: most drafts a row gets (K).
      min_n: shortest suffix that may match, in tokens.
      max_n: longest suffix that is compared, in tokens.
      max_model_len: a row of n tokens gets at most max_model_len - n drafts.

    Returns:
      (tokens, num_drafts): drafts, PAD after the last one, and how many there are.

    Raises:
      TypeError: histories or lengths are no int32 arrays. ValueError: a size or a length is out of
        range.

    Source: vLLM v1/spec_decode/ngram_proposer.py, batch_propose_numba.
    """
    owner = "propose_batch"
    check_at_least(owner, 1, num_drafts=num_drafts, max_model_len=max_model_len)
    check_bounds(owner, "min_n", min_n, "max_n", max_n)
    for name, array, ndim, shape in (
        ("histories", histories, 2, "[B, S]"),
        ("lengths", lengths, 1, "[B]"),
    ):
        if not isinstance(array, np.ndarray) or array.dtype != np.int32 or array.ndim != ndim:
            came = f"{getattr(array, 'dtype', type(array).__name__)} {np.shape(array)}"
            raise TypeError(
                f"{owner}: `{name}` is {came}, wanted an int32 numpy array {shape}. "
                f"Convert it first: np.asarray({name}, np.int32)."
            )
    if len(lengths) != len(histories) or np.any((lengths < 0) | (lengths > histories.shape[1])):
        raise ValueError(
            f"{owner}: `lengths` is {lengths}, wanted {len(histories)} values from 0 to "
            f"{histories.shape[1]}, as histories has shape {histories.shape}. "
            "Pass the number of known tokens of each row."
        )
    rows = np.arange(len(histories), dtype=np.int32)
    return _search(
        np.ascontiguousarray(histories),
        rows,
        np.array(lengths),
        num_drafts=num_drafts,
        bounds=(min_n, max_n),
        max_model_len=max_model_len,
    )


def check_bounds(owner: str, low_name: str, low: int, high_name: str, high: int) -> None:
    """Raises ValueError unless 1 <= low <= high."""
    check_at_least(owner, 1, **{low_name: low, high_name: high})
    if low > high:
        raise ValueError(
            f"{owner}: `{low_name}` is {low}, above `{high_name}` = {high}. "
            f"Lower {low_name} or raise {high_name}."
        )


# Two launches at once abort the process where numba has only its own thread pool (macOS), so the
# second one runs serially.
_thread_pool = threading.Lock()


def _search(history, rows, lengths, *, num_drafts, bounds, max_model_len):
    tokens = np.full((rows.size, num_drafts), PAD_TOKEN, np.int32)
    counts = np.zeros(rows.size, np.int32)
    history = history.view()
    history.flags.writeable = False  # one type, so one compilation, for every caller's array
    arguments = (history, rows, lengths, *bounds, max_model_len, tokens, counts)
    pays = rows.size > 1 and lengths.sum() >= _MIN_PARALLEL_TOKENS
    if pays and numba.get_num_threads() > 1 and _thread_pool.acquire(blocking=False):
        try:
            _search_in_parallel(*arguments)
        finally:
            _thread_pool.release()
    else:
        _search_serially(*arguments)
    return tokens, counts


_VECTOR, _TABLE = int32[::1], int32[:, ::1]
_RECORD_TYPES = (_TABLE, *[_VECTOR] * 7, int64, _VECTOR)
_SEARCH_TYPES = (
    numba.types.Array(int32, 2, "C", readonly=True),
    *(_VECTOR, _VECTOR, int64, int64, int64, _TABLE, _VECTOR),
)


@_njit()
def _record(
    history,  # [max_requests, max_model_len] out
    slot,  # [B]
    query_start,  # [B + 1]
    last_index,  # [B]
    token_ids,  # [T]
    position,  # [T]
    next_token,  # [B]
    num_valid,  # [B]
    id_limit,
    lengths,  # [B] out: known tokens; stays 0 where nothing is drafted
):
    num_slots, max_model_len = history.shape
    for b in range(slot.size):
        end = min(last_index[b] + 1, query_start[b + 1], token_ids.size)
        if not 0 <= slot[b] < num_slots or not 0 <= query_start[b] < end:
            continue
        row = history[slot[b]]
        for t in range(query_start[b], end):
            if 0 <= position[t] < max_model_len:
                row[position[t]] = token_ids[t] if 0 <= token_ids[t] < id_limit else PAD_TOKEN
        if num_valid[b] > 0:
            place = position[end - 1] + 1
            if 0 <= place < max_model_len:
                row[place] = next_token[b] if 0 <= next_token[b] < id_limit else PAD_TOKEN
            lengths[b] = place + 1


@_njit()
def _search_serially(history, rows, lengths, min_n, max_n, max_model_len, tokens, counts):
    for b in range(rows.size):
        if lengths[b] > 0:
            known = history[rows[b]]
            counts[b] = _draft(known, lengths[b], min_n, max_n, max_model_len, tokens[b])


@_njit(parallel=True)
def _search_in_parallel(history, rows, lengths, min_n, max_n, max_model_len, tokens, counts):
    # A body of its own: numba's disk cache cannot tell two compilations of one function apart.
    for b in numba.prange(rows.size):
        if lengths[b] > 0:
            known = history[rows[b]]
            counts[b] = _draft(known, lengths[b], min_n, max_n, max_model_len, tokens[b])


@_njit()
def _draft(known, length, min_n, max_n, max_model_len, tokens):
    room = min(tokens.size, max_model_len - length)
    if room <= 0:
        return 0
    start = _match_end(known, length, min_n, max_n)
    if start < 0:
        return 0
    count = min(room, length - start)
    for k in range(count):
        if known[start + k] < 0:
            return k
        tokens[k] = known[start + k]
    return count


@_njit()
def _match_end(known, length, min_n, max_n):
    """Returns the place after the earliest longest match, or -1.

    Only places where three tokens of a match longer than the best so far agree are looked at: the
    newest, the oldest and one between. Whole blocks are compared at once, which compilers turn
    into vector code, so most text costs a fraction of a cycle a token. Where too many places pass
    (a text of few distinct tokens, a long max_n), the search in linear time takes over.
    """
    newest = length - 1
    max_n = min(max_n, newest)
    longest = min_n - 1  # a shorter match is of no use
    if longest >= max_n:
        return -1
    end = -1
    spent = 0
    start = longest
    while start < newest:
        stop = min(start + _BLOCK, newest)
        middle = longest // 2
        last, inner, first = known[newest], known[newest - middle], known[newest - longest]
        lasts = known[start:stop]
        inners = known[start - middle : stop - middle]
        firsts = known[start - longest : stop - longest]
        hit = False
        for k in range(lasts.size):
            hit |= (lasts[k] == last) & (inners[k] == inner) & (firsts[k] == first)
        if not hit:
            start = stop
            continue
        k = 0
        while not ((lasts[k] == last) & (inners[k] == inner) & (firsts[k] == first)):
            k += 1
        place = start + k
        matched = 1
        most = min(max_n, place + 1)
        while matched < most and known[place - matched] == known[newest - matched]:
            matched += 1
        if matched > longest:
            longest, end = matched, place + 1
            if longest == max_n:
                return end
        spent += matched
        if spent > length // 4:
            return _match_end_in_linear_time(known, length, min_n, max_n)
        start = place + 1
    return end


@_njit()
def _match_end_in_linear_time(known, length, min_n, max_n):
    """Returns the place after the earliest longest match, or -1.

    Knuth-Morris-Pratt on the reversed tokens: the suffix becomes a prefix, and every later place
    in the reversed order is an earlier one in the text, so ties go to the last one seen.
    """
    border = np.zeros(max_n, np.int32)
    longest = place = matched = 0
    i = 1
    while i < length:
        if known[length - 1 - matched] == known[length - 1 - i]:
            matched += 1
            if matched >= longest:
                longest, place = matched, i
            if i < max_n:
                border[i] = matched
            if matched == max_n:
                matched = border[max_n - 1]
            i += 1
        elif matched > 0:
            matched = border[matched - 1]
        else:
            i += 1
    return length - 1 - place + longest if longest >= min_n else -1


PROPOSER = Proposer(
    name="ngram",
    Config=NgramConfig,
    init=init,
    propose=propose,
    admit=admit,
    kind="host",
)
