"""Values and memory that cross between torch and JAX."""

import gc
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

torch = pytest.importorskip("torch")

from tests.support import torch_forms as forms
from torch_bridge.interop.dlpack import jax_device, to_jax, to_torch


@pytest.fixture
def device():
    return torch.device("cuda" if jax.default_backend() == "gpu" else "cpu")


@pytest.mark.any_device
@pytest.mark.parametrize("x64", [False, True])
@pytest.mark.parametrize("form", forms.FORMS)
@pytest.mark.parametrize("dtype", forms.DTYPES, ids=str)
def test_every_dtype_and_form_crosses_bit_by_bit(dtype, form, x64, device):
    tensor = forms.FORMS[form](forms.base(dtype, device))
    before = forms.bits(tensor)
    with jax.enable_x64(x64):
        array = to_jax(tensor, name="ids")
        back = to_torch(array)
        narrow = dtype == torch.int64 and not x64
        assert array.dtype == (jnp.int32 if narrow else str(dtype).removeprefix("torch."))
        assert array.shape == tuple(tensor.shape) == tuple(back.shape)
        assert array.committed and array.devices() == {jax_device(device)}
        # Another order would compile every function again.
        assert array.format.layout.major_to_minor == tuple(range(array.ndim))
        expected = before.astype(np.int32) if narrow else before
        np.testing.assert_array_equal(forms.bits_of_array(array), expected)
        np.testing.assert_array_equal(forms.bits(back), expected)
        assert back.dtype == (torch.int32 if narrow else dtype) and back.device.type == device.type
    np.testing.assert_array_equal(forms.bits(tensor), before)


@pytest.mark.any_device
@pytest.mark.parametrize("value", [2**31 + 5, -(2**31) - 1, forms.INT64.max, forms.INT64.min])
def test_an_int64_beyond_32_bits_is_exact_or_refused_by_name(value, device):
    tensor = torch.tensor([1, value, 2], device=device)
    with jax.enable_x64(True):
        assert to_jax(tensor).tolist() == to_torch(to_jax(tensor)).tolist() == [1, value, 2]
        assert to_jax(tensor.cpu().numpy()).tolist() == [1, value, 2]
    with jax.enable_x64(False):
        for given in (tensor, tensor[1], tensor[::2][:0].new_tensor([value]), tensor.cpu().numpy()):
            with pytest.raises(ValueError, match=rf"`slots` holds {value}, .*jax_enable_x64"):
                to_jax(given, name="slots")


def test_64_bits_switched_on_for_the_process_count_as_well():
    before = jax.config.jax_enable_x64
    jax.config.update("jax_enable_x64", True)
    try:
        assert to_jax(torch.tensor([2**31 + 5])).tolist() == [2**31 + 5]
    finally:
        jax.config.update("jax_enable_x64", before)


@pytest.mark.parametrize("value", [forms.INT32.min, forms.INT32.max])
def test_the_limits_of_32_bits_are_exact(value):
    assert to_jax(torch.tensor([value])).tolist() == [value]


@pytest.mark.parametrize("size", [1, 3, 1000])
@pytest.mark.parametrize("dtype", forms.DTYPES, ids=str)
def test_contiguous_memory_is_shared(dtype, size):
    tensor = torch.ones(size, dtype=dtype)
    with jax.enable_x64(True):
        assert to_jax(tensor).unsafe_buffer_pointer() == tensor.data_ptr()
        one_row = torch.ones(2, size, dtype=dtype)[::2]  # contiguous, whatever its first stride
        assert to_jax(one_row).unsafe_buffer_pointer() == one_row.data_ptr()


@pytest.mark.parametrize("offset", [1, 3, 15])
def test_memory_that_is_not_aligned_is_copied_before_the_call_returns(offset):
    for value in range(20):
        source = torch.full((1 << 20,), value, dtype=torch.int32)
        array = to_jax(source[offset:])
        source.fill_(-1)  # JAX's own copy would still be under way
        assert (array == value).all()


