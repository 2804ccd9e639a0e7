"""vLLM's helpers for attention metadata, on tensors of torch.

Source: vLLM v1/spec_decode/utils.py.
"""

from typing import Any

import jax.numpy as jnp
import torch
from jaxtyping import Array

from jspec import metadata
from jspec.metadata import CommonAttentionMetadata, next_power_of_2
from jspec.pallas._dispatch import check_sizes
from torch_bridge.interop.checks import check_tensors, of_metadata
from torch_bridge.interop.metadata import changed
from torch_bridge.interop.packing import to_int32
from torch_bridge.ops.run import Arrays, Sizes, page_table, run


def compute_new_slot_mapping(
    cad: Any,
    new_positions: torch.Tensor,
    is_rejected_token_mask: torch.Tensor,
    block_size: int,
    num_new_tokens: int,
    max_model_len: int,
) -> torch.Tensor:
    """Looks up the cache slots of a pass whose requests each got more rows.

    The table is read flat, as vLLM does: a position beyond the table's width reads the next
    request's row. Trailing requests without rows are padding, and get no rows.

    Args:
      cad: before the rows were added; `num_reqs`, `query_start_loc` and `block_table_tensor` are
        read.
      new_positions: int [T + B * num_new_tokens].
      is_rejected_token_mask: bool, of the same rows; True for rows that store nothing.
      block_size: slots per page.
      num_new_tokens: rows that each request got beyond its query length.
      max_model_len: positions at or above it are not stored.

    Returns:
      int64 slots; -1 for rows that store nothing.

    Raises:
      TypeError, ValueError: an argument is invalid; the message names it.

    Source: vLLM v1/spec_decode/utils.py, of the same name.

    Example:
      >>> from types import SimpleNamespace
      >>> cad = SimpleNamespace(num_reqs=1, query_start_loc=torch.tensor([0, 1]),
      ...                       block_table_tensor=torch.tensor([[2, 5]]))
      >>> positions, rejected = torch.tensor([5, 6, 7, 8]), torch.zeros(4, dtype=torch.bool)
      >>> compute_new_slot_mapping(cad, positions, rejected, 4, 3, 8)
      tensor([21, 22, 23, -1])
    """
    op = "compute_new_slot_mapping"
    check_sizes(op, block_size=block_size, max_model_len=max_model_len)
    check_sizes(op, 0, num_new_tokens=num_new_tokens)

    def bucket(sizes: Sizes) -> Sizes:
        num_rows = sizes["R"] - sizes["B"] * num_new_tokens
        if num_rows < 0:
            raise ValueError(
                f"{op}: `new_positions` has {sizes['R']} entries for {sizes['B']} requests that "
                f"each got {num_new_tokens} rows, wanted one for each row. Pass the rows of the "
                "new layout."
            )
        num_requests = next_power_of_2(sizes["B"])
        return {"R": next_power_of_2(num_rows) + num_new_tokens * num_requests}

    (slots,) = run(
        op,
        _new_slots,
        {
            "query_start_loc": (of_metadata(op, cad, "query_start_loc", 1), "int B+1"),
            "block_table_tensor": (of_metadata(op, cad, "block_table_tensor"), "int B M"),
            "new_positions": (new_positions, "long R"),
            "is_rejected_token_mask": (is_rejected_token_mask, "bool R"),
        },
        "long R",
        bucket=bucket,
        page_size=block_size,
        num_new_tokens=num_new_tokens,
        max_model_len=max_model_len,
    )
    return slots


def _new_slots(
    arrays: Arrays, *, page_size: int, num_new_tokens: int, max_model_len: int, **_: Any
) -> tuple[Array]:
    added = arrays["live"].shape[0] * num_new_tokens
    return (
        metadata.compute_new_slot_mapping(
            metadata_of(arrays, arrays["new_positions"].shape[0] - added),
            arrays["new_positions"],
            arrays["is_rejected_token_mask"],
            page_size,
            num_new_tokens,
            max_model_len,
        ),
    )


def extend_all_queries_by_N(
    common_attn_metadata: Any, N: int, arange: torch.Tensor | None, new_slot_mapping: torch.Tensor
) -> Any:
    """Adds rows to every request; trailing requests without rows are padding, and stay so.

    Args:
      common_attn_metadata: is not written to.
      N: rows to add to each request.
      arange: not read; the argument is there for vLLM's signature.
      new_slot_mapping: int64 [T + B * N] slots of all rows.

    Returns:
      New metadata of the same class; lengths are not bounded by the model's. As in the original,
      fields other than the lengths, starts, counts and slots stay as they are: copies of the
      lengths on the host (such as `seq_lens_cpu_upper_bound`) then lack the N rows.

    Raises:
      TypeError, ValueError: an argument is invalid; the message names it.

    Source: vLLM v1/spec_decode/utils.py, of the same name.
    """
    del arange
    op = "extend_all_queries_by_N"
    check_sizes(op, 0, N=N)
    return changed(extended(op, common_attn_metadata, N), slot_mapping=new_slot_mapping)


def extended(op: str, cad: Any, num_new_tokens: int) -> Any:
    """Returns metadata with more rows for each request that has some, and the slots as they were.

    Raises:
      TypeError, ValueError: starts or lengths have another dtype, shape or device.
    """
    host, (start, seq_lens) = host_starts(op, cad), starts_and_lengths(op, cad)
    with torch.inference_mode(False):  # results may be written to in every mode
        host_added, added = (num_before(x) * num_new_tokens for x in (host, start))
        start, seq_lens = start + added, seq_lens + added.diff()
    return changed(
        cad,
        query_start_loc=start,
        query_start_loc_cpu=host + host_added,
        seq_lens=seq_lens,
        num_actual_tokens=cad.num_actual_tokens + int(host_added[-1]),
        max_query_len=cad.max_query_len + num_new_tokens,
        max_seq_len=cad.max_seq_len + num_new_tokens,
    )


