"""How host loops are compiled: without the interpreter lock, kept on disk where that works."""

import hashlib
import inspect
from collections.abc import Callable
from types import ModuleType
from typing import Any

import numba


def njit(**options) -> Any:
    """Returns a decorator that compiles a function to run without the interpreter lock."""

    def decorate(function):
        try:
            return numba.njit(nogil=True, cache=True, **options)(function)
        except RuntimeError:  # numba found no writable folder: a read-only install
            return numba.njit(nogil=True, **options)(function)

    return decorate


def part(function: Callable) -> Any:
    """Compiles a function into those that call it.

    It allocates nothing, so numba can leave out its reference counts: atomic operations, and most
    of the time of a function that reads a few cells.
    """
    options: dict[str, Any] = {"nogil": True, "forceinline": True, "_nrt": False}
    return numba.njit(**options)(function)


def entry(*sources: ModuleType, **options) -> Any:
    """Returns a decorator like `njit`'s for a function whose parts are in other modules.

    Numba compiles a stored function again when its own file has changed; here its name on disk
    changes with the text of `sources`, too.
    """
    digest = hashlib.sha256("".join(map(inspect.getsource, sources)).encode()).hexdigest()

    def decorate(function):
        function.__qualname__ = f"{function.__name__}_{digest[:16]}"
        return njit(**options)(function)

    return decorate
