"""Runs of the stand-in runner over recorded models, for tests."""

import functools
import json
from types import SimpleNamespace

import jax
import numpy as np
import torch
from safetensors.torch import load_file

import jspec
from jspec.proposers.extract_hidden import ExtractHiddenStatesConfig
from tests.conftest import GOLDEN
from tests.support.counting import backend_compiles
from tests.support.torch_batch import LlamaTables
from tests.support.torch_runner import vllm_config
from tests.support.torch_stand_in import StandInEngine, StandInRunner, ours
from tests.test_transcripts import load

MODELS = GOLDEN / "models"
DEVICE = torch.device("cuda:0" if jax.default_backend() == "gpu" else "cpu")
MAX_MODEL_LEN = 128
RECORDED = {
    "eagle": "e2e_llama_eagle1",
    "eagle3": "e2e_llama_eagle3",
    "draft_model": "e2e_llama_draft",
    "medusa": "e2e_llama_medusa",
    "dflash": "e2e_qwen3_dflash",
}
LOOK_UPS = {
    "ngram": jspec.NgramConfig(num_drafts=4, prompt_lookup_min=1, prompt_lookup_max=3),
    "ngram_gpu": jspec.NgramGPUConfig(num_drafts=4, prompt_lookup_min=1, prompt_lookup_max=3),
    "suffix": jspec.SuffixConfig(num_drafts=4, max_tree_depth=12),
}
LAYERS = (2, 4)


@functools.cache
def load_method(method):
    """Returns target, its folder, the drafter's config and params, and the drafter's folder."""
    if method in RECORDED:
        case = json.loads((MODELS / RECORDED[method] / "case.json").read_text())
        model, drafter = load(RECORDED[method])
        return model, case["target"], drafter.config, drafter.params, MODELS / case["draft"]
    folder = "mimo_mtp" if method == "mtp" else "target_llama"
    model = jspec.load(MODELS / folder, "float32")
    if method == "mtp":
        drafter = jspec.load(MODELS / folder, target=model, num_drafts=4)
        return model, folder, drafter.config, drafter.params, MODELS / folder
    if method == "extract_hidden_states":
        sizes = {"hidden_size": 64, "vocab_size": 128}
        return model, folder, ExtractHiddenStatesConfig(hidden_layers=LAYERS, **sizes), None, None
    return model, folder, LOOK_UPS[method], None, None


def prompts_of(method):
    data = np.load(MODELS / RECORDED.get(method, "e2e_llama_eagle3") / "expected.npz")
    prompts = [data[f"prompt_{i}"].tolist() for i in range(4)]
    return [prompt[: 24 - i] * (1 + i % 2) for i, prompt in enumerate(prompts)]


def tables(folder, *, num_padded=0, num_rows=None):
    """The tables of a recorded target, in memory that JAX can share."""
    found = load_file(MODELS / folder / "model.safetensors")
    tied = json.loads((MODELS / folder / "config.json").read_text())["tie_word_embeddings"]

    def table(name):
        rows = found[name].float()[:num_rows]
        padded = torch.zeros(rows.shape[0] + num_padded, rows.shape[1], device=DEVICE)
        padded[: rows.shape[0]] = rows
        return padded

    embed = table("model.embed_tokens.weight")
    return LlamaTables(embed, None if tied else table("lm_head.weight"))


def config_for(method, *, folder="target_llama", path=None, **speculative):
    """vLLM's configuration for a method."""
    hf_config = json.loads((MODELS / folder / "config.json").read_text())
    num_drafts = speculative.pop("num_drafts", 4)
    config = vllm_config(
        method,
        num_drafts,
        path=path,
        hf_config=SimpleNamespace(to_dict=lambda: hf_config, **hf_config),
        max_model_len=MAX_MODEL_LEN,
        max_requests=3,
        max_rows=64,
        **speculative,
    )
    if method == "extract_hidden_states":
        config.speculative_config.draft_model_config.hf_config = {
            "eagle_aux_hidden_state_layer_ids": list(LAYERS)
        }
    config.cache_config.num_gpu_blocks = None  # known after profiling only
    config.additional_config = {}
    return config


def kv_cache(limits):
    """vLLM's KV cache configuration: the manager counts pages of twice the kernels' size."""
    page_size = limits.page_size
    spec = SimpleNamespace(block_size=2 * page_size)
    groups = [SimpleNamespace(kv_cache_spec=spec, layer_names=["layers.0"])]
    num_blocks = -(-limits.num_pages // 2)
    return SimpleNamespace(num_blocks=num_blocks, kv_cache_groups=groups), [page_size]


def options_of(method):
    names = ("prompt_lookup_min", "prompt_lookup_max", "max_tree_depth")
    found = {name: getattr(LOOK_UPS.get(method), name, None) for name in names}
    found["suffix_decoding_max_tree_depth"] = found.pop("max_tree_depth")
    return {name: value for name, value in found.items() if value is not None}


def run(
    method,
    *,
    release="0.20",
    look_up=ours,
    chunk_size=64,
    config=None,
    capture_sizes=(64, 16, 1),
    start_worker=None,
    **speculative,
):
    """Decodes prompts with the stand-in's drafter, whose drafts are compared step by step.

    `start_worker` makes a worker of a configuration, and the worker the runner.
    """
    model, folder, drafter, params, path = load_method(method)
    limits = jspec.CacheConfig(
        num_pages=31, page_size=8, max_model_len=MAX_MODEL_LEN, dtype="float32"
    )
    engine = StandInEngine(
        *(model, prompts_of(method), drafter, params),
        max_tokens=16,
        max_requests=3,
        chunk_size=chunk_size,
        stop_ids=(),
        cache=limits,
        drafting="fixed",
    )
    if config is None:
        speculative |= options_of(method) | {"num_drafts": drafter.num_drafts}
        config = config_for(method, folder=folder, path=path, **speculative)
    worker = None if start_worker is None else start_worker(config)
    if worker is None:
        engine.runner = StandInRunner(
            *(config, DEVICE, model.config.vocab_size), look_up=look_up, release=release
        )
    else:
        engine.runner = worker.model_runner
    engine.is_compared = method != "extract_hidden_states"  # whose drafts are fillers
    engine.runner.start(tables(folder), *kv_cache(limits), capture_sizes)
    if worker is not None:
        worker.compile_or_warm_up_model()
    with backend_compiles() as engine.compiled:
        engine.run()
    assert engine.num_compared > 20 or not engine.is_compared
    return engine
