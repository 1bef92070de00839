"""Background tasks in a test: starting them, waiting for them, and listeners that take notes."""

from __future__ import annotations

import os
import shlex
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from corral import BashExecRequest, TaskStatus
from tests.support.aio import until
from tests.support.driver import Stage
from tests.support.processes import descendants

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from corral import BashExecutor, BashTask, BashTaskId, EndReason

__all__ = ["Note", "Told", "census", "read_until", "slow_warden", "start", "started"]


def start(on: BashExecutor, command: str, **fields: Any) -> BashTask:
    """Starts `command` in the background; `fields` are those of a `BashExecRequest`."""
    return on.start(on.resolve(BashExecRequest(command=command, **fields)))


async def started(*tasks: BashTask, timeout: float = 10) -> None:
    """Waits until the leader of each task runs (or the task is over)."""
    await until(
        lambda: all(task.started_at is not None or task.status is not TaskStatus.RUNNING for task in tasks),
        timeout=timeout,
    )


async def read_until(on: BashExecutor, task: BashTask, mark: bytes, *, timeout: float = 10) -> bytes:
    """Reads the stdout of `task` until it contains `mark`; returns all that was read."""
    seen = b""

    def found() -> bool:
        nonlocal seen
        seen += on.read_output(task.id).stdout.data
        return mark in seen

    await until(found, timeout=timeout)
    return seen


@dataclass(frozen=True, slots=True, kw_only=True)
class Note:
    """What a listener saw of a task in its first statement."""

    task: BashTask
    status: TaskStatus
    reason: EndReason | None
    exit_code: int | None
    signal: str | None
    ended: bool
    """Whether `ended_at` was set."""
    stdout: bytes
    stderr: bytes
    read_status: TaskStatus


class Told:
    """A listener: reads everything that there is to read of a task, at once, and notes it."""

    def __init__(self, on: BashExecutor) -> None:
        self._on = on
        self.notes: list[Note] = []
        self.withdraw = on.on_task_done(self)

    def __call__(self, task: BashTask) -> None:
        read = self._on.read_output(task.id)
        self.notes.append(
            Note(
                task=task,
                status=task.status,
                reason=task.reason,
                exit_code=task.exit_code,
                signal=task.signal,
                ended=task.ended_at is not None,
                stdout=read.stdout.data,
                stderr=read.stderr.data,
                read_status=read.status,
            )
        )

    @property
    def ids(self) -> Sequence[BashTaskId]:
        """Of whom it was told, in that order."""
        return [note.task.id for note in self.notes]

    def of(self, task: BashTask) -> Note:
        """The one note of `task`; fails the test when there is none, or more than one."""
        (note,) = (note for note in self.notes if note.task is task)
        return note

    async def hears(self, *tasks: BashTask, timeout: float = 10) -> None:
        """Waits until it was told of all of them."""
        await until(lambda: {task.id for task in tasks} <= set(self.ids), timeout=timeout)


def census(*, directory: Path | None = None) -> dict[str, Any]:
    """What this process holds now: descriptors, threads, asyncio tasks, children, files in `directory`."""
    return {
        **Stage.footprint(),
        "children": [str(process) for process in descendants(os.getpid())],
        "files": sorted(str(path) for path in directory.rglob("*")) if directory is not None else [],
    }


def slow_warden(directory: Path, warden: Path, seconds: float) -> str:
    """A program that becomes the warden after a while, for the environment variable CORRAL_WARDEN."""
    script = directory / "corral-warden-slow"
    script.write_text(f'#!/bin/sh\nsleep {seconds}\nexec {shlex.quote(str(warden))} "$@"\n')
    script.chmod(0o755)
    return str(script)
