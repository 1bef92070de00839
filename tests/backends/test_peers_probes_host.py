"""Further probes that command executors are known to fail: output, and what the host must not suffer.

As test_peers_probes.py.
"""

from __future__ import annotations

import asyncio
import os
import random
import subprocess
import time
from collections import Counter
from typing import TYPE_CHECKING

import pytest

from corral import BashExecRequest, EndReason, OwnerToken, TaskStatus, UnknownTaskError
from tests.support.aio import ended, executor, run, run_command, start_command, until
from tests.support.lifeline import Lifeline
from tests.support.processes import descendants, descriptors, rss_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from corral import BashTask

pytestmark = pytest.mark.backend("local")

MIB = 1 << 20
GRACE = 0.3  # seconds; what tests.support.aio.executor configures


@pytest.fixture
def line() -> Iterator[Lifeline]:
    with Lifeline() as made:
        yield made


@pytest.fixture
def load() -> Iterator[None]:
    """Every processor is busy, for at most 40 s."""
    busy = [
        subprocess.Popen(["timeout", "40", "bash", "-c", "while :; do :; done"])
        for _ in range(os.cpu_count() or 1)
    ]
    yield
    for process in busy:
        process.terminate()
    for process in busy:
        process.wait(5)


def warden_pids() -> list[int]:
    return [process.pid for process in descendants(os.getpid()) if process.warden]


# --- output


def test_output_before_a_timeout_is_kept() -> None:
    async def scenario() -> None:
        async with executor() as made:
            result = await run_command(made, "echo early; echo wrong >&2; sleep 15", timeout_ms=400)
            assert result.timed_out
            assert (result.stdout.text, result.stderr.text) == ("early\n", "wrong\n")

    run(scenario())


def test_bytes_that_are_not_text_are_kept_and_shown() -> None:
    """No error; `data` has them as they are, `text` has U+FFFD."""

    async def scenario() -> None:
        async with executor() as made:
            result = await run_command(made, r"printf 'a\377\376b\000\r\n'")
            assert result.exit_code == 0
            assert result.stdout.data == b"a\xff\xfeb\0\r\n"
            assert result.stdout.text == "a\ufffd\ufffdb\0\r\n"

    run(scenario())


def test_a_character_is_never_split_between_two_reads(tmp_path: Path) -> None:
    """Written in pieces that end inside a character, and read as they come."""
    text = "\u20ac" * 21_846  # 65,538 bytes
    (tmp_path / "text").write_text(text, encoding="utf-8")
    command = """\
head -c 65537 text; sleep 0.1; tail -c 1 text
for i in 1 2 3; do sleep 0.02; printf '\\342'; sleep 0.02; printf '\\202\\254'; done"""

    async def scenario() -> None:
        async with executor(workdir=tmp_path, max_output_bytes=200_000) as made:
            task = start_command(made, command)
            texts: list[str] = []
            while task.status is TaskStatus.RUNNING:
                texts.append(made.read_output(task.id).stdout.text)
                await asyncio.sleep(0.003)
            texts.append(made.read_output(task.id).stdout.text)
            assert "".join(texts) == text + "\u20ac" * 3
            assert len([part for part in texts if part]) > 1

    run(scenario())


def test_a_cut_never_goes_through_a_character() -> None:
    """Whatever byte the kept tail begins with, its text begins with a whole character."""

    async def scenario() -> None:
        async with executor(max_output_bytes=1_000) as made:
            for extra in range(4):
                xs = "x" * (extra + 1)
                command = f"printf {xs}; printf '\\360\\237\\230\\200%.0s' {{1..1000}}"
                result = await run_command(made, command)
                assert result.stdout.total_bytes == extra + 1 + 4_000
                assert set(result.stdout.text) == {"\U0001f600"}
                assert len(result.stdout.text) == 250

    run(scenario())


def test_a_huge_line_does_not_grow_the_host() -> None:
    """300 MiB without a newline: memory stays flat on both sides, the count and the tail are right."""
    size = 300 * MIB

    async def scenario() -> None:
        async with executor(max_spill_bytes=8 * MIB) as made:
            await run_command(made, "true")
            await until(lambda: len(warden_pids()) == 1)  # the keeper of that command has gone
            both = (os.getpid(), *warden_pids())
            before = [rss_bytes(pid) for pid in both]
            result = await run_command(made, f"head -c {size} /dev/zero | tr '\\0' a; printf END")
            after = [rss_bytes(pid) for pid in both]
            assert result.exit_code == 0
            assert result.stdout.total_bytes == size + 3
            assert result.stdout.dropped_bytes == size + 3 - len(result.stdout.data)
            assert result.stdout.data == b"a" * (len(result.stdout.data) - 3) + b"END"
            growth = [now - then for then, now in zip(before, after, strict=True)]
            assert all(grown < 24 * MIB for grown in growth), growth

    run(scenario(), timeout=50)


