"""Attention metadata of a pass: rows by request, KV slots, and how both change between passes."""

import dataclasses
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from jspec.axes import PAD_SLOT, AnyArray
from jspec.pallas._dispatch import check_forms, check_sizes
from jspec.pallas._lookup import is_page
from jspec.state import pytree, static


@pytree
class CommonAttentionMetadata:
    """What every attention layer of a pass reads.

    T rows belong to B requests by `query_start`. Trailing requests without rows are padding, and so
    are the rows from `query_start[-1]` on.

    Attributes:
      query_start: first row of each request, and the end of the last.
      seq_lens: KV length of each request with the rows of this pass; 0 for padding.
      block_table: pages of each request in order; PAD where there is none.
      slots: cache slot that each row writes; PAD writes nothing.
      num_tokens: rows that are no padding.
      max_query_len: most rows of a request, or more.
      max_seq_len: longest `seq_lens`, or more.
      causal: whether a row sees only rows up to its own position.
    """

    query_start: Int[AnyArray, "B1"]
    seq_lens: Int[AnyArray, "B"]
    block_table: Int[AnyArray, "B M"]
    slots: Int[AnyArray, "T"]
    num_tokens: Int[AnyArray, ""]
    max_query_len: Int[AnyArray, ""]
    max_seq_len: Int[AnyArray, ""]
    causal: bool = static(default=True)

    @classmethod
    def of(
        cls,
        query_start: Int[AnyArray, "B1"],
        seq_lens: Int[AnyArray, "B"],
        block_table: Int[AnyArray, "B M"],
        slots: Int[AnyArray, "T"],
        *,
        causal: bool = True,
    ) -> "CommonAttentionMetadata":
        """Derives the three counts from the arrays.

        Raises:
          TypeError, ValueError: an array of a wrong dtype or shape.
        """
        check_forms(
            "CommonAttentionMetadata.of",
            seq_lens=(seq_lens, "int B"),
            query_start=(query_start, "int B+1"),
            block_table=(block_table, "int B M"),
            slots=(slots, "int T"),
        )
        return cls(
            query_start=query_start,
            seq_lens=seq_lens,
            block_table=block_table,
            slots=slots,
            num_tokens=jnp.asarray(query_start[-1], jnp.int32),
            max_query_len=jnp.diff(query_start).max(initial=0).astype(jnp.int32),
            max_seq_len=jnp.max(seq_lens, initial=0).astype(jnp.int32),
            causal=causal,
        )


def compute_new_slot_mapping(
    metadata: CommonAttentionMetadata,
    positions: Int[AnyArray, "R"],
    rejected_mask: Bool[AnyArray, "R"],
    page_size: int,
    num_new_tokens: int,
    max_model_len: int,
) -> Int[Array, "R"]:
    """Looks up the cache slots of a pass whose requests each got more rows.

    The table is read flat, as recorded: where it is too narrow for a position, the next request's
    row answers, and PAD past the last. `set_inputs_first_pass` gives PAD in both places.

    In: query_start [0 1], block_table [[2 5]], 3 new rows a request, positions [5 6 7 8], page_size
    4, max_model_len 8. Out: [21 22 23 -1].

    Args:
      metadata: before the rows were added; T rows, B requests.
      positions: of all R = T + B * num_new_tokens rows; their dtype is the slots'.
      rejected_mask: True for rows that write nothing.
      page_size: slots per page (S).
      num_new_tokens: rows that each request got beyond its query length.
      max_model_len: positions at or above it are not stored.

    Returns:
      Slots; PAD for rejected rows, for rows of no request, and where the table holds PAD.

    Raises:
      TypeError, ValueError: an argument of a wrong dtype, shape or size.

    Source: vLLM v1/spec_decode/utils.py, compute_new_slot_mapping.
    """
    owner = "compute_new_slot_mapping"
    check_sizes(owner, page_size=page_size, max_model_len=max_model_len)
    check_extended(
        owner,
        metadata,
        num_new_tokens,
        positions=(positions, "int"),
        rejected_mask=(rejected_mask, "bool"),
    )
    num_pages = metadata.block_table.shape[1]
    request, page = locate(metadata, positions, num_new_tokens, page_size, max_model_len)
    page_id = read(jnp.ravel(metadata.block_table), request * num_pages + page)
    return slots_of(page_id, positions, rejected_mask, page_size, max_model_len)


