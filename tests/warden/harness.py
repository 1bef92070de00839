"""A raw client: starts a warden, speaks frames to it, and sees that nothing of it remains.

Every wait has a limit. The end of a `Warden` closes its stream, which must end everything; what it is checked
against is /proc and the file system.
"""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import signal
import socket
import subprocess
import tempfile
import time
import uuid
from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING, Self

from tests.warden import frames
from tests.warden.builds import Build, for_others
from tests.warden.frames import Frame, Task
from tests.warden.procs import Account, Stat, below, marked, stat, still_alive

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from types import TracebackType

LIMIT = 8.0
"""Seconds for whatever should happen at once."""


# --- the warden


class Warden:
    """A running warden and the host's ends of its stream. Use it with `with`.

    `prefix` is a command line that ends by executing the program it is given, for limits and signal
    settings. `pipes` connects by two pipes in place of a socket pair. `status` is what it must exit with;
    None: anything.
    """

    def __init__(
        self,
        build: Build,
        *,
        prefix: Sequence[str] = (),
        arguments: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
        account: Account | None = None,
        pipes: bool = False,
        pass_fds: Sequence[int] = (),
        status: int | None = 0,
    ) -> None:
        self.build = for_others(build) if account else build
        self.patience = build.patience
        self.scratch = Path(tempfile.mkdtemp(prefix="corral-warden-test-"))
        self.mark = f"mark-{uuid.uuid4().hex}"
        self.ready: frames.Ready | None = None
        self.tasks: dict[int, Task] = {}
        self.pongs: deque[int] = deque()
        self.errors: list[frames.Failure] = []
        self.bye = self.eof = False
        self.keep = 0
        self._status = status
        self._ended = False
        self._parser = frames.Parser()
        (self.scratch / "logs").mkdir()
        (self.scratch / "tmp").mkdir()
        if account:
            for part in (self.scratch, *self.scratch.iterdir()):
                os.chown(part, account.uid, account.gid)
        environment = {
            "PATH": os.environ.get("PATH", "/usr/bin:/bin"),
            "HOME": str(self.scratch),
            "TMPDIR": str(self.scratch / "tmp"),
            "CORRAL_TEST_MARK": self.mark,
            **self.build.environment(self.scratch / "logs"),
            **(env or {}),
        }
        (theirs_in, self._to), (self._from, theirs_out) = _pipes() if pipes else _socketpair()
        self.process = subprocess.Popen(
            [*prefix, str(self.build.program), *arguments],
            stdin=theirs_in,
            stdout=theirs_out,
            stderr=subprocess.DEVNULL,
            cwd=self.scratch,
            env={name: value for name, value in environment.items() if value},
            pass_fds=pass_fds,
            **({"user": account.uid, "group": account.gid, "extra_groups": []} if account else {}),
        )
        for fd in {theirs_in, theirs_out}:
            os.close(fd)
        born = stat(self.process.pid)
        self._born = born.born if born else 0

    @property
    def pid(self) -> int:
        return self.process.pid

    # --- sending

    def write(self, data: bytes, *, seconds: float = LIMIT) -> None:
        """Raw bytes. `BrokenPipeError` when the warden has closed its end."""
        view, deadline = memoryview(data), time.monotonic() + seconds * self.patience
        while view:
            _, writable, _ = select.select([], [self._to], [], max(0.0, deadline - time.monotonic()))
            assert writable, f"the warden does not read: {len(view)} bytes left after {seconds} s"
            view = view[os.write(self._to, view[: 1 << 20]) :]

    def takes(self, data: bytes, seconds: float) -> bool:
        """Whether the warden takes all of `data` within a time, whatever its build. If not, some is lost."""
        try:
            self.write(data, seconds=seconds / self.patience)
        except AssertionError:
            return False
        return True

    def hello(self, **fields: object) -> frames.Ready:
        """HELLO, and wait for READY."""
        self.keep = int(str(fields.get("ring", 64_000)))
        self.write(frames.hello(**fields))  # type: ignore[arg-type]
        self.wait(lambda: self.ready is not None, "READY")
        assert self.ready is not None
        return self.ready

    def expect(self, task: int, *, fetch: bool = False, offset: int = 0) -> Task:
        """From now on frames for this number are taken, in the order that the protocol demands."""
        self.tasks[task] = Task(task, self.keep, fetch, offset)
        return self.tasks[task]

    def start(self, command: str | bytes, *, stdin: bytes | None = None, **fields: object) -> Task:
        """START and whatever TEXT and STDIN it needs."""
        task = self.expect(len(self.tasks) + 1)
        raw = command.encode() if isinstance(command, str) else command
        size = None if stdin is None else len(stdin)
        first, rest = raw[: 1 << 20], raw[1 << 20 :]
        self.write(frames.start(task.id, first, size=len(raw), stdin_size=size, **fields))  # type: ignore[arg-type]
        for kind, data in ((frames.TEXT, rest), (frames.STDIN, stdin or b"")):
            for at in range(0, len(data), 1 << 20):
                self.write(frames.frame(kind, data[at : at + (1 << 20)], task=task.id))
        return task

    def fetch(self, path: str | Path, *, offset: int = 0, **fields: int) -> Task:
        task = self.expect(len(self.tasks) + 1, fetch=True, offset=offset)
        self.write(frames.fetch(task.id, str(path), offset=offset, **fields))
        return task

    def run(self, command: str | bytes, *, seconds: float = LIMIT, **fields: object) -> Task:
        """Start it and wait until its last frame."""
        return self.finish(self.start(command, **fields), seconds=seconds)  # type: ignore[arg-type]

    def end_of_input(self) -> None:
        """Half-close: the warden sees the end of the host, we still hear it."""
        with socket.socket(fileno=os.dup(self._to)) as ours:
            ours.shutdown(socket.SHUT_WR)

    def close_output(self) -> None:
        """Of two pipes: nobody will read what the warden writes."""
        assert self._to != self._from
        os.close(self._from)
        self._from = -1

    # --- receiving

    def wait(self, condition: Callable[[], bool], what: str, *, seconds: float = LIMIT) -> None:
        deadline = time.monotonic() + seconds * self.patience
        while not condition():
            assert not self.eof, f"end of file before {what}\n{self.describe()}"
            self.receive(deadline, what)

    def receive(self, deadline: float, what: str) -> list[Frame]:
        """The frames that one read completes; the end of file sets `eof`."""
        readable, _, _ = select.select([self._from], [], [], max(0.0, deadline - time.monotonic()))
        assert readable, f"nothing came, waiting for {what}\n{self.describe()}"
        try:
            data = os.read(self._from, 1 << 20)
        except ConnectionResetError:  # it ended with something of ours unread
            data = b""
        self.eof = not data
        found = self._parser.feed(data)
        for frame in found:
            self._take(frame)
        return found

    def read_raw(self, size: int, *, seconds: float = LIMIT) -> bytes:
        """The next bytes as they are, for what is too much to be parsed here."""
        deadline = time.monotonic() + seconds * self.patience
        data = bytearray()
        while len(data) < size:
            readable, _, _ = select.select([self._from], [], [], max(0.0, deadline - time.monotonic()))
            assert readable, f"{len(data)} bytes of {size} came"
            data += os.read(self._from, size - len(data)) or b"(end of file)"
        return bytes(data)

    def listen(self, seconds: float) -> list[Frame]:
        """All that comes within a time. For what must not come."""
        found: list[Frame] = []
        deadline = time.monotonic() + seconds
        while not self.eof and select.select([self._from], [], [], max(0.0, deadline - time.monotonic()))[0]:
            found += self.receive(deadline, "anything")
        return found

    def _take(self, frame: Frame) -> None:
        frames.require(not self.bye, f"{frame} after BYE")
        if frame.kind == frames.READY:
            frames.require(self.ready is None, "a second READY")
            self.ready = frames.read_ready(frame)
        elif frame.kind == frames.ERROR and frame.task == 0:
            self.errors.append(frames.read_error(frame))
        elif frame.kind == frames.PONG:
            self.pongs.append(int.from_bytes(frame.payload, "little"))
        elif frame.kind == frames.BYE:
            self.bye = True
        else:
            frames.require(frame.task in self.tasks, f"{frame} for no task of ours")
            self.tasks[frame.task].take(frame)

    def finish(self, task: Task, *, seconds: float = LIMIT) -> Task:
        self.wait(lambda: task.over, f"the last frame of task {task.id}", seconds=seconds)
        return task

    def reach(self, task: Task, *states: str, seconds: float = LIMIT) -> Task:
        self.wait(lambda: task.state in states, f"task {task.id} to be {states}", seconds=seconds)
        return task

    def stdout_within(self, task: Task, data: bytes, seconds: float) -> bool:
        """Whether `task` writes just that to its stdout within a time."""
        deadline = time.monotonic() + seconds * self.patience
        while task.stdout != data and time.monotonic() < deadline:
            self.listen(0.02)
        return task.stdout == data

    def barrier(self) -> None:
        """Everything sent so far was taken: the warden has answered a PING that came after it."""
        token = uuid.uuid4().int >> 64
        self.write(frames.ping(token))
        self.wait(lambda: token in self.pongs, "PONG")

    def wait_eof(self, *, seconds: float = 3.0) -> None:
        deadline = time.monotonic() + seconds * self.patience
        while not self.eof:
            self.receive(deadline, "the end of file")

    # --- looking at it

    def keeper(self, task: Task) -> int:
        found = stat(task.pid)
        assert found is not None, f"the leader {task.pid} is gone"
        return found.parent

    def descriptors(self, pid: int | None = None) -> int:
        """How many are open. 0 for whoever is not root: the warden is closed to its own user."""
        if os.geteuid() != 0:
            return 0
        return len(os.listdir(f"/proc/{pid or self.pid}/fd"))

    def rss(self) -> int:
        pages = int(Path(f"/proc/{self.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")

    def reports(self) -> str:
        """What the sanitizers wrote."""
        return "\n".join(
            path.read_text(errors="replace") for path in sorted((self.scratch / "logs").iterdir())
        )

    def describe(self) -> str:
        listed = "\n".join(
            f"  {task.id} {task.state} {task.error or task.exit or ''}" for task in self.tasks.values()
        )
        status = self.process.poll()
        return f"exit status {status}, errors {self.errors}, tasks:\n{listed}\n{self.reports()}"

    # --- the end

    def hang_up(self) -> None:
        """Close our ends: the end of the host."""
        for fd in {self._to, self._from} - {-1}:
            os.close(fd)
        self._to = self._from = -1

    def end(self) -> None:
        """Hang up, and check that everything is gone within 3 s."""
        tree = below(self.pid) if self.process.returncode is None else []
        self.hang_up()
        try:
            status = self.process.wait(3 * self.patience)
        except subprocess.TimeoutExpired as error:
            msg = f"the warden lives on after the end of its stream\n{self.describe()}"
            raise AssertionError(msg) from error
        assert not self.reports(), f"the sanitizers found something\n{self.reports()}"
        assert self._status is None or status == self._status, f"exit status {status}\n{self.describe()}"
        self.assert_nothing_left(tree)
        self._ended = True

    def assert_nothing_left(self, tree: Sequence[Stat] = ()) -> None:
        """No process and no spill directory. The warden itself has been waited for."""
        left = {process.pid: process for process in (*still_alive(tree), *marked(self.mark, self._born))}
        assert not left, f"still alive: {list(left.values())}"
        left_files = sorted(os.listdir(self.scratch / "tmp"))
        assert not left_files, f"files left: {left_files}"
        if self.ready:
            assert not os.path.lexists(self.ready.spill_directory), "the spill directory is still there"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                self.end()
        finally:
            self._clean_up(ended=kind is None and self._ended)
            if error is not None and self.reports_at_exit:
                error.add_note(self.reports_at_exit)

    reports_at_exit = ""

    def _clean_up(self, *, ended: bool) -> None:
        """Whatever went wrong: nothing outlives the test."""
        if not ended:
            self._kill_all()
        self.reports_at_exit = self.reports()
        shutil.rmtree(self.scratch, ignore_errors=True)

    def _kill_all(self) -> None:
        tree = below(self.pid) if self.process.poll() is None else []
        self.hang_up()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(1)
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        deadline = time.monotonic() + 2
        while (left := [*still_alive(tree), *marked(self.mark, self._born)]) and time.monotonic() < deadline:
            for process in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process.pid, signal.SIGKILL)
            time.sleep(0.01)


def _socketpair() -> tuple[tuple[int, int], tuple[int, int]]:
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    mine, other = ours.detach(), theirs.detach()
    return (other, mine), (mine, other)


def _pipes() -> tuple[tuple[int, int], tuple[int, int]]:
    to_warden, from_warden = os.pipe(), os.pipe()
    os.set_blocking(to_warden[1], False)
    return to_warden, from_warden