def test_endless_output_does_not_outlast_a_timeout() -> None:
    """And does not grow the host."""

    async def scenario() -> None:
        async with executor(max_spill_bytes=8 * MIB) as made:
            await run_command(made, "true")
            before = rss_bytes(os.getpid())
            began = time.monotonic()
            result = await run_command(made, "exec cat /dev/zero", timeout_ms=800)
            assert time.monotonic() - began < 0.8 + GRACE + 1
            assert result.timed_out
            assert result.stdout.total_bytes > 10 * MIB
            assert rss_bytes(os.getpid()) - before < 24 * MIB

    run(scenario())


def test_a_flood_in_the_background_is_bounded_on_disk(tmp_path: Path, line: Lifeline) -> None:
    """The disk space of the spill stays within its cap while a task floods, and dispose leaves nothing.

    Nor does anything appear in the working directory, where a glob of the task would find its own output.
    """
    spill, work = tmp_path / "spill", tmp_path / "work"
    spill.mkdir()
    work.mkdir()
    cap = 16 * MIB

    def used() -> int:
        return sum(file.lstat().st_blocks * 512 for file in spill.rglob("*") if file.is_file())

    async def scenario() -> None:
        async with executor(spill_dir=str(spill), workdir=work, max_spill_bytes=cap) as made:
            task = start_command(made, line.prologue + "n timeout 15 yes flood & wait")
            most = 0
            read = made.read_output(task.id)
            began = time.monotonic()
            while read.stdout.end < 20 * cap and time.monotonic() - began < 10:
                most = max(most, used())
                await asyncio.sleep(0.01)
                read = made.read_output(task.id)
            assert read.stdout.end >= 20 * cap
            # The head is released in steps, so a moment's overshoot is part of the bargain.
            assert cap // 2 < most <= 2 * cap
            assert made.kill(task.id)
            await ended(made, task)
            rest = made.read_output(task.id).stdout
            assert rest.spill_path is not None
            kept = spill / rest.spill_path
            assert kept.is_relative_to(spill)
            assert kept.stat().st_size == rest.end
            assert kept.stat().st_mode & 0o777 == 0o600
            assert kept.parent.stat().st_mode & 0o777 == 0o700
            assert list(work.iterdir()) == []
        assert list(spill.iterdir()) == []

    run(scenario())


def test_the_end_of_a_long_output_is_kept() -> None:
    """Where the error message is."""

    async def scenario() -> None:
        async with executor() as made:
            result = await run_command(made, "seq 1 1000000; echo ERR; exit 1")
            assert result.exit_code == 1
            assert result.stdout.text.endswith("999999\n1000000\nERR\n")
            assert result.stdout.total_bytes == 6_888_896 + 4
            assert result.stdout.spill_path is not None
            # The whole of it is in a file that the next command can use.
            look = await run_command(
                made, f"wc -c <'{result.stdout.spill_path}'; head -n 2 '{result.stdout.spill_path}'"
            )
            assert look.stdout.text == "6888900\n1\n2\n"

    run(scenario())


def test_the_last_byte_before_an_exit_is_never_lost(load: None) -> None:
    """500 quick commands on a busy machine, eight at a time."""

    async def scenario() -> None:
        async with executor() as made:
            gate = asyncio.Semaphore(8)

            async def one(number: int) -> None:
                async with gate:
                    result = await run_command(made, f"printf {number}; printf e{number} >&2")
                    assert (result.stdout.text, result.stderr.text) == (f"{number}", f"e{number}")

            await asyncio.gather(*(one(number) for number in range(500)))

    run(scenario(), timeout=50)


def test_output_that_nobody_read_in_time_is_missed_with_its_size() -> None:
    """Reading resumes after a pause of the reader; what was lost meanwhile is told exactly."""

    async def scenario() -> None:
        async with executor(max_output_bytes=10_000) as made:
            task = start_command(made, "echo first; sleep 0.2; seq 100000 199999; echo last")
            await until(lambda: made.read_output(task.id).stdout.text == "first\n")
            await ended(made, task)
            read = made.read_output(task.id)
            assert read.lossy
            assert read.stdout.start == 6 + read.stdout.dropped_bytes
            assert read.stdout.end == 6 + 700_000 + 5
            assert read.stdout.text.endswith("199998\n199999\nlast\n")
            assert made.read_output(task.id).stdout.data == b""

    run(scenario())


# --- the loop, leaks, races, ownership


