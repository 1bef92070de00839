"""Processes as /proc shows them. Knows nothing of the code under test."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Process", "descendants", "descriptors", "look", "rss_bytes"]

WARDEN_NAME = "corral-warden"


@dataclass(frozen=True, slots=True, kw_only=True)
class Process:
    """One process at the moment it was read. `exe` is None where it may not be read."""

    pid: int
    ppid: int
    pgrp: int
    session: int
    state: str
    comm: str
    exe: str | None
    cmdline: str

    @property
    def zombie(self) -> bool:
        return self.state in "ZX"

    @property
    def warden(self) -> bool:
        """The warden or one of its keepers.

        Their executable tells; where it cannot be read (they are not dumpable, and we are not root) their
        name does.
        """
        if self.exe is not None:
            return WARDEN_NAME in self.exe.rsplit("/", 1)[-1]
        return self.comm.startswith("corral-")

    def __str__(self) -> str:
        return (
            f"pid {self.pid} {self.state} ppid {self.ppid} pgrp {self.pgrp} session {self.session} "
            f"[{self.comm}] {self.cmdline[:120]}"
        )


def _stat(pid: int) -> tuple[str, str, int, int, int] | None:
    """Name, state, parent, group and session; None when there is no such process (any more)."""
    try:
        stat = Path("/proc", str(pid), "stat").read_bytes()
    except OSError:
        return None
    # The name stands in parentheses and may contain anything, also parentheses.
    comm, _, rest = stat.partition(b"(")[2].rpartition(b")")
    state, ppid, pgrp, session = rest.split()[:4]
    return comm.decode(errors="replace"), state.decode(), int(ppid), int(pgrp), int(session)


def look(pid: int) -> Process | None:
    """The process `pid`, or None when there is none (any more)."""
    stat = _stat(pid)
    if stat is None:
        return None
    comm, state, ppid, pgrp, session = stat
    base = Path("/proc", str(pid))
    try:
        exe: str | None = str((base / "exe").readlink())
    except OSError:
        exe = None
    try:
        cmdline = (base / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        cmdline = ""
    return Process(
        pid=pid, ppid=ppid, pgrp=pgrp, session=session, state=state, comm=comm, exe=exe, cmdline=cmdline
    )


def _parents() -> dict[int, int]:
    """The parent of every process. Not atomic: what forks or is re-parented meanwhile may be missing."""
    found: dict[int, int] = {}
    for name in os.listdir("/proc"):
        if name.isdigit() and (stat := _stat(int(name))) is not None:
            found[int(name)] = stat[2]
    return found


def descendants(root: int) -> list[Process]:
    """Everything below `root`, without `root`, zombies included.

    Two scans are joined, so that a process whose parent died between the two readings is not lost. Against
    trees that fork all the time this is still no proof; a `Lifeline` is.
    """
    inside: set[int] = set()
    for scan in (_parents(), _parents()):
        children: dict[int, list[int]] = {}
        for pid, parent in scan.items():
            children.setdefault(parent, []).append(pid)
        pending = [root]
        while pending:
            below = children.get(pending.pop(), [])
            inside.update(below)
            pending += below
    found = (look(pid) for pid in sorted(inside))
    return [process for process in found if process is not None]


def rss_bytes(pid: int) -> int:
    """Resident memory of a process."""
    resident = Path("/proc", str(pid), "statm").read_text().split()[1]
    return int(resident) * os.sysconf("SC_PAGE_SIZE")


def descriptors(pid: int) -> list[str]:
    """What the open descriptors of a process lead to: paths, and kinds such as `socket` and `pipe`."""
    found: list[str] = []
    for name in os.listdir(f"/proc/{pid}/fd"):
        try:
            found.append(os.readlink(f"/proc/{pid}/fd/{name}").split(":")[0])
        except FileNotFoundError:
            continue  # the one that listed the directory, when it is our own
    return sorted(found)
