"""Models in several files: what index and shards hold, and what a tied model lacks."""

import json
import shutil

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import jspec

SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")


@pytest.fixture
def source(golden):
    return golden / "models" / "draft_llama_small"


@pytest.fixture
def shard(source, tmp_path):
    """Writes the source in two shards, with an index whose entries `change` may alter."""

    def write(change=lambda weight_map: weight_map, *, again=()):
        (tmp_path / "config.json").write_bytes((source / "config.json").read_bytes())
        tensors = load_file(source / "model.safetensors")
        names = sorted(tensors)
        parts = names[::2], [*names[1::2], *again]
        weight_map = {}
        for file, part in zip(SHARDS, parts, strict=True):
            save_file({name: tensors[name] for name in part}, tmp_path / file)
            weight_map |= dict.fromkeys(part, file)
        index = {"metadata": {}, "weight_map": change(weight_map)}
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
        return tmp_path

    return write


def without(*names):
    return lambda weight_map: {k: v for k, v in weight_map.items() if k not in names}


def same_weights(folder, other):
    a, b = (jspec.load(path, "float32").params for path in (folder, other))
    return jax.tree.all(jax.tree.map(np.array_equal, a, b))


@pytest.mark.parametrize(
    "change,match",
    [
        (without("lm_head.weight"), "lm_head.weight in no shard, which is in model-00001"),
        (
            lambda weight_map: weight_map | {"model.layers.9.up.weight": SHARDS[0]},
            "layers.9.up.weight in model-00001-of-00002.safetensors, which is in no shard",
        ),
        (
            lambda weight_map: weight_map | {"lm_head.weight": SHARDS[1]},
            "lm_head.weight in model-00002-of-00002.safetensors, which is in model-00001",
        ),
    ],
    ids=["forgotten", "in no shard", "in another shard"],
)
def test_shards_that_contradict_their_index_are_read_with_a_warning(change, match, shard, source):
    folder = shard(change)
    with pytest.warns(UserWarning, match=f"index.json and its shards differ in 1.*{match}"):
        assert same_weights(folder, source)


def test_a_shard_that_the_index_forgets_is_named_and_missed(shard):
    def first_alone(weight_map):
        return {name: file for name, file in weight_map.items() if file == SHARDS[0]}

    folder = shard(first_alone)
    with (
        pytest.warns(UserWarning, match=f"{SHARDS[1]} not read"),
        pytest.raises(ValueError) as caught,
    ):
        jspec.load(folder)
    held = load_file(folder / SHARDS[1])
    assert all(f"missing: {name} " in str(caught.value) for name in held)


def test_a_tensor_in_two_shards_is_refused(shard):
    folder = shard(again=["lm_head.weight"])
    with pytest.raises(ValueError, match=f"{SHARDS[0]} and {SHARDS[1]} both.*'lm_head.weight'"):
        jspec.load(folder)


def test_a_shard_of_the_index_that_is_not_there_is_named(shard):
    folder = shard(lambda weight_map: weight_map | {"x": "model-00003-of-00002.safetensors"})
    with pytest.raises(FileNotFoundError, match="model-00003-of-00002.safetensors. Fetch them"):
        jspec.load(folder)


@pytest.mark.parametrize("has_head", [True, False])
def test_a_recorded_tied_model_needs_no_head_in_its_file(has_head, golden, tmp_path):
    source = golden / "models" / "target_qwen3_tied"
    tensors = load_file(source / "model.safetensors")
    tensors.pop("lm_head.weight", None)
    if has_head:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    shutil.copy(source / "config.json", tmp_path)
    save_file(tensors, tmp_path / "model.safetensors")
    assert "head" not in jspec.load(tmp_path, "float32").params
    assert same_weights(tmp_path, source)


def test_a_head_that_is_missing_and_not_tied_is_named(source, tmp_path):
    tensors = load_file(source / "model.safetensors")
    del tensors["lm_head.weight"]
    shutil.copy(source / "config.json", tmp_path)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"missing: lm_head\.weight \[128, 32\]"):
        jspec.load(tmp_path)
