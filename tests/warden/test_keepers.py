"""Commands that turn against their keeper: killed, stopped, or out of its reach."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from typing import TYPE_CHECKING

import pytest

from tests.warden import frames
from tests.warden.builds import released
from tests.warden.frames import EXITED, LOST
from tests.warden.harness import Warden
from tests.warden.procs import below, ordinary, poll, stat, still_alive, timed

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.warden.frames import Task

HIDDEN = "trap '' TERM HUP; (setsid sleep 20 &); env -i setsid sleep 20 & sleep 0.05; "
"""Processes that only a subreaper finds again."""


def lost(task: Task) -> bool:
    return task.exit is not None and task.exit.kind == LOST and task.keeper_lost and task.survivors == 0


@pytest.fixture
def bystander(warden: Warden) -> Task:
    """Another command with a leftover, which must not notice anything."""
    task = warden.start("setsid sleep 20 & echo up; read -r -t 20 <> <(:)")
    warden.wait(lambda: task.stdout == b"up\n", "up")
    return task


def assert_unharmed(warden: Warden, bystander: Task) -> None:
    tree = [process for process in below(warden.pid) if process.alive]
    assert len(tree) >= 3, "keeper, leader and leftover of the other command"
    assert bystander.state == "started"
    warden.write(frames.kill(bystander.id, 5000))
    warden.finish(bystander)
    assert not bystander.keeper_lost
    assert bystander.exit is not None
    assert bystander.exit.value == signal.SIGTERM
    poll(lambda: not below(warden.pid), 2, "nothing left, no zombie either")
    assert warden.run("echo on").stdout == b"on\n"


def test_a_keeper_that_is_killed(warden: Warden, bystander: Task) -> None:
    task = warden.start(HIDDEN + "echo before; sleep 0.1; kill -9 $PPID; sleep 20")
    with timed(0, 1.5 * warden.patience, "the end of a command without a keeper"):
        warden.finish(task)
    assert lost(task)
    assert task.stdout == b"before\n"
    assert_unharmed(warden, bystander)


def test_a_keeper_that_is_killed_at_once(warden: Warden, bystander: Task) -> None:
    tasks = [warden.start("kill -9 $PPID; sleep 20 & wait") for _ in range(15)]
    for task in tasks:
        assert lost(warden.finish(task))
    assert_unharmed(warden, bystander)


@pytest.mark.parametrize("number", ["STOP", "TERM", "INT", "SEGV", "USR1", "HUP", "TSTP"])
def test_a_keeper_that_gets_another_signal(warden: Warden, bystander: Task, number: str) -> None:
    task = warden.start(f"{HIDDEN} kill -{number} $PPID; sleep 20")
    warden.finish(task)
    assert lost(task)
    assert_unharmed(warden, bystander)


def test_a_keeper_that_is_continued_after_all(warden: Warden) -> None:
    # A stopped keeper is seen and killed, whether or not somebody continues it.
    tasks = [warden.start("kill -STOP $PPID; kill -CONT $PPID; exit 3") for _ in range(10)]
    for task in tasks:
        warden.finish(task)
        assert lost(task) or task.code == 3
    assert warden.run("echo on").stdout == b"on\n"


def test_a_keeper_that_is_stopped_and_then_told_to_kill(warden: Warden, bystander: Task) -> None:
    task = warden.start(HIDDEN + "echo up; kill -STOP $PPID; sleep 20")
    warden.reach(task, "started")
    with timed(0, 0.3 + 0.9 * warden.patience + 0.3, "GONE of a command that has stopped its keeper"):
        warden.write(frames.kill(task.id, 300))
        warden.finish(task)
    assert task.keeper_lost or task.exit is not None
    assert task.survivors == 0
    assert_unharmed(warden, bystander)


def test_a_keeper_that_is_stopped_between_exit_and_end(warden: Warden) -> None:
    task = warden.start("k=$PPID; (sleep 0.02; kill -STOP $k; sleep 20) & exit 6")
    with timed(0, 1.5 * warden.patience, "the end"):
        warden.finish(task)
    assert task.exit is not None
    assert (task.exit.kind, task.exit.value) == (EXITED, 6), "an exit that was seen stays what it was"
    assert task.keeper_lost
    assert task.survivors == 0


@pytest.mark.parametrize("number", ["STOP", "KILL"])
def test_a_keeper_that_dies_while_only_leftovers_live(warden: Warden, number: str) -> None:
    task = warden.start(
        f"k=$PPID; trap '' TERM; (sleep 0.3; kill -{number} $k; sleep 20) & setsid sleep 20 & exit 6"
    )
    warden.reach(task, "ended")
    assert task.leftovers
    assert task.code == 6
    warden.finish(task)
    assert task.keeper_lost
    assert task.survivors == 0
    poll(lambda: not below(warden.pid), 1, "the leftovers")


@pytest.fixture
def freezer(tmp_path: Path) -> Iterator[Path]:
    """A cgroup of version 2, which can freeze what is in it without stopping it."""
    root = tmp_path / "cgroup2"
    root.mkdir()
    if (
        os.geteuid() != 0
        or subprocess.run(["mount", "-t", "cgroup2", "none", root], capture_output=True).returncode
    ):
        pytest.skip("needs root and cgroup v2")
    group = root / f"corral-test-{os.getpid()}"
    try:
        group.mkdir()
        yield group
        poll(lambda: not (group / "cgroup.procs").read_text(), 2, "the cgroup is empty")
        group.rmdir()
    finally:
        subprocess.run(["umount", "-l", root], check=True)


def test_a_silent_keeper_is_not_waited_for(warden: Warden, freezer: Path) -> None:
    """One that does nothing, though nobody has stopped it."""
    task = warden.start(HIDDEN + "echo up; sleep 20")
    warden.wait(lambda: task.stdout == b"up\n", "up")
    (freezer / "cgroup.procs").write_text(str(warden.keeper(task)))
    (freezer / "cgroup.freeze").write_text("1")
    poll(lambda: "frozen 1" in (freezer / "cgroup.events").read_text(), 5, "the keeper is frozen")
    with timed(0.2 + 0.4, 0.2 + 0.9 * warden.patience, "GONE of a silent keeper"):
        warden.write(frames.kill(task.id, 200))
        warden.finish(task)
    assert lost(task)


def test_everybody_kills_their_keeper_while_the_session_ends(warden: Warden) -> None:
    for number in range(10):
        task = warden.start(
            f"{HIDDEN} sleep 0.0{number}; kill -{('STOP', 'KILL')[number % 2]} $PPID; sleep 20"
        )
        warden.reach(task, "started")


def test_keepers_that_are_killed_during_a_shutdown(warden: Warden) -> None:
    tasks = [
        warden.start("k=$PPID; trap 'kill -9 $k; sleep 20' TERM; echo up; sleep 20 & wait") for _ in range(5)
    ]
    for task in tasks:
        warden.wait(lambda task=task: task.stdout == b"up\n", "up")
    warden.write(frames.shutdown(2000))
    with timed(0, 2.0 * warden.patience, "the good-bye"):
        warden.wait_eof(seconds=4)
    assert warden.bye
    assert all(lost(task) for task in tasks)


# --- out of reach

BECOME_ROOT = """\
#include <unistd.h>
int main(void) { return setuid(0) || write(1, "root\\n", 5) != 5 || sleep(6); }
"""


@pytest.fixture
def become_root(tmp_path: Path) -> Path:
    """A program that runs as root for 6 s, whoever starts it. There, nothing of the user's can reach it."""
    if os.geteuid() != 0 or shutil.which("cc") is None:
        pytest.skip("needs root and a C compiler")
    tmp_path.chmod(0o755)
    for parent in tmp_path.parents[:2]:
        parent.chmod(0o755)
    (tmp_path / "become-root.c").write_text(BECOME_ROOT)
    program = tmp_path / "become-root"
    subprocess.run(["cc", "-o", program, tmp_path / "become-root.c"], check=True, timeout=30)
    program.chmod(0o4755)
    return program


