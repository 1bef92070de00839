"""A second witness for root: a cgroup hierarchy of our own, without controllers, that only counts."""

from __future__ import annotations

import atexit
import ctypes
import functools
import os
import tempfile
import time
from pathlib import Path
from typing import Self

__all__ = ["Cgroup", "hierarchy"]

MNT_DETACH = 2


@functools.cache
def hierarchy() -> int | None:
    """A directory descriptor of a private v1 hierarchy; None where that is not possible (no root, no v1).

    It is unmounted lazily at once: it then lives only as long as the descriptor, and nothing is left behind
    when the tests are killed.
    """
    if os.geteuid() != 0:
        return None
    libc = ctypes.CDLL(None, use_errno=True)
    where = Path(tempfile.mkdtemp(prefix="corral-cgroup-"))
    try:
        options = f"none,name=corral-test-{os.getpid()}".encode()
        if libc.mount(b"cgroup", bytes(where), b"cgroup", 0, options) != 0:
            return None
        fd = os.open(where, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        libc.umount2(bytes(where), MNT_DETACH)
    finally:
        where.rmdir()
    atexit.register(os.close, fd)
    return fd


class Cgroup:
    """One throw-away cgroup. `procs_fd()` lets a process enter it; whatever it starts stays inside."""

    def __init__(self, root: int, name: str) -> None:
        self._root = root
        self._name = name
        os.mkdir(name, dir_fd=root)

    @classmethod
    def make(cls, name: str) -> Self | None:
        root = hierarchy()
        return None if root is None else cls(root, name)

    def procs_fd(self) -> int:
        """A descriptor: writing `0` to it moves the writer in. The caller closes it."""
        return os.open(f"{self._name}/cgroup.procs", os.O_WRONLY | os.O_CLOEXEC, dir_fd=self._root)

    def pids(self) -> list[int]:
        """Who is inside, zombies included: version 1 lists them, so look at the state."""
        fd = os.open(f"{self._name}/cgroup.procs", os.O_RDONLY | os.O_CLOEXEC, dir_fd=self._root)
        with os.fdopen(fd, "rb") as file:
            return [int(pid) for pid in file.read().split()]

    def remove(self) -> None:
        """Removes it. It must be empty, but the last exits may still be on their way."""
        deadline = time.monotonic() + 1
        while True:
            try:
                os.rmdir(self._name, dir_fd=self._root)
            except OSError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.005)
            else:
                return
