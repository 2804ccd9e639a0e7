"""The rows of a drafter's first pass: the target's rows, moved and extended."""

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jspec.axes import PAD_TOKEN, AnyArray, Impl
from jspec.metadata.attention_metadata import (
    CommonAttentionMetadata,
    check_metadata,
    extend_all_queries_by_N,
    is_live,
    locate,
    num_before,
    read,
    slots_of,
)
from jspec.pallas._dispatch import check_sizes
from jspec.pallas.expand_dflash import expand_dflash
from jspec.pallas.expand_eagle import expand_eagle
from jspec.state import pytree


@pytree
class FirstPass:
    """What a drafter's first pass runs on: R rows, or R query rows after T of context.

    Attributes:
      token_ids: PAD or 0 in rows that no draft depends on.
      positions: 0 in rejected and padding rows that the pass added.
      hidden: target hidden states of each row, for drafters that read them.
      sample_index: rows that drafts are read from; within the request, 0 for padding.
      metadata: of the R rows.
      rejected_mask: rows that write nothing; None where no row was added.
      masked_mask: rows to draft in parallel; None where no row was added.
      context_positions: of the target's rows, for block drafters.
      context_slots: cache slots of the target's rows, for block drafters.
    """

    token_ids: Int[AnyArray, "R"]
    positions: Int[AnyArray, "*axes R"]
    hidden: Float[AnyArray, "R D"] | None = None
    sample_index: Int[AnyArray, "B slots"]
    metadata: CommonAttentionMetadata
    rejected_mask: Bool[AnyArray, "R"] | None = None
    masked_mask: Bool[AnyArray, "R"] | None = None
    context_positions: Int[AnyArray, "T"] | None = None
    context_slots: Int[AnyArray, "T"] | None = None


def set_inputs_first_pass(
    token_ids: Int[AnyArray, "T"],
    positions: Int[AnyArray, "*axes T"],
    next_token: Int[AnyArray, "B"],
    metadata: CommonAttentionMetadata,
    *,
    hidden: Float[AnyArray, "T D"] | None = None,
    num_rejected: Int[AnyArray, "B"] | None = None,
    num_slots: int = 1,
    shift: bool = True,
    mask_token: int = 0,
    mask_hidden: Float[AnyArray, "D"] | None = None,
    page_size: int,
    max_model_len: int,
    impl: Impl = "auto",
) -> FirstPass:
    """Joins the rows that the target ran with the token that each request continues from.

    With `shift` and one slot the rows stay as many: ids move left by one, and the next token takes
    the place after the last accepted one. Otherwise each request gets num_slots - shift more rows.

    In: token_ids [1 10 11 20 21 22], query_start [0 1 3 6], next_token [2 12 23].
    Out: token_ids [2 11 12 21 22 23].

    Args:
      token_ids: of the target's rows; rows from `query_start[-1]` on may hold anything.
      positions: of the target's rows; several axes (M-RoPE) only where no row is added.
      next_token: the token each request continues from.
      metadata: of the target's pass, rejected rows included.
      hidden: target hidden states, for drafters that read them; needs `shift`.
      num_rejected: rejected rows at the end of each request; none if None.
      num_slots: rows for the next token and for tokens to draft in parallel.
      shift: True for drafters that read hidden states: row i pairs hidden state i with token i + 1.
      mask_token: id of a row to draft in parallel.
      mask_hidden: hidden state of such a row.
      page_size: slots per page (S).
      max_model_len: positions at or above it get no slot.
      impl: implementation of `expand_eagle`.

    Returns:
      The rows, R = T + B * (num_slots - shift). A rejected or padding row that was added writes
      nothing; without added rows it keeps its slot, which the next step overwrites.

    Raises:
      TypeError, ValueError: an argument of a wrong dtype, shape or size.

    Source: vLLM v1/spec_decode/llm_base_proposer.py, set_inputs_first_pass.
    """
    owner = "set_inputs_first_pass"
    check_sizes(owner, num_slots=num_slots, page_size=page_size, max_model_len=max_model_len)
    num_added = num_slots - shift
    num_requests = check_metadata(owner, metadata)["B"]
    if num_rejected is None:
        num_rejected = jnp.zeros(num_requests, jnp.int32)
    has_axes = jnp.ndim(positions) == 2 and not num_added
    check_metadata(
        owner,
        metadata,
        token_ids=(token_ids, "int T"),
        positions=(positions, "int axes T" if has_axes else "int T"),
        next_token=(next_token, "int B"),
        num_rejected=(num_rejected, "int B"),
    )
    if hidden is not None:
        _check_hidden(owner, hidden, mask_hidden, token_ids.shape[0], num_slots, shift)
    start = jnp.asarray(metadata.query_start, jnp.int32)
    last_index = start[1:] - 1 - jnp.asarray(num_rejected, jnp.int32)  # [B]
    if not num_added:
        ids, sample_index = _shift(token_ids, next_token, start, last_index)
        return FirstPass(
            token_ids=ids,
            positions=positions,
            hidden=hidden,
            sample_index=sample_index[:, None],
            metadata=metadata,
        )
    rows = expand_eagle(
        token_ids,
        positions,
        next_token,
        start,
        last_index,
        num_slots=num_slots,
        shift=shift,
        mask_token=mask_token,
        impl=impl,
    )
    if hidden is not None:
        hidden = read(hidden, rows.hidden_source, fill=0)
        if num_slots > 1:
            mask_row = jnp.asarray(mask_hidden, hidden.dtype)[None]
            hidden = jnp.where(rows.masked_mask[:, None], mask_row, hidden)  # [R, D]
    request, page = locate(metadata, rows.positions, num_added, page_size, max_model_len)
    page_id = read(metadata.block_table, (request, page))
    slots = slots_of(page_id, rows.positions, rows.rejected_mask, page_size, max_model_len)
    return FirstPass(
        token_ids=rows.token_ids,
        positions=rows.positions,
        hidden=hidden,
        sample_index=rows.sample_index,
        metadata=extend_all_queries_by_N(metadata, num_added, slots),
        rejected_mask=rows.rejected_mask,
        masked_mask=rows.masked_mask,
    )


