"""Rejection sampling: a plain loop, and independence of requests."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec.axes import PAD_TOKEN
from jspec.verification import greedy, rejection, sampling

pytestmark = pytest.mark.any_device

run = jax.jit(rejection.rejection)
run_synthetic = jax.jit(rejection.synthetic)
sampled = jax.jit(rejection.sampled, static_argnums=0)
METHODS = ("rejection", "block")


def one_request(rng, B, K, V, with_probs=True):
    """Draws a batch of steps; the drafts come from their distributions."""
    logits = rng.normal(size=(B, K + 1, V)).astype(np.float32) * 2
    q = np.exp(rng.normal(size=(B, K, V)))
    q = (q / q.sum(-1, keepdims=True)).astype(np.float32)
    drafts = np.array([[rng.choice(V, p=row / row.sum()) for row in rows] for rows in q])
    return logits, drafts.astype(np.int32).reshape(B, K), q if with_probs else None


def by_a_loop(logits, drafts, num_drafts, temperature, uniform, exponential, probs):
    """The oracle: the rule of arXiv 2211.17192, request by request, in float64."""
    rows = []
    for b, heat in enumerate(temperature):
        row = []
        for j in range(num_drafts[b] + 1):
            scores = logits[b, j].astype(np.float64)
            best = int(np.argmax(scores))
            if heat > 0:
                weights = np.exp((scores - scores.max()) / heat)
                p = weights / weights.sum()
            else:
                p = np.eye(len(scores))[best]
            draft = drafts[b, j] if j < num_drafts[b] else PAD_TOKEN
            if 0 <= draft < len(p):
                q = np.eye(len(p))[draft] if probs is None else probs[b, j].astype(np.float64)
                if heat > 0:
                    kept = p[draft] / q[draft] >= uniform[b, j]
                else:
                    kept = draft == best
                if kept:
                    row.append(int(draft))
                    continue
                p = np.maximum(p - q, 0)
            row.append(int(np.argmax(p / exponential[b, j])) if heat > 0 else best)
            break
        rows.append(row + [PAD_TOKEN] * (logits.shape[1] - len(row)))
    return rows


@pytest.mark.parametrize("with_probs", [False, True])
@pytest.mark.parametrize("B, K, V", [(1, 0, 3), (1, 1, 5), (9, 4, 7), (5, 7, 130)])
def test_any_size_matches_the_loop(B, K, V, with_probs, rng):
    """With greedy rows, placeholders, ids past the vocabulary and unused columns."""
    logits, drafts, probs = one_request(rng, B, K, V, with_probs)
    drafts[rng.random((B, K)) < 0.1] = PAD_TOKEN
    drafts[rng.random((B, K)) < 0.1] = V
    num_drafts = rng.integers(0, K + 1, B).astype(np.int32)
    temperature = rng.choice(np.array([0, -1, np.nan, 0.5, 1.0, 2.0], np.float32), B)
    uniform = rng.random((B, K)).astype(np.float32)
    exponential = rng.exponential(size=(B, K + 1, V)).astype(np.float32)
    arguments = {"temperature": temperature, "uniform": uniform, "exponential": exponential}
    wanted = by_a_loop(logits, drafts, num_drafts, probs=probs, **arguments)
    arguments = jax.tree.map(jnp.asarray, arguments | {"probs": probs})
    verified, accepted = run(*map(jnp.asarray, (logits, drafts, num_drafts)), **arguments)
    assert verified.tokens.tolist() == wanted
    assert accepted.tolist() == [sum(t != PAD_TOKEN for t in row) - 1 for row in wanted]


@pytest.mark.parametrize("method", METHODS)
def test_greedy_requests_get_what_greedy_verification_gives(method, rng):
    """Of equal scores the lowest id, whatever the drafter's distribution was."""
    B, K, V = 60, 3, 6
    logits = rng.integers(0, 3, (B, K + 1, V)).astype(np.float32)  # ties everywhere
    drafts = np.where(rng.random((B, K)) < 0.7, logits[:, :-1].argmax(-1), 2).astype(np.int32)
    num_drafts = rng.integers(0, K + 1, B).astype(np.int32)
    probs = rng.dirichlet(np.ones(V), (B, K)).astype(np.float32) * (rng.random((B, K, 1)) < 0.8)
    arrays = tuple(map(jnp.asarray, (logits, drafts, num_drafts)))
    wanted, count = greedy.greedy(*arrays)
    assert set(count.tolist()) == {0, 1, 2, 3}
    got, accepted = sampled(
        method,
        *arrays,
        temperature=jnp.zeros(B),
        seed=jnp.arange(B, dtype=jnp.int32),
        position=jnp.full(B, 5, jnp.int32),
        probs=jnp.asarray(probs.astype(np.float32)),
    )
    assert got.tokens.tolist() == wanted.tokens.tolist()
    assert accepted.tolist() == count.tolist()


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("with_probs", [False, True])
def test_neighbours_padding_and_the_bucket_change_nothing(method, with_probs, rng):
    B, K, V = 7, 4, 11
    logits, drafts, probs = one_request(rng, B, K, V, with_probs)
    drafts[:, :2] = logits[:, :2].argmax(-1)  # so that some are kept
    num_drafts = np.array([0, 1, 2, 3, 4, 4, 4], np.int32)
    numbers = {
        "temperature": rng.uniform(0.3, 2, B).astype(np.float32),
        "seed": rng.integers(-(2**31), 2**31, B).astype(np.int32),
        "position": rng.integers(0, 99, B).astype(np.int32),
    }

    def verify_rows(rows, columns=K, poison=0):
        """Verifies some rows, behind `poison` others and in another width."""
        pad = columns - K

        def take(x, axis_1=True):
            if x is None:
                return None
            x = x[rows]
            if axis_1:
                fill = np.full((len(x), pad, *x.shape[2:]), 3, x.dtype)
                x = np.concatenate([x, fill], axis=1)
            others = np.full((poison, *x.shape[1:]), 2, x.dtype)
            return jnp.asarray(np.concatenate([others, x]))

        arguments = {name: take(x, False) for name, x in numbers.items()}
        got, accepted = sampled(
            method,
            *(take(logits), take(drafts), take(num_drafts, False)),
            **arguments,
            probs=take(probs),
        )
        tokens = np.asarray(got.tokens)[poison:]
        assert (tokens[:, K + 1 :] == PAD_TOKEN).all()
        return tokens[:, : K + 1].tolist(), accepted.tolist()[poison:]

    wanted = verify_rows(np.arange(B))
    assert 0 < sum(wanted[1]) < num_drafts.sum()
    order = rng.permutation(B)
    assert verify_rows(order)[0] == [wanted[0][i] for i in order]
    assert verify_rows(np.arange(B), columns=K + 3, poison=2) == wanted
    for b in range(B):
        assert verify_rows(np.array([b]))[0] == [wanted[0][b]]


