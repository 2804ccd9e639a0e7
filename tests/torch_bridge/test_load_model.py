"""Embedding and head shared with a torch target, and the KV pages of the drafter."""

import json
from types import SimpleNamespace
from typing import Any

import jax
import pytest

torch = pytest.importorskip("torch")

from tests.support.torch_batch import LlamaTables
from tests.support.torch_runs import DEVICE, MODELS, config_for, kv_cache, tables
from torch_bridge import DraftModelProposer, EagleProposer, MedusaProposer

pytestmark = pytest.mark.any_device

LIMITS = SimpleNamespace(num_pages=31, page_size=8)


def eagle(path="eagle3_llama", method="eagle3", folder="target_llama", **options):
    config = config_for(method, folder=folder, path=MODELS / path, **options)
    return EagleProposer(config, DEVICE)


def pointers(proposer):
    return {leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(proposer._params)}


def pages_of(proposer):
    """The number of pages that it allocated, and the slots of one."""
    cache = proposer._memory
    return jax.tree.leaves(cache)[0].shape[1], cache.page_size


@pytest.mark.parametrize("num_padded", [0, 64])
def test_embedding_and_head_are_one_buffer_with_the_targets(num_padded):
    target = tables("target_llama", num_padded=num_padded)
    embed, head = target.model.embed_tokens.weight, target.lm_head.weight
    assert embed.shape[0] == 128 + num_padded
    proposer = eagle("eagle1_llama", "eagle")
    proposer.load_model(target)
    shared = pointers(proposer)
    assert head.data_ptr() in shared  # an EAGLE head has none of its own
    proposer = eagle()
    proposer.load_model(target)
    assert embed.data_ptr() in pointers(proposer)  # EAGLE-3 has a head of its own here
    assert proposer.config.vocab_size == 128


def test_equal_embeddings_are_shared_and_others_kept():
    target = tables("target_llama")
    with torch.no_grad():
        target.model.embed_tokens.weight += 1
    proposer = eagle("eagle1_llama", "eagle")
    proposer.load_model(target)
    assert target.model.embed_tokens.weight.data_ptr() not in pointers(proposer)


def test_medusa_shares_the_head():
    target = tables("target_llama")
    proposer = MedusaProposer(config_for("medusa", path=MODELS / "medusa_llama"), DEVICE)
    proposer.load_model(target)
    assert proposer.config.num_drafts == 4


@pytest.mark.parametrize("as_module", [True, False])
def test_tied_embeddings_are_the_head_too(as_module):
    folder = "target_qwen3_tied"
    hf_config = json.loads((MODELS / folder / "config.json").read_text())
    assert hf_config["tie_word_embeddings"]
    config = config_for("draft_model", folder=folder, path=MODELS / folder)
    proposer = DraftModelProposer(config, DEVICE)
    target = tables(folder)
    assert not hasattr(target, "lm_head")
    proposer.load_model(target if as_module else MODELS / folder)
    assert "head" not in proposer._params


def test_a_path_gives_what_a_module_gives():
    by_path, by_module = eagle(), eagle()
    by_path.load_model(MODELS / "target_llama")
    by_module.load_model(tables("target_llama"))
    assert by_path.config == by_module.config
    pairs = zip(*(jax.tree.leaves(p._params) for p in (by_path, by_module)), strict=True)
    assert all((a == b).all() for a, b in pairs)


def test_a_multimodal_wrapper_is_looked_into():
    wrapper = torch.nn.Module()
    target = tables("target_llama")
    wrapper.get_language_model = lambda: target
    proposer = eagle()
    proposer.load_model(wrapper)
    assert target.model.embed_tokens.weight.data_ptr() in pointers(proposer)


def test_a_part_of_a_table_is_an_error():
    with pytest.raises(ValueError, match=r"embed has shape \(64, 64\).*tensor parallelism"):
        eagle().load_model(tables("target_llama", num_rows=64))
    target = tables("target_llama")
    target.lm_head.weight = torch.nn.Parameter(target.lm_head.weight[:64])
    with pytest.raises(ValueError, match=r"head has shape \(64, 64\)"):
        eagle().load_model(target)


