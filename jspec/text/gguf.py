"""Tokenizers and chat templates of GGUF files, in Hugging Face terms."""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from jspec.text.chat import ChatTemplate
from jspec.text.files import TextFiles, single_or_named

_BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}


def _split(digits: str) -> list[dict[str, Any]]:
    """Returns the pre-tokenizer of Llama-3 and Qwen, which differ in the pattern of digits."""
    pattern = (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
        + digits
        + r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )
    split = {
        "type": "Split",
        "pattern": {"Regex": pattern},
        "behavior": "Isolated",
        "invert": False,
    }
    return [split, _BYTE_LEVEL | {"use_regex": False}]


_GPT2 = [_BYTE_LEVEL | {"use_regex": True}]
_DIGITS = [{"type": "Digits", "individual_digits": True}, *_GPT2]
_QWEN2 = _split(r"\p{N}")
_LLAMA3 = _split(r"\p{N}{1,3}")

# Values of `tokenizer.ggml.pre`. Files without one were written before it existed.
_PRE_TOKENIZERS = {
    "default": _GPT2,
    "gpt-2": _GPT2,
    "smollm": _DIGITS,
    "starcoder": _DIGITS,
    "qwen2": _QWEN2,
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
}

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED = 1, 2, 3, 4, 5  # `tokenizer.ggml.token_type`

_SPECIAL_TOKENS = {
    "bos_token": "bos",
    "eos_token": "eos",
    "unk_token": "unknown",
    "pad_token": "padding",
    "sep_token": "seperator",  # as the format spells it
}

# llama.cpp stops at these even if the metadata does not name them.
_STOP_TEXTS = {"<|endoftext|>", "<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>"}


def gguf_text_files(metadata: Mapping[str, Any], *, source: str = "GGUF") -> TextFiles:
    """Converts the metadata of a GGUF file to the text files of a Hugging Face folder.

    Args:
      metadata: the file's values by full name.
      source: name of the file, for messages.

    Returns:
      The tokenizer with its special tokens, the chat template, and the stop tokens: eos, eot, eom
      and those that llama.cpp always stops at.

    Raises:
      ValueError: see `gguf_tokenizer_json`; a template is no text.
    """
    values = _Values(metadata, source)
    tokenizer_json = gguf_tokenizer_json(metadata, source=source)
    tokens = values.get("tokens", str, [])
    special = {name: values.token(key, tokens) for name, key in _SPECIAL_TOKENS.items()}
    config = {name: token for name, token in special.items() if token is not None}
    config["tokenizer_class"] = "PreTrainedTokenizerFast"  # all settings are in tokenizer.json
    ends = (values.token_id(end, tokens) for end in ("eos", "eot", "eom"))
    stops = {end for end in ends if end is not None}
    stops |= {index for index, token in enumerate(tokens) if token in _STOP_TEXTS}
    return TextFiles(
        tokenizer_json,
        None if tokenizer_json is None else config,
        _chat_template(metadata, source),
        tuple(sorted(stops)),
    )


