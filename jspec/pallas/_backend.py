"""Where a kernel runs: Pallas' two GPU lowerings and its interpreter, named in this file alone."""

import contextlib
import contextvars
import functools
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, TypeAlias

import jax
import jax.numpy as jnp

Lowering: TypeAlias = Literal["triton", "mosaic"]
"""How Pallas turns a kernel into GPU code."""

Backend: TypeAlias = Literal["triton", "mosaic", "interpret"]
"""How a kernel runs: by one of the lowerings, or step by step in JAX on any device."""

_BLOCK = 128  # cells a Triton program handles: one a thread of four warps

_lowering: contextvars.ContextVar[Lowering] = contextvars.ContextVar(
    "jspec_lowering", default="triton"
)


def lowering() -> Lowering:
    """Returns the lowering that `impl="pallas"` means here."""
    return _lowering.get()


@contextlib.contextmanager
def use_lowering(name: Lowering) -> Iterator[None]:
    """Makes `impl="pallas"` mean one lowering; read when a call is traced, not when it runs.

    Raises:
      ValueError: `name` is neither "triton" nor "mosaic".
    """
    if name not in ("triton", "mosaic"):
        raise ValueError(f"use_lowering: `name` is {name!r}, wanted 'triton' or 'mosaic'.")
    token = _lowering.set(name)
    try:
        yield
    finally:
        _lowering.reset(token)


def launch(
    kernel: Callable[..., None],
    num_cells: int,
    inputs: Sequence[jax.Array],
    outputs: tuple[jax.ShapeDtypeStruct, ...],
    *,
    name: str,
    how: Backend,
) -> Any:
    """Runs `kernel(cell, *input_refs, *output_refs)` for each cell in [0, num_cells).

    `cell` is one index under Mosaic and a vector of indices elsewhere, and every ref is flat, so
    that `ref[cell]` means the same everywhere and a kernel knows of no lowering. The last vector
    repeats the last cell: both write the same values, so no access needs a mask.

    Args:
      kernel: reads and writes flat refs at integer indices, which it keeps in range.
      num_cells: at least 1.
      inputs: arrays of any shape; the kernel sees them flat, in row-major order.
      outputs: shapes and dtypes, likewise flat to the kernel, which writes each element.
      name: what a profile shows, "jspec_..." by convention.
      how: the backend.

    Returns:
      A tuple of arrays like `outputs`.
    """
    flat = [out.update(shape=(out.size,)) for out in outputs]
    run = _mosaic if how == "mosaic" else functools.partial(_vectors, interpret=how == "interpret")
    results = run(kernel, num_cells, [x.reshape(-1) for x in inputs], flat, name)
    return tuple(x.reshape(out.shape) for x, out in zip(results, outputs, strict=True))


def for_each_program(
    kernel: Callable[..., None],
    num_programs: int,
    inputs: Sequence[jax.Array],
    outputs: tuple[jax.ShapeDtypeStruct, ...],
    *,
    name: str,
    how: Literal["triton", "interpret"],
    num_warps: int = 4,
    num_stages: int = 3,
) -> Any:
    """Runs `kernel(program, *input_refs, *output_refs)` for each program in [0, num_programs).

    A program works on blocks, which it reads and writes by `load` and `store`: whole arrays lie
    after the refs, in the shapes that they have. Sizes of blocks are powers of two.

    Args:
      kernel: writes each element of the outputs in one of its programs.
      num_programs: at least 1.
      inputs: arrays of any shape.
      outputs: shapes and dtypes.
      name: what a profile shows, "jspec_..." by convention.
      how: the backend.
      num_warps: threads of a program, in units of 32.
      num_stages: rounds of a loop whose loads are in flight together.

    Returns:
      A tuple of arrays like `outputs`.
    """
    from jax.experimental import pallas as pl

    return _triton(
        lambda *refs: kernel(pl.program_id(0), *refs),
        num_programs,
        inputs,
        outputs,
        name,
        num_warps=num_warps,
        num_stages=num_stages,
        interpret=how == "interpret",
    )


def load(block: Any, mask: jax.Array) -> jax.Array:
    """Reads the elements of a block of a ref where `mask` holds; 0 elsewhere.

    Args:
      block: `ref.at[...]` with an index along each axis, arrays that broadcast among them: the
        interpreter has no masked access by a mix of arrays and slices.
      mask: likewise.
    """
    from jax.experimental.pallas import triton as pltriton

    return pltriton.load(block, mask=mask, other=0)


def store(block: Any, value: jax.Array, mask: jax.Array) -> None:
    """Writes a block of a ref where `mask` holds; see `load`."""
    from jax.experimental.pallas import triton as pltriton

    pltriton.store(block, value, mask=mask)


def _mosaic(kernel, num_cells: int, inputs: list, outputs: list, name: str):
    from jax.experimental.pallas import mosaic_gpu as plgpu

    def body(*refs):
        kernel(jax.lax.axis_index("cell"), *refs)

    body.__name__ = name
    return plgpu.kernel(
        body,
        out_type=outputs,
        grid=(num_cells,),
        grid_names=("cell",),
        compiler_params=plgpu.CompilerParams(),
    )(*inputs)


def _vectors(kernel, num_cells: int, inputs: list, outputs: list, name: str, *, interpret: bool):
    from jax.experimental import pallas as pl

    block = min(_BLOCK, pl.next_power_of_2(num_cells))

    def body(*refs):
        lane = jax.lax.broadcasted_iota(jnp.int32, (block,), 0)
        kernel(jnp.minimum(pl.program_id(0) * block + lane, num_cells - 1), *refs)

    return _triton(
        body,
        pl.cdiv(num_cells, block),
        inputs,
        outputs,
        name,
        num_warps=max(1, block // 32),
        num_stages=1,
        interpret=interpret,
    )


def _triton(
    body: Callable[..., None],
    num_programs: int,
    inputs: Sequence[jax.Array],
    outputs: Sequence[jax.ShapeDtypeStruct],
    name: str,
    *,
    num_warps: int,
    num_stages: int,
    interpret: bool,
) -> Any:
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import triton as pltriton

    # JAX deprecated this lowering in 0.11 and warns when the call is lowered, which is after this
    # function has returned. benchmarks/ops.py says what it is worth.
    warnings.filterwarnings("ignore", "The Pallas Triton backend is deprecated", DeprecationWarning)

    def named(*refs):
        body(*refs)

    named.__name__ = name
    whole = pl.BlockSpec(memory_space=pl.ANY)
    return pl.pallas_call(
        named,
        out_shape=outputs,
        grid=(num_programs,),
        in_specs=[whole] * len(inputs),
        out_specs=[whole] * len(outputs),
        compiler_params=pltriton.CompilerParams(num_warps=num_warps, num_stages=num_stages),
        interpret=interpret,
        name=name,
    )(*inputs)
