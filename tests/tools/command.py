"""Running the real `corral` command, and counting through /proc what is left of it."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path
from typing import IO, TYPE_CHECKING, Self

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from types import TracebackType

__all__ = ["CORRAL", "Running", "corral", "environment", "install"]

CORRAL = (sys.executable, "-m", "corral_tools.cli")
LIMIT = 40.0
"""Seconds after which any command of these tests has hung."""
MARK = "CORRAL_TEST_MARK"


def environment(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """This process's environment, without what would change the defaults of `corral`."""
    return {**{k: v for k, v in os.environ.items() if not k.startswith("CORRAL_B")}, **(extra or {})}


def corral(
    *words: str, env: Mapping[str, str] | None = None, stdin: bytes = b"", cwd: Path | None = None
) -> subprocess.CompletedProcess[bytes]:
    """Runs `corral WORDS` to its end. Nothing of it may be alive afterwards."""
    with Running(*words, env=env, stdin=subprocess.PIPE, cwd=cwd) as running:
        stdout, stderr = running.process.communicate(stdin, timeout=LIMIT)
        running.assert_gone()
        return subprocess.CompletedProcess(words, running.process.returncode, stdout, stderr)


def install(folder: Path, entry_points: Mapping[str, str], modules: Mapping[str, str]) -> dict[str, str]:
    """Puts a distribution `acme-backends 1.2` with these backends and modules (name: source) into `folder`.

    Returns the environment variables with which an interpreter finds it.
    """
    info = folder / "acme_backends-1.2.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: acme-backends\nVersion: 1.2\n")
    lines = [f"{name} = {value}\n" for name, value in entry_points.items()]
    (info / "entry_points.txt").write_text("[corral.backends]\n" + "".join(lines))
    for name, source in modules.items():
        (folder / f"{name}.py").write_text(source)
    path = [str(folder), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {"PYTHONPATH": os.pathsep.join(path)}


class Running:
    """A `corral` process in a session of its own: a signal to its group is what Ctrl-C in a terminal is.

    All that it starts inherits a mark in its environment, by which /proc tells what is alive. Leaving the
    context kills that.
    """

    def __init__(
        self,
        *words: str,
        env: Mapping[str, str] | None = None,
        stdin: int = subprocess.DEVNULL,
        stdout: int | IO[bytes] = subprocess.PIPE,
        stderr: int | IO[bytes] = subprocess.PIPE,
        cwd: Path | None = None,
        ignored: Sequence[signal.Signals] = (),
        program: Sequence[str] = CORRAL,
    ) -> None:
        self._mark = uuid.uuid4().hex

        def prepare() -> None:
            # A test run in the background of a shell has SIGINT ignored; what is started here begins afresh.
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                signal.signal(number, signal.SIG_IGN if number in ignored else signal.SIG_DFL)

        self.process = subprocess.Popen(
            [*program, *words],
            env={**environment(env), MARK: self._mark},
            stdin=stdin,
            stdout=stdout,
            stderr=stderr,
            cwd=cwd,
            start_new_session=True,
            preexec_fn=prepare,
            bufsize=0,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(10)
        for pid in self.alive():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for stream in (self.process.stdin, self.process.stdout, self.process.stderr):
            if stream is not None:
                stream.close()

    def alive(self) -> dict[int, str]:
        """Command lines by pid of everything that was started by `corral` and lives, itself left out."""
        found: dict[int, str] = {}
        mark = f"{MARK}={self._mark}".encode()
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit() or int(entry.name) == self.process.pid:
                continue
            try:
                # Both are empty for a zombie.
                if mark in (entry / "environ").read_bytes().split(b"\0"):
                    line = (entry / "cmdline").read_bytes().replace(b"\0", b" ")
                    found[int(entry.name)] = line.decode(errors="replace")
            except OSError:
                continue
        return found

    def assert_gone(self) -> None:
        """Nothing is alive, now and not later."""
        assert self.alive() == {}

    def read_until(self, expected: bytes) -> bytes:
        """Reads standard output until it ends with `expected`; fails when it never does."""
        assert self.process.stdout is not None
        data = b""
        deadline = time.monotonic() + LIMIT
        while not data.endswith(expected):
            assert time.monotonic() < deadline
            byte = os.read(self.process.stdout.fileno(), 1)
            assert byte, f"ended after {data!r}"
            data += byte
        return data

    def signal(self, number: signal.Signals) -> None:
        """To the whole foreground group, as a terminal does."""
        os.killpg(self.process.pid, number)

    def finish(self) -> tuple[int, bytes, bytes]:
        """Waits for the end of `corral`: its status, and the rest of both outputs."""
        stdout, stderr = self.process.communicate(timeout=LIMIT)
        return self.process.returncode, stdout, stderr
