"""Constraints on what is sampled: a plain loop, ties, and what leaves a distribution alone."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec.verification import sampling

pytestmark = pytest.mark.any_device

constrain = jax.jit(sampling.constrain)
ALL = {"top_k": [0], "top_p": [1.0], "min_p": [0.0]}


def softmax(x):
    weights = np.exp(x - x.max())
    return weights / weights.sum()


def by_a_loop(logits, temperature, top_k=0, top_p=1.0, min_p=0.0):
    """The oracle: ids that are left, by sorting and adding up in float64."""
    V = len(logits)
    if not temperature > 0:
        return list(range(V))
    scores = logits.astype(np.float64) / temperature
    chances = softmax(scores)
    kept = [i for i in range(V) if chances[i] >= min_p * chances.max()]
    ranked = sorted(kept, key=lambda i: (-logits[i], i))
    if 0 < top_k < len(ranked):
        ranked = [i for i in ranked if logits[i] >= logits[ranked[top_k - 1]]]
    chances = softmax(scores[ranked])
    if 0 < top_p < 1:
        before = np.cumsum(chances) - chances
        ranked = [i for i, b in zip(ranked, before, strict=True) if b < top_p - 1e-9]
    return sorted(ranked)


def left(logits, temperature, **constraints):
    """Ids that are left in each row; their logits must be as they were."""
    constraints = {
        k: jnp.asarray(np.asarray(v, np.int32 if k == "top_k" else np.float32))
        for k, v in constraints.items()
    }
    logits = np.asarray(logits, np.float32)
    got = np.asarray(
        constrain(jnp.asarray(logits), jnp.asarray(temperature, jnp.float32), **constraints)
    )
    kept = got > -np.inf
    np.testing.assert_array_equal(got[kept], logits[kept])
    return [np.flatnonzero(row).tolist() for row in kept]


def test_a_temperature_that_some_devices_read_as_0_is_greedy_on_all_of_them():
    logits = jnp.asarray([[1, 3, 3, 2]], jnp.float32)
    tiny = float(np.finfo(np.float32).tiny)
    drawn = {
        temperature: {
            int(sampling.draw(logits, *np.float32([[temperature]]), *seed_and_place, stream=0)[0])
            for seed_and_place in np.arange(20, dtype=np.int32).reshape(10, 2, 1)
        }
        for temperature in (0.0, 1e-45, tiny / 2, tiny)
    }
    assert drawn == {0.0: {1}, 1e-45: {1}, tiny / 2: {1}, tiny: {1, 2}}  # a tie is drawn at random
    shares = sampling.distribution(jnp.repeat(logits, 2, 0), jnp.asarray([tiny / 2, tiny]))
    np.testing.assert_array_equal(shares, [[0, 1, 0, 0], [0, 0.5, 0.5, 0]])


@pytest.mark.parametrize("names", [["top_k"], ["top_p"], ["min_p"], ["min_p", "top_k", "top_p"]])
@pytest.mark.parametrize("ties", [False, True])
def test_any_constraints_match_the_loop(names, ties, rng):
    B, V = 60, 23
    logits = rng.normal(size=(B, V)) * 2
    if ties:  # in steps whose sums are far from the limits that are drawn below
        logits = rng.integers(0, 4, (B, V)) * 1.0
    temperature = rng.choice([0.0, 0.5, 1.0, 2.0], B)
    numbers = {
        "top_k": rng.choice([-1, 0, 1, 2, 5, 22, 23, 99], B),
        "top_p": rng.choice([0.05, 0.313, 0.777, 0.9501, 1.0], B),
        "min_p": rng.choice([0.0, 0.07, 0.41, 1.0], B),
    }
    numbers = {name: numbers[name] for name in names}
    wanted = [
        by_a_loop(
            logits[b].astype(np.float32), temperature[b], **{k: v[b] for k, v in numbers.items()}
        )
        for b in range(B)
    ]
    assert left(logits, temperature, **numbers) == wanted
    assert len({len(row) for row in wanted}) > 3


def test_of_equal_tokens_top_k_keeps_all_and_top_p_the_lowest_ids():
    logits = [[1.0, 3.0, 2.0, 2.0, 2.0]]
    assert left(logits, [1.0], top_k=[2]) == [[1, 2, 3, 4]]
    assert left(np.zeros((1, 4)), [1.0], top_p=[0.5]) == [[0, 1]]
    assert left(np.zeros((1, 4)), [1.0], top_p=[0.51]) == [[0, 1, 2]]


def test_constraints_hold_at_the_temperature():
    logits = np.log([[0.5, 0.3, 0.2]])
    assert left(logits, [1.0], min_p=[0.5]) == [[0, 1]]
    assert left(logits, [0.5], min_p=[0.5]) == [[0]]
    assert left(logits, [1.0], top_p=[0.6]) == [[0, 1]]
    assert left(logits, [0.5], top_p=[0.6]) == [[0]]


def test_top_p_counts_the_chances_that_top_k_leaves():
    logits = np.log([[0.4, 0.3, 0.2, 0.1]])
    assert left(logits, [1.0], top_p=[0.55]) == [[0, 1]]
    assert left(logits, [1.0], top_p=[0.55], top_k=[2]) == [[0]]  # 4 / 7 is enough


def test_the_best_token_is_never_excluded(rng):
    logits = rng.normal(size=(20, 9))
    strictest = {"top_k": [1] * 20, "top_p": [1e-6] * 20, "min_p": [1.0] * 20}
    for name, value in strictest.items():
        assert left(logits, [1.0] * 20, **{name: value}) == logits.argmax(1)[:, None].tolist()


@pytest.mark.parametrize("temperature", [0.0, -1.0, np.nan])
def test_greedy_rows_stay_as_they_are(temperature):
    assert left([[1.0, 2.0, 3.0]], [temperature], top_k=[1], top_p=[0.1], min_p=[1.0]) == [
        [0, 1, 2]
    ]


@pytest.mark.parametrize("name", ALL)
def test_the_number_that_means_all_excludes_nothing(name, rng):
    logits = rng.normal(size=(1, 50)) * 30  # many chances round to 0
    assert left(logits, [1.0], **{name: ALL[name]}) == [list(range(50))]


def test_what_was_excluded_before_stays_excluded_and_a_row_does_not_see_its_neighbours(rng):
    logits = rng.normal(size=(6, 12))
    logits[:, 3] = -np.inf
    numbers = {"top_k": [4, 0, 2, 7, 3, 0], "top_p": [0.9, 0.5, 1, 0.3, 0.8, 1], "min_p": [0.1] * 6}
    together = left(logits, [0.8] * 6, **numbers)
    assert all(3 not in row for row in together)
    for b in range(6):
        assert left(logits[b : b + 1], [0.8], **{k: v[b : b + 1] for k, v in numbers.items()}) == [
            together[b]
        ]


def test_draws_come_from_what_is_left(rng):
    logits = jnp.asarray(np.tile(rng.normal(size=(1, 8)), (3000, 1)).astype(np.float32))
    heat = jnp.full(3000, 1.3)
    kept = constrain(logits, heat, jnp.full(3000, 3, jnp.int32))
    tokens = sampling.draw(kept, heat, np.arange(3000), np.zeros(3000, np.int32), stream=0)
    best = np.argsort(-np.asarray(logits[0]))[:3]
    assert set(tokens.tolist()) == set(best.tolist())
    chances = np.asarray(sampling.distribution(kept, heat))[0]
    np.testing.assert_allclose(chances[best], softmax(np.asarray(logits[0])[best] / 1.3), rtol=1e-5)
