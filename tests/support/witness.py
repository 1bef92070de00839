"""Starts a driver under watch and counts what is left of its processes, without asking the code under test.

    with Watch("scenarios:end", {"command": ...}, line=lifeline, account=account) as watch:
        watch.report("running")
        watch.go()
        ended = watch.report("ended")
        assert watch.survivors() == []

Three witnesses agree or the test fails: the parents of all processes walked down from a child subreaper
(supervisor.py), the end-of-file of a lifeline that every workload process holds, and, for root, a cgroup. A
survivor is every living process under watch that is neither the driver nor a warden. Leaving the context
kills everything.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import platform
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from tests.support.cgroup import Cgroup
from tests.support.processes import Process, descendants, look

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tests.support.accounts import Account
    from tests.support.lifeline import Lifeline

__all__ = ["Report", "Watch"]

HERE = Path(__file__).parent
LIMIT_SECONDS = 55.0
"""After this long the supervisor ends everything by itself, the test runner being dead or stuck."""
_numbers = itertools.count()


class Report(dict[str, Any]):
    """The fields of one report of the driver."""


class Watch:
    """One driver and all that descends from it; a context manager, to be entered once."""

    def __init__(
        self,
        scenario: str,
        arguments: Mapping[str, Any],
        *,
        account: Account | None = None,
        line: Lifeline | None = None,
        env: Mapping[str, str] | None = None,
    ) -> None:
        self._scenario = scenario
        self._arguments = arguments
        self._account = account
        self._line = line
        self._env = dict(env or {})
        self._buffers = {"control": b"", "driver": b""}

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as stack:
            self._start(stack)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *exc: object) -> None:
        """Ends everything under watch, whatever state it is in."""
        self._stack.close()

    def _start(self, stack: contextlib.ExitStack) -> None:
        self._home = Path(tempfile.mkdtemp(prefix="corral-watch-"))
        stack.callback(shutil.rmtree, self._home, ignore_errors=True)
        self._home.chmod(0o755)
        work = self._home / "work"
        work.mkdir()
        env = {**os.environ, "HOME": str(work), "TMPDIR": str(work), **self._env}
        identity: list[str] = []
        if self._account is not None and self._account.uid is not None and self._account.gid is not None:
            os.chown(work, self._account.uid, self._account.gid)
            identity = [str(self._account.uid), str(self._account.gid)]
            env["CORRAL_WARDEN"] = str(self._copy_of_the_warden())
        stderr = stack.enter_context((self._home / "stderr").open("w+b"))
        self._cgroup = Cgroup.make(f"{os.getpid()}-{next(_numbers)}")
        procs = -1
        if self._cgroup is not None:
            stack.callback(self._cgroup.remove)
            procs = self._cgroup.procs_fd()
            stack.callback(os.close, procs)
        self._control, theirs = socket.socketpair()
        stack.enter_context(self._control)
        program = [str(HERE / "driver.py"), self._scenario, json.dumps(self._arguments), *identity]
        with theirs:
            self._supervisor = subprocess.Popen(
                [
                    *(sys.executable, "-I", "-S", str(HERE / "supervisor.py")),
                    *(str(theirs.fileno()), str(procs), str(LIMIT_SECONDS)),
                    *(sys.executable, "-W", "always", *program),
                ],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                pass_fds=[theirs.fileno()] + ([procs] if procs >= 0 else []),
                cwd=work,
                env=env,
                bufsize=0,
            )
        stack.enter_context(self._supervisor)
        stack.callback(self._end)
        self.driver = int(self._line_of("control", 10).split()[1])

    def _copy_of_the_warden(self) -> Path:
        """For a user who may not be able to reach the package."""
        # The rest of this module works without what it watches.
        from corral_backends.warden.binary import find_warden  # noqa: PLC0415

        copy = self._home / "corral-warden"
        shutil.copyfile(find_warden(platform.machine()), copy)
        copy.chmod(0o755)
        return copy

    def _end(self) -> None:
        if self._line is not None:
            self._line.hang_up()
        self._control.shutdown(socket.SHUT_WR)
        try:
            self._supervisor.wait(15)
        except subprocess.TimeoutExpired:
            self._supervisor.kill()
            raise

    # --- the driver

    def _line_of(self, source: str, timeout: float) -> str:
        stdout = self._supervisor.stdout
        assert stdout is not None
        fd = self._control.fileno() if source == "control" else stdout.fileno()
        deadline = time.monotonic() + timeout
        while b"\n" not in self._buffers[source]:
            readable, _, _ = select.select([fd], [], [], max(0.0, deadline - time.monotonic()))
            if not readable:
                msg = f"no word from the {source} within {timeout} s\n{self.describe()}"
                raise AssertionError(msg)
            data = os.read(fd, 65536)
            if not data:
                msg = f"the {source} ended without a further word\n{self.describe()}"
                raise AssertionError(msg)
            self._buffers[source] += data
        line, _, self._buffers[source] = self._buffers[source].partition(b"\n")
        return line.decode()

    def report(self, name: str, *, timeout: float = 15) -> Report:
        """The driver's next report, which must be called `name`."""
        report = Report(json.loads(self._line_of("driver", timeout)))
        assert report.pop("report") == name, f"expected the report {name!r}: {report}\n{self.describe()}"
        return report

    def go(self, word: str = "go") -> None:
        """Answers the report that the driver waits with."""
        stdin = self._supervisor.stdin
        assert stdin is not None
        stdin.write(word.encode() + b"\n")

    def finish(self) -> None:
        """Waits for the driver's own end: status 0, and nothing on standard error."""
        status = self._line_of("control", 10)
        assert status == "exit 0", f"the driver ended with wait status {status}\n{self.describe()}"
        assert self.stderr() == ""

    def kill_driver(self) -> None:
        """SIGKILL to the host process, and waits until it is dead."""
        os.kill(self.driver, signal.SIGKILL)
        assert self._line_of("control", 5) == f"exit {signal.SIGKILL.value}"

    def freeze_driver(self, seconds: float) -> None:
        """Stops the host process for a while, as a debugger does, or a laptop that is closed."""
        os.kill(self.driver, signal.SIGSTOP)
        time.sleep(seconds)
        os.kill(self.driver, signal.SIGCONT)

    def interrupt(self) -> None:
        """SIGINT to the host process, as Ctrl-C sends it."""
        os.kill(self.driver, signal.SIGINT)

    def wait_interrupted(self, *, timeout: float) -> None:
        """Waits until the driver has ended by SIGINT, which is how Python ends on a KeyboardInterrupt."""
        assert self._line_of("control", timeout) == f"exit {signal.SIGINT.value}", self.describe()

    # --- the witnesses

    def processes(self) -> list[Process]:
        """All that live under watch but the driver: wardens, and whatever else."""
        found = {process.pid: process for process in descendants(self._supervisor.pid)}
        if self._cgroup is not None:
            for pid in self._cgroup.pids():
                if pid not in found and (process := look(pid)) is not None:
                    found[pid] = process
        own = (self.driver, self._supervisor.pid)
        return [process for pid, process in sorted(found.items()) if pid not in own and not process.zombie]

    def survivors(self) -> list[Process]:
        """What lives under watch and is neither driver nor warden."""
        return [process for process in self.processes() if not process.warden]

    def wardens(self) -> list[Process]:
        return [process for process in self.processes() if process.warden]

    def zombies(self) -> list[Process]:
        """The dead whom the driver or a warden has not reaped; the supervisor is about to reap its own."""
        return [p for p in descendants(self._supervisor.pid) if p.zombie and p.ppid != self._supervisor.pid]

    def assert_no_survivors(self) -> None:
        """All witnesses, at once and without patience."""
        held = self._line is not None and self._line.held()
        found = self.survivors()
        listed = "\n".join(str(process) for process in found)
        assert not found, f"{len(found)} survivors:\n{listed}"
        assert not held, f"survivors that no list shows: the lifeline is still held\n{self.describe()}"

    def wait_gone(self, *, timeout: float) -> float:
        """Waits until neither survivors nor wardens are left; returns the seconds it took, or fails."""
        started = time.monotonic()
        while (self._line is not None and self._line.held()) or self.processes():
            waited = time.monotonic() - started
            assert waited < timeout, f"still there after {waited:.2f} s:\n{self.describe()}"
            time.sleep(0.002)
        return time.monotonic() - started

    def wait_keepers_gone(self, *, timeout: float) -> None:
        """Waits until of the wardens only one is left: the dispatcher."""
        deadline = time.monotonic() + timeout
        while len(self.wardens()) > 1:
            assert time.monotonic() < deadline, f"keepers without a tree:\n{self.describe()}"
            time.sleep(0.01)

    # --- for messages and the end

    def stderr(self) -> str:
        return (self._home / "stderr").read_text(errors="replace")

    def describe(self) -> str:
        listed = "\n".join(str(process) for process in descendants(self._supervisor.pid))
        return f"processes under watch:\n{listed or 'none'}\nstandard error of the driver:\n{self.stderr()}"
