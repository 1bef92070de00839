"""From the kill of a process tree until nothing of it is alive, beside `os.killpg`.

The witness belongs to neither: every process of the tree inherits the write end of a FIFO, and its end of
file is the death of the last one. The trees stay in their process group, for outside of it `killpg` kills
nothing. The rival sends SIGTERM, as corral does first.
"""

from __future__ import annotations

import asyncio
import os
import signal
import tempfile
import time
from asyncio.subprocess import DEVNULL
from functools import partial
from pathlib import Path
from statistics import median

from _measure import Report, alternate, arguments

from corral import BashExecRequest, BashTask
from corral_backends.places.local import LocalExecutor

TREES = {
    "one sleep": "sleep 600",
    "a pipeline in nested shells": "( (sleep 600 | sleep 600 | cat) & sleep 600 & wait ) & wait",
    "100 sleeps": "for i in {1..100}; do sleep 600 & done; wait",
}
SETTLE_S = 0.3
"""How long a tree is left alone to grow to its full size."""


class Witness:
    """The read end of a FIFO that one tree holds open. Each tree needs a new one."""

    def __init__(self, path: Path, tree: str) -> None:
        self._fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        self.script = f"exec 9> {path}; echo >&9; {tree}"
        """The tree, with the FIFO open in all of it. Its first byte says that it runs."""

    async def alive(self) -> None:
        """Return when the tree has grown."""
        if not await self._read():
            msg = "the tree ended before it was killed"
            raise RuntimeError(msg)
        await asyncio.sleep(SETTLE_S)

    async def dead(self) -> float:
        """The time, by `time.perf_counter`, at which nobody was left to hold the FIFO."""
        while await self._read():
            pass
        now = time.perf_counter()
        os.close(self._fd)
        return now

    async def _read(self) -> bytes:
        """What is there to read, once there is something; empty when no writer is left."""
        loop = asyncio.get_running_loop()
        ready: asyncio.Future[None] = loop.create_future()
        loop.add_reader(self._fd, _wake, ready)
        try:
            await ready
        finally:
            loop.remove_reader(self._fd)
        return os.read(self._fd, 64)


def _wake(ready: asyncio.Future[None]) -> None:
    if not ready.done():
        ready.set_result(None)


async def ours(executor: LocalExecutor, fifo: Path, tree: str, confirmed: list[float]) -> float:
    witness = Witness(fifo, tree)
    done: asyncio.Future[BashTask] = asyncio.get_running_loop().create_future()
    forget = executor.on_task_done(done.set_result)
    task = executor.start(executor.resolve(BashExecRequest(command=witness.script)))
    await witness.alive()
    dead = asyncio.ensure_future(witness.dead())
    began = time.perf_counter()
    executor.kill(task.id)
    await done
    confirmed.append(time.perf_counter() - began)
    forget()
    return await dead - began


async def rival(fifo: Path, tree: str) -> float:
    witness = Witness(fifo, tree)
    process = await asyncio.create_subprocess_exec(
        "bash", "-c", witness.script, stdin=DEVNULL, start_new_session=True
    )
    await witness.alive()
    dead = asyncio.ensure_future(witness.dead())
    began = time.perf_counter()
    os.killpg(process.pid, signal.SIGTERM)
    await process.wait()
    return await dead - began


async def measure(report: Report, rounds: int, repeat: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        fifo = Path(folder, "alive")
        os.mkfifo(fifo)
        async with LocalExecutor() as executor:
            for _ in range(repeat):
                for name, tree in TREES.items():
                    confirmed: list[float] = []
                    contenders = {
                        "corral": partial(ours, executor, fifo, tree, confirmed),
                        "killpg": partial(rival, fifo, tree),
                    }
                    times = await alternate(contenders, rounds=rounds, warmup=1)
                    report.compare(name, times)
                    told = median(confirmed[-rounds:]) * 1000
                    report.figure("until the listener is told, median", told, "ms")


def main() -> None:
    given = arguments(__doc__, rounds=20).parse_args()
    report = Report("Death of a process tree")
    asyncio.run(measure(report, given.rounds, given.repeat))
    report.finish(given.json)


if __name__ == "__main__":
    main()
