"""Text that arrives token by token."""

from collections.abc import Callable, Iterable


class TextStream:
    """Decodes tokens as they come, never half a character.

    On text, the parts together are what decoding all tokens at once gives. Bytes that are no text
    become U+FFFD; where a SentencePiece vocabulary spells them, characters beside them are shown
    as soon as they are whole, while decoding at once takes the whole run of bytes for no text.
    `tokenizers.decoders.DecodeStream` gives the same parts, but never the last ones of a text that
    ends within a character, and raises where such a run of bytes changes.

    Args:
      decode: turns token ids into text.

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

    def _forget(self, newest: list[int]) -> None:
        """Keeps only `newest` as context, if its first bytes start a character."""
        text = self._decode(newest)
        if text and not text.startswith("\ufffd"):
            self._ids, self._num_shown = newest, len(text)
