"""Draft heads on disk, changed for a test, and the steps that their recordings were made from."""

import dataclasses
import functools

import numpy as np

import jspec
from jspec.checkpoint import Checkpoint, read
from jspec.state import Batch
from tests.conftest import GOLDEN
from tests.paged import shuffled_tables
from tests.steps import Row, make_step

TOLERANCE = {"atol": 1e-4, "rtol": 1e-4}  # float32, as the recordings' README says
NEAR_TIE = 1e-3  # gap of the two best logits below which another choice is excused
PAGE_SIZE, PAGES = 5, 8  # of a request
NUM_PROMPTS = 3


@functools.cache
def target(name="target_llama", dtype="float32"):
    """Loads a recorded target model."""
    return jspec.load(GOLDEN / "models" / name, dtype)


def recorded(name) -> dict[str, np.ndarray]:
    """Reads what a head gave."""
    return dict(np.load(GOLDEN / "models" / name / "expected.npz"))


def checkpoint(name, *, drop=(), config=None, **tensors) -> Checkpoint:
    """Reads a recorded head's checkpoint, without some tensors and with others."""
    original = read(GOLDEN / "models" / name)
    kept = {key: value for key, value in original.tensors() if key not in drop} | tensors
    return original._replace(
        config=original.config | (config or {}), names=tuple(kept), tensors=lambda: kept.items()
    )


def recorded_batch(data, config, hidden, rng) -> Batch:
    """Makes the step that read the recorded prompts whole, over shuffled pages and poison.

    Args:
      data: the recording.
      config: the drafter's.
      hidden: name of the hidden states that the drafter read.
      rng: shuffles the pages.
    """
    rows = [
        Row(slot=i, context=data[f"prompt_{i}"], kept=[int(data[f"next_token_{i}"])], start=0)
        for i in range(NUM_PROMPTS)
    ]
    num_rows = sum(len(row.context) for row in rows)
    scheduled, verified = make_step(
        rows,
        num_requests=NUM_PROMPTS + 1,
        num_rows=num_rows + 5,
        width=config.num_drafts + 1,
        pages_per_request=PAGES,
        poison=True,
    )
    table = scheduled.block_table.copy()
    table[:NUM_PROMPTS] = shuffled_tables(rng, NUM_PROMPTS, PAGES, NUM_PROMPTS * PAGES)
    states = np.concatenate([data[f"{hidden}_{i}"] for i in range(NUM_PROMPTS)])
    padded = np.full((num_rows + 5, states.shape[1]), np.nan, np.float32)
    padded[:num_rows] = states
    scheduled = dataclasses.replace(scheduled, block_table=table, hidden=padded)
    return jspec.prepare(scheduled, verified, vocab_size=config.vocab_size)


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