def gguf_tokenizer_json(metadata: Mapping[str, Any], *, source: str = "GGUF") -> str | None:
    """Rebuilds a Hugging Face tokenizer.json from the metadata of a GGUF file.

    Byte-level BPE (`tokenizer.ggml.model` "gpt2") and SentencePiece BPE ("llama") are known.

    Args:
      metadata: the file's `tokenizer.ggml.*` values by full name.
      source: name of the file, for messages.

    Returns:
      Content of a tokenizer.json, or None where the file has no tokenizer.

    Raises:
      ValueError: the tokenizer is of another kind, has an unknown pre-tokenizer, or a value has a
        wrong type.

    Source: llama.cpp src/llama-vocab.cpp, which names the rules.
    """
    values = _Values(metadata, source)
    kind = values.get("model", str, "none")
    if kind == "none":
        return None
    pre = values.get("pre", str, "default")
    if kind != "llama" and (kind != "gpt2" or pre not in _PRE_TOKENIZERS):
        raise ValueError(
            f"{source}: tokenizer model {kind!r} with pre-tokenizer {pre!r} is not supported, "
            "wanted 'llama' (SentencePiece) or 'gpt2' (byte-level BPE) with one of "
            f"{', '.join(_PRE_TOKENIZERS)}. Pass the model's Hugging Face folder, which has a "
            "tokenizer.json."
        )
    tokens = values.get("tokens", str, [])
    types = values.get("token_type", int, [_NORMAL] * len(tokens))
    if not tokens or len(types) != len(tokens):
        raise _incomplete(source, tokens, f"{len(types)} token types", "a type for each token")
    parts = (
        _sentencepiece(values, tokens, types)
        if kind == "llama"
        else _byte_level(values, tokens, _PRE_TOKENIZERS[pre])
    )
    added = [
        {
            "id": index,
            "content": token,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": t == _CONTROL,
        }
        for index, (token, t) in enumerate(zip(tokens, types, strict=True))
        if t == _CONTROL or (t == _USER_DEFINED and kind == "gpt2")
    ]
    vocab = {
        token: index
        for index, (token, t) in enumerate(zip(tokens, types, strict=True))
        if t != _UNUSED
    }
    whole = {"version": "1.0", "truncation": None, "padding": None, "added_tokens": added} | parts
    starts_with_bos = kind == "llama" or _PRE_TOKENIZERS[pre] is _LLAMA3
    whole["post_processor"] = _post_processor(
        values.token_with_id("bos", tokens, default=starts_with_bos),
        values.token_with_id("eos", tokens, default=False),
    )
    whole["model"] = _BPE | parts["model"] | {"vocab": vocab}
    return json.dumps(whole, ensure_ascii=False)


_BPE = {
    "type": "BPE",
    "dropout": None,
    "unk_token": None,
    "continuing_subword_prefix": None,
    "end_of_word_suffix": None,
    "fuse_unk": False,
    "byte_fallback": False,
    "ignore_merges": False,
}


class _Values:
    """Reads `tokenizer.ggml.*` values and checks their types."""

    def __init__(self, metadata: Mapping[str, Any], source: str):
        self.metadata = metadata
        self.source = source

    def get(self, key: str, kind: type, default: Any) -> Any:
        """Reads a value; `kind` is that of its items where the default is a list."""
        value = self.metadata.get(f"tokenizer.ggml.{key}", default)
        items = value if isinstance(default, list) else [value]
        if not isinstance(items, list) or not all(isinstance(item, kind) for item in items):
            raise ValueError(
                f"{self.source}: metadata `tokenizer.ggml.{key}` is {str(value)[:60]}, wanted "
                f"{'a list of ' * isinstance(default, list)}{kind.__name__}. Convert the model "
                "again with a current llama.cpp."
            )
        return value

    def token_id(self, name: str, tokens: Sequence[str]) -> int | None:
        """Returns the id of a special token, None where the file names none."""
        index = self.get(f"{name}_token_id", int, -1)
        if not tokens or index == -1:
            return None if index == -1 else index
        if not 0 <= index < len(tokens):
            raise ValueError(
                f"{self.source}: metadata `tokenizer.ggml.{name}_token_id` is {index}, wanted one "
                f"of the {len(tokens)} tokens. Convert the model again with a current llama.cpp."
            )
        return index

    def token(self, name: str, tokens: Sequence[str]) -> str | None:
        """Returns the text of a special token, None where the file names none."""
        index = self.token_id(name, tokens)
        return None if index is None or not tokens else tokens[index]

    def token_with_id(
        self, name: str, tokens: Sequence[str], *, default: bool
    ) -> tuple[str, int] | None:
        """Returns a special token that is added to every text, None if it is not added."""
        index = self.token_id(name, tokens)
        wanted = self.get(f"add_{name}_token", bool, default)
        return (tokens[index], index) if wanted and index is not None else None


