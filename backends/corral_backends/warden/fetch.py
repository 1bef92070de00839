"""A file on its way from the place to the host."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator

from corral import PlaceError, PlaceLostError

from . import protocol
from .connection import Connection, Conversation
from .protocol import Data, End, Failed, Gone, Message, ProtocolViolation

WINDOW = 1 << 20
"""Bytes under way at most, which bounds the memory of a fetch on both sides."""


class Fetch(Conversation):
    """The host's end of one FETCH. Chunks wait in a queue that the credit bounds."""

    def __init__(self, start: int) -> None:
        self._arrived: asyncio.Queue[bytes | None] = asyncio.Queue()
        self._at = start
        self._failed: Failed | None = None
        self._credit = WINDOW
        self._ended = False
        self._lost: str | None = None

    def on_message(self, message: Message) -> bool:
        if isinstance(message, Data) and self._due(message):
            self._at += len(message.data)
            self._credit -= len(message.data)
            self._arrived.put_nowait(message.data)
            return False
        if isinstance(message, End) and message.stdout.total == self._at and not self._ended:
            self._ended = True
            return False
        if isinstance(message, Failed) and not self._ended:
            self._failed = message
        elif not (isinstance(message, Gone) and self._ended):
            msg = f"{type(message).__name__} is not due in a fetch"
            raise ProtocolViolation(msg)
        self._arrived.put_nowait(None)
        return True

    def _due(self, data: Data) -> bool:
        return (
            data.stream == 0
            and data.offset == self._at
            and 0 < len(data.data) <= self._credit
            and not self._ended
        )

    def on_lost(self, why: str) -> None:
        self._lost = why
        self._arrived.put_nowait(None)

    async def chunks(self, connection: Connection, path: str) -> AsyncIterator[bytes]:
        """The file's bytes from the offset on. Errors as in `BashExecutor.fetch`."""
        number = connection.begin(self)
        connection.send(protocol.fetch(number, protocol.encode_text(path), offset=self._at, credit=WINDOW))
        over = False
        try:
            while (chunk := await self._arrived.get()) is not None:
                yield chunk
                self._credit += len(chunk)
                connection.send(protocol.credit(number, 0, len(chunk)))
            over = True
        finally:
            if not over:  # abandoned half-way: nobody will give it credit any more
                connection.send(protocol.kill(number, 0))
        if self._lost is not None:
            msg = f"the place was lost while {path} was fetched: {self._lost}"
            raise PlaceLostError(msg, stage="fetch")
        if self._failed is not None and self._failed.errno:
            raise OSError(self._failed.errno, os.strerror(self._failed.errno), path)
        if self._failed is not None:
            msg = f"{path} could not be fetched: {self._failed.message}"
            raise PlaceError(msg, stage="fetch", retryable=True)
