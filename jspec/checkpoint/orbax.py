"""Nested dicts of arrays on disk, in Orbax' format: sharded or not, on any number of devices."""

from pathlib import Path
from typing import Any

import jax

from jspec.state import Params


def write(folder: Path, params: Params) -> None:
    """Writes arrays to a new folder; each device's part is written from there.

    Args:
      folder: absolute path that does not exist.
      params: nested dict of JAX arrays, all of them addressable by this process.
    """
    with _checkpointer() as checkpointer:
        checkpointer.save(folder, params)


def read_shapes(folder: Path) -> Params:
    """Returns shapes and dtypes of what was written, as `jax.ShapeDtypeStruct`; reads no data."""
    with _checkpointer() as checkpointer:
        stored = checkpointer.metadata(folder).item_metadata.tree
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), stored)


def read(folder: Path, shapes: Params, sharding: jax.sharding.Sharding) -> Params:
    """Reads arrays back.

    Args:
      folder: from `write`.
      shapes: from `read_shapes`.
      sharding: where every array goes, wherever it was when it was written.
    """
    template = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), shapes
    )
    with _checkpointer() as checkpointer:
        return checkpointer.restore(folder, template)


def _checkpointer() -> Any:
    import orbax.checkpoint as ocp  # takes a second, and most runs save nothing

    return ocp.Checkpointer(ocp.StandardCheckpointHandler())
