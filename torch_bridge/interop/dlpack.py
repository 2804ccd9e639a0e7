"""Arrays passed between PyTorch and JAX without a copy, in the order of the caller's stream.

A crossing costs tens of microseconds of host time on a GPU, so the hot path makes few: see
`torch_bridge.interop.packing`.
"""

import contextlib
import functools
import os
import threading
import warnings
from collections import deque
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax._src import lib as _jaxlib
from torch.utils import dlpack as torch_dlpack

_to_dlpack = torch_dlpack.to_dlpack  # pyright: ignore[reportPrivateImportUsage]  # documented
_INT32 = np.iinfo(np.int32)
_DTYPES = {
    torch.bool: np.dtype(bool),
    torch.int32: np.dtype(np.int32),
    torch.int64: np.dtype(np.int64),
    torch.bfloat16: np.dtype(jnp.bfloat16),
    torch.float16: np.dtype(np.float16),
    torch.float32: np.dtype(np.float32),
}


def to_jax(tensor: torch.Tensor | np.ndarray, *, name: str = "tensor") -> jax.Array:
    """Passes a tensor to JAX, without a copy where possible.

    JAX treats arrays as constant: neither write to the tensor nor donate the array while the array
    exists. A CUDA array is read after the work that is queued on the caller's current stream; keep
    it until a result of it has been returned by `to_torch`, as torch may reuse its memory before
    JAX has read it otherwise. Copied are numpy arrays, tensors that are not contiguous,
    memory that JAX cannot use (aligned to less than 64 bytes on a CPU, 16 on CUDA, or pinned), and
    int64 while JAX is 32 bits wide, whose values are compared with the limits of int32, which waits
    for the device on CUDA.

    Args:
      tensor: bool, int32, int64, bfloat16, float16 or float32; numpy's arrays and scalars are
        accepted, too.
      name: of the argument, for messages.

    Returns:
      The array, committed to the tensor's device.

    Raises:
      TypeError: no tensor, a sparse one, or another dtype. ValueError: an int64 value that int32
        does not hold. RuntimeError: JAX has no such device, or this process was forked from one
        that ran JAX.

    Example:
      >>> to_jax(torch.arange(3, dtype=torch.int32))
      Array([0, 1, 2], dtype=int32)
    """
    if isinstance(tensor, np.ndarray | np.generic):
        tensor = _copy_of_numpy(tensor, name)
    check_dense(name, tensor)
    if tensor.dtype not in _DTYPES:
        raise TypeError(_wrong_dtype(name, tensor.dtype))
    if tensor.device.type not in _PLATFORMS:
        raise RuntimeError(
            f"`{name}` is on {tensor.device}, wanted cpu or cuda. Make it there, or move it first: "
            f"{name}.to('cpu')."
        )
    device = jax_device(tensor.device)
    tensor = tensor.detach().resolve_neg().contiguous()
    if tensor.dtype == torch.int64 and not jax.config.read("jax_enable_x64"):
        tensor = _narrow(tensor, name)
    # The strides of dimensions of size 1 are anything, and JAX reads them.
    tensor = tensor.as_strided(tensor.shape, _strides(tensor.shape))
    unaligned = tensor.data_ptr() % _ALIGNMENT[tensor.device.type]
    if tensor.is_cuda and tensor.numel():
        return _stream(device).to_jax(tensor.clone() if unaligned else tensor)
    if (
        tensor.is_cuda
        or not tensor.numel()
        or unaligned
        or tensor.is_pinned()  # DLPack says that it is a GPU's
    ):
        return jax.device_put(_to_numpy(tensor.cpu()).copy(), device)
    return jax.dlpack.from_dlpack(tensor, device)


def to_torch(array: jax.Array) -> torch.Tensor:
    """Copies an array into a tensor of torch's own, on the same device.

    Writing to the tensor changes nothing in JAX, and is allowed in and outside of inference mode.
    On CUDA the copy is queued on the caller's current stream, and nothing waits for
    it on the host.

    Args:
      array: on one device.

    Raises:
      TypeError: no array of JAX, or of a dtype that torch lacks. ValueError: it is on several
        devices. RuntimeError: this process was forked from one that ran JAX.

    Example:
      >>> to_torch(jnp.arange(3)).fill_(-1)
      tensor([-1, -1, -1], dtype=torch.int32)
    """
    check_not_forked()
    if not isinstance(array, jax.Array):
        raise TypeError(
            f"`array` is a {type(array).__name__}, wanted an array of JAX. Pass what a function of "
            "JAX returned."
        )
    devices = array.devices()
    if len(devices) != 1:
        raise ValueError(
            f"`array` lies on {len(devices)} devices, wanted one. Gather it first: "
            "jax.device_put(array, jax.devices()[0])."
        )
    (device,) = devices
    with torch.inference_mode(False):
        if device.platform == "cpu":
            return from_host(np.array(array))  # waits for the array, and owns its memory
        return _stream(device).own(array)