def test_tensors_with_gradients_and_lazy_signs_cross():
    grad = torch.ones(3, requires_grad=True)
    parameter = torch.nn.Parameter(torch.full((2, 2), 3.0))
    negative = torch.imag(torch.tensor([1 + 2j, 3 - 4j]).conj())
    assert negative.is_neg()
    assert to_jax(grad * 2).tolist() == [2.0, 2.0, 2.0]
    assert to_jax(parameter).tolist() == [[3.0, 3.0], [3.0, 3.0]]
    assert to_jax(negative).tolist() == [-2.0, 4.0]
    assert to_jax(negative[:1]).tolist() == [-2.0]
    assert grad.requires_grad and parameter.requires_grad


def _read_only(array):
    array.flags.writeable = False
    return array


@pytest.mark.parametrize(
    "array",
    [
        np.arange(6, dtype=np.int32)[::-1],
        np.arange(12, dtype=np.float32).reshape(3, 4)[::-1, ::-2],
        _read_only(np.arange(6, dtype=np.int64)),
        np.arange(6, dtype=">i4"),
        np.arange(6, dtype=">i8")[::-2],
        np.array([1.5, -0.25], dtype=">f4"),
        np.array([1.5, -0.25], dtype=">f2"),
        np.arange(12, dtype=np.int32).reshape(3, 4, order="F"),
        np.array([1.5, -0.25], jnp.bfloat16)[::-1],
        np.array([True, False])[::-1],
        np.array(7, np.int32),
        np.int32(-7),
        np.int64(7),
        np.float16(0.5),
        np.bool_(True),
        np.zeros((0, 3), np.float32),
        np.broadcast_to(np.int32(4), (2, 3)),
    ],
    ids=lambda array: f"{array.dtype.str}{array.shape}{array.strides}",
)
def test_arrays_of_numpy_are_copied_whatever_their_form(array):
    got = to_jax(array, name="ids")
    assert got.dtype == (jnp.int32 if array.dtype.kind == "i" else array.dtype.newbyteorder("="))
    np.testing.assert_array_equal(np.asarray(got), array.astype(got.dtype))


def test_what_is_written_to_an_array_of_numpy_later_is_not_seen():
    for value in range(20):
        source = np.full(1 << 20, value, np.int32)
        array = to_jax(source)
        source[:] = -1
        assert (array == value).all()


@pytest.mark.parametrize(
    "given",
    [
        torch.zeros(2, dtype=torch.uint8),
        torch.zeros(2, dtype=torch.int16),
        torch.zeros(2, dtype=torch.float64),
        torch.zeros(2, dtype=torch.complex64),
        torch.zeros(2, dtype=torch.float8_e4m3fn),
        torch.zeros((2, 2)).to_sparse(),
        np.zeros(2),
        np.zeros(2, np.uint32),
        np.array(["a"]),
        np.array([{}]),
        np.zeros(2, [("a", np.int32)]),
        [1, 2],
        3,
        None,
        jnp.zeros(2),
    ],
    ids=lambda given: f"{type(given).__name__}-{getattr(given, 'dtype', '')}",
)
def test_what_cannot_cross_is_refused_by_name(given):
    with pytest.raises(TypeError, match=r"`draft_ids` .*wanted .*(Convert|Make)"):
        to_jax(given, name="draft_ids")


def test_tensors_without_strides_are_refused_by_name():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says that these are prototypes
        compressed = torch.eye(2).to_sparse_csr()
        nested = torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)])
        jagged = torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)], layout=torch.jagged)
    for given in (torch.eye(2).to_sparse(), compressed, nested, jagged):
        with pytest.raises(TypeError, match=r"`draft_ids` is .*wanted a dense .*to_dense"):
            to_jax(given, name="draft_ids")


def test_devices_that_jax_has_not_are_refused():
    with pytest.raises(RuntimeError, match="`draft_ids` is on meta, wanted cpu or cuda"):
        to_jax(torch.zeros(2, device="meta"), name="draft_ids")
    with pytest.raises(RuntimeError, match="wanted cpu or cuda"):
        jax_device(torch.device("mps"))
    with pytest.raises(RuntimeError, match=r"JAX has no device cuda:99 .*jax\[cuda13\]"):
        jax_device(torch.device("cuda", 99))
    with pytest.raises(RuntimeError, match=r"JAX has no device cpu:99 .*JAX_PLATFORMS"):
        jax_device(torch.device("cpu", 99))


