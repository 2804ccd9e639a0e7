"""Reads recordings: the cases of a family of calls, models with their outputs, and whole runs.

A folder of recordings holds `<family>.npz`, `<family>.json`, `<family>.json.gz` and `models/*/`.
The one of this repository is `tests/golden`; the environment variable JSPEC_GOLDEN names another
of the same format, with other cases, sizes, names or fewer families.

Values are read when a test asks for them, so that `tests/mutations.py` can see who reads a value
and change it for one run.
"""

import contextlib
import copy
import functools
import gzip
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from jspec.checkpoint import read
from jspec.proposers import REGISTRY

_OURS = Path(__file__).parent.parent / "golden"
FOLDER = Path(os.environ.get("JSPEC_GOLDEN") or _OURS).resolve()
MODELS = FOLDER / "models"
SENTINELS = (-7777, -777777, -4242)  # cells that the recorded software did not write

_reads: set[tuple[str, str]] | None = None
_change: tuple[str, str, Callable[[Any], Any]] | None = None


@contextlib.contextmanager
def watched() -> Iterator[set[tuple[str, str]]]:
    """Collects (file, key) of each value that is read."""
    global _reads
    _reads = set()
    try:
        yield _reads
    finally:
        _reads = None


@contextlib.contextmanager
def changed(file: str, key: str, change: Callable[[Any], Any]) -> Iterator[None]:
    """Returns `change(value)` in place of one value."""
    global _change
    _change = (file, key, change)
    try:
        yield
    finally:
        _change = None


def _give(file: str, key: str, value: Any) -> Any:
    if _reads is not None:
        _reads.add((file, key))
    value = copy.deepcopy(value)
    return _change[2](value) if _change is not None and _change[:2] == (file, key) else value


@functools.cache
def _load(file: str) -> Any:
    path = FOLDER / file
    if path.suffix == ".npz":
        with np.load(path) as data:
            return dict(data)
    content = path.read_bytes()
    return json.loads(gzip.decompress(content) if path.suffix == ".gz" else content)


def _skip_if_missing(file: str) -> None:
    if "JSPEC_GOLDEN" in os.environ and not (FOLDER / file).exists():
        pytest.skip(f"{file} is not in {FOLDER} (JSPEC_GOLDEN)")


class Values(Mapping[str, Any]):
    """Recorded values by name; each is a copy.

    Args:
      file: where they are recorded, relative to the folder.
      prefix: what their keys begin with.
      values: value by key.
      as_int32: turns int64 arrays into int32.
    """

    def __init__(self, file: str, prefix: str, values: dict[str, Any], as_int32: bool = False):
        self.file, self.prefix, self.as_int32 = file, prefix, as_int32
        self._values = {
            key.removeprefix(prefix): value
            for key, value in values.items()
            if key.startswith(prefix)
        }

    def __getitem__(self, name: str) -> Any:
        value = _give(self.file, self.prefix + name, self._values[name])
        if self.as_int32 and isinstance(value, np.ndarray) and value.dtype == np.int64:
            return value.astype(np.int32)
        return value

    def __contains__(self, name: object) -> bool:
        return name in self._values

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def with_prefix(self, prefix: str) -> "Values":
        """Returns the values whose names begin with `prefix`, without it."""
        keys = {self.prefix + name: value for name, value in self._values.items()}
        return Values(self.file, self.prefix + prefix, keys, self.as_int32)


class Case(NamedTuple):
    """A recorded call.

    Attributes:
      name: of the case.
      given: arrays that the call got.
      want: arrays that it returned.
      scalars: other arguments and results.
    """

    name: str
    given: Values
    want: Values
    scalars: Values

    def __repr__(self) -> str:
        return self.name


@functools.cache
def values(family: str) -> dict[str, Any]:
    """Returns all values of a family of arrays: arrays and scalars by key."""
    file = f"{family}.npz"
    arrays = _load(file)
    scalars = {
        f"c{i:03d}.scalar.{name}": value
        for i, entry in enumerate(arrays["scalars"])
        for name, value in json.loads(str(entry)).items()
    }
    return {key: x for key, x in arrays.items() if key not in ("names", "scalars")} | scalars


def cases(family: str, *, as_int32: bool = False) -> list[Case]:
    """Reads the cases of a family of arrays; skips the test where the folder has none."""
    file = f"{family}.npz"
    _skip_if_missing(file)
    found = values(family)
    by_case: dict[str, dict[str, Any]] = {}
    for key, value in found.items():
        by_case.setdefault(key.partition(".")[0], {})[key] = value
    return [
        Case(
            str(name),
            Values(file, f"c{i:03d}.in.", by_case[f"c{i:03d}"], as_int32),
            Values(file, f"c{i:03d}.out.", by_case[f"c{i:03d}"], as_int32),
            Values(file, f"c{i:03d}.scalar.", by_case[f"c{i:03d}"]),
        )
        for i, name in enumerate(_load(file)["names"])
    ]


