"""Replay of recorded requests through drafters, which counts accepted drafts without a model.

Drafts are verified greedily against the recorded output. Needs token ids only, of a server's log or
a data set.
"""

import json
import reprlib
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from os import PathLike
from typing import Any

import jax
import numpy as np

from jspec import api
from jspec._checks import check_at_least
from jspec.axes import INT32_MAX, PAD_TOKEN
from jspec.config import Buckets, CacheConfig
from jspec.proposers import REGISTRY
from jspec.runtime.scheduling import RequestRows, pack
from jspec.state import State, Verified

ALL = "all"
"""Segment of all records."""


@dataclass(frozen=True)
class Record:
    """A recorded request.

    Attributes:
      prompt: token ids, at least one.
      output: token ids of the target's output.
      segment: the kind of request that it is counted under, besides "all".
    """

    prompt: Sequence[int]
    output: Sequence[int]
    segment: str = ALL

    @property
    def num_tokens(self) -> int:
        """Tokens of prompt and output together."""
        return len(self.prompt) + len(self.output)


@dataclass
class Tally:
    """Counts and drafting time of a drafter on some requests.

    The first token of an output comes from the pass that reads the prompt, before any draft: it
    counts neither as a step nor as a token. Drafts past the end of an output are not counted, and
    its last token counts as the target's own, as in `SpecDecodingStats.observe_draft`.

    Attributes:
      num_requests: requests replayed.
      num_steps: passes of the target after the prompt's.
      num_tokens: tokens of these passes: `num_steps + num_accepted_tokens`.
      num_drafted_steps: passes that had drafts to verify.
      num_draft_tokens: drafted tokens.
      num_accepted_tokens: accepted ones of them.
      draft_seconds: time in the drafter; a step's time is split equally between its requests.
    """

    num_requests: int = 0
    num_steps: int = 0
    num_tokens: int = 0
    num_drafted_steps: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    draft_seconds: float = 0.0

    @property
    def acceptance_length(self) -> float:
        """Mean tokens per step, an upper bound of the speed-up; 1.0 without a step."""
        return self.num_tokens / self.num_steps if self.num_steps else 1.0

    @property
    def drafted_share(self) -> float:
        """Share of the steps that had drafts."""
        return self.num_drafted_steps / self.num_steps if self.num_steps else 0.0

    @property
    def acceptance_rate(self) -> float:
        """Share of the drafted tokens that were accepted."""
        return self.num_accepted_tokens / self.num_draft_tokens if self.num_draft_tokens else 0.0

    @property
    def draft_us_per_token(self) -> float:
        """Microseconds in the drafter for each token of the output."""
        return 1e6 * self.draft_seconds / self.num_tokens if self.num_tokens else 0.0


def model_free() -> list[str]:
    """Lists the methods that need no weights, in the order of the registry."""
    return [name for name, proposer in REGISTRY.items() if proposer.model_free]


def read_records(path: str | PathLike) -> Iterator[Record]:
    """Reads records line by line: `{"prompt": [ids], "output": [ids], "segment": "chat"}`.

    `segment` may be left out; other keys and blank lines are skipped.

    Raises:
      OSError: the file cannot be read.
      ValueError: a line has another form; the message has its number.
    """
    with open(path, encoding="utf-8-sig", errors="replace") as lines:
        for number, line in enumerate(lines, 1):
            if line.strip():
                yield _parse(line, f"{path}, line {number}")


def replay(
    records: Iterable[Record], config: Any, *, max_model_len: int, max_requests: int = 8
) -> dict[str, Tally]:
    """Replays requests through a drafter.

    Args:
      records: read one by one, in order, as slots become free.
      config: a model-free drafter's, for example `NgramConfig(num_drafts=5)`.
      max_model_len: the longest record's `num_tokens`, or more.
      max_requests: requests that run at the same time.

    Returns:
      A tally by segment, "all" first. Its times include fetching results to the host, but no
      compilation.

    Raises:
      ValueError: a record is longer than max_model_len, or a size is below 1.

    Example:
      >>> import jspec
      >>> from jspec.runtime.replay import Record, replay
      >>> config = jspec.NgramConfig(num_drafts=3, prompt_lookup_min=2)
      >>> record = Record(prompt=[1, 2, 3, 4, 5, 1, 2], output=[3, 4, 5, 9])
      >>> tally = replay([record], config, max_model_len=16)["all"]
      >>> tally.num_steps, tally.num_tokens, tally.num_accepted_tokens
      (1, 3, 2)
    """
    check_at_least("replay", 1, max_model_len=max_model_len, max_requests=max_requests)
    # Room for drafts after the longest record, so that none is truncated at its end.
    limit = max_model_len + config.num_drafts + 1
    cache = CacheConfig(num_pages=1, page_size=limit, max_model_len=limit)
    run = _Replay(api.init(config, cache=cache, max_requests=max_requests))
    api.warmup(run.state, Buckets(requests=(max_requests,), tokens=(run.num_rows,)))
    waiting = iter(records)
    while run.admit(waiting, max_model_len):
        run.step()
    return run.tallies


def winner(tallies: Mapping[str, Tally]) -> str | None:
    """Names the drafter with the longest acceptance length, on ties the one of lower latency.

    Args:
      tallies: by drafter, of the same requests.

    Returns:
      Its name; None where no drafter had a token accepted.
    """
    useful = {name: t for name, t in tallies.items() if t.num_accepted_tokens}
    return max(
        useful,
        key=lambda name: (useful[name].acceptance_length, -useful[name].draft_us_per_token),
        default=None,
    )


