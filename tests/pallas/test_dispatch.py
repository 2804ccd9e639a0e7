"""What the ops refuse, which implementation they choose, and that each kernel lowers for a GPU."""

import doctest
import functools
import sys
from types import SimpleNamespace
from typing import get_args

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.ops import case
from benchmarks.shapes import STEPS
from jspec import pallas
from jspec.axes import Impl
from jspec.pallas import (
    _backend,
    _dispatch,
    eagle_step,
    expand_dflash,
    expand_eagle,
    next_token,
    sample_index,
)


def ints(*shape: int) -> jax.Array:
    return jnp.ones(shape, jnp.int32)


OPS = {
    next_token: (dict(sampled=ints(4, 3), discard=ints(4) > 1, backup=ints(4)), {"vocab_size": 9}),
    sample_index: (dict(cu_num_drafts=ints(4), num_valid=ints(4), query_start=ints(5)), {}),
    eagle_step: (
        dict(positions=ints(4), block_table=ints(4, 2), seq_lens=ints(4)),
        dict(page_size=4, max_model_len=9),
    ),
    expand_eagle: (
        dict(
            token_ids=ints(7),
            positions=ints(7),
            next_token=ints(4),
            query_start=ints(5),
            last_index=ints(4),
        ),
        dict(num_slots=2, shift=True, mask_token=7),
    ),
    expand_dflash: (
        dict(
            next_token=ints(4),
            positions=ints(7),
            query_start=ints(5),
            block_table=ints(4, 2),
            num_rejected=ints(4),
        ),
        dict(num_drafts=2, page_size=4, mask_token=7, max_model_len=9),
    ),
}
EVERY_OP = pytest.mark.parametrize("op", OPS, ids=lambda op: op.__name__)


def every_array(*, but: tuple[str, ...] = ()):
    """Parametrizes a test over the arrays of all ops, save those that are named."""
    arrays = [(op, name) for op, (arrays, _) in OPS.items() for name in arrays]
    cases = [case for case in arrays if f"{case[0].__name__}.{case[1]}" not in but]
    return pytest.mark.parametrize("op,name", cases, ids=lambda x: getattr(x, "__name__", x))


@pytest.fixture
def on_an_h200(monkeypatch):
    """Makes the default device look like a GPU to the dispatcher; nothing can run there."""
    device = SimpleNamespace(platform="gpu", device_kind="NVIDIA H200")
    monkeypatch.setattr(_dispatch, "_default_device", lambda: device)


def refused(op, **changed):
    arrays, static = OPS[op]
    return op(**{**arrays, **static, **changed})


@every_array()
def test_a_list_is_refused_with_the_array_to_pass(op, name, as_users_run_it):
    with pytest.raises(TypeError, match=f"{op.__name__}: `{name}` is a list, .*Pass jnp.asarray"):
        refused(op, **{name: [1, 2, 3, 4]})


@every_array()
def test_floats_are_refused_with_the_cast_to_use(op, name, as_users_run_it):
    floats = OPS[op][0][name].astype(jnp.float32)
    with pytest.raises(TypeError, match=f"`{name}` has dtype float32, wanted .*Pass {name}"):
        refused(op, **{name: floats})


@every_array()
def test_bools_and_integers_do_not_stand_in_for_each_other(op, name, as_users_run_it):
    array = OPS[op][0][name]
    other = array.astype(jnp.int32) if array.dtype == bool else array > 1
    with pytest.raises(TypeError, match=f"`{name}` has dtype {other.dtype}, wanted"):
        refused(op, **{name: other})


@every_array(but=("next_token.discard",))
def test_64_bit_integers_are_refused_where_jax_would_cut_them(op, name, as_users_run_it):
    wide = np.asarray(OPS[op][0][name], np.int64)
    with pytest.raises(TypeError, match=f"`{name}` has dtype int64.*jax_enable_x64"):
        refused(op, **{name: wide})


