"""Many commands at once, beside `asyncio.gather` over asyncio's own subprocesses."""

from __future__ import annotations

import asyncio
import time
from asyncio.subprocess import DEVNULL, PIPE
from collections.abc import Awaitable, Callable
from functools import partial

from _measure import Report, Ticker, alternate, arguments, raise_descriptor_limit

from corral import BashExecRequest
from corral_backends.places.local import LocalExecutor

One = Callable[[str], Awaitable[int | None]]
"""Runs a command and returns its exit code."""


async def rival(command: str) -> int | None:
    process = await asyncio.create_subprocess_exec(
        "bash", "-c", command, stdin=DEVNULL, stdout=PIPE, stderr=PIPE
    )
    await process.communicate()
    return process.returncode


async def all_at_once(run: One, command: str, count: int, gaps: list[float]) -> float:
    async with Ticker() as ticker:
        began = time.perf_counter()
        codes = await asyncio.gather(*(run(command) for _ in range(count)))
        seconds = time.perf_counter() - began
        await asyncio.sleep(ticker.period_s)  # the last gap ends with a tick
    if any(codes):
        msg = f"not every `{command}` came back with 0: {set(codes)}"
        raise RuntimeError(msg)
    gaps.append(max(ticker.gaps))
    return seconds


async def measure(report: Report, counts: list[int], rounds: int, repeat: int) -> None:
    async with LocalExecutor() as executor:

        async def ours(command: str) -> int | None:
            return (await executor.run(executor.resolve(BashExecRequest(command=command)))).exit_code

        for _ in range(repeat):
            for command in ("true", "sleep 0.5"):
                for count in counts:
                    our_gaps: list[float] = []
                    their_gaps: list[float] = []
                    contenders = {
                        "corral": partial(all_at_once, ours, command, count, our_gaps),
                        "asyncio": partial(all_at_once, rival, command, count, their_gaps),
                    }
                    times = await alternate(contenders, rounds=rounds, warmup=1)
                    report.compare(f"{count} x {command}", times)
                    report.figure("longest time between two ticks, corral", max(our_gaps) * 1000, "ms")
                    report.figure("longest time between two ticks, asyncio", max(their_gaps) * 1000, "ms")


def main() -> None:
    parser = arguments(__doc__, rounds=5)
    parser.add_argument("--counts", type=int, nargs="+", default=[50, 500], help="commands at once")
    given = parser.parse_args()
    raise_descriptor_limit()
    report = Report("Many commands at once")
    asyncio.run(measure(report, given.counts, given.rounds, given.repeat))
    report.finish(given.json)


if __name__ == "__main__":
    main()
