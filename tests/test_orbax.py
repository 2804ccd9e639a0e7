"""Saved folders: what is restored, what is shared, and what is refused."""

import dataclasses
import json
import shutil
import subprocess
import sys

import jax
import numpy as np
import pytest

import jspec
from jspec import proposers, saving
from jspec.checkpoint import Model, orbax
from jspec.models import llama
from jspec.models.config import ModelConfig
from jspec.models.rope import RopeConfig
from jspec.proposers.base import Drafter
from jspec.proposers.draft_model import DraftModelConfig
from tests.conftest import GOLDEN
from tests.proposers.test_loading import FOLDERS
from tests.support.heads import target as recorded_target
from tests.support.marks import slow_ones

MODEL = ModelConfig.tiny()
HEADS = [p.name for p in proposers.REGISTRY.values() if p.init_params is not None]


@pytest.fixture
def target():
    params = llama.init_params(MODEL, jax.random.key(0), "float32")
    return Model(MODEL, params, '{"model": "ä"}', None, (2, 5))


@pytest.fixture
def drafter(target):
    """A drafter of the target's shape that shares its embedding and head."""
    params = llama.init_params(MODEL, jax.random.key(1), "float32")
    shared = {name: target.params[name] for name in ("embed", "head")}
    return Drafter(DraftModelConfig(num_drafts=2, model=MODEL), params | shared)


def assert_same(got, wanted):
    jax.tree.map(np.testing.assert_array_equal, got, wanted)
    assert jax.tree.map(lambda leaf: leaf.dtype, got) == jax.tree.map(lambda a: a.dtype, wanted)


def edit(folder, change):
    """Rewrites jspec.json."""
    file = folder / "jspec.json"
    description = json.loads(file.read_text())
    change(description)
    file.write_text(json.dumps(description))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_recorded_model_comes_back_whole(tmp_path, dtype):
    model = jspec.load(GOLDEN / "models" / "target_qwen3_tied", dtype)
    jspec.save(tmp_path / "saved", model)
    restored = jspec.restore(tmp_path / "saved")
    assert isinstance(restored, Model)
    assert restored._replace(params=None) == model._replace(params=None)
    assert_same(restored.params, model.params)


def test_the_rest_of_a_model_comes_back_too(tmp_path, target):
    jspec.save(tmp_path / "new" / "saved", target)
    restored = jspec.restore(tmp_path / "new" / "saved")
    assert restored._replace(params=None) == target._replace(params=None)


@pytest.mark.parametrize("method", HEADS)
def test_every_drafter_comes_back_under_the_contract_of_its_config(tmp_path, method):
    proposer = proposers.find(method)
    config = proposer.Config.tiny()
    params = proposer.init_params(config, jax.random.key(0), "bfloat16")
    jspec.save(tmp_path / "saved", Drafter(config, params))
    restored = jspec.restore(tmp_path / "saved")
    assert restored.config == config
    if params is None:
        assert restored.params is None
    else:
        assert_same(restored.params, params)


@pytest.mark.parametrize("name", slow_ones(FOLDERS, lambda name: name != "eagle3_llama"))
def test_every_recorded_drafter_comes_back_beside_its_target(tmp_path, name):
    model = recorded_target(FOLDERS[name][1])
    drafter = jspec.load(GOLDEN / "models" / name, target=model)
    jspec.save(tmp_path / "saved", drafter, target=model)
    restored = jspec.restore(tmp_path / "saved", model)
    assert restored.config == drafter.config
    assert_same(restored.params, drafter.params)
    of_target = {id(leaf) for leaf in jax.tree.leaves(model.params)}

    def shared(params):
        return jax.tree.map(lambda leaf: id(leaf) in of_target, params)

    assert shared(restored.params) == shared(drafter.params)


def test_a_drafter_without_weights_is_its_config(tmp_path):
    config = jspec.NgramConfig(num_drafts=3)
    jspec.save(tmp_path / "saved", Drafter(config, None))
    assert jspec.restore(tmp_path / "saved") == Drafter(config, None)


def test_shared_arrays_are_named_and_not_written(tmp_path, target, drafter):
    jspec.save(tmp_path / "saved", drafter, target=target)
    stored = orbax.read_shapes(tmp_path / "saved" / "params")
    assert not {"embed", "head"} & stored.keys() and "layers" in stored
    restored = jspec.restore(tmp_path / "saved", target)
    assert restored.params["embed"] is target.params["embed"]
    assert restored.params["head"] is target.params["head"]
    assert_same(restored.params, drafter.params)


