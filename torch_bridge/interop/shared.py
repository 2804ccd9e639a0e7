"""Torch memory that JAX reads in every step, and copies of host numbers to a device."""

from typing import Any

import jax
import torch

from torch_bridge.interop.dlpack import to_jax


def torch_device(device: Any, owner: str) -> torch.device:
    """Returns a device with its index.

    Raises:
      TypeError: it is no device.
    """
    try:
        device = torch.device(device)
    except (TypeError, RuntimeError) as error:
        raise TypeError(
            f"{owner}: `device` is {device!r}, wanted a torch device. Pass for example "
            "torch.device('cuda:0') or 'cpu'."
        ) from error
    if device.type == "cpu":
        return torch.device("cpu")  # torch never says cpu:0
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device


def empty(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Allocates memory that may be written to in and outside of inference mode."""
    with torch.inference_mode(False):
        return torch.empty(shape, dtype=dtype, device=device)


def alias(tensor: torch.Tensor) -> jax.Array:
    """Passes memory to JAX that torch rewrites between two calls of JAX.

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
    # The device is explicit: a caller may have set another default device.
    if device.type == "cpu":
        return torch.tensor(values, dtype=dtype, device="cpu")
    pinned = torch.tensor(values, dtype=dtype, device="cpu", pin_memory=True)
    return pinned.to(device, non_blocking=True)
