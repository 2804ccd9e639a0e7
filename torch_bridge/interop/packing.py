"""Packs the tensors of a step into one array, so that it crosses to JAX once."""

import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
import torch
from jaxtyping import Array, Int32

from jspec.axes import INT32_MAX
from jspec.metadata import next_power_of_2
from torch_bridge.interop.dlpack import Stream, check_not_forked, from_host, jax_device
from torch_bridge.interop.layout import INT32_MIN, Field, Layout
from torch_bridge.interop.shared import alias, empty, torch_device

_KEPT_RESULTS = 4
_MOST_SLICES = 4096
_MOST_PLANS = 4096  # one for each combination of sizes


class Plan(NamedTuple):
    """How tensors of known forms are packed; see `Packer.plan`.

    Attributes:
      header: their sizes, on the device.
      as_words: how the memory of each is read as int32; None where it is flat int32 already.
      length: words that are written.
      num_words: words that JAX reads.
    """

    header: torch.Tensor
    as_words: tuple[Callable[[torch.Tensor], torch.Tensor] | None, ...]
    length: int
    num_words: int


def _forms(tensors: Iterable[torch.Tensor]) -> tuple[Any, ...]:
    """Returns what a plan for some tensors depends on; hashable."""
    return tuple([(x.dtype, x.shape, x.device, x.layout) for x in tensors])


