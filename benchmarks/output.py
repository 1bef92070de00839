"""A flood of output: what it costs in memory, how fast it is spilled, whether the event loop lives on.

First one command writes `--size`, and what must stay bounded is looked at while it runs. Then smaller floods
are timed beside `head | cat > file`, which writes the same bytes to the same directory and keeps no tail.
Both are done on a tmpfs, where the processor is the limit, and on a disk.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
import time
from asyncio.subprocess import DEVNULL, PIPE
from pathlib import Path

from _measure import (
    Report,
    Ticker,
    alternate,
    arguments,
    children,
    pss_kib,
    reset_peak,
    size,
    status_kib,
    warden_of,
)

from corral import BashExecRequest, BashRunResult
from corral_backends.places.local import LocalExecutor

SAMPLE_S = 0.05


class Watch:
    """Looks at the warden, its keepers and the spill file while a command runs."""

    def __init__(self) -> None:
        self.spill_bytes = 0
        self.warden_kib = 0
        self.keeper_kib = 0
        self.pss_kib = 0
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Watch:
        self._task = asyncio.get_running_loop().create_task(self._sample())
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._task is not None
        self._task.cancel()
        await asyncio.wait({self._task})

    async def _sample(self) -> None:
        while True:
            await asyncio.sleep(SAMPLE_S)
            self.look()

    def look(self) -> None:
        warden = warden_of(os.getpid())
        keepers = children(warden)
        self.warden_kib = max(self.warden_kib, status_kib(warden, "VmRSS"))
        for keeper in keepers:
            self.keeper_kib = max(self.keeper_kib, status_kib(keeper, "VmRSS"))
            for descriptor in Path(f"/proc/{keeper}/fd").glob("*"):
                if str(descriptor.readlink()).endswith(".stdout"):
                    self.spill_bytes = max(self.spill_bytes, descriptor.stat().st_blocks * 512)
        self.pss_kib = max(self.pss_kib, sum(pss_kib(pid) or 0 for pid in (warden, *keepers)))


def in_mib(kib: int) -> float:
    return kib / 1024


async def flood(executor: LocalExecutor, amount: int) -> BashRunResult:
    return await executor.run(executor.resolve(BashExecRequest(command=f"head -c {amount} /dev/zero")))


async def bounds(report: Report, directory: str, amount: int, cap: int) -> None:
    """One flood with a capped spill file."""
    async with LocalExecutor(spill_dir=directory, max_spill_bytes=cap) as executor:
        await flood(executor, 1 << 20)  # opens the place, and imports what is imported late
        reset_peak()
        before = status_kib("self", "VmHWM")
        async with Watch() as watch, Ticker() as ticker:
            began = time.perf_counter()
            result = await flood(executor, amount)
            seconds = time.perf_counter() - began
        grown = status_kib("self", "VmHWM") - before
    report.heading(f"{amount / (1 << 30):g} GiB, spill capped at {cap / (1 << 30):g} GiB, in {directory}")
    exact = result.stdout.total_bytes == amount and result.exit_code == 0
    report.figure(
        "bytes counted, exactly" if exact else "BYTES COUNTED WRONGLY", result.stdout.total_bytes, "bytes"
    )
    report.figure("host, growth of its peak", in_mib(grown), "MiB", target="below 16")
    report.figure("warden, peak resident", in_mib(watch.warden_kib), "MiB")
    report.figure("keeper, peak resident", in_mib(watch.keeper_kib), "MiB")
    report.figure("warden and keeper, shared pages counted once", in_mib(watch.pss_kib), "MiB")
    report.figure(
        "spill file, peak on disk", watch.spill_bytes / (1 << 20), "MiB", target=f"at most {cap >> 20}"
    )
    report.figure("throughput", amount / seconds / 1e9, "GB/s", target="1.0 on a tmpfs")
    report.figure("loop ticks of 20 ms that came", len(ticker.gaps), f"of {int(seconds / ticker.period_s)}")
    report.figure("longest time between two ticks", max(ticker.gaps) * 1000, "ms")


async def compare(report: Report, directory: str, amount: int, rounds: int, repeat: int) -> None:
    """Floods that are spilled whole, beside a pipe into `cat > file`."""
    rival_file = Path(directory, f"corral-benchmark-{os.getpid()}")
    script = f"head -c {amount} /dev/zero | cat > {rival_file}"
    async with LocalExecutor(
        spill_dir=directory, max_spill_bytes=2 * amount, max_spill_total_bytes=0
    ) as executor:

        async def ours() -> float:
            began = time.perf_counter()
            result = await flood(executor, amount)
            seconds = time.perf_counter() - began
            if result.stdout.total_bytes != amount or result.stdout.spill_path is None:
                msg = f"the flood did not arrive as it should: {result}"
                raise RuntimeError(msg)
            os.unlink(result.stdout.spill_path)  # noqa: PTH108
            return seconds

        async def rival() -> float:
            began = time.perf_counter()
            process = await asyncio.create_subprocess_exec(
                "bash", "-c", script, stdin=DEVNULL, stdout=PIPE, stderr=PIPE
            )
            await process.communicate()
            seconds = time.perf_counter() - began
            os.unlink(rival_file)  # noqa: PTH108
            return seconds

        for _ in range(repeat):
            times = await alternate({"corral": ours, "head | cat > file": rival}, rounds=rounds, warmup=1)
            report.compare(f"{amount / (1 << 30):g} GiB, all of it spilled, in {directory}", times)
            report.figure("throughput, best round", amount / min(times["corral"]) / 1e9, "GB/s")


async def measure(report: Report, given: Arguments) -> None:
    for directory in given.directories:
        for _ in range(given.repeat):
            await bounds(report, directory, given.size, given.cap)
        if given.rounds:
            await compare(report, directory, given.pair_size, given.rounds, given.repeat)


class Arguments:
    """The command line, typed."""

    rounds: int
    repeat: int
    json: Path | None
    size: int
    pair_size: int
    cap: int
    directories: list[str]


def main() -> None:
    parser = arguments(__doc__, rounds=5)
    parser.add_argument("--size", type=size, default="10G", help="of the flood whose bounds are looked at")
    parser.add_argument(
        "--pair-size", type=size, default="1G", help="of the floods that are timed beside the rival"
    )
    parser.add_argument("--cap", type=size, default="1G", help="of the spill file in the first part")
    parser.add_argument(
        "--directories", nargs="+", default=["/dev/shm", tempfile.gettempdir()], help="where to spill"
    )
    given = parser.parse_args(namespace=Arguments())
    report = Report("A flood of output")
    asyncio.run(measure(report, given))
    report.finish(given.json)


if __name__ == "__main__":
    main()
