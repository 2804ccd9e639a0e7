"""Several MTP modules that draft in turn, against a loop without a cache."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jspec
from jspec.models import weights
from jspec.models.config import ModelConfig
from jspec.models.kv_cache import init_cache
from jspec.models.mtp import MTP
from jspec.proposers import _in_turn
from jspec.proposers import mtp as proposer
from tests.support.marks import slow_ones
from tests.support.paged import make_view
from tests.support.steps import Row, make_step

pytestmark = pytest.mark.any_device

PAGE_SIZE, PAGES = 4, 12
CACHE = jspec.CacheConfig(
    num_pages=4 * PAGES, page_size=PAGE_SIZE, max_model_len=PAGE_SIZE * PAGES, dtype="float32"
)
D = 32


def config_of(num_modules, num_drafts):
    model = ModelConfig.tiny(num_layers=num_modules)
    return jspec.MTPConfig(num_drafts=num_drafts, model=model, hidden_layer=2)


@functools.cache
def params_of(num_modules):
    params = proposer.PROPOSER.init_params(config_of(num_modules, 1), jax.random.key(3), "float32")
    # Biased norms and larger heads: every input decides, and no two logits are close.
    return jax.tree.map(lambda x: x * 1.7, params)


@functools.cache
def uncached(num_modules, index):
    """Runs one module over the first rows of one request, without anything from before."""
    config = config_of(num_modules, 1).model

    @jax.jit
    def run(params, ids, hidden, view):
        sizes = dict(num_layers=num_modules, num_kv_heads=config.num_kv_heads, head_dim=8)
        model = weights.bind(MTP, config, params)
        out, _, _ = model(index, ids, hidden, view, init_cache(CACHE, **sizes))
        return out, model.logits(out)

    def padded(ids, hidden):
        n, rest = len(ids), CACHE.max_model_len - len(ids)
        table = np.arange(PAGES, dtype=np.int32)[None]
        view = make_view(table, [0], [n], page_size=PAGE_SIZE, num_rows=n + rest)
        ids, hidden = np.pad(ids, (0, rest)), np.pad(hidden, ((0, rest), (0, 0)))
        out, logits = run(params_of(num_modules), ids, hidden, view)
        return np.asarray(out)[:n], np.asarray(logits)[n - 1]

    return padded


def plain_drafts(num_modules, tokens, hidden, num_drafts):
    """The definition: all rows of all modules anew for each draft.

    Args:
      tokens: all known ones, the newest included; n + 1.
      hidden: [n, D] the target's, of all but the newest.

    Returns:
      (drafts, gap): and the smallest distance between a draft's score and the next best.
    """
    inputs, outputs, drafts, gap = [], [], [], np.inf
    for t in range(num_drafts):
        ids = np.array([*tokens[1:], *drafts], np.int32)  # row r reads the token at r + 1
        if t == 0:
            rows = hidden
        else:  # row r reads the last draft's module at r - 1
            rows = np.concatenate([np.zeros((1, D), np.float32), outputs[t - 1]])
        if t >= num_modules:  # rows that this module has run already stay as they are
            old = inputs[t - num_modules]
            rows = np.concatenate([old, rows[len(old) :]])
        inputs.append(rows)
        out, logits = uncached(num_modules, t % num_modules)(ids, rows)
        outputs.append(out)
        two = np.sort(logits)[-2:]
        gap = min(gap, two[1] - two[0])
        drafts.append(int(np.argmax(logits)))
    return drafts, gap


def hidden_of(tokens):
    """The hidden states that `make_step` gives to tokens at their positions."""
    return np.stack(
        [
            np.random.default_rng([token, i]).standard_normal(D).astype(np.float32)
            for i, token in enumerate(tokens)
        ]
    )


def step(state, rows, *, num_rows=40, **changes):
    scheduled, verified = make_step(
        rows,
        num_requests=4,
        num_rows=num_rows,
        width=state.config.num_drafts + 1,
        pages_per_request=PAGES,
        poison=True,
        reads=proposer.PROPOSER.reads(state.config),
    )
    scheduled = dataclasses.replace(scheduled, **changes)
    state, drafts = jspec.step(state, scheduled, verified)
    return state, np.asarray(drafts.tokens), np.asarray(drafts.num_drafts)


@pytest.mark.parametrize(
    "num_modules,num_drafts", slow_ones([(1, 3), (2, 3), (3, 8)], lambda modules, _: modules != 2)
)
def test_modules_in_turn_draft_what_the_plain_loop_drafts(num_modules, num_drafts, rng):
    """Prompts of uneven length, a chunked one, then steps with accepted and rejected drafts."""
    config = config_of(num_modules, num_drafts)
    state = jspec.init(config, params_of(num_modules), cache=CACHE, max_requests=3)
    texts = {slot: rng.integers(0, 64, n).tolist() for slot, n in enumerate((1, 7, 12))}
    for slot, text in texts.items():
        state = jspec.admit(state, slot, text)
    chunk = texts[2][:5]
    first = Row(slot=2, context=chunk, kept=[3], start=0, backup=texts[2][5])
    state, _, counts = step(state, [first])
    assert not counts.any()
    starts = {0: 0, 1: 0, 2: 5}
    drafts = {slot: [] for slot in texts}
    gaps = []
    for accepted in ({0: 0, 1: 0, 2: 0}, {0: 1, 1: 0, 2: 9}, {2: 1, 0: 9}, {1: 2, 2: 0}):
        rows = []
        for slot, num_accepted in accepted.items():
            kept = [*drafts[slot][:num_accepted], int(rng.integers(0, 64))]
            rows.append(Row(slot, texts[slot], drafts=drafts[slot], kept=kept, start=starts[slot]))
            starts[slot] = len(texts[slot]) + len(kept) - 1
            texts[slot] = texts[slot] + kept
        state, tokens, counts = step(state, rows)
        for b, slot in enumerate(accepted):
            text = texts[slot]
            wanted, gap = plain_drafts(num_modules, text, hidden_of(text[:-1]), num_drafts)
            gaps.append(gap)
            assert tokens[b].tolist() == wanted
            assert counts[b] == num_drafts
            drafts[slot] = wanted
    assert min(gaps) > 1e-3  # no near tie


def test_two_modules_draft_three_tokens_as_0_1_0():
    config = config_of(2, 3)
    state = jspec.init(config, params_of(2), cache=CACHE, max_requests=3)
    scheduled, verified = make_step(
        [Row(slot=1, context=[5, 6, 7], kept=[8], start=0)],
        num_requests=2,
        num_rows=4,
        width=4,
        pages_per_request=PAGES,
        reads=proposer.PROPOSER.reads(config),
    )
    batch = jspec.prepare(*jax.tree.map(jnp.asarray, (scheduled, verified)))
    ran = []

    def noted(index, model):
        def run(token_ids, *rest):
            ran.append((index, len(token_ids)))
            return model.run(token_ids, *rest)

        return model._replace(run=run)

    def drafts(params, memory, batch):
        models = [noted(i, model) for i, model in enumerate(proposer.draft_models(config, params))]
        return _in_turn.in_turn(models, config, batch, memory, num_drafts=3)

    jax.eval_shape(drafts, state.params, state.memory, batch)
    # The step's 4 rows, then 1 and 2 rows of each of the two requests.
    assert ran == [(0, 4), (1, 4), (1, 2), (0, 4)]


def test_drafts_end_with_the_longest_request_and_with_its_pages(rng):
    config = config_of(2, 6)
    text = rng.integers(0, 64, 45).tolist()
    wanted, _ = plain_drafts(2, text, hidden_of(text[:-1]), 3)
    state = jspec.init(config, params_of(2), cache=CACHE, max_requests=3)
    state = jspec.admit(state, 0, text[:-1])
    row = Row(slot=0, context=text[:-1], kept=text[-1:], start=0)
    state, tokens, counts = step(state, [row], num_rows=48)
    assert tokens[0].tolist() == [*wanted, -1, -1, -1] and counts[0] == 3  # 45 + 3 = 48
    table = np.full((4, PAGES), -1, np.int32)
    table[0, :2] = 0, 1
    state = jspec.init(config, params_of(2), cache=CACHE, max_requests=3)
    text = text[:7]
    state = jspec.admit(state, 0, text[:-1])
    wanted, _ = plain_drafts(2, text, hidden_of(text[:-1]), 3)
    row = Row(slot=0, context=text[:-1], kept=text[-1:], start=0)
    state, tokens, counts = step(state, [row], num_rows=48, block_table=table)
    # Rows at 6 and 7 have slots and give a draft each behind the one that row 5 gives.
    assert tokens[0].tolist() == [*wanted, -1, -1, -1] and counts[0] == 3


def test_a_cached_part_of_a_prompt_is_not_mistaken_for_the_last_request(rng):
    old, prompt = rng.integers(0, 64, (2, 8)).tolist()
    for released in (True, False):
        state = jspec.init(config_of(2, 3), params_of(2), cache=CACHE, max_requests=3)
        state = jspec.admit(state, 0, old)
        state, *_ = step(state, [Row(slot=0, context=old[:5], kept=[7], start=0)])
        row, slot = Row(slot=0, context=prompt, kept=[9], start=5), 0
        if released:
            state = jspec.admit(jspec.release(state, 0), 0, prompt)
        else:  # another row of the memory over the same pages
            state, slot = jspec.admit(state, 1, prompt), 1
        _, tokens, _ = step(state, [row], request_slot=np.array([slot, -1, -1, -1], np.int32))
        if released:
            wanted = tokens
    np.testing.assert_array_equal(tokens, wanted)
