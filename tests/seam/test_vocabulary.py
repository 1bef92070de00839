from __future__ import annotations

import dataclasses
from pathlib import PurePosixPath

import pytest
from hypothesis import given
from hypothesis import strategies as st

from corral import BashRunResult, BashTaskRead, CollectedOutput, EndReason, StreamRead, TaskStatus

CHARACTERS = "a\u00e4\u20ac\U0001f600\n\0"


def tail(stream: bytes, dropped: int) -> CollectedOutput:
    return CollectedOutput(
        data=stream[dropped:],
        total_bytes=len(stream),
        dropped_bytes=dropped,
        spill_path=PurePosixPath("/tmp/spill") if dropped else None,
        spill_start=0,
    )


def read(**fields: object) -> StreamRead:
    offsets = {"start": 0, "end": 0, "dropped_bytes": 0, "spill_path": None, "spill_start": 0}
    return StreamRead(**{"data": b"", "text": "", **offsets, **fields})  # type: ignore[arg-type]


class TestText:
    @given(st.text(st.sampled_from(CHARACTERS), max_size=8))
    def test_a_cut_at_any_offset_gives_the_whole_characters_after_it(self, text: str) -> None:
        stream = text.encode()
        boundaries = {len(text[:index].encode()): index for index in range(len(text) + 1)}
        for cut in range(len(stream) + 1):
            following = min(offset for offset in boundaries if offset >= cut)
            assert tail(stream, cut).text == text[boundaries[following] :], f"cut at {cut}"

    @given(st.binary(max_size=40), st.integers(0, 40))
    def test_whatever_the_bytes_only_the_beginning_of_a_cut_tail_is_skipped(
        self, stream: bytes, cut: int
    ) -> None:
        output = tail(stream, min(cut, len(stream)))
        skipped = 0
        while output.dropped_bytes and skipped < 3 and output.data[skipped : skipped + 1] in CONTINUATION:
            skipped += 1
        assert output.text == output.data[skipped:].decode(errors="replace")

    def test_nothing_is_skipped_where_nothing_was_cut(self) -> None:
        assert tail(b"\x80\x80ok", 0).text == "\ufffd\ufffdok"

    def test_at_most_three_bytes_can_belong_to_a_cut_character(self) -> None:
        assert tail(b"x\x80\x80\x80\x80ok", 1).text == "\ufffdok"

    @pytest.mark.parametrize("length", [0, 1, 2, 3])
    def test_a_tail_that_is_all_inside_one_character(self, length: int) -> None:
        stream = "\U0001f600".encode()
        assert tail(stream, 4 - length).text == ""

    @pytest.mark.parametrize("data", [b"a\r\nb", b"\r", b"\0", b"\xef\xbb\xbfbom", b"end without newline"])
    def test_line_ends_and_marks_are_kept(self, data: bytes) -> None:
        assert tail(data, 0).text.encode() == data

    def test_an_incomplete_character_at_the_end_shows(self) -> None:
        assert tail("a\u20ac".encode()[:-1], 0).text == "a\ufffd"


CONTINUATION = [bytes([value]) for value in range(0x80, 0xC0)]


class TestNumbersAddUp:
    def test_output_knows_whether_it_was_truncated(self) -> None:
        assert not tail(b"abc", 0).truncated
        assert tail(b"abc", 1).truncated
        assert tail(b"abc", 3).truncated

    @pytest.mark.parametrize(
        ("data", "total", "dropped", "spill_start"),
        [
            (b"abc", 4, 0, 0),
            (b"abc", 2, 0, 0),
            (b"abc", 3, 1, 0),
            (b"abc", 2, -1, 0),
            (b"abc", 3, 0, -1),
            (b"abc", 3, 0, 4),
        ],
    )
    def test_output_that_does_not(self, data: bytes, total: int, dropped: int, spill_start: int) -> None:
        with pytest.raises(ValueError, match="total_bytes"):
            CollectedOutput(
                data=data, total_bytes=total, dropped_bytes=dropped, spill_path=None, spill_start=spill_start
            )

    def test_reads_that_do(self) -> None:
        assert read(data=b"abc", text="abc", start=5, end=8, dropped_bytes=5).end == 8

    @pytest.mark.parametrize(
        "fields",
        [
            {"data": b"abc", "end": 2},
            {"data": b"abc", "start": 1, "end": 3},
            {"dropped_bytes": 1},
            {"start": 5, "end": 5, "dropped_bytes": 6},
            {"dropped_bytes": -1},
            {"start": -1, "end": -1},
        ],
    )
    def test_reads_that_do_not(self, fields: dict[str, object]) -> None:
        with pytest.raises(ValueError, match="start"):
            read(**fields)


def test_values_are_frozen_and_slotted_and_take_keywords_only() -> None:
    output = tail(b"abc", 0)
    with pytest.raises(dataclasses.FrozenInstanceError):
        output.data = b""  # type: ignore[misc]
    with pytest.raises((AttributeError, TypeError)):
        output.extra = 1  # type: ignore[attr-defined]
    with pytest.raises(TypeError):
        CollectedOutput(b"", 0, 0, None, 0)  # type: ignore[call-arg]
    for kind in (CollectedOutput, BashRunResult, StreamRead, BashTaskRead):
        assert all(field.kw_only for field in dataclasses.fields(kind))
        assert not hasattr(kind, "__dict__") or "__dict__" not in kind.__slots__


def test_equal_outputs_are_equal() -> None:
    assert tail(b"abc", 1) == tail(b"abc", 1)
    assert tail(b"abc", 1) != tail(b"abc", 2)


def test_reprs_show_short_output_and_are_short_for_long_output() -> None:
    assert repr(tail(b"hi\n", 0)) == (
        r"CollectedOutput(data=b'hi\n', total_bytes=3, dropped_bytes=0, spill_path=None, spill_start=0)"
    )
    assert len(repr(tail(b"x" * 64_000, 0))) < 400
    assert "b'hi'" in repr(read(data=b"hi", text="hi", end=2))
    assert len(repr(read(data=b"x" * 64_000, text="x" * 64_000, end=64_000))) < 400


def test_the_words_are_strings() -> None:
    assert {reason.value for reason in EndReason} == {
        "exited",
        "signalled",
        "timed_out",
        "aborted",
        "killed",
        "disposed",
        "out_of_memory",
        "lost",
    }
    assert {status.value for status in TaskStatus} == {"running", "finished", "failed"}
    assert f"{EndReason.TIMED_OUT} {TaskStatus.FAILED}" == "timed_out failed"