def _shift(
    token_ids: AnyArray, next_token: AnyArray, start: Array, last_index: Array
) -> tuple[Array, Array]:
    """Moves ids left by one and puts each next token where its request ends."""
    num_rows = token_ids.shape[0]
    ids = jnp.asarray(token_ids, jnp.int32)
    ids = jnp.concatenate([ids[1:], jnp.full(min(num_rows, 1), PAD_TOKEN, jnp.int32)])
    ids = jnp.where(jnp.arange(1, num_rows + 1, dtype=jnp.int32) < start[-1], ids, PAD_TOKEN)
    has_rows = start[:-1] < start[1:]
    sample_index = jnp.clip(last_index, start[:-1], start[1:] - 1)
    ids = ids.at[jnp.where(has_rows, sample_index, num_rows)].set(
        jnp.asarray(next_token, jnp.int32), mode="drop"
    )
    return ids, jnp.where(has_rows, sample_index, 0)


def _check_hidden(
    owner: str,
    hidden: AnyArray,
    mask_hidden: AnyArray | None,
    num_rows: int,
    num_slots: int,
    shift: bool,
) -> None:
    if not shift:
        raise ValueError(
            f"{owner}: `hidden` is given with shift=False, which is for drafters that read none. "
            "Pass shift=True, or leave `hidden` out."
        )
    if hidden.ndim != 2 or hidden.shape[0] != num_rows:
        raise ValueError(
            f"{owner}: `hidden` has shape {hidden.shape}, wanted [{num_rows}, D], one hidden state "
            "for each of `token_ids`. Pass the target's hidden states of the same rows."
        )
    if not jnp.issubdtype(hidden.dtype, jnp.floating):
        raise TypeError(
            f"{owner}: `hidden` has dtype {hidden.dtype}, wanted a float one. Pass hidden states, "
            "not token ids."
        )
    if num_slots > 1 and (mask_hidden is None or mask_hidden.shape != hidden.shape[1:]):
        got = "None" if mask_hidden is None else f"of shape {mask_hidden.shape}"
        raise ValueError(
            f"{owner}: `mask_hidden` is {got}, wanted [{hidden.shape[1]}] for the {num_slots - 1} "
            "rows a request that are drafted in parallel. Pass the drafter's mask vector."
        )


def set_inputs_first_pass_dflash(
    positions: Int[AnyArray, "T"],
    next_token: Int[AnyArray, "B"],
    metadata: CommonAttentionMetadata,
    *,
    num_rejected: Int[AnyArray, "B"] | None = None,
    num_drafts: int,
    mask_token: int,
    page_size: int,
    max_model_len: int | None = None,
    impl: Impl = "auto",
) -> FirstPass:
    """Lays a block of 1 + num_drafts query rows after the accepted context of each request.

    Args:
      positions: of the target's rows, which become the context.
      next_token: the token each request continues from.
      metadata: of the target's pass, rejected rows included.
      num_rejected: rejected rows at the end of each request; none if None.
      num_drafts: drafts per request (K).
      mask_token: id of a row to draft in parallel.
      page_size: slots per page (S).
      max_model_len: positions at or above it, and rejected context rows, get no slot; None keeps
        every slot, as the original does.
      impl: implementation of `expand_dflash`.

    Returns:
      The query rows, R = B * (1 + num_drafts), which see each other both ways: not causal.

    Raises:
      TypeError, ValueError: an argument of a wrong dtype, shape or size.

    Source: vLLM v1/spec_decode/dflash.py, DFlashProposer.set_inputs_first_pass.
    """
    owner = "set_inputs_first_pass_dflash"
    check_sizes(owner, num_drafts=num_drafts, page_size=page_size)
    num_requests = check_metadata(owner, metadata)["B"]
    if num_rejected is None:
        num_rejected = jnp.zeros(num_requests, jnp.int32)
    check_metadata(
        owner,
        metadata,
        positions=(positions, "int T"),
        next_token=(next_token, "int B"),
        num_rejected=(num_rejected, "int B"),
    )
    width = num_drafts + 1
    start = jnp.asarray(metadata.query_start, jnp.int32)
    rows = expand_dflash(
        next_token,
        positions,
        start,
        metadata.block_table,
        num_rejected,
        num_drafts=num_drafts,
        page_size=page_size,
        mask_token=mask_token,
        max_model_len=max_model_len,
        impl=impl,
    )
    live = is_live(start)  # [B]
    query_start = num_before(start) * width
    seq_lens = jnp.asarray(metadata.seq_lens, jnp.int32)
    block = dataclasses.replace(
        metadata,
        query_start=query_start,
        seq_lens=jnp.where(live, seq_lens - jnp.asarray(num_rejected, jnp.int32) + width, seq_lens),
        slots=rows.query_slots,
        num_tokens=query_start[-1],
        max_query_len=jnp.int32(width),
        max_seq_len=jnp.asarray(metadata.max_seq_len, jnp.int32) + width,
        causal=False,
    )
    return FirstPass(
        token_ids=rows.token_ids,
        positions=rows.query_positions,
        sample_index=rows.sample_index,
        metadata=block,
        context_positions=rows.context_positions,
        context_slots=rows.context_slots,
    )
