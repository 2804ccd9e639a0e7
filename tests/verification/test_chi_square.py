"""Verified texts are distributed as the target's own; the same test detects deliberate faults.

A target that looks at one token decides over texts of three. They are decoded in up to three steps
that draft two tokens each, for 25,000 seeds at once.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec.axes import PAD_TOKEN
from jspec.verification import greedy, rejection, sampling
from tests.support.marks import slow_ones

pytestmark = pytest.mark.any_device

V, K, LENGTH = 4, 2, 3
NUM_TEXTS = 25_000
# Chi-square that texts of the right distribution stay below in 99.99 % of all cases.
LIMIT = 113.0  # 64 texts: 63 degrees of freedom

_rng = np.random.default_rng(7)
TARGET = _rng.normal(size=(V + 1, V)).astype(np.float32)  # scores after each token; V = the start
DRAFTER = TARGET + _rng.normal(size=(V + 1, V)).astype(np.float32)
TREE = np.array([PAD_TOKEN, PAD_TOKEN, 0, 0, 1], np.int32)  # the parents of its nodes


def chances(temperature):
    """The target's chance of each text, in float64."""
    weights = np.exp(TARGET.astype(np.float64) / temperature)
    after = weights / weights.sum(-1, keepdims=True)
    return np.einsum("a,ab,bc->abc", after[V], after[:V], after[:V]).ravel()


def chi_square(texts, temperature):
    wanted = chances(temperature) * len(texts)
    index = np.ravel_multi_index(tuple(np.asarray(texts).T), (V,) * LENGTH)
    return ((np.bincount(index, minlength=V**LENGTH) - wanted) ** 2 / wanted).sum()


def program(method, with_probs, *, new_seeds=True, heat=1.0):
    """Compiles the decoding of all texts, from empty prompts.

    Args:
      method: "rejection", "block" or "tree".
      with_probs: drafts are drawn, and verified with their distribution; else the drafter's best.
      new_seeds: False draws a block's drafts with the random numbers of the step before.
      heat: drafts are drawn at this many times the temperature.
    """
    target, drafter = jnp.asarray(TARGET), jnp.asarray(DRAFTER)

    def rows_after(last, drafts):
        """Target scores after the context and after each draft."""
        return target[jnp.concatenate([last[:, None], drafts], axis=1)]

    def chain(last, seed, temperature, start, previous):
        is_block = with_probs and method == "block" and new_seeds
        draft_seed = rejection.draft_seed(seed, previous) if is_block else seed
        drafts, probs, token = [], [], last
        for j in range(K):
            scores = drafter[token]
            if with_probs:
                token = sampling.draw(scores, heat * temperature, draft_seed, start + j, stream=1)
                probs.append(sampling.distribution(scores, temperature))
            else:
                token = jnp.argmax(scores, axis=-1).astype(jnp.int32)
            drafts.append(token)
        drafts = jnp.stack(drafts, axis=1)
        verified, _ = rejection.sampled(
            method,
            *(rows_after(last, drafts), drafts, jnp.full(len(seed), K, jnp.int32)),
            **{"temperature": temperature, "seed": seed, "position": start},
            probs=jnp.stack(probs, axis=1) if with_probs else None,
        )
        return verified.tokens

    def tree(last, seed, temperature, start, previous):
        """The two best tokens, then the two best after the first and the best after the second."""
        _, first = jax.lax.top_k(drafter[last], 2)
        _, second = jax.lax.top_k(drafter[first], 2)
        drafts = jnp.concatenate([first, second[:, 0], second[:, 1, :1]], axis=1)
        places = start[:, None] + jnp.array([0, 1, 1, 2, 2, 2], jnp.int32)[None]
        flat = [jnp.repeat(x, 6) for x in (temperature, seed)]
        scores = rows_after(last, drafts).reshape(-1, V)
        chosen = sampling.draw(scores, *flat, places.reshape(-1), stream=rejection.TARGET_STREAM)
        parents = jnp.broadcast_to(TREE[None], drafts.shape)
        count = jnp.full(len(seed), len(TREE), jnp.int32)
        verified, *_ = greedy.tree(chosen.reshape(-1, 6), drafts, parents, count, depth=K)
        return verified.tokens

    @jax.jit
    def run(temperature):
        B = NUM_TEXTS
        seed = jnp.arange(B, dtype=jnp.int32)
        row = seed[:, None]

        def step(carry, _):
            texts, last, start, previous = carry
            draft = tree if method == "tree" else chain
            tokens = draft(last, seed, jnp.full(B, temperature), start, previous)
            live = tokens != PAD_TOKEN
            column = start[:, None] + jnp.arange(K + 1, dtype=jnp.int32)[None]
            column = jnp.where(live, column, LENGTH)
            texts = texts.at[row, column].set(tokens, mode="drop")
            count = live.sum(axis=1, dtype=jnp.int32)
            last = jnp.take_along_axis(tokens, count[:, None] - 1, axis=1, mode="clip")[:, 0]
            return (texts, last, start + count, start), None

        texts = jnp.full((B, LENGTH), PAD_TOKEN, jnp.int32)
        start = texts, *(jnp.full(B, x, jnp.int32) for x in (V, 0, -1))
        return jax.lax.scan(step, start, length=LENGTH)[0][0]

    return lambda temperature: np.asarray(run(jnp.float32(temperature)))


right_program = functools.cache(program)


METHODS = [
    ("rejection", False),
    ("rejection", True),
    ("block", False),
    ("block", True),
    ("tree", False),
]


@pytest.mark.parametrize("temperature", slow_ones([0.7, 1.0], lambda heat: heat < 1))
@pytest.mark.parametrize("method, with_probs", METHODS)
def test_texts_have_the_targets_own_distribution(method, with_probs, temperature):
    texts = right_program(method, with_probs)(temperature)
    assert chi_square(texts, temperature) < LIMIT
    assert chi_square(texts, temperature + 0.1) > LIMIT  # so small a difference would be seen


@pytest.mark.parametrize("method, with_probs", [("rejection", False), ("block", True)])
def test_a_residual_without_subtraction_is_caught(method, with_probs, monkeypatch):
    emit = rejection._emit

    def emit_from_p(step, *rest):
        return emit(step._replace(is_token=jnp.zeros_like(step.is_token)), *rest)

    monkeypatch.setattr(rejection, "_emit", emit_from_p)
    assert chi_square(program(method, with_probs)(1.0), 1.0) > LIMIT


@pytest.mark.parametrize("method", ["rejection", "block"])
def test_drafts_of_another_distribution_than_stated_are_caught(method):
    assert chi_square(program(method, True, heat=1.3)(1.0), 1.0) > LIMIT


def test_drafts_that_a_block_test_has_seen_before_are_caught():
    """Why `rejection.draft_seed` exists."""
    assert chi_square(program("block", True, new_seeds=False)(1.0), 1.0) > LIMIT
