"""This machine: a warden as a child process, a socket pair as its stream."""

from __future__ import annotations

import asyncio
import errno
import fcntl
import fnmatch
import os
import platform
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePath, PurePosixPath
from typing import Unpack

from corral import PlaceLostError, PlaceOpenError, UnsupportedPlaceError

from ..warden import (
    DuplexStream,
    Place,
    SocketStream,
    WardenConfig,
    WardenExecutor,
    WardenOptions,
    find_warden,
    posix_path,
)

EXIT_S = 3.0
"""How long a warden may take to exit after its stream has ended: it kills what is left and removes its
files."""


class LocalPlace(Place):
    """This machine, as the user that this process runs as. Linux only.

    `inherit` chooses what commands get of this process's environment, as it is when the place is opened: all,
    nothing but `PATH`, `HOME`, `USER`, `LOGNAME`, `SHELL`, `TMPDIR`, `LANG`, `LC_*` and `TZ`, or what matches
    given names (`fnmatch` patterns)."""

    def __init__(self, *, inherit: bool | Sequence[str] = True) -> None:
        self._inherit = inherit
        self._process: subprocess.Popen[bytes] | None = None
        self._exit: int | None = None  # a pidfd of the process

    async def open(self) -> DuplexStream:
        if sys.platform != "linux":
            msg = f"the local backend needs Linux, and this is {sys.platform}"
            raise UnsupportedPlaceError(msg, remedy="Use the docker or the ssh backend.")
        program = find_warden(platform.machine())
        try:
            ours, theirs = _socket_pair()
        except OSError as error:
            msg = f"no socket for the warden: {error.strerror}"
            raise PlaceOpenError(msg, retryable=True) from error
        with theirs:
            try:
                self._spawn(program, theirs)
            except BaseException:
                ours.close()
                raise
        return await SocketStream.connect(ours)

    def stuck(self) -> bool:
        return self._process is not None and _stopped(self._process.pid)

    def _spawn(self, program: PurePath, stream: socket.socket) -> None:
        # A forked child of this process could hold the stream open after our end, so the warden also watches
        # us.
        try:
            host = _pidfd(os.getpid())
        except OSError as error:
            msg = f"no descriptor of this process for the warden: {error.strerror}"
            raise PlaceOpenError(msg, retryable=True) from error
        arguments = [str(program)]
        if host is not None:
            arguments += ["--host-pidfd", str(host)]
        try:
            self._process = subprocess.Popen(  # our own program
                arguments,
                stdin=stream.fileno(),
                stdout=stream.fileno(),
                stderr=subprocess.DEVNULL,
                cwd="/",
                env=inherited_environment(os.environ, self._inherit),
                pass_fds=() if host is None else (host,),
                start_new_session=True,
            )
        except PermissionError as error:
            msg = f"the warden {program} may not be run: {error.strerror}"
            remedy = "Is its file system mounted noexec, or its directory closed to this user?"
            raise PlaceOpenError(msg, remedy=remedy, retryable=False) from error
        except OSError as error:
            msg = f"the warden {program} cannot be run: {error.strerror}"
            raise PlaceOpenError(msg, retryable=None) from error
        finally:
            if host is not None:
                os.close(host)
        try:
            self._exit = _pidfd(self._process.pid)
        except OSError:
            self._exit = None  # gone already, or no descriptor left: it will be polled for

    async def close(self) -> None:
        process, self._process = self._process, None
        exit_fd, self._exit = self._exit, None
        if process is None:
            return
        try:
            gone = not _stopped(process.pid) and await _exited(process, exit_fd, EXIT_S)
            if not gone:
                # Stopped by a task, or it just does not end. Its keepers see that it died, and kill.
                _kill(process, exit_fd)
                gone = await _exited(process, exit_fd, EXIT_S)
        finally:
            if exit_fd is not None:
                os.close(exit_fd)
        process.poll()  # reaps it, unless somebody else has
        if not gone:
            msg = f"the warden (pid {process.pid}) does not die"
            remedy = "It is stuck in the kernel; look at its disk or mount."
            raise PlaceLostError(msg, stage="close", remedy=remedy)

    async def remove_spills(self, directory: PurePosixPath) -> None:
        shutil.rmtree(directory, ignore_errors=True)


def _pidfd(pid: int) -> int | None:
    """A descriptor that gets readable when the process ends; `None` on kernels before 5.3."""
    try:
        descriptor = os.pidfd_open(pid)
    except OSError as error:
        if error.errno in (
            errno.ENOSYS,
            errno.EPERM,
        ):  # EPERM: a filter of system calls that does not know it
            return None
        raise
    try:
        return fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, 3)
    finally:
        os.close(descriptor)


def _socket_pair() -> tuple[socket.socket, socket.socket]:
    """A connected pair under numbers from 3 up.

    Where the standard descriptors are closed it could be one of them, and be taken for what it is not.
    """
    first, second = socket.socketpair()
    with first, second:
        ours = socket.socket(fileno=fcntl.fcntl(first, fcntl.F_DUPFD_CLOEXEC, 3))
        try:
            return ours, socket.socket(fileno=fcntl.fcntl(second, fcntl.F_DUPFD_CLOEXEC, 3))
        except BaseException:
            ours.close()
            raise


def _stopped(pid: int) -> bool:
    """Whether the process is stopped (or traced): alive, and doing nothing."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in ("T", "t")
    except OSError:
        return False


async def _exited(process: subprocess.Popen[bytes], exit_fd: int | None, seconds: float) -> bool:
    """Whether the process ends within that time. Needs neither SIGCHLD nor its exit status."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + seconds
    if exit_fd is None:
        while process.poll() is None and loop.time() < deadline:  # noqa: ASYNC110  # nothing tells us
            await asyncio.sleep(0.005)
        return process.poll() is not None
    ended: asyncio.Future[None] = loop.create_future()

    def readable() -> None:
        if not ended.done():
            ended.set_result(None)

    loop.add_reader(exit_fd, readable)
    try:
        done, _ = await asyncio.wait({ended}, timeout=seconds)
        return bool(done)
    finally:
        loop.remove_reader(exit_fd)


def _kill(process: subprocess.Popen[bytes], exit_fd: int | None) -> None:
    try:
        if exit_fd is not None:  # cannot hit a stranger, whoever may have reaped our child meanwhile
            signal.pidfd_send_signal(exit_fd, signal.SIGKILL)
        else:
            process.kill()
    except ProcessLookupError:
        pass


MINIMAL_ENVIRONMENT = ("PATH", "HOME", "USER", "LOGNAME", "SHELL", "TMPDIR", "LANG", "LC_*", "TZ")


def inherited_environment(environ: Mapping[str, str], inherit: bool | Sequence[str]) -> dict[str, str]:
    """What commands inherit; the warden takes out of it what would change how bash starts."""
    if inherit is True:
        return dict(environ)
    patterns = MINIMAL_ENVIRONMENT if inherit is False else tuple(inherit)
    return {
        name: value
        for name, value in environ.items()
        if any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)
    }


class LocalExecutor(WardenExecutor):
    """Runs commands on this machine. The options are those of `WardenConfig`, and `env_inherit` (see
    `LocalPlace`).

    `workdir` defaults to this process's working directory, taken now; a relative one is relative to that.
    """

    def __init__(
        self,
        *,
        workdir: str | PurePath | None = None,
        env_inherit: bool | Sequence[str] = True,
        **options: Unpack[WardenOptions],
    ) -> None:
        here = posix_path(Path.cwd())
        config = WardenConfig(workdir=here / posix_path(workdir or "."), **options)
        super().__init__(LocalPlace(inherit=env_inherit), config)
