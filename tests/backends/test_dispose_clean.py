"""Dispose of the local place: it leaves nothing, is bounded, and hides no other error."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import signal
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from corral import (
    AbortController,
    EndReason,
    ExecutorDisposedError,
    PlaceLostError,
    TaskStatus,
)
from corral_backends.places.local import LocalExecutor
from tests.support.accounts import ACCOUNTS
from tests.support.aio import executor, run, run_command, spec, until
from tests.support.lifeline import Lifeline
from tests.support.processes import descendants
from tests.support.tasks import Told, census, start, started
from tests.support.witness import Watch

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator


pytestmark = pytest.mark.backend("local")

GRACE = 0.3  # seconds; what tests.support.aio.executor configures
DEAF = "trap '' TERM INT HUP\n"
TREE = "setsid -f bash -c 'printf m >&9; exec sleep 20'\n(n sleep 20 &)\n"


@pytest.fixture
def line() -> Iterator[Lifeline]:
    with Lifeline() as made:
        yield made


@pytest.fixture
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where temporary files go."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    return tmp_path


def dispatcher() -> int:
    """The pid of the one warden that this process has."""
    here = os.getpid()
    (found,) = (p.pid for p in descendants(here) if p.warden and p.ppid == here and not p.zombie)
    return found


def big_file(directory: Path) -> Path:
    """More than is ever under way."""
    file = directory / "big"
    file.touch()
    os.truncate(file, 1 << 30)
    return file


async def last_of(chunks: AsyncIterator[bytes]) -> bytes:
    last = b""
    async for chunk in chunks:
        last = chunk
    return last


def test_dispose_leaves_nothing(work: Path) -> None:
    """Descriptors, threads, asyncio tasks, children, zombies, files are as before, after all kinds of use."""

    async def use(made: LocalExecutor) -> None:
        told = Told(made)
        controller = AbortController()
        flood = "head -c 300000 /dev/zero"
        tasks = [
            start(made, flood),
            start(made, flood, workdir=work / "missing"),
            start(made, f"{flood}; sleep 20", signal=controller.signal),
            start(made, f"{flood}; sleep 20"),
            start(made, f"{flood} | cat & setsid -f sleep 20"),
            start(made, "sleep 0.05; kill -9 $PPID; sleep 20"),
        ]
        await made.run(spec(made, "cat", stdin=b"x" * 500_000))
        await run_command(made, "true # " + "x" * 500_000)
        await run_command(made, "sleep 20", timeout_ms=50)
        cancelled = asyncio.create_task(run_command(made, "sleep 20"))
        await started(tasks[2], tasks[3])
        cancelled.cancel()
        controller.abort()
        made.kill(tasks[3].id)
        await told.hears(*tasks)
        path = made.read_output(tasks[0].id).stdout.spill_path
        assert path is not None
        async for _ in made.fetch(path):  # read to its end
            pass
        async for _ in made.fetch(big_file(work)):  # abandoned
            break
        (work / "big").unlink()
        assert census(directory=work)["files"]  # there are spill files
        for _ in range(3):
            start(made, f"{flood}; sleep 20")
        await asyncio.sleep(0.1)

    async def scenario() -> None:
        before = census(directory=work)
        for _ in range(2):
            async with executor() as made:
                await use(made)
            assert made.disposed
            await asyncio.sleep(0)  # asyncio closes the generator of an abandoned fetch
            gc.collect()
            assert census(directory=work) == before

    run(scenario())


def test_dispose_during_a_fetch(work: Path) -> None:
    """Whoever is in the middle of one is told so."""

    async def scenario() -> None:
        before = census(directory=work)
        made = LocalExecutor(kill_grace_ms=300)
        chunks = aiter(made.fetch(big_file(work)))
        assert await anext(chunks)
        await made.dispose()
        with pytest.raises(ExecutorDisposedError):
            await last_of(chunks)
        (work / "big").unlink()
        assert census(directory=work) == before

    run(scenario())


# --- dispose.bounded, and errors


def test_dispose_of_a_place_that_is_lost_at_that_moment(line: Lifeline, work: Path) -> None:
    """It does all that it can, then raises PlaceLostError, every time; runs end as lost, nothing stays."""

    async def scenario() -> None:
        before = census(directory=work)
        made = LocalExecutor(kill_grace_ms=300)
        running = asyncio.create_task(run_command(made, f"{line.prologue}echo up\n{DEAF}{TREE}n sleep 20"))
        task = start(made, f"head -c 200000 /dev/zero; {line.prologue}{TREE}n sleep 20")
        await until(lambda: line.marks() >= 6, timeout=10)
        os.kill(dispatcher(), signal.SIGKILL)
        for _ in range(2):
            with pytest.raises(PlaceLostError):
                await made.dispose()
        with pytest.raises(PlaceLostError) as caught:
            await running
        assert caught.value.stdout is not None
        assert caught.value.stdout.text == "up\n"
        assert (task.status, task.reason) == (TaskStatus.FAILED, EndReason.LOST)
        await until(lambda: not line.held(), timeout=1)
        assert census(directory=work) == before

    run(scenario())


def test_dispose_never_masks(caplog: pytest.LogCaptureFixture) -> None:
    """Inside `async with`, the body's exception comes out; the disposal's is noted on it and logged."""

    async def broken() -> None:
        async with LocalExecutor(kill_grace_ms=300) as made:
            await run_command(made, "true")
            os.kill(dispatcher(), signal.SIGKILL)
            msg = "the body"
            raise ValueError(msg)

    async def unbroken() -> None:
        async with LocalExecutor(kill_grace_ms=300) as made:
            await run_command(made, "true")
            os.kill(dispatcher(), signal.SIGKILL)

    async def cancelled() -> None:
        async with LocalExecutor(kill_grace_ms=300) as made:
            await run_command(made, "true")
            os.kill(dispatcher(), signal.SIGKILL)
            raise asyncio.CancelledError

    async def scenario() -> None:
        before = census()
        with pytest.raises(ValueError, match="the body") as caught:
            await broken()
        assert ["PlaceLostError" in note for note in caught.value.__notes__] == [True]
        assert "disposing of an executor failed" in caplog.text
        with pytest.raises(PlaceLostError):
            await unbroken()
        with pytest.raises(asyncio.CancelledError):
            await cancelled()
        assert census() == before

    run(scenario())


def test_dispose_of_a_frozen_place() -> None:
    """A dispatcher that is stopped: bounded, PlaceLostError, and all of its trees are gone."""
    with contextlib.ExitStack() as stack:
        # It takes its time, so all accounts do it at once.
        watches: list[tuple[Watch, Lifeline]] = []
        for account in ACCOUNTS:
            line = stack.enter_context(Lifeline())
            command = f"{line.prologue}{DEAF}{TREE}n sleep 30"
            arguments = {"commands": [command] * 3}
            watch = stack.enter_context(Watch("holding:hold", arguments, account=account, line=line))
            watches.append((watch, line))
            watch.report("started")
            watch.go(f"foreground {command}".replace("\n", ";"))
            watch.report("running")
            assert line.wait_marks(12, timeout=10), watch.describe()
            (frozen,) = (process.pid for process in watch.wardens() if process.ppid == watch.driver)
            os.kill(frozen, signal.SIGSTOP)
            watch.go("dispose")
        for watch, line in watches:
            disposed = watch.report("disposed", timeout=20)
            assert disposed["error"] == "PlaceLostError"
            assert disposed["elapsed_ms"] < 8_000
            assert {(task["status"], task["reason"], task["told"]) for task in disposed["tasks"]} == {
                ("failed", "lost", 0)
            }
            assert disposed["runs"] == ["PlaceLostError"]
            assert line.wait_released(timeout=1), watch.describe()
            watch.assert_no_survivors()
            assert watch.processes() == []
            assert watch.zombies() == []
            assert disposed["after"] == disposed["before"]
            watch.go("leave")
            watch.finish()
