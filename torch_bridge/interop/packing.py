"""The tensors of a step as one, so that it crosses to JAX once.

`Packer.pack` writes them one behind the other into one int32 tensor, with their sizes in front;
`Layout.unpack`, inside jit, cuts them out again, padded to the sizes of a bucket. So neither a
padded copy nor a host value is needed, whatever sizes a step has.
"""

import functools
import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax import lax
from jaxtyping import Array, Int32

from jspec.axes import INT32_MAX
from jspec.metadata import next_power_of_2
from torch_bridge.interop.dlpack import Stream, check_not_forked, from_host, is_dense, jax_device
from torch_bridge.interop.shared import alias, empty, with_index

_KEPT_RESULTS = 4
_MOST_SLICES = 4096
Kind = Literal["int32", "int64", "bool", "float32", "bfloat16", "float16"]
_HALVES = ("bfloat16", "float16")
_INT32_MIN = -INT32_MAX - 1


@dataclass(frozen=True)
class Field:
    """One tensor of a step.

    Attributes:
      name: of the argument.
      size: letter of its first dimension, whose size changes from step to step.
      more: entries beyond that size: `query_start` has B + 1.
      shape: its other dimensions.
      kind: element type; integers come in either width. An int64 that int32 does not hold becomes
        the nearest that it does.
    """

    name: str
    size: str
    more: int = 0
    shape: tuple[int, ...] = ()
    kind: Kind = "int32"

    @property
    def words(self) -> int:
        """int32 words of an entry: a bool takes one, and two halves of an even row share one."""
        size = math.prod(self.shape)
        if self.kind == "int64":
            return 2 * size
        return size // 2 if self.kind in _HALVES and size % 2 == 0 else size


@dataclass(frozen=True)
class Layout:
    """Where the tensors of a step lie, and what they are padded to.

    Attributes:
      fields: in order.
      capacity: most entries by letter, a bucket's sizes.
    """

    fields: tuple[Field, ...]
    capacity: tuple[tuple[str, int], ...]

    @functools.cached_property
    def num_words(self) -> int:
        """Length of the packed tensor."""
        capacity = dict(self.capacity)
        return len(capacity) + sum((capacity[f.size] + f.more) * f.words for f in self.fields)

    def unpack(
        self, words: Int32[Array, "words"]
    ) -> tuple[dict[str, Array], dict[str, Int32[Array, ""]]]:
        """Cuts the tensors out again.

        Entries from a tensor's own size on hold anything.

        Args:
          words: what `Packer.pack` wrote.

        Returns:
          (arrays, sizes): of the bucket's sizes, by name; how many entries are real, by letter.
        """
        capacity = dict(self.capacity)
        sizes = {letter: words[i] for i, letter in enumerate(capacity)}
        arrays, offset = {}, jnp.int32(len(capacity))
        for field in self.fields:
            num_entries = capacity[field.size] + field.more
            # In range: before this one lies at most what the bucket has room for.
            part = lax.dynamic_slice(words, (offset,), (num_entries * field.words,))
            arrays[field.name] = _decode(part, field).reshape(num_entries, *field.shape)
            offset = offset + (sizes[field.size] + field.more) * field.words
        return arrays, sizes


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


def forms(tensors: Iterable[torch.Tensor]) -> tuple[Any, ...]:
    """Returns what a plan for some tensors depends on; hashable."""
    return tuple([(x.dtype, x.shape, x.device, x.layout) for x in tensors])


