"""What the files of a model say about its text: templates, special tokens, and where it ends."""

import json

import pytest

from jspec.text import gguf_text_files, read_text_files
from jspec.text.files import special_tokens

VOCAB = {"<s>": 1, "</s>": 2, "a": 5}
TOKENIZER = {
    "added_tokens": [{"id": 7, "content": "<end>"}],
    "model": {"type": "BPE", "vocab": VOCAB, "merges": []},
}


def read(folder, config=(), **files):
    """Writes files (`__` is a dot, `_in_` a folder) and reads them."""
    for name, content in files.items():
        file = folder / name.replace("_in_", "/").replace("__", ".")
        file.parent.mkdir(exist_ok=True)
        file.write_text(content if isinstance(content, str) else json.dumps(content), "utf-8")
    return read_text_files(folder, dict(config))


NAMED = [{"name": "default", "template": "d"}, {"name": "tools", "template": "t"}]


@pytest.mark.parametrize(
    "files,wanted",
    [
        ({}, None),
        ({"tokenizer_config__json": {}}, None),
        ({"tokenizer_config__json": {"chat_template": "c"}}, "c"),
        ({"tokenizer_config__json": {"chat_template": NAMED}}, {"default": "d", "tools": "t"}),
        ({"tokenizer_config__json": {"chat_template": NAMED[:1]}}, "d"),
        ({"tokenizer_config__json": {"chat_template": NAMED[1:]}}, {"tools": "t"}),
        ({"chat_template__json": {"chat_template": "p"}}, "p"),
        (
            {
                "chat_template__json": {"chat_template": "p"},
                "tokenizer_config__json": {"chat_template": "c"},
            },
            "c",
        ),
        ({"chat_template__jinja": "j", "tokenizer_config__json": {"chat_template": NAMED}}, "j"),
        (
            {"chat_template__jinja": "j", "additional_chat_templates_in_x__jinja": "x"},
            {"default": "j", "x": "x"},
        ),
        (
            {
                "additional_chat_templates_in_x__jinja": "x",
                "tokenizer_config__json": {"chat_template": "c"},
            },
            {"x": "x"},
        ),
    ],
)
def test_the_template_is_found_where_transformers_finds_it(files, wanted, tmp_path):
    assert read(tmp_path, **files).chat_template == wanted


@pytest.mark.parametrize("template", [3, [], ["a"], [{"name": "a"}], [{"template": "a"}]])
def test_another_value_is_no_template(template, tmp_path):
    with pytest.raises(ValueError, match="tokenizer_config.json: chat_template is .*wanted a text"):
        read(tmp_path, tokenizer_config__json={"chat_template": template})


@pytest.mark.parametrize(
    "config,files,wanted",
    [
        ({}, {}, ()),
        ({"eos_token_id": 3}, {}, (3,)),
        ({"eos_token_id": [9, 3]}, {}, (3, 9)),
        ({"eos_token_id": 3}, {"generation_config__json": {"eos_token_id": [28, 0]}}, (0, 28)),
        ({"eos_token_id": 3}, {"generation_config__json": {"eos_token_id": 0}}, (0,)),
        ({"eos_token_id": 3}, {"generation_config__json": {"eos_token_id": None}}, (3,)),
        ({"eos_token_id": 3}, {"tokenizer_config__json": {"eos_token": "<end>"}}, (3, 7)),
        ({}, {"tokenizer_config__json": {"eos_token": {"content": "</s>"}}}, (2,)),
        ({}, {"special_tokens_map__json": {"eos_token": "</s>"}}, (2,)),
        ({}, {"tokenizer_config__json": {"tokenizer_class": "LlamaTokenizerFast"}}, (2,)),
        ({}, {"tokenizer_config__json": {"eos_token": "<missing>"}}, ()),
        (
            {},
            {
                "tokenizer_config__json": {
                    "eos_token": "<new>",
                    "added_tokens_decoder": {"11": {"content": "<new>", "special": True}},
                }
            },
            (11,),
        ),
        (
            {},
            {
                "generation_config__json": {"eos_token_id": 4},
                "tokenizer_config__json": {"eos_token": "</s>"},
            },
            (4,),
        ),
    ],
)
def test_a_text_ends_where_the_files_say(config, files, wanted, tmp_path):
    files = {"tokenizer__json": TOKENIZER} | files
    assert read(tmp_path, config, **files).stop_ids == wanted


@pytest.mark.parametrize("eos", [-1, "2", True, [1, None]])
def test_an_end_token_that_is_no_id_names_its_file(eos, tmp_path):
    with pytest.raises(ValueError, match="generation_config.json: `eos_token_id`"):
        read(tmp_path, generation_config__json={"eos_token_id": eos})
    (tmp_path / "generation_config.json").unlink()
    with pytest.raises(ValueError, match="^config.json: `eos_token_id`"):
        read(tmp_path, {"eos_token_id": eos})


def test_an_end_token_of_a_damaged_tokenizer_is_not_missed_in_silence(tmp_path):
    files = {"tokenizer__json": "{", "tokenizer_config__json": {"eos_token": "</s>"}}
    with pytest.raises(ValueError, match="tokenizer.json cannot be read"):
        read(tmp_path, **files)


def test_special_tokens_are_read_with_and_without_options():
    config = {
        "tokenizer_class": "LlamaTokenizer",
        "bos_token": {"__type": "AddedToken", "content": "<b>"},
        "pad_token": None,
        "unk_token": None,
        "add_bos_token": True,
        "extra_special_tokens": {"image_token": "<i>"},
    }
    wanted = {"bos_token": "<b>", "eos_token": "</s>", "image_token": "<i>"}
    assert special_tokens(config) == wanted
    assert special_tokens(None) == {}


def test_a_gguf_file_and_a_folder_of_one_model_agree(tmp_path):
    tokens = ["<unk>", "<s>", "</s>", "a", "b", "<end>", "ab"]
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.merges": ["a b"],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.eom_token_id": 5,
        "tokenizer.chat_template": "{{ bos_token }}d",
        "tokenizer.chat_templates": ["tool_use"],
        "tokenizer.chat_template.tool_use": "t",
    }
    gguf = gguf_text_files(metadata)
    assert gguf.chat_template == {"default": "{{ bos_token }}d", "tool_use": "t"}
    assert special_tokens(gguf.tokenizer_config) == {"bos_token": "<s>", "eos_token": "</s>"}
    names = {"eos_token": "</s>", "bos_token": "<s>"}
    folder = read(
        tmp_path,
        {"eos_token_id": 5},
        tokenizer__json=gguf.tokenizer_json,
        tokenizer_config__json=names,
    )
    assert gguf.stop_ids == folder.stop_ids == (2, 5)
