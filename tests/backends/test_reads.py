"""read_output of a background task: joined reads equal the stream, or say exactly what is missing.

The model of that is in tests/support/reading.py; late readers are in test_reads_late.py.
"""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from corral import TaskStatus
from tests.support.aio import executor, run, until
from tests.support.reading import expect_nothing_more, read_to_the_end, writer
from tests.support.tasks import Told, start

if TYPE_CHECKING:
    from corral import BashTaskRead

pytestmark = pytest.mark.backend("local")


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
