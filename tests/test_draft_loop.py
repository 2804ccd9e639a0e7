"""The draft loop against its recordings: what the model saw in every forward of a `propose` call.

Past `max_model_len` ours differs from the recorded one on purpose. There the original starts again
at position 0 and writes real slots; ours stays at the last position, writes nothing, sees one key,
and the drafts are PAD.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec.axes import PAD_SLOT, PAD_TOKEN
from jspec.proposers import _draft
from jspec.proposers._draft import DraftingConfig, DraftModel
from jspec.state import Batch
from tests import recordings

pytestmark = pytest.mark.any_device

NOT_WRITTEN = -4242
POISON = 1_000_003


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


ONE_OF_EACH_PATH = [
    "eagle_decode_rejected",
    "draft_model",
    "eagle_parallel",
    "draft_model_parallel",
]


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

    def run(token_ids, hidden, view, record, embeds):
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
        count = record["count"]
        record = {
            name: record[name].at[count, : len(value)].set(value, mode="drop")
            for name, value in seen.items()
        } | {"count": count + 1}
        return out, feedback if case.shift else None, record

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
    return draft(
        model,
        DraftingConfig(num_drafts=max(steps, 1)),
        batch,
        record,
        page_size=case.block_size,
        max_model_len=case.max_model_len,
        steps=steps,
        shift=case.shift,
    )


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


@functools.cache
def run_padded(name):
    """Makes a recorded call behind misleading padding."""
    case = named(name)
    return run_jitted(case, case.batch(more_requests=2, more_rows=5))


@recordings.each_case("propose_loop")
def test_every_forward_is_as_recorded_and_poisoned_padding_writes_nothing(case):
    record, drafts = run_padded(case.name)
    case = Case(case)
    assert_as_recorded(case, record, drafts)
    B, T = case.num_requests, len(case.forwards[0]["input_ids"])
    assert (record["slot_mapping"][0, T:] == PAD_SLOT).all()
    assert not record["seq_lens"][:, B:].any()
    for slots in record["slot_mapping"][1:, B : B + 2]:
        assert (slots == PAD_SLOT).all()


def is_past_the_limit(case) -> bool:
    return (case.want["f0.positions"] >= case.scalars["max_model_len"]).any()


@recordings.each_case("propose_loop", only=is_past_the_limit)
def test_a_longer_model_drafts_what_the_first_pass_past_the_limit_did(case):
    """Positions of the recorded first pass go on past the limit, as ours do in a longer model."""
    case = Case(case)
    case.max_model_len = 1024
    wanted = case.forwards[0]
    assert wanted["positions"].max() < case.max_model_len
    record, _ = run_jitted(case, case.batch())
    np.testing.assert_array_equal(record["positions"][0], wanted["positions"])
    rows = case.drafting_rows()
    tokens = case.drafts[:, : rows.shape[1]]
    np.testing.assert_array_equal(record["best_token"][0][rows], tokens)


@pytest.mark.slow
@recordings.of_this_repository
@pytest.mark.parametrize("name", ["eagle_decode_rejected", "draft_model_parallel"])
def test_every_forward_is_as_recorded_without_jit(name):
    case = named(name)
    with jax.disable_jit():
        record, drafts = propose(case, jax.tree.map(jnp.asarray, case.batch()))
    assert_as_recorded(case, *jax.tree.map(np.asarray, (record, drafts)))


@recordings.of_this_repository
def test_the_recordings_reach_all_paths_and_the_limit():
    cases = [Case(case) for case in recordings.cases("propose_loop")]
    assert {case.path for case in cases} == {
        *("eagle", "eagle_parallel", "draft_model", "draft_model_parallel")
    }
    counts = [num_allowed(case) for case in cases]
    assert sum(count.sum() for count in counts) == 81
    assert sum(assert_as_recorded(case, *run_padded(case.name)) for case in cases) == 86
    assert any(0 < c < case.num_speculative_tokens for case in cases for c in num_allowed(case))


@recordings.of_this_repository
def test_past_the_limit_nothing_recorded_is_written_again():
    """The original writes slots 1, 2, ... of both requests again; ours writes none."""
    case = named("eagle_limit")
    record, drafts = run_jitted(case, case.batch())
    assert (case.forwards[4]["slot_mapping"] != PAD_SLOT).all()
    assert record["positions"][3:, :2].tolist() == [[31, 31]] * 2
    assert record["slot_mapping"][3:, :2].tolist() == [[PAD_SLOT] * 2] * 2
    assert drafts.num_drafts.tolist() == [1, 1]


@recordings.of_this_repository
@pytest.mark.parametrize("name", ONE_OF_EACH_PATH)
@pytest.mark.parametrize("steps", [0, 1, 2])
def test_fewer_steps_draft_the_first_recorded_tokens(name, steps):
    case = named(name)
    record, drafts = run_jitted(case, case.batch(), steps=steps)
    assert record["count"] == (1 if case.is_parallel else max(steps, 1))
    assert drafts.tokens.shape == (case.num_requests, steps)
    np.testing.assert_array_equal(drafts.tokens, case.drafts[:, :steps])
    assert drafts.num_drafts.tolist() == [steps] * case.num_requests


WORKED = {
    "token_ids": [500, 501, 511, 512, 600, 601, 602, 603],
    "positions": [9, 10, 11, 12, 4, 5, 6, 7],
    "table": [[3, 8, 5, 1], [6, 2, 0, 4]],
}


def worked_case(path):
    """The worked step: K = 3, pages of 4; request 0 lost two drafts of three, request 1 none."""
    case = named("eagle_decode_rejected")
    case.path, case.block_size, case.max_model_len, case.vocab_size = path, 4, 64, 1000
    case.shift = path == "eagle"
    case.num_requests, case.num_speculative_tokens = 2, 3
    case.start, case.num_rejected = np.array([0, 4, 8]), np.array([2, 0])
    case.last_index, case.last_position = np.array([1, 7]), np.array([10, 7])
    case.inputs = {
        "target_token_ids": np.array(WORKED["token_ids"]),
        "target_positions": np.array(WORKED["positions"]),
        "target_hidden_states": np.arange(24, dtype=np.float32).reshape(8, 3),
        "next_token_ids": np.array([502, 604]),
        "seq_lens": np.array([13, 8]),
        "block_table": np.array(WORKED["table"]),
    }
    return case


def test_the_worked_step_of_a_head_that_reads_hidden_states():
    case = worked_case("eagle")
    record, drafts = run_jitted(case, case.batch())
    assert record["input_ids"][0, [0, 1, 2, 4, 5, 6, 7]].tolist() == [
        *(501, 502, 512, 601, 602, 603, 604)
    ]
    assert record["positions"][0].tolist() == WORKED["positions"]
    assert record["slot_mapping"][0].tolist() == [21, 22, 23, 4, 8, 9, 10, 11]
    assert record["seq_lens"].tolist() == [[13, 8], [12, 9], [13, 10]]
    assert record["positions"][1:, :2].tolist() == [[11, 8], [12, 9]]
    assert record["slot_mapping"][1:, :2].tolist() == [[23, 0], [4, 1]]
    assert record["input_ids"][1:, :2].tolist() == drafts.tokens[:, :2].T.tolist()
    assert drafts.num_drafts.tolist() == [3, 3]


def test_the_worked_step_of_a_draft_model():
    case = worked_case("draft_model")
    record, drafts = run_jitted(case, case.batch())
    assert record["input_ids"][0].tolist() == [500, 501, 502, 0, 0, 600, 601, 602, 603, 604]
    assert record["positions"][0].tolist() == [9, 10, 11, 0, 0, 4, 5, 6, 7, 8]
    assert record["slot_mapping"][0].tolist() == [21, 22, 23, -1, -1, 8, 9, 10, 11, 0]
    assert record["query_start_loc"][0].tolist() == [0, 5, 10]
    assert record["seq_lens"].tolist() == [[14, 9], [13, 10], [14, 11]]
    assert record["positions"][1:, :2].tolist() == [[12, 9], [13, 10]]
    assert record["slot_mapping"][1:, :2].tolist() == [[4, 1], [5, 2]]
    assert drafts.num_drafts.tolist() == [3, 3]


@pytest.mark.parametrize("name", ["eagle_decode_rejected", "eagle_parallel", "draft_model"])
def test_a_request_without_a_kept_token_writes_in_the_first_pass_alone(name):
    case = named(name)
    batch = case.batch()
    batch.num_valid[0] = 0
    record, drafts = run_jitted(case, batch)
    count = num_allowed(case)
    assert drafts.num_drafts.tolist() == [0, *count[1:]]
    assert (drafts.tokens[0] == PAD_TOKEN).all() and (drafts.tokens[1:] == case.drafts[1:]).all()
    assert (record["slot_mapping"][1:, 0] == PAD_SLOT).all() and not record["seq_lens"][1:, 0].any()
    wanted = case.forwards[0]["slot_mapping"]
    assert record["slot_mapping"][0, : len(wanted)].tolist() == wanted.tolist()


@pytest.mark.parametrize(
    "path, num_pages, is_narrow, wanted",
    [
        # Request 0 of a head: positions 10 and 11 are stored, 12 is not; two drafts saw all.
        ("eagle", 4, False, [3, 3]),
        ("eagle", 3, False, [2, 3]),
        ("eagle", 3, True, [2, 3]),
        # Of a draft model: the next token lies at 11, the first draft at 12.
        ("draft_model", 3, False, [1, 3]),
        ("draft_model", 3, True, [1, 3]),
        ("draft_model", 2, False, [0, 3]),
        ("draft_model", 2, True, [0, 0]),
    ],
)
def test_drafts_end_where_a_row_that_they_saw_has_no_slot(path, num_pages, is_narrow, wanted):
    case = worked_case(path)
    _, whole = run_jitted(case, case.batch())
    if is_narrow:
        table = case.inputs["block_table"][:, :num_pages]
    else:
        table = case.inputs["block_table"].copy()
        table[0, num_pages:] = PAD_SLOT
    case.inputs["block_table"] = table
    _, cut = run_jitted(case, case.batch())
    assert cut.num_drafts.tolist() == wanted
    kept = np.arange(3)[None] < cut.num_drafts[:, None]
    np.testing.assert_array_equal(cut.tokens, np.where(kept, whole.tokens, PAD_TOKEN))


def draft_with(model, case, steps, shift, draft=_draft.chain):
    """Drafts without a cache, with a model of a test's own."""
    propose = functools.partial(
        draft,
        model,
        DraftingConfig(num_drafts=steps),
        page_size=case.block_size,
        max_model_len=case.max_model_len,
        steps=steps,
        shift=shift,
    )
    return jax.jit(lambda batch: propose(batch, None)[1])(case.batch())


