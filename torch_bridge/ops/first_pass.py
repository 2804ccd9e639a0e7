"""The inputs of a drafter's first pass, on tensors of torch.

Source: vLLM v1/spec_decode/llm_base_proposer.py and dflash.py, set_inputs_first_pass.
"""

import operator
from typing import Any, NamedTuple

import jax.numpy as jnp
import torch
from jaxtyping import Array

from jspec import metadata
from jspec.axes import INT32_MAX
from jspec.pallas._dispatch import check_sizes
from torch_bridge.interop.checks import check_are_tensors, check_tensors, of_metadata
from torch_bridge.interop.metadata import changed, has_own, remade
from torch_bridge.interop.packing import to_int32
from torch_bridge.ops.batch import (
    extended,
    host_starts,
    metadata_of,
    num_before,
    starts_and_lengths,
)
from torch_bridge.ops.expand import block_rows
from torch_bridge.ops.run import Arrays, run


class FirstPassInputs(NamedTuple):
    """Inputs of a drafter's first pass of R rows. The first three are what vLLM's method returns.

    Attributes:
      num_tokens: R.
      token_indices_to_sample: int32, rows that drafts are read from, a request's side by side.
      cad: metadata of the R rows, of the caller's class.
      input_ids: int32 [R]; -1 or the padding id in rows that no draft depends on.
      positions: int64 [R], or [3, R] with M-RoPE.
      hidden_states: float [R, D]; None for drafters that read none.
      is_rejected_token_mask: bool [R]; None where no row was added.
      is_masked_token_mask: bool [R]; None where no row was added.
    """

    num_tokens: int
    token_indices_to_sample: torch.Tensor
    cad: Any
    input_ids: torch.Tensor
    positions: torch.Tensor
    hidden_states: torch.Tensor | None
    is_rejected_token_mask: torch.Tensor | None
    is_masked_token_mask: torch.Tensor | None


def set_inputs_first_pass(
    target_token_ids: torch.Tensor,
    next_token_ids: torch.Tensor,
    target_positions: torch.Tensor,
    target_hidden_states: torch.Tensor | None,
    token_indices_to_sample: torch.Tensor | None,
    cad: Any,
    num_rejected_tokens_gpu: torch.Tensor | None,
    *,
    block_size: int,
    max_model_len: int,
    pass_hidden_states_to_model: bool = True,
    extra_slots_per_request: int = 1,
    parallel_drafting_token_id: int = 0,
    parallel_drafting_hidden_state_tensor: torch.Tensor | None = None,
) -> FirstPassInputs:
    """Joins the rows that the target ran with the token that each request continues from.

    The positional arguments are those of vLLM's method; the keywords are what its object holds.
    Drafters that read hidden states and have one slot keep the rows, and ids move left by one.
    Otherwise each request gets `extra_slots_per_request` rows more, less one where ids are shifted.

    Args:
      target_token_ids: int [T] the target's rows, rejected ones included.
      next_token_ids: int [B] the token each request continues from.
      target_positions: int [T]; [3, T] with M-RoPE only where no row is added.
      target_hidden_states: float [T, D], read where `pass_hidden_states_to_model`.
      token_indices_to_sample: int [B] row of each request's last accepted token, read where no row
        is added; None = from `num_rejected_tokens_gpu`.
      cad: metadata of the target's pass; is not written to.
      num_rejected_tokens_gpu: int [B] rejected rows at the end of each request; None for none.
      block_size: slots per page.
      max_model_len: positions at or above it get no slot.
      pass_hidden_states_to_model: False for draft models.
      extra_slots_per_request: rows for the next token and for those drafted in parallel.
      parallel_drafting_token_id: of rows that are drafted in parallel.
      parallel_drafting_hidden_state_tensor: float [D] hidden state of such a row.

    Returns:
      The rows. A row to sample from lies in its request, also where all of it was rejected.

    Raises:
      TypeError, ValueError: an argument is invalid; the message names it.

    Source: vLLM v1/spec_decode/llm_base_proposer.py, set_inputs_first_pass.
    """
    op = "set_inputs_first_pass"
    shift = bool(pass_hidden_states_to_model)
    num_added = extra_slots_per_request - shift
    check_sizes(op, block_size=block_size, max_model_len=max_model_len)
    check_sizes(op, extra_slots_per_request=extra_slots_per_request)
    tensors = {
        "target_token_ids": (target_token_ids, "int T"),
        "next_token_ids": (next_token_ids, "int B"),
        "query_start_loc": (of_metadata(op, cad, "query_start_loc", 1), "int B+1"),
    }
    if num_rejected_tokens_gpu is not None:
        tensors["num_rejected_tokens_gpu"] = num_rejected_tokens_gpu, "int B"
    if num_added == 0 and token_indices_to_sample is not None:
        tensors["token_indices_to_sample"] = token_indices_to_sample, "int B"
    hidden = target_hidden_states if shift else None
    checked = tensors | ({"target_hidden_states": (hidden, "float T D")} if shift else {})
    if num_added == 0:
        in_axes = isinstance(target_positions, torch.Tensor) and target_positions.ndim == 2
        checked["target_positions"] = target_positions, "int axes T" if in_axes else "int T"
    _, sizes = check_tensors(op, checked)
    if num_added == 0:
        ids, index = run(op, _shifted, tensors, "int T, int B")
        with torch.inference_mode(False):  # writable in every mode, as the other results
            positions = target_positions.to(torch.int64, copy=True)
            states = hidden.detach().clone() if hidden is not None else None
        return FirstPassInputs(sizes["T"], index, cad, ids, positions, states, None, None)
    extended_cad = extended(op, cad, num_added)
    tensors |= {
        "target_positions": (target_positions, "long T"),
        "block_table_tensor": (of_metadata(op, cad, "block_table_tensor"), "int B M"),
    }
    results = "int B, int R, long R, bool R, bool R, long R"
    if hidden is not None:
        vector = _mask_vector(op, parallel_drafting_hidden_state_tensor, hidden.shape[1])
        tensors["target_hidden_states"] = hidden, "float T D"
        tensors["parallel_drafting_hidden_state_tensor"] = vector[None], "float V D"
        results += ", float R"
    num_rows = sizes["T"] + sizes["B"] * num_added
    index, ids, positions, rejected, masked, slots, *states = run(
        op,
        _expanded,
        tensors,
        results,
        rows=lambda sizes: {"R": sizes["T"] + sizes["B"] * num_added},
        num_slots=extra_slots_per_request,
        shift=shift,
        mask_token=parallel_drafting_token_id,
        page_size=block_size,
        max_model_len=max_model_len,
    )
    return FirstPassInputs(
        num_tokens=num_rows,
        token_indices_to_sample=index.view(-1),
        cad=changed(extended_cad, slot_mapping=slots),
        input_ids=ids,
        positions=positions,
        hidden_states=states[0] if states else None,
        is_rejected_token_mask=rejected,
        is_masked_token_mask=masked,
    )


