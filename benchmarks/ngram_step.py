"""A complete drafting step of n-gram lookup on a GPU, against the torch calls of the original.

    python -m benchmarks.ngram_step --output benchmarks/results/ngram-step-h200.json

A step goes from the verified tokens to the next drafts: it counts the valid tokens, picks the one
to continue from, appends them to the histories and looks the suffix up. jspec's is one executable
(`jspec.step`); the original makes a dozen eager calls and a compiled one. "compiled whole" is all
of them under torch.compile. A turn is a number of calls of one implementation, where every call is
waited for ("blocked"), or only the last ("in a stream"); turns are interleaved. `--smoke` runs a
tiny size.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np

import jspec
from benchmarks.ngram import DEVICE_SIZES, MAX_N, MIN_N, SMOKE_SIZES, VOCAB, K, contexts, setting
from benchmarks.ngram_original import torch_search
from benchmarks.shapes import command_line

CALLS = 50  # a turn
ROOM = 64  # tokens that a history may grow by


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--smoke", action="store_true", help="a tiny size: does it run?")
    parser.add_argument("--rounds", type=int, default=15, help="turns of each contender")
    parser.add_argument("--output", type=Path, help="JSON file to write")
    arguments = parser.parse_args()
    sizes = SMOKE_SIZES if arguments.smoke else DEVICE_SIZES
    results: dict[str, Any] = {"setting": setting() | {"command": command_line("ngram_step")}}
    print(json.dumps(results["setting"], indent=2))
    results["steps"] = [compare(B, S, arguments.rounds) for B, S in sizes]
    if arguments.output:
        arguments.output.write_text(json.dumps(results, indent=2) + "\n")


def compare(B: int, S: int, rounds: int) -> dict[str, Any]:
    """Times every implementation on histories of S tokens, the newest of which was just sampled."""
    histories = contexts(B, S)["copied"]
    ours, drafts = our_step(histories)
    contenders = {"jspec.step": ours}
    for name, (step, found) in original_steps(histories).items():
        for got, wanted in zip(found, drafts, strict=True):
            np.testing.assert_array_equal(got, wanted)
        contenders[name] = step
    row: dict[str, Any] = {"B": B, "S": S}
    for how, waits in (("blocked", True), ("in a stream", False)):
        times: dict[str, list[float]] = {name: [] for name in contenders}
        for i in range(rounds + 1):
            for name, step in contenders.items():
                begin = time.perf_counter()
                step(waits)
                if i:  # the first turn warms up
                    times[name].append(1e6 * (time.perf_counter() - begin) / CALLS)
        medians = {name: statistics.median(turns) for name, turns in times.items()}
        row[how] = {
            "us": medians,
            "over_jspec": {name: us / medians["jspec.step"] for name, us in medians.items()},
        }
    print(json.dumps(row, indent=2), flush=True)
    return row


def our_step(histories: np.ndarray) -> tuple[Callable[[bool], None], tuple[Any, Any]]:
    B, S = histories.shape
    config = jspec.NgramGPUConfig(
        num_drafts=K, prompt_lookup_min=MIN_N, prompt_lookup_max=MAX_N, vocab_size=VOCAB + 1
    )
    cache = jspec.CacheConfig(num_pages=1, max_model_len=S + ROOM)
    state = jspec.init(config, cache=cache, max_requests=B)
    for slot, history in enumerate(histories):
        state = jspec.admit(state, slot, history[:-1])
    index, ones = np.arange(B, dtype=np.int32), np.ones(B, np.int32)
    scheduled = jspec.Scheduled(
        token_ids=np.ascontiguousarray(histories[:, -2]),
        positions=(S - 2) * ones,
        query_start=np.arange(B + 1, dtype=np.int32),
        seq_lens=(S - 1) * ones,
        block_table=np.zeros((B, 1), np.int32),
        num_drafts=0 * ones,
        request_slot=index,
        backup_token=-ones,
        discard=np.zeros(B, bool),
    )
    verified = jspec.Verified(tokens=sampled_tokens(histories))
    scheduled, verified = jax.device_put((scheduled, verified), jax.devices()[0])

    def step(waits: bool) -> None:
        nonlocal state
        for _ in range(CALLS):
            state, drafts = jspec.step(state, scheduled, verified)
            if waits:
                jax.block_until_ready(drafts)
        jax.block_until_ready(drafts)

    state, drafts = jspec.step(state, scheduled, verified)
    return step, jax.device_get((drafts.tokens, drafts.num_drafts))


def sampled_tokens(histories: np.ndarray) -> np.ndarray:
    """Returns the newest token of each history, in the form of verified tokens."""
    sampled = np.full((len(histories), K + 1), jspec.PAD_TOKEN, np.int32)
    sampled[:, 0] = histories[:, -1]
    return sampled


def original_steps(histories: np.ndarray) -> dict[str, tuple[Callable[[bool], None], Any]]:
    """The original's step in torch, reimplemented; none without torch."""
    try:
        import torch
    except ImportError:
        return {}
    B, S = histories.shape
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    table = np.full((B, S + ROOM), 0, np.int32)
    table[:, : S - 1] = histories[:, :-1]
    token_ids = torch.as_tensor(table).to(device)
    num_tokens = torch.full((B,), S - 1, dtype=torch.int64, device=device)
    sampled = torch.as_tensor(sampled_tokens(histories)).to(device)
    discard = torch.zeros(B, dtype=torch.bool, device=device)
    columns = torch.arange(K + 1, device=device)

    def step_with(search):
        def step():
            backup = token_ids.gather(1, (num_tokens - 1).clamp(min=0)[:, None])[:, 0]
            tokens = sampled.masked_fill(discard[:, None], -1)
            count = ((tokens != -1) & (tokens < VOCAB + 1)).sum(1)
            newest = tokens.gather(1, (count - 1).clamp(min=0)[:, None])[:, 0]
            next_token = torch.where(count > 0, newest, backup)
            at = num_tokens[:, None] + columns
            writes = (columns < count[:, None]) & (tokens != -1) & (at < token_ids.shape[1])
            at = at.clamp(max=token_ids.shape[1] - 1)
            token_ids.scatter_(1, at, torch.where(writes, tokens, token_ids.gather(1, at)))
            length = num_tokens + count
            drafts, num_valid = search(token_ids, length, (count > 0) & (length >= MIN_N))
            return next_token, drafts, num_valid

        return step

    search = torch_search(MIN_N, MAX_N, K)
    steps = {
        "torch": step_with(torch.compile(search)),
        "torch, compiled whole": torch.compile(step_with(search)),
    }

    def turn(step):
        def run(waits: bool) -> None:
            with torch.inference_mode():
                for _ in range(CALLS):
                    step()
                    if waits and device.type == "cuda":
                        torch.cuda.synchronize()
                if device.type == "cuda":
                    torch.cuda.synchronize()

        return run

    made = {}
    for name, step in steps.items():
        with torch.inference_mode():
            _, drafts, num_valid = step()
        made[name] = turn(step), (drafts.cpu().numpy(), num_valid.cpu().numpy())
    return made


if __name__ == "__main__":
    main()
