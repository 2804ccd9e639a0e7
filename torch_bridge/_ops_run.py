"""How functions of jspec run on tensors of torch: packed into one array, and out of one again."""

import copy
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
from torch_bridge.dlpack import check_not_forked, to_torch
from torch_bridge.packing import Field, Layout, Packer
from torch_bridge.shared import SharedRows

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
    rows: torch.Tensor | None = None,
    vector: torch.Tensor | None = None,
    **static: Any,
) -> tuple[torch.Tensor, ...]:
    """Runs a function under jit, compiled once for each bucket of sizes.

    Args:
      op: name of the function, for messages and profiles.
      traced: takes (arrays, **static) and returns a tuple of integer or bool arrays; with `rows`
        it takes (arrays, rows, vector, **static), and the last result is a float array.
      tensors: name to (tensor, form); a form is "int" or "bool" and axes: "int B+1", "int B M".
        The first axis may change from call to call, and the first tensor with a letter sets it.
      results: how many leading rows of each result are real, and the dtype they get.
      device: of the tensors; by default the first one's.
      capacity: what letters are padded to; by default a power of two.
      rows: float [T, D] hidden states, which are not packed.
      vector: float [D] beside them.
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
    kinds = tuple((tensor.dtype, tensor.shape[1:]) for tensor, _ in tensors.values())
    # "auto" asks for the default device, and these tensors may lie on another one.
    impl = "xla" if device.type == "cpu" else "auto"
    key = (op, traced, kinds, tuple(bucket.items()), vector is not None)
    key = (*key, impl, tuple(static.items()), tuple(tensors))
    compiled = _compilations.get(key)
    if compiled is None:
        layout = _layout(tensors, bucket)
        compiled = _compilations[key] = _Compiled(op, traced, layout, {"impl": impl} | static)
    floats: tuple[Any, ...] = ()
    if rows is not None:
        # Written before the integers are packed: JAX waits for what was queued up to there.
        caller.packer.follow_stream()
        floats = caller.write(rows, vector, bucket["T"])
    words = caller.packer.pack(
        compiled.layout, {name: tensor for name, (tensor, _) in tensors.items()}, sizes
    )
    out, hidden = compiled(words, *floats)
    return caller.take(out, hidden, compiled.shapes, results)


def check_tensors(
    op: str, tensors: Mapping[str, tuple[Any, str]], device: torch.device | None = None
) -> tuple[torch.device, dict[str, int]]:
    """Refuses tensors of the wrong dtype, rank, size or device.

    Returns:
      (device, sizes): of all of them; of the first axes, by letter.
    """
    sizes: dict[str, int] = {}
    owner: dict[str, str] = {}
    for name, (tensor, form) in tensors.items():
        kind, *axes = form.split()
        wanted = (torch.bool,) if kind == "bool" else (torch.int32, torch.int64)
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(
                f"{op}: `{name}` is a {type(tensor).__name__}, wanted a torch tensor. Make one "
                f"first: torch.as_tensor({name}, dtype={wanted[0]})."
            )
        if tensor.dtype not in wanted:
            raise TypeError(
                f"{op}: `{name}` has dtype {tensor.dtype}, wanted "
                f"{' or '.join(map(str, wanted))}. Convert it first: {name}.to({wanted[0]})."
            )
        device = device or tensor.device
        if tensor.device != device:
            raise ValueError(
                f"{op}: `{name}` is on {tensor.device}, wanted {device}, as the other tensors. "
                f"Move it first: {name}.to({str(device)!r})."
            )
        letter, _, more = axes[0].partition("+")
        if tensor.ndim != len(axes) or not all(tensor.shape[1:]):
            raise ValueError(
                f"{op}: `{name}` has shape {tuple(tensor.shape)}, wanted [{', '.join(axes)}]"
                f"{' with a column or more' if axes[1:] else ''}. Reshape it."
            )
        size = tensor.shape[0] - int(more or 0)
        if sizes.setdefault(letter, size) != size or size < 0:
            raise ValueError(
                f"{op}: `{name}` has shape {tuple(tensor.shape)}, wanted [{', '.join(axes)}] with "
                f"{letter} = {sizes[letter]}, as `{owner.get(letter, name)}` has it. Pass one "
                "entry for each request or row."
            )
        owner.setdefault(letter, name)
    assert device is not None  # there is a tensor
    return device, sizes


def first_rows(
    op: str, name: str, tensor: Any, kind: str, size: int, device: torch.device
) -> torch.Tensor:
    """Returns the first entries of a tensor that may be longer than the batch.

    Raises:
      TypeError, ValueError: it is shorter, or of another dtype, rank or device.
    """
    check_long_enough(op, name, tensor, kind, size, device)
    return tensor[:size]


def check_long_enough(
    op: str, name: str, tensor: Any, kind: str, size: int, device: torch.device
) -> None:
    """Refuses a tensor that is shorter than the batch, or of another dtype, rank or device."""
    check_tensors(op, {name: (tensor, f"{kind} B")}, device)
    if tensor.shape[0] < size:
        raise ValueError(
            f"{op}: `{name}` has {tensor.shape[0]} entries, wanted {size} or more. Pass one for "
            "each request."
        )


def page_table(arrays: Arrays) -> Int32[Array, "B M"]:
    """Returns the block table, without pages for requests that are padding."""
    return jnp.where(arrays["live"][:, None], arrays["block_table_tensor"], PAD_SLOT)


def _layout(tensors: Mapping[str, tuple[Any, str]], bucket: Mapping[str, int]) -> Layout:
    fields = []
    for name, (tensor, form) in tensors.items():
        letter, _, more = form.split()[1].partition("+")
        kind = {torch.bool: "bool", torch.int64: "int64"}.get(tensor.dtype, "int32")
        shape = tuple(tensor.shape[1:])
        fields.append(Field(name, letter, int(more or 0), shape, kind))  # type: ignore[arg-type]
    return Layout(tuple(fields), tuple(bucket.items()))


class _Compiled:
    """One function for one bucket: unpack, compute, join what comes out."""

    def __init__(self, op: str, traced: Callable[..., Any], layout: Layout, static: dict[str, Any]):
        self.layout = layout
        self.shapes: tuple[tuple[int, ...], ...] = ()

        def call(words: Array, *floats: Any) -> tuple[Array, Array | None]:
            outputs = traced(_inputs(layout, words), *floats, **static)
            outputs, hidden = (outputs[:-1], outputs[-1]) if floats else (outputs, None)
            self.shapes = tuple(x.shape for x in outputs)
            return jnp.concatenate([x.ravel().astype(jnp.int32) for x in outputs]), hidden

        call.__name__ = f"jspec_bridge_{op}"
        self._call = jax.jit(call)

    def __call__(self, words: Array, *floats: Any) -> tuple[Array, Array | None]:
        return self._call(words, *floats)


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
        self._rows = SharedRows(device)
        self._vector = SharedRows(device)
        self._held: Any = None

    @torch.inference_mode(False)  # what comes out may be written to everywhere
    def take(
        self,
        words: Array,
        hidden: Array | None,
        shapes: tuple[tuple[int, ...], ...],
        results: tuple[tuple[int, torch.dtype], ...],
    ) -> tuple[torch.Tensor, ...]:
        """Copies what came out, once, and cuts it."""
        held, flat = self.packer.own(words, words.shape[0], torch.int32)
        taken, offset = [], 0
        integers = results if hidden is None else results[:-1]
        for shape, (num_rows, dtype) in zip(shapes, integers, strict=True):
            end = offset + num_rows * math.prod(shape[1:])
            taken.append(flat[offset:end].view(num_rows, *shape[1:]).to(dtype))
            offset += math.prod(shape)
        if hidden is not None:
            num_rows, _ = results[-1]
            stream = self.packer.stream
            if stream is None:
                taken.append(to_torch(hidden)[:num_rows])
            else:
                view = stream.view(hidden)
                taken.append(view[:num_rows].clone())
                held = held, view
        self._held = held  # until the next call, whose input JAX reads after these copies
        return tuple(taken)

    def write(
        self, rows: torch.Tensor, vector: torch.Tensor | None, capacity: int
    ) -> tuple[Array, Array | None]:
        """Copies hidden states, and a vector beside them, to memory that JAX reads."""
        states = self._rows.write([rows], capacity, "target_hidden_states")
        if vector is None:
            return states, None
        name = "parallel_drafting_hidden_state_tensor"
        return states, self._vector.write([vector[None]], 1, name)


_compilations: dict[Any, _Compiled] = {}
_local = threading.local()


def _caller(device: torch.device) -> _Caller:
    callers = _local.__dict__.setdefault("callers", {})
    caller = callers.get(device)
    if caller is None:
        caller = callers[device] = _Caller(device)
    return caller


def changed(metadata: Any, **values: Any) -> Any:
    """Returns a shallow copy of a metadata object, of the same class, with other attributes."""
    new = copy.copy(metadata)
    for name, value in values.items():
        object.__setattr__(new, name, value)  # a frozen dataclass will do
    return new
