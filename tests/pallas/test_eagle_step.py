"""eagle_step: recorded cases, plain loops, the limits of a model and of a table, padding."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jspec.axes import PAD_SLOT
from jspec.pallas import eagle_step
from tests.support import recordings
from tests.support.op_runs import BACKENDS, POISON, assert_same, padded, run, to_array
from tests.support.oracles import ops

SIZES = dict(page_size=4, max_model_len=23)


def draw(rng, B: int, M: int):
    """Positions on both sides of every limit, and a table too narrow for some of them."""
    positions = rng.integers(0, 26, B)
    return positions, rng.integers(0, 50, (B, M)), positions + rng.integers(0, 3, B)


@pytest.mark.parametrize("road", BACKENDS)
@recordings.each_case("eagle_step_slot_mapping")
def test_every_recorded_case_comes_out_exactly(road, case):
    _, given, want, scalars = case
    B = len(given["positions"])
    num_rows = scalars["input_batch_size"] or B
    family = "eagle_step_slot_mapping"  # padded alike, so that few kernels are compiled
    most = recordings.largest(family, "in.positions") + 2
    widest = recordings.largest(family, "in.block_table", axis=1)
    table = given["block_table"][:, : scalars["block_table_cols"]]
    num_steps = scalars["steps"] or 1
    last = given["positions"].max() + num_steps
    is_narrow = last // scalars["block_size"] >= table.shape[1]
    if not is_narrow:  # as wide as the others; a narrow one stays, as its last page answers
        table = np.pad(table, [(0, 0), (0, widest - table.shape[1])], constant_values=POISON)
    table = padded(table, most, table.shape[1])
    positions, seq_lens = padded(given["positions"], most), padded(given["seq_lens"], most)
    sizes = dict(page_size=scalars["block_size"], max_model_len=scalars["max_model_len"])
    for step in range(num_steps):
        positions, slots, seq_lens = run(
            eagle_step, road, positions, table, seq_lens, num_rows=most + 8, **sizes, eager=True
        )
        now = {name: x[step] if scalars["steps"] else x for name, x in want.items()}
        np.testing.assert_array_equal(positions[:B], now["clamped_positions"])
        np.testing.assert_array_equal(slots[:B], now["slot_mapping"][:B])
        np.testing.assert_array_equal(seq_lens[:B], now["seq_lens"])
        assert (now["slot_mapping"][B:num_rows] == PAD_SLOT).all()
        assert (slots[most:] == PAD_SLOT).all()


@pytest.mark.parametrize("road", BACKENDS)
def test_slot_0_is_a_slot_like_any_other(road):
    table = [[3, 0, 5], [8, 9, 2]]
    got = run(eagle_step, road, [15, 31], table, [16, 32], page_size=16, max_model_len=40)
    assert_same(got, ([16, 32], [0, 32], [17, 33]))


@pytest.mark.parametrize("road", BACKENDS)
def test_a_page_id_whose_slots_would_wrap_around_has_none(road):
    table = [[3, 2**30], [2**31 - 1, 9], [2**27, 2**27 - 1]]
    got = run(eagle_step, road, [15, 3, 15], table, [16, 4, 16], page_size=16, max_model_len=40)
    assert_same(got, ([16, 4, 16], [PAD_SLOT, PAD_SLOT, PAD_SLOT], [17, 5, 17]))


@pytest.mark.parametrize("road", BACKENDS)
@pytest.mark.parametrize("B,M,num_rows", [(1, 1, 1), (5, 2, 8), (130, 7, 200)])
def test_any_size_matches_the_loop(road, B, M, num_rows, rng):
    args = draw(rng, B, M)
    want = ops.eagle_step(*args, **SIZES, num_rows=num_rows)
    assert_same(run(eagle_step, road, *args, **SIZES, num_rows=num_rows), want)


@pytest.mark.parametrize("road", BACKENDS)
@given(data=st.data())
def test_any_contents_match_the_loop(road, data):
    positions = data.draw(st.lists(st.integers(-1, 24), min_size=5, max_size=5))
    pages = st.lists(st.integers(-1, 9), min_size=3, max_size=3)
    table = data.draw(st.lists(pages, min_size=5, max_size=5))
    seq_lens = data.draw(st.lists(st.integers(0, 30), min_size=5, max_size=5))
    want = ops.eagle_step(positions, table, seq_lens, **SIZES)
    assert_same(run(eagle_step, road, positions, table, seq_lens, **SIZES), want)


@pytest.mark.parametrize("road", BACKENDS)
@pytest.mark.parametrize("poison", [-1, -(2**31), 2**31 - 1])
def test_a_padded_request_gets_no_slot_whatever_it_holds(road, poison):
    args = [poison, 6], [[poison] * 2, [4, 9]], [poison, 7]
    positions, slots, seq_lens = run(eagle_step, road, *args, **SIZES)
    assert_same((positions, slots, seq_lens), ([0, 7], [PAD_SLOT, 39], [1, 8]))


@pytest.mark.parametrize("road", BACKENDS)
def test_a_page_that_is_pad_has_no_slot(road):
    _, slots, _ = run(eagle_step, road, [2, 3], [[5, -1]] * 2, [3, 4], **SIZES)
    assert slots.tolist() == [23, PAD_SLOT]


@pytest.mark.parametrize("road", BACKENDS)
def test_permuting_the_requests_permutes_the_steps(road, rng):
    args, order = draw(rng, 7, 4), rng.permutation(7)
    moved = run(eagle_step, road, *(x[order] for x in args), **SIZES)
    assert_same(moved, [x[order] for x in run(eagle_step, road, *args, **SIZES)])


@pytest.mark.parametrize("road", BACKENDS)
def test_an_empty_batch_has_padding_slots_alone(road):
    args = np.zeros(0), np.zeros((0, 2)), np.zeros(0)
    positions, slots, seq_lens = run(eagle_step, road, *args, **SIZES, num_rows=3)
    assert positions.shape == seq_lens.shape == (0,)
    assert slots.tolist() == [PAD_SLOT] * 3


@pytest.mark.parametrize("impl", ["xla", "interpret"])
def test_donated_positions_and_lengths_hold_the_next_step(impl, rng):
    positions, table, seq_lens = (to_array(x) for x in draw(rng, 5, 4))
    want = ops.eagle_step(positions.tolist(), table.tolist(), seq_lens.tolist(), **SIZES)
    step = functools.partial(eagle_step, **SIZES, impl=impl)
    got = jax.jit(step, donate_argnums=(0, 2))(positions, table, seq_lens)
    assert positions.is_deleted() and seq_lens.is_deleted()
    assert_same(got, want)


def test_too_few_rows_are_refused():
    args = to_array([1, 2]), to_array([[1], [2]]), to_array([2, 3])
    with pytest.raises(ValueError, match="`num_rows` is 1, wanted at least 2. Pass num_rows=2"):
        eagle_step(*args, **SIZES, num_rows=1)


@pytest.mark.parametrize("road", BACKENDS)
def test_64_bit_positions_reach_slots_past_32_bits(road):
    with jax.enable_x64(True):
        positions, lengths = jnp.array([7, POISON]), jnp.array([8, 9], jnp.int32)
        table = jnp.array([[1, 2**30], [3, 4]], jnp.int32)
        got = run(eagle_step, road, positions, table, lengths, page_size=8, max_model_len=99)
    assert [x.dtype.name for x in got] == ["int64", "int64", "int32"]
    assert_same(got, ([8, 0], [2**33, PAD_SLOT], [9, 1]))
