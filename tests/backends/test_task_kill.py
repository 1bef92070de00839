"""kill() of a background task: its whole tree, its bounds, its answers. For the local place."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from corral import AbortController, EndReason, TaskStatus, WorkdirError
from tests.support.accounts import ACCOUNTS
from tests.support.aio import executor, run, run_command
from tests.support.lifeline import Lifeline
from tests.support.tasks import Told, read_until, start
from tests.support.witness import Watch

if TYPE_CHECKING:
    from collections.abc import Iterator

    from corral import BashExecutor

pytestmark = pytest.mark.backend("local")

GRACE = 0.3  # seconds; what tests.support.aio.executor configures
DEAF = "trap '' TERM INT HUP\n"


@pytest.fixture
def line() -> Iterator[Lifeline]:
    with Lifeline() as made:
        yield made


def test_kill(line: Lifeline) -> None:
    """The first call returns True and ends the tree by TERM; others return False, now and later."""

    async def scenario() -> None:
        async with executor() as made:
            told = Told(made)
            task = start(
                made,
                line.prologue + "setsid -f sleep 20\nenv -i setsid -f sleep 20\n(n sleep 20 &)\n"
                "trap 'echo bye; exit 5' TERM\necho up\nwhile :; do sleep 0.01; done",
            )
            await read_until(made, task, b"up")
            assert [made.kill(task.id) for _ in range(3)] == [True, False, False]
            assert task.status is TaskStatus.RUNNING  # until it is dead
            await told.hears(task)
            assert not line.held()
            assert (task.status, task.reason) == (TaskStatus.FINISHED, EndReason.KILLED)
            assert (task.exit_code, task.signal, told.of(task).stdout) == (5, None, b"bye\n")
            assert made.kill(task.id) is False

    run(scenario())


def test_kill_by_term_then_kill(line: Lifeline) -> None:
    """What does not heed TERM gets KILL after the grace; the listener hears of it when all are dead."""

    async def scenario() -> None:
        async with executor() as made:
            told = Told(made)
            task = start(made, line.prologue + DEAF + "n sleep 20 &\necho up\nwhile :; do sleep 20; done")
            await read_until(made, task, b"up")
            began = time.monotonic()
            assert made.kill(task.id)
            await asyncio.sleep(GRACE / 2)
            assert line.held()
            await told.hears(task)
            assert GRACE <= time.monotonic() - began < GRACE + 1
            assert not line.held()
            assert (task.exit_code, task.signal, task.reason) == (None, "SIGKILL", EndReason.KILLED)

    run(scenario())


def test_kill_of_a_finished_task_leaves_its_leftovers(line: Lifeline) -> None:
    """False, and what the task left behind lives on until dispose."""

    async def scenario() -> None:
        async with executor() as made:
            told = Told(made)
            task = start(made, line.prologue + "n sleep 20 &\nexit 3")
            await told.hears(task)
            assert (task.exit_code, task.reason) == (3, EndReason.EXITED)
            assert made.kill(task.id) is False
            await asyncio.sleep(0.1)
            assert line.held()
        assert not line.held()

    run(scenario())


def test_kill_while_being_aborted_is_false(line: Lifeline) -> None:
    """The first cause wins, in both orders."""

    async def one(made: BashExecutor, told: Told, *, abort_first: bool) -> None:
        controller = AbortController()
        task = start(made, line.prologue + DEAF + "echo up\nn sleep 20", signal=controller.signal)
        await read_until(made, task, b"up")
        if abort_first:
            controller.abort()
        assert made.kill(task.id) is not abort_first
        controller.abort()
        await told.hears(task)
        assert told.of(task).reason is (EndReason.ABORTED if abort_first else EndReason.KILLED)

    async def scenario() -> None:
        async with executor(kill_grace_ms=50) as made:
            told = Told(made)
            await one(made, told, abort_first=True)
            await one(made, told, abort_first=False)

    run(scenario())


@pytest.mark.parametrize("delay_ms", [0, 0.5, 1, 2, 4, 8])
def test_kill_right_after_start(delay_ms: float, line: Lifeline) -> None:
    """From before the leader runs on: True, KILLED, told once, and nothing stays alive."""

    async def scenario() -> None:
        async with executor() as made:
            await run_command(made, "true")
            told = Told(made)
            tasks = []
            for _ in range(8):
                task = start(made, line.prologue + "setsid -f sleep 20\nsleep 20")
                tasks.append(task)
                deadline = time.perf_counter() + delay_ms / 1000
                while time.perf_counter() < deadline:
                    await asyncio.sleep(0)
                assert made.kill(task.id) is True
            await told.hears(*tasks)
            assert not line.held()
            assert len(told.notes) == len(tasks)
            for task in tasks:
                assert task.reason is EndReason.KILLED
                assert (task.status is TaskStatus.FINISHED) is (task.started_at is not None)

    run(scenario())


def test_kill_that_crosses_the_end(tmp_path: Path) -> None:
    """A kill that comes as the launch fails, or as the leader exits, hides neither error nor status."""

    async def scenario() -> None:
        async with executor() as made:
            await run_command(made, "true")
            told = Told(made)
            for number in range(150):
                failing = start(made, "true", workdir=tmp_path / "missing")
                exiting = start(made, "exit 3")
                await asyncio.sleep(number % 6 * 0.0005)
                killed = [made.kill(task.id) for task in (failing, exiting)]
                await told.hears(failing, exiting)
                assert isinstance(failing.error, WorkdirError)
                assert failing.reason is (EndReason.KILLED if killed[0] else None)
                assert exiting.error is None
                assert exiting.reason is (EndReason.KILLED if killed[1] else EndReason.EXITED)
                assert (exiting.exit_code, exiting.signal) in [(3, None), (None, "SIGTERM")]
            assert len(told.notes) == 300

    run(scenario())


def test_kill_while_its_text_is_on_the_way() -> None:
    """A command of 30 MB that is killed before it has arrived."""

    async def scenario() -> None:
        async with executor() as made:
            await run_command(made, "true")
            told = Told(made)
            task = start(made, "sleep 20 # " + "x" * 30_000_000)
            assert made.kill(task.id) is True
            await told.hears(task, timeout=10)
            assert task.reason is EndReason.KILLED
            assert (await run_command(made, "echo next")).stdout.data == b"next\n"

    run(scenario())


SETUID = """\
#include <stdio.h>
#include <unistd.h>
int main(void) { if (setuid(0)) return 1; puts("up"); fflush(stdout); alarm(15); for (;;) pause(); }
"""


@pytest.fixture
def becomes_root() -> Iterator[str]:
    """A setuid program that anybody may run, prints "up", and stays."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if os.geteuid() != 0 or compiler is None:
        pytest.skip("needs root and a C compiler")
    with tempfile.TemporaryDirectory(prefix="corral-setuid-") as name:
        directory = Path(name)
        directory.chmod(0o755)
        (directory / "up.c").write_text(SETUID)
        subprocess.run([compiler, "-o", directory / "up", directory / "up.c"], check=True)
        (directory / "up").chmod(0o4755)
        yield str(directory / "up")


