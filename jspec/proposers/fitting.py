"""Whether weights and memory are those that a drafter's config wants."""

import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from jspec.checkpoint.assemble import Keys, leaves_of
from jspec.config import CacheConfig
from jspec.proposers import of
from jspec.state import Memory, Params, State

_TARGET_IDS = "target_ids"
"""Param with the target's token of each draft id, in every method that has a draft vocabulary."""

_LOAD = "Take config and params from one call of jspec.load."


@functools.lru_cache
def shapes_of(config: Any) -> Mapping[Keys, jax.ShapeDtypeStruct]:
    """Returns shapes and float32 or int32 types of a config's params; empty without weights."""
    return leaves_of(_abstract_params(config))


def misfits(wanted: Mapping[Keys, Any], found: Mapping[Keys, Any]) -> str:
    """Lists arrays that are missing, unknown or of a wrong shape, a line each; empty if all fit."""
    problems, too_long = [], ""
    for keys in sorted(wanted.keys() | found.keys()):
        name = "/".join(keys)
        if keys not in found:
            problems.append(f"  missing: {name} {list(wanted[keys].shape)}\n")
        elif keys not in wanted:
            problems.append(f"  unknown: {name} {list(found[keys].shape)}\n")
        elif wanted[keys].shape != found[keys].shape:
            shapes = list(found[keys].shape), list(wanted[keys].shape)
            problems.append(f"  wrong shape: {name} {shapes[0]}, wanted {shapes[1]}\n")
            if keys[-1] in ("embed", "head") and shapes[0][1:] == shapes[1][1:]:
                too_long = name if shapes[0] > shapes[1] else too_long
    if too_long:
        problems.append(
            f"Rows that pad {too_long} for sharding are stated in the config's model: "
            "padded_vocab_size (of a draft vocabulary padded_draft_vocab_size).\n"
        )
    return "".join(problems)


def check_params(owner: str, config: Any, params: Params) -> None:
    """Refuses weights that a drafter of this config cannot run with.

    Args:
      owner: the function that was called, for messages.
      config: a registered proposer's.
      params: nested dict of arrays, in memory; None for a drafter without weights.

    Raises:
      TypeError: it is no such dict, or an array has an element type that weights cannot have.
      ValueError: arrays are missing, unknown or of a wrong shape (all are listed), or a table of
        token ids leads out of the vocabulary.
    """
    check_shapes(owner, config, params)
    check_token_tables(owner, config, leaves_of(params))


def check_shapes(owner: str, config: Any, params: Params) -> None:
    """Does what `check_params` does without reading a value: for arrays that are traced, too."""
    key = _key(config, params)
    if key in _checked:
        return
    name, wanted = of(config).name, shapes_of(config)
    if not wanted:
        if params is not None:
            raise ValueError(
                f"{owner}: `params` is a {type(params).__name__}, wanted None: {name} has no "
                "weights. Leave params out."
            )
        return
    if params is None:
        raise ValueError(f"{owner}: `params` is None, wanted the weights of {name}. {_LOAD}")
    found: dict[Keys, Any] = {}
    waiting: list[tuple[Keys, Any]] = [((), params)]
    while waiting:
        keys, value = waiting.pop()
        if isinstance(value, Mapping):
            waiting += [((*keys, str(key)), item) for key, item in value.items()]
        elif keys and isinstance(value, (jax.Array, np.ndarray)):
            found[keys] = value
        else:
            raise TypeError(
                f"{owner}: `{'/'.join(('params', *keys))}` is a {type(value).__name__}, wanted "
                f"{'an array' if keys else f'the nested dict of weights of {name}'}. {_LOAD}"
            )
    problems = misfits(wanted, found)
    if problems:
        raise ValueError(f"{owner}: `params` does not fit the config of {name}:\n{problems}{_LOAD}")
    check_dtypes(owner, wanted, found)
    _checked.add(key)


def check_dtypes(owner: str, wanted: Mapping[Keys, Any], found: Mapping[Keys, Any]) -> None:
    """Raises TypeError for an array of an element type that weights cannot have."""
    for keys, leaf in found.items():
        is_float = jnp.issubdtype(wanted[keys].dtype, jnp.floating)
        accepted = ("bfloat16", "float16", "float32") if is_float else ("int32",)
        if leaf.dtype.name not in accepted:
            raise TypeError(
                f"{owner}: `{'/'.join(('params', *keys))}` has dtype {leaf.dtype}, wanted "
                f"{' or '.join(accepted)}. Convert it first: array.astype({accepted[-1]!r})."
            )


