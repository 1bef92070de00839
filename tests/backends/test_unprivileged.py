"""What only an ordinary user meets: permissions and limits; and what no command may do to its warden.

Root is spared the former and, on this place, has ptrace power over the latter. So a driver gives up root;
where the tests do not run as root, it is whoever runs them.
"""

from __future__ import annotations

import errno
import os
import shutil
from typing import TYPE_CHECKING, Any

import pytest

from tests.support.lifeline import Lifeline
from tests.support.lonely import LONELY, ROOT_AND_LONELY
from tests.support.shared import shared_directory
from tests.support.spoofs import FIND, FRAMES, WRITE_EVERYWHERE, steal
from tests.support.witness import Watch

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.support.accounts import Account

pytestmark = pytest.mark.backend("local")

GRACE_MS = 300
every_account = pytest.mark.parametrize("account", ROOT_AND_LONELY, ids=str)


@pytest.fixture
def line() -> Iterator[Lifeline]:
    with Lifeline() as made:
        yield made


def watch(
    *requests: dict[str, Any], account: Account = LONELY, line: Lifeline | None = None, **options: Any
) -> Watch:
    arguments = {"requests": requests, "options": options}
    return Watch("hosts:commands", arguments, account=account, line=line)


def disposed(watch: Watch) -> dict[str, Any]:
    """The report of a dispose that leaves nothing, after which the driver ends cleanly."""
    told = watch.report("disposed", timeout=20)
    assert watch.processes() == []
    assert watch.zombies() == []
    assert told["after"] == told["before"]
    watch.go()
    watch.finish()
    return told


# --- permissions


@pytest.fixture
def closed() -> Iterator[Path]:
    """A directory that an ordinary user cannot enter, on a path that every user can."""
    with shared_directory() as directory:
        made = directory / "closed"
        (made / "inside").mkdir(parents=True)
        made.chmod(0)
        yield made
        made.chmod(0o700)


def test_rejects_workdir_that_may_not_be_entered(closed: Path) -> None:
    """A directory of mode 000, and one inside it: WorkdirError naming it, a remedy, and nothing was run."""
    ran = closed.with_name("ran")
    requests = [
        {"command": f"touch '{ran}'", "workdir": str(where)}
        for where in (closed, closed / "inside", closed / "x")
    ]
    with watch(*requests, {"command": "echo next"}) as watched:
        for request in requests:
            told = watched.report("ran")
            assert (told["error"], told["workdir"]) == ("WorkdirError", request["workdir"])
            assert repr(request["workdir"]) in told["message"]
            assert "Permission denied" in told["message"]
            assert told["remedy"] is not None
            watched.go()
        assert watched.report("ran")["stdout"] == "next\n"
        watched.go()
        disposed(watched)
    assert not ran.exists()


def test_rejects_shell_that_may_not_be_run(closed: Path) -> None:
    """A bash without the right to execute it, or behind a closed door: ShellNotFoundError."""
    shell = closed.with_name("bash")
    shell.write_text("#!/bin/sh\n")
    shell.chmod(0o644)
    for path in (shell, closed / "bash"):
        with watch({"command": "true"}, shell=str(path)) as watched:
            told = watched.report("ran")
            assert told["error"] == "ShellNotFoundError"
            watched.go()
            disposed(watched)


def test_spill_without_the_right_to_write(closed: Path) -> None:
    """No path, and the command is not affected."""
    readable = closed.with_name("readable")
    readable.mkdir()
    readable.chmod(0o555)
    for directory in (closed, readable):
        with watch({"command": "seq 20000; exit 3"}, spill_dir=str(directory)) as watched:
            told = watched.report("ran")
            assert (told["exit_code"], told["stdout"][-6:]) == (3, "20000\n")
            watched.go()
            disposed(watched)


# --- processes