def _byte_level(
    values: _Values, tokens: Sequence[str], rule: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    merges = values.get("merges", str, [])
    if not merges:
        raise _incomplete(values.source, tokens, "no merges", "at least one merge")
    return {
        "normalizer": {"type": "NFC"} if rule is _QWEN2 else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": rule},
        "decoder": _BYTE_LEVEL | {"use_regex": True},
        "model": {
            # Llama-3 uses a token for a whole word even if no merges produce it.
            "ignore_merges": rule is _LLAMA3,
            "merges": [merge.split(" ") for merge in merges],
        },
    }


def _sentencepiece(values: _Values, tokens: Sequence[str], types: Sequence[int]) -> dict[str, Any]:
    """SentencePiece's BPE: the pair whose merged piece has the highest score merges first."""
    scores = values.get("scores", float, [])
    if len(scores) != len(tokens):
        raise _incomplete(values.source, tokens, f"{len(scores)} scores", "a score for each token")
    space = values.get("add_space_prefix", bool, True)
    escape = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
    # Every text between special tokens gets the prefix, as in llama.cpp and in the tokenizer.json
    # of Llama-2.
    prefix = [{"type": "Prepend", "prepend": "▁"}] if space else []
    decoders: list[dict[str, Any]] = [
        {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    if space:
        decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    unknown = next((token for token, t in zip(tokens, types, strict=True) if t == _UNKNOWN), None)
    pieces = {
        token: score for token, score, t in zip(tokens, scores, types, strict=True) if t == _NORMAL
    }
    ids = {token: index for index, token in enumerate(tokens)}
    merges = [
        (-score, ids[piece[:cut]], ids[piece[cut:]])
        for piece, score in pieces.items()
        for cut in range(1, len(piece))
        if piece[:cut] in pieces and piece[cut:] in pieces
    ]
    # User-defined pieces are never split, and do not separate texts like special tokens.
    own = [token for token, t in zip(tokens, types, strict=True) if t == _USER_DEFINED]
    whole = "|".join(re.escape(token) for token in sorted(own, key=len, reverse=True))
    split = {"type": "Split", "pattern": {"Regex": whole}, "behavior": "Isolated", "invert": False}
    return {
        "normalizer": {"type": "Sequence", "normalizers": [*prefix, escape]},
        "pre_tokenizer": split if own else None,
        "decoder": {"type": "Sequence", "decoders": decoders},
        "model": {
            "unk_token": unknown,
            "fuse_unk": True,
            "byte_fallback": True,
            "ignore_merges": bool(own),
            "merges": [[tokens[left], tokens[right]] for _, left, right in sorted(merges)],
        },
    }


def _chat_template(metadata: Mapping[str, Any], source: str) -> ChatTemplate | None:
    """Reads the template of a file, or several by name."""
    key = "tokenizer.chat_template"
    names = metadata.get("tokenizer.chat_templates", [])
    keys = {"default": key} | {str(name): f"{key}.{name}" for name in names}
    found = {name: metadata[own] for name, own in keys.items() if own in metadata}
    for name, template in found.items():
        if not isinstance(template, str):
            raise ValueError(
                f"{source}: metadata `{keys[name]}` is {str(template)[:60]}, wanted one str. "
                "Convert the model again with a current llama.cpp."
            )
    return single_or_named(found) if found else None


def _incomplete(source: str, tokens: Sequence[str], has: str, wanted: str) -> ValueError:
    return ValueError(
        f"{source}: the vocabulary has {len(tokens)} tokens and {has}, wanted {wanted}. "
        "Convert the model again with a current llama.cpp."
    )


def _post_processor(
    bos: tuple[str, int] | None, eos: tuple[str, int] | None
) -> dict[str, Any] | None:
    """Adds BOS before and EOS after every text, where they are given."""
    if bos is None and eos is None:
        return None

    def special(token: tuple[str, int] | None) -> list[dict[str, Any]]:
        return [] if token is None else [{"SpecialToken": {"id": token[0], "type_id": 0}}]

    first, second = ({"Sequence": {"id": name, "type_id": 0}} for name in "AB")
    return {
        "type": "TemplateProcessing",
        "single": [*special(bos), first, *special(eos)],
        "pair": [*special(bos), first, second, *special(eos)],
        "special_tokens": {
            token[0]: {"id": token[0], "ids": [token[1]], "tokens": [token[0]]}
            for token in (bos, eos)
            if token is not None
        },
    }
