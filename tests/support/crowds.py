"""Scenarios for a driver: a thousand tasks at the same time, and very many one after the other."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from typing import TYPE_CHECKING, Any

from corral import BashExecRequest, TaskStatus
from corral_backends.places.local import LocalExecutor

if TYPE_CHECKING:
    from corral import BashTask, BashTaskId
    from tests.support.driver import Stage

__all__ = ["crowd", "soak"]


async def crowd(stage: Stage, *, gate: str, tasks: int) -> None:
    """`tasks` tasks at the same time, which all wait at a FIFO. Then as many sleepers, which dispose ends.

    Reports: `waiting` (all have a leader that runs; the test opens the gate before it answers), `done` (how
    often each was told), `sleeping`, `disposed`.
    """
    before = stage.footprint()
    executor = LocalExecutor(kill_grace_ms=3_000, max_finished_tasks=2 * tasks)
    told: Counter[BashTaskId] = Counter()
    executor.on_task_done(lambda task: told.update([task.id]))

    async def start(command: str) -> list[BashTask]:
        spec = executor.resolve(BashExecRequest(command=command))
        made = [executor.start(spec) for _ in range(tasks)]
        while any(task.started_at is None for task in made):
            await asyncio.sleep(0.01)
        return made

    began = time.monotonic()
    waiting = await start(f"read -r word <{gate}; echo done")
    await stage.ask("waiting", seconds=time.monotonic() - began)
    began = time.monotonic()
    while any(task.status is TaskStatus.RUNNING for task in waiting):
        await asyncio.sleep(0.01)
    seconds = time.monotonic() - began
    await asyncio.sleep(0.05)
    outputs = Counter(executor.read_output(task.id).stdout.text for task in waiting)
    exits = Counter(str(task.exit_code) for task in waiting)
    times = dict(Counter(str(told[task.id]) for task in waiting))
    await stage.ask("done", seconds=seconds, told=times, exits=dict(exits), outputs=dict(outputs))
    began = time.monotonic()
    sleeping = await start("sleep 1000")
    await stage.ask("sleeping", seconds=time.monotonic() - began)
    began = time.monotonic()
    await executor.dispose()
    seconds = time.monotonic() - began
    await stage.ask(
        "disposed",
        seconds=seconds,
        told=sum(told[task.id] for task in sleeping),
        reasons=dict(Counter(str(task.reason) for task in sleeping)),
        before=before,
        after=stage.footprint(),
    )


async def soak(stage: Stage, *, runs: int, tasks: int, step: int, lanes: int) -> None:
    """Short runs, then short tasks, in one executor. Reports `step` after so many, then `disposed`."""
    before = stage.footprint()
    executor = LocalExecutor(kill_grace_ms=300)
    spec = executor.resolve(BashExecRequest(command="echo hi"))
    told = 0

    def hear(_task: BashTask) -> None:
        nonlocal told
        told += 1

    executor.on_task_done(hear)

    async def some_runs(count: int) -> None:
        for _ in range(count):
            result = await executor.run(spec)
            assert (result.exit_code, result.stdout.data) == (0, b"hi\n")

    async def some_tasks(count: int) -> None:
        for _ in range(count):
            task = executor.start(spec)
            while task.status is TaskStatus.RUNNING:
                await asyncio.sleep(0.001)
            assert executor.read_output(task.id).stdout.data == b"hi\n"

    for kind, work, count in (("runs", some_runs, runs), ("tasks", some_tasks, tasks)):
        for done in range(0, count, step):
            began = time.monotonic()
            await asyncio.gather(*(work(step // lanes) for _ in range(lanes)))
            await stage.ask("step", kind=kind, done=done + step, seconds=time.monotonic() - began)
    known = len(executor.list())
    await executor.dispose()
    fields: dict[str, Any] = {"told": told, "known": known, "before": before, "after": stage.footprint()}
    await stage.ask("disposed", **fields)
