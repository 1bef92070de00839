"""The end of a background task: who is told, when, how often, and how long it is remembered."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from corral import (
    AbortController,
    BashTaskId,
    EndReason,
    TaskStatus,
    UnknownTaskError,
)
from tests.support.aio import executor, run, run_command, until
from tests.support.tasks import Told, read_until, start, started

if TYPE_CHECKING:
    from corral import BashExecutor, BashTask

pytestmark = pytest.mark.backend("local")


ENDS: dict[str, tuple[str, dict[str, Any]]] = {
    "exit": ("exit 3", {"exit_code": 3, "reason": EndReason.EXITED}),
    "signal": ("kill -9 $$", {"signal": "SIGKILL", "reason": EndReason.SIGNALLED}),
    "kill": ("sleep 20", {"signal": "SIGTERM", "reason": EndReason.KILLED}),
    "abort": ("sleep 20", {"signal": "SIGTERM", "reason": EndReason.ABORTED}),
    # What its supervisor has not read yet goes with it, so it is given a moment.
    "lost": ("sleep 0.1; kill -9 $PPID; sleep 20", {"status": TaskStatus.FAILED, "reason": EndReason.LOST}),
}


@pytest.mark.parametrize("how", ENDS)
def test_done_order(how: str) -> None:
    """When a listener is called, everything is final, and its first read gives the rest of the output."""
    command, expected = ENDS[how]
    out, err = "x" * 60_000, "y" * 60_000

    async def scenario() -> None:
        async with executor() as made:
            told = Told(made)
            controller = AbortController()
            task = start(
                made,
                f"printf %s {out}\nprintf %s {err} >&2\necho up\nread -r _ </dev/null\n{command}",
                signal=controller.signal,
            )
            if how in ("kill", "abort"):
                seen = await read_until(made, task, b"up")
                made.kill(task.id) if how == "kill" else controller.abort()
            else:
                seen = b""
            await told.hears(task)
            note = told.of(task)
            assert note.ended
            assert note.read_status is note.status is expected.get("status", TaskStatus.FINISHED)
            assert note.reason is expected["reason"]
            assert (note.exit_code, note.signal) == (expected.get("exit_code"), expected.get("signal"))
            assert seen + note.stdout == f"{out}up\n".encode()
            assert err.encode().endswith(note.stderr)
            assert len(note.stderr) > 0 or seen
            later = made.read_output(task.id)
            assert (later.stdout.data, later.stderr.data, later.status) == (b"", b"", note.status)

    run(scenario())


@pytest.mark.parametrize("how", ENDS)
def test_done_once(how: str) -> None:
    """Each listener hears of each task exactly once, whatever ends it, also when several things do."""
    command, expected = ENDS[how]

    async def scenario() -> None:
        async with executor() as made:
            listeners = [Told(made), Told(made), Told(made)]
            controllers = [AbortController() for _ in range(10)]
            tasks = [
                start(made, f"read -r _ </dev/null; {command}", signal=controller.signal)
                for controller in controllers
            ]
            await started(*tasks)
            for task, controller in zip(tasks, controllers, strict=True):
                if how == "kill":
                    made.kill(task.id)
                    controller.abort()
                elif how == "abort":
                    controller.abort()
                    made.kill(task.id)
            for told in listeners:
                await told.hears(*tasks)
            for task, controller in zip(tasks, controllers, strict=True):
                controller.abort()
                assert made.kill(task.id) is False
                assert task.reason is expected["reason"]
            await asyncio.sleep(0.05)
            for told in listeners:
                assert sorted(told.ids) == sorted(task.id for task in tasks)

    run(scenario())


def test_done_isolated(caplog: pytest.LogCaptureFixture) -> None:
    """A listener that raises, kills, starts, or takes itself back harms neither executor nor others."""

    async def scenario() -> None:
        async with executor() as made:
            heard: list[str] = []
            more: list[BashTask] = []
            victim = start(made, "sleep 20")

            def raises(task: BashTask) -> None:
                heard.append("raises")
                msg = f"from the listener of {task.id}"
                raise ValueError(msg)

            def cancels(_task: BashTask) -> None:
                heard.append("cancels")
                raise asyncio.CancelledError

            def kills(task: BashTask) -> None:
                heard.append("kills")
                assert made.kill(task.id) is False
                if victim.status is TaskStatus.RUNNING:
                    made.kill(victim.id)

            def starts(_task: BashTask) -> None:
                heard.append("starts")
                if not more:
                    more.append(start(made, "echo more"))

            def leaves(_task: BashTask) -> None:
                heard.append("leaves")
                withdraw()

            made.on_task_done(raises)
            made.on_task_done(cancels)
            made.on_task_done(kills)
            made.on_task_done(starts)
            withdraw = made.on_task_done(leaves)
            last = Told(made)
            task = start(made, "echo hi")
            await last.hears(task, victim)
            await last.hears(*more)
            assert len(last.notes) == 3
            assert {name: heard.count(name) for name in set(heard)} == {
                "raises": 3,
                "cancels": 3,
                "kills": 3,
                "starts": 3,
                "leaves": 1,
            }
            assert last.of(more[0]).stdout == b"more\n"
            assert victim.reason is EndReason.KILLED
            assert (await run_command(made, "echo next")).stdout.data == b"next\n"

    run(scenario())
    errors = [record for record in caplog.records if record.name == "corral"]
    assert len(errors) == 6
    assert {record.levelname for record in errors} == {"ERROR"}
    assert caplog.text.count("from the listener of") == 3


def test_done_not_after_withdrawal() -> None:
    """A listener that was taken back hears of nothing any more."""

    async def scenario() -> None:
        async with executor() as made:
            first, last = Told(made), Told(made)
            task = start(made, "sleep 0.1")
            first.withdraw()
            first.withdraw()
            await last.hears(task)
            assert first.notes == []

    run(scenario())


# --- retention


def assert_unknown(made: BashExecutor, task: BashTask) -> None:
    assert made.get(task.id) is None
    assert made.owner_of(task.id) is None
    assert task not in made.list()
    for call in (made.read_output, made.kill):
        with pytest.raises(UnknownTaskError):
            call(task.id)


def test_retention() -> None:
    """The last `max_finished_tasks` are kept; the oldest end goes first, running ones never."""

    async def scenario() -> None:
        async with executor(max_finished_tasks=3) as made:
            told = Told(made)
            running = start(made, "sleep 20", owner="runner")
            tasks = []
            for number in range(8):
                tasks.append(start(made, f"echo {number}", owner=f"owner {number}"))
                await told.hears(tasks[-1])
            assert list(made.list()) == [running, *tasks[-3:]]
            assert [made.owner_of(task.id) for task in tasks[-3:]] == ["owner 5", "owner 6", "owner 7"]
            for task in tasks[:-3]:
                assert_unknown(made, task)
                assert task.exit_code == 0  # who holds the object still reads it
            # The order of the ends counts, not that of the starts.
            made.kill(running.id)
            await told.hears(running)
            assert list(made.list()) == [running, *tasks[-2:]]
            last = [start(made, "true") for _ in range(2)]
            await told.hears(*last)
            assert list(made.list()) == [running, *last]
            assert made.owner_of(running.id) == "runner"

    run(scenario())


@pytest.mark.parametrize("kept", [0, 1])
def test_retention_waits_for_the_listeners(kept: int) -> None:
    """Many ends at once do not make a task unknown before its listeners have read it."""

    async def scenario() -> None:
        async with executor(max_finished_tasks=kept) as made:
            told = Told(made)
            tasks = [start(made, f"sleep 0.1; echo {number}") for number in range(40)]
            await started(*tasks)
            time.sleep(0.3)  # they all end while the loop is away
            await until(lambda: all(task.status is not TaskStatus.RUNNING for task in tasks))
            await asyncio.sleep(0.05)
            assert sorted(told.ids) == sorted(task.id for task in tasks)
            assert [told.of(task).stdout for task in tasks] == [f"{n}\n".encode() for n in range(40)]
            assert len(made.list()) == kept

    run(scenario())


def files(directory: Path) -> list[Path]:
    return sorted(path for path in directory.rglob("*") if path.is_file())


def test_retention_removes_spills(tmp_path: Path) -> None:
    """The file of a dropped task goes with it; those of kept and of running tasks stay."""

    async def scenario() -> None:
        async with executor(max_finished_tasks=2, max_output_bytes=1_000, spill_dir=str(tmp_path)) as made:
            told = Told(made)
            flood = "head -c 5000 /dev/zero; head -c 6000 /dev/zero >&2"
            running = start(made, f"{flood}; echo up; sleep 20")
            await read_until(made, running, b"up")
            paths: dict[BashTaskId, list[Path]] = {}
            tasks = [running]
            for _ in range(4):
                tasks.append(start(made, flood))
                await told.hears(tasks[-1])
            for task in (tasks[0], *tasks[-2:]):
                read = made.read_output(task.id)
                paths[task.id] = [Path(str(stream.spill_path)) for stream in (read.stdout, read.stderr)]
                assert [path.stat().st_size for path in paths[task.id]] >= [5_000, 6_000]
            await run_command(made, "true")  # the warden has heard of what was dropped
            assert files(tmp_path) == sorted(path for both in paths.values() for path in both)
            made.kill(running.id)
            await told.hears(running)
            await run_command(made, "true")
            assert files(tmp_path) == sorted(paths[tasks[-1].id] + paths[running.id])

    run(scenario())
    assert list(tmp_path.iterdir()) == []
