"""Memory that torch writes and JAX reads, rows and aliases, and results that are torch's own."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

torch = pytest.importorskip("torch")

from tests import torch_forms as forms  # noqa: E402
from torch_bridge.dlpack import jax_device, to_torch  # noqa: E402
from torch_bridge.packing import Packer  # noqa: E402
from torch_bridge.shared import SharedRows, alias, empty  # noqa: E402


@pytest.fixture
def device():
    return torch.device("cuda" if jax.default_backend() == "gpu" else "cpu")


@pytest.fixture
def packer(device):
    return Packer(device, "Owner")


@pytest.mark.any_device
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_rows_are_read_where_they_were_written(dtype, device):
    rows, pointers = SharedRows(device), set()
    for step, num_rows in enumerate((4, 0, 2, 3)):
        hidden = torch.full((num_rows, 6), float(step), dtype=dtype, device=device)
        hidden += torch.arange(6, device=device).to(dtype)
        array = rows.write([hidden], 4, "hidden")
        jax.block_until_ready(array)
        got = to_torch(array)[:num_rows]
        assert array.shape == (4, 6) and got.dtype == dtype
        np.testing.assert_array_equal(forms.bits(got), forms.bits(hidden))
        pointers.add(array.unsafe_buffer_pointer())
    assert len(pointers) == 1


@pytest.mark.any_device
def test_rows_change_their_capacity_width_and_dtype(device):
    rows = SharedRows(device)
    for capacity, width, dtype in [
        (2, 4, torch.float32),
        (8, 4, torch.float32),
        (2, 4, torch.float32),
        (4, 4, torch.bfloat16),
        (4, 3, torch.bfloat16),
        (8, 4, torch.float32),
    ]:
        hidden = torch.randn((2, width), device=device).to(dtype)
        array = rows.write([hidden], capacity, "hidden")
        assert array.shape == (capacity, width)
        np.testing.assert_array_equal(forms.bits(to_torch(array)[:2]), forms.bits(hidden))


@pytest.mark.any_device
def test_rows_of_several_layers_lie_side_by_side(device):
    rows = SharedRows(device)
    base = torch.arange(24, dtype=torch.float32, device=device)
    parts = [base.reshape(6, 4).T[:3], base[:3, None], base[:6].reshape(3, 2).requires_grad_()]
    array = rows.write(parts, 4, "hidden")
    assert array.shape == (4, 9)
    torch.testing.assert_close(to_torch(array)[:3], torch.cat(parts, 1).detach(), rtol=0, atol=0)


_rows = torch.zeros(3, 2)


@pytest.mark.parametrize(
    "parts, error, message",
    [
        ([_rows.double()], TypeError, "`hidden` has dtype torch.float64, wanted one of bfloat16"),
        ([_rows, _rows.half()], TypeError, "`hidden` has dtype torch.float16"),
        ([_rows.to("meta")], ValueError, "`hidden` is on meta, and the drafter on cpu"),
        ([_rows[0]], ValueError, r"`hidden` has shape \(2,\), .* two dimensions"),
        ([_rows[None]], ValueError, r"`hidden` has shape \(1, 3, 2\)"),
        ([_rows, _rows[:2]], ValueError, r"`hidden` has shape \(2, 2\), wanted 3 rows"),
        ([torch.zeros(5, 2)], ValueError, r"`hidden` has shape \(5, 2\), .* at most 4"),
    ],
    ids=str,
)
def test_rows_that_do_not_fit_are_refused_by_name(parts, error, message):
    rows = SharedRows(torch.device("cpu"))
    rows.write([torch.ones(8, 2)], 8, "hidden")  # more room than the next step may use
    with pytest.raises(error, match=message):
        rows.write(parts, 4, "hidden")


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
    first, second = (packer.own(result, num_rows, dtype)[1] for _ in range(2))
    assert first.dtype == dtype and first.device.type == device.type
    first.fill_(-1)
    expected = [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert second.tolist() == expected[:num_rows] and result.tolist() == expected
    assert packer.own(result, 4, dtype)[1].tolist() == expected


@pytest.mark.any_device
@pytest.mark.parametrize(
    "dtype", [torch.bool, torch.bfloat16, torch.float16, torch.float32], ids=str
)
def test_own_takes_what_is_no_integer(dtype, packer, device):
    with jax.default_device(jax_device(device)):
        result = jnp.array([1, 0, 1], str(dtype).removeprefix("torch."))
    assert packer.own(result, 2, dtype)[1].tolist() == [1, 0]
    assert to_torch(result).tolist() == [1, 0, 1]
