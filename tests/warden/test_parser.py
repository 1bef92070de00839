"""The host's `FrameParser` and encoders, against arbitrary bytes and against counterparts written apart."""

from __future__ import annotations

import struct
from pathlib import PurePosixPath

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from corral_backends.warden import protocol
from corral_backends.warden.protocol import FrameParser, Message, ProtocolViolation
from tests.warden import frames, peer
from tests.warden.frames import Scanner, frame

MOST = 12 + frames.MAX_TO_HOST


def fed(pieces: list[bytes]) -> tuple[list[Message], bool]:
    """The messages of these pieces, and whether a violation ended them, which alone may."""
    parser, found = FrameParser(), list[Message]()
    for piece in pieces:
        try:
            found.extend(parser.feed(piece))
        except ProtocolViolation:
            # What was complete before the violation has to have come out: take it from a parser of its own.
            return found + prefix(pieces, len(found)), True
        assert parser.pending < MOST
    return found, False


def prefix(pieces: list[bytes], have: int) -> list[Message]:
    """What a parser hands out before the violation, message by message."""
    parser, found = FrameParser(), list[Message]()
    try:
        for piece in pieces:
            for message in parser.feed(piece):
                found.append(message)
    except ProtocolViolation:
        pass
    return found[have:]


def split(data: bytes, cuts: list[int]) -> list[bytes]:
    at = sorted({cut % (len(data) + 1) for cut in cuts})
    return [data[a:b] for a, b in zip([0, *at], [*at, len(data)], strict=True)]


u32, u64 = st.integers(0, (1 << 32) - 1), st.integers(0, (1 << 64) - 1)
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
paths = st.builds("/{}".format, st.from_regex(r"[a-zA-Z0-9_.-]{1,20}", fullmatch=True))
tasks = st.integers(1, (1 << 32) - 1)


@st.composite
def stream_ends(draw: st.DrawFn) -> tuple[bytes, protocol.StreamEnd]:
    total = draw(u64)
    state = draw(st.sampled_from(list(protocol.SpillState)))
    start = draw(st.integers(0, total))
    path = draw(paths) if state is protocol.SpillState.COMPLETE else ""
    known = PurePosixPath(path) if path else None
    return peer.stream_end(total, start, state, path), protocol.StreamEnd(total, start, state, known)


@st.composite
def messages(draw: st.DrawFn) -> tuple[bytes, Message]:
    """A frame, and the message that it stands for."""
    task, stream = draw(tasks), draw(st.integers(0, 1))
    kind = draw(st.integers(0, 9))
    if kind == 0:
        pid, uid, spill = draw(u32), draw(u32), draw(paths)
        message = protocol.Ready(1, pid, uid, "riscv", PurePosixPath("/"), PurePosixPath(spill))
        return peer.ready(pid=pid, uid=uid, machine="riscv", spill=spill), message
    if kind == 1:
        pid = draw(u32)
        return peer.started(task, pid), protocol.Started(task, pid)
    if kind == 2:
        offset, content = draw(st.integers(0, 1 << 62)), draw(st.binary(min_size=1, max_size=300))
        return peer.data(task, stream + 1, offset, content), protocol.Data(task, stream, offset, content)
    if kind == 3:
        start, path = draw(u64), draw(paths | st.just(""))
        known = PurePosixPath(path) if path else None
        return peer.spill(task, stream + 1, start, path), protocol.Spill(task, stream, start, known)
    if kind == 4:
        how = draw(st.sampled_from(list(protocol.ExitKind)))
        values = {1: st.integers(0, 255), 2: st.integers(1, 64), 3: st.just(0)}
        value, wall = draw(values[how]), draw(u64)
        return peer.exited(task, how, value, wall), protocol.Exit(task, how, value, 10, 20, wall, 3000)
    if kind == 5:
        (out, stdout), (err, stderr), leftovers = (
            draw(stream_ends()),
            draw(stream_ends()),
            draw(st.booleans()),
        )
        return peer.end(task, out, err, leftovers=leftovers), protocol.End(task, leftovers, stdout, stderr)
    if kind == 6:
        survivors, lost = draw(u32), draw(st.booleans())
        return peer.gone(task, survivors, keeper_lost=lost), protocol.Gone(task, survivors, lost)
    if kind == 7:
        code, errno, message = (
            draw(st.sampled_from(list(protocol.ErrorCode))),
            draw(st.integers(0, 4095)),
            draw(texts),
        )
        number = draw(st.just(0) | tasks)
        return peer.error(number, code, errno, message), protocol.Failed(number, code, errno, message)
    if kind == 8:
        token = draw(u64)
        return peer.pong(token), protocol.Pong(token)
    return peer.BYE, protocol.Bye()


