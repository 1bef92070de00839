"""Kills tasks in a namespace where pids are used again at once, beside bystanders that nobody may signal.

    unshare --pid --fork --mount-proc --kill-child bash -c 'python reuse.py SECONDS; exit $?'

Run by root, in a pid namespace of its own, with a shell as its init. Prints one JSON object: how many
bystanders ended, how many of them by a signal, how many of their pids were those of a task's leader before.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[2])

from corral import BashExecRequest, TaskStatus
from corral_backends.places.local import LocalExecutor

if TYPE_CHECKING:
    from corral import BashTask

LOW = 300
"""Where the kernel is sent back to when it looks for the next pid."""

COMMANDS = (
    "echo $$",
    "echo $$; for i in 1 2 3 4 5 6; do (:) & done; wait",
    "echo $$; while :; do (:); done",
    "echo $$; trap 'exit 0' TERM; while :; do (:) & (:); done",
    "echo $$; (sleep 0.002 & sleep 0.004 & sleep 9 &) ; setsid -f sleep 9; sleep 9",
    "echo $$; setsid bash -c 'while :; do /bin/true; done' & wait",
)


class Bystanders:
    """Short-lived processes of the host, started without pause in a thread of their own."""

    def __init__(self) -> None:
        self.pids: set[int] = set()
        self.ended = 0
        self.signalled = 0
        self._over = threading.Event()
        self._threads = [threading.Thread(target=self._main) for _ in range(2)]
        self._threads.append(threading.Thread(target=self._rewind))

    def __enter__(self) -> Bystanders:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join()

    def _main(self) -> None:
        while not self._over.is_set():
            alive = [subprocess.Popen(["sleep", "0.02"], start_new_session=True) for _ in range(8)]
            for process in alive:
                self.pids.add(process.pid)
                self.ended += 1
                self.signalled += process.wait() < 0

    def _rewind(self) -> None:
        while not self._over.is_set():
            Path("/proc/sys/kernel/ns_last_pid").write_text(str(LOW))
            time.sleep(0.001)


async def kill_tasks(seconds: float) -> tuple[int, set[int]]:
    """Starts and kills tasks for so long. Returns how many, and the pids of their leaders."""
    chance = random.Random(0)
    leaders: set[int] = set()
    count = 0

    async def one(executor: LocalExecutor) -> None:
        task: BashTask = executor.start(
            executor.resolve(BashExecRequest(command=chance.choice(COMMANDS), timeout_ms=10_000))
        )
        await asyncio.sleep(chance.random() * 0.02)
        executor.kill(task.id)
        while task.status is TaskStatus.RUNNING:
            await asyncio.sleep(0.001)
        leaders.update(map(int, executor.read_output(task.id).stdout.data.split()))

    async def lane(executor: LocalExecutor, until: float) -> None:
        nonlocal count
        while time.monotonic() < until:
            await one(executor)
            count += 1

    async with LocalExecutor(kill_grace_ms=40) as executor:
        until = time.monotonic() + seconds
        await asyncio.gather(*(lane(executor, until) for _ in range(4)))
    return count, leaders


def main() -> None:
    with Bystanders() as bystanders:
        count, leaders = asyncio.run(kill_tasks(float(sys.argv[1])))
    print(
        json.dumps(
            {
                "tasks": count,
                "bystanders": bystanders.ended,
                "signalled": bystanders.signalled,
                "reused": len(bystanders.pids & leaders),
                "highest": max(bystanders.pids | leaders),
                "left": sum(name.isdigit() for name in os.listdir("/proc")),
            }
        )
    )


if __name__ == "__main__":
    main()