@pytest.mark.parametrize("draft", [_draft.chain, _draft.in_parallel])
def test_nan_logits_give_a_token_of_the_vocabulary(draft):
    case = named("draft_model")
    model = DraftModel(
        run=lambda ids, hidden, view, cache, embeds: (jnp.zeros((len(ids), 3)), None, cache),
        logits=lambda out: jnp.full((len(out), case.vocab_size), jnp.nan),
        vocab_size=case.vocab_size,
    )
    drafts = draft_with(model, case, 3, shift=False, draft=draft)
    assert drafts.num_drafts.tolist() == [3] * case.num_requests
    assert ((drafts.tokens >= 0) & (drafts.tokens < case.vocab_size)).all()


def test_draft_ids_become_target_ids_and_ties_go_to_the_lowest():
    case = named("eagle_k1")
    model = DraftModel(
        run=lambda ids, hidden, view, cache, embeds: (hidden, hidden, cache),
        logits=lambda out: jnp.tile(jnp.array([[0.0, 2.0, 2.0, 1.0]]), (len(out), 1)),
        vocab_size=case.vocab_size,
        target_ids=jnp.array([3, 7, 20, 60], jnp.int32),
    )
    drafts = draft_with(model, case, 2, shift=True)
    assert drafts.tokens.tolist() == [[7, 7]] * case.num_requests
