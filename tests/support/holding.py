"""A scenario for a driver: holds background tasks, and does with them what it is told, word by word."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import sys
import time
from collections import Counter
from typing import TYPE_CHECKING, Any

from corral import BashExecRequest, TaskStatus
from corral_backends.places.local import LocalExecutor

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from corral import BashTask, BashTaskId
    from tests.support.driver import Stage

__all__ = ["Errors", "hold", "rush"]


class Errors(logging.Handler):
    """Collects what is logged, which would else go to standard error."""

    def __init__(self) -> None:
        super().__init__()
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())

    @classmethod
    @contextlib.contextmanager
    def collected(cls) -> Iterator[Errors]:
        handler = cls()
        loggers = [logging.getLogger(name) for name in ("corral", "asyncio")]
        for logger in loggers:
            logger.addHandler(handler)
        try:
            yield handler
        finally:
            for logger in loggers:
                logger.removeHandler(handler)


class Holder:
    """One executor and its tasks."""

    def __init__(self, commands: Sequence[str], grace_ms: int) -> None:
        self.executor = LocalExecutor(kill_grace_ms=grace_ms)
        self.told: Counter[BashTaskId] = Counter()
        self.executor.on_task_done(lambda task: self.told.update([task.id]))
        self.tasks = [
            self.executor.start(self.executor.resolve(BashExecRequest(command=command)))
            for command in commands
        ]
        self.runs: list[asyncio.Task[Any]] = []

    def chosen(self, numbers: str) -> list[BashTask]:
        return [self.tasks[int(number)] for number in numbers.split()] or self.tasks

    async def ended(self, tasks: Sequence[BashTask]) -> None:
        while any(task.status is TaskStatus.RUNNING for task in tasks):
            await asyncio.sleep(0.002)
        await asyncio.sleep(0.02)  # a second notification would come now

    def seen(self) -> list[dict[str, Any]]:
        """The tasks as JSON. Reading takes their output."""
        return [
            {
                "status": str(task.status),
                "reason": None if task.reason is None else str(task.reason),
                "exit_code": task.exit_code,
                "signal": task.signal,
                "error": type(task.error).__name__,
                "message": str(task.error),
                "told": self.told[task.id],
                "stdout": self.executor.read_output(task.id).stdout.text,
            }
            for task in self.tasks
        ]

    async def dispose(self) -> str | None:
        """The name of the error that it raised."""
        try:
            await self.executor.dispose()
        except Exception as error:
            return type(error).__name__
        return None


def fork_a_holder_of_descriptors() -> int:
    """A forked child that lives on and holds a copy of every socket that this process has.

    Copies under other numbers too, since a child that was forked in the normal way may close what it knows.
    """
    for name in os.listdir("/proc/self/fd"):
        try:
            if os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                os.dup(int(name))
        except OSError:
            continue
    pid = os.fork()
    if pid == 0:
        time.sleep(50)
        os._exit(0)
    return pid


def leave(how: str) -> None:
    """Ends this process, or the coroutine that calls it, without a thought for the executor."""
    if how == "sys.exit":
        sys.exit(5)
    if how == "os._exit":
        os._exit(6)
    if how == "raise":
        msg = "unhandled"
        raise RuntimeError(msg)


async def hold(stage: Stage, *, commands: Sequence[str], grace_ms: int = 300) -> None:
    """Starts the commands as background tasks; each word is answered by one report.

    `kill [N...]`, `wait [N...]`: kills these tasks, or all, waits for their ends: `ended`. `run`: runs
    `echo next`: `ran`. `foreground COMMAND`: runs it without waiting: `running`. `fork`: `forked`. `look`:
    `seen`. `dispose`: `disposed`. `leave HOW`: no report.
    """
    before = stage.footprint()
    with Errors.collected() as errors:
        holder = Holder(commands, grace_ms)
        report: str = "started"
        fields: dict[str, Any] = {}
        while True:
            verb, _, rest = (await stage.ask(report, **fields)).partition(" ")
            began = time.monotonic()
            fields = {}
            if verb in ("kill", "wait"):
                tasks = holder.chosen(rest)
                killed = [holder.executor.kill(task.id) for task in tasks] if verb == "kill" else []
                await holder.ended(tasks)
                report, fields = "ended", {"killed": killed, "tasks": holder.seen()}
            elif verb == "run":
                result = await holder.executor.run(
                    holder.executor.resolve(BashExecRequest(command="echo next"))
                )
                report, fields = "ran", {"stdout": result.stdout.text}
            elif verb == "foreground":
                spec = holder.executor.resolve(BashExecRequest(command=rest))
                holder.runs.append(asyncio.create_task(holder.executor.run(spec)))
                report = "running"
            elif verb == "fork":
                report, fields = "forked", {"pid": fork_a_holder_of_descriptors()}
            elif verb == "look":
                report, fields = "seen", {"tasks": holder.seen()}
            elif verb == "dispose":
                error = await holder.dispose()
                elapsed_ms = (time.monotonic() - began) * 1000
                runs = await asyncio.gather(*holder.runs, return_exceptions=True)
                holder.runs.clear()
                report = "disposed"
                fields = {
                    "error": error,
                    "runs": [
                        type(run).__name__ if isinstance(run, BaseException) else str(run.reason)
                        for run in runs
                    ],
                    "tasks": holder.seen(),
                    "before": before,
                    "after": stage.footprint(),
                    "logged": errors.messages,
                    "elapsed_ms": elapsed_ms,
                }
            elif verb == "leave":
                leave(rest)
                return
            else:
                return
            fields.setdefault("elapsed_ms", (time.monotonic() - began) * 1000)


async def rush(stage: Stage, *, commands: Sequence[str]) -> None:
    """Says `rushing`, then opens its place and starts the commands, and stays; the test kills the host."""
    stage.say("rushing")
    Holder(commands, 300)
    await asyncio.sleep(50)