@dataclass
class _Request:
    record: Record
    tokens: list[int]
    num_known: int
    drafts: list[int] = field(default_factory=list)


class _Replay:
    """Runs a drafter over the requests in its slots, with recorded tokens as the verified ones."""

    def __init__(self, state: State):
        self.state = state
        self.num_rows = state.max_requests * (state.config.num_drafts + 1)
        self.running: dict[int, _Request] = {}
        self.tallies = {ALL: Tally()}

    def admit(self, waiting: Iterator[Record], max_model_len: int) -> bool:
        """Fills the free slots; False when nothing is left to run."""
        for slot in range(self.state.max_requests):
            while slot not in self.running:
                record = next(waiting, None)
                if record is None:
                    return bool(self.running)
                if record.num_tokens > max_model_len:
                    raise ValueError(
                        f"replay: a record has {record.num_tokens} tokens, above `max_model_len` = "
                        f"{max_model_len}. Pass the longest record's num_tokens."
                    )
                self._count(record, num_requests=1)
                if record.output:
                    begin = time.perf_counter()
                    self.state = api.admit(self.state, slot, record.prompt)
                    self._count(record, draft_seconds=time.perf_counter() - begin)
                    tokens = [*record.prompt, *record.output]
                    self.running[slot] = _Request(record, tokens, len(record.prompt))
        return True

    def step(self) -> None:
        """Verifies every request's drafts against the recorded tokens, and drafts again."""
        config, max_requests = self.state.config, self.state.max_requests
        rows = []
        kept = np.full((max_requests, config.num_drafts + 1), PAD_TOKEN, np.int32)
        for b, (slot, request) in enumerate(self.running.items()):
            # All but the prompt's last token count as cached, so that every step has one shape.
            known, drafts = request.num_known, request.drafts
            pending = [request.tokens[known - 1], *drafts]
            rows.append(RequestRows(slot, pending, known - 1, len(drafts), pages=()))
            recorded = request.tokens[known : known + len(drafts) + 1]
            num_accepted = _common_prefix(drafts, recorded)
            num_drafts, num_kept = len(drafts), num_accepted + 1
            if num_kept > len(recorded):  # the output ends inside the drafts
                num_kept = len(recorded)
                num_drafts = num_accepted = num_kept - 1
            kept[b, :num_kept] = recorded[:num_kept]
            if known > len(request.record.prompt):
                self._count(
                    request.record,
                    num_steps=1,
                    num_tokens=num_kept,
                    num_drafted_steps=bool(drafts),
                    num_draft_tokens=num_drafts,
                    num_accepted_tokens=num_accepted,
                )
            request.num_known += num_kept
        scheduled = pack(
            rows, num_rows=self.num_rows, num_requests=max_requests, pages_per_request=1
        )
        begin = time.perf_counter()
        self.state, drafts = api.step(self.state, scheduled, Verified(tokens=kept))
        tokens, num_drafts = jax.device_get((drafts.tokens, drafts.num_drafts))
        ended = [
            s for s, request in self.running.items() if request.num_known == len(request.tokens)
        ]
        for slot in ended:
            self.state = api.release(self.state, slot)
        seconds = (time.perf_counter() - begin) / len(rows)
        for b, request in enumerate(self.running.values()):
            request.drafts = tokens[b, : num_drafts[b]].tolist()
            self._count(request.record, draft_seconds=seconds)
        for slot in ended:
            del self.running[slot]

    def _count(self, record: Record, **amounts: float) -> None:
        for segment in {ALL, record.segment}:
            tally = self.tallies.setdefault(segment, Tally())
            for name, amount in amounts.items():
                setattr(tally, name, getattr(tally, name) + amount)


def _common_prefix(drafts: Sequence[int], recorded: Sequence[int]) -> int:
    pairs = zip(drafts, recorded, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(drafts), len(recorded)))


def _parse(line: str, where: str) -> Record:
    wanted = 'wanted an object like {"prompt": [1, 2], "output": [3], "segment": "chat"}'
    try:
        entry = json.loads(line)
    except ValueError as error:
        raise ValueError(f"{where}: no JSON ({error}), {wanted}.") from None
    if not isinstance(entry, dict) or not {"prompt", "output"} <= entry.keys():
        keys = f"keys {sorted(entry)}" if isinstance(entry, dict) else f"a {type(entry).__name__}"
        raise ValueError(f"{where}: {keys}, {wanted}.")
    for name in ("prompt", "output"):
        ids = entry[name]
        bad = [x for x in ids if not _is_id(x)] if isinstance(ids, list) else [ids]
        if bad:
            raise ValueError(
                f"{where}: `{name}` holds {reprlib.repr(bad[0])}, wanted a list of token ids "
                "(integers from 0 on). Encode text with the target's tokenizer first."
            )
    if not entry["prompt"]:
        raise ValueError(f"{where}: `prompt` is empty, wanted at least one token.")
    segment = entry.get("segment", ALL)
    if not isinstance(segment, str):
        raise ValueError(f"{where}: `segment` is {segment!r}, wanted a string.")
    return Record(entry["prompt"], entry["output"], segment)


def _is_id(value: Any) -> bool:
    return type(value) is int and 0 <= value < INT32_MAX