def check_dense(name: str, tensor: Any, owner: str = "") -> None:
    """Raises TypeError for what is no dense tensor; `owner` is put in front, with ": "."""
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(
            f"{owner}`{name}` is a {type(tensor).__name__}, wanted a torch tensor. Make one first: "
            f"torch.as_tensor({name})."
        )
    if tensor.layout != torch.strided or tensor.is_nested:
        raise TypeError(
            f"{owner}`{name}` is sparse or nested, wanted a dense tensor. Convert it first: "
            f"{name}.to_dense(), or to_padded_tensor where it is nested."
        )


def from_host(array: np.ndarray) -> torch.Tensor:
    """Returns a tensor in a numpy array's memory, bfloat16 included.

    Raises:
      TypeError: torch has no such dtype.
    """
    if array.dtype == _DTYPES[torch.bfloat16]:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    try:
        return torch.from_numpy(array)
    except TypeError as error:
        raise TypeError(
            f"`array` has dtype {array.dtype}, which torch does not take. Convert it first: "
            "array.astype('float32')."
        ) from error


_PLATFORMS = ("cpu", "cuda")
_ALIGNMENT = {"cpu": 64, "cuda": 16}  # of what an executable of XLA takes


def _strides(shape: torch.Size) -> list[int]:
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return strides[::-1]


def _copy_of_numpy(array: np.ndarray | np.generic, name: str) -> torch.Tensor:
    """Copies an array, as torch takes no reversed, read-only or byte-swapped ones."""
    if array.dtype.newbyteorder("=") not in _DTYPES.values():
        raise TypeError(_wrong_dtype(name, array.dtype))
    return from_host(np.array(array, dtype=array.dtype.newbyteorder("="), order="C"))


def _to_numpy(tensor: torch.Tensor) -> np.ndarray:
    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.int16).numpy().view(_DTYPES[torch.bfloat16])
    return tensor.numpy()


def _wrong_dtype(name: str, dtype: Any) -> str:
    wanted = ", ".join(str(dtype) for dtype in _DTYPES)
    return f"`{name}` has dtype {dtype}, wanted one of {wanted}. Convert it before the call."


def _narrow(tensor: torch.Tensor, name: str) -> torch.Tensor:
    if tensor.numel():
        low, high = (int(value) for value in torch.aminmax(tensor))
        if low < _INT32.min or high > _INT32.max:
            value = low if low < _INT32.min else high
            raise ValueError(
                f"`{name}` holds {value}, and JAX is 32 bits wide here, wanted "
                f"{_INT32.min} to {_INT32.max}. Pass smaller values, or switch on "
                "jax.config.update('jax_enable_x64', True)."
            )
    return tensor.to(torch.int32)


def jax_device(device: torch.device) -> jax.Device:  # pyright: ignore[reportInvalidTypeForm]
    """Finds the JAX device of a torch device.

    Raises:
      RuntimeError: JAX has no such device, or this process was forked from one that ran JAX.
    """
    check_not_forked()
    if device.type not in _PLATFORMS:
        raise RuntimeError(
            f"device {device} is not supported, wanted cpu or cuda. Move the tensors to one of "
            "these first."
        )
    index = device.index
    if index is None:
        index = torch.cuda.current_device() if device.type == "cuda" else 0
    try:
        return next(d for d in jax.devices(device.type) if d.local_hardware_id == index)
    except (RuntimeError, StopIteration) as error:
        advice = {
            "cpu": "Leave cpu among JAX_PLATFORMS.",
            "cuda": "Install jax[cuda12] or jax[cuda13] to match the driver, and leave "
            "CUDA_VISIBLE_DEVICES and JAX_PLATFORMS as torch's devices need them.",
        }
        raise RuntimeError(
            f"JAX has no device {device.type}:{index} ({error or 'none with this index'}). "
            f"{advice[device.type]}"
        ) from error


def placement(device: jax.Device) -> Callable[[], Any]:  # pyright: ignore[reportInvalidTypeForm]
    """Returns a function that makes a context in which a device is JAX's default.

    jspec's ops choose their implementation by the default device, by default a GPU if there is one.
    """
    if device in jax.local_devices()[:1]:
        return contextlib.nullcontext
    return functools.partial(jax.default_device, device)


def check_preallocation(device: torch.device) -> None:
    """Warns where JAX is about to preallocate most of a GPU's memory, which torch needs as well."""
    # As jaxlib reads them: empty and other values have no effect.
    is_set = any(os.environ.get(f"XLA_{client}_MEM_FRACTION") for client in _CLIENTS)
    is_set |= os.environ.get("XLA_PYTHON_CLIENT_PREALLOCATE") in ("false", "False", "0")
    is_set |= os.environ.get("XLA_PYTHON_CLIENT_ALLOCATOR", "").lower() == "platform"
    if device.type == "cuda" and not is_set:
        warnings.warn(
            "JAX preallocates three quarters of a GPU's memory, and torch gets the rest. Set "
            "XLA_PYTHON_CLIENT_PREALLOCATE=false, or XLA_CLIENT_MEM_FRACTION to what the "
            "drafter needs, before anything of JAX runs.",
            RuntimeWarning,
            stacklevel=3,
        )


