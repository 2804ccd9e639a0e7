"""How functions of jspec run on tensors of torch: packed into one array, and out of one again."""

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
from torch_bridge.interop.checks import check_tensors, layout_of
from torch_bridge.interop.dlpack import check_not_forked, to_torch
from torch_bridge.interop.packing import Layout, Packer

Arrays = Mapping[str, Array]
"""Inputs of a traced function by name, padded: entries from a tensor's own size on hold anything.

The `live` entry [B] is True for requests that are no padding.
"""


def run(
    op: str,
    traced: Callable[..., Any],
    tensors: Mapping[str, tuple[Any, str]],
    results: tuple[tuple[int, torch.dtype], ...],
    *,
    device: torch.device | None = None,
    capacity: Mapping[str, int] | None = None,
    **static: Any,
) -> tuple[torch.Tensor, ...]:
    """Runs a function under jit, compiled once for each bucket of sizes.

    Args:
      op: name of the function, for messages and profiles.
      traced: takes (arrays, **static) and returns a tuple of integer or bool arrays, of which the
        last may be of floats.
      tensors: name to (tensor, form), see `check_tensors`; the first axis may change from call to
        call.
      results: how many leading rows of each result are real, and the dtype they get.
      device: of the tensors; by default the first one's.
      capacity: what letters are padded to; by default a power of two.
      static: what a compilation depends on; hashable.

    Returns:
      The results, of torch's own; the float one last.

    Raises:
      TypeError, ValueError: a tensor is of another dtype, shape or device; named.
      RuntimeError: JAX has no such device, or this process was forked from one that ran JAX.
    """
    check_not_forked()
    device, sizes = check_tensors(op, tensors, device)
    caller = _caller(device)
    bucket = {letter: next_power_of_2(size) for letter, size in sizes.items()}
    bucket.update(capacity or {})
    kinds = tuple(
        (tensor.dtype if form.startswith("float") else form, tensor.shape[1:])
        for tensor, form in tensors.values()
    )
    # "auto" asks for the default device, and these tensors may lie on another one.
    impl = "xla" if device.type == "cpu" else "auto"
    key = (op, traced, kinds, tuple(bucket.items()), impl, tuple(static.items()), tuple(tensors))
    compiled = _compilations.get(key)
    if compiled is None:
        layout = layout_of(tensors, bucket)
        compiled = _compilations[key] = _Compiled(op, traced, layout, {"impl": impl} | static)
    packer, named = caller.packer, {name: tensor for name, (tensor, _) in tensors.items()}
    words = packer.pack(packer.plan(compiled.layout, named, sizes), list(named.values()))
    out, floats = compiled(words)
    return caller.take(out, floats, compiled.shapes, results)


def page_table(arrays: Arrays) -> Int32[Array, "B M"]:
    """Returns the block table, without pages for requests that are padding."""
    return jnp.where(arrays["live"][:, None], arrays["block_table_tensor"], PAD_SLOT)


class _Compiled:
    """One function for one bucket: unpack, compute, join what comes out."""

    def __init__(self, op: str, traced: Callable[..., Any], layout: Layout, static: dict[str, Any]):
        self.layout = layout
        self.shapes: tuple[tuple[int, ...], ...] = ()

        def call(words: Array) -> tuple[Array, Array | None]:
            outputs, floats = traced(_inputs(layout, words), **static), None
            if jnp.issubdtype(outputs[-1].dtype, jnp.floating):
                *outputs, floats = outputs
            self.shapes = tuple(x.shape for x in outputs)
            return jnp.concatenate([x.ravel().astype(jnp.int32) for x in outputs]), floats

        call.__name__ = f"jspec_bridge_{op}"
        self._call = jax.jit(call)

    def __call__(self, words: Array) -> tuple[Array, Array | None]:
        return self._call(words)


def _inputs(layout: Layout, words: Array) -> dict[str, Array]:
    arrays, sizes = layout.unpack(words)
    num_requests = dict(layout.capacity)["B"]
    request = jnp.arange(num_requests + 1, dtype=jnp.int32)
    arrays["live"] = request[:-1] < sizes["B"]
    if "query_start_loc" in arrays:  # padded requests have no rows
        start = arrays["query_start_loc"]
        end = start.at[sizes["B"]].get(mode="clip", wrap_negative_indices=False)
        arrays["query_start_loc"] = jnp.where(request < sizes["B"], start, end)
    for letter, size in layout.capacity:
        if letter not in "BT":
            arrays[f"live_{letter}"] = jnp.arange(size, dtype=jnp.int32) < sizes[letter]
    return arrays


class _Caller:
    """The memory that one thread's calls share with JAX on one device."""

    def __init__(self, device: torch.device):
        self.packer = Packer(device, "torch_bridge.ops")
        self._held: Any = None

    @torch.inference_mode(False)  # what comes out may be written to everywhere
    def take(
        self,
        words: Array,
        floats: Array | None,
        shapes: tuple[tuple[int, ...], ...],
        results: tuple[tuple[int, torch.dtype], ...],
    ) -> tuple[torch.Tensor, ...]:
        """Copies what came out, once, and cuts it."""
        held, flat = self.packer.own(words, words.shape[0], torch.int32)
        taken, offset = [], 0
        integers = results if floats is None else results[:-1]
        for shape, (num_rows, dtype) in zip(shapes, integers, strict=True):
            end = offset + num_rows * math.prod(shape[1:])
            taken.append(flat[offset:end].view(num_rows, *shape[1:]).to(dtype))
            offset += math.prod(shape)
        if floats is not None:
            num_rows, _ = results[-1]
            stream = self.packer.stream
            if stream is None:
                taken.append(to_torch(floats)[:num_rows])
            else:
                view = stream.view(floats)
                taken.append(view[:num_rows].clone())
                held = held, view
        self._held = held  # until the next call, whose input JAX reads after these copies
        return tuple(taken)


_compilations: dict[Any, _Compiled] = {}
_local = threading.local()


def _caller(device: torch.device) -> _Caller:
    callers = _local.__dict__.setdefault("callers", {})
    caller = callers.get(device)
    if caller is None:
        caller = callers[device] = _Caller(device)
    return caller
