"""Random faults in recorded model folders are reported, or change nothing (`tests.corruptions`)."""

import pytest

from tests import corruptions
from tests.corruptions import FAULTS, recorded, run, try_fault


@pytest.mark.parametrize("count", [30, pytest.param(200, marks=pytest.mark.slow)])
def test_a_fault_is_told_or_changes_nothing_that_it_may_not(count):
    results = run(count, seed=0)
    assert len(results) == count
    assert not [str(result) for result in results if not result.excused]


def test_every_fault_and_every_model_is_drawn():
    drawn = [corruptions.draw(number, 0, recorded()) for number in range(300)]
    assert {fault for _, fault, _ in drawn} == set(FAULTS)
    assert {folder.name for folder, _, _ in drawn} == recorded().keys()


def scale(folder, rng):
    """A weight that nothing contradicts."""
    name = min(folder.tensors)
    folder.tensors[name] = folder.tensors[name] + folder.tensors[name].dtype.type(1)
    return name


def leave(folder, rng):
    """A second file that `load` cannot see."""
    folder.told = True
    return "nothing"


@pytest.mark.parametrize("fault", [scale, leave])
def test_the_script_sees_what_is_silent(fault, monkeypatch):
    monkeypatch.setattr(corruptions, "FAULTS", (fault,))
    result = try_fault(0, 0, {"draft_llama_small": None})
    assert (result.outcome, result.excused) == ("SILENT", False)
