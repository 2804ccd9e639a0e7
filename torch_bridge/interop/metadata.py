"""Copies of a caller's metadata with other fields, of its own class.

Fields are those of CommonAttentionMetadata in vLLM 0.19 to 0.33; see `docs/pytorch.md`.
"""

import copy
from typing import Any

_OF_THE_TARGETS_PASS = (
    *("positions", "is_prefilling", "req_idx"),
    *("logits_indices_padded", "num_logits_indices", "max_logits_per_req"),
    *("encoder_seq_lens", "encoder_seq_lens_cpu"),
    *("dcp_local_seq_lens_cpu", "dcp_local_seq_lens_cpu_upper_bound"),
    *("mm_req_doc_ranges", "rswa_prefix_lens", "replayssm_decode_base_cpu"),
    *("_num_computed_tokens_cache", "_token_to_req_indices_cache"),
)
"""Fields that describe the target's pass in detail: the original leaves them out of metadata for a
drafter."""

HOST_LENGTHS = ("seq_lens_cpu", "_seq_lens_cpu", "seq_lens_cpu_upper_bound")
"""Copies of `seq_lens` that vLLM's metadata keeps on the host, by release."""


def changed(metadata: Any, **values: Any) -> Any:
    """Returns a shallow copy of a metadata object, of the same class, with other attributes."""
    new = copy.copy(metadata)
    for name, value in values.items():
        object.__setattr__(new, name, value)  # also for frozen dataclasses
    return new


def remade(metadata: Any, *left_out: str, **values: Any) -> Any:
    """Returns `changed` metadata without the fields that describe the target's pass.

    Attributes that no release of vLLM has stay as they are.

    Args:
      metadata: the caller's.
      left_out: further fields that become None where the object has them.
      values: the fields of the new pass.
    """
    new = changed(metadata, **values)
    for name in (*_OF_THE_TARGETS_PASS, *left_out):
        if getattr(metadata, name, None) is not None:
            object.__setattr__(new, name, None)
    return new


def has_own(metadata: Any, name: str) -> bool:
    """Whether an object stores an attribute: reading a property may wait for the device."""
    return name in getattr(metadata, "__dict__", {})
