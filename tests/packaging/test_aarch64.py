"""The aarch64 warden of a release, run by qemu-user where the machine is another one.

The commands it starts are this machine's own bash: qemu passes execve on. What qemu does unlike a kernel:

- prctl(PR_SET_CHILD_SUBREAPER) fails with EINVAL (seen with 7.2), so the warden would not see what leaves its
  parent. `subreaper.c`, loaded into qemu, makes the call for it. A qemu without a dynamic loader cannot
  load that; the tests that need it are then skipped and say so.
- vfork is a plain fork: the child shares no memory with its parent, so that why it could not start bash is
  lost. See `test_a_command_never_runs_in_another_directory`.
- Descriptors are copied and processes scheduled by this machine's kernel: limits, credentials and speed are
  none of the warden's and are not tested here.
"""

from __future__ import annotations

import functools
import os
import platform
import shutil
import stat
import subprocess
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.packaging.artifacts import read_elf, warden_name
from tests.warden import frames
from tests.warden.builds import Build
from tests.warden.harness import Warden
from tests.warden.procs import Stat, below, poll, still_alive

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.packaging.conftest import Release

    Starter = Callable[..., Warden]

# Here, so that the many environments without it report one skip and not one for every test.
pytest.importorskip("ziglang", reason="ziglang is not installed: `scripts/test -e release` has it")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

NATIVE = platform.machine() == "aarch64"


@dataclass(frozen=True, slots=True, kw_only=True)
class Runner:
    """How to run the program here. `no_trees`: why it cannot see what leaves its parent; None if it can."""

    program: Path
    prefix: tuple[str, ...]
    env: dict[str, str]
    no_trees: str | None


def shim(qemu: str, folder: Path) -> Path | str:
    """`subreaper.c` compiled for qemu, or why there is none."""
    if read_elf(Path(qemu).read_bytes()).static:
        return f"{qemu} has no dynamic loader"
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        return "there is no C compiler for subreaper.c"
    made = folder / "subreaper.so"
    source = Path(__file__).with_name("subreaper.c")
    line = [compiler, "-shared", "-fPIC", "-Wall", "-Wextra", "-Werror", "-o", str(made), str(source), "-ldl"]
    ran = subprocess.run(line, capture_output=True, text=True, check=False, timeout=60)
    assert ran.returncode == 0, ran.stderr
    return made


