"""Every error of corral, and who caused it.

::

    CorralError
    ├── PlaceError                  infrastructure: the place where commands run, or the way to it
    │   ├── PlaceOpenError          it could not be made ready
    │   ├── PlaceLostError          it went away while it was in use
    │   ├── UnsupportedPlaceError   it is of a kind that cannot serve
    │   ├── WorkdirError            it has no such working directory
    │   ├── ShellNotFoundError      it has no bash
    │   └── SpawnError              it could not make a process
    ├── AbortedBeforeStartError     the caller aborted before anything was started
    ├── ExecutorDisposedError       the caller used an executor after disposing it
    ├── UnknownTaskError            the caller named a task that this executor does not know (a LookupError)
    ├── ConfigError                 whoever wrote the configuration (a ValueError)
    └── DuplicateServiceError       the program provided a second executor where there can be one

What a *command* does is never an error: a nonzero exit, a death by signal, a timeout and an abort are
results. A wrong value in a call is a plain `ValueError` or `TypeError` that names the field. Use from another
event loop, or in a forked child, is a `RuntimeError`.

`str(error)` is one line: what happened, where, to what. `error.remedy` is what to do about it, when that is
known; a traceback shows it as a note. All errors survive `pickle` and `copy` with their attributes.
"""

from __future__ import annotations

import copyreg
from typing import ClassVar

from ._abort import AbortReason
from ._vocabulary import BashTaskId, CollectedOutput


class CorralError(Exception):
    """Base of all errors of corral. `message` is made one line: line breaks in it become spaces."""

    remedy: str | None
    """What to do about it, a sentence for a person. `None` when there is nothing useful to say."""

    def __init__(self, message: str, *, remedy: str | None = None) -> None:
        super().__init__(" ".join(message.splitlines()))
        self.remedy = remedy
        if remedy is not None:
            self.add_note(f"Remedy: {remedy}")

    def __reduce__(self) -> tuple[object, ...]:
        # The inherited way calls the class with `args` alone, which required keywords of a subclass would
        # break.
        return copyreg.__newobj__, (type(self), *self.args), self.__dict__  # type: ignore[attr-defined]


class PlaceError(CorralError):
    """Infrastructure failed: the place, or the way to it. Never caused by what a command did.

    Backends raise it, or one of its subclasses, from `run` and from opening a place; a background task that
    fails carries it as `BashTask.error`.
    """

    default_stage: ClassVar[str] = "place"

    stage: str
    """What was being done, a short word of the backend's choice: `"connect"`, `"pull"`, `"workdir"`."""

    retryable: bool | None
    """Whether the same call may succeed later with nothing changed. `None`: not known."""

    def __init__(
        self,
        message: str,
        *,
        stage: str | None = None,
        remedy: str | None = None,
        retryable: bool | None = None,
    ) -> None:
        super().__init__(message, remedy=remedy)
        self.stage = self.default_stage if stage is None else stage
        self.retryable = retryable


class PlaceOpenError(PlaceError):
    """The place could not be made ready: opening failed, or took longer than `open_timeout_ms`.

    No command was started. The next command tries to open it again.
    """

    default_stage = "open"


class PlaceLostError(PlaceError):
    """The place went away in mid-command: link cut, container removed, machine gone.

    What the command did, and whether it is over, is not known; it was not run again. `stdout` and `stderr`
    hold what had arrived, or `None` where there is nothing to tell (as when `dispose` could not reach the
    place).
    """

    default_stage = "session"

    stdout: CollectedOutput | None
    stderr: CollectedOutput | None

    def __init__(
        self,
        message: str,
        *,
        stdout: CollectedOutput | None = None,
        stderr: CollectedOutput | None = None,
        stage: str | None = None,
        remedy: str | None = None,
        retryable: bool | None = None,
    ) -> None:
        super().__init__(message, stage=stage, remedy=remedy, retryable=retryable)
        self.stdout = stdout
        self.stderr = stderr


class UnsupportedPlaceError(PlaceError):
    """The place is of a kind that cannot serve: its architecture, its system, or a feature that it lacks."""

    default_stage = "open"

    def __init__(
        self,
        message: str,
        *,
        stage: str | None = None,
        remedy: str | None = None,
        retryable: bool | None = False,
    ) -> None:
        super().__init__(message, stage=stage, remedy=remedy, retryable=retryable)


class WorkdirError(PlaceError):
    """The working directory is missing, is no directory, or may not be entered. Nothing was run."""

    default_stage = "workdir"

    workdir: str
    """The directory, as a path of the place."""

    def __init__(
        self,
        message: str,
        *,
        workdir: str,
        stage: str | None = None,
        remedy: str | None = None,
        retryable: bool | None = False,
    ) -> None:
        super().__init__(message, stage=stage, remedy=remedy, retryable=retryable)
        self.workdir = workdir


class ShellNotFoundError(PlaceError):
    """There is no bash in the place. Nothing was run."""

    default_stage = "shell"

    def __init__(
        self,
        message: str,
        *,
        stage: str | None = None,
        remedy: str | None = None,
        retryable: bool | None = False,
    ) -> None:
        super().__init__(message, stage=stage, remedy=remedy, retryable=retryable)


class SpawnError(PlaceError):
    """The place could not make a process (`EAGAIN`, `ENOMEM`, `E2BIG`, ...). Nothing was run."""

    default_stage = "spawn"

    errno: int | None
    """The number of the error in the place, which need not be one of this machine. `None`: not known."""

    def __init__(
        self,
        message: str,
        *,
        errno: int | None = None,
        stage: str | None = None,
        remedy: str | None = None,
        retryable: bool | None = None,
    ) -> None:
        super().__init__(message, stage=stage, remedy=remedy, retryable=retryable)
        self.errno = errno


class AbortedBeforeStartError(CorralError):
    """The spec's signal was aborted before the command was started, or while the place was being opened.

    Caused by the caller. Nothing was run, so there is no result to give. `reason` is that of the signal.
    """

    reason: BaseException | str | None

    def __init__(
        self,
        message: str = "aborted before the command was started; nothing was run",
        *,
        reason: AbortReason = None,
    ) -> None:
        super().__init__(message if reason is None else f"{message}: {reason}")
        self.reason = reason


class ExecutorDisposedError(CorralError):
    """The executor has been disposed, or was disposed before the command could be started. Nothing was run.

    Caused by the caller: what outlives an executor must not use it any more.
    """

    def __init__(
        self, message: str = "this executor has been disposed", *, remedy: str | None = None
    ) -> None:
        super().__init__(message, remedy=remedy)


class UnknownTaskError(CorralError, LookupError):
    """No task of this id: it was never started by this executor, or its finished record was dropped."""

    task_id: BashTaskId

    def __init__(self, task_id: BashTaskId) -> None:
        super().__init__(
            f"unknown task {task_id!r}: never started here, or ended so long ago that its record was dropped"
        )
        self.task_id = task_id


class ConfigError(CorralError, ValueError):
    """A configuration names an unknown backend or key, or has a value of the wrong type.

    `entry` is the entry it was found in, `key` the key inside that entry, and `suggestion` the nearest name
    that would have been valid; each is `None` where there is none.
    """

    entry: str | None
    key: str | None
    suggestion: str | None

    def __init__(
        self,
        message: str,
        *,
        entry: str | None = None,
        key: str | None = None,
        suggestion: str | None = None,
        remedy: str | None = None,
    ) -> None:
        super().__init__(message, remedy=remedy)
        self.entry = entry
        self.key = key
        self.suggestion = suggestion


class DuplicateServiceError(CorralError):
    """A context was given a second executor. One context has one; make a context of its own for the other."""
