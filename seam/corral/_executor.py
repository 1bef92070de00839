"""The executor: what every backend does, and the parts of it that are the same for all."""

from __future__ import annotations

import asyncio
import inspect
import os
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Generator, Iterator, Sequence
from pathlib import PurePath
from types import TracebackType
from typing import Self, final
from weakref import WeakSet

from ._abort import Disposer
from ._errors import ExecutorDisposedError
from ._isolation import call_each, logger
from ._task import BashTask, BashTaskListener
from ._vocabulary import (
    BashExecRequest,
    BashExecSpec,
    BashRunResult,
    BashTaskId,
    BashTaskRead,
    OwnerToken,
    TaskStatus,
)


class BashExecutor(ABC):
    """Runs bash commands in one place, and keeps background tasks there.

    ::

        async with LocalExecutor() as executor:
            result = await executor.run(executor.resolve(BashExecRequest(command="make")))

    An executor belongs to the first event loop that uses it, and to the process that made it. Use from
    another loop, without a running loop, or in a forked child is a `RuntimeError`. Only `run`, `dispose` and
    the iteration over `fetch` wait; everything else returns at once. The place is made ready by the first
    command, not by the constructor. Dispose of it, best by `async with`: that is what ends its tasks.

    **Writing one.** Subclass it, call `super().__init__()`, implement the abstract methods; `resolve_request`
    and `require_spec` are the checks, `TaskRecord` makes the tasks. Begin `run` and `start` with
    `_check_open`, and the other methods with `_check_usable`. Call `notify_task_done` once a background
    task's status is final and all of its output can be read. Put into `_dispose` whatever must be ended. If a
    loop that the executor does not know calls back, go through that loop's `call_soon_threadsafe`: nothing
    here is thread-safe but what says so.
    """

    def __init__(self) -> None:
        self.__pid = os.getpid()
        self.__loop: asyncio.AbstractEventLoop | None = None
        self.__listeners: dict[object, BashTaskListener] = {}
        self.__notified: WeakSet[BashTask] = WeakSet()
        self.__disposed = False
        self.__disposal: asyncio.Task[None] | None = None

    # --- what a backend implements

    @abstractmethod
    def resolve(self, request: BashExecRequest) -> BashExecSpec:
        """Check a request and fill in what it leaves out from this executor's configuration.

        Does no I/O, changes nothing, needs no event loop; equal requests give equal specs. Errors as in
        `resolve_request`: `TypeError` and `ValueError`, naming the field.
        """

    @abstractmethod
    async def run(self, spec: BashExecSpec) -> BashRunResult:
        """Run a command in the foreground, until its bash has exited or was ended by timeout or abort.

        Returns for every end of the command, whatever its exit status. A timeout or an abort ends it and all
        of its processes by SIGTERM, and by SIGKILL after the grace. What it left in the background when it
        exited by itself lives on until `dispose`. Cancelling the awaiting task kills the command, waits for
        its end within bounds, and raises `CancelledError`.

        Raises `PlaceOpenError`, `UnsupportedPlaceError`, `WorkdirError`, `ShellNotFoundError`, `SpawnError`
        when it could not be started; `PlaceLostError` when the place went away in mid-command;
        `AbortedBeforeStartError`; `ExecutorDisposedError`; `TypeError` for anything that is not a
        `BashExecSpec`.
        """

    @abstractmethod
    def start(self, spec: BashExecSpec) -> BashTask:
        """Start a command in the background and return its task at once, before it runs.

        No timeout applies; the spec's signal, `kill` and `dispose` end it. A start that fails later is told
        by the task: status `FAILED`, `error` set, listeners called. `AbortedBeforeStartError` when the signal
        is already aborted, `ExecutorDisposedError`, and `TypeError` for anything that is not a
        `BashExecSpec`.
        """

    @abstractmethod
    def get(self, task_id: BashTaskId) -> BashTask | None:
        """The task of this id; `None` for one that this executor does not know, or does not know any more."""

    @abstractmethod
    def list(self) -> Sequence[BashTask]:
        """All tasks, running and finished, in the order of their start. A snapshot.

        Of the finished ones only the most recent are kept, a number that is the executor's to configure.
        """

    @abstractmethod
    def owner_of(self, task_id: BashTaskId) -> OwnerToken | None:
        """The owner in the task's spec, verbatim. `None` for a task without one, and for an unknown id.

        The only way to it. What an owner may do is for the consumer to decide.
        """

    @abstractmethod
    def read_output(self, task_id: BashTaskId) -> BashTaskRead:
        """What the task brought since the previous call. No byte is delivered twice, to whomever.

        Memory is bounded: what nobody read in time is dropped from its beginning, `lossy` says so, and
        offsets say what is missing. `UnknownTaskError` for an unknown id.
        """

    @abstractmethod
    def kill(self, task_id: BashTaskId) -> bool:
        """Begin to end a running task and all of its processes, by SIGTERM and after the grace by SIGKILL.

        Returns at once; a listener hears of the end. `True` when this call did it, `False` when the task had
        ended or was already being ended. `UnknownTaskError` for an unknown id.
        """

    @abstractmethod
    def fetch(self, path: str | PurePath, *, start: int = 0) -> AsyncIterator[bytes]:
        """Read a file of the place, such as a `spill_path`, from the byte offset `start` to its end.

        Chunks are of the backend's choosing and never empty. Everything happens during the iteration, also
        the errors: `ValueError` for a path that is not absolute or a negative `start`; what the file refuses
        as the `OSError` that it is in the place; what is wrong with the place as a `PlaceError`.
        """

    @abstractmethod
    async def _dispose(self) -> None:
        """End everything: tasks, foreground runs, leftovers; then the place. Called once, in its own task.

        `disposed` is already true and no listener is called any more. Runs that are being awaited resolve
        with `EndReason.DISPOSED`. Ends in bounded time, with all done that can be done; only then raises
        `PlaceLostError` if the place could not be reached.
        """

    # --- listeners

    def on_task_done(self, listener: BashTaskListener) -> Disposer:
        """Have `listener` called with each background task that ends from now on. Returns what takes it back.

        It is called exactly once for each task, synchronously, in the executor's event loop, when the task's
        status is final and `read_output` gives the rest of its output. From the call of `dispose` on it is
        never called, also not for the tasks that this ends. It may do anything, also raise: that is logged
        (logger `corral`). The same function registered twice is called twice.

        `TypeError` for a coroutine function, which nobody would await. `ExecutorDisposedError` once disposed.
        """
        given: object = listener
        if not callable(given) or inspect.iscoroutinefunction(given):
            msg = f"listener must be a plain function, not {given!r}; it can create a task for what must wait"
            raise TypeError(msg)
        if self.__disposed:
            msg = "on_task_done: this executor has been disposed, and would never call the listener"
            raise ExecutorDisposedError(msg)
        key = object()
        self.__listeners[key] = listener

        def dispose() -> None:
            self.__listeners.pop(key, None)

        return dispose

    def notify_task_done(self, task: BashTask) -> None:
        """Tell the listeners that `task` has ended. For the executor itself; consumers do not call it.

        Listeners that are registered now are called in the order of registration, unless they were taken
        back, or the executor was disposed, before their turn. A second call for the same task does nothing,
        nor does any call once disposed; a call for a task that is still running is logged as the mistake it
        is.

        Never raises, but for a `KeyboardInterrupt` or `SystemExit` of a listener, and only after all were
        called.
        """
        if task in self.__notified:
            return
        if task.status is TaskStatus.RUNNING:
            logger.error("notify_task_done: %r has not ended; no listener was called", task, stack_info=True)
            return
        self.__notified.add(task)
        call_each(self.__calls_for(task), "a task-done listener")

    def __calls_for(self, task: BashTask) -> Iterator[Callable[[], None]]:
        for key in tuple(self.__listeners):
            listener = self.__listeners.get(key)
            if listener is not None:  # taken back meanwhile, or all of them by dispose()

                def call(listener: BashTaskListener = listener) -> None:
                    listener(task)

                yield call

    # --- disposal

    @property
    def disposed(self) -> bool:
        """Whether `dispose` has been called. It may not have completed."""
        return self.__disposed

    @final
    def dispose(self) -> Awaitable[None]:
        """End all tasks, runs and leftovers, give back the place, and never call a listener again.

        The call itself begins it: from its return on no listener is called and nothing can be started, also
        when nobody awaits. All calls share one disposal and its outcome; each returns an awaitable of it,
        which can be awaited any number of times. Cancelling a waiter does not cancel the disposal.

        Ends in bounded time. Raises `PlaceLostError`, after doing all that it can, when the place cannot be
        reached: then there may be processes left in it.
        """
        loop = self.__check("dispose")
        if self.__disposal is None:
            self.__disposed = True
            self.__listeners.clear()
            self.__disposal = loop.create_task(self.__run_disposal(), name="corral-dispose")
        return _Disposal(self.__disposal)

    async def __run_disposal(self) -> None:
        # An eager task factory comes here before `create_task` has returned, and what follows may call
        # `dispose`.
        self.__disposal = asyncio.current_task()
        await self._dispose()

    @final
    async def __aenter__(self) -> Self:
        self._check_open("async with")
        return self

    @final
    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Dispose. Its error is raised, unless the body raised: then it is noted there and logged."""
        try:
            await self.dispose()
        except Exception as error:
            if exc is None:
                raise
            exc.add_note(f"Disposing of the executor failed too: {type(error).__name__}: {error}")
            logger.exception("disposing of an executor failed after an error in its async with block")

    # --- where it may be used

    def _check_usable(self, operation: str) -> None:
        """`RuntimeError` unless this is the executor's process and its event loop is running here.

        For subclasses, at the beginning of each method that touches the executor's state. `operation` is the
        name of the method. The first successful call binds the executor to the running loop.
        """
        self.__check(operation)

    def _check_open(self, operation: str) -> None:
        """`_check_usable`, and `ExecutorDisposedError` once disposed. For what starts something."""
        self.__check(operation)
        if self.__disposed:
            msg = f"{operation}: this executor has been disposed"
            raise ExecutorDisposedError(msg, remedy="Make a new executor.")

    def __check(self, operation: str) -> asyncio.AbstractEventLoop:
        if os.getpid() != self.__pid:
            msg = (
                f"{operation}: this executor belongs to process {self.__pid}, and this is a forked child; "
                "make another executor here"
            )
            raise RuntimeError(msg)
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            msg = f"{operation}: no event loop is running in this thread; call it from a coroutine"
            raise RuntimeError(msg) from None
        if self.__loop is None:
            self.__loop = loop
        elif self.__loop is not loop:
            msg = f"{operation}: this executor belongs to the event loop that used it first, not to this one"
            if self.__loop.is_closed():
                msg += "; that loop is closed, and the executor should have been disposed before"
            raise RuntimeError(msg)
        return loop


class _Disposal:
    """An awaitable of a disposal that any number of waiters share, and none of them cancels.

    Not a future for each call: one that nobody awaits would complain of an error that another was given.
    """

    __slots__ = ("_task",)

    def __init__(self, task: asyncio.Task[None]) -> None:
        self._task = task

    def __await__(self) -> Generator[object, None, None]:
        return self._wait().__await__()

    async def _wait(self) -> None:
        if asyncio.current_task() is self._task:
            msg = "the disposal of an executor waits for itself; _dispose() must not await dispose()"
            raise RuntimeError(msg)
        await asyncio.shield(self._task)
