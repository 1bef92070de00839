"""The process under watch: imports corral, runs one scenario, and reports to the test line by line.

    python driver.py MODULE:FUNCTION '{"arguments": ...}' [UID GID]

The scenario is a coroutine function of a module of tests.support; it gets a `Stage` and the arguments.
Standard output carries one JSON object a line (`{"report": NAME, ...}`), standard input one word a line.
After each report that asks for an answer the scenario waits, holding its executor, so that the test can
count processes in that very state. With UID and GID it gives up root after it has imported everything it
will need: the interpreter and the packages may lie where that user cannot read them.
"""

from __future__ import annotations

import asyncio
import ctypes
import importlib
import json
import os
import resource
import signal
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

PR_SET_DUMPABLE = 4
FUSE = 600  # processes an ordinary user may have: no bug here can use up the machine's


class Stage:
    """A scenario's connection to the test."""

    def __init__(self, out: int, words: int) -> None:
        self._out = out
        self._in = words
        self._buffer = b""

    def say(self, report: str, **fields: Any) -> None:
        """Reports and goes on."""
        line = json.dumps({"report": report, **fields}).encode() + b"\n"
        while line:
            line = line[os.write(self._out, line) :]

    async def ask(self, report: str, **fields: Any) -> str:
        """Reports and waits for the test's word. End of file ends the driver: the test is over."""
        self.say(report, **fields)
        loop = asyncio.get_running_loop()
        while b"\n" not in self._buffer:
            readable = asyncio.Event()
            loop.add_reader(self._in, readable.set)
            try:
                await readable.wait()
            finally:
                loop.remove_reader(self._in)
            data = os.read(self._in, 4096)
            if not data:
                os._exit(3)
            self._buffer += data
        word, _, self._buffer = self._buffer.partition(b"\n")
        return word.decode()

    @staticmethod
    def footprint() -> dict[str, Any]:
        """What the process holds now: descriptors by what they lead to, threads, unfinished asyncio tasks."""
        from tests.support.processes import descriptors  # noqa: PLC0415 - main sets the path

        current = asyncio.current_task()
        running = [task for task in asyncio.all_tasks() if task is not current and not task.done()]
        return {
            "fds": descriptors(os.getpid()),
            "threads": sorted(thread.name for thread in threading.enumerate()),
            "tasks": sorted(getattr(task.get_coro(), "__qualname__", "?") for task in running),
        }


def become(uid: int, gid: int) -> None:
    """Gives up root for good."""
    os.setgroups([])
    os.setgid(gid)
    os.setuid(uid)
    # A change of user makes a process undumpable; started by that user in the first place it would not be.
    ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, 1, 0, 0, 0)


def main(arguments: Sequence[str]) -> int:
    name, text, *who = arguments
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # under nohup it would be ignored
    # What the code under test prints must not reach the protocol.
    out = os.dup(1)
    os.dup2(2, 1)
    words = os.dup(0)
    nowhere = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nowhere, 0)
    os.close(nowhere)
    sys.path[0] = str(Path(__file__).resolve().parents[2])
    module, _, function = name.partition(":")
    if who or (os.geteuid() != 0 and module == "scenarios"):  # where the storms are; crowds need more
        resource.setrlimit(resource.RLIMIT_NPROC, (FUSE, FUSE))
    scenario = getattr(importlib.import_module(f"tests.support.{module}"), function)

    # Needed late, and then out of reach.
    import concurrent.futures.thread  # noqa: F401, PLC0415
    import encodings.idna  # noqa: F401, PLC0415
    import linecache  # noqa: F401, PLC0415

    import tests.support.processes  # noqa: F401, PLC0415

    if who:
        become(int(who[0]), int(who[1]))
    asyncio.run(scenario(Stage(out, words), **json.loads(text)))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