@every_array()
def test_a_wrong_rank_is_refused_with_the_axes_wanted(op, name, as_users_run_it):
    array = OPS[op][0][name]
    with pytest.raises(ValueError, match=rf"`{name}` has shape .*wanted \[.*Reshape it to"):
        refused(op, **{name: array[..., None]})


@every_array(but=("expand_dflash.positions",))  # nothing else has its axis
def test_sizes_that_differ_are_refused_naming_both_arrays(op, name, as_users_run_it):
    with pytest.raises(
        ValueError, match=r"`\w+` has shape .*as `\w+` has it.*Pad or slice"
    ) as error:
        refused(op, **{name: OPS[op][0][name][:-1]})
    assert f"`{name}`" in str(error.value)


@pytest.mark.parametrize("op,name", [(next_token, "sampled"), (eagle_step, "block_table")])
def test_a_table_without_columns_is_refused(op, name, as_users_run_it):
    with pytest.raises(ValueError, match=f"`{name}` has shape .4, 0.*Pass one column or more"):
        refused(op, **{name: ints(4, 0)})


@pytest.mark.parametrize(
    "op,name",
    [
        (next_token, "vocab_size"),
        (eagle_step, "page_size"),
        (eagle_step, "max_model_len"),
        (expand_eagle, "num_slots"),
        (expand_dflash, "num_drafts"),
        (expand_dflash, "page_size"),
        (expand_dflash, "max_model_len"),
    ],
)
def test_a_size_must_be_a_positive_integer(op, name, as_users_run_it):
    with pytest.raises(ValueError, match=f"`{name}` is 0, wanted at least 1. Pass {name}=1"):
        refused(op, **{name: 0})
    with pytest.raises(TypeError, match=f"`{name}` is 2.5, wanted an integer.*Pass a plain int"):
        refused(op, **{name: 2.5})
    with pytest.raises(TypeError, match=f"`{name}` is True"):
        refused(op, **{name: True})


@EVERY_OP
def test_the_example_of_an_op_runs(op):
    results = doctest.testmod(sys.modules[op.__module__])
    assert results.attempted and not results.failed


@EVERY_OP
def test_an_unknown_implementation_is_refused_with_the_known_ones(op, as_users_run_it):
    with pytest.raises(ValueError, match=f"`impl` is 'cuda', wanted one of {get_args(Impl)[0]}"):
        refused(op, impl="cuda")


@EVERY_OP
def test_a_kernel_without_a_gpu_is_refused_with_what_to_pass(op, monkeypatch):
    device = SimpleNamespace(platform="cpu", device_kind="cpu")
    monkeypatch.setattr(_dispatch, "_default_device", lambda: device)
    with pytest.raises(NotImplementedError, match='needs a CUDA GPU.*Pass impl="xla"'):
        refused(op, impl="pallas")


def test_auto_takes_xla_away_from_a_gpu(monkeypatch):
    device = SimpleNamespace(platform="cpu", device_kind="cpu")
    monkeypatch.setattr(_dispatch, "_default_device", lambda: device)
    assert _dispatch.choose("auto", "eagle_step", num_cells=4) == "xla"


def test_auto_takes_the_measured_winner_of_the_device_kind(on_an_h200):
    for op in OPS:
        winner = _dispatch._WINNERS["NVIDIA H200"].get(op.__name__, "xla")
        assert _dispatch.choose("auto", op.__name__, num_cells=4) == winner


def test_auto_takes_xla_where_the_kernel_does_not_fit_or_has_nothing_to_do(on_an_h200):
    assert _dispatch.choose("auto", "eagle_step", num_cells=0) == "xla"
    assert _dispatch.choose("auto", "eagle_step", num_cells=4, fits=False, why="this") == "xla"


def test_measured_winners_name_ops_and_roads_that_exist():
    names = set(pallas.__all__)
    for winners in _dispatch._WINNERS.values():
        assert set(winners) <= names
        assert set(winners.values()) <= {"xla", "triton", "mosaic"}


def test_the_default_device_may_be_a_platform_name():
    with jax.default_device("cpu"):
        assert _dispatch._default_device().platform == "cpu"


