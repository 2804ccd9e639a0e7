"""A step's tensors packed into one array, against a packing in numpy."""

import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from tests.support import torch_forms as forms
from tests.support.counting import backend_compiles
from torch_bridge.interop.checks import check_tensors
from torch_bridge.interop.dlpack import from_host
from torch_bridge.interop.layout import Field, Layout, layout_of
from torch_bridge.interop.packing import Packer

_DTYPES = {
    "int32": torch.int32,
    "int64": torch.int64,
    "bool": torch.bool,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
_HALVES = ("bfloat16", "float16")
_INTS = [0, 1, -1, 2**31 - 1, -(2**31), 2**31, -(2**31) - 1, 2**32, -(2**32) + 5, 2**63 - 1]


@pytest.fixture
def device():
    return torch.device("cuda" if jax.default_backend() == "gpu" else "cpu")


@pytest.fixture
def packer(device):
    return Packer(device, "Owner")


def _draw(rng, kind, shape):
    if kind == "bool":
        return rng.integers(0, 2, shape).astype(bool)
    if kind == "float32":
        return rng.integers(-(2**31), 2**31, shape).astype(np.int32).view(np.float32)
    if kind in _HALVES:
        return rng.integers(0, 2**16, shape).astype(np.uint16).view(jnp.dtype(kind))
    values = rng.choice(np.array([*_INTS, -(2**63)]), shape)
    return values.astype(np.int32) if kind == "int32" else values


def _expected(values):
    """What JAX gets of a tensor: an int64 as the nearest int32."""
    if values.dtype == np.int64:
        return np.clip(values, forms.INT32.min, forms.INT32.max).astype(np.int32)
    return values


def _check(layout, words, values, sizes, unpack=None):
    """Compares what JAX unpacks with what was packed, bit by bit."""
    arrays, got_sizes = (unpack or jax.jit(layout.unpack))(words)
    assert {letter: int(size) for letter, size in got_sizes.items()} == sizes
    capacity = dict(layout.capacity)
    for field in layout.fields:
        wanted, got = _expected(values[field.name]), np.asarray(arrays[field.name])
        assert got.shape == (capacity[field.size] + field.more, *field.shape)
        assert got.dtype == wanted.dtype
        live = got[: sizes[field.size] + field.more]
        assert live.tobytes() == wanted.tobytes(), field


_fields = st.builds(
    lambda size, more, shape, kind: (size, more, tuple(shape), kind),
    st.sampled_from("BT"),
    st.integers(0, 1),
    st.lists(st.integers(0, 3), max_size=2),
    st.sampled_from(list(_DTYPES)),
)


@pytest.mark.any_device
@given(
    st.lists(_fields, max_size=5),
    st.integers(0, 5),
    st.integers(0, 9),
    st.integers(0, 2**31),
    st.data(),
)
def test_random_layouts_unpack_to_what_was_packed(fields, most_b, most_t, seed, data):
    device = torch.device("cuda" if jax.default_backend() == "gpu" else "cpu")
    layout = Layout(
        tuple(Field(f"f{i}", *field) for i, field in enumerate(fields)),
        (("B", most_b), ("T", most_t)),
    )
    packer, rng, unpack = (
        Packer(device, "Owner"),
        np.random.default_rng(seed),
        jax.jit(layout.unpack),
    )
    steps = [dict(layout.capacity), {"B": 0, "T": 0}]  # exactly full, and empty
    steps.append({"B": data.draw(st.integers(0, most_b)), "T": data.draw(st.integers(0, most_t))})
    for sizes in steps:
        values = {
            field.name: _draw(rng, field.kind, (sizes[field.size] + field.more, *field.shape))
            for field in layout.fields
        }
        tensors = {name: from_host(value).to(device) for name, value in values.items()}
        _check(layout, forms.packed(packer, layout, tensors, sizes), values, sizes, unpack)


@pytest.mark.any_device
@pytest.mark.parametrize("form", [name for name in forms.FORMS if "scalar" not in name])
@pytest.mark.parametrize("kind", list(_DTYPES))
def test_tensors_of_every_form_are_packed(kind, form, packer, device):
    tensor = forms.FORMS[form](forms.base(_DTYPES[kind], device))
    layout = Layout((Field("ids", "B", shape=tensor.shape[1:], kind=kind),), (("B", 32),))
    words = forms.packed(packer, layout, {"ids": tensor}, {"B": len(tensor)})
    values = forms.bits(tensor).view(jnp.dtype(kind))
    _check(layout, words, {"ids": values}, {"B": len(tensor)})


@pytest.mark.any_device
@pytest.mark.parametrize("kind", _HALVES)
@pytest.mark.parametrize("width", [3, 4])
@pytest.mark.parametrize("offset", [0, 1, 2, 3])
def test_halves_of_any_alignment_are_packed(kind, offset, width, packer, device):
    rows = forms.base(_DTYPES[kind], device)[offset : offset + 5 * width].reshape(5, width)
    layout = Layout((Field("ids", "B"), Field("rows", "B", shape=(width,), kind=kind)), (("B", 8),))
    for part in (rows, rows.detach().requires_grad_(), rows.flip(0), rows[:0]):
        size = len(part)
        ids = torch.arange(size, dtype=torch.int32, device=device)
        values = {"ids": np.arange(size, dtype=np.int32), "rows": forms.bits(part).view(kind)}
        words = forms.packed(packer, layout, {"ids": ids, "rows": part}, {"B": size})
        _check(layout, words, values, {"B": size})


@pytest.mark.parametrize("length", [1, 2])
def test_lazy_signs_and_gradients_are_packed(length):
    negative = torch.imag(torch.tensor([1 + 2j, 3 - 4j]).conj())[:length]
    learned = torch.nn.Parameter(torch.full((length,), 2.5))
    layout = Layout((Field("a", "B", kind="float32"), Field("b", "B", kind="float32")), (("B", 2),))
    tensors = {"a": negative, "b": learned}
    words = forms.packed(Packer(torch.device("cpu"), "Owner"), layout, tensors, {"B": length})
    values = {"a": np.float32([-2, 4])[:length], "b": np.float32([2.5, 2.5])[:length]}
    _check(layout, words, values, {"B": length})


@pytest.mark.any_device
@pytest.mark.parametrize(
    "value, nearest",
    [
        (2**31 - 1, 2**31 - 1),
        (2**31, 2**31 - 1),
        (2**31 + 5, 2**31 - 1),
        (2**32, 2**31 - 1),
        (2**63 - 1, 2**31 - 1),
        (-(2**31), -(2**31)),
        (-(2**31) - 1, -(2**31)),
        (-(2**32), -(2**31)),
        (-(2**63), -(2**31)),
        (-1, -1),
    ],
)
@pytest.mark.parametrize("x64", [False, True])
def test_an_int64_becomes_the_nearest_int32(value, nearest, x64, packer, device):
    layout = Layout((Field("slots", "T", kind="int64"),), (("T", 2),))
    with jax.enable_x64(x64):
        words = forms.packed(
            packer, layout, {"slots": torch.tensor([value], device=device)}, {"T": 1}
        )
        slots = jax.jit(layout.unpack)(words)[0]["slots"]
        assert slots.dtype == jnp.int32 and slots[0] == nearest


@pytest.mark.any_device
def test_no_entry_of_an_earlier_step_is_read_for_a_live_one(packer, device):
    layout = Layout((Field("ids", "B"), Field("starts", "B", more=1)), (("B", 8),))
    poison = torch.full((9,), 0x7F7F7F7F, dtype=torch.int32, device=device)
    for size in (8, 3, 0, 5):
        forms.packed(packer, layout, {"ids": poison[:8], "starts": poison}, {"B": 8})
        values = {
            "ids": np.arange(size, dtype=np.int32),
            "starts": np.arange(size + 1, dtype=np.int32),
        }
        tensors = {name: torch.from_numpy(value).to(device) for name, value in values.items()}
        _check(layout, forms.packed(packer, layout, tensors, {"B": size}), values, {"B": size})


@pytest.mark.any_device
def test_layouts_take_turns_while_the_memory_grows(packer, device):
    capacities = [1, 4, 2, 64, 1, 4, 1000, 64, 2]
    layouts = {
        most: Layout((Field("ids", "B", kind="int64"),), (("B", most),)) for most in capacities
    }
    unpack = {most: jax.jit(layout.unpack) for most, layout in layouts.items()}
    for step, most in enumerate(capacities * 2):
        values = {"ids": np.arange(most) * 1000 + step}
        tensors = {"ids": torch.from_numpy(values["ids"]).to(device)}
        words = forms.packed(packer, layouts[most], tensors, {"B": most})
        _check(layouts[most], words, values, {"B": most}, unpack[most])


def test_a_step_on_a_cpu_is_written_where_the_last_one_was():
    packer = Packer(torch.device("cpu"), "Owner")
    layout = Layout((Field("ids", "B"),), (("B", 4),))
    steps = [
        forms.packed(packer, layout, {"ids": torch.full((n,), n, dtype=torch.int32)}, {"B": n})
        for n in (4, 2, 0)
    ]
    assert len({array.unsafe_buffer_pointer() for array in steps}) == 1


@pytest.mark.any_device
def test_sizes_that_change_compile_nothing(packer, device):
    layout = Layout(
        (Field("ids", "B", kind="int64"), Field("masks", "T", kind="bool")), (("B", 8), ("T", 16))
    )
    unpack = jax.jit(layout.unpack)

    def step(num_requests, num_rows):
        tensors = {
            "ids": torch.zeros(num_requests, dtype=torch.int64, device=device),
            "masks": torch.zeros(num_rows, dtype=torch.bool, device=device),
        }
        words = forms.packed(packer, layout, tensors, {"B": num_requests, "T": num_rows})
        packer.own(unpack(words)[0]["ids"], num_requests, torch.int64)

    step(1, 1)
    with backend_compiles() as compiled:
        for size in range(9):
            step(size, 2 * size)
    assert compiled == []


@pytest.mark.any_device
def test_an_equal_layout_compiles_nothing(packer, device):
    @jax.jit
    def add(words):
        return words + 1

    tensor = torch.arange(3, dtype=torch.int32, device=device)
    with backend_compiles() as compiled:
        for _ in range(3):
            layout = Layout((Field("ids", "B"),), (("B", 4),))
            add(forms.packed(packer, layout, {"ids": tensor}, {"B": 3}))
    assert len(compiled) <= 1
    assert len({Layout((Field("ids", "B"),), (("B", 4),)) for _ in range(3)}) == 1


_ids = torch.zeros(3, dtype=torch.int64)


@pytest.mark.parametrize(
    "tensor, error, message",
    [
        (None, TypeError, "`ids` is a NoneType, wanted a torch tensor"),
        (np.zeros((3, 2)), TypeError, "`ids` is a ndarray, wanted"),
        (_ids, ValueError, r"`ids` has shape \(3,\), wanted \[B, W\] with a column or more"),
        (_ids.new_zeros(2, 2), ValueError, r"`ids` has shape \(2, 2\).*B = 3.*one entry for each"),
        (_ids.new_zeros(4, 2), ValueError, r"`ids` has shape \(4, 2\).*B = 3"),
        (_ids.new_zeros(3, 4), ValueError, r"`ids` has shape \(3, 4\).*W = 2, as `rows` has it"),
        (_ids.new_zeros(3, 2).to_sparse(), TypeError, "`ids` is sparse or nested, wanted a dense"),
        (torch.zeros(3, 2), TypeError, r"`ids` has dtype torch.float32, wanted torch.int64 or .*"),
        (_ids.new_zeros(3, 2).to("meta"), ValueError, "`ids` is on meta, wanted cpu"),
    ],
    ids=str,
)
def test_a_tensor_that_does_not_fit_is_refused_by_name(tensor, error, message):
    given = {"rows": (torch.zeros(3, 2), "float B W"), "ids": (tensor, "long B W")}
    with pytest.raises(error, match=f"Owner: {message}"):
        check_tensors("Owner", given)
    with pytest.raises(error, match="Owner: `ids` "):
        Packer(torch.device("cpu"), "Owner").pack_planned(
            0, [tensor], lambda: check_tensors("Owner", given)
        )


@pytest.mark.any_device
@pytest.mark.parametrize("kind", ["int32", "int64"])
@pytest.mark.parametrize("shape", [(), (3,)])
def test_either_width_of_integers_is_packed_as_the_field_says(kind, shape, packer, device):
    layout = Layout((Field("ids", "B", shape=shape, kind=kind),), (("B", 4),))
    values = np.arange(2 * int(np.prod(shape)), dtype=np.int64).reshape(2, *shape) - 2
    wide = values.copy()
    wide.flat[:2] = 2**40, -(2**40)
    unpack = jax.jit(layout.unpack)
    for array in (values.astype(np.int32), values, wide):
        tensor = torch.tensor(array, device=device)
        words = forms.packed(packer, layout, {"ids": tensor}, {"B": 2})
        _check(layout, words, {"ids": array}, {"B": 2}, unpack)


@pytest.mark.parametrize("size", [5, -1])
def test_a_size_that_the_layout_has_not_is_refused(size):
    packer = Packer(torch.device("cpu"), "Owner")
    layout = Layout((Field("ids", "B"),), (("B", 4),))
    with pytest.raises(ValueError, match=f"Owner: .*B = {size}, wanted 0 to 4. Raise max_num_seqs"):
        forms.packed(
            packer, layout, {"ids": torch.zeros(max(size, 0), dtype=torch.int32)}, {"B": size}
        )


def test_what_was_refused_leaves_the_packer_usable():
    packer = Packer(torch.device("cpu"), "Owner")
    layout = Layout((Field("ids", "B"),), (("B", 4),))

    def pack(tensor):
        def plan():
            _, sizes = check_tensors("Owner", {"ids": (tensor, "int B")})
            return packer.plan(layout, {"ids": tensor}, sizes), None

        return packer.pack_planned(layout, [tensor], plan)[0]

    for wrong in (torch.zeros(3), [1, 2, 3], torch.zeros(3).int().to_sparse()):
        with pytest.raises(TypeError, match="Owner: `ids` "):
            pack(wrong)
    words = pack(torch.arange(3, dtype=torch.int32))
    _check(layout, words, {"ids": np.arange(3, dtype=np.int32)}, {"B": 3})


@pytest.mark.any_device
def test_two_threads_pack_at_once(device):
    layout = Layout((Field("ids", "B", kind="int64"), Field("row", "B", shape=(7,))), (("B", 64),))
    unpack, wrong, barrier = jax.jit(layout.unpack), [], threading.Barrier(2)

    def run(seed):
        packer, rng = Packer(device, f"Owner {seed}"), np.random.default_rng(seed)
        barrier.wait()
        try:
            for _ in range(150):
                n = int(rng.integers(0, 65))
                values = {
                    "ids": rng.integers(0, 2**31, n),
                    "row": rng.integers(0, 2**31, (n, 7)).astype(np.int32),
                }
                tensors = {
                    name: torch.from_numpy(value).to(device) for name, value in values.items()
                }
                arrays, _ = unpack(forms.packed(packer, layout, tensors, {"B": n}))
                for name, value in values.items():
                    got = packer.own(arrays[name], n, torch.int64)
                    if not np.array_equal(got.cpu().numpy(), value):
                        wrong.append((seed, name, n))
        except Exception as error:  # a thread's own would be lost
            wrong.append(error)

    threads = [threading.Thread(target=run, args=(seed,)) for seed in (1, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=120)
    assert not any(thread.is_alive() for thread in threads) and wrong == []


@pytest.mark.any_device
@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad, torch.enable_grad])
def test_a_packer_goes_on_in_another_mode(mode, device):
    fields = Field("ids", "B"), Field("hidden", "B", shape=(2,), kind="float32")
    layouts = [Layout(fields, (("B", most),)) for most in (2, 64, 2)]
    values = {"ids": np.int32([7, 8]), "hidden": np.ones((2, 2), np.float32)}

    def step(layout):
        words = forms.packed(packer, layout, tensors, {"B": 2})
        _check(layout, words, values, {"B": 2})
        drafts = packer.own(jax.jit(layout.unpack)(words)[0]["ids"], 2, torch.int32)
        return drafts, packer.zeros(5)

    with mode():
        packer = Packer(device, "Owner")
        tensors = {name: torch.from_numpy(value).to(device) for name, value in values.items()}
        inside = [step(layout) for layout in layouts]
    outside = [step(layout) for layout in layouts]
    with mode():
        outside += [step(layout) for layout in layouts]
    for drafts, zeros in inside + outside:
        assert zeros.tolist() == [0] * 5
        assert drafts.fill_(-1).tolist() == [-1, -1]


