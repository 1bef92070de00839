"""Dispose of the local place: everything dies, is awaited, and nothing is left, whatever is under way.

What it does to hostile trees is in test_workloads.py and test_hostile.py.
"""

from __future__ import annotations

import asyncio
import platform
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from corral import (
    AbortController,
    EndReason,
    ExecutorDisposedError,
    TaskStatus,
)
from corral_backends.places.local import LocalExecutor
from corral_backends.warden import find_warden
from tests.support.aio import executor, run, run_command, spec, until
from tests.support.lifeline import Lifeline
from tests.support.tasks import Told, census, read_until, slow_warden, start, started

if TYPE_CHECKING:
    from collections.abc import Iterator

    from corral import BashTask

pytestmark = pytest.mark.backend("local")

GRACE = 0.3  # seconds; what tests.support.aio.executor configures
DEAF = "trap '' TERM INT HUP\n"
TREE = "setsid -f bash -c 'printf m >&9; exec sleep 20'\n(n sleep 20 &)\n"
UP = "echo up; printf m >&9\n"


@pytest.fixture
def line() -> Iterator[Lifeline]:
    with Lifeline() as made:
        yield made


@pytest.fixture
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where temporary files go."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    return tmp_path


# --- dispose.kills


def test_dispose_kills(line: Lifeline) -> None:
    """Tasks, foreground runs and leftovers are dead when it returns; runs and tasks end as DISPOSED."""

    async def scenario() -> None:
        made = LocalExecutor(kill_grace_ms=300)
        told = Told(made)
        await made.run(spec(made, f"{line.prologue}{TREE}exit 3"))  # whose processes stay behind
        polite = f"{line.prologue}trap 'echo bye; exit 9' TERM\n{TREE}{UP}while :; do sleep 0.01; done"
        plain = f"{line.prologue}{TREE}{UP}sleep 20"
        runs = [asyncio.create_task(made.run(spec(made, command))) for command in (polite, plain)]
        tasks = [start(made, command) for command in (polite, plain)]
        for task in tasks:
            await read_until(made, task, b"up")
        await until(lambda: line.marks() >= 14, timeout=10)
        await made.dispose()
        assert not line.held()
        results = [run.result() for run in runs]
        assert [(r.exit_code, r.signal, r.stdout.text) for r in results] == [
            (9, None, "up\nbye\n"),
            (None, "SIGTERM", "up\n"),
        ]
        assert {(r.reason, r.timed_out, r.aborted, r.survivors) for r in results} == {
            (EndReason.DISPOSED, False, False, 0)
        }
        assert [(task.status, task.reason) for task in tasks] == [
            (TaskStatus.FINISHED, EndReason.DISPOSED)
        ] * 2
        assert [(task.exit_code, task.signal) for task in tasks] == [(9, None), (None, "SIGTERM")]
        assert made.read_output(tasks[0].id).stdout.data == b"bye\n"
        assert told.notes == []

    run(scenario())


@pytest.mark.parametrize("grace_ms", [0, 400])
def test_dispose_gives_the_grace(grace_ms: int, line: Lifeline) -> None:
    """A tree that heeds nothing but SIGKILL is dead after the grace, and not much later."""

    async def scenario() -> float:
        made = LocalExecutor(kill_grace_ms=grace_ms)
        task = start(made, f"{line.prologue}{DEAF}{TREE}echo up\nwhile :; do sleep 20; done")
        await read_until(made, task, b"up")
        began = time.monotonic()
        await made.dispose()
        assert not line.held()
        assert (task.signal, task.reason) == ("SIGKILL", EndReason.DISPOSED)
        return time.monotonic() - began

    assert grace_ms / 1000 <= run(scenario()) < grace_ms / 1000 + 1


def test_dispose_does_not_rename_what_was_ending(line: Lifeline) -> None:
    """The first cause wins: what was being killed, aborted or cancelled when dispose came, ends as that."""
    controller = AbortController()

    async def scenario() -> None:
        made = LocalExecutor(kill_grace_ms=300)
        deaf = f"{line.prologue}{DEAF}echo up\nn sleep 20"
        killed, aborted = start(made, deaf), start(made, deaf, signal=controller.signal)
        cancelled = asyncio.create_task(run_command(made, deaf))
        timed_out = asyncio.create_task(run_command(made, deaf, timeout_ms=200))
        for task in (killed, aborted):
            await read_until(made, task, b"up")
        await until(lambda: line.marks() >= 4, timeout=10)
        await asyncio.sleep(0.25)
        made.kill(killed.id)
        controller.abort()
        cancelled.cancel()
        await asyncio.sleep(0)
        await made.dispose()
        assert not line.held()
        assert (killed.reason, aborted.reason) == (EndReason.KILLED, EndReason.ABORTED)
        assert (await timed_out).reason is EndReason.TIMED_OUT
        with pytest.raises(asyncio.CancelledError):
            await cancelled

    run(scenario())


# --- dispose.idempotent


def test_dispose_twice_and_concurrently(line: Lifeline) -> None:
    """All calls share one disposal; a waiter that is cancelled, or gives up, does not end it."""

    async def scenario() -> None:
        made = LocalExecutor(kill_grace_ms=300)
        task = start(made, f"{line.prologue}{DEAF}echo up\nn sleep 20")
        await read_until(made, task, b"up")
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await made.dispose()
        assert made.disposed
        assert line.held()
        waiters = [asyncio.ensure_future(made.dispose()) for _ in range(5)]
        await asyncio.sleep(0.02)
        waiters[0].cancel()
        await asyncio.gather(*waiters[1:])
        assert not line.held()
        await made.dispose()

    run(scenario())


