"""A child subreaper in which the tests start their driver: a program that needs only the standard library.

    python -I -S supervisor.py CONTROL_FD CGROUP_FD LIMIT_SECONDS PROGRAM ARGUMENT...

Every descendant of the driver, however it escaped (setsid, double fork, `env -i`), is re-parented to this
process at the latest, so walking the parents down from here finds it. Zombies are reaped all the time: a
fork storm would otherwise use up the pids of the machine.

CONTROL_FD is a socket. Lines that go out: `driver PID`, `exit STATUS` (wait status of the driver), and last
`end KILLED LEFT`. End-of-file on it, or LIMIT_SECONDS, ends everything: SIGKILL to each direct child, reap,
again, until there is no child left or 10 s are over. Killing a direct child hands its children to us, so no
list is needed and no pid is signalled that could have been reaped: this one thread is the only one that
reaps. CGROUP_FD is an open `cgroup.procs` to enter first, or -1.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import socket
import sys
import time

PR_SET_CHILD_SUBREAPER = 36
CLEANUP_SECONDS = 10.0


def become_subreaper() -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")


def start(program: list[str], inherited: list[int]) -> int:
    """Forks and executes `program` with our descriptors 0, 1 and 2. Returns its pid."""
    pid = os.fork()
    if pid:
        return pid
    try:
        for fd in inherited:
            os.close(fd)
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
        os.setsid()
        os.execv(program[0], program)
    finally:
        os._exit(127)


def direct_children() -> list[int]:
    found: list[int] = []
    for thread in os.listdir("/proc/self/task"):
        with open(f"/proc/self/task/{thread}/children", "rb") as file:
            found += [int(pid) for pid in file.read().split()]
    return found


class Supervisor:
    def __init__(self, control: socket.socket, driver: int, limit: float) -> None:
        self.control = control
        self.driver = driver
        self.deadline = time.monotonic() + limit

    def say(self, line: str) -> None:
        try:
            self.control.sendall(line.encode() + b"\n")
        except OSError:
            pass  # the test is gone; its end of file comes next

    def reap(self) -> bool:
        """Reaps all that has ended. False once there are no children at all."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return False
            if pid == 0:
                return True
            if pid == self.driver:
                self.say(f"exit {status}")

    def watch(self, wakeup: int) -> None:
        """Until the test is done with us, or the limit."""
        while (left := self.deadline - time.monotonic()) > 0:
            self.reap()
            readable, _, _ = select.select([self.control.fileno(), wakeup], [], [], left)
            if wakeup in readable:
                os.read(wakeup, 65536)
            if self.control.fileno() in readable and not self.control.recv(4096):
                return

    def clean_up(self) -> tuple[int, int]:
        """Kills everything. Returns how many were killed, and how many could not be."""
        killed: set[int] = set()
        deadline = time.monotonic() + CLEANUP_SECONDS
        while self.reap() and time.monotonic() < deadline:
            for pid in direct_children():
                os.kill(pid, signal.SIGKILL)
                killed.add(pid)
            time.sleep(0.0005)
        return len(killed), len(direct_children())


def main() -> int:
    control_fd, cgroup_fd, limit, *program = sys.argv[1:]
    control = socket.socket(fileno=int(control_fd))
    become_subreaper()
    inherited = [control.fileno()]
    if int(cgroup_fd) >= 0:
        os.write(int(cgroup_fd), b"0")
        os.close(int(cgroup_fd))
    read_end, write_end = os.pipe()
    os.set_blocking(write_end, False)
    os.set_blocking(read_end, False)
    driver = start(program, inherited)
    # After the fork, so that the driver starts with plain signal handling.
    signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    # The driver alone holds these, so that the test sees its end as end of file.
    nowhere = os.open(os.devnull, os.O_RDWR)
    os.dup2(nowhere, 0)
    os.dup2(nowhere, 1)
    supervisor = Supervisor(control, driver, float(limit))
    supervisor.say(f"driver {driver}")
    supervisor.watch(read_end)
    killed, left = supervisor.clean_up()
    supervisor.say(f"end {killed} {left}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
