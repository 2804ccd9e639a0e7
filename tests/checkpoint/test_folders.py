"""Model folders without a model or with several: what is read, warned of and refused."""

import json
import os
import shutil
import sys
import tempfile

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import jspec
from jspec import checkpoint
from tests.conftest import GOLDEN

SOURCE = GOLDEN / "models" / "draft_llama_small"
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:{}\nsize 4096\n".format("0" * 64)


@pytest.fixture
def folder(tmp_path):
    """A copy of a recorded model."""
    copy = tmp_path / "model"
    copy.mkdir()
    for name in ("config.json", WEIGHTS):
        shutil.copy(SOURCE / name, copy)
    return copy


def other_weights(file):
    """Writes the same tensors with other values."""
    save_file({name: x[::-1].copy() for name, x in load_file(SOURCE / WEIGHTS).items()}, file)


def is_the_source(model):
    wanted = jspec.load(SOURCE, "float32").params
    return jax.tree.all(jax.tree.map(np.array_equal, model.params, wanted))


@pytest.mark.parametrize(
    "name",
    [
        *("consolidated.safetensors", "model-00001-of-00002.safetensors", "model_fp16.safetensors"),
        *("medusa_lm_head.safetensors", "adapter_model.safetensors"),
        *("pytorch_model.bin", "medusa_lm_head.pt"),
    ],
)
def test_weights_beside_those_that_are_read_are_named(name, folder):
    other_weights(folder / name)
    with pytest.warns(UserWarning, match=f"{name} not read: .* those of {WEIGHTS}"):
        assert is_the_source(jspec.load(folder, "float32"))


def test_one_file_comes_before_shards(folder):
    shard = "model-00001-of-00001.safetensors"
    other_weights(folder / shard)
    weight_map = dict.fromkeys(load_file(SOURCE / WEIGHTS), shard)
    (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    with pytest.warns(UserWarning, match=f"{shard}, {INDEX} not read: .* those of {WEIGHTS}"):
        assert is_the_source(jspec.load(folder, "float32"))


def test_an_index_of_the_one_file_says_nothing_else(folder):
    weight_map = dict.fromkeys(load_file(SOURCE / WEIGHTS), WEIGHTS)
    (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    assert is_the_source(jspec.load(folder, "float32"))


def test_a_pickle_that_was_converted_may_stay_beside_its_safetensors():
    folder = GOLDEN / "models" / "medusa_llama"
    assert {"medusa_lm_head.pt", "medusa_lm_head.safetensors"} <= set(os.listdir(folder))
    assert checkpoint.read(folder).names  # a warning would be an error


@pytest.mark.parametrize("has_weights", [True, False])
def test_an_adapter_is_not_taken_for_a_model(has_weights, folder):
    (folder / "adapter_config.json").write_text('{"base_model_name_or_path": "x"}')
    if not has_weights:
        (folder / WEIGHTS).rename(folder / "adapter_model.safetensors")
    with pytest.raises(ValueError, match="adapter_config.json.*merge_and_unload"):
        jspec.load(folder)


READ = [
    *("config.json", WEIGHTS, INDEX, "generation_config.json", "tokenizer.json"),
    *("tokenizer_config.json", "chat_template.jinja", "adapter_config.json"),
]


@pytest.mark.parametrize("name", READ)
def test_a_dangling_link_is_called_one(name, folder):
    (folder / name).unlink(missing_ok=True)
    (folder / name).symlink_to("../../blobs/0123")
    with pytest.raises(FileNotFoundError, match=f"{name} is a link to ../../blobs/0123, which is"):
        jspec.load(folder)


@pytest.mark.parametrize("name", READ)
def test_a_pointer_of_git_lfs_is_called_one(name, folder):
    (folder / name).write_text(POINTER)
    with pytest.raises(ValueError, match=f"{name} is a pointer of Git LFS.*git lfs pull, in "):
        jspec.load(folder)


@pytest.mark.parametrize("name", READ)
def test_a_folder_in_place_of_a_file_is_called_one(name, folder):
    (folder / name).unlink(missing_ok=True)
    (folder / name).mkdir()
    with pytest.raises(IsADirectoryError, match=f"{name} is a folder, wanted a file"):
        jspec.load(folder)


def test_a_gguf_file_is_looked_at_alike(tmp_path):
    link, pointer = tmp_path / "link.gguf", tmp_path / "pointer.gguf"
    link.symlink_to("blob")
    pointer.write_text(POINTER)
    with pytest.raises(FileNotFoundError, match="link.gguf is a link to blob"):
        jspec.load(link)
    with pytest.raises(ValueError, match="pointer.gguf is a pointer of Git LFS"):
        jspec.load(pointer)
    dangling = tmp_path / "folder"
    dangling.symlink_to("elsewhere")
    with pytest.raises(FileNotFoundError, match="folder is a link to elsewhere"):
        jspec.load(dangling)


def test_links_that_lead_somewhere_are_followed(tmp_path, folder):
    linked = tmp_path / "linked"
    linked.mkdir()
    for file in folder.iterdir():
        (linked / file.name).symlink_to(file)
    assert is_the_source(jspec.load(linked, "float32"))


def test_a_folder_above_or_beside_the_model_says_where_it_is(tmp_path, folder):
    with pytest.raises(FileNotFoundError, match=f"config.json is missing. Pass the.*{folder}"):
        jspec.load(tmp_path)
    hub = tmp_path / "models--x--y" / "snapshots"
    hub.mkdir(parents=True)
    folder.rename(hub / "0123")
    with pytest.raises(FileNotFoundError, match=f"Pass the folder inside.*{hub / '0123'}"):
        jspec.load(hub.parent)
    (tmp_path / "gguf").mkdir()
    (tmp_path / "gguf" / "model.gguf").touch()
    with pytest.raises(FileNotFoundError, match="Pass the file itself: .*gguf/model.gguf"):
        jspec.load(tmp_path / "gguf")
    (tmp_path / "empty").mkdir()
    with pytest.raises(FileNotFoundError, match="The folder is empty"):
        jspec.load(tmp_path / "empty")


@pytest.mark.skipif(sys.platform != "linux" or os.geteuid() != 0, reason="becomes another user")
@pytest.mark.parametrize("name", ["config.json", WEIGHTS])
def test_a_file_of_somebody_else_is_named(name, folder):
    with tempfile.TemporaryDirectory() as home:
        os.chmod(home, 0o755)
        copy = shutil.copytree(folder, f"{home}/model")
        os.chmod(f"{copy}/{name}", 0o600)
        os.seteuid(65534)
        try:
            with pytest.raises(PermissionError, match=f"{name} cannot be read: Permission denied"):
                checkpoint.read(copy)
        finally:
            os.seteuid(0)
