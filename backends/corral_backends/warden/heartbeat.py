"""Streams with a lease: a thread of their own keeps the warden assured that the host lives.

A heartbeat on the user's event loop would stop whenever that loop is busy, and the warden would take the host
for dead. So the connection itself lives in a private thread with a loop of its own; data crosses between the
two loops, pings do not come from the user's at all."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Coroutine
from typing import TypeVar

from . import protocol
from .place import DuplexStream, Receiver

T = TypeVar("T")

BEATS_PER_LEASE = 4
"""So that a beat, or even two, may be late or lost."""


class PrivateLoop:
    """An event loop in a daemon thread, for one place. `stop` ends both."""

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._main, name=name, daemon=True)
        self._thread.start()

    def _main(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_forever()
            left = asyncio.all_tasks(self._loop)
            for task in left:
                task.cancel()
            self._loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))
        finally:
            self._loop.close()

    async def run(self, coroutine: Coroutine[object, object, T]) -> T:
        """Run it there and wait for it here. Cancelling the waiter cancels it."""
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(coroutine, self._loop))

    def call(self, function: Callable[..., object], *arguments: object) -> None:
        """Call it there, soon. From any thread; nothing happens once the loop is closed."""
        try:
            self._loop.call_soon_threadsafe(function, *arguments)
        except RuntimeError:  # closed
            pass

    async def stop(self) -> None:
        """End the loop, cancelling what still runs there, and wait for the thread, which does not take
        long."""
        self.call(self._loop.stop)
        while self._thread.is_alive():  # noqa: ASYNC110  # join() would block the user's loop
            await asyncio.sleep(0.001)


class LeasedStream(DuplexStream):
    """A stream that lives in a `PrivateLoop`, used from the user's loop, with a heartbeat that needs only the
    former.

    `lease_ms` is what the warden was told in HELLO.
    """

    def __init__(self, inner: DuplexStream, private: PrivateLoop, *, lease_ms: int) -> None:
        self._inner = inner
        self._private = private
        self._interval = lease_ms / 1000 / BEATS_PER_LEASE
        self._beating: asyncio.Task[None] | None = None
        self._over = False

    @classmethod
    async def connect(
        cls, connect: Callable[[], Awaitable[DuplexStream]], private: PrivateLoop, *, lease_ms: int
    ) -> LeasedStream:
        """`connect` makes the inner stream; it runs in the private loop, as does everything of that
        stream."""

        async def there() -> DuplexStream:
            return await connect()

        return cls(await private.run(there()), private, lease_ms=lease_ms)

    def start(self, receiver: Receiver) -> None:
        bridge = _Bridge(receiver, asyncio.get_running_loop(), self._stop_beating)
        self._private.call(self._inner.start, bridge)

    def write(self, data: bytes) -> None:
        self._private.call(self._write, data)

    def _write(self, data: bytes) -> None:
        self._inner.write(data)
        if self._beating is None and not self._over:  # not before HELLO, which must be the first frame
            self._beating = asyncio.get_running_loop().create_task(self._beat(), name="corral-heartbeat")

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(self._interval)
            self._inner.write(protocol.ping(0))

    def _stop_beating(self) -> None:
        self._over = True
        if self._beating is not None:
            self._beating.cancel()

    @property
    def unsent(self) -> int:
        return self._inner.unsent

    def close(self) -> None:
        self._private.call(self._inner.close)


class _Bridge:
    """Receives in the private loop, delivers in the user's."""

    def __init__(
        self, receiver: Receiver, loop: asyncio.AbstractEventLoop, ended: Callable[[], None]
    ) -> None:
        self._receiver = receiver
        self._loop = loop
        self._ended = ended

    def received(self, data: bytes) -> None:
        self._deliver(self._receiver.received, data)

    def ended(self, error: Exception | None) -> None:
        self._ended()
        self._deliver(self._receiver.ended, error)

    def _deliver(self, function: Callable[..., object], argument: object) -> None:
        try:
            self._loop.call_soon_threadsafe(function, argument)
        except RuntimeError:  # the user's loop is closed: nobody is left to tell
            pass
