"""Changes recorded values one at a time: does a test fail? `python -m tests.mutations`.

Of every result in every recording one element is changed, in memory (`support/recordings.py`), and
the tests that read it run again. A change that no test detects is printed, and the exit status is
1; `support/not_compared.py` lists what no test can detect. Arguments of the recorded calls are not
changed: each has to be read by a test.
"""

import argparse
import contextlib
import functools
import io
import math
import os
import random
import re
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

HERE = Path(__file__).parent

# Scalars and entries of JSON that are results; others are arguments of the recorded calls.
RESULTS = {
    "copy_and_expand_eagle_inputs.npz": r"total_output_tokens",
    "prepare_inputs.npz": r"(un)?padded\..*",
    "propose_loop.npz": r"fwd\..*",
    "rejection_sampler.npz": r"max_spec_len",
    "set_inputs_first_pass.npz": r"num_(actual_)?tokens|max_(query|seq)_len|causal|\w+_per_request",
    "slot_mapping_and_metadata.npz": r"new_(num_actual_tokens|max_query_len|max_seq_len)",
    "spec_decode_metadata_dummy.npz": r"max_spec_len|raises",
    "tree_drafting.npz": r"draft_columns_per_level|fwd|raises",
    "metrics.json": r"(stats_per_step|logs|log_calls_when_nothing_observed|prometheus_samples).*",
    "ngram_gpu_trim_drafts.json": r"after.*",
    "parse_output.json": r"result.*",
    "suffix_decoding.json.gz": r"ops\.(speculate\.last.*|state\..*|expect_error\.last)",
    "suffix_proposer.json.gz": r"steps\.(drafts|active_after|cached_after).*",
}
MODEL_INPUTS = r"prompt_\d+"


class Value(NamedTuple):
    """A recorded value that can be changed.

    Attributes:
      file: of the recording.
      key: as `recordings` counts reads.
      label: "file:case:key", for people and for `not_compared`.
      paths: places inside the value: flat indices of an array, else tuples of keys.
      is_result: whether a change has to be seen; an argument has to be read.
    """

    file: str
    key: str
    label: str
    paths: tuple
    is_result: bool


def main() -> int:
    """Runs the check; returns the exit status."""
    parser = argparse.ArgumentParser(
        description="Changes recorded values one at a time: does a test turn red?"
    )
    parser.add_argument("families", nargs="*", help="parts of file names; default: all")
    parser.add_argument("--elements", type=int, default=1, help="changes per value (default: 1)")
    parser.add_argument("--seed", type=int, default=0, help="which elements")
    parser.add_argument("--jobs", type=int, default=2, help="processes (default: 2)")
    arguments = parser.parse_args()
    os.environ.setdefault("JSPEC_TEST_QUICK", "1")
    begin = time.monotonic()
    wanted = [v for v in values() if any(f in v.file for f in arguments.families or [""])]
    results = [value for value in wanted if value.is_result]
    seen, reads, num_changes = run(wanted, arguments)
    unseen = [value.label for value in results if value.label not in seen]
    unread = sorted({v.label for v in wanted if not v.is_result and (v.file, v.key) not in reads})
    for label in unseen:
        print(f"no test sees a change of {label}")
    for label in unread:
        print(f"no test reads {label}")
    print(
        f"{len(results)} results in {len({v.file for v in results})} files, {num_changes} changes: "
        f"{len(seen)} seen, {len(unseen)} not; {len(wanted) - len(results)} arguments: "
        f"{len(unread)} not read; {time.monotonic() - begin:.0f} s"
    )
    return 1 if unseen or unread else 0


