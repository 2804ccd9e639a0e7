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
    """Compiles a function that makes no arrays into those that call it.

    Numba then leaves out its reference counts: atomic operations, and most of the time of a
    function that reads a few cells. Inlined, it need not be handed all tables each time.
    """
    options: dict[str, Any] = {"nogil": True, "forceinline": True, "_nrt": False}
    return numba.njit(**options)(function)


def allocating_part(function: Callable) -> Any:
    """Compiles a function that makes arrays or lists, for those that call it."""
    return numba.njit(nogil=True)(function)


def entry(*sources: ModuleType) -> Any:
    """Returns a decorator like `njit`'s for a function whose parts are in other modules.

    Numba compiles a stored function again when its own file has changed, but not when only a part
    of it has. So here its name on disk changes with the text of `sources`.
    """
    try:
        text = "".join(map(inspect.getsource, sources))
    except OSError:  # an install without sources, which nobody edits
        text = ""
    digest = hashlib.sha256(text.encode()).hexdigest()[:16]

    def decorate(function):
        function.__qualname__ = f"{function.__name__}_{digest}"
        return njit()(function)

    return decorate
