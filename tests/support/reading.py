"""What read_output must give, as a model, and commands whose output is known byte by byte."""

from __future__ import annotations

import asyncio
import codecs
from typing import TYPE_CHECKING

from corral import TaskStatus

if TYPE_CHECKING:
    from collections.abc import Sequence

    from corral import BashExecutor, BashTask, StreamRead

__all__ = ["Model", "expect_nothing_more", "read_to_the_end", "writer"]


class Model:
    """What the reads of one stream must be, given the whole stream."""

    def __init__(self, stream: bytes, limit: int) -> None:
        self._stream = stream
        self._limit = limit
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._text_from = 0
        self.at = 0
        self.dropped = 0
        self.text = ""

    def check(self, read: StreamRead, *, final: bool) -> None:
        """One read: the right bytes at the right offsets, what is missing, and the right text for both."""
        assert read.start == self.at + read.dropped_bytes
        assert read.end == read.start + len(read.data)
        assert read.data == self._stream[read.start : read.end]
        assert len(read.data) <= self._limit
        expected = ""
        if read.dropped_bytes:
            # Nothing is dropped while there is room for it.
            assert read.end - self.at > self._limit
            expected = self._decoder.decode(b"", final=True)
            self._decoder.reset()
            # What is left of a character that the gap has cut is no text, in whichever read it comes.
            self._text_from = read.start
            after = self._stream[read.start : read.start + 3]
            while after[:1] and after[0] & 0xC0 == 0x80:
                self._text_from += 1
                after = after[1:]
        expected += self._decoder.decode(
            self._stream[max(read.start, self._text_from) : read.end], final=final
        )
        assert read.text == expected
        self.text += read.text
        self.at = read.end
        self.dropped += read.dropped_bytes

    def check_end(self) -> None:
        assert self.at == len(self._stream)
        if not self.dropped:
            assert self.text == self._stream.decode(errors="replace")


async def read_to_the_end(
    on: BashExecutor,
    task: BashTask,
    streams: Sequence[bytes],
    *,
    limit: int = 64_000,
    pauses: Sequence[float] = (0,),
) -> tuple[Model, Model]:
    """Reads until the task is over, sleeping for each of the pauses in turn; checks every read."""
    models = Model(streams[0], limit), Model(streams[1], limit)
    turn = 0
    final = False
    while not final:
        await asyncio.sleep(pauses[turn % len(pauses)])
        turn += 1
        read = on.read_output(task.id)
        final = read.status is not TaskStatus.RUNNING
        for model, stream in zip(models, (read.stdout, read.stderr), strict=True):
            model.check(stream, final=final)
        assert read.lossy is bool(read.stdout.dropped_bytes or read.stderr.dropped_bytes)
    for model in models:
        model.check_end()
    expect_nothing_more(on, task, streams)
    return models


def expect_nothing_more(on: BashExecutor, task: BashTask, streams: Sequence[bytes]) -> None:
    """Reads after the end are empty, at the end of the stream, and not lossy."""
    for _ in range(2):
        read = on.read_output(task.id)
        assert (read.lossy, read.status) == (False, task.status)
        for stream, whole in zip((read.stdout, read.stderr), streams, strict=True):
            assert (stream.data, stream.text, stream.dropped_bytes) == (b"", "", 0)
            assert stream.start == stream.end == len(whole)


def writer(pieces: Sequence[tuple[int, int, float]]) -> str:
    """Bash text that copies its stdin: so many bytes to descriptor 1 or 2, then a pause, for each piece."""
    steps = [f"head -c {size} >&{fd}" + (f"; sleep {pause}" if pause else "") for size, fd, pause in pieces]
    return "\n".join(["true", *steps])
