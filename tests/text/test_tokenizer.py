"""Tokenizers: rebuilt from a byte-level GGUF vocabulary, read from folders, streamed whole."""

import json
import sys

import numpy as np
import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from jspec.axes import PAD_TOKEN
from jspec.text import Tokenizer, gguf_tokenizer_json

TEMPLATE = "{{ bos_token }}{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}"

SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MERGES = ["h e", "l l", "he ll", "hell o", "Ġ hello", "1 2", "12 3", "123 4"]


def metadata(pre="smollm", **more):
    """A vocabulary: three control tokens, all bytes, some words, an unused and a user token."""
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    words = [merge.replace(" ", "") for merge in MERGES]
    tokens = [*SPECIALS, *alphabet, *words, "[PAD1]", "<tool>"]
    types = [3] * len(SPECIALS) + [1] * (len(alphabet) + len(words)) + [5, 4]
    own = {"model": "gpt2", "pre": pre, "tokens": tokens, "token_type": types, "merges": MERGES}
    return {f"tokenizer.ggml.{key}": value for key, value in (own | more).items()}


def build(pre="smollm", **more):
    return Tokenizer.from_json(gguf_tokenizer_json(metadata(pre, **more)))


@pytest.fixture(scope="module")
def tokenizer():
    return build()


def spell(tokenizer, text):
    return [tokenizer.decode([token], keep_special=True) for token in tokenizer.encode(text)]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "hello hello",
        "  two  spaces, a\ttab and\r\nlines\n\n",
        "def f(x):\n    return x ** 2  # squared\n",
        "naïve café, 日本語, 👩‍👩‍👧, \U0010ffff, \x00",
        "<|im_start|>user\nhello<|im_end|><tool>",
    ],
)
@pytest.mark.parametrize("pre", ["smollm", "gpt-2", "default", "qwen2", "llama-bpe"])
def test_decoding_gives_the_text_back(pre, text):
    tokenizer = build(pre)
    assert tokenizer.decode(tokenizer.encode(text), keep_special=True) == text


@pytest.mark.parametrize(
    "pre,wanted",
    [
        ("smollm", ["1", "2", "3", "4"]),
        ("qwen2", ["1", "2", "3", "4"]),
        ("llama-bpe", ["123", "4"]),
        ("gpt-2", ["1234"]),
    ],
)
def test_digits_stay_together_as_the_pre_tokenizer_says(pre, wanted):
    assert spell(build(pre), "1234") == wanted


def test_the_pre_tokenizers_cut_words_differently():
    """GPT-2 keeps only a space with a word, Llama-3 and Qwen any one character but a line break."""
    cut = {pre: build(pre)._inner.pre_tokenizer for pre in ("smollm", "qwen2")}
    pieces = {pre: [p for p, _ in c.pre_tokenize_str("(x I'LL")] for pre, c in cut.items()}
    assert pieces == {"smollm": ["(", "x", "ĠI", "'", "LL"], "qwen2": ["(x", "ĠI", "'LL"]}


def test_merges_apply_in_order(tokenizer):
    assert spell(tokenizer, "hello hello") == ["hello", " hello"]


def test_llama3_takes_a_whole_word_without_merges():
    assert spell(build("llama-bpe", merges=["h e"]), "hello") == ["hello"]
    assert spell(build("qwen2", merges=["h e"]), "hello") == ["he", "l", "l", "o"]


def test_qwen_composes_characters_first():
    assert build("qwen2").encode("e\u0301") == build("qwen2").encode("é")


def test_special_tokens_are_found_in_the_text_and_left_out_of_it(tokenizer):
    ids = tokenizer.encode("<|im_start|>hello<|im_end|>")
    assert ids == [1, tokenizer.encode("hello")[0], 2]
    assert tokenizer.decode(ids) == "hello"


def test_padding_is_skipped(tokenizer):
    row = np.array([*tokenizer.encode("hello"), PAD_TOKEN, PAD_TOKEN], np.int32)
    assert tokenizer.decode(row) == "hello"
    assert tokenizer.stream().push(row) == "hello"


def test_unused_entries_of_the_vocabulary_are_no_text(tokenizer):
    unused = metadata()["tokenizer.ggml.tokens"].index("[PAD1]")
    assert tokenizer.decode([unused]) == ""
    assert tokenizer.encode("[PAD1]") != [unused]


@pytest.mark.parametrize("pre,add_bos,wanted", [
    ("smollm", None, []), ("smollm", True, [0]), ("llama-bpe", None, [0]), ("llama-bpe", False, []),
])  # fmt: skip
def test_bos_is_added_where_the_model_wants_it(pre, add_bos, wanted):
    more = {} if add_bos is None else {"add_bos_token": add_bos}
    tokenizer = build(pre, bos_token_id=0, **more)
    hello = tokenizer.encode("hello")
    assert tokenizer.encode("hello", add_special=True) == wanted + hello


@pytest.mark.parametrize("more", [{"pre": "poro-chat"}, {"model": "t5"}])
def test_an_unknown_tokenizer_lists_the_known_ones(more):
    with pytest.raises(ValueError, match="is not supported.*'llama'.*smollm.*qwen2.*llama-bpe"):
        gguf_tokenizer_json(metadata() | {f"tokenizer.ggml.{k}": v for k, v in more.items()})


@pytest.mark.parametrize("key", ["tokens", "merges"])
def test_an_incomplete_vocabulary_is_refused(key):
    incomplete = metadata()
    del incomplete[f"tokenizer.ggml.{key}"]
    with pytest.raises(ValueError, match="wanted a type for each token|at least one merge"):
        gguf_tokenizer_json(incomplete)


