"""A prototype of suffix decoding on a device, with arrays instead of a tree.

    python -m benchmarks.suffix_gpu --output benchmarks/results/suffix-device.json

On a device, arrays can replace the tree of a request. They have for each index of the text how many
tokens up to it equal the newest ones, at most `depth`; a new token updates all of them in one
operation:

    match'[i] = match[i - 1] + 1 where text[i] == token, else 0

A match of m tokens occurs where `match >= m`, and its draft is the most frequent next token among
these indices, repeatedly. The prototype follows the CANDIDATES longest and newest of them, for
all m in parallel, and reports where there were more or where tokens were equally frequent: their
order depends on how the tree was built, which the arrays do not have. Everywhere else its
drafts must equal those of the tree. It does not search responses of other requests.
"""

import argparse
import functools
import json
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.host_suffix import about, texts
from jspec.suffix import SuffixDecodingCache

DEPTH, LEAST, CANDIDATES = 24, 0.1, 64


@functools.partial(jax.jit, donate_argnums=(0, 1))
def append(text, match, length, tokens):
    """Adds a token to each text [B, S] and brings the match lengths [B, S] up to date."""
    row = jnp.arange(text.shape[0], dtype=jnp.int32)
    text = text.at[row, length].set(tokens, mode="drop")
    place = jnp.arange(text.shape[1], dtype=jnp.int32)[None]  # [1, S]
    shifted = jnp.pad(match[:, :-1], ((0, 0), (1, 0)))
    same = (text == tokens[:, None]) & (place < length[:, None])
    return text, jnp.where(same, jnp.minimum(shifted + 1, DEPTH), 0), length + 1


@jax.jit
def draft(text, match, length):
    """Returns (tokens [B, D], num_drafts, score, match_len, is_sure), each [B]."""
    size = jnp.arange(1, DEPTH, dtype=jnp.int32)  # [m]
    place = jnp.arange(text.shape[1], dtype=jnp.int32)
    # The longest matches, the newest of equals, first.
    key = jnp.where(match > 0, match * text.shape[1] + place, -1)
    key, at = jax.lax.top_k(key, CANDIDATES)  # [B, C]
    length_at = jnp.where(key >= 0, jnp.take_along_axis(match, at, 1), 0)
    complete = (match > 0).sum(1, dtype=jnp.int32) <= CANDIDATES
    after = at[..., None] + jnp.arange(1, DEPTH, dtype=jnp.int32)  # [B, C, D - 1]
    known = after < length[:, None, None]
    flat = jnp.minimum(after, text.shape[1] - 1).reshape(after.shape[0], -1)
    next_token = jnp.take_along_axis(text, flat, 1).reshape(after.shape)
    next_token = jnp.where(known, next_token, -1)
    alive = length_at[:, None] >= size[None, :, None]  # [B, m, C]
    matched = size[None] <= jnp.minimum(length, DEPTH)[:, None] - 1  # [B, m]
    total = alive.sum(-1, dtype=jnp.int32) + 1  # the text's own end occurs, too

    def step(carry, j):
        alive, total, prob, running, tied = carry
        token = next_token[:, :, j]  # [B, C]
        votes = alive & (token >= 0)[:, None]
        same = token[:, :, None] == token[:, None, :]  # [B, C, C]
        count = jnp.einsum("bmc,bcd->bmd", votes.astype(jnp.float32), same.astype(jnp.float32))
        count = jnp.where(votes, count, 0)
        most = count.max(-1)
        best = count.argmax(-1)
        chosen = jnp.take_along_axis(token, best, 1)  # [B, m]
        share = prob * (most / jnp.maximum(total, 1).astype(jnp.float32))
        running = running & (most > 0) & (share >= LEAST) & (j < size)[None]
        running = running & (size + j < DEPTH)[None]
        follows = votes & (token[:, None] == chosen[..., None])
        tied = tied | (running & ((count == most[..., None]) & ~follows).any(-1))
        prob = jnp.where(running, share, prob)
        out = (jnp.where(running, chosen, -1), jnp.where(running, share, 0))
        return (follows, follows.sum(-1, dtype=jnp.int32), prob, running, tied), out

    shape = total.shape
    start = (alive, total, jnp.ones(shape, jnp.float32), matched, jnp.zeros(shape, bool))
    steps = jnp.arange(DEPTH - 1, dtype=jnp.int32)
    (*_, tied), (tokens, shares) = jax.lax.scan(step, start, steps)  # [D - 1, B, m]
    score = jnp.where(matched, shares.sum(0), -1)  # [B, m]
    best = shape[1] - 1 - score[:, ::-1].argmax(1)  # the longest of equals
    row = jnp.arange(shape[0])
    tokens = tokens[:, row, best].T
    count = (tokens >= 0).sum(1, dtype=jnp.int32)
    any_matched = matched.any(1)
    match_len = jnp.where(any_matched, best + 1, 0)
    return tokens, count, jnp.maximum(score[row, best], 0), match_len, complete & ~tied.any(1)


