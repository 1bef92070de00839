"""Scenarios for a driver: hosts that are unusual, and hosts that count what they hold."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import gc
import json
import multiprocessing
import multiprocessing.popen_fork  # else imported when it is needed, then out of reach
import multiprocessing.util
import os
import resource
import signal
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from corral import (
    AbortController,
    AbortedBeforeStartError,
    BashExecRequest,
    BashTaskId,
    PlaceError,
    WorkdirError,
)
from corral_backends.places.local import LocalExecutor
from tests.support.scenarios import told

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.support.driver import Stage

__all__ = ["commands", "daemon", "few_descriptors", "few_processes", "forks", "statuses", "uses"]

GRACE_MS = 300


async def outcome(executor: LocalExecutor, **fields: Any) -> dict[str, Any]:
    """A run as JSON: its result, or its error by name."""
    began = time.monotonic()
    try:
        result = told(await executor.run(executor.resolve(BashExecRequest(**fields))))
    except (PlaceError, ValueError) as error:
        attributes = {
            name: getattr(error, name, None) for name in ("errno", "retryable", "workdir", "remedy")
        }
        partial = getattr(error, "stdout", None)
        result = {"error": type(error).__name__, "message": str(error), **attributes}
        result["stdout"] = partial.text if partial is not None else None
    return {**result, "elapsed_ms": (time.monotonic() - began) * 1000}


async def commands(stage: Stage, *, requests: list[dict[str, Any]], options: dict[str, Any]) -> None:
    """Runs each of the requests and reports `ran` with its outcome; then disposes and reports `disposed`."""
    before = stage.footprint()
    executor = LocalExecutor(**{"kill_grace_ms": GRACE_MS, **options})
    for request in requests:
        await stage.ask("ran", **await outcome(executor, **request))
    began = time.monotonic()
    error = None
    try:
        await executor.dispose()
    except PlaceError as raised:
        error = type(raised).__name__
    elapsed = (time.monotonic() - began) * 1000
    await stage.ask("disposed", error=error, elapsed_ms=elapsed, before=before, after=stage.footprint())


@contextlib.contextmanager
def reaping() -> Iterator[None]:
    """A thread that takes the exit status of every child of this process, whoever's it is."""
    over = threading.Event()

    def loop() -> None:
        while not over.is_set():
            try:
                if os.waitpid(-1, os.WNOHANG) == (0, 0):
                    time.sleep(0.0002)
            except ChildProcessError:
                time.sleep(0.0002)

    thread = threading.Thread(target=loop)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


async def statuses(stage: Stage, *, sigchld_ignored: bool, reaper: bool) -> None:
    """Runs commands of which the ends are known, in a host that disturbs waiting. Reports `ends`, `disposed`.

    `ends` are pairs of exit code and signal of `exit 7`, `exit 0`, `exit 255`, `kill -9 $$`, a timeout and
    a background task, for each of five executors.
    """
    before = stage.footprint()
    if sigchld_ignored:
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    ends: list[list[list[int | str | None]]] = []
    with reaping() if reaper else contextlib.nullcontext():
        for _ in range(5):
            async with LocalExecutor(kill_grace_ms=GRACE_MS) as executor:
                runs = [
                    outcome(executor, command=text) for text in ("exit 7", "exit 0", "exit 255", "kill -9 $$")
                ]
                runs.append(outcome(executor, command="exec sleep 15", timeout_ms=100))
                done = asyncio.Event()
                executor.on_task_done(lambda _task, done=done: done.set())  # type: ignore[misc]
                task = executor.start(executor.resolve(BashExecRequest(command="exit 7")))
                seen = [[end["exit_code"], end["signal"]] for end in await asyncio.gather(*runs)]
                await done.wait()
                ends.append([*seen, [task.exit_code, task.signal]])
    await stage.ask("ends", ends=ends)
    await stage.ask("disposed", before=before, after=stage.footprint())


async def uses(stage: Stage, *, spill: str) -> None:
    """Uses everything that an executor has, three times over; reports `used` after each dispose."""
    before = stage.footprint()
    for _ in range(3):
        async with LocalExecutor(kill_grace_ms=GRACE_MS, spill_dir=spill) as executor:
            await use(executor)
            during = stage.footprint()
        gc.collect()
        left = sorted(str(path) for path in Path(spill).iterdir())  # noqa: ASYNC240
        await stage.ask("used", before=before, during=during, after=stage.footprint(), left=left)


