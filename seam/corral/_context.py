"""A context: one executor, and whatever was registered with it, undone in the right order."""

# Imports are made at run time, for `typing.get_type_hints`.

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import Self, TypeAlias, final

from ._abort import Disposer
from ._errors import CorralError, DuplicateServiceError
from ._executor import BashExecutor
from ._task import BashTaskListener

Undo: TypeAlias = Callable[[], None] | Callable[[], Awaitable[None]]
"""Takes back an effect. It may be a coroutine function."""


class Scope:
    """Effects that belong together, and end together: last in, first out.

    A consumer that can be reloaded opens a scope, registers its listeners through it, and closes it before it
    goes. The executor, its tasks and their owners are not the scope's: they stay. Everything happens in the
    executor's event loop."""

    def __init__(self, context: Context, name: str) -> None:
        self.context = context
        self.name = name
        self._effects: dict[object, Undo] = {}
        self._closed = False

    @property
    def closed(self) -> bool:
        """Whether `close` has been called. It may not have completed."""
        return self._closed

    def effect(self, undo: Undo) -> Disposer:
        """Have `undo` called when the scope closes. Returns what forgets it, without calling it."""
        if self._closed:
            msg = f"scope {self.name!r} is closed; nothing can be registered with it any more"
            raise RuntimeError(msg)
        key = object()
        self._effects[key] = undo

        def forget() -> None:
            self._effects.pop(key, None)

        return forget

    def on_task_done(self, listener: BashTaskListener) -> Disposer:
        """As `BashExecutor.on_task_done` of the context's executor; the listener goes with the scope."""
        unregister = self.context.bash.on_task_done(listener)
        forget = self.effect(unregister)

        def dispose() -> None:
            forget()
            unregister()

        return dispose

    def scope(self, name: str) -> Scope:
        """A scope inside this one: it closes with it, if it was not closed before."""
        inner = Scope(self.context, name)
        inner._when_closed = self.effect(inner.close)  # of the same class
        return inner

    _when_closed: Disposer | None = None

    async def close(self) -> None:
        """Undo every effect, the last one first. All are undone, whatever single ones raise.

        Calling it again does nothing. What was raised is raised here at the end, as an `ExceptionGroup`.
        """
        if self._closed:
            return
        self._closed = True
        if self._when_closed is not None:
            self._when_closed()
        errors: list[Exception] = []
        while self._effects:
            _, undo = self._effects.popitem()
            try:
                waiting = undo()
                if inspect.isawaitable(waiting):
                    await waiting
            except Exception as error:
                errors.append(error)
        if errors:
            msg = f"closing scope {self.name!r}"
            raise ExceptionGroup(msg, errors)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Close. Its errors are raised, unless the body raised: then they become a note there."""
        try:
            await self.close()
        except ExceptionGroup as group:
            if exc is None:
                raise
            exc.add_note(f"{group.message} failed too: {'; '.join(map(repr, group.exceptions))}")


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

        `DuplicateServiceError` when there is one already; the second one stays the caller's.
        """
        if self._bash is not None:
            msg = (
                f"{self.name!r} already has an executor ({type(self._bash).__name__}), one is all it can have"
            )
            remedy = "Dispose of the other one, or make a context of its own for it."
            raise DuplicateServiceError(msg, remedy=remedy)
        # First in, so that it goes last: what others registered may need it while they are undone.
        self._effects = {object(): executor.dispose, **self._effects}
        self._bash = executor
