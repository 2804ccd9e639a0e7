"""Rejection sampling of drafts, token by token or by block.

The output has the distribution of tokens that are sampled from the target without drafts.
`rejection`, `block` and `synthetic` take their random numbers as arguments; `sampled` generates
them from the seed and the position of each request. A draft is kept if its uniform number in (0, 1]
is at most its acceptance probability and that is above 0: a draft of probability 0 is never kept,
even if the uniform number is 0. Sources: arXiv 2211.17192 and 2403.10444.
"""

import functools
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from jspec.axes import PAD_TOKEN, AnyArray
from jspec.state import Verified
from jspec.verification import sampling

TARGET_STREAM = 0
"""Random stream of the target's tokens, the same as without drafts."""

_TEST_STREAM = 2
"""Random stream of the acceptance tests; the drafts themselves are drawn from stream 1."""

_SEED_STREAM = 3
"""Random stream of new seeds."""


def rejection(
    logits: Float[Array, "B W V"],
    drafts: Int[Array, "B K"],
    num_drafts: Int[Array, "B"],
    *,
    temperature: Float[Array, "B"],
    uniform: Float[Array, "B K"],
    exponential: Float[Array, "B N V"],
    probs: Float[Array, "B K V"] | None = None,
    bonus: Int[Array, "B"] | None = None,
) -> tuple[Verified, Int[Array, "B"]]:
    """Keeps each draft with probability min(1, p / q), up to the first that fails.

    In: p [[.5 .3 .2] [.1 .6 .3] ...], drafts [[0 1]], no q, uniform [[.4 .7]], 1 / exponential
    [[1 2 4]]. Out: tokens [[0 2 -1]], num_accepted [1]: .6 < .7, and .3 * 4 beats .1 * 1.

    Args:
      logits: row j is the target's prediction after j drafts; W = K + 1. Top-k, top-p and min-p
        are applied already (see `jspec.verification.sampling.constrain`), the temperature is not.
        The target's distribution p is computed from it.
      drafts: PAD after the last; an id outside the vocabulary is rejected.
      num_drafts: drafts of each request; later columns are ignored.
      temperature: of each request, as `sampling.draw`; a greedy request keeps drafts that equal the
        argmax, the lowest id on ties.
      uniform: a number in (0, 1] per draft.
      exponential: Exp(1) noise that the token after the kept drafts is sampled with. N = W: a row
        for each column of that token; N = 1: one row for all columns.
      probs: the drafter's distribution of each draft (q), over the target's vocabulary; None where
        drafts depend on the context alone (one-hot q).
      bonus: token of requests whose drafts were all kept, where it was sampled beforehand.

    Returns:
      (verified, num_accepted): kept drafts and then a token of the target, PAD after it; how many
      drafts were kept. The token is sampled from max(p - q, 0) after a rejected draft, else from p.

    Raises:
      ValueError: the shapes contradict each other.

    Source: vLLM v1/sample/rejection_sampler.py, rejection_sample and sample_recovered_tokens.
    """
    inputs = (temperature, uniform, exponential, probs, bonus)
    step = _read("rejection", logits, drafts, num_drafts, *inputs)
    return _emit(step, _test_each(step))


def block(
    logits: Float[Array, "B W V"],
    drafts: Int[Array, "B K"],
    num_drafts: Int[Array, "B"],
    **inputs: Any,
) -> tuple[Verified, Int[Array, "B"]]:
    """Keeps the longest prefix of drafts that passes a test of the whole prefix.

    A draft that `rejection` rejects may be kept together with those after it. On average at least
    as many drafts are kept as by `rejection`.

    In: p [[.5 .3 .2] [.1 .6 .3] ...], q [[.25 .5 .25] [.2 .5 .3]], drafts [[1 1]], uniform
    [[.5 .6]]. The prefixes pass with probabilities 0 and min(1, .6 * 1.2) = .72. Out: num_accepted
    [2].

    Args, Returns, Raises: as `rejection`. But `uniform` must be generated anew for every step: the
      numbers of rejected drafts are used, too, and the next step's must be independent of them.

    Source: arXiv 2403.10444; vLLM v1/worker/gpu/spec_decode/rejection_sampler_utils.py.
    """
    step = _read("block", logits, drafts, num_drafts, **inputs)
    return _emit(step, _test_block(step))


