"""read_output of a background task: joined reads equal the stream, or say exactly what is missing.

`check` is the model; every test of a running task reads through it.
"""

from __future__ import annotations

import asyncio
import codecs
import hashlib
import os
import random
import subprocess
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from corral import TaskStatus
from tests.support.aio import executor, run, run_command, until
from tests.support.processes import rss_bytes
from tests.support.tasks import Told, read_until, start, started

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import PurePath

    from corral import BashExecutor, BashTask, BashTaskRead, StreamRead

pytestmark = pytest.mark.backend("local")


class Model:
    """What the reads of one stream must be, given the whole stream."""

    def __init__(self, stream: bytes, limit: int) -> None:
        self._stream = stream
        self._limit = limit
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self.at = 0
        self.dropped = 0
        self.text = ""

    def check(self, read: StreamRead, *, final: bool) -> None:
        """One read: the right bytes at the right offsets, what is missing, and the right text for both."""
        assert read.start == self.at + read.dropped_bytes
        assert read.end == read.start + len(read.data)
        assert read.data == self._stream[read.start : read.end]
        assert len(read.data) <= self._limit
        data = read.data
        expected = ""
        if read.dropped_bytes:
            # Nothing is dropped while there is room for it.
            assert read.end - self.at > self._limit
            expected = self._decoder.decode(b"", final=True)
            self._decoder.reset()
            cut = next((i for i, byte in enumerate(data[:3]) if byte & 0xC0 != 0x80), min(3, len(data)))
            data = data[cut:]
        expected += self._decoder.decode(data, final=final)
        assert read.text == expected
        self.text += read.text
        self.at = read.end
        self.dropped += read.dropped_bytes

    def check_end(self) -> None:
        assert self.at == len(self._stream)
        if not self.dropped:
            assert self.text == self._stream.decode(errors="replace")


async def read_to_the_end(
    on: BashExecutor,
    task: BashTask,
    streams: Sequence[bytes],
    *,
    limit: int = 64_000,
    pauses: Sequence[float] = (0,),
) -> tuple[Model, Model]:
    """Reads until the task is over, sleeping for each of the pauses in turn; checks every read."""
    models = Model(streams[0], limit), Model(streams[1], limit)
    turn = 0
    final = False
    while not final:
        await asyncio.sleep(pauses[turn % len(pauses)])
        turn += 1
        read = on.read_output(task.id)
        final = read.status is not TaskStatus.RUNNING
        for model, stream in zip(models, (read.stdout, read.stderr), strict=True):
            model.check(stream, final=final)
        assert read.lossy is bool(read.stdout.dropped_bytes or read.stderr.dropped_bytes)
    for model in models:
        model.check_end()
    expect_nothing_more(on, task, streams)
    return models


def expect_nothing_more(on: BashExecutor, task: BashTask, streams: Sequence[bytes]) -> None:
    """Reads after the end are empty, at the end of the stream, and not lossy."""
    for _ in range(2):
        read = on.read_output(task.id)
        assert (read.lossy, read.status) == (False, task.status)
        for stream, whole in zip((read.stdout, read.stderr), streams, strict=True):
            assert (stream.data, stream.text, stream.dropped_bytes) == (b"", "", 0)
            assert stream.start == stream.end == len(whole)


def writer(pieces: Sequence[tuple[int, int, float]]) -> str:
    """Bash text that copies its stdin: so many bytes to descriptor 1 or 2, then a pause, for each piece."""
    steps = [f"head -c {size} >&{fd}" + (f"; sleep {pause}" if pause else "") for size, fd, pause in pieces]
    return "\n".join(["true", *steps])


# Text whose characters take one to four bytes, with bytes that are no UTF-8 in between.
streams_of_text = st.lists(
    st.one_of(
        st.text(st.sampled_from("a\r\n\0é€\U0001f600\u0301"), max_size=40).map(str.encode),
        st.binary(max_size=8),
        st.integers(1, 2_000).map(lambda count: "€".encode() * count),
    ),
    max_size=8,
).map(b"".join)


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data(), stream=streams_of_text, limit=st.sampled_from([1, 7, 64, 1_000, 64_000]))
def test_read_incremental(data: st.DataObject, stream: bytes, limit: int) -> None:
    """Whatever is written when, and read when: the model holds, for both streams."""
    pieces: list[tuple[int, int, float]] = []
    left = len(stream)
    while left and len(pieces) < 8:
        size = data.draw(st.integers(1, left), label="size") if len(pieces) < 7 else left
        pieces.append((size, data.draw(st.sampled_from([1, 2])), data.draw(st.sampled_from([0, 0, 0.002]))))
        left -= size
    pauses = data.draw(st.lists(st.sampled_from([0, 0.0005, 0.003]), min_size=1, max_size=4), label="pauses")
    written = [b"", b""]
    at = 0
    for size, fd, _ in pieces:
        written[fd - 1] += stream[at : at + size]
        at += size

    async def scenario() -> None:
        async with executor(max_output_bytes=limit) as made:
            task = start(made, writer(pieces), stdin=stream)
            await read_to_the_end(made, task, written, limit=limit, pauses=pauses)
            assert (task.exit_code, task.error) == (0, None)

    run(scenario())