def test_a_default_device_of_torch_changes_nothing():
    layout = Layout((Field("ids", "B"),), (("B", 4),))
    tensors = {"ids": torch.arange(3, dtype=torch.int32)}
    with torch.device("meta"):
        packer = Packer(torch.device("cpu"), "Owner")
        words = forms.packed(packer, layout, tensors, {"B": 3})
        assert packer.zeros(2).tolist() == [0, 0]
    _check(layout, words, {"ids": np.arange(3, dtype=np.int32)}, {"B": 3})


@pytest.mark.any_device
@pytest.mark.parametrize("kind", list(_DTYPES))
def test_a_layout_takes_the_kind_of_a_tensor_and_one_width_of_integers(kind):
    tensor = torch.zeros(1, dtype=_DTYPES[kind])
    forms_of = (
        ["int", "long"] if kind.startswith("int") else ["bool" if kind == "bool" else "float"]
    )
    for form in forms_of:
        (field,) = layout_of({"x": (tensor, f"{form} B")}, {"B": 1}).fields
        assert field.kind == {"int": "int32", "long": "int64"}.get(form, kind)


@pytest.mark.parametrize("form", ["int B", "long B", "float B", "bool B"])
def test_a_dtype_that_no_field_takes_is_refused(form):
    tensor = torch.zeros(1, dtype=torch.float64)
    with pytest.raises(TypeError, match="`ids` has dtype torch.float64, wanted torch"):
        check_tensors("Owner", {"ids": (tensor, form)})
