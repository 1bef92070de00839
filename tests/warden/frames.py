"""The warden protocol, written down from PROTOCOL.md for tests: encoders, a parser, and the order of frames.

Shares nothing with `corral_backends.warden.protocol`, so that the two can be held against each other.
Encoders take every field as it is, lies included.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

HELLO, START, TEXT, STDIN, KILL, CREDIT, PING, SHUTDOWN, FORGET, FETCH = range(0x01, 0x0B)
READY, STARTED, DATA, EXIT, END, GONE, ERROR, PONG, BYE, SPILL = range(0x81, 0x8B)

FROM_HOST: Final = range(HELLO, FETCH + 1)
NAMES: Final = dict(
    zip(
        range(READY, SPILL + 1),
        ["READY", "STARTED", "DATA", "EXIT", "END", "GONE", "ERROR", "PONG", "BYE", "SPILL"],
        strict=True,
    )
)

# ERROR codes
WORKDIR, SHELL, SPAWN, TOO_LARGE, PROTOCOL, REFUSED, FILE = range(1, 8)
# kinds of EXIT
EXITED, SIGNALLED, LOST = 1, 2, 3
# states of a spill
NONE, COMPLETE, FAILED = 0, 1, 2

MAX_CREDIT: Final = 16 << 20
MAX_TO_WARDEN: Final = 8 << 20
MAX_TO_HOST: Final = 1 << 20
STDOUT, STDERR = 1, 2


def frame(kind: int, payload: bytes = b"", *, task: int = 0, flags: int = 0, zero: int = 0) -> bytes:
    return struct.pack("<IBBHI", len(payload), kind, flags, zero, task) + payload


def text(data: bytes | str) -> bytes:
    raw = data.encode("utf-8", "surrogateescape") if isinstance(data, str) else data
    return struct.pack("<I", len(raw)) + raw


def block(env: dict[str, str] | bytes) -> bytes:
    """An environment text; bytes are taken as the block itself."""
    if isinstance(env, bytes):
        return text(env)
    return text("".join(f"{name}={value}\0" for name, value in env.items()))


def hello(
    *,
    magic: bytes = b"CRRL",
    version: int = 1,
    zero: int = 0,
    lease_ms: int = 0,
    ring: int = 64_000,
    spill_cap: int = 1 << 30,
    spill_total: int = 1 << 32,
    spill_parent: bytes | str = "",
    shell: bytes | str = "",
    env: dict[str, str] | bytes = b"",
    rest: bytes = b"",
    task: int = 0,
) -> bytes:
    head = magic + struct.pack("<HHIIQQ", version, zero, lease_ms, ring, spill_cap, spill_total)
    return frame(HELLO, head + text(spill_parent) + text(shell) + block(env) + rest, task=task)


def start(
    task: int,
    command: bytes | str,
    *,
    flags: int | None = None,
    size: int | None = None,
    stdin_size: int | None = None,
    credit: int = MAX_CREDIT,
    workdir: bytes | str = "/",
    env: dict[str, str] | bytes = b"",
) -> bytes:
    """START with `command` as far as it is to travel in this frame. `stdin_size` None: no stdin."""
    raw = command.encode("utf-8", "surrogateescape") if isinstance(command, str) else command
    flags = (stdin_size is not None) if flags is None else flags
    head = struct.pack("<IQQQ", flags, len(raw) if size is None else size, stdin_size or 0, credit)
    return frame(START, head + text(workdir) + block(env) + raw, task=task)


def kill(task: int, grace_ms: int = 0) -> bytes:
    return frame(KILL, struct.pack("<I", grace_ms), task=task)


def credit(task: int, stream: int, size: int) -> bytes:
    return frame(CREDIT, struct.pack("<I", size), task=task, flags=stream)


def ping(token: int) -> bytes:
    return frame(PING, struct.pack("<Q", token))


def shutdown(grace_ms: int = 0) -> bytes:
    return frame(SHUTDOWN, struct.pack("<I", grace_ms))


def forget(task: int) -> bytes:
    return frame(FORGET, task=task)


def fetch(task: int, path: bytes | str, *, offset: int = 0, credit: int = MAX_CREDIT) -> bytes:
    return frame(FETCH, struct.pack("<QQ", offset, credit) + text(path), task=task)


# --- what the warden says


class BadFrameError(Exception):
    """The warden sent something that PROTOCOL.md does not allow."""


def require(condition: object, what: str) -> None:
    if not condition:
        raise BadFrameError(what)


@dataclass(frozen=True, slots=True)
class Frame:
    kind: int
    flags: int
    task: int
    payload: bytes

    def __str__(self) -> str:
        shown = self.payload if len(self.payload) <= 48 else self.payload[:48] + b"..."
        return f"{NAMES.get(self.kind, hex(self.kind))}(task={self.task}, flags={self.flags}, {shown!r})"


class Scanner:
    """Reads fields from the front of a payload, which must be used up at the end."""

    def __init__(self, payload: bytes) -> None:
        self.payload = payload
        self.at = 0

    def take(self, size: int) -> bytes:
        require(self.at + size <= len(self.payload), f"a payload of {len(self.payload)} bytes is too short")
        self.at += size
        return self.payload[self.at - size : self.at]

    def u(self, size: int) -> int:
        return int.from_bytes(self.take(size), "little")

    def text(self) -> str:
        return self.take(self.u(4)).decode("utf-8", "surrogateescape")

    def zeros(self, size: int) -> None:
        require(not any(self.take(size)), "a reserved field is not zero")

    def done(self) -> None:
        require(self.at == len(self.payload), f"{len(self.payload) - self.at} bytes too many in a payload")


@dataclass(frozen=True, slots=True)
class Ready:
    version: int
    pid: int
    uid: int
    machine: str
    start_directory: str
    spill_directory: str


@dataclass(frozen=True, slots=True)
class Exit:
    kind: int
    value: int
    user_us: int
    system_us: int
    wall_us: int
    max_rss: int


@dataclass(frozen=True, slots=True)
class StreamEnd:
    total: int
    spill_start: int
    state: int
    path: str


@dataclass(frozen=True, slots=True)
class Failure:
    code: int
    errno: int
    message: str


def read_ready(found: Frame) -> Ready:
    scan = Scanner(found.payload)
    version = scan.u(2)
    scan.zeros(2)
    pid, uid = scan.u(4), scan.u(4)
    scan.zeros(4)
    result = Ready(version, pid, uid, scan.text(), scan.text(), scan.text())
    scan.done()
    return result


def read_exit(found: Frame) -> Exit:
    scan = Scanner(found.payload)
    kind = scan.u(1)
    scan.zeros(3)
    value = int.from_bytes(scan.take(4), "little", signed=True)
    result = Exit(kind, value, scan.u(8), scan.u(8), scan.u(8), scan.u(8))
    scan.done()
    require(kind in (EXITED, SIGNALLED, LOST), f"an exit of kind {kind}")
    return result


def read_end(found: Frame) -> tuple[StreamEnd, StreamEnd]:
    scan = Scanner(found.payload)
    both = tuple(StreamEnd(scan.u(8), scan.u(8), scan.u(4), scan.text()) for _ in range(2))
    scan.done()
    for end in both:
        require(end.state in (NONE, COMPLETE, FAILED), f"spill state {end.state}")
        require(bool(end.path) == (end.state == COMPLETE), f"{end} has a path it must not have, or lacks one")
        require(end.spill_start <= end.total, f"{end} begins after its end")
    return both[0], both[1]


def read_error(found: Frame) -> Failure:
    scan = Scanner(found.payload)
    code = scan.u(2)
    scan.zeros(2)
    result = Failure(code, scan.u(4), scan.text())
    scan.done()
    require(WORKDIR <= code <= FILE, f"error code {code}")
    return result


class Parser:
    """Cuts bytes into frames and checks what every frame must obey."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[Frame]:
        self._buffer += data
        found: list[Frame] = []
        while len(self._buffer) >= 12:
            length, kind, flags, zero, task = struct.unpack_from("<IBBHI", self._buffer)
            require(length <= MAX_TO_HOST, f"a frame of {length} bytes")
            require(kind in NAMES, f"a frame of type {kind:#x}")
            require(zero == 0, "a reserved header field is not zero")
            if len(self._buffer) < 12 + length:
                break
            frame = Frame(kind, flags, task, bytes(self._buffer[12 : 12 + length]))
            del self._buffer[: 12 + length]
            allowed = {DATA: (1, 2), SPILL: (1, 2), END: (0, 1), GONE: (0, 1)}.get(kind, (0,))
            require(flags in allowed, f"flags of {frame}")
            require((task == 0) == (kind in (READY, PONG, BYE)) or kind == ERROR, f"task number of {frame}")
            found.append(frame)
        return found

    @property
    def pending(self) -> bytes:
        return bytes(self._buffer)


