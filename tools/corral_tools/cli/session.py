"""One executor for one command: made, used, stopped by signals, disposed."""

# Imports stand where they are needed: the start of `corral run` is what a user waits for.
# ruff: noqa: PLC0415

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import traceback
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from corral import AbortController, AbortedBeforeStartError, BashExecRequest, CorralError
from corral_tools.cli import exits
from corral_tools.cli.exits import CliError
from corral_tools.cli.opening import Opened, from_backend, from_file
from corral_tools.cli.values import LONGEST_MS

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from corral import AbortSignal, BashExecSpec, BashExecutor
    from corral_tools.cli.report import Json
    from corral_tools.cli.run import RunOptions

_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

_HURRY: Final = 0.5
"""Seconds that a dispose still gets after a second signal."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The exit status of a run, and with `--json` what to print."""

    status: int
    document: Mapping[str, Json] | None = None


class Interrupts:
    """The signals that end a run, as events of the running loop. Use as a context manager.

    The first one is told to the listener. A second sets `hurry`. A third ends the process on the spot: what a
    backend runs ends with its host. A signal that was ignored when `corral` was started (by `nohup`, or by a
    shell for a background job) stays ignored.
    """

    def __init__(self) -> None:
        self.first: signal.Signals | None = None
        self.hurry = asyncio.Event()
        self._listener: Callable[[signal.Signals], None] | None = None
        self._loop = asyncio.get_running_loop()
        self._held: list[signal.Signals] = []

    def __enter__(self) -> Interrupts:
        for number in _SIGNALS:
            if signal.getsignal(number) != signal.SIG_IGN:
                self._loop.add_signal_handler(number, self._caught, number)
                self._held.append(number)
        return self

    def __exit__(self, *_: object) -> None:
        for number in self._held:
            self._loop.remove_signal_handler(number)

    def tell(self, listener: Callable[[signal.Signals], None] | None) -> None:
        """Makes `listener` the one that hears of the first signal; also when it came before. None: nobody."""
        self._listener = listener
        if self.first is not None and listener is not None:
            listener(self.first)

    def _caught(self, number: signal.Signals) -> None:
        if self.first is None:
            self.first = number
            if self._listener is not None:
                self._listener(number)
        elif not self.hurry.is_set():
            self.hurry.set()
        else:
            os._exit(128 + self.first)


def run(options: RunOptions) -> int:
    """Runs the command that `options` describe, reports as they ask, and returns the exit status."""
    try:
        stdin = _read_stdin() if options.forward_stdin else None
        with contextlib.redirect_stdout(sys.stderr):  # what a backend prints is not the command's output
            outcome = asyncio.run(_session(options, stdin))
    except (CorralError, CliError) as error:
        outcome = _failure(options, error)
    except Exception as error:
        # A backend may raise anything. The interpreter's own status, 1, would look like the command's.
        traceback.print_exc()
        internal = CliError(f"internal error: {type(error).__name__}: {error}")
        internal.__cause__ = error
        outcome = _failure(options, internal)
    if outcome.document is not None:
        from corral_tools.cli.report import write_document  # json: only here

        write_document(outcome.document)
    return outcome.status


def _failure(options: RunOptions, error: CorralError | CliError, status: int = exits.TROUBLE) -> Outcome:
    if not options.as_json:
        exits.tell(exits.explain(error))
        return Outcome(status=status)
    from corral_tools.cli.report import failure_document  # json: only here

    return Outcome(status=status, document=failure_document(error))


def _read_stdin() -> bytes:
    chunks: list[bytes] = []
    try:
        while chunk := os.read(0, 1 << 16):
            chunks.append(chunk)
    except OSError as error:
        msg = f"cannot read standard input: {error.strerror}"
        raise CliError(msg, remedy="leave --stdin out if there is nothing to read") from error
    return b"".join(chunks)


