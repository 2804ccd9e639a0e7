"""Model folders with one random fault each, and what loading makes of them.

    python -m tests.corruptions --count 200 --seed 0

A fault must end in a clear error, in a UserWarning, in the same model, or in another model that
nothing in the folder contradicts. The last is known by `_FREE` and by what a fault says of itself.
"""

import argparse
import collections
import copy
import json
import os
import shutil
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
from numpy.random import Generator
from safetensors.numpy import load_file, save_file

import jspec
from tests.conftest import GOLDEN

MODELS = GOLDEN / "models"
BF16 = np.dtype(ml_dtypes.bfloat16)

_ERRORS = (ValueError, NotImplementedError, KeyError, OSError)
_INDEX = "model.safetensors.index.json"

# Settings that nothing else in a folder tells: another value is another model. Nested ones count
# by their own name.
_FREE = {
    # every decoder
    *("rms_norm_eps", "rope_theta", "max_position_embeddings", "eos_token_id", "attention_dropout"),
    # RoPE scaling
    *("rope_scaling", "rope_parameters", "factor", "low_freq_factor", "high_freq_factor"),
    *("original_max_position_embeddings", "rope_type"),
    # what a drafter reads, and how it drafts
    *("eagle_aux_hidden_state_layer_ids", "norm_before_residual", "norm_output", "ptd_token_id"),
    *("mask_token_id", "target_layer_ids", "block_size", "layer_types", "sliding_window"),
    *("use_sliding_window", "num_heads", "medusa_num_heads", "selector_top_k", "conv_group_size"),
}


@dataclass
class Folder:
    """A model folder that is not written yet.

    Attributes:
      name: of the recorded folder.
      file: of its weights.
      config: content of config.json.
      tensors: by name.
      keys: words of which an error has to name one.
      legal: the fault makes another model that nothing contradicts.
      told: even the right model wants a warning.
      after: changes the files once they are written.
    """

    name: str
    file: str
    config: dict[str, Any]
    tensors: dict[str, np.ndarray]
    keys: list[str] = field(default_factory=list)
    legal: bool = False
    told: bool = False
    after: Callable[[Path], None] | None = None

    def write(self, path: Path) -> None:
        path.mkdir()
        (path / "config.json").write_text(json.dumps(self.config))
        save_file(self.tensors, path / self.file)
        if self.after is not None:
            self.after(path)


Fault = Callable[[Folder, Generator], str | None]
"""Changes a folder; returns what it did, None where it cannot be done to this folder."""

# config.json


