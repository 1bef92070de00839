"""Time limits and signals. What `corral run` leaves behind is counted through /proc. On the local backend."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import signal
import subprocess
import termios
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.tools.command import CORRAL, LIMIT, Running, corral, install

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.backend("local")

# Traps TERM, with one child in its own session, one that ignores TERM, and one that is stopped.
TRAPPING = """
trap 'echo bye; exit 3' TERM
setsid sleep 600 &
(trap '' TERM; exec sleep 600) &
sleep 600 &
until grep -qx sleep /proc/$!/comm; do sleep 0.01; done
kill -STOP $!
echo ready
while :; do sleep 0.1; done
"""
STUBBORN = "trap '' TERM; setsid sleep 600 & echo ready; while :; do sleep 0.1; done"


def with_grace(folder: Path, seconds: int) -> tuple[str, str]:
    """Options for a local backend that gives a command so long between the TERM and the KILL."""
    file = folder / "corral.yaml"
    file.write_text(f"- name: local\n  config: {{kill_grace_ms: {seconds * 1_000}}}\n")
    return "--config", str(file)


def wait_for_sleepers(running: Running, count: int) -> None:
    """The positive control: they are alive, and this test sees them."""
    deadline = time.monotonic() + 20
    while sum(line.startswith("sleep 600") for line in running.alive().values()) < count:
        assert time.monotonic() < deadline, running.alive()
        time.sleep(0.01)


@pytest.mark.parametrize(
    ("number", "expected"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)]
)
def test_a_signal_ends_the_whole_tree(number: signal.Signals, expected: int) -> None:
    with Running("run", "--", TRAPPING) as running:
        running.read_until(b"ready\n")
        wait_for_sleepers(running, 3)
        running.signal(number)
        status, stdout, stderr = running.finish()
        running.assert_gone()
    assert (status, stdout) == (expected, b"bye\n")
    # Bash says "Terminated" of the sleep that it waits for; that is its own word. Ours there is none.
    assert b"corral" not in stderr
    assert b"Traceback" not in stderr


def test_a_signal_to_corral_alone_does_the_same() -> None:
    with Running("run", "--", TRAPPING) as running:
        running.read_until(b"ready\n")
        wait_for_sleepers(running, 3)
        running.process.send_signal(signal.SIGTERM)
        status, stdout, _ = running.finish()
        running.assert_gone()
    assert (status, stdout) == (143, b"bye\n")


def test_who_ignores_the_first_signal_is_killed_after_the_grace(tmp_path: Path) -> None:
    with Running("run", *with_grace(tmp_path, 2), "--", STUBBORN) as running:
        running.read_until(b"ready\n")
        wait_for_sleepers(running, 1)
        started = time.monotonic()
        running.signal(signal.SIGINT)
        status, _, _ = running.finish()
        took = time.monotonic() - started
        running.assert_gone()
    assert status == 130
    assert took > 1.9


def test_a_second_signal_does_not_wait(tmp_path: Path) -> None:
    with Running("run", *with_grace(tmp_path, 60), "--", STUBBORN) as running:
        running.read_until(b"ready\n")
        wait_for_sleepers(running, 1)
        running.signal(signal.SIGINT)
        time.sleep(0.3)
        assert running.process.poll() is None
        running.signal(signal.SIGINT)
        status, _, stderr = running.finish()
        # The host is gone, which is what the warden kills everything for; it needs a moment.
        deadline = time.monotonic() + 10
        while running.alive() and time.monotonic() < deadline:
            time.sleep(0.01)
        running.assert_gone()
    assert (status, stderr) == (130, b"")


def test_a_signal_ends_a_run_whose_output_nobody_reads() -> None:
    with Running("run", "--", "setsid sleep 600 & yes") as running:
        wait_for_sleepers(running, 1)
        time.sleep(0.5)
        running.signal(signal.SIGINT)
        assert running.process.wait(LIMIT) == 130
        running.assert_gone()


def test_a_signal_while_the_rest_of_the_output_is_waiting_for_its_reader() -> None:
    with Running("run", "--", "head -c 10000000 /dev/zero; touch /proc/self/none; exit 0") as running:
        time.sleep(1.5)
        assert running.process.poll() is None
        running.signal(signal.SIGINT)
        assert running.process.wait(LIMIT) == 130
        running.assert_gone()


@pytest.mark.parametrize("words", [[], ["--json"]])
def test_a_signal_while_the_place_is_made_ready(tmp_path: Path, words: list[str]) -> None:
    source = (Path(__file__).parent / "plain_backend.py").read_text()
    env = install(tmp_path, {"never": "plain_backend:NeverReadyExecutor"}, {"plain_backend": source})
    with Running("run", "--backend", "never", *words, "--timeout", "100ms", "true", env=env) as running:
        assert running.process.stderr is not None
        assert running.process.stderr.readline() == b"opening\n"
        time.sleep(0.5)  # the time limit is the command's, which has not begun
        assert running.process.poll() is None
        running.signal(signal.SIGINT)
        status, stdout, stderr = running.finish()
    assert (status, stderr) == (130, b"")
    if words:
        assert json.loads(stdout)["error"]["type"] == "AbortedBeforeStartError"
    else:
        assert stdout == b""


def test_a_signal_that_was_ignored_from_the_start_stays_ignored() -> None:
    with Running("run", "--", "echo ready; sleep 1; echo end", ignored=[signal.SIGHUP]) as running:
        running.read_until(b"ready\n")
        running.signal(signal.SIGHUP)
        assert running.finish() == (0, b"end\n", b"")


@pytest.fixture
def terminal() -> Iterator[tuple[int, int]]:
    ours, theirs = pty.openpty()
    yield ours, theirs
    os.close(ours)
    os.close(theirs)


def test_ctrl_c_in_a_terminal(terminal: tuple[int, int]) -> None:
    ours, theirs = terminal

    def control() -> None:
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)

    process = subprocess.Popen(
        [*CORRAL, "run", "--", "trap 'echo bye; exit 3' TERM; echo ready; sleep 600 & wait"],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        start_new_session=True,
        preexec_fn=control,
    )
    try:
        shown = b""
        while b"ready" not in shown:
            shown += os.read(ours, 1024)
        os.write(ours, b"\x03")
        assert process.wait(LIMIT) == 130
        while b"bye" not in shown:
            shown += os.read(ours, 1024)
    finally:
        process.kill()
        process.wait(5)
    assert b"Traceback" not in shown


def test_a_time_limit() -> None:
    started = time.monotonic()
    done = corral("run", "--timeout", "1500ms", "--", "echo early; setsid sleep 600 & sleep 600")
    took = time.monotonic() - started
    assert (done.returncode, done.stdout) == (124, b"early\n")
    assert done.stderr == b"corral: timed out after 1500ms\n"
    assert took > 1.5


def test_a_time_limit_lets_a_trap_speak_and_stays_a_time_limit() -> None:
    done = corral("run", "--timeout", "2", "--", "trap 'echo bye; exit 3' TERM; sleep 600 & wait")
    assert (done.returncode, done.stdout) == (124, b"bye\n")
    assert done.stderr == b"corral: timed out after 2s\n"


def test_a_time_limit_for_who_ignores_it(tmp_path: Path) -> None:
    done = corral("run", *with_grace(tmp_path, 1), "--timeout", "1s", "--", STUBBORN)
    assert (done.returncode, done.stdout) == (124, b"ready\n")
    assert done.stderr.endswith(b"corral: timed out after 1s\n")


def test_a_time_limit_that_is_not_reached() -> None:
    done = corral("run", "--timeout", "20s", "--", "exit 4")
    assert (done.returncode, done.stderr) == (4, b"")


def test_a_time_limit_is_for_the_command_and_not_for_its_reader() -> None:
    with Running("run", "--timeout", "3s", "--", "head -c 10000000 /dev/zero") as running:
        time.sleep(4)
        status, stdout, stderr = running.finish()
    assert (status, len(stdout), stderr) == (0, 10_000_000, b"")
