"""`corral run`: statuses, output, options, on the real local backend."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from tests.tools.command import CORRAL, corral, environment

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.backend("local")


def test_outputs_and_status_are_passed_on() -> None:
    done = corral("run", "--", "echo out; echo err >&2; exit 7")
    assert (done.stdout, done.stderr, done.returncode) == (b"out\n", b"err\n", 7)


@pytest.mark.parametrize("status", [0, 1, 2, 124, 125, 137, 255])
def test_every_status_is_the_commands_own(status: int) -> None:
    done = corral("run", "--", f"exit {status}")
    assert (done.stdout, done.stderr, done.returncode) == (b"", b"", status)


@pytest.mark.parametrize(("name", "status"), [("KILL", 137), ("TERM", 143), ("INT", 130), ("SEGV", 139)])
def test_a_death_by_signal_is_128_and_the_signal(name: str, status: int) -> None:
    done = corral("run", "--", f"ulimit -c 0; kill -{name} $$")
    assert (done.stdout, done.stderr, done.returncode) == (b"", b"", status)


def test_bytes_are_passed_on_as_they_are() -> None:
    done = corral("run", "--", r"printf 'a\0b\r\n\377\376\342\202'; printf '\r\342' >&2")
    assert done.stdout == b"a\0b\r\n\xff\xfe\xe2\x82"
    assert done.stderr == b"\r\xe2"


def test_one_argument_is_bash_text() -> None:
    done = corral("run", "--", "x='a  b'; echo \"$x\" | tr a-z A-Z && echo $((1 + 2)) # '")
    assert done.stdout == b"A  B\n3\n"


def test_several_arguments_are_a_program_and_its_arguments() -> None:
    words = ["a  b", "$HOME", "'", "", "*", "; exit 9", "#", "\\", "new\nline", "--json"]
    done = corral("run", "--", "printf", "<%s>", *words)
    assert done.stdout == "".join(f"<{word}>" for word in words).encode()
    assert done.returncode == 0


def test_the_command_begins_at_the_first_word_that_is_no_option() -> None:
    done = corral("run", "--env", "A=1", "printf", "%s", "--json", "--", "-h")
    assert done.stdout == b"--json---h"


def test_an_empty_command_does_nothing() -> None:
    done = corral("run", "--", "")
    assert (done.stdout, done.stderr, done.returncode) == (b"", b"", 0)


def test_arguments_that_are_not_utf8() -> None:
    with subprocess.Popen(
        [*map(str.encode, CORRAL), b"run", b"--", b"printf", b"%s", b"a\xff\xe2"],
        stdout=subprocess.PIPE,
        env=environment(),
    ) as process:
        stdout, _ = process.communicate(timeout=30)
    assert (stdout, process.returncode) == (b"a\xff\xe2", 0)


def test_workdir(tmp_path: Path) -> None:
    assert corral("run", "--workdir", str(tmp_path), "pwd").stdout == f"{tmp_path}\n".encode()
    (tmp_path / "sub").mkdir()
    assert corral("run", "--workdir", "sub", "pwd", cwd=tmp_path).stdout == f"{tmp_path}/sub\n".encode()
    assert corral("run", "pwd", cwd=tmp_path).stdout == f"{tmp_path}\n".encode()


def test_a_missing_workdir_is_named() -> None:
    done = corral("run", "--workdir", "/no/such", "--", "echo ran")
    assert done.returncode == 125
    assert done.stdout == b""
    assert done.stderr.startswith(b"corral: ")
    assert b"/no/such" in done.stderr
    assert done.stderr.count(b"\n") == 1


def test_a_workdir_name_cannot_forge_a_line() -> None:
    done = corral("run", "--workdir", "/no\ncorral: all is well\x1b[2J\udcff", "true")
    assert done.returncode == 125
    assert done.stderr.count(b"\n") == 1
    assert b"\x1b" not in done.stderr


def test_env() -> None:
    done = corral("run", "--env", "A=1=2", "--env", "B= x ", "--env", "A=3", "--", 'echo "$A,$B,$TERM"')
    assert done.stdout == b"3, x ,dumb\n"
    done = corral("run", "--", "echo $HOST_SAYS", env={"HOST_SAYS": "hello"})
    assert done.stdout == b"hello\n"


def test_a_variable_that_would_change_the_shell_is_refused() -> None:
    done = corral("run", "--env", "BASH_ENV=/tmp/x", "true")
    assert done.returncode == 125
    assert done.stderr.startswith(b"corral: env: BASH_ENV ")
    assert done.stderr.count(b"\n") == 1


def test_standard_input_is_empty_unless_asked_for() -> None:
    assert corral("run", "--", "cat; echo end", stdin=b"for somebody else").stdout == b"end\n"
    data = bytes(range(256)) * 1_000
    done = corral("run", "--stdin", "cat", stdin=data)
    assert done.stdout == data
    assert corral("run", "--stdin", "--json", "wc", "-c", stdin=data).stdout.count(b"256000") == 1


def test_a_closed_standard_input_is_told() -> None:
    shell = 'exec "$@" <&-'
    done = subprocess.run(
        ["sh", "-c", shell, "sh", *CORRAL, "run", "--stdin", "cat"],
        capture_output=True,
        timeout=30,
        env=environment(),
        check=False,
    )
    assert done.returncode == 125
    assert done.stderr.startswith(b"corral: cannot read standard input: ")


def test_what_is_left_in_the_background_does_not_hold_the_end_up() -> None:
    # `corral()` itself asserts that nothing is alive afterwards.
    done = corral("run", "--", "sleep 600 & setsid sleep 600 & echo hi")
    assert (done.stdout, done.returncode) == (b"hi\n", 0)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ([], b"missing command"),
        (["run"], b"no command given"),
        (["run", "--"], b"no command given"),
        (["run", "--no-such", "true"], b"--no-such"),
        (["nosuch"], b"'nosuch'"),
        (["run", "--timeout"], b"--timeout"),
        (["run", "--timeout", "5x", "true"], b"'--timeout': '5x' is not a duration"),
        (["run", "--timeout", "0", "true"], b"'--timeout': '0' is less than a millisecond"),
        (["run", "--timeout=-1s", "true"], b"'--timeout': '-1s' is not a duration"),
        (["run", "--env", "A", "true"], b"'--env': 'A' has no '='"),
        (["run", "--max-output", "5", "true"], b"--max-output needs --json"),
        (["run", "--json", "--max-output", "0", "true"], b"--max-output"),
        (["backends", "surplus"], b"surplus"),
    ],
)
def test_wrong_usage_is_one_line_and_125(words: list[str], says: bytes) -> None:
    done = corral(*words)
    # With --json the line is an object on standard output; its form is tested with the others.
    told = done.stdout if "--json" in words else done.stderr
    assert done.returncode == 125
    assert says in told
    assert told.count(b"\n") == 1
    assert b"--help'" in told
    assert done.stdout + done.stderr == told


@pytest.mark.parametrize("words", [["--help"], ["-h"], ["run", "--help"], ["backends", "-h"]])
def test_help(words: list[str]) -> None:
    done = corral(*words)
    assert (done.returncode, done.stderr) == (0, b"")
    assert done.stdout.startswith(b"Usage: corral")


def test_help_into_a_full_device_is_told() -> None:
    with open("/dev/full", "wb") as full:
        done = subprocess.run(
            [*CORRAL, "--help"],
            stdout=full,
            stderr=subprocess.PIPE,
            timeout=30,
            env=environment(),
            check=False,
        )
    assert done.returncode == 125
    assert done.stderr.startswith(b"corral: cannot write standard output: ")
    assert done.stderr.count(b"\n") == 1


def test_version() -> None:
    done = corral("--version")
    assert done.returncode == 0
    assert done.stdout.startswith(b"corral ")


def test_a_run_loads_nothing_that_it_does_not_need() -> None:
    done = subprocess.run(
        [sys.executable, "-X", "importtime", *CORRAL[1:], "run", "--", "true"],
        capture_output=True,
        timeout=30,
        env=environment(),
        check=True,
    )
    loaded = {line.rpartition(b"|")[2].strip() for line in done.stderr.splitlines()}
    assert b"click" in loaded
    assert not loaded & {b"rich", b"yaml", b"pydantic", b"corral_tools.cli.report"}
