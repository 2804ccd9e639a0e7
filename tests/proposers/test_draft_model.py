"""Draft models, one token after the other and in parallel, against a model run without a cache."""

import dataclasses
import functools
import json
import os
import shutil
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jspec
from jspec import proposers
from jspec.axes import PAD_SLOT, PAD_TOKEN
from jspec.checkpoint import Model, read
from jspec.models import llama
from jspec.proposers import draft_model
from jspec.proposers.draft_model import DraftModelConfig
from tests.conftest import GOLDEN
from tests.support.paged import make_view, poisoned_cache, shuffled_tables
from tests.support.steps import Row, make_step

pytestmark = pytest.mark.any_device

TOLERANCE = {"atol": 1e-4, "rtol": 1e-4}  # float32, as the recordings' README says
SMALL = GOLDEN / "models" / "draft_llama_small"
PAGE_SIZE, MAX_LEN, K, MASK = 4, 32, 3, 61
PAGES = MAX_LEN // PAGE_SIZE
B, T = 4, 24


@functools.cache
def weights(model, seed=0):
    return llama.init_params(model, jax.random.key(seed), "float32")


def config_of(is_parallel, **changes):
    changes = {"parallel_drafting": True, "mask_token": MASK} | changes if is_parallel else changes
    return dataclasses.replace(DraftModelConfig.tiny(), draft_sampling="probabilistic", **changes)


@functools.partial(jax.jit, static_argnames="model")
def uncached(model, params, ids):
    """Softmax after each token of one sequence, from a pass over all of it."""
    table = np.arange(PAGES, dtype=np.int32)[None]
    view = make_view(table, [0], [len(ids)], page_size=PAGE_SIZE)
    cache = poisoned_cache(model, num_pages=PAGES, page_size=PAGE_SIZE)
    rows = np.arange(len(ids), dtype=np.int32)
    logits, _, _ = llama.forward(model, params, ids, view, cache, logit_rows=rows)
    return jax.nn.softmax(logits, axis=-1)


def wanted_probs(config, params, known, drafts, next_token_at):
    """What each draft is drawn from, by a pass over all that stands before it."""
    if config.parallel_drafting:
        ids = [*known, *[MASK] * (len(drafts) - 1)]
    else:
        ids = [*known, *drafts[:-1]]
    padded = np.pad(np.array(ids, np.int32), (0, MAX_LEN - len(ids)))
    probs = uncached(config.model, params, padded)
    return np.asarray(probs)[next_token_at : next_token_at + len(drafts)]


class Requests:
    """Requests whose texts are known: drafts are right, wrong or missing as a test says."""

    def __init__(self, rng, prompt_lens, vocab_size):
        self.texts = [rng.integers(0, vocab_size, MAX_LEN).tolist() for _ in prompt_lens]
        self.num_known = list(prompt_lens)  # the last known token has not been run yet
        self.num_run = [0] * len(prompt_lens)

    def row(self, slot, num_right=0, num_wrong=0, chunk=None):
        """One request's part of a step, and its tokens after it; a chunk ends before the prompt."""
        text, known = self.texts[slot], self.num_known[slot]
        start = self.num_run[slot]
        if chunk is not None:
            self.num_run[slot] = start + chunk
            return Row(
                slot=slot,
                context=text[: start + chunk],
                kept=[9],
                start=start,
                backup=text[start + chunk],
            )
        right = text[known : known + num_right]
        wrong = [(token + 1) % 60 for token in text[known + num_right :][:num_wrong]]
        self.num_known[slot] = known + num_right + 1
        self.num_run[slot] = known + num_right
        return Row(
            slot=slot,
            context=text[:known],
            drafts=[*right, *wrong],
            kept=text[known : known + num_right + 1],
            start=start,
        )


def new_state(config, params, num_pages=4 * PAGES + 2):
    """A state whose cache turns everything into NaN that reads what nobody wrote."""
    cache = jspec.CacheConfig(
        num_pages=num_pages, page_size=PAGE_SIZE, max_model_len=MAX_LEN, dtype="float32"
    )
    state = jspec.init(config, params, cache=cache, max_requests=4)
    memory = jax.tree.map(lambda x: jnp.full_like(x, jnp.nan), state.memory)
    return dataclasses.replace(state, memory=memory)


