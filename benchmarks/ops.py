"""Device time of the index ops: plain XLA and each lowering of the kernel, in one run.

    python -m benchmarks.ops --output benchmarks/results/ops-h200.json     # on a GPU
    python -m benchmarks.ops --smoke                                       # anywhere

A program chains calls: each output feeds a small fusion (the link), which feeds the next call, so
that none is eliminated, merged or reordered. The slope between a short and a long chain, less the
slope of a chain of links alone, is the time of a call. Each op and implementation runs in its own
process, so that a failure loses only its own cells.
"""

import argparse
import contextlib
import functools
import importlib.metadata
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from benchmarks.shapes import STEPS, StepShape, command_line
from jspec import pallas
from jspec.pallas import _backend

OPS = ("next_token", "sample_index", "eagle_step", "expand_eagle", "expand_dflash")
GPU_IMPLS = ("xla", "triton", "mosaic")
ANY_IMPLS = ("xla", "interpret")
UNROLLED = 20  # calls in the body of the loop: long compared with the loop's own overhead
PACKAGES = ("jax", "jaxlib", "jax-cuda12-plugin", "jax-cuda13-plugin", "numpy")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--smoke", action="store_true", help="short chains of XLA and interpreter")
    parser.add_argument("--ops", nargs="+", choices=OPS, default=list(OPS))
    parser.add_argument("--steps", nargs="+", choices=list(STEPS), help="shapes (default: all)")
    parser.add_argument("--counts", nargs=2, type=int, help="calls in the two chains")
    parser.add_argument("--limit", type=int, default=180, help="seconds for one implementation")
    parser.add_argument("--output", type=Path, help="JSON file to write")
    parser.add_argument("--worker", nargs=2, metavar=("OP", "IMPL"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    arguments.steps = arguments.steps or (["b1"] if arguments.smoke else list(STEPS))
    arguments.counts = arguments.counts or ([1, 3] if arguments.smoke else [100, 600])
    if arguments.worker:
        print(json.dumps(work(*arguments.worker, arguments)))
        return

    results: dict[str, Any] = {"setting": setting(arguments), "ops": {}}
    for op in arguments.ops:
        for variant in ANY_IMPLS if arguments.smoke else GPU_IMPLS:
            results["ops"].setdefault(op, {})[variant] = run_worker(op, variant, arguments)
            print(f"{op} {variant}: done", file=sys.stderr)
            if arguments.output:  # after each, so that an interrupted run keeps its results
                arguments.output.parent.mkdir(parents=True, exist_ok=True)
                arguments.output.write_text(json.dumps(results, indent=2) + "\n")
    print(table(results, arguments.steps))


def setting(arguments: argparse.Namespace) -> dict[str, Any]:
    """Returns device, versions and shapes."""
    versions = {}
    for package in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    return {
        "command": command_line("ops"),
        "versions": versions,
        "chain": arguments.counts,
        "shapes": {name: vars(STEPS[name]) for name in arguments.steps},
        "unit": "microseconds of device time a call",
    }


def run_worker(op: str, variant: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Measures one implementation in a process of its own; an error is returned as a result."""
    command = [sys.executable, "-m", "benchmarks.ops", "--worker", op, variant]
    command += ["--steps", *arguments.steps, "--counts", *map(str, arguments.counts)]
    # Unfiltered, so that a traceback ends with the exception itself.
    settings = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", "JAX_TRACEBACK_FILTERING": "off"}
    try:
        done = subprocess.run(
            command,
            env=os.environ | settings,
            capture_output=True,
            text=True,
            timeout=arguments.limit,
        )
    except subprocess.TimeoutExpired:
        return {"error": f"no result within {arguments.limit} s"}
    if done.returncode:
        errors = re.findall(r"^[\w.]+(?:Error|Exception): .*", done.stderr, re.MULTILINE)
        error = errors[-1] if errors else f"exit code {done.returncode}"
        return {"error": error, "stderr": done.stderr[-4000:]}
    return json.loads(done.stdout.splitlines()[-1])


def work(op: str, variant: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Measures one implementation at each shape, after comparing it with plain XLA."""
    device = jax.devices()[0]
    cells = {}
    for name in arguments.steps:
        function, args = case(op, STEPS[name])
        impl = "pallas" if variant in ("triton", "mosaic") else variant
        call = functools.partial(function, impl=impl)
        with _backend.use_lowering(variant) if impl == "pallas" else contextlib.nullcontext():
            call = jax.jit(call)  # traced and lowered once for a whole chain
            got = call(*args)
            want = jax.jit(functools.partial(function, impl="xla"))(*args)
            programs = [jax.jit(chain(call, count)) for count in arguments.counts]
            links = [jax.jit(links_alone(want, count)) for count in arguments.counts]
            total, link = (slope(both, args, arguments.counts) for both in (programs, links))
            cells[name] = {
                "us": total - link,
                "us_with_link": total,
                "same_as_xla": all(
                    np.array_equal(x, y)
                    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True)
                ),
            }
            if device.platform == "gpu":
                cells[name]["launches"] = launches(programs[0], args)
    return {"device": device.device_kind, "cells": cells}


def case(op: str, shape: StepShape) -> tuple[Callable, tuple[jax.Array, ...]]:
    """Makes a random step: an op with its static arguments, and its arrays."""
    rng = np.random.default_rng(0)
    B, W, T = shape.requests, shape.width, shape.rows
    kept = rng.integers(1, W + 1, B)
    query_start = np.arange(B + 1) * W
    start = rng.integers(0, shape.max_model_len - 2 * W, B)
    paged = dict(page_size=shape.page_size, max_model_len=shape.max_model_len)
    arrays = {
        "sampled": np.where(np.arange(W) < kept[:, None], rng.integers(0, 32_000, (B, W)), -1),
        "discard": rng.random(B) < 0.1,
        "ids": rng.integers(0, 32_000, T),
        "next": rng.integers(0, 32_000, B),
        "kept": kept,
        "cu_num_drafts": np.arange(1, B + 1) * shape.num_drafts,
        "query_start": query_start,
        "last_index": query_start[:-1] + kept - 1,
        "num_rejected": W - kept,
        "positions": (start[:, None] + np.arange(W)).reshape(-1),
        "position": start,
        "length": start + 1,
        "table": rng.permutation(B * shape.pages).reshape(B, shape.pages),
    }
    names, static = {
        "next_token": (("sampled", "discard", "next"), dict(vocab_size=shape.vocab_size)),
        "sample_index": (("cu_num_drafts", "kept", "query_start"), {}),
        "eagle_step": (("position", "table", "length"), paged),
        "expand_eagle": (
            ("ids", "positions", "next", "query_start", "last_index"),
            dict(num_slots=shape.num_drafts, shift=True, mask_token=7),
        ),
        "expand_dflash": (
            ("next", "positions", "query_start", "table", "num_rejected"),
            dict(num_drafts=shape.num_drafts, mask_token=7, **paged),
        ),
    }[op]
    args = [arrays[name] for name in names]
    args = tuple(jnp.asarray(x if x.dtype == bool else x.astype(np.int32)) for x in args)
    return functools.partial(getattr(pallas, op), **static), args


def chain(call: Callable, count: int) -> Callable:
    """Builds a program of `count` calls, each of which waits for all results of the one before."""

    def step(zero, args):
        args, outputs = lax.optimization_barrier((args, tuple(call(*args))))
        args, _ = lax.optimization_barrier((link(zero, args, outputs), outputs))
        return args

    return repeat(step, count)


def links_alone(outputs: Any, count: int) -> Callable:
    """Builds the same program without the calls."""

    def step(zero, args):
        args, current = lax.optimization_barrier((args, tuple(outputs)))
        return link(zero, args, current)

    return repeat(step, count)


def repeat(step: Callable, count: int) -> Callable:
    """Runs a step `count` times: a loop of known length over a short unrolled body."""
    unrolled = min(count, UNROLLED)

    def body(zero, args):
        for _ in range(unrolled):
            args = step(zero, args)
        return args

    def program(zero, *args):
        return lax.fori_loop(0, count // unrolled, lambda _, args: body(zero, args), args)

    return program


def link(zero: jax.Array, args: tuple, outputs: tuple) -> tuple:
    """Returns the arguments unchanged, in a way that only the value 0 of `zero` makes true."""
    total = zero * sum(x.reshape(-1)[0].astype(jnp.int32) for x in outputs)
    return tuple(x ^ (total != 0) if x.dtype == bool else x + total for x in args)


def slope(programs: list[Callable], args: tuple, counts: list[int]) -> float:
    """Times both programs back to back; returns microseconds a call."""
    short, long = (seconds(program, args) for program in programs)
    return (long - short) / (counts[1] - counts[0]) * 1e6


def seconds(program: Callable, args: tuple, *, repeats: int = 25, calls: int = 5) -> float:
    """Returns the best time of a program over batches of unblocked calls."""
    zero = jnp.zeros((), jnp.int32)
    jax.block_until_ready([program(zero, *args) for _ in range(3)])
    times = []
    for _ in range(repeats):
        begin = time.perf_counter()
        jax.block_until_ready([program(zero, *args) for _ in range(calls)])
        times.append((time.perf_counter() - begin) / calls)
    return min(times)


def launches(program: Callable, args: tuple) -> dict[str, int]:
    """Profiles one call and counts what the host launched: graphs, and kernels outside of them."""
    zero = jnp.zeros((), jnp.int32)
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            jax.block_until_ready(program(zero, *args))
        [path] = Path(folder).rglob("*.xplane.pb")
        planes = list(jax.profiler.ProfileData.from_file(str(path)).planes)
        names = Counter(event.name for p in planes for line in p.lines for event in line.events)
    return {
        "graphs": sum(n for name, n in names.items() if name.startswith("cuGraphLaunch")),
        "kernels": sum(n for name, n in names.items() if name.startswith("cuLaunchKernel")),
    }


def table(results: dict[str, Any], steps: list[str]) -> str:
    """Formats the results as Markdown."""
    lines = [
        "| op | implementation | " + " | ".join(steps) + " | command buffer |",
        "| --- " * (len(steps) + 3) + "|",
    ]
    for op, variants in results["ops"].items():
        for variant, result in variants.items():
            if "error" in result:
                lines.append(f"| {op} | {variant} | failed: {result['error']} |")
                continue
            cells = [result["cells"][name] for name in steps]
            times = [f"{c['us']:.2f}" if c["same_as_xla"] else "WRONG" for c in cells]
            inside = {describe(cell["launches"]) for cell in cells if "launches" in cell}
            lines.append(
                f"| {op} | {variant} | {' | '.join(times)} | {'; '.join(sorted(inside)) or '-'} |"
            )
    return "\n".join(lines)


def describe(counts: dict[str, int]) -> str:
    """Returns in a word or two where a program's kernels ran."""
    if not counts["graphs"]:
        return f"outside ({counts['kernels']} launches)" if counts["kernels"] else "not traced"
    return "inside" if not counts["kernels"] else f"split ({counts['graphs']} graphs)"


if __name__ == "__main__":
    main()
