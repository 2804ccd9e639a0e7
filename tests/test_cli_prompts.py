"""Prompts of the command line: texts, files, JSON lines, and what is no prompt."""

import argparse
import io
import json
import re

import pytest

from jspec import cli
from jspec.checkpoint.tokenizer import Tokenizer
from jspec.cli import prompts
from tests.text_models import character_tokenizer

CHAT = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}]


@pytest.fixture(autouse=True)
def own_cache(monkeypatch, tmp_path_factory):
    monkeypatch.setenv("JSPEC_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))
    monkeypatch.setattr(cli, "_keep_compiled", lambda folder: None)  # the tests have a cache


def read(*files, texts=None):
    return prompts.read(argparse.Namespace(prompt=texts, prompt_file=list(map(str, files))))


def test_texts_come_first_and_then_the_files_in_their_order(tmp_path):
    (tmp_path / "one.txt").write_text("def add(a, b):\n    return\n")
    lines = [{"prompt": "two", "id": 7}, {"messages": CHAT}]
    (tmp_path / "more.jsonl").write_text("\n\n".join(map(json.dumps, lines)) + "\n")
    found = read(tmp_path / "one.txt", tmp_path / "more.jsonl", texts=["zero"])
    assert found == ["zero", "def add(a, b):\n    return", "two", CHAT]


def test_a_byte_order_mark_and_carriage_returns_are_no_part_of_a_prompt(tmp_path, monkeypatch):
    (tmp_path / "one.txt").write_bytes(b"\xef\xbb\xbftext\r\n")
    (tmp_path / "two.jsonl").write_bytes(b'\xef\xbb\xbf{"prompt": "a"}\r\n{"prompt": "b"}\r\n')
    monkeypatch.setattr("sys.stdin", io.StringIO("\ufeffpiped\n"))
    assert read(tmp_path / "one.txt", tmp_path / "two.jsonl", "-") == ["text", "a", "b", "piped"]


def test_half_a_surrogate_pair_is_named(tmp_path):
    (tmp_path / "p.jsonl").write_text('{"prompt": "fine"}\n{"prompt": "a\\ud800"}\n')
    with pytest.raises(ValueError, match="line 2 has .* at character 1.*both halves"):
        read(tmp_path / "p.jsonl")
    chat = {"messages": [{"role": "user", "content": "\ud800"}]}
    (tmp_path / "p.jsonl").write_text(json.dumps(chat))
    with pytest.raises(ValueError, match="line 1 has"):
        read(tmp_path / "p.jsonl")
    with pytest.raises(ValueError, match="--prompt has .* at character 0.*Write it as UTF-8"):
        read(texts=["\udcff"])  # as Python reads bytes of an argument that are no UTF-8


def test_a_dash_is_standard_input(monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("from a pipe\n"))
    assert read("-") == ["from a pipe"]


@pytest.mark.parametrize(
    "line,match",
    [
        ("{", "line 2 is not JSON.*one object a line"),
        ("[1]", "line 2 is .*Correct the line"),
        ('{"text": "a"}', 'line 2 is .*wanted {"prompt"'),
        ('{"prompt": 3}', "line 2"),
        ('{"messages": []}', "line 2"),
        ('{"messages": [{"role": "user"}]}', "line 2"),
        ('{"messages": [{"role": "user", "content": [1]}]}', "line 2"),
    ],
)
def test_a_line_that_is_no_prompt_is_named(line, match, tmp_path):
    (tmp_path / "p.jsonl").write_text('{"prompt": "fine"}\n' + line)
    with pytest.raises(ValueError, match=match):
        read(tmp_path / "p.jsonl")


def test_files_that_cannot_be_prompts_are_named(tmp_path):
    (tmp_path / "empty.jsonl").write_text("\n")
    (tmp_path / "bytes.txt").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match="holds no prompt"):
        read(tmp_path / "empty.jsonl")
    with pytest.raises(ValueError, match="Save it as UTF-8"):
        read(tmp_path / "bytes.txt")
    with pytest.raises(ValueError, match="nowhere is no file"):
        read("nowhere")
    with pytest.raises(ValueError, match="--prompt-file FILE"):
        read()


def test_text_is_put_in_the_chat_form_unless_it_is_raw():
    template = "{{'<|im_start|>'}}"
    tokenizer = Tokenizer.from_json(character_tokenizer().to_str(), template)
    text = "<|im_start|>system\nbe brief<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n"
    asked, chat, raw = (
        prompts.encode(tokenizer, ["hi"], raw=False),
        prompts.encode(tokenizer, [CHAT], raw=False),
        prompts.encode(tokenizer, ["hi"], raw=True),
    )
    assert raw == [[104, 105]]
    assert tokenizer.decode(chat[0]) == text + "<|im_start|>assistant\n"
    assert tokenizer.decode(asked[0]).endswith("<|im_start|>assistant\n")
    with pytest.raises(ValueError, match="Leave out --raw"):
        prompts.encode(tokenizer, ["hi", CHAT], raw=True)


@pytest.mark.parametrize(
    "words,match",
    [
        (["--top-k", "3"], "--top-k has no effect without --temperature"),
        (["--verification", "block"], "--verification has no effect without --temperature"),
        (["--temperature", "-1"], "temperature.*0 is greedy"),
        (["--temperature", "1", "--top-p", "0"], "top_p.*keeps every token"),
        (["--temperature", "1", "--min-p", "2"], "min_p"),
        (["--batch-size", "0"], "--batch-size"),
        (["--draft-sampling", "greedy", "--temperature", "1"], "no effect without --drafter"),
        (["--method", "none", "--adaptive"], "--adaptive has no effect with --method none"),
        (["--method", "none", "--no-adaptive"], "--no-adaptive has no effect with --method none"),
        (["--prompt-file", "nowhere"], "nowhere is no file"),
    ],
)
def test_options_are_checked_before_a_model_is_looked_for(words, match, capfd):
    assert cli.main(["generate", "--model", "nowhere", "--prompt", "a", *words]) == 1
    error = capfd.readouterr().err
    assert error.count("\n") == 1
    assert re.search(match, error)