def extend_all_queries_by_N(
    metadata: CommonAttentionMetadata, num_new_tokens: int, slots: Int[AnyArray, "R"]
) -> CommonAttentionMetadata:
    """Adds rows to every request but the padded ones, which stay without.

    In: query_start [0 3 5], seq_lens [10 4], 2 new rows. Out: query_start [0 5 9], seq_lens [12 6].

    Args:
      metadata: T rows, B requests.
      num_new_tokens: rows to add to each.
      slots: of all R = T + B * num_new_tokens rows.

    Returns:
      New metadata; lengths are not bounded by the model's.

    Raises:
      TypeError, ValueError: an argument of a wrong dtype, shape or size.

    Source: vLLM v1/spec_decode/utils.py, extend_all_queries_by_N.
    """
    check_extended("extend_all_queries_by_N", metadata, num_new_tokens, slots=(slots, "int"))
    start = jnp.asarray(metadata.query_start, jnp.int32)
    added = jnp.where(is_live(start), jnp.int32(num_new_tokens), 0)  # [B]
    return dataclasses.replace(
        metadata,
        query_start=start + num_before(start) * num_new_tokens,
        seq_lens=jnp.asarray(metadata.seq_lens, jnp.int32) + added,
        slots=jnp.asarray(slots),
        num_tokens=jnp.asarray(metadata.num_tokens, jnp.int32) + added.sum(dtype=jnp.int32),
        max_query_len=jnp.asarray(metadata.max_query_len, jnp.int32) + num_new_tokens,
        max_seq_len=jnp.asarray(metadata.max_seq_len, jnp.int32) + num_new_tokens,
    )


def prepare_inputs(
    metadata: CommonAttentionMetadata,
    num_sampled: Int[AnyArray, "B"],
    num_draft_tokens: Int[AnyArray, "B"],
) -> tuple[CommonAttentionMetadata, Int[Array, "T"]]:
    """Takes the rows of rejected drafts out of a pass.

    The kept rows move to the front; the sizes of the arrays stay, `num_tokens` says how many rows
    are left. Gather the pass's other arrays with the returned indices.

    In: query_start [0 3 7], num_draft_tokens [2 3], num_sampled [1 4].
    Out: query_start [0 1 5], token_indices [0 3 4 5 6 -1 -1].

    Args:
      metadata: of the target's pass; `seq_lens` counts rejected rows.
      num_sampled: tokens that each request got: accepted drafts and one more, 0 for none.
      num_draft_tokens: drafts that were verified; without drafts no row is rejected.

    Returns:
      (metadata, token_indices): of the kept rows, and where each of them was; PAD after them.
      `max_query_len` is still that of the target's pass.

    Raises:
      TypeError, ValueError: an argument of a wrong dtype, shape or size.

    Source: vLLM v1/spec_decode/llm_base_proposer.py, prepare_inputs.
    """
    check_metadata(
        "prepare_inputs",
        metadata,
        num_sampled=(num_sampled, "int B"),
        num_draft_tokens=(num_draft_tokens, "int B"),
    )
    start = jnp.asarray(metadata.query_start, jnp.int32)
    num_drafts = jnp.asarray(num_draft_tokens, jnp.int32)
    num_rejected = num_drafts + 1 - jnp.asarray(num_sampled, jnp.int32)
    num_rejected = jnp.where(num_drafts > 0, num_rejected, 0)
    num_rejected = jnp.clip(num_rejected, 0, jnp.diff(start))  # padding has nothing to reject
    taken_out = jnp.cumsum(num_rejected, dtype=jnp.int32)  # up to the end of each request
    kept_start = start.at[1:].add(-taken_out)

    rows = jnp.arange(metadata.slots.shape[0], dtype=jnp.int32)
    token_indices = rows + (start - kept_start).at[request_of(kept_start, rows)].get(mode="clip")
    token_indices = jnp.where(rows < kept_start[-1], token_indices, PAD_SLOT)
    seq_lens = jnp.asarray(metadata.seq_lens, jnp.int32) - num_rejected
    kept = dataclasses.replace(
        metadata,
        query_start=kept_start,
        seq_lens=seq_lens,
        slots=read(metadata.slots, token_indices),
        num_tokens=kept_start[-1],
        max_seq_len=jnp.max(seq_lens, initial=0),
    )
    return kept, token_indices


