"""`StreamBuffer` against a model that keeps the whole stream."""

from __future__ import annotations

from pathlib import PurePosixPath

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from corral_backends.warden.output import StreamBuffer
from corral_backends.warden.protocol import ProtocolViolation, SpillState, StreamEnd

# What arrives: the next piece, and how many bytes were skipped before it. Or a read.
piece = st.tuples(st.sampled_from([0, 0, 0, 1, 7, 1000]), st.binary(min_size=1, max_size=40))
steps = st.lists(st.one_of(piece, st.just("read"), st.just("look")), max_size=30)
limits = st.sampled_from([1, 2, 3, 10, 50, 10_000])


class Model:
    """The stream with every byte that came; those that did not are None."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.bytes: list[int | None] = []
        self.cursor = 0

    def add(self, skipped: int, content: bytes) -> None:
        self.bytes += [None] * skipped
        self.bytes += content

    def tail(self) -> tuple[int, bytes]:
        """Offset and content of what a reader can get now: no gap, no more than the limit, nothing twice."""
        at = len(self.bytes)
        while at > self.cursor and len(self.bytes) - at < self.limit and self.bytes[at - 1] is not None:
            at -= 1
        return at, bytes(byte for byte in self.bytes[at:] if byte is not None)


@settings(max_examples=200)
@given(limits, steps)
def test_against_the_model(limit: int, taken: list[tuple[int, bytes] | str]) -> None:
    buffer, model = StreamBuffer(limit), Model(limit)
    for step in [*taken, "look", "read", "read"]:
        start, content = model.tail()
        if step == "read":
            found = buffer.read(final=False)
            assert (found.start, found.end, found.data) == (start, len(model.bytes), content)
            assert found.dropped_bytes == start - model.cursor
            model.cursor = len(model.bytes)
        elif step == "look":
            seen = buffer.collected()
            assert (seen.data, seen.total_bytes, seen.dropped_bytes) == (content, len(model.bytes), start)
            assert seen.truncated == (start > 0)
            assert buffer.end == len(model.bytes)
        elif isinstance(step, tuple):
            buffer.add(len(model.bytes) + step[0], step[1])
            model.add(*step)


@given(limits, st.lists(st.binary(min_size=1, max_size=30), min_size=1, max_size=10), st.integers(1, 100))
def test_what_was_there_already_is_a_violation(limit: int, pieces: list[bytes], back: int) -> None:
    buffer = StreamBuffer(limit)
    for content in pieces:
        buffer.add(buffer.end, content)
    with pytest.raises(ProtocolViolation):
        buffer.add(max(0, buffer.end - back), b"again")


@given(st.text(max_size=60), st.lists(st.integers(0, 300), max_size=12), st.booleans())
def test_a_character_is_never_split_between_reads(text: str, cuts: list[int], read_often: bool) -> None:
    raw = text.encode("utf-8", "surrogatepass")
    buffer, found, whole = StreamBuffer(10_000), "", b""
    at = sorted({cut % (len(raw) + 1) for cut in cuts})
    for begin, finish in zip([0, *at], [*at, len(raw)], strict=True):
        buffer.add(begin, raw[begin:finish])
        if read_often:
            read = buffer.read(final=False)
            found += read.text
            whole += read.data
    read = buffer.read(final=True)
    assert whole + read.data == raw
    assert found + read.text == raw.decode("utf-8", "replace")


@settings(max_examples=200)
@given(
    st.text(st.sampled_from("ab\u00e9\u20ac\U0001d11e"), max_size=40),
    st.lists(st.tuples(st.integers(0, 6), st.integers(1, 8)), max_size=8),
)
def test_a_gap_breaks_no_more_than_the_character_that_it_begins_in(
    text: str, parts: list[tuple[int, int]]
) -> None:
    """Valid text with holes: at each, at most one character is shown as broken, however the rest is read."""
    raw, buffer, found, at, gaps = text.encode(), StreamBuffer(10_000), "", 0, 0
    for skipped, size in parts:
        at += skipped
        content = raw[at : at + size]
        if content:
            gaps += skipped > 0
            buffer.add(at, content)
            at += len(content)
            found += buffer.read(final=False).text
    found += buffer.read(final=True).text
    assert found.count("\ufffd") <= gaps + 1, "and one at the end, where the text is cut off"


def test_after_a_gap_the_rest_of_the_cut_character_may_come_in_pieces() -> None:
    buffer = StreamBuffer(100)
    clef = "𝄞a".encode()
    buffer.add(0, b"x")
    assert buffer.read(final=False).text == "x"
    found = ""
    for at in range(1, len(clef)):
        buffer.add(1 + at, clef[at : at + 1])
        found += buffer.read(final=False).text
    assert found == "a"


def test_three_continuation_bytes_are_all_that_can_belong_to_a_cut_character() -> None:
    buffer = StreamBuffer(100)
    buffer.add(7, b"\x80" * 5 + b"a")
    assert buffer.read(final=True).text == "\ufffd\ufffda"


@given(st.lists(piece, max_size=8), st.integers(-2, 2))
def test_the_end_must_be_where_the_data_is(pieces: list[tuple[int, bytes]], off: int) -> None:
    buffer = StreamBuffer(10)
    for skipped, content in pieces:
        buffer.add(buffer.end + skipped, content)
    total = max(0, buffer.end + off)
    path = PurePosixPath("/spill")
    end = StreamEnd(total, min(3, total), SpillState.COMPLETE, path)
    if total != buffer.end:
        with pytest.raises(ProtocolViolation):
            buffer.finish(end)
        return
    buffer.finish(end)
    seen = buffer.collected()
    assert (seen.spill_path, seen.spill_start) == (path, min(3, total))


def test_memory_is_bounded_by_the_limit() -> None:
    buffer = StreamBuffer(1000)
    for number in range(2000):
        buffer.add(number * 65_536, bytes(65_536))
        assert len(buffer.collected().data) == 1000


def test_a_spill_is_told_while_it_is_written() -> None:
    buffer = StreamBuffer(10)
    buffer.add(0, b"x" * 20)
    buffer.spilling(PurePosixPath("/spill"), 5)
    read = buffer.read(final=False)
    assert (read.spill_path, read.spill_start, read.dropped_bytes) == (PurePosixPath("/spill"), 5, 10)
    buffer.spilling(None, 0)
    assert buffer.read(final=False).spill_path is None