def host_starts(op: str, cad: Any) -> torch.Tensor:
    """Returns the metadata's copy of `query_start_loc` on the host, int [B + 1].

    Raises:
      TypeError, ValueError: it has another dtype, shape or device.
    """
    name = "query_start_loc_cpu"
    host = of_metadata(op, cad, name, 1)
    check_tensors(op, {name: (host, "int B+1")}, torch.device("cpu"))
    return host


def starts_and_lengths(op: str, cad: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the metadata's `query_start_loc`, int32 [B + 1], and `seq_lens`, int32 [B].

    Raises:
      TypeError, ValueError: one has another dtype, shape or device.
    """
    start, seq_lens = (of_metadata(op, cad, "query_start_loc", 1), of_metadata(op, cad, "seq_lens"))
    check_tensors(op, {"query_start_loc": (start, "int B+1"), "seq_lens": (seq_lens, "int B")})
    return to_int32(start), to_int32(seq_lens)


def num_before(query_start: torch.Tensor) -> torch.Tensor:
    """Counts the requests before each one, padding at the end not included, [B + 1]."""
    index = torch.arange(len(query_start), dtype=query_start.dtype, device=query_start.device)
    return index.minimum((query_start[:-1] < query_start[-1:]).sum(dtype=index.dtype))


def update_num_computed_tokens_for_batch_change(
    num_computed_tokens: torch.Tensor,
    num_accepted_tokens: torch.Tensor,
    prev_positions: torch.Tensor,
    valid_sampled_token_count: torch.Tensor,
    prev_num_draft_tokens: torch.Tensor,
    cpu_num_computed_tokens: torch.Tensor,
) -> None:
    """Reorders the counts of the batch before for this batch, in place.

    Args:
      num_computed_tokens: int [B] or longer; of the batch before, overwritten with this one's
        counts. Entries from B on stay.
      num_accepted_tokens: int [B], written.
      prev_positions: int [B] index of each request in the batch before; negative if new.
      valid_sampled_token_count: int, tokens that each request of the batch before kept.
      prev_num_draft_tokens: int, drafts that it had verified; 0 means the host's count is right.
      cpu_num_computed_tokens: int [B] the host's counts of this batch, on the device.

    Raises:
      TypeError, ValueError: an argument is invalid: the message names it, and nothing is
        written.

    Source: vLLM v1/spec_decode/utils.py, of the same name.

    Example:
      >>> computed, accepted = torch.tensor([50, 60, 70, 80]), torch.tensor([1, 1, 1])
      >>> update_num_computed_tokens_for_batch_change(
      ...     computed, accepted, torch.tensor([2, -1, 0]), torch.tensor([1, 2, 3, 4]),
      ...     torch.tensor([0, 3, 3, 3]), torch.tensor([999, 5, 51]))
      >>> computed.tolist(), accepted.tolist()
      ([73, 5, 51, 80], [3, 1, 1])
    """
    op = "update_num_computed_tokens_for_batch_change"
    tensors = {
        "prev_positions": (prev_positions, "long B"),
        "num_accepted_tokens": (num_accepted_tokens, "int B"),
        "cpu_num_computed_tokens": (cpu_num_computed_tokens, "int B"),
        "num_computed_tokens": (num_computed_tokens, "int R"),
        "valid_sampled_token_count": (valid_sampled_token_count, "int S"),
        "prev_num_draft_tokens": (prev_num_draft_tokens, "int U"),
    }

    def bucket(sizes: Sizes) -> Sizes:
        B, most = sizes["B"], next_power_of_2(max(sizes.values()))
        check_tensors(op, {"num_computed_tokens": (num_computed_tokens, "int B..")}, B=B)
        return dict.fromkeys("RSU", most)

    computed, accepted = run(op, _batch_change, tensors, "int B, int B", bucket=bucket)
    num_computed_tokens[: len(computed)].copy_(computed)
    num_accepted_tokens.copy_(accepted)


def _batch_change(arrays: Arrays, **_: Any) -> tuple[Array, Array]:
    return metadata.update_num_computed_tokens_for_batch_change(
        arrays["num_computed_tokens"],
        arrays["num_accepted_tokens"],
        arrays["prev_positions"],
        arrays["valid_sampled_token_count"],
        # After the last request of the batch before, no row had drafts.
        jnp.where(arrays["live_U"] & arrays["live_S"], arrays["prev_num_draft_tokens"], 0),
        arrays["cpu_num_computed_tokens"],
    )


def metadata_of(arrays: Arrays, num_rows: int) -> CommonAttentionMetadata:
    """Makes jspec's metadata of a padded batch; lengths and counts, computed in torch, are 0."""
    num_requests = arrays["live"].shape[0]
    zero, table = jnp.int32(0), jnp.zeros((num_requests, 1), jnp.int32)
    return CommonAttentionMetadata(
        query_start=arrays["query_start_loc"],
        seq_lens=jnp.zeros(num_requests, jnp.int32),
        block_table=page_table(arrays) if "block_table_tensor" in arrays else table,
        slots=jnp.zeros(num_rows, jnp.int32),
        num_tokens=zero,
        max_query_len=zero,
        max_seq_len=zero,
    )