def step(state, rows, tables, poison=True, **fields):
    """Runs a step; pages of each request are those of its row in `tables`."""
    scheduled, verified = make_step(
        rows,
        num_requests=B,
        num_rows=T,
        width=K + 1,
        pages_per_request=PAGES,
        poison=poison,
        reads=proposers.of(state.config).reads(state.config),
    )
    table = scheduled.block_table.copy()
    for b, row in enumerate(rows):
        table[b] = tables[row.slot]
    ones = {"temperature": np.ones(B, np.float32)} if scheduled.temperature is not None else {}
    scheduled = dataclasses.replace(scheduled, block_table=table, **ones | fields)
    state, drafts = jspec.step(state, scheduled, verified)
    return state, jax.tree.map(np.asarray, drafts)


def assert_drafts_follow_from_the_text(config, params, requests, rows, drafts):
    for b, row in enumerate(rows):
        if row.backup is not None:
            assert drafts.num_drafts[b] == 0
            continue
        known = requests.texts[row.slot][: requests.num_known[row.slot]]
        count = min(K, MAX_LEN - len(known))
        assert drafts.num_drafts[b] == count
        if count:
            tokens = drafts.tokens[b, :count].tolist()
            wanted = wanted_probs(config, params, known, tokens, len(known) - 1)
            np.testing.assert_allclose(drafts.probs[b, :count], wanted, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("is_parallel", [False, True], ids=["chain", "parallel"])
def test_drafts_equal_those_of_a_model_without_a_cache_after_any_rejections(is_parallel, rng):
    """Chunks, accepted and rejected drafts, neighbours, shuffled pages, up to the longest request.

    Every cell that a step did not write is NaN, so a draft that saw a rejected or foreign row, or a
    mask of an earlier step, differs from the pass over the text alone.
    """
    config = config_of(is_parallel)
    params = weights(config.model)
    state = new_state(config, params)
    tables = shuffled_tables(rng, 4, PAGES, 4 * PAGES + 2)
    requests = Requests(rng, [9, 3, 1, 14], config.vocab_size)
    steps = [
        lambda r: [r.row(3, chunk=6), r.row(1), r.row(0, chunk=4)],
        lambda r: [r.row(1, num_right=1, num_wrong=2), r.row(3, chunk=5), r.row(0)],
        lambda r: [r.row(0, num_right=3), r.row(2), r.row(3), r.row(1, num_wrong=3)],
        lambda r: [r.row(1), r.row(3, num_right=2, num_wrong=1), r.row(2, num_wrong=2)],
        *[lambda r: [r.row(s, num_right=s, num_wrong=3 - s) for s in (3, 1, 0, 2)]] * 3,
        lambda r: [r.row(3), r.row(2, num_right=3)],
        lambda r: [r.row(3), r.row(1, num_wrong=1)],
    ]
    for lay_out in steps:
        rows = lay_out(requests)
        state, drafts = step(state, rows, tables)
        assert_drafts_follow_from_the_text(config, params, requests, rows, drafts)
    assert requests.num_known[3] == MAX_LEN  # with one draft left, then with none


@pytest.mark.parametrize("is_parallel", [False, True], ids=["chain", "parallel"])
def test_a_call_without_drafts_keeps_the_cache_current(is_parallel, rng):
    config = config_of(is_parallel)
    params = weights(config.model)
    tables = shuffled_tables(rng, 4, PAGES, 4 * PAGES + 2)
    requests = Requests(rng, [9], config.vocab_size)
    state = new_state(config, params)
    scheduled, verified = make_step(
        [requests.row(0)],
        num_requests=B,
        num_rows=T,
        width=K + 1,
        pages_per_request=PAGES,
        reads=proposers.of(config).reads(config),
    )
    table = np.tile(tables[:1], (B, 1))
    scheduled = dataclasses.replace(scheduled, block_table=table)
    state, drafts = jspec.step(state, scheduled, verified, num_drafts=0)
    assert drafts.tokens.shape == (B, 0) and drafts.probs.shape == (B, 0, config.vocab_size)
    rows = [requests.row(0)]
    state, drafts = step(state, rows, tables)
    assert_drafts_follow_from_the_text(config, params, requests, rows, drafts)


@pytest.mark.parametrize("is_parallel", [False, True], ids=["chain", "parallel"])
def test_a_request_short_of_pages_drafts_what_it_has_room_for(is_parallel, rng):
    """What it would have read in the missing page, or in page 0 instead, decides nothing."""
    config = config_of(is_parallel)
    params = weights(config.model)
    tables = shuffled_tables(rng, 4, PAGES, 4 * PAGES + 2)
    for num_known, count in ((6, 3), (7, 2), (8, 1), (9, 0)):  # next token included; 8 slots
        requests = Requests(rng, [num_known - 1], config.vocab_size)
        short = tables.copy()
        short[0, 2:] = PAD_SLOT
        rows = [requests.row(0)]
        _, drafts = step(new_state(config, params), rows, short)
        assert drafts.num_drafts[0] == count, num_known
        assert (drafts.tokens[0, count:] == PAD_TOKEN).all() and not drafts.probs[0, count:].any()
        known = requests.texts[0][:num_known]
        if count:
            tokens = drafts.tokens[0, :count].tolist()
            wanted = wanted_probs(config, params, known, tokens, num_known - 1)
            np.testing.assert_allclose(drafts.probs[0, :count], wanted, atol=1e-5, rtol=1e-4)


def test_hidden_states_and_logits_of_the_draft_path_are_the_recorded_ones(monkeypatch):
    """Through the real first pass and loop: the drafts are the recorded continuations."""
    model, data = jspec.load(SMALL, "float32"), dict(np.load(SMALL / "expected.npz"))
    num_prompts, num_drafts, seen = 3, 6, []

    class Watched(llama.Llama):
        def __call__(self, *args):
            states, cache = super().__call__(*args)
            jax.debug.callback(lambda *x: seen.append(x), *states.values(), ordered=True)
            return states, cache

    monkeypatch.setattr(draft_model, "Llama", Watched)
    config = DraftModelConfig(num_drafts=num_drafts, model=model.config)
    cache = jspec.CacheConfig(num_pages=40, page_size=5, max_model_len=60, dtype="float32")
    memory = draft_model.PROPOSER.init(config, model.params, cache, num_prompts)
    texts = [[*data[f"prompt_{i}"], *data[f"continuation_{i}"]] for i in range(num_prompts)]
    lens = [len(data[f"prompt_{i}"]) for i in range(num_prompts)]
    rows = [
        Row(slot=i, context=texts[i][:n], kept=[texts[i][n]], start=0) for i, n in enumerate(lens)
    ]
    layout = make_step(
        rows, num_requests=4, num_rows=48, width=num_drafts + 1, pages_per_request=12
    )
    batch = jspec.prepare(*layout, vocab_size=config.vocab_size)
    propose = jax.jit(draft_model.propose, static_argnums=(0, 4))
    _, drafts = propose(config, model.params, memory, batch, num_drafts)
    jax.effects_barrier()
    assert len(seen) == num_drafts
    at = 0
    for i, n in enumerate(lens):
        assert drafts.tokens[i].tolist() == texts[i][n + 1 : n + 1 + num_drafts]
        assert data[f"continuation_gap_{i}"][1 : num_drafts + 1].min() > 1e-3
        passes = [[np.asarray(x)[at : at + n + 1] for x in seen[0]]]
        passes += [[np.asarray(x)[i : i + 1] for x in states] for states in seen[1:]]
        at += n + 1
        states = [np.concatenate(parts) for parts in zip(*passes, strict=True)]
        if i == 0:
            wanted = [*data["hidden_states_0"], data["final_norm_hidden_0"]]
            for got, recorded in zip(states, wanted, strict=True):
                np.testing.assert_allclose(got, recorded[: n + num_drafts], **TOLERANCE)
        logits = states[-1] @ np.asarray(model.params["head"]).T
        np.testing.assert_allclose(logits, data[f"logits_{i}"][: n + num_drafts], **TOLERANCE)


@pytest.fixture
def target():
    """A target of the golden drafter's vocabulary."""
    config = jspec.ModelConfig.tiny(vocab_size=128)
    return Model(config, weights(config, seed=1), None, None, ())


def copy_with(tmp_path, name=SMALL, **config):
    """A copy of a golden model with another config.json."""
    shutil.copytree(name, tmp_path / "model")
    file = tmp_path / "model" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | config))
    return tmp_path / "model"


