"""The form of a packed step: which tensors it has, and how JAX unpacks them.

One int32 array has the sizes of a step's tensors and then the tensors, one after the other, so that
one array is passed to JAX. `Layout.unpack`, inside jit, slices them out, padded to the sizes of a
bucket: a step of any size needs no padded copy and no host value.
"""

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass

import jax.numpy as jnp
import torch
from jax import lax
from jaxtyping import Array, Bool, Int32

from jspec.axes import INT32_MAX
from torch_bridge.interop.checks import parsed

INT32_MIN = -INT32_MAX - 1
_HALVES = ("bfloat16", "float16")


@dataclass(frozen=True)
class Field:
    """One tensor of a step.

    Attributes:
      name: of the argument.
      size: letter of its first dimension, whose size changes from step to step.
      more: entries beyond that size: `query_start` has B + 1.
      shape: its other dimensions.
      kind: dtype: int32, int64, bool, float32, bfloat16 or float16. Integers come in either width;
        an int64 that int32 does not hold becomes the nearest that it does.
    """

    name: str
    size: str
    more: int = 0
    shape: tuple[int, ...] = ()
    kind: str = "int32"

    @property
    def words(self) -> int:
        """int32 words of an entry: a bool takes one, and two halves of an even row share one."""
        size = math.prod(self.shape)
        if self.kind == "int64":
            return 2 * size
        return size // 2 if self.kind in _HALVES and size % 2 == 0 else size


@dataclass(frozen=True)
class Layout:
    """The order of a step's tensors, and the sizes that they are padded to.

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
        """Slices the tensors out.

        Entries after a tensor's own size are undefined.

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
            # In range: the fields before this one have at most the bucket's sizes.
            part = lax.dynamic_slice(words, (offset,), (num_entries * field.words,))
            arrays[field.name] = _decode(part, field).reshape(num_entries, *field.shape)
            offset = offset + (sizes[field.size] + field.more) * field.words
        return arrays, sizes


def layout_of(tensors: Mapping[str, tuple[torch.Tensor, str]], bucket: Mapping[str, int]) -> Layout:
    """Returns the layout of tensors that `check_tensors` accepted.

    Args:
      tensors: name to (tensor, form), see `check_tensors`.
      bucket: what first axes are padded to, by letter.
    """
    fields = []
    for name, (tensor, form) in tensors.items():
        dtypes, ((letter, more, _), *_) = parsed(form)
        # One width for each integer argument, the one that vLLM's runner passes, so that the other
        # width compiles nothing.
        dtype = tensor.dtype if tensor.dtype.is_floating_point else dtypes[0]
        kind = str(dtype).removeprefix("torch.")
        fields.append(Field(name, letter, more, tuple(tensor.shape[1:]), kind))
    return Layout(tuple(fields), tuple(bucket.items()))


def without_padding(
    query_start: Int32[Array, "B+1"], num_requests: Int32[Array, ""]
) -> tuple[Bool[Array, "B"], Int32[Array, "B+1"]]:
    """Returns which requests are no padding, and starts that give padding no rows."""
    request = jnp.arange(query_start.shape[0], dtype=jnp.int32)
    end = query_start.at[num_requests].get(mode="clip", wrap_negative_indices=False)
    return request[:-1] < num_requests, jnp.where(request < num_requests, query_start, end)


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
    nearest = jnp.where(high < 0, jnp.int32(INT32_MIN), jnp.int32(INT32_MAX))
    return jnp.where(high == low >> 31, low, nearest)
