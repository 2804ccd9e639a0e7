"""Single kernels and helpers of a runner, on tensors of torch, with the names of vLLM's.

`eagle_prepare_inputs_padded`, `eagle_prepare_next_token_padded` and `extend_all_queries_by_N` run
in torch; the others pass one array to JAX and get one back. Sizes are padded to powers of two, so
that changing batches compile nothing; tensors on a GPU are read and written in the order of the
caller's current stream, and nothing waits for the device. Values are those of `jspec.pallas` and
`jspec.metadata`: 32 bits wide, where larger ones are clamped.

Source: vLLM v1/spec_decode/utils.py.
"""

from jspec.metadata import (
    PADDING_SLOT_ID,
    next_power_of_2,
    unconditional_to_conditional_rates,
)
from torch_bridge.ops.batch import (
    compute_new_slot_mapping,
    extend_all_queries_by_N,
    update_num_computed_tokens_for_batch_change,
)
from torch_bridge.ops.expand import (
    BlockInputs,
    ExpandedInputs,
    copy_and_expand_dflash_inputs,
    copy_and_expand_eagle_inputs,
)
from torch_bridge.ops.first_pass import (
    BlockFirstPassInputs,
    FirstPassInputs,
    set_inputs_first_pass,
    set_inputs_first_pass_dflash,
)
from torch_bridge.ops.kernels import (
    eagle_prepare_inputs_padded,
    eagle_prepare_next_token_padded,
    eagle_step_update_slot_mapping_and_metadata,
)

__all__ = [
    "PADDING_SLOT_ID",
    "BlockFirstPassInputs",
    "BlockInputs",
    "ExpandedInputs",
    "FirstPassInputs",
    "compute_new_slot_mapping",
    "copy_and_expand_dflash_inputs",
    "copy_and_expand_eagle_inputs",
    "eagle_prepare_inputs_padded",
    "eagle_prepare_next_token_padded",
    "eagle_step_update_slot_mapping_and_metadata",
    "extend_all_queries_by_N",
    "next_power_of_2",
    "set_inputs_first_pass",
    "set_inputs_first_pass_dflash",
    "unconditional_to_conditional_rates",
    "update_num_computed_tokens_for_batch_change",
]
