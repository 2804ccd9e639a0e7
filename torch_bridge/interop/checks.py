"""Checks of tensors and metadata: dtype, shape and device."""

from collections.abc import Mapping
from numbers import Integral
from typing import Any

import torch

from torch_bridge.interop.dlpack import is_dense


def check_has(op: str, name: str, value: Any, *attributes: str) -> None:
    """Raises TypeError for an argument that lacks an attribute."""
    for attribute in attributes:
        if not hasattr(value, attribute):
            raise TypeError(
                f"{op}: `{name}` is a {type(value).__name__} without `{attribute}`, wanted one "
                f"with {', '.join(attributes)}. Pass the metadata of the target's step."
            )


def check_are_tensors(op: str, **tensors: Any) -> None:
    """Refuses arguments that are no dense tensors with a dimension or more.

    Raises:
      TypeError: no tensor, or a sparse one. ValueError: a tensor without dimensions.
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
      TypeError, ValueError: it is missing, no tensor or too short.
    """
    try:
        tensor, size = getattr(cad, name), cad.num_reqs + more
        length = tensor.shape[0]
        if length == size:
            return tensor
        if length > size:
            return tensor[:size]
    except (AttributeError, IndexError, RuntimeError, TypeError):
        pass  # only now is it found what is wrong, as that takes time
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
    op: str,
    tensors: Mapping[str, tuple[Any, str]],
    device: torch.device | None = None,
    **known: int,
) -> tuple[torch.device, dict[str, int]]:
    """Refuses tensors of the wrong dtype, rank, size or device.

    Args:
      op: for messages.
      tensors: name to (tensor, form). A form is a dtype and axes: "int B+1", "long T", "float T D",
        "bool B..". An "int" or a "long" may be int32 or int64, and is packed as int32 or int64; an
        "int32" is that alone. All axes with one letter have one size, which the first of them
        sets; "B.." may be longer.
      device: wanted; by default the first tensor's.
      known: sizes that are known before, by letter.

    Returns:
      (device, sizes): of all of them; of the first axes, by letter.

    Raises:
      TypeError, ValueError: a tensor has another dtype, rank, size or device.
    """
    sizes: dict[str, int] = dict(known)
    owners: dict[str, str] = {}
    first: list[str] = []
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
        shape = f"`{name}` has shape {tuple(tensor.shape)}, wanted [{', '.join(axes)}]"
        if tensor.ndim != len(axes) or not all(tensor.shape[1:]):
            raise ValueError(
                f"{op}: {shape}{' with a column or more' if axes[1:] else ''}. Reshape it."
            )
        for axis, length in zip(axes, tensor.shape, strict=True):
            letter, _, more = axis.removesuffix("..").partition("+")
            size = length - int(more or 0)
            if axis.endswith("..") and size < sizes[letter]:
                raise ValueError(
                    f"{op}: `{name}` has {size} entries, wanted {sizes[letter]} or more. Pass one "
                    "for each request or row."
                )
            if not axis.endswith("..") and (sizes.setdefault(letter, size) != size or size < 0):
                as_owner = f", as `{owners[letter]}` has it" if letter in owners else ""
                raise ValueError(
                    f"{op}: {shape} with {letter} = {sizes[letter]}{as_owner}. Pass one entry for "
                    "each request or row."
                )
            owners.setdefault(letter, name)
        first.append(axes[0].removesuffix("..").partition("+")[0])
    assert device is not None  # there is a tensor
    return device, {letter: sizes[letter] for letter in first}


_INT32, _INT64 = torch.int32, torch.int64
_WANTED = {
    "int32": (_INT32,),
    "int": (_INT32, _INT64),
    "long": (_INT64, _INT32),
    "bool": (torch.bool,),
    "float": (torch.bfloat16, torch.float16, torch.float32),
}
