"""The recorded `propose` calls, with their toy model: an integer function of what it reads.

Past `max_model_len` ours differs from the recorded one on purpose. There the original starts again
at position 0 and writes real slots; ours stays at the last position, writes nothing, sees one key,
and the drafts are PAD.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jspec.axes import PAD_SLOT, PAD_TOKEN
from jspec.proposers import _draft
from jspec.proposers._config import DraftingConfig
from jspec.proposers._draft import DraftModel
from jspec.state import Batch, pytree, static
from tests.support import recordings

NOT_WRITTEN = -4242
POISON = 1_000_003


@pytree
class Recording:
    """A cache without keys and values: what a toy model kept of each pass."""

    record: Any
    page_size: int = static()
    max_model_len: int = static()


class Case:
    """A recorded call, with its own copy of the inputs."""

    def __init__(self, case: recordings.Case):
        scalars = case.scalars
        self.name, self.path, self.fwd = case.name, scalars["path"], scalars["fwd"]
        self.num_speculative_tokens = scalars["num_speculative_tokens"]
        self.block_size, self.max_model_len = scalars["block_size"], scalars["max_model_len"]
        self.vocab_size = scalars["vocab_size"]
        self.parallel_drafting_token_id = scalars["parallel_drafting_token_id"]
        self.inputs = inputs = dict(case.given)
        self.start = inputs["query_start_loc"]
        self.num_requests = len(self.start) - 1
        no_rejections = np.zeros(self.num_requests, np.int32)
        self.num_rejected = inputs.get("num_rejected_tokens", no_rejections)
        self.last_index = self.start[1:] - 1 - self.num_rejected
        self.last_position = inputs["target_positions"][self.last_index].astype(np.int32)
        self.drafts = case.want["draft_token_ids"]
        self.forwards = [dict(case.want.with_prefix(f"f{f}.")) for f in range(len(self.fwd))]
        self.shift = self.path.startswith("eagle")
        self.is_parallel = self.path.endswith("parallel")
        assert self.forwards[0]["input_ids"].size and len(inputs["next_token_ids"])

    def is_inside(self, forward):
        """Whether each request's row of a later forward has a position below the limit."""
        return self.position_of(forward) < self.max_model_len

    def position_of(self, forward):
        """Position of each request's row in a later forward, as if there were no limit."""
        return self.last_position + forward + (not self.shift)

    def drafting_rows(self):
        """Rows of the first pass that drafts are picked from: [B, K in parallel, else 1]."""
        kept = self.last_index - self.start[:-1] + (not self.shift)
        first = self.forwards[0]["query_start_loc"][:-1] + kept
        return first[:, None] + np.arange(self.num_speculative_tokens if self.is_parallel else 1)

    def batch(self, more_requests=0, more_rows=0):
        """The step; with padding that holds NaN and misleading ids, positions and pages."""
        inputs, B, T = self.inputs, self.num_requests, len(self.inputs["target_token_ids"])

        def padded(array, count, fill):
            array = np.asarray(array, np.float32 if array.dtype == np.float32 else np.int32)
            widths = [(0, count), *[(0, 0)] * (array.ndim - 1)]
            return np.pad(array, widths, constant_values=fill)

        requests = functools.partial(padded, count=more_requests)
        rows = functools.partial(padded, count=more_rows)
        return Batch(
            token_ids=rows(inputs["target_token_ids"], fill=POISON),
            positions=rows(inputs["target_positions"], fill=POISON),
            query_start=requests(self.start, fill=T),
            seq_lens=requests(inputs["seq_lens"], fill=0),
            block_table=requests(inputs["block_table"], fill=POISON),
            num_drafts=requests(self.num_rejected, fill=3),
            request_slot=requests(np.arange(B), fill=PAD_SLOT),
            backup_token=requests(np.full(B, POISON), fill=POISON),
            discard=np.arange(B + more_requests) >= B,
            hidden=rows(inputs["target_hidden_states"], fill=np.nan),
            next_token=requests(inputs["next_token_ids"], fill=POISON),
            last_index=requests(self.last_index, fill=0),
            num_valid=requests(np.ones(B), fill=0),
            num_rejected=requests(self.num_rejected, fill=0),
        )


