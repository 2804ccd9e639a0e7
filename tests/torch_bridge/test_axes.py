"""Positions of three axes (M-RoPE): keys and values are stored by index in the request."""

import dataclasses
import functools

import jax
import numpy as np
import pytest

torch = pytest.importorskip("torch")

import jspec
from jspec import proposers
from jspec.models.config import ModelConfig
from jspec.models.rope import RopeConfig
from tests.support.counting import backend_compiles
from tests.support.torch_runner import common_attn_metadata, vllm_config
from torch_bridge import DFlashProposer, DraftModelProposer, EagleProposer

pytestmark = pytest.mark.any_device

DEVICE = torch.device("cuda:0" if jax.default_backend() == "gpu" else "cpu")
PAGE_SIZE, MAX_LEN, K = 16, 64, 2
TABLE = [[5, 6, 7, 8], [1, 2, 3, 4]]
ROPES = {"plain": RopeConfig(), "mrope": RopeConfig(mrope_section=(2, 1, 1))}


def configs(rope):
    """Heads that draft in chains, by name."""
    model = ModelConfig.tiny(rope=ROPES[rope])
    eagle, eagle3 = jspec.EagleConfig.tiny(), jspec.Eagle3Config.tiny()
    decoder = dataclasses.replace(eagle3.model.decoder, rope=ROPES[rope])
    modules = dataclasses.replace(model, num_layers=2)
    return {
        "eagle": dataclasses.replace(
            eagle, num_drafts=K, model=dataclasses.replace(eagle.model, rope=ROPES[rope])
        ),
        "eagle3": dataclasses.replace(
            eagle3, num_drafts=K, model=dataclasses.replace(eagle3.model, decoder=decoder)
        ),
        "mtp": jspec.MTPConfig(num_drafts=K, model=model, hidden_layer=1),
        "modules": jspec.MTPConfig(num_drafts=K, model=modules, hidden_layer=1),
    }


CHAINS = list(configs("plain"))


def make(cls, config, **options):
    name = proposers.of(config).name
    settings = vllm_config(
        *(name, config.num_drafts), max_model_len=MAX_LEN, num_pages=16, page_size=PAGE_SIZE
    )
    for key, value in options.items():
        setattr(settings.model_config, key, value)
    drafter = cls(settings, DEVICE)
    params = proposers.find(name).init_params(config, jax.random.key(0), "float32")
    drafter.set_drafter(config, jax.device_put(params, drafter._jax_device))
    return drafter


@functools.cache
def compiled(name, rope="plain"):
    """A head of its own for each name and rope, which tests share."""
    return make(EagleProposer, configs(rope)[name])


def chain(name, rope="plain"):
    """The same with nothing in its pages."""
    drafter = compiled(name, rope)
    drafter._memory = None
    return drafter


def step(drafter, positions, query_start, seq_lens, rejected=None):
    """A step whose rows have these positions, [T] or [3, T]."""
    num_rows, size = query_start[-1], drafter._reads.hidden_size
    random = torch.Generator().manual_seed(0)
    return {
        "target_token_ids": torch.arange(num_rows, device=DEVICE),
        "target_positions": torch.tensor(positions, device=DEVICE),
        "target_hidden_states": torch.randn((num_rows, size), generator=random).to(DEVICE),
        "next_token_ids": torch.arange(len(seq_lens), device=DEVICE) + 9,
        "token_indices_to_sample": None,
        "common_attn_metadata": common_attn_metadata(
            query_start, seq_lens, TABLE[: len(seq_lens)], page_size=PAGE_SIZE, device=DEVICE
        ),
        "num_rejected_tokens_gpu": None
        if rejected is None
        else torch.tensor(rejected, dtype=torch.int32, device=DEVICE),
    }


def written(drafter):
    """The KV slots that hold something, in any layer."""
    memory = getattr(drafter._memory, "inner", drafter._memory)
    keys = np.asarray(getattr(memory, "cache", memory).k)
    return np.flatnonzero(keys.reshape(len(keys), 16 * PAGE_SIZE, -1).any(axis=(0, 2))).tolist()


@pytest.mark.parametrize("rope", ROPES)
@pytest.mark.parametrize("name", CHAINS)
def test_slots_come_from_the_place_whatever_the_axes_are(name, rope):
    """Length 40: place 39 in page 7 is slot 119; the drafted row is the next one."""
    for axes in ([[12], [12], [12]], [[300], [2], [7]]):
        drafter = chain(name, rope)
        drafts = drafter.propose(**step(drafter, axes, [0, 1], [40]))
        assert written(drafter) == [119, 120]
        assert (drafts >= 0).all()


@pytest.mark.parametrize("name", CHAINS)
def test_drafts_end_by_the_place_whatever_the_axes_are(name):
    """Of 64 places: a request of 61 tokens and the next one gets two drafts, one of 63 none."""
    for length, kept in ((61, 2), (62, 1), (63, 0), (64, 0)):
        for position in (3, 63, 500):
            drafter, axes = chain(name), np.full((3, 1), position)
            drafts = drafter.propose(**step(drafter, axes, [0, 1], [length]))
            assert (drafts >= 0).sum() == kept, (length, position)
            places = range(length - 1, min(length + 1, MAX_LEN))
            assert written(drafter) == [8 * PAGE_SIZE + place - 48 for place in places]


