"""Recorded arrays and attention metadata as tensors of torch, and exact comparison."""

from collections.abc import Mapping

import jax
import numpy as np
import torch

from tests.support import op_runs
from tests.support.torch_runner import CommonAttentionMetadata


def device() -> torch.device:
    """Names the device that the tests run on."""
    return torch.device("cuda", 0) if jax.default_backend() == "gpu" else torch.device("cpu")


def tensors(arrays: Mapping[str, np.ndarray]) -> dict[str, torch.Tensor]:
    """Puts recorded arrays on the device, with their dtypes."""
    return {name: torch.tensor(array, device=device()) for name, array in arrays.items()}


def ints(*values) -> torch.Tensor:
    """Makes int32 [n]."""
    return torch.tensor(values, dtype=torch.int32, device=device())


def longs(*values) -> torch.Tensor:
    """Makes int64 [n]."""
    return torch.tensor(values, dtype=torch.int64, device=device())


def metadata(query_start, seq_lens, table=None, slots=None, **counts) -> CommonAttentionMetadata:
    """Makes metadata on the device, with the counts that the arrays imply or those given."""
    start = torch.as_tensor(np.asarray(query_start, np.int32))
    lengths = torch.as_tensor(np.asarray(seq_lens, np.int32))
    if table is None:
        table = np.zeros((len(lengths), 1))
    if slots is None:
        slots = np.zeros(int(start[-1]))
    table, slots = np.asarray(table, np.int32), np.asarray(slots, np.int64)
    values = {
        "num_actual_tokens": int(start[-1]),
        "max_query_len": int(start.diff().max()) if len(lengths) else 0,
        "max_seq_len": int(lengths.max()) if len(lengths) else 0,
    }
    return CommonAttentionMetadata(
        query_start_loc=start.to(device()),
        query_start_loc_cpu=start,
        seq_lens=lengths.to(device()),
        num_reqs=len(lengths),
        block_table_tensor=torch.as_tensor(table).to(device()),
        slot_mapping=torch.as_tensor(slots).to(device()),
        seq_lens_cpu_upper_bound=lengths.clone(),
        **(values | counts),
    )


def counts(cad) -> dict[str, int]:
    """Names the three numbers that metadata keeps on the host."""
    return {
        name: getattr(cad, name) for name in ("num_actual_tokens", "max_query_len", "max_seq_len")
    }


def same(got: torch.Tensor, want, dtype: torch.dtype | None = None) -> None:
    """Compares exactly: values, shape, and dtype with the recorded one or the one given."""
    want = np.asarray(want)
    np.testing.assert_array_equal(got.cpu().numpy(), want)
    assert got.shape == want.shape
    assert got.dtype == (dtype or torch.from_numpy(want).dtype)
    assert got.device == device() and got.is_contiguous()


def strided(given: torch.Tensor) -> torch.Tensor:
    """Returns the same values at every other place of a buffer that holds poison between them."""
    wide = given.new_full((*given.shape, 2), 1 if given.dtype == torch.bool else op_runs.POISON)
    wide[..., 0] = given
    return wide[..., 0]
