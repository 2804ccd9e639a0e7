"""Output while prompts are decoded: streamed text, JSON records, a progress line."""

import json
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

from jspec.text import Tokenizer

_INTERVAL = 0.1  # seconds between two states of the progress line


class EndDetector:
    """Finds out when prompts end, from their new tokens.

    Args:
      budgets: most new tokens of each prompt.
      stop_ids: tokens that end a text.
    """

    def __init__(self, budgets: Sequence[int], stop_ids: Sequence[int]):
        self._left = list(budgets)
        self._stop_ids = frozenset(stop_ids)

    def take(self, index: int, tokens: list[int]) -> str | None:
        """Returns the finish reason of a prompt that ends with these tokens, else None."""
        self._left[index] -= len(tokens)
        if tokens[-1] in self._stop_ids:
            return "stop"
        return None if self._left[index] > 0 else "length"


class Records:
    """Collects the JSON record of each prompt, and prints it when the prompt ends.

    Args:
      tokenizer: the model's.
      ends: of the prompts.
      fields: first fields of each record.
      shown: whether records are printed.

    Attributes:
      records: of the prompts, in their order; complete once all have ended.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        ends: EndDetector,
        fields: Sequence[Mapping[str, Any]],
        *,
        shown: bool,
    ):
        self._tokenizer, self._ends, self._shown = tokenizer, ends, shown
        self.records = [
            {**each, "tokens": 0, "accepted_tokens": 0, "finish_reason": "length", "token_ids": []}
            for each in fields
        ]

    def __call__(self, index: int, tokens: list[int], num_accepted: int) -> None:
        """Handles a prompt's new tokens; see `jspec.runtime.scheduling.OnTokens`."""
        record = self.records[index]
        record["token_ids"] += tokens
        record["tokens"] += len(tokens)
        record["accepted_tokens"] += num_accepted
        reason = self._ends.take(index, tokens)
        if reason is not None:
            record["finish_reason"] = reason
            record["text"] = self._tokenizer.decode(record["token_ids"])
            if self._shown:
                print(json.dumps(record), flush=True)


class Text:
    """Prints continuations one after the other; accepted drafts are highlighted on a terminal.

    Of prompts that are decoded together, the first that has not ended is streamed; the text of the
    others is buffered.

    Args:
      tokenizer: the model's.
      ends: of the prompts.
      titles: of the prompts, printed before each text, where there are several.
    """

    def __init__(self, tokenizer: Tokenizer, ends: EndDetector, titles: Sequence[str]):
        self._tokenizer, self._ends = tokenizer, ends
        self._titles = titles if len(titles) > 1 else ()
        self._has_ended = [False] * len(titles)
        self._waiting: list[list[tuple[list[int], int]]] = [[] for _ in titles]
        self._current, self._has_title = 0, False
        self._stream = tokenizer.stream()
        self._bold, self._dim, self._plain = (
            ("\033[1;32m", "\033[2m", "\033[0m") if sys.stdout.isatty() else ("", "", "")
        )

    def __call__(self, index: int, tokens: list[int], num_accepted: int) -> None:
        """Handles a prompt's new tokens; see `jspec.runtime.scheduling.OnTokens`."""
        self._has_ended[index] = self._ends.take(index, tokens) is not None
        self._waiting[index].append((tokens, num_accepted))
        while self._current < len(self._has_ended):
            for kept, accepted in self._waiting[self._current]:
                self._print(kept, accepted)
            self._waiting[self._current].clear()
            if not self._has_ended[self._current]:
                break
            self._end()

    def _begin(self) -> None:
        if self._titles and not self._has_title:
            title = self._titles[self._current]
            print(f"{self._dim}[{self._current + 1}] {title}{self._plain}")
        self._has_title = True

    def _end(self) -> None:
        self._begin()
        print(self._stream.finish(), end="\n\n")
        self._current, self._has_title = self._current + 1, False
        self._stream = self._tokenizer.stream()

    def _print(self, tokens: list[int], num_accepted: int) -> None:
        self._begin()
        push = self._stream.push
        accepted, rest = push(tokens[:num_accepted]), push(tokens[num_accepted:])
        marked = f"{self._bold}{accepted}{self._plain}" if accepted else ""
        print(marked, rest, sep="", end="", flush=True)


class Progress:
    """Shows a progress line on standard error, where that is a terminal.

    Args:
      title: beginning of the line.
      num_prompts: of the run.
    """

    def __init__(self, title: str, num_prompts: int):
        self._title = title
        self._num_prompts = num_prompts
        self._seen: set[int] = set()
        self._num_tokens = self._num_first = self._num_accepted = 0
        self._begin = self._shown = 0.0
        self._write("compiling, up to a minute the first time")

    def __call__(self, index: int, tokens: list[int], num_accepted: int) -> None:
        """Handles a prompt's new tokens; see `jspec.runtime.scheduling.OnTokens`."""
        now = time.perf_counter()
        if not self._seen:  # everything is compiled by now: timing starts after these tokens
            self._begin, self._num_first = now, len(tokens)
        self._seen.add(index)
        self._num_tokens += len(tokens)
        self._num_accepted += num_accepted
        if now - self._shown < _INTERVAL:
            return
        self._shown = now
        done = len(self._seen)
        filled = "#" * round(20 * done / self._num_prompts)
        text = (
            f"[{filled:20}] prompt {done}/{self._num_prompts}, {self._num_tokens} tokens, "
            f"{self._num_accepted} accepted drafts"
        )
        if now > self._begin:  # the first tokens are not timed
            speed = (self._num_tokens - self._num_first) / (now - self._begin)
            text += f", {speed:.1f} tokens/s"
        self._write(text)

    def finish(self) -> None:
        """Clears the line."""
        if sys.stderr.isatty():
            print("\r\033[K", end="", file=sys.stderr, flush=True)

    def _write(self, text: str) -> None:
        if sys.stderr.isatty():
            print(f"\r\033[K{self._title}: {text}", end="", file=sys.stderr, flush=True)
