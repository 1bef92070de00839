"""Running coroutines in a test, with an end that holds even when the event loop is blocked."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import threading
import time
from typing import TYPE_CHECKING, Any, TypeVar

from corral import BashExecRequest, TaskStatus
from corral_backends.places.local import LocalExecutor

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping
    from pathlib import PurePath
    from types import FrameType

    from corral import BashExecSpec, BashExecutor, BashRunResult, BashTask

__all__ = ["ended", "executor", "run", "run_command", "spec", "start_command", "until"]

T = TypeVar("T")


def run(coro: Coroutine[Any, Any, T], timeout: float = 20) -> T:
    """`asyncio.run(coro)` that fails the test after `timeout` seconds.

    A loop that still turns is told by cancellation. Two seconds later a signal ends one that does not.
    """

    async def limited() -> T:
        try:
            async with asyncio.timeout(timeout):
                return await coro
        except TimeoutError as error:
            msg = f"the test did not end within {timeout} s"
            raise AssertionError(msg) from error

    with _alarm(timeout + 2):
        return asyncio.run(limited())


@contextlib.contextmanager
def _alarm(seconds: float) -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def fail(_number: int, _frame: FrameType | None) -> None:
        msg = f"the event loop was still blocked after {seconds} s"
        raise AssertionError(msg)

    before = signal.signal(signal.SIGALRM, fail)
    remaining, _ = signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, remaining)  # a limit that a plugin had set goes on
        signal.signal(signal.SIGALRM, before)


@contextlib.asynccontextmanager
async def executor(**config: Any) -> AsyncIterator[LocalExecutor]:
    """A local executor with a short grace, disposed on the way out."""
    async with LocalExecutor(**{"kill_grace_ms": 300, **config}) as made:
        yield made


def spec(
    on: BashExecutor,
    command: str,
    *,
    timeout_ms: int | None = None,
    workdir: str | PurePath | None = None,
    env: Mapping[str, str] | None = None,
    stdin: bytes | None = None,
) -> BashExecSpec:
    """A resolved spec for `command`."""
    return on.resolve(
        BashExecRequest(command=command, timeout_ms=timeout_ms, workdir=workdir, env=env, stdin=stdin)
    )


async def run_command(on: BashExecutor, command: str, *, timeout_ms: int | None = None) -> BashRunResult:
    """Runs `command` to its end."""
    return await on.run(spec(on, command, timeout_ms=timeout_ms))


def start_command(on: BashExecutor, command: str) -> BashTask:
    """Starts `command` in the background."""
    return on.start(spec(on, command))


async def ended(on: BashExecutor, task: BashTask, *, timeout: float = 10) -> None:
    """Waits until the status of `task` is final, as a listener hears of it."""
    done = asyncio.Event()
    withdraw = on.on_task_done(lambda other: done.set() if other is task else None)
    try:
        if task.status is TaskStatus.RUNNING:
            async with asyncio.timeout(timeout):
                await done.wait()
    finally:
        withdraw()


async def until(reached: Callable[[], bool], *, timeout: float = 5) -> None:
    """Polls `reached` until it is true; fails the test after `timeout` seconds."""
    deadline = time.monotonic() + timeout
    while not reached():
        assert time.monotonic() < deadline, f"not reached within {timeout} s"
        await asyncio.sleep(0.005)
