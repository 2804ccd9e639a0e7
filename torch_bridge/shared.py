"""Memory that torch writes and JAX reads, step after step, and how numbers get there."""

from collections.abc import Sequence
from typing import Any

import jax
import torch
from jaxtyping import Array, Float

from torch_bridge.dlpack import jax_device, to_jax

_FLOATS = (torch.bfloat16, torch.float16, torch.float32)


class SharedRows:
    """Rows of a step that JAX reads where torch wrote them: hidden states.

    Write after `follow_stream` and before `pack` of the step's Packer: JAX waits for what the
    stream holds when it gets the packed array.

    Args:
      device: of the rows.
    """

    def __init__(self, device: torch.device):
        self._device = with_index(device)
        self._rows: torch.Tensor | None = None
        self._arrays: dict[int, jax.Array] = {}

    def write(self, parts: Sequence[torch.Tensor], capacity: int, name: str) -> Float[Array, "T D"]:
        """Copies tensors side by side to the shared memory.

        Args:
          parts: float [n, D of it] each, n at most `capacity`.
          capacity: rows of the result; from row n on they hold anything.
          name: of the argument, for messages.

        Raises:
          TypeError: they are no floats that JAX has, or of several dtypes. ValueError: they are on
            another device, no matrices of as many rows, or more rows than `capacity`.
        """
        first = parts[0]
        for part in parts:
            self._check(part, first, capacity, name)
        width = sum([part.shape[1] for part in parts])
        shared = self._rows
        if shared is None or (shared.dtype, shared.shape[1]) != (first.dtype, width):
            shared = None
        if shared is None or shared.shape[0] < capacity:
            shared = self._rows = empty((capacity, width), first.dtype, self._device)
            self._arrays = {}
        rows = shared if len(shared) == len(first) else shared[: len(first)]
        if len(parts) == 1:
            rows.copy_(first.detach() if first.requires_grad else first)
        else:
            torch.cat([part.detach() for part in parts], dim=1, out=rows)
        if capacity not in self._arrays:
            self._arrays[capacity] = alias(shared[:capacity])
        return self._arrays[capacity]

    def _check(self, part: torch.Tensor, first: torch.Tensor, capacity: int, name: str) -> None:
        shape = part.shape
        if len(shape) != 2 or shape[0] != first.shape[0] or shape[0] > capacity:
            raise ValueError(
                f"`{name}` has shape {tuple(shape)}, wanted {min(len(first), capacity)} rows, of "
                f"at most {capacity}, in two dimensions. Pass a row for each row of this step."
            )
        if part.dtype not in _FLOATS or part.dtype != first.dtype:
            raise TypeError(
                f"`{name}` has dtype {part.dtype}, wanted one of bfloat16, float16 and float32. "
                f"Convert it first: {name}.to(torch.bfloat16)."
            )
        if part.device != self._device:
            raise ValueError(
                f"`{name}` is on {part.device}, and the drafter on {self._device}. Move it there "
                "first."
            )


def with_index(device: torch.device) -> torch.device:
    """Names the CUDA device that "cuda" stands for."""
    if device.type == "cuda":
        return torch.device("cuda", jax_device(device).local_hardware_id)
    return device


def empty(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Allocates memory that may be written to in and outside of inference mode."""
    with torch.inference_mode(False):
        return torch.empty(shape, dtype=dtype, device=device)


def alias(tensor: torch.Tensor) -> jax.Array:
    """Hands memory to JAX that torch goes on writing to, between two calls of JAX.

    Args:
      tensor: contiguous; on a CPU aligned to 64 bytes, as what torch allocates is.

    Raises:
      RuntimeError: JAX copied it, so that it would not see what is written.
    """
    array = to_jax(tensor)
    if tensor.numel() and array.unsafe_buffer_pointer() != tensor.data_ptr():
        raise RuntimeError(
            f"JAX copied a tensor of shape {tuple(tensor.shape)}, strides {tensor.stride()} and "
            f"dtype {tensor.dtype} on {tensor.device} in place of sharing its memory, wanted "
            "contiguous memory that is neither pinned nor int64 while JAX is 32 bits wide. Copy it "
            "first: torch.empty_like(tensor).copy_(tensor)."
        )
    return array


@torch.inference_mode(False)
def on_device(values: Any, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    """Copies numbers to a device; nothing waits for it on the host."""
    # The device is named: a caller may have set another default one.
    if device.type == "cpu":
        return torch.tensor(values, dtype=dtype, device="cpu")
    pinned = torch.tensor(values, dtype=dtype, device="cpu", pin_memory=True)
    return pinned.to(device, non_blocking=True)
