"""Earlier import path of `jspec.text`."""

from jspec.text import Tokenizer, gguf_tokenizer_json, read_chat_template, render_chat

__all__ = ["Tokenizer", "gguf_tokenizer_json", "read_chat_template", "render_chat"]
