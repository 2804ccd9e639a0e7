"""After a warm-up no step compiles, for any width, layout and size of its tensors."""

import dataclasses
import functools
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest
from numba.core import event

torch = pytest.importorskip("torch")

import jspec
import torch_bridge
from jspec import proposers
from jspec.models.config import ModelConfig
from tests.support.counting import backend_compiles
from tests.support.torch_golden import strided
from tests.support.torch_lookup import config as lookup_config
from tests.support.torch_runner import common_attn_metadata, vllm_config

pytestmark = pytest.mark.any_device

DEVICE = torch.device("cuda:0" if jax.default_backend() == "gpu" else "cpu")
PAGE_SIZE, MAX_LEN, MAX_REQUESTS, MAX_ROWS = 4, 32, 4, 32
TABLE = np.arange(32, dtype=np.int32).reshape(4, 8)
CONFIGS = {
    "EagleProposer": jspec.EagleConfig.tiny(),
    "EagleProposer, modules": jspec.MTPConfig(
        num_drafts=3, model=ModelConfig.tiny(num_layers=2), hidden_layer=1
    ),
    "DraftModelProposer": jspec.DraftModelConfig.tiny(),
    "DFlashProposer": jspec.DFlashConfig.tiny(),
    "MedusaProposer": jspec.MedusaConfig.tiny(),
    "ExtractHiddenStatesProposer": dataclasses.replace(
        proposers.find("extract_hidden_states").Config.tiny(), hidden_layers=(2, 0)
    ),
}
WITH_METADATA = [name for name in CONFIGS if not name.startswith(("Medusa", "Extract"))]


def make(name, **speculative):
    config = CONFIGS[name]
    method = proposers.of(config).name
    settings = vllm_config(
        *(method, config.num_drafts),
        max_model_len=MAX_LEN,
        max_requests=MAX_REQUESTS,
        max_rows=MAX_ROWS,
        num_pages=32,
        page_size=PAGE_SIZE,
        **speculative,
    )
    drafter = getattr(torch_bridge, name.split(",")[0])(settings, DEVICE)
    init = proposers.find(method).init_params
    params = None if init is None else init(config, jax.random.key(0), "float32")
    drafter.set_drafter(config, jax.device_put(params, drafter._jax_device))
    return drafter


kept = functools.cache(make)


def warmed(name):
    """A drafter that tests share; what JAX forgot between them is compiled again."""
    drafter = kept(name)
    drafter.warmup()
    return drafter