def test_rejects_spawn() -> None:
    """No process can be made: SpawnError with EAGAIN, that says it may be tried again, and nothing was run.

    As the limit rises, first the keeper cannot be made, then bash, and then the command runs, once. A first
    command, whose place cannot even be opened, says so.
    """
    with (
        shared_directory() as directory,
        Watch("hosts:few_processes", {"marker": str(directory / "marker")}, account=LONELY) as watched,
    ):
        *failed, ran = watched.report("runs", timeout=20)["outcomes"]
        assert len(failed) >= 3
        for told in failed:
            assert (told["error"], told["errno"], told["retryable"]) == ("SpawnError", errno.EAGAIN, True)
            assert told["elapsed_ms"] < 5_000
        assert ran["exit_code"] == 0
        watched.go()
        opening = watched.report("opening")
        assert opening["error"] in ("PlaceOpenError", "SpawnError")
        assert os.strerror(errno.EAGAIN) in opening["message"]
        watched.go()
        assert watched.report("over")["stdout"] == "over\n"
        watched.go()
        watched.finish()
        assert (directory / "marker").read_text() == "run\n"


# --- spoofs


@every_account
def test_spoof_by_output(account: Account) -> None:
    """Frames of the protocol, written to stdout and stderr, are output, and end nothing."""
    text = "".join(f"\\{byte:03o}" for byte in FRAMES)
    command = f"printf '{text}'; printf '{text}' >&2; exit 9"
    with watch({"command": command}, {"command": "echo next"}, account=account) as watched:
        told = watched.report("ran")
        assert (told["exit_code"], told["reason"]) == (9, "exited")
        assert told["stdout"] == told["stderr"] == FRAMES.decode(errors="replace")
        watched.go()
        assert watched.report("ran")["stdout"] == "next\n"
        watched.go()
        disposed(watched)


@every_account
def test_spoof_through_descriptors(account: Account) -> None:
    """Writing frames to every descriptor that a command has or can open reaches no stream of the warden."""
    command = FIND + WRITE_EVERYWHERE + "\nexit 9"
    with watch({"command": command}, {"command": "echo next"}, account=account) as watched:
        told = watched.report("ran")
        assert (told["exit_code"], told["reason"]) == (9, "exited")
        watched.go()
        assert watched.report("ran")["stdout"] == "next\n"
        watched.go()
        disposed(watched)


def test_spoof_by_looking_into_the_warden() -> None:
    """Neither descriptors nor memory nor environment of keeper and dispatcher can be opened by a command.

    The control: those of the command's own child can.
    """
    look = """\
look() {
    ls /proc/$1/fd >/dev/null 2>&1 && echo fd
    for what in environ mem maps; do { : </proc/$1/$what; } 2>/dev/null && echo $what; done
    head -c 1 /proc/$1/maps >/dev/null 2>&1 && echo read
    echo .
}
sleep 15 & look $!; kill $!
look $keeper; look $dispatcher
"""
    with watch({"command": FIND + look}) as watched:
        told = watched.report("ran")
        assert told["stdout"] == "fd\nenviron\nmem\nmaps\nread\n.\n.\n.\n"
        watched.go()
        disposed(watched)


def test_spoof_by_stealing_descriptors() -> None:
    """pidfd_getfd, which needs ptrace power, gets at no descriptor of keeper and dispatcher.

    The control: it gets at those of the command's own child, if this kernel has it.
    """
    if shutil.which("perl") is None:
        pytest.skip("no perl here")
    command = (
        f"{FIND}sleep 15 </dev/null >/dev/null 2>&1 & child=$!\nuntil [ -r /proc/$child/fd/2 ]; do :; done\n"
        f"{steal('$child')}{steal('$keeper')}{steal('$dispatcher')}kill $child"
    )
    with watch({"command": command}) as watched:
        told = watched.report("ran")
        own, *others = told["stdout"].split()
        if own != "3":
            pytest.skip(f"no pidfd_getfd here: {own} {told['stderr']}")
        assert others == ["0", "0"]
        watched.go()
        disposed(watched)


