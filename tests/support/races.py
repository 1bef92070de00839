"""Scenarios for a driver: very many tasks, ended by everything at once.

Each reports figures and what went against the contract (`violations`, empty if all is well).
"""

from __future__ import annotations

import asyncio
import errno
import os
import random
import signal
import time
from collections import Counter
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from corral import (
    AbortController,
    AbortedBeforeStartError,
    BashExecRequest,
    EndReason,
    ExecutorDisposedError,
    PlaceLostError,
    PlaceOpenError,
    SpawnError,
    TaskStatus,
    WorkdirError,
)
from corral_backends.places.local import LocalExecutor
from tests.support.holding import Errors
from tests.support.processes import descendants

if TYPE_CHECKING:
    from collections.abc import Callable

    from corral import BashTask, BashTaskId
    from tests.support.driver import Stage

__all__ = ["race"]

GRACE_MS = 60
DRAIN_SECONDS = 20
MISSING = "/nonexistent/workdir"


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """A command and how it ends when nobody ends it (never, if `reason` is None and it is no failure)."""

    command: str
    weight: int
    reason: EndReason | None = None
    exit_code: int | None = None
    stdout: bytes = b""
    workdir: str | None = None


KINDS = (
    Kind(command="true", weight=6, reason=EndReason.EXITED, exit_code=0),
    Kind(command="exit 3", weight=4, reason=EndReason.EXITED, exit_code=3),
    Kind(command="echo hi", weight=6, reason=EndReason.EXITED, exit_code=0, stdout=b"hi\n"),
    Kind(command="kill -9 $$", weight=3, reason=EndReason.SIGNALLED),
    Kind(command="sleep 0.01", weight=6, reason=EndReason.EXITED, exit_code=0),
    Kind(command="sleep 0.04; echo late", weight=6, reason=EndReason.EXITED, exit_code=0, stdout=b"late\n"),
    Kind(command="setsid -f sleep 20; exit 4", weight=2, reason=EndReason.EXITED, exit_code=4),
    Kind(command="head -c 150000 /dev/zero", weight=2, reason=EndReason.EXITED, exit_code=0),
    Kind(command="sleep 20", weight=8),
    Kind(command="trap '' TERM; (sleep 20 &); sleep 20; sleep 20", weight=2),
    Kind(command="true", workdir=MISSING, weight=2),
    Kind(command="kill -9 $PPID; sleep 20", weight=1, reason=EndReason.LOST),
    Kind(command="kill -STOP $PPID; sleep 20", weight=1, reason=EndReason.LOST),
)


LAUNCH_ERRORS = (WorkdirError, AbortedBeforeStartError, ExecutorDisposedError, PlaceLostError, SpawnError)
"""Of a task with a workdir that is missing, in its turn, before it, or after it."""


def short(error: BaseException | None) -> bool:
    """Whether the machine had no process left for this user, of whom there may be others."""
    return isinstance(error, SpawnError) and error.errno == errno.EAGAIN


@dataclass(slots=True)
class Entry:
    """What was done to one task, and what was heard of it."""

    task: BashTask
    kind: Kind
    killed: int = 0  # how often kill() said True
    aborted: bool = False
    early: bool = False  # final, and its listeners due, before dispose began
    made: datetime = field(default_factory=lambda: datetime.now(UTC))
    heard: Counter[str] = field(default_factory=Counter)