async def use(executor: LocalExecutor) -> None:
    def resolved(command: str, **fields: Any) -> Any:
        return executor.resolve(BashExecRequest(command=command, **fields))

    controller = AbortController()
    await executor.run(resolved("true"))  # what is aborted below has begun by then
    runs = [executor.run(resolved(f"echo {number}; exit {number}")) for number in range(20)]
    runs += [executor.run(resolved("setsid sleep 15 & sleep 15", timeout_ms=100)) for _ in range(5)]
    runs += [executor.run(resolved("sleep 15", signal=controller.signal)) for _ in range(5)]
    runs += [
        executor.run(resolved("sleep 15 & setsid sleep 15 & echo x", stdin=b"x" * 100_000)) for _ in range(5)
    ]
    cancelled = [asyncio.create_task(executor.run(resolved("sleep 15; :"))) for _ in range(5)]
    tasks = [executor.start(resolved("sleep 15; :")) for _ in range(5)]
    asyncio.get_running_loop().call_later(0.1, controller.abort)
    await asyncio.gather(*runs)
    for task in cancelled:
        task.cancel()
    await asyncio.wait(cancelled)
    for task in tasks[:3]:
        executor.kill(task.id)
    with contextlib.suppress(WorkdirError):
        await executor.run(resolved("true", workdir="/no/such"))
    with contextlib.suppress(AbortedBeforeStartError):
        await executor.run(resolved("true", signal=controller.signal))
    large = await executor.run(resolved("seq 300000; " + "#" * 200_000))
    assert large.stdout.spill_path is not None
    async for _ in executor.fetch(large.stdout.spill_path):
        pass
    abandoned = executor.fetch(large.stdout.spill_path)
    await anext(abandoned)
    await abandoned.aclose()  # type: ignore[attr-defined]


def used_descriptors() -> int:
    return len(os.listdir("/proc/self/fd")) - 1


async def few_descriptors(stage: Stage, *, limit: int) -> None:
    """A host and a warden that may have `limit` descriptors each.

    Reports `crowd` (outcomes of 100 commands at once, and of one afterwards), `openings` (for each number of
    descriptors that were still free: the error of opening, or the warden's arguments, and how many
    descriptors more than before are held afterwards).
    """
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
    async with LocalExecutor(kill_grace_ms=GRACE_MS) as executor:
        await outcome(executor, command="true")
        crowd = await asyncio.gather(
            *(outcome(executor, command=f"sleep 0.5; echo {number}") for number in range(100))
        )
        await stage.ask("crowd", outcomes=crowd, then=await outcome(executor, command="echo then"))
    openings = []
    for free in range(14):
        held: list[int] = []
        with contextlib.suppress(OSError):
            while True:
                held.append(os.open(os.devnull, os.O_RDONLY))
        for descriptor in held[:free]:
            os.close(descriptor)
        before = used_descriptors() if free else limit
        executor = LocalExecutor(kill_grace_ms=GRACE_MS)
        result = await outcome(executor, command="echo opened")
        # To look around takes a descriptor.
        for descriptor in held[free:]:
            os.close(descriptor)
        wardens = children()
        arguments = [Path(f"/proc/{pid}/cmdline").read_text() for pid in wardens]  # noqa: ASYNC240
        await executor.dispose()
        leaked = used_descriptors() - (before - len(held[free:]))
        openings.append(
            {**result, "free": free, "arguments": arguments, "leaked": leaked, "left": children()}
        )
    await stage.ask("openings", openings=openings)


def children() -> list[int]:
    return [int(pid) for pid in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()]


async def few_processes(stage: Stage, *, marker: str) -> None:
    """An ordinary user whose processes are limited. Reports `runs`, `opening`, and `over`.

    `runs` are the outcomes of one command under a limit of the warden's that is 1, 2, 3 and so on, until it
    could be run; `opening` that of a first command under a limit of the host's that is used up.
    """
    hard = resource.getrlimit(resource.RLIMIT_NPROC)[1]
    async with LocalExecutor(kill_grace_ms=GRACE_MS) as executor:
        await outcome(executor, command="true")
        (warden,) = children()
        runs = []
        for limit in range(1, hard):
            resource.prlimit(warden, resource.RLIMIT_NPROC, (limit, hard))
            runs.append(await outcome(executor, command=f"echo run >>'{marker}'"))
            if "error" not in runs[-1]:
                break
        resource.prlimit(warden, resource.RLIMIT_NPROC, (hard, hard))
        await stage.ask("runs", outcomes=runs)
    async with LocalExecutor(kill_grace_ms=GRACE_MS) as executor:
        resource.setrlimit(resource.RLIMIT_NPROC, (1, hard))
        opening = await outcome(executor, command=f"echo opening >>'{marker}'")
        resource.setrlimit(resource.RLIMIT_NPROC, (hard, hard))
        await stage.ask("opening", **opening)
        await stage.ask("over", **await outcome(executor, command="echo over"))