def named(name):
    """Returns the recorded call of that name."""
    (case,) = [case for case in recordings.cases("propose_loop") if case.name == name]
    return Case(case)


def toy(token_ids, positions, hidden, vocab_size):
    """The recordings' integer model; returns (out, feedback)."""
    h = jnp.zeros((*token_ids.shape, 3), jnp.int32) if hidden is None else hidden.astype(jnp.int32)
    i, q, (h0, h1, h2) = token_ids, positions, h.T
    new = [5 * i + 3 * q + 7 * h0 + h1, i + 11 * q + 2 * h1 + 1, h0 + 2 * i + h2]
    new = jnp.stack(new, axis=-1) % vocab_size
    return new.astype(jnp.float32), ((new + 1) % vocab_size).astype(jnp.float32)


def toy_logits(out, vocab_size):
    l0, l1, l2 = out.astype(jnp.int32).T[:, :, None]
    v = jnp.arange(vocab_size, dtype=jnp.int32)[None]
    return (((17 * v + 29 * l0 + 5 * l1 + l2) * 31 % 257) * vocab_size + v).astype(jnp.float32)


def propose(case, batch, steps=None):
    """Drafts with the toy model; the cache collects what each forward saw."""
    steps = case.num_speculative_tokens if steps is None else steps
    num_requests = batch.next_token.shape[0]
    net = (max(steps, 1) if case.is_parallel else 1) - case.shift
    num_rows = batch.token_ids.shape[0] + net * num_requests
    num_forwards = 1 if case.is_parallel else max(steps, 1)

    def room(*shape, dtype=jnp.int32):
        return jnp.full((num_forwards, *shape), POISON, dtype)

    record = {
        "count": jnp.int32(0),
        "input_ids": room(num_rows),
        "positions": room(num_rows),
        "slot_mapping": room(num_rows),
        "hidden_states": room(num_rows, 3, dtype=jnp.float32),
        "seq_lens": room(num_requests),
        "query_start_loc": room(num_requests + 1),
        "best_token": room(num_rows),
    }

    def run(token_ids, hidden, view, cache, embeds):
        assert embeds is None and (hidden is not None) == case.shift
        out, feedback = toy(token_ids, view.positions, hidden, case.vocab_size)
        seen = {
            "input_ids": token_ids,
            "positions": view.positions,
            "slot_mapping": view.slots,
            "hidden_states": jnp.zeros_like(out) if hidden is None else hidden,
            "seq_lens": view.seq_lens,
            "query_start_loc": view.query_start,
            "best_token": jnp.argmax(toy_logits(out, case.vocab_size), -1).astype(jnp.int32),
        }
        count = cache.record["count"]
        record = {
            name: cache.record[name].at[count, : len(value)].set(value, mode="drop")
            for name, value in seen.items()
        } | {"count": count + 1}
        return out, feedback if case.shift else None, dataclasses.replace(cache, record=record)

    is_masked = case.shift and case.is_parallel
    model = DraftModel(
        run=run,
        logits=functools.partial(toy_logits, vocab_size=case.vocab_size),
        vocab_size=case.vocab_size,
        mask_token=case.parallel_drafting_token_id,
        mask_hidden=jnp.asarray(case.inputs["parallel_drafting_hidden_state"])
        if is_masked
        else None,
    )
    draft = _draft.in_parallel if case.is_parallel else _draft.chain
    cache, drafts = draft(
        model,
        DraftingConfig(num_drafts=max(steps, 1)),
        batch,
        Recording(record=record, page_size=case.block_size, max_model_len=case.max_model_len),
        num_drafts=steps,
        shift=case.shift,
    )
    return cache.record, drafts


def run_jitted(case, batch, steps=None):
    record, drafts = jax.jit(functools.partial(propose, case, steps=steps))(batch)
    return jax.tree.map(np.asarray, (record, drafts))


