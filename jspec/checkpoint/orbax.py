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
    """Writes arrays to a new folder; each device's part is written from there.

    Args:
      folder: absolute path that does not exist.
      params: nested dict of JAX arrays, all of them addressable by this process.

    Raises:
      OSError: the disk does not take them.
    """
    try:
        with _quiet(), _checkpointer() as checkpointer:
            checkpointer.save(folder, params)
    except ValueError as error:  # of TensorStore, whatever the system said
        raise OSError(str(error)) from error


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


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keeps an error that is raised from being printed by each thread, too, with a traceback."""
    log = logging.getLogger("absl")
    level, hook = log.level, sys.unraisablehook

    def pass_on(found: Any) -> None:
        # What TensorStore still wrote after the first error reports to a loop that has ended.
        if str(found.exc_value) != "Event loop is closed":
            hook(found)

    log.setLevel(logging.CRITICAL)
    sys.unraisablehook = pass_on
    try:
        yield
        sys.unraisablehook = hook  # after an error it stays: such reports come late, too
    finally:
        log.setLevel(level)


def _checkpointer() -> Any:
    import orbax.checkpoint as ocp  # takes a second, and most runs save nothing

    return ocp.Checkpointer(ocp.StandardCheckpointHandler())
