"""CUDA streams: the order of torch's work and JAX's, with provoked races.

A kernel that only waits delays a stream, so that work that is not ordered runs too early.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

torch = pytest.importorskip("torch")

from tests.support import torch_forms as forms
from tests.support.torch_runner import no_waits
from torch_bridge.interop import dlpack
from torch_bridge.interop.checks import check_tensors
from torch_bridge.interop.dlpack import Stream, jax_device, to_jax, to_torch
from torch_bridge.interop.layout import Field, Layout
from torch_bridge.interop.packing import Packer
from torch_bridge.interop.shared import alias, empty

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda", 0)
HOLD = 400_000_000  # clock cycles: about 0.2 s
SIZE = 1 << 20


@pytest.fixture(params=["fast", "public"], autouse=True)
def importer(request, monkeypatch):
    """Runs each test with the part of from_dlpack that is fast, and with the public function."""
    if request.param == "public":
        monkeypatch.setattr(dlpack, "_import_buffer", None)
    else:
        assert dlpack._import_buffer is not None, "this JAX has the fast part no more"
    yield request.param
    torch.cuda.synchronize()


@pytest.fixture(params=["default", "side"])
def stream(request):
    return torch.cuda.default_stream(CUDA) if request.param == "default" else torch.cuda.Stream()


@jax.jit
def _add(x):
    return x + 1


@jax.jit
def _slow(x, identity):
    """Adds one after some tenths of a second, exactly."""
    return functools.reduce(lambda y, _: y @ identity, range(100), x) + 1


@pytest.fixture(scope="module")
def identity():
    eye = jax.device_put(jnp.eye(4096, dtype=jnp.float32), jax_device(CUDA))
    _slow(eye, eye).block_until_ready()
    return eye


@pytest.mark.parametrize("size", [1, 3, 1000])
@pytest.mark.parametrize("dtype", forms.DTYPES, ids=str)
def test_contiguous_memory_is_shared(dtype, size):
    tensor = torch.ones(size, dtype=dtype, device=CUDA)
    with jax.enable_x64(True):
        array = to_jax(tensor)
        assert array.unsafe_buffer_pointer() == tensor.data_ptr()
        assert array.committed and array.devices() == {jax_device(CUDA)}
        assert array.tolist() == tensor.tolist()


@pytest.mark.parametrize("dtype", forms.DTYPES, ids=str)
@pytest.mark.parametrize("offset", [1, 3, 7])
def test_a_computation_reads_memory_of_any_alignment(dtype, offset):
    tensor = forms.base(dtype, CUDA)[offset:]
    with jax.enable_x64(True):
        flipped = jax.jit(lambda x: x[::-1])(to_jax(tensor))
        np.testing.assert_array_equal(forms.bits_of_array(flipped), forms.bits(tensor)[::-1])


def _held_up(stream, step):
    """Runs a step behind a held-up stream, having run it before: no memory is allocated then."""
    for _ in range(2):
        with torch.cuda.stream(stream):
            step()
        torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(HOLD)
        got = step()
        assert not stream.query()  # the host waited for nothing
    stream.synchronize()
    return got


def test_jax_reads_a_tensor_after_what_the_stream_holds(stream):
    source, values = torch.zeros(SIZE, dtype=torch.int32, device=CUDA), iter([1, 4, 7])

    def step():
        source.fill_(next(values))
        return to_torch(_add(to_jax(source)))

    assert (_held_up(stream, step) == 8).all()


def test_jax_reads_a_copy_of_a_strided_tensor_after_what_the_stream_holds(stream):
    source = torch.zeros((1024, 1024), dtype=torch.int32, device=CUDA)
    values = iter([1, 4, 7])

    def step():
        source[0] = next(values)
        return to_torch(_add(to_jax(source.T)))

    back = _held_up(stream, step)
    assert (back[:, 0] == 8).all() and (back[:, 1:] == 1).all()


def test_torch_reads_a_result_after_it_is_computed(stream, identity):
    source = torch.empty((4096, 4096), device=CUDA)
    for value in (1.0, 2.0):  # the first time, memory is allocated
        source.fill_(value)
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            tensor = to_torch(_slow(to_jax(source), identity))
            doubled = tensor * 2
            computing = not stream.query()
        stream.synchronize()
        assert (tensor == value + 1).all() and (doubled == 2 * value + 2).all()
    assert computing  # the host did not wait


def test_memory_of_a_result_is_not_used_again_before_it_was_copied(stream):
    source = torch.arange(SIZE, dtype=torch.int32, device=CUDA)
    fresh = jax.jit(lambda x: jnp.full_like(x, -1))
    for hold in (0, HOLD):  # the first time, memory is allocated
        result = _add(to_jax(source)).block_until_ready()
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            torch.cuda._sleep(hold)
            tensor = to_torch(result)
        del result
        over = [fresh(to_jax(source)) for _ in range(30)]
        if stream != torch.cuda.current_stream():  # else `over` waits for the stream as well
            jax.block_until_ready(over)
            assert not (hold and stream.query())
        stream.synchronize()
        assert torch.equal(tensor, torch.arange(1, SIZE + 1, dtype=torch.int32, device=CUDA))
        del over


def test_memory_of_a_tensor_that_was_let_go_of_is_not_written_to_before_jax_read_it(identity):
    for transposed in (False, True):
        source = torch.full((4096, 4096), 2.0, device=CUDA)
        tensor = to_torch(_slow(to_jax(source.T if transposed else source), identity))
        del source
        over = [torch.full((4096, 4096), -1.0, device=CUDA) for _ in range(4)]
        assert (tensor == 3).all() and (over[-1] == -1).all()


_LAYOUT = Layout((Field("ids", "B", kind="int64"), Field("mask", "B", kind="bool")), (("B", SIZE),))


@jax.jit
def _unpack(words):
    arrays, sizes = _LAYOUT.unpack(words)
    return jnp.where(arrays["mask"], arrays["ids"], -1) + sizes["B"] * 0


_WITH_ROWS = Layout(
    (*_LAYOUT.fields, Field("rows", "B", shape=(8,), kind="bfloat16")), _LAYOUT.capacity
)


@jax.jit
def _sum_with_rows(words):
    arrays, _ = _WITH_ROWS.unpack(words)
    return arrays["ids"] + arrays["rows"][:, 0].astype(jnp.int32)


def _tensors(value):
    return {
        "ids": torch.full((SIZE,), value, device=CUDA),
        "mask": torch.ones(SIZE, dtype=torch.bool, device=CUDA),
    }


def test_jax_reads_a_packed_step_after_what_the_stream_holds(stream):
    packer, tensors, values = Packer(CUDA, "Owner"), _tensors(0), iter([1, 4, 7])

    def step():
        tensors["ids"].fill_(next(values))
        result = _unpack(forms.packed(packer, _LAYOUT, tensors, {"B": SIZE}))
        return packer.own(result, SIZE, torch.int64)

    drafts = _held_up(stream, step)
    assert (drafts == 7).all()


def test_jax_reads_packed_rows_after_what_the_stream_holds(stream):
    packer, tensors = Packer(CUDA, "Owner"), _tensors(1)
    tensors["rows"] = torch.zeros((SIZE, 8), dtype=torch.bfloat16, device=CUDA)
    values = iter([1, 4, 16])

    def step():
        tensors["rows"].fill_(next(values))
        result = _sum_with_rows(forms.packed(packer, _WITH_ROWS, tensors, {"B": SIZE}))
        return packer.own(result, SIZE, torch.int64)

    drafts = _held_up(stream, step)
    assert (drafts == 17).all()


def test_memory_that_was_shared_once_is_read_again(stream):
    memory = empty((SIZE,), torch.int32, CUDA).zero_()
    array, values = alias(memory), iter([1, 4, 7])
    packer, tensors = Packer(CUDA, "Owner"), _tensors(1)
    both = jax.jit(lambda words, memory: _unpack(words) + memory)

    def step():
        packer.follow_stream()
        memory.fill_(next(values))
        result = both(forms.packed(packer, _LAYOUT, tensors, {"B": SIZE}), array)
        return packer.own(result, SIZE, torch.int32)

    drafts = _held_up(stream, step)
    assert (drafts == 8).all()


def test_a_step_on_another_stream_waits_for_the_last_one():
    packer, steps = Packer(CUDA, "Owner"), [_tensors(value) for value in range(6)]
    streams = [torch.cuda.Stream(), torch.cuda.Stream(), torch.cuda.default_stream(CUDA)]
    for hold in (0, HOLD):  # the first time, memory is allocated
        torch.cuda.synchronize()
        kept = []
        for value, tensors in enumerate(steps):
            with torch.cuda.stream(streams[value % 3]):
                if value % 3 == 0:
                    torch.cuda._sleep(hold)
                result = _unpack(forms.packed(packer, _LAYOUT, tensors, {"B": SIZE}))
                kept.append(packer.own(result, SIZE, torch.int64))
        assert not (hold and streams[0].query())
        torch.cuda.synchronize()
        for value, drafts in enumerate(kept):
            assert (drafts == value).all()


def test_a_plan_made_on_another_stream_waits_for_the_first_one():
    side = torch.cuda.Stream()
    tensors = _tensors(1)
    forms.packed(Packer(CUDA, "Owner"), _LAYOUT, tensors, {"B": SIZE})  # loads kernels
    torch.cuda.synchronize()
    packer = Packer(CUDA, "Owner")
    torch.cuda._sleep(HOLD)
    packer.plan(_LAYOUT, tensors, {"B": SIZE})  # numbers that all headers are made of
    with torch.cuda.stream(side):
        plan = packer.plan(_LAYOUT, tensors, {"B": SIZE})
        header = plan.header.clone()
        assert not side.query()
    side.synchronize()
    assert header.tolist() == [SIZE]


def test_nothing_waits_on_the_host(stream):
    packer, tensors = Packer(CUDA, "Owner"), _tensors(3)
    ids = torch.arange(SIZE, dtype=torch.int32, device=CUDA)
    tensors["rows"] = torch.ones((SIZE, 8), dtype=torch.bfloat16, device=CUDA)
    plan = packer.plan(_WITH_ROWS, tensors, {"B": SIZE})

    def step():
        with no_waits():
            rejected = packer.zeros(SIZE)
            words = packer.pack(plan, list(tensors.values()))
            drafts = packer.own(_sum_with_rows(words), SIZE, torch.int64)
            array = to_jax(ids)
            return rejected, drafts, to_torch(_add(array)), (array, to_jax(ids[1:]))

    rejected, drafts, added, _ = _held_up(stream, step)
    assert (rejected == 0).all() and (drafts == 4).all() and torch.equal(added, ids + 1)


def test_what_waits_on_the_host_would_have_been_seen():
    with no_waits(), pytest.raises(RuntimeError, match="synchronizing"):
        torch.ones(1, device=CUDA).item()


def test_a_view_is_the_results_own_memory(stream):
    source = torch.arange(SIZE, dtype=torch.int32, device=CUDA)
    result = _add(to_jax(source))
    with torch.cuda.stream(stream):
        view = Stream(CUDA).view(result)
        assert view.data_ptr() == result.unsafe_buffer_pointer()
        assert to_torch(result).data_ptr() != view.data_ptr()


@pytest.mark.parametrize("dtype", forms.DTYPES, ids=str)
def test_pinned_memory_stays_on_the_host(dtype):
    tensor = forms.base(dtype).pin_memory()
    with jax.enable_x64(True):
        array = to_jax(tensor)
        assert array.devices() == {jax_device(torch.device("cpu"))}
        np.testing.assert_array_equal(forms.bits_of_array(array), forms.bits(tensor))


def test_tensors_of_the_host_and_of_the_gpu_are_told_apart():
    ids = torch.zeros(2, dtype=torch.int32)
    with pytest.raises(ValueError, match="Owner: `ids` is on cpu, wanted cuda:0"):
        check_tensors("Owner", {"ids": (ids, "int B")}, torch.device("cuda:0"))
    with pytest.raises(ValueError, match="Owner: `ids` is on cuda:0, wanted cpu"):
        check_tensors("Owner", {"ids": (ids.cuda(), "int B")}, torch.device("cpu"))


def test_thousands_of_calls_leave_no_memory_behind():
    packer, tensors = Packer(CUDA, "Owner"), _tensors(3)
    ids = torch.arange(SIZE, dtype=torch.int32, device=CUDA)
    device = jax_device(CUDA)

    def calls(count):
        for _ in range(count):
            to_torch(_add(to_jax(ids)))
            result = _unpack(forms.packed(packer, _LAYOUT, tensors, {"B": SIZE}))
            packer.own(result, SIZE, torch.int32)
        torch.cuda.synchronize()
        del result
        to_torch(_add(to_jax(ids)))  # lets go of what was copied
        torch.cuda.synchronize()

    calls(20)
    arrays, memory = len(jax.live_arrays()), torch.cuda.memory_allocated()
    in_use = device.memory_stats()["bytes_in_use"]
    calls(2000)
    # JAX lets go of what torch freed at some later call of its own.
    assert len(jax.live_arrays()) <= arrays + 10
    # A leak of one result each would be 8 GB; one may wait for its copy to end.
    assert torch.cuda.memory_allocated() - memory <= 8 * SIZE
    assert device.memory_stats()["bytes_in_use"] - in_use <= 8 * SIZE