def synthetic(
    logits: Float[Array, "B W V"],
    drafts: Int[Array, "B K"],
    num_drafts: Int[Array, "B"],
    *,
    rates: Float[AnyArray, "K"],
    **inputs: Any,
) -> tuple[Verified, Int[Array, "B"]]:
    """Keeps drafts at given rates, whatever their tokens: for load tests, not for real text.

    Args:
      rates: from `synthetic_rates`: acceptance probability of each draft, given that those before
        it were kept.

    Other Args, Returns, Raises: as `rejection`.

    Source: vLLM v1/sample/rejection_sampler.py, synthetic mode.
    """
    step = _read("synthetic", logits, drafts, num_drafts, **inputs)
    rates = jnp.asarray(rates, jnp.float32)[None]
    return _emit(step, _Kept.prefix(step.is_token & _passes(rates, step.uniform)))


def synthetic_rates(
    num_drafts: int, *, rates: Sequence[float] | None = None, length: float | None = None
) -> np.ndarray:
    """Converts unconditional acceptance rates to the conditional ones that `synthetic` takes.

    In: num_drafts 3, rates [.9 .6 .3]. Out: [.9 .667 .5]. In: length 2.5. Out: [1 .5 0].

    Args:
      num_drafts: K.
      rates: share of all steps that keep each draft: K non-increasing numbers in 0..1.
      length: instead of `rates`: mean tokens of a step, 1..K + 1.

    Returns:
      float32 [K]: rates among the steps that kept all drafts before.

    Raises:
      ValueError: not exactly one of `rates` and `length` is given, or it is out of range.
    """
    if (rates is None) == (length is None):
        raise ValueError(
            f"synthetic_rates: `rates` is {rates!r} and `length` {length!r}. Pass exactly one."
        )
    if length is not None:
        if not 1 <= length <= num_drafts + 1:
            raise ValueError(
                f"synthetic_rates: `length` is {length!r}, wanted 1..{num_drafts + 1}: a step "
                "gives one token, and one more for each kept draft. Change it, or num_drafts."
            )
        kept = np.clip(length - 1 - np.arange(num_drafts), 0, 1)
    else:
        kept = np.asarray(rates, np.float64)
        if kept.shape != (num_drafts,):
            raise ValueError(
                f"synthetic_rates: `rates` has shape {kept.shape}, wanted ({num_drafts},). Pass a "
                "rate for each draft."
            )
        if not ((kept >= 0) & (kept <= 1)).all() or (np.diff(kept) > 0).any():
            raise ValueError(
                f"synthetic_rates: `rates` is {rates!r}, wanted numbers in 0..1 that do not grow: "
                "a draft is kept only with those before it. Lower the later rates."
            )
    before = np.concatenate([[1.0], kept])[:num_drafts]
    return np.divide(kept, before, out=np.zeros(num_drafts), where=before > 0).astype(np.float32)


def sampled(
    method: Literal["rejection", "block"],
    logits: Float[Array, "B W V"],
    drafts: Int[Array, "B K"],
    num_drafts: Int[Array, "B"],
    *,
    temperature: Float[Array, "B"],
    seed: Int[Array, "B"],
    position: Int[Array, "B"],
    probs: Float[Array, "B K V"] | None = None,
) -> tuple[Verified, Int[Array, "B"]]:
    """Verifies drafts with random numbers that are functions of each request's seed and position.

    So a request's tokens depend neither on other requests nor on padding. A step without drafts
    gives the token that sampling without drafts gives.

    Args:
      method: "rejection" or "block".
      logits, drafts, num_drafts, temperature, probs: as `rejection`.
      seed: of each request.
      position: of the first token that the step gives.

    Returns, Raises: as `rejection`.
    """
    keys = sampling.keys(seed, position, stream=_TEST_STREAM)
    columns = jnp.arange(drafts.shape[1], dtype=jnp.int32)

    def uniform_of(key: Array, column: Array) -> Array:  # independent of K; in (0, 1]
        return 1 - jax.random.uniform(jax.random.fold_in(key, column), dtype=jnp.float32)

    uniform = jax.vmap(jax.vmap(uniform_of, (None, 0)), (0, None))(keys, columns)  # [B, K]
    step = _read("sampled", logits, drafts, num_drafts, temperature, uniform, None, probs)
    kept = _TESTS[method](step)
    last = position + kept.num_accepted
    noise = sampling.gumbel(seed, last, logits.shape[-1], stream=TARGET_STREAM)
    return _emit(step._replace(exponential=jnp.exp(-noise)[:, None]), kept)


def draft_seed(seed: Int[AnyArray, "B"], position: Int[AnyArray, "B"]) -> Int[Array, "B"]:
    """Returns seeds for the next step's drafts, where drafts are verified by `block`.

    `block` also uses the random numbers of drafts that it rejects. If the next step sampled those
    drafts with the same seed, they would depend on that test, and the output would be biased.

    Args:
      seed: of each request.
      position: of the first token that the last step gave.
    """
    keys = sampling.keys(seed, position, stream=_SEED_STREAM)
    bits = jax.vmap(functools.partial(jax.random.bits, dtype=jnp.uint32))(keys)
    return jax.lax.bitcast_convert_type(bits, jnp.int32)


