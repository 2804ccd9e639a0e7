"""Recorded models with a tokenizer, so that they take text."""

import shutil
from pathlib import Path

import tokenizers

from tests.conftest import GOLDEN


def with_tokenizer(path: Path, name: str) -> Path:
    """Copies a recorded model and gives it a tokenizer of one token per ASCII character."""
    shutil.copytree(GOLDEN / "models" / name, path)
    (path / "tokenizer.json").write_text(character_tokenizer().to_str())
    return path


def character_tokenizer() -> tokenizers.Tokenizer:
    """Makes a tokenizer of one token per ASCII character."""
    vocab = {chr(i): i for i in range(128)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocab, merges=[]))
    tokenizer.decoder = tokenizers.decoders.Fuse()
    return tokenizer
