"""Attention metadata for tests, and batches whose padding misleads."""

import contextlib

import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np

from jspec.metadata import CommonAttentionMetadata

POISON = 1_000_003

# Few shapes, so that few programs are compiled: up to 5 requests and 25 rows are padded to these.
SHAPE = {"num_requests": 6, "num_rows": 27}


def ints(*values) -> np.ndarray:
    """Makes an int32 array."""
    return np.array(values, np.int32)


def metadata_of(query_start, seq_lens, table=None, slots=None, **counts) -> CommonAttentionMetadata:
    """Makes metadata on the host, with the counts that the arrays imply or those given."""
    query_start, seq_lens = np.asarray(query_start, np.int32), np.asarray(seq_lens, np.int32)
    counts = {
        "num_tokens": query_start[-1],
        "max_query_len": np.diff(query_start).max(),
        "max_seq_len": seq_lens.max(),
    } | counts
    if table is None:
        table = np.zeros((len(seq_lens), 1))
    return CommonAttentionMetadata(
        query_start=query_start,
        seq_lens=seq_lens,
        block_table=np.asarray(table, np.int32),
        slots=np.zeros(query_start[-1], np.int32) if slots is None else slots,
        **{name: np.asarray(count, np.int32) for name, count in counts.items()},
    )


def assert_counts(metadata: CommonAttentionMetadata, scalars) -> None:
    """Compares the three counts with recorded ones."""
    for ours, theirs in (
        ("num_tokens", "num_actual_tokens"),
        ("max_query_len", "max_query_len"),
        ("max_seq_len", "max_seq_len"),
    ):
        assert int(getattr(metadata, ours)) == scalars[theirs], ours


def assert_int32(tree) -> None:
    """Refuses every leaf that is neither int32 nor bool."""
    assert {leaf.dtype for leaf in jax.tree.leaves(tree)} <= {jnp.dtype("int32"), jnp.dtype("bool")}


@contextlib.contextmanager
def unchecked():
    """Turns the test-time annotation checker off, to meet the library's own errors."""
    jaxtyping.config.update("jaxtyping_disable", True)
    try:
        yield
    finally:
        jaxtyping.config.update("jaxtyping_disable", False)


def padded(lengths, table, *, width: int, num_requests: int, num_rows: int):
    """Pads a batch with requests and rows whose contents mislead; their lengths are 0."""
    start = np.cumsum([0, *lengths], dtype=np.int32)
    more = num_requests - len(lengths)
    return CommonAttentionMetadata(
        query_start=np.pad(start, (0, more), mode="edge"),
        seq_lens=np.array([9 * length for length in lengths] + [0] * more, np.int32),
        block_table=np.array([*table, *[[POISON] * width] * more], np.int32).reshape(-1, width),
        slots=np.array([*range(start[-1]), *[POISON] * (num_rows - start[-1])], np.int32),
        num_tokens=np.int32(start[-1]),
        max_query_len=np.int32(max(lengths, default=0)),
        max_seq_len=np.int32(9 * max(lengths, default=0)),
    )