def test_read_floods(tmp_path: Path) -> None:
    """Megabytes on both streams, read now and then: exact offsets across many gaps, and no byte twice."""
    text = "".join(f"{number} \U0001f600€é\n" for number in range(300_000)).encode()
    noise = random.Random(1).randbytes(4_000_000)
    (tmp_path / "text").write_bytes(text)
    (tmp_path / "noise").write_bytes(noise)

    async def scenario() -> None:
        async with executor(max_output_bytes=20_000) as made:
            task = start(
                made,
                f"cd {tmp_path}\nfor i in {{0..9}}; do tail -c +$((i * 600000 + 1)) text | head -c 600000; "
                "sleep 0.01; done\ntail -c +6000001 text & cat noise >&2; wait",
            )
            models = await read_to_the_end(made, task, [text, noise], limit=20_000, pauses=[0, 0.002, 0.02])
            assert min(model.dropped for model in models) > 0
            assert (task.exit_code, task.error) == (0, None)

    run(scenario())


def test_read_never_splits_a_character() -> None:
    """Characters that come byte by byte, read as fast as possible: no text has half of one."""
    text = "é€\U0001f600" * 25
    stream = text.encode()

    async def scenario() -> None:
        async with executor() as made:
            task = start(made, writer([(1, 1, 0)] * len(stream)), stdin=stream)
            models = await read_to_the_end(made, task, [stream, b""])
            assert models[0].text == text  # and so no read had a U+FFFD
            half = start(made, "printf '\\xe2\\x82'; sleep 0.2; printf '\\xac|\\xe2\\x82'")
            seen = []
            while half.status is TaskStatus.RUNNING:
                seen.append(made.read_output(half.id).stdout)
                await asyncio.sleep(0.01)
            seen.append(made.read_output(half.id).stdout)
            assert b"".join(read.data for read in seen) == b"\xe2\x82\xac|\xe2\x82"
            first = next(read for read in seen if read.data)
            assert (first.data, first.text) == (b"\xe2\x82", "")  # the bytes come at once, the text whole
            assert "".join(read.text for read in seen) == "€|\N{REPLACEMENT CHARACTER}"

    run(scenario())


def test_read_streams_are_apart() -> None:
    """Each stream has its own offsets; output comes while the task runs."""

    async def scenario() -> None:
        async with executor() as made:
            task = start(made, "echo out; echo problem >&2; sleep 20")
            reads: list[BashTaskRead] = []

            def complete() -> bool:
                reads.append(made.read_output(task.id))
                return reads[-1].stdout.end == 4 and reads[-1].stderr.end == 8

            await until(complete)
            assert {read.status for read in reads} == {TaskStatus.RUNNING}
            assert b"".join(read.stdout.data for read in reads) == b"out\n"
            assert b"".join(read.stderr.data for read in reads) == b"problem\n"
            assert not any(read.lossy for read in reads)

    run(scenario())


def test_read_of_a_task_that_has_not_started(tmp_path: Path) -> None:
    """Empty reads, before and after it fails."""

    async def scenario() -> None:
        async with executor() as made:
            task = start(made, "echo hi", workdir=tmp_path / "missing")
            read = made.read_output(task.id)
            assert (read.stdout.data, read.stdout.end, read.lossy, read.status) == (
                b"",
                0,
                False,
                TaskStatus.RUNNING,
            )
            await until(lambda: task.status is TaskStatus.FAILED)
            expect_nothing_more(made, task, [b"", b""])

    run(scenario())


def test_read_ends_with_the_leader() -> None:
    """What leftovers write later is no output of the task any more."""

    async def scenario() -> None:
        async with executor() as made:
            told = Told(made)
            task = start(made, "(sleep 0.3; echo late; echo late >&2) & echo early")
            await told.hears(task)
            assert told.of(task).stdout == b"early\n"
            await asyncio.sleep(0.5)
            expect_nothing_more(made, task, [b"early\n", b""])

    run(scenario())


# --- late readers, and none at all

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
            assert made.read_output(task.id).stdout.end <= 64_000
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
