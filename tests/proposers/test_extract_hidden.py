"""Hidden states by request: stored, overwritten, read back, written to files."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import jspec
from jspec import proposers
from jspec.axes import PAD_SLOT, PAD_TOKEN
from jspec.checkpoint import Checkpoint
from jspec.checkpoint.hidden_states import HiddenStates, read_hidden_states, save_hidden_states
from jspec.checkpoint.safetensors import read_folder
from jspec.metadata import first_token
from jspec.models import hidden_cache, llama
from jspec.models.kv_cache import init_cache
from jspec.proposers.extract_hidden import PROPOSER, ExtractHiddenStatesConfig
from jspec.runtime.decode import Engine
from tests.conftest import GOLDEN
from tests.support import recordings
from tests.support.batches import unchecked
from tests.support.paged import make_view
from tests.support.steps import Row, make_step

pytestmark = pytest.mark.any_device

L, D = 3, 8
CONFIG = ExtractHiddenStatesConfig(hidden_layers=(2, 0, "norm"), hidden_size=D, vocab_size=64)
CACHE = jspec.CacheConfig(num_pages=24, page_size=4, max_model_len=32, dtype="float32")
READS = PROPOSER.reads(CONFIG)


@pytest.fixture(scope="module")
def target():
    return jspec.load(GOLDEN / "models" / "draft_llama_small", "float32")


def states_of(tokens, start=0):
    """The hidden states that `make_step` gives these tokens at these places: [n, L, D]."""
    rows = [
        np.random.default_rng([token, start + i]).standard_normal(L * D)
        for i, token in enumerate(tokens)
    ]
    return np.array(rows, np.float32).reshape(len(rows), L, D)


def fresh(num_requests=3, cache=CACHE):
    state = jspec.init(CONFIG, cache=cache, max_requests=num_requests)
    return state


def step(state, rows, tables, *, num_rows=16, cache=CACHE, **kwargs):
    """Runs a step whose requests have these pages; returns the state, drafts and the batch."""
    scheduled, verified = make_step(
        rows,
        num_requests=state.max_requests,
        num_rows=num_rows,
        width=2,
        pages_per_request=cache.pages_per_request,
        reads=READS,
        **kwargs,
    )
    table = scheduled.block_table.copy()
    for b, row in enumerate(rows):
        table[b] = tables[row.slot]
    scheduled = dataclasses.replace(scheduled, block_table=table)
    state, drafts = jspec.step(state, scheduled, verified)
    return state, jax.tree.map(np.asarray, drafts), jspec.prepare(scheduled, verified)


@pytest.fixture
def tables(rng):
    """Pages of three requests, in no order."""
    return rng.permutation(24).reshape(3, 8).astype(np.int32)


def stored(state, tables, slot, num_tokens):
    return hidden_cache.read(state.memory, tables[slot], num_tokens)


@recordings.each_case("extract_hidden_states_next_token")
def test_the_first_token_is_the_recorded_one(case):
    names = ("sampled_token_ids", "discard_request_mask", "backup_token_ids")
    arguments = [case.given[name] for name in names]
    wanted = [case.want[name] for name in ("next_token_ids", "valid_sampled_tokens_count")]
    vocab_size = case.scalars["vocab_size"]
    on_host = first_token(*arguments, vocab_size=vocab_size)
    on_device = first_token(*map(jnp.asarray, arguments), vocab_size=vocab_size)
    for got, kind in ((on_host, np.ndarray), (on_device, jax.Array)):
        assert all(isinstance(array, kind) and array.dtype == np.int32 for array in got)
        for array, want in zip(got, wanted, strict=True):
            np.testing.assert_array_equal(array, want)


def test_tokens_without_a_column_are_refused_by_shape():
    with (
        unchecked(),
        pytest.raises(ValueError, match=r"`sampled` has shape \(5,\).*sampled\[:, None\]"),
    ):
        first_token(np.zeros(5, np.int32), np.zeros(5, bool), np.zeros(5, np.int32), vocab_size=9)


def test_each_row_is_stored_as_its_token_with_the_layers_in_order(tables):
    """Requests of 3 and 2 tokens: states [5, 3, D]."""
    rows = [
        Row(slot=0, context=[5, 6, 7], kept=[8], start=0),
        Row(slot=2, context=[9, 3], kept=[4], start=0),
    ]
    state, drafts, batch = step(fresh(), rows, tables, num_rows=5)
    assert drafts.tokens.tolist() == [[8], [4], [PAD_TOKEN]]
    assert drafts.num_drafts.tolist() == [1, 1, 0]
    for slot, tokens in ((0, [5, 6, 7]), (2, [9, 3])):
        np.testing.assert_array_equal(stored(state, tables, slot, len(tokens)), states_of(tokens))
    # Nothing else was written, the last slot included.
    written = np.zeros((24, 4), bool)
    written[tables[0, 0], :3] = written[tables[2, 0], :2] = True
    pages = np.asarray(state.memory.pages)
    assert (pages[~written] == 0).all() and (pages[written] != 0).all()
    # Layers in the configured order: (2, 0, "norm") is how `hidden` lies side by side.
    first = np.asarray(batch.hidden)[0].reshape(L, D)
    np.testing.assert_array_equal(stored(state, tables, 0, 1)[0], first)


def test_padding_writes_nothing_and_not_to_the_last_slot(tables):
    row = Row(slot=0, context=[5, 6, 7], kept=[8], start=0)
    state, _, _ = step(fresh(), [row], tables, num_rows=16, poison=True)
    pages = np.asarray(state.memory.pages)
    assert np.isfinite(pages).all()  # poisoned padding rows are NaN
    assert (pages.reshape(-1, L, D)[-1] == 0).all()
    assert np.count_nonzero(pages.any(axis=(2, 3))) == 3


def test_the_draft_is_the_last_token_that_was_kept(tables):
    """Not the first sampled column, which an accepted draft would be."""
    row = Row(slot=0, context=[5, 6], drafts=[7], kept=[7, 9])
    _, drafts, _ = step(fresh(), [row], tables)
    assert drafts.tokens.tolist() == [[9], [PAD_TOKEN], [PAD_TOKEN]]


def test_a_request_reads_back_whole_over_chunks_rejections_and_other_rows(tables):
    """Chunked prefill, rejected and accepted drafts, batch places and neighbours that change."""
    prompt = [11, 12, 13, 14, 15]
    neighbour = [21, 22]
    state = fresh()
    state, drafts, _ = step(
        state, [Row(slot=1, context=prompt[:3], kept=[1], start=0, backup=14)], tables
    )
    assert drafts.num_drafts.tolist() == [0, 0, 0]  # nothing was sampled
    np.testing.assert_array_equal(stored(state, tables, 1, 3), states_of(prompt[:3]))
    rows = [
        Row(slot=0, context=neighbour, kept=[23], start=0),
        Row(slot=1, context=prompt, kept=[16], start=3),
    ]
    state, _, _ = step(state, rows, tables)
    tokens = [*prompt, 16]
    # The draft 40 is rejected: its states lie behind the request's, and are not part of it.
    row = Row(slot=1, context=tokens, drafts=[40], kept=[17])
    state, _, batch = step(state, [row], tables)
    computed = int(batch.seq_lens[0] - batch.num_rejected[0])
    assert computed == len(tokens) == 6 and batch.num_rejected[0] == 1
    np.testing.assert_array_equal(stored(state, tables, 1, computed), states_of(tokens))
    np.testing.assert_array_equal(stored(state, tables, 1, 7)[6], states_of([40], start=6)[0])
    # The next step writes over them; this time the draft is accepted.
    rows = [
        Row(slot=1, context=[*tokens, 17], drafts=[18], kept=[18, 19]),
        Row(slot=0, context=[*neighbour, 23], drafts=[24], kept=[25]),
    ]
    state, _, batch = step(state, rows, tables)
    tokens += [17, 18]
    computed = (batch.seq_lens - batch.num_rejected).tolist()
    assert computed == [8, 3, 0]
    np.testing.assert_array_equal(stored(state, tables, 1, 8), states_of(tokens))
    np.testing.assert_array_equal(stored(state, tables, 0, 3), states_of([*neighbour, 23]))


def test_reading_follows_the_pages_wherever_they_lie(tables, rng):
    """The same request with other pages reads the same."""
    tokens = list(range(1, 15))
    read = []
    for _ in range(2):
        pages = rng.permutation(24).reshape(3, 8).astype(np.int32)
        row = Row(slot=0, context=tokens, kept=[9], start=0)
        state, _, _ = step(fresh(), [row], pages)
        read.append(stored(state, pages, 0, len(tokens)))
    np.testing.assert_array_equal(*read)
    np.testing.assert_array_equal(read[0], states_of(tokens))
    for n in range(len(tokens) + 1):
        got = stored(state, pages, 0, n)
        assert got.shape == (n, L, D)
        np.testing.assert_array_equal(got, read[0][:n])


def test_a_row_at_the_longest_request_is_stored_and_none_behind_it(tables):
    most = CACHE.max_model_len
    context = [3] * (most - 1)
    row = Row(slot=0, context=context, drafts=[4], kept=[4, 5])
    state, drafts, _ = step(fresh(), [row], tables)
    assert drafts.num_drafts.tolist() == [0, 0, 0]  # most tokens are known: no draft fits
    last = hidden_cache.read(state.memory, tables[0], most)[-2:]
    np.testing.assert_array_equal(last, states_of([3, 4], start=most - 2))
    for num_known, count in ((most, 0), (most - 1, 1)):
        row = Row(slot=0, context=[3] * (num_known - 1), kept=[5])
        assert step(fresh(), [row], tables)[1].num_drafts[0] == count
    short = dataclasses.replace(CACHE, max_model_len=30)
    narrow = tables[:, :8]
    row = Row(slot=0, context=[3] * 30, drafts=[4], kept=[4, 5])
    state, _, _ = step(fresh(cache=short), [row], narrow, cache=short)
    pages = np.asarray(state.memory.pages)
    assert np.count_nonzero(pages.any(axis=(2, 3))) == 1  # position 29, but not 30


def test_reading_what_is_not_there_is_refused(tables):
    memory = fresh().memory
    for num_tokens in (-1, 33):
        with pytest.raises(ValueError, match="`num_tokens` is.*0 to max_model_len = 32"):
            hidden_cache.read(memory, tables[0], num_tokens)
    row = np.array([3, PAD_SLOT], np.int32)
    assert hidden_cache.read(memory, row, 4).shape == (4, L, D)
    for bad in (row, row[:1], np.array([3, 24], np.int32)):
        with pytest.raises(ValueError, match="`block_table_row` starts with.*2 pages from 0 to 23"):
            hidden_cache.read(memory, bad, 5)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_states_have_the_element_type_of_the_cache(tables, dtype):
    cache = dataclasses.replace(CACHE, dtype=dtype)
    row = Row(slot=0, context=[5, 6, 7], kept=[8], start=0)
    state, _, _ = step(fresh(cache=cache), [row], tables, cache=cache)
    got = stored(state, tables, 0, 3)
    assert got.dtype == jnp.dtype(dtype)
    np.testing.assert_array_equal(got, states_of([5, 6, 7]).astype(got.dtype))


@pytest.mark.parametrize("num_rows", [1, 2, 5])
def test_a_write_touches_its_slots_alone(rng, num_rows):
    cache = hidden_cache.init_hidden_cache(CACHE, num_layers=2, hidden_size=4)
    states = rng.standard_normal((num_rows, 2, 4)).astype(np.float32)
    view = make_view(np.array([[7, 2]], np.int32), [3], [num_rows], page_size=4)
    got = np.asarray(hidden_cache.write(cache, states, view.slots).pages).reshape(-1, 2, 4)
    wanted = np.zeros_like(got)
    wanted[view.slots] = states
    np.testing.assert_array_equal(got, wanted)
    slots = np.array([PAD_SLOT, 96, 10**6, PAD_SLOT - 1, -96], np.int32)[:num_rows]
    assert not np.asarray(hidden_cache.write(cache, states, slots).pages).any()


def test_wrong_choices_are_refused_by_name():
    for changes, word in (
        ({"num_drafts": 2}, "`num_drafts` is 2, wanted 1"),
        ({"num_drafts": 0}, "`num_drafts` is 0"),
        ({"hidden_layers": ()}, "`hidden_layers` is .*tuple of layers, for example"),
        ({"hidden_layers": [1]}, "`hidden_layers` is .*tuple"),
        ({"hidden_layers": (1, -1)}, "`hidden_layers` is -1"),
        ({"hidden_layers": (1, "last")}, "`hidden_layers` is 'last'"),
        ({"hidden_layers": (1, 1)}, "each layer once"),
        ({"hidden_size": 0}, "`hidden_size` is 0"),
        ({"vocab_size": 0}, "`vocab_size` is 0"),
    ):
        with pytest.raises(ValueError, match=word):
            dataclasses.replace(CONFIG, **changes)


def checkpoint(layers, **config):
    config |= {"architectures": ["ExtractHiddenStatesModel"]}
    config |= {} if layers is None else {"eagle_aux_hidden_state_layer_ids": layers}
    return Checkpoint(config, (), lambda: iter(()), None, None, ())


def test_the_layers_are_read_off_a_config(target, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(checkpoint([2, 0]).config))
    drafter = jspec.load(tmp_path, target=target)
    assert drafter.params is None
    assert drafter.config == ExtractHiddenStatesConfig(
        hidden_layers=(2, 0), hidden_size=target.config.hidden_size, vocab_size=128
    )
    for layers in (None, [], 3):
        with pytest.raises(ValueError, match="layer_ids in config.json is.*Add it"):
            PROPOSER.load(checkpoint(layers), target, dtype="float32")
    with pytest.raises(ValueError, match=r"has \[9, -1\].*last layer of the target"):
        PROPOSER.load(checkpoint([1, 9, -1]), target, dtype="float32")
    with pytest.raises(ValueError, match="`num_drafts` is 3, wanted 1"):
        PROPOSER.load(checkpoint([1]), target, dtype="float32", num_drafts=3)


def test_the_method_is_recognised_by_its_architecture_alone():
    found = checkpoint([1])
    methods = [p for p in proposers.REGISTRY.values() if p.recognises(found.config, found.names)]
    assert methods == [PROPOSER]
    model = read_folder(GOLDEN / "models" / "target_llama")
    assert not PROPOSER.recognises(model.config, model.names)


def test_the_method_has_no_weights_and_still_needs_a_target():
    assert PROPOSER.init_params is None and not PROPOSER.model_free
    assert proposers.find("ngram_gpu").model_free


def test_decoding_keeps_the_targets_states_of_every_request(target):
    """Requests of uneven length, read in chunks, and a batch that they enter and leave."""
    layers = (2, 0, "norm", 1)
    config = ExtractHiddenStatesConfig(
        hidden_layers=layers,
        hidden_size=target.config.hidden_size,
        vocab_size=target.config.vocab_size,
    )
    recorded = np.load(GOLDEN / "models" / "draft_llama_small" / "expected.npz")
    prompts = [recorded[f"prompt_{i}"].tolist() for i in range(3)] + [[9]]
    run = {"max_tokens": 20, "stop_ids": ()}
    plain = jspec.generate_plain(target, prompts, **run)

    read = {}

    class Reading(Engine):
        """The loop itself; reads a request's states after each step."""

        def step(self, on_tokens=None):
            before = dict(self.scheduler.running)
            more = super().step(on_tokens)
            for request in (*before.values(), *self.scheduler.running.values()):
                row, n = np.array(request.pages, np.int32), request.num_computed
                read[request.index] = hidden_cache.read(self.state.memory, row, n)
            return more

    engine = Reading(target, prompts, config, max_requests=3, chunk_size=8, **run)
    report = engine.run()
    assert report.generations == plain.generations
    assert report.stats.num_draft_tokens > report.stats.num_accepted_tokens  # some were rejected
    for i, prompt in enumerate(prompts):
        text = [*prompt, *report.generations[i].tokens]
        assert len(read[i]) in (len(text) - 1, len(text))  # the newest one has not been run
        wanted = whole(target, text, layers)[: len(read[i])]
        np.testing.assert_allclose(read[i], wanted, atol=1e-4, rtol=1e-4)