def test_a_lowering_is_selected_for_a_block_alone(on_an_h200):
    assert _dispatch.choose("pallas", "eagle_step", num_cells=4) == "triton"
    with _backend.use_lowering("mosaic"):
        assert _dispatch.choose("pallas", "eagle_step", num_cells=4) == "mosaic"
    assert _dispatch.choose("pallas", "eagle_step", num_cells=4) == "triton"


def test_an_unknown_lowering_is_refused(as_users_run_it):
    with pytest.raises(ValueError, match="`name` is 'cuda', wanted 'triton' or 'mosaic'"):
        with _backend.use_lowering("cuda"):
            pass


@EVERY_OP
@pytest.mark.parametrize(
    "lowering,target", [("triton", "__gpu$xla.gpu.triton"), ("mosaic", "mosaic_gpu")]
)
def test_every_kernel_lowers_for_a_gpu_that_is_not_there(op, lowering, target, on_an_h200):
    arrays, static = OPS[op]
    device = jax.sharding.AbstractDevice(device_kind="NVIDIA H200", num_cores=None, platform="gpu")
    mesh = jax.sharding.AbstractMesh((), (), abstract_device=device)
    traced = jax.jit(functools.partial(op, **static, impl="pallas")).trace
    with jax.sharding.use_abstract_mesh(mesh), _backend.use_lowering(lowering):
        module = traced(**arrays).lower(lowering_platforms=("cuda",)).as_text()
    assert module.count("custom_call") == module.count(f"custom_call @{target}") == 1
    assert f"jspec_{op.__name__}" in module


@EVERY_OP
@pytest.mark.parametrize("impl", ["xla", "interpret"])
def test_vmap_runs_several_batches_at_once(op, impl):
    call, args = case(op.__name__, STEPS["b8"])
    batches = [args, [jnp.roll(x, 1) if x.shape == (8,) else x for x in args]]
    stacked = [jnp.stack(x) for x in zip(*batches, strict=True)]
    got = jax.jit(jax.vmap(functools.partial(call, impl=impl)))(*stacked)
    for i, batch in enumerate(batches):
        want = jax.jit(functools.partial(call, impl="xla"))(*batch)
        jax.tree.map(np.testing.assert_array_equal, jax.tree.map(lambda x, i=i: x[i], got), want)


@EVERY_OP
@pytest.mark.parametrize("impl", ["xla", "interpret"])
def test_64_bit_inputs_widen_positions_and_slots_alone(op, impl):
    call, args = case(op.__name__, STEPS["b8"])
    narrow = jax.jit(functools.partial(call, impl="xla"))(*args)
    with jax.enable_x64(True):
        args = [x if x.dtype == bool else x.astype(jnp.int64) for x in args]
        wide = jax.jit(functools.partial(call, impl=impl))(*args)
    jax.tree.map(np.testing.assert_array_equal, wide, narrow)
    fields = getattr(wide, "_fields", ("positions", "slots", "lengths") if op is eagle_step else ())
    for name, x in zip(fields, wide, strict=bool(fields)):
        is_place = any(part in name for part in ("positions", "slots", "lengths"))
        assert x.dtype == (bool if "mask" in name else jnp.int64 if is_place else jnp.int32)
    if not fields:
        assert [x.dtype for x in wide] == [jnp.int32] * 2


@EVERY_OP
def test_mosaic_interpreted_gives_the_same_integers(op, on_an_h200):
    plgpu = pytest.importorskip("jax.experimental.pallas.mosaic_gpu")
    if not hasattr(plgpu, "force_gpu_interpret_mode"):
        pytest.skip("this JAX does not interpret Mosaic GPU kernels")
    call, args = case(op.__name__, STEPS["b8"])
    with plgpu.force_gpu_interpret_mode(), _backend.use_lowering("mosaic"):
        got = jax.jit(functools.partial(call, impl="pallas"))(*args)
    want = jax.jit(functools.partial(call, impl="xla"))(*args)
    jax.tree.map(np.testing.assert_array_equal, got, want)
