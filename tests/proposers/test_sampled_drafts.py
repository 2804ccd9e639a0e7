"""Drafts sampled at a temperature: their distribution, and independence of other requests."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec.proposers import _draft
from jspec.proposers._config import DraftingConfig
from jspec.proposers._draft import Vocabulary
from jspec.state import Batch
from jspec.verification import rejection, sampling

pytestmark = pytest.mark.any_device

CONFIG = DraftingConfig(num_drafts=2, draft_sampling="probabilistic")
CHANCES = np.array([0.4, 0.25, 0.15, 0.1, 0.07, 0.03])
NUM_DRAWS = 20_000
# Chi-square that draws from the right distribution stay below in 99.99 % of all cases.
LIMIT_6 = 25.7  # 6 tokens: 5 degrees of freedom
LIMIT_36 = 74.9  # 36 pairs of tokens: 35 degrees of freedom

draw = jax.jit(sampling.draw, static_argnames="stream")
distribution = jax.jit(sampling.distribution)


def softmax(logits, temperature):
    """The oracle, in float64."""
    scores = np.asarray(logits, np.float64) / temperature
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True)


def batch_of(position, seed, temperature):
    """A step of one row a request; the next token's place is `position + 1`."""
    B = len(position)
    position = np.asarray(position, np.int32)

    def full(value):
        return np.full(B, value, np.int32)

    return Batch(
        token_ids=full(0),
        positions=position,
        query_start=np.arange(B + 1, dtype=np.int32),
        seq_lens=position + 1,
        block_table=full(0)[:, None],
        num_drafts=full(0),
        request_slot=np.arange(B, dtype=np.int32),
        backup_token=full(0),
        discard=np.zeros(B, bool),
        temperature=np.broadcast_to(np.asarray(temperature, np.float32), B),
        seed=np.broadcast_to(np.asarray(seed, np.int32), B),
        next_token=full(0),
        last_index=np.arange(B, dtype=np.int32),
        num_valid=full(1),
        num_rejected=full(0),
    )


def pick(logits, position, seed, temperature, index=0, vocabulary=None):
    """Picks draft `index` of each request, as the draft loop does."""
    logits = np.asarray(logits, np.float32)
    vocabulary = vocabulary or Vocabulary(logits.shape[-1])
    picked = jax.jit(lambda x, b: _draft.pick(vocabulary, CONFIG, x, b, index))
    return jax.tree.map(np.asarray, picked(logits, batch_of(position, seed, temperature)))


def chi_square(tokens, chances):
    """Compares how often each id 0, 1, ... was drawn with how often it should be."""
    wanted = chances * len(tokens)
    return ((np.bincount(tokens, minlength=len(chances)) - wanted) ** 2 / wanted).sum()


@functools.cache
def many(vary, index=0, temperature=0.8):
    """20,000 drafts from the same logits, under as many seeds, or as many places in a text."""
    logits = np.tile(0.8 * np.log(CHANCES), (NUM_DRAWS, 1))  # at temperature 0.8: CHANCES
    numbers = np.arange(NUM_DRAWS)
    position, seed = (np.full(NUM_DRAWS, 17), numbers) if vary == "seed" else (numbers, -5)
    return pick(logits, position, seed, temperature, index)


@pytest.mark.parametrize("vary", ["seed", "position"])
def test_draws_follow_the_distribution_that_comes_with_them(vary):
    tokens, probs = many(vary)
    np.testing.assert_allclose(probs, np.tile(CHANCES, (NUM_DRAWS, 1)), atol=1e-6)
    assert chi_square(tokens, CHANCES) < LIMIT_6


def test_draws_at_a_slightly_wrong_temperature_would_be_noticed():
    tokens, _ = many("seed", temperature=0.88)
    assert chi_square(tokens, CHANCES) > LIMIT_6


@pytest.mark.parametrize("vary", ["seed", "position"])
def test_the_drafts_of_a_request_are_drawn_independently(vary):
    pairs = 6 * many(vary)[0] + many(vary, index=1)[0]
    assert chi_square(pairs, np.outer(CHANCES, CHANCES).ravel()) < LIMIT_36


