"""Commands that turn on their supervisor, and hosts that end badly. Counted as in test_workloads.py."""

from __future__ import annotations

import dataclasses
import os
import shlex
import signal
import time
from typing import TYPE_CHECKING

import pytest

from tests.support.accounts import ACCOUNTS, Account
from tests.support.lifeline import Lifeline
from tests.support.processes import look
from tests.support.storm import setuid_program
from tests.support.witness import Watch
from tests.support.workloads import WORKLOADS

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.backend("local")

GRACE_MS = 300
TIMEOUT_MS = 500
UP_SECONDS = 10.0

every_account = pytest.mark.parametrize("account", ACCOUNTS, ids=str)

# The parent of a command is its keeper, whose parent is the dispatcher.
KEEPER = "$PPID"
DISPATCHER = "$(read -r _ _ _ p _ </proc/$PPID/stat; echo $p)"
TREE = "setsid -f bash -c 'printf m >&9; exec sleep 15'\n(n sleep 15 &)\n"


@pytest.fixture
def line() -> Iterator[Lifeline]:
    with Lifeline() as made:
        yield made


def watch_end(
    command: str, how: str, account: Account, line: Lifeline, timeout_ms: int = TIMEOUT_MS
) -> Watch:
    arguments = {"command": command, "how": how, "timeout_ms": timeout_ms, "grace_ms": GRACE_MS}
    return Watch("scenarios:end", arguments, account=account, line=line)


# --- commands against their supervisor


@every_account
@pytest.mark.parametrize("victim", [KEEPER, DISPATCHER], ids=["keeper", "dispatcher"])
def test_a_command_that_kills_its_supervisor_is_lost(victim: str, account: Account, line: Lifeline) -> None:
    """Never a success: the run ends as lost, at once, with the output until then, and nothing survives."""
    command = f"{line.prologue}{TREE}echo early\nsleep 0.1\nkill -KILL {victim}\nsleep 15"
    with watch_end(command, "exit", account, line, timeout_ms=10_000) as watch:
        ended = watch.report("ended")
        assert (ended["reason"], ended["stdout"]) == ("lost", "early\n")
        assert ended["elapsed_ms"] < 1_500
        assert line.wait_released(timeout=1), watch.describe()
        watch.go()
        watch.report("disposed")
        assert watch.processes() == []


@every_account
def test_a_command_that_freezes_its_keeper_ends_in_time(account: Account, line: Lifeline) -> None:
    """Within timeout + grace + 1 s the run is back and nothing is alive; no exit status is made up."""
    command = f"{line.prologue}{TREE}echo early\nsleep 0.1\nkill -STOP {KEEPER}\nsleep 15"
    with watch_end(command, "timeout", account, line) as watch:
        ended = watch.report("ended")
        assert ended["reason"] in ("lost", "timed_out")
        assert ended.get("exit_code") is None
        assert ended["elapsed_ms"] < TIMEOUT_MS + GRACE_MS + 1_000
        watch.assert_no_survivors()
        watch.go()
        watch.report("disposed")
        assert watch.processes() == []


def test_a_command_that_freezes_the_dispatcher_is_lost(line: Lifeline) -> None:
    """The host gives up at timeout + grace + 1 s by itself.

    The warden is then ended, and all of its trees with it.
    """
    freeze = f"sleep 0.1\nkill -STOP {DISPATCHER}\nsleep 20"
    command = f"{line.prologue}setsid -f sleep 20\necho early\n{freeze}"
    with watch_end(command, "timeout", ACCOUNTS[-1], line) as watch:
        ended = watch.report("ended")
        assert (ended["reason"], ended["stdout"]) == ("lost", "early\n")
        assert ended["elapsed_ms"] < TIMEOUT_MS + GRACE_MS + 1_000 + 250  # the last, for giving up
        assert line.wait_released(timeout=2), watch.describe()
        watch.go()
        watch.report("disposed")
        assert watch.processes() == []


def test_a_process_with_other_credentials_is_counted_and_not_waited_for(line: Lifeline) -> None:
    """A command of a user that became root cannot be killed by that user: the result counts it."""
    program, user = setuid_program(), ACCOUNTS[-1]
    if program is None or user.uid is None:
        pytest.skip("needs root, a C compiler, and a /tmp that heeds the set-user-id bit")
    command = f"{line.prologue}{shlex.quote(str(program))} root 2 15\nn sleep 15"
    with watch_end(command, "timeout", user, line) as watch:
        ended = watch.report("ended")
        assert line.marks() == 3, watch.describe()
        assert ended["reason"] == "timed_out"
        assert ended["survivors"] == 2
        assert ended["elapsed_ms"] < TIMEOUT_MS + GRACE_MS + 1_000
        assert [process.comm for process in watch.survivors()] == ["storm-setuid"] * 2
        watch.go()
        watch.report("disposed")
        assert watch.wardens() == []


# --- many at once


