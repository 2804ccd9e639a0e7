"""Checks of an op's arguments, and the choice of its implementation."""

import functools
import inspect
from collections.abc import Callable
from typing import Any, Literal, TypeAlias, get_args

import jax
import numpy as np

from jspec.axes import AnyArray, Impl
from jspec.pallas import _backend

Choice: TypeAlias = Literal["xla"] | _backend.Backend
"""An implementation: the plain definition, or the kernel on one of its backends."""

# The measured winner of each op by device kind (benchmarks/results); XLA where nothing is listed.
_WINNERS: dict[str, dict[str, Choice]] = {
    "NVIDIA H200": {
        "next_token": "triton",
        "sample_index": "triton",
        "eagle_step": "triton",
        "expand_eagle": "triton",
        "expand_dflash": "triton",
        "ngram_match": "triton",
    },
}

# Ops whose kernel wins on every GPU that Triton compiles for: a plain loop of traced length makes
# the host wait for the device in each of its rounds.
_WINNERS_ON_CUDA: dict[str, Choice] = {"paged_attention": "triton"}
_TRITON_NEEDS = 8  # major compute capability

_AXES = {
    "B": "requests",
    "T": "flat tokens",
    "W": "verified tokens a request",
    "M": "pages a request",
    "R": "memory rows",
    "S": "tokens a row",
    "G": "tiles",
    "E": "query rows a tile",
}


def on_host(impl: Impl, *arrays: Any) -> bool:
    """Says whether a host drafter calls: numpy arrays alone, and no implementation asked for."""
    return impl == "auto" and all(isinstance(array, np.ndarray) for array in arrays)


def choose(impl: Impl, op: str, *, num_cells: int, fits: bool = True, why: str = "") -> Choice:
    """Decides at trace time which implementation of an op runs.

    Args:
      impl: "auto" takes the winner on the default device: measured for its kind, or the same on
        every CUDA GPU; XLA elsewhere.
      op: name of the op.
      num_cells: what a kernel would run over; without any there is nothing to launch.
      fits: whether the kernel handles these sizes.
      why: the reason where it does not.

    Returns:
      The implementation; "pallas" becomes the lowering that `_backend.use_lowering` selected.

    Raises:
      ValueError: no such `impl`.
      NotImplementedError: a kernel was asked for that cannot run here.
    """
    if impl not in get_args(Impl):
        raise ValueError(f"{op}: `impl` is {impl!r}, wanted one of {', '.join(get_args(Impl))}.")
    if impl == "xla":
        return "xla"
    device = _default_device()
    if impl == "auto":
        if not fits or not num_cells:
            return "xla"
        winner = _WINNERS.get(device.device_kind, {}).get(op)
        if winner is None and op in _WINNERS_ON_CUDA and _is_cuda(device):
            winner = _WINNERS_ON_CUDA[op]
        return winner or "xla"
    if not fits:
        raise NotImplementedError(
            f'{op}: impl="{impl}" does not handle {why}. Pass impl="xla" or "auto".'
        )
    if impl == "pallas" and device.platform != "gpu":
        raise NotImplementedError(
            f'{op}: impl="pallas" needs a CUDA GPU, and the default device is {device}. '
            'Pass impl="xla" or "auto", or impl="interpret" to step through the kernel.'
        )
    if num_cells == 0:
        return "xla"
    return "interpret" if impl == "interpret" else _backend.lowering()


def _is_cuda(device: Any) -> bool:
    """Says whether Triton compiles for a device; an AMD one has a capability like "gfx942"."""
    if device.platform != "gpu":
        return False
    major = str(device.compute_capability).partition(".")[0]
    return major.isdigit() and int(major) >= _TRITON_NEEDS


def _default_device():
    device = jax.config.jax_default_device  # pyright: ignore[reportAttributeAccessIssue]
    if isinstance(device, str):
        return jax.devices(device)[0]
    return device or jax.devices()[0]


def check_arrays(op: Callable, *arrays: AnyArray | None, host: bool = False) -> dict[str, int]:
    """Refuses arrays that are not what an op's annotations say; see `check_forms`.

    Args:
      op: the function; its array arguments are annotated with jaxtyping's `Int` or `Bool`.
      arrays: those arguments, in their order; None where an optional one is left out.
      host: the arrays stay in numpy.
    """
    forms = zip(array_forms(op).items(), arrays, strict=True)
    given = {name: (array, form) for (name, form), array in forms if array is not None}
    return check_forms(op.__qualname__, host=host, **given)


