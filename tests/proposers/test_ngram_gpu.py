"""N-gram lookup on the device: the ops, against recordings, the definition and the host search."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec.axes import PAD_TOKEN
from jspec.proposers import ngram, ngram_gpu
from tests.support import recordings
from tests.support.oracles import ngram as oracle
from tests.support.steps import POISON

match = jax.jit(ngram_gpu.ngram_match, static_argnames=("min_n", "max_n", "num_drafts"))
append_tokens = jax.jit(ngram_gpu.append_tokens)
update_token_ids = jax.jit(ngram_gpu.update_token_ids, static_argnames="vocab_size")
update_incremental = jax.jit(ngram_gpu.update_incremental)


def sizes(scalars):
    return dict(min_n=scalars["min_n"], max_n=scalars["max_n"], num_drafts=scalars["k"])


def assert_equal(got, wanted):
    for a, b in zip(got, wanted, strict=True):
        np.testing.assert_array_equal(a, b)


# Recordings.


@recordings.each_case("ngram_cpu_gpu")
def test_the_recorded_matches_are_reproduced(case):
    scalars = case.scalars
    lengths = case.given["num_tokens"]
    mask = case.given["has_sampled"] & (lengths >= scalars["min_n"])
    got = match(case.given["token_ids"], lengths, mask, **sizes(scalars))
    assert_equal(got, (case.want["gpu_drafts"], case.want["gpu_num"]))


@recordings.each_case("ngram_cpu_gpu")
def test_the_recorded_rows_that_differ_agree_once_the_length_limit_is_applied(case):
    scalars = case.scalars
    room = np.clip(scalars["max_model_len"] - case.given["num_tokens"], 0, scalars["k"])
    capped = np.minimum(case.want["gpu_num"], room)
    np.testing.assert_array_equal(capped, case.want["cpu_num"])
    assert (case.want["differ"] == (capped != case.want["gpu_num"])).all()


@recordings.each_case("ngram_gpu_propose")
def test_the_recorded_appends_and_their_matches_are_reproduced(case):
    scalars = case.scalars
    before, count = case.given["num_tokens_no_spec"], case.given["valid_sampled_tokens_count"]
    sampled = case.given["valid_sampled_token_ids"]
    token_ids = append_tokens(case.given["token_ids"], before, sampled, count)
    mask = (count > 0) & (before + count >= scalars["min_n"])
    drafts, num_valid = match(token_ids, before + count, mask, **sizes(scalars))
    defined = before + sampled.shape[1] <= case.given["token_ids"].shape[1]  # one value a place
    np.testing.assert_array_equal(defined, case.want["row_is_well_defined"])
    assert_equal(
        [np.asarray(x)[defined] for x in (token_ids, drafts, num_valid)],
        [
            case.want[f"{name}"][defined]
            for name in ("token_ids", "draft_tokens", "num_valid_draft_tokens")
        ],
    )


@recordings.each_case("ngram_gpu_update_token_ids")
def test_the_recorded_token_updates_are_reproduced(case):
    scalars = case.scalars
    wanted = case.want["valid_sampled_token_ids"]
    got = update_token_ids(
        case.given["sampled_token_ids"][:, : wanted.shape[1]],  # lists are as wide as the longest
        case.given["token_ids"],
        case.given["num_tokens_no_spec"],
        case.given["discard_request_mask"],
        vocab_size=scalars["vocab_size"],
    )
    names = ("next_token_ids", "valid_sampled_tokens_count")
    assert_equal(got, [*(case.want[f"{name}"] for name in names), wanted])


@recordings.each_case("ngram_gpu_incremental")
def test_the_recorded_reorderings_are_reproduced(case):
    scalars = case.scalars
    got = update_incremental(
        case.given["token_ids_gpu"],
        case.given["num_tokens_gpu"],
        case.given["token_ids_cpu"],
        case.given["num_tokens_cpu"],
        case.given["cur_index"],
        case.given["prev_index"],
        case.given["is_new"] | scalars["first_run"],
    )
    assert_equal(got, (case.want["token_ids_gpu"], case.want["num_tokens_gpu"]))


# The matcher.


@pytest.mark.parametrize(
    "min_n, max_n, num_drafts", [(1, 1, 1), (1, 4, 5), (2, 3, 3), (3, 4, 2), (4, 4, 5)]
)
def test_host_and_device_agree_on_a_thousand_contexts(rng, min_n, max_n, num_drafts):
    histories, lengths = oracle.contexts(rng, 1000, 40)
    kwargs = dict(min_n=min_n, max_n=max_n, num_drafts=num_drafts)
    drafts, num_valid = match(histories, lengths, np.ones(1000, bool), **kwargs)
    assert drafts.dtype == num_valid.dtype == jnp.int32
    assert_equal(
        (drafts, num_valid), ngram.propose_batch(histories, lengths, max_model_len=1000, **kwargs)
    )
    for row, length, draft, count in zip(
        histories, lengths, np.asarray(drafts), num_valid, strict=True
    ):
        wanted = oracle.draft(row[:length].tolist(), **kwargs)
        assert draft[:count].tolist() == wanted and (draft[count:] == PAD_TOKEN).all()


def test_what_lies_behind_a_context_is_never_read(rng):
    histories, lengths = oracle.contexts(rng, 50, 24)
    behind = np.arange(24)[None] >= lengths[:, None]
    mask = rng.random(50) < 0.8
    kwargs = dict(min_n=1, max_n=3, num_drafts=4)
    wanted = match(np.where(behind, np.int32(0), histories), lengths, mask, **kwargs)
    assert_equal(
        match(np.where(behind, np.int32(POISON), histories), lengths, mask, **kwargs), wanted
    )
    assert (np.asarray(wanted[0])[~mask] == PAD_TOKEN).all()
    assert not np.asarray(wanted[1])[~mask].any()


def test_rows_may_be_shorter_than_the_longest_suffix():
    kwargs = dict(min_n=1, max_n=9, num_drafts=2)
    drafts, num_valid = match(
        np.array([[4, 5, 4], [6, 6, 6]], np.int32),
        np.array([3, 3], np.int32),
        np.ones(2, bool),
        **kwargs,
    )
    assert drafts.tolist() == [[5, 4], [6, PAD_TOKEN]] and num_valid.tolist() == [2, 1]


def test_a_hole_in_the_source_ends_the_count_of_leading_drafts():
    drafts, num_valid = match(
        np.array([[1, 2, PAD_TOKEN, 3, 1]], np.int32),
        np.array([5], np.int32),
        np.ones(1, bool),
        min_n=1,
        max_n=2,
        num_drafts=3,
    )
    assert drafts.tolist() == [[2, PAD_TOKEN, 3]] and num_valid.tolist() == [1]


def test_the_matcher_runs_under_vmap_and_scan(rng):
    histories, lengths = oracle.contexts(rng, 12, 16)
    mask = np.ones(12, bool)
    op = functools.partial(ngram_gpu.ngram_match, min_n=1, max_n=3, num_drafts=3)
    wanted = jax.jit(op)(histories, lengths, mask)
    split = [x.reshape(3, 4, *x.shape[1:]) for x in (histories, lengths, mask)]

    def flat(out):
        return [x.reshape(12, *x.shape[2:]) for x in out]

    assert_equal(flat(jax.jit(jax.vmap(op))(*split)), wanted)
    scanned = jax.lax.scan(lambda carry, x: (carry, op(*x)), 0, tuple(split))[1]
    assert_equal(flat(scanned), wanted)


# The bookkeeping ops.


def test_tokens_that_land_outside_their_row_are_dropped():
    token_ids = np.arange(8, dtype=np.int32).reshape(2, 4)
    sampled = np.array([[91, 92, 93], [94, PAD_TOKEN, 96]], np.int32)
    got = append_tokens(token_ids, np.array([3, 1], np.int32), sampled, np.array([3, 3], np.int32))
    assert got.tolist() == [[0, 1, 2, 91], [4, 94, 6, 96]]


def test_a_reordering_skips_padded_entries_and_moves_rows_in_a_cycle():
    device = np.arange(12, dtype=np.int32).reshape(3, 4)
    host = -device
    index = np.array([1, 2, 0, PAD_TOKEN], np.int32)
    previous = np.array([0, 1, 2, 1], np.int32)
    lengths = np.array([2, 3, 4], np.int32)
    tokens, counts = update_incremental(
        device, lengths[::-1], host, lengths, index, previous, np.zeros(4, bool)
    )
    np.testing.assert_array_equal(tokens, device[[2, 0, 1]])
    np.testing.assert_array_equal(counts, lengths)


def test_a_row_without_valid_tokens_continues_from_its_last_known_one():
    next_token, count, sampled = update_token_ids(
        np.array([[9, 1000, 3, -1], [5, 6, -1, -1], [-1, -1, -1, -1]], np.int32),
        np.array([[1, 2, 3], [4, 5, 6], [7, 8, 9]], np.int32),
        np.array([3, 2, 0], np.int32),
        np.array([False, True, False]),
        vocab_size=100,
    )
    assert next_token.tolist() == [1000, 5, 7] and count.tolist() == [2, 0, 0]
    assert sampled[1].tolist() == [PAD_TOKEN] * 4
