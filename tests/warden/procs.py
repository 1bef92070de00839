"""Processes and users as /proc and the system show them. Knows nothing of the code under test."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Account:
    """An ordinary user that nobody else is: limits per user then count only what a test starts."""

    uid: int
    gid: int


def ordinary() -> Account | None:
    """Whom to run as so as not to be root; None for the user who runs the tests."""
    number = 61_000 + os.getpid() % 4_000
    return Account(number, number) if os.geteuid() == 0 else None


# --- /proc


@dataclass(frozen=True, slots=True)
class Stat:
    pid: int
    state: str
    parent: int
    born: int
    """In clock ticks since boot: together with the pid it names a process for ever."""

    @property
    def alive(self) -> bool:
        return self.state not in "ZX"


def _read(pid: int, name: str) -> bytes:
    """A file of a process; empty when it is gone or not ours to read. By system calls, which are quicker."""
    try:
        fd = os.open(f"/proc/{pid}/{name}", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return b""
    try:
        return os.read(fd, 1 << 17)
    except OSError:
        return b""
    finally:
        os.close(fd)


def stat(pid: int) -> Stat | None:
    rest = _read(pid, "stat").rpartition(b")")[2].split()
    return Stat(pid, rest[0].decode(), int(rest[1]), int(rest[19])) if rest else None


def everybody() -> list[Stat]:
    return [found for name in os.listdir("/proc") if name.isdigit() and (found := stat(int(name)))]


def below(root: int) -> list[Stat]:
    """Everything that descends from `root`, zombies included."""
    children: dict[int, list[Stat]] = {}
    for process in everybody():
        children.setdefault(process.parent, []).append(process)
    found: list[Stat] = []
    pending = [root]
    while pending:
        for child in children.get(pending.pop(), ()):
            found.append(child)
            pending.append(child.pid)
    return found


def still_alive(processes: Sequence[Stat]) -> list[Stat]:
    return [was for was in processes if (now := stat(was.pid)) and now.born == was.born and now.alive]


def marked(mark: str, since: int) -> list[Stat]:
    """Who carries `mark` in the environment that it was started with, wherever it has moved to."""
    found: list[Stat] = []
    for process in everybody():
        if process.born < since:
            continue
        environ = _read(process.pid, "environ")
        if mark.encode() in environ and process.alive:
            found.append(process)
    return found


def poll(condition: Callable[[], bool], seconds: float, what: str) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds} s: {what}"
        time.sleep(0.003)


@contextlib.contextmanager
def timed(low: float, high: float, what: str) -> Iterator[None]:
    """The body takes between `low` and `high` seconds."""
    began = time.monotonic()
    yield
    took = time.monotonic() - began
    assert low <= took <= high, f"{what} took {took:.3f} s, not {low} to {high}"
