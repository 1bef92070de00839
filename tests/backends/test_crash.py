"""Ends without dispose: the host dies in every way, or the warden does. Nothing stays, for root and others.

Hostile trees are in test_workloads.py and test_hostile.py, the lease in test_lease.py.
"""

from __future__ import annotations

import os
import signal
import time
from typing import TYPE_CHECKING

import pytest

from tests.support.accounts import ACCOUNTS, Account
from tests.support.lifeline import Lifeline
from tests.support.processes import look
from tests.support.witness import Watch

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Sequence

pytestmark = pytest.mark.backend("local")

GRACE_MS = 300
UP_SECONDS = 20.0
GONE_SECONDS = 1.0
REPETITIONS = 20

every_account = pytest.mark.parametrize("account", ACCOUNTS, ids=str)

STAY = "bash -c 'printf m >&9; exec sleep 30'"
TREES = (
    # Each with the number of its marks.
    (f"setsid -f {STAY}\nn sleep 30", 2),
    (f"trap '' TERM INT HUP\n(n sleep 30 &)\n{STAY} & n sleep 30", 3),
    (f"env -i setsid -f {STAY}\nn sleep 30", 2),
    ("n sleep 30 | n sleep 30 | n cat", 3),
    (f"(setsid {STAY} & exit 0)\nnohup {STAY} >/dev/null 2>&1 & disown\nn sleep 30", 3),
)


@pytest.fixture
def line() -> Iterator[Lifeline]:
    with Lifeline() as made:
        yield made


def hold(line: Lifeline, account: Account, trees: Sequence[tuple[str, int]]) -> Watch:
    commands = [line.prologue + text for text, _ in trees]
    return Watch("holding:hold", {"commands": commands, "grace_ms": GRACE_MS}, account=account, line=line)


def bring_up(watch: Watch, line: Lifeline, trees: Sequence[tuple[str, int]]) -> None:
    watch.report("started")
    assert line.wait_marks(sum(marks for _, marks in trees), timeout=UP_SECONDS), watch.describe()
    assert line.held()


def wait_gone(watch: Watch, line: Lifeline, *, but: Collection[int] = ()) -> float:
    """Waits until nothing lives under watch but those; returns the seconds it took, or fails."""
    began = time.monotonic()
    while line.held() or {process.pid for process in watch.processes()} - set(but):
        waited = time.monotonic() - began
        assert waited < GONE_SECONDS, f"still there after {waited:.2f} s:\n{watch.describe()}"
        time.sleep(0.002)
    return time.monotonic() - began


# --- the host is killed


def test_host_killed() -> None:
    """20 trees, 20 times: within 1 s nothing is alive, though a forked child holds every descriptor."""
    trees = TREES * 4
    took = []
    for repetition in range(REPETITIONS):
        account = ACCOUNTS[repetition % len(ACCOUNTS)]
        with Lifeline() as line, hold(line, account, trees) as watch:
            bring_up(watch, line, trees)
            watch.go("fork")
            child = watch.report("forked")["pid"]
            watch.kill_driver()
            took.append(wait_gone(watch, line, but=[child]))
            assert look(child) is not None
    assert len(took) == REPETITIONS
    print(f"gone after {min(took) * 1000:.0f} to {max(took) * 1000:.0f} ms")


@every_account
def test_host_killed_while_opening(account: Account) -> None:
    """At any moment between making the warden and running the commands: nothing is left."""
    for delay_ms in (0, 1, 2, 4, 8, 16):
        with (
            Lifeline() as line,
            Watch(
                "holding:rush",
                {"commands": [line.prologue + text for text, _ in TREES]},
                account=account,
                line=line,
            ) as watch,
        ):
            watch.report("rushing")
            time.sleep(delay_ms / 1000)
            watch.kill_driver()
            watch.wait_gone(timeout=GONE_SECONDS)


# --- the host ends without dispose


@every_account
@pytest.mark.parametrize("how", ["sys.exit", "os._exit", "raise", "return"])
def test_host_ends_without_dispose(how: str, account: Account, line: Lifeline) -> None:
    """By sys.exit, os._exit, an exception that nobody handles, or `asyncio.run` that simply returns."""
    with hold(line, account, TREES) as watch:
        bring_up(watch, line, TREES)
        watch.go(f"leave {how}")
        deadline = time.monotonic() + 10
        while (driver := look(watch.driver)) is not None and not driver.zombie:
            assert time.monotonic() < deadline, f"the host does not end:\n{watch.describe()}"
            time.sleep(0.002)
        wait_gone(watch, line)


# --- the warden is killed, or loses a keeper


def dispatcher(watch: Watch) -> int:
    (found,) = (process.pid for process in watch.wardens() if process.ppid == watch.driver)
    return found


def expect_clean_dispose(watch: Watch, *, error: str | None = None) -> None:
    watch.go("dispose")
    disposed = watch.report("disposed", timeout=20)
    assert disposed["error"] == error
    assert watch.processes() == []
    assert watch.zombies() == []
    assert disposed["after"] == disposed["before"]
    watch.go("leave")
    watch.finish()


@every_account
def test_dispatcher_killed(account: Account, line: Lifeline) -> None:
    """Its tasks end as LOST, told once; their trees are gone; the next command has a new warden."""
    with hold(line, account, TREES) as watch:
        bring_up(watch, line, TREES)
        old = dispatcher(watch)
        os.kill(old, signal.SIGKILL)
        watch.go("wait")
        ended = watch.report("ended")
        assert [
            (task["status"], task["reason"], task["error"], task["exit_code"], task["told"])
            for task in ended["tasks"]
        ] == [("failed", "lost", "PlaceLostError", None, 1)] * len(TREES)
        wait_gone(watch, line)
        watch.go("run")
        assert watch.report("ran")["stdout"] == "next\n"
        assert dispatcher(watch) != old
        watch.go("look")
        assert {task["told"] for task in watch.report("seen")["tasks"]} == {1}
        expect_clean_dispose(watch)


@every_account
@pytest.mark.parametrize("number", ["KILL", "STOP"])
def test_keeper_killed_or_frozen_by_its_task(number: str, account: Account, line: Lifeline) -> None:
    """That task is lost at once, told once, its tree gone; the others and the place go on."""
    suicide = f"setsid -f {STAY}\n{STAY} &\nprintf m >&9\nsleep 0.1\nkill -{number} $PPID\nsleep 30"
    trees = ((suicide, 3), ("n sleep 30", 1))
    with hold(line, account, trees) as watch:
        bring_up(watch, line, trees)
        warden = dispatcher(watch)
        watch.go("wait 0")
        lost, other = watch.report("ended")["tasks"]
        assert (lost["status"], lost["reason"], lost["error"], lost["told"]) == (
            "failed",
            "lost",
            "PlaceLostError",
            1,
        )
        assert (lost["exit_code"], lost["signal"]) == (None, None)
        assert (other["status"], other["told"]) == ("running", 0)
        assert [process.cmdline for process in watch.survivors()] == ["sleep 30"]
        watch.go("run")
        assert watch.report("ran")["stdout"] == "next\n"
        assert dispatcher(watch) == warden
        watch.go("kill 1")
        lost, other = watch.report("ended")["tasks"]
        assert (lost["told"], other["reason"], other["told"]) == (1, "killed", 1)
        wait_gone(watch, line, but=[warden])
        expect_clean_dispose(watch)
