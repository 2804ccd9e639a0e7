"""Prompts of the command line: texts, files, JSON lines, and what is no prompt."""

import argparse
import io
import json
import re

import pytest
import tokenizers

from jspec import cli
from jspec.checkpoint import Model
from jspec.cli import models, prompts
from jspec.text import Tokenizer
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
        ('{"messages": [{"role": "user", "content": "a"}], "tools": [{}]}', "line 2 has 'tools'"),
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


TEMPLATE = "{{ bos_token }}{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"


def tokenizer_with_bos(template=None):
    """Characters, and BOS before every text."""
    inner = character_tokenizer()
    inner.add_special_tokens(["\x01"])
    inner.post_processor = tokenizers.processors.TemplateProcessing(
        single="\x01 $A", special_tokens=[("\x01", 1)]
    )
    return Tokenizer.from_json(inner.to_str(), template, {"bos_token": "\x01"})


def test_text_is_put_in_the_chat_form_unless_it_is_raw():
    tokenizer = tokenizer_with_bos(TEMPLATE)
    asked = prompts.encode(tokenizer, ["hi", CHAT], raw=False)
    assert [ids[0] for ids in asked] == [1, 1]  # once, by the template
    texts = [tokenizer.decode(ids) for ids in asked]
    assert texts == ["[user]hi", "[system]be brief[user]hi"]
    assert prompts.encode(tokenizer, ["hi", ""], raw=True) == [[1, 104, 105], [1]]
    bare = prompts.encode(tokenizer, ["hi"], raw=True, special_tokens=False)
    assert bare == [[104, 105]]
    with pytest.raises(ValueError, match="Leave out --raw"):
        prompts.encode(tokenizer, ["hi", CHAT], raw=True)


def test_a_model_without_a_template_continues_texts_and_says_so(capfd):
    tokenizer = tokenizer_with_bos()
    lone = [{"role": "user", "content": "hi"}]
    assert prompts.encode(tokenizer, ["hi", lone], raw=False) == [[1, 104, 105]] * 2
    assert re.search("no chat template.*as with --raw", capfd.readouterr().err)
    with pytest.raises(ValueError, match=r"prompts\[0\].*messages have no form.*--chat-template"):
        prompts.encode(tokenizer, [CHAT, lone], raw=False)


def test_a_prompt_that_a_template_refuses_is_numbered():
    tokenizer = tokenizer_with_bos("{{ raise_exception('no system') if messages[1] else '' }}")
    with pytest.raises(ValueError, match=r"prompts\[1\]: .*no system"):
        prompts.encode(tokenizer, ["hi", CHAT], raw=False)


def test_a_template_is_chosen_by_name_or_read_from_a_file(tmp_path):
    json_text = character_tokenizer().to_str()
    named = {"one": "1", "two": "{{ eos_token }}2"}
    model = Model(None, None, json_text, named, (), {"eos_token": "e"})  # pyright: ignore
    (tmp_path / "own.jinja").write_text("own")

    def said(template):
        tokenizer = models.open_tokenizer(model, template)
        return tokenizer.decode(tokenizer.chat("hi"), keep_special=True)

    assert [said("two"), said(str(tmp_path / "own.jinja"))] == ["e2", "own"]
    with pytest.raises(ValueError, match="no chat template 'three', only 'one', 'two'.*NAME"):
        said("three")
    with pytest.raises(ValueError, match="no chat template 'default', only 'one', 'two'.*NAME"):
        said(None)
    (tmp_path / "own.jinja").write_bytes(b"\xff")
    with pytest.raises(ValueError, match="own.jinja is no text"):
        said(str(tmp_path / "own.jinja"))


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
        (["--no-special-tokens"], "--no-special-tokens has no effect without --raw"),
        (["--raw", "--chat-template", "a"], "--chat-template has no effect with --raw"),
    ],
)
def test_options_are_checked_before_a_model_is_looked_for(words, match, capfd):
    assert cli.main(["generate", "--model", "nowhere", "--prompt", "a", *words]) == 1
    error = capfd.readouterr().err
    assert error.count("\n") == 1
    assert re.search(match, error)
