"""Tokenizers, chat templates, streaming and stop tokens of a model."""

from jspec.text.chat import ChatTemplate, Messages, render_chat
from jspec.text.files import TextFiles, read_chat_template, read_text_files
from jspec.text.gguf import gguf_text_files, gguf_tokenizer_json
from jspec.text.stream import TextStream
from jspec.text.tokenizer import Tokenizer

__all__ = [
    "ChatTemplate",
    "Messages",
    "TextFiles",
    "TextStream",
    "Tokenizer",
    "gguf_text_files",
    "gguf_tokenizer_json",
    "read_chat_template",
    "read_text_files",
    "render_chat",
]
