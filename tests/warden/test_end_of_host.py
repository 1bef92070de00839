"""How a session ends: good-bye, end of file, lease, death of the host."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from typing import TYPE_CHECKING

import pytest

from tests.warden import frames
from tests.warden.builds import released
from tests.warden.harness import Warden
from tests.warden.procs import below, poll, still_alive, timed

if TYPE_CHECKING:
    from tests.warden.conftest import Starter

STUBBORN = "trap '' TERM INT HUP; setsid sleep 20 & (trap '' TERM; env -i sleep 20) & echo up; wait; sleep 20"


def stubborn(warden: Warden) -> frames.Task:
    task = warden.start(STUBBORN)
    warden.wait(lambda: task.stdout == b"up\n", "up")
    return task


# --- SHUTDOWN


def test_shutdown_of_an_idle_warden(warden: Warden) -> None:
    warden.write(frames.shutdown(3000))
    with timed(0, 1.0 * warden.patience, "the good-bye"):
        warden.wait_eof()
    assert warden.bye


def test_shutdown_tells_every_end_before_the_good_bye(warden: Warden) -> None:
    running = [warden.start("sleep 20"), stubborn(warden)]
    with_leftovers = warden.start("sleep 20 & exit 3")
    warden.reach(with_leftovers, "ended")
    assembling = warden.expect(90)
    warden.write(frames.start(90, "tru", size=4))
    with timed(0.3, 0.3 + 1.2 * warden.patience, "a shutdown with a grace of 300 ms"):
        warden.write(frames.shutdown(300))
        warden.wait_eof(seconds=5)
    assert warden.bye
    assert all(task.over for task in (*running, with_leftovers, assembling))
    assert [task.exit.value for task in running if task.exit] == [signal.SIGTERM, signal.SIGKILL]
    assert assembling.error is not None
    assert assembling.error.code == frames.REFUSED


def test_shutdown_lets_traps_run(warden: Warden) -> None:
    task = warden.start("trap 'echo bye; exit 5' TERM; echo up; while :; do sleep 0.01; done")
    warden.wait(lambda: task.stdout == b"up\n", "up")
    warden.write(frames.shutdown(5000))
    warden.wait_eof()
    assert (task.stdout, task.code, warden.bye) == (b"up\nbye\n", 5, True)


def test_a_second_shutdown_may_shorten_the_grace(warden: Warden) -> None:
    stubborn(warden)
    warden.write(frames.shutdown(60_000))
    warden.barrier()
    with timed(0, 1.2 * warden.patience, "the shutdown"):
        warden.write(frames.shutdown(0) + frames.shutdown(60_000))
        warden.wait_eof(seconds=5)
    assert warden.bye


def test_nothing_new_during_a_shutdown(warden: Warden) -> None:
    stubborn(warden)
    warden.write(frames.shutdown(300))
    refused = [warden.start("echo no"), warden.fetch("/etc/passwd")]
    warden.barrier()
    warden.wait_eof(seconds=5)
    assert [task.error.code for task in refused if task.error] == [frames.REFUSED] * 2


def test_shutdown_of_a_host_that_does_not_read(warden: Warden) -> None:
    task = warden.start("yes | head -c 5000000; exec sleep 20")
    poll(lambda: len(below(warden.pid)) >= 2, 5, "it runs")
    tree = below(warden.pid)
    warden.write(frames.shutdown(0))
    poll(lambda: not still_alive(tree), 1.0 * warden.patience, "the tree, without a reader")
    warden.wait_eof(seconds=5)
    assert warden.bye
    assert task.over


# --- end of file


def test_end_of_input_kills_without_grace(warden: Warden) -> None:
    stubborn(warden)
    leftovers = warden.start("trap '' TERM; sleep 20 & exit")
    warden.reach(leftovers, "ended")
    tree = below(warden.pid)
    assert len(tree) >= 6
    with timed(0, 1.0 * warden.patience, "everything"):
        warden.end_of_input()
        warden.wait_eof()
        poll(lambda: not still_alive(tree), 0.1, "all dead at the end of the stream")
    assert not warden.bye


@pytest.mark.parametrize("pipes", [False, True])
def test_hanging_up(start: Starter, pipes: bool) -> None:
    with start(pipes=pipes) as warden:
        warden.hello()
        stubborn(warden)
        warden.start("yes")  # unread output must not keep it
        tree = below(warden.pid)
        began = time.monotonic()
        warden.hang_up()
        poll(lambda: not still_alive(tree), 1.0 * warden.patience, "the trees")
        warden.process.wait(1.0 * warden.patience)
        assert time.monotonic() - began < 1.0 * warden.patience


def test_only_the_output_is_closed(start: Starter) -> None:
    with start(pipes=True) as warden:
        warden.hello()
        stubborn(warden)
        warden.close_output()
        warden.write(frames.ping(1))  # the answer cannot be written
        warden.process.wait(2 * warden.patience)


def test_hanging_up_with_half_of_a_command_sent(warden: Warden) -> None:
    warden.write(frames.start(1, b"x" * 1000, size=1 << 20, stdin_size=1 << 20))
    warden.write(frames.frame(frames.STDIN, bytes(500_000), task=1) + b"\x00\x00\x10\x00\x03")


def test_hanging_up_before_hello(start: Starter) -> None:
    with start():
        pass


# --- the lease


def test_the_lease_ends_the_session() -> None:
    with Warden(released()) as warden:
        warden.hello(lease_ms=1200)
        stubborn(warden)
        tree = below(warden.pid)
        warden.barrier()
        with timed(1.15, 2.0, "the lease"):
            warden.wait_eof(seconds=5)
        poll(lambda: not still_alive(tree), 0.2, "all dead")
        assert not warden.bye


def test_any_frame_renews_the_lease() -> None:
    with Warden(released()) as warden:
        warden.hello(lease_ms=1000)
        task = warden.start("sleep 1.4")
        for number in range(8):
            warden.write(frames.ping(number) if number % 2 else frames.credit(task.id, 1, 1))
            warden.listen(0.2)
        assert task.code == 0
        assert not warden.eof


def test_without_a_lease_silence_is_no_end(warden: Warden) -> None:
    task = warden.start("sleep 0.8; echo on")
    assert warden.listen(0.7)
    assert warden.finish(task).stdout == b"on\n"


# --- the host's pidfd

HOST = """
import os, signal, socket, subprocess, sys
program, fd = sys.argv[1], int(sys.argv[2])
pidfd = os.pidfd_open(os.getpid())
child = subprocess.Popen([program, "--host-pidfd", str(pidfd)], stdin=fd, stdout=fd, pass_fds=[pidfd])
print(child.pid, flush=True)
signal.pause()
"""


def test_the_death_of_the_host_is_seen_though_the_stream_stays_open(start: Starter) -> None:
    # As when a forked child of the host holds the stream. Here the test itself holds both ends of it.
    with start() as template:
        program, environment = template.build.program, template.build.environment(template.scratch / "logs")
        mark = template.mark
        ours, theirs = socket.socketpair()
        with ours, theirs:
            host = subprocess.Popen(
                [sys.executable, "-I", "-S", "-c", HOST, program, str(theirs.fileno())],
                stdout=subprocess.PIPE,
                pass_fds=[theirs.fileno()],
                env={
                    **os.environ,
                    **environment,
                    "CORRAL_TEST_MARK": mark,
                    "TMPDIR": str(template.scratch / "tmp"),
                },
            )
            assert host.stdout is not None
            with host, host.stdout:
                try:
                    warden = int(host.stdout.readline())
                    ours.sendall(frames.hello() + frames.start(1, STUBBORN))
                    parser, seen = frames.Parser(), b""
                    ours.settimeout(5)
                    while b"up\n" not in seen:
                        seen += b"".join(frame.payload for frame in parser.feed(ours.recv(65536)))
                    tree = below(warden)
                    assert len(tree) >= 4
                finally:
                    host.kill()
                with timed(0, 1.0 * template.patience, "everything after the host's death"):
                    poll(lambda: not still_alive(tree), 5, "the trees")
                    poll(lambda: not below(warden) and not still_alive(tree), 5, "the keepers")


def test_a_host_that_is_dead_at_once(start: Starter) -> None:
    gone = subprocess.Popen(["true"])
    pidfd = os.pidfd_open(gone.pid)
    gone.wait()
    try:
        with start(arguments=["--host-pidfd", str(pidfd)], pass_fds=[pidfd]) as warden:
            warden.wait_eof()
            warden.process.wait(2)
    finally:
        os.close(pidfd)


# --- the warden itself dies


def test_keepers_kill_their_trees_when_the_dispatcher_is_killed() -> None:
    with Warden(released(), status=-signal.SIGKILL) as warden:
        warden.hello()
        for _ in range(3):
            stubborn(warden)
        leftovers = warden.start("trap '' TERM; setsid sleep 20 & exit")
        warden.reach(leftovers, "ended")
        tree = below(warden.pid)
        assert len(tree) >= 14
        os.kill(warden.pid, signal.SIGKILL)
        with timed(0, 1.0, "the trees of a killed dispatcher"):
            poll(lambda: not still_alive(tree), 5, "trees and keepers are gone")


def test_a_dispatcher_that_is_told_to_end_by_a_signal() -> None:
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        with Warden(released(), status=-number) as warden:
            warden.hello()
            stubborn(warden)
            tree = below(warden.pid)
            os.kill(warden.pid, number)
            poll(lambda tree=tree: not still_alive(tree), 1, "trees and keepers are gone")
