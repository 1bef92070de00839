"""Background tasks of the local place: starting, looking up, killing, being told, being forgotten.

Reading their output is in test_reads.py, many of them at once in test_races.py.
"""

from __future__ import annotations

import asyncio
import gc
import platform
import threading
import time
import weakref
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from corral import (
    AbortController,
    AbortedBeforeStartError,
    BashExecRequest,
    BashTaskId,
    EndReason,
    ExecutorDisposedError,
    PlaceOpenError,
    ShellNotFoundError,
    SpawnError,
    TaskStatus,
    UnknownTaskError,
    UnsupportedPlaceError,
    WorkdirError,
)
from corral_backends.warden import find_warden
from tests.support.aio import executor, run, run_command, until
from tests.support.lifeline import Lifeline
from tests.support.tasks import Told, read_until, slow_warden, start

if TYPE_CHECKING:
    from collections.abc import Iterator

    from corral import CorralError
    from corral_backends.places.local import LocalExecutor

pytestmark = pytest.mark.backend("local")

GRACE = 0.3  # seconds; what tests.support.aio.executor configures
DEAF = "trap '' TERM INT HUP\n"


@pytest.fixture
def line() -> Iterator[Lifeline]:
    with Lifeline() as made:
        yield made


@pytest.fixture
def slow_to_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> float:
    """Opening the place takes this many seconds."""
    seconds = 0.5
    monkeypatch.setenv("CORRAL_WARDEN", slow_warden(tmp_path, find_warden(platform.machine()), seconds))
    return seconds


# --- start


def test_start_immediate(slow_to_open: float) -> None:
    """`start` returns a running task at once, before its place is open, and the command then runs."""

    async def scenario() -> None:
        async with executor() as made:
            told = Told(made)
            began = time.monotonic()
            task = start(made, "echo hi")
            assert time.monotonic() - began < slow_to_open / 2
            assert (task.status, task.started_at, task.ended_at) == (TaskStatus.RUNNING, None, None)
            assert (task.exit_code, task.signal, task.reason, task.error) == (None, None, None, None)
            assert made.read_output(task.id).stdout.data == b""
            await told.hears(task)
            assert time.monotonic() - began >= slow_to_open
            assert (told.of(task).stdout, task.exit_code, task.reason) == (b"hi\n", 0, EndReason.EXITED)
            assert task.started_at is not None
            assert task.ended_at is not None
            assert task.started_at <= task.ended_at

    run(scenario())


@pytest.mark.usefixtures("slow_to_open")
def test_start_shares_one_opening() -> None:
    """Whatever is started while the place is opened waits for that one opening, and runs in one place."""

    async def scenario() -> None:
        async with executor() as made:
            told = Told(made)
            # The parent of bash is its keeper, and the parent of that is the warden.
            tasks = [start(made, "read -r _ _ _ parent _ </proc/$PPID/stat; echo $parent") for _ in range(5)]
            result = await run_command(made, "read -r _ _ _ parent _ </proc/$PPID/stat; echo $parent")
            await told.hears(*tasks)
            assert {told.of(task).stdout for task in tasks} == {result.stdout.data}

    run(scenario())


async def expect_failed(made: LocalExecutor, error: type[CorralError], **fields: Any) -> CorralError:
    """A task that is started with those fields fails with that error, and everybody is told once."""
    told = Told(made)
    task = start(made, "echo ran", **fields)
    assert task.status is TaskStatus.RUNNING
    await told.hears(task)
    await asyncio.sleep(0.02)
    assert (task.status, task.started_at, task.reason) == (TaskStatus.FAILED, None, None)
    assert (task.exit_code, task.signal) == (None, None)
    assert task.ended_at is not None
    note = told.of(task)
    assert (note.status, note.ended, note.stdout, note.stderr) == (TaskStatus.FAILED, True, b"", b"")
    assert made.get(task.id) is task
    assert made.kill(task.id) is False
    assert type(task.error) is error
    return task.error


@pytest.mark.parametrize("opened", [False, True], ids=["cold", "open"])
def test_start_in_a_missing_workdir(opened: bool, tmp_path: Path) -> None:
    """A launch that fails ends the task as FAILED with its error, and one notification."""

    async def scenario() -> None:
        async with executor() as made:
            if opened:
                await run_command(made, "true")
            error = await expect_failed(made, WorkdirError, workdir=tmp_path / "missing")
            assert str(tmp_path / "missing") in str(error)
            assert (await run_command(made, "echo next")).stdout.data == b"next\n"

    run(scenario())


