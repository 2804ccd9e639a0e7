"""`torch_bridge.ops`, every function: memory, padding, threads, compilations."""

import doctest
import importlib
import os
import subprocess
import sys
import threading

import jax
import numpy as np
import pytest

torch = pytest.importorskip("torch")

from tests.support.counting import backend_compiles
from tests.support.op_runs import POISON
from tests.support.torch_golden import device, longs, metadata, strided
from tests.support.torch_runner import no_waits
from torch_bridge import ops

pytestmark = pytest.mark.any_device


def calls(shift: int = 0, size: int = 3, as_given=lambda tensor: tensor):
    """Makes a call of each function, of `size` requests of 2 rows: name to (call, its tensors)."""
    B, dev = size, device()
    start = torch.arange(B + 1, dtype=torch.int32, device=dev) * 2
    cad = metadata(start.cpu(), np.full(B, 6), np.arange(3 * B).reshape(B, 3) + shift)
    cad.query_start_loc = as_given(cad.query_start_loc)
    cad.seq_lens, cad.block_table_tensor = as_given(cad.seq_lens), as_given(cad.block_table_tensor)
    g = as_given
    per_request = torch.arange(B, dtype=torch.int32, device=dev) + shift
    rows = torch.arange(2 * B, dtype=torch.int32, device=dev) + shift
    ids, positions = g(rows), g((rows % 2 + 4).long())
    nexts, ones = g(per_request + 100), g(per_request * 0 + 1)
    mask = torch.arange(B, device=dev) % 2 == 1
    longer = g(torch.arange(3 * B, device=dev) % 2 == 1)
    hidden = g(rows[:, None] + torch.tensor([0.25, 0.5], device=dev))
    vector = g(torch.tensor([7.0, 8.0], device=dev))
    sampled = g(torch.stack([per_request, per_request * 0 - 1], 1))
    more = g((torch.arange(3 * B, device=dev) % 3 + 4).long())

    def step():
        outputs = [torch.zeros(n, dtype=torch.int64, device=dev) for n in (B, B + 2)]
        lengths = torch.full((B,), 6, dtype=torch.int32, device=dev)
        ops.eagle_step_update_slot_mapping_and_metadata(
            positions[::2], cad.block_table_tensor, lengths, 4, 64, *outputs, B + 2
        )
        return *outputs, lengths

    def change():
        computed, accepted = per_request * 10, per_request + 5
        ops.update_num_computed_tokens_for_batch_change(
            computed, accepted, g(per_request - shift - 1), ones, ones, nexts
        )
        return computed, accepted

    def pass_(**keywords):
        reads = keywords["pass_hidden_states_to_model"]
        rows_ = ops.set_inputs_first_pass(
            ids,
            nexts,
            positions,
            hidden if reads else None,
            None,
            cad,
            ones,
            block_size=4,
            max_model_len=64,
            parallel_drafting_token_id=77,
            parallel_drafting_hidden_state_tensor=vector,
            **keywords,
        )
        new = [] if rows_.cad is cad else [rows_.cad.slot_mapping, rows_.cad.seq_lens]
        return [*rows_[1:2], *rows_[3:], *new]

    return {
        "step": step,
        "sample": lambda: ops.eagle_prepare_inputs_padded(
            g(per_request * 0 + start[1:]), ones, cad.query_start_loc
        ),
        "next": lambda: ops.eagle_prepare_next_token_padded(sampled, g(mask), nexts, 1000),
        "expand": lambda: ops.copy_and_expand_eagle_inputs(
            ids, positions, nexts, cad.query_start_loc, g(start[1:] - 2), 0, 77, 3, True
        ),
        "block": lambda: ops.copy_and_expand_dflash_inputs(
            nexts, positions, cad.query_start_loc, cad.block_table_tensor, ones, 77, 4, 2
        ),
        "slots": lambda: [ops.compute_new_slot_mapping(cad, more, longer, 4, 1, 64)],
        "extend": lambda: [ops.extend_all_queries_by_N(cad, 2, None, more).query_start_loc],
        "change": change,
        "shifted": lambda: pass_(pass_hidden_states_to_model=True, extra_slots_per_request=1),
        "parallel": lambda: pass_(pass_hidden_states_to_model=True, extra_slots_per_request=3),
        "model": lambda: pass_(pass_hidden_states_to_model=False, extra_slots_per_request=1),
        "block_pass": lambda: ops.set_inputs_first_pass_dflash(
            nexts,
            positions,
            cad,
            ones,
            num_speculative_tokens=2,
            parallel_drafting_token_id=77,
            block_size=4,
        )[3:],
    }


NAMES = list(calls())


def taken(outputs) -> list:
    return [x.tolist() for x in outputs if x is not None]


@pytest.mark.parametrize("name", NAMES)
def test_strided_tensors_give_what_contiguous_ones_do(name):
    assert not strided(longs(1, 2, 3)).is_contiguous()
    assert taken(calls(as_given=strided)[name]()) == taken(calls()[name]())