@dataclass(slots=True)
class Stream:
    """What came of one stream. `data` is what is known of its end, in one piece."""

    data: bytearray = field(default_factory=bytearray)
    start: int = 0
    gaps: int = 0
    received: int = 0
    spill: tuple[int, str] | None = None

    @property
    def at(self) -> int:
        return self.start + len(self.data)

    def add(self, offset: int, data: bytes) -> None:
        require(data, "a DATA frame without data")
        require(offset >= self.at, f"DATA at {offset} after {self.at} was reached")
        if offset > self.at:
            self.gaps += 1
            self.data.clear()
            self.start = offset
        self.data += data
        self.received += len(data)


@dataclass(slots=True)
class Task:
    """One task number as the host sees it. `take` refuses whatever is not due."""

    id: int
    keep: int
    fetch: bool = False
    offset: int = 0
    state: str = "sent"
    pid: int = 0
    streams: tuple[Stream, Stream] = field(default_factory=lambda: (Stream(), Stream()))
    exit: Exit | None = None
    ends: tuple[StreamEnd, StreamEnd] | None = None
    leftovers: bool = False
    survivors: int = 0
    keeper_lost: bool = False
    error: Failure | None = None
    watch: Callable[[int, int, bytes], None] | None = None
    """Called with the stream, the offset and the bytes of each DATA: the tail alone is kept."""

    def __post_init__(self) -> None:
        if self.fetch:
            self.streams[0].start = self.offset

    @property
    def over(self) -> bool:
        return self.state in ("gone", "failed")

    @property
    def stdout(self) -> bytes:
        return bytes(self.streams[0].data)

    @property
    def stderr(self) -> bytes:
        return bytes(self.streams[1].data)

    @property
    def code(self) -> int | None:
        """The exit status, of an exit that was one."""
        return self.exit.value if self.exit and self.exit.kind == EXITED else None

    def take(self, found: Frame) -> None:
        due = f"{found} for a {'fetch' if self.fetch else 'task'} that is {self.state}"
        running = ("sent",) if self.fetch else ("started", "exited")
        if found.kind == STARTED:
            require(self.state == "sent" and not self.fetch, due)
            scan = Scanner(found.payload)
            self.state, self.pid = "started", scan.u(4)
            scan.done()
        elif found.kind == DATA:
            require(self.state in running, due)
            offset = int.from_bytes(found.payload[:8], "little")
            require(len(found.payload) <= 8 + (64 << 10), "a DATA frame of more than 64 KiB")
            require(not self.fetch or (found.flags == STDOUT and offset == self.streams[0].at), due)
            self.streams[found.flags - 1].add(offset, found.payload[8:])
            if self.watch:
                self.watch(found.flags, offset, found.payload[8:])
        elif found.kind == SPILL:
            require(self.state in running and not self.fetch, due)
            scan = Scanner(found.payload)
            self.streams[found.flags - 1].spill = (scan.u(8), scan.text())
            scan.done()
        elif found.kind == EXIT:
            self.exit = read_exit(found)
            # A keeper that is killed at once leaves a task that was never started.
            require(self.state == "started" or (self.state == "sent" and self.exit.kind == LOST), due)
            self.state = "exited"
        elif found.kind == END:
            require(self.state == ("sent" if self.fetch else "exited"), due)
            self.ends, self.leftovers, self.state = read_end(found), bool(found.flags), "ended"
            self._check_tail()
        elif found.kind == GONE:
            require(self.state == "ended", due)
            scan = Scanner(found.payload)
            self.survivors, self.keeper_lost, self.state = scan.u(4), bool(found.flags), "gone"
            scan.done()
        elif found.kind == ERROR:
            require(self.state == "sent", due)
            self.error, self.state = read_error(found), "failed"
        else:
            require(False, due)

    def _check_tail(self) -> None:
        assert self.ends is not None
        for stream, end in zip(self.streams, self.ends, strict=True):
            require(stream.at == end.total, f"END says {end.total}, the data reached {stream.at}")
            known = len(stream.data)
            require(
                self.fetch or known >= min(self.keep, end.total), f"END left a tail of {known} bytes only"
            )