def step(drafter, lengths, known=None):
    """The arguments of a step whose requests ran so many rows."""
    start = np.concatenate([[0], np.cumsum(lengths)])
    known = np.array(lengths) + 3 if known is None else known
    metadata = common_attn_metadata(
        *(start, known, TABLE[: len(lengths)]), page_size=PAGE_SIZE, device=DEVICE
    )
    num_rows, width = int(start[-1]), drafter._reads.hidden_size
    if isinstance(drafter, torch_bridge.MedusaProposer):
        return {"target_hidden_states": torch.ones(len(lengths), width, device=DEVICE)}
    if isinstance(drafter, torch_bridge.ExtractHiddenStatesProposer):
        layers = len(drafter.config.hidden_layers)
        states = [torch.ones(num_rows, width // layers, device=DEVICE)] * layers
        sampled = torch.ones((len(lengths), 2), dtype=torch.int32, device=DEVICE)
        return {
            "sampled_token_ids": sampled,
            "target_hidden_states": states,
            "common_attn_metadata": metadata,
        }
    places = [np.arange(n - r, n) for n, r in zip(known, lengths, strict=True)]
    zeros = torch.zeros(len(lengths), dtype=torch.int32, device=DEVICE)
    return {
        "target_token_ids": torch.arange(num_rows, dtype=torch.int32, device=DEVICE),
        "target_positions": torch.tensor(np.concatenate(places), device=DEVICE),
        "target_hidden_states": torch.ones(num_rows, width, device=DEVICE),
        "next_token_ids": zeros + 7,
        "token_indices_to_sample": metadata.query_start_loc[1:] - 1,
        "common_attn_metadata": metadata,
        "num_rejected_tokens_gpu": zeros,
    }


FORMS = {
    "int32": lambda tensor: tensor.to(torch.int32),
    "int64": lambda tensor: tensor.to(torch.int64),
    "strided int32": lambda tensor: strided(tensor.to(torch.int32)),
    "strided int64": lambda tensor: strided(tensor.to(torch.int64)),
    "backwards": lambda tensor: tensor.flip(0).clone().flip(0),
    "in the middle": lambda tensor: torch.cat([tensor[:1], tensor, tensor[:1]])[1:-1],
}


def is_integer(value):
    return isinstance(value, torch.Tensor) and not value.is_floating_point()


def variants(given):
    """Every integer argument and field, in every form; and all of them in one form at once."""
    metadata: Any = given.get("common_attn_metadata")
    names = ("query_start_loc", "seq_lens", "block_table_tensor", "slot_mapping")
    for form in FORMS.values():
        changed = {name: form(x) for name, x in given.items() if is_integer(x)}
        fields = {name: form(getattr(metadata, name)) for name in names if metadata is not None}
        for name, tensor in changed.items():
            yield given | {name: tensor}
        for name, tensor in fields.items():
            yield given | {"common_attn_metadata": dataclasses.replace(metadata, **{name: tensor})}
        if metadata is not None:
            changed["common_attn_metadata"] = dataclasses.replace(metadata, **fields)
        yield given | changed


@pytest.mark.parametrize("name", [name for name in CONFIGS if not name.startswith("Medusa")])
def test_no_width_or_layout_of_an_integer_compiles_in_a_step(name):
    drafter = warmed(name)
    given = step(drafter, [2, 1, 3])
    without = {"num_rejected_tokens_gpu": None} if name in WITH_METADATA else {}
    wanted, num_calls = None, 0
    with backend_compiles() as compiled:
        for arguments in variants(given):
            for more in ({}, without):
                drafts = drafter.propose(**arguments | more).tolist()
                wanted = wanted or drafts
                assert drafts == wanted
                num_calls += 1
    assert num_calls > 20
    assert not compiled


@pytest.mark.parametrize("name", CONFIGS)
def test_after_warmup_no_step_compiles_whatever_its_size(name, rng):
    drafter = warmed(name)
    with backend_compiles() as compiled:
        for _ in range(40):
            lengths = rng.multinomial(
                rng.integers(0, MAX_ROWS - MAX_REQUESTS + 1), np.ones(n := rng.integers(1, 5)) / n
            )
            drafter.propose(**step(drafter, lengths + 1, rng.integers(0, 4, n) + lengths + 1))
    assert not compiled


@pytest.mark.parametrize("name", CONFIGS)
def test_captured_sizes_serve_all_smaller_steps(name):
    """As CUDA graphs of vLLM's do: 16 rows and 1 row were captured, and 2 to 15 take 16."""
    drafter, alone = make(name), warmed(name)
    alone._memory = None  # of other tests
    for num_tokens in (16, 1):
        drafter.dummy_run(num_tokens, is_graph_capturing=True)
    with backend_compiles() as compiled:
        got = [
            drafter.propose(**step(drafter, lengths)).tolist()
            for lengths in ([1], [2], [1, 1, 1], [5], [3, 4, 2], [4, 4, 4, 4])
        ]
    assert not compiled
    for lengths, drafts in zip(([1], [2], [1, 1, 1], [5]), got, strict=False):
        assert alone.propose(**step(alone, lengths)).tolist() == drafts


@pytest.mark.parametrize("name", ["EagleProposer", "DFlashProposer"])
def test_a_smaller_number_of_drafts_is_cut_from_what_was_captured(name):
    drafter = make(name)
    drafter.dummy_run(4, is_graph_capturing=True)
    given = step(drafter, [2, 1])
    with backend_compiles() as compiled:
        wanted = drafter.propose(**given).tolist()
        for count in (0, 1, 2):
            drafts = drafter.propose(**given, num_speculative_tokens=count)
            assert drafts.tolist() == [row[:count] for row in wanted]
            drafts.fill_(-1)
    assert not compiled


def test_a_schedule_of_drafts_has_executables_of_its_own():
    """A batch of one gets three drafts, of two or three gets one, and of four none."""
    schedule = [(1, 1, 3), (2, 3, 1), (4, 4, 0)]
    drafter = make("EagleProposer", num_speculative_tokens_per_batch_size=schedule)
    drafter.warmup()
    counts = {}
    for layout, (count,) in drafter._executables:
        counts.setdefault(dict(layout.capacity)["B"], set()).add(count)
    assert counts == {1: {3}, 2: {3, 1}, 4: {3, 1, 0}}


def test_a_step_that_compiles_after_a_dummy_run_warns_once():
    drafter = make("EagleProposer")
    given = step(drafter, [2, 1])
    drafter.propose(**given)  # nobody asked for compilation ahead: it is expected
    drafter.dummy_run(16)
    half = given["target_hidden_states"].to(torch.bfloat16)
    words = r"EagleProposer: a step compiles .*hidden_states bfloat16\[3, 32\]\. Call warmup"
    with pytest.warns(UserWarning, match=words) as warned:
        drafter.propose(**given | {"target_hidden_states": half})
    assert [warning.filename for warning in warned] == [__file__]
    drafter.propose(**given | {"target_hidden_states": half.half()})  # reported once
    drafter.set_drafter(drafter.config, drafter._params)
    drafter.propose(**given)


def test_pages_that_change_are_compiled_for_anew_and_not_in_a_step():
    drafter = make("EagleProposer")
    drafter.dummy_run(4)
    spec = SimpleNamespace(block_size=PAGE_SIZE)
    groups = [SimpleNamespace(kv_cache_spec=spec)]
    drafter.initialize_attn_backend(SimpleNamespace(num_blocks=40, kv_cache_groups=groups))
    drafter.dummy_run(4)
    with backend_compiles() as compiled:
        drafter.propose(**step(drafter, [2, 1]))
    assert not compiled


def test_warmup_without_weights_says_so():
    settings = vllm_config("eagle", 3)
    with pytest.raises(RuntimeError, match="EagleProposer: no drafter is loaded. Call load_model"):
        torch_bridge.EagleProposer(settings, DEVICE).warmup()


def test_the_lookup_on_the_device_compiles_at_construction_alone():
    drafter = torch_bridge.NgramProposerGPU(lookup_config(max_num_seqs=3), DEVICE)
    for columns in (48, 20):  # as wide as the longest request, and narrower
        table = torch.zeros((3, columns), dtype=torch.int32, device=DEVICE)
        table[:, :6] = torch.tensor([1, 2, 3, 1, 2, 3], device=DEVICE)
        given = {
            "num_tokens_no_spec": torch.tensor([4, 4], device=DEVICE),
            "valid_sampled_token_ids_gpu": torch.tensor([[2, -1], [2, 3]], device=DEVICE),
            "valid_sampled_tokens_count": torch.tensor([1, 2], device=DEVICE),
        }
        with backend_compiles() as compiled:
            for arguments in variants(given):
                drafts, count = drafter.propose(token_ids_gpu=table[:2], **arguments)
                assert drafts.tolist() == [[3, 1, 2, -1], [1, 2, 3, -1]]
                assert count.tolist() == [3, 3]
        assert not compiled


def test_lookups_on_the_host_compile_at_construction_alone():
    settings = lookup_config()
    ngram = torch_bridge.NgramProposer(settings)
    suffix = torch_bridge.SuffixDecodingProposer(settings)
    known = np.zeros((2, 48), np.int32)
    known[:, :6] = [1, 2, 3, 1, 2, 3]
    sampled = [[3], [3]]
    with event.install_recorder("numba:compile") as recorder:
        for i, width in enumerate((np.int32, np.int64)):
            lengths = np.repeat(np.array([6, 0, 6, 0], width), 2)
            assert ngram.propose(sampled, lengths, np.asfortranarray(known)) == [[1, 2, 3]] * 2
            tables = known, known[::-1], torch.from_numpy(known)
            for j, table in enumerate(tables):
                for counts in (lengths[:2], lengths[::4], torch.from_numpy(lengths[:2])):
                    drafts = ngram.propose(sampled, counts, table)
                    assert drafts == [[1, 2, 3]] * 2
                names = [f"{i}{j}a", f"{i}{j}b"]
                batch = SimpleNamespace(
                    req_ids=names,
                    req_id_to_index={name: row for row, name in enumerate(names)},
                    num_tokens_no_spec=lengths[:2],
                    num_prompt_tokens=lengths[:2] - 1,
                    token_ids_cpu=table,
                )
                assert len(suffix.propose(batch, sampled)) == 2
    assert not recorder.buffer


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_pinned_integers_are_refused_as_on_another_device(dtype):
    drafter = make("EagleProposer")
    given = step(drafter, [2, 1])
    pinned = given["next_token_ids"].cpu().to(dtype).pin_memory()
    with pytest.raises(ValueError, match="`next_token_ids` is on cpu"):
        drafter.propose(**given | {"next_token_ids": pinned})
