"""Cancelling `run` at any moment leaves no process, task or descriptor, and raises CancelledError."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

import pytest

from tests.support.accounts import ACCOUNTS, Account
from tests.support.aio import executor, run, run_command
from tests.support.lifeline import Lifeline
from tests.support.witness import Watch

if TYPE_CHECKING:
    from corral import BashExecutor

pytestmark = pytest.mark.backend("local")

GRACE_MS = 300
ROUNDS = 10
DELAYS_MS = (0, 0.2, 0.5, 1, 2, 3, 5, 10, 20)

every_account = pytest.mark.parametrize("account", ACCOUNTS, ids=str)

# Part of it has left the process group of the leader, part has lost its parent.
TREE = "setsid -f sleep 15\n(sleep 15 &)\nsleep 15"
# The same, heeding nothing but SIGKILL.
DEAF = "trap '' TERM INT HUP\n(n sleep 15 &)\nsetsid -f bash -c 'printf m >&9; exec sleep 15'\nsleep 15"


def watch_rounds(
    line: Lifeline,
    account: Account,
    *,
    delays_ms: tuple[float, ...],
    rounds: int = ROUNDS,
    cold: bool = False,
    twice: bool = False,
) -> Watch:
    arguments = {
        "command": line.prologue + TREE,
        "delays_ms": delays_ms,
        "rounds": rounds,
        "grace_ms": GRACE_MS,
        "cold": cold,
        "twice": twice,
    }
    return Watch("scenarios:cancel_rounds", arguments, account=account, line=line)


def expect_disposed(watch: Watch) -> None:
    disposed = watch.report("disposed")
    assert watch.processes() == []
    assert watch.zombies() == []
    assert disposed["after"] == disposed["before"]
    watch.go()
    watch.finish()


@every_account
@pytest.mark.parametrize("cold", [False, True], ids=["open", "opening"])
@pytest.mark.parametrize("delay_ms", DELAYS_MS)
def test_cancel_leaves_nothing(delay_ms: float, cold: bool, account: Account) -> None:
    """From before the spawn until long after it, in an open place and in one that is being opened."""
    with Lifeline() as line, watch_rounds(line, account, delays_ms=(delay_ms,), cold=cold) as watch:
        idle = watch.report("ready")
        watch.go()
        for _ in range(ROUNDS):
            told = watch.report("round")
            watch.assert_no_survivors()
            assert told["outcome"] == "cancelled"
            assert told["elapsed_ms"] < GRACE_MS + 1_000
            assert {key: told[key] for key in idle} == idle
            watch.go()
        expect_disposed(watch)


@every_account
@pytest.mark.parametrize("cold", [False, True], ids=["open", "opening"])
def test_cancel_twice_leaves_nothing(cold: bool, account: Account) -> None:
    """A second cancel, at any moment, does not leave the tree alive: at most it is not waited for."""
    rounds = 3
    with (
        Lifeline() as line,
        watch_rounds(line, account, delays_ms=DELAYS_MS, rounds=rounds, cold=cold, twice=True) as watch,
    ):
        watch.report("ready")
        watch.go()
        for _ in range(rounds * len(DELAYS_MS)):
            told = watch.report("round")
            assert told["outcome"] == "cancelled"
            assert line.wait_released(timeout=GRACE_MS / 1000 + 1), watch.describe()
            watch.go()
        expect_disposed(watch)


def test_cancel_waits_for_the_kill() -> None:
    """CancelledError comes when a tree that ignores SIGTERM is dead, not before, and within grace + 1 s."""

    async def scenario(line: Lifeline) -> float:
        async with executor(kill_grace_ms=GRACE_MS) as made:
            task = asyncio.create_task(run_command(made, line.prologue + DEAF))
            assert await asyncio.to_thread(line.wait_marks, 2, timeout=5)
            began = time.monotonic()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            waited = time.monotonic() - began
            assert not line.held()
            return waited

    with Lifeline() as line:
        waited = run(scenario(line))
    assert GRACE_MS / 1000 <= waited < GRACE_MS / 1000 + 1


def test_a_second_cancel_does_not_wait() -> None:
    """It raises at once; the tree, which ignores SIGTERM, still dies by SIGKILL when the grace is over."""

    async def scenario(line: Lifeline) -> float:
        async with executor(kill_grace_ms=GRACE_MS) as made:
            task = asyncio.create_task(run_command(made, line.prologue + DEAF))
            assert await asyncio.to_thread(line.wait_marks, 2, timeout=5)
            task.cancel()
            await asyncio.sleep(0.02)
            assert not task.done()
            began = time.monotonic()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            waited = time.monotonic() - began
            assert line.held()
            assert await asyncio.to_thread(line.wait_released, timeout=GRACE_MS / 1000 + 1)
            return waited

    with Lifeline() as line:
        assert run(scenario(line)) < GRACE_MS / 1000 / 2


def test_cancelling_one_opening_run_leaves_the_other() -> None:
    """The opening is shared: whoever caused it may go, the others are served."""

    async def scenario() -> None:
        async with executor() as made:
            first = asyncio.create_task(run_command(made, "echo first"))
            second = asyncio.create_task(run_command(made, "echo second"))
            await asyncio.sleep(0)
            first.cancel()
            with pytest.raises(asyncio.CancelledError):
                await first
            assert (await second).stdout.text == "second\n"

    run(scenario())


def test_cancel_of_one_run_leaves_the_others() -> None:
    async def scenario(line: Lifeline) -> None:
        async with executor() as made:
            others = [asyncio.create_task(run_command(made, f"sleep 0.3; echo {n}")) for n in range(5)]
            task = asyncio.create_task(run_command(made, line.prologue + "n sleep 15"))
            assert await asyncio.to_thread(line.wait_marks, 1, timeout=5)
            task.cancel()
            results = await asyncio.gather(*others)
            assert [result.stdout.text for result in results] == [f"{n}\n" for n in range(5)]
            assert task.cancelled()
            assert not line.held()

    with Lifeline() as line:
        run(scenario(line))


def test_an_asyncio_timeout_around_run_kills() -> None:
    """`asyncio.timeout` cancels; its TimeoutError comes out and nothing is left."""

    async def scenario(line: Lifeline) -> None:
        async with executor() as made:
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.3):
                    await run_command(made, line.prologue + TREE)
            assert not line.held()
            assert (await run_command(made, "echo next")).stdout.text == "next\n"

    with Lifeline() as line:
        run(scenario(line))


def test_a_failing_sibling_in_a_task_group_kills() -> None:
    """The group cancels the run and waits for it; the error of the sibling is what comes out."""

    async def fail_once_up(line: Lifeline) -> None:
        assert await asyncio.to_thread(line.wait_marks, 1, timeout=5)
        msg = "sibling"
        raise ValueError(msg)

    async def both(made: BashExecutor, line: Lifeline) -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(run_command(made, line.prologue + "setsid -f sleep 15\nn sleep 15"))
            group.create_task(fail_once_up(line))

    async def scenario(line: Lifeline) -> None:
        async with executor() as made:
            with pytest.raises(ExceptionGroup) as caught:
                await both(made, line)
            assert [str(error) for error in caught.value.exceptions] == ["sibling"]
            assert not line.held()

    with Lifeline() as line:
        run(scenario(line))


@every_account
@pytest.mark.parametrize("presses", [1, 2])
def test_ctrl_c_leaves_nothing(presses: int, account: Account) -> None:
    """SIGINT to the host ends `asyncio.run` by cancellation: the tree is dead when the host is."""
    with Lifeline() as line:
        arguments = {"command": line.prologue + DEAF, "grace_ms": GRACE_MS}
        with Watch("scenarios:until_interrupted", arguments, account=account, line=line) as watch:
            watch.report("running")
            assert line.wait_marks(2, timeout=5), watch.describe()
            for _ in range(presses):
                watch.interrupt()
                time.sleep(0.01)
            watch.wait_interrupted(timeout=GRACE_MS / 1000 + 3)
            # An impatient second press may end the host before the kill is over; the warden sees that at
            # once.
            watch.wait_gone(timeout=0.02 if presses == 1 else 1)
