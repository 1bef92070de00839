"""The host's copy of one output stream: the tail, and where the reader stands."""

from __future__ import annotations

import codecs
from pathlib import PurePosixPath

from corral import CollectedOutput, StreamRead

from .protocol import ProtocolViolation, StreamEnd


class StreamBuffer:
    """The last `limit` bytes of a stream, of which pieces arrive in order but possibly with gaps.

    All offsets count from the beginning of the whole stream. What `read` has handed out is not kept.
    """

    __slots__ = (
        "_cursor",
        "_data",
        "_decoder",
        "_limit",
        "_spill_path",
        "_spill_start",
        "_start",
        "_to_skip",
    )

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._data = bytearray()
        self._start = 0  # offset of the first byte of _data
        self._cursor = 0  # offset up to which read() has handed out
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._to_skip = 0  # how many bytes to come may be the rest of a character that a gap has cut
        self._spill_path: PurePosixPath | None = None
        self._spill_start = 0

    @property
    def end(self) -> int:
        """Offset of the next byte to come."""
        return self._start + len(self._data)

    def add(self, offset: int, data: bytes) -> None:
        """`data` is at `offset` of the stream. `ProtocolViolation` when that was there already."""
        if offset != self.end:
            if offset < self.end:
                msg = f"output at offset {offset} after offset {self.end} was reached"
                raise ProtocolViolation(msg)
            self._data.clear()  # a gap: what was before it is no tail any more
            self._start = offset
        self._data += data
        excess = len(self._data) - self._limit
        if excess > 0:
            del self._data[:excess]
            self._start += excess

    def spilling(self, path: PurePosixPath | None, start: int) -> None:
        """The file that has the whole stream from `start` on, while it is being written."""
        self._spill_path, self._spill_start = path, start

    def finish(self, end: StreamEnd) -> None:
        """The stream is complete. `ProtocolViolation` when the tail that END promises did not come."""
        if end.total != self.end:
            msg = f"output ends at {end.total}, but {self.end} was reached"
            raise ProtocolViolation(msg)
        self._spill_path, self._spill_start = end.spill_path, end.spill_start

    def collected(self) -> CollectedOutput:
        """What is known of the stream, complete or not."""
        return CollectedOutput(
            data=bytes(self._data),
            total_bytes=self.end,
            dropped_bytes=self._start,
            spill_path=self._spill_path,
            spill_start=min(self._spill_start, self.end),  # the file may be ahead of a stream that was lost
        )

    def read(self, *, final: bool) -> StreamRead:
        """What came since the previous call; `final` when no more will come."""
        data, start = bytes(self._data), self._start
        dropped = start - self._cursor
        text = ""
        if dropped:
            # The gap may begin and end inside a character: the one before it is shown as broken, and the
            # rest of the one after it, at most three continuation bytes, is left out.
            text = self._decoder.decode(b"", final=True)
            self._decoder.reset()
            self._to_skip = 3
        skipped = _continuations(data, self._to_skip)
        self._to_skip = self._to_skip - skipped if skipped == len(data) else 0
        text += self._decoder.decode(data[skipped:], final=final)
        if final:
            self._decoder.reset()
        self._data.clear()
        self._start = self._cursor = start + len(data)
        return StreamRead(
            data=data,
            text=text,
            start=start,
            end=self._cursor,
            dropped_bytes=dropped,
            spill_path=self._spill_path,
            spill_start=self._spill_start,
        )


def _continuations(data: bytes, most: int) -> int:
    count = 0
    while count < min(most, len(data)) and data[count] & 0xC0 == 0x80:
        count += 1
    return count
