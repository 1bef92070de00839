"""Spill files as a test looks at them: by their path, which means something here, and through `fetch`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import PurePath

    from corral import BashExecutor, CollectedOutput

__all__ = ["entries", "fetched", "files", "path_of"]


def entries(directory: Path) -> list[Path]:
    """What is directly in it."""
    return sorted(directory.iterdir())


def files(directory: Path) -> list[Path]:
    """All that is in it, at any depth, and no directory."""
    return sorted(file for file in directory.rglob("*") if not file.is_dir())


def path_of(output: CollectedOutput) -> Path:
    """Where its file is. There has to be one."""
    assert output.spill_path is not None
    return Path(output.spill_path)


async def fetched(made: BashExecutor, path: PurePath | str, start: int = 0) -> bytes:
    """All of the file from `start` on."""
    chunks = [chunk async for chunk in made.fetch(path, start=start)]
    assert all(chunks), "an empty chunk"
    return b"".join(chunks)
