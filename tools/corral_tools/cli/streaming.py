"""A command whose output is passed on as it comes.

It goes through `start` and `read_output`, which every backend has. The command never waits for us: what we
are too slow to read is dropped from the executor's memory and stays in the spill file of the place, from
where the gap is filled with `fetch`.
"""

from __future__ import annotations

import asyncio
import errno
from collections.abc import AsyncGenerator
from typing import TYPE_CHECKING, Final

from corral import CorralError, EndReason, PlaceLostError, TaskStatus
from corral_tools.cli import exits
from corral_tools.cli.sink import Sink
from corral_tools.cli.values import format_duration

if TYPE_CHECKING:
    import signal
    from pathlib import PurePosixPath

    from corral import BashExecSpec, BashExecutor, BashTask, BashTaskRead, StreamRead

MEMORY: Final = 4 << 20
"""Bytes per stream that the executor is asked to keep: a burst between two reads that needs no detour."""

_OVERFLOW: Final = "its full copy reached its limit of size"
_RANGES: Final = 8
"""How many ranges of missing output are told one by one."""
_SHORTEST_POLL: Final = 0.002
_LONGEST_POLL: Final = 0.025
_SPILL_PATIENCE: Final = 1.0
"""Seconds in which a spill file may lag behind the read that showed the gap."""
_KILL_PATIENCE: Final = 10.0
"""Seconds after a kill in which the task should have ended; what takes longer is left to dispose."""
_DRAIN_PATIENCE: Final = 1.0
"""Seconds for the last output of a command that was stopped; its reader may be gone or stuck."""


class LiveRun:
    """One command from `start` to its last byte. `run` once; the other methods may be called meanwhile."""

    def __init__(
        self, executor: BashExecutor, spec: BashExecSpec, *, limit_ms: int | None, wanted_ms: int | None
    ) -> None:
        """`limit_ms` ends the command; `wanted_ms` is what the user asked for, which may be more."""
        self._executor = executor
        self._spec = spec
        self._limit_ms = limit_ms
        self._wanted_ms = wanted_ms
        self._timer: asyncio.TimerHandle | None = None
        self._task: BashTask | None = None
        self._done = asyncio.Event()
        self._abandon = asyncio.Event()
        self._status: int | None = None
        self._line: str | None = None
        self._out = _Stream(
            "stdout", Sink(1, lambda error: self._write_failed(exits.STDOUT, error)), executor
        )
        self._err = _Stream(
            "stderr", Sink(2, lambda error: self._write_failed(exits.STDERR, error)), executor
        )

    async def run(self) -> int:
        """Runs the command and returns the exit status; lines of ours on standard error come last."""
        if self._status is not None:
            return self._status
        forget = self._executor.on_task_done(self._on_task_done)
        try:
            self._task = self._executor.start(self._spec)
            pump = asyncio.create_task(self._pump(self._task))
            abandoned = asyncio.create_task(self._abandon.wait())
            try:
                await asyncio.wait({pump, abandoned}, return_when=asyncio.FIRST_COMPLETED)
                if not pump.done():
                    await self._ended_within(_KILL_PATIENCE)
                    await asyncio.wait({pump}, timeout=_DRAIN_PATIENCE)
            finally:
                abandoned.cancel()
                pump.cancel()
                await asyncio.wait({pump, abandoned})
            if not pump.cancelled():
                pump.result()
            return await self._conclude(self._task)
        finally:
            if self._timer is not None:
                self._timer.cancel()
            forget()

    def interrupt(self, number: signal.Signals) -> None:
        """Ends the run because `corral` got the signal `number`; output that nobody takes is given up."""
        self._stop(128 + number, None)
        self._abandon.set()

    def _stop(self, status: int, line: str | None) -> None:
        """The first cause decides the status."""
        if self._status is not None:
            return
        self._status, self._line = status, line
        if self._task is not None:
            self._kill(self._task)

    def _kill(self, task: BashTask) -> bool:
        try:
            return self._executor.kill(task.id)
        except CorralError:
            # Already forgotten, hence ended; reading it tells the same.
            return False

    def _write_failed(self, name: str, error: OSError) -> None:
        if isinstance(error, BrokenPipeError):
            self._stop(exits.BROKEN_PIPE, None)
        else:
            self._stop(exits.TROUBLE, exits.explain(exits.write_failure(name, error)))
        self._abandon.set()

    def _timed_out(self, task: BashTask, limit_ms: int) -> None:
        # An exit that the executor has seen wins, however slowly the output is taken from us.
        if self._status is None and task.status is TaskStatus.RUNNING and self._kill(task):
            self._status = exits.TIMED_OUT
            self._line = f"timed out after {format_duration(limit_ms)}"
            if self._wanted_ms is not None and limit_ms < self._wanted_ms:
                self._line += ", which is the most that the backend allows"

    def _on_task_done(self, task: BashTask) -> None:
        if self._task is not None and task.id == self._task.id:
            self._done.set()

    async def _pump(self, task: BashTask) -> None:
        delay = _SHORTEST_POLL
        while True:
            read = self._executor.read_output(task.id)
            self._arm(task)
            if self._out.wants(read.stdout) or self._err.wants(read.stderr):
                await self._deliver(read)
                delay = _SHORTEST_POLL
            elif read.status is not TaskStatus.RUNNING:
                break
            else:
                await self._ended_within(delay)
                delay = min(delay * 1.5, _LONGEST_POLL)
        await asyncio.gather(self._out.sink.drained(), self._err.sink.drained())

    def _arm(self, task: BashTask) -> None:
        if self._limit_ms is not None and self._timer is None and task.started_at is not None:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(self._limit_ms / 1000, self._timed_out, task, self._limit_ms)

    async def _deliver(self, read: BashTaskRead) -> None:
        """Both at once: a reader of one that is slow does not hold back what there is of the other."""
        await asyncio.gather(self._out.deliver(read.stdout), self._err.deliver(read.stderr))

    async def _ended_within(self, delay: float) -> None:
        if self._done.is_set():
            # It has ended, and yet its output is not said to be complete: do not spin until it is.
            await asyncio.sleep(_SHORTEST_POLL)
            return
        try:
            async with asyncio.timeout(delay):
                await self._done.wait()
        except TimeoutError:
            pass

    async def _conclude(self, task: BashTask) -> int:
        # Whoever stopped the run or stopped reading gave up the rest of the output.
        streams = () if self._abandon.is_set() else (self._out, self._err)
        lines = [line for stream in streams if (line := stream.losses())]
        if self._status is not None:
            status = self._status
            if self._line is not None:
                lines.append(self._line)
            if isinstance(task.error, PlaceLostError):
                # Something may be alive that nobody could kill.
                lines.append(exits.explain(task.error))
        else:
            status, line = verdict(task)
            if lines and status == 0:
                # A pipeline must not take half of the output for all of it.
                status = exits.TROUBLE
            if line is not None:
                lines.append(line)
        sink = self._err.sink
        if lines:
            start = b"" if sink.at_line_start else b"\n"
            sink.put(start + b"".join(map(exits.as_bytes, lines)))
            try:
                async with asyncio.timeout(_DRAIN_PATIENCE if self._abandon.is_set() else None):
                    await sink.drained()
            except TimeoutError:
                pass
        return status


