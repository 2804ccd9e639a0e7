"""Prompts of a command: reading from options, files and JSON lines; encoding."""

import argparse
import io
import itertools
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from jspec.metadata import check_prompt
from jspec.models.config import ModelConfig
from jspec.text import Tokenizer

Prompt: TypeAlias = str | list[dict[str, str]]
"""A text, or the messages of a conversation."""

_KEYS = ("role", "content")
"""Keys of a message."""

_UNSUPPORTED = ("tools", "documents", "chat_template_kwargs")
"""Other keys of a line that transformers passes to chat templates."""

_UTF16 = (b"\xff\xfe", b"\xfe\xff")
"""Byte-order marks."""


class CommandPrompt(NamedTuple):
    """A prompt of a command.

    Attributes:
      prompt: text or conversation.
      place: option, or file and line, for messages.
    """

    prompt: Prompt
    place: str


class BadPrompts:
    """Handles errors of prompts that cannot be decoded: raises the first, or counts them.

    Args:
      skip: whether such prompts are skipped, each with a line on standard error.
    """

    def __init__(self, skip: bool = False):
        self._skip = skip
        self.num_skipped = 0

    def take(self, error: ValueError) -> None:
        """Raises the error, or prints it and counts the prompt."""
        if not self._skip:
            raise error
        print(f"jspec: skipped: {error}", file=sys.stderr)
        self.num_skipped += 1


def add_options(add: Callable[..., Any]) -> None:
    """Adds the options of prompts to a command."""
    add("--prompt", action="append", help="text; may be given several times")
    add(
        "--prompt-file",
        action="append",
        metavar="FILE",
        help='a text file is one prompt; a .jsonl file has one a line, {"prompt": "..."} or '
        '{"messages": [...]}; - is standard input; pipes are read',
    )


def add_encoding_options(add: Callable[..., Any]) -> None:
    """Adds the options of reading and encoding prompts to a command."""
    add(
        "--prompt-format",
        choices=("text", "jsonl"),
        help="of files of prompts and of standard input (default: jsonl where the name ends in "
        ".jsonl, else text)",
    )
    add(
        "--skip-bad",
        action="store_true",
        help="leave prompts out that are malformed, empty or too long (default: an error that "
        "names the first, and none is decoded)",
    )
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


def check_encoding_options(arguments: argparse.Namespace) -> None:
    """Raises ValueError for options of `add_encoding_options` that have no effect together."""
    if arguments.raw and arguments.chat_template is not None:
        raise ValueError("--chat-template has no effect with --raw. Leave one of them out.")
    if arguments.no_special_tokens and not arguments.raw:
        raise ValueError(
            "--no-special-tokens has no effect without --raw: a chat template writes all special "
            "tokens itself. Leave it out, or pass both."
        )


def read(arguments: argparse.Namespace, bad: BadPrompts) -> list[CommandPrompt]:
    """Collects the prompts of a command: those of `--prompt`, then those of the files.

    Args:
      arguments: the command's.
      bad: handles malformed lines.

    Raises:
      ValueError: there is no prompt, a line is malformed, or a file is no text. OSError: a file
        cannot be read.
    """
    texts = arguments.prompt or ()
    asked = []
    for number, text in enumerate(texts, start=1):
        place = "--prompt" if len(texts) == 1 else f"--prompt {number}"
        asked.append(CommandPrompt(_checked(text, place), place))
    for name in arguments.prompt_file or ():
        asked += read_file(name, bad, arguments.prompt_format)
    if not asked:
        raise ValueError("there is no prompt. Pass --prompt TEXT or --prompt-file FILE.")
    return asked


def read_file(
    name: str, bad: BadPrompts, prompt_format: str | None = None, most: int | None = None
) -> list[CommandPrompt]:
    """Reads a file or pipe of prompts, "-" being standard input.

    Args:
      name: of the file.
      bad: handles malformed lines.
      prompt_format: "jsonl" has a prompt a line, "text" is a single one; None = by the name.
      most: most prompts to read; None = all.

    Raises: as `read`.
    """
    text = _read_text(name)
    title = "standard input" if name == "-" else name
    is_jsonl = (
        name.lower().endswith(".jsonl") if prompt_format is None else prompt_format == "jsonl"
    )
    if not is_jsonl:
        return [CommandPrompt(_checked(text.removesuffix("\n"), title), title)]
    asked = list(itertools.islice(_lines(text, title, bad), most))
    if not asked:
        raise ValueError(f"{title} holds no prompt, wanted one a line. Add some.")
    return asked