@every_account
@pytest.mark.parametrize("ending", ["exit 0", "sleep 15", "echo forged; exec sleep 15"])
def test_spoof_by_killing_the_keeper(ending: str, account: Account, line: Lifeline) -> None:
    """Ends as lost, whatever the command then does; what had come is kept, and no process is left."""
    start = f"{line.prologue}n setsid sleep 15 &\n(trap '' TERM; n sleep 15) &\necho out\n"
    at_once = {"command": f"{start}kill -9 $PPID\n{ending}"}
    later = {"command": f"{start}sleep 0.3\nkill -9 $PPID\n{ending}"}
    with watch(*[at_once] * 5, later, {"command": "echo next"}, account=account, line=line) as watched:
        for output in [("", "out\n")] * 5 + [("out\n",)]:
            told = watched.report("ran")
            assert told.get("error") == "PlaceLostError", told
            # What was still in the pipe died with its reader.
            assert told["stdout"] in output
            assert told["elapsed_ms"] < 3_000
            watched.assert_no_survivors()
            watched.go()
        assert watched.report("ran")["stdout"] == "next\n"
        watched.go()
        assert disposed(watched)["error"] is None


@every_account
@pytest.mark.parametrize("ending", ["exit 0", "sleep 15", "(exit 0) & wait; kill -CONT $$"])
def test_spoof_by_stopping_the_keeper(ending: str, account: Account, line: Lifeline) -> None:
    """The timeout holds within its bound, no exit code is made up, and none of its processes is left."""
    command = f"{line.prologue}n setsid sleep 15 &\necho out\nkill -STOP $PPID\n{ending}"
    request = {"command": command, "timeout_ms": 500}
    with watch(request, {"command": "echo next"}, account=account, line=line) as watched:
        told = watched.report("ran")
        assert told["elapsed_ms"] < 500 + GRACE_MS + 1_000 + 200
        assert told.get("error", told.get("reason")) in ("PlaceLostError", "timed_out")
        assert told.get("exit_code") is None
        watched.assert_no_survivors()
        watched.go()
        assert watched.report("ran")["stdout"] == "next\n"
        watched.go()
        assert disposed(watched)["error"] is None


@every_account
def test_spoof_by_killing_the_dispatcher(account: Account, line: Lifeline) -> None:
    """All commands are lost, none is given a result or run again; the place opens anew for the next one."""
    command = f"{line.prologue}{FIND}n setsid sleep 15 &\necho out\nkill -9 $dispatcher\nexit 0"
    with watch({"command": command}, {"command": "echo next"}, account=account, line=line) as watched:
        told = watched.report("ran")
        assert told.get("error") == "PlaceLostError", told
        assert told["stdout"] in ("", "out\n")
        assert told["elapsed_ms"] < 3_000
        assert line.wait_released(timeout=1)
        watched.go()
        assert watched.report("ran")["stdout"] == "next\n"
        watched.go()
        disposed(watched)


@pytest.mark.parametrize(
    ("pause", "more_ms"), [("sleep 0.3", 0), pytest.param(":", 10_000, marks=pytest.mark.slow)]
)
def test_spoof_by_stopping_the_dispatcher(pause: str, more_ms: int, line: Lifeline) -> None:
    """The host keeps the bound itself: lost after timeout + grace + 1 s; dispose kills everything.

    It counts from when the host hears that the command runs. One that is quick enough to keep that from it
    has 10 s more.
    """
    command = f"{line.prologue}{FIND}n setsid sleep 30 &\n{pause}\nkill -STOP $dispatcher\nexit 0"
    with watch({"command": command, "timeout_ms": 600}, line=line) as watched:
        told = watched.report("ran")
        assert told.get("error") == "PlaceLostError", told
        assert told["elapsed_ms"] < 600 + more_ms + GRACE_MS + 1_000 + 300
        watched.go()
        told = watched.report("disposed", timeout=20)
        assert told["elapsed_ms"] < 12_000
        assert line.wait_released(timeout=1)
        watched.wait_gone(timeout=1)
        assert told["after"] == told["before"]
        watched.go()
        watched.finish()
