"""A config.json with larger sizes than its checkpoint is refused before memory is allocated."""

import json
import tracemalloc

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import jspec
from jspec import checkpoint, cli
from tests.checkpoint.test_gguf import D, V, write
from tests.conftest import GOLDEN
from tests.proposers.test_loading import FOLDERS
from tests.support.heads import target as recorded_target

MODELS = GOLDEN / "models"
TARGETS = ("target_llama", "target_qwen3_tied")
SIZES = {
    *("num_hidden_layers", "vocab_size", "hidden_size", "intermediate_size", "head_dim"),
    *("num_attention_heads", "num_key_value_heads", "draft_vocab_size", "target_hidden_size"),
    *("num_nextn_predict_layers", "medusa_num_heads", "medusa_num_layers", "num_heads"),
    *("block_size", "truncated_vocab_size"),
}
ABSURD = 10**12


def sizes_of(name):
    config = json.loads((MODELS / name / "config.json").read_text())
    sizes = [key for key, value in config.items() if type(value) is int and key in SIZES]
    if name == "mimo_mtp":  # the modules come with a target, whose layers they do not read
        sizes.remove("num_hidden_layers")
    if FOLDERS.get(name, ("",))[0].startswith(
        "eagle"
    ):  # the tensors count, see test_config_tensors
        sizes.remove("num_hidden_layers")
    return sizes


CASES = [(name, size) for name in (*TARGETS, *FOLDERS) for size in sizes_of(name)]


def copy(name, folder, **changes):
    """Copies a recorded folder with a changed config.json."""
    folder.mkdir()
    for file in (MODELS / name).iterdir():
        (folder / file.name).symlink_to(file)
    config = json.loads((MODELS / name / "config.json").read_text()) | changes
    (folder / "config.json").unlink()
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("name,size", CASES)
def test_a_size_beyond_the_checkpoint_is_refused_without_its_memory(name, size, tmp_path):
    folder = copy(name, tmp_path / name, **{size: ABSURD})
    options = {} if name in TARGETS else {"target": recorded_target(FOLDERS[name][1])}
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match=r"(?s)\d{12}|num_heads|head_dim"):
            jspec.load(folder, dtype="float32", **options)
        assert tracemalloc.get_traced_memory()[1] < 100e6
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("words", [[], [str(MODELS / "eagle1_llama"), "--target"]])
def test_inspect_refuses_them_too(words, tmp_path, capfd):
    folder = copy("target_llama", tmp_path / "model", num_hidden_layers=ABSURD)
    assert cli.main(["inspect", *words, str(folder)]) == 1
    assert "fewer than one for each" in capfd.readouterr().err


def test_a_saved_folder_that_claims_more_layers_than_arrays_is_refused(tmp_path):
    jspec.save(tmp_path / "saved", recorded_target("target_llama"))
    file = tmp_path / "saved" / "jspec.json"
    description = json.loads(file.read_text())
    description["config"]["num_layers"] = ABSURD
    file.write_text(json.dumps(description))
    with pytest.raises(ValueError, match="fewer than one for each"):
        jspec.restore(tmp_path / "saved")


def test_a_gguf_file_that_claims_more_layers_or_heads_is_refused(tmp_path):
    tensors = {
        "token_embd.weight": np.ones((V, D), np.float32),
        "output_norm.weight": np.ones(D, np.float32),
        "blk.0.attn_k.weight": np.ones((16, D), np.float32),
    }
    path = write(tmp_path / "layers.gguf", tensors, {"llama.block_count": 2**31})
    with pytest.raises(ValueError, match="2147483648 layers.*3 tensors"):
        jspec.load(path)
    for heads in (0, 3, 2**31):
        path = write(tmp_path / f"{heads}.gguf", tensors, {"llama.attention.head_count_kv": heads})
        with pytest.raises(ValueError, match=f"16 rows, wanted pairs for each of {heads} heads"):
            list(checkpoint.read(path).tensors())


def test_a_window_of_any_size_is_taken(tmp_path):
    target = recorded_target("target_qwen3")
    folder = copy("dflash_qwen3_swa", tmp_path / "sliding", sliding_window=ABSURD)
    drafter = jspec.load(folder, target=target, dtype="float32")
    assert jspec.generate(target, [[1, 2, 3]], *drafter, max_tokens=6).num_tokens == 6


def test_drafts_that_are_asked_for_are_not_limited_by_the_config(tmp_path):
    folder = copy("dflash_qwen3", tmp_path / "head", block_size=ABSURD)
    with pytest.raises(ValueError, match="Pass num_drafts="):
        jspec.load(folder, target=recorded_target("target_qwen3"))
    drafter = jspec.load(folder, target=recorded_target("target_qwen3"), num_drafts=3)
    assert drafter.config.num_drafts == 3


@pytest.mark.parametrize(
    "name,like",
    [
        ("medusa_llama_vllm", "lm_heads.0.weight"),
        ("medusa_llama_vllm", "blocks.0.layers.0.weight"),
        ("medusa_llama_vllm", "blocks.7.layers.0.weight"),
        ("eagle1_llama", "fc.weight"),
        ("eagle3_llama", "midlayer.mlp.up_proj.weight"),
        ("dflash_qwen3", "fc.weight"),
        ("mimo_mtp", "model.mtp_layers.0.input_proj.weight"),
        ("draft_llama_small", "model.norm.weight"),
        ("draft_llama_small", "model.rotary_emb.inv_freq"),
    ],
)
def test_a_tensor_whose_name_only_begins_as_a_known_one_is_unknown(name, like, tmp_path):
    folder = copy(name, tmp_path / name)
    tensors = load_file(MODELS / name / "model.safetensors")
    (folder / "model.safetensors").unlink()
    save_file(tensors | {f"{like}x": np.ones((2, 2), np.float32)}, folder / "model.safetensors")
    with pytest.raises(ValueError, match=f"unknown: {like}x"):
        jspec.load(
            folder,
            target=recorded_target(FOLDERS[name][1]),
            method=FOLDERS[name][0],
            dtype="float32",
        )


def test_heads_and_blocks_are_counted_not_read_off_their_numbers(tmp_path):
    name = "medusa_llama_vllm"
    folder = copy(name, tmp_path / name)
    tensors = load_file(MODELS / name / "model.safetensors")
    (folder / "model.safetensors").unlink()
    far = {f"blocks.{ABSURD}.layers.0.weight": tensors["blocks.0.layers.0.weight"]}
    save_file(tensors | far, folder / "model.safetensors")
    with pytest.warns(UserWarning, match="num_heads 3, and the checkpoint has 4 heads"):
        drafter = jspec.load(folder, target=recorded_target(FOLDERS[name][1]), dtype="float32")
    assert drafter.config.num_drafts == FOLDERS[name][2]
