"""The words of the seam: what is asked of an executor, and what it answers.

All times are milliseconds, all sizes and offsets are bytes. Output is bytes; `text` is a view of it. All
values but `BashTask` are immutable. Paths are paths of the place, hence POSIX, whatever this machine is.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import PurePath, PurePosixPath
from reprlib import Repr
from types import MappingProxyType
from typing import NewType

from ._abort import AbortSignal

OwnerToken = NewType("OwnerToken", str)
"""Whose a task is, in the words of the consumer. An executor stores it, returns it, and never looks at it."""

BashTaskId = NewType("BashTaskId", str)
"""The id of one background task. Unguessable and never reused."""


_repr = Repr()
_repr.maxother = 200


def _short(data: bytes) -> str:
    """`repr` without the middle, if it is long: output can be of any size, and a log line should not be."""
    return _repr.repr(data)


class EndReason(StrEnum):
    """What ended a command. The first cause wins; an exit that was already seen wins over a later kill."""

    EXITED = "exited"
    """It exited by itself, with any status."""
    SIGNALLED = "signalled"
    """A signal ended it that this executor did not send."""
    TIMED_OUT = "timed_out"
    ABORTED = "aborted"
    """Its abort signal, or the cancellation of the coroutine that awaited it."""
    KILLED = "killed"
    """`BashExecutor.kill`."""
    DISPOSED = "disposed"
    """The executor was disposed."""
    OUT_OF_MEMORY = "out_of_memory"
    """The memory limit of the place."""
    LOST = "lost"
    """The place went away; what became of the command is not known."""


class TaskStatus(StrEnum):
    """Where a background task stands. `FINISHED` and `FAILED` are final."""

    RUNNING = "running"
    """Started, or about to be: `BashTask.started_at` tells."""
    FINISHED = "finished"
    """It ran and ended, in whatever way; `BashTask.reason` tells."""
    FAILED = "failed"
    """It never ran, or its place went away; `BashTask.error` tells."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BashExecRequest:
    """What a caller asks for. `BashExecutor.resolve` checks it and fills in what was left out.

    `repr` leaves out `env`, `owner` and `stdin`, which may hold secrets.
    """

    command: str
    """The text that `bash -c` is given, unchanged. No NUL."""
    workdir: str | PurePath | None = None
    """Where to run it. Relative: to the executor's own. `None`: the executor's own."""
    timeout_ms: int | None = None
    """Limit of a foreground run, above 0; more than the executor's maximum counts as that maximum."""
    signal: AbortSignal | None = None
    """Aborting it ends the command."""
    owner: OwnerToken | None = field(default=None, repr=False)
    """Whose the task is. `""` is an owner like any other; `None` is none."""
    env: Mapping[str, str] | None = field(default=None, repr=False)
    """Environment variables on top of those that the executor sets."""
    stdin: bytes | None = field(default=None, repr=False)
    """What the command reads. `None` and `b""` alike: it is at the end at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BashExecSpec:
    """A request with every field decided. Made by `BashExecutor.resolve`; taken by `run` and `start`.

    No field has a default, so that a forgotten owner is a visible `None`. Equal requests give equal specs.
    `repr` leaves out `env`, `owner` and `stdin`. Not hashable.
    """

    command: str
    workdir: PurePosixPath
    timeout_ms: int
    signal: AbortSignal | None
    owner: OwnerToken | None = field(repr=False)
    env: Mapping[str, str] = field(repr=False)
    """What the request added, copied and read-only."""
    stdin: bytes | None = field(repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "env", MappingProxyType(dict(self.env)))


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectedOutput:
    """One output stream of one run: the tail that was kept, and where the rest went.

    `ValueError` when the numbers do not add up.
    """

    data: bytes
    """The last `total_bytes - dropped_bytes` bytes of the stream, exactly as they were written."""
    total_bytes: int
    """How much the command wrote."""
    dropped_bytes: int
    """How much of it, from its beginning, is missing in `data`."""
    spill_path: PurePosixPath | None
    """A file of the place with the full stream, when more came than was kept and a file could be written.

    Readers treat it as untrusted: a command of the same user can alter it. `BashExecutor.fetch` reads it.
    """
    spill_start: int
    """The offset in the stream at which the file begins to hold data: above 0 once its own bound was reached.

    Offsets in the file are offsets in the stream in any case; what is before this one is a hole. 0 without a
    file.
    """

    def __post_init__(self) -> None:
        if self.dropped_bytes < 0 or self.dropped_bytes + len(self.data) != self.total_bytes:
            msg = (
                f"total_bytes ({self.total_bytes}) must be dropped_bytes ({self.dropped_bytes}) "
                f"plus the length of data ({len(self.data)})"
            )
            raise ValueError(msg)
        if not 0 <= self.spill_start <= self.total_bytes:
            msg = f"spill_start ({self.spill_start}) must be between 0 and total_bytes ({self.total_bytes})"
            raise ValueError(msg)

    def __repr__(self) -> str:
        return (
            f"CollectedOutput(data={_short(self.data)}, "
            f"total_bytes={self.total_bytes}, dropped_bytes={self.dropped_bytes}, "
            f"spill_path={self.spill_path!r}, spill_start={self.spill_start})"
        )

    @property
    def text(self) -> str:
        """`data` as UTF-8, with U+FFFD for what is not UTF-8.

        A character that the cut went through is left out: `text` never begins inside one.
        """
        if not self.dropped_bytes:
            return self.data.decode(errors="replace")
        start = 0
        # A character is at most four bytes, so what remains of a cut one is at most three continuation bytes.
        while start < min(3, len(self.data)) and self.data[start] & 0xC0 == 0x80:
            start += 1
        return self.data[start:].decode(errors="replace")

    @property
    def truncated(self) -> bool:
        """Whether something is missing in `data`."""
        return self.dropped_bytes > 0


@dataclass(frozen=True, slots=True, kw_only=True)
class BashRunResult:
    """How a foreground run ended. Any end of a command is a result, never an exception."""

    exit_code: int | None
    """The status of bash, 0 to 255. `None` when a signal ended it or its end was not seen."""
    signal: str | None
    """The name of the signal that ended bash (`"SIGKILL"`), else `None`. Excludes an `exit_code`."""
    timed_out: bool
    """The same as `reason == EndReason.TIMED_OUT`."""
    aborted: bool
    """The same as `reason == EndReason.ABORTED`."""
    timeout_ms: int
    """The limit that applied."""
    stdout: CollectedOutput
    stderr: CollectedOutput
    duration_ms: float
    """From the start of bash to its end; opening the place does not count."""
    reason: EndReason
    survivors: int
    """How many processes of it a kill could not reach. 0, but for those that took on other credentials."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamRead:
    """What one stream of a task brought since the previous read. Offsets count from the stream's beginning.

    `ValueError` when the numbers do not add up.
    """

    data: bytes
    """`stream[start:end]`, exactly as it was written."""
    text: str
    """The same as UTF-8, but for an incomplete character at the end, which the next read brings whole.

    What is not UTF-8 is U+FFFD; so is a character that the end of the stream, or a gap, has cut.
    """
    start: int
    end: int
    dropped_bytes: int
    """How much between the end of the previous read and `start` was lost to the bound on memory."""
    spill_path: PurePosixPath | None
    """As in `CollectedOutput`: where the full stream is, if it was more than is kept in memory."""
    spill_start: int
    """As in `CollectedOutput`: what is before this offset is not in the file any more. 0 without a file."""

    def __post_init__(self) -> None:
        if self.end - self.start != len(self.data):
            msg = f"end ({self.end}) must be start ({self.start}) plus the length of data ({len(self.data)})"
            raise ValueError(msg)
        if not 0 <= self.dropped_bytes <= self.start:
            msg = f"dropped_bytes ({self.dropped_bytes}) must be between 0 and start ({self.start})"
            raise ValueError(msg)

    def __repr__(self) -> str:
        return (
            f"StreamRead(data={_short(self.data)}, start={self.start}, end={self.end}, "
            f"dropped_bytes={self.dropped_bytes}, spill_path={self.spill_path!r})"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class BashTaskRead:
    """What a task brought since the previous read; no byte is delivered twice."""

    stdout: StreamRead
    stderr: StreamRead
    lossy: bool
    """Whether this read comes after a gap in either stream: a `dropped_bytes` is above 0."""
    status: TaskStatus
    """The task's status at the time of this read. When it is final, the next read brings nothing."""
