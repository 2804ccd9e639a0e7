"""Encoding and decoding of text with a model's tokenizer.json and chat template."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from jspec._checks import read_json, warn
from jspec.text.chat import ChatTemplate, Messages, render_chat
from jspec.text.files import read_text_files, special_tokens, token_text
from jspec.text.stream import TextStream


class Tokenizer:
    """Encodes, decodes and applies the chat template of a model.

    Attributes:
      chat_template: the model's Jinja template, or several by name; None for a model without one.
      special_tokens: texts of `bos_token`, `eos_token` and others, as far as the model names them.
    """

    def __init__(
        self,
        inner: Any,
        chat_template: ChatTemplate | None = None,
        config: Mapping[str, Any] | None = None,
    ):
        """Wraps a tokenizer, and adds the settings and tokens of `config` to it.

        Args:
          inner: a `tokenizers.Tokenizer`.
          chat_template: see the attributes.
          config: content of a tokenizer_config.json.
        """
        config = config or {}
        self._inner = inner
        self.chat_template = chat_template
        self.special_tokens = special_tokens(config)
        self._wants_bos = config.get("add_bos_token") is True
        _add_tokens(inner, config, self.special_tokens)
        inner.encode_special_tokens = config.get("split_special_tokens") is True
        inner.no_truncation()  # some files have the setting of their training
        inner.no_padding()

    @classmethod
    def from_json(
        cls,
        text: str,
        chat_template: ChatTemplate | None = None,
        config: Mapping[str, Any] | None = None,
    ) -> "Tokenizer":
        """Builds a tokenizer from the content of a Hugging Face tokenizer.json.

        Args:
          text: the content.
          chat_template: see the class.
          config: content of tokenizer_config.json.

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
        return cls(inner, chat_template, config)

    @classmethod
    def from_folder(cls, folder: str | Path) -> "Tokenizer":
        """Reads the tokenizer, the special tokens and the chat template of a Hugging Face folder.

        Raises:
          FileNotFoundError: the folder has no tokenizer.json.
          ValueError: a file is damaged.
        """
        folder = Path(folder)
        config = folder / "config.json"
        files = read_text_files(folder, read_json(config) if config.is_file() else {})
        if files.tokenizer_json is None:
            raise FileNotFoundError(
                f"no tokenizer at {folder / 'tokenizer.json'}. Pass a Hugging Face folder with a "
                "tokenizer.json; `AutoTokenizer.from_pretrained(...).save_pretrained(folder)` "
                "writes one."
            )
        return cls.from_json(files.tokenizer_json, files.chat_template, files.tokenizer_config)

    @property
    def vocab_size(self) -> int:
        """Number of tokens, added ones included."""
        return self._inner.get_vocab_size()

    def encode(self, text: str, *, add_special: bool = False) -> list[int]:
        """Turns text into tokens; the text of a special token becomes that token.

        Args:
          text: any text.
          add_special: whether to add the special tokens that tokenizer.json adds to every text,
            such as BOS. `add_bos_token` of tokenizer_config.json is not applied, as in transformers
            5, with a warning where the two differ.

        Returns:
          Token ids. Bytes that the vocabulary lacks are left out (SmolLM2 lacks some control
          characters); `decode(ids, keep_special=True)` restores all other text.
        """
        ids = self._inner.encode(text, add_special_tokens=add_special).ids
        bos = self.special_tokens.get("bos_token")
        if add_special and self._wants_bos and bos is not None:
            if ids[:1] != [self._inner.token_to_id(bos)]:
                warn(
                    "tokenizer_config.json says add_bos_token, and tokenizer.json, which decides, "
                    f"does not add it. Begin the text with {bos!r} to have it."
                )
        return ids

    def decode(self, ids: Iterable[int], *, keep_special: bool = False) -> str:
        """Turns tokens into text; negative ids (PAD) are skipped.

        Args:
          ids: tokens of any integer type.
          keep_special: whether the text includes special tokens.

        Returns:
          The text; bytes that are no UTF-8 become U+FFFD.
        """
        kept = [int(token) for token in ids if token >= 0]
        return self._inner.decode(kept, skip_special_tokens=not keep_special)

    def stream(self, *, keep_special: bool = False) -> TextStream:
        """Returns an incremental decoder."""
        return TextStream(lambda ids: self.decode(ids, keep_special=keep_special))

    def chat(self, prompt: str | Messages, *, template: str | None = None) -> list[int]:
        """Encodes a text or a conversation with the chat template and a generation prompt.

        The tokens are those of transformers' `apply_chat_template`. A text for a model without a
        chat template is encoded unchanged, with the special tokens of tokenizer.json and a warning.

        Args:
          prompt: the user's text, or messages with a role and a content each.
          template: name of the template, where the model has several; `default` by default.

        Returns:
          Token ids.

        Raises:
          ImportError, ValueError: as `render_chat`; messages need a template.

        Example:
          tokenizer.chat("What is the capital of France?")
        """
        if isinstance(prompt, str):
            if not self.chat_template and template is None:
                warn(
                    "the model has no chat template: the text is continued as it stands. Pass a "
                    "template (--chat-template FILE), or say that this is wanted (--raw)."
                )
                return self.encode(prompt, add_special=True)
            prompt = [{"role": "user", "content": prompt}]
        text = render_chat(prompt, self.chat_template, self.special_tokens, name=template)
        return self.encode(text)


def _add_tokens(inner: Any, config: Mapping[str, Any], special: Mapping[str, str]) -> None:
    """Adds tokens of tokenizer_config.json that tokenizer.json lacks, or lacks as special ones."""
    from tokenizers import AddedToken

    present = {token.content: token.special for token in inner.get_added_tokens_decoder().values()}
    decoder = config.get("added_tokens_decoder")
    for _, token in sorted((decoder or {}).items(), key=lambda item: int(item[0])):
        if token["content"] not in present:
            present[token["content"]] = bool(token.get("special"))
            inner.add_tokens([AddedToken(**{k: v for k, v in token.items() if k != "__type"})])
    extra = config.get("extra_special_tokens") or config.get("additional_special_tokens")
    texts = [token_text(config.get(name)) for name in special]
    texts += map(token_text, extra if isinstance(extra, list) else ())
    texts += [text for text in special.values() if inner.token_to_id(text) is not None]
    new = dict.fromkeys(text for text in texts if text is not None and not present.get(text))
    inner.add_special_tokens([AddedToken(text, normalized=False) for text in new])