_CLIENTS = ("CLIENT", "PYTHON_CLIENT")  # the second is the older name


class Stream:
    """Orders one CUDA device's work in torch and in JAX, for one thread.

    Args:
      device: "cuda" or "cuda:i".
    """

    def __init__(self, device: torch.device):
        self._device = jax_device(device)
        self._index = self._device.local_hardware_id
        ready = self._device.get_stream_for_external_ready_events()
        self._jax_handle = ready
        self._jax = torch.cuda.ExternalStream(ready, torch.device("cuda", self._index))
        self._event = torch.cuda.Event()
        self._streams: dict[int, torch.cuda.Stream] = {}
        self._read: deque[tuple[torch.cuda.Event, torch.Tensor]] = deque()

    def current(self) -> torch.cuda.Stream:
        """Returns the caller's current stream."""
        handle = self._handle()
        stream = self._streams.get(handle)
        if stream is None:
            stream = self._streams[handle] = torch.cuda.current_stream(self._index)
        return stream

    def to_jax(self, tensor: torch.Tensor) -> jax.Array:
        """Passes on a contiguous CUDA tensor, read after the current stream's work so far."""
        if _import_buffer is None:
            return jax.dlpack.from_dlpack(_Exporter(self, tensor, self._index))
        self.hold_up(self._jax)
        capsule = _to_dlpack(tensor)
        return _import_buffer(capsule, self._device, self._jax_handle, None, *_DEVICE_KIND)

    def hold_up(self, other: torch.cuda.Stream) -> None:
        """Makes another stream wait for the current one's work so far."""
        self._event.record(self.current())
        other.wait_event(self._event)

    def own(self, array: jax.Array) -> torch.Tensor:
        """Copies an array into a tensor, queued on the current stream."""
        view = self.view(array)
        owned = view.clone()
        event = torch.cuda.Event()
        event.record(self.current())
        # JAX may reuse memory that torch released for its next result, before the queued copy has
        # read it: views are released when their copy is done.
        self._read.append((event, view))
        while self._read and self._read[0][0].query():
            self._read.popleft()
        return owned

    def view(self, array: jax.Array) -> torch.Tensor:
        """Returns the array's own memory, which must only be read, on the current stream."""
        # DLPack writes the default stream as 1.
        capsule = array.__dlpack__(stream=self._handle() or 1)  # pyright: ignore[reportCallIssue]
        return torch_dlpack.from_dlpack(capsule)

    def _handle(self) -> int:
        # A tenth of the time of the public call.
        return torch._C._cuda_getCurrentRawStream(self._index)


_threads = threading.local()


def _stream(device: jax.Device) -> Stream:  # pyright: ignore[reportInvalidTypeForm]
    """Returns this thread's: two threads must not record one event."""
    streams = _threads.__dict__.setdefault("streams", {})
    index = device.local_hardware_id
    if index not in streams:
        streams[index] = Stream(torch.device("cuda", index))
    return streams[index]


class _Exporter:
    """A CUDA tensor as `jax.dlpack.from_dlpack` takes it."""

    def __init__(self, stream: Stream, tensor: torch.Tensor, index: int):
        self._stream, self._tensor, self._index = stream, tensor, index

    def __dlpack_device__(self) -> tuple[int, int]:
        return 2, self._index

    def __dlpack__(self, *, stream: int, **_: Any) -> Any:
        # JAX imports arrays on several streams in turn.
        self._stream.hold_up(torch.cuda.ExternalStream(stream, self._tensor.device))
        return _to_dlpack(self._tensor)


# jax.dlpack.from_dlpack takes 94 us on a GPU (JAX 0.11.2, H200), of which this part takes 20. Where
# JAX lacks it, the public function does the same.
_import_buffer = getattr(getattr(_jaxlib, "_jax", None), "dlpack_managed_tensor_to_buffer", None)
_DEVICE_KIND = (2,) if getattr(_jaxlib, "jaxlib_extension_version", 0) >= 467 else ()


_parent_ran_jax = False


def _note_fork() -> None:
    global _parent_ran_jax
    from jax._src import xla_bridge

    _parent_ran_jax = xla_bridge.backends_are_initialized()


def check_not_forked() -> None:
    """Refuses to run JAX in a process that was forked from one that ran JAX: it would hang.

    Raises:
      RuntimeError: this is such a process.
    """
    if _parent_ran_jax:
        raise RuntimeError(
            "this process was forked from one in which JAX had started, where JAX hangs. Start "
            "workers with multiprocessing's 'spawn' method (vLLM: VLLM_WORKER_MULTIPROC_METHOD="
            "spawn), or make the first drafter inside the worker."
        )


os.register_at_fork(after_in_child=_note_fork)