# --- forks


def refusals(executor: LocalExecutor) -> dict[str, str]:
    """What each member says here: the error's name and text."""
    spec = executor.resolve(BashExecRequest(command="touch forked"))
    nobody = BashTaskId("nobody")
    uses = {
        "run": lambda: executor.run(spec).send(None),
        "start": lambda: executor.start(spec),
        "get": lambda: executor.get(nobody),
        "list": lambda: executor.list(),
        "owner_of": lambda: executor.owner_of(nobody),
        "read_output": lambda: executor.read_output(nobody),
        "kill": lambda: executor.kill(nobody),
        "fetch": lambda: executor.fetch("/etc/passwd").__anext__().send(None),  # type: ignore[attr-defined]
        "dispose": lambda: executor.dispose(),
    }
    told = {}
    for name, attempt in uses.items():
        try:
            attempt()
            told[name] = "nothing"
        except Exception as error:
            told[name] = f"{type(error).__name__}: {error}"
    return told


def in_child(executor: LocalExecutor, out: int) -> None:
    """What a forked child does: it is refused, has an executor of its own, and lets go of everything."""
    told = refusals(executor)

    async def own() -> str:
        async with LocalExecutor(kill_grace_ms=GRACE_MS) as another:
            return str((await outcome(another, command="echo child"))["stdout"])

    told["own"] = asyncio.run(own())
    del executor
    gc.collect()
    os.write(out, json.dumps(told).encode())
    os.close(out)


async def forks(stage: Stage, *, line: str) -> None:
    """Forks children in mid-run, by hand and by multiprocessing; each ends. Reports `forked` for each.

    `line` is the prologue of a lifeline; a background task holds on to it all the while.
    """
    async with LocalExecutor(kill_grace_ms=GRACE_MS) as executor:
        task = executor.start(executor.resolve(BashExecRequest(command=line + "n sleep 20; :")))
        running = asyncio.create_task(outcome(executor, command="sleep 0.3; echo parent"))
        await asyncio.sleep(0.1)
        for how in ("fork", "multiprocessing"):
            reading, writing = os.pipe()
            if how == "fork":
                pid = os.fork()
                if pid == 0:
                    os.close(reading)
                    try:
                        in_child(executor, writing)
                    finally:
                        os._exit(0)
                os.close(writing)
                said = read_all(reading)
                os.waitpid(pid, 0)  # noqa: ASYNC222 - it has ended
            else:
                process = multiprocessing.get_context("fork").Process(
                    target=in_child, args=(executor, writing)
                )
                process.start()
                os.close(writing)
                said = read_all(reading)
                process.join()
                process.close()
            told = json.loads(said)
            then = await outcome(executor, command="echo then")
            await stage.ask("forked", child=told, then=then, task=str(task.status))
        await stage.ask("over", **await running)


def read_all(descriptor: int) -> bytes:
    """Blocks; the writers are few and quick."""
    with os.fdopen(descriptor, "rb") as file:
        return file.read()


async def daemon(stage: Stage, *, line: str, closed: bool) -> None:
    """A host, with its standard descriptors closed or not, of which a forked child lives on and on.

    The fork goes around Python, so the child keeps all descriptors, and the stream open. Reports `running`.
    """
    if closed:
        for descriptor in (0, 1, 2):
            os.close(descriptor)
    async with LocalExecutor(kill_grace_ms=GRACE_MS) as executor:
        executor.start(executor.resolve(BashExecRequest(command=line + "n setsid sleep 20 & n sleep 20; :")))
        await outcome(executor, command="true")
        libc = ctypes.CDLL(None)
        if libc.fork() == 0:
            libc.sleep(8)
            os._exit(0)
        await stage.ask("running")
