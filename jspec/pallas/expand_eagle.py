"""expand_eagle: a step's rows with room for drafts, for parallel drafting and draft models."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Bool, Int

from jspec.axes import PAD_SLOT, AnyArray, Impl
from jspec.pallas import _backend, _dispatch, _lookup


class ExpandedRows(NamedTuple):
    """The rows that a drafter's first pass runs on: R = T + B * (num_slots - shift) of them.

    Request r starts at row `query_start[r] + r * (num_slots - shift)`: its accepted tokens, the
    next token, masked rows, then as many rejected rows as the verifier rejected. Rows of no
    request, and those of a request with query length 0, are padding.

    Attributes:
      token_ids: `pad_token` in rejected and padding rows.
      positions: counted from the request's first position; 0 in rejected and padding rows.
      rejected_mask: True in rejected and padding rows: no KV, no draft.
      masked_mask: True where the row holds `mask_token`.
      sample_index: rows that the drafts are read from, the next token's first; the request's first
        row where it has none such, 0 for a padded request.
      hidden_index: with shift, the row that each target row's hidden state goes to; else PAD.
      hidden_source: with shift, the target row whose hidden state belongs in each row; PAD in
        masked and padding rows, behind the target's rows, and without shift.
    """

    token_ids: Int[jax.Array, "R"]
    positions: Int[jax.Array, "R"]
    rejected_mask: Bool[jax.Array, "R"]
    masked_mask: Bool[jax.Array, "R"]
    sample_index: Int[jax.Array, "B slots"]
    hidden_index: Int[jax.Array, "T"]
    hidden_source: Int[jax.Array, "R"]