def test_without_a_target_the_folder_stands_alone(tmp_path, drafter):
    jspec.save(tmp_path / "saved", drafter)
    assert_same(jspec.restore(tmp_path / "saved").params, drafter.params)


def test_shared_arrays_want_their_target(tmp_path, target, drafter):
    jspec.save(tmp_path / "saved", drafter, target=target)
    with pytest.raises(ValueError, match="without embed, head.*pass target=model"):
        jspec.restore(tmp_path / "saved")
    tied = target._replace(params={k: v for k, v in target.params.items() if k != "head"})
    with pytest.raises(ValueError, match="shares head .*saved with"):
        jspec.restore(tmp_path / "saved", tied)
    wide = ModelConfig.tiny(vocab_size=80)
    other = Model(wide, llama.init_params(wide, jax.random.key(0), "float32"), None, None, ())
    with pytest.raises(ValueError, match=r"wrong shape: embed \[80, 32\], wanted \[64, 32\]"):
        jspec.restore(tmp_path / "saved", other)


def test_missing_and_unknown_arrays_are_listed_together(tmp_path, target):
    jspec.save(tmp_path / "saved", target)
    edit(tmp_path / "saved", lambda d: d["config"].update(num_layers=3, qkv_bias=True))
    with pytest.raises(ValueError) as error:
        jspec.restore(tmp_path / "saved")
    message = str(error.value)
    assert "missing: layers/2/mlp/down [48, 32]" in message
    assert "missing: layers/0/attention/qkv_bias [64]" in message
    edit(tmp_path / "saved", lambda d: d["config"].update(num_layers=1, qkv_bias=False))
    with pytest.raises(ValueError, match=r"unknown: layers/1/mlp/down \[48, 32\]"):
        jspec.restore(tmp_path / "saved")
    edit(tmp_path / "saved", lambda d: d["config"].update(num_layers=2, intermediate_size=40))
    with pytest.raises(
        ValueError, match=r"wrong shape: layers/0/mlp/down \[48, 32\], wanted \[40, 32\]"
    ):
        jspec.restore(tmp_path / "saved")


def test_nothing_is_overwritten(tmp_path, target):
    with pytest.raises(FileExistsError, match="Remove it, or write to another path"):
        jspec.save(tmp_path, target)


@pytest.mark.parametrize("wrong", [None, {"embed": 1}, ModelConfig.tiny()])
def test_only_models_and_drafters_are_saved(tmp_path, wrong):
    with pytest.raises(TypeError, match="wanted a Model or a Drafter"):
        jspec.save(tmp_path / "saved", wrong)
    with pytest.raises(TypeError, match="wanted one of"):
        jspec.save(tmp_path / "saved", Drafter(wrong, {}))
    assert not list(tmp_path.iterdir())


def test_arrays_that_are_gone_are_named_before_anything_is_written(tmp_path, target):
    gone = jax.numpy.zeros(3)
    gone.delete()
    with pytest.raises(ValueError, match="embed of `saved` was deleted.*Load it again"):
        jspec.save(tmp_path / "saved", target._replace(params=target.params | {"embed": gone}))
    assert not list(tmp_path.iterdir())


def test_a_save_that_fails_does_not_restore_and_can_be_repeated(tmp_path, target, monkeypatch):
    def full(*arguments):
        raise OSError("No space left on device")

    with monkeypatch.context() as patch, pytest.raises(OSError, match="No space"):
        patch.setattr("pathlib.Path.write_text", full)
        jspec.save(tmp_path / "saved", target)
    assert not list(tmp_path.iterdir())
    with pytest.raises(FileNotFoundError, match="Pass a saved folder"):
        jspec.restore(tmp_path / "saved")
    jspec.save(tmp_path / "saved", target)
    assert_same(jspec.restore(tmp_path / "saved").params, target.params)


def test_a_save_that_is_killed_does_not_restore_and_can_be_repeated(tmp_path):
    script = (
        "import os, sys, jspec\n"
        "model = jspec.load(sys.argv[1], 'float32')\n"
        "if sys.argv[3] == 'kill':\n"
        "    os.rename = lambda *paths: os._exit(9)\n"  # of the last step; Orbax uses another call
        "jspec.save(sys.argv[2], model)\n"
    )
    model = GOLDEN / "models" / "draft_llama_small"
    command = [sys.executable, "-c", script, str(model), str(tmp_path / "saved")]
    assert subprocess.run([*command, "kill"]).returncode == 9
    assert list(tmp_path.iterdir()) == [tmp_path / ".saved.partial"]
    with pytest.raises(FileNotFoundError, match="Pass a saved folder"):
        jspec.restore(tmp_path / "saved")
    assert subprocess.run([*command, "go on"]).returncode == 0
    assert list(tmp_path.iterdir()) == [tmp_path / "saved"]
    assert_same(jspec.restore(tmp_path / "saved").params, jspec.load(model, "float32").params)


