"""The files of a Hugging Face folder that define tokenizer, chat template and stop tokens."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from jspec._checks import check_at_least, read_json
from jspec.text.chat import ChatTemplate

_CLASS_TOKENS = {
    "LlamaTokenizer": {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"},
    "Qwen2Tokenizer": {"eos_token": "<|endoftext|>", "pad_token": "<|endoftext|>"},
    "GemmaTokenizer": {"bos_token": "<bos>", "eos_token": "<eos>", "unk_token": "<unk>"},
}
"""Special tokens of a class in transformers, where tokenizer_config.json does not name them."""


class TextFiles(NamedTuple):
    """Tokenizer, chat template and stop tokens of a model.

    Attributes:
      tokenizer_json: content of tokenizer.json, None where there is none.
      tokenizer_config: content of tokenizer_config.json without the chat template, None where
        there is none.
      chat_template: the Jinja template, or several by name; None where there is none.
      stop_ids: tokens that end a text, ascending.
    """

    tokenizer_json: str | None
    tokenizer_config: dict[str, Any] | None
    chat_template: ChatTemplate | None
    stop_ids: tuple[int, ...]


def read_text_files(folder: Path, config: Mapping[str, Any]) -> TextFiles:
    """Reads tokenizer, chat template and stop tokens of a folder.

    Stop tokens are those of generation_config.json, as in transformers' `generate`; if it names
    none, those of config.json and the `eos_token` of tokenizer_config.json.

    Args:
      folder: of the model.
      config: content of its config.json.

    Raises:
      ValueError: a file is damaged, or a value in it has a wrong type.
    """
    tokenizer_json = _read_text(folder / "tokenizer.json")
    tokenizer_config = _tokenizer_config(folder)
    stop_ids = _eos_ids(_read_optional(folder / "generation_config.json"), "generation_config.json")
    if not stop_ids:
        stop_ids = _eos_ids(config, "config.json")
        eos = special_tokens(tokenizer_config).get("eos_token")
        found = None if eos is None else _token_id(eos, tokenizer_json, tokenizer_config)
        stop_ids += [] if found is None else [found]
    return TextFiles(
        tokenizer_json,
        tokenizer_config,
        read_chat_template(folder),
        tuple(sorted(set(stop_ids))),
    )


def read_chat_template(folder: str | Path) -> ChatTemplate | None:
    """Reads the chat template of a Hugging Face folder, or several by name.

    As in transformers, chat_template.jinja (`default`) and additional_chat_templates/NAME.jinja
    replace the template in tokenizer_config.json; chat_template.json, which image processors wrote,
    has the lowest priority.

    Raises:
      ValueError: the content of a file is no template.
    """
    folder = Path(folder)
    own = {"default": _read_text(folder / "chat_template.jinja")}
    more = sorted((folder / "additional_chat_templates").glob("*.jinja"))
    named = own | {file.stem: _read_text(file) for file in more}
    found = {name: text for name, text in named.items() if text is not None}
    if found:
        return single_or_named(found)
    for name in ("tokenizer_config.json", "chat_template.json"):
        template = _read_optional(folder / name).get("chat_template")
        if template is not None:
            return _as_template(template, folder / name)
    return None


def special_tokens(tokenizer_config: Mapping[str, Any] | None) -> dict[str, str]:
    """Returns the texts of `bos_token`, `eos_token` and others, for chat templates."""
    config = dict(tokenizer_config or {})
    kind = str(config.get("tokenizer_class")).removesuffix("Fast")
    extra = config.get("extra_special_tokens")
    named = config | (extra if isinstance(extra, dict) else {})
    named = _CLASS_TOKENS.get(kind, {}) | {k: v for k, v in named.items() if k.endswith("_token")}
    texts = {name: token_text(token) for name, token in named.items()}
    return {name: text for name, text in texts.items() if text is not None}


def single_or_named(templates: dict[str, str]) -> ChatTemplate:
    """Returns the template itself if `default` is the only one."""
    return templates["default"] if templates.keys() == {"default"} else templates


def token_text(token: Any) -> str | None:
    """Returns the text of a token, which files store as a str or as an object with options."""
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else None


def _tokenizer_config(folder: Path) -> dict[str, Any] | None:
    files = [folder / name for name in ("tokenizer_config.json", "special_tokens_map.json")]
    if not any(file.is_file() for file in files):
        return None
    config, older = map(_read_optional, files)
    if "added_tokens_decoder" not in config:  # files with it have all of the older one
        config |= older
    config.pop("chat_template", None)
    return config


def _eos_ids(config: Mapping[str, Any], source: str) -> list[int]:
    eos = config.get("eos_token_id")
    ids = [] if eos is None else eos if isinstance(eos, list) else [eos]
    for token in ids:
        check_at_least(source, 0, eos_token_id=token)
    return ids


def _token_id(
    text: str, tokenizer_json: str | None, tokenizer_config: Mapping[str, Any] | None
) -> int | None:
    """Returns the id of a token, None where the files do not have it."""
    added = (tokenizer_config or {}).get("added_tokens_decoder")
    if isinstance(added, dict):
        for index, token in added.items():
            if token_text(token) == text and str(index).isdecimal():
                return int(index)
    try:
        content = json.loads(tokenizer_json or "{}")
        for token in content.get("added_tokens") or ():
            if token["content"] == text:
                return token["id"]
        vocab = (content.get("model") or {}).get("vocab") or {}
        if isinstance(vocab, list):  # of (text, score)
            return next((i for i, (piece, _) in enumerate(vocab) if piece == text), None)
        return vocab.get(text)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(
            f"tokenizer.json cannot be read ({error}). Fetch the file again."
        ) from error


def _as_template(template: Any, file: Path) -> ChatTemplate:
    if isinstance(template, str):
        return template
    if isinstance(template, list) and all(isinstance(entry, dict) for entry in template):
        named = {entry.get("name"): entry.get("template") for entry in template}
        if named and all(isinstance(text, str) for pair in named.items() for text in pair):
            return single_or_named(named)
    raise ValueError(
        f"{file}: chat_template is {template!r}, wanted a text, or a list of "
        '{"name": ..., "template": ...}. Fetch the file again.'
    )


def _read_text(file: Path) -> str | None:
    try:
        return file.read_text("utf-8") if file.is_file() else None
    except UnicodeDecodeError as error:
        raise ValueError(f"{file} is no text ({error}). Fetch the file again.") from error


def _read_optional(file: Path) -> dict[str, Any]:
    return read_json(file) if file.is_file() else {}