@functools.cache
def largest(family: str, key: str, axis: int = 0) -> int:
    """Returns the longest axis of an array over all cases of a family: what padding has to hold.

    Args:
      family: of arrays.
      key: "in.<name>" or "out.<name>".
      axis: of the array.
    """
    names = [name for name in values(family) if name.partition(".")[2] == key]
    return max(values(family)[name].shape[axis] for name in names)


def documents(file: str) -> list[Values]:
    """Reads the cases of a family of JSON; skips the test where the folder has none."""
    _skip_if_missing(file)
    return [
        Values(file, f"{i}.", {f"{i}.{name}": value for name, value in case.items()})
        for i, case in enumerate(_load(file))
    ]


def each_case(
    family: str, *, as_int32: bool = False, only: Callable[[Case], bool] = lambda case: True
):
    """Parametrises a test over the cases of a family of arrays, as `case`."""
    return _each(
        lambda: [case for case in cases(family, as_int32=as_int32) if only(case)],
        lambda case: case.name,
    )


def each_document(file: str, only: Callable[[Values], bool] = lambda case: True):
    """Parametrises a test over the cases of a family of JSON, as `case`."""
    return _each(
        lambda: [case for case in documents(file) if only(case)], lambda case: case["name"]
    )


def each_model(*kinds: str, having: str = "prompt_0"):
    """Parametrises a test over the models of some kinds that have an array, as `name`."""
    return _each(
        lambda: [name for name in models(*kinds) if having in expected(name)],
        str,
        "name",
        f"{' or '.join(kinds)} models with {having}",
    )


def each_run():
    """Parametrises a test over the recorded runs, as `name`."""
    return _each(runs, str, "name", "runs")


def _each(found: Callable[[], list], name_of: Callable[[Any], str], argument="case", what="cases"):
    try:
        params = [pytest.param(x, id=name_of(x)) for x in found()]
        word = f"no {what} in {FOLDER} (JSPEC_GOLDEN)"
    except pytest.skip.Exception as skipped:
        params, word = [], str(skipped)
    if not params:
        assert "JSPEC_GOLDEN" in os.environ, f"no {what} in {FOLDER}"
        params = [pytest.param(None, id="none", marks=pytest.mark.skip(reason=word))]

    def decorate(test):
        return pytest.mark.recorded(pytest.mark.parametrize(argument, params)(test))

    return decorate


def of_this_repository(test):
    """Skips a test of what this repository's recordings hold where JSPEC_GOLDEN names others."""
    is_other = FOLDER != _OURS
    skip = pytest.mark.skipif(is_other, reason=f"counts what tests/golden holds, not {FOLDER}")
    return skip(test)


# --- models


@functools.cache
def _kinds() -> dict[str, str]:
    kinds = {}
    for folder in sorted(MODELS.iterdir()) if MODELS.exists() else ():
        if (folder / "config.json").exists() and not (folder / "case.json").exists():
            kinds[folder.name] = _kind(folder)
    return kinds


def _kind(folder: Path) -> str:
    checkpoint = read(folder)
    if "mask_hidden" in checkpoint.names:
        return "peagle"
    methods = [
        method
        for method, proposer in REGISTRY.items()
        if proposer.load is not None and proposer.recognises(checkpoint.config, checkpoint.names)
    ]
    # A draft model is a target like any other.
    return next((method for method in methods if method != "draft_model"), "target")


def models(*kinds: str) -> list[str]:
    """Lists the recorded models of some kinds: "target", "peagle", or a drafting method.

    Without kinds it lists all.
    """
    return [name for name, kind in _kinds().items() if kind in (kinds or [kind])]


def runs() -> list[str]:
    """Lists the recorded runs of speculative decoding."""
    return sorted(path.parent.name for path in MODELS.glob("*/case.json"))


def expected(name: str) -> Values:
    """Returns what a model gave, or what happened in a run."""
    file = f"models/{name}/expected.npz"
    return Values(file, "", _load(file))


def settings(name: str) -> dict[str, Any]:
    """Returns the settings of a recorded run."""
    return _load(f"models/{name}/case.json")


def target_of(name: str) -> str:
    """Returns the model that a recorded head drafts for: its README says "for `target`"."""
    return readme(name, r"for `(\w+)`")[0]


def readme(name: str, pattern: str) -> tuple[str, ...]:
    """Returns what a pattern's groups find in the README of a recorded model."""
    found = re.search(pattern, (MODELS / name / "README.md").read_text())
    assert found, f"models/{name}/README.md says nothing like {pattern}"
    return found.groups()


def num_prompts(data: Values) -> int:
    """Counts the prompts of a recorded model or run."""
    return sum(re.fullmatch(r"prompt_\d+", key) is not None for key in data)