@functools.cache
def array_forms(op: Callable) -> dict[str, str]:
    """Reads the form of each array argument, "int B W" for example, from the annotations."""
    forms = {}
    for name, annotation in inspect.get_annotations(op, eval_str=True).items():
        array = (get_args(annotation) or (annotation,))[0]  # numpy's and JAX's are alike
        if name != "return" and hasattr(array, "dim_str"):
            forms[name] = f"{'bool' if 'bool' in array.dtypes else 'int'} {array.dim_str}"
    return forms


def check_forms(op: str, *, host: bool = False, **arrays: tuple[AnyArray, str]) -> dict[str, int]:
    """Refuses arrays of the wrong kind, rank or size.

    Args:
      op: name of the op, for the message.
      host: the arrays stay in numpy, where int64 needs no JAX setting.
      arrays: name to (array, form); a form is "int" or "bool" and axes: "int B W", "int B+1".
        The first array with an axis sets its size; an axis other than B and T has at least 1.

    Returns:
      The size of each axis.

    Raises:
      TypeError: not an array, or of a wrong dtype. ValueError: a wrong shape.
    """
    sizes: dict[str, int] = {}
    owner: dict[str, str] = {}
    for name, (array, form) in arrays.items():
        kind, *axes = form.split()
        _check_dtype(op, name, array, kind, host)
        if array.ndim != len(axes):
            legend = ", ".join(f"{a} {_AXES[a]}" for a in axes if a in _AXES)
            raise ValueError(
                f"{op}: `{name}` has shape {array.shape}, wanted [{', '.join(axes)}] "
                f"({legend}). Reshape it to {len(axes)} ax{'i' if len(axes) == 1 else 'e'}s."
            )
        for index, (axis, size) in enumerate(zip(axes, array.shape, strict=True)):
            letter, _, extra = axis.partition("+")
            if letter not in sizes:
                sizes[letter], owner[letter] = size - int(extra or 0), name
                if size == 0 and letter not in "BT":
                    raise ValueError(
                        f"{op}: `{name}` has shape {array.shape}, wanted [{', '.join(axes)}] with "
                        f"{axis} ({_AXES[axis]}) at least 1. Pass one column or more."
                    )
            wanted = sizes[letter] + int(extra or 0)
            if size != wanted:
                raise ValueError(
                    f"{op}: `{name}` has shape {array.shape}, wanted {wanted} along axis {index}: "
                    f"{axis} with {letter} = {sizes[letter]}, as `{owner[letter]}` has it. "
                    f"Pad or slice one of the two."
                )
    return sizes


def _check_dtype(op: str, name: str, array: Any, kind: str, host: bool) -> None:
    if not hasattr(array, "dtype") or not hasattr(array, "ndim"):
        dtype = "bool" if kind == "bool" else "int32"
        raise TypeError(
            f"{op}: `{name}` is a {type(array).__name__}, wanted an array. "
            f"Pass jnp.asarray({name}, '{dtype}')."
        )
    if kind == "bool":
        if array.dtype != np.bool_:
            raise TypeError(
                f"{op}: `{name}` has dtype {array.dtype}, wanted bool. Pass {name} != 0."
            )
        return
    if array.dtype not in (np.int32, np.int64):
        raise TypeError(
            f"{op}: `{name}` has dtype {array.dtype}, wanted int32 or int64. "
            f"Pass {name}.astype('int32')."
        )
    if array.dtype == np.int64 and not host and jax.dtypes.canonicalize_dtype(np.int64) != np.int64:
        raise TypeError(
            f"{op}: `{name}` has dtype int64, which JAX would cut to 32 bits here. "
            f"Pass {name}.astype('int32'), or set jax_enable_x64."
        )


def check_sizes(op: str, minimum: int = 1, **sizes: int) -> None:
    """Refuses a static argument that is no integer, or lies below `minimum`.

    Raises:
      TypeError: not an integer. ValueError: too small.
    """
    for name, size in sizes.items():
        if isinstance(size, bool) or not isinstance(size, int | np.integer):
            raise TypeError(
                f"{op}: `{name}` is {size!r}, wanted an integer that is known when the call is "
                f"traced. Pass a plain int."
            )
        if size < minimum:
            raise ValueError(
                f"{op}: `{name}` is {size}, wanted at least {minimum}. Pass {name}={minimum} "
                "or more."
            )