@given(st.lists(messages(), max_size=12), st.lists(st.integers(0, 5000), max_size=20))
def test_messages_come_out_as_they_went_in(said: list[tuple[bytes, Message]], cuts: list[int]) -> None:
    data = b"".join(encoded for encoded, _ in said)
    assert fed(split(data, cuts)) == ([message for _, message in said], False)


@given(st.binary(max_size=2000), st.lists(st.integers(0, 2000), max_size=10))
def test_arbitrary_bytes(data: bytes, cuts: list[int]) -> None:
    assert fed(split(data, cuts)) == fed([data])


@settings(max_examples=300)
@given(
    st.lists(messages(), min_size=1, max_size=5),
    st.lists(st.tuples(st.integers(0, 2000), st.integers(0, 255)), max_size=4),
    st.lists(st.integers(0, 3000), max_size=6),
    st.binary(max_size=20),
)
def test_damaged_messages(
    said: list[tuple[bytes, Message]], damage: list[tuple[int, int]], cuts: list[int], rest: bytes
) -> None:
    data = bytearray(b"".join(encoded for encoded, _ in said) + rest)
    for at, value in damage:
        data[at % len(data)] = value
    assert fed(split(bytes(data), cuts)) == fed([bytes(data)])


@given(messages(), st.integers(0, 400))
def test_a_payload_cut_short_is_a_violation_or_another_message(said: tuple[bytes, Message], cut: int) -> None:
    encoded, message = said
    payload = encoded[12:]
    shorter = payload[: cut % len(payload)] if payload else b""
    if shorter == payload:
        return
    found, violated = fed([len(shorter).to_bytes(4, "little") + encoded[4:12] + shorter])
    # Only the bytes of a DATA frame have no length of their own.
    assert violated or (isinstance(message, protocol.Data) and len(shorter) >= 8 and found != [message])


@pytest.mark.parametrize(
    "encoded",
    [
        frame(0x80),
        frame(0x8B),
        frame(frames.HELLO),
        frame(frames.BYE, b"x"),
        frame(frames.BYE, zero=1),
        frame(frames.BYE, flags=1),
        frame(frames.DATA, bytes(9), task=1, flags=0),
        frame(frames.DATA, bytes(9), task=1, flags=3),
        frame(frames.SPILL, bytes(12), task=1, flags=0),
        frame(frames.GONE, bytes(4), task=1, flags=2),
        frame(frames.END, peer.stream_end(0) * 2, task=1, flags=0x81),
        peer.spill(1, 1, 0, "relative"),
        peer.exited(1, 0, 0),
        peer.exited(1, 4, 0),
        peer.exited(1, frames.EXITED, 256),
        peer.exited(1, frames.EXITED, -1),
        peer.exited(1, frames.SIGNALLED, 0),
        peer.exited(1, frames.SIGNALLED, 129),
        peer.exited(1, frames.LOST, 1),
        peer.end(1, peer.stream_end(5, 6), peer.stream_end(0)),
        peer.end(1, peer.stream_end(5, 0, 3), peer.stream_end(0)),
        peer.end(1, peer.stream_end(5, 0, frames.COMPLETE), peer.stream_end(0)),
        peer.end(1, peer.stream_end(5, 0, frames.COMPLETE, "relative"), peer.stream_end(0)),
        peer.end(1, peer.stream_end(0), peer.stream_end(5, 0, frames.NONE, "/path")),
        peer.error(1, 0),
        peer.error(1, 8),
        peer.error(1, 1, 4096),
        peer.error(1, 1, (1 << 32) - 1),
        struct.pack("<IBBHI", frames.MAX_TO_HOST + 1, frames.DATA, 1, 0, 1),
        struct.pack("<IBBHI", 0xFFFFFFFF, frames.PONG, 0, 0, 0),
    ],
)
def test_what_a_warden_must_not_say(encoded: bytes) -> None:
    assert fed([encoded]) == ([], True)
    assert fed([encoded[at : at + 1] for at in range(len(encoded))]) == ([], True)


