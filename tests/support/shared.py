"""Directories that every user can reach. Those of pytest are closed to others, and it closes them again."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["shared_directory"]


@contextlib.contextmanager
def shared_directory() -> Iterator[Path]:
    """A new directory in which anybody may do anything; removed on the way out with all that is in it."""
    made = Path(tempfile.mkdtemp(prefix="corral-shared-")).resolve()
    try:
        made.chmod(0o777)
        yield made
    finally:
        for inside in made.rglob("*"):  # what a test has closed must be open to be removed
            with contextlib.suppress(OSError):
                if inside.is_dir() and not inside.is_symlink():
                    inside.chmod(0o700)
        shutil.rmtree(made, ignore_errors=True)