def _mask_vector(op: str, vector: torch.Tensor | None, width: int) -> torch.Tensor:
    if vector is not None:
        check_are_tensors(op, parallel_drafting_hidden_state_tensor=vector)
    if vector is None or vector.shape != (width,):
        got = "None" if vector is None else f"of shape {tuple(vector.shape)}"
        raise ValueError(
            f"{op}: `parallel_drafting_hidden_state_tensor` is {got}, wanted [{width}] for the "
            "rows that are drafted in parallel. Pass the drafter's mask vector."
        )
    return vector


def _num_rejected(arrays: Arrays) -> Array | None:
    if "token_indices_to_sample" in arrays:
        return arrays["query_start_loc"][1:] - 1 - arrays["token_indices_to_sample"]
    return arrays.get("num_rejected_tokens_gpu")


def _shifted(arrays: Arrays, *, impl: str) -> tuple[Array, Array]:
    ids = arrays["target_token_ids"]
    rows = metadata.set_inputs_first_pass(
        ids,
        jnp.zeros_like(ids),  # positions pass as they are
        arrays["next_token_ids"],
        metadata_of(arrays, ids.shape[0]),
        num_rejected=_num_rejected(arrays),
        page_size=1,
        max_model_len=1,
        impl=impl,  # type: ignore[arg-type]
    )
    return rows.token_ids, rows.sample_index[:, 0]


def _expanded(arrays: Arrays, *, num_slots: int, **static: Any) -> tuple[Array, ...]:
    mask_hidden = arrays.get("parallel_drafting_hidden_state_tensor")
    num_rows, num_requests = arrays["target_token_ids"].shape[0], arrays["live"].shape[0]
    rows = metadata.set_inputs_first_pass(
        arrays["target_token_ids"],
        # No position may overflow.
        jnp.minimum(arrays["target_positions"], INT32_MAX - num_rows - num_requests * num_slots),
        arrays["next_token_ids"],
        metadata_of(arrays, num_rows),
        hidden=arrays.get("target_hidden_states"),
        num_rejected=_num_rejected(arrays),
        num_slots=num_slots,
        mask_hidden=None if mask_hidden is None else mask_hidden[0],
        **static,
    )
    outputs = _OUTPUTS(rows)
    return outputs if rows.hidden is None else (*outputs, rows.hidden)