@pytest.mark.parametrize("method", METHODS)
def test_a_step_without_drafts_gives_the_token_that_plain_sampling_draws(method, rng):
    B, V = 50, 40
    logits = jnp.asarray(rng.normal(size=(B, 1, V)).astype(np.float32))
    numbers = jnp.full(B, 0.8), jnp.arange(B, dtype=jnp.int32), jnp.full(B, 4, jnp.int32)
    nothing = jnp.zeros((B, 0), jnp.int32), jnp.zeros(B, jnp.int32)
    got, _ = sampled(
        method,
        *(logits, *nothing),
        **dict(zip(("temperature", "seed", "position"), numbers, strict=True)),
        probs=jnp.zeros((B, 0, V)),
    )
    drawn = sampling.draw(logits[:, 0], *numbers, stream=rejection.TARGET_STREAM)
    assert got.tokens[:, 0].tolist() == drawn.tolist()


def test_a_placeholder_is_rejected_and_the_token_after_it_is_the_targets_own():
    """Not of the residual: with q the whole of p on token 0, that would exclude it."""
    logits = jnp.log(jnp.array([[[0.9, 0.05, 0.05]] * 2]))
    probs = jnp.array([[[1.0, 0.0, 0.0]]])
    for method in (rejection.rejection, rejection.block):
        verified, accepted = method(
            logits,
            jnp.array([[PAD_TOKEN]]),
            jnp.array([1]),
            temperature=jnp.ones(1),
            uniform=jnp.full((1, 1), 1e-6),
            exponential=jnp.ones((1, 1, 3)),
            probs=probs,
        )
        assert verified.tokens.tolist() == [[0, PAD_TOKEN]]
        assert accepted.tolist() == [0]


