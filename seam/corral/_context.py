"""A context: one executor, and whatever was registered with it, undone in the right order."""

# Imports are made at run time, for `typing.get_type_hints`.

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable
from types import TracebackType
from typing import Self, TypeAlias, cast, final

from ._abort import Disposer
from ._errors import CorralError, DuplicateServiceError
from ._executor import BashExecutor
from ._isolation import logger
from ._task import BashTaskListener

Undo: TypeAlias = Callable[[], object]
"""Takes back an effect. What it returns is awaited if it can be, so it may be a coroutine function."""


class Scope:
    """Effects that belong together, and end together: last in, first out.

    A consumer that can be reloaded opens a scope, registers its listeners through it, and closes it before it
    goes. The executor, its tasks and their owners are not the scope's: they stay. Everything happens in the
    executor's event loop."""

    def __init__(self, context: Context, name: str) -> None:
        self.context = context
        self.name = name
        self._effects: dict[object, Undo] = {}
        self._closer: asyncio.Task[object] | None = None
        self._closing: asyncio.Event | None = None  # set when it is over

    @property
    def closed(self) -> bool:
        """Whether `close` has been called. It may not have completed."""
        return self._closing is not None

    def effect(self, undo: Undo) -> Disposer:
        """Have `undo` called when the scope closes. Returns what forgets it, without calling it.

        `RuntimeError` from the call of `close` on.
        """
        self._check_open()
        return self._remember(undo)

    def _remember(self, undo: Undo) -> Disposer:
        key = object()
        self._effects[key] = undo

        def forget() -> None:
            self._effects.pop(key, None)

        return forget

    def on_task_done(self, listener: BashTaskListener) -> Disposer:
        """As `BashExecutor.on_task_done` of the context's executor; the listener goes with the scope.

        While the scope closes it is still called, until what was registered after it has been undone.
        """
        self._check_open()  # before the executor has the listener, which nothing would take back
        unregister = self.context.bash.on_task_done(listener)
        forget = self._remember(unregister)

        def dispose() -> None:
            forget()
            unregister()

        return dispose

    def scope(self, name: str) -> Scope:
        """A scope inside this one: it closes with it, if it was not closed before."""
        self._check_open()
        inner = Scope(self.context, name)
        inner._when_closed = self._remember(inner.close)  # of the same class
        return inner

    _when_closed: Disposer | None = None

    def _check_open(self) -> None:
        if self.closed:
            msg = f"scope {self.name!r} is closed; nothing can be registered with it any more"
            raise RuntimeError(msg)

    async def close(self) -> None:
        """Undo every effect, the last one first. All are undone, whatever single ones raise.

        What was raised is raised here at the end, as an `ExceptionGroup`. Calling it again waits for the
        first call and raises nothing; in an undo, which the first call waits for, it does nothing.

        Cancelling it cancels the undo that is waited for, and nothing else: the others are still undone, then
        `CancelledError` is raised. So a limit of time around it ends an undo that hangs.
        """
        task = asyncio.current_task()
        if self._closing is not None:
            if task is not self._closer:
                await self._closing.wait()
            return
        self._closer, self._closing = task, asyncio.Event()
        errors: list[Exception] = []
        interruption: BaseException | None = None
        try:
            while self._effects:
                _, undo = self._effects.popitem()
                try:
                    waiting = undo()
                    if inspect.isawaitable(waiting):
                        await waiting
                except asyncio.CancelledError as error:
                    # Unless it is meant for us, the undo has cancelled something and waited for it.
                    if task is not None and task.cancelling():
                        interruption = interruption or error
                except Exception as error:
                    errors.append(error)
                except BaseException as error:  # addressed to the whole program
                    interruption = interruption or error
        finally:
            # Only now: until here, whoever closes the scope around this one has to wait for it.
            if self._when_closed is not None:
                self._when_closed()
            self._closer = None
            self._closing.set()
        self._report(errors, interruption)

    def _report(self, errors: list[Exception], interruption: BaseException | None) -> None:
        msg = f"closing scope {self.name!r}"
        if interruption is not None:
            for error in errors:
                interruption.add_note(f"{msg} failed too: {error!r}")
                logger.error("%s failed", msg, exc_info=error)
            raise interruption
        if errors:
            raise ExceptionGroup(msg, errors)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Close. Its errors are raised, unless the body raised: then they are noted there and logged."""
        try:
            await self.close()
        except ExceptionGroup as group:
            if exc is None:
                raise
            exc.add_note(f"{group.message} failed too: {'; '.join(map(repr, group.exceptions))}")
            logger.exception("%s failed after an error in its async with block", group.message)


@final
class Context(Scope):
    """The root scope of a program: it provides the one executor, and closing it disposes of that, last of
    all."""

    def __init__(self, name: str = "context") -> None:
        super().__init__(self, name)
        self._bash: BashExecutor | None = None

    @property
    def bash(self) -> BashExecutor:
        """The executor. `CorralError` while none has been provided."""
        if self._bash is None:
            msg = f"{self.name!r} has no executor"
            raise CorralError(msg, remedy="Give it one by provide(), or by an entry of the configuration.")
        return self._bash

    def provide(self, executor: BashExecutor) -> None:
        """Make `executor` the one of this context, which from now on disposes of it.

        `DuplicateServiceError` when there is one already, `RuntimeError` when the context is closed, and
        `TypeError` for anything else than an executor; it then stays the caller's.
        """
        given = cast("object", executor)
        if not isinstance(given, BashExecutor):
            msg = f"executor must be a BashExecutor, not {given!r}"
            raise TypeError(msg)
        if self._bash is not None:
            msg = (
                f"{self.name!r} already has an executor ({type(self._bash).__name__}), one is all it can have"
            )
            remedy = "Dispose of the other one, or make a context of its own for it."
            raise DuplicateServiceError(msg, remedy=remedy)
        self._check_open()
        # First in, so that it goes last: what others registered may need it while they are undone.
        self._effects = {object(): executor.dispose, **self._effects}
        self._bash = executor
