"""Thousands of steps through a drafter, and two drafters at the same time."""

import threading

import jax
import numpy as np
import pytest

torch = pytest.importorskip("torch")

import jspec
from tests.support.counting import backend_compiles
from tests.support.torch_forms import resident_bytes
from tests.support.torch_runner import common_attn_metadata, vllm_config
from torch_bridge import EagleProposer

pytestmark = pytest.mark.any_device

DEVICE = torch.device("cuda:0" if jax.default_backend() == "gpu" else "cpu")
PAGE = 4
TABLE = [[3, 8, 5, 1], [6, 2, 0, 4], [7, 9, 10, 11]]


def make(seed=0):
    """Makes a drafter with random weights, compiled for steps of up to four requests."""
    config = jspec.EagleConfig.tiny()
    settings = vllm_config("eagle", config.num_drafts, max_model_len=16, page_size=PAGE)
    proposer = EagleProposer(settings, DEVICE)
    params = jspec.REGISTRY["eagle"].init_params(config, jax.random.key(seed), "float32")
    proposer.set_drafter(config, params)
    for num_rows in (4, 8, 16):
        proposer.dummy_run(num_rows)
    return proposer


def steps(rng, count):
    """Yields steps of one to three requests that each ran one to four rows."""
    for _ in range(count):
        lengths = rng.integers(1, 5, rng.integers(1, 4))
        start = np.concatenate([[0], np.cumsum(lengths)])
        known = lengths + rng.integers(0, 6, len(lengths))
        positions = np.concatenate(
            [np.arange(n - r, n) for n, r in zip(known, lengths, strict=True)]
        )
        table = TABLE[: len(lengths)]
        yield {
            "target_token_ids": torch.tensor(rng.integers(0, 64, start[-1]), dtype=torch.int32),
            "target_positions": torch.tensor(positions),
            "target_hidden_states": torch.tensor(
                rng.normal(size=(start[-1], 32)), dtype=torch.float32
            ),
            "next_token_ids": torch.tensor(rng.integers(0, 64, len(lengths)), dtype=torch.int32),
            "token_indices_to_sample": None,
            "common_attn_metadata": common_attn_metadata(
                start, known, table, page_size=PAGE, device=DEVICE
            ),
        }


def on_device(step):
    return {k: v.to(DEVICE) if isinstance(v, torch.Tensor) else v for k, v in step.items()}


def test_ten_thousand_steps_compile_nothing_and_leave_no_memory_behind(rng):
    proposer = make()
    some = [on_device(step) for step in steps(rng, 50)]
    for step in some:
        proposer.propose(**step)
    before, num_arrays = resident_bytes(), len(jax.live_arrays())
    with backend_compiles() as compiled, torch.inference_mode():
        for i in range(10_000):
            drafts = proposer.propose(**some[i % len(some)])
            drafts.fill_(-1)  # as a runner may
    assert not compiled
    assert len(jax.live_arrays()) <= num_arrays
    assert resident_bytes() - before < 16e6  # kilobytes a call would be tens of millions


def test_two_drafters_in_two_threads_draft_as_they_do_alone():
    sequences = [
        [on_device(step) for step in steps(np.random.default_rng(seed), 60)] for seed in (1, 2)
    ]
    alone = []
    for seed, sequence in enumerate(sequences):
        proposer = make(seed)
        alone.append([proposer.propose(**step).cpu() for step in sequence])
    together = [[], []]
    ready = threading.Barrier(2)

    def run(seed):
        proposer = make(seed)
        ready.wait()
        for step in sequences[seed]:
            together[seed].append(proposer.propose(**step).cpu())

    threads = [threading.Thread(target=run, args=(seed,)) for seed in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for wanted, got in zip(alone, together, strict=True):
        assert len(got) == 60
        assert all(torch.equal(a, b) for a, b in zip(wanted, got, strict=True))
