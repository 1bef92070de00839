"""What a background task costs in memory, here and in the place, beside asyncio's own subprocess.

Every figure comes from a fresh Python process, because what another contender has freed would be used again.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import time
from asyncio.subprocess import DEVNULL, PIPE

from _measure import Report, arguments, children, pss_kib, raise_descriptor_limit, status_kib, warden_of

from corral import BashExecRequest
from corral_backends.places.local import LocalExecutor

COMMAND = "echo ready; exec sleep 600"
READY = b"ready\n"

Figures = dict[str, float | None]


def supervisors_kib(warden: int) -> int | None:
    """What a warden and its keepers take together."""
    parts = [pss_kib(pid) for pid in (warden, *children(warden))]
    return None if None in parts else sum(part or 0 for part in parts)


async def ours(count: int) -> Figures:
    async with LocalExecutor() as executor:
        await executor.run(executor.resolve(BashExecRequest(command="true")))
        warden = warden_of(os.getpid())
        host, place = status_kib("self", "VmRSS"), supervisors_kib(warden)
        spec = executor.resolve(BashExecRequest(command=COMMAND))
        began = time.perf_counter()
        waiting = {executor.start(spec).id for _ in range(count)}
        while waiting:
            await asyncio.sleep(0.005)
            waiting -= {task for task in waiting if executor.read_output(task).stdout.data}
        seconds = time.perf_counter() - began
        now = supervisors_kib(warden)
        figures: Figures = {
            "started_s": seconds,
            "host_kib": (status_kib("self", "VmRSS") - host) / count,
            "place_kib": (now - place) / count if now is not None and place is not None else None,
        }
        began = time.perf_counter()
    figures["ended_s"] = time.perf_counter() - began
    return figures


async def rival(count: int) -> Figures:
    first = await asyncio.create_subprocess_exec(
        "bash", "-c", "true", stdin=DEVNULL, stdout=PIPE, stderr=PIPE
    )
    await first.communicate()
    host = status_kib("self", "VmRSS")
    began = time.perf_counter()

    async def start() -> asyncio.subprocess.Process:
        process = await asyncio.create_subprocess_exec(
            "bash", "-c", COMMAND, stdin=DEVNULL, stdout=PIPE, stderr=PIPE
        )
        assert process.stdout is not None
        await process.stdout.readexactly(len(READY))
        return process

    processes = await asyncio.gather(*(start() for _ in range(count)))
    seconds = time.perf_counter() - began
    figures: Figures = {"started_s": seconds, "host_kib": (status_kib("self", "VmRSS") - host) / count}
    began = time.perf_counter()
    for process in processes:
        process.kill()
    await asyncio.gather(*(process.wait() for process in processes))
    figures["ended_s"] = time.perf_counter() - began
    return figures


def in_fresh_process(contender: str, count: int) -> Figures:
    ran = subprocess.run(
        [sys.executable, __file__, "--only", contender, "--counts", str(count)],
        check=True,
        stdout=subprocess.PIPE,
    )
    figures: Figures = json.loads(ran.stdout)
    return figures


def main() -> None:
    parser = arguments(__doc__, rounds=1)
    parser.add_argument("--counts", type=int, nargs="+", default=[1, 10, 100, 1000], help="tasks at once")
    parser.add_argument("--only", choices=["corral", "asyncio"], help=argparse.SUPPRESS)
    given = parser.parse_args()
    raise_descriptor_limit()
    if given.only:
        print(json.dumps(asyncio.run((ours if given.only == "corral" else rival)(given.counts[0]))))
        return
    report = Report("Memory of background tasks")
    for count in given.counts:
        for _ in range(given.rounds * given.repeat):
            mine, theirs = in_fresh_process("corral", count), in_fresh_process("asyncio", count)
            report.heading(f"{count} tasks")
            report.figure("host, per task: corral", mine["host_kib"], "KiB")
            report.figure("host, per task: asyncio", theirs["host_kib"], "KiB")
            report.figure("warden and keepers, per task", mine["place_kib"], "KiB")
            report.figure("until all have said a word: corral", mine["started_s"], "s")
            report.figure("until all have said a word: asyncio", theirs["started_s"], "s")
            report.figure("until all are dead: corral, by dispose", mine["ended_s"], "s")
            report.figure("until all are dead: asyncio, by kill", theirs["ended_s"], "s")
    report.finish(given.json)


if __name__ == "__main__":
    main()
