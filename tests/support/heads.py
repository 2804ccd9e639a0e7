"""Draft heads on disk, changed for a test, and the steps that their recordings were made from."""

import dataclasses
import functools

import jax
import numpy as np

import jspec
from jspec.checkpoint import Checkpoint, read
from jspec.models import llama
from jspec.models.kv_cache import KVCache
from jspec.state import Batch
from tests.support import recordings
from tests.support.paged import make_view, poisoned_cache, shuffled_tables
from tests.support.steps import Row, make_step

TOLERANCE = {"atol": 1e-4, "rtol": 1e-4}  # float32, as the recordings' README says
NEAR_TIE = 1e-3  # gap of the two best logits below which another choice is excused
GAP_TOLERANCE = {"atol": 1e-3}  # of gaps, float32
PAGE_SIZE, PAGES = 5, 8  # of a request


@functools.cache
def target(name="target_llama", dtype="float32"):
    """Loads a recorded target model."""
    return jspec.load(recordings.MODELS / name, dtype)


def target_of(name: str):
    """Loads the target that a recorded head drafts for."""
    return target(recordings.target_of(name))


def checkpoint(name, *, drop=(), config=None, **tensors) -> Checkpoint:
    """Reads a recorded head's checkpoint, without some tensors and with others."""
    original = read(recordings.MODELS / name)
    kept = {key: value for key, value in original.tensors() if key not in drop} | tensors
    return original._replace(
        config=original.config | (config or {}), names=tuple(kept), tensors=lambda: kept.items()
    )


def gaps(logits) -> np.ndarray:
    """Returns by how much the best logit of each row exceeds the next."""
    best = np.sort(logits, axis=-1)
    return best[..., -1] - best[..., -2]


def num_drafts_of(data: recordings.Values) -> int:
    """Counts the drafts of a recorded chain."""
    return len(data["chain_tokens_0"])


def pages_of(data: recordings.Values) -> int:
    """Returns pages with room for the longest recorded prompt and drafts behind it."""
    longest = max(len(data[f"prompt_{i}"]) for i in range(recordings.num_prompts(data)))
    return max(PAGES, -(-(longest + 18) // PAGE_SIZE))


def recorded_cache(data: recordings.Values, config) -> KVCache:
    """Makes the pages of `recorded_batch`, with NaN wherever nobody wrote."""
    num_pages = recordings.num_prompts(data) * pages_of(data)
    return poisoned_cache(config, num_pages=num_pages, page_size=PAGE_SIZE)


def recorded_batch(data: recordings.Values, config, hidden: str) -> Batch:
    """Makes the step that read the recorded prompts whole, over shuffled pages and poison.

    Args:
      data: the recording.
      config: the drafter's.
      hidden: name of the hidden states that the drafter read.
    """
    num_prompts = recordings.num_prompts(data)
    rows = [
        Row(slot=i, context=data[f"prompt_{i}"], kept=[int(data[f"next_token_{i}"])], start=0)
        for i in range(num_prompts)
    ]
    num_rows = sum(len(row.context) for row in rows)
    scheduled, verified = make_step(
        rows,
        num_requests=num_prompts + 1,
        num_rows=num_rows + 5,
        width=config.num_drafts + 1,
        pages_per_request=pages_of(data),
        poison=True,
    )
    table = scheduled.block_table.copy()
    rng = np.random.default_rng(20240229)
    table[:num_prompts] = shuffled_tables(
        rng, num_prompts, pages_of(data), num_prompts * pages_of(data)
    )
    states = np.concatenate([data[f"{hidden}_{i}"] for i in range(num_prompts)])
    padded = np.full((num_rows + 5, states.shape[1]), np.nan, np.float32)
    padded[:num_rows] = states
    scheduled = dataclasses.replace(scheduled, block_table=table, hidden=padded)
    return jspec.prepare(scheduled, verified, vocab_size=config.vocab_size)


_forward = jax.jit(llama.forward, static_argnames=("config", "hidden_layers"))


@functools.cache
def _target_outputs(name: str, layers: tuple) -> tuple[np.ndarray, np.ndarray, list[slice]]:
    """Runs a head's recorded prompts through its target: (last logits, hidden, rows of each)."""
    data, model = recordings.expected(name), target_of(name)
    prompts = [data[f"prompt_{i}"] for i in range(recordings.num_prompts(data))]
    n, pages = len(prompts), pages_of(data)
    tables = shuffled_tables(np.random.default_rng(n), n, pages, n * pages)
    view = make_view(tables, [0] * n, [len(ids) for ids in prompts], page_size=PAGE_SIZE)
    logits, hidden, _ = _forward(
        model.config,
        model.params,
        np.concatenate(prompts).astype(np.int32),
        view,
        recorded_cache(data, model.config),
        logit_rows=view.query_start[1:] - 1,
        hidden_layers=layers,
    )
    rows = [slice(*view.query_start[i : i + 2]) for i in range(n)]
    return np.asarray(logits), np.asarray(hidden), rows


def assert_target_gives_what_a_head_read(name: str, layers: tuple, hidden: str) -> None:
    """Compares the target's hidden states and next token with what a head is recorded to read."""
    data = recordings.expected(name)
    logits, states, rows = _target_outputs(name, layers)
    for i, at in enumerate(rows):
        np.testing.assert_allclose(states[at], data[f"{hidden}_{i}"], **TOLERANCE)
        assert np.argmax(logits[i]) == data[f"next_token_{i}"]


def dense_attention(config, params, x, *, mask=None) -> np.ndarray:
    """Attends without a cache, in float64: rows 0..T-1 at positions 0..T-1.

    Args:
      config: a ModelConfig.
      params: of `layers.Attention`.
      x: [T, Din] normed input.
      mask: [T, T] True = seen; causal by default.
    """
    T, N, n, d = len(x), config.num_heads, config.num_kv_heads, config.head_dim
    qkv = x @ params["qkv"] + params.get("qkv_bias", 0)
    q, k, v = np.split(qkv.reshape(T, N + 2 * n, d), [N, N + n], axis=1)
    if config.qk_norm:
        q = dense_norm(q, params["q_norm"]["weight"], config.rms_norm_eps)
        k = dense_norm(k, params["k_norm"]["weight"], config.rms_norm_eps)
    angle = np.arange(T)[:, None] * config.rope.theta ** -(np.arange(0, d, 2) / d)
    turn = np.exp(1j * angle)[:, None]  # [T, 1, half]

    def rotated(x):
        pairs = (x[..., : d // 2] + 1j * x[..., d // 2 :]) * turn
        return np.concatenate([pairs.real, pairs.imag], -1)

    k, v = (np.repeat(part, N // n, axis=1) for part in (rotated(k), v))
    scores = np.einsum("qhd,khd->hqk", rotated(q), k) / np.sqrt(d)
    scores = np.where(np.tri(T, dtype=bool) if mask is None else mask, scores, -np.inf)
    scores = np.exp(scores - scores.max(-1, keepdims=True))
    scores /= scores.sum(-1, keepdims=True)
    out = np.einsum("hqk,khd->qhd", scores, v).reshape(T, -1)
    return out @ params["o"] + params.get("o_bias", 0)


def dense_norm(x, weight, eps) -> np.ndarray:
    """Norms in float64."""
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * weight


def dense_mlp(params, x) -> np.ndarray:
    """Runs the gated MLP in float64."""
    gate, up = np.split(x @ params["gate_up"] + params.get("gate_up_bias", 0), 2, axis=-1)
    return (gate / (1 + np.exp(-gate)) * up) @ params["down"] + params.get("down_bias", 0)