def test_a_checkpoint_of_eight_devices_restores_on_one(tmp_path):
    script = (
        "import os, sys\n"
        "os.environ['XLA_FLAGS'] = '--xla_force_host_platform_device_count=8'\n"
        "import jax, jspec\n"
        "from jax.sharding import NamedSharding, PartitionSpec as P\n"
        "mesh = jax.make_mesh((8,), ('x',))\n"
        "def shard(leaf):\n"
        "    axis = next((i for i, n in enumerate(leaf.shape) if n % 8 == 0), None)\n"
        "    spec = P() if axis is None else P(*[None] * axis, 'x')\n"
        "    return jax.device_put(leaf, NamedSharding(mesh, spec))\n"
        "model = jspec.load(sys.argv[1], 'float32')\n"
        "params = jax.tree.map(shard, model.params)\n"
        "assert len(params['embed'].addressable_shards[7].data) == len(params['embed']) // 8\n"
        "jspec.save(sys.argv[2], model._replace(params=params))\n"
    )
    model = GOLDEN / "models" / "draft_llama_small"
    command = [sys.executable, "-c", script, str(model), str(tmp_path / "saved")]
    subprocess.run(command, check=True)
    restored = jspec.restore(tmp_path / "saved")
    for leaf in jax.tree.leaves(restored.params):
        assert leaf.devices() == {jax.devices()[0]}
    assert_same(restored.params, jspec.load(model, "float32").params)


def test_what_is_no_saved_folder_says_so(tmp_path, target):
    with pytest.raises(FileNotFoundError, match="goes to jspec.load"):
        jspec.restore(GOLDEN / "models" / "draft_llama_small")
    jspec.save(tmp_path / "saved", target)
    with pytest.raises(ValueError, match="Read it with jspec.restore"):
        jspec.load(tmp_path / "saved")
    edit(tmp_path / "saved", lambda d: d.update(format=99))
    with pytest.raises(ValueError, match="format 99, wanted 1"):
        jspec.restore(tmp_path / "saved")
    edit(tmp_path / "saved", lambda d: d.update(format=1))
    shutil.rmtree(tmp_path / "saved" / "params")
    with pytest.raises(ValueError, match=r"missing: embed \[64, 32\]"):
        jspec.restore(tmp_path / "saved")


@pytest.mark.parametrize("method", proposers.REGISTRY)
def test_a_config_survives_json(method):
    config = proposers.find(method).Config.tiny()
    text = json.dumps(saving.config_to_json(config))
    assert saving.config_from_json(json.loads(text)) == config


def test_nested_configs_tuples_and_absent_values_survive_json():
    rope = RopeConfig(
        kind="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_len=32
    )
    model = ModelConfig.tiny(rope=rope, eos_token_ids=(2, 7))
    config = DraftModelConfig(num_drafts=4, model=model)
    text = json.dumps(saving.config_to_json(config))
    restored = saving.config_from_json(json.loads(text))
    assert restored == config and hash(restored) == hash(config)
    assert type(restored.model.eos_token_ids) is tuple


@pytest.mark.parametrize(
    "change, match",
    [
        ({"class": "NoConfig"}, "'NoConfig' is unknown, wanted one of .*NgramConfig"),
        ({"class": "Path"}, "'Path' is unknown"),
        ({"colour": 3}, "NgramConfig does not take these fields.*colour"),
        ({"num_drafts": 0}, "num_drafts"),
    ],
)
def test_a_config_of_another_version_is_refused(change, match):
    value = saving.config_to_json(jspec.NgramConfig(num_drafts=3)) | change
    with pytest.raises(ValueError, match=match):
        saving.config_from_json(value)


def test_a_config_holds_no_arrays():
    @dataclasses.dataclass(frozen=True)
    class Config:
        table: np.ndarray

    with pytest.raises(TypeError, match="Keep arrays in params"):
        saving.config_to_json(Config(np.zeros(2)))
