"""Text to tokens and back: Hugging Face tokenizers, rebuilt from a GGUF vocabulary where needed."""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from jspec.config import read_json

Messages: TypeAlias = Sequence[Mapping[str, str]]
"""A conversation: `{"role": "system" | "user" | "assistant", "content": text}` in turn."""

_BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}


def _split(digits: str) -> list[dict[str, Any]]:
    """Cuts text as Llama-3 and Qwen do; they differ in how many digits stay together."""
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

_CONTROL, _USER_DEFINED, _UNUSED = 3, 4, 5  # values of `tokenizer.ggml.token_type`


class Tokenizer:
    """Encodes, decodes and applies the chat form of a model.

    Attributes:
      chat_template: the model's Jinja template, None for a model without a chat form.
    """

    def __init__(self, inner: Any, chat_template: str | None = None):
        self._inner = inner
        self.chat_template = chat_template

    @classmethod
    def from_json(cls, text: str, chat_template: str | None = None) -> "Tokenizer":
        """Builds a tokenizer from the content of a Hugging Face tokenizer.json.

        Raises:
          ImportError: the `tokenizers` package is missing. ValueError: it cannot read the text.
        """
        try:
            import tokenizers
        except ImportError as error:
            raise ImportError(
                "text needs the `tokenizers` package. Run: pip install 'jspec-decode[demo]'"
            ) from error
        try:
            inner = tokenizers.Tokenizer.from_str(text)
        except Exception as error:  # all that the package raises
            raise ValueError(
                f"tokenizer.json cannot be read ({error}). Fetch the file again, or upgrade the "
                "`tokenizers` package."
            ) from error
        return cls(inner, chat_template)

    @classmethod
    def from_folder(cls, folder: str | Path) -> "Tokenizer":
        """Reads tokenizer.json and the chat template of a Hugging Face folder.

        Raises:
          FileNotFoundError: the folder has no tokenizer.json.
        """
        path = Path(folder) / "tokenizer.json"
        if not path.is_file():
            raise FileNotFoundError(
                f"no tokenizer at {path}. Pass a Hugging Face folder with a tokenizer.json; "
                "`AutoTokenizer.from_pretrained(...).save_pretrained(folder)` writes one."
            )
        return cls.from_json(path.read_text("utf-8"), read_chat_template(folder))

    @property
    def vocab_size(self) -> int:
        """Number of tokens, added ones included."""
        return self._inner.get_vocab_size()

    def encode(self, text: str, *, add_special: bool = False) -> list[int]:
        """Turns text into tokens; the spelling of a special token becomes that token.

        Args:
          text: any text.
          add_special: whether to add what the model starts or ends every text with, such as BOS.

        Returns:
          Token ids. Bytes that the vocabulary lacks are left out (SmolLM2 lacks some control
          characters); all other text comes back from `decode(ids, keep_special=True)`.
        """
        return self._inner.encode(text, add_special_tokens=add_special).ids

    def decode(self, ids: Iterable[int], *, keep_special: bool = False) -> str:
        """Turns tokens into text; negative ids (PAD) are skipped.

        Args:
          ids: tokens of any integer type.
          keep_special: whether special tokens are spelled out rather than left out.

        Returns:
          The text; bytes that are no UTF-8 become U+FFFD.
        """
        kept = [int(token) for token in ids if token >= 0]
        return self._inner.decode(kept, skip_special_tokens=not keep_special)

    def stream(self, *, keep_special: bool = False) -> "TextStream":
        """Starts decoding a text that arrives token by token."""
        return TextStream(self, keep_special=keep_special)

    def chat(self, prompt: str | Messages) -> list[int]:
        """Encodes a question, or a conversation, so that the model answers next.

        Args:
          prompt: the user's text, or messages with a role and a content each.

        Returns:
          Token ids; see `render_chat` for the forms. A model without a known form gets plain text
          with its BOS.

        Raises:
          ValueError: there is no message, or one without role or content.

        Example:
          tokenizer.chat("What is the capital of France?")
        """
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        text, is_chat = render_chat(messages, self.chat_template)
        return self.encode(text, add_special=not is_chat)


