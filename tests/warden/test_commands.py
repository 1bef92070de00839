"""Commands: how they start and end, what they are given, and what they must not be given."""

from __future__ import annotations

import hashlib
import os
import re
import resource
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.warden import frames
from tests.warden.frames import COMPLETE, EXITED, NONE, SIGNALLED
from tests.warden.procs import below, poll, stat, timed

if TYPE_CHECKING:
    from tests.warden.conftest import Starter
    from tests.warden.harness import Warden

PLAIN = {"PATH": os.environ.get("PATH", "/usr/bin:/bin")}


def test_everything_a_command_tells(warden: Warden) -> None:
    # `take` of the harness refuses any other order than STARTED, DATA*, EXIT, DATA*, END, GONE.
    task = warden.run("echo out; echo err >&2; sleep 0.05; exit 7")
    assert (task.stdout, task.stderr, task.code) == (b"out\n", b"err\n", 7)
    assert task.exit is not None
    assert task.ends is not None
    assert 50_000 <= task.exit.wall_us < 5_000_000
    assert 1000 <= task.exit.max_rss < 100_000, "in KiB"
    assert [(end.total, end.state, end.spill_start) for end in task.ends] == [(4, NONE, 0), (4, NONE, 0)]
    assert (task.leftovers, task.survivors, task.keeper_lost) == (False, 0, False)


def test_cpu_time_is_the_leaders_own(warden: Warden) -> None:
    task = warden.run("for ((i = 0; i < 100000; i++)); do :; done")
    assert task.exit is not None
    assert 10_000 < task.exit.user_us + task.exit.system_us <= task.exit.wall_us + 20_000


def test_every_exit_status(warden: Warden) -> None:
    # Many at a time: 256 commands one after the other would take most of this suite's time.
    for first in range(0, 256, 32):
        tasks = [warden.start(f"exit {status}") for status in range(first, first + 32)]
        assert [warden.finish(task, seconds=20).code for task in tasks] == list(range(first, first + 32))


def test_every_signal_that_kills(warden: Warden) -> None:
    harmless = {signal.SIGCHLD, signal.SIGCONT, signal.SIGURG, signal.SIGWINCH}
    stopping = {signal.SIGSTOP, signal.SIGTSTP, signal.SIGTTIN, signal.SIGTTOU}
    numbers = [number for number in range(1, 32) if number not in harmless | stopping] + [34, 50, 64]
    # perl and the like would be cleaner than bash, which has handlers of its own for some signals.
    tasks = [warden.start(f"ulimit -c 0; exec env kill -s {number} $$") for number in numbers]
    found = [warden.finish(task, seconds=20).exit for task in tasks]
    assert [(end.kind, end.value) if end else None for end in found] == [
        (SIGNALLED, number) for number in numbers
    ]


@pytest.mark.parametrize("number", [signal.SIGCHLD, signal.SIGURG, signal.SIGWINCH])
def test_signals_that_kill_nobody(warden: Warden, number: int) -> None:
    assert warden.run(f"kill -{number} $$; exit 5").code == 5


def test_an_exec_failure_of_the_last_command(warden: Warden) -> None:
    assert warden.run("/nonexistent/program").code == 127
    assert warden.run("/etc/passwd").code == 126
    assert warden.run("kill -9 $$ # 137 is something else").code is None


# --- what a command is given


def test_stdin_is_at_its_end(warden: Warden) -> None:
    assert warden.run("cat; readlink /proc/self/fd/0").stdout == b"/dev/null\n"
    assert warden.run("cat | wc -c", stdin=b"").stdout == b"0\n"