class Heat:
    """One executor with a number of tasks, from its making to its disposal."""

    def __init__(self, chance: random.Random, *, losses: bool, drain: bool) -> None:
        self.chance = chance
        self.losses = losses
        self.drain = drain
        self.executor = LocalExecutor(
            kill_grace_ms=GRACE_MS, max_output_bytes=10_000, max_finished_tasks=10_000
        )
        self.entries: dict[BashTaskId, Entry] = {}
        self.begun = False
        self.violations: list[str] = []
        self.raised = 0
        self.short = 0
        self.drain_s = self.dispose_s = 0.0
        self.undo_leaver: Callable[[], None] | None = None
        self.steady = ("first", "raiser", "killer", "starter", "last")
        for name in self.steady:
            self.executor.on_task_done(self.listener(name))
        self.undo_leaver = self.executor.on_task_done(self.listener("leaver"))
        # In some heats a listener disposes.
        self.dispose_after = 0 if drain else chance.choice([0, 0, chance.randint(1, 20)])

    def wrong(self, entry: Entry, what: str) -> None:
        task = entry.task
        self.violations.append(
            f"{what}: {task.command!r} {task.status} {task.reason} {task.exit_code} {task.signal} "
            f"{task.error!r} killed {entry.killed} aborted {entry.aborted} heard {dict(entry.heard)} "
            f"made {entry.made} started {task.started_at} ended {task.ended_at}"
        )

    # --- listeners

    def listener(self, name: str) -> Callable[[BashTask], None]:
        def hear(task: BashTask) -> None:
            entry = self.entries[task.id]
            if self.begun or self.executor.disposed:
                self.wrong(entry, f"{name} was called after dispose began")
            entry.heard[name] += 1
            if name == "first":
                self.check_final(entry)
            elif name == "raiser":
                self.raised += 1
                msg = "on purpose"
                raise ValueError(msg)
            elif name == "killer":
                self.kill(entry)
                self.kill(self.chance.choice(list(self.entries.values())))
            elif name == "starter":
                if self.chance.random() < 0.05:
                    self.start()
            elif name == "leaver":
                if self.undo_leaver is None:
                    self.wrong(entry, "a listener that was taken back was called")
                elif self.chance.random() < 0.1:
                    self.undo_leaver()
                    self.undo_leaver = None
            elif self.dispose_after and sum(e.heard["last"] for e in self.entries.values()) == (
                self.dispose_after
            ):
                self.dispose()

        return hear

    def check_final(self, entry: Entry) -> None:
        """In a listener's first statements: the end is final, and the output is all there."""
        task, kind = entry.task, entry.kind
        status = task.status
        read = self.executor.read_output(task.id)
        again = self.executor.read_output(task.id)
        if status is TaskStatus.RUNNING or task.ended_at is None or read.status is not status:
            self.wrong(entry, "not final")
        if again.stdout.data or again.stderr.data:
            self.wrong(entry, "output after the rest of the output")
        if task.reason is kind.reason is EndReason.EXITED:
            if task.exit_code != kind.exit_code:
                self.wrong(entry, "another exit code")
            if kind.stdout and read.stdout.data != kind.stdout:
                self.wrong(entry, f"output {read.stdout.data!r}")
        if (task.exit_code is not None) and (task.signal is not None):
            self.wrong(entry, "both an exit code and a signal")

    # --- doing things to tasks

    def start(self) -> None:
        kind = self.chance.choices(KINDS, [kind.weight for kind in KINDS])[0]
        controller = AbortController()
        try:
            task = self.executor.start(
                self.executor.resolve(
                    BashExecRequest(command=kind.command, workdir=kind.workdir, signal=controller.signal)
                )
            )
        except ExecutorDisposedError:
            return
        entry = self.entries[task.id] = Entry(task, kind)
        # Some are left alone if they end by themselves.
        if kind.reason is None or self.chance.random() < 0.6:
            loop = asyncio.get_running_loop()
            for _ in range(self.chance.choice([1, 1, 2, 3])):
                delay = self.chance.choice([0, 0.001, 0.005, 0.02, 0.05]) * self.chance.random()
                if self.chance.random() < 0.6:
                    loop.call_later(delay, self.kill, entry)
                else:
                    loop.call_later(delay, self.abort, entry, controller)

    def kill(self, entry: Entry) -> None:
        final = entry.task.status is not TaskStatus.RUNNING
        if self.executor.kill(entry.task.id):
            entry.killed += 1
            if final:
                self.wrong(entry, "kill of an ended task said True")

    @staticmethod
    def abort(entry: Entry, controller: AbortController) -> None:
        entry.aborted = True
        controller.abort("on purpose")

    async def foreground(self) -> None:
        """A run in between, that times out, is aborted, cancelled, or just ends."""
        controller = AbortController()
        kind = self.chance.choices(KINDS, [kind.weight for kind in KINDS])[0]
        request = BashExecRequest(
            command=kind.command,
            workdir=kind.workdir,
            signal=controller.signal,
            timeout_ms=self.chance.randint(1, 80),
        )
        how = self.chance.choice(["timeout", "abort", "cancel"])
        run = asyncio.ensure_future(self.executor.run(self.executor.resolve(request)))
        if how != "timeout":
            await asyncio.sleep(self.chance.random() * 0.04)
            run.cancel() if how == "cancel" else controller.abort()
        expected = (PlaceLostError, PlaceOpenError) if self.losses else ()
        try:
            await run
        except asyncio.CancelledError:
            if how != "cancel":
                self.violations.append(f"a run that nobody cancelled was: {request.command!r}")
        except (AbortedBeforeStartError, ExecutorDisposedError):
            pass
        except Exception as error:
            if kind.workdir is not None:
                known = isinstance(error, WorkdirError)
            else:
                known = kind.reason is EndReason.LOST and isinstance(error, PlaceLostError)
            if not known and not isinstance(error, expected) and not short(error):
                self.violations.append(f"run {request.command!r}: {error!r}")

    def lose(self) -> None:
        """SIGKILL to one of our wardens: this heat's, or that of one beside it."""
        here = os.getpid()
        wardens = [p.pid for p in descendants(here) if p.warden and p.ppid == here and not p.zombie]
        if wardens:
            os.kill(self.chance.choice(wardens), signal.SIGKILL)

    def dispose(self) -> None:
        self.begun = True
        self.executor.dispose()

    # --- the heat

    async def run(self, tasks: int) -> None:
        chance = self.chance
        runs: list[asyncio.Task[None]] = []
        while len(self.entries) < tasks and not self.begun:
            self.start()
            if chance.random() < 0.15:
                runs.append(asyncio.ensure_future(self.foreground()))
            if self.losses and chance.random() < 0.01:
                self.lose()
            while self.running() > 12 and not self.begun:
                await asyncio.sleep(0.001)
            await asyncio.sleep(chance.choice([0, 0, 0, 0.001, 0.004]))
        if self.drain:
            began = time.monotonic()
            while self.running() and time.monotonic() - began < DRAIN_SECONDS:
                for entry in self.entries.values():
                    if entry.kind.reason is None:
                        self.kill(entry)
                await asyncio.sleep(0.005)
            self.drain_s = time.monotonic() - began
        if not self.begun:
            for entry in self.entries.values():
                entry.early = entry.task.status is not TaskStatus.RUNNING
            await asyncio.sleep(0.001)  # what has ended by then is told in this turn
            if self.begun:  # by a listener, before the turn of others
                for entry in self.entries.values():
                    entry.early = False
            else:
                self.dispose()
        heard = {task_id: Counter(entry.heard) for task_id, entry in self.entries.items()}
        expected = (PlaceLostError,) if self.losses else ()
        began = time.monotonic()
        try:
            await self.executor.dispose()
        except expected:
            pass
        except Exception as error:
            self.violations.append(f"dispose: {error!r}")
        self.dispose_s = time.monotonic() - began
        await asyncio.gather(*runs)
        await asyncio.sleep(0.001)
        for task_id, entry in self.entries.items():
            if entry.heard != heard[task_id]:
                self.wrong(entry, "a listener was called after dispose began")
            self.check_end(entry)

    def running(self) -> int:
        return sum(entry.task.status is TaskStatus.RUNNING for entry in self.entries.values())

    def check_end(self, entry: Entry) -> None:
        task, kind, heard = entry.task, entry.kind, entry.heard
        if task.status is TaskStatus.RUNNING:
            self.wrong(entry, "still running")
        if heard and max(heard.values()) > 1:
            self.wrong(entry, "told twice")
        if entry.early and [heard[name] for name in self.steady] != [1] * len(self.steady):
            self.wrong(entry, "not told")
        if entry.killed > 1:
            self.wrong(entry, "killed twice")
        allowed = {kind.reason, EndReason.DISPOSED if not entry.early else kind.reason}
        if entry.killed:
            allowed.add(EndReason.KILLED)
        if entry.aborted:
            allowed.add(EndReason.ABORTED)
        if self.losses:
            allowed.add(EndReason.LOST)
        if kind.reason is None and kind.workdir is None:
            allowed.discard(None)
        if self.losses and isinstance(task.error, PlaceOpenError):
            allowed.add(None)  # its warden was killed while it said hello
        if short(task.error):
            self.short += 1
        elif task.reason not in allowed:
            self.wrong(entry, "another reason")
        if kind.workdir is not None and not isinstance(task.error, LAUNCH_ERRORS):
            self.wrong(entry, "another error")
        if entry.killed and task.reason not in (EndReason.KILLED, EndReason.LOST):
            self.wrong(entry, "killed, and yet not")
        failed = task.status is TaskStatus.FAILED
        if failed is not (task.error is not None) or (task.started_at is None and not failed):
            self.wrong(entry, "neither failed nor finished")