class Packer:
    """Packs steps into memory that torch and JAX share; for one thread.

    A result that was computed from a step is fetched with `own` or `take` before the next step is
    packed: nothing else makes the next step's writes wait for JAX's reads.

    Args:
      device: of the tensors.
      owner: for messages.
    """

    def __init__(self, device: torch.device, owner: str):
        self.owner = owner
        self.stream = Stream(device) if device.type == "cuda" else None
        self.device = jax_device(device)
        self._torch_device = torch_device(device, owner)
        self._plans: dict[Any, tuple[Plan, Any]] = {}
        self._numbers = self._words = self._empty(0)
        self._zeros = self._empty(0)
        self._fronts: dict[int, torch.Tensor] = {}
        self._taken: deque[torch.Tensor] = deque(maxlen=_KEPT_RESULTS)
        self._arrays: dict[int, jax.Array] = {}
        self._outside = torch.inference_mode(False)  # results may be written to in every mode
        self._last: Any = None  # the stream that reads and writes this memory

    def pack_planned(
        self, key: Any, tensors: Sequence[torch.Tensor], plan: Callable[[], tuple[Plan, Any]]
    ) -> tuple[Int32[Array, "words"], Any]:
        """Packs tensors, which are checked and planned if their forms are new.

        Args:
          key: what else the plan depends on; hashable.
          tensors: in the order of the layout's fields.
          plan: checks the tensors; returns their plan and what runs them, which are kept.

        Returns:
          (words, what runs them).

        Raises:
          TypeError, ValueError: `plan` refuses a tensor.
          RuntimeError: this process was forked from one that ran JAX.
        """
        try:
            key = key, _forms(tensors)
            planned = self._plans.get(key)
        except (AttributeError, RuntimeError, TypeError):
            plan()  # raises an error that names the tensor
            raise
        if planned is None:
            if len(self._plans) >= _MOST_PLANS:
                self._plans.clear()
            planned = self._plans[key] = plan()
        return self.pack(planned[0], tensors), planned[1]

    def forget_plans(self) -> None:
        """Discards all plans."""
        self._plans.clear()

    def plan(self, layout: Layout, tensors: Mapping[str, Any], sizes: Mapping[str, int]) -> Plan:
        """Plans how tensors are packed, and all others of the same dtypes and shapes.

        Args:
          layout: a field for each tensor.
          tensors: by name, of the layout's dtypes and sizes; see `check_tensors`.
          sizes: entries by letter, at most the layout's.

        Raises:
          ValueError: a size is beyond the layout's.
        """
        self.follow_stream()  # for the header
        for letter, most in layout.capacity:
            if not 0 <= sizes[letter] <= most:
                raise ValueError(
                    f"{self.owner}: this step has {letter} = {sizes[letter]}, wanted 0 to {most}. "
                    "Raise max_num_seqs or max_num_batched_tokens in the scheduler's config."
                )
        fields = layout.fields
        length = len(layout.capacity) + sum((sizes[f.size] + f.more) * f.words for f in fields)
        header = self._header([sizes[letter] for letter, _ in layout.capacity])
        as_words = tuple(_how_to_pack(field, tensors[field.name]) for field in fields)
        return Plan(header, as_words, length, layout.num_words)

    def pack(self, plan: Plan, tensors: Sequence[torch.Tensor]) -> Int32[Array, "words"]:
        """Writes a step's tensors into one array of JAX, valid until the next call.

        Args:
          plan: for tensors of these forms.
          tensors: in the order of the layout's fields.

        Raises:
          RuntimeError: this process was forked from one that ran JAX.
        """
        check_not_forked()
        self.follow_stream()
        words = self._first_words(plan.num_words)  # which allocates enough for all words
        parts = [plan.header]
        for tensor, as_words in zip(tensors, plan.as_words, strict=True):
            parts.append(tensor if as_words is None else as_words(tensor))
        if self.stream is not None:
            torch.cat(parts, out=self._first_words(plan.length))
            return self.stream.to_jax(words)
        # Not with torch, whose threads spin after a large copy and slow down XLA's: on two cores a
        # step took 1.4 times as long.
        np.concatenate([x.numpy() for x in parts], out=self._first_words(plan.length).numpy())
        if plan.num_words not in self._arrays:
            self._arrays[plan.num_words] = alias(words)
        return self._arrays[plan.num_words]

    def take(self, pairs: Int32[Array, "B 2K"], num_rows: int, width: int) -> torch.Tensor:
        """Makes the first rows of a result a tensor of torch's, on the current stream.

        On a GPU nothing is copied where all columns are taken: torch gets the memory that JAX has
        just allocated for it. The caller keeps no reference to `pairs`, so that writing to the
        tensor changes no array of JAX.

        Args:
          pairs: computed from what the last `pack` returned, by a function that returns it once;
            see `int64_pairs`.
          num_rows, width: of the tensor; `width` is at most K.

        Returns:
          int64 [num_rows, width].
        """
        with self._outside:
            if self.stream is None:
                taken = torch.from_numpy(np.array(pairs)[:num_rows].view(np.int64))  # waits
            else:
                taken = self._rows(pairs, num_rows, torch.int64)
            return taken if taken.shape[1] == width else taken[:, :width].contiguous()

    def own(self, array: jax.Array, num_rows: int, dtype: torch.dtype) -> torch.Tensor:
        """Copies the first rows of a result into a tensor of torch's own, on the current stream.

        Args:
          array: computed from what the last `pack` returned.
          num_rows: of the tensor.
          dtype: of the tensor.
        """
        with self._outside:
            return self._rows(array, num_rows).to(dtype, copy=self.stream is not None)

    def zeros(self, size: int) -> torch.Tensor:
        """Returns int32 zeros, which must only be read."""
        if size > self._zeros.shape[0]:
            self._zeros = self._empty(next_power_of_2(size)).zero_()
        return self._zeros[:size]

    def follow_stream(self) -> None:
        """Makes the current stream wait for the one that used this memory last."""
        if self.stream is None:
            return
        current = self.stream.current()
        if self._last is not None and self._last is not current:
            current.wait_stream(self._last)
        self._last = current

    def _rows(
        self, array: jax.Array, num_rows: int, dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        """Returns the first rows of a result, read as a dtype: a copy on a CPU, else its memory.

        That memory is kept for some more calls: JAX may use memory that torch has released for its
        next result. It waits by then for what torch had queued before the step in between.
        """
        self.follow_stream()
        if self.stream is None:
            rows = from_host(np.array(array))  # waits for the result
        else:
            rows = self.stream.view(array)
            self._taken.append(rows)
        rows = rows if dtype is None else rows.view(dtype)
        return rows if len(rows) == num_rows else rows[:num_rows]

    def _header(self, sizes: Sequence[int]) -> torch.Tensor:
        """Returns sizes on the device, without a copy from the host."""
        most = max(sizes)
        with torch.inference_mode(False):
            if most >= self._numbers.shape[0]:
                self._numbers = torch.arange(
                    2 * most + 1, dtype=torch.int32, device=self._torch_device
                )
            return torch.cat([self._numbers[size : size + 1] for size in sizes])

    def _first_words(self, count: int) -> torch.Tensor:
        """Returns the front of the memory that steps are written to."""
        words = self._fronts.get(count)
        if words is None:
            if count > self._words.shape[0]:
                self._words = self._empty(count)
                self._fronts, self._arrays = {}, {}
            elif len(self._fronts) >= _MOST_SLICES:
                self._fronts.clear()
            words = self._fronts[count] = self._words[:count]
        return words

    def _empty(self, size: int) -> torch.Tensor:
        return empty((size,), torch.int32, self._torch_device)


def to_int32(tensor: torch.Tensor) -> torch.Tensor:
    """Returns integers as the nearest int32."""
    if tensor.dtype == torch.int32:
        return tensor
    return tensor.clamp(INT32_MIN, INT32_MAX).to(torch.int32)


def _how_to_pack(
    field: Field, tensor: torch.Tensor
) -> Callable[[torch.Tensor], torch.Tensor] | None:
    """Returns how a tensor is converted to what an executable reads, whatever its integer width."""
    if field.kind == "int32" and tensor.dtype == torch.int64:
        return lambda tensor: to_int32(tensor).reshape(-1)
    if field.kind == "int64" and tensor.dtype == torch.int32:
        return lambda tensor: _as_words(tensor.long())
    return None if field.kind == "int32" and not field.shape else _as_words


def _as_words(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a tensor's entries in order, their memory read as int32."""
    dtype = tensor.dtype
    if dtype == torch.int32:
        return tensor.reshape(-1)
    if dtype == torch.bool:
        return tensor.reshape(-1).to(torch.int32)
    if tensor.requires_grad:
        tensor = tensor.detach()
    if tensor.is_neg():
        tensor = tensor.resolve_neg()
    flat = tensor if tensor.ndim == 1 else tensor.reshape(-1)
    if flat.stride() != (1,):
        # Words are contiguous; torch treats a single entry of any stride as contiguous.
        flat = flat.contiguous().as_strided(flat.shape, (1,))
    if dtype.itemsize == 2:
        if math.prod(tensor.shape[1:]) % 2:
            return flat.view(torch.int16).to(torch.int32)
        if flat.data_ptr() % 4 or flat.storage_offset() % 2:
            flat = flat.clone()
    return flat.view(torch.int32)
