from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import sys
from typing import TYPE_CHECKING

import pytest

from corral import BashExecRequest, ExecutorDisposedError, PlaceLostError
from tests.seam.memory import MemoryExecutor

if TYPE_CHECKING:
    from collections.abc import Coroutine


def lost() -> PlaceLostError:
    return PlaceLostError("the host is unreachable", remedy="look for processes there")


def test_it_is_disposed_from_the_call_on_and_nothing_can_be_started() -> None:
    async def main() -> None:
        executor = MemoryExecutor()
        spec = executor.resolve(BashExecRequest(command="true"))
        states = [executor.disposed]
        disposal = executor.dispose()
        states.append(executor.disposed)
        assert states == [False, True]
        with pytest.raises(ExecutorDisposedError, match="start"):
            executor.start(spec)
        with pytest.raises(ExecutorDisposedError, match="run"):
            await executor.run(spec)
        assert executor.disposals == 0
        await disposal
        assert executor.disposals == 1

    asyncio.run(main())


def test_it_happens_even_when_nobody_awaits_it() -> None:
    async def main() -> None:
        executor = MemoryExecutor()
        executor.dispose()
        for _ in range(3):
            await asyncio.sleep(0)
        assert executor.disposals == 1
        assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(main())


def test_all_calls_share_one_disposal() -> None:
    async def main() -> None:
        executor = MemoryExecutor()
        executor.disposal_gate = asyncio.Event()
        awaitables = [executor.dispose() for _ in range(3)]
        waiters = [asyncio.ensure_future(awaitable) for awaitable in awaitables]
        await asyncio.sleep(0)
        assert not any(waiter.done() for waiter in waiters)
        executor.disposal_gate.set()
        await asyncio.gather(*waiters)
        await awaitables[0]
        await executor.dispose()
        assert executor.disposals == 1

    asyncio.run(main())


def test_every_waiter_gets_the_error() -> None:
    async def main() -> None:
        error = lost()
        executor = MemoryExecutor(disposal_error=error)
        first = executor.dispose()
        for awaitable in (first, first, executor.dispose()):
            with pytest.raises(PlaceLostError) as caught:
                await awaitable
            assert caught.value is error

    asyncio.run(main())


def test_cancelling_one_waiter_cancels_neither_the_disposal_nor_another_waiter() -> None:
    async def main() -> None:
        executor = MemoryExecutor()
        executor.disposal_gate = asyncio.Event()
        cancelled = asyncio.ensure_future(executor.dispose())
        other = asyncio.ensure_future(executor.dispose())
        await asyncio.sleep(0)
        cancelled.cancel()
        with pytest.raises(asyncio.CancelledError):
            await cancelled
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(executor.dispose(), 0.01)
        executor.disposal_gate.set()
        await other
        assert executor.disposals == 1

    asyncio.run(main())


def reports_of(main: Coroutine[object, object, None]) -> list[str]:
    """Run `main` and return what asyncio had to complain of, until everything was collected."""
    reports: list[str] = []

    async def watched() -> None:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda loop, context: reports.append(str(context["message"])))
        await main
        gc.collect()

    asyncio.run(watched())
    return reports


def test_an_error_that_nobody_was_given_is_reported_by_asyncio() -> None:
    async def main() -> None:
        executor = MemoryExecutor(disposal_error=lost())
        executor.disposal_gate = asyncio.Event()
        waiter = asyncio.ensure_future(executor.dispose())
        await asyncio.sleep(0)
        waiter.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await waiter
        executor.disposal_gate.set()
        for _ in range(5):
            await asyncio.sleep(0)
        assert len(asyncio.all_tasks()) == 1

    assert reports_of(main()) == ["Task exception was never retrieved"]


def test_an_error_that_one_waiter_was_given_is_not_reported_for_those_who_did_not_wait() -> None:
    async def main() -> None:
        executor = MemoryExecutor(disposal_error=lost())
        executor.dispose()
        with pytest.raises(PlaceLostError):
            await executor.dispose()
        executor.dispose()

    assert reports_of(main()) == []


def test_a_disposal_that_waits_for_itself_is_an_error_and_no_deadlock() -> None:
    class Confused(MemoryExecutor):
        async def _dispose(self) -> None:
            await self.dispose()

    async def main() -> None:
        with pytest.raises(RuntimeError, match="waits for itself"):
            await asyncio.wait_for(Confused().dispose(), 5)

    asyncio.run(main())


@pytest.mark.skipif(sys.version_info < (3, 12), reason="eager task factories came with Python 3.12")
def test_an_eager_task_factory_makes_no_second_disposal() -> None:
    class Reentrant(MemoryExecutor):
        async def _dispose(self) -> None:
            self.dispose()
            await super()._dispose()

    async def main() -> None:
        asyncio.get_running_loop().set_task_factory(asyncio.eager_task_factory)  # type: ignore[attr-defined]
        executor = Reentrant()
        executor.disposal_gate = asyncio.Event()
        disposal = executor.dispose()
        executor.disposal_gate.set()
        await disposal
        assert executor.disposals == 1

    asyncio.run(main())


def test_async_with_gives_the_executor_and_disposes_of_it() -> None:
    async def main() -> None:
        executor = MemoryExecutor()
        async with executor as same:
            assert same is executor
            assert not executor.disposed
        assert executor.disposals == 1
        with pytest.raises(ExecutorDisposedError):
            async with executor:
                pytest.fail("entered a disposed executor")

    asyncio.run(main())


def test_an_error_of_the_disposal_leaves_the_async_with_block() -> None:
    async def main() -> None:
        error = lost()
        with pytest.raises(PlaceLostError) as caught:
            async with MemoryExecutor(disposal_error=error):
                pass
        assert caught.value is error

    asyncio.run(main())


@pytest.mark.parametrize("kind", [ValueError, KeyboardInterrupt, asyncio.CancelledError])
def test_an_error_of_the_disposal_masks_none_of_the_body(
    kind: type[BaseException], caplog: pytest.LogCaptureFixture
) -> None:
    body = kind("the body's own")
    caught: list[BaseException] = []

    async def main() -> None:
        try:
            async with MemoryExecutor(disposal_error=lost()):
                raise body
        except BaseException as error:
            caught.append(error)

    asyncio.run(main())
    assert caught == [body]
    assert any("PlaceLostError: the host is unreachable" in note for note in body.__notes__)
    (record,) = caplog.records
    assert (record.name, record.levelno) == ("corral", logging.ERROR)


def test_a_disposed_executor_can_still_be_asked() -> None:
    async def main() -> None:
        async with MemoryExecutor() as executor:
            task = executor.start(executor.resolve(BashExecRequest(command="sleep 9")))
        assert executor.get(task.id) is task
        assert list(executor.list()) == [task]
        assert executor.resolve(BashExecRequest(command="true")).command == "true"
        assert not executor.kill(task.id)

    asyncio.run(main())