class Packer:
    """Packs the steps of one drafter, into memory that both sides keep, for one thread.

    A result of what read one step is fetched with `own` or `take` before the next is packed:
    nothing else makes the next step's writes wait for JAX's reads.

    Args:
      device: of the tensors.
      owner: for messages.
    """

    def __init__(self, device: torch.device, owner: str):
        self.owner = owner
        self.stream = Stream(device) if device.type == "cuda" else None
        self.device = jax_device(device)
        self._torch_device = with_index(device)
        self._numbers = self._words = self._empty((0,), torch.int32)
        self._zeros = self._empty((0,), torch.int32)
        self._fronts: dict[int, torch.Tensor] = {}
        self._taken: deque[torch.Tensor] = deque(maxlen=_KEPT_RESULTS)
        self._arrays: dict[int, jax.Array] = {}
        self._outside = torch.inference_mode(False)  # what comes out may be written to anywhere
        self._last: Any = None  # the stream that reads and writes this memory

    def plan(self, layout: Layout, tensors: Mapping[str, Any], sizes: Mapping[str, int]) -> Plan:
        """Checks a step's tensors once for all that have the same `forms`.

        Args:
          layout: a field for each tensor.
          tensors: by name.
          sizes: entries by letter, at most the layout's.

        Raises:
          TypeError, ValueError: a tensor is of another dtype, shape or device; named.
        """
        self.follow_stream()  # for the header
        for letter, most in layout.capacity:
            if not 0 <= sizes[letter] <= most:
                raise ValueError(
                    f"{self.owner}: this step has {letter} = {sizes[letter]}, wanted 0 to {most}. "
                    "Raise max_num_seqs or max_num_batched_tokens in the scheduler's config."
                )
        length = len(layout.capacity)
        for field in layout.fields:
            num_entries = sizes[field.size] + field.more
            self._check(field, tensors.get(field.name), num_entries)
            length += num_entries * field.words
        header = self._header([sizes[letter] for letter, _ in layout.capacity])
        as_words = tuple(_how_to_pack(field, tensors[field.name]) for field in layout.fields)
        return Plan(header, as_words, length, layout.num_words)

    def pack(self, plan: Plan, tensors: Sequence[torch.Tensor]) -> Int32[Array, "words"]:
        """Writes a step's tensors into one array of JAX, valid until the next call.

        Args:
          plan: for tensors of these `forms`.
          tensors: in the order of the layout's fields.

        Raises:
          RuntimeError: this process was forked from one that ran JAX.
        """
        check_not_forked()
        self.follow_stream()
        words = self._first_words(plan.num_words)  # which makes room for all of it
        parts = [plan.header]
        for tensor, as_words in zip(tensors, plan.as_words, strict=True):
            parts.append(tensor if as_words is None else as_words(tensor))
        if self.stream is not None:
            torch.cat(parts, out=self._first_words(plan.length))
            return self.stream.to_jax(words)
        # Not by torch, whose threads spin for a while after a large copy, in the way of XLA's: on
        # two cores a step took 1.4 times as long.
        np.concatenate([x.numpy() for x in parts], out=self._first_words(plan.length).numpy())
        if plan.num_words not in self._arrays:
            self._arrays[plan.num_words] = alias(words)
        return self._arrays[plan.num_words]

    def take(self, pairs: Int32[Array, "B 2K"], num_rows: int) -> torch.Tensor:
        """Makes the first rows of a result a tensor of torch's, on the current stream.

        On a GPU nothing is copied: torch gets the memory that JAX has just allocated for it. The
        caller lets go of `pairs`, so that no array of JAX is left to change.

        Args:
          pairs: computed from what the last `pack` returned, by a function that returns it once;
            see `int64_pairs`.
          num_rows: of the tensor.

        Returns:
          int64 [num_rows, K].
        """
        self.follow_stream()
        with self._outside:
            if self.stream is None:
                rows = np.array(pairs)[:num_rows]  # waits for the result
                return torch.from_numpy(rows.view(np.int64))
            view = self.stream.view(pairs)
            # JAX may use memory that torch has let go of for its next result. It waits by then for
            # what torch had queued before the step in between.
            self._taken.append(view)
            view = view.view(torch.int64)
            return view if view.shape[0] == num_rows else view[:num_rows]

    def own(self, array: jax.Array, num_rows: int, dtype: torch.dtype) -> tuple[Any, torch.Tensor]:
        """Copies the first rows of a result into a tensor of torch's own, on the current stream.

        Args:
          array: computed from what the last `pack` returned.
          num_rows: of the tensor.
          dtype: of the tensor.

        Returns:
          (held, tensor): `held` is to be kept until the next call: JAX could otherwise use the
          result's memory again before the queued copy has read it.
        """
        self.follow_stream()
        with torch.inference_mode(False):
            if self.stream is None:
                rows = np.asarray(array)[:num_rows]  # waits for the result
                return None, from_host(np.array(rows)).to(dtype)
            view = self.stream.view(array)
            rows = view if len(view) == num_rows else view[:num_rows]
            return view, rows.to(dtype, copy=True)

    def zeros(self, size: int) -> torch.Tensor:
        """Returns int32 zeros, which must only be read."""
        if size > self._zeros.shape[0]:
            self._zeros = self._empty((next_power_of_2(size),), torch.int32).zero_()
        return self._zeros[:size]

    def follow_stream(self) -> None:
        """Lets a stream that the caller changed to wait for what the last one still does."""
        if self.stream is None:
            return
        current = self.stream.current()
        if self._last is not None and self._last is not current:
            current.wait_stream(self._last)
        self._last = current

    def _header(self, sizes: Sequence[int]) -> torch.Tensor:
        """Returns sizes on the device, which they reach without a copy from the host."""
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
                self._words = self._empty((count,), torch.int32)
                self._fronts, self._arrays = {}, {}
            elif len(self._fronts) >= _MOST_SLICES:
                self._fronts.clear()
            words = self._fronts[count] = self._words[:count]
        return words

    def _empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return empty(shape, dtype, self._torch_device)

    def _check(self, field: Field, tensor: Any, num_entries: int) -> None:
        """Says what is wrong with a tensor."""
        wanted, dtypes = (num_entries, *field.shape), dtypes_of(field.kind)
        dense = isinstance(tensor, torch.Tensor) and is_dense(tensor)
        if not dense or tensor.shape != wanted:
            got = tuple(tensor.shape) if dense else f"a {type(tensor).__name__}"
            raise ValueError(
                f"{self.owner}: `{field.name}` is {got}, wanted a dense tensor of shape {wanted}. "
                "Pass one entry for each request or row of this step."
            )
        if tensor.dtype not in dtypes:
            raise TypeError(
                f"{self.owner}: `{field.name}` has dtype {tensor.dtype}, wanted "
                f"{' or '.join(map(str, dtypes))}. Convert it first: {field.name}.to({dtypes[0]})."
            )
        if tensor.device != self._torch_device:
            raise ValueError(
                f"{self.owner}: `{field.name}` is on {tensor.device}, and the drafter on "
                f"{self._torch_device}. Move it there first."
            )


