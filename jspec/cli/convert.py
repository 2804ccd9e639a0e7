"""`python -m jspec convert`: models from Hugging Face or GGUF form to Orbax, and back."""

import argparse
import json
import shutil
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jspec import checkpoint, proposers
from jspec.checkpoint import Model
from jspec.checkpoint.export import write_folder
from jspec.checkpoint.new_folder import check_free
from jspec.cli import drafters, models
from jspec.config import read_json
from jspec.loading import load
from jspec.models import llama
from jspec.proposers.base import Drafter
from jspec.saving import restore, save

EXAMPLES = """examples:
  python -m jspec convert path/to/folder saved --dtype bfloat16
  python -m jspec convert model.gguf saved
  python -m jspec convert path/to/head saved-head --target path/to/folder
  python -m jspec convert saved folder-again
  python -m jspec convert saved-head head-again --target path/to/folder
  python -m jspec convert model.gguf folder --to hf
"""

_ORIGIN = "origin.json"
"""File beside a saved drafter: what its params do not say about the folder that it came from."""


class _Origin(NamedTuple):
    """The folder that a drafter came from.

    Attributes:
      config: content of its config.json.
      names: of its tensors.
    """

    config: Mapping[str, Any]
    names: Collection[str]


def add_to(commands: Any) -> None:
    """Adds the command to a parser's commands."""
    convert = commands.add_parser(
        "convert",
        help="write a model in another form: Hugging Face or GGUF to Orbax, and back",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    convert.set_defaults(run=_run)
    add = convert.add_argument
    add("source", help="Hugging Face folder, .gguf file, or folder of jspec.save")
    add("destination", help="folder to make; it must not exist")
    add(
        "--to",
        choices=("orbax", "hf"),
        help="form to write (default: hf for a folder of jspec.save, orbax for the others)",
    )
    add(
        "--target",
        metavar="PATH",
        help="the source is a drafter for this model; what both share is not written twice",
    )
    add("--method", help="--target: method of the drafter (default: the one that recognises it)")
    add("--dtype", help="of the weights that are written (default: float32; saved: its own)")


def _run(arguments: argparse.Namespace) -> int:
    destination = Path(arguments.destination)
    check_free(destination)
    if arguments.method is not None:
        proposers.find(arguments.method)
        if arguments.target is None:
            raise ValueError("--method has no effect without --target. Leave it out.")
    source = models.find("source", arguments.source)
    is_saved = models.is_saved(source)
    if is_saved and arguments.dtype is not None:
        raise ValueError(
            f"--dtype has no effect with {source}, which keeps the one that it was saved in. Leave "
            "it out."
        )
    dtype = arguments.dtype or "float32"
    models.check_dtype(dtype)
    target = None
    if arguments.target is not None:
        target = models.open_model(arguments.target, dtype, option="--target", quiet=True)
    found: Model | Drafter
    if target is not None:
        found = drafters.open_drafter(source, target, method=arguments.method)
    else:
        found = restore(source) if is_saved else load(source, dtype)
    origin = _origin(source) if isinstance(found, Drafter) else None
    if (arguments.to or ("hf" if is_saved else "orbax")) == "orbax":
        save(destination, found, target=target)
        if origin is not None:
            _write_origin(destination, origin)
    elif isinstance(found, Model):
        _write_model(destination, found)
    else:
        _write_drafter(destination, found, origin)
    print(f"{destination}: {_describe(found)}")
    return 0


def _origin(source: Path) -> _Origin | None:
    """Describes where a drafter comes from; None for a saved one that nobody described."""
    if models.is_saved(source):
        file = source / _ORIGIN
        return _Origin(**read_json(file)) if file.is_file() else None
    opened = checkpoint.read(source)
    return _Origin(opened.config, opened.names)


def _write_origin(folder: Path, origin: _Origin) -> None:
    try:
        (folder / _ORIGIN).write_text(json.dumps(origin._asdict(), indent=1), "utf-8")
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)  # whole or not at all
        raise


def _write_model(folder: Path, model: Model) -> None:
    """Writes a target as a Hugging Face folder."""
    content = model.config.to_hf() | {"torch_dtype": model.params["embed"].dtype.name}
    generation = {"eos_token_id": list(model.stop_ids)}
    texts = {"generation_config.json": json.dumps(generation, indent=2) + "\n"}
    if model.tokenizer_json is not None:
        texts["tokenizer.json"] = model.tokenizer_json
    config, template = model.tokenizer_config, model.chat_template
    if isinstance(template, str):
        texts["chat_template.jinja"] = template
    elif template is not None:
        named = [{"name": name, "template": text} for name, text in template.items()]
        config = (config or {}) | {"chat_template": named}
    if config is not None:
        texts["tokenizer_config.json"] = json.dumps(config, indent=2, ensure_ascii=False) + "\n"
    write_folder(folder, content, model.params, llama.rules(model.config), texts)


def _write_drafter(folder: Path, drafter: Drafter, origin: _Origin | None) -> None:
    """Writes a drafter with the config.json and the tensor names of the folder it came from.

    Raises:
      ValueError: that folder is not known, or its tensors cannot be told from the params.
    """
    proposer = proposers.of(drafter.config)
    if proposer.rules is None or origin is None:
        raise ValueError(
            f"a drafter of method {proposer.name} is not written in Hugging Face form where "
            "its own folder is not known. Convert that folder, or keep it."
        )
    params = drafter.params
    if "mask_hidden" in params:
        raise ValueError(
            f"a drafter of method {proposer.name} that drafts in parallel is not written in "
            "Hugging Face form: its mask_hidden was fused. Keep the folder that it came from."
        )
    table = proposer.rules(drafter.config, origin.names)
    rules = {name: table.get(name) for name in origin.names}
    ids = [n for n, place in rules.items() if place is not None and place.path == ("target_ids",)]
    if "target_ids" not in params:  # a map of each id to itself is not kept
        rules |= dict.fromkeys(ids)
    elif any(name.endswith("d2t") for name in ids):  # stored as what to add to a draft id
        own = np.asarray(params["target_ids"])
        params = params | {"target_ids": own - np.arange(len(own), dtype=own.dtype)}
    write_folder(folder, origin.config, params, rules, {}, optional=("embed", "head"))


def _describe(found: Model | Drafter) -> str:
    if isinstance(found, Model):
        return f"a target model of type {found.config.model_type}"
    return f"a drafter of method {proposers.of(found.config).name}"
