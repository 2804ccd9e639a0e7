"""The forms that a step's tensors must have, and errors that say what does not fit."""

from collections.abc import Mapping
from numbers import Integral
from typing import Any

import torch

from torch_bridge.interop.dlpack import is_dense
from torch_bridge.interop.packing import Field, Kind, Layout, dtypes_of, kind_of


def check_has(op: str, name: str, value: Any, *attributes: str) -> None:
    """Refuses an argument that lacks an attribute.

    Raises:
      TypeError: it does; named.
    """
    for attribute in attributes:
        if not hasattr(value, attribute):
            raise TypeError(
                f"{op}: `{name}` is a {type(value).__name__} without `{attribute}`, wanted one "
                f"with {', '.join(attributes)}. Pass the metadata of the target's step."
            )


def check_are_tensors(op: str, **tensors: Any) -> None:
    """Refuses what is no dense tensor with a dimension or more.

    Raises:
      TypeError, ValueError: an argument is none; named.
    """
    for name, tensor in tensors.items():
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(
                f"{op}: `{name}` is a {type(tensor).__name__}, wanted a torch tensor on the "
                f"step's device. Make one first: torch.as_tensor({name})."
            )
        if not is_dense(tensor):
            raise TypeError(
                f"{op}: `{name}` is sparse or nested, wanted a dense tensor. Convert it first: "
                f"{name}.to_dense(), or to_padded_tensor where it is nested."
            )
        if not tensor.ndim:
            raise ValueError(
                f"{op}: `{name}` has shape (), wanted one entry for each request or row. Pass it "
                f"with that dimension: {name}.reshape(1) where there is one."
            )


def of_metadata(op: str, cad: Any, name: str, more: int = 0) -> torch.Tensor:
    """Returns the first entries of a tensor of the metadata's, which may be longer.

    Args:
      op: for messages.
      cad: with `num_reqs`.
      name: of the tensor.
      more: entries beyond one for each request.

    Raises:
      TypeError, ValueError: it is missing, no tensor or too short; named.
    """
    try:
        tensor, size = getattr(cad, name), cad.num_reqs + more
        length = tensor.shape[0]
        if length == size:
            return tensor
        if length > size:
            return tensor[:size]
    except (AttributeError, IndexError, RuntimeError, TypeError):
        pass  # what is wrong is looked for now: looking takes time
    check_has(op, "common_attn_metadata", cad, "num_reqs", name)
    if not isinstance(cad.num_reqs, Integral):
        raise TypeError(
            f"{op}: `num_reqs` is {cad.num_reqs!r}, wanted an int. Pass the metadata of the "
            "target's step."
        )
    tensor, size = getattr(cad, name), int(cad.num_reqs) + more
    check_are_tensors(op, **{name: tensor})
    raise ValueError(
        f"{op}: `{name}` has shape {tuple(tensor.shape)}, wanted {size} entries or more, as "
        f"`num_reqs` {cad.num_reqs} says. Pass the metadata of the target's step."
    )


def check_tensors(
    op: str, tensors: Mapping[str, tuple[Any, str]], device: torch.device | None = None
) -> tuple[torch.device, dict[str, int]]:
    """Refuses tensors of the wrong dtype, rank, size or device.

    Args:
      op: for messages.
      tensors: name to (tensor, form). A form is "int", "long", "bool" or "float" and axes:
        "int B+1", "int B M". The first tensor with a letter for its first axis sets that size.
        Integers may be int32 and int64: an "int" is packed as int32, a "long" as int64.
      device: wanted; by default the first tensor's.

    Returns:
      (device, sizes): of all of them; of the first axes, by letter.

    Raises:
      TypeError, ValueError: a tensor does not fit; named.
    """
    sizes: dict[str, int] = {}
    owner: dict[str, str] = {}
    for name, (tensor, form) in tensors.items():
        kind, *axes = form.split()
        wanted = _WANTED[kind]
        check_are_tensors(op, **{name: tensor})
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


_WANTED = {
    "int": dtypes_of("int32"),
    "long": dtypes_of("int64"),
    "bool": (torch.bool,),
    "float": (torch.bfloat16, torch.float16, torch.float32),
}


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


# One width for each argument, the one that vLLM's runner hands over: the other compiles nothing.
_PACKED_AS: dict[str, Kind] = {"int": "int32", "long": "int64"}


def layout_of(tensors: Mapping[str, tuple[torch.Tensor, str]], bucket: Mapping[str, int]) -> Layout:
    """Lays out tensors that `check_tensors` has passed.

    Args:
      tensors: name to (tensor, form).
      bucket: what letters are padded to.
    """
    fields = []
    for name, (tensor, form) in tensors.items():
        kind, axis, *_ = form.split()
        letter, _, more = axis.partition("+")
        packed_as = _PACKED_AS.get(kind) or kind_of(tensor)
        fields.append(Field(name, letter, int(more or 0), tuple(tensor.shape[1:]), packed_as))
    return Layout(tuple(fields), tuple(bucket.items()))
