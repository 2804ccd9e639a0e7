"""Faults that a model folder may have in config.json and in its tensors."""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from numpy.random import Generator
from safetensors.numpy import save_file

BF16 = np.dtype(ml_dtypes.bfloat16)

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
      of_config: the fault is in config.json.
      told: even the right model wants a warning.
      after: changes the files once they are written.
    """

    name: str
    file: str
    config: dict[str, Any]
    tensors: dict[str, np.ndarray]
    keys: list[str] = field(default_factory=list)
    legal: bool = False
    of_config: bool = False
    told: bool = False
    after: Callable[[Path], Any] | None = None

    def write(self, path: Path) -> None:
        path.mkdir()
        (path / "config.json").write_text(json.dumps(self.config))
        save_file(self.tensors, path / self.file)
        if self.after is not None:
            self.after(path)


Fault = Callable[[Folder, Generator], str | None]
"""Changes a folder; returns what it did, None where it cannot be done to this folder."""

# config.json


def _settings(config: dict[str, Any]) -> Iterator[tuple[dict[str, Any], str]]:
    for key, value in config.items():
        yield config, key
        if isinstance(value, dict):
            yield from _settings(value)


def _pick(config: dict[str, Any], rng: Generator) -> tuple[dict[str, Any], str]:
    """Chooses a setting: the object that holds it, and its key."""
    found = list(_settings(config))
    return found[rng.integers(len(found))]


def drop_key(folder: Folder, rng: Generator) -> str | None:
    holder, key = _pick(folder.config, rng)
    del holder[key]
    folder.keys, folder.legal, folder.of_config = [key], key in _FREE, True
    return f"without {key}"


def change_number(folder: Folder, rng: Generator) -> str | None:
    holder, key = _pick(folder.config, rng)
    old = holder[key]
    if type(old) not in (int, float):
        return None
    new = [old * 2, old + 1, old - 1, 0, -old, 10**12, old / 2, float("nan")][rng.integers(8)]
    if new == old:
        return None
    holder[key] = new
    folder.keys, folder.legal, folder.of_config = [key], key in _FREE, True
    return f"{key} {old} -> {new}"


def change_type(folder: Folder, rng: Generator) -> str | None:
    holder, key = _pick(folder.config, rng)
    old = holder[key]
    new = [str(old), [old], {"x": old}, None, True, "", [], -1.5][rng.integers(8)]
    if new == old or (new is None and old is None):
        return None
    holder[key] = new
    folder.keys, folder.legal, folder.of_config = [key], key in _FREE, True
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
    folder.keys, folder.legal, folder.of_config = [a, b], {a, b} <= _FREE | _UNREAD, True
    return f"{a} <-> {b}"


_UNREAD = {
    *("bos_token_id", "pretraining_tp", "initializer_range", "max_paths", "topk"),
    "max_window_layers",  # where no window is on
}

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
    elif isinstance(old, (int, float)) and not isinstance(old, bool):
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
    # null says nothing that the other place could contradict.
    folder.keys, folder.of_config, folder.legal = [key, place], True, old is None
    return f"{key} {old!r}, and {place} {other!r}"


# Tensors


def any_tensor(folder: Folder, rng: Generator) -> str:
    names = list(folder.tensors)
    return names[rng.integers(len(names))]


def _tensor_that(fits: Callable[[np.ndarray], Any], folder: Folder, rng: Generator) -> str | None:
    names = [name for name, x in folder.tensors.items() if fits(x)]
    return names[rng.integers(len(names))] if names else None


def drop_tensor(folder: Folder, rng: Generator) -> str | None:
    name = any_tensor(folder, rng)
    del folder.tensors[name]
    folder.keys = [name, name.replace("midlayer", "layers.0")]
    # The target's stands in for it, or that it is there is the one thing that says so.
    whole = folder.config.get("draft_vocab_size") == folder.config.get("vocab_size")
    whole |= folder.name.startswith("medusa")
    folder.legal = name in ("t2d", "embed_tokens.weight", "fc.bias", "mask_hidden")
    folder.legal |= name == "lm_head.weight" and whole
    return f"without {name}"


def rename_tensor(folder: Folder, rng: Generator) -> str | None:
    name = any_tensor(folder, rng)
    new = [f"x.{name}", f"{name}x", name.replace("weight", "wieght"), name.upper()]
    other = new[rng.integers(len(new))]
    if other == name:
        return None
    folder.tensors[other] = folder.tensors.pop(name)
    folder.keys = [name, other]
    return f"{name} is called {other}"


def transpose(folder: Folder, rng: Generator) -> str | None:
    name = _tensor_that(lambda x: x.ndim == 2 and x.shape[0] != x.shape[1], folder, rng)
    if name is None:
        return None
    folder.tensors[name] = np.ascontiguousarray(folder.tensors[name].T)
    folder.keys = [name]
    return f"{name} transposed"


def reshape(folder: Folder, rng: Generator) -> str | None:
    name = _tensor_that(lambda x: x.size % 2 == 0, folder, rng)
    if name is None:
        return None
    folder.tensors[name] = folder.tensors[name].reshape(2, -1)
    folder.keys = [name]
    folder.legal = name == "mask_hidden"  # as many numbers
    return f"{name} of another shape"


def cut_rows(folder: Folder, rng: Generator) -> str | None:
    name = _tensor_that(lambda x: len(x) > 1 if x.ndim else False, folder, rng)
    if name is None:
        return None
    folder.tensors[name] = folder.tensors[name][:-1]
    folder.keys = [name]
    return f"{name} without its last row"


def quantize(folder: Folder, rng: Generator) -> str | None:
    name = _tensor_that(
        lambda x: np.issubdtype(x.dtype, np.floating) or x.dtype == BF16, folder, rng
    )
    if name is None:
        return None
    kind = [np.int8, np.uint8, np.int32, np.int64, np.bool_][rng.integers(5)]
    folder.tensors[name] = np.ones(folder.tensors[name].shape, kind)
    folder.keys = [name, np.dtype(kind).name]
    return f"{name} as {np.dtype(kind).name}"


def change_precision(folder: Folder, rng: Generator) -> str | None:
    name = any_tensor(folder, rng)
    kind = [np.float64, np.float32, np.float16, BF16][rng.integers(4)]
    if folder.tensors[name].dtype == kind:
        return None
    was_index = np.issubdtype(folder.tensors[name].dtype, np.integer)
    folder.tensors[name] = folder.tensors[name].astype(kind)
    folder.keys = [name]
    folder.legal = not was_index and folder.tensors[name].dtype != bool
    return f"{name} as {np.dtype(kind).name}"


def edit_header(name: str, key: str, value: Any, file: str) -> Callable[[Path], None]:
    def edit(path: Path) -> None:
        content = (path / file).read_bytes()
        length = int.from_bytes(content[:8], "little")
        header = json.loads(content[8 : 8 + length])
        header[name][key] = value
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        (path / file).write_bytes(len(text).to_bytes(8, "little") + text + content[8 + length :])

    return edit


def float8(folder: Folder, rng: Generator) -> str | None:
    """Writes a tensor's header as if it were quantized, with as many bytes."""
    name = _tensor_that(lambda x: x.dtype == BF16 and x.ndim == 2, folder, rng)
    if name is None:
        return None
    rows, columns = folder.tensors[name].shape
    folder.tensors[name] = folder.tensors[name].view(np.uint8).reshape(rows, 2 * columns)
    kind = ["F8_E4M3", "F8_E5M2"][rng.integers(2)]
    folder.after = edit_header(name, "dtype", kind, folder.file)
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
    name = any_tensor(folder, rng)
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
    if name == "d2t" and rng.random() < 0.5:
        folder.tensors.pop("t2d", None)
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


FAULTS: tuple[Fault, ...] = (
    drop_key,
    change_number,
    change_number,
    change_type,
    change_type,
    swap_keys,
    say_twice,
    drop_tensor,
    rename_tensor,
    transpose,
    reshape,
    cut_rows,
    quantize,
    change_precision,
    float8,
    unknown_tensor,
    second_name,
    change_table,
    change_table,
)
