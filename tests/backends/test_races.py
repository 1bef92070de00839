"""Very many tasks at once, ended by everything at once. Counted as in test_workloads.py.

The tests marked slow are the same with the numbers that the contract is meant to stand.
"""

from __future__ import annotations

import os
import stat
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.support import witness
from tests.support.accounts import ACCOUNTS, Account
from tests.support.processes import rss_bytes
from tests.support.witness import Report, Watch

if TYPE_CHECKING:
    from collections.abc import Mapping

pytestmark = pytest.mark.backend("local")

every_account = pytest.mark.parametrize("account", ACCOUNTS, ids=str)


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """The supervisor of a driver lets it run for longer."""
    monkeypatch.setattr(witness, "LIMIT_SECONDS", 580.0)


def expect_clean(watch: Watch, report: Report) -> None:
    """Nothing is left of the driver's executors: no process, zombie, descriptor, thread or asyncio task."""
    assert watch.processes() == []
    assert watch.zombies() == []
    assert report["after"] == report["before"]
    watch.go()
    watch.finish()


def race(arguments: Mapping[str, Any], account: Account, *, timeout: float) -> None:
    with Watch("races:race", arguments, account=account) as watch:
        raced = watch.report("raced", timeout=timeout)
        assert raced["violations"] == []
        assert raced["tasks"] >= arguments["tasks"]
        assert raced["told"] > raced["tasks"] / 2
        assert raced["short"] < raced["tasks"] / 10
        assert {"exited", "signalled", "killed", "aborted", "disposed", "lost"} <= set(raced["reasons"])
        assert raced["slowest"]["dispose"] < 10
        figures = ("tasks", "executors", "notifications", "reasons", "slowest")
        print(f"{raced['seconds']:.1f} s", *(f"{name}: {raced[name]}" for name in figures), sep=", ")
        expect_clean(watch, raced)


@every_account
@pytest.mark.parametrize("losses", [False, True], ids=["kept", "lost"])
def test_race(losses: bool, account: Account) -> None:
    """Exit, kill, abort, dispose and (`lost`) the death of wardens: each listener once, none too late."""
    race({"seed": 20, "tasks": 400, "lanes": 4, "losses": losses}, account, timeout=45)


@pytest.mark.skipif(sys.version_info < (3, 12), reason="asyncio has no eager tasks")
def test_race_of_eager_tasks() -> None:
    """The same in a loop whose tasks begin to run while `create_task` is still being called."""
    arguments = {"seed": 30, "tasks": 200, "lanes": 4, "losses": True, "eager": True}
    race(arguments, ACCOUNTS[0], timeout=45)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize("losses", [False, True], ids=["kept", "lost"])
def test_race_of_ten_thousand(losses: bool) -> None:
    race({"seed": 10, "tasks": 10_000, "lanes": 6, "losses": losses}, ACCOUNTS[0], timeout=500)


def test_a_thousand_at_once(tmp_path: Path) -> None:
    """1,000 concurrent tasks are all done and told once; 1,000 sleepers are gone when dispose returns."""
    count = 1_000
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    assert stat.S_ISFIFO(gate.stat().st_mode)
    with Watch("crowds:crowd", {"gate": str(gate), "tasks": count}) as watch:
        waiting = watch.report("waiting", timeout=40)
        assert len(watch.survivors()) == count
        watch.go()
        gate.write_text("")  # lets all of them pass, whoever waits
        done = watch.report("done", timeout=40)
        assert done["told"] == {"1": count}
        assert done["outputs"] == {"done\n": count}
        watch.go()
        sleeping = watch.report("sleeping", timeout=40)
        assert len(watch.survivors()) == count
        watch.go()
        disposed = watch.report("disposed", timeout=40)
        watch.assert_no_survivors()
        assert disposed["told"] == 0
        assert disposed["reasons"] == {"disposed": count}
        assert disposed["seconds"] < 10
        print(
            f"{count} started in {waiting['seconds']:.2f} s, ended in {done['seconds']:.2f} s; as many "
            f"sleepers started in {sleeping['seconds']:.2f} s, disposed of in {disposed['seconds']:.2f} s"
        )
        expect_clean(watch, disposed)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.usefixtures("patient")
def test_soak() -> None:
    """20,000 short runs and 2,000 tasks in one executor: host and warden do not grow."""
    runs, tasks, step = 20_000, 2_000, 500
    arguments = {"runs": runs, "tasks": tasks, "step": step, "lanes": 4}
    with Watch("crowds:soak", arguments) as watch:
        sizes: list[tuple[int, int]] = []
        seconds = 0.0
        for _ in range((runs + tasks) // step):
            seconds += watch.report("step", timeout=100)["seconds"]
            watch.wait_keepers_gone(timeout=5)
            (warden,) = watch.wardens()
            sizes.append((rss_bytes(watch.driver), rss_bytes(warden.pid)))
            watch.go()
        disposed = watch.report("disposed")
        assert disposed["told"] == tasks
        assert disposed["known"] == 1_000
        warm = 4  # steps
        after_runs = runs // step - 1
        for which, name, bound in ((0, "host", 1 << 20), (1, "warden", 1 << 18)):
            grown = sizes[after_runs][which] - sizes[warm][which]
            by_tasks = sizes[-1][which] - sizes[after_runs][which]
            print(
                f"{name}: {sizes[warm][which]} bytes when warm, {grown:+} in {runs - warm * step} runs, "
                f"{by_tasks:+} in {tasks} tasks"
            )
            assert grown < bound
            assert by_tasks < bound + (4 << 20 if which == 0 else 0)  # 1,000 finished tasks are remembered
        print(f"{(runs + tasks) / seconds:.0f} commands a second")
        expect_clean(watch, disposed)
