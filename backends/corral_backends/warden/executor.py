"""The executor of every place that has a warden: policy on this side, supervision on that."""

from __future__ import annotations

import asyncio
import secrets
import threading
from collections import deque
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from pathlib import PurePath

from corral import (
    AbortedBeforeStartError,
    AbortSignal,
    BashExecRequest,
    BashExecSpec,
    BashExecutor,
    BashRunResult,
    BashTask,
    BashTaskId,
    BashTaskRead,
    CorralError,
    EndReason,
    ExecutorDisposedError,
    OwnerToken,
    PlaceLostError,
    PlaceOpenError,
    SpawnError,
    TaskRecord,
    TaskStatus,
    UnknownTaskError,
    require_spec,
    resolve_request,
)

from . import protocol
from .command import Command, Stage
from .config import WardenConfig
from .connection import Connection
from .deadlines import Deadlines
from .fetch import Fetch
from .place import Place
from .protocol import Failed
from .session import Session
from .trouble import start_error

CREDIT_PAUSE_S = 0.1
"""How often a stream that nobody reads is sampled, so that its tail stays fresh at a bounded cost."""


class WardenExecutor(BashExecutor):
    """Runs commands through a warden in a `Place`. Backends subclass it, or just construct it with their
    place.

    The warden supervises; here are decided the limits, the causes of ends, what is remembered, who is told.
    """

    def __init__(self, place: Place, config: WardenConfig) -> None:
        super().__init__()
        self._config = config
        self._session = Session(place, config)
        self._tasks: dict[BashTaskId, Command] = {}
        self._finished: deque[BashTaskId] = deque()
        self._launches: set[asyncio.Task[None]] = set()
        self._deadlines = Deadlines(
            grace_s=config.kill_grace_ms / 1000,
            end=self._end,
            lose=self._lose,
            suspect=self._session.suspect,
        )

    # --- the seam: asking

    def resolve(self, request: BashExecRequest) -> BashExecSpec:
        """As in the seam. Besides, a command or stdin of more than 1 GiB is a `ValueError`."""
        config = self._config
        spec = resolve_request(
            request,
            workdir=config.workdir,
            timeout_ms=min(config.timeout_ms, config.max_timeout_ms),
            max_timeout_ms=config.max_timeout_ms,
        )
        for field, size in (("command", len(spec.command)), ("stdin", len(spec.stdin or b""))):
            if size > protocol.MAX_TEXT_BYTES:
                msg = f"{field} has {size} bytes; more than {protocol.MAX_TEXT_BYTES} cannot be sent"
                raise ValueError(msg)
        return spec

    def get(self, task_id: BashTaskId) -> BashTask | None:
        self._check_usable("get")
        command = self._tasks.get(task_id)
        return command.record.task if command is not None and command.record is not None else None

    def list(self) -> Sequence[BashTask]:
        self._check_usable("list")
        return tuple(command.record.task for command in self._tasks.values() if command.record is not None)

    def owner_of(self, task_id: BashTaskId) -> OwnerToken | None:
        self._check_usable("owner_of")
        command = self._tasks.get(task_id)
        return command.spec.owner if command is not None else None

    # --- the seam: running

    async def run(self, spec: BashExecSpec) -> BashRunResult:
        require_spec(spec, "run")
        self._check_open("run")
        _refuse_aborted(spec.signal)
        command = Command(spec, self, limit=self._config.max_output_bytes)
        connection = await self._connection(spec.signal)
        self._send(connection, command)
        command.waiter = asyncio.get_running_loop().create_future()
        try:
            await command.waiter
        except asyncio.CancelledError:
            await self._end_cancelled(command)
            raise
        if command.error is not None:
            raise command.error
        return command.result()

    def start(self, spec: BashExecSpec) -> BashTask:
        require_spec(spec, "start")
        self._check_open("start")
        _refuse_aborted(spec.signal)
        task_id = BashTaskId(secrets.token_hex(16))
        record = TaskRecord(task_id=task_id, command=spec.command, workdir=spec.workdir)
        command = Command(spec, self, limit=self._config.max_output_bytes, record=record)
        self._tasks[task_id] = command
        if self._session.connection is not None:
            self._send(self._session.connection, command)
        else:
            self._listen_for_abort(command)
            launch = asyncio.get_running_loop().create_task(self._launch(command), name="corral-launch")
            self._launches.add(launch)
            launch.add_done_callback(self._launches.discard)
        return record.task

    async def _launch(self, command: Command) -> None:
        try:
            connection = await self._connection(None)
        except CorralError as error:
            command.error = error
            if isinstance(error, ExecutorDisposedError) and command.cause is None:
                command.cause = EndReason.DISPOSED
            self._finish(command)
            return
        if not command.finished:  # it may have been killed meanwhile
            self._send(connection, command)

    async def _connection(self, signal: AbortSignal | None) -> Connection:
        connection = self._session.connection
        if connection is None:
            connection = await self._session.opened(signal)
            if self.disposed:
                msg = "the executor was disposed while its place was being opened; nothing was run"
                raise ExecutorDisposedError(msg)
            _refuse_aborted(signal)
            if connection is None or not connection.alive:
                msg = "the place was lost while it was being opened"
                raise PlaceOpenError(msg, retryable=True)
        return connection

    def _send(self, connection: Connection, command: Command) -> None:
        spec = command.spec
        text, workdir = protocol.encode_text(spec.command), protocol.encode_text(str(spec.workdir))
        command.connection = connection
        command.stage = Stage.SENT
        frames = protocol.start(
            connection.begin(command),
            command=text,
            stdin=spec.stdin,
            workdir=workdir,
            env=spec.env,
            credit=self._config.max_output_bytes,
        )
        connection.send(*frames)
        self._deadlines.sent(command, connection, len(text) + len(spec.stdin or b""))
        if spec.stdin is not None:
            command.spec = replace(spec, stdin=None)  # the record of a task may be kept for long
        if command.forget_abort is None:
            self._listen_for_abort(command)

    def _listen_for_abort(self, command: Command) -> None:
        signal = command.spec.signal
        if signal is None:
            return
        loop, thread = asyncio.get_running_loop(), threading.get_ident()

        def aborted() -> None:
            if threading.get_ident() == thread:
                self._end(command, EndReason.ABORTED)
            elif not loop.is_closed():
                loop.call_soon_threadsafe(self._end, command, EndReason.ABORTED)

        command.forget_abort = signal.on_abort(aborted)

    # --- the seam: background tasks

    def read_output(self, task_id: BashTaskId) -> BashTaskRead:
        self._check_usable("read_output")
        command = self._known(task_id)
        assert command.record is not None  # only background tasks are in the table
        status = command.record.task.status
        final = status is not TaskStatus.RUNNING
        stdout, stderr = (stream.read(final=final) for stream in command.streams)
        self._give_credit(command)
        lossy = bool(stdout.dropped_bytes or stderr.dropped_bytes)
        return BashTaskRead(stdout=stdout, stderr=stderr, lossy=lossy, status=status)

    def kill(self, task_id: BashTaskId) -> bool:
        self._check_usable("kill")
        return self._end(self._known(task_id), EndReason.KILLED)

    def _known(self, task_id: BashTaskId) -> Command:
        command = self._tasks.get(task_id)
        if command is None:
            raise UnknownTaskError(task_id)
        return command

    async def fetch(self, path: str | PurePath, *, start: int = 0) -> AsyncIterator[bytes]:
        self._check_open("fetch")
        text = path if isinstance(path, str) else path.as_posix()
        if not text.startswith("/") or "\0" in text:
            msg = f"path must be an absolute path of the place, not {text!r}"
            raise ValueError(msg)
        if start < 0:
            msg = f"start must not be negative, but is {start}"
            raise ValueError(msg)
        connection = await self._connection(None)
        try:
            async for chunk in Fetch(start).chunks(connection, text):
                yield chunk
        except OSError as error:
            if not self.disposed:
                raise
            msg = f"the executor was disposed while {text} was fetched"
            raise ExecutorDisposedError(msg) from error

    # --- ending

    def _end(self, command: Command, cause: EndReason) -> bool:
        """Begin to end a command for `cause`, unless it has ended or something else came first."""
        if command.finished or command.cause is not None:
            return False
        if command.stage >= Stage.EXITED:
            self._deadlines.exited(command, hurry=True)
            return False
        command.cause = cause
        if command.connection is None:
            command.error = AbortedBeforeStartError(
                f"{cause} before the command was started; nothing was run",
                reason=command.spec.signal.reason if command.spec.signal is not None else None,
            )
            self._finish(command)
            return True
        command.connection.send(protocol.kill(command.number, self._config.kill_grace_ms))
        self._deadlines.killed(command, command.connection)
        return True

    async def _end_cancelled(self, command: Command) -> None:
        if command.finished:
            return
        self._end(command, EndReason.ABORTED)
        command.waiter = asyncio.get_running_loop().create_future()
        if not command.finished:
            await asyncio.wait({command.waiter}, timeout=self._deadlines.kill_s)

    def _lose(self, command: Command, why: str) -> None:
        stdout, stderr = command.collected()
        command.error = PlaceLostError(f"the command was lost: {why}", stdout=stdout, stderr=stderr)
        self._finish(command)

    def _finish(self, command: Command) -> None:
        """The one way to the end of a command. The first call counts."""
        if command.finished:
            return
        command.finished = True
        command.cancel_timers()
        if command.forget_abort is not None:
            command.forget_abort()
            command.forget_abort = None
        if command.waiter is not None and not command.waiter.done():
            command.waiter.set_result(None)
        if command.record is not None:
            self._close_record(command, command.record)

    def _close_record(self, command: Command, record: TaskRecord) -> None:
        error = command.error
        if error is None:
            record.finished(exit_code=command.exit_code, signal=command.signal, reason=command.reason)
        else:
            if not isinstance(error, CorralError):
                error = SpawnError(str(error))  # a ValueError has nobody to be raised at
            reason = EndReason.LOST if isinstance(error, PlaceLostError) else command.cause
            record.failed(error=error, reason=reason)
        # In a turn of its own, so that whatever a listener does or raises, the session goes on.
        asyncio.get_running_loop().call_soon(self._tell, record.task)

    def _tell(self, task: BashTask) -> None:
        self.notify_task_done(task)
        self._finished.append(task.id)  # only now: a listener may still read its output
        while len(self._finished) > self._config.max_finished_tasks:
            dropped = self._tasks.pop(self._finished.popleft())
            if dropped.connection is not None:
                dropped.connection.send(protocol.forget(dropped.number))

    # --- what commands tell (`Observer`)

    def on_started(self, command: Command) -> None:
        self._deadlines.started(command)
        if command.record is not None and not command.finished:
            command.record.started()

    def on_output(self, command: Command) -> None:
        if command.credit_timer is None and max(command.owed) * 2 >= self._config.max_output_bytes:
            loop = asyncio.get_running_loop()
            command.credit_timer = loop.call_later(CREDIT_PAUSE_S, self._give_credit, command)

    def _give_credit(self, command: Command) -> None:
        if command.credit_timer is not None:
            command.credit_timer.cancel()
            command.credit_timer = None
        if command.stage is not Stage.STARTED or command.connection is None:
            return
        for stream, owed in enumerate(command.owed):
            if owed:
                command.connection.send(protocol.credit(command.number, stream, owed))
                command.owed[stream] = 0

    def on_exited(self, command: Command) -> None:
        if command.cause is None:
            self._deadlines.exited(command, hurry=False)

    def on_ended(self, command: Command) -> None:
        # A command that was told to die is over when its whole tree is.
        if command.cause is None and not command.supervisor_lost:
            self._finish(command)

    def on_gone(self, command: Command) -> None:
        never_seen = command.record is not None and command.record.task.started_at is None
        if command.supervisor_lost and (command.cause is None or never_seen):
            self._lose(command, "its supervisor was killed, and so were its processes; nobody saw its exit")
        else:
            self._finish(command)

    def on_failed(self, command: Command, failed: Failed) -> None:
        command.error = start_error(failed, command.spec)
        self._finish(command)

    def on_lost(self, command: Command, why: str) -> None:
        if not command.finished:
            self._lose(command, why)

    # --- disposal

    async def _dispose(self) -> None:
        await self._session.stop_opening()
        if self._launches:
            await asyncio.wait(self._launches)
        connection = self._session.connection
        if connection is not None:
            for command in connection.commands(Command):
                if command.cause is None and command.stage < Stage.EXITED:
                    command.cause = EndReason.DISPOSED
        await self._session.close(self._config.kill_grace_ms)


def _refuse_aborted(signal: AbortSignal | None) -> None:
    if signal is not None and signal.aborted:
        raise AbortedBeforeStartError(reason=signal.reason)
