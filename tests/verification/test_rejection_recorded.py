"""Rejection sampling against the recordings of both samplers and of the parser."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec.axes import PAD_TOKEN
from jspec.metadata import SpecDecodeMetadata
from jspec.verification import rejection, sampling
from tests.support import recordings
from tests.verification.test_rejection import METHODS, run, run_synthetic

pytestmark = pytest.mark.any_device


def padded(flat, counts, width, fill):
    """Spreads flat rows over requests: [N, ...] -> [B, width, ...]."""
    out = np.full((len(counts), width, *flat.shape[1:]), fill, flat.dtype)
    out[np.arange(width)[None] < counts[:, None]] = flat
    return out


def run_padded(function, logits, drafts, counts, probs, rates=None, **numbers):
    """Verifies flat rows of drafts, padded alike in all recorded cases: few shapes are compiled."""
    family = "rejection_sampler"
    B = 1 + max(recordings.largest(family, f"in.{name}") for name in ("q", "draft_token_ids"))
    K, live = recordings.largest(family, "out.output_token_ids", axis=1), len(counts)
    counts = np.pad(counts, (0, B - live))
    numbers["uniform"] = padded(numbers["uniform"].astype(np.float32), counts, K, 1.0)
    for name in ("temperature", "exponential", "bonus"):
        widths = [(0, B - live)] + [(0, 0)] * (numbers[name].ndim - 1)
        numbers[name] = np.pad(numbers[name], widths, constant_values=1)
    if probs is not None:
        numbers["probs"] = padded(probs, counts, K, 0.0)
    if rates is not None:
        numbers["rates"] = np.pad(rates, (0, K - len(rates)))
    rows = padded(logits, counts, K + 1, 0.0), padded(drafts, counts, K, 7), counts
    verified, accepted = function(*map(jnp.asarray, rows), **jax.tree.map(jnp.asarray, numbers))
    tokens = np.asarray(verified.tokens)
    assert (tokens[live:, 1:] == PAD_TOKEN).all()
    return tokens[:live], np.asarray(accepted)[:live]


@recordings.each_case("rejection_sampler")
def test_every_recorded_case_comes_out_exactly(case):
    _, given, want, scalars = case
    counts, wanted = given["num_draft_tokens"], want["output_token_ids"]
    logits, drafts, probs = (
        given.get(name) for name in ("target_logits", "draft_token_ids", "draft_probs")
    )
    function, rates, K = run, None, scalars["max_spec_len"]
    if "synthetic_acceptance_rates" in given:
        rates = given["synthetic_acceptance_rates"].tolist()
        function, rates = run_synthetic, rejection.synthetic_rates(K, rates=rates)
    arrays = logits, drafts, counts, probs, rates
    tokens, accepted = run_padded(
        function,
        *arrays,
        temperature=(given["temperature"] > 0).astype(np.float32),  # the logits are scaled
        uniform=given["uniform_probs"],
        exponential=given["q"][:, None],
        bonus=given["bonus_token_ids"][:, 0].astype(np.int32),
    )
    np.testing.assert_array_equal(tokens[:, : K + 1], wanted)
    assert (tokens[:, K + 1 :] == PAD_TOKEN).all()
    np.testing.assert_array_equal(accepted, (wanted != PAD_TOKEN).sum(1) - 1)

    ends = SpecDecodeMetadata.make_dummy(
        [row.tolist() for row in np.split(drafts, np.cumsum(counts)[:-1])]
    )
    np.testing.assert_array_equal(ends.cu_num_draft_tokens, want["cu_num_draft_tokens"])
    # Both are recorded of greedy requests, too, where nothing reads them.
    target = sampling.distribution(jnp.asarray(logits), jnp.ones(len(logits)))
    np.testing.assert_allclose(target, want["target_probs"], atol=1e-5)  # float32
    if "recovered_token_ids" in want:
        # Each draft alone in a request, and no random number accepts it.
        tokens, accepted = run_padded(
            run,
            *(logits, drafts, np.ones_like(drafts), probs),
            temperature=np.ones(len(drafts), np.float32),
            uniform=np.full(len(drafts), np.inf),
            exponential=np.repeat(given["q"], counts, axis=0)[:, None],
            bonus=np.zeros(len(drafts), np.int32),
        )
        assert not accepted.any()
        np.testing.assert_array_equal(tokens[:, 0], want["recovered_token_ids"])


def block_inputs(case):
    """Reads a case of the newer sampler: each request's first row holds the token before."""
    given = case.given
    rows = np.diff(given["cu_num_logits"]).astype(np.int32)
    W = case.scalars["k"] + 1
    temperature = given["temperature"]
    drafts = padded(given["draft_sampled"].astype(np.int32), rows, W, 3)[:, 1:]
    arguments = {
        "temperature": np.where(temperature > 0, np.float32(1), np.float32(0)),
        "uniform": padded(given["u"], rows, W, 1.0)[:, :-1],
        "exponential": np.exp(-padded(given["gumbel"], rows, W, 0.0)),
    }
    if "draft_logits" in given:
        scale = np.where(temperature > 0, temperature, 1)[:, None, None]
        arguments["probs"] = np.asarray(jax.nn.softmax(given["draft_logits"] / scale, axis=-1))
    logits = padded(given["target_logits"], rows, W, 0.0)
    return jax.tree.map(jnp.asarray, ((logits, drafts, rows - 1), arguments))


@pytest.mark.parametrize("method", METHODS)
@recordings.each_case("block_verification")
def test_every_recorded_case_of_the_newer_sampler_comes_out_exactly(case, method):
    arrays, arguments = block_inputs(case)
    verified, accepted = jax.jit(getattr(rejection, method))(*arrays, **arguments)
    name = {"rejection": "standard", "block": "block"}[method]
    np.testing.assert_array_equal(accepted + 1, case.want[f"{name}_num_sampled"])
    np.testing.assert_array_equal(verified.tokens, case.want[f"{name}_sampled"])


@recordings.each_document("parse_output.json")
def test_every_recorded_output_is_parsed_exactly(case):
    tokens = np.array(case["output_token_ids"])
    got = rejection.parse_output(tokens, case["vocab_size"], discard=case["discard_req_indices"])
    assert got == case["result"]
    assert tokens.tolist() == case["output_token_ids"]