@pytest.fixture(scope="module")
def runner(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Runner:
    qemu = shutil.which("qemu-aarch64")
    if qemu is None and not NATIVE:
        reason = "no qemu-aarch64 here (Debian: apt-get install qemu-user)"
        if os.environ.get("CORRAL_REQUIRE_QEMU") == "1":
            pytest.fail(f"CORRAL_REQUIRE_QEMU is set, and there is {reason}")
        pytest.skip(reason)
    release: Release = request.getfixturevalue("release")
    folder = tmp_path_factory.mktemp("aarch64")
    with zipfile.ZipFile(release.wheel) as archive:
        program = Path(archive.extract(warden_name("aarch64"), folder))
    program.chmod(0o755)
    if qemu is None:
        return Runner(program=program, prefix=(), env={}, no_trees=None)
    made = shim(qemu, folder)
    if isinstance(made, str):
        why = f"qemu-user refuses PR_SET_CHILD_SUBREAPER, and {made}"
        return Runner(program=program, prefix=(qemu,), env={}, no_trees=why)
    # Not for the warden, nor for what it starts.
    prefix = (qemu, "-U", "LD_PRELOAD")
    return Runner(program=program, prefix=prefix, env={"LD_PRELOAD": str(made)}, no_trees=None)


@pytest.fixture
def start(runner: Runner) -> Starter:
    build = Build("released", runner.program, 4.0)
    return functools.partial(Warden, build, prefix=runner.prefix, env=runner.env)


@pytest.fixture
def warden(start: Starter) -> Iterator[Warden]:
    """A warden that has been greeted; that its end leaves nothing is checked."""
    with start() as running:
        running.hello()
        yield running


@pytest.fixture
def trees(runner: Runner) -> None:
    """For tests that need the warden to see what leaves its parent."""
    if runner.no_trees:
        pytest.skip(runner.no_trees)


# A child, one in a session of its own, one that has lost its parent, and a leader that waits.
FAMILY = "sleep 1000 & setsid sleep 1000 & (sleep 1000 &); echo up; wait"


def grown(warden: Warden, command: str = FAMILY, size: int = 5) -> tuple[frames.Task, list[Stat]]:
    """The task once it has said `up`, and all that is below its keeper."""
    task = warden.start(command)
    assert warden.stdout_within(task, b"up\n", 5)
    keeper = warden.keeper(task)
    # bash says `up` before its last child has become what it starts.
    poll(lambda: len(below(keeper)) >= size - 1, 5, "the family")
    return task, below(keeper)


def test_it_says_which_machine_it_is_for(start: Starter) -> None:
    with start() as warden:
        ready = warden.hello()
        assert (ready.version, ready.machine, ready.uid) == (1, "aarch64", os.geteuid())
        assert ready.pid == warden.pid


def test_output_status_and_environment(warden: Warden) -> None:
    task = warden.run("echo hi; echo $WORD >&2; exit 7", env={"WORD": "there"})
    assert (task.stdout, task.stderr, task.code, task.survivors) == (b"hi\n", b"there\n", 7, 0)


def test_commands_do_not_get_what_was_loaded_into_the_emulator(warden: Warden) -> None:
    assert warden.run("echo ${LD_PRELOAD-none}").stdout == b"none\n"


def test_a_signal_is_told(warden: Warden) -> None:
    task = warden.run("kill -9 $$")
    assert task.exit is not None
    assert (task.exit.kind, task.exit.value) == (frames.SIGNALLED, 9)


def test_many_at_once(warden: Warden) -> None:
    tasks = [warden.start(f"sleep 0.1; echo {number}") for number in range(20)]
    assert [warden.finish(task).stdout for task in tasks] == [f"{number}\n".encode() for number in range(20)]


def test_stdin_and_a_command_longer_than_an_argument(warden: Warden) -> None:
    data = os.urandom(30_000)
    assert warden.run("cat", stdin=data).stdout == data
    task = warden.run("echo " + "y" * 300_000 + " | wc -c")
    assert (task.stdout.strip(), task.code) == (b"300001", 0)


def test_a_megabyte_is_spilled_whole(warden: Warden) -> None:
    task = warden.run("seq 200000 | head -c 1000000; echo end >&2")
    assert task.ends is not None
    end = task.ends[0]
    assert (end.total, end.spill_start, end.state) == (1_000_000, 0, frames.COMPLETE)
    spilled = Path(end.path)
    assert stat.S_IMODE(spilled.stat().st_mode) == 0o600
    whole = "".join(f"{number}\n" for number in range(1, 200_001)).encode()[:1_000_000]
    assert spilled.read_bytes() == whole
    assert task.stdout == whole[-len(task.stdout) :]
    fetched = warden.finish(warden.fetch(end.path, offset=500_000))
    assert fetched.stdout == whole[500_000:]


def test_the_head_of_a_spill_is_released_past_its_cap(start: Starter) -> None:
    with start() as warden:
        warden.hello(spill_cap=1 << 20)
        task = warden.run("head -c 5000000 /dev/zero")
        assert task.ends is not None
        assert 5_000_000 - (1 << 20) <= task.ends[0].spill_start < 5_000_000
        # Offsets of 64 bits and holes: what a wrong call number or a split argument would break.
        assert Path(task.ends[0].path).stat().st_size == 5_000_000


@pytest.mark.usefixtures("trees")
def test_a_kill_reaches_the_whole_tree(warden: Warden) -> None:
    task, family = grown(warden)
    warden.write(frames.kill(task.id, 0))
    warden.finish(task)
    assert still_alive(family) == []
    assert task.exit is not None
    assert (task.exit.kind, task.exit.value, task.survivors) == (frames.SIGNALLED, 9, 0)


@pytest.mark.usefixtures("trees")
def test_a_kill_with_grace_lets_the_tree_end_by_itself(warden: Warden) -> None:
    task, family = grown(warden, f"trap 'echo term; exit 3' TERM; {FAMILY}")
    warden.write(frames.kill(task.id, 5_000))
    warden.finish(task)
    assert still_alive(family) == []
    assert (task.stdout, task.code, task.survivors) == (b"up\nterm\n", 3, 0)


@pytest.mark.usefixtures("trees")
def test_the_end_of_the_host_leaves_nothing(start: Starter) -> None:
    with start() as warden:
        warden.hello()
        _, family = grown(warden)
        assert len(family) == 4
    # The end of `with` closed the stream, and saw that the warden is gone and no process or file is left.
    assert still_alive(family) == []


@pytest.mark.usefixtures("trees")
def test_the_tree_of_a_dead_keeper_is_killed(warden: Warden) -> None:
    task, family = grown(warden)
    os.kill(warden.keeper(task), 9)
    warden.finish(task)
    assert still_alive(family) == []
    assert task.keeper_lost
    assert task.survivors == 0


@pytest.mark.usefixtures("trees")
def test_keepers_kill_what_a_dead_warden_leaves(start: Starter) -> None:
    with start(status=-9) as warden:
        warden.hello()
        _, family = grown(warden)
        os.kill(warden.pid, 9)
        warden.process.wait(5)
        poll(lambda: not still_alive(family), 5, "the family's end")


def test_shutdown_says_bye(warden: Warden) -> None:
    task = warden.start("echo up; exec sleep 1000")
    assert warden.stdout_within(task, b"up\n", 5)
    warden.write(frames.shutdown())
    warden.wait(lambda: warden.bye, "BYE")
    assert task.state == "gone"


def test_silence_ends_a_lease(start: Starter) -> None:
    with start() as warden:
        warden.hello(lease_ms=500)
        task = warden.start("echo up; exec sleep 1000")
        assert warden.stdout_within(task, b"up\n", 0.3)
        warden.wait_eof()


def test_the_death_of_the_host_is_seen_through_its_pidfd(start: Starter) -> None:
    with subprocess.Popen(["sleep", "1000"]) as host:
        try:
            pin = os.pidfd_open(host.pid)
            try:
                warden = start(arguments=("--host-pidfd", str(pin)), pass_fds=(pin,))
            finally:
                os.close(pin)
            with warden:
                warden.hello()
                task = warden.start("echo up; exec sleep 1000")
                assert warden.stdout_within(task, b"up\n", 5)
                host.kill()
                warden.wait_eof()
        finally:
            host.kill()


def test_what_is_no_frame_ends_the_session(start: Starter) -> None:
    with start(status=None) as warden:
        warden.hello()
        warden.write(b"\xff" * 100)
        warden.wait_eof()
        assert [error.code for error in warden.errors] == [frames.PROTOCOL]


def test_a_missing_shell_is_told(start: Starter) -> None:
    with start() as warden:
        warden.hello(shell="/nonexistent/bash")
        task = warden.run("echo ran")
        assert task.error is not None
        assert task.error.code == frames.SHELL


def test_a_command_never_runs_in_another_directory(warden: Warden) -> None:
    """The error itself travels through memory that vfork shares, and so not under qemu: there the child's own
    status is all there is. In either case nothing ran."""
    task = warden.run("echo ran", workdir="/nonexistent")
    assert task.stdout == b""
    if NATIVE or task.error is not None:
        assert task.error is not None
        assert task.error.code == frames.WORKDIR
    else:
        assert task.code == 127
