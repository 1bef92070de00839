"""Readers of a background task that come late, share its output, or do not come at all."""

from __future__ import annotations

import asyncio
import hashlib
import os
import subprocess
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from corral import TaskStatus
from tests.support.aio import executor, run, run_command, until
from tests.support.processes import rss_bytes
from tests.support.reading import Model, expect_nothing_more, writer
from tests.support.tasks import read_until, start, started

if TYPE_CHECKING:
    from pathlib import PurePath


pytestmark = pytest.mark.backend("local")

LINES = "seq 10000000 21111110"
"""Lines of nine bytes: about 100 MB of which every part can be told."""
TOTAL = 11_111_111 * 9


def lines_between(start: int, end: int) -> bytes:
    first, last = start // 9, end // 9 + 1
    text = b"".join(b"%d\n" % (10_000_000 + number) for number in range(first, last))
    return text[start - first * 9 : end - first * 9]


def size(path: PurePath) -> int:
    return Path(path).stat().st_size


def test_read_late(tmp_path: Path) -> None:
    """Who reads 100 MB too late is told exactly what is missing, and where all of it is."""
    expected = hashlib.sha256()
    with subprocess.Popen(LINES.split(), stdout=subprocess.PIPE) as witness:
        assert witness.stdout is not None
        while chunk := witness.stdout.read(1 << 20):
            expected.update(chunk)

    async def scenario() -> None:
        async with executor(spill_dir=str(tmp_path)) as made:
            task = start(made, LINES)
            await until(lambda: task.status is TaskStatus.FINISHED, timeout=30)
            read = made.read_output(task.id)
            stdout = read.stdout
            assert (read.lossy, stdout.end, stdout.start) == (True, TOTAL, stdout.dropped_bytes)
            assert len(stdout.data) == 64_000
            assert stdout.data == lines_between(stdout.start, stdout.end)
            assert stdout.text == stdout.data.decode()
            assert stdout.spill_path is not None
            assert stdout.spill_start == 0
            assert size(stdout.spill_path) == TOTAL
            found = hashlib.sha256()
            async for chunk in made.fetch(stdout.spill_path):
                found.update(chunk)
            assert found.digest() == expected.digest()
            # The missing part alone, as a consumer would get it.
            part = b"".join([chunk async for chunk in made.fetch(stdout.spill_path, start=TOTAL - 100_000)])
            assert part == lines_between(TOTAL - 100_000, TOTAL)
            expect_nothing_more(made, task, [b"x" * TOTAL, b""])

    run(scenario(), timeout=50)


def test_read_late_while_it_runs(tmp_path: Path) -> None:
    """The path and exact offsets are there before the end; all below a read's start is in the file."""

    async def scenario() -> None:
        async with executor(spill_dir=str(tmp_path), max_output_bytes=10_000) as made:
            task = start(made, "seq 10000000 10099999; sleep 0.3; seq 10100000 10199999; sleep 20")
            await asyncio.sleep(0.2)
            last = 0
            while last < 1_800_000:
                read = made.read_output(task.id).stdout
                assert read.start == last + read.dropped_bytes
                assert read.data == lines_between(read.start, read.end)
                if read.dropped_bytes:
                    assert read.spill_path is not None
                    assert size(read.spill_path) >= read.start
                    chunks = [chunk async for chunk in made.fetch(read.spill_path, start=last)]
                    missing = b"".join(chunks)[: read.dropped_bytes]
                    assert missing == lines_between(last, read.start)
                last = read.end
                await asyncio.sleep(0.05)

    run(scenario())


def test_read_trickle_too_late() -> None:
    """A stream that comes slowly, without a gap, is bounded like any other: the tail is what is read."""
    stream = b"".join(b"%07d\n" % number for number in range(1_000))

    async def scenario() -> None:
        async with executor(max_output_bytes=1_000) as made:
            task = start(made, writer([(400, 1, 0.03)] * 20), stdin=stream)
            model = Model(stream[:8_000], 1_000)
            await until(lambda: task.status is TaskStatus.FINISHED)
            model.check(made.read_output(task.id).stdout, final=True)
            model.check_end()
            assert model.dropped == 7_000

    run(scenario())


def test_read_never(tmp_path: Path) -> None:
    """A consumer that never reads costs the host no memory, and does not slow the command."""

    async def scenario() -> tuple[float, float, int]:
        async with executor(spill_dir=str(tmp_path), max_spill_bytes=8 << 20) as made:
            await run_command(made, "head -c 20000000 /dev/zero")
            began = time.monotonic()
            await run_command(made, "head -c 300000000 /dev/zero")
            in_foreground = time.monotonic() - began
            before = peak = rss_bytes(os.getpid())
            began = time.monotonic()
            task = start(made, "head -c 300000000 /dev/zero")
            while task.status is TaskStatus.RUNNING:
                await asyncio.sleep(0.005)
                peak = max(peak, rss_bytes(os.getpid()))
            elapsed = time.monotonic() - began
            assert made.read_output(task.id).stdout.end == 300_000_000
            return elapsed, in_foreground, peak - before

    elapsed, in_foreground, grown = run(scenario(), timeout=40)
    assert grown < 4_000_000
    assert elapsed < 2 * in_foreground + 1


def test_read_after_all_readers_slept(tmp_path: Path) -> None:
    """A task that outruns everybody is not slowed: it ends while the loop of the host is blocked."""
    over = tmp_path / "over"

    async def scenario() -> None:
        async with executor() as made:
            task = start(made, f"head -c 3000000 /dev/zero; touch '{over}'")
            await started(task)
            wait_for(over)  # blocking the loop is the point
            assert task.status is TaskStatus.RUNNING  # as far as the host could see
            await until(lambda: task.status is TaskStatus.FINISHED)
            read = made.read_output(task.id)
            assert read.stdout.end == 3_000_000
            assert len(read.stdout.data) == 64_000

    run(scenario())


def wait_for(file: Path) -> None:
    deadline = time.monotonic() + 10
    while not file.exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_reads_share_one_cursor() -> None:
    """No byte is delivered twice, to whomever: of two readers each gets what the other did not."""

    async def scenario() -> None:
        async with executor() as made:
            task = start(made, "for i in {0..99}; do echo $i; done; sleep 0.05; echo up; sleep 20")
            parts: list[list[bytes]] = [[], []]

            async def reader(mine: list[bytes], pause: float) -> None:
                while b"up" not in b"".join(parts[0] + parts[1]):
                    if data := made.read_output(task.id).stdout.data:
                        mine.append(data)
                    await asyncio.sleep(pause)

            async with asyncio.timeout(10):
                await asyncio.gather(reader(parts[0], 0.001), reader(parts[1], 0.0015))
            lines = b"".join(parts[0] + parts[1]).split()
            assert sorted(lines) == sorted([*(str(i).encode() for i in range(100)), b"up"])
            assert await read_until(made, task, b"") == b""

    run(scenario())
