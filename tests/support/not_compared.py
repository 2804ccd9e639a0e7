"""Recorded values that no test may see, each with its reason.

`tests/mutations.py` reads this table: every other recorded value turns a test red if it changes.
A value is named by its file, its case (of models: nothing) and its key.
"""

import re
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from tests.support import recordings


class Excuse(NamedTuple):
    """Values that are not compared.

    Attributes:
      pattern: of "file:case:key".
      reason: why.
      where: `(value, case, key) -> bool`, or of an array the cells that are meant; all by default.
    """

    pattern: str
    reason: str
    where: Callable[[Any, Any, str], Any] = lambda value, case, key: True


def _rows(array: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """Widens a mask of rows to an array's cells."""
    return np.broadcast_to(rows.reshape(-1, *[1] * (array.ndim - 1)), array.shape)


def _forward(key: str) -> int:
    """Returns N of "out.fN.<name>"."""
    found = re.match(r"out\.f(\d+)\.", key)
    assert found
    return int(found[1])


def _not_written(array, case, key):
    return np.isin(array, recordings.SENTINELS)


def _behind_the_output(array, case, key):
    return np.arange(len(array)) >= case.scalars["total_output_tokens"]


def _one_slot(value, case, key):
    return case.scalars["path"] in ("eagle", "draft_model")


def _a_block(value, case, key):
    return case.scalars["path"] == "dflash"


def _of_undefined_rows(array, case, key):
    return _rows(array, ~case.want["row_is_well_defined"])


def _slots_past_the_limit(array, case, key):
    return case.want["f0.positions"] >= case.scalars["max_model_len"]


def _loop_past_the_limit(array, case, key):
    from tests.support.toy_loop import Case

    return _rows(array, ~Case(case).is_inside(_forward(key)))


def _drafts_past_the_limit(array, case, key):
    from tests.support.toy_loop import Case

    loop = Case(case)
    if loop.is_parallel:
        return np.zeros(array.shape, bool)
    later = [~loop.is_inside(f) for f in range(1, array.shape[1])]
    return np.stack([np.zeros(len(array), bool), *later], axis=1)


def _other_nodes(array, case, key):
    from tests.proposers.test_tree import compared_nodes

    return ~compared_nodes(case)[:, : array.shape[1]]


def _other_rows_of_a_tree(array, case, key):
    from tests.proposers.test_tree import compared_requests

    requests = compared_requests(case, _forward(key))
    return _rows(array, ~np.repeat(requests, len(array) // len(requests)))


def _of_an_uneven_tree(value, case, key):
    from tests.proposers.test_tree import is_even, tree_of

    return not is_even(tree_of(case))


def _refused(value, case, key):
    from tests.metrics.test_metrics import is_refused

    return is_refused(case)


LIMIT = "past max_model_len the original starts again at position 0; ours stays and drafts PAD"

NOT_COMPARED = (
    Excuse(r".*\.json(\.gz)?:.*:(name|adversarial)", "the case's name, and a comment on it"),
    Excuse(r".*\.npz:.*:out\..*", "a sentinel: the original did not write the cell", _not_written),
    Excuse(
        r"copy_and_expand_eagle_inputs\.npz:.*:out\.is_\w+_mask",
        "behind the rows of the pass: the original did not write the cell",
        _behind_the_output,
    ),
    Excuse(
        r"set_inputs_first_pass\.npz:.*:num_speculative_tokens",
        "these first passes add one row, whatever follows",
        _one_slot,
    ),
    Excuse(
        r"set_inputs_first_pass\.npz:.*:max_model_len",
        "the original's blocks have no limit; `torch_bridge.ops` has none either",
        _a_block,
    ),
    Excuse(
        r"ngram_gpu_propose\.npz:.*:out\.(token_ids|draft_tokens|num_valid_draft_tokens)",
        "the original writes several values to one place; which one stays depends on the device",
        _of_undefined_rows,
    ),
    Excuse(
        r"propose_loop\.npz:.*:fwd\.max_seq_len",
        "a bound that ours has no field for; attention reads the lengths themselves",
    ),
    Excuse(r"propose_loop\.npz:.*:out\.f0\.slot_mapping", LIMIT, _slots_past_the_limit),
    Excuse(
        r"propose_loop\.npz:.*:out\.f[1-9]\d*\.(?!query_start_loc)\w+", LIMIT, _loop_past_the_limit
    ),
    Excuse(r"propose_loop\.npz:.*:out\.draft_token_ids", LIMIT, _drafts_past_the_limit),
    Excuse(
        r"tree_drafting\.npz:.*:out\.f\d+\.slot_mapping",
        "the original's slots move by one with each level; ours keeps nodes outside of the pages",
    ),
    Excuse(
        r"tree_drafting\.npz:.*:(out\.child_drafts_per_level|draft_columns_per_level)",
        "the original divides the sizes of levels, which an uneven tree has no quotients of",
        _of_an_uneven_tree,
    ),
    Excuse(
        r"tree_drafting\.npz:.*:out\.draft_token_ids",
        "past the longest request, or of an uneven tree, which the original drafts as another one",
        _other_nodes,
    ),
    Excuse(
        r"tree_drafting\.npz:.*:out\.f\d+\.(input_ids|positions|hidden_states)",
        LIMIT,
        _other_rows_of_a_tree,
    ),
    Excuse(
        r"metrics\.json:.*:(?!steps|stats_per_step\.error).*",
        "an impossible count raises after the totals changed; ours changes nothing",
        _refused,
    ),
    Excuse(
        r"models/.*::tree_robust_\d+",
        "says whether the tree hinges on a near tie: it is compared where not",
    ),
)


def excused(label: str, value: Any, case: Any) -> Any:
    """Says whether a value, or which cells of an array, are not compared.

    Args:
      label: "file:case:key".
      value: the recorded one.
      case: what it belongs to: a `recordings.Case`, an entry of JSON, or None for models.
    """
    out = np.zeros(np.shape(value) if isinstance(value, np.ndarray) else (), bool)
    for excuse in NOT_COMPARED:
        if re.fullmatch(excuse.pattern, label):
            cells = np.broadcast_to(excuse.where(value, case, label.split(":")[-1]), out.shape)
            out |= cells
            if cells.any():
                used.add(excuse)
    return out if isinstance(value, np.ndarray) else bool(out)


used: set[Excuse] = set()
"""Entries that stood for something so far."""
