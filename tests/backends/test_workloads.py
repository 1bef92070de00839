"""Hostile process trees, ended in every way: nothing of them may be alive afterwards.

Counted by witnesses that the executor knows nothing of (tests/support/witness.py), with a control first:
killers that are known to be too weak leave survivors, and the witness sees them.
"""

from __future__ import annotations

import time

import pytest

from tests.support.accounts import ACCOUNTS, Account
from tests.support.lifeline import Lifeline
from tests.support.witness import Watch
from tests.support.workloads import WORKLOADS, Workload, leftovers

pytestmark = pytest.mark.backend("local")

GRACE_MS = 300
# What a workload needs to be up; doubled until it was, so that a busy machine costs time and not a failure.
TIMEOUTS_MS = (400, 1_600, 6_400)
UP_SECONDS = 10.0

every_workload = pytest.mark.parametrize("workload", WORKLOADS, ids=lambda workload: workload.name)
every_account = pytest.mark.parametrize("account", ACCOUNTS, ids=str)


def skip_unless_possible(workload: Workload) -> None:
    missing = workload.missing()
    if missing is not None:
        pytest.skip(missing)


# --- the control


@every_workload
@pytest.mark.parametrize("killer", ["leader", "group"])
def test_the_witness_sees_what_a_weak_killer_leaves(workload: Workload, killer: str) -> None:
    """Killing the leader alone leaves every other process; killing the group leaves what left the group."""
    skip_unless_possible(workload)
    with (
        Lifeline() as line,
        Watch("weak:weak", {"command": workload.script(line), "killer": killer}, line=line) as watch,
    ):
        watch.report("running")
        assert line.wait_marks(workload.all_marks, timeout=UP_SECONDS), watch.describe()
        if not workload.moves:
            assert len(watch.survivors()) >= workload.alive + 1
        watch.go()
        watch.report("ended")
        time.sleep(0.1)  # a signal to a group is delivered on the way, not at once
        if killer == "leader" or workload.escapes_group:
            assert workload.moves or watch.survivors()
            assert line.held()
        else:
            watch.assert_no_survivors()


# --- the executor

END_REASONS = {
    "abort": "aborted",
    "cancel": "cancelled",
    "kill": "killed",
    "dispose": "disposed",
}


def watch_end(command: str, how: str, account: Account, line: Lifeline, *, timeout_ms: int = 60_000) -> Watch:
    arguments = {"command": command, "how": how, "timeout_ms": timeout_ms, "grace_ms": GRACE_MS}
    return Watch("scenarios:end", arguments, account=account, line=line)


def bring_up(workload: Workload, watch: Watch, line: Lifeline) -> None:
    """Waits until every process of the workload is what it is meant to be; the run is still under way."""
    before = line.marks()
    watch.report("running")
    assert line.wait_marks(before + workload.all_marks, timeout=UP_SECONDS), watch.describe()
    assert line.held(), watch.describe()


def expect_disposed(watch: Watch) -> None:
    """Answers `ended`; then dispose leaves no process, no zombie, no descriptor, thread or asyncio task."""
    watch.go()
    disposed = watch.report("disposed")
    assert watch.processes() == []
    assert watch.zombies() == []
    assert disposed["after"] == disposed["before"]
    watch.go()


def expect_clean_end(watch: Watch) -> None:
    expect_disposed(watch)
    watch.finish()


@every_workload
@every_account
def test_nothing_survives_a_timeout(workload: Workload, account: Account) -> None:
    """The tree is dead when `run` comes back, within timeout + grace + 1 s; the partial output is kept."""
    skip_unless_possible(workload)
    for timeout_ms in TIMEOUTS_MS:
        with (
            Lifeline() as line,
            watch_end(workload.script(line), "timeout", account, line, timeout_ms=timeout_ms) as watch,
        ):
            ended = watch.report("ended", timeout=timeout_ms / 1000 + 10)
            watch.assert_no_survivors()
            assert ended["reason"] == "timed_out"
            assert ended["timed_out"]
            assert ended["survivors"] == 0
            assert timeout_ms <= ended["elapsed_ms"] < timeout_ms + GRACE_MS + 1_000
            up = line.marks() >= workload.all_marks
            if up:
                assert ended["stdout"] == "READY\n"
                watch.wait_keepers_gone(timeout=1)
            expect_clean_end(watch)
        if up:
            return
    pytest.fail(f"the workload was not up within {TIMEOUTS_MS[-1]} ms")


@every_workload
@every_account
def test_nothing_survives_an_end_on_demand(workload: Workload, account: Account) -> None:
    """The tree is dead when `run` or `dispose` returns or the task is done, within grace + 1 s."""
    skip_unless_possible(workload)
    with Lifeline() as line:
        arguments = {
            "command": workload.script(line),
            "hows": list(END_REASONS),
            "timeout_ms": 60_000,
            "grace_ms": GRACE_MS,
        }
        with Watch("scenarios:ends", arguments, account=account, line=line) as watch:
            for how, reason in END_REASONS.items():
                bring_up(workload, watch, line)
                watch.go()
                ended = watch.report("ended")
                watch.assert_no_survivors()
                assert ended["reason"] == reason
                assert ended["elapsed_ms"] < GRACE_MS + 1_000, how
                if how != "cancel":  # which has no result
                    assert ended["stdout"] == "READY\n"
                if how == "dispose":
                    assert watch.processes() == []
                else:
                    watch.wait_keepers_gone(timeout=1)
                expect_disposed(watch)
            watch.finish()


@every_workload
@every_account
def test_leftovers_live_on_until_dispose(workload: Workload, account: Account) -> None:
    """A leader that exits leaves its processes alive, whatever they are; dispose then kills every one."""
    skip_unless_possible(workload)
    with Lifeline() as line, watch_end(leftovers(workload, line), "exit", account, line) as watch:
        ended = watch.report("ended")
        assert (ended["reason"], ended["exit_code"]) == ("exited", 7)
        assert ended["stdout"] == "READY\n"
        assert line.wait_marks(workload.all_marks, timeout=UP_SECONDS), watch.describe()
        assert line.held()
        if not workload.moves:
            assert len(watch.survivors()) >= workload.alive
        expect_clean_end(watch)
        assert not line.held()


@every_workload
@every_account
def test_nothing_survives_the_death_of_the_host(workload: Workload, account: Account) -> None:
    """SIGKILL to the host process: within 1 s neither a process of the tree nor a warden is alive."""
    skip_unless_possible(workload)
    with Lifeline() as line, watch_end(workload.script(line), "abort", account, line) as watch:
        bring_up(workload, watch, line)
        watch.kill_driver()
        watch.wait_gone(timeout=1)
