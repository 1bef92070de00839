"""A peer that plays scripts, for tests of the host (`peer.py` is what it stands on)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeAlias

from hypothesis import HealthCheck, settings

from corral import (
    AbortController,
    BashExecRequest,
)
from corral_backends.warden import WardenConfig, WardenExecutor
from tests.warden import frames, peer
from tests.warden.frames import Frame
from tests.warden.peer import Peer, PeerPlace, PeerStream

GRACE_MS, TIMEOUT_MS = 400, 2_000
LIMIT = 64_000
SETTINGS = settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large]
)


def executor(talker: Peer) -> tuple[WardenExecutor, PeerPlace]:
    place = PeerPlace(talker)
    config = WardenConfig(
        kill_grace_ms=GRACE_MS, timeout_ms=TIMEOUT_MS, max_output_bytes=LIMIT, open_timeout_ms=5_000
    )
    return WardenExecutor(place, config), place


def request(text: str = "true", abort: AbortController | None = None) -> BashExecRequest:
    return BashExecRequest(command=text, signal=abort.signal if abort else None)


# --- a peer that keeps to the protocol, but for what its script says


Step: TypeAlias = tuple[float, bytes | str]
"""Seconds to wait, then what to say; or "hang up", or "broken"."""


@dataclass
class Scripted(Peer):
    """Greets, and plays a script for each START and FETCH. `{n}` of a step is the task's number."""

    scripts: list[Callable[[int], list[Step]]]
    greeting: bytes = field(default_factory=peer.ready)
    on_kill: bool = True
    pieces: int = 0
    """Say everything in pieces of so many bytes; 0: at once."""

    def __post_init__(self) -> None:
        self.said_gone: set[int] = set()
        self.ended: set[int] = set()
        self.started: set[int] = set()
        self.times: dict[int, float] = {}

    def heard(self, stream: PeerStream, found: Frame) -> None:
        if found.kind == frames.HELLO:
            self.say(stream, self.greeting)
        elif found.kind in (frames.START, frames.FETCH):
            steps = self.scripts.pop(0)(found.task) if self.scripts else obedient(found.task)
            asyncio.get_running_loop().call_soon(self.step, stream, steps)
        elif found.kind == frames.KILL and self.on_kill:
            self.say(stream, killed(found.task))
        elif found.kind == frames.PING and self.on_kill:
            self.say(stream, peer.pong(int.from_bytes(found.payload, "little")))
        elif found.kind == frames.SHUTDOWN and self.on_kill:
            self.say(stream, peer.BYE)
            stream.hang_up()

    def step(self, stream: PeerStream, steps: list[Step]) -> None:
        if not steps:
            return
        (delay, what), *rest = steps

        def go() -> None:
            if what == "hang up":
                stream.hang_up()
            elif what == "broken":
                stream.hang_up(ConnectionResetError("reset"))
            elif isinstance(what, bytes):
                self.say(stream, what)
            self.step(stream, rest)

        asyncio.get_running_loop().call_later(delay, go)

    def say(self, stream: PeerStream, said: bytes) -> None:
        for kind, number in ((frames.STARTED, self.started), (frames.END, self.ended)):
            if len(said) >= 12 and said[4] == kind:
                number.add(int.from_bytes(said[8:12], "little"))
                self.times.setdefault(kind, asyncio.get_running_loop().time())
        size = self.pieces or len(said)
        for at in range(0, len(said), size or 1):
            stream.say(said[at : at + size])


def whole_end(task: int, out: int = 0, err: int = 0) -> bytes:
    return peer.end(task, peer.stream_end(out), peer.stream_end(err))


def killed(task: int) -> bytes:
    return peer.exited(task, frames.SIGNALLED, 15) + whole_end(task) + peer.gone(task)


def obedient(task: int) -> list[Step]:
    return [(0, peer.started(task)), (0.01, peer.exited(task) + whole_end(task) + peer.gone(task))]
