"""N-gram lookup against a reimplementation of vLLM's algorithm.

    python -m benchmarks.ngram --host --output benchmarks/results/ngram-host.json
    python -m benchmarks.ngram --device --output benchmarks/results/ngram-device.json

Host: the search with numba, and the lists that the original takes and returns in each call. Device:
each implementation of the op, and the original's vectorised torch code where torch is installed.
Turns are interleaved in one process, and medians are compared. `--smoke` runs tiny sizes.
"""

import argparse
import functools
import importlib.metadata
import importlib.util
import itertools
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numba
import numpy as np

from benchmarks.ngram_original import Original, torch_search
from benchmarks.shapes import command_line
from jspec.config import CacheConfig
from jspec.pallas.ngram_match import ngram_match
from jspec.proposers import ngram
from jspec.state import Batch

K, MIN_N, MAX_N, VOCAB = 5, 2, 4, 32_000
STREAM = 50  # calls before the host waits, as in a serving loop
HOST_BOUNDS = [(MIN_N, MAX_N), (5, 5), (1, 20)]
HOST_SIZES = [(128, 4096), (128, 32_768)]
DEVICE_SIZES = [(64, 4096), (64, 32_768), (256, 32_768)]
SMOKE_SIZES = [(4, 256)]
ROTATED_BYTES = 2**28  # histories that calls alternate between: more than fit into a cache
BANDWIDTH = {"NVIDIA H200": 4.3e12}  # bytes a second, reads of a long array


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--host", action="store_true")
    parser.add_argument("--device", action="store_true")
    parser.add_argument("--smoke", action="store_true", help="tiny sizes: does it run?")
    parser.add_argument("--rounds", type=int, default=21, help="turns of each contender")
    parser.add_argument("--output", type=Path, help="JSON file to write")
    arguments = parser.parse_args()
    if not (arguments.host or arguments.device):
        parser.error("pass --host, --device or both")
    results: dict[str, Any] = {"setting": setting()}
    print(json.dumps(results["setting"], indent=2))
    if arguments.host:
        results["host"] = host(SMOKE_SIZES if arguments.smoke else HOST_SIZES, arguments.rounds)
        results["first_call"] = first_call()
    if arguments.device:
        sizes = SMOKE_SIZES if arguments.smoke else DEVICE_SIZES
        results["device"] = device(sizes, arguments.rounds)
    if arguments.output:
        arguments.output.write_text(json.dumps(results, indent=2) + "\n")


def setting() -> dict[str, Any]:
    """Returns the machine, versions and command of the figures."""
    packages = ("jax", "jaxlib", "numpy", "numba", "torch")
    versions = {p: importlib.metadata.version(p) for p in packages if importlib.util.find_spec(p)}
    with open("/proc/cpuinfo") as lines:
        cpu = next((line.split(":")[1].strip() for line in lines if "model name" in line), "?")
    return {
        "command": command_line("ngram"),
        "host": f"{cpu}, {os.cpu_count()} threads",
        "device": jax.devices()[0].device_kind,
        "python": platform.python_version(),
        "versions": versions,
        "device_lookup": {"num_drafts": K, "min_n": MIN_N, "max_n": MAX_N},
    }


def take_turns(rounds: int, contenders: dict[Any, Callable[[], Any]]) -> dict[Any, list[float]]:
    """Returns the sorted microseconds of the turns of each; the first turn is not counted."""
    turns: dict[Any, list[float]] = {name: [] for name in contenders}
    for i in range(rounds + 1):
        for name, call in contenders.items():
            begin = time.perf_counter()
            call()
            if i:
                turns[name].append(1e6 * (time.perf_counter() - begin))
    return {name: sorted(times) for name, times in turns.items()}


def medians(turns: dict[Any, list[float]]) -> dict[Any, float]:
    return {name: statistics.median(times) for name, times in turns.items()}


# On the host.


