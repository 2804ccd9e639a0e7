"""Which logits rows a verifier reads, from the drafts of each request."""

import operator
from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
from jaxtyping import Int

from jspec.axes import AnyArray
from jspec.state import pytree, static


@pytree
class SpecDecodeMetadata:
    """Which rows a verifier reads: for B requests with `drafts` draft tokens between them.

    The verifier runs the output head on R = drafts + B rows of the target's hidden states (each
    request's newest token and its drafts), then reads those R logits rows by index.

    Attributes:
      num_draft_tokens: drafts of each request, 0 allowed; static, so other counts trace anew.
      draft_token_ids: drafts of all requests, one after the other.
      cu_num_draft_tokens: running total of `num_draft_tokens`, own drafts included.
      cu_num_sampled_tokens: running total of `num_draft_tokens + 1`.
      target_logits_indices: logits row that verifies each draft.
      bonus_logits_indices: logits row that each request's bonus token comes from.
      logits_indices: row of the flat step that each logits row is computed from.

    Source: vLLM v1/spec_decode/metadata.py.
    """

    num_draft_tokens: tuple[int, ...] = static()
    draft_token_ids: Int[AnyArray, "drafts"]
    cu_num_draft_tokens: Int[AnyArray, "B"]
    cu_num_sampled_tokens: Int[AnyArray, "B"]
    target_logits_indices: Int[AnyArray, "drafts"]
    bonus_logits_indices: Int[AnyArray, "B"]
    logits_indices: Int[AnyArray, "R"]

    @property
    def max_spec_len(self) -> int:
        """Drafts of the request with most; 0 for an empty batch."""
        return max(self.num_draft_tokens, default=0)

    @classmethod
    def from_drafts(
        cls, draft_token_ids: Sequence[Sequence[int]], cu_num_scheduled_tokens: Sequence[int]
    ) -> "SpecDecodeMetadata":
        """Indexes a scheduled step; runs on the host.

        In: 2 and 0 drafts, cu_num_scheduled_tokens [3 9].
        Out: logits_indices [0 1 2 8], target_logits_indices [0 1], bonus_logits_indices [2 3].

        Args:
          draft_token_ids: drafts of each request.
          cu_num_scheduled_tokens: end of each request's rows in the flat step [B]. Its last
            rows are its newest token and its drafts.

        Raises:
          TypeError: a token or an end is no integer.
          ValueError: the lengths differ, or a request has fewer rows than drafts and one.

        Source: vLLM v1/worker/gpu_model_runner.py, _calc_spec_decode_metadata.
        """
        owner = "SpecDecodeMetadata.from_drafts"
        drafts, num_drafts = _flatten(owner, draft_token_ids)
        ends = np.asarray(cu_num_scheduled_tokens)
        if ends.size and not np.issubdtype(ends.dtype, np.integer):
            raise TypeError(
                f"{owner}: `cu_num_scheduled_tokens` has dtype {ends.dtype}, wanted integers. "
                "Pass np.cumsum(num_scheduled_tokens)."
            )
        ends = ends.astype(np.int32)
        if ends.shape != num_drafts.shape:
            raise ValueError(
                f"{owner}: `cu_num_scheduled_tokens` has shape {ends.shape}, wanted "
                f"[{len(num_drafts)}], one entry for each list of drafts. Pass "
                "np.cumsum(num_scheduled_tokens)."
            )
        num_sampled = num_drafts + 1
        num_rows = np.diff(ends, prepend=0)
        short = np.flatnonzero(num_rows < num_sampled)
        if short.size:
            request = short[0]
            raise ValueError(
                f"{owner}: `cu_num_scheduled_tokens` gives request {request} {num_rows[request]} "
                f"rows, wanted {num_sampled[request]} or more: its newest token and its drafts. "
                "Count the drafts in when you schedule."
            )
        cu_num_sampled = np.cumsum(num_sampled, dtype=np.int32)
        first_row, first_logits_row = ends - num_sampled, cu_num_sampled - num_sampled
        return cls._of(
            drafts,
            num_drafts,
            target_logits_indices=np.repeat(first_logits_row, num_drafts) + _ranges(num_drafts),
            bonus_logits_indices=cu_num_sampled - 1,
            logits_indices=np.repeat(first_row, num_sampled) + _ranges(num_sampled),
        )

    @classmethod
    def make_dummy(cls, draft_token_ids: Sequence[Sequence[int]]) -> "SpecDecodeMetadata":
        """Makes metadata of the right shapes whose indices are all 0, to warm a verifier up.

        Args:
          draft_token_ids: drafts of each request; an empty list is an empty batch.

        Raises:
          TypeError: a token is no integer.
        """
        drafts, num_drafts = _flatten("SpecDecodeMetadata.make_dummy", draft_token_ids)
        return cls._of(
            drafts,
            num_drafts,
            target_logits_indices=np.zeros_like(drafts),
            bonus_logits_indices=np.zeros_like(num_drafts),
            logits_indices=np.zeros(drafts.size + num_drafts.size, np.int32),
        )

    @classmethod
    def _of(cls, drafts: np.ndarray, num_drafts: np.ndarray, **indices: np.ndarray):
        return cls(
            num_draft_tokens=tuple(num_drafts.tolist()),
            draft_token_ids=jnp.asarray(drafts),
            cu_num_draft_tokens=jnp.asarray(np.cumsum(num_drafts, dtype=np.int32)),
            cu_num_sampled_tokens=jnp.asarray(np.cumsum(num_drafts + 1, dtype=np.int32)),
            **{name: jnp.asarray(index, jnp.int32) for name, index in indices.items()},
        )


def _flatten(owner: str, draft_token_ids: Sequence[Sequence[int]]) -> tuple[np.ndarray, np.ndarray]:
    try:
        flat = [operator.index(token) for drafts in draft_token_ids for token in drafts]
        token_ids = np.array(flat, np.int32)
    except (TypeError, OverflowError) as error:
        raise TypeError(
            f"{owner}: `draft_token_ids` is no list of lists of 32-bit integers ({error}). "
            "Pass one list of token ids a request, for example [[11, 12], [], [13]]."
        ) from error
    num_drafts = [len(drafts) for drafts in draft_token_ids]
    return token_ids, np.array(num_drafts, np.int32)


def _ranges(lengths: np.ndarray) -> np.ndarray:
    """Counts from 0 in each run: [2 0 3] -> [0 1 0 1 2]."""
    starts = np.cumsum(lengths, dtype=np.int32) - lengths
    return np.arange(lengths.sum(), dtype=np.int32) - np.repeat(starts, lengths)
