"""Row, slot and logit indices of a batch between verification and drafting.

`prepare` and `paged_view` are what jspec's own steps use; the rest are the bookkeeping functions of
vLLM's runners under their own names. Functions return new values and never write to an argument.
Sizes are static and counts are traced, so all but the constructors of `SpecDecodeMetadata` work
inside jit.
"""

from jspec.axes import PAD_SLOT
from jspec.metadata.attention_metadata import (
    CommonAttentionMetadata,
    compute_new_slot_mapping,
    extend_all_queries_by_N,
    prepare_inputs,
)
from jspec.metadata.batch_change import update_num_computed_tokens_for_batch_change
from jspec.metadata.first_pass import (
    FirstPass,
    set_inputs_first_pass,
    set_inputs_first_pass_dflash,
)
from jspec.metadata.first_token import first_token
from jspec.metadata.numbers import next_power_of_2, unconditional_to_conditional_rates
from jspec.metadata.prepare import (
    check_counts,
    check_prompt,
    check_scheduled,
    check_verified,
    paged_view,
    prepare,
    row_request,
)
from jspec.metadata.spec_decode_metadata import SpecDecodeMetadata
from jspec.metadata.trees import ancestors, path_as_chain, tree_view

PADDING_SLOT_ID = PAD_SLOT
"""vLLM's name of `PAD_SLOT`: write no key and no value."""

__all__ = [
    "PADDING_SLOT_ID",
    "CommonAttentionMetadata",
    "FirstPass",
    "SpecDecodeMetadata",
    "ancestors",
    "check_counts",
    "check_prompt",
    "check_scheduled",
    "check_verified",
    "compute_new_slot_mapping",
    "extend_all_queries_by_N",
    "first_token",
    "next_power_of_2",
    "paged_view",
    "path_as_chain",
    "prepare",
    "prepare_inputs",
    "row_request",
    "set_inputs_first_pass",
    "set_inputs_first_pass_dflash",
    "tree_view",
    "unconditional_to_conditional_rates",
    "update_num_computed_tokens_for_batch_change",
]
