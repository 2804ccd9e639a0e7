"""Recorded folders with a changed config.json or other tensors, and what loading warns of."""

import json
import warnings
from typing import Any

from safetensors.numpy import load_file, save_file

from tests.conftest import GOLDEN

MODELS = GOLDEN / "models"


def warned_once(call, *args, **kwargs) -> tuple[Any, str]:
    """Returns what a call gave, and the text of its only warning."""
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        result = call(*args, **kwargs)
    assert [warning.category for warning in told] == [UserWarning]
    # Warned of where the user's call is, not at a line of jspec.
    assert told[0].filename == __file__
    return result, str(told[0].message)


def copy(tmp_path, name, *, drop=(), tensors=None, without=(), **changes):
    """Writes a recorded folder with a changed config.json, and with other tensors."""
    folder = tmp_path / name
    folder.mkdir(parents=True)
    config = json.loads((MODELS / name / "config.json").read_text()) | changes
    text = json.dumps({key: value for key, value in config.items() if key not in drop})
    (folder / "config.json").write_text(text)
    file = next((MODELS / name).glob("*.safetensors"))
    kept = {key: value for key, value in load_file(file).items() if key not in without}
    save_file(kept | (tensors or {}), folder / file.name)
    return folder
