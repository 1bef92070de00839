"""An exact, unprivileged witness: a FIFO whose write end every process of a tree holds.

A command that begins with `lifeline.prologue` opens the FIFO as descriptor 9, and whatever it starts
inherits it: through `setsid`, double forks, `env -i`, `nohup`, and through fork chains that no scan of
/proc can follow. The kernel reports end-of-file on the read end when, and only when, the last holder is
gone. (Only a process that closes descriptor 9 on purpose gets away; no workload here does.)
"""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Self

from tests.support.processes import Process, look

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Lifeline"]


class Lifeline:
    """Made by a test, outside the code under test. Leaving the context kills what still holds on."""

    def __init__(self) -> None:
        self._directory = Path(tempfile.mkdtemp(prefix="corral-lifeline-"))
        self._directory.chmod(0o755)
        self.path = self._directory / "line"
        os.mkfifo(self.path)
        self.path.chmod(0o666)  # a command may run as somebody else
        self._fd = os.open(self.path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        self._marks = 0

    @property
    def prologue(self) -> str:
        """Bash text that takes hold of the line. `n COMMAND` marks and becomes COMMAND (`n sleep 9 &`)."""
        return f'exec 9>{shlex.quote(str(self.path))}\nn() {{ printf m >&9; exec "$@"; }}\n'

    def held(self) -> bool:
        """True while any process holds the line."""
        while True:
            try:
                data = os.read(self._fd, 65536)
            except BlockingIOError:
                return True
            if not data:
                return False
            self._marks += data.count(b"m")

    def marks(self) -> int:
        """How many marks (bytes `m` on descriptor 9) came so far."""
        self.held()
        return self._marks

    def wait_marks(self, count: int, *, timeout: float) -> bool:
        """True as soon as `count` marks came, False when they did not within `timeout` seconds."""
        return self._poll(lambda: self.marks() >= count, timeout)

    def wait_released(self, *, timeout: float) -> bool:
        """True as soon as nobody holds the line, False when somebody still does after `timeout` seconds."""
        return self._poll(lambda: not self.held(), timeout)

    @staticmethod
    def _poll(reached: Callable[[], bool], timeout: float) -> bool:
        deadline = time.monotonic() + timeout
        while not reached():
            if time.monotonic() > deadline:
                return False
            time.sleep(0.001)
        return True

    def holders(self) -> list[Process]:
        """Who holds the line, as far as their descriptors may be read. For messages and the cleanup."""
        found: list[Process] = []
        for name in os.listdir("/proc"):
            if not name.isdigit() or int(name) == os.getpid():
                continue
            if self._holds(name) and (process := look(int(name))) is not None:
                found.append(process)
        return found

    def _holds(self, pid: str) -> bool:
        # Descriptor 9 is where the prologue puts it.
        try:
            return os.readlink(f"/proc/{pid}/fd/9") == str(self.path)
        except OSError:
            return False

    def hang_up(self) -> None:
        """Closes our end; every fork storm takes that as its end. From here on nothing is counted."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def close(self) -> None:
        """Hangs up, kills the holders that are left, and removes the FIFO."""
        self.hang_up()
        deadline = time.monotonic() + 5
        while (holders := self.holders()) and time.monotonic() < deadline:
            for process in holders:
                try:
                    os.kill(process.pid, signal.SIGKILL)
                except ProcessLookupError:
                    pass
            time.sleep(0.002)
        shutil.rmtree(self._directory, ignore_errors=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