_OUTPUTS = operator.attrgetter(
    *("sample_index", "token_ids", "positions", "rejected_mask", "masked_mask", "metadata.slots")
)


class BlockFirstPassInputs(NamedTuple):
    """Inputs of a block drafter. The first three are what vLLM's method returns.

    Attributes:
      num_tokens: query rows, B * (1 + drafts).
      token_indices_to_sample: int32 [B * drafts] query rows that drafts are read from.
      cad: metadata of the query rows, of the caller's class; not causal.
      input_ids: int32 [num_tokens].
      positions: int64 [num_tokens].
      context_positions: int64 [T].
      context_slot_mapping: int64 [T].
    """

    num_tokens: int
    token_indices_to_sample: torch.Tensor
    cad: Any
    input_ids: torch.Tensor
    positions: torch.Tensor
    context_positions: torch.Tensor
    context_slot_mapping: torch.Tensor


def set_inputs_first_pass_dflash(
    next_token_ids: torch.Tensor,
    target_positions: torch.Tensor,
    cad: Any,
    num_rejected_tokens_gpu: torch.Tensor | None = None,
    *,
    num_speculative_tokens: int,
    parallel_drafting_token_id: int,
    block_size: int,
) -> BlockFirstPassInputs:
    """Adds a block of query rows after the accepted context of each request.

    The model's limit is not applied to slots, as in the original.

    Args:
      next_token_ids: int [B] the token each request continues from.
      target_positions: int [T] of the target's rows, which become the context.
      cad: metadata of the target's pass; is not written to.
      num_rejected_tokens_gpu: int [B] rejected rows at the end of each request; None for none.
      num_speculative_tokens: drafts per request.
      parallel_drafting_token_id: of rows to draft.
      block_size: slots per page.

    Returns:
      The rows.

    Raises:
      TypeError, ValueError: an argument is invalid; the message names it.

    Source: vLLM v1/spec_decode/dflash.py, DFlashProposer.set_inputs_first_pass.
    """
    op = "set_inputs_first_pass_dflash"
    check_sizes(op, block_size=block_size, num_speculative_tokens=num_speculative_tokens)
    host, (start, seq_lens) = host_starts(op, cad), starts_and_lengths(op, cad)
    rejected = num_rejected_tokens_gpu
    tensors = {
        "next_token_ids": (next_token_ids, "int B"),
        "target_positions": (target_positions, "long T"),
        "query_start_loc": (start, "int B+1"),
        "block_table_tensor": (of_metadata(op, cad, "block_table_tensor"), "int B M"),
    }
    if rejected is not None:
        tensors["num_rejected_tokens_gpu"] = rejected, "int B"
    rows = block_rows(op, tensors, num_speculative_tokens, block_size, parallel_drafting_token_id)
    width = num_speculative_tokens + 1
    is_live = host[:-1] < host[-1:]
    bounds = {}
    bound = getattr(cad, "seq_lens_cpu_upper_bound", None)
    if bound is not None:  # rejected rows included
        bounds["seq_lens_cpu_upper_bound"] = bound[: len(is_live)] + is_live.to(bound) * width
    with torch.inference_mode(False):  # results may be written to in every mode
        before = num_before(start)
        added = width if rejected is None else width - to_int32(rejected)
        seq_lens = seq_lens + before.diff() * added
        start, host = before * width, num_before(host) * width
    block = remade(
        cad,
        *("_seq_lens_cpu", "_num_computed_tokens_cpu", "dcp_local_seq_lens"),
        *(["seq_lens_cpu"] if has_own(cad, "seq_lens_cpu") else []),
        query_start_loc=start,
        query_start_loc_cpu=host,
        seq_lens=seq_lens,
        num_actual_tokens=int(host[-1]),
        max_query_len=width,
        max_seq_len=cad.max_seq_len + width,
        slot_mapping=rows.query_slot_mapping,
        causal=False,
        **bounds,
    )
    return BlockFirstPassInputs(
        num_tokens=len(rows.input_ids),
        token_indices_to_sample=rows.token_indices,
        cad=block,
        input_ids=rows.input_ids,
        positions=rows.query_positions,
        context_positions=rows.context_positions,
        context_slot_mapping=rows.context_slot_mapping,
    )
