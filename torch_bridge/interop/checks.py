"""Checks of tensors and metadata: dtype, shape and device."""

import functools
from collections.abc import Mapping
from numbers import Integral
from typing import Any

import torch

from torch_bridge.interop.dlpack import check_dense


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
        check_dense(name, tensor, f"{op}: ")
        if not tensor.ndim:
            raise ValueError(
                f"{op}: `{name}` has shape (), wanted one entry for each request or row. Pass it "
                f"with that dimension: {name}.reshape(1) where there is one."
            )


def of_metadata(op: str, cad: Any, name: str, more: int = 0) -> torch.Tensor:
    """Returns the entries of a metadata tensor that belong to requests; it may be longer.

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
        pass  # the checks below take time, so they run only for invalid input
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
        wanted, axes = parsed(form)
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
        shape = tensor.shape
        if len(shape) != len(axes) or not all(shape[1:]):
            least = " with a column or more" if axes[1:] else ""
            raise ValueError(f"{op}: {_shape_of(name, tensor, form)}{least}. Reshape it.")
        for (letter, more, or_longer), length in zip(axes, shape, strict=True):
            size = length - more
            if or_longer:
                if size < sizes[letter]:
                    raise ValueError(
                        f"{op}: `{name}` has {size} entries, wanted {sizes[letter]} or more. Pass "
                        "one for each request or row."
                    )
            elif sizes.setdefault(letter, size) != size or size < 0:
                as_owner = f", as `{owners[letter]}` has it" if letter in owners else ""
                raise ValueError(
                    f"{op}: {_shape_of(name, tensor, form)} with {letter} = {sizes[letter]}"
                    f"{as_owner}. Pass one entry for each request or row."
                )
            owners.setdefault(letter, name)
        first.append(axes[0][0])
    assert device is not None  # there is a tensor
    return device, {letter: sizes[letter] for letter in first}


def _shape_of(name: str, tensor: torch.Tensor, form: str) -> str:
    axes = ", ".join(form.split()[1:])
    return f"`{name}` has shape {tuple(tensor.shape)}, wanted [{axes}]"


@functools.lru_cache(maxsize=256)
def parsed(form: str) -> tuple[tuple[torch.dtype, ...], list[tuple[str, int, bool]]]:
    """Returns the dtypes of a form, and of each axis: letter, entries more, whether longer will do.

    Integers are packed as the first dtype, whichever width they have.
    """
    kind, *axes = form.split()
    parts = [(axis.removesuffix("..").partition("+"), axis.endswith("..")) for axis in axes]
    return _WANTED[kind], [(letter, int(more or 0), longer) for (letter, _, more), longer in parts]


_INT32, _INT64 = torch.int32, torch.int64
_WANTED = {
    "int32": (_INT32,),
    "int": (_INT32, _INT64),
    "long": (_INT64, _INT32),
    "bool": (torch.bool,),
    "float": (torch.bfloat16, torch.float16, torch.float32),
}
