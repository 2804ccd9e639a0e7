"""Token ids and chat prompts equal those recorded from transformers."""

import json
import sys
from datetime import datetime

import pytest

from jspec.text import Tokenizer, chat, render_chat
from tests.conftest import RECORDED_TEXT

FOUND = json.loads((RECORDED_TEXT / "families.json").read_text())
FAMILIES = FOUND["families"]
USER = [{"role": "user", "content": "Hi"}]


@pytest.fixture(autouse=True)
def clock(monkeypatch):
    """The time at which the templates were recorded."""

    class Clock(datetime):
        @classmethod
        def now(cls, tz=None):
            return datetime.fromisoformat(FOUND["now"])

    monkeypatch.setattr(chat, "datetime", Clock)


@pytest.fixture(scope="module")
def tokenizers_of(tmp_path_factory):
    found = {}
    for name, family in FAMILIES.items():
        folder = tmp_path_factory.mktemp(name)
        for file, text in family["files"].items():
            (folder / file).parent.mkdir(exist_ok=True)
            (folder / file).write_text(text, "utf-8")
        found[name] = Tokenizer.from_folder(folder)
    return found


def cases(kind):
    return [
        pytest.param(name, case, id=f"{name}-{i}")
        for name, family in FAMILIES.items()
        for i, case in enumerate(family[kind])
    ]


def test_eight_families_were_recorded_with_system_prompts_and_several_turns():
    wanted = {"chatml", "llama2", "llama31", "mistral", "zephyr", "gemma", "deepseek", "qwen3"}
    assert wanted <= FAMILIES.keys()
    for family in FAMILIES.values():
        assert any(len(c["messages"]) >= 3 and "ids" in c for c in family["chats"])


@pytest.mark.parametrize("name,case", cases("chats"))
def test_a_conversation_becomes_the_recorded_tokens(name, case, tokenizers_of):
    tokenizer = tokenizers_of[name]
    if "error" in case:
        with pytest.raises(ValueError, match="refuses these messages") as caught:
            tokenizer.chat(case["messages"])
        assert case["error"].rstrip(".") in str(caught.value)
        return
    special, template = tokenizer.special_tokens, tokenizer.chat_template
    assert render_chat(case["messages"], template, special) == case["text"]
    assert tokenizer.chat(case["messages"]) == case["ids"]


@pytest.mark.filterwarnings("ignore:tokenizer_config.json says add_bos_token")
@pytest.mark.parametrize("name,case", cases("texts"))
def test_a_text_becomes_the_recorded_tokens_and_comes_back(name, case, tokenizers_of):
    tokenizer = tokenizers_of[name]
    assert tokenizer.encode(case["text"], add_special=True) == case["ids"]
    assert tokenizer.encode(case["text"]) == case["without"]
    assert tokenizer.decode(case["ids"]) == case["decoded"]
    stream = tokenizer.stream()
    parts = [stream.push([token]) for token in case["ids"]]
    assert "".join(parts) + stream.finish() == case["decoded"]


def test_the_bos_of_tokenizer_config_json_is_missed_aloud(tokenizers_of):
    with pytest.warns(UserWarning, match="add_bos_token.*Begin the text with '<｜begin"):
        tokenizers_of["deepseek"].encode("hello", add_special=True)
    tokenizers_of["deepseek"].encode("<｜begin▁of▁sentence｜>hello", add_special=True)


def test_one_of_several_templates_is_chosen_by_name(tokenizers_of):
    qwen = tokenizers_of["qwen3"]
    assert qwen.decode(qwen.chat(USER, template="short")) == "user"
    with pytest.raises(
        ValueError, match="no chat template 'long', only .*'short'.*--chat-template"
    ):
        qwen.chat(USER, template="long")
    with pytest.raises(ValueError, match="no chat template 'default', only 'tool_use', 'rag'"):
        render_chat(USER, {"tool_use": "a", "rag": "b"})


def test_a_template_that_needs_tools_says_so(tokenizers_of):
    with pytest.raises(ValueError, match="fails with these messages.*may need tools"):
        tokenizers_of["mistral"].chat(USER, template="tool_use")


@pytest.mark.parametrize(
    "template,match",
    [
        ("{% for m in messages %}", "cannot be read, line 1: .*endfor"),
        ("{{ messages[0].__class__.__mro__ }}", "fails with these messages.*unsafe"),
        ("{{ messages.append(1) }}", "fails with these messages.*unsafe"),
        ("{{ messages[3].content }}", "fails with these messages"),
        ("{{ 1 / 0 }}", "fails with these messages.*zero"),
        ("{{ 'a' + eos_token }}", "'eos_token' is undefined.*tokenizer_config.json does not name"),
        ("{{ raise_exception('Only tools.') }}", "refuses these messages: Only tools.*--raw"),
        (None, "no chat template, so that messages have no form.*--chat-template FILE"),
    ],
)
def test_a_template_that_cannot_be_rendered_says_why(template, match):
    with pytest.raises(ValueError, match=match):
        render_chat(USER, template)


def test_a_text_without_a_template_is_continued_aloud(tokenizers_of):
    zephyr = tokenizers_of["llama2"]
    plain = Tokenizer(zephyr._inner)
    with pytest.warns(UserWarning, match="no chat template.*as it stands.*--raw"):
        assert plain.chat("hello") == zephyr.encode("hello", add_special=True)
    with pytest.raises(ValueError, match="messages have no form"):
        plain.chat(USER)


def test_without_the_jinja2_package_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "jinja2", None)
    with pytest.raises(ImportError, match=r"pip install 'jspec-decode\[demo\]'"):
        render_chat(USER, "no template was this one yet")


@pytest.mark.parametrize("messages", [[], [{"role": "user"}]])
def test_a_message_without_content_is_refused(messages, tokenizers_of):
    with pytest.raises(ValueError, match="'role': ..., 'content': ..."):
        tokenizers_of["chatml"].chat(messages)
