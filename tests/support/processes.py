"""Processes as /proc shows them. Knows nothing of the code under test."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Process", "children_of", "descendants", "look", "rss_bytes", "snapshot"]

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


def look(pid: int) -> Process | None:
    """The process `pid`, or None when there is none (any more)."""
    base = Path("/proc", str(pid))
    try:
        stat = (base / "stat").read_bytes()
    except OSError:
        return None
    # The name stands in parentheses and may contain anything, also parentheses.
    comm, _, rest = stat.partition(b"(")[2].rpartition(b")")
    state, ppid, pgrp, session = rest.split()[:4]
    try:
        exe: str | None = str((base / "exe").readlink()) if state not in (b"Z", b"X") else None
    except OSError:
        exe = None
    try:
        cmdline = (base / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        cmdline = ""
    return Process(
        pid=pid,
        ppid=int(ppid),
        pgrp=int(pgrp),
        session=int(session),
        state=state.decode(),
        comm=comm.decode(errors="replace"),
        exe=exe,
        cmdline=cmdline,
    )


def snapshot() -> dict[int, Process]:
    """All processes by pid. Not atomic: what forks or is re-parented meanwhile may be missing."""
    found: dict[int, Process] = {}
    for name in os.listdir("/proc"):
        if name.isdigit() and (process := look(int(name))) is not None:
            found[process.pid] = process
    return found


def descendants(root: int) -> list[Process]:
    """Everything below `root`, without `root`, zombies included.

    Two scans are joined, so that a process whose parent died between the two readings is not lost. Against
    trees that fork all the time this is still no proof; a `Lifeline` is.
    """
    both = [snapshot(), snapshot()]
    inside: dict[int, Process] = {}
    for scan in both:
        children: dict[int, list[Process]] = {}
        for process in scan.values():
            children.setdefault(process.ppid, []).append(process)
        pending = [root]
        while pending:
            for child in children.get(pending.pop(), ()):
                inside[child.pid] = child
                pending.append(child.pid)
    # Only what the later scan still knows: the first one may have seen a process that was about to end.
    return [process for pid, process in inside.items() if pid in both[1]]


def children_of(pid: int) -> list[Process]:
    """The direct children of `pid`."""
    return [process for process in snapshot().values() if process.ppid == pid]


def rss_bytes(pid: int) -> int:
    """Resident memory of a process."""
    resident = Path("/proc", str(pid), "statm").read_text().split()[1]
    return int(resident) * os.sysconf("SC_PAGE_SIZE")
