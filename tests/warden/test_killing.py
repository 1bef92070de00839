"""KILL: the tree, the grace, and what is left after the leader's exit."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING

import pytest

from tests.warden import frames
from tests.warden.frames import SIGNALLED
from tests.warden.procs import below, poll, stat, timed

if TYPE_CHECKING:
    from tests.warden.harness import Warden


def test_a_stopped_command_can_be_killed(warden: Warden) -> None:
    task = warden.start("echo $$; kill -STOP $$; echo on; exit 3")
    warden.reach(task, "started")
    poll(lambda: (found := stat(task.pid)) is not None and found.state == "T", 5, "stopped")
    warden.write(frames.kill(task.id, 2000))  # TERM, then CONT so that it is heard
    with timed(0, 1.5 * warden.patience, "the end of a stopped command"):
        warden.finish(task)
    assert task.exit is not None
    assert (task.exit.kind, task.exit.value) == (SIGNALLED, signal.SIGTERM)


def test_term_then_kill(warden: Warden) -> None:
    task = warden.start("trap 'echo trapped; exit 9' TERM; echo up; while :; do sleep 0.01; done")
    warden.wait(lambda: task.stdout == b"up\n", "up")
    warden.write(frames.kill(task.id, 5000))
    warden.finish(task)
    assert (task.stdout, task.code) == (b"up\ntrapped\n", 9)


def test_the_grace_is_kept_and_then_ends(warden: Warden) -> None:
    task = warden.start("trap '' TERM; echo up; sleep 20 & wait; sleep 20")
    warden.wait(lambda: task.stdout == b"up\n", "up")
    with timed(0.28, 0.3 + 0.9 * warden.patience, "the end of a command that ignores TERM"):
        warden.write(frames.kill(task.id, 300))
        warden.finish(task)
    assert task.exit is not None
    assert (task.exit.kind, task.exit.value) == (SIGNALLED, signal.SIGKILL)


def test_a_shorter_grace_wins(warden: Warden) -> None:
    task = warden.start("trap '' TERM; echo up; sleep 20; sleep 20; sleep 20")
    warden.wait(lambda: task.stdout == b"up\n", "up")
    with timed(0.15, 0.9 * warden.patience + 0.2, "the end after the second KILL"):
        warden.write(
            frames.kill(task.id, 60_000) + frames.kill(task.id, 0xFFFFFFFF) + frames.kill(task.id, 200)
        )
        warden.finish(task)


@pytest.mark.parametrize("grace_ms", [0, 100])
def test_the_whole_tree_dies(warden: Warden, grace_ms: int) -> None:
    task = warden.start(
        "trap '' TERM; setsid sleep 20 & (setsid sleep 20 &); env -i setsid sleep 20 & "
        "(sleep 20; sleep 20) | cat & sleep 0.1; echo up; wait"
    )
    warden.wait(lambda: task.stdout == b"up\n", "up")
    assert len(below(warden.pid)) >= 7
    warden.write(frames.kill(task.id, grace_ms))
    warden.finish(task)
    assert task.survivors == 0
    poll(lambda: not below(warden.pid), 1, "the tree, its keeper and every zombie are gone")


def test_kill_reaches_leftovers(warden: Warden) -> None:
    task = warden.start("sleep 20 & setsid sleep 20 & echo hi")
    with timed(0.04, 1.0 * warden.patience, "END in spite of leftovers that hold the pipes"):
        warden.reach(task, "ended")
    assert task.leftovers
    assert (task.stdout, task.code) == (b"hi\n", 0)
    assert not [frame for frame in warden.listen(0.2) if frame.task == task.id], (
        "GONE waits for the leftovers"
    )
    warden.write(frames.kill(task.id, 1000))
    warden.finish(task)
    assert task.survivors == 0


def test_gone_comes_when_the_last_leftover_ends_by_itself(warden: Warden) -> None:
    task = warden.start("sleep 0.4 >/dev/null 2>&1 & echo hi")
    warden.reach(task, "ended")
    assert task.leftovers
    with timed(0.2, 1.5 * warden.patience, "GONE"):
        warden.finish(task)


def test_leftovers_are_neither_blocked_nor_signalled(warden: Warden) -> None:
    done = warden.scratch / "tmp" / "done"
    task = warden.start(f"(sleep 0.2; head -c 3000000 /dev/zero; echo $? > {done}) & exit 0")
    warden.reach(task, "ended")
    assert task.ends is not None
    assert task.ends[0].total == 0
    warden.finish(task)
    assert done.read_text() == "0\n"
    done.unlink()


def test_a_chatty_leftover_does_not_delay_the_end(warden: Warden) -> None:
    with timed(0, 1.0 * warden.patience, "END beside a chatty leftover"):
        task = warden.reach(
            warden.start("(while :; do echo x; sleep 0.01; done) & exit 4", credit=100), "ended"
        )
    assert task.code == 4
    warden.write(frames.kill(task.id, 0))
    warden.finish(task)


def test_kill_in_every_state_sent_at_once(warden: Warden) -> None:
    tasks = [warden.expect(number) for number in range(1, 41)]
    for task in tasks:
        warden.write(frames.start(task.id, "sleep 20") + frames.kill(task.id, task.id % 3 * 20))
    for task in tasks:
        warden.finish(task, seconds=20)
    assert {task.exit.kind for task in tasks if task.exit} == {SIGNALLED}
