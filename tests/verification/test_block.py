"""Block verification: a plain loop, and exact sums over all drafts of small vocabularies."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec.axes import PAD_TOKEN
from jspec.verification import rejection

pytestmark = pytest.mark.any_device

run = jax.jit(rejection.block)


def chances(p, q, drafts):
    """The oracle, in float64: chance of each prefix to pass, and the weight of p behind it.

    Args:
      p: [g + 1, V] target rows. q: [g, V] draft rows. drafts: g tokens.
    """
    weights = [1.0]
    for i, x in enumerate(drafts):
        weights.append(min(weights[-1] * p[i, x] / q[i, x], 1.0))
    passing = []
    for i in range(1, len(drafts)):
        gain = np.maximum(weights[i] * p[i] - q[i], 0).sum()
        least = gain + 1 - weights[i]
        passing.append(gain / least if least > 0 else 1.0)
    return passing + weights[len(drafts) :] if len(drafts) else [], weights


def softmax(x):
    weights = np.exp(x - x.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True)


@pytest.mark.parametrize("with_probs", [False, True])
@pytest.mark.parametrize("B, K, V", [(3, 0, 3), (5, 1, 5), (60, 4, 4), (7, 7, 130)])
def test_any_size_matches_the_loop(B, K, V, with_probs, rng):
    """With placeholders, ids past the vocabulary and unused columns, at temperatures."""
    logits = rng.normal(size=(B, K + 1, V)).astype(np.float32)
    probs = softmax(rng.normal(size=(B, K, V)))
    drafts = np.array([[rng.choice(V, p=row) for row in rows] for rows in probs], np.int32)
    drafts = drafts.reshape(B, K)
    drafts = np.where(rng.random((B, K)) < 0.4, logits[:, :-1].argmax(-1), drafts)
    drafts[rng.random((B, K)) < 0.06] = PAD_TOKEN
    drafts[rng.random((B, K)) < 0.06] = V
    num_drafts = rng.integers(0, K + 1, B).astype(np.int32)
    temperature = rng.uniform(0.5, 1.5, B).astype(np.float32)
    uniform = 1 - rng.random((B, K)).astype(np.float32)
    exponential = rng.exponential(size=(B, K + 1, V)).astype(np.float32)
    wanted, revived = [], 0
    for b in range(B):
        p = softmax(logits[b].astype(np.float64) / temperature[b])
        tokens = list(itertools.takewhile(lambda x: 0 <= x < V, drafts[b, : num_drafts[b]]))
        q = probs[b] if with_probs else np.eye(V)[np.minimum(np.maximum(drafts[b], 0), V - 1)]
        passing, weights = chances(p, q, tokens)
        kept = max((i + 1 for i, h in enumerate(passing) if uniform[b, i] <= h), default=0)
        revived += any(uniform[b, i] > passing[i] for i in range(kept))
        rest = weights[kept] * p[kept]
        if kept < len(tokens):
            rest = np.maximum(rest - q[kept], 0)
        last = int(np.argmax(rest / exponential[b, kept]))
        wanted.append([*map(int, tokens[:kept]), last] + [PAD_TOKEN] * (K - kept))
    verified, _ = run(
        *map(jnp.asarray, (logits, drafts, num_drafts)),
        temperature=jnp.asarray(temperature),
        uniform=jnp.asarray(uniform),
        exponential=jnp.asarray(exponential),
        probs=jnp.asarray(probs.astype(np.float32)) if with_probs else None,
    )
    assert verified.tokens.tolist() == wanted
    assert revived > 0 or B < 60  # a failing prefix was kept with what is behind it


def models(rng, K, V):
    """Draws p and q of every context of up to K tokens."""
    contexts = [c for length in range(K + 1) for c in itertools.product(range(V), repeat=length)]
    return tuple(
        {c: softmax(rng.normal(size=V) * rng.uniform(0.2, 2)) for c in contexts} for _ in "pq"
    )


def all_drafts(p, q, K, V, point_mass):
    """Yields every draft block with its chance and the rows that verification reads."""
    for drafts in itertools.product(range(V), repeat=K):
        before = [drafts[:i] for i in range(K + 1)]
        rows_p, rows_q = np.array([p[c] for c in before]), np.array([q[c] for c in before[:-1]])
        if point_mass:
            best = rows_q.argmax(-1)
            chance, rows_q = float((best == drafts).all()), np.eye(V)[list(drafts)]
        else:
            chance = np.prod([row[x] for row, x in zip(rows_q, drafts, strict=True)])
        if chance:
            yield drafts, chance, rows_p, rows_q


def each_length(passing):
    """Chance of each number of kept drafts: the longest prefix that passes wins."""
    fails = np.append(np.cumprod([1 - h for h in passing][::-1])[::-1], 1.0)
    return [fails[0], *(h * fails[i + 1] for i, h in enumerate(passing))]


@pytest.mark.parametrize("point_mass", [False, True])
@pytest.mark.parametrize("K, V", [(1, 3), (2, 3), (3, 3), (4, 2)])
def test_in_expectation_it_keeps_at_least_what_the_test_of_each_draft_keeps(K, V, point_mass, rng):
    gains = []
    for _ in range(20):
        p, q = models(rng, K, V)
        by_block = by_token = 0.0
        for drafts, chance, rows_p, rows_q in all_drafts(p, q, K, V, point_mass):
            passing, _ = chances(rows_p, rows_q, drafts)
            by_block += chance * np.dot(each_length(passing), range(K + 1))
            ratio = [min(1.0, rows_p[i, x] / rows_q[i, x]) for i, x in enumerate(drafts)]
            by_token += chance * np.cumprod(ratio).sum()
        gains.append(by_block - by_token)
    assert min(gains) > -1e-12
    if K == 1 or point_mass:
        assert max(gains) < 1e-12
    else:
        assert min(gains) > 0 and max(gains) > 0.01


@pytest.mark.parametrize("point_mass", [False, True])
@pytest.mark.parametrize("K, V", [(1, 3), (2, 3), (3, 3)])
def test_its_output_has_exactly_the_targets_distribution(K, V, point_mass, rng):
    """Summed over all drafts and lengths; what a step leaves open the target adds."""
    p, q = models(rng, K, V)
    output = dict.fromkeys(itertools.product(range(V), repeat=K + 1), 0.0)
    wanted = {text: np.prod([p[text[:i]][x] for i, x in enumerate(text)]) for text in output}
    for drafts, chance, rows_p, rows_q in all_drafts(p, q, K, V, point_mass):
        passing, weights = chances(rows_p, rows_q, drafts)
        for kept, share in enumerate(each_length(passing)):
            rest = weights[kept] * rows_p[kept]
            rest = np.maximum(rest - rows_q[kept], 0) if kept < K else rest
            if not share:
                continue
            for token in range(V):
                start = (*drafts[:kept], token)
                for text in output:
                    if text[: kept + 1] == start:
                        tail = [p[text[:i]][text[i]] for i in range(kept + 1, K + 1)]
                        output[text] += chance * share * rest[token] / rest.sum() * np.prod(tail)
    np.testing.assert_allclose(list(output.values()), list(wanted.values()), atol=1e-12)


def test_a_draft_that_fails_alone_is_kept_with_the_next():
    p = [[0.5, 0.3, 0.2], [0.1, 0.6, 0.3], [1 / 3] * 3]
    arguments = {
        "temperature": jnp.ones(1),
        "uniform": jnp.array([[0.95, 0.6]]),
        "exponential": jnp.ones((1, 1, 3)),
        "probs": jnp.array([[[0.25, 0.5, 0.25], [0.2, 0.5, 0.3]]]),
    }
    arrays = jnp.log(jnp.array([p])), jnp.array([[1, 1]]), jnp.array([2])
    assert run(*arrays, **arguments)[1].tolist() == [2]
    assert rejection.rejection(*arrays, **arguments)[1].tolist() == [0]


def test_every_step_gives_drafts_new_seeds():
    position = jnp.arange(1000, dtype=jnp.int32)
    seeds = rejection.draft_seed(jnp.full(1000, 3, jnp.int32), position)
    assert seeds.dtype == jnp.int32
    assert len(set(seeds.tolist())) == 1000
    assert (np.asarray(seeds) < 0).any()  # all 32 bits are random
    assert seeds.tolist() != rejection.draft_seed(jnp.full(1000, 4, jnp.int32), position).tolist()
