"""Builds params from named tensors, by the rule table of a model."""

import collections
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jspec.models.layers import Place, Rules
from jspec.state import Params


def assemble(template: Params, rules: Rules, tensors: Iterable[tuple[str, np.ndarray]]) -> Params:
    """Fills params with a checkpoint's tensors, fusing on the way.

    Tensors are copied leaf by leaf into host memory, once all of a leaf are known to fit: no size
    that a config claims is allocated without the tensors. Nothing goes to a device before all names
    and shapes fit; then leaf after leaf moves there, so the peak is the params' own size and the
    tensors of a leaf.

    Args:
      template: shapes and dtypes of the params, see `jspec.models.weights.abstract`.
      rules: where each tensor goes.
      tensors: (name, array) pairs in any order; `rotary_emb.inv_freq` is skipped.

    Returns:
      The params on the default device, in the template's dtypes.

    Raises:
      ValueError: tensors are missing, unknown, repeated, of a wrong shape or no floats; all are
        listed.
    """
    shapes = {_keys(path): leaf for path, leaf in jax.tree.leaves_with_path(template)}
    wanted = {name: place for name, place in rules.items() if place is not None}
    num_parts = collections.Counter(place.path for place in wanted.values())
    parts: dict[tuple[str, ...], list[tuple[Place, np.ndarray]]] = collections.defaultdict(list)
    leaves: dict[tuple[str, ...], np.ndarray] = {}
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
        shape = _tensor_shape(leaf.shape, place)
        if jnp.issubdtype(leaf.dtype, jnp.floating) and not is_float(tensor):
            problems.append(f"wrong dtype: {name} {tensor.dtype}, wanted floats, not quantized")
        if tensor.shape != shape:
            problems.append(f"wrong shape: {name} {list(tensor.shape)}, wanted {list(shape)}")
        if problems:  # go on for the names and shapes only
            continue
        parts[place.path].append((place, tensor))
        if len(parts[place.path]) == num_parts[place.path]:
            leaves[place.path] = _fuse(leaf, parts.pop(place.path))
    problems += [
        f"missing: {name} {list(_tensor_shape(shapes[place.path].shape, place))}"
        for name, place in wanted.items()
        if name not in seen
    ]
    if problems:
        raise ValueError(
            "the checkpoint's tensors do not fit its config:\n  " + "\n  ".join(problems) + "\n"
            "Take weights and config.json from the same model."
        )

    def move(path: tuple[Any, ...], _: Any) -> jax.Array:
        # Without the wait, copies queue up and host and device hold everything twice.
        return jnp.asarray(leaves.pop(_keys(path))).block_until_ready()

    return jax.tree.map_with_path(move, template)


def is_float(tensor: np.ndarray) -> bool:
    """Tells weights from quantized ones, whose integers mean nothing without their scales."""
    return bool(jnp.issubdtype(tensor.dtype, jnp.floating))


def _fuse(leaf: Any, parts: list[tuple[Place, np.ndarray]]) -> np.ndarray:
    """Copies the tensors of a leaf side by side, in its dtype."""
    out = np.empty(leaf.shape, leaf.dtype)
    for place, tensor in parts:
        start, end = place.columns or (0, leaf.shape[-1])
        out[..., start:end] = tensor.T if place.transpose else tensor
    return out


def _keys(path: tuple[Any, ...]) -> tuple[str, ...]:
    return tuple(entry.key for entry in path)


def _tensor_shape(leaf_shape: tuple[int, ...], place: Place) -> tuple[int, ...]:
    """Returns the shape that a place wants a checkpoint tensor to have."""
    if place.columns:
        start, end = place.columns
        leaf_shape = (*leaf_shape[:-1], end - start)
    return leaf_shape[::-1] if place.transpose else leaf_shape
