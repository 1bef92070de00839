"""A descriptor of ours that is written from a thread, so that a slow reader never holds up the event loop.

Switching the descriptor itself to non-blocking would do it without a thread, but that mode belongs to the
open file description: a terminal or pipe that is shared with the shell would change under everybody else.
"""

from __future__ import annotations

import asyncio
import os
import threading
from queue import SimpleQueue
from typing import TYPE_CHECKING, Final

from corral_tools.cli.exits import wait_writable

if TYPE_CHECKING:
    from collections.abc import Callable

_BACKLOG: Final = 1 << 20
"""Bytes that may wait here before `room` makes the producer wait."""


class Sink:
    """Writes bytes to `fd` in order. All methods belong to the event loop that is running at construction.

    `on_failure` is called once, in that loop, when a write fails; from then on everything is thrown away and
    nothing waits. The thread starts with the first byte and is a daemon: one that is stuck in a write does
    not keep the process alive.
    """

    def __init__(self, fd: int, on_failure: Callable[[OSError], None]) -> None:
        self._fd = fd
        self._on_failure = on_failure
        self._loop = asyncio.get_running_loop()
        self._queue: SimpleQueue[bytes] = SimpleQueue()
        self._backlog = 0
        self._changed = asyncio.Event()
        self._started = False
        self._broken = False
        self._last = b"\n"

    @property
    def broken(self) -> bool:
        """Whether a write failed: what is put from now on goes nowhere."""
        return self._broken

    @property
    def at_line_start(self) -> bool:
        """Whether the last byte put was a line break, or none was put."""
        return self._last == b"\n"

    def put(self, data: bytes) -> None:
        """Queues `data`, whatever its size."""
        if self._broken or not data:
            return
        self._last = data[-1:]
        self._backlog += len(data)
        self._queue.put(data)
        if not self._started:
            self._started = True
            threading.Thread(target=self._write_all, name=f"corral-fd-{self._fd}", daemon=True).start()

    async def room(self) -> None:
        """Waits until little enough is queued that more may come."""
        await self._backlog_at_most(_BACKLOG)

    async def drained(self) -> None:
        """Waits until everything was written."""
        await self._backlog_at_most(0)

    async def _backlog_at_most(self, limit: int) -> None:
        while self._backlog > limit and not self._broken:
            self._changed.clear()
            await self._changed.wait()

    def _write_all(self) -> None:
        # RuntimeError below: the loop is closed, the run was given up while this thread was stuck in a write.
        while True:
            data = self._queue.get()
            try:
                self._write(data)
            except OSError as error:
                try:
                    self._loop.call_soon_threadsafe(self._failed, error)
                except RuntimeError:
                    pass
                return
            try:
                self._loop.call_soon_threadsafe(self._wrote, len(data))
            except RuntimeError:
                return

    def _write(self, data: bytes) -> None:
        rest = memoryview(data)
        while rest:
            try:
                rest = rest[os.write(self._fd, rest) :]
            except BlockingIOError:
                wait_writable(self._fd)

    def _wrote(self, count: int) -> None:
        self._backlog -= count
        self._changed.set()

    def _failed(self, error: OSError) -> None:
        self._broken = True
        self._changed.set()
        self._on_failure(error)
