"""Prompts of the command line: texts, files, JSON lines, and invalid ones."""

import argparse
import io
import json
import os
import re
import threading

import pytest
import tokenizers

from jspec import ModelConfig, cli
from jspec.checkpoint import Model
from jspec.cli import models, prompts
from jspec.text import Tokenizer
from tests.support.text_models import character_tokenizer

pytestmark = pytest.mark.usefixtures("own_cache")

CHAT = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}]


def read_with_places(*files, texts=None, form=None, bad=None):
    words = {"prompt": texts, "prompt_file": list(map(str, files)), "prompt_format": form}
    return prompts.read(argparse.Namespace(**words), bad or prompts.BadPrompts())


def read(*files, **options):
    return [each.prompt for each in read_with_places(*files, **options)]


def pipe_in(monkeypatch, data):
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(data)))


def encode(tokenizer, texts, *, bad=None, **options):
    asked = [prompts.CommandPrompt(text, f"row {i}") for i, text in enumerate(texts)]
    model = ModelConfig.tiny(vocab_size=128)
    return prompts.encode(tokenizer, asked, bad or prompts.BadPrompts(), model=model, **options)[1]


def test_texts_come_first_and_then_the_files_in_their_order(tmp_path):
    (tmp_path / "one.txt").write_text("def add(a, b):\n    return\n")
    lines = [{"prompt": "two", "id": 7}, {"messages": CHAT}]
    (tmp_path / "more.jsonl").write_text("\n\n".join(map(json.dumps, lines)) + "\n")
    found = read(tmp_path / "one.txt", tmp_path / "more.jsonl", texts=["zero"])
    assert found == ["zero", "def add(a, b):\n    return", "two", CHAT]


def test_a_byte_order_mark_and_carriage_returns_are_no_part_of_a_prompt(tmp_path, monkeypatch):
    (tmp_path / "one.txt").write_bytes(b"\xef\xbb\xbftext\r\n")
    (tmp_path / "two.jsonl").write_bytes(b'\xef\xbb\xbf{"prompt": "a"}\r\n{"prompt": "b"}\r\n')
    pipe_in(monkeypatch, b"\xef\xbb\xbfpiped\n")
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


def test_a_dash_is_standard_input_in_either_format(monkeypatch):
    pipe_in(monkeypatch, "from a \u00e9 pipe\n".encode())
    assert read("-") == ["from a \u00e9 pipe"]
    pipe_in(monkeypatch, b'{"prompt": "a"}\n\n{"prompt": "b"}')
    found = read_with_places("-", form="jsonl")
    assert found == [("a", "standard input, line 1"), ("b", "standard input, line 3")]