def run(wanted: list[Value], arguments: Any) -> tuple[set[str], set[tuple[str, str]], int]:
    """Runs the test files, several at once; a value that was seen is not changed again."""
    # Those of torch repeat what the others show, so that they come last.
    waiting = sorted(
        test_files(), key=lambda path: ("torch_bridge" in path.parts, -path.stat().st_size)
    )
    seen: set[str] = set()
    reads: set[tuple[str, str]] = set()
    num_changes = 0
    with ProcessPoolExecutor(arguments.jobs, mp_context=get_context("spawn")) as pool:
        running = {}
        while waiting or running:
            while waiting and len(running) < arguments.jobs:
                path = waiting.pop(0)
                left = [v for v in wanted if not is_done(v, seen, reads)]
                if not any(names(path, value.file) for value in left):
                    continue
                task = pool.submit(check, str(path), left, arguments.elements, arguments.seed)
                running[task] = path.relative_to(HERE), time.monotonic()
            for task in wait(running, return_when=FIRST_COMPLETED).done:
                name, start = running.pop(task)
                found, read, count = task.result()
                seen, reads, num_changes = seen | found, reads | read, num_changes + count
                print(f"{name}: {count} changes, {time.monotonic() - start:.0f} s", file=sys.stderr)
    return seen, reads, num_changes


def is_done(value: Value, seen: set[str], reads: set[tuple[str, str]]) -> bool:
    """Whether a result's change was seen, or an argument was read."""
    return value.label in seen if value.is_result else (value.file, value.key) in reads


def test_files() -> list[Path]:
    """Lists the test files that compare with recordings."""
    marks = re.compile(r"@recordings\.each_|pytest\.mark\.recorded")
    return [path for path in HERE.rglob("test_*.py") if marks.search(path.read_text())]


def names(path: Path, file: str) -> bool:
    """Whether a test file reads a recording."""
    kind = r"each_(model|run)\(" if file.startswith("models/") else re.escape(file.split(".")[0])
    return re.search(kind, path.read_text()) is not None


def check(path: str, wanted: list[Value], elements: int, seed: int):
    """Runs a test file, then again what reads each value with that value changed."""
    import pytest

    plugin = Mutations(wanted, elements, seed)
    options = ["-qq", "-n", "0", "-m", "recorded and not gpu and not slow"]
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        status = pytest.main([path, *options], plugins=[plugin])
    if status != pytest.ExitCode.OK or plugin.failed:
        failed = ", ".join(plugin.failed)
        raise AssertionError(f"{path} fails as recorded: {failed}\n{printed.getvalue()}")
    return plugin.seen, plugin.reads, plugin.num_changes


class Mutations:
    """A pytest plugin that runs the collected tests over changed recordings."""

    def __init__(self, wanted: list[Value], elements: int, seed: int):
        self.wanted, self.elements, self.seed = wanted, elements, seed
        self.seen: set[str] = set()
        self.reads: set[tuple[str, str]] = set()
        self.failed: list[str] = []
        self.num_changes = 0
        self.seconds: dict[Any, float] = {}

    def pytest_runtestloop(self, session) -> bool:
        """Runs in place of pytest's loop."""
        from tests.support import recordings

        readers = defaultdict(list)
        for item in session.items:
            with recordings.watched() as reads:
                if not self.passes(item):
                    self.failed.append(item.nodeid)
            self.reads |= reads
            for read in reads:
                readers[read].append(item)
        if self.failed:
            return True
        for value in self.wanted:
            items = readers[value.file, value.key]
            if value.is_result and items and self.is_seen(value, items):
                self.seen.add(value.label)
        return True

    def is_seen(self, value: Value, items: list) -> bool:
        """Whether a test fails for each of a few changes of a value."""
        from tests.support import recordings

        rng = random.Random(f"{self.seed} {value.label}")
        for place in rng.sample(value.paths, min(self.elements, len(value.paths))):
            self.num_changes += 1
            change = functools.partial(changed, place=place)
            with recordings.changed(value.file, value.key, change):
                if all(self.passes(item) for item in sorted(items, key=self.seconds.__getitem__)):
                    return False
        return True

    def passes(self, item) -> bool:
        """Runs a test once more."""
        from _pytest.runner import runtestprotocol

        begin = time.monotonic()
        reports = runtestprotocol(item, log=False, nextitem=None)
        self.seconds[item] = time.monotonic() - begin
        return not any(report.failed for report in reports)


# --- values and their changes


