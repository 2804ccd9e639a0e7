"""`convert` brings along what tokenizer and generation are made from, and names what stops it."""

import errno
import json
import os
import re

import numpy as np
import pytest

import jspec
from jspec import checkpoint, cli
from jspec.checkpoint import stored_dtype
from jspec.checkpoint.base import Checkpoint
from jspec.checkpoint.new_folder import check_free, new_folder, remedy
from tests.checkpoint.test_gguf import HF_LAYER, D, V, write
from tests.conftest import GOLDEN
from tests.support.text_models import with_tokenizer

pytestmark = pytest.mark.usefixtures("own_cache")

TEMPLATE = "{{ bos_token }}{% for message in messages %}{{ message.content }}{% endfor %}"
ORIGINALS = {
    "tokenizer_config.json": json.dumps({"eos_token": "</s>", "chat_template": TEMPLATE}),
    "generation_config.json": '{"eos_token_id": [2, 7], "temperature": 0.6}',
    "special_tokens_map.json": '{"eos_token": "</s>"}',
    "added_tokens.json": '{"</s>": 2}',
    "vocab.json": '{"a": 97}',
    "merges.txt": "#version: 0.2\n",
}


def convert(*words):
    return cli.main(["convert", *map(str, words)])


@pytest.fixture
def source(tmp_path):
    return with_tokenizer(tmp_path / "source", "draft_llama_small")


def both_ways(source, tmp_path):
    """Writes a Hugging Face folder straight from a source and by way of a saved one."""
    assert convert(source, tmp_path / "straight", "--to", "hf") == 0
    assert convert(source, tmp_path / "saved") == 0
    assert convert(tmp_path / "saved", tmp_path / "round") == 0
    return tmp_path / "straight", tmp_path / "round"


def test_the_files_of_a_folder_are_copied_as_they_are(source, tmp_path):
    for name, text in ORIGINALS.items():
        (source / name).write_text(text)
    (source / "tokenizer.model").write_bytes(b"\x00\xff")
    (source / "chat_template.jinja").unlink()
    more = source / "additional_chat_templates" / "brief.jinja"
    more.parent.mkdir()
    more.write_text("{{ messages[0].content }}")
    names = (*ORIGINALS, "tokenizer.json", "tokenizer.model", more.relative_to(source))
    for folder in both_ways(source, tmp_path):
        for name in names:
            assert (folder / name).read_bytes() == (source / name).read_bytes()
        assert not (folder / "chat_template.jinja").exists()  # it is in tokenizer_config.json
        assert jspec.load(folder)[2:] == jspec.load(source)[2:]


def test_what_a_folder_lacks_is_written_from_the_model(source, tmp_path):
    tokenizer = json.loads((source / "tokenizer.json").read_text())
    tokenizer["model"]["vocab"] = {"<s>": 1, "</s>": 2, "a": 97}
    (source / "tokenizer.json").write_text(json.dumps(tokenizer))
    (source / "chat_template.jinja").write_text(TEMPLATE)
    for folder in both_ways(source, tmp_path):
        settings = json.loads((folder / "tokenizer_config.json").read_text())
        assert (settings["bos_token"], settings["eos_token"]) == ("<s>", "</s>")
        assert settings["tokenizer_class"] == "PreTrainedTokenizerFast"
        special = json.loads((folder / "special_tokens_map.json").read_text())
        assert special == {"bos_token": "<s>", "eos_token": "</s>"}
        generation = json.loads((folder / "generation_config.json").read_text())
        assert generation == {"eos_token_id": [2]}
        assert (folder / "chat_template.jinja").read_text() == TEMPLATE


def test_token_texts_are_found_in_a_vocabulary_of_pieces_too(source, tmp_path):
    pieces = {"type": "Unigram", "unk_id": 0, "vocab": [["<unk>", 0.0], ["<s>", 0.0], ["</s>", 0]]}
    (source / "tokenizer.json").write_text(json.dumps({"model": pieces}))
    assert convert(source, tmp_path / "new", "--to", "hf") == 0
    settings = json.loads((tmp_path / "new" / "tokenizer_config.json").read_text())
    assert (settings["bos_token"], settings["eos_token"]) == ("<s>", "</s>")


@pytest.mark.parametrize("text", ["{", "[]", '{"model": {"vocab": 3}}', '{"added_tokens": [1]}'])
def test_a_tokenizer_that_is_none_is_named(text, source, tmp_path, capfd):
    (source / "tokenizer.json").write_text(text)
    assert convert(source, tmp_path / "new", "--to", "hf") == 1
    told = capfd.readouterr().err
    assert "tokenizer.json is no tokenizer" in told and told.count("\n") == 1


