"""`convert` changes the format of a model and nothing else."""

import json
import os
import re
import subprocess
import sys

import jax
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

import jspec
from jspec import cli
from jspec.checkpoint.export import write_folder
from jspec.cli import convert as module
from jspec.models import llama
from jspec.models.config import ModelConfig
from jspec.models.rope import RopeConfig
from tests.conftest import GOLDEN
from tests.support.marks import slow_ones
from tests.support.text_models import with_tokenizer

pytestmark = pytest.mark.usefixtures("own_cache")

MODELS = GOLDEN / "models"
TARGETS = [
    *("target_llama", "target_llama_rope3", "target_qwen2_bias", "target_qwen3"),
    *("target_qwen3_tied", "draft_llama_small", "mimo_mtp"),
]


def convert(*words):
    return cli.main(["convert", *map(str, words)])


def tensors(folder):
    (file,) = folder.glob("*.safetensors")
    return safetensors.numpy.load_file(file)


def same(a, b):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    return all(
        x.dtype == y.dtype and np.array_equal(x, y)
        for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    )


@pytest.mark.parametrize("name", slow_ones(TARGETS, lambda name: name != "target_qwen3"))
def test_a_recorded_model_goes_to_orbax_and_back_bit_by_bit(name, tmp_path, capfd):
    assert convert(MODELS / name, tmp_path / "saved") == 0, capfd.readouterr().err
    assert convert(tmp_path / "saved", tmp_path / "again") == 0, capfd.readouterr().err
    before, after = tensors(MODELS / name), tensors(tmp_path / "again")
    ours = {key for key in before if "mtp_layers" not in key}
    if ModelConfig.from_hf(MODELS / name).tie_embeddings:
        ours.discard("lm_head.weight")
    assert after.keys() == ours
    for key in ours:
        assert after[key].dtype == before[key].dtype
        np.testing.assert_array_equal(after[key], before[key], err_msg=key)
    model, again = jspec.load(MODELS / name, "float32"), jspec.load(tmp_path / "again", "float32")
    assert again.config == model.config and again.stop_ids == model.stop_ids
    assert same(again.params, model.params)


def test_texts_and_dtype_come_along(tmp_path, capfd):
    source = with_tokenizer(tmp_path / "source", "draft_llama_small")
    (source / "chat_template.jinja").write_text("<|im_start|>")
    (source / "tokenizer_config.json").write_text('{"bos_token": "a", "eos_token": "é"}')
    assert convert(source, tmp_path / "saved", "--dtype", "bfloat16") == 0
    assert convert(tmp_path / "saved", tmp_path / "again") == 0, capfd.readouterr().err
    model, again = jspec.load(source), jspec.load(tmp_path / "again")
    assert again[2:] == model[2:]
    assert again.tokenizer_json is not None and again.chat_template == "<|im_start|>"
    assert json.loads((tmp_path / "again" / "config.json").read_text())["torch_dtype"] == "bfloat16"
    assert all(x.dtype == ml_dtypes.bfloat16 for x in tensors(tmp_path / "again").values())
    assert again.tokenizer_config == {"bos_token": "a", "eos_token": "é"}
    assert same(again.params, model.params)


def test_several_chat_templates_come_along(tmp_path):
    source = with_tokenizer(tmp_path / "source", "draft_llama_small")
    (source / "additional_chat_templates").mkdir()
    (source / "additional_chat_templates" / "short.jinja").write_text("s")
    assert convert(source, tmp_path / "saved") == 0
    assert convert(tmp_path / "saved", tmp_path / "again") == 0
    again = jspec.load(tmp_path / "again")
    assert again.chat_template == jspec.load(source).chat_template
    assert set(again.chat_template) == {"default", "short"}


def test_a_recorded_head_goes_to_orbax_without_what_its_target_has(tmp_path, capfd):
    target = MODELS / "target_llama"
    assert convert(MODELS / "eagle1_llama", tmp_path / "head", "--target", target) == 0
    assert "a drafter of method eagle" in capfd.readouterr().out
    model = jspec.load(target, "bfloat16")  # as both are stored
    wanted = jspec.load(MODELS / "eagle1_llama", target=model)
    restored = jspec.restore(tmp_path / "head", model)
    assert restored.config == wanted.config and same(restored.params, wanted.params)
    assert restored.params["embed"] is model.params["embed"]