def test_a_target_without_tables_is_an_error():
    with pytest.raises(AttributeError, match="Linear without model.embed_tokens or"):
        eagle().load_model(torch.nn.Linear(2, 2))
    embed = tables("target_llama").model.embed_tokens.weight.detach()
    with pytest.raises(AttributeError, match="LlamaTables without lm_head"):
        eagle().load_model(LlamaTables(embed, None))


def test_another_target_is_an_error():
    with pytest.raises(ValueError, match="Load the head with the target that it was trained for"):
        eagle(folder="target_llama_rope3").load_model(tables("target_llama_rope3"))
    with pytest.raises(ValueError, match="wanted at least 128 rows of 64"):
        eagle().load_model(LlamaTables(torch.zeros(128, 32), torch.zeros(128, 32)))


def test_pages_come_from_the_kv_cache_configuration():
    proposer = eagle()
    proposer.load_model(MODELS / "target_llama")
    proposer.initialize_attn_backend(*kv_cache(LIMITS))  # 16 pages of 16 slots, split in two
    assert (proposer.block_size, proposer.kv_cache_gid) == (8, 0)
    proposer.dummy_run(4)
    assert pages_of(proposer) == (32, 8)
    proposer.initialize_attn_backend(kv_cache(LIMITS)[0])  # kernels that take the pages as they are
    proposer.dummy_run(4)
    assert pages_of(proposer) == (16, 16)


def test_pages_come_from_the_cache_config_without_one():
    proposer = eagle()
    proposer.load_model(MODELS / "target_llama")
    proposer.dummy_run(4)
    assert proposer._memory is None  # vLLM profiles before it knows
    proposer.vllm_config.cache_config.num_gpu_blocks = 5
    proposer.vllm_config.cache_config.block_size = 32
    proposer.dummy_run(4)
    assert pages_of(proposer) == (5, 32)


@pytest.mark.parametrize(
    "weight, words",
    [
        (None, "of the target's head is missing"),
        (torch.zeros((128, 64), dtype=torch.int8), "head is torch.int8 on cpu"),
        (torch.zeros((128, 64), device="meta"), "head is torch.float32 on meta"),
    ],
    ids=["missing", "quantised", "meta"],
)
def test_a_table_that_holds_no_weights_is_an_error(weight, words):
    target: Any = tables("target_llama")
    del target.lm_head
    target.lm_head = SimpleNamespace(weight=weight)
    with pytest.raises(TypeError, match=words):
        eagle("eagle1_llama", "eagle").load_model(target)


def test_what_is_no_target_is_an_error():
    with pytest.raises(TypeError, match="EagleProposer: `target_model` is a NoneType, wanted a"):
        eagle().load_model(None)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    "change, words",
    [
        ({"kv_cache_groups": []}, "kv_cache_groups` is empty, wanted the target's"),
        ({"kv_cache_groups": None}, "kv_cache_groups` is missing"),
        ({"kv_cache_groups": [SimpleNamespace()]}, "kv_cache_groups.0..kv_cache_spec.block_size`"),
        ({"num_blocks": None}, "num_blocks` is missing"),
    ],
)
def test_a_kv_cache_configuration_that_lacks_something_is_an_error(change, words):
    proposer = eagle()
    whole, _ = kv_cache(LIMITS)
    with pytest.raises(ValueError, match=f"EagleProposer: `kv_cache_config.{words}"):
        proposer.initialize_attn_backend(SimpleNamespace(**vars(whole) | change))
    assert proposer.block_size == -1


@pytest.mark.parametrize("size", [0, 3, 7])
def test_pages_that_do_not_fill_the_blocks_are_an_error(size):
    proposer = eagle()
    proposer.initialize_attn_backend(*kv_cache(LIMITS))
    with pytest.raises(ValueError, match=rf"`kernel_block_sizes` is \[{size}\], wanted sizes that"):
        proposer.initialize_attn_backend(kv_cache(LIMITS)[0], [size])
    assert proposer.block_size == 8
