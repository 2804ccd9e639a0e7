"""Medusa heads for tests: recorded ones, drawn ones, and what they score and draft."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

import jspec
from jspec.checkpoint import Checkpoint, read
from jspec.models import weights
from jspec.models.medusa import Medusa
from jspec.proposers.medusa import PROPOSER
from tests.support import recordings
from tests.support.steps import Row, make_step

NAMES = ["medusa_llama", "medusa_llama_vllm", "medusa_llama_vllm_trunc"]
TOLERANCE = {"atol": 1e-4, "rtol": 1e-4}  # float32, as the recordings' README says
CACHE = jspec.CacheConfig(num_pages=32, page_size=4, max_model_len=32, dtype="float32")
D, V = 64, 128  # of the recorded target


@functools.cache
def load_target():
    """The model that the recorded heads are for."""
    return jspec.load(recordings.MODELS / "target_llama", "float32")


def load(name, target, **options):
    return PROPOSER.load(read(recordings.MODELS / name), target, dtype="float32", **options)


def stored(config, tensors):
    """A checkpoint that lies in memory."""
    return Checkpoint(config, tuple(tensors), lambda: iter(tensors.items()), None, None, ())


def drawn(rng, *, num_heads=2, num_layers=1, bias=False, heads="own", rows=V):
    """Tensors in vLLM's layout; `heads` "own", "shared" or "none"."""
    tensors = {}
    for i in range(num_heads):
        for j in range(num_layers):
            tensors[f"blocks.{i}.layers.{j}.weight"] = rng.standard_normal((D, D)) / 8
            if bias:
                tensors[f"blocks.{i}.layers.{j}.bias"] = rng.standard_normal(D)
        if heads == "own":
            tensors[f"lm_heads.{i}.weight"] = rng.standard_normal((rows, D))
    if heads == "shared":
        tensors["lm_head.weight"] = rng.standard_normal((rows, D))
    return {name: tensor.astype(np.float32) for name, tensor in tensors.items()}


def load_stored(tensors, target, config=None, **options):
    return PROPOSER.load(stored(config or {}, tensors), target, dtype="float32", **options)


def logits(drafter, hidden, index):
    """Scores of one head over the target's vocabulary; -inf where it has no such token."""
    heads = weights.bind(Medusa, drafter.config.model, drafter.params)
    out = heads.logits(jnp.asarray(hidden), index)
    ids = drafter.params.get("target_ids")
    if ids is None:
        return np.asarray(out)
    wide = np.full((len(hidden), drafter.config.vocab_size), -np.inf, np.float32)
    wide[:, np.asarray(ids)] = out
    return wide


def draft(drafter, hidden, *, tokens=None, num_drafts=None, context=5, cache=CACHE, **fields):
    """Drafts for requests whose only row in a step has these hidden states [B, D]."""
    config = drafter.config
    rows = [Row(slot=b, context=[1] * context, kept=[2]) for b in range(len(hidden))]
    scheduled, verified = make_step(
        rows,
        num_requests=len(hidden),
        num_rows=len(hidden),
        width=config.num_drafts + 1,
        pages_per_request=cache.pages_per_request,
    )
    scheduled = dataclasses.replace(scheduled, hidden=np.asarray(hidden, np.float32), **fields)
    state = jspec.init(*drafter, cache=cache, max_requests=len(hidden))
    _, drafts = jspec.step(state, scheduled, verified, num_drafts=num_drafts)
    return jax.tree.map(np.asarray, drafts)
