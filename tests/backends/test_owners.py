"""Owner tokens: kept verbatim, told only to who asks for them, and never seen by the place, logs or reprs."""

from __future__ import annotations

import asyncio
import logging
import os
import traceback
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

import pytest

from corral import BashExecRequest, BashTaskId, Context, OwnerToken, PlaceLostError, TaskStatus
from corral_backends.places.local import LocalExecutor, LocalPlace
from corral_backends.warden import DuplexStream, Receiver, WardenConfig, WardenExecutor
from tests.support.aio import executor, run, run_command, until
from tests.support.processes import descendants
from tests.support.tasks import Told, read_until, start, started

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from corral import BashExecutor, BashTask

pytestmark = pytest.mark.backend("local")

TOKENS = {
    "empty": "",
    "space": " ",
    "newlines": "\n\r\n a\tb \n",
    "nul": "a\0b",
    "unicode": "é \u202e\U0001f600 e\u0301 \ud800",
    "shell": "$(touch x) `id` '\"\\; # \x1b[31m",
    "none-like": "None",
    "megabyte": "x€" * 500_000,
}

SECRET = "owner-cd4f6e19b0a7-token"
"""What must not turn up anywhere."""


@pytest.mark.parametrize("token", TOKENS.values(), ids=TOKENS)
def test_owner_verbatim(token: str) -> None:
    """`owner_of` gives the very token: while opening, while running, in a listener, and after the end."""

    async def scenario() -> None:
        async with executor() as made:
            heard: list[str | None] = []
            made.on_task_done(lambda task: heard.append(made.owner_of(task.id)))
            task = start(made, "sleep 0.05", owner=OwnerToken(token))
            assert made.owner_of(task.id) == token
            await started(task)
            assert made.owner_of(task.id) == token
            await until(lambda: bool(heard))
            assert heard == [token]
            assert made.owner_of(task.id) == token

    run(scenario())


def test_owner_of_failed_and_killed_tasks(tmp_path: Path) -> None:
    """However a task ends, its owner stays."""

    async def scenario() -> None:
        async with executor() as made:
            told = Told(made)
            tasks = [
                start(made, "true", owner=OwnerToken("missing"), workdir=tmp_path / "missing"),
                start(made, "sleep 20", owner=OwnerToken("killed")),
                start(made, "kill -9 $PPID; sleep 20", owner=OwnerToken("lost")),
            ]
            await started(tasks[1])
            made.kill(tasks[1].id)
            await told.hears(*tasks)
            assert [made.owner_of(task.id) for task in tasks] == ["missing", "killed", "lost"]
        assert [made.owner_of(task.id) for task in tasks] == ["missing", "killed", "lost"]

    run(scenario())


def test_owner_none() -> None:
    """No owner and no such task both read None; an empty token is neither."""

    async def scenario() -> None:
        async with executor() as made:
            without, empty = start(made, "true"), start(made, "true", owner=OwnerToken(""))
            assert made.owner_of(without.id) is None
            assert made.owner_of(empty.id) == ""
            assert made.owner_of(BashTaskId("unknown")) is None

    run(scenario())


def test_owners_are_apart() -> None:
    """Many tasks with and without owners, started together: each has its own."""

    async def scenario() -> None:
        async with executor() as made:
            told = Told(made)
            owners = [None if n % 5 == 0 else OwnerToken(f"owner {n % 7}") for n in range(60)]
            tasks = [start(made, "true", owner=owner) for owner in owners]
            assert [made.owner_of(task.id) for task in tasks] == owners
            await told.hears(*tasks)
            assert [made.owner_of(task.id) for task in tasks] == owners

    run(scenario())


def test_owner_survives_its_consumer() -> None:
    """Scopes come and go (a reload); the executor has the tasks and their owners all the while."""

    async def scenario() -> None:
        heard: list[BashTask] = []
        async with Context() as context:
            made = LocalExecutor()
            context.provide(made)
            async with context.scope("consumer") as scope:
                scope.on_task_done(heard.append)
                task = start(made, "sleep 0.2; echo hi", owner=OwnerToken("consumer"))
            assert made.owner_of(task.id) == "consumer"
            async with context.scope("consumer, reloaded") as scope:
                scope.on_task_done(heard.append)
                await until(lambda: task.status is TaskStatus.FINISHED)
                await asyncio.sleep(0.02)
                assert made.owner_of(task.id) == "consumer"
                assert heard == [task]

    run(scenario())


# --- never seen


def environments_and_arguments() -> bytes:
    """Of everything below this process: wardens, keepers, commands."""
    found = b""
    for process in descendants(os.getpid()):
        for name in ("environ", "cmdline", "comm"):
            try:
                found += Path("/proc", str(process.pid), name).read_bytes()
            except OSError:
                continue  # gone, or not ours to read: keepers are not dumpable
    return found


def test_owner_is_not_in_the_place(tmp_path: Path) -> None:
    """Neither environment nor arguments of the whole tree have it; nor has any file that corral writes."""

    async def scenario() -> None:
        async with executor(spill_dir=str(tmp_path), max_output_bytes=100) as made:
            # The control: what does reach the place is seen.
            control = start(
                made, "env; echo $0 $@; sleep 20; : in-the-command", env={"CONTROL": "in-the-environment"}
            )
            task = start(made, "env; echo $0 $@; seq 1000; echo up; sleep 20", owner=OwnerToken(SECRET))
            await read_until(made, task, b"up")
            await started(control)
            seen = environments_and_arguments()
            assert b"in-the-environment" in seen
            assert b"in-the-command" in seen
            assert SECRET.encode() not in seen
            spill = made.read_output(task.id).stdout.spill_path
            assert spill is not None
            written = b"".join([chunk async for chunk in made.fetch(spill)])
            assert b"PATH=" in written
            assert SECRET.encode() not in written

    run(scenario())