def _read_text(name: str) -> str:
    path = Path(name)
    if name != "-" and path.is_dir():
        raise ValueError(f"{name} is a folder, wanted a file of prompts. Pass a file in it.")
    if name != "-" and not path.exists():
        raise ValueError(f"{name} is no file. Pass a text file, or a .jsonl file of prompts.")
    data = sys.stdin.buffer.read() if name == "-" else path.read_bytes()
    if data.startswith(_UTF16):
        raise ValueError(
            f"{name} is UTF-16 text, wanted UTF-8. Save it as UTF-8 (iconv -f UTF-16 -t UTF-8)."
        )
    try:  # without a byte-order mark; lines end in \n
        return io.TextIOWrapper(io.BytesIO(data), "utf-8-sig").read()
    except UnicodeDecodeError as error:
        raise ValueError(f"{name} is no UTF-8 text ({error}). Save it as UTF-8.") from error


def _lines(text: str, title: str, bad: BadPrompts) -> Iterator[CommandPrompt]:
    for number, line in enumerate(text.split("\n"), start=1):
        place = f"{title}, line {number}"
        if line.strip():
            try:
                yield CommandPrompt(_parse(line, place), place)
            except ValueError as error:
                bad.take(error)


def encode(
    tokenizer: Tokenizer,
    asked: Sequence[CommandPrompt],
    bad: BadPrompts,
    *,
    model: ModelConfig,
    vocab_sizes: Iterable[int | None] = (),
    raw: bool,
    special_tokens: bool = True,
) -> tuple[list[CommandPrompt], list[list[int]]]:
    """Encodes prompts with the model's chat template, or unchanged, and checks their tokens.

    Texts for a model without a chat template are encoded unchanged, with a line on standard error.

    Args:
      tokenizer: the model's.
      asked: of `read`.
      bad: handles prompts that cannot be decoded.
      model: the target's config.
      vocab_sizes: of the drafters, where they have one.
      raw: whether prompts are encoded unchanged.
      special_tokens: whether unchanged texts get the special tokens that the tokenizer adds to
        every text, such as BOS.

    Returns:
      (asked, ids): the prompts that can be decoded, and their tokens.

    Raises:
      ValueError: a conversation is to be encoded unchanged, the template refuses it, or the model
        cannot take its tokens; or no prompt is left.
    """
    texts = [_only_text(each.prompt) for each in asked]
    if not raw and not tokenizer.chat_template and any(text is not None for text in texts):
        print(
            "jspec: the model has no chat template: prompts are continued as they stand, as with "
            "--raw. --chat-template FILE puts them in a form.",
            file=sys.stderr,
        )
    vocab_size = min([model.vocab_size, *(size for size in vocab_sizes if size is not None)])
    kept, ids = [], []
    for each in asked:
        try:
            tokens = _encode(tokenizer, each, raw, special_tokens)
            _check_tokens(each.place, tokens, model.max_positions, vocab_size)
        except ValueError as error:
            bad.take(error)
        else:
            kept.append(each)
            ids.append(tokens)
    if not kept:
        raise ValueError(f"no prompt is left: {bad.num_skipped} were skipped. Correct them.")
    return kept, ids


def _encode(
    tokenizer: Tokenizer, asked: CommandPrompt, raw: bool, special_tokens: bool
) -> list[int]:
    prompt, place = asked
    if raw and not isinstance(prompt, str):
        raise ValueError(
            f"{place}: messages have no text to continue as it stands. Leave out --raw, or pass "
            '{"prompt": "..."} lines.'
        )
    text = _only_text(prompt)
    if raw or (text is not None and not tokenizer.chat_template):
        return tokenizer.encode(text or "", add_special=special_tokens)
    try:
        return tokenizer.chat(prompt)
    except ValueError as error:
        raise ValueError(f"{place}: {error}") from error


def _check_tokens(place: str, tokens: list[int], max_positions: int, vocab_size: int) -> None:
    if len(tokens) >= max_positions:
        raise ValueError(
            f"{place}: the prompt has {len(tokens)} tokens, and the model takes {max_positions}, a "
            "new one included. Shorten it, or leave such prompts out with --skip-bad."
        )
    check_prompt(place, tokens, max_len=max_positions, vocab_size=vocab_size)


def _only_text(prompt: Prompt) -> str | None:
    """Returns the user's text; None for a conversation of several messages."""
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
    """Returns a prompt; raises ValueError for half a surrogate pair, which tokenizers refuse."""
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
