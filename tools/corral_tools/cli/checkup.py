"""The checks of one backend, made in a process of their own: `corral doctor` starts it and listens.

What is checked may hang, end the interpreter, or print; here it harms nobody. Everything goes through the
public seam. The parent gets one JSON object a line on a socket; that socket's end is the parent's, and ends
the checks too.

    {"begin": STEP}                     what is being done from now on
    {"step": STEP, "outcome": ..., ...} how it ended, as in the report
    {"trouble": str, "remedy": str|null}   the configuration is at fault, nothing was checked
    {"end": true}                       that was all
"""

from __future__ import annotations

import asyncio
import importlib
import json
import os
import signal
import socket
import sys
import time
from typing import TYPE_CHECKING, Final, NamedTuple

from corral import ConfigEntry, ConfigError, CorralError, PlaceError, load_backend, load_config, make_executor
from corral_tools.cli import exits
from corral_tools.cli.probes import PROBES, FailedError, NotCheckedError, Probe

if TYPE_CHECKING:
    from collections.abc import Coroutine

    from corral import BashExecutor
    from corral_tools.cli.machine import Json

STEPS: Final = ("import", "construct", *PROBES, "dispose")

_DISPOSAL: Final = 4.0
_CANCELLATION: Final = 1.0
GRACE: Final = _DISPOSAL + 4 * _CANCELLATION
"""Seconds beyond its limit in which a backend may dispose of what it has."""


class Subject(NamedTuple):
    """What is checked: a backend with its defaults, or the entry of a configuration file."""

    backend: str
    config: str | None = None
    entry: str | None = None