def test_a_gguf_file_becomes_a_folder_with_its_end_tokens_and_template(tmp_path, rng):
    tensors = {name: shape for name, (_, shape) in HF_LAYER.items()}
    tensors = {f"blk.0.{name}": shape for name, shape in tensors.items()}
    tensors |= {"token_embd.weight": (V, D), "output_norm.weight": (D,)}
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": ["<|endoftext|>", "a", "<|im_end|>", "<s>", "b"],
        "tokenizer.ggml.token_type": [3, 1, 3, 3, 1],
        "tokenizer.ggml.merges": ["a b"],
        "tokenizer.ggml.bos_token_id": 3,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.chat_template": TEMPLATE,
    }
    drawn = {name: rng.standard_normal(shape, np.float32) for name, shape in tensors.items()}
    file = write(tmp_path / "model.gguf", drawn, metadata)
    for folder in both_ways(file, tmp_path):
        settings = json.loads((folder / "tokenizer_config.json").read_text())
        assert (settings["bos_token"], settings["eos_token"]) == ("<s>", "<|im_end|>")
        assert settings["model_max_length"] == 256
        generation = json.loads((folder / "generation_config.json").read_text())
        assert set(generation["eos_token_id"]) == {0, 2}
        assert (folder / "chat_template.jinja").read_text() == TEMPLATE
        assert json.loads((folder / "config.json").read_text())["torch_dtype"] == "float32"


def test_the_dtype_of_a_folder_is_that_of_most_numbers():
    def folder(**tensors):
        return Checkpoint({}, tuple(tensors), lambda: iter(tensors.items()), None, None, ())

    half, single = np.zeros(5, np.float16), np.zeros(4, np.float32)
    assert stored_dtype(folder(a=half, b=single)) == "float16"
    assert stored_dtype(folder(a=half, b=single, c=single)) == "float32"
    assert stored_dtype(folder(a=np.zeros(9, np.int64), b=half)) == "float16"
    assert stored_dtype(folder(a=np.zeros(9))) == stored_dtype(folder()) == "float32"


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_folder_keeps_its_dtype(dtype, source, tmp_path):
    assert convert(source, tmp_path / "low", "--to", "hf", "--dtype", dtype) == 0
    for folder in both_ways(tmp_path / "low", tmp_path):
        config = json.loads((folder / "config.json").read_text())
        assert config["torch_dtype"] == dtype
        content = (tmp_path / "low" / "model.safetensors").read_bytes()
        assert (folder / "model.safetensors").read_bytes() == content


@pytest.mark.parametrize("dtype", [None, "float32"])
def test_a_drafter_keeps_its_dtype_whatever_its_targets(dtype, tmp_path):
    """A head in bfloat16, whose target was saved in float32."""
    head = GOLDEN / "models" / "eagle3_llama"
    target = tmp_path / "target"
    assert convert(GOLDEN / "models" / "target_llama", target, "--dtype", "float32") == 0
    words = ["--dtype", dtype] if dtype else []
    assert convert(head, tmp_path / "new", "--target", target, "--to", "hf", *words) == 0
    stored, new = checkpoint.read(head), checkpoint.read(tmp_path / "new")
    wanted = dtype or "bfloat16"
    assert (stored_dtype(new), new.config["torch_dtype"]) == (wanted, wanted)
    assert new.config == stored.config | {"torch_dtype": wanted}
    before = dict(stored.tensors())
    for name, tensor in new.tensors():
        assert name == "d2t" or tensor.dtype == wanted
        np.testing.assert_array_equal(tensor, before[name].astype(tensor.dtype))


# A folder that cannot be written says why.


@pytest.mark.parametrize(
    "error,match",
    [
        (OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), "No space left.*Free some space"),
        (OSError(errno.EDQUOT, os.strerror(errno.EDQUOT)), "quota exceeded.*Free some space"),
        (OSError("RESOURCE_EXHAUSTED: No space left on device"), "Free some space"),
        (PermissionError(errno.EACCES, "Permission denied"), r"Permission denied\). Write to"),
        (OSError(errno.EROFS, os.strerror(errno.EROFS)), r"Read-only file system\). Write to"),
        (OSError(errno.EIO, os.strerror(errno.EIO)), r"output error\). Write to another"),
    ],
)
def test_a_write_that_fails_names_its_reason(error, match, tmp_path):
    with (
        pytest.raises(type(error), match=f"new was not written.*{match}"),
        new_folder(tmp_path / "new"),
    ):
        raise error
    assert list(tmp_path.iterdir()) == []
    assert ("Free" in remedy(error)) == ("Free" in match)


def test_a_folder_that_nothing_can_be_made_in_says_why(source, tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    with pytest.raises(PermissionError, match=f"{tmp_path} is not yours to write"):
        check_free(tmp_path / "new")
    monkeypatch.setattr(os, "statvfs", lambda path: type("", (), {"f_flag": os.ST_RDONLY}))
    with pytest.raises(PermissionError, match=f"{tmp_path} lies on a read-only file system"):
        check_free(tmp_path / "new")
    assert convert(source, tmp_path / "new") == 1
    told = capfd.readouterr().err
    assert re.search("read-only", told) and "space" not in told and told.count("\n") == 1


def test_a_file_in_the_way_is_named(source, tmp_path, capfd):
    (tmp_path / "file").touch()
    assert convert(source, tmp_path / "file") == 1
    assert "file exists. Remove it" in capfd.readouterr().err
    assert convert(source, tmp_path / "file" / "new") == 1
    assert "file is no folder" in capfd.readouterr().err
