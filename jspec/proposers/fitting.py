"""Whether weights are those that a drafter's config wants."""

import functools
from collections.abc import Mapping
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from jspec.proposers import of
from jspec.state import Params

Keys: TypeAlias = tuple[str, ...]
"""Where an array lies in nested dicts."""


@functools.lru_cache
def shapes_of(config: Any) -> Mapping[Keys, jax.ShapeDtypeStruct]:
    """Returns shapes and float32 or int32 types of a config's params; empty without weights."""
    init_params = of(config).init_params
    if init_params is None:
        return {}
    drawn = jax.eval_shape(lambda: init_params(config, jax.random.key(0), "float32"))
    return leaves_of(drawn)


def leaves_of(params: Params) -> dict[Keys, Any]:
    """Lays nested dicts out flat."""
    leaves = jax.tree.leaves_with_path(params)
    return {tuple(entry.key for entry in path): leaf for path, leaf in leaves}


def misfits(wanted: Mapping[Keys, Any], found: Mapping[Keys, Any]) -> str:
    """Lists arrays that are missing, unknown or of a wrong shape, a line each; empty if all fit."""
    problems = []
    for keys in sorted(wanted.keys() | found.keys()):
        name = "/".join(keys)
        if keys not in found:
            problems.append(f"  missing: {name} {list(wanted[keys].shape)}\n")
        elif keys not in wanted:
            problems.append(f"  unknown: {name} {list(found[keys].shape)}\n")
        elif wanted[keys].shape != found[keys].shape:
            shapes = list(found[keys].shape), list(wanted[keys].shape)
            problems.append(f"  wrong shape: {name} {shapes[0]}, wanted {shapes[1]}\n")
    return "".join(problems)


def check_params(owner: str, config: Any, params: Params) -> None:
    """Refuses weights that a drafter of this config cannot run with.

    Args:
      owner: the function that was called, for messages.
      config: a registered proposer's.
      params: nested dict of arrays; None for a drafter without weights.

    Raises:
      TypeError: it is no such dict, or an array has an element type that weights cannot have.
      ValueError: arrays are missing, unknown or of a wrong shape (all are listed).
    """
    name, wanted = of(config).name, shapes_of(config)
    if not wanted:
        if params is not None:
            raise ValueError(
                f"{owner}: `params` is a {type(params).__name__}, wanted None: {name} has no "
                "weights. Leave params out."
            )
        return
    fix = "Take config and params from one call of jspec.load."
    if params is None:
        raise ValueError(f"{owner}: `params` is None, wanted the weights of {name}. {fix}")
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
                f"{'an array' if keys else f'the nested dict of weights of {name}'}. {fix}"
            )
    problems = misfits(wanted, found)
    if problems:
        raise ValueError(f"{owner}: `params` does not fit the config of {name}:\n{problems}{fix}")
    for keys, leaf in found.items():
        is_float = jnp.issubdtype(wanted[keys].dtype, jnp.floating)
        accepted = ("bfloat16", "float16", "float32") if is_float else ("int32",)
        if leaf.dtype.name not in accepted:
            raise TypeError(
                f"{owner}: `{'/'.join(('params', *keys))}` has dtype {leaf.dtype}, wanted "
                f"{' or '.join(accepted)}. Convert it first: array.astype({accepted[-1]!r})."
            )