def values() -> list[Value]:
    """Lists the values of all recordings that can be changed."""
    from tests.support import recordings

    found: list[Value] = []
    for path in sorted(recordings.FOLDER.iterdir()):
        if path.suffix == ".npz":
            found += of_family(path.stem)
        elif path.suffix in (".json", ".gz"):
            found += of_documents(path.name)
    for name in sorted([*recordings.models(), *recordings.runs()]):
        file = f"models/{name}/expected.npz"
        data = recordings.expected(name)
        for key in data:
            is_result = re.fullmatch(MODEL_INPUTS, key) is None
            found += of_array(file, key, f"{file}::{key}", data[key], None, is_result)
    return found


def of_family(family: str) -> Iterator[Value]:
    """Lists the arrays and scalars of a family's cases."""
    from tests.support import recordings

    file = f"{family}.npz"
    for case in recordings.cases(family):
        for side in (case.given, case.want):
            for name in side:
                key, kind = side.prefix + name, side.prefix.split(".")[1]
                label = f"{file}:{case.name}:{kind}.{name}"
                yield from of_array(file, key, label, side[name], case, kind == "out")
        for name, value in case.scalars.items():
            yield from of_entry(file, case.scalars.prefix, name, value, case.name, case)


def of_documents(file: str) -> Iterator[Value]:
    """Lists the entries of a family of JSON."""
    from tests.support import recordings

    for case in recordings.documents(file):
        for name, value in case.items():
            yield from of_entry(file, case.prefix, name, value, case["name"], case)


def of_array(file, key, label, array, case, is_result) -> Iterator[Value]:
    """Lists an array's elements that are compared, if there is one."""
    from tests.support.not_compared import excused

    cells = excused(label, array, case) if is_result else np.zeros(array.shape, bool)
    places = np.flatnonzero(~cells)
    if len(places):
        yield Value(file, key, label, tuple(places.tolist()), is_result)


def of_entry(file, prefix, name, value, case_name, case) -> Iterator[Value]:
    """Lists the places in an entry of JSON, like ones together."""
    from tests.support.not_compared import excused

    groups = defaultdict(list)
    for path, words in leaves(value):
        groups[".".join([name, *words])].append(path)
    for words, paths in groups.items():
        label = f"{file}:{case_name}:{words}"
        is_result = re.fullmatch(RESULTS.get(file, ""), words) is not None
        if not excused(label, value, case):
            yield Value(file, prefix + name, label, tuple(paths), is_result)


def leaves(value: Any, path: tuple = (), words: tuple = ()) -> Iterator[tuple[tuple, tuple]]:
    """Walks through JSON: (keys on the way, words without the indices of lists)."""
    if isinstance(value, dict) and value:
        for name, entry in value.items():
            yield from leaves(entry, (*path, name), (*words, name))
    elif isinstance(value, list) and value and isinstance(value[0], str) and len(path) == 1:
        for i, entry in enumerate(value):  # of a list of operations: `op.<place>`
            place = "last" if i == len(value) - 1 else str(i)
            yield from leaves(entry, (*path, i), (*words, value[0], place) if i else words)
    elif isinstance(value, list) and value:
        for i, entry in enumerate(value):
            yield from leaves(entry, (*path, i), words)
    else:
        yield path, words


def changed(value: Any, place: Any) -> Any:
    """Returns a value with another element in one place."""
    if isinstance(value, np.ndarray):
        flat = value.reshape(-1).copy()
        flat[place] = other(flat[place].item())
        return flat.reshape(value.shape)
    if not place:
        return other(value)
    first, *rest = place
    value[first] = changed(value[first], tuple(rest))
    return value


def other(x: Any) -> Any:
    """Returns something else than `x`, further away than any tolerance."""
    if isinstance(x, bool):
        return not x
    if isinstance(x, int):
        return x + 1
    if isinstance(x, float):
        return x + 0.01 * (1 + abs(x)) if math.isfinite(x) else 0.0
    if isinstance(x, str):
        digit = re.search(r"\d(?=\D*$)", x)
        return (
            x + "?"
            if digit is None
            else f"{x[: digit.start()]}{9 - int(digit[0])}{x[digit.end() :]}"
        )
    return [7] if x == [] else {"7": 7} if x == {} else 7


if __name__ == "__main__":
    sys.exit(main())
