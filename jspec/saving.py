"""Saving what was loaded: converted weights with their config, to be restored without the source.

A saved folder has jspec.json (config, and which arrays are the target's) and params/ (Orbax).
Arrays that a drafter shares with its target are not written twice.
"""

import dataclasses
import json
import os
import typing
from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import Any

import jax
from jax.sharding import SingleDeviceSharding

from jspec import proposers
from jspec._checks import read_json
from jspec.checkpoint import Model, check_layers, orbax
from jspec.checkpoint.assemble import Keys, leaves_of
from jspec.checkpoint.new_folder import check_free, new_folder
from jspec.models import llama, weights
from jspec.models.config import ModelConfig
from jspec.proposers.base import Drafter
from jspec.proposers.fitting import check_dtypes, check_token_tables, misfits, shapes_of
from jspec.state import Params

_FORMAT = 1
_CLASS = "class"
"""Key that names the class of a config in JSON."""


def save(path: str | PathLike[str], saved: Model | Drafter, *, target: Model | None = None) -> None:
    """Writes a model or a drafter to a new folder, atomically.

    A save that is killed may leave a hidden folder, `.<name>.partial`, which never restores. The
    next save to the same path removes it.

    Args:
      path: folder to make; it must not exist.
      saved: what `jspec.load` returned, on one device or sharded over several.
      target: of a drafter; arrays that both share are then named instead of written, and
        `restore` wants the target, too.

    Raises:
      FileExistsError: something is at `path`. OSError: the disk does not take it.
      TypeError: `saved` is neither a Model nor a Drafter, or its config is not a registered one.
      ValueError: an array was donated or deleted.

    Example:
      jspec.save("heads/eagle3", drafter, target=model)
    """
    check_free(path)
    description: dict[str, Any] = {"format": _FORMAT}
    shared = {}
    if isinstance(saved, Model):
        description["model"] = {field: getattr(saved, field) for field in _MODEL_FIELDS}
    elif isinstance(saved, Drafter):
        proposers.of(saved.config)
        shared = _find_shared(saved.params, None if target is None else target.params)
        description["shared"] = {"/".join(own): "/".join(of) for own, of in shared.items()}
    else:
        raise TypeError(
            f"save: `saved` is a {type(saved).__name__}, wanted a Model or a Drafter. Pass what "
            "jspec.load returned, or jspec.Drafter(config, params)."
        )
    description["config"] = config_to_json(saved.config)
    _check_alive(saved.params)
    own = _nest(
        {keys: leaf for keys, leaf in leaves_of(saved.params).items() if keys not in shared}
    )
    with new_folder(path) as folder:
        if own:
            orbax.write(folder / "params", own)
        (folder / "jspec.json").write_text(json.dumps(description, indent=1), "utf-8")


def restore(path: str | PathLike[str], target: Model | None = None) -> Model | Drafter:
    """Reads back what `save` wrote, onto one device.

    Args:
      path: the folder.
      target: of a drafter that was saved with one; the arrays that they share are its own.

    Returns:
      A Model or a Drafter, as saved, on the device of the target or else the first one.

    Raises:
      FileNotFoundError: no saved folder is there.
      ValueError: arrays are missing, unknown or of a wrong shape for the config (all are listed);
        a table of token ids leads out of the vocabulary; the target is missing, or another one.
      TypeError: an array has an element type that weights cannot have.

    Example:
      drafter = jspec.restore("heads/eagle3", target=model)
    """
    path = Path(path).absolute()
    if not (path / "jspec.json").is_file():
        raise FileNotFoundError(
            f"{path} is no folder of jspec.save: it has no jspec.json. Pass a saved folder; a "
            "Hugging Face folder goes to jspec.load."
        )
    description = read_description(path)
    config = config_from_json(description["config"])
    shapes = orbax.read_shapes(path / "params") if (path / "params").is_dir() else {}
    shared = _reattach(path, description.get("shared", {}), target)
    _check_fit(path, config, leaves_of(shapes) | shared)
    home = jax.devices()[0] if target is None else next(iter(target.params["embed"].devices()))
    own = orbax.read(path / "params", shapes, SingleDeviceSharding(home)) if shapes else {}
    leaves = leaves_of(own) | shared
    check_token_tables(str(path), config, leaves)
    params = _nest(leaves) or None
    if "model" in description:
        fields = description["model"]
        return Model(config, params, **fields | {"stop_ids": tuple(fields["stop_ids"])})
    return Drafter(config, params)


def read_description(path: Path) -> dict[str, Any]:
    """Reads the jspec.json of a saved folder.

    Raises:
      ValueError: it is of another format, or holds no config.
    """
    description = read_json(path / "jspec.json")
    if description.get("format") != _FORMAT:
        raise ValueError(
            f"{path} has format {description.get('format')!r}, wanted {_FORMAT}. Restore it with "
            "the jspec that saved it."
        )
    if not isinstance(description.get("config"), dict):
        raise ValueError(f"{path}: jspec.json has no config. Save the model or drafter again.")
    return description


