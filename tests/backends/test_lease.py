"""The lease: for streams whose end says nothing. A local warden with a leased stream stands for them."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import time
from pathlib import Path, PurePosixPath

import pytest

from corral import BashExecRequest, PlaceLostError
from corral_backends.warden import (
    DuplexStream,
    LeasedStream,
    Place,
    PrivateLoop,
    SocketStream,
    WardenConfig,
    WardenExecutor,
    find_warden,
)

pytestmark = pytest.mark.backend("local")

LEASE_MS = 1000


class LeasedPlace(Place):
    """A warden on this machine whose stream never ends by itself: a copy of our end stays open."""

    lease_ms = LEASE_MS

    def __init__(self) -> None:
        self.private: PrivateLoop | None = None
        self.process: subprocess.Popen[bytes] | None = None
        self.held: socket.socket | None = None

    async def open(self) -> DuplexStream:
        ours, theirs = socket.socketpair()
        self.held = ours.dup()
        with theirs:
            self.process = subprocess.Popen(
                [find_warden(os.uname().machine)],
                stdin=theirs.fileno(),
                stdout=theirs.fileno(),
                start_new_session=True,
            )
        self.private = PrivateLoop("test-lease")
        return await LeasedStream.connect(
            lambda: SocketStream.connect(ours), self.private, lease_ms=self.lease_ms
        )

    async def close(self) -> None:
        if self.private is not None:
            await self.private.stop()
            self.private = None
        if self.held is not None:
            self.held.close()
            self.held = None
        if self.process is not None:
            deadline = time.monotonic() + 5
            while self.process.poll() is None and time.monotonic() < deadline:
                await asyncio.sleep(0.005)
            assert self.process.poll() is not None


def alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def executor(place: Place) -> WardenExecutor:
    return WardenExecutor(place, WardenConfig(workdir=PurePosixPath("/"), kill_grace_ms=300))


def test_a_busy_event_loop_loses_nothing() -> None:
    """The user's loop is blocked for three leases; the command that runs meanwhile ends as ever."""

    async def main() -> None:
        async with executor(LeasedPlace()) as place:
            task = place.start(place.resolve(BashExecRequest(command="sleep 2; echo whole")))
            while task.started_at is None:
                await asyncio.sleep(0.01)
            time.sleep(3 * LEASE_MS / 1000)  # blocking it is the point
            while task.ended_at is None:
                await asyncio.sleep(0.01)
            assert (task.exit_code, place.read_output(task.id).stdout.data) == (0, b"whole\n")

    asyncio.run(asyncio.wait_for(main(), 30))


def test_a_host_that_falls_silent_is_given_up_within_the_lease() -> None:
    """The stream stays open, but nothing comes: after the lease the warden kills every tree and exits."""

    async def main() -> None:
        place = LeasedPlace()
        async with executor(place) as bash:
            run = asyncio.ensure_future(bash.run(bash.resolve(BashExecRequest(command="sleep 60"))))
            task = bash.start(bash.resolve(BashExecRequest(command="setsid sleep 60 & echo $!; wait")))
            pid = ""
            while not pid:
                await asyncio.sleep(0.02)
                pid = bash.read_output(task.id).stdout.text.strip()
            assert alive(int(pid))
            assert place.private is not None
            silent_since = time.monotonic()
            place.private.call(time.sleep, 2.5 * LEASE_MS / 1000)  # the thread that beats is stuck
            while alive(int(pid)):
                await asyncio.sleep(0.01)
            assert LEASE_MS / 1000 * 0.7 < time.monotonic() - silent_since < LEASE_MS / 1000 + 1
            with pytest.raises(PlaceLostError):
                await run

    asyncio.run(asyncio.wait_for(main(), 30))


def test_nothing_of_the_private_thread_stays() -> None:
    """dispose.leaves-nothing, for a place that has a thread and a loop of its own."""

    async def main() -> None:
        before = len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))
        async with executor(LeasedPlace()) as bash:
            result = await bash.run(bash.resolve(BashExecRequest(command="echo hi")))
            assert result.stdout.data == b"hi\n"
        assert (len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))) == before

    asyncio.run(asyncio.wait_for(main(), 30))
