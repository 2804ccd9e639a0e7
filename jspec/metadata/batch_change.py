"""Counts of computed tokens that follow requests from one batch to the next."""

import jax.numpy as jnp
from jaxtyping import Array, Int

from jspec.axes import AnyArray
from jspec.metadata.attention_metadata import read
from jspec.pallas._dispatch import check_arrays


def update_num_computed_tokens_for_batch_change(
    num_computed_tokens: Int[AnyArray, "R"],
    num_accepted_tokens: Int[AnyArray, "B"],
    prev_positions: Int[AnyArray, "B"],
    valid_sampled_token_count: Int[AnyArray, "R"],
    prev_num_draft_tokens: Int[AnyArray, "R"],
    cpu_num_computed_tokens: Int[AnyArray, "B"],
) -> tuple[Int[Array, "rows"], Int[Array, "B"]]:
    """Brings the counts of the batch before into the order of this one.

    The host counted every draft as computed; where drafts were verified, the device's count of
    the batch before and what it kept since are right instead.

    In: num_computed_tokens [10 20], prev_positions [1 -1 0], prev_num_draft_tokens [3 2],
    valid_sampled_token_count [2 3], cpu_num_computed_tokens [99 50 99]. Out: [23 50 12].

    Args:
      num_computed_tokens: of the R rows of the batch before.
      num_accepted_tokens: of this batch.
      prev_positions: index of each request in the batch before; negative (or past it) if new.
      valid_sampled_token_count: tokens that each request of the batch before kept.
      prev_num_draft_tokens: drafts that it had verified; 0 means the host's count is right.
      cpu_num_computed_tokens: the host's counts of this batch.

    Returns:
      (num_computed_tokens, num_accepted_tokens): in this batch's order. The first keeps its old
      entries past B.

    Raises:
      TypeError, ValueError: an argument of a wrong dtype, shape or size.

    Source: vLLM v1/spec_decode/utils.py, update_num_computed_tokens_for_batch_change.
    """
    check_arrays(
        update_num_computed_tokens_for_batch_change,
        *(num_computed_tokens, num_accepted_tokens, prev_positions),
        *(valid_sampled_token_count, prev_num_draft_tokens, cpu_num_computed_tokens),
    )
    drafted = read(prev_num_draft_tokens, prev_positions, fill=0) > 0
    num_kept = read(valid_sampled_token_count, prev_positions, fill=0).astype(jnp.int32)
    computed = read(num_computed_tokens, prev_positions, fill=0).astype(jnp.int32) + num_kept
    computed = jnp.where(drafted, computed, jnp.asarray(cpu_num_computed_tokens, jnp.int32))
    rest = jnp.asarray(num_computed_tokens, jnp.int32)[computed.shape[0] :]
    return (
        jnp.concatenate([computed, rest]),
        jnp.where(drafted, num_kept, jnp.asarray(num_accepted_tokens, jnp.int32)),
    )