def parse_output(
    tokens: np.ndarray, vocab_size: int, *, discard: Sequence[int] = ()
) -> list[list[int]]:
    """Lists the valid tokens of each request, on the host.

    In: tokens [[1 2 -1] [3 -1 4] [9 10 11]], vocab_size 10, discard [0]. Out: [[], [3 4], [9]].

    Args:
      tokens: int [B, W]; PAD and ids at or above `vocab_size` are left out in every column.
      vocab_size: V.
      discard: rows whose tokens do not count.

    Source: vLLM v1/sample/rejection_sampler.py, RejectionSampler.parse_output.
    """
    tokens = np.asarray(tokens)
    valid = (tokens != PAD_TOKEN) & (tokens < vocab_size)
    valid[list(discard)] = False
    return [row[keep].tolist() for row, keep in zip(tokens, valid, strict=True)]


class _Step(NamedTuple):
    """A step's drafts, their probabilities under target and drafter, and the random numbers."""

    target: Float[Array, "B W V"]  # p
    best: Int[Array, "B W"]
    is_random: Bool[Array, "B 1"]
    drafts: Int[Array, "B K"]
    num_drafts: Int[Array, "B"]
    is_token: Bool[Array, "B K"]  # drafts before the first id outside the vocabulary
    p: Float[Array, "B K"]  # the target's probability of each draft
    q: Float[Array, "B K"]  # the drafter's
    probs: Float[Array, "B K V"] | None
    uniform: Float[Array, "B K"]
    exponential: Float[Array, "B N V"] | None
    bonus: Int[Array, "B"] | None


class _Kept(NamedTuple):
    """How many drafts are kept, and the factor of p in the residual max(factor * p - q, 0)."""

    num_accepted: Int[Array, "B"]
    factor: Float[Array, "B"]

    @classmethod
    def prefix(cls, passes: Bool[Array, "B K"]) -> "_Kept":
        """Keeps drafts up to the first that does not pass."""
        count = jnp.cumprod(passes, axis=1, dtype=jnp.int32).sum(axis=1, dtype=jnp.int32)
        return cls(count, jnp.ones(count.shape, jnp.float32))


def _read(
    owner: str,
    logits: Array,
    drafts: Array,
    num_drafts: Array,
    temperature: Float[Array, "B"],
    uniform: Float[Array, "B K"],
    exponential: Float[Array, "B N V"] | None,
    probs: Array | None = None,
    bonus: Int[Array, "B"] | None = None,
) -> _Step:
    """Checks the shapes and looks up the probabilities of the drafts."""
    B, W, V = logits.shape if logits.ndim == 3 else (-1, -1, -1)
    if drafts.shape != (B, W - 1) or uniform.shape != drafts.shape:
        raise ValueError(
            f"{owner}: `logits` has shape {logits.shape}, `drafts` {drafts.shape} and `uniform` "
            f"{uniform.shape}, wanted [B, K + 1, V], [B, K] and [B, K]. Gather one logits row per "
            "draft and one after the last."
        )
    if probs is not None and probs.shape != (B, W - 1, V):
        raise ValueError(
            f"{owner}: `probs` has shape {probs.shape}, wanted [B, K, V], {(B, W - 1, V)}. Pass "
            "the distribution of each draft over the target's vocabulary, or None."
        )
    flat = logits.reshape(B * W, V)
    target = sampling.distribution(flat, jnp.repeat(jnp.asarray(temperature), W))
    target = target.reshape(B, W, V)
    column = jnp.arange(W - 1, dtype=jnp.int32)[None]
    is_token = (drafts >= 0) & (drafts < V) & (column < num_drafts[:, None])
    is_token = jnp.cumprod(is_token, axis=1, dtype=jnp.int32) > 0
    index = jnp.where(is_token, drafts, 0)[:, :, None]
    q = jnp.ones(drafts.shape, jnp.float32)
    if probs is not None:
        q = jnp.take_along_axis(probs, index, axis=2, mode="clip")[:, :, 0]
    return _Step(
        target=target,
        best=jnp.argmax(logits, axis=-1).astype(jnp.int32),
        is_random=sampling.draws(temperature)[:, None],
        drafts=drafts,
        num_drafts=num_drafts,
        is_token=is_token,
        p=jnp.take_along_axis(target[:, :-1], index, axis=2, mode="clip")[:, :, 0],
        q=q,
        probs=probs,
        uniform=uniform,
        exponential=exponential,
        bonus=bonus,
    )