def contexts(B: int, S: int) -> dict[str, np.ndarray]:
    """Makes token histories: the time of the search depends on how they repeat."""
    rng = np.random.default_rng(0)
    copied = rng.integers(0, VOCAB, (B, S))
    copied[:, -MAX_N:] = copied[:, S // 2 - MAX_N : S // 2]  # the suffix occurs once, half way
    drawn = {
        "random ids": rng.integers(0, VOCAB, (B, S)),
        "as frequent as words": np.minimum(rng.zipf(1.3, (B, S)), VOCAB),
        "copied": copied,
        "three ids": rng.integers(0, 3, (B, S)),
        "one id": np.ones((B, S)),
    }
    return {name: np.ascontiguousarray(x, np.int32) for name, x in drawn.items()}


def last_step(token_ids: np.ndarray) -> Batch:
    """The step in which the newest token of each history was sampled."""
    B, S = token_ids.shape
    rows = np.arange(B, dtype=np.int32)
    ones = np.ones(B, np.int32)
    return Batch(
        token_ids=np.ascontiguousarray(token_ids[:, -2]),
        positions=(S - 2) * ones,
        query_start=np.arange(B + 1, dtype=np.int32),
        seq_lens=(S - 1) * ones,
        block_table=np.zeros((B, 1), np.int32),
        num_drafts=0 * ones,
        request_slot=rows,
        backup_token=-ones,
        discard=np.zeros(B, bool),
        next_token=np.ascontiguousarray(token_ids[:, -1]),
        last_index=rows,
        num_valid=ones,
        num_rejected=0 * ones,
    )


def host(sizes: list[tuple[int, int]], rounds: int) -> list[dict[str, Any]]:
    """Compares the search of one step with the original's, and the whole drafter with it."""
    warnings.simplefilter("ignore", numba.NumbaPendingDeprecationWarning)  # a list as argument
    rows = []
    for (B, S), bounds in itertools.product(sizes, HOST_BOUNDS):
        for name, token_ids in contexts(B, S).items():
            calls = host_calls(token_ids, bounds)
            wanted = calls["original"]()
            for threads in range(1, min(2, numba.config.NUMBA_NUM_THREADS) + 1):
                numba.set_num_threads(threads)
                for ours in ("search", "drafter"):
                    assert as_lists(*calls[ours]()) == wanted, f"{ours}: not the original's drafts"
                turns = take_turns(rounds, calls)
                median, best = medians(turns), {who: times[0] for who, times in turns.items()}
                row: dict[str, Any] = {
                    "requests": B,
                    "tokens": S,
                    "bounds": bounds,
                    "contexts": name,
                    "threads": threads,
                    "median_us": median,
                    "best_us": best,
                }
                for ours in ("search", "drafter"):
                    row[f"original_over_{ours}"] = {
                        "medians": median["original"] / median[ours],
                        "bests": best["original"] / best[ours],
                    }
                rows.append(row)
                print(f"{B} x {S}, n {bounds}, {name}, {threads} threads: ", end="")
                print(", ".join(f"{n} {median[n]:.0f} (best {best[n]:.0f})" for n in calls), "us")
    return rows


def host_calls(token_ids: np.ndarray, bounds: tuple[int, int]) -> dict[str, Callable[[], Any]]:
    """Makes the functions that are compared, each of which drafts one step of these histories."""
    B, S = token_ids.shape
    limit = S + K
    original = Original(B, limit, bounds, K)
    config = ngram.NgramConfig(
        num_drafts=K, prompt_lookup_min=bounds[0], prompt_lookup_max=bounds[1]
    )
    memory = ngram.init(config, None, CacheConfig(num_pages=1, max_model_len=limit), B)
    memory.history[:, :S] = token_ids
    lengths = np.full(B, S, np.int32)
    batch = last_step(token_ids)
    sampled = batch.next_token[:, None].tolist()

    def search():
        return ngram.propose_batch(
            memory.history,
            lengths,
            num_drafts=K,
            min_n=bounds[0],
            max_n=bounds[1],
            max_model_len=limit,
        )

    def drafter():
        drafts = ngram.propose(config, None, memory, batch, config.num_drafts)[1]
        return drafts.tokens, drafts.num_drafts

    return {
        "original": lambda: original.propose(sampled, lengths, memory.history),
        "search": search,
        "drafter": drafter,
    }


def as_lists(tokens: np.ndarray, counts: np.ndarray) -> list[list[int]]:
    return [row[:count].tolist() for row, count in zip(tokens, counts, strict=True)]


_FIRST_CALL = """
import time
import numpy as np
import jspec
from benchmarks.ngram import last_step
from jspec.proposers import ngram

batch = last_step(np.ones((4, 64), np.int32))
cache = jspec.CacheConfig(num_pages=1, max_model_len=128)
ends = [time.perf_counter()]
state = jspec.init(jspec.NgramConfig(num_drafts=5), cache=cache, max_requests=4)
ends.append(time.perf_counter())
for _ in range(4):
    jspec.propose(state, batch)
    ends.append(time.perf_counter())
searches = ngram._record, ngram._search_serially, ngram._search_in_parallel
compiled = sum(sum(search.stats.cache_misses.values()) for search in searches)
assert all(len(search.signatures) == 1 for search in searches)
print(ends[1] - ends[0], ends[2] - ends[1], ends[5] - ends[4], compiled)
"""


def first_call() -> dict[str, dict[str, float]]:
    """Times `init` and the first calls of fresh processes: nothing cached on disk, then cached."""
    results = {}
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, "NUMBA_CACHE_DIR": folder, "JAX_PLATFORMS": "cpu"}
        for name in ("nothing cached", "cached on disk"):
            command = [sys.executable, "-c", _FIRST_CALL]
            out = subprocess.run(
                command, env=environment, check=True, capture_output=True, text=True
            ).stdout
            init, first, later, compiled = map(float, out.split())
            results[name] = {
                "functions_compiled": compiled,
                "init_s": init,
                "first_call_us": 1e6 * first,
                "fourth_call_us": 1e6 * later,
            }
            print(
                f"{name}: init {init:.2f} s ({compiled:.0f} functions compiled), then the first "
                f"call {1e6 * first:.0f} us, the fourth {1e6 * later:.0f} us"
            )
    return results


