"""How long one short command takes, beside asyncio's own subprocess with the same pipes.

Both wait for the end of `true` in a bash and for all of its output. `--heap` makes this process big first,
for a host that forks gets slow then. `--busy` keeps processors busy meanwhile, when every hand-over from one
process to the next may have to wait. `--uvloop` runs both under uvloop (`pip install uvloop`).
"""

from __future__ import annotations

import asyncio
import importlib
import subprocess
import time
from asyncio.subprocess import DEVNULL, PIPE
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from _measure import PAGE, Report, alternate, arguments

from corral import BashExecRequest
from corral_backends.places.local import LocalExecutor

COMMAND = "true"


async def rival() -> float:
    """What one writes without a library: a leader that gives its output, but whose tree nobody watches."""
    began = time.perf_counter()
    process = await asyncio.create_subprocess_exec(
        "bash", "-c", COMMAND, stdin=DEVNULL, stdout=PIPE, stderr=PIPE
    )
    await process.communicate()
    return time.perf_counter() - began


async def measure(report: Report, rounds: int, repeat: int) -> None:
    async with LocalExecutor() as executor:

        async def ours() -> float:
            began = time.perf_counter()
            await executor.run(executor.resolve(BashExecRequest(command=COMMAND)))
            return time.perf_counter() - began

        for _ in range(repeat):
            times = await alternate({"corral": ours, "asyncio": rival}, rounds=rounds, warmup=20)
            report.compare(f"bash -c {COMMAND}", times)


@contextmanager
def busy(count: int) -> Iterator[None]:
    """Strangers that use a processor each: in sessions of their own, as another user's programs are."""
    spinning = [
        subprocess.Popen(["sh", "-c", "while :; do :; done"], start_new_session=True) for _ in range(count)
    ]
    try:
        yield
    finally:
        for process in spinning:
            process.kill()
            process.wait()


def loop_factory(uvloop: bool) -> Callable[[], asyncio.AbstractEventLoop]:
    return importlib.import_module("uvloop").new_event_loop if uvloop else asyncio.new_event_loop


def main() -> None:
    parser = arguments(__doc__, rounds=200)
    parser.add_argument("--heap", type=float, default=0, help="GiB of memory to fill before", metavar="GIB")
    parser.add_argument("--busy", type=int, default=0, help="programs that just use a processor")
    parser.add_argument("--uvloop", action="store_true", help="use uvloop's event loop")
    given = parser.parse_args()
    heap = bytearray(int(given.heap * (1 << 30)))
    heap[::PAGE] = b"\1" * len(range(0, len(heap), PAGE))
    loop = "uvloop" if given.uvloop else "asyncio"
    settings = {"heap": f"{given.heap:g} GiB", "busy": given.busy, "loop": loop}
    report = Report("Latency of one command", settings)
    with busy(given.busy), asyncio.Runner(loop_factory=loop_factory(given.uvloop)) as runner:
        runner.run(measure(report, given.rounds, given.repeat))
    report.finish(given.json)
    del heap


if __name__ == "__main__":
    main()
