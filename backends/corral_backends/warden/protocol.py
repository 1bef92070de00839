"""Frames and messages of the warden protocol, version 1. `src/PROTOCOL.md` is the reference.

Everything that comes from the stream is hostile input: a place may be under the control of the commands that
run in it. `FrameParser` bounds every length and accepts only what the protocol allows; anything else is a
`ProtocolViolation`, after which the stream is of no more use."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import IntEnum
from pathlib import PurePosixPath
from typing import Final, TypeAlias

VERSION: Final = 1

HEADER: Final = struct.Struct("<IBBHI")
MAX_FRAME_IN: Final = 1 << 20
"""Longest payload that the host accepts."""
MAX_FRAME_OUT: Final = 8 << 20
"""Longest payload that the warden accepts."""
CHUNK: Final = 256 << 10
"""Payload size of the TEXT and STDIN frames that carry what does not fit into START."""
MAX_TEXT_BYTES: Final = 1 << 30
"""Longest command and longest stdin, each."""
INLINE_COMMAND: Final = 128 << 10
"""How much of a command START itself carries."""
MAX_ERRNO: Final = 4095
"""The kernel's own bound on error numbers."""
MAX_CREDIT: Final = 16 << 20
"""Credit of a stream saturates here."""


class FrameType(IntEnum):
    HELLO = 0x01
    START = 0x02
    TEXT = 0x03
    STDIN = 0x04
    KILL = 0x05
    CREDIT = 0x06
    PING = 0x07
    SHUTDOWN = 0x08
    FORGET = 0x09
    FETCH = 0x0A
    READY = 0x81
    STARTED = 0x82
    DATA = 0x83
    EXIT = 0x84
    END = 0x85
    GONE = 0x86
    ERROR = 0x87
    PONG = 0x88
    BYE = 0x89
    SPILL = 0x8A


class ErrorCode(IntEnum):
    WORKDIR = 1
    SHELL = 2
    SPAWN = 3
    TOO_LARGE = 4
    PROTOCOL = 5
    REFUSED = 6
    FILE = 7


class ExitKind(IntEnum):
    EXITED = 1
    SIGNALLED = 2
    LOST = 3


class SpillState(IntEnum):
    NONE = 0
    COMPLETE = 1
    FAILED = 2


class ProtocolViolation(Exception):  # noqa: N818  # not an error of the caller's, and never shown to one
    """The other end said something that the protocol does not allow."""


@dataclass(frozen=True, slots=True)
class Ready:
    version: int
    pid: int
    uid: int
    machine: str
    start_directory: PurePosixPath
    spill_directory: PurePosixPath


@dataclass(frozen=True, slots=True)
class Started:
    task: int
    pid: int


@dataclass(frozen=True, slots=True)
class Data:
    task: int
    stream: int
    """0 is stdout, 1 is stderr."""
    offset: int
    data: bytes


@dataclass(frozen=True, slots=True)
class Exit:
    task: int
    kind: ExitKind
    value: int
    """The status, or the number of the signal."""
    user_us: int
    system_us: int
    wall_us: int
    max_rss_kib: int


@dataclass(frozen=True, slots=True)
class Spill:
    task: int
    stream: int
    start: int
    path: PurePosixPath | None


@dataclass(frozen=True, slots=True)
class StreamEnd:
    total: int
    spill_start: int
    spill_state: SpillState
    spill_path: PurePosixPath | None


@dataclass(frozen=True, slots=True)
class End:
    task: int
    leftovers: bool
    stdout: StreamEnd
    stderr: StreamEnd


@dataclass(frozen=True, slots=True)
class Gone:
    task: int
    survivors: int
    keeper_lost: bool


@dataclass(frozen=True, slots=True)
class Failed:
    """ERROR. Task 0 is the session."""

    task: int
    code: ErrorCode
    errno: int
    message: str


@dataclass(frozen=True, slots=True)
class Pong:
    token: int


@dataclass(frozen=True, slots=True)
class Bye:
    pass


Message: TypeAlias = Ready | Started | Data | Spill | Exit | End | Gone | Failed | Pong | Bye


