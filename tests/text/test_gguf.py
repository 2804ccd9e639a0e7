"""SentencePiece vocabularies of GGUF files: ids equal those that sentencepiece recorded."""

import json

import pytest

from jspec.text import Tokenizer, gguf_text_files, gguf_tokenizer_json
from tests.conftest import RECORDED_TEXT

FOUND = json.loads((RECORDED_TEXT / "sentencepiece.json").read_text())
TOKENS, SCORES, TYPES = map(list, zip(*FOUND["pieces"], strict=True))


def metadata(**more):
    own = {"model": "llama", "tokens": TOKENS, "scores": SCORES, "token_type": TYPES}
    own |= {"bos_token_id": 1, "eos_token_id": 2, "unknown_token_id": 0}
    return {f"tokenizer.ggml.{key}": value for key, value in (own | more).items()}


def build(**more):
    files = gguf_text_files(metadata(**more))
    return Tokenizer.from_json(files.tokenizer_json, None, files.tokenizer_config)


@pytest.fixture(scope="module")
def tokenizer():
    return build()


@pytest.mark.parametrize("case", FOUND["texts"], ids=range(len(FOUND["texts"])))
def test_a_text_becomes_the_recorded_pieces_and_comes_back(case, tokenizer):
    assert tokenizer.encode(case["text"]) == case["ids"]
    assert tokenizer.decode(case["ids"]) == case["text"].replace("▁", " ")
    stream = tokenizer.stream()
    parts = [stream.push([token]) for token in case["ids"]]
    assert "".join(parts) + stream.finish() == case["text"].replace("▁", " ")


def test_bytes_that_are_no_piece_are_spelled(tokenizer):
    ids = tokenizer.encode("語")
    assert [TOKENS[i] for i in ids] == ["▁", "<0xE8>", "<0xAA>", "<0x9E>"]


def test_texts_begin_with_bos_unless_the_file_says_otherwise(tokenizer):
    plain = tokenizer.encode("hello")
    assert tokenizer.encode("hello", add_special=True) == [1, *plain]
    assert build(add_bos_token=False).encode("hello", add_special=True) == plain
    both = build(add_eos_token=True).encode("hello", add_special=True)
    assert both == [1, *plain, 2]


def test_every_stretch_between_special_tokens_has_its_own_space(tokenizer):
    word = tokenizer.encode("hello")
    assert tokenizer.encode("<s>hello</s>hello") == [1, *word, 2, *word]
    bare = build(add_space_prefix=False)
    assert TOKENS[bare.encode("hello")[0]][0] != "▁"
    assert bare.encode(" hello") == word and bare.decode(word) == " hello"


def test_special_tokens_and_end_tokens_come_along(tokenizer):
    wanted = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    assert tokenizer.special_tokens == wanted
    assert gguf_text_files(metadata()).stop_ids == (2,)
    assert tokenizer.decode(tokenizer.encode("<s>hello<tool></s>")) == "hello<tool>"


@pytest.mark.parametrize(
    "more,match",
    [
        ({"scores": SCORES[:-1]}, "scores, wanted a score for each token"),
        ({"scores": []}, "0 scores"),
        ({"scores": ["a"] * len(TOKENS)}, "tokenizer.ggml.scores` is .*wanted a list of float"),
        ({"token_type": TYPES[:-1]}, "token types, wanted a type for each token"),
        ({"add_space_prefix": 1}, "add_space_prefix` is 1, wanted bool"),
        ({"eos_token_id": len(TOKENS)}, "eos_token_id` is 370, wanted one of the 370 tokens"),
    ],
)
def test_a_vocabulary_that_is_not_whole_is_named(more, match):
    with pytest.raises(ValueError, match=match):
        gguf_text_files(metadata(**more))


def test_a_file_that_is_all_config_has_no_tokenizer():
    assert gguf_tokenizer_json({"tokenizer.ggml.model": "none"}) is None
    assert gguf_text_files({}) == (None, None, None, ())
