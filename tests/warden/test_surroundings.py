"""What a command gets of its surroundings: environment, shell, limits; and what it cannot reach."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.warden import frames
from tests.warden.builds import released
from tests.warden.harness import Warden
from tests.warden.procs import below, ordinary, poll, timed

if TYPE_CHECKING:
    from tests.warden.conftest import Starter
    from tests.warden.frames import Task

ENOENT, ENOEXEC, EAGAIN, EACCES, EMFILE, E2BIG = 2, 8, 11, 13, 24, 7


def environment(warden: Warden, **fields: object) -> dict[bytes, bytes]:
    """What `execve` handed over, from /proc, so that no shell has changed it."""
    task = warden.run("cat /proc/$$/environ", **fields)
    entries = [entry for entry in task.stdout.split(b"\0") if entry]
    found = dict(entry.split(b"=", 1) for entry in entries)
    assert len(found) == len(entries), f"a name comes twice: {entries}"
    return found


def error(task: Task) -> tuple[int, int]:
    assert task.error is not None, f"it ran: {task}"
    return task.error.code, task.error.errno


# --- environment

HOSTILE = {
    "BASH_ENV": "{}/evil",
    "ENV": "{}/evil",
    "SHELLOPTS": "xtrace:verbose",
    "BASHOPTS": "extglob",
    "BASH_FUNC_ls%%": "() {{ echo evil; }}",
    "BASH_FUNC_cat()": "() {{ echo evil; }}",
    "OLDPWD": "/tmp",
}


def test_what_would_change_bash_is_not_inherited(start: Starter, tmp_path: Path) -> None:
    (tmp_path / "evil").write_text("echo evil\n")
    hostile = {name: value.format(tmp_path) for name, value in HOSTILE.items()}
    with start(env={**hostile, "BASH_FUN": "kept", "ENVIRON": "kept", "KEPT": "a=b"}) as warden:
        warden.hello()
        task = warden.run("ls /dev/null; cd -; shopt extglob; echo $-")
        assert task.stdout.decode().split() == ["/dev/null", "extglob", "off", "hBc"]
        assert b"OLDPWD not set" in task.stderr
        found = environment(warden)
        assert not {name.encode() for name in HOSTILE} & set(found)
        assert (found[b"BASH_FUN"], found[b"ENVIRON"], found[b"KEPT"]) == (b"kept", b"kept", b"a=b")


def test_hello_is_on_top_of_it_and_start_on_top_of_that(start: Starter) -> None:
    with start(env={"A": "warden", "B": "warden", "C": "warden"}) as warden:
        warden.hello(env=b"B=hello\0C=hello\0D=hello\0E=\0B=2\0")
        found = environment(warden, env=b"C=start\0E=x=y\n\0F=\xff\0C=last\0")
        names = (b"A", b"B", b"C", b"D", b"E", b"F")
        assert [found.get(name) for name in names] == [b"warden", b"2", b"last", b"hello", b"x=y\n", b"\xff"]
        found = environment(warden)
        assert [found.get(name) for name in names] == [b"warden", b"2", b"hello", b"hello", b"", None]


def test_names_that_begin_alike(start: Starter) -> None:
    with start(env={"AB": "1", "A": "2"}) as warden:
        warden.hello(env={"ABC": "3"})
        found = environment(warden, env={"A": "4", "ABCD": "5"})
        assert [found[name] for name in (b"A", b"AB", b"ABC", b"ABCD")] == [b"4", b"1", b"3", b"5"]


def test_many_variables_take_no_long_time(start: Starter) -> None:
    # 100,000 of the 2 MiB that a kernel takes. A shell would take its time with them.
    many = "".join(f"V{number}=\0" for number in range(100_000)).encode()
    with start() as warden:
        warden.hello(shell=shutil.which("true"), env=many)
        for env in (b"", many, many):
            with timed(0, 2 * warden.patience, "100,000 variables"):
                task = warden.run("", env=env)
            assert task.code == 0 or error(task) == (frames.TOO_LARGE, E2BIG)


@pytest.mark.parametrize("size", [131_072, 3_000_000])
def test_more_environment_than_the_kernel_takes(warden: Warden, size: int) -> None:
    assert error(warden.run("true", env={"LARGE": "x" * size})) == (frames.TOO_LARGE, E2BIG)
    assert warden.run("echo on").stdout == b"on\n"


def test_bashrc_is_not_read_under_sshd(start: Starter) -> None:
    with start(env={"SSH_CLIENT": "192.0.2.1 1 22", "SSH2_CLIENT": "192.0.2.1 1 22", "SHLVL": ""}) as warden:
        (warden.scratch / ".bashrc").write_text("echo read\n")
        shutil.copy(warden.scratch / ".bashrc", warden.scratch / ".bash_profile")
        warden.hello()
        assert warden.run("echo $SSH_CLIENT").stdout == b"192.0.2.1 1 22\n"
        control = subprocess.run(
            ["bash", "-c", ":"],
            env={"HOME": str(warden.scratch), "SSH_CLIENT": "192.0.2.1 1 22"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            timeout=10,
        )
        if control.stdout != b"read\n":
            pytest.skip("this bash has no such habit, so the test says little")


# --- the shell


def script(where: Path, name: str, text: str, mode: int = 0o755) -> Path:
    where.mkdir(exist_ok=True)
    (where / name).write_text(text)
    (where / name).chmod(mode)
    return where / name


@pytest.mark.parametrize(
    ("shell", "number"),
    [("/nonexistent/bash", ENOENT), ("/", ENOENT), ("{}/plain", ENOENT), ("no-such-shell", ENOENT)],
)
def test_without_a_shell_nothing_runs(start: Starter, shell: str, number: int) -> None:
    with start() as warden:
        script(warden.scratch, "plain", "", 0o644)
        warden.hello(shell=shell.format(warden.scratch))
        assert error(warden.run("true")) == (frames.SHELL, number)
        assert error(warden.run("true", stdin=b"x" * 300_000)) == (frames.SHELL, number)
        task = warden.finish(warden.fetch("/etc/passwd"))
        assert task.stdout == Path("/etc/passwd").read_bytes()


def test_a_shell_that_is_no_program(start: Starter) -> None:
    with start() as warden:
        warden.hello(shell=str(script(warden.scratch, "text", "no program\n")))
        assert error(warden.run("true")) == (frames.SHELL, ENOEXEC)


def test_a_shell_by_its_path(start: Starter) -> None:
    with start() as warden:
        mine = script(warden.scratch / "other", "mine", '#!/bin/sh\necho "mine $0"\nexec bash "$@"\n')
        warden.hello(shell=str(mine))
        assert warden.run("echo $0").stdout == f"mine {mine}\nbash\n".encode()


def test_the_first_bash_of_path(tmp_path: Path, start: Starter) -> None:
    mine = script(tmp_path / "bin", "bash", "#!/bin/sh\necho mine\n")
    script(tmp_path / "not", "bash", "", 0o644)
    path = f"relative:{tmp_path}/missing:{tmp_path}/not::{mine.parent}:{os.environ['PATH']}"
    with start(env={"PATH": path}) as warden:
        script(warden.scratch / "relative", "bash", "#!/bin/sh\necho relative\n")
        warden.hello()
        assert warden.run("echo theirs").stdout == b"mine\n"
        assert warden.run("echo theirs", env={"PATH": "/usr/bin:/bin"}).stdout == b"mine\n"


@pytest.mark.parametrize("path", ["", "/nonexistent", "::"])
def test_bash_is_found_where_it_usually_is(start: Starter, path: str) -> None:
    if not any(os.access(f"{where}/bash", os.X_OK) for where in ("/usr/local/bin", "/usr/bin", "/bin")):
        pytest.skip("no bash in the usual places")
    with start(env={"PATH": path}) as warden:
        warden.hello()
        assert warden.run("echo $0").stdout == b"bash\n"


def test_a_shell_that_comes_and_goes(start: Starter) -> None:
    with start() as warden:
        where = warden.scratch / "bin"
        warden.hello(shell=f"{where}/sh")
        assert error(warden.run("true")) == (frames.SHELL, ENOENT)
        shell = script(where, "sh", '#!/bin/sh\nexec bash "$@"\n')
        assert warden.run("exit 5").code == 5
        shell.unlink()
        assert error(warden.run("true")) == (frames.SHELL, ENOENT)


# --- limits


def limited(limit: str) -> list[str]:
    return ["bash", "-c", f'ulimit {limit} && exec "$@"', "-"]


@pytest.mark.parametrize("room", [0, 1])
def test_no_more_processes(room: int) -> None:
    """EAGAIN from fork: with `room` 0 there is no keeper, with 1 the keeper can start no bash."""
    account = ordinary()
    if account is None:
        pytest.skip("an ordinary user's limit counts what else it runs; as root a user of our own is taken")
    with Warden(released(), account=account, prefix=limited(f"-u {3 + room}")) as warden:
        warden.hello()
        running = warden.start("exec sleep 20")
        warden.reach(running, "started")
        for _ in range(3):
            assert error(warden.run("true")) == (frames.SPAWN, EAGAIN)
        assert error(warden.run("true", stdin=b"x" * 100_000)) == (frames.SPAWN, EAGAIN)
        poll(lambda: len(below(warden.pid)) == 2, 2, "only the first command is left")
        fetched = warden.finish(warden.fetch("/etc/passwd"))
        if room:
            assert fetched.stdout == Path("/etc/passwd").read_bytes()
        else:
            assert error(fetched) == (frames.FILE, EAGAIN)
        assert running.state == "started"
        warden.write(frames.kill(running.id))
        warden.finish(running)
        poll(lambda: not below(warden.pid), 2, "it is reaped")
        assert warden.run("exec echo again").stdout == b"again\n"


def test_no_more_descriptors(start: Starter) -> None:
    with start(prefix=limited("-n 24")) as warden:
        warden.hello()
        before = warden.descriptors()
        running: list[Task] = []
        while True:
            task = warden.start("sleep 20")
            warden.reach(task, "started", "failed")
            if task.error:
                break
            running.append(task)
            assert len(running) < 24
        assert len(running) >= 5
        for refused in (task, warden.run("true"), warden.run("#" * 200_000), warden.run("true", stdin=b"")):
            assert error(refused) == (frames.SPAWN, EMFILE)
        assert error(warden.finish(warden.fetch("/etc/passwd"))) == (frames.FILE, EMFILE)
        assert all(task.state == "started" for task in running)
        for task in running:
            warden.write(frames.kill(task.id))
            warden.finish(task)
        poll(lambda: warden.descriptors() == before, 2, "every descriptor is given back")
        assert warden.run("echo again").stdout == b"again\n"


def test_a_lost_keeper_without_a_descriptor_left(start: Starter) -> None:
    """The warden has to look for orphans, and that takes a descriptor."""
    with start(prefix=limited("-n 24")) as warden:
        warden.hello()
        task = warden.start(
            "trap '' TERM; setsid sleep 20 & echo up; while [ ! -e go ]; do :; done; kill -9 $PPID; sleep 20",
            workdir="",
        )
        warden.wait(lambda: task.stdout == b"up\n", "up")
        tree = below(warden.pid)
        while not warden.reach(warden.start("sleep 20"), "started", "failed").error:
            pass
        (warden.scratch / "go").touch()
        warden.finish(task)
        assert task.keeper_lost
        assert task.survivors == 0
        poll(lambda: not [p for p in tree if p.alive and Path(f"/proc/{p.pid}").exists()], 1, "the orphans")


def test_little_memory(start: Starter) -> None:
    # Far less than two rings of 16 MiB: the command is refused, or the rings work.
    if start.args[0].name == "sanitized":  # type: ignore[attr-defined]
        pytest.skip("the sanitizers reserve more address space than this")
    with start(prefix=limited("-v 60000")) as warden:
        warden.hello(ring=16 << 20)
        first, second, third = (warden.start("sleep 20") for _ in range(3))
        for task in (first, second, third):
            warden.reach(task, "started", "failed")
        failed = [task for task in (first, second, third) if task.error]
        assert failed
        assert all(error(task)[0] == frames.SPAWN for task in failed)


# --- what is out of reach for an ordinary user's command

PROBE = """
import ctypes, os, sys
libc = ctypes.CDLL(None, use_errno=True)
for pid in map(int, sys.argv[1:]):
    result = []
    for what in ("fd/0", "fd/3", "mem", "maps", "environ"):
        try:
            os.close(os.open(f"/proc/{pid}/{what}", os.O_RDONLY))
            result.append(what)
        except (PermissionError, FileNotFoundError):
            pass
    try:
        os.listdir(f"/proc/{pid}/fd")
        result.append("list")
    except PermissionError:
        pass
    if libc.ptrace(0x4206, pid, 0, 0) == 0:  # SEIZE
        result.append("ptrace")
    pidfd = os.pidfd_open(pid)
    if libc.syscall(438, pidfd, 3, 0) >= 0 or ctypes.get_errno() == 9:  # pidfd_getfd; EBADF: allowed
        result.append("getfd")
    print(pid, *result)
