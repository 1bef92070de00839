"""The warden's side of the protocol in memory, for tests of the host: encoders, a place, a clock that jumps.

The encoders are written from PROTOCOL.md, apart from those of the product, and take every field as it is.
"""

from __future__ import annotations

import asyncio
import selectors
import struct
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from corral_backends.warden import DuplexStream, Place, Receiver
from tests.warden import frames
from tests.warden.frames import frame, text

T = TypeVar("T")


# --- what a warden says


def ready(
    *, version: int = 1, pid: int = 7, uid: int = 0, machine: str = "x86_64", spill: str = "/tmp/corral-x"
) -> bytes:
    head = struct.pack("<HHIII", version, 0, pid, uid, 0)
    return frame(frames.READY, head + text(machine) + text("/") + text(spill))


def started(task: int, pid: int = 9) -> bytes:
    return frame(frames.STARTED, struct.pack("<I", pid), task=task)


def data(task: int, stream: int, offset: int, content: bytes) -> bytes:
    return frame(frames.DATA, struct.pack("<Q", offset) + content, task=task, flags=stream)


def spill(task: int, stream: int, start: int, path: str) -> bytes:
    return frame(frames.SPILL, struct.pack("<Q", start) + text(path), task=task, flags=stream)


def exited(task: int, kind: int = frames.EXITED, value: int = 0, wall_us: int = 1000) -> bytes:
    return frame(frames.EXIT, struct.pack("<B3xiQQQQ", kind, value, 10, 20, wall_us, 3000), task=task)


def stream_end(total: int, start: int = 0, state: int = frames.NONE, path: str = "") -> bytes:
    return struct.pack("<QQI", total, start, state) + text(path)


def end(task: int, stdout: bytes, stderr: bytes, *, leftovers: bool = False) -> bytes:
    return frame(frames.END, stdout + stderr, task=task, flags=int(leftovers))


def gone(task: int, survivors: int = 0, *, keeper_lost: bool = False) -> bytes:
    return frame(frames.GONE, struct.pack("<I", survivors), task=task, flags=int(keeper_lost))


def error(task: int, code: int, errno: int = 0, message: str = "because") -> bytes:
    return frame(frames.ERROR, struct.pack("<HHI", code, 0, errno) + text(message), task=task)


def pong(token: int) -> bytes:
    return frame(frames.PONG, struct.pack("<Q", token))


BYE = frame(frames.BYE)


# --- what a host said


class Heard:
    """The frames of a host, cut out of what it wrote. What a warden would refuse is an `AssertionError`."""

    def __init__(self) -> None:
        self._buffer = bytearray()
        self.greeted = False
        self.started: set[int] = set()

    def feed(self, written: bytes) -> list[frames.Frame]:
        self._buffer += written
        found: list[frames.Frame] = []
        while len(self._buffer) >= 12:
            length, kind, flags, zero, task = struct.unpack_from("<IBBHI", self._buffer)
            assert length <= frames.MAX_TO_WARDEN
            assert kind in frames.FROM_HOST
            assert zero == 0
            assert flags in ((1, 2) if kind == frames.CREDIT else (0,))
            if len(self._buffer) < 12 + length:
                break
            found.append(frames.Frame(kind, flags, task, bytes(self._buffer[12 : 12 + length])))
            del self._buffer[: 12 + length]
            self._check(found[-1])
        return found

    def _check(self, found: frames.Frame) -> None:
        assert (found.kind == frames.HELLO) != self.greeted, "HELLO comes first and once"
        self.greeted = True
        if found.kind in (frames.START, frames.FETCH):
            assert found.task > 0
            assert found.task not in self.started, "a task number was used twice"
            self.started.add(found.task)
        elif found.kind not in (frames.HELLO, frames.PING, frames.SHUTDOWN):
            assert found.task in self.started, f"{found} for no task"


class PeerStream(DuplexStream):
    """The host's end. What it writes goes to `peer.heard`; `say` is how the peer answers."""

    def __init__(self, peer: Peer) -> None:
        self._peer = peer
        self._receiver: Receiver | None = None
        self._heard = Heard()
        self.open = True

    def start(self, receiver: Receiver) -> None:
        self._receiver = receiver
        asyncio.get_running_loop().call_soon(self._peer.connected, self)

    def write(self, written: bytes) -> None:
        assert self._receiver is not None, "written before start()"
        if self.open:
            for found in self._heard.feed(written):
                asyncio.get_running_loop().call_soon(self._peer.heard, self, found)

    def close(self) -> None:
        if self.open:
            self.open = False
            asyncio.get_running_loop().call_soon(self._ended, None)

    def _ended(self, why: Exception | None) -> None:
        assert self._receiver is not None
        receiver, self._receiver = self._receiver, None
        receiver.ended(why)

    # what the peer does

    def say(self, said: bytes) -> None:
        if self.open and said and self._receiver is not None:
            self._receiver.received(said)

    def hang_up(self, why: Exception | None = None) -> None:
        if self.open:
            self.open = False
            self._ended(why)


class Peer:
    """A warden in memory. Subclasses say what it answers."""

    def connected(self, stream: PeerStream) -> None:
        """The host listens now."""

    def heard(self, stream: PeerStream, found: frames.Frame) -> None:
        """The host has sent a frame."""


class PeerPlace(Place):
    """Hands out streams to one peer, and counts."""

    def __init__(self, peer: Peer) -> None:
        self._peer = peer
        self.streams: list[PeerStream] = []
        self.is_open = False

    async def open(self) -> DuplexStream:
        assert not self.is_open, "opened twice without a close"
        self.is_open = True
        self.streams.append(PeerStream(self._peer))
        return self.streams[-1]

    async def close(self) -> None:
        self.is_open = False


# --- a clock that jumps


class _JumpingSelector(selectors.SelectSelector):
    """When nothing is ready, the time is at once what was waited for."""

    now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        found = super().select(0)
        if not found:
            assert timeout is not None, "everybody waits, and nothing will ever happen"
            self.now += max(0.0, timeout)
        return found


class JumpingLoop(asyncio.SelectorEventLoop):
    """An event loop in which nobody waits: hours of timers take milliseconds. For tests without real I/O."""

    def __init__(self) -> None:
        self._jumping = _JumpingSelector()
        super().__init__(self._jumping)
        self.complaints: list[str] = []
        self.set_exception_handler(lambda _, context: self.complaints.append(repr(context)))

    def time(self) -> float:
        return self._jumping.now


def run(scenario: Callable[[JumpingLoop], Coroutine[Any, Any, T]]) -> T:
    """Runs it in a loop that jumps. Nothing may be left over, and no exception may have gone astray."""
    with asyncio.Runner(loop_factory=JumpingLoop) as runner:
        loop = runner.get_loop()
        assert isinstance(loop, JumpingLoop)
        result = runner.run(_and_nothing_left(scenario(loop)))
        assert loop.complaints == []
        return result


async def _and_nothing_left(scenario: Coroutine[Any, Any, T]) -> T:
    result = await scenario
    for _ in range(5):
        await asyncio.sleep(0)
    left = asyncio.all_tasks() - {asyncio.current_task()}
    assert not left, f"tasks left: {left}"
    return result
