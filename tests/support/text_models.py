"""Recorded models with a tokenizer, so that they take text."""

import shutil
from pathlib import Path

import tokenizers

from tests.conftest import GOLDEN


def with_tokenizer(path: Path, name: str) -> Path:
    """Copies a recorded model, with a token per ASCII character and messages one a line."""
    shutil.copytree(GOLDEN / "models" / name, path)
    (path / "tokenizer.json").write_text(character_tokenizer().to_str())
    (path / "chat_template.jinja").write_text(
        "{% for m in messages %}{{ m.content }}{{ '' if loop.last else '\n' }}{% endfor %}"
    )
    return path


def character_tokenizer() -> tokenizers.Tokenizer:
    """Makes a tokenizer of one token per ASCII character."""
    vocab = {chr(i): i for i in range(128)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocab, merges=[]))
    tokenizer.decoder = tokenizers.decoders.Fuse()
    return tokenizer