"""


def test_the_stream_is_out_of_reach() -> None:
    with Warden(released(), account=ordinary()) as warden:
        warden.hello()
        (warden.scratch / "probe.py").write_text(PROBE)
        candidates = (sys.executable, "/usr/bin/python3", "/usr/local/bin/python3")
        python = next((found for found in candidates if runs(warden, found)), None)
        if python is None:
            pytest.skip("no Python that an ordinary user can run")
        control = warden.start("exec sleep 20")
        warden.reach(control, "started")
        pids = (control.pid, warden.keeper(control), warden.pid)
        task = warden.run(
            f"{python} -I -S {warden.scratch}/probe.py $PPID {' '.join(map(str, pids))}", seconds=15
        )
        own, *found = (line.split() for line in task.stdout.decode().splitlines())
        reached = {int(pid): what for pid, *what in found}
        assert own[1:] == [], f"its own keeper: {own}"
        assert {"fd/0", "maps", "environ", "list", "getfd"} <= set(reached[control.pid]), (
            "the control: its own kind"
        )
        assert reached[warden.keeper(control)] == []
        assert reached[warden.pid] == []


def runs(warden: Warden, python: str) -> bool:
    return warden.run(f"{python} -I -S -c 'import ctypes, os; os.pidfd_open'").code == 0


def test_a_fetch_is_out_of_reach_too() -> None:
    with Warden(released(), account=ordinary()) as warden:
        warden.hello()
        with (warden.scratch / "large").open("wb") as large:
            large.truncate(1 << 30)
        (warden.scratch / "large").chmod(0o644)
        warden.fetch(warden.scratch / "large", credit=1)
        poll(lambda: len(below(warden.pid)) == 1, 3, "the reader")
        (reader,) = below(warden.pid)
        task = warden.run(f"ls /proc/{reader.pid}/fd && echo reached")
        assert (task.stdout, task.code) == (b"", 2)
        assert b"ermission" in task.stderr


def test_no_descriptor_of_ours_in_any_process(warden: Warden) -> None:
    """Neither keepers nor commands nor readers of files hold the stream: else its end would not be seen."""
    if os.geteuid() != 0:
        pytest.skip("only root may look")
    held = {os.readlink(f"/proc/{warden.pid}/fd/{fd}") for fd in os.listdir(f"/proc/{warden.pid}/fd")}
    sockets = {name for name in held if name.startswith("socket:")}
    assert len(sockets) == 1, "the stream, twice"
    for _ in range(3):
        warden.reach(warden.start("cat & sleep 20", stdin=b"x" * 100_000), "started")
    warden.fetch("/proc/self/maps", credit=1)
    time.sleep(0.1)
    for process in below(warden.pid):
        for fd in os.listdir(f"/proc/{process.pid}/fd"):
            assert os.readlink(f"/proc/{process.pid}/fd/{fd}") not in sockets