def _passes(probability: Array, uniform: Array) -> Array:
    """Tests probabilities with numbers in (0, 1]; probability 0 fails, even if a number is 0."""
    return (probability > 0) & (uniform <= probability)


def _test_each(step: _Step) -> _Kept:
    ratio = jnp.where(step.q > 0, step.p / jnp.where(step.q > 0, step.q, 1), 0)
    keeps = jnp.where(step.is_random, _passes(ratio, step.uniform), _is_best(step))
    return _Kept.prefix(step.is_token & keeps)


def _test_block(step: _Step) -> _Kept:
    B, K = step.drafts.shape
    weights = [jnp.ones(B, jnp.float32)]
    for i in range(K):
        p, q = step.p[:, i], step.q[:, i]
        ratio = jnp.where(q > 0, weights[-1] * p / jnp.where(q > 0, q, 1), 0)
        weights.append(jnp.minimum(ratio, 1))
    weight = jnp.stack(weights, axis=1)  # [B, W]
    if step.probs is None:
        gain = weight[:, :-1] * (1 - step.p)  # max(weight * p - q, 0), where q is 1 at the draft
    else:
        gain = weight[:, :-1, None] * step.target[:, :-1] - step.probs
        gain = jnp.maximum(gain, 0).sum(axis=-1)  # [B, K, V] -> [B, K]
    least = gain + 1 - weight[:, :-1]
    prob = jnp.where(least > 0, gain / jnp.where(least > 0, least, 1), 1)
    prob = jnp.concatenate([prob[:, 1:], weight[:, -1:]], axis=1)[:, :K]  # of prefixes 1..K
    length = jnp.arange(1, K + 1, dtype=jnp.int32)[None]
    num_tokens = step.is_token.sum(axis=1, dtype=jnp.int32)[:, None]
    prob = jnp.where(length == num_tokens, weight[:, 1:], prob)
    passes = _passes(prob, step.uniform) & (length <= num_tokens)
    count = jnp.max(jnp.where(passes, length, 0), axis=1, initial=0)
    greedy = _Kept.prefix(step.is_token & _is_best(step)).num_accepted
    count = jnp.where(step.is_random[:, 0], count, greedy)
    weight = jnp.take_along_axis(weight, count[:, None], axis=1, mode="clip")[:, 0]
    return _Kept(count, weight)


_TESTS = {"rejection": _test_each, "block": _test_block}


def _is_best(step: _Step) -> Bool[Array, "B K"]:
    return step.drafts == step.best[:, :-1]


def _emit(step: _Step, kept: _Kept) -> tuple[Verified, Int[Array, "B"]]:
    """Samples the token after the kept drafts."""
    assert step.exponential is not None
    B, W, V = step.target.shape
    at = kept.num_accepted[:, None]

    def here(x: Array) -> Array:
        index = jnp.minimum(at, x.shape[1] - 1)[:, :, None]
        return jnp.take_along_axis(x, index, axis=1, mode="clip")[:, 0]

    p = here(step.target)  # [B, V]
    drafts = jnp.pad(step.drafts, ((0, 0), (0, 1)), constant_values=PAD_TOKEN)
    if step.probs is None or W == 1:
        q = jax.nn.one_hot(here(drafts[:, :, None])[:, 0], V, dtype=jnp.float32)
    else:
        q = here(step.probs)
    rejected = jnp.pad(step.is_token, ((0, 0), (0, 1)))
    rejected = jnp.take_along_axis(rejected, at, axis=1, mode="clip")  # [B, 1]
    rest = jnp.maximum(kept.factor[:, None] * p - jnp.where(rejected, q, 0), 0)
    # Rounding may reject a draft although p = q; the residual is 0 then, and p replaces it.
    rest = jnp.where(rest.max(axis=1, keepdims=True) > 0, rest, p)
    # A score may underflow to 0; tokens of probability 0 stay below that.
    scores = jnp.where(rest > 0, rest / here(step.exponential), -1)
    token = jnp.argmax(scores, axis=1).astype(jnp.int32)
    best = jnp.take_along_axis(step.best, at, axis=1, mode="clip")[:, 0]
    token = jnp.where(step.is_random[:, 0], token, best)
    if step.bonus is not None:
        bonus = step.bonus.astype(jnp.int32)
        token = jnp.where(kept.num_accepted == step.num_drafts, bonus, token)
    column = jnp.arange(W, dtype=jnp.int32)[None]
    tokens = jnp.where(column < at, drafts, jnp.where(column == at, token[:, None], PAD_TOKEN))
    return Verified(tokens=tokens.astype(jnp.int32)), kept.num_accepted
