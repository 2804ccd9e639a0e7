"""Runs an op by each of its roads."""

import contextlib
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec.pallas import _backend

KERNELS = ["interpret", *(pytest.param(x, marks=pytest.mark.gpu) for x in ("triton", "mosaic"))]
BACKENDS = ["xla", *KERNELS]

POISON = 1_000_003  # an id, page, count and position that no case uses


@functools.cache
def compiled(op, road: str, static: tuple):
    """Compiles an op for one road and its static arguments, once per shape."""
    impl = "pallas" if road in ("triton", "mosaic") else road
    return jax.jit(functools.partial(op, impl=impl, **dict(static)))


def run(op, road: str, *arrays, eager: bool = False, **static):
    """Calls an op under jit with int32 or bool arrays (lists are converted); numpy comes back.

    With `eager`, plain JAX runs outside of jit, where other static values compile nothing anew.
    """
    args = [to_array(x) for x in arrays]
    if eager and road == "xla":
        return jax.tree.map(np.asarray, op(*args, **static, impl="xla"))
    on_gpu = road in ("triton", "mosaic")
    with _backend.use_lowering(road) if on_gpu else contextlib.nullcontext():
        return jax.tree.map(np.asarray, compiled(op, road, tuple(sorted(static.items())))(*args))


def to_array(x):
    """Makes int32 of integers; bools and JAX arrays stay as they are."""
    if x is None or isinstance(x, jax.Array):
        return x
    x = np.asarray(x)
    return jnp.asarray(x if x.dtype == bool else x.astype(np.int32))


def assert_same(got, want) -> None:
    """Compares the outputs of an op with lists, exactly; a NamedTuple with a dict of fields."""
    if isinstance(want, dict):
        assert list(want) == list(got._fields)
        names, want = got._fields, want.values()
    else:
        names = range(len(want))
    for name, x, y in zip(names, got, want, strict=True):
        np.testing.assert_array_equal(x, np.asarray(y).reshape(x.shape), err_msg=str(name))


def bucket(size: int) -> int:
    """Returns a power of two with room for `size` and for padding: few kernels are compiled."""
    return 1 << max(size, 31).bit_length()


def padded(array: np.ndarray, *shape: int, value: int = POISON) -> np.ndarray:
    """Grows an array at the end of each axis, with poison by default."""
    widths = [(0, want - have) for want, have in zip(shape, array.shape, strict=True)]
    return np.pad(array, widths, constant_values=value)