def test_the_event_loop_is_not_blocked() -> None:
    """A tick every 20 ms goes on beside opening, spawning, waiting, killing and a flood of output."""

    async def scenario() -> None:
        late: list[float] = []
        stop = asyncio.Event()

        async def tick() -> None:
            while not stop.is_set():
                due = time.monotonic() + 0.02
                await asyncio.sleep(0.02)
                late.append(time.monotonic() - due)

        ticker = asyncio.create_task(tick())
        async with executor(max_spill_bytes=8 * MIB) as made:
            await asyncio.gather(
                run_command(made, "sleep 1"),
                run_command(made, "exec cat /dev/zero", timeout_ms=500),
                *(run_command(made, "sleep 15", timeout_ms=300) for _ in range(10)),
            )
        stop.set()
        await ticker
        # 50 are due in the second that this takes at least.
        assert len(late) >= 45
        assert sorted(late)[-3] < 0.05

    run(scenario())


def test_no_zombies_pile_up() -> None:
    """Below the host and below its warden, after 200 commands that ended by themselves or were killed."""

    async def scenario() -> None:
        async with executor() as made:
            for number in range(100):
                await run_command(made, "true & exit 1")
                task = start_command(made, "sleep 15 & sleep 15")
                if number % 2:
                    await asyncio.sleep(0.002)
                assert made.kill(task.id)
                await ended(made, task)
            await until(lambda: len(warden_pids()) == 1)
            assert [p for p in descendants(os.getpid()) if p.zombie] == []

    run(scenario(), timeout=50)


def test_no_descriptors_leak() -> None:
    """In the host and in its warden, after 200 commands whose children outlived them for a while."""

    def held() -> list[Counter[str]]:
        # Only root can look into the warden, which is not dumpable.
        wardens = warden_pids() if os.geteuid() == 0 else []
        return [Counter(descriptors(pid)) for pid in (os.getpid(), *wardens)]

    async def scenario() -> None:
        async with executor() as made:
            await run_command(made, "true")
            before = held()
            for _ in range(200):
                await run_command(made, "sleep 0.02 & echo x")
            await until(lambda: len(warden_pids()) == 1)
            assert held() == before

    run(scenario(), timeout=50)


def test_a_completion_is_told_exactly_once() -> None:
    """500 short tasks, each killed at a random moment around its own end."""
    choose = random.Random(7)

    async def scenario() -> None:
        async with executor() as made:
            told: Counter[str] = Counter()
            made.on_task_done(lambda task: told.update([task.id]))

            async def one() -> tuple[BashTask, bool]:
                task = start_command(made, "true")
                await asyncio.sleep(choose.uniform(0, 0.012))
                killed = made.kill(task.id)
                if task.status is TaskStatus.RUNNING:
                    await ended(made, task)
                return task, killed

            results: list[tuple[BashTask, bool]] = []
            for _ in range(50):
                results += await asyncio.gather(*(one() for _ in range(10)))
            await asyncio.sleep(0.05)
            assert told == Counter(task.id for task, _ in results)
            for task, killed in results:
                assert killed or task.reason is EndReason.EXITED
            assert {killed for _, killed in results} == {True, False}, "the delays do not straddle the end"

    run(scenario(), timeout=50)


def test_a_listener_that_raises_harms_no_other(caplog: pytest.LogCaptureFixture) -> None:
    """Many tasks end together, and each is told to the others; the error is logged."""

    async def scenario() -> None:
        async with executor() as made:
            told: Counter[str] = Counter()

            def fail(task: BashTask) -> None:
                raise RuntimeError(task.command)

            made.on_task_done(fail)
            made.on_task_done(lambda task: told.update([task.id]))
            tasks = [start_command(made, f": {number}") for number in range(30)]
            await until(lambda: len(told) == 30)
            assert told == Counter(task.id for task in tasks)

    run(scenario())
    assert len([record for record in caplog.records if record.exc_info]) == 30


def test_tasks_of_another_executor_are_unknown() -> None:
    """Neither seen, nor read, nor killed; like an id that never was."""

    async def scenario() -> None:
        async with executor() as one, executor() as other:
            request = BashExecRequest(command="sleep 15", owner=OwnerToken("session-a"))
            task = one.start(one.resolve(request))
            assert other.get(task.id) is None
            assert list(other.list()) == []
            assert other.owner_of(task.id) is None
            for refused in (other.read_output, other.kill):
                with pytest.raises(UnknownTaskError):
                    refused(task.id)
            assert one.owner_of(task.id) == "session-a"
            assert task.status is TaskStatus.RUNNING

    run(scenario())


def test_fifty_commands_at_once_do_not_wait_for_each_other() -> None:
    """50 commands of half a second each are over in much less than one after the other."""

    async def scenario() -> None:
        async with executor() as made:
            await run_command(made, "true")
            began = time.monotonic()
            results = await asyncio.gather(*(run_command(made, f"sleep 0.5; echo {n}") for n in range(50)))
            assert time.monotonic() - began < 5
            assert [result.stdout.text for result in results] == [f"{n}\n" for n in range(50)]

    run(scenario())