class Channel:
    """Tells the parent, and keeps the time of the step that is under way."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self._begun = time.monotonic()

    def send(self, message: dict[str, Json]) -> None:
        try:
            self.connection.sendall(json.dumps(message).encode() + b"\n")
        except (BrokenPipeError, ConnectionResetError):
            pass  # nobody listens any more; what has been opened is still to be disposed of

    def begin(self, step: str) -> None:
        self._begun = time.monotonic()
        self.send({"begin": step})

    def end(
        self,
        step: str,
        outcome: str,
        evidence: str,
        *,
        remedy: str | None = None,
        stage: str | None = None,
        retryable: bool | None = None,
        timed: bool = True,
    ) -> None:
        spent = round((time.monotonic() - self._begun) * 1000, 1) if timed else None
        self.send(
            {
                "step": step,
                "outcome": outcome,
                "evidence": exits.one_line(evidence),
                "remedy": None if remedy is None else exits.one_line(remedy),
                "stage": stage,
                "retryable": retryable,
                "duration_ms": spent,
            }
        )

    def failed(self, step: str, error: BaseException) -> None:
        if isinstance(error, FailedError):
            self.end(step, "failed", str(error), remedy=error.remedy)
        elif isinstance(error, PlaceError):
            self.end(
                step,
                "failed",
                f"{type(error).__name__}: {error}",
                remedy=error.remedy,
                stage=error.stage,
                retryable=error.retryable,
            )
        else:
            remedy = error.remedy if isinstance(error, CorralError) else None
            self.end(step, "failed", f"{type(error).__name__}: {error}", remedy=remedy)

    def rest_not_checked(self, after: str, reason: str) -> None:
        for step in STEPS[STEPS.index(after) + 1 :]:
            self.end(step, "not checked", reason, timed=False)


def main() -> None:
    """The process: descriptor of the socket, seconds, and the fields of the `Subject` as JSON."""
    descriptor, seconds, fields = sys.argv[1:]
    connection = socket.socket(fileno=int(descriptor))
    connection.set_inheritable(False)
    # Whatever is printed here is no part of the report.
    os.dup2(2, 1)
    # The last resort, should the parent be dead and this process hang.
    signal.setitimer(signal.ITIMER_REAL, float(seconds) + GRACE + 1)
    channel = Channel(connection)
    executor = _prepare(channel, Subject(*json.loads(fields)))
    if executor is None:
        _leave(channel)
    else:
        asyncio.run(_examine(channel, executor, float(seconds)))


def _leave(channel: Channel) -> None:
    """Ends the process at once: a thread or a task that hangs would be waited for on the usual way out."""
    channel.send({"end": True})
    sys.stderr.flush()
    os._exit(0)


def _prepare(channel: Channel, subject: Subject) -> BashExecutor | None:
    """Import and construct. None when that ended the checks, which has been told then."""
    channel.begin("import")
    try:
        if ":" in subject.backend:
            where = subject.backend
            importlib.import_module(where.partition(":")[0])
        else:
            where = str(getattr(load_backend(subject.backend), "__module__", "a function"))
    except (Exception, SystemExit) as error:
        if isinstance(error, ConfigError):  # its message has the cause
            channel.failed("import", FailedError(str(error), remedy=error.remedy))
        else:
            channel.failed("import", error)
        channel.rest_not_checked("import", "it cannot be imported")
        return None
    channel.end("import", "ok", where)
    channel.begin("construct")
    entry = ConfigEntry(id=subject.backend, name=subject.backend)
    if subject.config is not None:
        entry = next(each for each in load_config(subject.config) if each.id == subject.entry)
    try:
        executor = make_executor(entry)
    except ConfigError as error:
        if subject.config is not None:
            channel.send({"trouble": str(error), "remedy": error.remedy})
            return None
        if error.key == "name":
            channel.failed("construct", error)
        else:
            text = f"needs a configuration, use --config: {error}"
            channel.end("construct", "not checked", text, remedy=error.remedy)
        channel.rest_not_checked("construct", "there is no executor")
        return None
    except (Exception, SystemExit) as error:
        channel.failed("construct", error)
        channel.rest_not_checked("construct", "there is no executor")
        return None
    channel.end("construct", "ok", "with its default options" if subject.config is None else "as configured")
    return executor


async def _examine(channel: Channel, executor: BashExecutor, seconds: float) -> None:
    loop = asyncio.get_running_loop()
    deadline = loop.time() + seconds
    work = asyncio.create_task(_probe(channel, executor, deadline))

    def abandoned() -> None:
        loop.remove_reader(channel.connection)
        work.cancel()

    # Nothing is ever sent this way, so it is the end of the parent.
    loop.add_reader(channel.connection, abandoned)
    await asyncio.wait({work})
    loop.remove_reader(channel.connection)
    channel.begin("dispose")
    try:
        await _bounded(_dispose(executor), max(deadline - loop.time(), _DISPOSAL))
    except Exception as error:
        channel.failed("dispose", error)
    else:
        channel.end("dispose", "ok", "everything was given back")
    if not work.cancelled():
        work.result()
    _leave(channel)


async def _dispose(executor: BashExecutor) -> None:
    await executor.dispose()


async def _probe(channel: Channel, executor: BashExecutor, deadline: float) -> None:
    """Everything between construct and dispose. Where no command runs, there is nothing to go on with."""
    loop = asyncio.get_running_loop()
    probe, reason = Probe(executor, deadline), None
    for step, check in PROBES.items():
        if reason is not None:
            channel.end(step, "not checked", reason, timed=False)
            continue
        channel.begin(step)
        try:
            evidence = await _bounded(check(probe), deadline - loop.time())
        except NotCheckedError as error:
            channel.end(step, "not checked", str(error))
        except Exception as error:
            channel.failed(step, error)
            if loop.time() >= deadline:
                reason = "there was no time left"
            elif step in ("open", "run"):
                reason = f"the step {step!r} failed"
        else:
            channel.end(step, "ok", evidence)


async def _bounded(work: Coroutine[object, object, str | None], seconds: float) -> str:
    """The work's result. `FailedError` when it takes longer, even if it does not care for being cancelled."""
    task = asyncio.ensure_future(work)
    try:
        await asyncio.wait({task}, timeout=max(seconds, 0))
        if task.done():
            return task.result() or ""
    finally:
        if not task.done():
            task.cancel()
            await asyncio.wait({task}, timeout=_CANCELLATION)
    msg = f"has not ended after {max(seconds, 0):.1f} s, when the time of this backend was up"
    raise FailedError(msg, remedy="Give it more with --timeout; if it hangs again, report this output.")