def whole(target, tokens, layers):
    """Hidden states of a text that is run at once: [n, L, D]."""
    config, n = target.config, len(tokens)
    pages = jspec.CacheConfig(num_pages=1, page_size=64, max_model_len=64, dtype="float32")
    kv = init_cache(
        pages,
        num_layers=config.num_layers,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
    )
    view = make_view(np.zeros((1, 1), np.int32), [0], [n], page_size=64, num_rows=64)
    _, hidden, _ = forward(
        config,
        target.params,
        np.pad(np.array(tokens, np.int32), (0, 64 - n)),
        view,
        kv,
        logit_rows=np.zeros(1, np.int32),
        hidden_layers=layers,
    )
    return np.asarray(hidden)[:n].reshape(n, len(layers), -1)


forward = jax.jit(llama.forward, static_argnames=("config", "hidden_layers"))


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16, np.float32])
@pytest.mark.parametrize("token_ids", [None, np.arange(5, dtype=np.int32)])
def test_a_file_gives_back_what_was_written(tmp_path, rng, dtype, token_ids):
    states = rng.standard_normal((5, L, D)).astype(dtype)
    path = tmp_path / "request.safetensors"
    save_hidden_states(path, HiddenStates(states, (2, 0, "norm"), token_ids))
    got = read_hidden_states(path)
    assert got.layers == (2, 0, "norm") and got.states.dtype == dtype
    np.testing.assert_array_equal(got.states, states)
    if token_ids is None:
        assert got.token_ids is None
    else:
        np.testing.assert_array_equal(got.token_ids, token_ids)


def test_a_file_that_does_not_hold_states_is_refused(tmp_path, rng):
    states = rng.standard_normal((5, L, D)).astype(np.float32)
    path = tmp_path / "request.safetensors"
    with pytest.raises(ValueError, match=r"`states` has shape.*wanted \[n, 2, D\]"):
        save_hidden_states(path, HiddenStates(states, (1, 2)))
    with pytest.raises(ValueError, match=r"`token_ids` has shape \(6,\).*newest token out"):
        save_hidden_states(path, HiddenStates(states, (0, 1, 2), np.arange(6)))
    assert not path.exists()
    with pytest.raises(FileNotFoundError):
        read_hidden_states(path)
    path.write_bytes(b"no safetensors")
    with pytest.raises(ValueError, match="holds no hidden states"):
        read_hidden_states(path)
    with pytest.raises(ValueError, match="holds no hidden states.*layers"):
        read_hidden_states(GOLDEN / "models" / "draft_llama_small" / "model.safetensors")