def _settings(config: dict[str, Any], above: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    for key, value in config.items():
        yield (*above, key)
        if isinstance(value, dict):
            yield from _settings(value, (*above, key))


def _pick(config: dict[str, Any], rng: Generator, kind: Any = object) -> tuple[Any, str] | None:
    """Chooses a setting whose value is of a kind: the object that holds it, and its key."""
    found = []
    for path in _settings(config):
        holder = config
        for key in path[:-1]:
            holder = holder[key]
        value = holder[path[-1]]
        if isinstance(value, kind) and not (kind is not object and isinstance(value, bool)):
            found.append((holder, path[-1]))
    return found[rng.integers(len(found))] if found else None


def drop_key(folder: Folder, rng: Generator) -> str | None:
    holder, key = _pick(folder.config, rng) or (None, "")
    del holder[key]
    folder.keys, folder.legal = [key], key in _FREE
    return f"without {key}"


def change_number(folder: Folder, rng: Generator) -> str | None:
    picked = _pick(folder.config, rng, (int, float))
    if picked is None:
        return None
    holder, key = picked
    old = holder[key]
    new = [old * 2, old + 1, old - 1, 0, -old, 10**12, old / 2, float("nan")][rng.integers(8)]
    if new == old:
        return None
    holder[key] = new
    folder.keys, folder.legal = [key], key in _FREE
    return f"{key} {old} -> {new}"


def change_type(folder: Folder, rng: Generator) -> str | None:
    holder, key = _pick(folder.config, rng) or (None, "")
    old = holder[key]
    new = [str(old), [old], {"x": old}, None, True, "", [], -1.5][rng.integers(8)]
    if new == old or (new is None and old is None):
        return None
    holder[key] = new
    # A number where there was a list, say, is a value like any other for a free setting.
    folder.keys, folder.legal = [key], key in _FREE
    return f"{key} {old!r} -> {new!r}"


def swap_keys(folder: Folder, rng: Generator) -> str | None:
    numbers = [k for k, v in folder.config.items() if type(v) in (int, float)]
    if len(numbers) < 2:
        return None
    a, b = rng.choice(numbers, 2, replace=False).tolist()
    config = folder.config
    if config[a] == config[b]:
        return None
    config[a], config[b] = config[b], config[a]
    folder.keys, folder.legal = [a, b], {a, b} <= _FREE | _UNREAD
    return f"{a} <-> {b}"


_UNREAD = {"bos_token_id", "pretraining_tp", "initializer_range", "max_paths", "topk"}

# A setting, and other places that say the same: a key beside it, or an object that has one.
_ELSEWHERE = {
    "rope_theta": ["rope_parameters"],
    "rope_scaling": ["rope_parameters"],
    "num_hidden_layers": ["n_layer", "num_layers"],
    "hidden_size": ["n_embd", "d_model"],
    "num_attention_heads": ["n_head"],
    "vocab_size": ["n_vocab"],
    "eagle_aux_hidden_state_layer_ids": ["eagle_config"],
    "norm_before_residual": ["eagle_config"],
    "draft_vocab_size": ["eagle_config"],
    "block_size": ["dflash_config"],
    "sliding_window": ["dflash_config"],
    "mask_token_id": ["mask_token_id", "pard_token", "ptd_token_id"],
    "ptd_token_id": ["mask_token_id", "pard_token"],
    "medusa_num_heads": ["num_heads"],
    "num_heads": ["medusa_num_heads"],
    "medusa_num_layers": ["num_hidden_layers"],
    "torch_dtype": ["dtype"],
    "dtype": ["torch_dtype"],
}


def say_twice(folder: Folder, rng: Generator) -> str | None:
    """Adds a second place for a setting, with another value."""
    known = [key for key in folder.config if key in _ELSEWHERE]
    if not known:
        return None
    key = known[rng.integers(len(known))]
    places = _ELSEWHERE[key]
    place = places[rng.integers(len(places))]
    old = folder.config[key]
    other: Any = "float16" if isinstance(old, str) else 7
    if isinstance(old, list):
        other = [0, *old[1:]]
    elif type(old) in (int, float):
        other = old + 1
    elif isinstance(old, bool):
        other = not old
    if place.endswith(("_config", "_parameters")):
        if key == "rope_scaling":
            other = {"rope_type": "linear", "factor": 3.0}
        elif place == "rope_parameters":
            other = {"rope_type": "default", key: other}
        else:
            other = {**(folder.config.get(place) or {}), key: other}
    if folder.config.get(place) == other:
        return None
    folder.config[place] = other
    folder.keys = [key, place]
    return f"{key} {old!r}, and {place} {other!r}"


# Tensors


def _tensor(folder: Folder, rng: Generator, fits: Callable[[np.ndarray], Any] = bool) -> str | None:
    names = [n for n, x in folder.tensors.items() if fits is bool or fits(x)]
    return names[rng.integers(len(names))] if names else None


def drop_tensor(folder: Folder, rng: Generator) -> str | None:
    name = _tensor(folder, rng)
    del folder.tensors[name]
    folder.keys = [name, name.replace("midlayer", "layers.0")]
    # What is only a copy of the target's, or a check of another table, may be left out.
    folder.legal = name in ("t2d", "embed_tokens.weight") or _is_medusas(name, folder)
    return f"without {name}"


def _is_medusas(name: str, folder: Folder) -> bool:
    """Whether the target's head stands in for a tensor of Medusa heads."""
    return folder.name.startswith("medusa") and name == "lm_head.weight"


def rename_tensor(folder: Folder, rng: Generator) -> str | None:
    name = _tensor(folder, rng)
    new = [f"x.{name}", f"{name}x", name.replace("weight", "wieght"), name.upper()]
    other = new[rng.integers(len(new))]
    if other == name:
        return None
    folder.tensors[other] = folder.tensors.pop(name)
    folder.keys = [name, other]
    return f"{name} is called {other}"


def transpose(folder: Folder, rng: Generator) -> str | None:
    name = _tensor(folder, rng, lambda x: x.ndim == 2 and x.shape[0] != x.shape[1])
    if name is None:
        return None
    folder.tensors[name] = np.ascontiguousarray(folder.tensors[name].T)
    folder.keys = [name]
    return f"{name} transposed"


def reshape(folder: Folder, rng: Generator) -> str | None:
    name = _tensor(folder, rng, lambda x: x.size % 2 == 0)
    if name is None:
        return None
    folder.tensors[name] = folder.tensors[name].reshape(2, -1)
    folder.keys = [name]
    folder.legal = name == "mask_hidden"  # as many numbers
    return f"{name} of another shape"


def cut_rows(folder: Folder, rng: Generator) -> str | None:
    name = _tensor(folder, rng, lambda x: len(x) > 1 if x.ndim else False)
    if name is None:
        return None
    folder.tensors[name] = folder.tensors[name][:-1]
    folder.keys = [name]
    return f"{name} without its last row"


def quantize(folder: Folder, rng: Generator) -> str | None:
    name = _tensor(folder, rng, lambda x: np.issubdtype(x.dtype, np.floating) or x.dtype == BF16)
    if name is None:
        return None
    kind = [np.int8, np.uint8, np.int32, np.int64, np.bool_][rng.integers(5)]
    folder.tensors[name] = np.ones(folder.tensors[name].shape, kind)
    folder.keys = [name, np.dtype(kind).name]
    return f"{name} as {np.dtype(kind).name}"


def change_precision(folder: Folder, rng: Generator) -> str | None:
    name = _tensor(folder, rng)
    kind = [np.float64, np.float32, np.float16, BF16][rng.integers(4)]
    if folder.tensors[name].dtype == kind:
        return None
    was_index = np.issubdtype(folder.tensors[name].dtype, np.integer)
    folder.tensors[name] = folder.tensors[name].astype(kind)
    folder.keys = [name]
    folder.legal = not was_index and folder.tensors[name].dtype != bool
    return f"{name} as {np.dtype(kind).name}"


def float8(folder: Folder, rng: Generator) -> str | None:
    """Writes a tensor's header as if it were quantized, with as many bytes."""
    name = _tensor(folder, rng, lambda x: x.dtype == BF16 and x.ndim == 2)
    if name is None:
        return None
    rows, columns = folder.tensors[name].shape
    folder.tensors[name] = folder.tensors[name].view(np.uint8).reshape(rows, 2 * columns)
    kind = ["F8_E4M3", "F8_E5M2"][rng.integers(2)]
    folder.after = _edit_header(name, "dtype", kind, folder.file)
    folder.keys = [name]
    return f"{name} as {kind}"


def unknown_tensor(folder: Folder, rng: Generator) -> str | None:
    new = ["extra", "layers.9.mlp.up_proj.weight", "lm_head.bias", "model.layers.0.mlp.bias"]
    name = new[rng.integers(len(new))]
    folder.tensors[name] = np.ones((3, 5), np.float32)
    folder.keys = [name]
    return f"and {name}"


def second_name(folder: Folder, rng: Generator) -> str | None:
    """Repeats a tensor, with other values, under a prefix that other publishers write."""
    name = _tensor(folder, rng)
    prefixes = ("model.", "medusa_heads.")
    new = [prefix + name for prefix in prefixes]
    new += [name.removeprefix(p) for p in prefixes if name.startswith(p)]
    new += [name.replace(a, b) for a, b in (("midlayer.", "layers.0."), ("layers.0.", "midlayer."))]
    new = [other for other in dict.fromkeys(new) if other not in folder.tensors]
    other = new[rng.integers(len(new))]
    folder.tensors[other] = folder.tensors[name][::-1].copy()
    folder.keys = [name, other]
    return f"{name}, and {other}"


def change_table(folder: Folder, rng: Generator) -> str | None:
    """Damages d2t, t2d or token_map."""
    tables = [name for name in ("d2t", "t2d", "token_map") if name in folder.tensors]
    if not tables:
        return None
    name = tables[rng.integers(len(tables))]
    table = folder.tensors[name]
    how = ["zero", "permuted", "absolute", "doubled", "moved", "negative"][rng.integers(6)]
    new = {
        "zero": np.zeros_like(table),
        "permuted": rng.permutation(table),
        "absolute": table + np.arange(len(table)) if name == "d2t" else table,
        "doubled": np.concatenate([table[:1], table[:-1]]),
        "moved": np.roll(table, 1),
        "negative": ~table,
    }[how]
    if np.array_equal(new, table):
        return None
    folder.tensors[name] = new.astype(table.dtype)
    folder.keys = [name]
    if name == "d2t":
        ids = new + np.arange(len(new))
        free = "t2d" not in folder.tensors and len(set(ids)) == len(ids) and ids.min() >= 0
        folder.legal = bool(free and ids.max() < folder.config["vocab_size"] and how != "zero")
    # Any other order of the same ids is a map, too.
    folder.legal |= name == "token_map" and how in ("permuted", "moved")
    return f"{name} {how}"


# The file of weights


def _edit_header(name: str, key: str, value: Any, file: str) -> Callable[[Path], None]:
    def edit(path: Path) -> None:
        content = (path / file).read_bytes()
        length = int.from_bytes(content[:8], "little")
        header = json.loads(content[8 : 8 + length])
        header[name][key] = value
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        (path / file).write_bytes(len(text).to_bytes(8, "little") + text + content[8 + length :])

    return edit


def truncate(folder: Folder, rng: Generator) -> str | None:
    part = rng.random()

    def cut(path: Path) -> None:
        file = path / folder.file
        os.truncate(file, int(part * file.stat().st_size))

    folder.after, folder.keys = cut, [folder.file]
    return f"cut at {part:.0%}"


def header_length(folder: Folder, rng: Generator) -> str | None:
    by = int(rng.choice([-8, -1, 1, 8, 1000, 2**40, -(2**30)]))

    def change(path: Path) -> None:
        content = bytearray((path / folder.file).read_bytes())
        length = int.from_bytes(content[:8], "little")
        content[:8] = ((length + by) % 2**64).to_bytes(8, "little")
        (path / folder.file).write_bytes(content)

    folder.after, folder.keys = change, [folder.file]
    return f"header length {by:+}"


def header_value(folder: Folder, rng: Generator) -> str | None:
    name = _tensor(folder, rng)
    changes = [("dtype", "F12"), ("dtype", 3), ("shape", [-1]), ("shape", "x"), ("shape", [3])]
    changes += [("data_offsets", [0, 1]), ("data_offsets", [8]), ("data_offsets", None)]
    key, value = changes[rng.integers(len(changes))]
    folder.after = _edit_header(name, key, value, folder.file)
    folder.keys = [name, folder.file]
    return f"header of {name}: {key} {value}"


def flip_bytes(folder: Folder, rng: Generator) -> str | None:
    """Overwrites some bytes of the header."""
    places, values = rng.integers(8, 400, 3).tolist(), rng.integers(0, 256, 3).tolist()

    def flip(path: Path) -> None:
        content = bytearray((path / folder.file).read_bytes())
        for at, value in zip(places, values, strict=True):
            content[at] = value
        (path / folder.file).write_bytes(content)

    folder.after, folder.keys = flip, [folder.file, *folder.tensors]
    return f"bytes {places} of the header"


# The folder


def _others(folder: Folder) -> dict[str, np.ndarray]:
    return {name: x[::-1].copy() if x.ndim else x for name, x in folder.tensors.items()}


def second_file(folder: Folder, rng: Generator) -> str | None:
    names = ["consolidated.safetensors", "model-00001-of-00001.safetensors", "pytorch_model.bin"]
    names += ["model.safetensors", "medusa_lm_head.safetensors", "adapter_model.safetensors"]
    name = names[rng.integers(len(names))]
    if name == folder.file:
        return None
    folder.after = lambda path: save_file(_others(folder), path / name)
    folder.keys, folder.told = [name], True
    return f"{name} with other weights beside it"


def shards_beside(folder: Folder, rng: Generator) -> str | None:
    def add(path: Path) -> None:
        save_file(_others(folder), path / "model-00001-of-00001.safetensors")
        index = {"weight_map": dict.fromkeys(folder.tensors, "model-00001-of-00001.safetensors")}
        (path / _INDEX).write_text(json.dumps(index))

    folder.after, folder.keys, folder.told = add, [_INDEX], True
    return "shards with other weights beside it"


def adapter(folder: Folder, rng: Generator) -> str | None:
    adapter = {"peft_type": "LORA", "base_model_name_or_path": "x"}
    folder.after = lambda path: (
        (path / "adapter_config.json").write_text(json.dumps(adapter)) and None
    )
    folder.keys, folder.told = ["adapter_config.json"], True
    return "adapter_config.json beside it"


def wrong_index(folder: Folder, rng: Generator) -> str | None:
    """Writes two shards, and an index that does not say what is in them."""
    how = ["moved", "unknown", "unlisted", "twice", "no shard", "no map"][rng.integers(6)]
    names = sorted(folder.tensors)
    halves = [names[::2], names[1::2]]
    files = [f"model-0000{i}-of-00002.safetensors" for i in (1, 2)]
    weight_map = {name: files[i] for i in (0, 1) for name in halves[i]}
    if len(names) < 3:
        return None
    if how == "moved":
        weight_map[names[0]] = files[1]
    elif how == "unknown":
        weight_map["model.extra"] = files[0]
    elif how == "unlisted":
        del weight_map[names[0]]
    elif how == "no shard":
        weight_map[names[0]] = "model-00003-of-00002.safetensors"
    folder.keys, folder.told = [_INDEX, *files, names[0]], True

    def split(path: Path) -> None:
        (path / folder.file).unlink()
        for file, half in zip(files, halves, strict=True):
            save_file({name: folder.tensors[name] for name in half}, path / file)
        if how == "twice":
            again = {n: folder.tensors[n] for n in [*halves[1], names[0]]}
            again[names[0]] = _others(folder)[names[0]]
            save_file(again, path / files[1])
        content = {} if how == "no map" else {"weight_map": weight_map}
        (path / _INDEX).write_text(json.dumps(content))

    folder.after = split
    return f"two shards, index: {how}"


def dangling_link(folder: Folder, rng: Generator) -> str | None:
    name = ["config.json", folder.file, "generation_config.json", _INDEX][rng.integers(4)]

    def link(path: Path) -> None:
        (path / name).unlink(missing_ok=True)
        (path / name).symlink_to("../../blobs/0123")

    folder.after, folder.keys, folder.told = link, [name], True
    return f"{name} is a dangling link"


def pointer(folder: Folder, rng: Generator) -> str | None:
    name = ["config.json", folder.file, "generation_config.json", "tokenizer.json"][rng.integers(4)]
    text = "version https://git-lfs.github.com/spec/v1\noid sha256:0123\nsize 12345\n"
    folder.after = lambda path: (path / name).write_text(text) and None
    folder.keys, folder.told = [name, "git lfs pull"], True
    return f"{name} is a pointer"


def in_a_subfolder(folder: Folder, rng: Generator) -> str | None:
    def move(path: Path) -> None:
        (path / "inner").mkdir()
        for file in ("config.json", folder.file):
            (path / file).rename(path / "inner" / file)

    folder.after, folder.keys = move, ["inner"]
    return "a folder deeper"


def folder_for_file(folder: Folder, rng: Generator) -> str | None:
    name = ["config.json", folder.file][rng.integers(2)]

    def replace(path: Path) -> None:
        (path / name).unlink()
        (path / name).mkdir()

    folder.after, folder.keys = replace, [name]
    return f"{name} is a folder"


def missing_file(folder: Folder, rng: Generator) -> str | None:
    name = ["config.json", folder.file][rng.integers(2)]
    folder.after, folder.keys = lambda path: (path / name).unlink(), [name, "model.safetensors"]
    return f"without {name}"


def broken_json(folder: Folder, rng: Generator) -> str | None:
    part = rng.random()

    def cut(path: Path) -> None:
        text = (path / "config.json").read_text()
        (path / "config.json").write_text(text[: int(part * len(text))])

    folder.after, folder.keys = cut, ["config.json"]
    return f"config.json cut at {part:.0%}"


FAULTS: tuple[Fault, ...] = (
    *(drop_key, change_number, change_number, change_type, change_type, swap_keys, say_twice),
    *(drop_tensor, rename_tensor, transpose, reshape, cut_rows, quantize, change_precision),
    *(float8, unknown_tensor, second_name, change_table, change_table, truncate, header_length),
    *(header_value, flip_bytes, second_file, shards_beside, adapter, wrong_index, dangling_link),
    *(pointer, in_a_subfolder, folder_for_file, missing_file, broken_json),
)

OUTCOMES = ("error", "warning", "same model", "another legal model")


@dataclass(frozen=True)
class Result:
    """What became of a fault.

    Attributes:
      number, model, fault, what: which it was.
      outcome: one of `OUTCOMES`, or what is wrong.
      text: of the error or of the warnings.
    """

    number: int
    model: str
    fault: str
    what: str
    outcome: str
    text: str = ""

    @property
    def excused(self) -> bool:
        return self.outcome in OUTCOMES

    def __str__(self) -> str:
        return f"{self.number} {self.model}, {self.fault}: {self.what}: {self.outcome} {self.text}"


def recorded() -> dict[str, str | None]:
    """Maps each recorded model folder to that of its target, None for a target."""
    found: dict[str, str | None] = {}
    for folder in sorted(MODELS.iterdir()):
        if not (folder / "config.json").is_file():
            continue
        found[folder.name] = None if folder.name.startswith("target") else "target_llama"
        if folder.name.startswith("dflash"):
            found[folder.name] = "target_qwen3"
        if folder.name == "mimo_mtp":
            found[folder.name] = "mimo_mtp"
    return found


_targets: dict[str, Any] = {}


def _load(path: Path, target: str | None) -> Any:
    if target is None:
        return jspec.load(path, "float32")
    if target not in _targets:
        _targets[target] = jspec.load(MODELS / target, "float32")
    return jspec.load(path, target=_targets[target])


def _same(a: Any, b: Any) -> bool:
    if a.config != b.config or jax.tree.structure(a.params) != jax.tree.structure(b.params):
        return False
    pairs = zip(jax.tree.leaves(a.params), jax.tree.leaves(b.params), strict=True)
    return all(x.dtype == y.dtype and np.array_equal(x, y, equal_nan=True) for x, y in pairs)


def try_fault(number: int, seed: int, models: dict[str, str | None]) -> Result:
    """Draws a fault, and loads a recorded folder that has it."""
    rng = np.random.default_rng([seed, number])
    while True:
        name = list(models)[rng.integers(len(models))]
        fault = FAULTS[rng.integers(len(FAULTS))]
        file = next((MODELS / name).glob("*.safetensors"))
        config = json.loads((MODELS / name / "config.json").read_text())
        folder = Folder(name, file.name, copy.deepcopy(config), load_file(file))
        what = fault(folder, rng)
        if what is not None:
            break
    result = {"number": number, "model": name, "fault": fault.__name__, "what": what}
    home = Path(tempfile.mkdtemp())
    try:
        folder.write(home / name)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                got = _load(home / name, models[name])
            except Exception as error:
                return Result(**result, outcome=_judge(error, folder), text=_text(error))
        told = [str(w.message) for w in caught]
        if told:
            named = any(key in text for text in told for key in folder.keys)
            kinds = all(w.category is UserWarning for w in caught)
            outcome = "warning" if named and kinds else "a warning that names nothing"
            return Result(**result, outcome=outcome, text=" | ".join(told))
        if _same(got, _load(MODELS / name, models[name])):
            return Result(**result, outcome="SILENT" if folder.told else "same model")
        return Result(**result, outcome="another legal model" if folder.legal else "SILENT")
    finally:
        shutil.rmtree(home)


def _text(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def _judge(error: Exception, folder: Folder) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    ours = Path(jspec.__file__).parent in Path(frames[-1].filename).parents
    if not isinstance(error, _ERRORS) or not ours:
        return "TRACEBACK"
    if not any(key and key in str(error) for key in folder.keys):
        return "an error that names nothing"
    listed = "the checkpoint's tensors do not fit its config:"
    return "error" if "\n" not in str(error) or listed in str(error) else "an error of many lines"


def run(count: int, seed: int) -> list[Result]:
    """Tries faults number 0 to count - 1 of a seed."""
    models = recorded()
    return [try_fault(number, seed, models) for number in range(count)]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.corruptions", description=__doc__)
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--verbose", action="store_true", help="print every case")
    arguments = parser.parse_args()
    results = run(arguments.count, arguments.seed)
    kinds = list(OUTCOMES) + sorted({r.outcome for r in results} - set(OUTCOMES))
    table = collections.Counter((r.fault, r.outcome) for r in results)
    print(f"{'':18}" + "".join(f"{kind[:19]:>20}" for kind in kinds))
    for fault in dict.fromkeys(f.__name__ for f in FAULTS):
        print(f"{fault:18}" + "".join(f"{table[fault, kind] or '':>20}" for kind in kinds))
    for result in results:
        if arguments.verbose or not result.excused:
            print(result)
    failed = sum(not result.excused for result in results)
    print(f"{len(results)} corruptions, seed {arguments.seed}: {failed} unexcused")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