# On the device.


def device(sizes: list[tuple[int, int]], rounds: int) -> list[dict[str, Any]]:
    """Times each implementation of the op: a call that is waited for, one of several asynchronous
    calls, and the device time of one call in a chain inside one executable."""
    on_gpu = jax.devices()[0].platform == "gpu"
    kernel = "pallas" if on_gpu else "interpret"
    impls = ["xla", kernel]
    results = []
    for B, S in sizes:
        copies = max(2, ROTATED_BYTES // (B * S * 4)) if on_gpu else 2
        histories = contexts(B, S)["copied"]
        table = np.concatenate([histories + np.int32(i) for i in range(copies)])  # [copies * B, S]
        lengths = np.full(B, S, np.int32)
        wanted = ngram.propose_batch(
            table[:B], lengths, num_drafts=K, min_n=MIN_N, max_n=MAX_N, max_model_len=S + K
        )
        args = jax.device_put((table, lengths, np.ones(B, bool)))
        rows = [jax.device_put(np.arange(B, dtype=np.int32) + i * B) for i in range(copies)]

        calls, chains = {"empty": rotate(_empty, args, rows)}, {}
        streams = {"empty": rotate(_empty, args, rows, STREAM)}
        for impl in impls:
            op = functools.partial(ngram_match, min_n=MIN_N, max_n=MAX_N, num_drafts=K, impl=impl)
            once = jax.jit(op)
            for got, want in zip(once(*args, rows[0]), wanted, strict=True):
                np.testing.assert_array_equal(got, want)
            calls[impl] = rotate(once, args, rows)
            streams[impl] = rotate(once, args, rows, STREAM)
            for length in (8, 40) if on_gpu else (1, 2):
                chains[impl, length] = chain(op, length, B, copies, args)
        if importlib.util.find_spec("torch"):
            original, graph = original_on_device(table, B, copies, wanted)
            calls["torch"], streams["torch"] = original(1), original(STREAM)
            if on_gpu:
                chains |= {("torch", length): graph(length) for length in (8, 40)}

        wall = medians(take_turns(rounds * 10 if on_gpu else rounds, calls))
        stream = medians(take_turns(rounds, streams))
        stream = {name: time / STREAM for name, time in stream.items()}
        chained = medians(take_turns(rounds, chains))
        short, long = sorted({length for _, length in chains})
        floor = BANDWIDTH.get(jax.devices()[0].device_kind)
        row: dict[str, Any] = {
            "B": B,
            "S": S,
            "wall_us": wall,
            "stream_us": stream,
            "device_us": {
                impl: (chained[impl, long] - chained[impl, short]) / (long - short)
                for impl in {name: None for name, _ in chains}
            },
            "floor_us": 1e6 * B * S * 4 / floor if floor else None,
        }
        if "torch" in wall:
            row["torch_over"] = {impl: wall["torch"] / wall[impl] for impl in impls}
            row["torch_over_in_a_stream"] = {i: stream["torch"] / stream[i] for i in impls}
            if on_gpu:
                device_us = row["device_us"]
                row["torch_over_on_the_device"] = {
                    i: device_us["torch"] / device_us[i] for i in impls
                }
        results.append(row)
        print(f"{B} x {S}", json.dumps(row, indent=2), flush=True)
    return results


@jax.jit
def _empty(token_ids, seq_lens, mask, rows):
    """Times a call that does nothing: the lower bound of a blocked call."""
    return seq_lens + rows, seq_lens


def rotate(call, args, rows, calls: int = 1) -> Callable[[], Any]:
    """Makes calls and waits; every call reads other histories, so that they are in no cache."""
    turn = iter(range(10**9))
    return lambda: jax.block_until_ready(
        [call(*args, rows[next(turn) % len(rows)]) for _ in range(calls)]
    )


def chain(op, length: int, B: int, copies: int, args) -> Callable[[], Any]:
    """One executable of calls in a row, each of which waits for the one before."""

    @jax.jit
    def run(token_ids, seq_lens, mask):
        for i in range(length):
            rows = jnp.arange(B, dtype=jnp.int32) + (i % copies) * B
            drafts, num_valid = op(token_ids, seq_lens, mask, rows)
            # Adds zero, which the compiler cannot know.
            seq_lens = seq_lens + jnp.minimum(num_valid, 0) + jnp.minimum(drafts[:, 0] + 1, 0)
        return seq_lens

    return lambda: jax.block_until_ready(run(*args))


def original_on_device(table: np.ndarray, B: int, copies: int, wanted) -> tuple[Callable, Callable]:
    """The original's vectorised search in torch, compiled: see `benchmarks.ngram_original`.

    Returns two functions from a number of calls to a turn that makes them and waits: one by one,
    and, on a GPU, replayed from a graph, which leaves the device's own time.
    """
    import torch

    where = torch.device("cuda" if torch.cuda.is_available() else "cpu")

    compiled = torch.compile(torch_search(MIN_N, MAX_N, K))
    tables = [torch.as_tensor(table[i * B : (i + 1) * B]).to(where) for i in range(copies)]
    seq_lens = torch.full((B,), table.shape[1], dtype=torch.int64, device=where)
    mask = torch.ones(B, dtype=torch.bool, device=where)
    with torch.inference_mode():  # as in the turns: another mode would compile again
        found = [compiled(history, seq_lens, mask) for history in tables][0]
    for got, want in zip(found, wanted, strict=True):
        np.testing.assert_array_equal(got.cpu().numpy(), want)
    turn = iter(range(10**9))

    def make(calls: int):
        def call():
            with torch.inference_mode():
                for _ in range(calls):
                    compiled(tables[next(turn) % copies], seq_lens, mask)
                if where.type == "cuda":
                    torch.cuda.synchronize()

        return call

    def make_graph(calls: int):
        graph = torch.cuda.CUDAGraph()
        with torch.inference_mode(), torch.cuda.graph(graph):
            for i in range(calls):
                compiled(tables[i % copies], seq_lens, mask)

        def replay():
            graph.replay()
            torch.cuda.synchronize()

        return replay

    return make, make_graph


if __name__ == "__main__":
    main()
