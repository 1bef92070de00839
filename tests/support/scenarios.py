"""What a driver can do. Each scenario is a coroutine function of a `Stage` and of JSON arguments."""

from __future__ import annotations

import asyncio
import os
import time
from typing import TYPE_CHECKING, Any

from corral import AbortController, BashExecRequest, BashRunResult, BashTask, PlaceLostError
from corral_backends.places.local import LocalExecutor

if TYPE_CHECKING:
    from tests.support.driver import Stage

__all__ = ["cancel_rounds", "end", "ends", "forked", "many", "until_interrupted"]


def told(result: BashRunResult) -> dict[str, Any]:
    """A result as JSON."""
    return {
        "reason": str(result.reason),
        "exit_code": result.exit_code,
        "signal": result.signal,
        "timed_out": result.timed_out,
        "aborted": result.aborted,
        "stdout": result.stdout.text,
        "stderr": result.stderr.text,
        "duration_ms": result.duration_ms,
        "survivors": result.survivors,
    }


async def end(stage: Stage, *, command: str, how: str, timeout_ms: int, grace_ms: int) -> None:
    """Runs `command`, ends it in the way `how`, and reports before the dispose and after.

    Reports: `running` (answer it when the workload is up; not for a timeout, which does not wait), `ended`
    (`elapsed_ms` since the run began for a timeout or a leader that exits, else since it was told to end),
    `disposed`.
    """
    before = stage.footprint()
    executor = LocalExecutor(kill_grace_ms=grace_ms)
    # Opening the place is not what is measured.
    assert (await executor.run(executor.resolve(BashExecRequest(command="true")))).exit_code == 0
    controller = AbortController()
    spec = executor.resolve(BashExecRequest(command=command, timeout_ms=timeout_ms, signal=controller.signal))
    result: dict[str, Any] = {}
    if how == "kill":
        done = asyncio.Event()
        executor.on_task_done(lambda _task: done.set())
        task = executor.start(spec)
        await stage.ask("running")
        began = time.monotonic()
        killed = executor.kill(task.id)
        await done.wait()
        result = told_task(executor, task) | {"killed": killed}
    else:
        began = time.monotonic()
        run = asyncio.create_task(executor.run(spec))
        if how not in ("timeout", "exit"):
            await stage.ask("running")
            began = time.monotonic()
        if how == "abort":
            controller.abort("enough")
        elif how == "cancel":
            run.cancel()
        elif how == "dispose":
            await executor.dispose()
        try:
            result = told(await run)
        except asyncio.CancelledError:
            result = {"reason": "cancelled"}
        except PlaceLostError as error:
            result = {"reason": "lost", "stdout": error.stdout.text if error.stdout else None}
    elapsed = (time.monotonic() - began) * 1000
    await stage.ask("ended", elapsed_ms=elapsed, **result)
    await executor.dispose()
    await stage.ask("disposed", before=before, after=stage.footprint())


async def ends(stage: Stage, *, command: str, hows: list[str], timeout_ms: int, grace_ms: int) -> None:
    """`end` in each of the ways in turn, each with an executor of its own."""
    for how in hows:
        await end(stage, command=command, how=how, timeout_ms=timeout_ms, grace_ms=grace_ms)


def told_task(executor: LocalExecutor, task: BashTask) -> dict[str, Any]:
    read = executor.read_output(task.id)
    return {
        "reason": str(task.reason),
        "exit_code": task.exit_code,
        "signal": task.signal,
        "status": str(task.status),
        "stdout": read.stdout.text,
    }


async def cancel_rounds(
    stage: Stage, *, command: str, delays_ms: list[float], rounds: int, grace_ms: int, cold: bool, twice: bool
) -> None:
    """Cancels `run` at each of the delays after its beginning, `rounds` times; each is followed by a report.

    Reports: `ready` (what the process holds when no run is under way), `round` for each, `disposed`.
    Cold: a round has an executor of its own, whose opening the cancellation meets; it is disposed before the
    report. Twice: a second cancel 1 ms after the first.
    """
    before = stage.footprint()
    executor = LocalExecutor(kill_grace_ms=grace_ms)
    await executor.run(executor.resolve(BashExecRequest(command="true")))
    if cold:
        await executor.dispose()
    await stage.ask("ready", **stage.footprint())
    for delay_ms in delays_ms:
        for _ in range(rounds):
            if cold:
                executor = LocalExecutor(kill_grace_ms=grace_ms)
            run = asyncio.create_task(executor.run(executor.resolve(BashExecRequest(command=command))))
            await pause(delay_ms)
            began = time.monotonic()
            run.cancel()
            if twice:
                await pause(1)
                run.cancel()
            outcome = "cancelled"
            try:
                outcome = str((await run).reason)
            except asyncio.CancelledError:
                pass
            elapsed_ms = (time.monotonic() - began) * 1000
            if cold:
                await executor.dispose()
            await stage.ask("round", outcome=outcome, elapsed_ms=elapsed_ms, **stage.footprint())
    await executor.dispose()
    await stage.ask("disposed", before=before, after=stage.footprint())


async def many(stage: Stage, *, commands: list[str], grace_ms: int) -> None:
    """Runs all commands at once, half of them as background tasks, and disposes of everything on demand.

    Reports: `running`, `ended` (`elapsed_ms` of the dispose, and how the foreground half ended).
    """
    executor = LocalExecutor(kill_grace_ms=grace_ms)
    specs = [executor.resolve(BashExecRequest(command=command)) for command in commands]
    runs = [asyncio.create_task(executor.run(spec)) for spec in specs[::2]]
    for spec in specs[1::2]:
        executor.start(spec)
    await stage.ask("running")
    began = time.monotonic()
    await executor.dispose()
    elapsed_ms = (time.monotonic() - began) * 1000
    results = await asyncio.gather(*runs)
    reasons = [str(result.reason) for result in results]
    await stage.ask("ended", elapsed_ms=elapsed_ms, reasons=reasons, survivors=[r.survivors for r in results])


async def forked(stage: Stage, *, command: str, grace_ms: int) -> None:
    """Runs `command` while a forked child of the host holds all of its descriptors, for at most 10 s.

    Reports: `running`, with the `child`'s pid; the test then kills the host.
    """
    executor = LocalExecutor(kill_grace_ms=grace_ms)
    await executor.run(executor.resolve(BashExecRequest(command="true")))
    child = os.fork()
    if child == 0:
        time.sleep(10)
        os._exit(0)
    run = asyncio.create_task(executor.run(executor.resolve(BashExecRequest(command=command))))
    await stage.ask("running", child=child)
    await run


async def until_interrupted(stage: Stage, *, command: str, grace_ms: int) -> None:
    """Runs `command` inside `async with` and reports `running`; the test then sends signals to the driver."""
    async with LocalExecutor(kill_grace_ms=grace_ms) as executor:
        stage.say("running")
        await executor.run(executor.resolve(BashExecRequest(command=command)))


async def pause(ms: float) -> None:
    """Sleeps with the resolution of the clock, not of epoll (1 ms); at least one turn of the loop."""
    until = time.perf_counter() + ms / 1000
    await asyncio.sleep(0)
    while time.perf_counter() < until:
        await asyncio.sleep(0)
