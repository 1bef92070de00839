from __future__ import annotations

import asyncio
import functools
import logging
from typing import TYPE_CHECKING

import pytest

from corral import BashExecRequest, BashTask, BashTaskId, EndReason, ExecutorDisposedError, TaskStatus
from tests.seam.memory import MemoryExecutor

if TYPE_CHECKING:
    from collections.abc import Callable


def start(executor: MemoryExecutor, command: str = "sleep 1") -> BashTask:
    return executor.start(executor.resolve(BashExecRequest(command=command)))


def with_executor(body: Callable[[MemoryExecutor], None]) -> None:
    """Run `body` inside an event loop, with an executor that is disposed of in the end."""

    async def main() -> None:
        async with MemoryExecutor() as executor:
            body(executor)

    asyncio.run(main())


def test_each_listener_hears_of_each_task_once_in_order_of_registration() -> None:
    heard: list[tuple[str, BashTaskId]] = []

    def body(executor: MemoryExecutor) -> None:
        executor.on_task_done(lambda task: heard.append(("a", task.id)))
        executor.on_task_done(lambda task: heard.append(("b", task.id)))
        first, second = start(executor), start(executor)
        executor.end(second)
        executor.end(first)
        assert heard == [("a", second.id), ("b", second.id), ("a", first.id), ("b", first.id)]

    with_executor(body)
    assert len(heard) == 4


def test_a_listener_gets_the_task_object_with_its_final_status() -> None:
    seen: list[tuple[BashTask, TaskStatus]] = []

    def body(executor: MemoryExecutor) -> None:
        executor.on_task_done(lambda task: seen.append((task, task.status)))
        task = start(executor)
        executor.end(task)
        assert seen == [(task, TaskStatus.FINISHED)]
        assert seen[0][0] is task is executor.get(task.id)

    with_executor(body)


def test_a_second_notification_of_a_task_tells_nobody() -> None:
    heard: list[BashTask] = []

    def body(executor: MemoryExecutor) -> None:
        executor.on_task_done(heard.append)
        task = start(executor)
        executor.end(task)
        executor.on_task_done(heard.append)
        executor.notify_task_done(task)
        assert heard == [task]

    with_executor(body)


def test_a_notification_of_a_running_task_tells_nobody_and_is_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    heard: list[BashTask] = []

    def body(executor: MemoryExecutor) -> None:
        executor.on_task_done(heard.append)
        task = start(executor)
        executor.notify_task_done(task)
        assert heard == []
        executor.end(task)
        assert heard == [task]

    with_executor(body)
    (record,) = caplog.records
    assert record.name == "corral"
    assert record.levelno == logging.ERROR


@pytest.mark.parametrize("error", [ValueError("bad"), asyncio.CancelledError(), GeneratorExit()])
def test_a_raising_listener_is_logged_and_stops_nobody(
    error: BaseException, caplog: pytest.LogCaptureFixture
) -> None:
    heard: list[BashTask] = []

    def bad(task: BashTask) -> None:
        raise error

    def body(executor: MemoryExecutor) -> None:
        executor.on_task_done(bad)
        executor.on_task_done(heard.append)
        task = start(executor)
        executor.end(task)
        assert heard == [task]

    with_executor(body)
    (record,) = caplog.records
    assert record.name == "corral"
    assert record.exc_info is not None
    assert record.exc_info[1] is error


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit])
def test_an_interruption_is_raised_after_all_were_told(kind: type[BaseException]) -> None:
    heard: list[BashTask] = []
    first, second = kind("first"), kind("second")

    def interrupting(error: BaseException, task: BashTask) -> None:
        raise error

    def body(executor: MemoryExecutor) -> None:
        executor.on_task_done(functools.partial(interrupting, first))
        executor.on_task_done(heard.append)
        executor.on_task_done(functools.partial(interrupting, second))
        executor.on_task_done(heard.append)
        task = start(executor)
        with pytest.raises(kind) as caught:
            executor.end(task)
        assert caught.value is first
        assert heard == [task, task]

    with_executor(body)


def test_the_disposer_unregisters_and_can_be_called_again() -> None:
    heard: list[BashTask] = []

    def body(executor: MemoryExecutor) -> None:
        undo = executor.on_task_done(heard.append)
        undo()
        undo()
        executor.end(start(executor))
        assert heard == []

    with_executor(body)