def check_token_tables(owner: str, config: Any, leaves: Mapping[Keys, Any]) -> None:
    """Raises ValueError unless `target_ids` are tokens, ascending and none twice.

    Traced arrays have no values yet: of those, an id outside the vocabulary counts as PAD.
    """
    for keys, leaf in leaves.items():
        if keys[-1] != _TARGET_IDS or isinstance(leaf, Tracer):
            continue
        ids, name = np.asarray(leaf), "/".join(("params", *keys))
        outside = (ids < 0) | (ids >= config.vocab_size)
        if outside.any():
            index = int(np.argmax(outside))
            raise ValueError(
                f"{owner}: `{name}` has {ids[index]} at {index}, wanted token ids from 0 to "
                f"{config.vocab_size - 1}, the config's vocabulary. {_LOAD}"
            )
        falls = ids[1:] <= ids[:-1]
        if falls.any():
            index = int(np.argmax(falls))
            raise ValueError(
                f"{owner}: `{name}` has {ids[index + 1]} after {ids[index]} at {index + 1}, wanted "
                "ascending token ids, none twice, so that the lowest one wins ties. Sort it, and "
                "the rows of `head` with it."
            )


def check_memory(owner: str, config: Any, memory: Memory) -> None:
    """Refuses memory that `jspec.init` did not make for this config.

    Args:
      owner, config: as `check_params`.
      memory: of arrays that may be traced.

    Raises:
      TypeError: it is of another type. ValueError: an array of it has another shape.
    """
    key = _key(config, memory)
    if key in _checked:
        return
    name = of(config).name
    fix = "Pass the memory of a state of this config: jspec.init(config, ...).memory."
    small, large = _abstract_memory(config)
    if type(memory) is not type(small):
        hint = "Pass state.params and state.memory." if isinstance(memory, State) else fix
        raise TypeError(
            f"{owner}: `memory` is a {type(memory).__name__}, wanted the {type(small).__name__} of "
            f"{name}. {hint}"
        )
    found, small, large = (
        {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree.leaves_with_path(tree)}
        for tree in (memory, small, large)
    )
    for part in sorted(found.keys() | small.keys()):
        got = tuple(found[part].shape) if part in found else None
        wanted = None
        if part in small:
            # Sizes that differ between two caches are the cache's, the others the config's.
            sizes = zip(small[part].shape, large[part].shape, strict=True)
            wanted = [a if a == b else None for a, b in sizes]
        if not _fits(got, wanted):
            shown = wanted and f"[{', '.join('any' if w is None else str(w) for w in wanted)}]"
            raise ValueError(
                f"{owner}: `memory{part}` has shape {got}, wanted {shown} by the config of {name}. "
                f"{fix}"
            )
    _checked.add(key)


def _fits(got: tuple[int, ...] | None, wanted: list[int | None] | None) -> bool:
    if got is None or wanted is None or len(got) != len(wanted):
        return False
    return all(w in (None, g) for g, w in zip(got, wanted, strict=True))


_checked: set[Any] = set()  # (config, structure, shapes and dtypes) that fit: they come again


def _key(config: Any, tree: Any) -> Any:
    leaves, structure = jax.tree.flatten(tree)
    return (
        config,
        structure,
        tuple((getattr(x, "shape", type(x)), getattr(x, "dtype", None)) for x in leaves),
    )


def _abstract_params(config: Any) -> Params:
    init_params = of(config).init_params
    if init_params is None:
        return None
    return jax.eval_shape(lambda: init_params(config, jax.random.key(0), "float32"))


@functools.lru_cache
def _abstract_memory(config: Any) -> tuple[Memory, Memory]:
    """Shapes of the memories for two caches that have no size in common."""

    def shapes(num_pages: int, page_size: int, max_model_len: int, max_requests: int) -> Memory:
        cache = CacheConfig(num_pages=num_pages, page_size=page_size, max_model_len=max_model_len)
        return jax.eval_shape(
            lambda params: of(config).init(config, params, cache, max_requests),
            _abstract_params(config),
        )

    return shapes(2, 8, 24, 3), shapes(5, 16, 64, 7)
