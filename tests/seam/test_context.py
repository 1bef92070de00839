"""Contexts and scopes: one executor, and everything registered with it undone in order."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

import pytest

from corral import (
    BashExecRequest,
    BashTask,
    Context,
    CorralError,
    DuplicateServiceError,
)
from tests.seam.memory import MemoryExecutor
from tests.support.aio import run

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable


class Log(list[str]):
    """What was undone, in order."""

    def undo(self, name: str) -> Callable[[], None]:
        return lambda: self.append(name)

    def undo_later(self, name: str) -> Callable[[], Awaitable[None]]:
        async def undo() -> None:
            await asyncio.sleep(0)
            self.append(name)

        return undo


# --- the executor of a context


def test_there_is_one_executor() -> None:
    async def scenario() -> None:
        async with Context("mine") as context:
            first, second = MemoryExecutor(), MemoryExecutor()
            context.provide(first)
            with pytest.raises(
                DuplicateServiceError, match=r"'mine' already has an executor \(Memory"
            ) as caught:
                context.provide(second)
            assert caught.value.remedy is not None
            assert context.bash is first
        assert (first.disposals, second.disposals) == (1, 0)
        await second.dispose()

    run(scenario())


def test_without_an_executor() -> None:
    async def scenario() -> None:
        async with Context("empty") as context:
            with pytest.raises(CorralError, match="'empty' has no executor"):
                context.bash  # noqa: B018
            with pytest.raises(CorralError, match="has no executor"):
                context.on_task_done(print)

    run(scenario())


def test_what_is_no_executor_is_refused() -> None:
    async def scenario() -> None:
        async with Context() as context:
            with pytest.raises(TypeError, match="executor must be a BashExecutor"):
                context.provide("local")  # type: ignore[arg-type]

    run(scenario())


def test_a_closed_context_takes_no_executor() -> None:
    """It would never be disposed of."""

    async def scenario() -> None:
        context = Context()
        await context.close()
        executor = MemoryExecutor()
        with pytest.raises(RuntimeError, match="is closed"):
            context.provide(executor)
        await executor.dispose()

    run(scenario())


def test_the_executor_goes_last_whenever_it_was_provided() -> None:
    async def scenario() -> None:
        log: list[bool] = []
        async with Context() as context:
            executor = MemoryExecutor()
            context.effect(lambda: log.append(executor.disposed))
            context.provide(executor)
            context.effect(lambda: log.append(executor.disposed))
            context.scope("inner").effect(lambda: log.append(executor.disposed))
        assert log == [False, False, False]
        assert executor.disposals == 1

    run(scenario())


def test_an_error_of_the_disposal_is_told() -> None:
    async def scenario() -> None:
        failure = CorralError("unreachable")
        with pytest.raises(ExceptionGroup) as caught:
            async with Context() as context:
                context.provide(MemoryExecutor(disposal_error=failure))
        assert caught.value.exceptions == (failure,)

    run(scenario())


# --- order and errors


def test_last_in_first_out_sync_and_async() -> None:
    async def scenario() -> None:
        log = Log()
        async with Context() as context:
            context.effect(log.undo("1"))
            context.effect(log.undo_later("2"))
            inner = context.scope("inner")
            inner.effect(log.undo_later("inner 1"))
            inner.scope("innermost").effect(log.undo("innermost"))
            inner.effect(log.undo("inner 2"))
            context.effect(log.undo("3"))
            context.effect(log.undo("forgotten"))()
        assert log == ["3", "inner 2", "innermost", "inner 1", "2", "1"]
        assert inner.closed

    run(scenario())


def test_an_inner_scope_that_was_closed_before_is_forgotten() -> None:
    async def scenario() -> None:
        log = Log()
        async with Context() as context:
            async with context.scope("inner") as inner:
                inner.effect(log.undo("inner"))
            assert log == ["inner"]
            assert not context.closed
            # Nothing of it is kept by the scope around it: a consumer may be reloaded for ever.
            assert context._effects == {}
        assert log == ["inner"]

    run(scenario())


def test_all_are_undone_whatever_single_ones_raise() -> None:
    async def scenario() -> None:
        log = Log()
        context = Context("mine")

        async def late() -> None:
            await asyncio.sleep(0)
            msg = "late"
            raise OSError(msg)

        context.effect(log.undo("first"))
        context.effect(late)
        inner = context.scope("inner")
        inner.effect(lambda: 1 // 0)
        context.effect(log.undo("last"))
        with pytest.raises(ExceptionGroup, match="closing scope 'mine'") as caught:
            await context.close()
        assert log == ["last", "first"]
        group, error = caught.value.exceptions
        assert isinstance(group, ExceptionGroup)
        assert isinstance(group.exceptions[0], ZeroDivisionError)
        assert isinstance(error, OSError)
        await context.close()  # told once

    run(scenario())


def test_an_error_of_the_body_is_never_masked(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        async def program() -> None:
            async with Context("mine") as context:
                context.effect(lambda: 1 // 0)
                msg = "body"
                raise LookupError(msg)

        with pytest.raises(LookupError, match="body") as caught:
            await program()
        assert any("ZeroDivisionError" in note for note in caught.value.__notes__)

    with caplog.at_level(logging.ERROR, "corral"):
        run(scenario())
    assert "closing scope 'mine' failed after an error" in caplog.text


def test_a_keyboard_interrupt_waits_for_the_rest() -> None:
    log = Log()

    async def scenario() -> None:
        def interrupt() -> None:
            raise KeyboardInterrupt

        async with Context() as context:
            context.effect(log.undo_later("first"))
            context.effect(interrupt)
            context.effect(log.undo("last"))

    with pytest.raises(KeyboardInterrupt):
        run(scenario())
    assert log == ["last", "first"]


# --- closing


def test_closing_twice_undoes_once() -> None:
    async def scenario() -> None:
        log = Log()
        context = Context()
        context.effect(log.undo("once"))
        await context.close()
        await context.close()
        assert log == ["once"]

    run(scenario())


def test_a_second_close_waits_for_the_first() -> None:
    async def scenario() -> None:
        gate, log = asyncio.Event(), Log()
        context = Context()
        context.effect(log.undo("first"))
        context.effect(gate.wait)
        closing = [asyncio.create_task(context.close()) for _ in range(3)]
        await asyncio.sleep(0.01)
        assert [task.done() for task in closing] == [False] * 3
        gate.set()
        await asyncio.gather(*closing)
        assert log == ["first"]

    run(scenario())


def test_the_context_waits_for_a_scope_that_is_being_closed() -> None:
    """What is undone there may need the executor."""

    async def scenario() -> None:
        gate = asyncio.Event()
        executor, seen = MemoryExecutor(), list[bool]()
        context = Context()
        context.provide(executor)
        inner = context.scope("inner")

        async def undo() -> None:
            await gate.wait()
            seen.append(executor.disposed)

        inner.effect(undo)
        reload = asyncio.create_task(inner.close())
        await asyncio.sleep(0)
        end = asyncio.create_task(context.close())
        await asyncio.sleep(0.01)
        assert not executor.disposed
        gate.set()
        await asyncio.gather(reload, end)
        assert seen == [False]
        assert executor.disposed

    run(scenario())


def test_an_undo_may_close_its_scope_and_those_around() -> None:
    async def scenario() -> None:
        log = Log()
        context = Context()
        inner = context.scope("inner")
        inner.effect(log.undo("inner"))
        context.effect(log.undo("outer"))

        async def undo() -> None:
            await inner.close()
            await context.close()

        inner.effect(undo)
        await inner.close()
        assert sorted(log) == ["inner", "outer"]
        assert context.closed

    run(scenario(), timeout=5)


def test_nothing_is_registered_while_it_closes() -> None:
    async def scenario() -> None:
        executor, errors, heard = MemoryExecutor(), list[str](), list[BashTask]()
        context = Context("mine")
        context.provide(executor)
        task = executor.start(executor.resolve(BashExecRequest(command="true")))

        def undo() -> None:
            for register in (
                lambda: context.effect(print),
                lambda: context.on_task_done(heard.append),
                lambda: context.scope("late"),
            ):
                with pytest.raises(RuntimeError, match="scope 'mine' is closed") as caught:
                    register()
                errors.append(str(caught.value))
            # Nor is the listener of the call that failed.
            executor.end(task)

        context.effect(undo)
        await context.close()
        assert len(errors) == 3
        assert heard == []

    run(scenario())


def test_cancelling_a_close_ends_the_undo_that_hangs_and_nothing_else() -> None:
    async def scenario() -> None:
        log = Log()
        context = Context()
        executor = MemoryExecutor()
        context.provide(executor)
        context.effect(log.undo_later("first"))

        async def hang() -> None:
            try:
                await asyncio.sleep(600)
            finally:
                log.append("hung")

        context.effect(hang)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.02):
                await context.close()
        assert log == ["hung", "first"]
        assert executor.disposals == 1
        await context.close()

    run(scenario(), timeout=5)


def test_a_cancelled_program_disposes_of_its_executor() -> None:
    async def scenario() -> None:
        executor, log = MemoryExecutor(), Log()

        async def program() -> None:
            async with Context() as context:
                context.provide(executor)
                context.effect(log.undo_later("undone"))
                await asyncio.sleep(600)

        task = asyncio.create_task(program())
        await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert log == ["undone"]
        assert executor.disposals == 1

    run(scenario(), timeout=5)


def test_errors_beside_a_cancellation_are_not_lost(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        context = Context("mine")
        context.effect(lambda: 1 // 0)
        context.effect(asyncio.Event().wait)
        closing = asyncio.create_task(context.close())
        await asyncio.sleep(0.01)
        closing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await closing

    run(scenario(), timeout=5)
    assert "ZeroDivisionError" in caplog.text


def test_an_undo_may_cancel_a_task_and_wait_for_it() -> None:
    """The usual way to stop one ends with CancelledError, which is not meant for whoever closes."""

    async def scenario() -> None:
        log = Log()
        async with Context() as context:
            worker = asyncio.create_task(asyncio.sleep(600))

            async def stop() -> None:
                worker.cancel()
                await worker

            context.effect(log.undo("first"))
            context.effect(stop)
        assert worker.cancelled()
        assert log == ["first"]

    run(scenario(), timeout=5)