def test_the_same_function_registered_twice_is_called_twice_and_unregistered_by_one() -> None:
    heard: list[BashTask] = []

    def body(executor: MemoryExecutor) -> None:
        undo = executor.on_task_done(heard.append)
        executor.on_task_done(heard.append)
        task = start(executor)
        executor.end(task)
        assert heard == [task, task]
        undo()
        heard.clear()
        other = start(executor)
        executor.end(other)
        assert heard == [other]

    with_executor(body)


def test_one_unregistered_by_an_earlier_one_is_not_called() -> None:
    heard: list[str] = []

    def body(executor: MemoryExecutor) -> None:
        executor.on_task_done(lambda task: undo())
        undo = executor.on_task_done(lambda task: heard.append("unregistered"))
        executor.on_task_done(lambda task: heard.append("last"))
        executor.end(start(executor))
        assert heard == ["last"]

    with_executor(body)


def test_one_registered_by_a_listener_hears_of_the_next_task_only() -> None:
    heard: list[BashTask] = []

    def body(executor: MemoryExecutor) -> None:
        undo = executor.on_task_done(lambda task: register())

        def register() -> None:
            undo()
            executor.on_task_done(heard.append)

        executor.end(start(executor))
        assert heard == []
        second = start(executor)
        executor.end(second)
        assert heard == [second]

    with_executor(body)


def test_a_listener_may_unregister_itself_start_and_kill() -> None:
    heard: list[tuple[str, BashTaskId]] = []

    def body(executor: MemoryExecutor) -> None:
        other = start(executor)

        def once(task: BashTask) -> None:
            undo()
            assert executor.kill(other.id)
            heard.append(("once", start(executor).id))

        undo = executor.on_task_done(once)
        executor.on_task_done(lambda task: heard.append(("always", task.id)))
        first = start(executor)
        executor.end(first)
        (third,) = [task for task in executor.list() if task.status is TaskStatus.RUNNING]
        assert heard == [("always", other.id), ("once", third.id), ("always", first.id)]

    with_executor(body)


def test_after_a_listener_has_disposed_no_other_is_called() -> None:
    heard: list[str] = []

    async def main() -> None:
        executor = MemoryExecutor()
        survivor = start(executor)

        def disposing(task: BashTask) -> None:
            heard.append("disposing")
            executor.dispose()
            heard.append("disposed")

        executor.on_task_done(disposing)
        executor.on_task_done(lambda task: heard.append("late"))
        executor.end(start(executor))
        await executor.dispose()
        assert survivor.reason is EndReason.DISPOSED
        assert executor.disposals == 1

    asyncio.run(main())
    assert heard == ["disposing", "disposed"]


def test_no_listener_hears_of_a_task_that_dispose_ends() -> None:
    heard: list[BashTask] = []

    async def main() -> None:
        executor = MemoryExecutor()
        executor.disposal_gate = asyncio.Event()
        executor.on_task_done(heard.append)
        ended_during, ended_by = start(executor), start(executor)
        disposal = executor.dispose()
        executor.end(ended_during)
        executor.disposal_gate.set()
        await disposal
        assert ended_by.reason is EndReason.DISPOSED

    asyncio.run(main())
    assert heard == []


def test_registering_with_a_disposed_executor_is_an_error() -> None:
    async def main() -> None:
        executor = MemoryExecutor()
        undo = executor.on_task_done(lambda task: None)
        await executor.dispose()
        undo()
        with pytest.raises(ExecutorDisposedError, match="on_task_done"):
            executor.on_task_done(lambda task: None)

    asyncio.run(main())


def test_a_coroutine_function_is_no_listener() -> None:
    async def nobody_awaits(task: BashTask) -> None:
        raise AssertionError

    executor = MemoryExecutor()
    for listener in (nobody_awaits, functools.partial(nobody_awaits), None):
        with pytest.raises(TypeError, match="listener"):
            executor.on_task_done(listener)  # type: ignore[arg-type]


def test_listeners_can_be_registered_before_there_is_an_event_loop() -> None:
    heard: list[BashTask] = []
    executor = MemoryExecutor()
    executor.on_task_done(heard.append)

    async def main() -> None:
        async with executor:
            executor.end(start(executor))

    asyncio.run(main())
    assert len(heard) == 1
