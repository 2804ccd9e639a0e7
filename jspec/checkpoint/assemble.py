"""Params from a checkpoint's tensors, by the rule table of a model."""

import collections
from collections.abc import Iterable
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from jspec.models.layers import Place, Rules
from jspec.state import Params

Keys: TypeAlias = tuple[str, ...]
"""Keys of an array in nested dicts."""


def leaves_of(params: Params) -> dict[Keys, Any]:
    """Flattens nested dicts."""
    leaves = jax.tree.leaves_with_path(params)
    return {tuple(entry.key for entry in path): leaf for path, leaf in leaves}


def assemble(template: Params, rules: Rules, tensors: Iterable[tuple[str, np.ndarray]]) -> Params:
    """Fills params with a checkpoint's tensors, fusing those of one leaf.

    The tensors of a leaf are copied into host memory once their shapes are checked, so that a size
    in a config allocates nothing without tensors of that size. After all names and shapes are
    checked, leaves move to the device one by one: peak memory is the params and one leaf's tensors.

    Args:
      template: shapes and dtypes of the params, see `jspec.models.weights.abstract`.
      rules: leaf and columns of each tensor.
      tensors: (name, array) pairs in any order; `rotary_emb.inv_freq` is skipped.

    Returns:
      The params on the default device, in the template's dtypes.

    Raises:
      ValueError: tensors are missing, unknown, repeated, of a wrong shape or no floats; all are
        listed.
    """
    shapes = leaves_of(template)
    wanted = {name: place for name, place in rules.items() if place is not None}
    num_parts = collections.Counter(place.path for place in wanted.values())
    parts: dict[Keys, list[tuple[Place, np.ndarray]]] = collections.defaultdict(list)
    leaves: dict[Keys, np.ndarray] = {}
    problems: list[str] = []
    seen: set[str] = set()
    for name, tensor in tensors:
        if name in seen:
            problems.append(f"repeated: {name} {list(tensor.shape)}")
        seen.add(name)
        place = wanted.get(name)
        if place is None:
            if name not in rules and not name.endswith("rotary_emb.inv_freq"):
                problems.append(f"unknown: {name} {list(tensor.shape)}")
            continue
        leaf = shapes[place.path]
        shape = tensor_shape(leaf.shape, place)
        if jnp.issubdtype(leaf.dtype, jnp.floating) and not is_float(tensor):
            problems.append(f"wrong dtype: {name} {tensor.dtype}, wanted floats, not quantized")
        if tensor.shape != shape:
            problems.append(f"wrong shape: {name} {list(tensor.shape)}, wanted {list(shape)}")
        if problems:  # only collect further ones
            continue
        parts[place.path].append((place, tensor))
        if len(parts[place.path]) == num_parts[place.path]:
            leaves[place.path] = _fuse(leaf, parts.pop(place.path))
    problems += [
        f"missing: {name} {list(tensor_shape(shapes[place.path].shape, place))}"
        for name, place in wanted.items()
        if name not in seen
    ]
    if problems:
        raise ValueError(
            "the checkpoint's tensors do not fit its config:\n  " + "\n  ".join(problems) + "\n"
            "Take weights and config.json from the same model."
        )

    # Without the wait, copies queue up and host and device hold all params twice.
    moved = [jnp.asarray(leaves.pop(keys)).block_until_ready() for keys in shapes]
    return jax.tree.unflatten(jax.tree.structure(template), moved)


def is_float(tensor: np.ndarray) -> bool:
    """Whether a tensor holds weights; those of quantized models are integers."""
    return bool(jnp.issubdtype(tensor.dtype, jnp.floating))


def _fuse(leaf: Any, parts: list[tuple[Place, np.ndarray]]) -> np.ndarray:
    """Concatenates the tensors of a leaf, in its dtype."""
    out = np.empty(leaf.shape, leaf.dtype)
    for place, tensor in parts:
        start, end = place.columns or (0, leaf.shape[-1])
        out[..., start:end] = tensor.T if place.transpose else tensor
    return out


def tensor_shape(leaf_shape: tuple[int, ...], place: Place) -> tuple[int, ...]:
    """Returns the shape of the checkpoint tensor at a place."""
    if place.columns:
        start, end = place.columns
        leaf_shape = (*leaf_shape[:-1], end - start)
    return leaf_shape[::-1] if place.transpose else leaf_shape
