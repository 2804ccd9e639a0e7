"""Suffix decoding against Arctic Inference's C++, call by call and step by step; a long run.

    python -m benchmarks.host --only suffix --original FOLDER

`arctic_inference.suffix_decoding` of version 0.1.2 is imported from FOLDER where it is not
installed. Its source distribution needs torch to build, but this part needs only nanobind: run
CMake in csrc/suffix_decoding, and put the module beside cache.py.

Both caches get the same texts and must give the same drafts. Their turns are interleaved in one
process.
"""

import gc
import importlib
import resource
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.ngram import setting
from benchmarks.shapes import command_line
from jspec.suffix import SuffixDecodingCache
from jspec.suffix import tables as t

DEPTH, VOCAB, STEP = 24, 32_000, 4
PROMPT, OUTPUT = 1024, 512


def about(module: str) -> dict[str, Any]:
    """Returns the machine, versions and command of the figures."""
    about = setting() | {"command": command_line(module)}
    del about["device_lookup"]
    return about


def texts(kind: str, count: int, size: int, seed: int = 0) -> list[np.ndarray]:
    """Makes texts whose parts do not recur, recur in many texts, or recur within each text."""
    rng = np.random.default_rng(seed)
    if kind == "random ids":
        return [rng.integers(0, VOCAB, size).astype(np.int32) for _ in range(count)]
    if kind == "copied prompt":
        halves = [rng.integers(0, VOCAB, size // 2) for _ in range(count)]
        return [np.tile(half, 3)[:size].astype(np.int32) for half in halves]
    phrases = [rng.integers(0, VOCAB, rng.integers(3, 40)) for _ in range(400)]
    made = []
    for _ in range(count):
        parts, length = [], 0
        while length < size:
            chosen = phrases[int(rng.zipf(1.2)) % 400]
            parts.append(chosen if rng.random() < 0.8 else rng.integers(0, VOCAB, 8))
            length += len(parts[-1])
        made.append(np.concatenate(parts)[:size].astype(np.int32))
    return made


def run(original: Path | None, *, smoke: bool, rounds: int) -> dict[str, Any]:
    """Compares the two and returns the figures."""
    if original:
        sys.path.insert(0, str(original))
    arctic = importlib.import_module("arctic_inference.suffix_decoding").SuffixDecodingCache
    count, requests = (3, 4) if smoke else (24, 64)
    results: dict[str, Any] = {}
    for kind in ("random ids", "recurring phrases", "copied prompt"):
        served = texts(kind, count, PROMPT + OUTPUT)
        calls: dict[str, list[dict[str, float]]] = {"jspec": [], "original": []}
        for _ in range(rounds):
            calls["jspec"].append(_calls(SuffixDecodingCache, served))
            calls["original"].append(_calls(arctic, served))
        batches = [texts(kind, requests, PROMPT + OUTPUT, seed=seed) for seed in range(rounds + 1)]
        steps = _serve_both(arctic, batches)
        results[kind] = {
            "us a call": _table(calls),
            f"us a request, step of {requests}": _table(steps),
            "bytes a token": _memory(arctic, texts(kind, 10 if smoke else 400, 1000)),
        }
        print(kind, results[kind], flush=True)
    return results


def _table(runs: dict[str, list[dict[str, float]]]) -> dict[str, dict[str, float]]:
    """Takes medians, and how many times as long the original takes."""
    table = {}
    for what in runs["jspec"][0]:
        medians = {name: statistics.median(r[what] for r in runs[name]) for name in runs}
        ratio = medians["original"] / medians["jspec"]
        table[what] = {k: round(v, 3) for k, v in (medians | {"ratio": ratio}).items()}
    return table


def _memory(arctic: Callable[..., Any], responses: list[np.ndarray]) -> dict[str, float]:
    """Compares the memory of responses; that of the original is its own estimate."""
    caches = SuffixDecodingCache(DEPTH, -1), arctic(DEPTH, -1)
    for cache in caches:
        for req_id, response in enumerate(responses):
            cache.start_request(req_id, [])
            cache.add_active_response(req_id, response)
            cache.stop_request(req_id)
    ours, theirs = caches
    used = ours._forest.used[:, t.LIVE].tolist()
    sizes = {
        "jspec, rows in use": sum(used[kind] * ours._forest[kind][0].nbytes for kind in range(4))
        + used[t.NODES] * ours._forest.chain.itemsize,
        "jspec, tables": ours.num_bytes,
        "original": theirs._global_tree.estimate_memory(),
    }
    return {name: round(int(size) / sum(map(len, responses)), 1) for name, size in sizes.items()}


def _calls(make: Callable[..., Any], served: list[np.ndarray]) -> dict[str, float]:
    """Serves texts one after the other with the public calls; microseconds a call."""
    cache, spent = make(DEPTH, 10_000), dict.fromkeys(("start", "add", "speculate", "stop"), 0.0)
    clock, gained = time.perf_counter, range(PROMPT, PROMPT + OUTPUT, STEP)
    for req_id, text in enumerate(served):
        begin = clock()
        cache.start_request(req_id, text[:PROMPT])
        spent["start"] += clock() - begin
        for at in gained:
            new, context = text[at : at + STEP], text[at + STEP - DEPTH : at + STEP]
            begin = clock()
            cache.add_active_response(req_id, new)
            middle = clock()
            cache.speculate(req_id, context, max_spec_tokens=DEPTH)
            spent["speculate"] += clock() - middle
            spent["add"] += middle - begin
        begin = clock()
        cache.stop_request(req_id)
        spent["stop"] += clock() - begin
    per = {"start": len(served), "stop": len(served)}
    return {k: 1e6 * v / per.get(k, len(served) * len(gained)) for k, v in spent.items()}


def _serve_both(
    arctic: Callable[..., Any], batches: list[list[np.ndarray]]
) -> dict[str, list[dict[str, float]]]:
    """Serves batches with both; the first batch, in which the memory grows, is not counted."""
    caches = {"jspec": SuffixDecodingCache(DEPTH, 64), "original": arctic(DEPTH, 64)}
    steps: dict[str, list[dict[str, float]]] = {name: [] for name in caches}
    for number, batch in enumerate(batches):
        drafts = {}
        for name, step in (("jspec", _step_ours), ("original", _step_original)):
            us, drafts[name] = _serve(caches[name], step, batch, number * len(batch))
            if number:
                steps[name].append({"add and speculate": us})
        if drafts["jspec"] != drafts["original"]:
            raise AssertionError("the drafts differ")
    return steps


def _serve(cache: Any, step: Callable, batch: list[np.ndarray], first_id: int) -> tuple:
    """Simulates a target that accepts drafts equal to the text; returns (us a request, drafts)."""
    known = {first_id + i: PROMPT for i in range(len(batch))}
    text = {first_id + i: tokens for i, tokens in enumerate(batch)}
    drafts: dict[int, list[int]] = {r: [] for r in known}
    spent, rows, found = 0.0, 0, []
    for req_id in known:
        cache.start_request(req_id, text[req_id][:PROMPT])
    while running := [r for r in known if known[r] < len(text[r])]:
        sampled = {}
        for r in running:
            written = text[r][known[r] :].tolist()
            same = (a == b for a, b in zip(drafts[r], written, strict=False))
            accepted = next((i for i, ok in enumerate(same) if not ok), len(drafts[r]))
            sampled[r] = written[: accepted + 1]
            known[r] += len(sampled[r])
        begin = time.perf_counter()
        drafts = step(cache, sampled, known, text)
        spent += time.perf_counter() - begin
        rows += len(sampled)
        found.append(drafts)
    for req_id in known:
        cache.stop_request(req_id)
    return 1e6 * spent / rows, found


def _step_original(cache, sampled, known, text) -> dict[int, list[int]]:
    """Drafts as vLLM's proposer does: one request after the other."""
    drafts = {}
    for req_id, new in sampled.items():
        cache.add_active_response(req_id, new)
        pattern = text[req_id][max(0, known[req_id] - DEPTH) : known[req_id]]
        most = min(DEPTH, PROMPT + OUTPUT - known[req_id] - 1)
        drafts[req_id] = cache.speculate(req_id, pattern, max_spec_tokens=most).token_ids
    return drafts


def _step_ours(cache, sampled, known, text) -> dict[int, list[int]]:
    """Drafts for all requests in one call, with the same lists as input."""
    new_start = np.cumsum([0, *map(len, sampled.values())], dtype=np.int32)
    new_tokens = np.array([token for new in sampled.values() for token in new], np.int32)
    room = np.array([PROMPT + OUTPUT - known[r] - 1 for r in sampled], np.int32)
    tokens, counts = cache.advance(list(sampled), new_tokens, new_start, room, num_drafts=DEPTH)
    pairs = zip(sampled, tokens.tolist(), counts.tolist(), strict=True)
    return {req_id: row[:count] for req_id, row, count in pairs}


def soak(num_tokens: int) -> dict[str, Any]:
    """Serves many requests with a small cache: memory stays constant, and the tree is correct."""
    cached, size = 200, 250
    cache, marks = SuffixDecodingCache(DEPTH, cached), []
    count = num_tokens // size
    begin = time.perf_counter()
    for req_id, text in enumerate(texts("recurring phrases", count, size)):
        cache.start_request(req_id, text[:50])
        for at in range(50, size, STEP):
            cache.add_active_response(req_id, text[at : at + STEP])
            cache.speculate(req_id, text[max(0, at + STEP - DEPTH) : at + STEP])
        cache.stop_request(req_id)
        if req_id % max(1, count // 10) == 0:
            marks.append({"requests": req_id, "nodes": cache.num_nodes, "bytes": cache.num_bytes})
    seconds = time.perf_counter() - begin
    scratch = SuffixDecodingCache(DEPTH, -1)
    for req_id, sequence in cache._shared.items():
        scratch.start_request(req_id, [])
        scratch.add_active_response(req_id, cache._text(sequence))
        scratch.stop_request(req_id)
    if _paths(cache) != _paths(scratch):
        raise AssertionError("the tree is not that of its responses")
    gc.collect()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    result = {"tokens": count * size, "requests": count, "seconds": round(seconds, 1)}
    return result | {"marks": marks, "peak resident kB": peak, "equals one from scratch": True}


def _paths(cache: SuffixDecodingCache) -> dict[int, int]:
    """Counts every path of the shared tree, by its hash."""
    nodes, found = cache._forest.nodes, {}
    stack = [(int(cache._shared_root), ())]
    while stack:
        node, path = stack.pop()
        child = int(nodes[node, t.CHILD])
        if child < t.NONE:
            page, offset = divmod(-2 - child, t.PAGE)
            text: list[int] = []
            while page != t.NONE and len(text) < DEPTH:
                text += cache._forest.pages[page, offset : t.PAGE].tolist()
                page, offset = int(cache._forest.pages[page, t.NEXT_PAGE]), 0
            text = (text[: text.index(t.END)] if t.END in text else text)[:DEPTH]
            found |= {hash(tuple(text[:n])): 1 for n in range(len(path) + 1, len(text) + 1)}
            continue
        while child != t.NONE:
            longer = (*path, int(nodes[child, t.TOKEN]))
            found[hash(longer)] = int(nodes[child, t.COUNT])
            stack.append((child, longer))
            child = int(nodes[child, t.NEXT])
    return found
