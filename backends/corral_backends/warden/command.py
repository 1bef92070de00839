"""One command as the host sees it: what the warden said of it so far, and how it ended."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Callable
from enum import IntEnum
from typing import Protocol

from corral import BashExecSpec, BashRunResult, CollectedOutput, EndReason, TaskRecord

from .connection import Connection, Conversation
from .output import StreamBuffer
from .protocol import Data, End, Exit, ExitKind, Failed, Gone, Message, ProtocolViolation, Spill, Started


class Stage(IntEnum):
    """How far a command has come. Only forward."""

    WAITING = 0
    """Not sent: its place is being opened."""
    SENT = 1
    STARTED = 2
    EXITED = 3
    """The leader is gone; output may still come."""
    ENDED = 4
    """All of its output is here. Leftovers may live."""
    GONE = 5
    """Nothing more can come."""


class Observer(Protocol):
    """The executor, as its commands see it. Called after the command has taken note itself."""

    def on_started(self, command: Command) -> None: ...
    def on_output(self, command: Command) -> None: ...
    def on_exited(self, command: Command) -> None: ...
    def on_ended(self, command: Command) -> None: ...
    def on_gone(self, command: Command) -> None: ...
    def on_failed(self, command: Command, failed: Failed) -> None: ...
    def on_lost(self, command: Command, why: str) -> None: ...


class Command(Conversation):
    """State of one command; a background task has a `record`.

    `cause` is the first thing that the host did to end it. `finished` is set once, by the executor's funnel,
    and then `error` is why there is no result."""

    def __init__(
        self, spec: BashExecSpec, observer: Observer, *, limit: int, record: TaskRecord | None = None
    ) -> None:
        self._observer = observer
        self.spec = spec
        self.record = record
        self.connection: Connection | None = None
        self.stage = Stage.WAITING
        self.streams = (StreamBuffer(limit), StreamBuffer(limit))
        self.owed = [0, 0]  # bytes received, per stream, for which no new credit was given yet
        self.credit_timer: asyncio.TimerHandle | None = None
        self.started_at = 0.0
        self.exit: Exit | None = None
        self.cause: EndReason | None = None
        self.survivors = 0
        self.error: Exception | None = None
        self.finished = False
        self.waiter: asyncio.Future[None] | None = None
        self.patience: asyncio.TimerHandle | None = None  # until it is started
        self.limit: asyncio.TimerHandle | None = None  # its timeout
        self.guard: asyncio.TimerHandle | None = None  # the bound on its end, once it was told to die
        self.forget_abort: Callable[[], None] | None = None

    # --- what the session calls

    def on_message(self, message: Message) -> bool:
        stage = self.stage
        if isinstance(message, Data) and Stage.STARTED <= stage <= Stage.EXITED:
            self.streams[message.stream].add(message.offset, message.data)
            self.owed[message.stream] += len(message.data)
            self._observer.on_output(self)
        elif isinstance(message, Spill) and Stage.STARTED <= stage <= Stage.EXITED:
            self.streams[message.stream].spilling(message.path, message.start)
        elif isinstance(message, Started) and stage is Stage.SENT:
            self.stage = Stage.STARTED
            self.started_at = time.monotonic()
            self._observer.on_started(self)
        elif isinstance(message, Exit) and (stage is Stage.STARTED or self._lost_at_once(message)):
            self.exit = message
            self.stage = Stage.EXITED
            self._observer.on_exited(self)
        elif isinstance(message, End) and stage is Stage.EXITED:
            self.streams[0].finish(message.stdout)
            self.streams[1].finish(message.stderr)
            self.stage = Stage.ENDED
            self._observer.on_ended(self)
        elif isinstance(message, Gone) and stage is Stage.ENDED:
            self.survivors = message.survivors
            self.stage = Stage.GONE
            self._observer.on_gone(self)
            return True
        elif isinstance(message, Failed) and stage is Stage.SENT:
            self.stage = Stage.GONE
            self._observer.on_failed(self, message)
            return True
        else:
            msg = f"{type(message).__name__} for a command that is {stage.name}"
            raise ProtocolViolation(msg)
        return False

    def _lost_at_once(self, message: Exit) -> bool:
        """Its keeper was killed before it could say that the leader runs."""
        return self.stage is Stage.SENT and message.kind is ExitKind.LOST

    def on_lost(self, why: str) -> None:
        self.stage = Stage.GONE
        self._observer.on_lost(self, why)

    def cancel_timers(self) -> None:
        for timer in (self.patience, self.limit, self.guard, self.credit_timer):
            if timer is not None:
                timer.cancel()
        self.patience = self.limit = self.guard = self.credit_timer = None

    # --- how it ended

    @property
    def supervisor_lost(self) -> bool:
        """The warden could not see the leader's exit: the command has killed what watched it."""
        return self.exit is not None and self.exit.kind is ExitKind.LOST

    @property
    def reason(self) -> EndReason:
        if self.cause is not None:
            return self.cause
        if self.exit is None or self.exit.kind is ExitKind.LOST:
            return EndReason.LOST
        return EndReason.EXITED if self.exit.kind is ExitKind.EXITED else EndReason.SIGNALLED

    @property
    def exit_code(self) -> int | None:
        return self.exit.value if self.exit and self.exit.kind is ExitKind.EXITED else None

    @property
    def signal(self) -> str | None:
        return signal_name(self.exit.value) if self.exit and self.exit.kind is ExitKind.SIGNALLED else None

    def collected(self) -> tuple[CollectedOutput, CollectedOutput]:
        return self.streams[0].collected(), self.streams[1].collected()

    def result(self) -> BashRunResult:
        reason = self.reason
        if self.exit is not None and not self.supervisor_lost:
            duration_ms = self.exit.wall_us / 1000
        else:
            duration_ms = (time.monotonic() - self.started_at) * 1000
        stdout, stderr = self.collected()
        return BashRunResult(
            exit_code=self.exit_code,
            signal=self.signal,
            timed_out=reason is EndReason.TIMED_OUT,
            aborted=reason is EndReason.ABORTED,
            timeout_ms=self.spec.timeout_ms,
            stdout=stdout,
            stderr=stderr,
            duration_ms=duration_ms,
            reason=reason,
            survivors=self.survivors,
        )


_FIRST_REALTIME = 34
"""SIGRTMIN as glibc and musl number it: the kernel's 32 and 33 belong to them."""


def signal_name(number: int) -> str:
    """`SIGKILL` for 9. Real-time signals have no names of their own but SIGRTMIN's: `SIGRTMIN+3`."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"SIGRTMIN+{number - _FIRST_REALTIME}" if number > _FIRST_REALTIME else f"SIG{number}"
