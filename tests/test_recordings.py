"""The reader of recordings, the check that changes them, and another folder of the same format."""

import os
import subprocess
import sys

import numpy as np
import pytest

from tests import mutations, other_recordings
from tests.support import not_compared, recordings

FAMILY = "eagle_step_slot_mapping"


def test_a_value_is_a_copy_that_is_noted_and_changed_where_asked_for():
    case = recordings.cases(FAMILY)[0]
    key = (f"{FAMILY}.npz", "c000.in.positions")
    with recordings.watched() as reads:
        before = case.given["positions"]
        assert "block_table" in case.given and dict(case.scalars)["steps"] is None
    assert reads == {key} | {(key[0], f"c000.scalar.{name}") for name in case.scalars}
    with recordings.changed(*key, lambda x: x + 1):
        np.testing.assert_array_equal(case.given["positions"], before + 1)
    before += 5
    np.testing.assert_array_equal(case.given["positions"], before - 5)


@pytest.mark.parametrize(
    "value, place, wanted",
    [
        (np.array([[1, 2], [3, 4]]), 2, [[1, 2], [4, 4]]),
        (np.array([True, False]), 1, [True, True]),
        (np.array([0.0, -np.inf]), 1, [0.0, 0.0]),
        ({"a": [1, None]}, ("a", 1), {"a": [1, 7]}),
        (["x 3.50", []], (0,), ["x 3.59", []]),
        (["x", []], (1,), ["x", [7]]),
    ],
)
def test_one_element_of_a_value_is_changed(value, place, wanted):
    got = mutations.changed(value, place)
    assert (got.tolist() if isinstance(got, np.ndarray) else got) == wanted


def test_entries_of_json_are_told_apart_by_the_operation_they_belong_to():
    ops = [["start", "a", [1, 2]], ["state", [], ["a"]]]
    words = [".".join(words) for _, words in mutations.leaves(ops)]
    assert words == ["", "start.1", "start.last", "start.last", "", "state.1", "state.last"]


@recordings.of_this_repository
def test_each_reason_stands_for_a_recorded_value():
    mutations.values()
    assert [e.pattern for e in not_compared.NOT_COMPARED if e not in not_compared.used] == []


@pytest.mark.slow
def test_another_folder_of_the_same_format_passes_and_names_what_it_lacks(tmp_path):
    other_recordings.write(tmp_path)
    files = [
        *("pallas/test_next_token.py", "pallas/test_sample_index.py", "pallas/test_eagle_step.py"),
        *("metadata/test_metadata.py", "metrics/test_metrics.py", "proposers/test_eagle3.py"),
        "verification/test_rejection_recorded.py",
    ]
    paths = [str(mutations.HERE / name) for name in files]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *paths, "-n", "0", "-rs", "-m", "recorded and not gpu"],
        env=os.environ | {"JSPEC_GOLDEN": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout
    for name in other_recordings.LEFT_OUT:
        assert f"{name} is not in {tmp_path}" in done.stdout