@every_account
def test_a_storm_that_has_run_for_a_while_is_ended_in_time(account: Account, line: Lifeline) -> None:
    """Sixty walkers with a backlog of dead ones behind them: the bounds hold for every way to end them."""
    storm = next(workload for workload in WORKLOADS if workload.name == "fork-chain-setsid")
    missing = storm.missing()
    if missing is not None:
        pytest.skip(missing)
    wide = dataclasses.replace(storm, text="{storm} chain 60 12 setsid", marks=60)
    hows = {"abort": "aborted", "kill": "killed", "dispose": "disposed"}
    arguments = {
        "command": wide.script(line),
        "hows": list(hows),
        "timeout_ms": 60_000,
        "grace_ms": GRACE_MS,
    }
    with Watch("scenarios:ends", arguments, account=account, line=line) as watch:
        for how, reason in hows.items():
            before = line.marks()
            watch.report("running")
            assert line.wait_marks(before + wide.all_marks, timeout=UP_SECONDS), watch.describe()
            time.sleep(0.4)
            watch.go()
            ended = watch.report("ended")
            watch.assert_no_survivors()
            assert ended["reason"] == reason
            assert ended["elapsed_ms"] < GRACE_MS + 1_000, how
            watch.go()
            watch.report("disposed")
            assert watch.processes() == []
            watch.go()
        watch.finish()


@every_account
def test_dispose_ends_all_workloads_at_once(account: Account, line: Lifeline) -> None:
    """Every hostile tree at the same time, in the foreground and the background; one dispose, no survivor."""
    possible = [workload for workload in WORKLOADS if workload.missing() is None]
    commands = [workload.script(line) for workload in possible]
    arguments = {"commands": commands, "grace_ms": GRACE_MS}
    with Watch("scenarios:many", arguments, account=account, line=line) as watch:
        watch.report("running")
        assert line.wait_marks(sum(workload.all_marks for workload in possible), timeout=3 * UP_SECONDS)
        watch.go()
        ended = watch.report("ended")
        watch.assert_no_survivors()
        assert watch.processes() == []
        assert set(ended["reasons"]) == {"disposed"}
        assert set(ended["survivors"]) == {0}
        assert ended["elapsed_ms"] < GRACE_MS + 2_000


@every_account
def test_the_death_of_the_host_ends_all_workloads_at_once(account: Account, line: Lifeline) -> None:
    """SIGKILL to the host while every hostile tree runs: all are gone within 1 s."""
    possible = [workload for workload in WORKLOADS if workload.missing() is None]
    arguments = {"commands": [workload.script(line) for workload in possible], "grace_ms": GRACE_MS}
    with Watch("scenarios:many", arguments, account=account, line=line) as watch:
        watch.report("running")
        assert line.wait_marks(sum(workload.all_marks for workload in possible), timeout=3 * UP_SECONDS)
        watch.kill_driver()
        watch.wait_gone(timeout=1)


# --- hosts that end badly, and one that does not


@every_account
def test_a_forked_child_of_a_dead_host_keeps_nothing_alive(account: Account, line: Lifeline) -> None:
    """The child holds the stream to the warden open, so no end of file comes; the trees die all the same."""
    arguments = {"command": f"{line.prologue}{TREE}n sleep 15", "grace_ms": GRACE_MS}
    with Watch("scenarios:forked", arguments, account=account, line=line) as watch:
        child = watch.report("running")["child"]
        assert line.wait_marks(3, timeout=UP_SECONDS), watch.describe()
        watch.kill_driver()
        assert line.wait_released(timeout=1), watch.describe()
        assert watch.wardens() == []
        assert [process.pid for process in watch.survivors()] == [child]


@every_account
@pytest.mark.parametrize(
    "number", [signal.SIGTERM, signal.SIGHUP, signal.SIGABRT], ids=lambda number: number.name
)
def test_a_host_that_dies_of_a_signal_leaves_nothing(
    number: signal.Signals, account: Account, line: Lifeline
) -> None:
    """Signals that Python does not turn into an exception: no code of the host runs, yet nothing is left."""
    with watch_end(f"{line.prologue}{TREE}n sleep 15", "abort", account, line) as watch:
        watch.report("running")
        assert line.wait_marks(3, timeout=UP_SECONDS), watch.describe()
        os.kill(watch.driver, number)
        watch.wait_gone(timeout=1.5)


@every_account
def test_a_host_that_was_stopped_for_a_while_loses_nothing(account: Account, line: Lifeline) -> None:
    """Its commands go on while it is stopped, and their results and output are there when it continues."""
    command = f"{line.prologue}n true &\nfor i in {{1..15}}; do echo $i; sleep 0.1; done\nexit 7"
    with watch_end(command, "exit", account, line, timeout_ms=20_000) as watch:
        assert line.wait_marks(1, timeout=UP_SECONDS), watch.describe()
        watch.freeze_driver(2)
        assert look(watch.driver) is not None
        ended = watch.report("ended")
        assert (ended["reason"], ended["exit_code"]) == ("exited", 7)
        assert ended["stdout"] == "".join(f"{number}\n" for number in range(1, 16))
        watch.go()
        watch.report("disposed")
        assert watch.processes() == []
        watch.go()
        watch.finish()
