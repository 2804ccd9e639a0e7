"""The folder of a user's downloads and compiled executables."""

import contextlib
import os
from pathlib import Path

import jax


def cache_folder() -> Path:
    """Returns $JSPEC_CACHE, else $XDG_CACHE_HOME/jspec, else ~/.cache/jspec."""
    if own := os.environ.get("JSPEC_CACHE"):
        return Path(own)
    shared = os.environ.get("XDG_CACHE_HOME")
    return (Path(shared) if shared else Path.home() / ".cache") / "jspec"


def keep_executables() -> None:
    """Keeps what JAX compiles in the cache folder, so that later processes start without compiling.

    A folder that JAX has already stays, and one that cannot be written goes unused.
    """
    folder = cache_folder() / "compiled"
    if jax.config.values["jax_compilation_cache_dir"] is not None:
        return
    with contextlib.suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
    if os.access(folder, os.W_OK):  # else JAX would warn at each executable
        jax.config.update("jax_compilation_cache_dir", str(folder))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)