@pytest.mark.parametrize("name", CHAINS)
def test_rows_that_were_rejected_count_as_places(name):
    """Rows 36 to 39 ran, the last two were rejected: the drafted row is place 38 again."""
    drafter = chain(name)
    axes = np.arange(4)[None] + [[10], [11], [12]]
    drafter.propose(**step(drafter, axes, [0, 4], [40], rejected=[2]))
    assert written(drafter) == [116, 117, 118, 119]


@pytest.mark.parametrize("name", CHAINS)
def test_a_plain_head_turns_by_the_first_axis(name):
    """With text alone all axes are the place, and drafts are those of positions [T]."""
    place, results = [17, 18, 19, 31, 32], []
    for positions in (place, [place, [0] * 5, [7] * 5]):
        drafter = chain(name)
        drafts = drafter.propose(**step(drafter, positions, [0, 3, 5], [20, 33], [1, 0]))
        results.append((drafts.tolist(), written(drafter)))
    assert results[0] == results[1]


@pytest.mark.parametrize("name", CHAINS)
def test_the_bridge_drafts_what_jspec_does_with_three_axes(name):
    drafter = chain(name)
    axes = np.array([[5, 6, 7, 2, 3], [1, 1, 1, 2, 3], [9, 8, 7, 2, 3]])
    given = step(drafter, axes, [0, 3, 5], [20, 33])
    got = drafter.propose(**given)
    cache = jspec.CacheConfig(
        num_pages=16, page_size=PAGE_SIZE, max_model_len=MAX_LEN, dtype="float32"
    )
    state = jspec.init(drafter.config, drafter._params, cache=cache, max_requests=2)
    for slot in range(2):
        state = jspec.admit(state, slot, [0])

    def ints(*values):
        return np.array(values, np.int32)

    scheduled = jspec.Scheduled(
        token_ids=ints(*range(5)),
        positions=axes.astype(np.int32),
        token_index=ints(17, 18, 19, 31, 32),
        query_start=ints(0, 3, 5),
        seq_lens=ints(20, 33),
        block_table=ints(*TABLE),
        num_drafts=ints(0, 0),
        request_slot=ints(0, 1),
        backup_token=ints(0, 0),
        discard=np.zeros(2, bool),
        hidden=given["target_hidden_states"].cpu().numpy(),
    )
    verified = jspec.Verified(tokens=ints([9, -1, -1], [10, -1, -1]))
    state, drafts = jspec.step(state, scheduled, verified)
    assert got.tolist() == np.asarray(drafts.tokens).tolist()
    memory = getattr(state.memory, "cache", state.memory)
    keys = np.asarray(memory.k).reshape(len(memory.k), 16 * PAGE_SIZE, -1)
    assert np.flatnonzero(keys.any(axis=(0, 2))).tolist() == written(drafter)


PARALLEL = {"parallel_drafting": True, "mask_token": 1}


@pytest.mark.parametrize(
    "cls, config",
    [
        (DFlashProposer, jspec.DFlashConfig.tiny()),
        (DraftModelProposer, jspec.DraftModelConfig.tiny()),
        (DraftModelProposer, dataclasses.replace(jspec.DraftModelConfig.tiny(), **PARALLEL)),
        (EagleProposer, dataclasses.replace(jspec.Eagle3Config.tiny(), **PARALLEL)),
    ],
    ids=["dflash", "draft_model", "pard", "p-eagle"],
)
def test_drafters_that_add_rows_refuse_three_axes_before_anything_compiles(cls, config):
    drafter = make(cls, config)
    place = np.arange(3)
    wanted = drafter.propose(**step(drafter, place, [0, 3], [3])).tolist()
    axes = step(drafter, np.stack([place] * 3), [0, 3], [3])
    with backend_compiles() as compiled:
        words = rf"{cls.__name__}: `target_positions` has shape \(3, 3\).*chain"
        with pytest.raises(NotImplementedError, match=words):
            drafter.propose(**axes)
        with pytest.raises(ValueError, match=r"has shape \(2, 3\), wanted \[T\]"):
            drafter.propose(**step(drafter, np.stack([place] * 2), [0, 3], [3]))
    assert drafter.propose(**step(drafter, place, [0, 3], [3])).tolist() == wanted
    assert not compiled


MROPE = {"rope_scaling": {"type": "default", "mrope_section": [2, 1, 1]}}


@pytest.mark.parametrize(
    "options",
    [{"uses_mrope": True}, {"hf_config": MROPE}, {"hf_config": {"text_config": MROPE}}],
    ids=["told", "config", "text config"],
)
def test_a_dummy_run_compiles_for_the_positions_of_the_target(options):
    drafter = make(EagleProposer, configs("plain")["eagle"], **options)
    drafter.dummy_run(6)
    with backend_compiles() as compiled:
        drafter.propose(**step(drafter, np.zeros((3, 4), int), [0, 1, 4], [20, 33]))
    assert not compiled