def test_a_plain_model_loads_as_a_drafter_that_shares_nothing(target):
    drafter = jspec.load(SMALL, target=target, num_drafts=4)
    alone = jspec.load(SMALL, "float32")
    assert drafter.config == DraftModelConfig(num_drafts=4, model=alone.config)
    for got, wanted in zip(
        jax.tree.leaves(drafter.params), jax.tree.leaves(alone.params), strict=True
    ):
        assert got.dtype == wanted.dtype and np.array_equal(got, wanted)
    itself = jspec.load(SMALL, target=alone)
    assert itself.config.num_drafts == 5
    for name in ("embed", "head"):
        assert itself.params[name] is not alone.params[name]


@pytest.mark.parametrize("name", ["target_llama", "target_qwen3_tied", "draft_llama_small"])
def test_whole_models_are_recognised(name):
    assert draft_model.PROPOSER.recognises(*named(name))


@pytest.mark.parametrize("name", ["eagle1_llama", "eagle3_llama", "medusa_llama_vllm", "mimo_mtp"])
def test_heads_are_not(name):
    assert not draft_model.PROPOSER.recognises(*named(name))


def named(name):
    checkpoint = read(GOLDEN / "models" / name)
    return checkpoint.config, checkpoint.names


def test_another_vocabulary_is_refused_with_both_sizes():
    config = jspec.ModelConfig.tiny(vocab_size=10)
    target = Model(config, weights(config), None, None, ())
    with pytest.raises(ValueError, match="128 tokens, the target's 10.*tokenizer"):
        jspec.load(SMALL, target=target)