@pytest.mark.parametrize("name", NAMES)
def test_what_was_in_memory_before_reaches_no_result(name):
    want = taken(calls()[name]())
    calls(shift=POISON, size=4)[name]()  # the same bucket, full
    assert taken(calls()[name]()) == want


@pytest.mark.parametrize("name", NAMES)
def test_results_belong_to_the_caller(name):
    outputs = [x for x in calls()[name]() if x is not None]
    want = taken(outputs)
    kept = [x.clone() for x in outputs]
    for x in calls()[name]():
        if x is not None:
            x.fill_(1)  # into the next call's results
    assert taken(calls()[name]()) == want
    assert all(torch.equal(x, y) for x, y in zip(outputs, kept, strict=True))
    for i, x in enumerate(outputs):  # and results do not overlap one another
        x.fill_(0)
        others = outputs[:i] + outputs[i + 1 :], kept[:i] + kept[i + 1 :]
        assert all(torch.equal(a, b) for a, b in zip(*others, strict=True))
        x.copy_(kept[i])


@pytest.mark.parametrize("name", NAMES)
def test_inference_mode_changes_nothing_and_leaves_writable_results(name):
    want = taken(calls()[name]())
    with torch.inference_mode():
        outputs = calls()[name]()
    assert taken(outputs) == want
    if name not in ("step", "change"):  # these write to what the caller made
        for x in outputs:
            if x is not None:
                x.fill_(0)
    assert taken(calls()[name]()) == want


@pytest.mark.parametrize("name", NAMES)
def test_a_batch_that_changes_compiles_nothing_in_its_bucket(name):
    calls(size=8)[name]()
    with backend_compiles() as compiled:
        for size in (5, 7, 6, 8):
            calls(size=size)[name]()
    assert compiled == []


@pytest.mark.parametrize("name", NAMES)
def test_no_width_or_layout_of_an_integer_compiles(name):
    def wide(tensor):
        return tensor.long() if tensor.dtype == torch.int32 else tensor

    def narrow(tensor):
        return tensor.int() if tensor.dtype == torch.int64 else tensor

    want = taken(calls()[name]())
    with backend_compiles() as compiled:
        for form in (wide, narrow):
            assert taken(calls(as_given=form)[name]()) == want
            assert taken(calls(as_given=lambda x, form=form: strided(form(x)))[name]()) == want
    assert compiled == []


@pytest.mark.parametrize("name", NAMES)
def test_an_empty_batch_has_empty_results(name):
    outputs = [x for x in calls(size=0)[name]() if x is not None]
    sizes = [x.numel() for x in outputs]
    if name == "step":
        assert (sizes, outputs[1].tolist()) == ([0, 2, 0], [-1, -1])
    elif name == "extend":
        assert outputs[0].tolist() == [0]
    else:
        assert set(sizes) == {0}


@pytest.mark.parametrize("name", NAMES)
def test_wide_integers_in_jax_change_nothing(name):
    want = calls()[name]()
    with jax.enable_x64(True):
        got = calls()[name]()
    assert taken(got) == taken(want)
    assert [getattr(x, "dtype", None) for x in got] == [getattr(x, "dtype", None) for x in want]


def test_two_threads_keep_their_memory_apart():
    want = {shift: taken(calls(shift=shift)["expand"]()) for shift in (0, 1000)}
    wrong, barrier = [], threading.Barrier(2)

    def work(shift):
        call = calls(shift=shift)["expand"]
        barrier.wait()
        for _ in range(200):
            if taken(call()) != want[shift]:
                wrong.append(shift)

    threads = [threading.Thread(target=work, args=(shift,)) for shift in want]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


_FORK = """
import os, torch
from torch_bridge import ops

def step():
    one = torch.ones(1, dtype=torch.int32)
    start = torch.tensor([0, 2])
    rows = torch.tensor([8, 9])
    return ops.copy_and_expand_eagle_inputs(rows, rows, one, start, one, 0, 7, 1, True)

assert step().input_ids.tolist() == [9, 1]
child = os.fork()
if child == 0:
    try:
        step()
    except RuntimeError as error:
        os._exit(7 if "spawn" in str(error) else 1)
    os._exit(2)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def test_a_forked_child_is_told_so_in_place_of_hanging():
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-W", "ignore", "-c", _FORK]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.stdout == "7\n", done.stderr


@pytest.mark.parametrize("module", ["batch", "expand", "kernels"])
def test_the_examples_of_the_docstrings_run(module):
    results = doctest.testmod(importlib.import_module(f"torch_bridge.ops.{module}"))
    assert results.attempted and not results.failed


@pytest.mark.gpu
@pytest.mark.parametrize("name", NAMES)
def test_nothing_waits_for_the_device(name):
    assert jax.default_backend() == "gpu"
    call = calls()[name]
    want = taken(call())
    torch.cuda.synchronize()
    with no_waits():
        outputs = call()
    assert taken(outputs) == want
