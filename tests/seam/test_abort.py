from __future__ import annotations

import asyncio
import gc
import logging
import signal
import sys
import threading
from functools import partial
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from corral import AbortController, AbortSignal

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType

    from _typeshed import TraceFunction

    from corral import Disposer


def test_a_signal_is_aborted_once_and_keeps_its_first_reason() -> None:
    controller = AbortController()
    abort_signal = controller.signal
    assert controller.signal is abort_signal
    assert (abort_signal.aborted, abort_signal.reason) == (False, None)
    controller.abort("first")
    controller.abort("second")
    assert (abort_signal.aborted, abort_signal.reason) == (True, "first")


@pytest.mark.parametrize("reason", [None, "", "why", ValueError("x"), KeyboardInterrupt()])
def test_the_reason_is_carried_as_it_is(reason: BaseException | str | None) -> None:
    controller = AbortController()
    controller.abort(reason)
    controller.abort("later")
    assert controller.signal.aborted
    assert controller.signal.reason is reason


def test_callbacks_are_called_once_in_order_before_abort_returns() -> None:
    controller = AbortController()
    called: list[object] = []
    controller.signal.on_abort(lambda: called.append(1))
    controller.signal.on_abort(lambda: called.append(2))
    controller.signal.on_abort(lambda: called.append((controller.signal.aborted, controller.signal.reason)))
    assert called == []
    controller.abort("why")
    controller.abort()
    assert called == [1, 2, (True, "why")]


def test_a_callback_registered_after_the_abort_is_called_at_once_and_once() -> None:
    controller = AbortController()
    controller.abort()
    called: list[int] = []
    undo = controller.signal.on_abort(lambda: called.append(1))
    assert called == [1]
    undo()
    controller.abort()
    assert called == [1]


def test_a_callback_taken_back_is_not_called() -> None:
    controller = AbortController()
    called: list[int] = []
    undo = controller.signal.on_abort(lambda: called.append(1))
    controller.signal.on_abort(lambda: called.append(2))
    undo()
    undo()
    controller.abort()
    assert called == [2]


def test_a_callback_taken_back_by_an_earlier_one_is_not_called() -> None:
    controller = AbortController()
    called: list[int] = []
    controller.signal.on_abort(lambda: undo())
    undo = controller.signal.on_abort(lambda: called.append(1))
    controller.abort()
    assert called == []


def test_a_callback_may_register_another_and_abort_again() -> None:
    controller = AbortController()
    called: list[int] = []

    def callback() -> None:
        controller.abort("again")
        controller.signal.on_abort(lambda: called.append(1))
        called.append(2)

    controller.signal.on_abort(callback)
    controller.abort("first")
    assert called == [1, 2]
    assert controller.signal.reason == "first"


