"""What `corral doctor` tries on an executor, through the public seam alone. Each probe returns its evidence.

The names of `PROBES` are those of the steps in the report.
"""

from __future__ import annotations

import asyncio
import secrets
import statistics
import time
from typing import TYPE_CHECKING, Final

from corral import (
    BashExecRequest,
    BashTask,
    CorralError,
    EndReason,
    ShellNotFoundError,
    SpawnError,
    TaskStatus,
    WorkdirError,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Mapping

    from corral import BashExecutor, BashRunResult

_ROUND_TRIPS: Final = 5
_OUTPUT: Final = 200_000
"""Bytes of output that no executor keeps in memory by default."""

_APPEARANCE: Final = 5.0
_END: Final = 6.0
"""Seconds in which a killed tree must be gone: a grace of 3 s, which ours do not need, and as much again."""
_POLL: Final = 0.02
_CLEANUP: Final = 0.9


class FailedError(Exception):
    """What was tried does not work. `str(error)` says what was seen; `remedy` what to do about it."""

    def __init__(self, evidence: str, *, remedy: str | None = None) -> None:
        super().__init__(evidence)
        self.remedy = remedy


class NotCheckedError(Exception):
    """It cannot be tried here. `str(error)` says why."""


class Probe:
    """An executor under examination. `deadline` is in the loop's time."""

    def __init__(self, executor: BashExecutor, deadline: float) -> None:
        self.executor = executor
        self._deadline = deadline
        self.unready: CorralError | None = None
        """Why the first command did not run, although the place was opened."""

    async def run(self, command: str, *, at_least: float = 0.001) -> BashRunResult:
        """Runs a command within the seconds that are left, or `at_least` so many."""
        left = max(self._deadline - asyncio.get_running_loop().time(), at_least)
        request = BashExecRequest(command=command, timeout_ms=max(int(left * 1000), 1))
        return await self.executor.run(self.executor.resolve(request))

    async def output(self, command: str) -> str:
        """What the command prints. `FailedError` unless it succeeds."""
        result = await self.run(command)
        if result.exit_code != 0 or result.reason is not EndReason.EXITED:
            status = result.signal if result.exit_code is None else f"status {result.exit_code}"
            said = result.stderr.text.strip()[-200:]
            msg = f"a command that should succeed ended with {status} ({result.reason})"
            raise FailedError(f"{msg}: {said}" if said else msg)
        return result.stdout.text

    def start(self, command: str) -> BashTask:
        return self.executor.start(self.executor.resolve(BashExecRequest(command=command)))


async def opens(probe: Probe) -> str:
    begun = time.monotonic()
    try:
        await probe.run("true")
    except (ShellNotFoundError, SpawnError, WorkdirError) as error:
        # The place is there and has answered; it is the command that it cannot run.
        probe.unready = error
    return f"ready after {_ms(begun)} ms"


async def runs(probe: Probe) -> str:
    if probe.unready is not None:
        raise probe.unready
    spent: list[float] = []
    version = ""
    for _ in range(_ROUND_TRIPS):
        token = secrets.token_hex(8)
        begun = time.monotonic()
        said = await probe.output(f'printf "%s\\n" {token} "$BASH_VERSION"')
        spent.append((time.monotonic() - begun) * 1000)
        echo, _, version = said.rstrip("\n").partition("\n")
        if echo != token:
            msg = f"a command that prints {token!r} gave {said[:200]!r}"
            raise FailedError(msg)
    if not version:
        msg = "the shell of the place does not know BASH_VERSION, so it is not bash"
        raise FailedError(msg, remedy="Install bash there.")
    return f"round trip {statistics.median(spent):.1f} ms, bash {version}"


async def kills(probe: Probe) -> str:
    """A process that left its group and its session is ended with the task that started it."""
    if await probe.output("type -P setsid || true") == "":
        msg = "the place has no setsid, with which a process leaves its session"
        raise NotCheckedError(msg)
    task = probe.start("setsid sleep 100 & echo $!; wait")
    pid = await _pid(probe, task)
    try:
        # First that it is there, and where it should be: else its absence would prove nothing.
        await _until(probe, pid, alive=True, seconds=_APPEARANCE)
        begun = time.monotonic()
        probe.executor.kill(task.id)
        await _until(probe, pid, alive=False, seconds=_END)
    except BaseException:
        if task.status is TaskStatus.RUNNING:
            probe.executor.kill(task.id)
        # Nobody else may be able to: not even dispose, where kill was not.
        await probe.run(f"kill -9 {pid}", at_least=_CLEANUP)
        raise
    return f"a process in a session of its own was gone {_ms(begun)} ms after the kill"


async def _pid(probe: Probe, task: BashTask) -> int:
    said = ""
    end = time.monotonic() + _APPEARANCE
    while "\n" not in said:
        said += probe.executor.read_output(task.id).stdout.text
        if task.status is not TaskStatus.RUNNING and "\n" not in said:
            msg = f"a background task ended before it said anything ({task.reason})"
            raise task.error or FailedError(msg)
        if time.monotonic() > end:
            probe.executor.kill(task.id)
            msg = f"a background task said nothing within {_APPEARANCE:g} s"
            raise FailedError(msg)
        await asyncio.sleep(_POLL)
    return int(said)


async def _until(probe: Probe, pid: int, *, alive: bool, seconds: float) -> None:
    """Asks the place, by other commands, until the process is (alive: in its own session) or is not there."""
    # A zombie can still be signalled. After the name in parentheses come state, parent, group and session.
    ask = (
        f"if kill -0 {pid} 2>/dev/null; then s=; {{ read -r s < /proc/{pid}/stat; }} 2>/dev/null; "
        'set -- ${s##*) }; case "$1" in [ZX]) echo gone;; *) echo "alive ${4:-unknown}";; esac; '
        "else echo gone; fi"
    )
    end = time.monotonic() + seconds
    wanted = (f"alive {pid}", "alive unknown") if alive else ("gone",)
    while (said := (await probe.output(ask)).strip()) not in wanted:
        if time.monotonic() > end:
            if alive:
                msg = f"the process that should be killed did not appear within {seconds:g} s ({said})"
                raise FailedError(msg)
            msg = f"a process in a session of its own was still alive {seconds:g} s after the kill"
            raise FailedError(msg, remedy="This backend leaves processes behind; report it to its authors.")
        await asyncio.sleep(_POLL)


async def spills(probe: Probe) -> str:
    """Output that is more than memory holds can be had in full."""
    result = await probe.run(f"printf '%0{_OUTPUT}d' 0")
    output = result.stdout
    if output.total_bytes != _OUTPUT:
        msg = f"of {_OUTPUT} bytes of output {output.total_bytes} came"
        raise FailedError(msg)
    if not output.truncated:
        msg = f"all of {_OUTPUT} bytes were kept in memory, so no file was needed"
        raise NotCheckedError(msg)
    if output.spill_path is None:
        msg = f"of {_OUTPUT} bytes of output {output.dropped_bytes} are lost: there is no spill file"
        remedy = (
            "See that the temporary directory of the place (TMPDIR, or the option spill_dir) can be written "
            "and has space; with the option max_spill_bytes: 0 there never is one."
        )
        raise FailedError(msg, remedy=remedy)
    size = 0
    async for chunk in probe.executor.fetch(output.spill_path):
        size += len(chunk)
    if size != _OUTPUT - output.spill_start:
        msg = f"the spill file of {_OUTPUT} bytes of output has {size} bytes"
        raise FailedError(msg)
    return f"{size} bytes in {output.spill_path.parent}, fetched again"


def _ms(begun: float) -> str:
    return f"{(time.monotonic() - begun) * 1000:.0f}"


PROBES: Final[Mapping[str, Callable[[Probe], Coroutine[object, object, str]]]] = {
    "open": opens,
    "run": runs,
    "kill": kills,
    "spill": spills,
}