@pytest.mark.parametrize("method", METHODS)
def test_a_draft_that_the_target_never_says_is_never_kept(method):
    B = 4000
    logits = jnp.broadcast_to(jnp.array([0.0, -jnp.inf, 1.0])[None, None], (B, 2, 3))
    got, accepted = sampled(
        method,
        logits,
        jnp.ones((B, 1), jnp.int32),
        jnp.ones(B, jnp.int32),
        temperature=jnp.ones(B),
        seed=jnp.arange(B, dtype=jnp.int32),
        position=jnp.zeros(B, jnp.int32),
    )
    assert not accepted.any()
    assert set(got.tokens[:, 0].tolist()) == {0, 2}


def test_where_rounding_leaves_no_residual_the_token_is_one_that_the_target_says():
    """The draft is refused although p = q: id 0 would be what the target never says."""
    verified, accepted = run(
        jnp.log(jnp.array([[[0.0, 1.0, 0.0]] * 2])),
        jnp.array([[1]]),
        jnp.array([1]),
        temperature=jnp.ones(1),
        uniform=jnp.full((1, 1), 1.5),
        exponential=jnp.ones((1, 1, 3)),
    )
    assert accepted.tolist() == [0]
    assert verified.tokens.tolist() == [[1, PAD_TOKEN]]


@pytest.mark.usefixtures("as_users_run_it")
@pytest.mark.parametrize(
    "wanted, given",
    [
        ([0.9, 2 / 3, 0.5], {"rates": [0.9, 0.6, 0.3]}),
        ([1, 0.5, 0], {"length": 2.5}),
        ([1, 1, 1], {"length": 4}),
        ([0, 0, 0], {"length": 1}),
        ([0.5, 0, 0], {"rates": [0.5, 0, 0]}),
    ],
)
def test_synthetic_rates_are_conditional(wanted, given):
    with warnings.catch_warnings(action="error"):
        rates = rejection.synthetic_rates(3, **given)
    assert rates.dtype == np.float32
    np.testing.assert_allclose(rates, wanted, atol=1e-7)


@pytest.mark.parametrize("rate", [0, 1])
def test_synthetic_rates_of_none_and_all_hold_for_every_random_number(rate):
    uniform = jnp.array([[2.0**-24], [0.5], [1.0]], jnp.float32)
    _, accepted = run_synthetic(
        jnp.zeros((3, 2, 4)),
        jnp.ones((3, 1), jnp.int32),
        jnp.ones(3, jnp.int32),
        rates=jnp.array([rate], jnp.float32),
        temperature=jnp.ones(3),
        uniform=uniform,
        exponential=jnp.ones((3, 1, 4)),
    )
    assert accepted.tolist() == [rate] * 3


@pytest.mark.parametrize("uniform", [0.0, 2.0**-24, 0.5, 1.0])
@pytest.mark.parametrize("with_probs", [False, True])
@pytest.mark.parametrize("method", [*METHODS, "synthetic"])
def test_probability_0_is_never_kept_and_probability_1_always(method, with_probs, uniform):
    """Also for u = 0 and u = 1, the ends of both half-open intervals."""
    B, K, V = 2, 2, 4
    p = np.eye(V, dtype=np.float32)[np.array([[1, 2, 3], [1, 2, 3]])]  # [B, K + 1, V]
    arguments = {
        "temperature": jnp.ones(B),
        "uniform": jnp.full((B, K), uniform),
        "exponential": jnp.ones((B, 1, V)),
    }
    if method == "synthetic":
        arguments["rates"] = jnp.array([1.0, 0.0])
    if with_probs:
        arguments["probs"] = jnp.asarray(p[:, :K])
    drafts = jnp.array([[1, 2], [1, 3]])  # of the second the target has probability 1 and 0
    verified, accepted = getattr(rejection, method)(
        *(jnp.log(jnp.asarray(p)), drafts, jnp.full(B, K)), **arguments
    )
    assert accepted.tolist() == ([1, 1] if method == "synthetic" else [2, 1])
    assert verified.tokens[1].tolist() == [1, 2, PAD_TOKEN]  # in the place of 3