HEADS = [
    ("eagle1_llama", "target_llama"),
    ("eagle1_llama_fcbias", "target_llama"),
    ("eagle3_llama", "target_llama"),
    ("eagle3_llama_aux", "target_llama"),
    ("eagle3_llama_fullvocab", "target_llama"),
    ("eagle3_llama_v31", "target_llama"),
    ("medusa_llama", "target_llama"),
    ("medusa_llama_vllm", "target_llama"),
    ("medusa_llama_vllm_trunc", "target_llama"),
    ("dflash_qwen3", "target_qwen3"),
    ("dflash2_qwen3", "target_qwen3"),
    ("mimo_mtp", "mimo_mtp"),
    ("draft_llama_small", "target_llama"),
]


@pytest.mark.parametrize("head,of", slow_ones(HEADS, lambda head, _: head != "eagle3_llama"))
def test_a_recorded_drafter_goes_to_orbax_and_back(head, of, tmp_path, capfd):
    method = "mtp" if head == "mimo_mtp" else None
    words = ["--target", MODELS / of, *(["--method", method] if method else [])]
    assert convert(MODELS / head, tmp_path / "saved", *words) == 0, capfd.readouterr().err
    assert convert(tmp_path / "saved", tmp_path / "again", *words) == 0, capfd.readouterr().err
    target = jspec.load(MODELS / of, "float32")
    wanted = jspec.load(MODELS / head, target=target, method=method)
    again = jspec.load(tmp_path / "again", target=target, method=method)
    assert again.config == wanted.config and same(again.params, wanted.params)
    before, after = tensors(MODELS / head), tensors(tmp_path / "again")
    assert after and after.keys() <= before.keys()
    for name, tensor in after.items():
        wanted = before[name]
        if "token_map" in before and len(wanted) == len(before["token_map"]):
            wanted = wanted[np.argsort(before["token_map"])]  # rows by the target's ids
        np.testing.assert_array_equal(tensor, wanted, err_msg=name)


def test_a_drafter_of_unknown_origin_is_not_written_back(tmp_path, capfd):
    target = jspec.load(MODELS / "target_llama", "float32")
    head = jspec.load(MODELS / "eagle3_llama", target=target)
    jspec.save(tmp_path / "saved", head, target=target)
    assert convert(tmp_path / "saved", tmp_path / "x", "--target", MODELS / "target_llama") == 1
    assert "where its own folder is not known" in capfd.readouterr().err


def test_orbax_is_passed_over_with_to_hf(tmp_path):
    assert convert(MODELS / "draft_llama_small", tmp_path / "again", "--to", "hf") == 0
    before, after = tensors(MODELS / "draft_llama_small"), tensors(tmp_path / "again")
    assert all(np.array_equal(before[name], after[name]) for name in before)


