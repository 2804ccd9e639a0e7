"""Builds params from named tensors, by the rule table of a model."""

from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jspec.models.layers import Place, Rules
from jspec.state import Params


def assemble(template: Params, rules: Rules, tensors: Iterable[tuple[str, np.ndarray]]) -> Params:
    """Fills params with a checkpoint's tensors, fusing on the way.

    Tensors are copied one at a time into host leaves; nothing goes to a device before all names and
    shapes are known to fit, and each host leaf is dropped when its device copy exists.

    Args:
      template: shapes and dtypes of the params, `abstract_params`.
      rules: where each tensor goes.
      tensors: (name, array) pairs in any order; `rotary_emb.inv_freq` is skipped.

    Returns:
      The params on the default device, in the template's dtypes.

    Raises:
      ValueError: tensors are missing, unknown, repeated or of a wrong shape: all are listed.
    """
    shapes = {path: leaf for path, leaf in _flatten(template)}
    wanted = {name: place for name, place in rules.items() if place is not None}
    leaves: dict[tuple[str, ...], np.ndarray] = {}
    problems: list[str] = []
    seen: set[str] = set()
    for name, tensor in tensors:
        if "rotary_emb.inv_freq" in name or (name in rules and rules[name] is None):
            continue
        place = wanted.get(name)
        if place is None or name in seen:
            kind = "unknown" if place is None else "repeated"
            problems.append(f"{kind}: {name} {list(tensor.shape)}")
            continue
        seen.add(name)
        leaf = shapes[place.path]
        shape = _tensor_shape(leaf.shape, place)
        if tensor.shape != shape:
            problems.append(f"wrong shape: {name} {list(tensor.shape)}, wanted {list(shape)}")
        if problems:
            continue  # the rest is read for its names and shapes only
        if place.path not in leaves:
            leaves[place.path] = np.empty(leaf.shape, leaf.dtype)
        target = leaves[place.path]
        if place.columns:
            target = target[..., slice(*place.columns)]
        _copy(target, tensor.T if place.transpose else tensor)
    for name, place in wanted.items():
        if name not in seen:
            shape = _tensor_shape(shapes[place.path].shape, place)
            problems.append(f"missing: {name} {list(shape)}")
    if problems:
        raise ValueError(
            "The checkpoint does not fit its config.json:\n  " + "\n  ".join(problems) + "\n"
            "Take weights and config.json from the same model."
        )
    return jax.tree_util.tree_map_with_path(
        lambda path, _: jnp.asarray(leaves.pop(tuple(key.key for key in path))), template
    )


def _flatten(template: Params) -> list[tuple[tuple[str, ...], Any]]:
    return [
        (tuple(key.key for key in path), leaf)
        for path, leaf in jax.tree_util.tree_leaves_with_path(template)
    ]


def _tensor_shape(leaf_shape: tuple[int, ...], place: Place) -> tuple[int, ...]:
    if place.columns:
        leaf_shape = (*leaf_shape[:-1], place.columns[1] - place.columns[0])
    return leaf_shape[::-1] if place.transpose else leaf_shape


def _copy(target: np.ndarray, source: np.ndarray) -> None:
    target[...] = source
