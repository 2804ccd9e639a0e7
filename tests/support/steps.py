"""Builds steps for tests: what a target ran and what a verifier kept, on the host."""

import dataclasses
from collections.abc import Sequence

import numpy as np

from jspec.axes import PAD_SLOT, PAD_TOKEN
from jspec.proposers.base import Reads
from jspec.state import Scheduled, Verified

POISON = 1_000_003  # a token, page, count and position that no test uses


@dataclasses.dataclass
class Row:
    """One request's part of a step.

    Attributes:
      slot: its memory row.
      context: tokens known before the step; the last one is run, after `start`.
      drafts: verified behind the context's last token.
      kept: what the verifier kept: accepted drafts and one more token.
      start: position of the first row; by default only the last known token is run.
      backup: next prompt token of an unfinished prefill, whose sampled token is discarded.
    """

    slot: int
    context: Sequence[int]
    drafts: Sequence[int] = ()
    kept: Sequence[int] = ()
    start: int | None = None
    backup: int | None = None


def make_step(
    rows: Sequence[Row],
    *,
    num_requests: int,
    num_rows: int,
    width: int,
    pages_per_request: int,
    poison: bool = False,
    reads: Reads | None = None,
) -> tuple[Scheduled, Verified]:
    """Lays rows out flat and pads them; with `poison` the padding holds misleading values.

    With `reads` the step has what a drafter reads beyond that: a row's hidden state follows from
    its token and position, a request's temperature and seed from its slot.
    """
    fill = POISON if poison else 0

    def full(value: int, *shape: int) -> np.ndarray:
        return np.full(shape, value, np.int32)

    token_ids, positions = full(fill, num_rows), full(fill, num_rows)
    query_start, seq_lens = full(0, num_requests + 1), full(0, num_requests)
    block_table = full(fill if poison else PAD_SLOT, num_requests, pages_per_request)
    num_drafts, slot = full(fill % 7, num_requests), full(PAD_SLOT, num_requests)
    backup, discard = full(fill, num_requests), np.full(num_requests, not poison)
    tokens = full(fill % 7 if poison else PAD_TOKEN, num_requests, width)
    reads = reads or Reads()
    hidden = np.full((num_rows, reads.hidden_size), np.nan if poison else 0, np.float32)
    at = 0
    for b, row in enumerate(rows):
        start = len(row.context) - 1 if row.start is None else row.start
        ids = [*row.context[start:], *row.drafts]
        end = at + len(ids)
        token_ids[at:end] = ids
        positions[at:end] = np.arange(start, start + len(ids))
        hidden[at:end] = [
            np.random.default_rng([token % 2**32, start + i]).standard_normal(reads.hidden_size)
            for i, token in enumerate(ids)
        ]
        at = end
        query_start[b + 1 :] = end
        seq_lens[b] = start + len(ids)
        block_table[b] = np.arange(pages_per_request) + row.slot * pages_per_request
        num_drafts[b], slot[b] = len(row.drafts), row.slot
        backup[b] = PAD_TOKEN if row.backup is None else row.backup
        discard[b] = row.backup is not None
        tokens[b] = PAD_TOKEN
        tokens[b, : len(row.kept)] = row.kept
    temperature = np.where(slot % 2, np.float32(0.7), np.float32(0))
    temperature[len(rows) :] = np.nan if poison else 0
    scheduled = Scheduled(
        token_ids=token_ids,
        positions=positions,
        query_start=query_start,
        seq_lens=seq_lens,
        block_table=block_table,
        num_drafts=num_drafts,
        request_slot=slot,
        backup_token=backup,
        discard=discard,
        hidden=hidden if reads.hidden_layers else None,
        temperature=temperature if reads.sampling else None,
        seed=slot if reads.sampling else None,
    )
    return scheduled, Verified(tokens=tokens)