@pytest.mark.parametrize(
    "more",
    [
        {"pre": ["smollm"]},
        {"tokens": 3},
        {"token_type": 3},
        {"merges": [3]},
        {"add_bos_token": 1},
        {"add_bos_token": True, "bos_token_id": "0"},
        {"add_bos_token": True, "bos_token_id": 10_000},
    ],
)
def test_tokenizer_metadata_of_another_type_is_named(more):
    with pytest.raises(ValueError, match=f"tokenizer.ggml.{list(more)[-1]}` is .*wanted"):
        gguf_tokenizer_json(metadata(**more))


@pytest.mark.parametrize("text", ["", "{", "{}", '{"model": 3}'])
def test_a_damaged_tokenizer_says_so(text):
    with pytest.raises(ValueError, match="tokenizer.json cannot be read.*Fetch the file again"):
        Tokenizer.from_json(text)


def test_a_file_without_a_tokenizer_has_none():
    assert gguf_tokenizer_json({}) is None


@given(text=st.text(st.characters(exclude_categories=["Cs"])), size=st.integers(1, 4))
def test_streaming_never_shows_half_a_character(tokenizer, text, size):
    ids = tokenizer.encode(text)
    stream = tokenizer.stream(keep_special=True)
    parts = [stream.push(ids[i : i + size]) for i in range(0, len(ids), size)]
    parts.append(stream.finish())
    assert "".join(parts) == text
    assert "\ufffd" in text or not any("\ufffd" in part for part in parts)


def test_a_character_appears_with_its_last_byte(tokenizer):
    stream = tokenizer.stream()
    assert [stream.push([token]) for token in tokenizer.encode("a€b")] == ["a", "", "", "€", "b"]
    assert stream.finish() == ""


@given(ids=st.lists(st.integers(3, 258), max_size=40))
def test_streaming_bytes_that_are_no_text_equals_decoding_them(tokenizer, ids):
    stream = tokenizer.stream()
    assert "".join([stream.push([token]) for token in ids]) + stream.finish() == tokenizer.decode(
        ids
    )


def test_streaming_keeps_leading_spaces_of_a_sentencepiece_tokenizer():
    """Its decoder strips the first space of a text and joins byte tokens, so it needs context."""
    bytes_ = {f"<0x{byte:02X}>": byte for byte in range(256)}
    vocab = bytes_ | {"▁": 256, "h": 257, "▁h": 258, "<unk>": 259}
    inner = tokenizers.Tokenizer(
        tokenizers.models.BPE(vocab, [("▁", "h")], byte_fallback=True, unk_token="<unk>")
    )
    inner.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace()
    inner.decoder = tokenizers.decoders.Sequence(
        [
            tokenizers.decoders.Replace("▁", " "),
            tokenizers.decoders.ByteFallback(),
            tokenizers.decoders.Fuse(),
            tokenizers.decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer = Tokenizer(inner)
    text = "h h 日本語h h"
    stream = tokenizer.stream()
    parts = [stream.push([token]) for token in tokenizer.encode(text)]
    assert "".join(parts) + stream.finish() == tokenizer.decode(tokenizer.encode(text)) == text
    assert parts[:2] == ["h", " h"]


def test_a_folder_brings_its_tokenizer_special_tokens_and_template(tmp_path):
    config = {
        "chat_template": TEMPLATE,
        "bos_token": "<|im_start|>",
        "eos_token": {"__type": "AddedToken", "content": "hello"},
        "added_tokens_decoder": {
            "1": {"content": "<|im_start|>", "special": True},
            "269": {"content": "<new>", "lstrip": True, "special": False},
        },
        "additional_special_tokens": ["<more>"],
    }
    (tmp_path / "tokenizer.json").write_text(gguf_tokenizer_json(metadata()), "utf-8")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    got = Tokenizer.from_folder(tmp_path)
    assert got.chat_template == TEMPLATE
    assert got.special_tokens == {"bos_token": "<|im_start|>", "eos_token": "hello"}
    hello = build().encode("hello")
    assert got.chat("hello") == [1, *hello, *hello]
    assert got.decode(got.chat("hello")) == ""  # an end token is no text
    assert got.vocab_size == build().vocab_size + 2
    assert got.encode("<new><more>") == [269, 270]  # after the last id of tokenizer.json
    assert got.decode([269, 270]) == "<new>"


def test_a_text_is_never_cut_or_padded_as_its_file_was_left(tokenizer):
    inner = tokenizers.Tokenizer.from_str(tokenizer._inner.to_str())
    inner.enable_truncation(2)
    inner.enable_padding(length=100)
    text = "a much longer text"
    assert Tokenizer.from_json(inner.to_str()).encode(text) == tokenizer.encode(text)


def test_special_tokens_are_text_where_the_model_says_so():
    inner = gguf_tokenizer_json(metadata())
    tokenizer = Tokenizer.from_json(inner, None, {"split_special_tokens": True})
    assert 1 not in tokenizer.encode("<|im_start|>")


def test_a_folder_without_a_template_has_no_chat_form(tmp_path):
    (tmp_path / "tokenizer.json").write_text(gguf_tokenizer_json(metadata()), "utf-8")
    assert Tokenizer.from_folder(tmp_path).chat_template is None


def test_a_folder_without_a_tokenizer_says_how_to_write_one(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"tokenizer\.json.*save_pretrained"):
        Tokenizer.from_folder(tmp_path)


def test_without_the_tokenizers_package_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(ImportError, match=r"pip install 'jspec-decode\[demo\]'"):
        Tokenizer.from_json("{}")