class TextStream:
    """Decodes tokens as they come, never half a character.

    Example:
      stream = tokenizer.stream()
      for ids in steps: print(stream.push(ids), end="")
      print(stream.finish())
    """

    def __init__(self, tokenizer: Tokenizer, *, keep_special: bool):
        self._tokenizer = tokenizer
        self._keep_special = keep_special
        self._ids: list[int] = []
        self._num_shown = 0  # characters of the text of `_ids` that the caller has

    def push(self, ids: Iterable[int]) -> str:
        """Returns the text that these tokens complete; "" while a character lacks bytes."""
        new = [int(token) for token in ids if token >= 0]
        self._ids += new
        text = self._decode(self._ids)
        complete = text.rstrip("\ufffd")  # a character that may still get its last bytes
        shown, self._num_shown = self._num_shown, max(self._num_shown, len(complete))
        if complete == text:
            self._forget(new)
        return complete[shown:]

    def finish(self) -> str:
        """Returns what was held back, with U+FFFD for bytes that are no character."""
        rest = self._decode(self._ids)[self._num_shown :]
        self._ids, self._num_shown = [], 0
        return rest

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, keep_special=self._keep_special)

    def _forget(self, newest: list[int]) -> None:
        """Keeps only `newest` as context, if its first bytes start a character."""
        text = self._decode(newest)
        if text and not text.startswith("\ufffd"):
            self._ids, self._num_shown = newest, len(text)


def render_chat(messages: Messages, template: str | None) -> tuple[str, bool]:
    """Writes a conversation in the model's chat form, up to where the assistant speaks.

    The form is recognised in the template; the template itself is not run:
    ChatML (`<|im_start|>`, with the template's own default system message) and Llama-3 headers
    (without the dates that Llama 3.1 adds to the system message). Anything else becomes the plain
    contents, one a line.

    Args:
      messages: the conversation, oldest first.
      template: Jinja chat template, or None.

    Returns:
      (text, is_chat): the prompt, and whether a chat form was found.

    Raises:
      ValueError: there is no message, or one without role or content.

    Example:
      render_chat([{"role": "user", "content": "Hi"}], template)
    """
    if not messages or any({"role", "content"} - message.keys() for message in messages):
        raise ValueError(
            f"chat: `messages` is {messages!r}, wanted at least one "
            "{'role': ..., 'content': ...}. Add the missing key."
        )
    turns = [(message["role"], message["content"]) for message in messages]
    template = template or ""
    if "<|im_start|>" in template:
        # A literal text only: one with quotes or braces is put together by the template.
        default = re.search(r"<\|im_start\|>system(?:\n|\\n)([^'{}]+?)<\|im_end\|>", template)
        if default and turns[0][0] != "system":
            turns.insert(0, ("system", default[1]))
        text = "".join(f"<|im_start|>{role}\n{said}<|im_end|>\n" for role, said in turns)
        return text + "<|im_start|>assistant\n", True
    if "<|start_header_id|>" in template:
        head = "<|start_header_id|>{}<|end_header_id|>\n\n"
        text = "".join(f"{head.format(role)}{said.strip()}<|eot_id|>" for role, said in turns)
        return "<|begin_of_text|>" + text + head.format("assistant"), True
    return "\n".join(said for _, said in turns), False


def read_chat_template(folder: str | Path) -> str | None:
    """Finds the chat template of a Hugging Face folder: a file of its own or in the settings."""
    own = Path(folder) / "chat_template.jinja"
    if own.is_file():
        return own.read_text("utf-8")
    settings = Path(folder) / "tokenizer_config.json"
    template = read_json(settings).get("chat_template") if settings.is_file() else None
    if isinstance(template, list) and all(isinstance(entry, dict) for entry in template):
        named = {entry.get("name"): entry.get("template") for entry in template}
        template = named.get("default")
    if template is not None and not isinstance(template, str):
        raise ValueError(
            f"{settings}: chat_template is {template!r}, wanted a text, or a list of "
            '{"name": ..., "template": ...}. Fetch the file again.'
        )
    return template