def test_a_pipe_with_a_name_is_read(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    writer = threading.Thread(target=(tmp_path / "pipe").write_text, args=("from a pipe\n",))
    writer.start()
    assert read(tmp_path / "pipe") == ["from a pipe"]
    writer.join()


def test_the_format_is_that_of_the_name_in_any_case_unless_it_is_said(tmp_path):
    line = '{"prompt": "a"}'
    (tmp_path / "P.JSONL").write_text(line)
    (tmp_path / "p.txt").write_text(line)
    assert read(tmp_path / "P.JSONL", tmp_path / "p.txt") == ["a", line]
    assert read(tmp_path / "P.JSONL", form="text") == [line]
    assert read(tmp_path / "p.txt", form="jsonl") == ["a"]


def test_bad_lines_are_skipped_and_counted_where_that_is_wanted(tmp_path, capfd):
    (tmp_path / "p.jsonl").write_text('{"prompt": "a"}\n{\n\n{"text": 1}\n{"prompt": "b"}\n')
    bad = prompts.BadPrompts(skip=True)
    found = read_with_places(tmp_path / "p.jsonl", bad=bad)
    assert found == [(text, f"{tmp_path}/p.jsonl, line {n}") for text, n in (("a", 1), ("b", 5))]
    assert bad.num_skipped == 2
    assert re.fullmatch(
        r"jspec: skipped: .*, line 2 is not JSON.*\njspec: skipped: .*, line 4 is .*\n",
        capfd.readouterr().err,
    )


@pytest.mark.parametrize(
    "text,match",
    [
        ("a" * 256, r"row 1: the prompt has 256 tokens.*takes 256.*--skip-bad"),
        ("", "row 1: the prompt is empty"),
        ("\x7f", "row 1: prompt token 0 is 127, wanted 0 <= id < 120"),
        (CHAT, "row 1: messages have no text.*Leave out --raw"),
    ],
)
def test_a_prompt_that_does_not_fit_the_model_is_named_or_skipped(text, match, capfd):
    tokenizer = Tokenizer.from_json(character_tokenizer().to_str())
    options = {"raw": True, "vocab_sizes": [None, 120]}
    model = ModelConfig.tiny(vocab_size=128, max_positions=256)
    asked = [prompts.CommandPrompt(t, f"row {i}") for i, t in enumerate(["a" * 255, text, "b"])]
    with pytest.raises(ValueError, match=match):
        prompts.encode(tokenizer, asked, prompts.BadPrompts(), model=model, **options)
    bad = prompts.BadPrompts(skip=True)
    kept = prompts.encode(tokenizer, asked, bad, model=model, **options)
    assert kept == ([asked[0], asked[2]], [[97] * 255, [98]]) and bad.num_skipped == 1
    assert re.search(match, capfd.readouterr().err)
    with pytest.raises(ValueError, match="no prompt is left: 2 were skipped"):
        prompts.encode(tokenizer, asked[1:2], bad, model=model, **options)


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
    (tmp_path / "bytes.txt").write_bytes(b"\xff\x00")
    with pytest.raises(ValueError, match="holds no prompt"):
        read(tmp_path / "empty.jsonl")
    with pytest.raises(ValueError, match="Save it as UTF-8"):
        read(tmp_path / "bytes.txt")
    with pytest.raises(ValueError, match="nowhere is no file"):
        read("nowhere")
    with pytest.raises(ValueError, match="is a folder"):
        read(tmp_path)
    for encoding in ("utf-16-le", "utf-16-be"):
        (tmp_path / "wide.jsonl").write_text('\ufeff{"prompt": "a"}', encoding)
        with pytest.raises(ValueError, match="wide.jsonl is UTF-16 text.*Save it as UTF-8"):
            read(tmp_path / "wide.jsonl")
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
    asked = encode(tokenizer, ["hi", CHAT], raw=False)
    assert [ids[0] for ids in asked] == [1, 1]  # once, by the template
    texts = [tokenizer.decode(ids) for ids in asked]
    assert texts == ["[user]hi", "[system]be brief[user]hi"]
    assert encode(tokenizer, ["hi", ""], raw=True) == [[1, 104, 105], [1]]
    bare = encode(tokenizer, ["hi"], raw=True, special_tokens=False)
    assert bare == [[104, 105]]
    with pytest.raises(ValueError, match="Leave out --raw"):
        encode(tokenizer, ["hi", CHAT], raw=True)


def test_a_model_without_a_template_continues_texts_and_says_so(capfd):
    tokenizer = tokenizer_with_bos()
    lone = [{"role": "user", "content": "hi"}]
    assert encode(tokenizer, ["hi", lone], raw=False) == [[1, 104, 105]] * 2
    assert re.search("no chat template.*as with --raw", capfd.readouterr().err)
    with pytest.raises(ValueError, match=r"row 0.*messages have no form.*--chat-template"):
        encode(tokenizer, [CHAT, lone], raw=False)
    bad = prompts.BadPrompts(skip=True)
    assert encode(tokenizer, [CHAT, lone], raw=False, bad=bad) == [[1, 104, 105]]


def test_a_prompt_that_a_template_refuses_is_numbered():
    tokenizer = tokenizer_with_bos("{{ raise_exception('no system') if messages[1] else 'x' }}")
    with pytest.raises(ValueError, match="row 1: .*no system"):
        encode(tokenizer, ["hi", CHAT], raw=False)


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
        (["--num-samples", "2"], "--num-samples has no effect without --temperature"),
        (["--num-samples", "0"], "--num-samples is 0, wanted 1 or more"),
        (["--no-special-tokens"], "--no-special-tokens has no effect without --raw"),
        (["--raw", "--chat-template", "a"], "--chat-template has no effect with --raw"),
    ],
)
def test_options_are_checked_before_a_model_is_looked_for(words, match, capfd):
    assert cli.main(["generate", "--model", "nowhere", "--prompt", "a", *words]) == 1
    error = capfd.readouterr().err
    assert error.count("\n") == 1
    assert re.search(match, error)