def verdict(task: BashTask) -> tuple[int, str | None]:
    """The exit status of a task that ended by itself, and what has to be said about it."""
    if task.error is not None:
        return exits.TROUBLE, exits.explain(task.error)
    status = exits.status_of(task.exit_code, task.signal)
    if task.reason is EndReason.OUT_OF_MEMORY:
        return status, "the command ran out of memory and was killed"
    if task.exit_code is None and task.signal is None:
        return status, f"the backend told neither an exit status nor a signal (reason: {task.reason})"
    return status, None


class _Stream:
    """One output of the command on its way to one of our descriptors."""

    def __init__(self, name: str, sink: Sink, executor: BashExecutor) -> None:
        self.name = name
        self.sink = sink
        self._executor = executor
        self._position = 0
        self._lost_bytes = 0
        self._lost_ranges: list[tuple[int, int]] = []
        """The first of them; so many are told."""
        self._reason: str | None = None

    def wants(self, read: StreamRead) -> bool:
        """Whether the read brings this stream any further."""
        return read.end > self._position

    async def deliver(self, read: StreamRead) -> None:
        """Passes on what is new, gap included, and waits until the sink has room again."""
        if read.start > self._position and read.spill_path is not None:
            self._skip_to(min(read.spill_start, read.start), _OVERFLOW)
            await self._fill(read, read.spill_path)
        self._skip_to(read.start, "the backend kept no full copy of it")
        self.sink.put(read.data)
        self._position = max(self._position, read.end)
        await self.sink.room()

    def _skip_to(self, offset: int, reason: str) -> None:
        """Gives up what is before `offset`, because of `reason` if there is none yet."""
        if offset <= self._position:
            return
        if not self.sink.broken:
            self._lost_bytes += offset - self._position
            ranges = self._lost_ranges
            if ranges and ranges[-1][1] == self._position:
                ranges[-1] = (ranges[-1][0], offset)
            elif len(ranges) <= _RANGES:
                ranges.append((self._position, offset))
            self._reason = self._reason or reason
        self._position = offset

    async def _fill(self, read: StreamRead, spill: PurePosixPath) -> None:
        """Fetches [position, read.start) from the spill, as far as it goes."""
        if self.sink.broken:
            return
        loop = asyncio.get_running_loop()
        give_up = loop.time() + _SPILL_PATIENCE
        while True:
            before = self._position
            chunks = self._executor.fetch(spill, start=before)
            try:
                async for chunk in chunks:
                    piece = chunk[: read.start - self._position]
                    self.sink.put(piece)
                    self._position += len(piece)
                    if self._position >= read.start or self.sink.broken:
                        return
                    await self.sink.room()
            except (CorralError, OSError) as error:
                # ENODATA: what was to be fetched was given up since the read told where the file begins.
                overflow = isinstance(error, OSError) and error.errno == errno.ENODATA
                self._reason = _OVERFLOW if overflow else f"its full copy could not be fetched: {error}"
                return
            finally:
                if isinstance(chunks, AsyncGenerator):
                    await chunks.aclose()
            if self._position > before:
                give_up = loop.time() + _SPILL_PATIENCE
            elif loop.time() > give_up:
                self._reason = "its full copy is shorter than the output"
                return
            await asyncio.sleep(_LONGEST_POLL)

    def losses(self) -> str | None:
        """One line with the exact ranges that did not come, or None."""
        if not self._lost_bytes:
            return None
        ranges = ", ".join(f"{start}-{end - 1}" for start, end in self._lost_ranges[:_RANGES])
        more = " and more" if len(self._lost_ranges) > _RANGES else ""
        where = f"{ranges}{more} of {self._position}"
        reason = exits.one_line(self._reason or "")
        return f"{self._lost_bytes} bytes of {self.name} are missing ({where}): {reason}"