class Recorder(DuplexStream):
    """A stream that keeps what goes to the warden."""

    def __init__(self, inner: DuplexStream, sent: bytearray) -> None:
        self._inner = inner
        self._sent = sent

    def start(self, receiver: Receiver) -> None:
        self._inner.start(receiver)

    def write(self, data: bytes) -> None:
        self._sent += data
        self._inner.write(data)

    def close(self) -> None:
        self._inner.close()


class RecordedPlace(LocalPlace):
    def __init__(self) -> None:
        super().__init__()
        self.sent = bytearray()

    async def open(self) -> DuplexStream:
        return Recorder(await super().open(), self.sent)


def test_owner_is_not_sent() -> None:
    """Nothing that goes to the place over the stream contains it."""

    async def scenario() -> bytes:
        place = RecordedPlace()
        async with WardenExecutor(place, WardenConfig(workdir=PurePosixPath("/"))) as made:
            told = Told(made)
            task = start(made, "echo the-command", owner=OwnerToken(SECRET), env={"A": "the-environment"})
            await told.hears(task)
            spec = made.resolve(BashExecRequest(command="true", owner=OwnerToken(SECRET)))
            await made.run(spec)
            return bytes(place.sent)

    sent = run(scenario())
    assert b"the-command" in sent
    assert b"the-environment" in sent
    assert SECRET.encode() not in sent


@asynccontextmanager
async def used_in_every_way(tmp_path: Path) -> AsyncIterator[tuple[BashExecutor, list[object]]]:
    """An executor with owned tasks that end in all ways, and everything public that came of it."""
    owner = OwnerToken(SECRET)
    async with executor() as made:
        told = Told(made)

        def raises(task: BashTask) -> None:
            msg = f"a listener, of {task!r}"
            raise ValueError(msg)

        made.on_task_done(raises)
        missing = tmp_path / "missing"
        commands = {"exit": "exit 3", "lost": "sleep 0.1; kill -9 $PPID; sleep 9", "killed": "sleep 20"}
        request = BashExecRequest(command="true", owner=owner, timeout_ms=10_000)
        spec = made.resolve(request)
        tasks = [start(made, command, owner=owner) for command in commands.values()]
        tasks.append(start(made, "true", owner=owner, workdir=missing))
        await started(tasks[2])
        made.kill(tasks[2].id)
        await told.hears(*tasks)
        seen: list[object] = [made, request, spec, replace(spec, command="false"), owner.__class__, *tasks]
        seen += [made.list(), made.read_output(tasks[0].id), told.notes, await made.run(spec)]
        for wrong in ({"workdir": missing}, {"command": "kill -9 $PPID; sleep 9"}, {"timeout_ms": 0}):
            try:
                await made.run(made.resolve(replace(request, **wrong)))
            except Exception as error:
                seen += [error, error.args, *traceback.format_exception(error)]
        with pytest.raises(TypeError) as caught:
            made.start(request)  # type: ignore[arg-type]
        seen += [caught.value, *traceback.format_exception(caught.value)]
        # The warden dies with owned tasks in it.
        last = start(made, "kill -9 $(read -r _ _ _ p _ </proc/$PPID/stat; echo $p); sleep 9", owner=owner)
        await told.hears(last)
        assert isinstance(last.error, PlaceLostError)
        seen += [last, last.error, *asyncio.all_tasks()]
        start(made, "sleep 20", owner=owner)
        yield made, seen
    seen += [made, made.list()]


def test_owner_is_in_no_repr(tmp_path: Path) -> None:
    """Neither repr nor str of anything public, nor any error's traceback, shows it."""

    async def scenario() -> list[object]:
        async with used_in_every_way(tmp_path) as (_, seen):
            pass
        return seen

    seen = run(scenario())
    shown = "\n".join(f"{thing!r}\n{thing}" for thing in seen)
    assert "missing" in shown  # the control: the command's other fields are shown
    assert SECRET not in shown


def test_owner_is_in_no_log(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """All loggers at DEBUG, asyncio in its debug mode: whatever goes wrong, the log does not show it."""
    caplog.set_level(logging.DEBUG)

    async def scenario() -> None:
        loop = asyncio.get_running_loop()
        loop.set_debug(True)
        loop.slow_callback_duration = 0  # every callback is logged, with its arguments
        async with used_in_every_way(tmp_path):
            pass

    run(scenario())
    assert "a listener, of <BashTask" in caplog.text  # the control: logs are seen
    assert "Executing <Handle" in caplog.text
    assert SECRET not in caplog.text


def test_owner_changes_nothing() -> None:
    """With whatever token, a command behaves as without."""
    command = "env | sort | grep -v ^_=; pwd; cd /proc/$$/fd; echo *; echo $0 $# $-; exit 3"

    async def scenario() -> None:
        async with executor() as made:
            plain = await run_command(made, command)
            told = Told(made)
            tasks = [start(made, command, owner=OwnerToken(token)) for token in TOKENS.values()]
            await told.hears(*tasks)
            assert {told.of(task).stdout for task in tasks} == {plain.stdout.data}
            assert {task.exit_code for task in tasks} == {plain.exit_code} == {3}

    run(scenario())