def start(prompts):
    """Fills texts and match lengths as appending token by token would."""
    B, size = prompts.shape
    text = jnp.zeros((B, size), jnp.int32)
    carry = (text, jnp.zeros_like(text), jnp.zeros(B, jnp.int32))

    @jax.jit
    def fill(carry, tokens):
        return jax.lax.scan(lambda c, t: (append(*c, t), None), carry, tokens)[0]

    return fill(carry, jnp.asarray(prompts.T))


def check(kind: str, num_requests: int, size: int) -> dict[str, float]:
    """Compares with the tree, after each of some tokens; returns how often `is_sure` was True."""
    batch = np.stack(texts(kind, num_requests, size))
    rows, sure, equal = 0, 0, 0
    for known in range(size - 40, size + 1, 8):
        text, match, length = start(batch[:, :known])
        tokens, count, score, match_len, is_sure = jax.device_get(draft(text, match, length))
        for b in range(num_requests):
            cache = SuffixDecodingCache(DEPTH, 0)
            cache.start_request(b, batch[b, :known])
            wanted = cache.speculate(b, batch[b, :known], min_token_prob=LEAST)
            same = tokens[b, : count[b]].tolist() == wanted.token_ids
            same &= abs(score[b] - wanted.score) < 1e-4 and match_len[b] == wanted.match_len
            if is_sure[b] and not same:
                raise AssertionError(f"{kind}, request {b} of {known} tokens: {wanted}")
            rows, sure, equal = rows + 1, sure + bool(is_sure[b]), equal + bool(same)
    return {"drafts": rows, "sure": sure / rows, "equal": equal / rows}


def measure(num_requests: int, size: int, rounds: int) -> dict[str, float]:
    """Times a step (append a token, draft) on the device and in the tree; microseconds."""
    batch = np.stack(texts("recurring phrases", num_requests, size))
    known = size - rounds - 2
    text, match, length = start(np.pad(batch[:, :known], ((0, 0), (0, size - known))))
    length = jnp.full(num_requests, known, jnp.int32)
    cache = SuffixDecodingCache(DEPTH, 0)
    for b in range(num_requests):
        cache.start_request(b, batch[b, :known])
    ids, one = list(range(num_requests)), np.arange(num_requests + 1, dtype=np.int32)
    room = np.full(num_requests, DEPTH, np.int32)
    device, host = [], []
    for i in range(rounds):
        new = np.ascontiguousarray(batch[:, known + i])
        begin = time.perf_counter()
        text, match, length = append(text, match, length, jnp.asarray(new))
        jax.block_until_ready(draft(text, match, length))
        middle = time.perf_counter()
        cache.advance(ids, new, one, room, num_drafts=DEPTH, min_token_prob=LEAST)
        device.append(middle - begin)
        host.append(time.perf_counter() - middle)
    return {
        "device step, us": 1e6 * float(np.median(device[1:])),
        "tree on the host, us": 1e6 * float(np.median(host[1:])),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--smoke", action="store_true", help="tiny sizes: does it run?")
    parser.add_argument("--output", type=Path, help="JSON file to write")
    arguments = parser.parse_args()
    sizes = [(2, 256)] if arguments.smoke else [(1, 4096), (64, 4096), (64, 32_768)]
    results = {"setting": about("suffix_gpu")}
    results["equal to the tree"] = {
        kind: check(kind, 2 if arguments.smoke else 8, 400)
        for kind in ("random ids", "recurring phrases", "copied prompt")
    }
    results["step"] = {f"{B} x {S}": measure(B, S, 4 if arguments.smoke else 30) for B, S in sizes}
    print(json.dumps(results, indent=2))
    if arguments.output:
        arguments.output.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
