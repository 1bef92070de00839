"""What consumers register through scopes, and what stays when they are reloaded."""

from __future__ import annotations

import asyncio

import pytest

from corral import BashExecRequest, BashExecutor, BashTask, Context, OwnerToken, TaskStatus
from corral_backends.places.local import LocalExecutor
from tests.seam.memory import MemoryExecutor
from tests.support.aio import ended, run, until


def begin(executor: BashExecutor, command: str = "true", owner: str | None = None) -> BashTask:
    token = None if owner is None else OwnerToken(owner)
    return executor.start(executor.resolve(BashExecRequest(command=command, owner=token)))


# --- listeners


def test_a_listener_goes_with_its_scope() -> None:
    async def scenario() -> None:
        heard: list[str] = []
        async with Context() as context:
            executor = MemoryExecutor()
            context.provide(executor)
            scope = context.scope("consumer")
            scope.on_task_done(lambda task: heard.append(f"scope {task.id}"))
            context.on_task_done(lambda task: heard.append(f"context {task.id}"))
            first, second = begin(executor), begin(executor)
            executor.end(first)
            await scope.close()
            executor.end(second)
        assert heard == ["scope task-1", "context task-1", "context task-2"]

    run(scenario())


def test_the_disposer_of_a_scopes_listener() -> None:
    async def scenario() -> None:
        heard: list[BashTask] = []
        async with Context() as context:
            executor = MemoryExecutor()
            context.provide(executor)
            scope = context.scope("consumer")
            dispose = scope.on_task_done(heard.append)
            dispose()
            assert scope._effects == {}
            executor.end(begin(executor))
            dispose()
            await scope.close()
            dispose()
        assert heard == []

    run(scenario())


def test_a_listener_is_checked() -> None:
    async def scenario() -> None:
        async with Context() as context:
            context.provide(MemoryExecutor())
            with pytest.raises(TypeError, match="listener must be a plain function"):
                context.on_task_done(asyncio.sleep)  # type: ignore[arg-type]

    run(scenario())


# --- a consumer that is reloaded


class Consumer:
    """What a tool layer does: a scope for what it registers, a policy that compares owners."""

    def __init__(self, context: Context) -> None:
        self.scope = context.scope("consumer")
        self.heard: list[str] = []
        self.scope.on_task_done(lambda task: self.heard.append(task.id))


@pytest.mark.backend("local")
def test_reload_keeps_tasks_and_owners_and_doubles_no_notice() -> None:
    async def scenario() -> None:
        async with Context() as context:
            context.provide(LocalExecutor(kill_grace_ms=300))
            bash = context.bash
            before = Consumer(context)
            early = begin(bash, "echo early", owner="session 1")
            await ended(bash, early)
            task = begin(bash, "echo before; read -t 60 _ < <(sleep 60); echo after", owner="session 2")
            while not bash.read_output(task.id).stdout.text:
                await asyncio.sleep(0.005)

            await before.scope.close()
            after = Consumer(context)

            assert bash.get(task.id) is task
            assert task.status is TaskStatus.RUNNING
            assert [bash.owner_of(each.id) for each in bash.list()] == ["session 1", "session 2"]
            assert bash.kill(task.id)
            await ended(bash, task)
            assert before.heard == [early.id]
            assert after.heard == [task.id]
            assert bash.owner_of(task.id) == "session 2"
        assert bash.disposed

    run(scenario())


@pytest.mark.backend("local")
def test_a_hundred_reloads_leave_nothing_behind() -> None:
    async def scenario() -> None:
        async with Context() as context:
            context.provide(LocalExecutor())
            task = begin(context.bash, "sleep 60", owner="x")
            consumers: list[Consumer] = []
            for _ in range(100):
                consumers.append(Consumer(context))
                if len(consumers) > 1:
                    await consumers[-2].scope.close()
            context.bash.kill(task.id)
            await until(lambda: bool(consumers[-1].heard))
            assert sum(len(each.heard) for each in consumers) == 1
            assert consumers[-1].heard == [task.id]
            assert len(context._effects) == 2  # the executor, the last consumer

    run(scenario())