async def _session(options: RunOptions, stdin: bytes | None) -> Outcome:
    with Interrupts() as interrupts:
        opened = _open(options)
        work = asyncio.create_task(
            (_report if options.as_json else _stream)(opened, options, stdin, interrupts)
        )
        hurry = asyncio.create_task(interrupts.hurry.wait())
        await asyncio.wait({work, hurry}, return_when=asyncio.FIRST_COMPLETED)
        interrupts.tell(None)
        work.cancel()  # does nothing to one that is done
        await _dispose(opened.executor, hurry, interrupts)
        hurry.cancel()
        await asyncio.wait({work, hurry})
        if interrupts.first is None:
            return work.result()
        return _interrupted(work, options, 128 + interrupts.first)


def _interrupted(work: asyncio.Task[Outcome], options: RunOptions, status: int) -> Outcome:
    """How a run ended that a signal has ended: with `status`, and what there is to report."""
    if work.cancelled():  # a second signal: nothing was waited for
        return Outcome(status=status)
    error = work.exception()
    if error is None:
        return Outcome(status=status, document=work.result().document)
    if not isinstance(error, CorralError | CliError):
        raise error
    if isinstance(error, AbortedBeforeStartError) and not options.as_json:
        return Outcome(status=status)  # what was asked for
    return _failure(options, error, status)


def _open(options: RunOptions) -> Opened:
    required = {} if options.max_output is None else {"max_output_bytes": options.max_output}
    # Without a limit of the user or of the configuration there is none.
    preferred = {"timeout_ms": LONGEST_MS, "max_timeout_ms": LONGEST_MS}
    if not options.as_json:
        from corral_tools.cli.streaming import MEMORY  # not for --json

        preferred["max_output_bytes"] = MEMORY
    if options.config is not None:
        return from_file(options.config, preferred=preferred, required=required)
    return from_backend(options.backend, preferred=preferred, required=required)


async def _dispose(executor: BashExecutor, hurry: asyncio.Task[bool], interrupts: Interrupts) -> None:
    """Ends everything that is left. What fails is told, and changes nothing about how the command ended."""

    async def dispose() -> None:
        await executor.dispose()

    disposal = asyncio.create_task(dispose())
    await asyncio.wait({disposal, hurry}, return_when=asyncio.FIRST_COMPLETED)
    if not disposal.done():
        await asyncio.wait({disposal}, timeout=_HURRY)
    if not disposal.done():
        os._exit(128 + (interrupts.first or signal.SIGINT))
    error = disposal.exception()
    if isinstance(error, CorralError):
        exits.tell(exits.explain(error))
    elif error is not None:
        raise error


def _resolve(
    executor: BashExecutor, options: RunOptions, stdin: bytes | None, signal: AbortSignal | None = None
) -> BashExecSpec:
    request = BashExecRequest(
        command=options.script,
        workdir=options.workdir,
        timeout_ms=options.timeout_ms,
        env=options.env,
        stdin=stdin,
        signal=signal,
    )
    try:
        return executor.resolve(request)
    except (TypeError, ValueError) as error:
        raise CliError(str(error)) from error


def _limit(spec: BashExecSpec) -> int | None:
    """The time limit that applies, None for none."""
    return spec.timeout_ms if spec.timeout_ms < LONGEST_MS else None


async def _stream(
    opened: Opened, options: RunOptions, stdin: bytes | None, interrupts: Interrupts
) -> Outcome:
    from corral_tools.cli.streaming import LiveRun  # not for --json

    spec = _resolve(opened.executor, options, stdin)
    live = LiveRun(opened.executor, spec, limit_ms=_limit(spec), wanted_ms=options.timeout_ms)
    interrupts.tell(live.interrupt)
    return Outcome(status=await live.run())


async def _report(
    opened: Opened, options: RunOptions, stdin: bytes | None, interrupts: Interrupts
) -> Outcome:
    from corral_tools.cli.report import result_document  # json: only here

    controller = AbortController()
    spec = _resolve(opened.executor, options, stdin, controller.signal)
    interrupts.tell(lambda number: controller.abort(number.name))
    result = await opened.executor.run(spec)
    status = exits.TIMED_OUT if result.timed_out else exits.status_of(result.exit_code, result.signal)
    document = result_document(result, backend=opened.backend, timeout_ms=_limit(spec))
    return Outcome(status=status, document=document)
