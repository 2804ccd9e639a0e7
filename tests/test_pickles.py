"""Folders that PyTorch pickled: refused by `load`, rewritten by `convert`, then the same model."""

import json
import re
import shutil
import sys

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file

import jspec
from jspec import checkpoint, cli
from tests.checkpoint.test_folders import POINTER
from tests.conftest import GOLDEN
from tests.proposers.test_loading import FOLDERS
from tests.support.heads import target as recorded_target

pytestmark = pytest.mark.usefixtures("own_cache")

torch = pytest.importorskip("torch")

MODELS = GOLDEN / "models"
TARGETS = ("target_llama", "target_qwen3_tied")


def convert(*words):
    return cli.main(["convert", *map(str, words)])


def stored(name):
    """A recorded model's tensors, for PyTorch."""
    (file,) = (MODELS / name).glob("*.safetensors")
    from safetensors.torch import load_file

    return load_file(file)


@pytest.fixture
def pickled(tmp_path):
    """Writes a recorded folder as PyTorch does, in one file or in shards."""

    def write(name, num_shards=0):
        folder = tmp_path / name
        folder.mkdir()
        shutil.copy(MODELS / name / "config.json", folder)
        (folder / "tokenizer.json").write_text("{}")
        tensors = stored(name)
        if not num_shards:
            torch.save(tensors, folder / "pytorch_model.bin")
            return folder
        weight_map = {}
        for i in range(num_shards):
            file = f"pytorch_model-{i + 1:05}-of-{num_shards:05}.bin"
            part = {n: tensors[n] for n in sorted(tensors)[i::num_shards]}
            torch.save(part, folder / file)
            weight_map |= dict.fromkeys(part, file)
        index = {"metadata": {"total_size": 1}, "weight_map": weight_map}
        (folder / "pytorch_model.bin.index.json").write_text(json.dumps(index))
        return folder

    return write


def load(folder, name):
    if name in TARGETS:
        return jspec.load(folder, "float32")
    return jspec.load(folder, target=recorded_target(FOLDERS[name][1]))


def assert_same_model(got, wanted):
    assert got.config == wanted.config
    jax.tree.map(np.testing.assert_array_equal, got.params, wanted.params)


@pytest.mark.parametrize("num_shards", [0, 3])
@pytest.mark.parametrize("name", [*TARGETS, *FOLDERS])
def test_any_methods_folder_becomes_the_same_model(name, num_shards, pickled, tmp_path, capfd):
    folder, new = pickled(name, num_shards), tmp_path / "new folder"
    with pytest.raises(FileNotFoundError, match="only pytorch_model.bin") as refused:
        load(folder, name)
    assert f"python -m jspec convert {folder} {folder}-safetensors" in str(refused.value)
    assert convert(folder, new) == 0, capfd.readouterr().err
    assert "as safetensors" in capfd.readouterr().out
    assert not list(new.glob("*.bin*")) and (new / "tokenizer.json").read_text() == "{}"
    wanted, got = stored(name), dict(checkpoint.read(new).tensors())
    assert got.keys() == wanted.keys()
    for tensor, values in got.items():
        assert values.dtype.name == str(wanted[tensor].dtype).removeprefix("torch.")
    # The new folder is read without a warning, which would be an error.
    (new / "tokenizer.json").unlink()
    assert_same_model(load(new, name), load(MODELS / name, name))


def test_medusas_own_file_name_is_kept(tmp_path, capfd):
    folder = tmp_path / "heads"
    folder.mkdir()
    for name in ("config.json", "medusa_lm_head.pt"):
        shutil.copy(MODELS / "medusa_llama" / name, folder)
    assert convert(folder, tmp_path / "new") == 0, capfd.readouterr().err
    ours = load_file(tmp_path / "new" / "medusa_lm_head.safetensors")
    published = load_file(MODELS / "medusa_llama" / "medusa_lm_head.safetensors")
    assert ours.keys() == published.keys()
    assert all(np.array_equal(ours[name], published[name]) for name in ours)


def test_tensors_that_share_storage_are_written_apart(pickled, tmp_path):
    folder = pickled("target_llama")
    tensors = stored("target_llama")
    table = tensors["model.embed_tokens.weight"]
    tensors |= {"lm_head.weight": table, "model.norm.weight": table[3]}
    tensors["model.layers.0.mlp.down_proj.weight"] = torch.ones(48, 64, dtype=table.dtype).T
    torch.save(tensors, folder / "pytorch_model.bin")
    assert convert(folder, tmp_path / "new") == 0
    got = load_file(tmp_path / "new" / "model.safetensors")
    for name, tensor in tensors.items():
        np.testing.assert_array_equal(got[name], tensor.float().numpy().astype(got[name].dtype))


@pytest.mark.parametrize(
    "options,message",
    [
        (["--dtype", "bfloat16"], "--dtype has no effect"),
        (["--target", "x"], "--target has no effect"),
        (["--to", "orbax"], "become safetensors first: --to orbax"),
    ],
)
def test_what_rewriting_does_not_do_is_refused(options, message, pickled, tmp_path, capfd):
    assert convert(pickled("eagle1_llama"), tmp_path / "new", *options) == 1
    assert re.search(message, capfd.readouterr().err)
    assert not (tmp_path / "new").exists()


def code(folder):
    torch.save({"x": print}, folder / "pytorch_model.bin")


def nested(folder):
    torch.save({"state_dict": {"x": torch.zeros(2)}}, folder / "pytorch_model.bin")


def pointer(folder):
    (folder / "pytorch_model.bin").write_text(POINTER)


def truncated(folder):
    file = folder / "pytorch_model.bin"
    file.write_bytes(file.read_bytes()[:1000])


def dangling(folder):
    (folder / "pytorch_model.bin").unlink()
    (folder / "pytorch_model.bin").symlink_to("blob")
    (folder / "pytorch_model.bin.index.json").write_text("{}")


def no_map(folder):
    (folder / "pytorch_model.bin").unlink()
    (folder / "pytorch_model.bin.index.json").write_text("{}")


def no_shard(folder):
    (folder / "pytorch_model.bin").unlink()
    index = {"weight_map": {"x": "pytorch_model-00001-of-00001.bin"}}
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps(index))


@pytest.mark.parametrize(
    "fault,message",
    [
        (code, "pytorch_model.bin is no file of tensors alone.*source that you trust"),
        (nested, "pytorch_model.bin is no dict of named tensors.*state_dict"),
        (pointer, "pytorch_model.bin is a pointer of Git LFS.*git lfs pull"),
        (truncated, "pytorch_model.bin is no file of tensors alone"),
        (dangling, "pytorch_model.bin is a link to blob"),
        (no_map, "pytorch_model.bin.index.json has no weight_map"),
        (no_shard, "lists shards that are not there: pytorch_model-00001-of-00001.bin"),
    ],
)
def test_what_is_no_file_of_tensors_leaves_nothing(fault, message, pickled, tmp_path, capfd):
    folder = pickled("eagle1_llama")
    fault(folder)
    assert convert(folder, tmp_path / "new") == 1
    captured = capfd.readouterr().err
    assert re.search(message, captured) and captured.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["eagle1_llama"]


def test_without_pytorch_the_extra_is_named(pickled, tmp_path, monkeypatch, capfd):
    folder = pickled("eagle1_llama")
    monkeypatch.setitem(sys.modules, "torch", None)
    assert convert(folder, tmp_path / "new") == 1
    assert re.search(r'torch is not installed.*"jspec-decode\[torch\]"', capfd.readouterr().err)
    assert not (tmp_path / "new").exists()
