"""`python -m jspec convert`: models from Hugging Face or GGUF format to Orbax, and back."""

import argparse
import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jspec import checkpoint, proposers
from jspec._checks import read_json
from jspec.checkpoint import Model
from jspec.checkpoint.export import tokenizer_files, write_folder
from jspec.checkpoint.new_folder import check_free
from jspec.checkpoint.weight_files import is_pickled
from jspec.cli import drafters, models
from jspec.loading import load
from jspec.models import llama
from jspec.proposers.base import Drafter
from jspec.saving import restore, save

HELP = "write a model in another form: Hugging Face or GGUF to Orbax, and back"

EXAMPLES = """examples:
  python -m jspec convert path/to/folder saved --dtype bfloat16
  python -m jspec convert model.gguf saved
  python -m jspec convert path/to/head saved-head --target path/to/folder
  python -m jspec convert saved folder-again
  python -m jspec convert saved-head head-again --target path/to/folder
  python -m jspec convert model.gguf folder --to hf
  python -m jspec convert folder-with-pytorch_model.bin folder-with-safetensors
"""

_ORIGIN = "origin.json"
"""File in a saved drafter: config.json and tensor names of the folder that it came from."""

_TEXTS = "texts"
"""Folder in a saved model: those files of `_OF_TEXT` that its source had."""

_OF_TEXT = (
    *("generation_config.json", "tokenizer.json", "tokenizer_config.json", "tokenizer.model"),
    *("special_tokens_map.json", "added_tokens.json", "chat_template.jinja", "chat_template.json"),
    *("vocab.json", "merges.txt"),
)
"""Files of a Hugging Face folder that define tokenizer and generation for transformers."""

_TEMPLATES = "additional_chat_templates"
"""Folder of further chat templates beside them."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of the command."""
    add = parser.add_argument
    add("source", help="Hugging Face folder or owner/name, .gguf file, or folder of jspec.save")
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
    add(
        "--dtype", help="of the weights that are written (default: as in the source; GGUF: float32)"
    )


def run(arguments: argparse.Namespace) -> int:
    """Runs the command, and returns its exit code."""
    destination = Path(arguments.destination)
    check_free(destination)
    drafters.check_method(arguments)
    source = models.find("source", arguments.source)
    if is_pickled(source):
        return _rewrite(source, destination, arguments)
    is_saved = models.is_saved(source)
    if is_saved and arguments.dtype is not None:
        raise ValueError(
            f"--dtype has no effect with {source}, which keeps the one that it was saved in. Leave "
            "it out."
        )
    dtype = models.dtype_of(source, arguments.dtype)
    target: Model | None = None
    found: Model | Drafter
    if arguments.target is not None:
        target = models.open_model(arguments.target, dtype, option="--target", quiet=True)
        options: dict[str, Any] = {} if is_saved else {"dtype": dtype}
        found = drafters.open_drafter(source, target, method=arguments.method, **options)
    else:
        found = restore(source) if is_saved else load(source, dtype)
    origin = _origin(source) if isinstance(found, Drafter) else None
    texts = _texts(source, found)
    if (arguments.to or ("hf" if is_saved else "orbax")) == "orbax":
        save(destination, found, target=target)
        _write_beside(destination, origin, texts)
    elif isinstance(found, Model):
        content = found.config.to_hf() | {"torch_dtype": found.params["embed"].dtype.name}
        write_folder(destination, content, found.params, llama.rules(found.config), texts)
    else:
        _write_drafter(destination, found, origin, texts)
    print(f"{destination}: {_describe(found)}")
    return 0


def _rewrite(source: Path, destination: Path, arguments: argparse.Namespace) -> int:
    """Writes a folder of pickles as one of safetensors, whatever model it holds."""
    given = {"--to orbax": arguments.to == "orbax", "--target": arguments.target is not None}
    given |= {"--method": arguments.method is not None, "--dtype": arguments.dtype is not None}
    given = [option for option, is_given in given.items() if is_given]
    if given:
        raise ValueError(
            f"{source} has pickled weights, which become safetensors first: {', '.join(given)} "
            "has no effect on that. Leave it out, and convert the new folder with it."
        )
    from torch_bridge.convert import convert_folder  # where PyTorch is

    print(f"{convert_folder(source, destination)}: the same tensors, as safetensors")
    return 0


def _origin(source: Path) -> dict[str, Any] | None:
    """Returns `config` and tensor `names` of a drafter's source; None if it is unknown."""
    if models.is_saved(source):
        file = source / _ORIGIN
        return read_json(file) if file.is_file() else None
    opened = checkpoint.read(source)
    return {"config": opened.config, "names": opened.names}


def _texts(source: Path, found: Model | Drafter) -> dict[str, bytes]:
    """Returns the files that define tokenizer and generation of a model, by name.

    They are those of the source; those that it lacks, as GGUF files do, are made from the model.
    """
    folder = source / _TEXTS if models.is_saved(source) else source
    texts = {}
    if folder.is_dir():
        names = [
            *_OF_TEXT,
            *(f"{_TEMPLATES}/{file.name}" for file in folder.glob(f"{_TEMPLATES}/*")),
        ]
        texts = {name: (folder / name).read_bytes() for name in names if (folder / name).is_file()}
    if isinstance(found, Drafter):
        return texts
    if "tokenizer_config.json" not in texts:
        opened = None if models.is_saved(source) else checkpoint.read(source)
        bos = None if opened is None else opened.config.get("bos_token_id")
        bos = bos if isinstance(bos, int) else None
        texts = tokenizer_files(found, bos) | texts
    if "generation_config.json" not in texts and found.stop_ids:
        generation = {"eos_token_id": list(found.stop_ids)}
        texts["generation_config.json"] = (json.dumps(generation, indent=2) + "\n").encode()
    return texts


def _write_beside(folder: Path, origin: Any, texts: Mapping[str, bytes]) -> None:
    """Adds origin and texts to a saved folder."""
    try:
        if origin is not None:
            (folder / _ORIGIN).write_text(json.dumps(origin, indent=1), "utf-8")
        for name, text in texts.items():
            (folder / _TEXTS / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / _TEXTS / name).write_bytes(text)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)  # incomplete
        raise


def _write_drafter(
    folder: Path, drafter: Drafter, origin: dict[str, Any] | None, texts: Mapping[str, bytes]
) -> None:
    """Writes a drafter with the config.json and the tensor names of the folder it came from.

    Raises:
      ValueError: that folder is unknown, or its tensors cannot be restored from the params.
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
    table = proposer.rules(drafter.config, origin["names"])
    rules = {name: table.get(name) for name in origin["names"]}
    maps = [n for n, place in rules.items() if place is not None and place.path == ("target_ids",)]
    if "target_ids" not in params:  # an identity map, which params leave out
        rules |= dict.fromkeys(maps)
    elif any(name.endswith("d2t") for name in maps):  # stored as target id - draft id
        ids = np.asarray(params["target_ids"])
        params = params | {"target_ids": ids - np.arange(len(ids), dtype=ids.dtype)}
    tables = ("embed", "head", "target_ids")  # the first two may be the target's
    hf = origin["config"]
    own = jax.tree.leaves({key: part for key, part in params.items() if key not in tables})
    stated = {key: own[0].dtype.name for key in ("torch_dtype", "dtype") if key in hf}
    content = {**hf, **stated}
    write_folder(folder, content, params, rules, texts, optional=("embed", "head"))


def _describe(found: Model | Drafter) -> str:
    if isinstance(found, Model):
        return f"a target model of type {found.config.model_type}"
    return f"a drafter of method {proposers.of(found.config).name}"
