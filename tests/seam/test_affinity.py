"""An executor belongs to one event loop and one process; elsewhere it says so, and does nothing."""

from __future__ import annotations

import asyncio
import os
import signal
import traceback
from typing import TYPE_CHECKING

import pytest

from corral import BashExecRequest, BashExecutor, BashTaskId
from tests.seam.memory import MemoryExecutor

if TYPE_CHECKING:
    from collections.abc import Callable

SPEC = MemoryExecutor().resolve(BashExecRequest(command="true"))
NO_TASK = BashTaskId("none")


def step(coroutine_like: object) -> None:
    """Run the first step of a coroutine, which is where it checks. It does not get any further."""
    coroutine_like.send(None)  # type: ignore[attr-defined]


USES: dict[str, Callable[[BashExecutor], object]] = {
    "run": lambda executor: step(executor.run(SPEC)),
    "start": lambda executor: executor.start(SPEC),
    "get": lambda executor: executor.get(NO_TASK),
    "list": lambda executor: executor.list(),
    "owner_of": lambda executor: executor.owner_of(NO_TASK),
    "read_output": lambda executor: executor.read_output(NO_TASK),
    "kill": lambda executor: executor.kill(NO_TASK),
    "fetch": lambda executor: step(executor.fetch("/x").__anext__()),
    "dispose": lambda executor: executor.dispose(),
    "async with": lambda executor: step(executor.__aenter__()),
}


@pytest.fixture(params=USES)
def use(request: pytest.FixtureRequest) -> tuple[str, Callable[[BashExecutor], object]]:
    return request.param, USES[request.param]


def test_use_without_a_running_loop(use: tuple[str, Callable[[BashExecutor], object]]) -> None:
    name, call = use
    executor = MemoryExecutor()
    with pytest.raises(RuntimeError, match=f"^{name}: no event loop is running"):
        call(executor)
    assert not executor.disposed


def test_use_from_another_loop(use: tuple[str, Callable[[BashExecutor], object]]) -> None:
    name, call = use
    executor = MemoryExecutor()

    async def first() -> None:
        executor.list()

    async def second() -> None:
        with pytest.raises(RuntimeError, match=f"^{name}: .* used it first, .*closed"):
            call(executor)

    asyncio.run(first())
    asyncio.run(second())
    assert not executor.disposed


def test_another_loop_that_is_still_open() -> None:
    executor = MemoryExecutor()

    async def use_it() -> None:
        executor.list()

    loop = asyncio.new_event_loop()
    try:
        loop.run_until_complete(use_it())
        with pytest.raises(RuntimeError, match=r"not to this one$"):
            asyncio.run(use_it())
        loop.run_until_complete(use_it())
    finally:
        loop.close()


def test_an_executor_made_without_a_loop_belongs_to_the_first_that_uses_it() -> None:
    executor = MemoryExecutor()

    async def main() -> None:
        assert (await executor.run(SPEC)).exit_code == 0
        await executor.dispose()

    asyncio.run(main())
    assert executor.disposals == 1


def test_resolve_needs_no_loop_and_binds_to_none() -> None:
    executor = MemoryExecutor()
    executor.resolve(BashExecRequest(command="true"))

    async def main() -> None:
        executor.resolve(BashExecRequest(command="true"))

    asyncio.run(main())

    async def other() -> None:
        await executor.dispose()

    asyncio.run(other())


def in_a_fork(body: Callable[[], None]) -> None:
    """Call `body` in a forked child that ends within five seconds; fail with its traceback if it raised."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            signal.alarm(5)
            body()
            status = 0
        except BaseException:
            os.write(writer, traceback.format_exc().encode())
        finally:
            os._exit(status)
    os.close(writer)
    with open(reader, "rb") as pipe:
        told = pipe.read()
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0, told.decode()


def test_use_in_a_forked_child(use: tuple[str, Callable[[BashExecutor], object]]) -> None:
    name, call = use

    async def main() -> None:
        async with MemoryExecutor() as executor:

            def child() -> None:
                with pytest.raises(RuntimeError, match=f"^{name}: .* forked child"):
                    call(executor)
                assert not executor.disposed

            in_a_fork(child)
            executor.list()

    asyncio.run(main())


def test_a_forked_child_that_leaves_the_async_with_block_disposes_of_nothing() -> None:
    async def main() -> None:
        async with MemoryExecutor() as executor:

            def child() -> None:
                leaving = SystemExit(3)
                coroutine = executor.__aexit__(SystemExit, leaving, None)
                with pytest.raises(StopIteration):
                    coroutine.send(None)
                assert executor.disposals == 0
                assert not executor.disposed
                assert any("forked child" in note for note in leaving.__notes__)

            in_a_fork(child)
            assert not executor.disposed
        assert executor.disposals == 1

    asyncio.run(main())