def test_start_without_a_shell(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with executor(shell=str(tmp_path / "missing")) as made:
            await expect_failed(made, ShellNotFoundError)

    run(scenario())


def test_start_with_too_large_an_environment() -> None:
    """What `run` refuses with a ValueError has nobody to be raised at, and is the task's error."""

    async def scenario() -> None:
        async with executor() as made:
            error = await expect_failed(made, SpawnError, env={f"A{n}": "x" * 100_000 for n in range(30)})
            assert "too large" in str(error)

    run(scenario())


@pytest.mark.parametrize(
    ("warden", "error"), [("/bin/true", PlaceOpenError), ("/nonexistent", UnsupportedPlaceError)]
)
def test_start_where_the_place_cannot_be_opened(
    warden: str, error: type[CorralError], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each task is told; the next command tries again."""
    monkeypatch.setenv("CORRAL_WARDEN", warden)

    async def scenario() -> None:
        async with executor() as made:
            await expect_failed(made, error)
            monkeypatch.delenv("CORRAL_WARDEN")
            assert (await run_command(made, "echo next")).stdout.data == b"next\n"

    run(scenario())


def test_start_refuses(tmp_path: Path) -> None:
    """Already aborted, a raw request, disposed: `start` raises, nothing is listed and nothing runs."""
    aborted = AbortController()
    aborted.abort("enough")
    command = f"touch '{tmp_path}/ran'"

    async def scenario() -> None:
        async with executor() as made:
            told = Told(made)
            with pytest.raises(AbortedBeforeStartError) as caught:
                start(made, command, signal=aborted.signal)
            assert caught.value.reason == "enough"
            with pytest.raises(TypeError, match="BashExecSpec"):
                made.start(BashExecRequest(command=command))  # type: ignore[arg-type]
            await run_command(made, "true")
            assert made.list() == ()
            assert told.notes == []
        with pytest.raises(ExecutorDisposedError):
            start(made, command)
        assert made.list() == ()

    run(scenario())
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("how", ["kill", "abort"])
def test_ended_while_opening(how: str, slow_to_open: float, tmp_path: Path) -> None:
    """It is over at once, FAILED and told once; the command never runs, though the place does open."""
    controller = AbortController()

    async def scenario() -> None:
        async with executor() as made:
            told = Told(made)
            began = time.monotonic()
            task = start(made, f"touch '{tmp_path}/ran'", signal=controller.signal)
            other = start(made, "echo other")
            await asyncio.sleep(0.02)
            if how == "kill":
                assert made.kill(task.id) is True
                assert made.kill(task.id) is False
            else:
                controller.abort("enough")
            await told.hears(task)
            assert time.monotonic() - began < slow_to_open
            assert (task.status, task.started_at) == (TaskStatus.FAILED, None)
            assert task.reason is (EndReason.KILLED if how == "kill" else EndReason.ABORTED)
            assert isinstance(task.error, AbortedBeforeStartError)
            assert task.error.reason == (None if how == "kill" else "enough")
            await told.hears(other)
            await run_command(made, "true")
            assert len(told.notes) == 2
            assert told.of(other).stdout == b"other\n"

    run(scenario())
    assert not (tmp_path / "ran").exists()


def test_ids_are_unguessable_and_never_used_twice() -> None:
    """At least 64 bits differ between any two of them, in one executor and between executors."""

    async def ids() -> list[str]:
        async with executor(max_finished_tasks=0) as made:
            tasks = [start(made, "true") for _ in range(100)]
            await until(lambda: all(task.status is TaskStatus.FINISHED for task in tasks))
            return [task.id for task in tasks]

    found = [int(task_id, 16) for _ in range(2) for task_id in run(ids())]
    assert len(set(found)) == 200
    assert min((a ^ b).bit_count() for i, a in enumerate(found) for b in found[:i]) > 24
    assert len({value >> 64 for value in found}) == len({value & (2**64 - 1) for value in found}) == 200


# --- no timeout, abort


def test_no_timeout() -> None:
    """No limit applies to a background task: not the default, not the maximum, not the spec's."""

    async def scenario() -> None:
        async with executor(timeout_ms=100, max_timeout_ms=150) as made:
            told = Told(made)
            tasks = [start(made, "sleep 0.6; echo whole", timeout_ms=limit) for limit in (None, 50, 10_000)]
            await told.hears(*tasks)
            assert {(task.reason, task.exit_code) for task in tasks} == {(EndReason.EXITED, 0)}
            assert {told.of(task).stdout for task in tasks} == {b"whole\n"}

    run(scenario())


@pytest.mark.parametrize("thread", [False, True], ids=["loop", "thread"])
def test_abort(thread: bool, line: Lifeline) -> None:
    """The spec's signal kills the whole tree, from whichever thread, and the partial output is kept."""
    controller = AbortController()

    async def scenario() -> None:
        async with executor() as made:
            told = Told(made)
            task = start(
                made,
                line.prologue + "setsid -f sleep 20\nn sleep 20 &\necho partial\nsleep 20",
                signal=controller.signal,
            )
            await read_until(made, task, b"partial")
            assert line.held()
            if thread:
                aborter = threading.Thread(target=controller.abort, args=("enough",))
                aborter.start()
                aborter.join()
            else:
                controller.abort("enough")
            await told.hears(task)
            assert not line.held()
            assert (task.status, task.reason) == (TaskStatus.FINISHED, EndReason.ABORTED)
            assert (task.exit_code, task.signal, task.error) == (None, "SIGTERM", None)
            controller.abort("again")
            await asyncio.sleep(0.05)
            assert told.ids == [task.id]

    run(scenario())


def test_abort_after_the_end_does_nothing() -> None:
    controller = AbortController()

    async def scenario() -> None:
        async with executor() as made:
            told = Told(made)
            task = start(made, "exit 4", signal=controller.signal)
            await told.hears(task)
            controller.abort()
            await asyncio.sleep(0.02)
            assert (task.reason, task.exit_code, len(told.notes)) == (EndReason.EXITED, 4, 1)

    run(scenario())


def test_a_long_lived_signal_keeps_nothing_of_ended_tasks() -> None:
    """One signal for many tasks does not collect them."""
    controller = AbortController()

    async def scenario() -> None:
        async with executor(max_finished_tasks=0) as made:
            tasks = [start(made, "true", signal=controller.signal) for _ in range(20)]
            await until(lambda: all(task.status is TaskStatus.FINISHED for task in tasks))
            await run_command(made, "true")
            known = [weakref.ref(task) for task in tasks]
            tasks.clear()
            await asyncio.sleep(0)
            gc.collect()
            assert [ref() for ref in known if ref() is not None] == []
        assert not controller.signal.aborted

    run(scenario())


# --- looking up


def test_lookup() -> None:
    """`list` is in start order, running and finished; it is a snapshot; all hand out the same object."""

    async def scenario() -> None:
        async with executor() as made:
            told = Told(made)
            sleeps = (0.3, 0, 20, 0.1, 0)
            tasks = [start(made, f"sleep {seconds}") for seconds in sleeps]
            snapshot = made.list()
            assert list(snapshot) == tasks
            await told.hears(*(task for task, seconds in zip(tasks, sleeps, strict=True) if seconds != 20))
            assert told.ids != [
                task.id for task in tasks if task is not tasks[2]
            ]  # they did end out of order
            last = start(made, "true")
            assert list(snapshot) == tasks
            assert list(made.list()) == [*tasks, last]
            await told.hears(last)
            assert tasks[2].status is TaskStatus.RUNNING
            for task in made.list():
                assert made.get(task.id) is task
            assert all(note.task is made.get(note.task.id) for note in told.notes)

    run(scenario())


def test_lookup_unknown() -> None:
    """An unknown id is `None` for `get` and `owner_of`, and an `UnknownTaskError` for what needs a task."""
    unknown = BashTaskId("no such task")

    async def scenario() -> None:
        async with executor() as made, executor() as other:
            theirs = start(other, "true").id
            for task_id in (unknown, theirs, BashTaskId("")):
                assert made.get(task_id) is None
                assert made.owner_of(task_id) is None
                for call in (made.read_output, made.kill):
                    with pytest.raises(UnknownTaskError) as caught:
                        call(task_id)
                    assert isinstance(caught.value, LookupError)
                    assert caught.value.task_id == task_id
            assert made.list() == ()

    run(scenario())


def test_lookup_knows_no_foreground_run() -> None:
    """What `run` runs is no task: not listed, and no listener hears of it."""

    async def scenario() -> None:
        async with executor() as made:
            told = Told(made)
            running = asyncio.create_task(run_command(made, "sleep 0.1"))
            await asyncio.sleep(0.05)
            assert made.list() == ()
            await running
            await asyncio.sleep(0.02)
            assert (made.list(), told.notes) == ((), [])

    run(scenario())