def test_other_parallel_sizes_are_refused_with_both(target):
    with pytest.raises(ValueError, match="draft_tensor_parallel_size` is 4.*`tensor_.* 1.*Leave"):
        jspec.load(SMALL, target=target, draft_tensor_parallel_size=4)
    with pytest.raises(ValueError, match="draft_tensor_parallel_size` is 1.*`tensor_.* 4"):
        jspec.load(SMALL, target=target, tensor_parallel_size=4, draft_tensor_parallel_size=1)
    with pytest.raises(ValueError, match="is 4, and the target lies on 1 device.*Leave"):
        jspec.load(SMALL, target=target, tensor_parallel_size=4)
    sizes = {"tensor_parallel_size": 1, "draft_tensor_parallel_size": 1}
    assert jspec.load(SMALL, target=target, **sizes).config.num_drafts == 5


def test_options_that_are_unknown_or_without_effect_are_refused(target):
    with pytest.raises(TypeError, match="paralel_drafting.*Did you mean parallel_drafting.*mask_"):
        jspec.load(SMALL, target=target, paralel_drafting=True)
    with pytest.raises(ValueError, match="`mask_token` is 3.*no effect.*parallel_drafting=True"):
        jspec.load(SMALL, target=target, mask_token=3)
    with pytest.raises(ValueError, match="`draft_sampling` is 'hot'.*probabilistic"):
        jspec.load(SMALL, target=target, draft_sampling="hot")
    with pytest.raises(ValueError, match="`num_drafts` is 0.*num_drafts=1"):
        jspec.load(SMALL, target=target, num_drafts=0)


def test_tensors_that_do_not_fit_are_listed(target, tmp_path):
    with pytest.raises(ValueError, match=r"(?s)missing: model.layers.2.*same model"):
        jspec.load(copy_with(tmp_path, num_hidden_layers=3), target=target)


def test_the_mask_token_of_a_parallel_model_is_looked_up(target, tmp_path):
    with pytest.raises(ValueError, match="dflash_config.*pard_token.*ptd_token_id.*Add the id"):
        jspec.load(SMALL, target=target, parallel_drafting=True)
    assert jspec.load(SMALL, target=target, parallel_drafting=True, mask_token=0).config == (
        jspec.load(copy_with(tmp_path, pard_token=0), target=target).config
    )
    folder = tmp_path / "model"
    config = jspec.load(folder, target=target).config
    assert config.parallel_drafting and config.mask_token == 0
    assert not jspec.load(folder, target=target, parallel_drafting=False).config.parallel_drafting


@pytest.mark.parametrize(
    "fields, word",
    [
        ({"parallel_drafting": True}, "`mask_token` is None.*Pass mask_token="),
        ({"parallel_drafting": True, "mask_token": 64}, "below the vocabulary of 64.*config.json"),
        ({"parallel_drafting": True, "mask_token": -1}, "`mask_token` is -1.*at least 0"),
        ({"mask_token": 1}, "no effect.*Leave it out"),
    ],
)
def test_a_config_that_contradicts_itself_is_refused(fields, word):
    with pytest.raises(ValueError, match=word):
        dataclasses.replace(DraftModelConfig.tiny(), **fields)


def test_the_draft_model_goes_where_the_target_is():
    script = """
import jax, sys, jspec
from jspec.checkpoint import Model, read
first, second = jax.devices()
target = jspec.load(sys.argv[1], "float32")
target = target._replace(params=jax.device_put(target.params, second))
drafter = jspec.load(sys.argv[1], target=target, num_drafts=2)
assert all(leaf.devices() == {second} for leaf in jax.tree.leaves(drafter.params))
"""
    environment = os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=2"}
    done = subprocess.run(
        [sys.executable, "-c", script, str(SMALL)],
        env=environment | {"JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
    )
    assert not done.returncode, done.stderr