# --- host to warden


def _frame(kind: FrameType, task: int, *parts: bytes, flags: int = 0) -> bytes:
    return b"".join((HEADER.pack(sum(map(len, parts)), kind, flags, 0, task), *parts))


def _text(data: bytes) -> bytes:
    return struct.pack("<I", len(data)) + data


def encode_text(text: str) -> bytes:
    """Text as the place gets it: what `os.fsdecode` made of arbitrary bytes comes out as those bytes."""
    return text.encode("utf-8", "surrogateescape")


def _environment(env: Mapping[str, str]) -> bytes:
    return _text(b"".join(encode_text(f"{name}={value}") + b"\0" for name, value in env.items()))


def hello(
    *,
    lease_ms: int,
    ring_bytes: int,
    spill_cap: int,
    spill_total: int,
    spill_parent: str,
    shell: str,
    env: Mapping[str, str],
) -> bytes:
    head = b"CRRL" + struct.pack("<HHIIQQ", VERSION, 0, lease_ms, ring_bytes, spill_cap, spill_total)
    texts = (_text(encode_text(spill_parent)), _text(encode_text(shell)), _environment(env))
    return _frame(FrameType.HELLO, 0, head, *texts)


def start(
    task: int, *, command: bytes, stdin: bytes | None, workdir: bytes, env: Mapping[str, str], credit: int
) -> Iterable[bytes]:
    """START, and the TEXT and STDIN frames with what does not fit into it."""
    head = struct.pack("<IQQQ", stdin is not None, len(command), len(stdin or b""), credit)
    first = command[:INLINE_COMMAND]
    yield _frame(FrameType.START, task, head, _text(workdir), _environment(env), first)
    for kind, data, sent in ((FrameType.TEXT, command, len(first)), (FrameType.STDIN, stdin or b"", 0)):
        for at in range(sent, len(data), CHUNK):
            yield _frame(kind, task, data[at : at + CHUNK])


def kill(task: int, grace_ms: int) -> bytes:
    return _frame(FrameType.KILL, task, struct.pack("<I", grace_ms))


def credit(task: int, stream: int, size: int) -> bytes:
    return _frame(FrameType.CREDIT, task, struct.pack("<I", size), flags=stream + 1)


def ping(token: int) -> bytes:
    return _frame(FrameType.PING, 0, struct.pack("<Q", token))


def shutdown(grace_ms: int) -> bytes:
    return _frame(FrameType.SHUTDOWN, 0, struct.pack("<I", grace_ms))


def forget(task: int) -> bytes:
    return _frame(FrameType.FORGET, task)


def fetch(task: int, path: bytes, *, offset: int, credit: int) -> bytes:
    return _frame(FrameType.FETCH, task, struct.pack("<QQ", offset, credit), _text(path))


# --- warden to host


class _Reader:
    """Takes fields off the front of a payload; running out of bytes is a violation."""

    __slots__ = ("_at", "_data")

    def __init__(self, data: bytes | memoryview) -> None:
        self._data = data
        self._at = 0

    def take(self, size: int) -> bytes:
        end = self._at + size
        if end > len(self._data):
            msg = "a payload is too short"
            raise ProtocolViolation(msg)
        taken = bytes(self._data[self._at : end])
        self._at = end
        return taken

    def unpack(self, layout: struct.Struct) -> tuple[int, ...]:
        return layout.unpack(self.take(layout.size))

    def text(self) -> str:
        (size,) = self.unpack(_U32)
        return self.take(size).decode("utf-8", "surrogateescape")

    def end(self) -> None:
        if self._at != len(self._data):
            msg = "a payload is too long"
            raise ProtocolViolation(msg)


_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")
_READY = struct.Struct("<HHIII")
_EXIT = struct.Struct("<B3xiQQQQ")
_STREAM_END = struct.Struct("<QQI")
_ERROR = struct.Struct("<HHI")


def _parse_ready(reader: _Reader) -> Ready:
    version, _, pid, uid, _ = reader.unpack(_READY)
    machine, start_directory, spill_directory = reader.text(), reader.text(), reader.text()
    return Ready(version, pid, uid, machine, PurePosixPath(start_directory), PurePosixPath(spill_directory))


