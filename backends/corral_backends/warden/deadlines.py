"""Every bound that the host keeps by itself, whatever the place says or fails to say."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from corral import EndReason

from . import protocol
from .command import Command, Stage
from .connection import Connection

KILL_MARGIN_S = 0.95
"""The warden answers a kill within the grace and 0.9 s; past the grace and this, the host stops waiting."""

OUTPUT_PATIENCE_S = 5.0
"""The output is complete 50 ms after the exit, unless a slow disk holds up the spill file, which may take its
time. Past this, the warden has to show that it lives."""
OUTPUT_HURRY_S = 0.3
"""The same once something was to end the command."""

START_S = 10.0
START_BYTES_PER_S = 50_000
"""A command that has not been started after this time, and the time that its text may take on a slow link,
makes its warden suspect."""


class Deadlines:
    """Sets the timers of commands; `Command.cancel_timers` takes them back.

    `end` begins to end a command for a cause, `lose` gives it up for a reason, `suspect` looks at a warden
    that owes an answer: the executor and its session."""

    def __init__(
        self,
        *,
        grace_s: float,
        end: Callable[[Command, EndReason], object],
        lose: Callable[[Command, str], object],
        suspect: Callable[[Connection], object],
    ) -> None:
        self.kill_s = grace_s + KILL_MARGIN_S
        """From the kill of a command to the end of waiting for it."""
        self._end = end
        self._lose = lose
        self._suspect = suspect

    def sent(self, command: Command, connection: Connection, size: int) -> None:
        """START is on its way, with a command and stdin of `size` together."""
        patience = START_S + size / START_BYTES_PER_S
        command.patience = _later(patience, self._not_started, command, connection)

    def _not_started(self, command: Command, connection: Connection) -> None:
        # The warden may be at fault, or it works and something below it hangs: a bash on a dead mount, say.
        self._suspect(connection)
        if command.record is None and not command.finished:
            self._set_limit(command)

    def started(self, command: Command) -> None:
        """The leader runs, and with it the time that it has. Background tasks have all the time."""
        if command.patience is not None:
            command.patience.cancel()
            command.patience = None
        if command.record is None and command.cause is None:
            self._set_limit(command)

    def _set_limit(self, command: Command) -> None:
        if command.limit is not None:
            command.limit.cancel()
        command.limit = _later(command.spec.timeout_ms / 1000, self._end, command, EndReason.TIMED_OUT)

    def killed(self, command: Command, connection: Connection) -> None:
        """KILL is on its way: the tree must be gone in time."""
        self._guard(command, connection, self.kill_s)

    def _guard(self, command: Command, connection: Connection, seconds: float) -> None:
        if command.guard is not None:
            command.guard.cancel()
        command.guard = _later(seconds, self._not_gone, command, connection, connection.unsent)

    def _not_gone(self, command: Command, connection: Connection, unsent: int) -> None:
        if command.finished:
            return
        if command.stage is Stage.SENT and 0 < connection.unsent < unsent:
            # The KILL is still queued behind the command's own long text, which is on its way.
            self._guard(command, connection, KILL_MARGIN_S)
        else:
            self._lose(command, f"the place did not confirm its end within {self.kill_s:g} s")
            self._suspect(connection)

    def exited(self, command: Command, *, hurry: bool) -> None:
        """The leader has exited: the rest of its output is due. `hurry` when something was to end the
        command."""
        if command.guard is not None:
            command.guard.cancel()
        if hurry:
            command.guard = _later(OUTPUT_HURRY_S, self._not_complete, command)
        elif command.connection is not None:
            command.guard = _later(OUTPUT_PATIENCE_S, self._suspect, command.connection)

    def _not_complete(self, command: Command) -> None:
        # The supervisor hangs, in the write to a dead disk perhaps: it goes, and so does what it supervises.
        if command.connection is not None and not command.finished:
            command.connection.send(protocol.kill(command.number, 0))
            self._guard(command, command.connection, KILL_MARGIN_S - OUTPUT_HURRY_S)


def _later(seconds: float, call: Callable[..., object], *arguments: object) -> asyncio.TimerHandle:
    return asyncio.get_running_loop().call_later(seconds, call, *arguments)