def gguf_tokenizer_json(metadata: Mapping[str, Any], *, source: str = "GGUF") -> str | None:
    """Rebuilds a Hugging Face tokenizer.json from the metadata of a GGUF file.

    Args:
      metadata: the file's `tokenizer.ggml.*` values by full name.
      source: what errors call the file.

    Returns:
      Content of a tokenizer.json, or None where the file has no tokenizer.

    Raises:
      ValueError: the tokenizer is no byte-level BPE, cuts text by an unknown rule, or a value has
        another type than it should.

    Source: llama.cpp src/llama-vocab.cpp, which names the rules.
    """

    def get(key: str, kind: type, default: Any) -> Any:
        """Reads a value; `kind` is that of its items where the default is a list."""
        value = metadata.get(f"tokenizer.ggml.{key}", default)
        items = value if isinstance(default, list) else [value]
        if not isinstance(items, list) or not all(isinstance(item, kind) for item in items):
            raise ValueError(
                f"{source}: metadata `tokenizer.ggml.{key}` is {str(value)[:60]}, wanted "
                f"{'a list of ' * isinstance(default, list)}{kind.__name__}. Convert the model "
                "again with a current llama.cpp."
            )
        return value

    model = get("model", str, "none")
    if model == "none":
        return None
    pre = get("pre", str, "default")
    if model != "gpt2" or pre not in _PRE_TOKENIZERS:
        raise ValueError(
            f"{source}: tokenizer model {model!r} with pre-tokenizer {pre!r} is not supported, "
            f"wanted 'gpt2' (byte-level BPE) with one of {', '.join(_PRE_TOKENIZERS)}. "
            "Pass the model's Hugging Face folder, which has a tokenizer.json."
        )
    tokens = get("tokens", str, [])
    types = get("token_type", int, [1] * len(tokens))
    merges = get("merges", str, [])
    if not merges or len(types) != len(tokens):
        raise ValueError(
            f"{source}: the vocabulary has {len(tokens)} tokens, {len(types)} token types and "
            f"{len(merges)} merges, wanted a type for each token and at least one merge. "
            "Convert the model again with a current llama.cpp."
        )
    rule = _PRE_TOKENIZERS[pre]
    added = [
        {
            "id": index,
            "content": token,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": kind == _CONTROL,
        }
        for index, (token, kind) in enumerate(zip(tokens, types, strict=True))
        if kind in (_CONTROL, _USER_DEFINED)
    ]
    vocab = {
        token: index
        for index, (token, kind) in enumerate(zip(tokens, types, strict=True))
        if kind != _UNUSED
    }
    bos = get("bos_token_id", int, -1)
    adds_bos = get("add_bos_token", bool, rule is _LLAMA3) and bos >= 0
    if adds_bos and bos >= len(tokens):
        raise ValueError(
            f"{source}: metadata `tokenizer.ggml.bos_token_id` is {bos}, wanted one of the "
            f"{len(tokens)} tokens. Convert the model again with a current llama.cpp."
        )
    return json.dumps(
        {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": added,
            "normalizer": {"type": "NFC"} if rule is _QWEN2 else None,
            "pre_tokenizer": {"type": "Sequence", "pretokenizers": rule},
            "post_processor": _start_with(tokens[bos], bos) if adds_bos else None,
            "decoder": _BYTE_LEVEL | {"use_regex": True},
            "model": {
                "type": "BPE",
                "dropout": None,
                "unk_token": None,
                "continuing_subword_prefix": None,
                "end_of_word_suffix": None,
                "fuse_unk": False,
                "byte_fallback": False,
                # Llama-3 takes a whole word of the vocabulary even if no merges lead to it.
                "ignore_merges": rule is _LLAMA3,
                "vocab": vocab,
                "merges": [merge.split(" ") for merge in merges],
            },
        },
        ensure_ascii=False,
    )


def _start_with(token: str, token_id: int) -> dict[str, Any]:
    special = {"SpecialToken": {"id": token, "type_id": 0}}
    first, second = ({"Sequence": {"id": name, "type_id": 0}} for name in "AB")
    return {
        "type": "TemplateProcessing",
        "single": [special, first],
        "pair": [special, first, second],
        "special_tokens": {token: {"id": token, "ids": [token_id], "tokens": [token]}},
    }