_MODEL_FIELDS = ("tokenizer_json", "tokenizer_config", "chat_template", "stop_ids")

# Arrays by their keys.


def _nest(leaves: dict[Keys, Any]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for keys, leaf in leaves.items():
        at = tree
        for key in keys[:-1]:
            at = at.setdefault(key, {})
        at[keys[-1]] = leaf
    return tree


def _check_alive(params: Params) -> None:
    dead = ["/".join(keys) for keys, leaf in leaves_of(params).items() if leaf.is_deleted()]
    if dead:
        raise ValueError(
            f"save: {', '.join(dead)} of `saved` was deleted, or donated to a jitted function. "
            "Load it again, and donate the memory of a state alone."
        )


def _find_shared(params: Params, of_target: Params) -> dict[Keys, Keys]:
    """Maps a drafter's arrays to those of the target that are the same object."""
    by_id = {id(leaf): keys for keys, leaf in leaves_of(of_target).items()}
    return {keys: by_id[id(leaf)] for keys, leaf in leaves_of(params).items() if id(leaf) in by_id}


def _reattach(path: Path, shared: dict[str, str], target: Model | None) -> dict[Keys, Any]:
    if not shared:
        return {}
    if target is None:
        raise ValueError(
            f"{path} was saved without {', '.join(shared)}, which are its target's. Load the "
            "target and pass target=model."
        )
    arrays = {"/".join(keys): leaf for keys, leaf in leaves_of(target.params).items()}
    missing = sorted(set(shared.values()) - arrays.keys())
    if missing:
        raise ValueError(
            f"{path} shares {', '.join(missing)} with its target, and `target` has none. Pass the "
            "target that it was saved with."
        )
    return {tuple(own.split("/")): arrays[of] for own, of in shared.items()}


def _check_fit(path: Path, config: Any, found: dict[Keys, Any]) -> None:
    if isinstance(config, ModelConfig):
        check_layers(str(path), config.num_layers, found)
        wanted: Mapping[Keys, Any] = leaves_of(weights.abstract(llama.Llama, config, "float32"))
    else:
        wanted = shapes_of(config)
    problems = misfits(wanted, found)
    if problems:
        raise ValueError(
            f"{path}: the arrays do not fit the config in jspec.json:\n{problems}"
            "Save it again, and pass the target that it was saved with."
        )
    check_dtypes(str(path), wanted, found)


# Configs in JSON: an object with its class for a dataclass or a named tuple, a list for a tuple.


def config_to_json(config: Any) -> Any:
    """Returns a config as `json.dumps` takes it.

    Args:
      config: a frozen dataclass of numbers, texts, tuples, named tuples and other dataclasses.

    Raises:
      TypeError: a field holds something else.
    """
    if _has_fields(type(config)):
        values = {name: config_to_json(getattr(config, name)) for name in _fields(type(config))}
        return {_CLASS: type(config).__name__} | values
    if isinstance(config, tuple):
        return [config_to_json(item) for item in config]
    if isinstance(config, PathLike):
        return os.fspath(config)
    if config is None or isinstance(config, (bool, int, float, str)):
        return config
    raise TypeError(
        f"config holds {config!r}, a {type(config).__name__}, wanted numbers, texts, tuples and "
        "dataclasses. Keep arrays in params."
    )


def config_from_json(value: Any) -> Any:
    """Returns the config that `config_to_json` wrote.

    Raises:
      ValueError: a class or a field is unknown, or a value is not allowed.
    """
    if isinstance(value, list):
        return tuple(config_from_json(item) for item in value)
    if not isinstance(value, dict):
        return value
    classes = _config_classes()
    cls = classes.get(value.get(_CLASS, ""))
    if cls is None:
        raise ValueError(
            f"config class {value.get(_CLASS)!r} is unknown, wanted one of "
            f"{', '.join(sorted(classes))}. Restore it with the jspec that saved it."
        )
    fields = {name: config_from_json(item) for name, item in value.items() if name != _CLASS}
    try:
        return cls(**fields)
    except TypeError as error:
        raise ValueError(
            f"config {cls.__name__} does not take these fields ({error}). Restore it with the "
            "jspec that saved it."
        ) from error


def _config_classes() -> dict[str, type]:
    """Returns every class that a registered config is made of, by name."""
    found: dict[str, type] = {}
    waiting: list[Any] = [ModelConfig, *(p.Config for p in proposers.REGISTRY.values())]
    while waiting:
        kind = waiting.pop()
        waiting += typing.get_args(kind)
        if _has_fields(kind) and kind.__name__ not in found:
            found[kind.__name__] = kind
            waiting += typing.get_type_hints(kind).values()
    return found


def _has_fields(kind: Any) -> bool:
    return isinstance(kind, type) and (dataclasses.is_dataclass(kind) or hasattr(kind, "_fields"))


def _fields(kind: Any) -> list[str]:
    """Returns what the constructor of a dataclass or named tuple takes."""
    if dataclasses.is_dataclass(kind):
        return [field.name for field in dataclasses.fields(kind) if field.init]
    return list(kind._fields)