def num_allowed(case):
    """Drafts that fit each request: max_model_len minus its known tokens, next one included."""
    count = case.max_model_len - (case.last_position + 2)
    return np.clip(count, 0, case.num_speculative_tokens)


def assert_as_recorded(case, record, drafts):
    """Compares every forward and the drafts; returns how many drafts were compared.

    Past the longest request a draft is PAD. What the model made of the recorded inputs is compared
    there, too.
    """
    B, last = case.num_requests, case.max_model_len - 1
    assert record["count"] == len(case.forwards)

    # 1. The first pass. Only cells that the original never wrote are left out.
    wanted = case.forwards[0]
    T, is_inside = len(wanted["input_ids"]), wanted["positions"] <= last
    assert [len(seen["input_ids"]) for seen in case.forwards] == [
        counts["num_actual_tokens"] for counts in case.fwd
    ]
    lengths = [np.diff(record["query_start_loc"][f, : B + 1]) for f in range(len(case.fwd))]
    assert [n.max() for n in lengths] == [counts["max_query_len"] for counts in case.fwd]
    got = {name: record[name][0, :T] for name in wanted if name != "seq_lens"}
    is_written = wanted["input_ids"] != NOT_WRITTEN
    np.testing.assert_array_equal(got["input_ids"][is_written], wanted["input_ids"][is_written])
    np.testing.assert_array_equal(got["positions"], np.minimum(wanted["positions"], last))
    slots = np.where(is_inside, wanted["slot_mapping"], PAD_SLOT)
    np.testing.assert_array_equal(got["slot_mapping"], slots)
    np.testing.assert_array_equal(record["seq_lens"][0, :B], wanted["seq_lens"])
    np.testing.assert_array_equal(record["query_start_loc"][0, : B + 1], wanted["query_start_loc"])
    if case.shift:
        is_written = wanted["hidden_states"] != NOT_WRITTEN
        np.testing.assert_array_equal(
            got["hidden_states"][is_written], wanted["hidden_states"][is_written]
        )

    rows = case.drafting_rows()
    inside = is_inside[rows]
    np.testing.assert_array_equal(
        record["best_token"][0][rows][inside], case.drafts[:, : rows.shape[1]][inside]
    )
    num_compared = inside.sum()

    # 2. The loop: as recorded up to the longest request, nothing written past it.
    for f, wanted in enumerate(case.forwards[1:], start=1):
        position, inside = case.position_of(f), case.is_inside(f)
        got = {name: record[name][f, :B] for name in wanted}
        np.testing.assert_array_equal(got["positions"], np.minimum(position, last))
        np.testing.assert_array_equal(got["positions"][inside], wanted["positions"][inside])
        slots = np.where(inside, wanted["slot_mapping"], PAD_SLOT)
        np.testing.assert_array_equal(got["slot_mapping"], slots)
        lengths = np.where(inside, wanted["seq_lens"], 1)
        np.testing.assert_array_equal(got["seq_lens"], lengths)
        np.testing.assert_array_equal(got["input_ids"][inside], wanted["input_ids"][inside])
        best = record["best_token"][f, :B]
        np.testing.assert_array_equal(best[inside], case.drafts[inside, f])
        num_compared += inside.sum()
        if case.shift:
            hidden = wanted["hidden_states"]
            np.testing.assert_array_equal(got["hidden_states"][inside], hidden[inside])
        np.testing.assert_array_equal(
            record["query_start_loc"][f, : B + 1], wanted["query_start_loc"]
        )

    # 3. Drafts.
    count = num_allowed(case)
    kept = np.arange(case.num_speculative_tokens)[None] < count[:, None]
    np.testing.assert_array_equal(drafts.num_drafts[:B], count)
    np.testing.assert_array_equal(drafts.tokens[:B], np.where(kept, case.drafts, PAD_TOKEN))
    assert (drafts.tokens[B:] == PAD_TOKEN).all() and not drafts.num_drafts[B:].any()
    return num_compared
