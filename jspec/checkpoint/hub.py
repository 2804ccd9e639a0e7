"""Models by their name on the Hugging Face hub: from its cache on this machine, else fetched.

The layout of the cache is documented by the hub: `models--owner--name` has files `refs/<revision>`
that hold a commit, and folders `snapshots/<commit>` of links to `blobs`.
"""

import importlib.util
import os
import re
import warnings
from os import PathLike
from pathlib import Path

from jspec.checkpoint.weight_files import check_folder, find_weights, is_pickled

_NAME = re.compile(r"([A-Za-z0-9][\w.-]*)/([A-Za-z0-9_][\w.-]*)(?:@([\w-][\w./-]*))?")
_TRUE = ("1", "ON", "YES", "TRUE")

_FILES = ["*.json", "*.jinja", "*.safetensors"]
_PICKLES = ["pytorch_model*.bin", "medusa_lm_head.pt"]
_LEFT_OUT = ["consolidated*", "*/*.safetensors", "*/*.json"]
"""Other copies of the weights, in other formats."""


def resolve(path: str | PathLike[str], owner: str = "load") -> Path:
    """Returns the path of a model on disk; one of the hub may be fetched.

    Args:
      path: a folder or file, or `owner/name` or `owner/name@revision` of a model on the hub. A path
        on disk has priority over the hub's cache (`HF_HUB_CACHE`, or `HF_HOME`), the cache over the
        hub. Only config, safetensors and text files are fetched, pickles if there is no safetensors
        file; nothing where `HF_HUB_OFFLINE` is set.
      owner: function or option, for messages.

    Returns:
      The path; of a model on the hub, the folder of its snapshot. Other paths are returned
      unchanged, whether they exist or not.

    Raises:
      TypeError: `path` is no path. FileNotFoundError: nothing of that name is on disk or in the
        cache, and it cannot be fetched.
    """
    if not isinstance(path, (str, PathLike)):
        raise TypeError(
            f"{owner}: `path` is {path!r}, wanted a folder, a .gguf file or owner/name of a model "
            "on the Hugging Face hub. Pass one of these."
        )
    local = Path(path)
    match = _NAME.fullmatch(path) if isinstance(path, str) else None
    if match is None or os.path.lexists(local) or ".." in str(path) or local.suffix == ".gguf":
        return local
    name, revision = f"{match[1]}/{match[2]}", match[3]
    snapshot = _find_snapshot(name, revision or "main")
    missing = None if snapshot is None else _find_missing(snapshot)
    if snapshot is not None and missing is None:
        return snapshot
    why = _why_not_fetched(match[1])
    if why is None:
        try:
            return Path(fetch(name, revision))
        except Exception as error:  # of the hub's package, or of the HTTP library below it
            first = (str(error).strip() or type(error).__name__).splitlines()[0]
            why = f"fetching it failed ({first})"
    cached = f"none of that name is in the Hugging Face hub's cache ({cache_folder()})"
    if snapshot is not None:
        cached = f"its copy in the Hugging Face hub's cache is not whole ({missing})"
    elif _folder_of(name).is_dir():
        cached = f"{_folder_of(name)} has no snapshot of revision {revision or 'main'}"
    command = f"hf download {name}" + (f" --revision {revision}" if revision else "")
    raise FileNotFoundError(
        f"{owner} {path!r} does not exist: as a path nothing is there; as a model, {cached}, and "
        f"{why}. Correct the path, or fetch the model: {command}"
    )


def cache_folder() -> Path:
    """Returns the folder of the hub's cache: HF_HUB_CACHE, else `hub` in HF_HOME."""
    own = os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE")
    shared = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    home = os.environ.get("HF_HOME") or os.path.join(shared, "huggingface")
    return Path(os.path.expandvars(own or os.path.join(home, "hub"))).expanduser()


def fetch(name: str, revision: str | None) -> str:
    """Fetches the files that jspec reads into the hub's cache; returns the snapshot's folder."""
    from huggingface_hub import snapshot_download  # an extra

    def download(patterns: list[str]) -> str:
        return snapshot_download(
            name,
            revision=revision,
            cache_dir=cache_folder(),
            allow_patterns=patterns,
            ignore_patterns=_LEFT_OUT,
        )

    snapshot = download(_FILES)
    if not any(Path(snapshot).glob("*.safetensors")):
        snapshot = download(_FILES + _PICKLES)
    return snapshot


def _folder_of(name: str) -> Path:
    return cache_folder() / f"models--{name.replace('/', '--')}"


def _find_snapshot(name: str, revision: str) -> Path | None:
    folder = _folder_of(name)
    ref = folder / "refs" / revision
    commit = ref.read_text("utf-8").strip() if ref.is_file() else revision
    snapshot = folder / "snapshots" / commit
    return snapshot if commit and snapshot.is_dir() else None


def _find_missing(snapshot: Path) -> str | None:
    """Describes what a snapshot lacks, as of a tokenizer alone or an interrupted download."""
    if any(snapshot.glob("*.gguf")):
        return None  # loading asks for the path of the file
    try:
        check_folder(snapshot)
        if not is_pickled(snapshot):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # loading will warn
                find_weights(snapshot)
    except FileNotFoundError as error:
        return str(error).partition(". ")[0]
    return None


def _why_not_fetched(owner_of_model: str) -> str | None:
    """Returns the reason why a model is not fetched, None if it may be."""
    offline = os.environ.get("HF_HUB_OFFLINE") or os.environ.get("TRANSFORMERS_OFFLINE")
    if offline and offline.upper() in _TRUE:
        return "HF_HUB_OFFLINE is set, so that it was not fetched"
    if Path(owner_of_model).is_dir():
        return f"{owner_of_model} is a folder here, so that it was not fetched"
    if importlib.util.find_spec("huggingface_hub") is None:
        return (
            "huggingface_hub is not installed, which fetches it (pip install 'jspec-decode[hub]')"
        )
    return None
