"""Recorded model folders with one random fault each, and how loading handles them.

    python -m tests.corruptions --count 200 --seed 0

A fault must end in a clear error, in a UserWarning, in the same model, or in another model that
nothing in the folder contradicts, as `tests.support.faults` knows.
"""

import argparse
import collections
import json
import re
import shutil
import sys
import tempfile
import traceback
import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
from safetensors.numpy import load_file

import jspec
from tests.conftest import GOLDEN
from tests.support import faults, file_faults
from tests.support.faults import Fault, Folder

MODELS = GOLDEN / "models"

FAULTS = faults.FAULTS + file_faults.FAULTS

_ERRORS = (ValueError, NotImplementedError, KeyError, OSError)

_FIELDS = {
    "block_size": "drafts",
    "hidden_size": "head_dim",
    "mask_token_id": "mask_token",
    "max_position_embeddings": "max_positions",
    "medusa_num_heads": "heads",
    "num_attention_heads": "head",
    "num_heads": "heads",
    "num_hidden_layers": "layer",
    "num_key_value_heads": "num_kv_heads",
    "original_max_position_embeddings": "original_max_len",
    "rope_parameters": "Rope",
    "rope_scaling": "Rope",
    "rope_theta": "theta",
    "truncated_vocab_size": "draft_vocab_size",
    "vocab_size": "vocabulary",
}
"""What errors call a setting, where it is not its own name."""

OUTCOMES = ("error", "warning", "same model", "another legal model")


@dataclass(frozen=True)
class Result:
    """What became of a fault.

    Attributes:
      number, model, fault, what: which it was.
      outcome: one of `OUTCOMES`, or what is wrong.
      text: of the error or of the warnings.
    """

    number: int
    model: str
    fault: str
    what: str
    outcome: str
    text: str = ""

    @property
    def excused(self) -> bool:
        return self.outcome in OUTCOMES

    def __str__(self) -> str:
        return f"{self.number} {self.model}, {self.fault}: {self.what}: {self.outcome} {self.text}"


def recorded() -> dict[str, str | None]:
    """Maps each recorded model folder to that of its target, None for a target."""
    found: dict[str, str | None] = {}
    for folder in sorted(MODELS.iterdir()):
        if not (folder / "config.json").is_file():
            continue
        found[folder.name] = None if folder.name.startswith("target") else "target_llama"
        if folder.name.startswith("dflash"):
            found[folder.name] = "target_qwen3"
        if folder.name == "mimo_mtp":
            found[folder.name] = "mimo_mtp"
    return found


_targets: dict[str, Any] = {}


def _load(path: Path, target: str | None) -> Any:
    if target is None:
        return jspec.load(path, "float32")
    if target not in _targets:
        _targets[target] = jspec.load(MODELS / target, "float32")
    return jspec.load(path, target=_targets[target])


def _same(a: Any, b: Any) -> bool:
    if a.config != b.config or jax.tree.structure(a.params) != jax.tree.structure(b.params):
        return False
    pairs = zip(jax.tree.leaves(a.params), jax.tree.leaves(b.params), strict=True)
    return all(x.dtype == y.dtype and np.array_equal(x, y, equal_nan=True) for x, y in pairs)


def draw(number: int, seed: int, models: Iterable[str]) -> tuple[Folder, Fault, str]:
    """Draws a recorded folder and a fault; returns them with what the fault did."""
    rng, names = np.random.default_rng([seed, number]), list(models)
    while True:
        name = names[rng.integers(len(names))]
        fault = FAULTS[rng.integers(len(FAULTS))]
        file = next((MODELS / name).glob("*.safetensors"))
        config = json.loads((MODELS / name / "config.json").read_text())
        folder = Folder(name, file.name, config, load_file(file))
        what = fault(folder, rng)
        if what is not None:
            return folder, fault, what


def try_fault(number: int, seed: int, models: dict[str, str | None]) -> Result:
    """Draws a fault, and loads a recorded folder that has it."""
    folder, fault, what = draw(number, seed, models)
    name = folder.name
    result = {"number": number, "model": name, "fault": fault.__name__, "what": what}
    home = Path(tempfile.mkdtemp())
    try:
        folder.write(home / name)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                got = _load(home / name, models[name])
            except Exception as error:
                return Result(**result, outcome=_judge(error, folder), text=_text(error))
        told = [str(w.message) for w in caught]
        if told:
            named = any(key in text for text in told for key in folder.keys)
            kinds = all(w.category is UserWarning for w in caught)
            outcome = "warning" if named and kinds else "a warning that names nothing"
            return Result(**result, outcome=outcome, text=" | ".join(told))
        if _same(got, _load(MODELS / name, models[name])):
            return Result(**result, outcome="SILENT" if folder.told else "same model")
        return Result(**result, outcome="another legal model" if folder.legal else "SILENT")
    finally:
        shutil.rmtree(home)


def _text(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def _judge(error: Exception, folder: Folder) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    ours = Path(jspec.__file__).parent in Path(frames[-1].filename).parents
    if not isinstance(error, _ERRORS) or not ours:
        return "TRACEBACK"
    text = re.sub(r"\d+", "*", str(error))  # layers may be listed together
    listed = "the checkpoint's tensors do not fit its config:" in text
    names = [*folder.keys, *(_FIELDS[key] for key in folder.keys if key in _FIELDS)]
    names += [name.removeprefix("model.") for name in names]
    named = any(re.sub(r"\d+", "*", name) in text for name in names)
    # A setting that the tensors contradict is seen by them, and a method by all names together.
    named |= listed and folder.of_config
    named |= "is no drafter that jspec knows" in text or "Pass method= with one of them" in text
    if not named:
        return "an error that names nothing"
    return "error" if listed or "\n" not in text else "an error of many lines"


def run(count: int, seed: int) -> list[Result]:
    """Tries faults number 0 to count - 1 of a seed."""
    models = recorded()
    return [try_fault(number, seed, models) for number in range(count)]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.corruptions", description=__doc__)
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--verbose", action="store_true", help="print every case")
    arguments = parser.parse_args()
    results = run(arguments.count, arguments.seed)
    kinds = list(OUTCOMES) + sorted({r.outcome for r in results} - set(OUTCOMES))
    table = collections.Counter((r.fault, r.outcome) for r in results)
    print(f"{'':18}" + "".join(f"{kind[:19]:>20}" for kind in kinds))
    for fault in dict.fromkeys(f.__name__ for f in FAULTS):
        print(f"{fault:18}" + "".join(f"{table[fault, kind] or '':>20}" for kind in kinds))
    for result in results:
        if arguments.verbose or not result.excused:
            print(result)
    failed = sum(not result.excused for result in results)
    print(f"{len(results)} corruptions, seed {arguments.seed}: {failed} unexcused")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
