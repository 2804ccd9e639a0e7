"""Tensors in every form that a caller may hand over, and how they are compared: bit by bit."""

import os

import numpy as np
import torch

INT64 = np.iinfo(np.int64)
INT32 = np.iinfo(np.int32)

# What rounds, saturates or wraps where a copy is not exact.
_SPECIAL = {
    torch.bool: [False, True, True, False],
    torch.int32: [INT32.min, INT32.max, -1, 0],
    torch.int64: [INT32.min, INT32.max, -1, 0],
    torch.bfloat16: [-0.0, float("inf"), float("nan"), 3.3895e38, 1e-40],
    torch.float16: [-0.0, float("-inf"), float("nan"), 65504.0, 6e-8],
    torch.float32: [-0.0, float("inf"), float("nan"), 3.4028235e38, 1e-45],
}
DTYPES = list(_SPECIAL)

FORMS = {
    "no_entries": lambda base: base[:0],
    "no_rows": lambda base: base[:0].reshape(0, 3),
    "no_columns": lambda base: base[:0].reshape(3, 0),
    "scalar": lambda base: base[2],
    "scalar_at_an_odd_offset": lambda base: base[7],
    "ones": lambda base: base[1:2].reshape(1, 1, 1),
    "whole": lambda base: base,
    "matrix": lambda base: base.reshape(6, 4),
    "odd_offset": lambda base: base[1:],
    "inner_part": lambda base: base[3:8],
    "strided": lambda base: base[::3],
    "columns": lambda base: base.reshape(4, 6)[:, 1:4],
    "transposed": lambda base: base.reshape(6, 4).T,
    "permuted": lambda base: base.reshape(2, 3, 4).permute(2, 0, 1),
    "one_with_an_odd_stride": lambda base: base[::4][:1],
    "one_row_of_a_strided_matrix": lambda base: base.reshape(4, 6)[::2][:1],
    "one_in_the_middle": lambda base: base.reshape(2, 3, 4)[:, 1:2],
    "expanded": lambda base: base[3:4].expand(5),
    "expanded_rows": lambda base: base[:4].expand(3, 4),
    "expanded_scalar": lambda base: base[4].expand(2, 2),
}


def base(dtype: torch.dtype, device: str | torch.device = "cpu") -> torch.Tensor:
    """Returns 24 entries, the special values among them."""
    special = torch.tensor(_SPECIAL[dtype], dtype=dtype)
    rest = torch.arange(24 - len(special)) * 37 % 11
    return torch.cat([special, rest.to(dtype)]).to(device)


def bits(tensor: torch.Tensor) -> np.ndarray:
    """Returns the entries as integers: NaN equals itself, and -0.0 does not equal 0.0."""
    host = tensor.detach().cpu().resolve_neg().clone(memory_format=torch.contiguous_format)
    same_size = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return host.view(same_size[host.element_size()]).numpy()


def bits_of_array(array) -> np.ndarray:
    """Returns the entries of an array of JAX in the same way."""
    host = np.asarray(array)
    return host.view({1: np.uint8, 2: np.int16, 4: np.int32, 8: np.int64}[host.itemsize])


def resident_bytes() -> int:
    """Returns how much memory this process holds."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def packed(packer, layout, tensors, sizes):
    """Plans and packs a step's tensors, which fit the layout."""
    plan = packer.plan(layout, tensors, sizes)
    return packer.pack(plan, [tensors[field.name] for field in layout.fields])