@pytest.mark.parametrize("size", [1, 65536, 1_000_003, 9_000_000])
def test_stdin_is_exact(warden: Warden, size: int) -> None:
    data = os.urandom(size // 2 + 1) + bytes(size - size // 2 - 1)
    task = warden.run("sha256sum; cat | wc -c; cat /dev/stdin | wc -c", stdin=data)
    assert task.stdout.decode().split() == [hashlib.sha256(data).hexdigest(), "-", "0", str(size)]


def test_stdin_can_be_read_again_and_in_part(warden: Warden) -> None:
    task = warden.run("head -c 2 /dev/stdin; cat /dev/stdin; read -r a; echo $a", stdin=b"one\ntwo\n")
    assert task.stdout == b"onone\ntwo\none\n"


def test_stdin_before_and_after_the_text(warden: Warden) -> None:
    task = warden.expect(1)
    parts = [
        (frames.STDIN, b"ab"),
        (frames.TEXT, b"a"),
        (frames.STDIN, b""),
        (frames.TEXT, b"t"),
        (frames.STDIN, b"c"),
    ]
    warden.write(frames.start(1, "c", size=3, stdin_size=3))
    for kind, data in parts:
        warden.barrier()
        assert task.state == "sent"
        warden.write(frames.frame(kind, data, task=1))
    assert warden.finish(task).stdout == b"abc"


@pytest.mark.parametrize("size", [131_070, 131_071, 131_072, 131_073])
@pytest.mark.parametrize("in_start", [0, 1000, None], ids=["later", "partly", "at-once"])
def test_commands_around_the_length_of_an_argument(warden: Warden, size: int, in_start: int | None) -> None:
    # As -c takes them: $0, no positional arguments, no further descriptor, `return` refused, REPLY unset.
    head = "echo $0 $# ${REPLY-unset} $(ls /proc/self/fd | wc -l); return 2>/dev/null; exit 6; : "
    command = head + "x" * (size - len(head))
    task = warden.expect(1)
    cut = len(command) if in_start is None else in_start
    warden.write(frames.start(1, command[:cut], size=len(command)))
    if cut < len(command):
        warden.write(frames.frame(frames.TEXT, command[cut:].encode(), task=1))
    warden.finish(task)
    assert task.stdout == b"bash 0 unset 4\n"  # 0, 1, 2 and the directory that ls reads
    assert task.code == 6


def test_a_command_of_ten_megabytes(warden: Warden) -> None:
    body = (
        "x="
        + shlex.quote("y" * 5_000_000 + "\n\\\r\n")
        + "; cat <<'E'\n"
        + "z" * 5_000_000
        + "\nE\necho ${#x}"
    )
    with timed(0, 5 * warden.patience, "a command of 10 MB"):
        task = warden.run(body, seconds=20)
    assert task.ends is not None
    assert task.ends[0].state == COMPLETE
    assert task.stdout[-10:] == b"z\n5000004\n"


ODD = [
    "",
    "-x",
    "--",
    "-c",
    "#",
    " ",
    "\n",
    "echo a\\",
    "'",
    "cat <<E\nno end",
    "cat <<E\\\nno",
    "\udcff\udc80",
]
ODD += [
    "echo 'ä𝄞'",
    "echo a\r\n",
    "!",
    "history",
    "echo $'\\0'",
    "return 3",
    "exec 5>&1; echo x >&5",
    "f() { exit 8; }; f",
]


@pytest.mark.parametrize("command", [*ODD, *(": " + "x" * 140_000 + "\n" + odd for odd in ODD)])
def test_odd_commands_do_what_bash_does(warden: Warden, command: str) -> None:
    raw = os.fsencode(command)
    stripped = (
        raw[raw.rfind(b"x\n") + 2 :] if len(raw) > 131_071 else raw
    )  # bash could not be given the long one
    expected = subprocess.run(
        ["bash", "-c", "--", stripped], stdin=subprocess.DEVNULL, capture_output=True, timeout=10, env=PLAIN
    )
    task = warden.run(raw)
    line = rb"(-c|eval): line \d+|line \d+"  # it begins further down, and a long command is read by `eval`
    assert re.sub(line, b"", task.stderr) == re.sub(line, b"", expected.stderr)
    assert (task.stdout, task.code) == (expected.stdout, expected.returncode)


def test_descriptors_of_a_command(warden: Warden) -> None:
    listed = "ls -l /proc/$$/fd; exit"
    for command, stdin in ((listed, None), (listed, b"in"), (listed + "\n" + "#" * 200_000, None)):
        lines = warden.run(command, stdin=stdin).stdout.decode().splitlines()
        found = {line.partition(" -> ")[0].split()[-1]: line.partition(" -> ")[2] for line in lines[1:]}
        assert set(found) == {"0", "1", "2"}, found
        assert found["1"].startswith("pipe:"), "never a file, which > /dev/stdout would truncate"
        assert found["1"] != found["2"]


def test_reopening_its_own_output(warden: Warden) -> None:
    task = warden.run("echo 1; echo 2 > /dev/stdout; echo 3 >> /dev/stdout; echo e > /dev/stderr; echo f >&2")
    assert (task.stdout, task.stderr) == (b"1\n2\n3\n", b"e\nf\n")


def test_signals_are_as_new(start: Starter) -> None:
    # SIGINT, SIGTERM, SIGPIPE and a real-time signal ignored and blocked by whoever starts the warden.
    program = (
        "import os, signal, sys\n"
        "numbers = [1, 2, 3, 13, 15, 17, 25, 40]\n"
        "for number in numbers: signal.signal(number, signal.SIG_IGN)\n"
        "signal.pthread_sigmask(signal.SIG_BLOCK, numbers)\n"
        "os.execv(sys.argv[1], sys.argv[1:])\n"
    )
    with start(prefix=[sys.executable, "-I", "-S", "-c", program]) as warden:
        warden.hello()
        lines = warden.run("cat /proc/self/status").stdout.decode().splitlines()
        masks = {
            line.split()[0]: line.split()[1] for line in lines if line.startswith("Sig") and "Q" not in line
        }
        assert masks == dict.fromkeys(("SigPnd:", "SigBlk:", "SigIgn:", "SigCgt:"), "0" * 16)
        assert warden.run("yes | head -1; echo ${PIPESTATUS[*]}").stdout == b"y\n141 0\n"
        killed = warden.start("sleep 20")
        warden.reach(killed, "started")
        warden.write(frames.kill(killed.id, 5000))
        with timed(0, 3 * warden.patience, "the end by TERM"):
            warden.finish(killed)
        assert killed.exit is not None
        assert killed.exit.value == signal.SIGTERM


def test_sessions_and_groups(warden: Warden) -> None:
    task = warden.run("ps -o sid=,pgid=,pid= -p $$ || cut -d' ' -f 6,5,1 /proc/$$/stat; echo $PPID")
    *numbers, keeper = task.stdout.split()
    assert set(numbers) == {str(task.pid).encode()}
    assert int(keeper) != warden.pid


def test_the_limit_on_descriptors_is_the_inherited_one(start: Starter) -> None:
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    with start(prefix=["bash", "-c", 'ulimit -Sn 123; exec "$@"', "-"]) as warden:
        warden.hello()
        assert (
            warden.run("ulimit -Sn; ulimit -Hn").stdout
            == f"123\n{hard}\n".replace("-1", "unlimited").encode()
        )
        limits = Path(f"/proc/{warden.pid}/limits").read_text()
        assert (
            f"{hard}"
            in next(line for line in limits.splitlines() if line.startswith("Max open files")).split()[3]
        )


@pytest.mark.parametrize(
    ("workdir", "number"),
    [("/nonexistent", 2), ("/etc/passwd", 20), ("/" + "x" * 300, 36), ("/" + "x/" * 3000, 36)],
)
def test_workdirs_that_cannot_be_entered(warden: Warden, workdir: str, number: int) -> None:
    task = warden.run("touch ran; exit 0", workdir=workdir)
    assert task.error is not None
    assert (task.error.code, task.error.errno) == (frames.WORKDIR, number)


def test_workdirs(warden: Warden) -> None:
    where = warden.scratch / "ä \n\udcff"
    where.mkdir()
    assert warden.run("pwd -P | head -c -1", workdir=os.fsencode(where)).stdout == os.fsencode(where)
    assert warden.run("pwd", workdir="").stdout.decode() == f"{warden.scratch}\n"
    assert warden.run("pwd", workdir=".").stdout.decode() == f"{warden.scratch}\n"


def test_nothing_of_a_command_stays_with_the_next(warden: Warden) -> None:
    warden.run("cd /; umask 0; ulimit -n 10; export A=1; set -e; alias ls=rm; shopt -s extglob; exit 0")
    task = warden.run("pwd; umask; echo ${A-none}; ulimit -n; shopt extglob", workdir=str(warden.scratch))
    before = warden.run("ulimit -n; umask").stdout.decode().split()
    assert task.stdout.decode().split() == [
        str(warden.scratch),
        before[1],
        "none",
        before[0],
        "extglob",
        "off",
    ]


def test_five_hundred_commands_leave_nothing(warden: Warden) -> None:
    warden.run("true")
    count = 500 if warden.patience == 1 else 150
    poll(lambda: not below(warden.pid), 1, "quiet")
    descriptors, memory = warden.descriptors(), warden.rss()
    for _ in range(count // 25):
        tasks = [warden.start("echo x; (exit 3) & true", stdin=b"y") for _ in range(25)]
        for task in tasks:
            assert warden.finish(task, seconds=20).code == 0
    poll(lambda: not below(warden.pid), 1, "no zombie and no keeper left")
    assert warden.descriptors() == descriptors
    assert warden.rss() < memory + (1 << 20) * warden.patience**3


def test_tasks_that_end_while_the_dispatcher_is_stopped(warden: Warden) -> None:
    # Then one round of its loop finds all their ends at once, and some events are about what is over already.
    tasks = [warden.start(f"sleep {delay}") for delay in (0.15, 0.3, 0.3, 0.45)]
    for task in tasks:
        warden.reach(task, "started")
    keepers = [warden.keeper(task) for task in tasks]
    os.kill(warden.pid, signal.SIGSTOP)
    try:
        poll(lambda: all((found := stat(keeper)) and not found.alive for keeper in keepers), 5, "their ends")
        time.sleep(0.02)
    finally:
        os.kill(warden.pid, signal.SIGCONT)
    for task in tasks:
        assert warden.finish(task).code == 0


def test_exit_is_told_before_the_end(warden: Warden) -> None:
    task = warden.start("sleep 0.6 & exit 2")
    warden.reach(task, "exited")
    assert task.exit is not None
    assert (task.exit.kind, task.exit.value) == (EXITED, 2)
    with timed(0.02, 0.5 * warden.patience, "the drain"):
        warden.reach(task, "ended")
    warden.finish(task)
