"""Bookkeeping of a batch between verification and drafting: who owns which row, slot and logit.

Functions return new values and never write to an argument. Sizes are static and counts are traced,
so all but the constructors of `SpecDecodeMetadata` work inside jit.
"""

from jspec.axes import PAD_SLOT
from jspec.bookkeeping.attention_metadata import (
    CommonAttentionMetadata,
    compute_new_slot_mapping,
    extend_all_queries_by_N,
    prepare_inputs,
)
from jspec.bookkeeping.batch_change import update_num_computed_tokens_for_batch_change
from jspec.bookkeeping.first_pass import (
    FirstPass,
    set_inputs_first_pass,
    set_inputs_first_pass_dflash,
)
from jspec.bookkeeping.numbers import next_power_of_2, unconditional_to_conditional_rates
from jspec.bookkeeping.spec_decode_metadata import SpecDecodeMetadata

PADDING_SLOT_ID = PAD_SLOT
"""vLLM's name of `PAD_SLOT`: write no key and no value."""

__all__ = [
    "PADDING_SLOT_ID",
    "CommonAttentionMetadata",
    "FirstPass",
    "SpecDecodeMetadata",
    "compute_new_slot_mapping",
    "extend_all_queries_by_N",
    "next_power_of_2",
    "prepare_inputs",
    "set_inputs_first_pass",
    "set_inputs_first_pass_dflash",
    "unconditional_to_conditional_rates",
    "update_num_computed_tokens_for_batch_change",
]
