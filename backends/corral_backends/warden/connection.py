"""A live session with one warden: frames out, checked messages in."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from typing import Protocol, TypeVar

from corral import PlaceOpenError

from . import protocol
from .place import DuplexStream
from .protocol import Bye, ErrorCode, Failed, FrameParser, Message, Pong, ProtocolViolation, Ready


class Conversation(ABC):
    """What a task number of the session stands for: a command, or a fetch."""

    number: int = 0

    @abstractmethod
    def on_message(self, message: Message) -> bool:
        """Take a message with this number; `True` when it was the last. `ProtocolViolation` if it is not
        due."""

    @abstractmethod
    def on_lost(self, why: str) -> None:
        """The session ended before the last message came."""


C = TypeVar("C", bound=Conversation)


class Owner(Protocol):
    """Who is told that a session ended."""

    def on_session_lost(self, connection: Connection, why: str) -> None:
        """Once, after every conversation was told; not for a session that never got ready."""


class Connection:
    """One session: the greeting, the conversations, the good-bye.

    The place is not believed: whatever does not fit the protocol ends the session.
    """

    def __init__(self, stream: DuplexStream, owner: Owner) -> None:
        loop = asyncio.get_running_loop()
        self._stream = stream
        self._owner = owner
        self._parser = FrameParser()
        self._last_number = 0
        self._conversations: dict[int, Conversation] = {}
        self._ready: asyncio.Future[Ready] = loop.create_future()
        self._over: asyncio.Future[None] = loop.create_future()
        self._why = ""
        self.said_bye = False
        self.heard = 0
        """How many messages came: a sign of life."""

    @property
    def alive(self) -> bool:
        return not self._over.done()

    async def open(self, hello: bytes) -> Ready:
        """Greet the warden. `PlaceOpenError` when it does not answer as it should."""
        self._stream.start(self)
        self._stream.write(hello)
        try:
            return await self._ready
        except BaseException:
            self.close()
            raise

    def begin(self, conversation: Conversation) -> int:
        """Give it a task number that was never used in this session, and the messages with that number."""
        self._last_number += 1
        conversation.number = self._last_number
        self._conversations[self._last_number] = conversation
        return self._last_number

    def commands(self, kind: type[C]) -> list[C]:
        """The conversations of that kind which are not over."""
        return [known for known in self._conversations.values() if isinstance(known, kind)]

    def send(self, *frames: bytes) -> None:
        """Send frames, without waiting. Nothing happens once the session is over."""
        if self.alive:
            for frame in frames:
                self._stream.write(frame)

    @property
    def unsent(self) -> int:
        """How many bytes still wait for the stream to take them."""
        return self._stream.unsent

    def close(self) -> None:
        """Cut the stream. It is over at once; the warden takes that for the end of the host and kills all."""
        self._stream.close()
        self.ended(None)

    async def wait_over(self, seconds: float) -> bool:
        """Whether the stream ended within that time."""
        done, _ = await asyncio.wait({self._over}, timeout=seconds)
        return bool(done)

    # --- what the stream calls (`Receiver`)

    def received(self, data: bytes) -> None:
        if not self.alive:
            return
        try:
            for message in self._parser.feed(data):
                self._take(message)
        except ProtocolViolation as violation:
            self._why = f"the warden broke the protocol: {violation}"
            self.close()

    def ended(self, error: Exception | None) -> None:
        if not self.alive:
            return
        self._over.set_result(None)
        why = self._why or (str(error) if error else "the stream to the warden ended")
        if not self._ready.done():
            self._ready.set_exception(PlaceOpenError(f"no session with the warden: {why}", stage="greet"))
            return
        lost = list(self._conversations.values())
        self._conversations.clear()
        for conversation in lost:
            conversation.on_lost(why)
        self._owner.on_session_lost(self, why)

    def _take(self, message: Message) -> None:
        self.heard += 1
        if not self._ready.done():
            self._greeted(message)
        elif isinstance(message, Ready) or self.said_bye:
            msg = f"{type(message).__name__} is not allowed any more"
            raise ProtocolViolation(msg)
        elif isinstance(message, Bye):
            self.said_bye = True
        elif isinstance(message, Failed) and message.code is ErrorCode.PROTOCOL:
            self._why = f"the warden did not understand: {message.message}"
        elif not isinstance(message, Pong):
            conversation = self._conversations.get(message.task)
            if conversation is None:
                msg = f"{type(message).__name__} for {message.task}, which is no task"
                raise ProtocolViolation(msg)
            if conversation.on_message(message):
                del self._conversations[message.task]

    def _greeted(self, message: Message) -> None:
        if isinstance(message, Failed):
            self._why = message.message
        elif isinstance(message, Ready) and message.version == protocol.VERSION:
            self._ready.set_result(message)
        else:
            msg = f"{type(message).__name__} came before Ready"
            raise ProtocolViolation(msg)
