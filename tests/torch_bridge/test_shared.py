"""Torch memory that JAX reads in every step, and results that torch owns."""

import gc

import jax
import jax.numpy as jnp
import pytest

torch = pytest.importorskip("torch")

from tests.support import torch_forms as forms
from torch_bridge.interop.dlpack import jax_device, to_torch
from torch_bridge.interop.layout import Field, Layout
from torch_bridge.interop.packing import Packer
from torch_bridge.interop.shared import alias, empty


@pytest.fixture
def device():
    return torch.device("cuda" if jax.default_backend() == "gpu" else "cpu")


@pytest.fixture
def packer(device):
    return Packer(device, "Owner")


@pytest.mark.any_device
@pytest.mark.parametrize("dtype", [d for d in forms.DTYPES if d != torch.int64], ids=str)
def test_an_alias_sees_what_torch_writes(dtype, device):
    memory = empty((3, 5), dtype, device).zero_()
    array = alias(memory)
    add = jax.jit(lambda x: x.astype(jnp.int32) + 1)
    assert add(array).tolist() == [[1] * 5] * 3
    memory.fill_(1)
    if device.type == "cuda":
        torch.cuda.synchronize()
    assert add(array).tolist() == [[2] * 5] * 3


@pytest.mark.any_device
def test_an_alias_of_nothing_is_empty(device):
    assert alias(torch.zeros((0, 4), device=device)).shape == (0, 4)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.zeros(4, 3).T,
        torch.zeros(16)[1:],
        torch.zeros(4)[::2],
        torch.zeros(4, dtype=torch.int64),
        torch.zeros(1).expand(4),
    ],
    ids=["transposed", "unaligned", "strided", "int64", "expanded"],
)
def test_memory_that_jax_cannot_share_has_no_alias(tensor):
    with pytest.raises(RuntimeError, match="in place of sharing its memory.*Copy it first"):
        alias(tensor)


@pytest.mark.any_device
@pytest.mark.parametrize("num_rows", [0, 1, 3, 4])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_own_returns_the_first_rows_in_memory_of_torchs_own(num_rows, dtype, packer, device):
    with jax.default_device(jax_device(device)):
        result = jnp.arange(8, dtype=jnp.int32).reshape(4, 2)
    first, second = (packer.own(result, num_rows, dtype) for _ in range(2))
    assert first.dtype == dtype and first.device.type == device.type
    first.fill_(-1)
    expected = [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert second.tolist() == expected[:num_rows] and result.tolist() == expected
    assert packer.own(result, 4, dtype).tolist() == expected


@pytest.mark.any_device
@pytest.mark.parametrize(
    "dtype", [torch.bool, torch.bfloat16, torch.float16, torch.float32], ids=str
)
def test_own_takes_what_is_no_integer(dtype, packer, device):
    with jax.default_device(jax_device(device)):
        result = jnp.array([1, 0, 1], str(dtype).removeprefix("torch."))
    assert packer.own(result, 2, dtype).tolist() == [1, 0]
    assert to_torch(result).tolist() == [1, 0, 1]


@pytest.mark.any_device
def test_zeros_are_zeros_of_every_size(packer):
    for size in (0, 1, 5, 3, 1000, 0, 17):
        assert packer.zeros(size).tolist() == [0] * size
        assert packer.zeros(size).dtype == torch.int32


def test_ten_thousand_steps_leave_nothing_behind():
    packer = Packer(torch.device("cpu"), "Owner")
    fields = Field("ids", "B", kind="int64"), Field("rows", "B", shape=(4,), kind="bfloat16")
    layout, tensors = (
        Layout(fields, (("B", 1024),)),
        {"ids": torch.arange(2048)[::2], "rows": torch.ones((1024, 4)).bfloat16()},
    )
    first = jax.jit(lambda words: words[1:])

    def step():
        packer.own(first(forms.packed(packer, layout, tensors, {"B": 1024})), 1024, torch.int32)

    for _ in range(300):
        step()
    gc.collect()
    num_arrays, memory = len(jax.live_arrays()), forms.resident_bytes()
    for _ in range(10_000):
        step()
    gc.collect()
    assert len(jax.live_arrays()) == num_arrays
    # A leak of 4 KiB each would be 40 MB.
    assert forms.resident_bytes() - memory < 8e6
