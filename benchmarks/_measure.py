"""What the benchmarks share: alternating the contenders, medians and spread, looking at processes, reporting.

A figure of one moment of one machine says little, so every benchmark runs a rival in the same process and in
the same minute, and what counts is the ratio. Nothing here fails when a target is missed: the target is
printed beside the figure and the reader decides.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import random
import re
import resource
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median, quantiles

from corral_backends.warden import find_warden

Contender = Callable[[], Awaitable[float]]
"""Does the work once and returns how many seconds of it count."""

PAGE = os.sysconf("SC_PAGE_SIZE")

# --- the command line


def arguments(description: str | None, *, rounds: int) -> argparse.ArgumentParser:
    """A parser with the options of every benchmark. `description` is the script's docstring."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=rounds, help="measurements of each contender")
    parser.add_argument("--repeat", type=int, default=1, help="how often to do it all")
    parser.add_argument("--json", type=Path, help="also write the figures into this file", metavar="FILE")
    return parser


def size(text: str) -> int:
    """`64K`, `2G`, or plain bytes."""
    match = re.fullmatch(r"(\d+)([KMGT]?)", text.upper())
    if match is None:
        msg = f"not a size: {text!r}"
        raise argparse.ArgumentTypeError(msg)
    return int(match[1]) << {"": 0, "K": 10, "M": 20, "G": 30, "T": 40}[match[2]]


def raise_descriptor_limit() -> None:
    """For hundreds of commands at once, of which the rival needs three descriptors each."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


# --- time


async def alternate(
    contenders: Mapping[str, Contender], *, rounds: int, warmup: int
) -> dict[str, list[float]]:
    """Seconds of each contender, by rounds.

    The order is drawn anew in each round, because who comes second finds caches warm and the remains of the
    first being cleared away. Value i of one contender was taken right before or after value i of the others.
    """
    times: dict[str, list[float]] = {name: [] for name in contenders}
    draw = random.Random(0)
    for index in range(-warmup, rounds):
        for name in draw.sample(sorted(contenders), len(contenders)):
            seconds = await contenders[name]()
            if index >= 0:
                times[name].append(seconds)
    return times


class Ticker:
    """An asyncio timer of `period_s` beside the work, which shows for how long the loop was not free."""

    def __init__(self, period_s: float = 0.02) -> None:
        self.period_s = period_s
        self.gaps: list[float] = []
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Ticker:
        self._task = asyncio.get_running_loop().create_task(self._tick())
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._task is not None
        self._task.cancel()
        await asyncio.wait({self._task})

    async def _tick(self) -> None:
        before = time.perf_counter()
        while True:
            await asyncio.sleep(self.period_s)
            now = time.perf_counter()
            self.gaps.append(now - before)
            before = now


# --- processes


def children(pid: int) -> list[int]:
    """The direct children of a process, zombies included."""
    found: list[int] = []
    for listed in Path(f"/proc/{pid}/task").glob("*/children"):
        found += map(int, listed.read_text().split())
    return sorted(found)


def warden_of(pid: int) -> int:
    """The warden that the process started: its child that is one by name."""
    name = find_warden(platform.machine()).name[:15]  # the kernel keeps no more of it
    for child in children(pid):
        if Path(f"/proc/{child}/comm").read_text().rstrip() == name:
            return child
    msg = f"process {pid} has no warden"
    raise LookupError(msg)


def status_kib(pid: int | str, name: str) -> int:
    """A field of /proc/PID/status in KiB: `VmRSS`, or `VmHWM` for its peak."""
    text = Path(f"/proc/{pid}/status").read_text()
    match = re.search(rf"^{name}:\s+(\d+) kB$", text, re.MULTILINE)
    return int(match[1]) if match else 0


def pss_kib(pid: int) -> int | None:
    """Memory of a process with shared pages divided among their sharers. None where it may not be read."""
    try:
        match = re.search(r"^Pss:\s+(\d+) kB$", Path(f"/proc/{pid}/smaps_rollup").read_text(), re.MULTILINE)
    except (PermissionError, FileNotFoundError, ProcessLookupError):
        return None
    return int(match[1]) if match else None


def reset_peak() -> None:
    """Make `VmHWM` of this process start from what it is now."""
    Path("/proc/self/clear_refs").write_text("5")


# --- reporting


@dataclass(slots=True)
class Report:
    """Prints figures as they come and keeps them for `--json`."""

    title: str
    settings: Mapping[str, object] = field(default_factory=dict[str, object])
    figures: list[dict[str, object]] = field(default_factory=list[dict[str, object]])

    def __post_init__(self) -> None:
        given = ", ".join(f"{name} {value}" for name, value in self.settings.items())
        print(f"{self.title}{f' ({given})' if given else ''}")
        load = os.getloadavg()[0]
        print(f"  Python {platform.python_version()}, {os.cpu_count()} cores, load {load:.1f}")

    def compare(self, label: str, times: Mapping[str, Sequence[float]], *, ours: str = "corral") -> None:
        """The contenders' medians and quartiles, and for each rival the ratio ours/rival, by rounds.

        The ratio is the median of the rounds' ratios, so that what slows a whole round counts for neither.
        """
        print(f"  {label}")
        for name, values in times.items():
            low, high = _quartiles(values)
            print(f"    {name:<28} {_ms(median(values))} ms   [{_ms(low)} .. {_ms(high)}]")
            self._keep(
                label, contender=name, median_s=median(values), quartiles_s=[low, high], rounds=len(values)
            )
        for name, values in times.items():
            if name == ours:
                continue
            ratios = [mine / theirs for mine, theirs in zip(times[ours], values, strict=True)]
            ratio = median(ratios)
            low, high = _quartiles(ratios)
            print(f"    {f'{ours} / {name}':<28} {ratio:9.2f}      [{low:9.2f} .. {high:9.2f}]")
            self._keep(label, ratio_to=name, ratio=ratio, quartiles=[low, high])

    def figure(self, label: str, value: float | None, unit: str, *, target: str = "") -> None:
        """One number. None is one that could not be read here."""
        shown = "unknown" if value is None else f"{value:,}" if isinstance(value, int) else f"{value:,.2f}"
        print(f"    {label:<44} {shown:>16} {unit}{f'   (target {target})' if target else ''}")
        self._keep(label, value=value, unit=unit, target=target)

    def heading(self, text: str) -> None:
        print(f"  {text}")
        self._keep("heading", text=text)

    def finish(self, path: Path | None) -> None:
        """Write the JSON file, if one is wanted."""
        if path is None:
            return
        machine = {"python": platform.python_version(), "kernel": platform.release(), "cores": os.cpu_count()}
        whole = {
            "title": self.title,
            "settings": dict(self.settings),
            "machine": machine,
            "figures": self.figures,
        }
        path.write_text(json.dumps(whole, indent=2, default=str) + "\n")

    def _keep(self, label: str, **what: object) -> None:
        self.figures.append({"label": label, **what})


def _quartiles(values: Sequence[float]) -> tuple[float, float]:
    if len(values) < 2:
        return values[0], values[0]
    low, _, high = quantiles(values, n=4, method="inclusive")
    return low, high


def _ms(seconds: float) -> str:
    return f"{seconds * 1000:9.2f}"