def test_dispose_of_an_unused_executor() -> None:
    """No warden is ever started for it."""

    async def scenario() -> None:
        before = census()
        made = LocalExecutor()
        await made.dispose()
        await made.dispose()
        assert census() == before
        with pytest.raises(ExecutorDisposedError):
            await run_command(made, "true")
        assert census() == before

    run(scenario())


@pytest.mark.parametrize("awaited", [False, True], ids=["dropped", "kept"])
def test_dispose_from_a_listener(awaited: bool, line: Lifeline) -> None:
    """From then on no listener is called: not the later ones for this task, none for others."""

    async def scenario() -> None:
        made = LocalExecutor(kill_grace_ms=300)
        heard: list[str] = []
        disposals: list[object] = []

        def disposes(task: BashTask) -> None:
            assert task.exit_code == 3
            heard.append("disposes")
            disposal = made.dispose()
            if awaited:
                disposals.append(asyncio.ensure_future(disposal))

        made.on_task_done(disposes)
        made.on_task_done(lambda _: heard.append("later"))
        others = [start(made, f"{line.prologue}n sleep 20") for _ in range(3)]
        at_once = [start(made, "sleep 0.2; exit 3") for _ in range(5)]
        await until(lambda: line.marks() >= 3, timeout=10)
        await until(lambda: made.disposed)
        await made.dispose()
        assert not line.held()
        assert heard == ["disposes"]
        assert {task.status for task in others} == {TaskStatus.FINISHED}
        assert {task.reason for task in at_once} <= {EndReason.EXITED, EndReason.DISPOSED}

    run(scenario())


def test_dispose_while_opening(work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs raise ExecutorDisposedError, tasks fail untold, nothing runs, and no process is left."""
    monkeypatch.setenv("CORRAL_WARDEN", slow_warden(work, find_warden(platform.machine()), 0.4))

    async def scenario() -> None:
        before = census()
        made = LocalExecutor(kill_grace_ms=300)
        told = Told(made)
        runs = [asyncio.create_task(run_command(made, f"touch '{work}/ran'")) for _ in range(3)]
        tasks = [start(made, f"touch '{work}/ran'") for _ in range(3)]
        await asyncio.sleep(0.1)
        await made.dispose()
        errors = await asyncio.gather(*runs, return_exceptions=True)
        assert [type(error) for error in errors] == [ExecutorDisposedError] * 3
        for task in tasks:
            assert (task.status, task.started_at, task.reason) == (
                TaskStatus.FAILED,
                None,
                EndReason.DISPOSED,
            )
            assert isinstance(task.error, ExecutorDisposedError)
        assert told.notes == []
        assert census() == before

    run(scenario())
    assert not (work / "ran").exists()


@pytest.mark.parametrize("delay_ms", [0, 0.3, 1, 2, 3, 5, 8, 13, 21])
def test_dispose_at_any_moment(delay_ms: float, line: Lifeline, work: Path) -> None:
    """Of a cold executor with tasks and runs, from before the warden exists until all are up."""

    async def scenario() -> None:
        before = census(directory=work)
        for _ in range(4):
            made = LocalExecutor(kill_grace_ms=300)
            told = Told(made)
            command = f"{line.prologue}setsid -f sleep 20\nsleep 20"
            tasks = [start(made, command) for _ in range(3)]
            runs = [asyncio.create_task(run_command(made, command)) for _ in range(3)]
            deadline = time.perf_counter() + delay_ms / 1000
            while time.perf_counter() < deadline:
                await asyncio.sleep(0)
            await made.dispose()
            assert not line.held()
            for outcome in await asyncio.gather(*runs, return_exceptions=True):
                if isinstance(outcome, BaseException):
                    assert isinstance(outcome, ExecutorDisposedError)
                else:
                    assert outcome.reason is EndReason.DISPOSED
            for task in tasks:
                assert task.reason is EndReason.DISPOSED
                assert (task.status is TaskStatus.FAILED) is (task.started_at is None)
            assert told.notes == []
            assert census(directory=work) == before

    run(scenario())


def test_after_dispose() -> None:
    """What was remembered can still be read; what starts something raises; kill has nothing to do."""

    async def scenario() -> None:
        async with executor() as made:
            told = Told(made)
            ended = start(made, "echo hi; exit 3", owner="somebody")
            await told.hears(ended)
            running = start(made, "echo partial; sleep 20", owner="else")
            await started(running)
            await asyncio.sleep(0.05)
        assert list(made.list()) == [ended, running]
        assert made.get(running.id) is running
        assert made.owner_of(running.id) == "else"
        assert made.read_output(running.id).stdout.data == b"partial\n"
        assert made.kill(running.id) is False
        assert made.disposed
        with pytest.raises(ExecutorDisposedError):
            start(made, "true")
        with pytest.raises(ExecutorDisposedError):
            await run_command(made, "true")
        with pytest.raises(ExecutorDisposedError):
            made.on_task_done(told)
        with pytest.raises(ExecutorDisposedError):
            await anext(aiter(made.fetch("/etc/passwd")))

    run(scenario())
