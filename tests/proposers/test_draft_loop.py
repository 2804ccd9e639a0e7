"""The draft loop against its recordings: what the model saw in every forward of a call."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec.axes import PAD_SLOT, PAD_TOKEN
from jspec.proposers import _draft
from jspec.proposers._config import DraftingConfig
from jspec.proposers._draft import DraftModel
from tests.support import recordings
from tests.support.toy_loop import (
    Case,
    Recording,
    assert_as_recorded,
    named,
    num_allowed,
    propose,
    run_jitted,
)

pytestmark = pytest.mark.any_device

ONE_OF_EACH_PATH = [
    "eagle_decode_rejected",
    "draft_model",
    "eagle_parallel",
    "draft_model_parallel",
]


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
    wanted = case.forwards[0]
    case.max_model_len = int(wanted["positions"].max()) + case.num_speculative_tokens + 2
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
        num_drafts=steps,
        shift=shift,
    )
    none = Recording(record=None, page_size=case.block_size, max_model_len=case.max_model_len)
    return jax.jit(lambda batch: propose(batch, none)[1])(case.batch())


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
