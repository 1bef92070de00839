"""Fetch brings a file of the place to the host."""

from __future__ import annotations

import asyncio
import errno
import os
from typing import TYPE_CHECKING

import pytest

from tests.support.aio import executor, run, run_command, start_command, until
from tests.support.batches import gathered
from tests.support.spills import fetched, path_of

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

pytestmark = pytest.mark.backend("local")


@pytest.fixture
def spill(tmp_path: Path) -> Path:
    """Where spill files go."""
    made = tmp_path / "spill"
    made.mkdir()
    return made


def test_fetch_brings_the_file_from_any_offset(spill: Path) -> None:
    """Byte for byte, from 0, from the middle, from the end and from behind it; while others are under way."""

    async def scenario() -> None:
        async with executor(spill_dir=str(spill)) as made:
            output = (await run_command(made, "head -c 5000000 /dev/urandom")).stdout
            whole = path_of(output).read_bytes()
            assert len(whole) == 5_000_000
            starts = (0, 1, 4_096, 2_500_001, 4_999_999, 5_000_000, 9_000_000)
            parts = await gathered(fetched(made, path_of(output), start) for start in starts)
            assert [part == whole[start:] for part, start in zip(parts, starts, strict=True)] == [True] * 7
            with pytest.raises(ValueError, match="start"):
                await fetched(made, path_of(output), -1)

    run(scenario())


def test_fetch_of_other_files(tmp_path: Path) -> None:
    """Any regular file of the place; an error of the file is the OSError that it is there."""
    (tmp_path / "empty").touch()
    (tmp_path / "plain").write_text("plain")
    os.mkfifo(tmp_path / "fifo")

    async def scenario() -> None:
        async with executor() as made:
            assert await fetched(made, tmp_path / "empty") == b""
            assert await fetched(made, str(tmp_path / "plain"), 2) == b"ain"
            for name, error in (
                ("missing", FileNotFoundError),
                (".", IsADirectoryError),
                ("plain/x", NotADirectoryError),
                ("fifo", OSError),
            ):
                with pytest.raises(error) as caught:
                    await asyncio.wait_for(fetched(made, f"{tmp_path}/{name}"), 5)
                assert caught.value.filename == f"{tmp_path}/{name}"
            with pytest.raises(ValueError, match="absolute"):
                await fetched(made, "relative")
            assert (await run_command(made, "echo next")).stdout.text == "next\n"

    run(scenario())


def test_fetch_may_be_abandoned(spill: Path) -> None:
    """Half-way: the place and other fetches go on, and nothing of it is left."""

    async def scenario() -> None:
        async with executor(spill_dir=str(spill)) as made:
            path = path_of((await run_command(made, "head -c 20000000 /dev/zero")).stdout)
            for _ in range(5):
                stream = made.fetch(path)
                assert await anext(stream)
                await stream.aclose()  # type: ignore[attr-defined]
                task = asyncio.create_task(fetched(made, path))
                await asyncio.sleep(0.001)
                task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await task
            assert len(await fetched(made, path)) == 20_000_000
            assert (await run_command(made, "echo next")).stdout.text == "next\n"

    run(scenario())


def test_fetch_of_a_head_that_goes_meanwhile(spill: Path, tmp_path: Path) -> None:
    """A file that is still written loses its head under a slow reader: an error, never made-up zeros."""
    cap = 8 << 20

    async def rest(stream: AsyncIterator[bytes], received: list[bytes]) -> None:
        async for chunk in stream:
            received.append(chunk)

    async def scenario() -> None:
        async with executor(spill_dir=str(spill), workdir=tmp_path, max_spill_bytes=cap) as made:
            task = start_command(
                made, f"yes | head -c {cap - 100_000}; cat go >&2; yes | head -c {4 * cap}; cat go"
            )
            await until(lambda: made.read_output(task.id).stdout.end >= cap - 100_000)
            path = made.read_output(task.id).stdout.spill_path
            assert path is not None
            stream = made.fetch(path)
            received = [await anext(stream)]
            # The reader pauses, and all that it has not been sent is released.
            (tmp_path / "go").write_text("go")
            await until(lambda: made.read_output(task.id).stdout.spill_start >= cap, timeout=20)
            with pytest.raises(OSError, match=os.strerror(errno.ENODATA)):
                await rest(stream, received)
            joined = b"".join(received)
            assert len(joined) < cap
            assert joined == (b"y\n" * (len(joined) // 2 + 1))[: len(joined)]

    os.mkfifo(tmp_path / "go")
    run(scenario())