def test_arrays_that_torch_cannot_take_are_refused():
    with pytest.raises(TypeError, match="`array` is a ndarray, wanted an array of JAX"):
        to_torch(np.zeros(2))
    with pytest.raises(TypeError, match="`array` has dtype float8_e4m3fn.*astype"):
        to_torch(jnp.zeros(2, jnp.float8_e4m3fn))


@pytest.mark.any_device
@pytest.mark.parametrize("dtype", forms.DTYPES, ids=str)
def test_an_array_outlives_the_tensor_it_came_from(dtype, device):
    values = forms.bits(forms.base(dtype))
    with jax.enable_x64(True):
        kept = [to_jax(forms.base(dtype, device).clone()) for _ in range(20)]
        parts = [to_jax(forms.base(dtype, device)[1:]) for _ in range(20)]
        gc.collect()
        over = [torch.full_like(forms.base(dtype, device), 1) for _ in range(200)]
        for array, part in zip(kept, parts, strict=True):
            np.testing.assert_array_equal(forms.bits_of_array(array), values)
            np.testing.assert_array_equal(forms.bits_of_array(part), values[1:])
    assert len(over) == 200


@pytest.mark.any_device
def test_a_tensor_outlives_the_array_it_came_from(device):
    with jax.default_device(jax_device(device)):
        kept = [to_torch(jnp.arange(1000, dtype=jnp.int32)) for _ in range(20)]
        gc.collect()
        over = [jnp.full(1000, -1, jnp.int32) for _ in range(200)]
        jax.block_until_ready(over)
    for tensor in kept:
        assert tensor.tolist() == list(range(1000))


@pytest.mark.any_device
def test_a_returned_tensor_is_torchs_own(device):
    with jax.default_device(jax_device(device)):
        table = jnp.arange(8, dtype=jnp.int32)
        lookup = jax.jit(lambda index: table[index])
        constant = jax.jit(lambda: jnp.arange(8, dtype=jnp.int32))
        same = jax.jit(lambda x: x)
        index = jnp.arange(8, dtype=jnp.int32)
        arrays = [table, lookup(index), constant(), same(table)]
        first, second = ([to_torch(array) for array in arrays] for _ in range(2))
        for tensor in first:
            tensor.fill_(0)
        arrays += [lookup(index), constant(), same(table), jax.jit(lambda: table + 0)()]
    expected = list(range(8))
    assert all(array.tolist() == expected for array in arrays)
    assert all(tensor.tolist() == expected for tensor in second)
    third = [to_torch(array) for array in arrays]
    assert all(tensor.tolist() == expected for tensor in third)


@pytest.mark.any_device
def test_a_tensor_that_jax_hands_back_unchanged_is_copied(device):
    source = torch.arange(100, dtype=torch.int32, device=device)
    back = to_torch(jax.jit(lambda x: x)(to_jax(source)))
    back.fill_(-1)
    assert source.tolist() == list(range(100))


@pytest.mark.any_device
def test_inference_mode_is_crossed_in_both_directions(device):
    with torch.inference_mode():
        inside = torch.arange(6, dtype=torch.int32, device=device)
        array = to_jax(inside)
        back = to_torch(array)
        back[0] = 9
    back[1] = 9
    assert array.tolist() == to_jax(inside).tolist() == list(range(6))
    assert back.tolist() == [9, 9, 2, 3, 4, 5]
    with torch.inference_mode():
        assert to_jax(back).tolist() == back.tolist()


@pytest.mark.parametrize("call", ["to_jax", "to_jax copied", "to_torch"])
def test_ten_thousand_calls_leave_nothing_behind(call):
    tensor = torch.arange(1025, dtype=torch.int32)
    array = jnp.arange(1024, dtype=jnp.int32)
    crossing = {
        "to_jax": lambda: to_jax(tensor[:1024].clone()),
        "to_jax copied": lambda: to_jax(tensor[1:]),
        "to_torch": lambda: to_torch(array),
    }[call]
    for _ in range(300):
        crossing()
    gc.collect()
    num_arrays, memory = len(jax.live_arrays()), forms.resident_bytes()
    for _ in range(10_000):
        crossing()
    gc.collect()
    assert len(jax.live_arrays()) == num_arrays
    # A leak of 4 KiB each would be 40 MB.
    assert forms.resident_bytes() - memory < 8e6
