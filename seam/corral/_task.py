"""A background task: the view that everybody has, and the record that only its executor has."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import PurePosixPath
from typing import TypeAlias, final

from ._errors import CorralError
from ._vocabulary import BashTaskId, EndReason, TaskStatus


class _State:
    """What a view and its record share."""

    def __init__(self, task_id: BashTaskId, command: str, workdir: PurePosixPath) -> None:
        self.id = task_id
        self.command = command
        self.workdir = workdir
        self.status = TaskStatus.RUNNING
        self.started_at: datetime | None = None
        self.ended_at: datetime | None = None
        self.exit_code: int | None = None
        self.signal: str | None = None
        self.reason: EndReason | None = None
        self.error: CorralError | None = None


@final
class BashTask:
    """A live, read-only view of one background task. It shows the present, not the moment it was handed out.

    `start`, `get`, `list` and listeners hand out the same object, so tasks compare by identity. It says
    nothing of the owner: `BashExecutor.owner_of` is the one way to that. Made by a `TaskRecord`, never
    directly.

    It may be read from any thread; whoever sees a final `status` sees the final values of everything else.
    """

    __slots__ = ("__weakref__", "_state")

    def __init__(self, state: _State) -> None:
        self._state = state

    @property
    def id(self) -> BashTaskId:
        return self._state.id

    @property
    def command(self) -> str:
        return self._state.command

    @property
    def workdir(self) -> PurePosixPath:
        return self._state.workdir

    @property
    def status(self) -> TaskStatus:
        """`RUNNING` from the moment `start` returns, also while the place is still being opened."""
        return self._state.status

    @property
    def started_at(self) -> datetime | None:
        """When bash was started, in UTC by this machine's clock. `None` until it is, and if it never was."""
        return self._state.started_at

    @property
    def ended_at(self) -> datetime | None:
        """When the task ended, in UTC by this machine's clock. `None` while it runs."""
        return self._state.ended_at

    @property
    def exit_code(self) -> int | None:
        """As in `BashRunResult`. `None` while it runs."""
        return self._state.exit_code

    @property
    def signal(self) -> str | None:
        """As in `BashRunResult`. `None` while it runs."""
        return self._state.signal

    @property
    def reason(self) -> EndReason | None:
        """What ended it. `None` while it runs, and for a task that could not be started."""
        return self._state.reason

    @property
    def error(self) -> CorralError | None:
        """Why it never ran, or how its place was lost. Set exactly when `status` is `FAILED`."""
        return self._state.error

    def __repr__(self) -> str:
        return f"<BashTask {self.id} {self.status} {self.command[:60]!r}>"


BashTaskListener: TypeAlias = Callable[[BashTask], None]
"""Told of a task that has ended: its status is final and `read_output` gives the rest of its output."""


@final
class TaskRecord:
    """The write side of a `BashTask`, for those who write an executor. It stays inside the executor.

    Like everything of an executor it is used from one thread. A task comes to a final status once: the method
    that tries a second time raises `RuntimeError` and changes nothing. So whichever of an exit, a kill and a
    lost place comes first decides, and `BashExecutor.notify_task_done` is called right after the method that
    succeeded.

    Times are aware `datetime`s, kept in UTC; left out, they are now. A naive one is a `ValueError`.
    """

    __slots__ = ("_state", "task")

    def __init__(self, *, task_id: BashTaskId, command: str, workdir: PurePosixPath) -> None:
        self._state = _State(task_id, command, workdir)
        self.task = BashTask(self._state)
        """The view to hand out; always the same object."""

    def started(self, at: datetime | None = None) -> None:
        """Bash is running. `RuntimeError` when that was said before, or when the task has ended."""
        state = self._state
        self._refuse_if_ended()
        if state.started_at is not None:
            msg = f"task {state.id}: started() was called twice"
            raise RuntimeError(msg)
        state.started_at = _utc(at)

    def finished(
        self,
        *,
        exit_code: int | None,
        signal: str | None,
        reason: EndReason,
        at: datetime | None = None,
    ) -> None:
        """It ran and has ended. At most one of `exit_code` and `signal` is not None.

        `RuntimeError` when `started` was never called: what never ran has failed, it has not finished.
        """
        state = self._state
        self._refuse_if_ended()
        if state.started_at is None:
            msg = f"task {state.id}: finished() before started(); a task that never ran ends by failed()"
            raise RuntimeError(msg)
        if exit_code is not None and signal is not None:
            msg = f"exit_code ({exit_code}) and signal ({signal}) exclude one another"
            raise ValueError(msg)
        ended_at = _utc(at)
        state.exit_code, state.signal, state.reason, state.ended_at = exit_code, signal, reason, ended_at
        state.status = TaskStatus.FINISHED

    def failed(
        self,
        *,
        error: CorralError,
        reason: EndReason | None = None,
        at: datetime | None = None,
    ) -> None:
        """It never ran, or its place went away (`reason` is then `EndReason.LOST`).

        A task that was killed, aborted or disposed before it ran has that as its `reason`; one that could not
        be started has `None`.
        """
        state = self._state
        self._refuse_if_ended()
        ended_at = _utc(at)
        state.error, state.reason, state.ended_at = error, reason, ended_at
        state.status = TaskStatus.FAILED

    def _refuse_if_ended(self) -> None:
        if self._state.status is not TaskStatus.RUNNING:
            msg = f"task {self._state.id} has already ended ({self._state.status})"
            raise RuntimeError(msg)

    def __repr__(self) -> str:
        return f"<TaskRecord of {self.task!r}>"


def _utc(at: datetime | None) -> datetime:
    if at is None:
        return datetime.now(UTC)
    if at.tzinfo is None:
        msg = f"at must be an aware datetime, not {at!r}"
        raise ValueError(msg)
    return at.astimezone(UTC)
