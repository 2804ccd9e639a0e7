"""Prompts that the words of a command name: texts, files, JSON lines."""

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from jspec.text import Tokenizer

Prompt: TypeAlias = str | list[dict[str, str]]
"""A text, or the messages of a conversation."""

_KEYS = ("role", "content")
"""What a message has."""

_UNSUPPORTED = ("tools", "documents", "chat_template_kwargs")
"""What a line may have beside messages, for templates that take it."""


def add_options(add: Callable[..., Any]) -> None:
    """Adds the options of prompts to a command."""
    add("--prompt", action="append", help="text; may be given several times")
    add(
        "--prompt-file",
        action="append",
        metavar="FILE",
        help='a text file is one prompt; a .jsonl file has one a line, {"prompt": "..."} or '
        '{"messages": [...]}; - reads one from standard input',
    )


def add_form_options(add: Callable[..., Any]) -> None:
    """Adds the options of how prompts become tokens to a command."""
    add("--raw", action="store_true", help="continue the text itself, without the chat template")
    add(
        "--no-special-tokens",
        action="store_true",
        help="--raw: leave out what the tokenizer begins every text with, such as BOS",
    )
    add(
        "--chat-template",
        metavar="NAME|FILE",
        help="one of several templates of the model, or a file with another one",
    )


def check_form(arguments: argparse.Namespace) -> None:
    """Raises ValueError for options of `add_form_options` that have no effect together."""
    if arguments.raw and arguments.chat_template is not None:
        raise ValueError("--chat-template has no effect with --raw. Leave one of them out.")
    if arguments.no_special_tokens and not arguments.raw:
        raise ValueError(
            "--no-special-tokens has no effect without --raw: a chat template writes all special "
            "tokens itself. Leave it out, or pass both."
        )


def read(arguments: argparse.Namespace) -> list[Prompt]:
    """Collects the prompts of a command: those of `--prompt`, then those of the files.

    Raises:
      ValueError: there is none, a line is no prompt, or a file is no text. OSError: a file cannot
        be read.
    """
    prompts: list[Prompt] = [_checked(text, "--prompt") for text in arguments.prompt or ()]
    for name in arguments.prompt_file or ():
        prompts += read_file(name)
    if not prompts:
        raise ValueError("there is no prompt. Pass --prompt TEXT or --prompt-file FILE.")
    return prompts


def read_file(name: str) -> list[Prompt]:
    """Reads a file of prompts; one that does not end in .jsonl is a single one.

    Raises: as `read`.
    """
    if name != "-" and not Path(name).is_file():
        raise ValueError(f"{name} is no file. Pass a text file, or a .jsonl file of prompts.")
    try:
        text = sys.stdin.read() if name == "-" else Path(name).read_text("utf-8")
        text = text.removeprefix("\ufeff")  # some editors begin UTF-8 files with it
    except UnicodeDecodeError as error:
        raise ValueError(f"{name} is no UTF-8 text ({error}). Save it as UTF-8.") from error
    if not name.endswith(".jsonl"):
        return [_checked(text.removesuffix("\n"), name)]
    lines = enumerate(text.split("\n"), start=1)
    prompts = [_parse(line, f"{name}, line {number}") for number, line in lines if line.strip()]
    if not prompts:
        raise ValueError(f"{name} holds no prompt, wanted one a line. Add some.")
    return prompts


def encode(
    tokenizer: Tokenizer, prompts: Sequence[Prompt], *, raw: bool, special_tokens: bool = True
) -> list[list[int]]:
    """Encodes prompts in the model's chat form, or as they stand.

    Texts for a model without a chat template are taken as they stand, and a line on standard error
    says so.

    Args:
      tokenizer: the model's.
      prompts: of `read`.
      raw: whether they are taken as they stand.
      special_tokens: whether texts that are taken as they stand get what the tokenizer adds to
        every text, such as BOS.

    Raises:
      ValueError: a conversation is to be taken as it stands, or its template does not take it.
    """
    if raw and not all(isinstance(prompt, str) for prompt in prompts):
        raise ValueError(
            'messages have no text to continue as it stands. Leave out --raw, or pass {"prompt": '
            '"..."} lines.'
        )
    texts = [_only_text(prompt) for prompt in prompts]
    if not raw and not tokenizer.chat_template and None not in texts:
        print(
            "jspec: the model has no chat template: prompts are continued as they stand, as with "
            "--raw. --chat-template FILE puts them in a form.",
            file=sys.stderr,
        )
        raw = True
    if raw:
        return [tokenizer.encode(text or "", add_special=special_tokens) for text in texts]
    ids = []
    for index, prompt in enumerate(prompts):
        try:
            ids.append(tokenizer.chat(prompt))
        except ValueError as error:
            raise ValueError(f"prompts[{index}]: {error}") from error
    return ids


def _only_text(prompt: Prompt) -> str | None:
    """Returns what the user says, None for a conversation of several messages."""
    if isinstance(prompt, str):
        return prompt
    lone = len(prompt) == 1 and prompt[0]["role"] == "user"
    return prompt[0]["content"] if lone else None


def _parse(line: str, place: str) -> Prompt:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{place} is not JSON ({error}). Write one object a line.") from error
    for key in _UNSUPPORTED:
        if isinstance(record, dict) and record.get(key):
            raise ValueError(
                f"{place} has {key!r}, which jspec does not pass to chat templates. Leave it out, "
                'or render the prompt with transformers, and pass {"prompt": "..."} with --raw.'
            )
    prompt = record.get("prompt", record.get("messages")) if isinstance(record, dict) else None
    if isinstance(prompt, str) or (isinstance(prompt, list) and prompt and _is_chat(prompt)):
        return _checked(prompt, place)
    raise ValueError(
        f'{place} is {line.strip()[:60]!r}, wanted {{"prompt": "text"}} or {{"messages": '
        '[{"role": "user", "content": "text"}]}. Correct the line.'
    )


def _checked(prompt: Prompt, place: str) -> Prompt:
    """Returns a prompt, or raises ValueError for half a surrogate pair: no tokenizer takes it."""
    parts = [prompt] if isinstance(prompt, str) else [m[k] for m in prompt for k in _KEYS]
    for text in parts:
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ValueError(
                f"{place} has {text[error.start]!r} at character {error.start}, wanted Unicode "
                "text. Write it as UTF-8, and both halves of a \\u pair."
            ) from error
    return prompt


def _is_chat(messages: list[Any]) -> bool:
    return all(
        isinstance(message, dict) and all(isinstance(message.get(key), str) for key in _KEYS)
        for message in messages
    )