async def race(stage: Stage, *, seed: int, tasks: int, lanes: int, losses: bool, eager: bool = False) -> None:
    """Heats side by side in `lanes`, until `tasks` background tasks were started. Reports: `raced`.

    `losses`: wardens are killed now and then. `eager`: asyncio's tasks begin to run when they are made.
    """
    if eager:
        asyncio.get_running_loop().set_task_factory(asyncio.eager_task_factory)
    before = stage.footprint()
    began = time.monotonic()
    chance = random.Random(seed)
    heats: list[Heat] = []
    total = 0

    async def lane() -> None:
        nonlocal total
        while total < tasks:
            heat = Heat(
                random.Random(chance.random()), losses=losses, drain=len(heats) % 3 == 0
            )  # in the order of making: reproducible as far as races are
            heats.append(heat)
            size = min(chance.randint(5, 60), tasks - total)
            total += size
            await heat.run(size)
            total += len(heat.entries) - size  # fewer if it was disposed of before

    with Errors.collected() as errors:
        await asyncio.gather(*(lane() for _ in range(lanes)))
        await asyncio.sleep(0.05)
    entries = [entry for heat in heats for entry in heat.entries.values()]
    listener_errors = sum("task-done listener raised" in message for message in errors.messages)
    violations = [violation for heat in heats for violation in heat.violations]
    if listener_errors != sum(heat.raised for heat in heats):
        violations.append(f"{listener_errors} errors of listeners were logged")
    expected = ("listener raised", "closing a place that had failed") if losses else ("listener raised",)
    violations += [
        f"logged: {message}" for message in errors.messages if not any(part in message for part in expected)
    ]
    await stage.ask(
        "raced",
        seconds=time.monotonic() - began,
        executors=len(heats),
        tasks=len(entries),
        notifications=sum(sum(entry.heard.values()) for entry in entries),
        told=sum(entry.heard["first"] for entry in entries),
        short=sum(heat.short for heat in heats),
        reasons=dict(Counter(str(entry.task.reason) for entry in entries)),
        slowest={
            "drain": max(heat.drain_s for heat in heats),
            "dispose": max(heat.dispose_s for heat in heats),
        },
        violations=violations[:20],
        before=before,
        after=stage.footprint(),
    )
