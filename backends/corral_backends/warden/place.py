"""What a backend author writes: a place, and a byte stream to a warden in it."""

from __future__ import annotations

import asyncio
import os
import socket
import weakref
from abc import ABC, abstractmethod
from pathlib import PurePosixPath
from typing import Protocol, cast


class Receiver(Protocol):
    """Where a stream delivers what comes from the warden. Called in the executor's event loop."""

    def received(self, data: bytes) -> None:
        """Some bytes, never empty, in order."""

    def ended(self, error: Exception | None) -> None:
        """The stream is over, exactly once, and nothing comes after it. `None` for a plain end of file."""


class DuplexStream(ABC):
    """One ordered, reliable byte stream to a warden and back.

    Used from the executor's event loop only. An implementation whose connection lives in another thread
    crosses over with `loop.call_soon_threadsafe`."""

    @abstractmethod
    def start(self, receiver: Receiver) -> None:
        """Begin to deliver. Called once; nothing may be lost that came before."""

    @abstractmethod
    def write(self, data: bytes) -> None:
        """Send, without waiting: what cannot be sent now is kept. After the end it does nothing."""

    @property
    def unsent(self) -> int:
        """About how many bytes were written and not sent yet. 0 where that is not known."""
        return 0

    @abstractmethod
    def close(self) -> None:
        """End the stream at once, dropping what was not sent. `Receiver.ended` is still called.
        Idempotent."""


class Place(ABC):
    """Where commands run. Opened lazily, by the first command; closed by `dispose`, or when it was lost.

    After a loss it is closed, and the next command opens it again, so both must be repeatable in turn. They
    never overlap. An executor has one place, and a place one executor."""

    lease_ms: int = 0
    """How long the warden waits for a sign of life before it takes the host for dead. 0 where the end of the
    stream can be relied on."""

    @abstractmethod
    async def open(self) -> DuplexStream:
        """Make the place, put a warden into it, connect.

        Raises `PlaceOpenError` or `UnsupportedPlaceError` (with stage, remedy, retryable); when it raises or
        is cancelled, nothing is left behind. The caller applies `open_timeout_ms`."""

    @abstractmethod
    async def close(self) -> None:
        """Unmake what `open` made. Idempotent, bounded in time, also after a failed `open` and after a loss.

        The stream has been closed, and the warden, if all went well, has said good-bye. What it could not
        reach is a `PlaceLostError`, after everything else was done."""

    def stuck(self) -> bool:
        """Whether the warden can be seen to be stopped, so that there is no use in waiting for it. Asked
        rarely."""
        return False

    async def remove_spills(self, directory: PurePosixPath) -> None:  # noqa: B027  # optional
        """Remove the spill directory of a warden that was lost. For places that have a way to it."""


class SocketStream(DuplexStream):
    """A stream over a connected socket. For socket pairs and unix sockets."""

    def __init__(self, connected: socket.socket, adapter: _Adapter) -> None:
        self._socket = connected
        self._adapter = adapter
        _open_sockets.add(self)

    @classmethod
    async def connect(cls, connected: socket.socket) -> SocketStream:
        """Takes the socket over, also when this raises or is cancelled."""
        adapter = _Adapter()
        try:
            connected.setblocking(False)
            await asyncio.get_running_loop().create_connection(lambda: adapter, sock=connected)
        except BaseException:
            connected.close()
            raise
        return cls(connected, adapter)

    def start(self, receiver: Receiver) -> None:
        self._adapter.start(receiver)

    def write(self, data: bytes) -> None:
        if not self._adapter.transport.is_closing():  # asyncio logs what comes later
            self._adapter.transport.write(data)

    @property
    def unsent(self) -> int:
        return self._adapter.transport.get_write_buffer_size()

    def close(self) -> None:
        self._adapter.transport.abort()

    def abandon_in_child(self) -> None:
        """In a forked child: give up our copy of the descriptor, so that it does not keep the stream open."""
        descriptor = self._socket.detach()
        if descriptor >= 0:
            os.close(descriptor)


class _Adapter(asyncio.Protocol):
    """Between asyncio's transport and a `Receiver`. Nothing is read before there is one."""

    transport: asyncio.Transport

    def __init__(self) -> None:
        self._receiver: Receiver | None = None
        self._ended: tuple[Exception | None] | None = None

    def start(self, receiver: Receiver) -> None:
        self._receiver = receiver
        if self._ended is None:
            self.transport.resume_reading()
        else:
            asyncio.get_running_loop().call_soon(receiver.ended, *self._ended)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # Not checked at run time: uvloop's transports are none by inheritance.
        self.transport = cast("asyncio.Transport", transport)
        self.transport.pause_reading()

    def data_received(self, data: bytes) -> None:
        if self._receiver is not None:
            self._receiver.received(data)

    def connection_lost(self, exc: Exception | None) -> None:
        self._ended = (exc,)
        if self._receiver is not None:
            receiver, self._receiver = self._receiver, None
            receiver.ended(exc)


_open_sockets: weakref.WeakSet[SocketStream] = weakref.WeakSet()


def _abandon_all() -> None:
    for stream in tuple(_open_sockets):
        stream.abandon_in_child()


os.register_at_fork(after_in_child=_abandon_all)
