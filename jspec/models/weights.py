"""Weights as plain nested dicts: their shapes, random values, and the module that they make.

A flax module as an argument of a jitted function costs several times its dispatch, so modules are
put together inside the trace, from a static config and the dict.
"""

import functools
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array

from jspec.state import Params

_M = TypeVar("_M", bound=nnx.Module)


def abstract(module: type[nnx.Module], config: Any, dtype: DTypeLike) -> Params:
    """Returns the params' shapes, as `jax.ShapeDtypeStruct`: what loading checks against.

    Args:
      module: constructed as `module(config, dtype)`.
      config: hashable; shape of the model.
      dtype: of the weights.
    """
    return jax.tree.map(lambda leaf: leaf, _split(module, config, jnp.dtype(dtype).name)[1])


def draw(module: type[nnx.Module], config: Any, key: Array, dtype: DTypeLike) -> Params:
    """Draws random params whose activations keep unit scale.

    Args:
      module, config, dtype: as `abstract`.
      key: random key, consumed.
    """
    template = abstract(module, config, dtype)
    paths, tree = jax.tree.flatten_with_path(template)

    def value(path: tuple, leaf: jax.ShapeDtypeStruct, key: Array) -> Array:
        name = path[-1].key
        if name == "weight":  # of a norm
            return jnp.ones(leaf.shape, leaf.dtype)
        fan_in = leaf.shape[-1] if name in ("embed", "head") else leaf.shape[0]
        return jax.random.normal(key, leaf.shape, leaf.dtype) * fan_in**-0.5

    keys = jax.random.split(key, len(paths))
    return jax.tree.unflatten(
        tree, [value(*item, key) for item, key in zip(paths, keys, strict=True)]
    )


def bind(module: type[_M], config: Any, params: Params) -> _M:
    """Puts a module together from its weights, whatever their dtype.

    Args:
      module, config: as `abstract`.
      params: its weights; further entries at the top level (`target_ids`) are left out.
    """
    graphdef, template = _split(module, config, "float32")  # they are the same for every dtype
    return nnx.merge(graphdef, {key: params[key] for key in template})


@functools.lru_cache
def _split(module: type[nnx.Module], config: Any, dtype: str) -> tuple[nnx.GraphDef, Params]:
    make: Any = module
    graphdef, state = nnx.split(nnx.eval_shape(lambda: make(config, dtype)))
    return graphdef, nnx.to_pure_dict(state)