def test_a_header_that_promises_too_much_is_refused_at_once() -> None:
    header = struct.pack("<IBBHI", frames.MAX_TO_HOST + 1, frames.DATA, 1, 0, 1)
    with pytest.raises(ProtocolViolation):
        list(FrameParser().feed(header))


def test_the_largest_frame_in_small_pieces() -> None:
    content = bytes(frames.MAX_TO_HOST - 8)
    encoded = peer.data(1, 1, 0, content)
    found, violated = fed([encoded[at : at + 4000] for at in range(0, len(encoded), 4000)])
    assert not violated
    assert found == [protocol.Data(1, 0, 0, content)]


# --- what the host says

environments = st.dictionaries(
    st.from_regex(r"[A-Za-z_][A-Za-z0-9_]{0,8}", fullmatch=True),
    st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=20),
    max_size=5,
)


def whole(frames_: list[bytes]) -> list[frames.Frame]:
    return peer.Heard().feed(frames.hello() + b"".join(frames_))[1:]


def environment(scan: Scanner) -> dict[str, str]:
    entries = scan.take(scan.u(4)).decode("utf-8", "surrogateescape")
    assert not entries or entries.endswith("\0")
    return dict(entry.split("=", 1) for entry in entries.split("\0")[:-1])


@given(u32, st.integers(1, 16 << 20), u64, u64, paths, paths, environments)
def test_hello(
    lease: int, ring: int, cap: int, total: int, parent: str, shell: str, env: dict[str, str]
) -> None:
    encoded = protocol.hello(
        lease_ms=lease,
        ring_bytes=ring,
        spill_cap=cap,
        spill_total=total,
        spill_parent=parent,
        shell=shell,
        env=env,
    )
    (found,) = peer.Heard().feed(encoded)
    scan = Scanner(found.payload)
    assert scan.take(4) == b"CRRL"
    assert [scan.u(2), scan.u(2), scan.u(4), scan.u(4), scan.u(8), scan.u(8)] == [
        1,
        0,
        lease,
        ring,
        cap,
        total,
    ]
    assert [scan.text(), scan.text(), environment(scan)] == [parent, shell, env]
    scan.done()


@settings(max_examples=60)
@given(
    tasks,
    st.binary(max_size=100).map(lambda raw: raw.replace(b"\0", b"x")),
    st.sampled_from([1, 1, 1, 2000, 9000]),
    st.none() | st.binary(max_size=50),
    st.sampled_from([1, 1, 20_000]),
    environments,
    u64,
)
def test_start_and_what_follows_it(
    task: int, text: bytes, times: int, stdin: bytes | None, more: int, env: dict[str, str], credit: int
) -> None:
    command, given_stdin = text * times, None if stdin is None else stdin * more
    encoded = protocol.start(task, command=command, stdin=given_stdin, workdir=b"/w", env=env, credit=credit)
    first, *rest = whole(list(encoded))
    assert first.kind == frames.START
    assert {found.task for found in (first, *rest)} == {task}
    scan = Scanner(first.payload)
    flags, size, stdin_size = scan.u(4), scan.u(8), scan.u(8)
    assert (flags, size, stdin_size) == (stdin is not None, len(command), len(given_stdin or b""))
    assert (scan.u(8), scan.text(), environment(scan)) == (credit, "/w", env)
    sent = {frames.TEXT: first.payload[scan.at :], frames.STDIN: b""}
    for found in rest:
        assert found.payload, "an empty frame says nothing"
        sent[found.kind] += found.payload
    assert sent == {frames.TEXT: command, frames.STDIN: given_stdin or b""}


@given(tasks, u32, st.integers(0, 1), u64, paths)
def test_small_frames(task: int, number: int, stream: int, large: int, path: str) -> None:
    found = whole(
        [
            protocol.fetch(task, path.encode(), offset=large, credit=number),
            protocol.kill(task, number),
            protocol.credit(task, stream, number),
            protocol.ping(large),
            protocol.shutdown(number),
            protocol.forget(task),
        ]
    )
    u4, u8 = struct.pack("<I", number), struct.pack("<Q", large)
    path_text = frames.text(path)
    assert [(f.kind, f.flags, f.task, f.payload) for f in found] == [
        (frames.FETCH, 0, task, u8 + struct.pack("<Q", number) + path_text),
        (frames.KILL, 0, task, u4),
        (frames.CREDIT, stream + 1, task, u4),
        (frames.PING, 0, 0, u8),
        (frames.SHUTDOWN, 0, 0, u4),
        (frames.FORGET, 0, task, b""),
    ]
