"""How host loops are compiled: without the interpreter lock, kept on disk where that works."""

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