@pytest.mark.parametrize("command", ["{} & wait", "exec {}"], ids=["child", "leader"])
def test_kill_of_what_took_on_other_credentials(command: str, becomes_root: str) -> None:
    """The stated limit, as with sudo: a process stays, but the kill is bounded and harms no other command."""
    (user,) = (account for account in ACCOUNTS if account.uid)
    commands = ["echo other; sleep 20", command.format(becomes_root)]
    with Watch("holding:hold", {"commands": commands}, account=user) as watch:
        watch.report("started")
        for _ in range(100):
            watch.go("look")
            tasks = watch.report("seen")["tasks"]
            if tasks[1]["stdout"]:
                break
            time.sleep(0.02)
        assert tasks[1]["stdout"] == "up\n"
        watch.go("kill 1")
        ended = watch.report("ended")
        assert ended["elapsed_ms"] < GRACE * 1000 + 1_000
        other, task = ended["tasks"]
        assert (task["reason"], task["told"]) == ("killed", 1)
        assert (other["status"], other["told"]) == ("running", 0)
        assert any(becomes_root in process.cmdline for process in watch.survivors())


def test_kill_signals_nothing_that_was_reaped() -> None:
    """Where pids are used again at once, no process of anybody else is ever hit."""
    script = Path(__file__).parents[1] / "support" / "reuse.py"
    unshare = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child"]
    if os.geteuid() != 0 or subprocess.run([*unshare, "true"], check=False).returncode != 0:
        pytest.skip("needs to be root, and a pid namespace")
    command = [*unshare, "bash", "-c", '"$@"; exit $?', "-", sys.executable, str(script), "3"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=40)
    assert (done.returncode, done.stderr) == (0, "")
    figures = json.loads(done.stdout)
    assert figures["signalled"] == 0
    assert figures["left"] == 2  # the init and the program itself
    assert figures["tasks"] > 20
    assert figures["reused"] >= 5, figures