def check_metadata(
    owner: str, metadata: CommonAttentionMetadata, **arrays: tuple[AnyArray, str]
) -> dict[str, int]:
    """Refuses metadata, and arrays beside it, whose dtypes or shapes do not fit together."""
    fields = {
        "metadata.seq_lens": (metadata.seq_lens, "int B"),
        "metadata.query_start": (metadata.query_start, "int B+1"),
        "metadata.block_table": (metadata.block_table, "int B M"),
        "metadata.slots": (metadata.slots, "int T"),
    }
    return check_forms(owner, **(fields | arrays))  # type: ignore[arg-type]


def check_extended(
    owner: str,
    metadata: CommonAttentionMetadata,
    num_new_tokens: int,
    **arrays: tuple[AnyArray, str],
) -> None:
    """Refuses metadata, or arrays that are not `num_new_tokens` rows a request longer."""
    check_sizes(owner, 0, num_new_tokens=num_new_tokens)
    num_added = check_metadata(owner, metadata)["B"] * num_new_tokens
    rows = {name: (array, f"{kind} T+{num_added}") for name, (array, kind) in arrays.items()}
    check_metadata(owner, metadata, **rows)


def read(table: AnyArray, index: Any, fill: int = PAD_SLOT) -> Array:
    """Reads a table; `fill` outside of it, where JAX would wrap or clamp the index."""
    return (
        jnp.asarray(table).at[index].get(mode="fill", fill_value=fill, wrap_negative_indices=False)
    )


def is_live(query_start: Array) -> Array:
    """True up to the last request that has rows [B]: requests are padded at the end."""
    return query_start[:-1] < query_start[-1]


def num_before(query_start: Array) -> Array:
    """Counts the requests before each one, padding not included [B + 1]."""
    index = jnp.arange(query_start.shape[0], dtype=jnp.int32)
    return jnp.minimum(index, is_live(query_start).sum(dtype=jnp.int32))


def request_of(query_start: Array, rows: Array) -> Array:
    """Finds the request of each row [T]; B past the last one."""
    found = jnp.searchsorted(query_start, rows, side="right", method="compare_all")
    return found.astype(jnp.int32) - 1


def locate(
    metadata: CommonAttentionMetadata,
    positions: AnyArray,
    num_new_tokens: int,
    page_size: int,
    max_model_len: int,
) -> tuple[Array, Array]:
    """Finds the request and the column of the block table that each row's page is in [R]."""
    start = jnp.asarray(metadata.query_start, jnp.int32)
    rows = jnp.arange(positions.shape[0], dtype=jnp.int32)
    request = request_of(start + num_before(start) * num_new_tokens, rows)
    page = jnp.minimum(positions, max_model_len - 1) // page_size
    return request, page.astype(jnp.int32)


def slots_of(
    page_id: Array,
    positions: AnyArray,
    rejected_mask: AnyArray,
    page_size: int,
    max_model_len: int,
) -> Array:
    """Turns pages into slots, of the positions' dtype; PAD for rows that are not stored [R]."""
    page_id = page_id.astype(positions.dtype)
    stored = is_page(page_id, page_size) & (positions >= 0) & (positions < max_model_len)
    slots = page_id * page_size + positions % page_size
    return jnp.where(stored & ~rejected_mask, slots, PAD_SLOT)