@pytest.mark.parametrize("uniform", [0.0, 1.0])
@pytest.mark.parametrize("method", METHODS)
def test_a_draft_of_probability_0_for_target_and_drafter_is_not_kept(method, uniform):
    verified, accepted = getattr(rejection, method)(
        jnp.log(jnp.array([[[0.5, 0.5, 0.0]] * 2])),
        jnp.array([[2]]),
        jnp.array([1]),
        temperature=jnp.ones(1),
        uniform=jnp.full((1, 1), uniform),
        exponential=jnp.array([[[2.0, 1.0, 1e-30]]]),
        probs=jnp.array([[[0.5, 0.5, 0.0]]]),
    )
    assert accepted.tolist() == [0]
    assert verified.tokens.tolist() == [[1, PAD_TOKEN]]


@pytest.mark.parametrize("largest", [np.inf, np.finfo(np.float32).max])
@pytest.mark.parametrize("method", METHODS)
def test_a_token_of_probability_0_is_not_drawn_where_every_score_is_0(method, largest):
    """The only token that is left has a score that underflows; so have those of probability 0."""
    verified, accepted = getattr(rejection, method)(
        jnp.log(jnp.array([[[0.0, 0.9, 0.1]] * 2])),
        jnp.array([[1]]),
        jnp.array([1]),
        temperature=jnp.ones(1),
        uniform=jnp.ones((1, 1)),
        exponential=jnp.full((1, 1, 3), largest, jnp.float32),
    )
    assert accepted.tolist() == [0]
    assert verified.tokens.tolist() == [[2, PAD_TOKEN]]


def test_synthetic_acceptance_has_the_wanted_length(rng):
    B, K, V = 40_000, 3, 4
    verified, accepted = run_synthetic(
        jnp.zeros((B, K + 1, V)),
        jnp.ones((B, K), jnp.int32),
        jnp.full(B, K, jnp.int32),
        rates=jnp.asarray(rejection.synthetic_rates(K, rates=[0.9, 0.6, 0.3])),
        temperature=jnp.ones(B),
        uniform=jnp.asarray(rng.random((B, K)).astype(np.float32)),
        exponential=jnp.asarray(rng.exponential(size=(B, 1, V)).astype(np.float32)),
    )
    shares = [(np.asarray(accepted) > j).mean() for j in range(K)]
    np.testing.assert_allclose(shares, [0.9, 0.6, 0.3], atol=0.01)  # four standard errors
    first = np.asarray(verified.tokens)[accepted == 0, 0]
    assert set(first) == {0, 2, 3}  # a refused draft is not drawn again


@pytest.mark.usefixtures("as_users_run_it")
@pytest.mark.parametrize(
    "given, word",
    [
        ({}, "exactly one"),
        ({"rates": [1.0] * 3, "length": 2}, "exactly one"),
        ({"length": 0.9}, "1..4"),
        ({"length": 4.5}, "num_drafts"),
        ({"length": float("nan")}, "1..4"),
        ({"rates": [0.5, 0.5]}, "a rate for each draft"),
        ({"rates": [0.5, 0.6, 0.1]}, "Lower the later"),
        ({"rates": [1.5, 0.6, 0.1]}, "numbers in 0..1"),
        ({"rates": [0.5, 0.1, float("nan")]}, "numbers in 0..1"),
    ],
)
def test_rates_that_are_none_are_refused(given, word):
    with pytest.raises(ValueError, match=word):
        rejection.synthetic_rates(3, **given)


@pytest.mark.usefixtures("as_users_run_it")
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    "change, word",
    [
        ({"logits": jnp.zeros((2, 3, 5))}, "one logits row per draft"),
        ({"uniform": jnp.zeros((2, 2))}, "`uniform` .2, 2."),
        ({"probs": jnp.zeros((2, 3, 4))}, "over the target's vocabulary"),
    ],
)
def test_shapes_that_do_not_fit_are_refused(method, change, word):
    arguments = {
        "logits": jnp.zeros((2, 4, 5)),
        "drafts": jnp.zeros((2, 3), jnp.int32),
        "num_drafts": jnp.ones(2, jnp.int32),
        "temperature": jnp.ones(2),
        "uniform": jnp.zeros((2, 3)),
        "exponential": jnp.ones((2, 1, 5)),
    }
    with pytest.raises(ValueError, match=word):
        getattr(rejection, method)(**arguments | change)
