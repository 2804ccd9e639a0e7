"""Nested dicts of arrays on disk, in Orbax' format: sharded or not, on any number of devices."""

import contextlib
import logging
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax

from jspec.state import Params


def write(folder: Path, params: Params) -> None:
    """Writes arrays to a new folder, each shard from its own device.

    Args:
      folder: absolute path that does not exist.
      params: nested dict of JAX arrays, all of them addressable by this process.

    Raises:
      OSError: a file cannot be written.
    """
    try:
        with _quiet(), _checkpointer() as checkpointer:
            checkpointer.save(folder, params)
    except ValueError as error:  # of TensorStore, for errors of the file system
        raise OSError(str(error)) from error


def read_shapes(folder: Path) -> Params:
    """Returns shapes and dtypes of the arrays as `jax.ShapeDtypeStruct`; reads no data."""
    with _checkpointer() as checkpointer:
        stored = checkpointer.metadata(folder).item_metadata.tree
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), stored)


def read(folder: Path, shapes: Params, sharding: jax.sharding.Sharding) -> Params:
    """Reads arrays back.

    Args:
      folder: from `write`.
      shapes: from `read_shapes`.
      sharding: of all arrays, whatever it was when they were written.
    """
    template = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), shapes
    )
    with _checkpointer() as checkpointer:
        return checkpointer.restore(folder, template)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Suppresses logs and tracebacks of threads for an error that is raised anyway."""
    log = logging.getLogger("absl")
    level, hook = log.level, sys.unraisablehook

    def pass_on(found: Any) -> None:
        # After the first error, TensorStore's other writes report to a closed event loop.
        if str(found.exc_value) != "Event loop is closed":
            hook(found)

    log.setLevel(logging.CRITICAL)
    sys.unraisablehook = pass_on
    try:
        yield
        sys.unraisablehook = hook  # after an error it stays, as some reports come late
    finally:
        log.setLevel(level)


def _checkpointer() -> Any:
    import orbax.checkpoint as ocp  # takes a second, and most runs save nothing

    return ocp.Checkpointer(ocp.StandardCheckpointHandler())
