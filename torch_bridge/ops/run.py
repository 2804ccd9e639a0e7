"""Runs functions of jspec on torch tensors, packed into one array; results come back in one."""

import math
import threading
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import torch
from jaxtyping import Array, Int32

from jspec.axes import PAD_SLOT
from jspec.metadata import next_power_of_2
from torch_bridge.interop.checks import check_are_tensors, check_tensors, parsed
from torch_bridge.interop.layout import Layout, layout_of, without_padding
from torch_bridge.interop.packing import Packer, Plan

Arrays = Mapping[str, Array]
"""Inputs of a traced function by name, padded: entries after a tensor's own size are undefined.

The `live` entry [B] is True for requests that are no padding.
"""

Sizes = dict[str, int]


def run(
    op: str,
    traced: Callable[..., Any],
    tensors: Mapping[str, tuple[Any, str]],
    results: str,
    *arrays: jax.Array,
    rows: Callable[[Sizes], Sizes] = lambda sizes: {},
    bucket: Callable[[Sizes], Sizes] = lambda sizes: {},
    **static: Any,
) -> list[torch.Tensor]:
    """Runs a function under jit, compiled once for each bucket of sizes.

    Args:
      op: name of the function, for messages and profiles.
      traced: takes (packed arrays, *arrays, **static) and returns a tuple of integer or bool
        arrays, of which the last may be of floats.
      tensors: name to (tensor, form), see `check_tensors`; the first axis may change from call to
        call.
      results: dtype and rows of each result, as "long R, bool R, int B+1". A float result has the
        dtype that `traced` gives it.
      arrays: on JAX's device already; passed on as they are.
      rows: sizes in `results` that no tensor has, from those of the tensors.
      bucket: padded sizes that are no power of two, by letter, from the tensors' sizes. It
        and `rows` depend on nothing but those, `static` and the shapes of `arrays`, and may refuse
        sizes.
      static: what a compilation depends on; hashable.

    Returns:
      The results, of torch's own.

    Raises:
      TypeError, ValueError: a tensor has another dtype, shape or device.
      RuntimeError: JAX has no such device, or this process was forked from one that ran JAX.
    """
    given = [tensor for tensor, _ in tensors.values()]
    check_are_tensors(op, **{next(iter(tensors)): given[0]})
    device = given[0].device
    # "auto" reads the default device, and these tensors may be on another one.
    options = static | {"impl": "xla" if device.type == "cpu" else "auto"}
    named = tuple((name, form) for name, (_, form) in tensors.items())
    function = op, traced, named, tuple(options.items()), *[array.shape for array in arrays]

    def plan() -> tuple[Plan, tuple[_Compiled, list[tuple[int, torch.dtype]]]]:
        _, sizes = check_tensors(op, tensors, device)
        most = {letter: next_power_of_2(size) for letter, size in sizes.items()} | bucket(sizes)
        layout = layout_of(tensors, most)
        compiled = _compilations.get((function, layout))
        if compiled is None:
            compiled = _Compiled(op, traced, layout, options)
            _compilations[function, layout] = compiled
        planned = packer.plan(layout, {name: x for name, (x, _) in tensors.items()}, sizes)
        return planned, (compiled, _cuts(results, sizes | rows(sizes)))

    packer = packer_of(device)
    words, (compiled, cuts) = packer.pack_planned((function, results), given, plan)
    out, floats = compiled.call(words, *arrays)
    return _take(packer, out, floats, compiled.shapes, cuts)


def page_table(arrays: Arrays) -> Int32[Array, "B M"]:
    """Returns the block table, without pages for requests that are padding."""
    return jnp.where(arrays["live"][:, None], arrays["block_table_tensor"], PAD_SLOT)


class _Compiled:
    """One function for one bucket: unpack, compute, join the results."""

    def __init__(self, op: str, traced: Callable[..., Any], layout: Layout, static: dict[str, Any]):
        self.shapes: tuple[tuple[int, ...], ...] = ()

        def call(words: Array, *arrays: Array) -> tuple[Array, Array | None]:
            outputs, floats = traced(_inputs(layout, words), *arrays, **static), None
            if jnp.issubdtype(outputs[-1].dtype, jnp.floating):
                *outputs, floats = outputs
            self.shapes = tuple(x.shape for x in outputs)
            return jnp.concatenate([x.ravel().astype(jnp.int32) for x in outputs]), floats

        call.__name__ = f"jspec_bridge_{op}"
        self.call = jax.jit(call)


def _inputs(layout: Layout, words: Array) -> dict[str, Array]:
    arrays, sizes = layout.unpack(words)
    capacity = dict(layout.capacity)
    start = arrays.get("query_start_loc", jnp.zeros(capacity["B"] + 1, jnp.int32))
    arrays["live"], arrays["query_start_loc"] = without_padding(start, sizes["B"])
    for letter, size in capacity.items():
        if letter not in "BT":
            arrays[f"live_{letter}"] = jnp.arange(size, dtype=jnp.int32) < sizes[letter]
    return arrays


def _cuts(results: str, sizes: Sizes) -> list[tuple[int, torch.dtype]]:
    """Returns how many leading rows of each result are no padding, and their dtype."""
    forms = [parsed(result) for result in results.split(", ")]
    return [(sizes[letter] + more, dtypes[0]) for dtypes, ((letter, more, _),) in forms]


@torch.inference_mode(False)  # results may be written to in every mode
def _take(
    packer: Packer,
    words: Array,
    floats: Array | None,
    shapes: tuple[tuple[int, ...], ...],
    cuts: list[tuple[int, torch.dtype]],
) -> list[torch.Tensor]:
    """Copies the results in one copy, and splits them."""
    flat = packer.own(words, words.shape[0], torch.int32)
    taken, offset = [], 0
    for shape, (num_rows, dtype) in zip(shapes, cuts, strict=False):
        end = offset + num_rows * math.prod(shape[1:])
        taken.append(flat[offset:end].view(num_rows, *shape[1:]).to(dtype))
        offset += math.prod(shape)
    if floats is not None:
        dtype = getattr(torch, floats.dtype.name)
        taken.append(packer.own(floats, cuts[-1][0], dtype))
    return taken


_compilations: dict[Any, _Compiled] = {}
_local = threading.local()


def packer_of(device: torch.device) -> Packer:
    """Returns this thread's: two threads must not write to one memory."""
    packers = _local.__dict__.setdefault("packers", {})
    if device not in packers:
        packers[device] = Packer(device, "torch_bridge.ops")
    return packers[device]
