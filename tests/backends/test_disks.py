"""Spill files where the disk is full, slow, or not there: the command and its tail are not affected."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import subprocess
import time
from typing import TYPE_CHECKING

import pytest

from corral import EndReason, PlaceLostError
from tests.support.aio import executor, run, run_command, until
from tests.support.spills import entries, fetched, files, path_of

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = pytest.mark.backend("local")

MIB = 1 << 20


@pytest.mark.parametrize("kind", ["missing", "file", "no-directory"])
def test_spill_without_a_writable_directory(kind: str, tmp_path: Path) -> None:
    """No path, and the command is not affected; when there is one later, the next command has a file."""
    parent = tmp_path / "parent"
    if kind == "file":
        parent.touch()
    where = "/proc/self" if kind == "no-directory" else str(parent)

    async def scenario() -> None:
        async with executor(spill_dir=where) as made:
            result = await run_command(made, "seq 1 100000; seq 1 100000 >&2; exit 3")
            assert (result.exit_code, result.reason) == (3, EndReason.EXITED)
            for output in (result.stdout, result.stderr):
                assert output.text.endswith("\n99999\n100000\n")
                assert (output.spill_path, output.total_bytes) == (None, 588_895)
            if kind == "no-directory":
                return
            parent.unlink(missing_ok=True)
            parent.mkdir()
            assert path_of((await run_command(made, "seq 1 20000")).stdout).parent.parent == parent

    run(scenario())


def mounted(command: list[str], directory: Path) -> bool:
    return subprocess.run(command, capture_output=True, check=False).returncode == 0 and os.path.ismount(
        directory
    )


@pytest.fixture
def tiny(tmp_path: Path) -> Iterator[Path]:
    """A tmpfs of 1 MiB."""
    directory = tmp_path / "tiny"
    directory.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=1m,mode=0700", "tmpfs", str(directory)]
    if os.geteuid() != 0 or not mounted(command, directory):
        pytest.skip("needs root, and the right to mount a tmpfs")
    yield directory
    subprocess.run(["umount", "-l", str(directory)], check=True)


def test_spill_withheld_on_a_full_disk(tiny: Path) -> None:
    """The disk fills up in the middle: the command succeeds, the tail is right, path and file are gone."""
    command = f"""\
seq 1 20000
cat /dev/zero >'{tiny}/filler' 2>&-
seq 20001 100000"""

    async def scenario() -> None:
        async with executor(spill_dir=str(tiny)) as made:
            result = await run_command(made, command)
            assert result.exit_code == 0
            assert (result.stdout.spill_path, result.stdout.total_bytes) == (None, 588_895)
            assert result.stdout.text.endswith("\n99999\n100000\n")
            assert len(result.stdout.data) == 64_000
            assert files(tiny) == [tiny / "filler"]
            # Full from the beginning.
            await run_command(made, f"cat /dev/zero >>'{tiny}/filler'")
            again = await run_command(made, "seq 1 100000")
            assert (again.exit_code, again.stdout.spill_path) == (0, None)
            assert again.stdout.text.endswith("\n99999\n100000\n")
            assert files(tiny) == [tiny / "filler"]
            # Room again.
            (tiny / "filler").unlink()
            assert path_of((await run_command(made, "seq 1 20000")).stdout).stat().st_size == 108_894
        assert entries(tiny) == []

    run(scenario())


def test_spill_cap_on_a_tmpfs(tiny: Path) -> None:
    """Its files are memory: at most half of the free space is taken, and the head makes room for the rest."""

    async def scenario() -> None:
        async with executor(spill_dir=str(tiny)) as made:
            output = (await run_command(made, "seq -f %015.0f 0 199999")).stdout
            kept = path_of(output)
            assert output.total_bytes == kept.stat().st_size == 3_200_000
            assert kept.stat().st_blocks * 512 <= MIB // 2
            assert output.spill_start >= 3_200_000 - MIB // 2
            tail = await fetched(made, kept, output.spill_start)
            assert tail.endswith(b"%015d\n%015d\n" % (199_998, 199_999))
            assert len(tail) == 3_200_000 - output.spill_start

    run(scenario())


@pytest.fixture
def slow(tmp_path: Path) -> Iterator[Path]:
    """A file system that can be frozen, so that every write to it waits."""
    directory, image = tmp_path / "slow", tmp_path / "image"
    directory.mkdir()
    tools = ("mkfs.ext4", "fsfreeze", "mount")
    if os.geteuid() != 0 or not all(shutil.which(tool) for tool in tools):
        pytest.skip("needs root, and the right to mount and freeze a file system")
    with image.open("wb") as file:
        file.truncate(16 * MIB)
    made = subprocess.run(["mkfs.ext4", "-q", "-F", str(image)], capture_output=True, check=False)
    if made.returncode != 0 or not mounted(["mount", "-o", "loop", str(image), str(directory)], directory):
        pytest.skip("no file system can be made and mounted here")
    # Whatever becomes of the test, a frozen file system must not stay behind.
    guard = subprocess.Popen(["bash", "-c", f"read -r -t 40; fsfreeze -u '{directory}' 2>&-"], stdin=-1)
    yield directory
    guard.communicate(b"\n", timeout=10)
    subprocess.run(["umount", "-l", str(directory)], check=True)


def freeze(directory: Path, *, thaw: bool = False) -> bool:
    return subprocess.run(["fsfreeze", "-u" if thaw else "-f", str(directory)], check=False).returncode == 0


def test_a_slow_disk_delays_nobody_else(slow: Path) -> None:
    """While every write to the spill disk waits, other commands run; the one that spills keeps its bound.

    A process that waits for a disk cannot be killed, so that command ends as lost; nothing else does.
    """

    async def scenario() -> None:
        async with executor(spill_dir=str(slow)) as made:
            assert path_of((await run_command(made, "seq 1 20000")).stdout).is_file()
            assert freeze(slow)
            patient = asyncio.create_task(run_command(made, "seq 1 100000"))
            hasty = asyncio.create_task(run_command(made, "seq 1 100000; sleep 15", timeout_ms=500))
            began = time.monotonic()
            for _ in range(20):
                assert (await run_command(made, "echo quick; seq 1000 >&2")).stdout.text == "quick\n"
            assert time.monotonic() - began < 2
            with contextlib.suppress(PlaceLostError):
                assert (await hasty).timed_out
            assert time.monotonic() - began < 0.5 + 0.3 + 1 + 0.5
            assert not patient.done()
            assert freeze(slow, thaw=True)
            result = await patient
            assert result.exit_code == 0
            assert path_of(result.stdout).stat().st_size == 588_895
            await until(lambda: len(files(slow)) >= 2)

    run(scenario())