def _parse_exit(reader: _Reader, task: int) -> Exit:
    kind, value, *rest = reader.unpack(_EXIT)
    known = ExitKind(kind)
    limit = {ExitKind.EXITED: range(256), ExitKind.SIGNALLED: range(1, 129), ExitKind.LOST: range(1)}[known]
    if value not in limit:
        msg = f"an exit of kind {known.name} with the value {value}"
        raise ProtocolViolation(msg)
    return Exit(task, known, value, *rest)


def _parse_stream_end(reader: _Reader) -> StreamEnd:
    total, spill_start, state = reader.unpack(_STREAM_END)
    path, known = reader.text(), SpillState(state)
    if (known is SpillState.COMPLETE) != path.startswith("/") or spill_start > total:
        msg = "a spill that contradicts itself"
        raise ProtocolViolation(msg)
    return StreamEnd(total, spill_start, known, PurePosixPath(path) if path else None)


def _parse(kind: int, flags: int, task: int, payload: bytes | memoryview) -> Message:
    reader = _Reader(payload)
    message: Message
    if kind == FrameType.DATA and flags in (1, 2):
        (offset,) = reader.unpack(_U64)
        return Data(task, flags - 1, offset, reader.take(len(payload) - _U64.size))
    if kind == FrameType.SPILL and flags in (1, 2):
        (start,), path = reader.unpack(_U64), reader.text()
        if path and not path.startswith("/"):
            msg = "a spill path that is not absolute"
            raise ProtocolViolation(msg)
        reader.end()
        return Spill(task, flags - 1, start, PurePosixPath(path) if path else None)
    if flags and not (flags == 1 and kind in (FrameType.END, FrameType.GONE)):
        msg = f"flags {flags} on a frame of type {kind:#x}"
        raise ProtocolViolation(msg)
    if kind == FrameType.STARTED:
        message = Started(task, *reader.unpack(_U32))
    elif kind == FrameType.EXIT:
        message = _parse_exit(reader, task)
    elif kind == FrameType.END:
        message = End(task, bool(flags), _parse_stream_end(reader), _parse_stream_end(reader))
    elif kind == FrameType.GONE:
        (survivors,) = reader.unpack(_U32)
        message = Gone(task, survivors, bool(flags))
    elif kind == FrameType.ERROR:
        code, _, errno = reader.unpack(_ERROR)
        if errno > MAX_ERRNO:
            msg = f"an error number of {errno}"
            raise ProtocolViolation(msg)
        message = Failed(task, ErrorCode(code), errno, reader.text())
    elif kind == FrameType.READY:
        message = _parse_ready(reader)
    elif kind == FrameType.PONG:
        message = Pong(*reader.unpack(_U64))
    elif kind == FrameType.BYE:
        message = Bye()
    else:
        msg = f"an unknown frame type {kind:#x}"
        raise ProtocolViolation(msg)
    reader.end()
    return message


class FrameParser:
    """Cuts a stream into messages, whatever pieces it comes in. Holds at most one frame that is not whole."""

    __slots__ = ("_rest",)

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> Iterable[Message]:
        """The messages that `data` completes. `ProtocolViolation` ends it for good."""
        if self._rest:
            data = self._rest + data
            self._rest = b""
        view, at, end = memoryview(data), 0, len(data)
        while end - at >= HEADER.size:
            size, kind, flags, zero, task = HEADER.unpack_from(data, at)
            if size > MAX_FRAME_IN or zero:
                msg = f"a frame of {size} bytes, reserved field {zero}"
                raise ProtocolViolation(msg)
            whole = HEADER.size + size
            if end - at < whole:
                break
            try:
                message = _parse(kind, flags, task, view[at + HEADER.size : at + whole])
            except ValueError as error:  # a number outside its enumeration
                raise ProtocolViolation(str(error)) from None
            at += whole
            yield message
        self._rest = data[at:]

    @property
    def pending(self) -> int:
        """Bytes of a frame that is not whole yet."""
        return len(self._rest)