@pytest.mark.parametrize("late", [False, True])
def test_a_raising_callback_is_logged_and_stops_nobody(late: bool, caplog: pytest.LogCaptureFixture) -> None:
    controller = AbortController()
    called: list[int] = []
    if late:
        controller.abort()
    controller.signal.on_abort(lambda: called.append(1 // 0))
    controller.signal.on_abort(lambda: called.append(1))
    controller.abort()
    assert called == [1]
    (record,) = caplog.records
    assert (record.name, record.levelno) == ("corral", logging.ERROR)


def test_an_interruption_of_a_callback_is_raised_after_all_were_called() -> None:
    controller = AbortController()
    called: list[int] = []

    def interrupting() -> None:
        raise KeyboardInterrupt

    controller.signal.on_abort(interrupting)
    controller.signal.on_abort(lambda: called.append(1))
    with pytest.raises(KeyboardInterrupt):
        controller.abort()
    assert called == [1]


def test_callbacks_run_in_the_thread_that_aborts() -> None:
    controller = AbortController()
    threads: list[threading.Thread] = []
    controller.signal.on_abort(lambda: threads.append(threading.current_thread()))
    thread = threading.Thread(target=controller.abort)
    thread.start()
    thread.join(5)
    assert threads == [thread]


def test_a_signal_is_not_made_directly() -> None:
    with pytest.raises(TypeError):
        AbortSignal()  # type: ignore[call-arg]


def test_reprs_tell_the_state() -> None:
    controller = AbortController()
    assert repr(controller.signal) == "<AbortSignal not aborted>"
    controller.abort("why")
    assert repr(controller) == "<AbortController of <AbortSignal aborted, reason='why'>>"


class TestTimeout:
    def test_the_loop_aborts_it_with_a_timeout_error(self) -> None:
        async def main() -> None:
            loop = asyncio.get_running_loop()
            begin = loop.time()
            abort_signal = AbortSignal.timeout(200)
            called = asyncio.Event()
            abort_signal.on_abort(called.set)
            assert not abort_signal.aborted
            await asyncio.wait_for(called.wait(), 5)
            assert loop.time() - begin >= 0.199
            assert isinstance(abort_signal.reason, TimeoutError)
            assert "200 ms" in str(abort_signal.reason)

        asyncio.run(main())

    def test_zero_aborts_in_the_next_turn_of_the_loop(self) -> None:
        async def main() -> None:
            abort_signal = AbortSignal.timeout(0)
            assert not abort_signal.aborted
            await asyncio.sleep(0.001)
            assert abort_signal.aborted

        asyncio.run(main())

    def test_it_fires_although_nobody_kept_the_signal(self) -> None:
        async def main() -> None:
            called = asyncio.Event()
            AbortSignal.timeout(1).on_abort(called.set)
            gc.collect()
            await asyncio.wait_for(called.wait(), 5)

        asyncio.run(main())

    def test_it_needs_a_running_loop(self) -> None:
        with pytest.raises(RuntimeError, match="running event loop"):
            AbortSignal.timeout(10)

    @pytest.mark.parametrize("ms", [-1, 1.0, float("nan"), True, "5", None])
    def test_it_takes_whole_milliseconds(self, ms: object) -> None:
        async def main() -> None:
            with pytest.raises(ValueError, match="ms must be"):
                AbortSignal.timeout(ms)  # type: ignore[arg-type]

        asyncio.run(main())


def live_objects() -> int:
    """How many objects of the module under test are alive, whatever they are."""
    gc.collect()
    return sum(type(thing).__module__ == AbortSignal.__module__ for thing in gc.get_objects())


class TestAny:
    def test_the_first_wins(self) -> None:
        a, b = AbortController(), AbortController()
        either = AbortSignal.any(a.signal, b.signal)
        called: list[int] = []
        either.on_abort(lambda: called.append(1))
        b.abort("b")
        a.abort("a")
        assert (either.aborted, either.reason) == (True, "b")
        assert called == [1]

    def test_the_first_wins_also_when_nobody_looked_in_between(self) -> None:
        a, b = AbortController(), AbortController()
        either = AbortSignal.any(a.signal, b.signal)
        b.abort("b")
        a.abort("a")
        assert either.reason == "b"
        assert AbortSignal.any(a.signal, b.signal).reason == "b"

    def test_of_none_is_never_aborted(self) -> None:
        nothing = AbortSignal.any()
        a = AbortController()
        both = AbortSignal.any(nothing, a.signal)
        assert not nothing.aborted
        a.abort("a")
        assert not nothing.aborted
        assert both.reason == "a"

    @pytest.mark.parametrize("bad", [None, "x", AbortController()])
    def test_it_takes_signals(self, bad: object) -> None:
        with pytest.raises(TypeError, match=type(bad).__name__):
            AbortSignal.any(AbortController().signal, bad)  # type: ignore[arg-type]

    def test_a_long_lived_signal_does_not_collect_those_made_from_it(self) -> None:
        session = AbortController()
        before = live_objects()
        for _ in range(10):
            either = AbortSignal.any(session.signal, AbortController().signal)
            either.on_abort(lambda: None)()
            assert not either.aborted
        del either
        assert live_objects() == before
        assert not session.signal.aborted

    def test_when_it_has_fired_the_others_forget_it(self) -> None:
        a, b = AbortController(), AbortController()
        before = live_objects()
        called: list[int] = []
        AbortSignal.any(a.signal, b.signal).on_abort(partial(called.append, 1))
        assert live_objects() > before, "somebody who only registered a callback must still be told"
        a.abort()
        assert called == [1]
        assert live_objects() == before + 1, "what was kept is more than how a was aborted"

    def test_a_signal_can_be_extended_without_end(self) -> None:
        stop, other = AbortController(), AbortController()
        extended = stop.signal
        for _ in range(5_000):
            extended = AbortSignal.any(extended, other.signal)
        called: list[int] = []
        extended.on_abort(partial(called.append, 1))
        assert not extended.aborted
        stop.abort("why")
        assert called == [1]
        assert extended.reason == "why"

    def test_a_timeout_in_it(self) -> None:
        async def main() -> None:
            stop = AbortController()
            either = AbortSignal.any(stop.signal, AbortSignal.timeout(1))
            called = asyncio.Event()
            either.on_abort(called.set)
            await asyncio.wait_for(called.wait(), 5)
            assert isinstance(either.reason, TimeoutError)
            assert not stop.signal.aborted

        asyncio.run(main())

    @given(st.data())
    def test_it_behaves_as_the_first_of_its_signals_in_whatever_order_things_happen(
        self, data: st.DataObject
    ) -> None:
        controllers = [AbortController() for _ in range(data.draw(st.integers(1, 4)))]
        # For each signal: what it is, and the controllers that it depends on.
        signals: list[tuple[AbortSignal, frozenset[int]]] = [
            (controller.signal, frozenset({index})) for index, controller in enumerate(controllers)
        ]
        aborted: list[int] = []
        # For each callback: its signal, what takes it back, how often it must have been called, and was.
        callbacks: list[tuple[int, Disposer, list[int], list[int]]] = []
        taken_back: set[int] = set()

        def first_cause(index: int) -> int | None:
            return next((cause for cause in aborted if cause in signals[index][1]), None)

        for action in data.draw(st.lists(st.sampled_from(["any", "register", "take back", "abort"]))):
            if action == "any":
                chosen = data.draw(st.lists(st.integers(0, len(signals) - 1), max_size=3))
                causes = frozenset[int]().union(*(signals[index][1] for index in chosen))
                signals.append((AbortSignal.any(*(signals[index][0] for index in chosen)), causes))
            elif action == "register":
                index = data.draw(st.integers(0, len(signals) - 1))
                expected = [1 if first_cause(index) is not None else 0]
                calls = [0]

                def count(calls: list[int] = calls) -> None:
                    calls[0] += 1

                callbacks.append((index, signals[index][0].on_abort(count), expected, calls))
            elif action == "take back" and callbacks:
                number = data.draw(st.integers(0, len(callbacks) - 1))
                callbacks[number][1]()
                taken_back.add(number)
            elif action == "abort":
                cause = data.draw(st.integers(0, len(controllers) - 1))
                controllers[cause].abort(str(cause))
                if cause not in aborted:
                    aborted.append(cause)
                for number, (index, _, expected, _) in enumerate(callbacks):
                    if number not in taken_back and first_cause(index) is not None:
                        expected[0] = 1
            for number, (_, _, expected, calls) in enumerate(callbacks):
                assert calls == expected, f"callback {number} after {action}"
            for index in data.draw(st.sets(st.integers(0, len(signals) - 1))):
                cause_seen = first_cause(index)
                assert signals[index][0].aborted == (cause_seen is not None)
                assert signals[index][0].reason == (None if cause_seen is None else str(cause_seen))


def at_each_line(operation: Callable[[], None], interrupt: Callable[[], None], number: int) -> bool:
    """Do `operation`, with `interrupt` called before its line `number` in the module, as by a signal handler.

    Returns whether there was such a line.
    """
    seen = 0

    def tracer(frame: FrameType, event: str, argument: object) -> TraceFunction | None:
        nonlocal seen
        if not frame.f_code.co_filename.endswith("_abort.py"):
            return None
        if event == "line":
            seen += 1
            if seen == number + 1:
                sys.settrace(None)
                frame.f_trace = None
                interrupt()
                return None
        return tracer

    before = sys.gettrace()
    sys.settrace(tracer)
    try:
        operation()
    finally:
        sys.settrace(before)
    return seen > number


@pytest.mark.parametrize("derived", [False, True])
class TestSignalHandlers:
    """A Python signal handler runs between any two lines, in the same thread: it must find no lock held."""

    def make(self, derived: bool) -> tuple[AbortController, AbortSignal]:
        controller = AbortController()
        if derived:
            return controller, AbortSignal.any(AbortController().signal, controller.signal)
        return controller, controller.signal

    def test_an_abort_in_the_middle_of_on_abort_loses_no_call(self, derived: bool) -> None:
        number = 0
        more = True
        while more:
            controller, abort_signal = self.make(derived)
            calls: list[int] = []
            abort_signal.on_abort(partial(calls.append, 0))
            undo: list[Disposer] = []

            def register(
                abort_signal: AbortSignal = abort_signal,
                callback: Callable[[], None] = partial(calls.append, 1),  # noqa: B008
                undo: list[Disposer] = undo,
            ) -> None:
                undo.append(abort_signal.on_abort(callback))

            more = at_each_line(register, controller.abort, number)
            controller.abort()
            undo[0]()
            assert sorted(calls) == [0, 1], f"interrupted at line {number}"
            number += 1
        assert number > 10

    def test_an_abort_in_the_middle_of_taking_back_calls_at_most_once(self, derived: bool) -> None:
        number = 0
        more = True
        while more:
            controller, abort_signal = self.make(derived)
            calls: list[int] = []
            other = AbortController()
            AbortSignal.any(other.signal, abort_signal).on_abort(partial(calls.append, 0))
            undo = abort_signal.on_abort(partial(calls.append, 1))
            more = at_each_line(undo, controller.abort, number)
            controller.abort()
            other.abort()
            assert sorted(calls) in ([0], [0, 1]), f"interrupted at line {number}"
            number += 1
        assert number > 3

    def test_an_abort_in_the_middle_of_an_abort_calls_once(self, derived: bool) -> None:
        number = 0
        more = True
        while more:
            controller, abort_signal = self.make(derived)
            calls: list[int] = []
            abort_signal.on_abort(partial(calls.append, 0))
            abort_signal.on_abort(partial(calls.append, 1))
            more = at_each_line(controller.abort, partial(controller.abort, "handler"), number)
            assert sorted(calls) == [0, 1], f"interrupted at line {number}"
            assert abort_signal.reason in (None, "handler")
            number += 1
        assert number > 10

    def test_a_real_handler(self, derived: bool) -> None:
        controller, abort_signal = self.make(derived)
        calls: list[int] = []
        abort_signal.on_abort(lambda: calls.append(1))
        before = signal.signal(signal.SIGUSR1, lambda number, frame: controller.abort(f"signal {number}"))
        try:
            signal.raise_signal(signal.SIGUSR1)
        finally:
            signal.signal(signal.SIGUSR1, before)
        assert calls == [1]
        assert abort_signal.reason == f"signal {int(signal.SIGUSR1)}"


def test_registering_races_with_aborting_in_another_thread_and_no_call_is_lost() -> None:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for _ in range(300):
            one, other = AbortController(), AbortController()
            either = AbortSignal.any(one.signal, other.signal)
            calls: list[int] = []
            ready = threading.Barrier(3)

            def abort(controller: AbortController, ready: threading.Barrier = ready) -> None:
                ready.wait(5)
                controller.abort()

            threads = [threading.Thread(target=abort, args=(c,)) for c in (one, other)]
            for thread in threads:
                thread.start()
            either.on_abort(partial(calls.append, -1))
            ready.wait(5)
            for number in range(20):
                either.on_abort(partial(calls.append, number))
            for thread in threads:
                thread.join(5)
                assert not thread.is_alive(), "deadlock"
            assert sorted(calls) == list(range(-1, 20))
    finally:
        sys.setswitchinterval(before)
