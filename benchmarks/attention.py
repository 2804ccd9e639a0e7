"""Device time of attention over pages: the kernel and the plain loop, in one run.

    python -m benchmarks.attention --output benchmarks/results/attention-h200.json   # on a GPU
    python -m benchmarks.attention --smoke                                           # anywhere

A program chains calls: the output of each is the query of the next, so that none is eliminated or
merged, and each reads another layer, so that keys and values come from memory and not from a cache
of the device. The slope between a short and a long chain is the time of a call. `GB/s` counts the
keys and values of one layer.
"""

import argparse
import functools
import json
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.ops import PACKAGES, slope
from benchmarks.shapes import command_line
from jspec.pallas import paged_attention

SIZES = ((64, 1024), (64, 8192), (8, 1024), (1, 1024))  # requests, keys of each
QUERY_HEADS, KV_HEADS, HEAD_DIM, PAGE_SIZE = 32, 8, 128, 16
SMOKE_SIZES = ((2, 40),)
ROTATED = 256 * 2**20  # bytes of keys and values that a chain goes through


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--smoke", action="store_true", help="a tiny size: does it run?")
    parser.add_argument("--ragged", action="store_true", help="lengths from an eighth to the whole")
    parser.add_argument("--counts", nargs=2, type=int, help="calls in the two chains")
    parser.add_argument("--output", type=Path, help="JSON file to write")
    arguments = parser.parse_args()
    counts = arguments.counts or ([1, 3] if arguments.smoke else [8, 24])
    impls = ("xla", "interpret" if arguments.smoke else "pallas")
    results: dict[str, Any] = {
        "setting": {
            "command": command_line("attention"),
            "device": jax.devices()[0].device_kind,
            "versions": versions(),
            "chain": counts,
            "shape": f"{QUERY_HEADS} query heads, {KV_HEADS} key/value heads of {HEAD_DIM}, "
            f"pages of {PAGE_SIZE}, bfloat16",
            "unit": "microseconds of device time a call",
        },
        "cells": [],
    }
    for size in SMOKE_SIZES if arguments.smoke else SIZES:
        results["cells"].append(compare(*size, arguments.ragged, impls, counts))
        print(json.dumps(results["cells"][-1]), flush=True)
        if arguments.output:  # after each, so that an interrupted run keeps its results
            arguments.output.write_text(json.dumps(results, indent=2) + "\n")


def compare(
    B: int, context: int, ragged: bool, impls: tuple[str, ...], counts: list[int]
) -> dict[str, Any]:
    """Measures every implementation on B requests of up to `context` keys."""
    rng = np.random.default_rng(0)
    M = -(-context // PAGE_SIZE)
    lengths = rng.integers(context // 8, context + 1, B) if ragged else np.full(B, context)
    layer_bytes = 2 * 2 * B * M * PAGE_SIZE * KV_HEADS * HEAD_DIM
    L = 2 if context <= 64 else max(1, -(-ROTATED // layer_bytes))
    shape = (L, B * M, PAGE_SIZE, KV_HEADS, HEAD_DIM)
    keys = jax.random.split(jax.random.key(0), 3)
    k, v = (jax.random.normal(key, shape, jnp.bfloat16) for key in keys[:2])
    group = QUERY_HEADS // KV_HEADS
    q = jax.random.normal(keys[2], (B, KV_HEADS, group, HEAD_DIM), jnp.bfloat16)
    table = jnp.asarray(rng.permutation(B * M).reshape(B, M), jnp.int32)
    num_seen = jnp.asarray(np.repeat(lengths[:, None], group, axis=1), jnp.int32)
    args = (q, k, v, table, num_seen)
    cell: dict[str, Any] = {"requests": B, "keys": context, "ragged": ragged}
    results = {}
    for impl in impls:
        programs = [jax.jit(functools.partial(chain(impl, L), count)) for count in counts]
        us = slope(programs, args, counts)
        read = 4 * KV_HEADS * HEAD_DIM * int(lengths.sum())
        cell[impl] = {"us": us, "GB/s": read / us / 1e3}
        once = jax.jit(functools.partial(chain(impl, L), 1))
        results[impl] = np.asarray(once(jnp.zeros((), jnp.int32), *args), np.float32)
    wanted = results["xla"]
    error = max(np.abs(got - wanted).max() for got in results.values())
    cell["largest difference over the largest value"] = float(error / np.abs(wanted).max())
    return cell


def chain(impl: Any, num_layers: int) -> Callable[..., jax.Array]:
    """Builds a program of `count` calls, each of which waits for the one before."""

    def program(count, _, q, k, v, table, num_seen):
        for i in range(count):
            attended = paged_attention(
                q, k, v, i % num_layers, table, num_seen, scale=HEAD_DIM**-0.5, impl=impl
            )
            q = (attended.out / attended.total[..., None]).astype(q.dtype)
        return q

    return program


def versions() -> dict[str, str]:
    """Lists the packages that a figure depends on."""
    installed = {package.name for package in metadata.distributions()}
    return {name: metadata.version(name) for name in PACKAGES if name in installed}


if __name__ == "__main__":
    main()