def to_int32(tensor: torch.Tensor) -> torch.Tensor:
    """Returns int64 as the nearest int32."""
    return tensor.clamp(_INT32_MIN, INT32_MAX).to(torch.int32)


def _how_to_pack(
    field: Field, tensor: torch.Tensor
) -> Callable[[torch.Tensor], torch.Tensor] | None:
    """Says how a tensor becomes what an executable reads, whichever width its integers have."""
    if field.kind == "int32" and tensor.dtype == torch.int64:
        return _narrowed
    if field.kind == "int64" and tensor.dtype == torch.int32:
        return _widened
    return None if field.kind == "int32" and not field.shape else _as_words


def _narrowed(tensor: torch.Tensor) -> torch.Tensor:
    return to_int32(tensor).reshape(-1)


def _widened(tensor: torch.Tensor) -> torch.Tensor:
    return _as_words(tensor.long())


def _as_words(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a tensor's memory as int32, one behind the other."""
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
        # Words lie side by side; one entry may have any stride, and is contiguous to torch.
        flat = flat.contiguous().as_strided(flat.shape, (1,))
    if dtype.itemsize == 2:
        if math.prod(tensor.shape[1:]) % 2:
            return flat.view(torch.int16).to(torch.int32)
        if flat.data_ptr() % 4 or flat.storage_offset() % 2:
            flat = flat.clone()
    return flat.view(torch.int32)


_TORCH_KINDS: dict[Kind, torch.dtype] = {
    "int32": torch.int32,
    "int64": torch.int64,
    "bool": torch.bool,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
_KINDS: dict[torch.dtype, Kind] = {dtype: kind for kind, dtype in _TORCH_KINDS.items()}


def dtypes_of(kind: Kind) -> tuple[torch.dtype, ...]:
    """Returns the dtypes that a field takes; the first one costs nothing."""
    own = _TORCH_KINDS[kind]
    if own not in _INTEGERS:
        return (own,)
    return own, *(dtype for dtype in _INTEGERS if dtype != own)


_INTEGERS = torch.int32, torch.int64


def kind_of(tensor: torch.Tensor) -> Kind:
    """Names the kind of a field that takes this tensor; int32, which `pack` refuses, if none."""
    return _KINDS.get(tensor.dtype, "int32")


def int64_pairs(ints: Int32[Array, "B K"]) -> Int32[Array, "B 2K"]:
    """Writes int32 values as torch reads int64: a low half and a high one each."""
    return jnp.stack([ints, ints >> 31], axis=-1).reshape(len(ints), -1)  # little-endian


def _decode(words: Array, field: Field) -> Array:
    kind = field.kind
    if kind in _HALVES and math.prod(field.shape) % 2:
        words = words.astype(jnp.int16)
    if kind == "float32" or kind in _HALVES:  # a word becomes one float, or two
        return lax.bitcast_convert_type(words, jnp.dtype(kind))
    if kind == "bool":
        return words != 0
    if kind == "int32":
        return words
    low, high = words.reshape(-1, 2).T  # little-endian
    nearest = jnp.where(high < 0, jnp.int32(_INT32_MIN), jnp.int32(INT32_MAX))
    return jnp.where(high == low >> 31, low, nearest)