@pytest.mark.parametrize("leader", [True, False])
def test_what_took_on_other_credentials_survives_and_is_counted(become_root: Path, leader: bool) -> None:
    command = f"exec {become_root}" if leader else f"{become_root} & sleep 20 & wait"
    with Warden(released(), account=ordinary()) as warden:
        warden.hello()
        task = warden.start(command)
        warden.reach(task, "started")
        if not warden.stdout_within(task, b"root\n", 2):
            pytest.skip("set-user-ID programs have no effect here")
        tree = [process for process in below(warden.pid) if stat(process.pid)]
        with timed(0.2, 0.2 + 0.95, "the honest answer to a KILL that cannot succeed"):
            warden.write(frames.kill(task.id, 200))
            warden.finish(task)
        assert task.survivors == 1
        assert task.leftovers
        assert task.exit is not None
        assert task.exit.kind == (LOST if leader else frames.SIGNALLED)
        assert warden.run("echo on").stdout == b"on\n"
        left = [process for process in still_alive(tree) if b"become-root" in cmdline(process.pid)]
        assert len(left) == 1
        os.kill(left[0].pid, signal.SIGKILL)
        poll(lambda: not still_alive(left), 2, "the test's own kill")


def cmdline(pid: int) -> bytes:
    with open(f"/proc/{pid}/cmdline", "rb") as file:
        return file.read()
