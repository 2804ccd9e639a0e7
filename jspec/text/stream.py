"""Incremental decoding of text."""

from collections.abc import Callable, Iterable


class TextStream:
    """Decodes tokens incrementally, in whole characters.

    For valid UTF-8, the joined parts equal decoding all tokens at once. Invalid bytes become
    U+FFFD; in a run of SentencePiece byte tokens, valid characters are returned as soon as they are
    complete, where decoding at once takes the whole run for invalid.
    `tokenizers.decoders.DecodeStream` gives the same parts, but no end of a text that ends within a
    character, and raises where such a run changes.

    Args:
      decode: converts token ids to text.

    Example:
      stream = tokenizer.stream()
      for ids in steps: print(stream.push(ids), end="")
      print(stream.finish())
    """

    def __init__(self, decode: Callable[[list[int]], str]):
        self._decode = decode
        self._ids: list[int] = []
        self._num_shown = 0  # characters of the text of `_ids` that the caller has

    def push(self, ids: Iterable[int]) -> str:
        """Returns the text that these tokens complete; "" while a character is incomplete."""
        new = [int(token) for token in ids if token >= 0]
        self._ids += new
        text = self._decode(self._ids)
        complete = text.rstrip("\ufffd")  # a character that may still get its last bytes
        shown, self._num_shown = self._num_shown, max(self._num_shown, len(complete))
        if complete == text:
            self._forget(new)
        return complete[shown:]

    def finish(self) -> str:
        """Returns the rest of the text, with U+FFFD for an incomplete character."""
        rest = self._decode(self._ids)[self._num_shown :]
        self._ids, self._num_shown = [], 0
        return rest

    def _forget(self, newest: list[int]) -> None:
        """Keeps only `newest` as context, if its first bytes start a character."""
        text = self._decode(newest)
        if text and not text.startswith("\ufffd"):
            self._ids, self._num_shown = newest, len(text)
