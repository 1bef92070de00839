"""Abort signals: how a caller asks for a command to be stopped.

An `AbortController` is kept by whoever may abort; its `AbortSignal` is handed to whoever must listen.
Everything here may be used from any thread and from a Python signal handler. Callbacks run in the thread that
aborts, at the moment of the abort: one that touches an event loop uses `loop.call_soon_threadsafe`.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Iterator
from threading import RLock
from typing import NamedTuple, TypeAlias

from ._isolation import call_each

AbortReason: TypeAlias = BaseException | str | None
"""Why something was aborted, in the words of whoever aborted. `None` when no reason was given."""

Disposer: TypeAlias = Callable[[], None]
"""Undoes a registration. Calling it again does nothing; it never raises."""

_order = itertools.count()


class _Outcome(NamedTuple):
    order: int
    reason: AbortReason


class _Latch:
    """The state behind a signal. Goes from unset to set once, and then calls what was registered.

    A latch with `sources` is set as soon as one of them is. It registers itself with them only while somebody
    is registered with it, so a long-lived signal does not collect one entry for each `any()` ever made from
    it. Sources never have sources themselves, so a signal can be extended by `any()` without end, and the
    lock of a source is only ever taken inside the lock of a latch that watches it, never the other way round.
    No lock is held while a callback runs.

    The locks are reentrant, and every registration is entered before the state is looked at, because a Python
    signal handler may abort in the middle of any method here, in the same thread.
    """

    __slots__ = ("_callbacks", "_lock", "_outcome", "sources")

    def __init__(self, sources: tuple[_Latch, ...] = ()) -> None:
        self.sources = sources
        self._lock = RLock()
        self._callbacks: dict[object, Callable[[], None]] = {}
        self._outcome: _Outcome | None = None

    def outcome(self) -> _Outcome | None:
        """What the latch was set with, or None. Calls nobody."""
        with self._lock:
            if self._outcome is None and self.sources:
                known = [outcome for source in self.sources if (outcome := source.outcome()) is not None]
                self._outcome = min(known, key=lambda outcome: outcome.order, default=None)
            return self._outcome

    def set(self, reason: AbortReason) -> None:
        with self._lock:
            if self._outcome is not None:
                return
            self._outcome = _Outcome(next(_order), reason)
        self.call_all()

    def add(self, callback: Callable[[], None]) -> Disposer:
        key = object()
        with self._lock:
            self.enter(key, callback)
            for source in self.sources:
                source.enter(self, self.call_all)
        if self.outcome() is not None and (mine := self.remove(key)) is not None:
            call_each([mine], "an abort callback")

        def dispose() -> None:
            self.remove(key)

        return dispose

    def enter(self, key: object, callback: Callable[[], None]) -> None:
        """Register without calling, even when the latch is set."""
        with self._lock:
            self._callbacks[key] = callback

    def remove(self, key: object) -> Callable[[], None] | None:
        with self._lock:
            callback = self._callbacks.pop(key, None)
            if not self._callbacks:
                for source in self.sources:
                    source.remove(self)
            return callback

    def call_all(self) -> None:
        call_each(self._take_all(), "an abort callback")

    def _take_all(self) -> Iterator[Callable[[], None]]:
        while True:
            with self._lock:
                key = next(iter(self._callbacks), None)
                callback = None if key is None else self.remove(key)
            if callback is None:
                return
            yield callback


class AbortSignal:
    """The read side of an abort: tells whether, why, and the moment when.

    Made by an `AbortController`, by `AbortSignal.timeout` or by `AbortSignal.any`, never directly. Once
    aborted, a signal stays aborted. Two signals are equal only when they are the same object.
    """

    __slots__ = ("__weakref__", "_latch")

    def __init__(self, latch: _Latch) -> None:
        self._latch = latch

    @property
    def aborted(self) -> bool:
        return self._latch.outcome() is not None

    @property
    def reason(self) -> BaseException | str | None:
        """What `abort` was given. `None` before the abort, and after one without a reason."""
        outcome = self._latch.outcome()
        return None if outcome is None else outcome.reason

    def on_abort(self, callback: Callable[[], None]) -> Disposer:
        """Have `callback` called when this signal is aborted; at once, before this returns, if it already is.

        It is called at most once, synchronously, in the thread that aborts; callbacks are called in the order
        in which they were registered. One that raises is logged (logger `corral`) and does not stop the
        others. Returns the disposer that takes the callback back: after it has returned, the callback is not
        started any more (one that is running in another thread is not waited for).
        """
        return self._latch.add(callback)

    @classmethod
    def timeout(cls, ms: int) -> AbortSignal:
        """A signal that the running event loop aborts in `ms` milliseconds. Its reason is a `TimeoutError`.

        `ms` is an integer of at least 0, else `ValueError`. Without a running event loop: `RuntimeError`.
        """
        if type(ms) is not int or ms < 0:
            msg = f"ms must be an integer of at least 0 milliseconds, not {ms!r}"
            raise ValueError(msg)
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            msg = "AbortSignal.timeout() needs a running event loop; call it from a coroutine"
            raise RuntimeError(msg) from None
        latch = _Latch()
        loop.call_later(ms / 1000, latch.set, TimeoutError(f"aborted by a timeout of {ms} ms"))
        return cls(latch)

    @classmethod
    def any(cls, *signals: AbortSignal) -> AbortSignal:
        """A signal that is aborted as soon as one of `signals` is, with the reason of the first.

        Of none at all: a signal that is never aborted. The given signals hold no reference to the new one
        unless a callback is registered with it, and none after that callback was called or taken back.
        """
        sources: dict[_Latch, None] = {}
        for signal in signals:
            _require_signal(signal)
            sources.update(dict.fromkeys(signal._latch.sources or (signal._latch,)))
        return cls(_Latch(tuple(sources)))

    def __repr__(self) -> str:
        state = f"aborted, reason={self.reason!r}" if self.aborted else "not aborted"
        return f"<AbortSignal {state}>"


def _require_signal(value: object) -> None:
    if not isinstance(value, AbortSignal):  # most likely None, where there is no signal
        msg = f"AbortSignal.any() takes AbortSignal objects, not {type(value).__name__}"
        raise TypeError(msg)


class AbortController:
    """The write side of an abort. Keep it; hand out its `signal`."""

    __slots__ = ("__weakref__", "_latch", "_signal")

    def __init__(self) -> None:
        self._latch = _Latch()
        self._signal = AbortSignal(self._latch)

    @property
    def signal(self) -> AbortSignal:
        """The one signal of this controller, always the same object."""
        return self._signal

    def abort(self, reason: BaseException | str | None = None) -> None:
        """Abort the signal and call what was registered with it, in this thread, before returning.

        The first abort wins; a later one does nothing and its reason is lost. May be called from any thread
        and from a Python signal handler.
        """
        self._latch.set(reason)

    def __repr__(self) -> str:
        return f"<AbortController of {self._signal!r}>"
