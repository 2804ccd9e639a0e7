"""Atomic creation of folders on disk."""

import contextlib
import errno
import os
import shutil
import time
from collections.abc import Iterator
from os import PathLike
from pathlib import Path


def check_free(path: str | PathLike[str]) -> None:
    """Checks that a folder can be made, before its content is computed.

    Args:
      path: of the folder; its parents are made, too.

    Raises:
      FileExistsError: `path` exists. NotADirectoryError: a parent is a file. PermissionError: the
        nearest parent cannot be written.
    """
    path = Path(path).absolute()
    if os.path.lexists(path):
        raise FileExistsError(f"{path} exists. Remove it, or write to another path.")
    above = next(parent for parent in path.parents if os.path.lexists(parent))
    if not above.is_dir():
        raise NotADirectoryError(
            f"{path} cannot be made: {above} is no folder. Write to another path."
        )
    if not os.access(above, os.W_OK | os.X_OK):
        is_read_only = hasattr(os, "statvfs") and os.statvfs(above).f_flag & os.ST_RDONLY
        why = "lies on a read-only file system" if is_read_only else "is not yours to write"
        raise PermissionError(f"{path} cannot be made: {above} {why}. Write to another path.")


@contextlib.contextmanager
def new_folder(path: str | PathLike[str]) -> Iterator[Path]:
    """Makes an empty folder to fill, which is renamed to `path` if no error was raised.

    A killed process may leave a hidden folder, `.<name>.partial`, which the next call for the same
    path removes.

    Args:
      path: of the folder to make; its parents are made, too.

    Raises:
      OSError: `path` exists, or a file cannot be written.

    Example:
      with new_folder("saved") as folder:
        (folder / "config.json").write_text("{}")
    """
    path = Path(path).absolute()
    check_free(path)
    partial = path.with_name(f".{path.name}.partial")
    try:
        shutil.rmtree(partial, ignore_errors=True)  # of a run that was killed
        partial.mkdir(parents=True)
        yield partial
        os.rename(partial, path)
    except OSError as error:
        _remove(partial)
        raise type(error)(f"{path} was not written ({error}). {remedy(error)}") from error
    except BaseException:
        _remove(partial)
        raise


def _remove(folder: Path) -> None:
    """Removes a folder that other threads may write to for a while after an error."""
    for _ in range(_MOST_REMOVALS):
        shutil.rmtree(folder, ignore_errors=True)
        time.sleep(_PAUSE)
        if not folder.exists():
            return


_MOST_REMOVALS = 20
_PAUSE = 0.1
"""In seconds; TensorStore's threads end their writes within a few of them."""


def remedy(error: OSError) -> str:
    """Returns the last sentence of a message: how to avoid an error of the file system."""
    # TensorStore's errors have the system's message, but no errno.
    full = {number: os.strerror(number) for number in _FULL}
    if error.errno in full or any(reason in str(error) for reason in full.values()):
        return "Free some space, or write to another path."
    return "Write to another path."


_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""Disk full, quota exceeded, file too large."""