def test_drafts_and_verification_draw_independently():
    tokens, _ = many("seed")
    logits = np.tile(np.log(CHANCES).astype(np.float32), (NUM_DRAWS, 1))
    arguments = (np.ones(NUM_DRAWS, np.float32), np.arange(NUM_DRAWS, dtype=np.int32))
    place = np.full(NUM_DRAWS, 19, np.int32)  # that of the first draft behind row 17
    drawn = draw(logits, *arguments, place, stream=rejection.TARGET_STREAM)
    pairs = 6 * tokens + np.asarray(drawn)
    assert chi_square(pairs, np.outer(CHANCES, CHANCES).ravel()) < LIMIT_36
    same = draw(logits, *arguments, place, stream=_draft._STREAM)
    np.testing.assert_array_equal(same, tokens)  # the place is the right one


def test_a_place_in_a_text_draws_the_same_whichever_step_drafts_it(rng):
    logits = rng.normal(size=(40, 9))
    seed, position = rng.integers(-(2**31), 2**31, 40), np.arange(40)
    later, _ = pick(logits, position + 1, seed, 1.0, index=0)
    earlier, _ = pick(logits, position, seed, 1.0, index=1)
    assert later.tolist() == earlier.tolist()
    assert later.tolist() != pick(logits, position, seed, 1.0, index=0)[0].tolist()


def test_a_draw_does_not_depend_on_other_rows(rng):
    logits, temperature = rng.normal(size=(7, 33)), rng.uniform(0.2, 2, 7)
    seed, position = rng.integers(0, 99, 7), rng.integers(0, 99, 7)
    tokens, _ = pick(logits, position, seed, temperature)
    order = rng.permutation(7)
    permuted, _ = pick(logits[order], position[order], seed[order], temperature[order])
    assert permuted.tolist() == tokens[order].tolist()
    alone = [
        pick(logits[i : i + 1], position[i : i + 1], seed[i], temperature[i])[0] for i in range(7)
    ]
    assert np.concatenate(alone).tolist() == tokens.tolist()


def test_the_distribution_is_the_softmax_at_the_temperature_over_the_whole_vocabulary(rng):
    logits, temperature = rng.normal(size=(5, 4)) * 3, np.array([1.0, 0.3, 2.5, 40.0, 0.05])
    target_ids = jnp.array([1, 4, 5, 9], jnp.int32)
    vocabulary = Vocabulary(11, target_ids)
    tokens, probs = pick(logits, range(5), 3, temperature, vocabulary=vocabulary)
    wanted = np.zeros((5, 11))
    wanted[:, np.asarray(target_ids)] = softmax(logits, temperature[:, None])
    assert probs.dtype == np.float32
    np.testing.assert_allclose(probs, wanted, atol=1e-6, rtol=1e-5)
    assert (np.take_along_axis(probs, tokens[:, None], 1) > 0).all()


@pytest.mark.parametrize("temperature", [0.0, -1.0, np.nan, 1e-30])
def test_without_a_temperature_the_best_token_is_certain_and_the_lowest_of_equals(temperature):
    logits = [[0.0, 5.0, 5.0, 1.0], [9.0, 3.0, 2.0, 1.0]]
    if temperature > 0:
        logits[0][2] = 4.0  # equals would share the chance
    tokens, probs = pick(logits, [4, 5], 8, temperature)
    assert tokens.tolist() == [1, 0]
    assert probs.tolist() == [[0, 1, 0, 0], [1, 0, 0, 0]]


@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize(
    "logits, wanted",
    [
        ([np.nan, 1.0, np.nan], 0),
        ([-np.inf, -np.inf, -np.inf], 0),
        ([1.0, np.inf, 2.0], 1),
        ([-np.inf, 3.0, -np.inf], 1),
    ],
)
def test_scores_that_are_no_numbers_give_a_token_and_a_distribution(logits, wanted, temperature):
    tokens, probs = pick([logits], [2], 1, temperature)
    assert tokens.tolist() == [wanted]
    assert probs.tolist() == [np.eye(3)[wanted].tolist()]


def test_a_token_without_a_chance_is_never_drawn():
    logits = np.tile(np.array([0.0, -np.inf, 1.0], np.float32), (2000, 1))
    tokens, probs = pick(logits, np.arange(2000), 6, 1.0)
    assert set(tokens.tolist()) == {0, 2}
    assert (probs[:, 1] == 0).all()