@pytest.mark.parametrize(
    "words,message",
    [
        (["nowhere", "new"], "source 'nowhere' does not exist"),
        ([MODELS / "target_llama", MODELS], "exists. Remove it"),
        ([MODELS / "target_llama", MODELS / "target_llama" / "config.json" / "x"], "is no folder"),
        (["nowhere", MODELS / "target_llama" / "config.json" / "x" / "y"], "cannot be made.*Write"),
        ([MODELS / "target_llama", "new", "--dtype", "int8"], "float32 or bfloat16"),
        ([MODELS / "eagle3_llama", "new"], "eagle3.*target=model"),
        ([MODELS / "eagle3_llama", "new", "--method", "eagle3"], "without --target"),
        (
            [MODELS / "peagle_llama", "new", "--to", "hf", "--target", MODELS / "target_llama"],
            "eagle3 that drafts in parallel is not written.*Keep the folder",
        ),
    ],
)
def test_an_error_is_one_line_and_leaves_nothing(words, message, tmp_path, capfd, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert convert(*words) == 1
    captured = capfd.readouterr()
    assert captured.out == "" and captured.err.count("\n") == 1
    assert re.search(message, captured.err)
    assert list(tmp_path.iterdir()) == []


def test_a_write_that_fails_leaves_nothing(tmp_path, monkeypatch):
    from jspec.checkpoint import export

    config = ModelConfig.tiny()
    params = llama.init_params(config, jax.random.key(0), "float32")

    def full(*args):
        raise OSError("no space left")

    monkeypatch.setattr(export, "_write_safetensors", full)
    with pytest.raises(OSError, match="no space"):
        write_folder(tmp_path / "new", config.to_hf(), params, llama.rules(config), {})
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("form", ["hf", "orbax"])
def test_a_full_disk_is_told_in_one_line_and_leaves_nothing(form, tmp_path):
    words = [sys.executable, "-m", "jspec", "convert", MODELS / "target_llama", tmp_path / "new"]
    ended = subprocess.run(
        ["bash", "-c", 'ulimit -f 4; exec "$@"', "-", *map(str, words), "--to", form],
        capture_output=True,
        text=True,
        env=os.environ | {"JSPEC_CACHE": os.devnull},
    )
    assert (ended.returncode, ended.stdout) == (1, "")
    lines = ended.stderr.splitlines()
    (ours,) = [line for line in lines if line.startswith("jspec: ")]
    assert re.search("new was not written .*File too large.*Free some space", ours)
    assert "Traceback" not in ended.stderr  # TensorStore may log a line of its own
    assert form == "orbax" or lines == [ours]
    assert list(tmp_path.iterdir()) == []


def test_a_drafter_whose_origin_cannot_be_written_leaves_nothing(tmp_path, capfd, monkeypatch):
    def full(*args, **kwargs):
        raise OSError("no space left")

    monkeypatch.setattr(module.json, "dumps", lambda *args, **kwargs: full())
    monkeypatch.setattr(module, "save", lambda folder, *args, **kwargs: folder.mkdir())
    words = ["--target", MODELS / "target_llama"]
    assert convert(MODELS / "eagle3_llama", tmp_path / "new", *words) == 1
    assert "no space left" in capfd.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_params_that_the_rules_do_not_cover_are_named(tmp_path):
    config = ModelConfig.tiny()
    params = llama.init_params(config, jax.random.key(0), "float32")
    with pytest.raises(ValueError, match="extra.*Take both from one model"):
        extra = params | {"extra": params["embed"]}
        write_folder(tmp_path / "new", {}, extra, llama.rules(config), {})
    del params["norm"]
    with pytest.raises(ValueError, match="norm/weight"):
        write_folder(tmp_path / "new", {}, params, llama.rules(config), {})


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"eos_token_ids": (3,), "max_positions": 99, "rms_norm_eps": 1e-5},
        {"eos_token_ids": (3, 5), "tie_embeddings": True},
        {"qkv_bias": True, "model_type": "qwen2"},
        {"qkv_bias": False, "model_type": "qwen2"},
        {"qkv_bias": True, "model_type": "mimo"},
        {"qkv_bias": True, "o_bias": True},
        {"qkv_bias": True},
        {"qk_norm": True, "model_type": "qwen3"},
        {"rope": RopeConfig(theta=5e5)},
        {"rope": RopeConfig(kind="linear", factor=4.0)},
        {
            "rope": RopeConfig(
                kind="llama3",
                factor=8.0,
                low_freq_factor=1.0,
                high_freq_factor=4.0,
                original_max_len=64,
            )
        },
        {
            "max_positions": 256,
            "rope": RopeConfig(kind="yarn", factor=4.0, original_max_len=64, truncate=False),
        },
        {"rope": RopeConfig(mrope_section=(2, 1, 1), mrope_interleaved=True)},
    ],
)
def test_a_config_is_read_back_from_its_config_json(changes):
    config = ModelConfig.tiny(**changes)
    written = json.loads(json.dumps(config.to_hf()))
    assert ModelConfig.from_hf(written) == config


def test_a_config_that_no_config_json_says_is_refused():
    with pytest.raises(ValueError, match=r"has no config\.json.*jspec\.save"):
        ModelConfig.tiny(model_type="qwen2", o_bias=True).to_hf()
