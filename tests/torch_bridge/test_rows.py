"""Drafters with memory by request, called by a runner that identifies requests by batch index."""

import dataclasses

import jax
import numpy as np
import pytest

torch = pytest.importorskip("torch")

import jspec
from jspec import proposers
from jspec.models.config import ModelConfig
from jspec.proposers import mtp
from tests.support.counting import backend_compiles
from tests.support.steps import Row, make_step
from tests.support.torch_runner import common_attn_metadata, vllm_config
from torch_bridge import EagleProposer

pytestmark = pytest.mark.any_device

DEVICE = torch.device("cuda:0" if jax.default_backend() == "gpu" else "cpu")
PAGE_SIZE, PAGES, MAX_REQUESTS, V = 4, 12, 4, 64
CACHE = jspec.CacheConfig(
    num_pages=MAX_REQUESTS * PAGES,
    page_size=PAGE_SIZE,
    max_model_len=PAGE_SIZE * PAGES,
    dtype="float32",
)


def drafters(num_modules, max_requests=MAX_REQUESTS):
    """Makes one drafter twice: behind the bridge, and as a state of jspec."""
    config = jspec.MTPConfig(
        num_drafts=3, model=ModelConfig.tiny(num_layers=num_modules), hidden_layer=2
    )
    params = mtp.PROPOSER.init_params(config, jax.random.key(3), "float32")
    # Biased norms and larger heads: every input decides, and no two logits are close.
    params = jax.tree.map(lambda x: x * 1.7, params)
    runner = EagleProposer(
        vllm_config(
            *("mtp", config.num_drafts),
            max_model_len=CACHE.max_model_len,
            num_pages=CACHE.num_pages,
            page_size=PAGE_SIZE,
            max_requests=max_requests,
        ),
        DEVICE,
    )
    runner.set_drafter(config, params)
    return runner, jspec.init(config, params, cache=CACHE, max_requests=MAX_REQUESTS)


def step_of(rows, state):
    return make_step(
        rows,
        num_requests=MAX_REQUESTS,
        num_rows=64,
        width=state.config.num_drafts + 1,
        pages_per_request=PAGES,
        reads=proposers.of(state.config).reads(state.config),
    )


def propose(runner, rows, state, table=None):
    """Hands the same step to the bridge, without the slots."""
    scheduled, verified = step_of(rows, state)
    assert scheduled.hidden is not None
    batch, B = jspec.prepare(scheduled, verified), len(rows)
    num_rows = int(scheduled.query_start[B])
    if table is None:
        table = scheduled.block_table[:B]
    drafts = runner.propose(
        target_token_ids=torch.tensor(scheduled.token_ids[:num_rows], device=DEVICE),
        target_positions=torch.tensor(scheduled.positions[:num_rows], device=DEVICE),
        target_hidden_states=torch.tensor(scheduled.hidden[:num_rows], device=DEVICE),
        next_token_ids=torch.tensor(batch.next_token[:B], device=DEVICE),
        token_indices_to_sample=None,
        common_attn_metadata=common_attn_metadata(
            *(scheduled.query_start[: B + 1], scheduled.seq_lens[:B], table),
            page_size=PAGE_SIZE,
            device=DEVICE,
        ),
        num_rejected_tokens_gpu=torch.tensor(batch.num_rejected[:B], device=DEVICE),
    )
    return drafts.cpu().numpy()


@pytest.mark.parametrize("num_modules", [1, 2, 3])
def test_modules_in_turn_keep_their_requests_when_rows_move(num_modules, rng):
    runner, state = drafters(num_modules)
    known: dict[int, list[int]] = {}
    drafts: dict[int, list[int]] = {}
    compiled: list[str] = []
    num_compared = 0
    for step in range(14):
        if step in (5, 9):  # one leaves; its pages and its slot are another's later
            left = list(known)[0]
            state = jspec.release(state, left)
            del known[left], drafts[left]
        for slot in set(range(3)) - known.keys() if step not in (5, 9) else ():
            known[slot] = rng.integers(0, V, int(rng.integers(3, 9))).tolist()
            state = jspec.admit(state, slot, known[slot])
        waits = int(rng.integers(3)) if step % 4 == 3 else None  # no room for all in this step
        rows = []
        for slot in rng.permutation([slot for slot in known if slot != waits]).tolist():
            new, guessed = slot not in drafts, drafts.get(slot, [])
            kept = [*guessed[: int(rng.integers(len(guessed) + 1))], int(rng.integers(V))]
            rows.append(Row(slot, known[slot], guessed, kept, start=0 if new else None))
        state, wanted = jspec.step(state, *step_of(rows, state))
        with backend_compiles() as compiles:
            got = propose(runner, rows, state)
        compiled += compiles if step > 10 else []
        wanted = np.asarray(wanted.tokens)[: len(rows)]
        np.testing.assert_array_equal(got, wanted)
        num_compared += wanted.size
        for row, tokens in zip(rows, wanted.tolist(), strict=True):
            known[row.slot] = [*row.context, *row.kept]
            drafts[row.slot] = tokens
    assert num_compared > 80
    assert not [name for name in compiled if "bridge" in name]


def test_requests_behind_one_cached_prefix_get_what_its_request_left():
    prompt = list(range(10, 19))
    rest = Row(0, prompt, kept=[7], start=PAGE_SIZE)
    runner, state = drafters(2)
    propose(runner, [Row(0, prompt[:PAGE_SIZE], start=0, backup=prompt[PAGE_SIZE])], state)
    (wanted,) = propose(runner, [rest], state)

    runner, state = drafters(2)
    propose(runner, [Row(0, prompt[:PAGE_SIZE], start=0, backup=prompt[PAGE_SIZE])], state)
    table = np.arange(3 * PAGES, dtype=np.int32).reshape(3, PAGES)
    table[1:, 0] = table[0, 0]  # the first page is shared
    got = propose(runner, [dataclasses.replace(rest, slot=slot) for slot in range(3)], state, table)
    np.testing.assert_array_equal(got, [wanted] * 3)

    runner, state = drafters(2)  # the prefix came from elsewhere: nothing is known of it
    propose(runner, [Row(0, prompt[:PAGE_SIZE], start=0, backup=prompt[PAGE_SIZE])], state)
    table[:, 0] += 3 * PAGES
    (other,) = propose(runner, [dataclasses.replace(rest, slot=1)], state, table[1:2])
    assert other.tolist() != wanted.tolist()


def test_a_row_is_taken_from_the_request_that_was_idle_longest():
    runner, state = drafters(2, max_requests=2)
    contexts = [list(range(20 * slot + 1, 20 * slot + 7)) for slot in range(3)]
    first = [Row(slot, contexts[slot], kept=[5], start=0) for slot in range(3)]
    second = [Row(slot, [*contexts[slot], 5], kept=[9]) for slot in range(3)]
    alone = []
    for slot in range(3):
        fresh, _ = drafters(2, max_requests=2)
        propose(fresh, [first[slot]], state)
        alone.append(propose(fresh, [second[slot]], state)[0].tolist())
    for slot in range(3):  # the third takes the row of the first
        propose(runner, [first[slot]], state)
    got = propose(runner, [second[2], second[1]], state).tolist()
    assert got == [alone[2], alone[1]]
    assert propose(runner, [second[0]], state).tolist() != [alone[0]]
