"""`corral doctor`: on what works, and on everything that can be broken."""

from __future__ import annotations

import json
import os
import platform
import pty
import shutil
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from corral_backends.warden.binary import find_warden
from tests.tools.command import CORRAL, corral, environment, install
from tests.tools.doctor import BACKENDS, MODULES, STEPS, outcomes, report

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def acme(tmp_path: Path) -> dict[str, str]:
    return install(tmp_path / "site", BACKENDS, MODULES)


# --- what works


@pytest.mark.backend("local")
def test_the_local_backend_works_here() -> None:
    found, steps = report("--backend", "local")
    assert found["schema"] == 1
    (backend,) = found["backends"]
    assert (backend["name"], backend["entry"], backend["outcome"]) == ("local", None, "ok")
    assert (backend["distribution"], backend["version"]) == ("corral", found["machine"]["corral"])
    assert outcomes(steps) == ["ok"] * 7
    for step in steps.values():
        assert set(step) == {"step", "outcome", "evidence", "remedy", "stage", "retryable", "duration_ms"}
        assert step["evidence"]
        assert step["duration_ms"] >= 0
    bash = subprocess.run(["bash", "-c", "echo $BASH_VERSION"], capture_output=True, text=True, check=True)
    assert steps["run"]["evidence"].endswith(f"bash {bash.stdout.strip()}")


def test_the_machine(tmp_path: Path) -> None:
    machine = report("--backend", "local", env={"TMPDIR": str(tmp_path)})[0]["machine"]
    assert machine["python"] == f"CPython {platform.python_version()}"
    assert (machine["kernel"], machine["architecture"]) == (os.uname().release, os.uname().machine)
    assert (machine["uid"], machine["euid"]) == (os.getuid(), os.geteuid())
    assert machine["open_files"]["soft"] <= machine["open_files"]["hard"]
    assert machine["temporary_directory"]["path"] == str(tmp_path)
    assert machine["temporary_directory"]["writable"] is True
    df = subprocess.run(["df", "--output=fstype", tmp_path], capture_output=True, text=True, check=True)
    assert machine["temporary_directory"]["file_system"] == df.stdout.split()[-1]
    wardens = {each["name"]: each for each in machine["wardens"]}
    ours = wardens[f"corral-warden-{os.uname().machine}"]
    said = subprocess.run([find_warden(os.uname().machine), "--version"], capture_output=True, check=True)
    assert ours == {"name": ours["name"], "version": said.stdout.decode().strip(), "error": None}


def test_nothing_of_it_is_secret() -> None:
    env = {"ACME_TOKEN": "hunter2-in-the-environment"}
    for words in (["doctor"], ["doctor", "--json"]):
        done = corral(*words, env=env)
        assert b"hunter2" not in done.stdout + done.stderr
        assert os.uname().nodename not in (done.stdout + done.stderr).decode().split()


@pytest.mark.backend("local")
def test_a_pipe_gets_a_line_for_each_step() -> None:
    done = corral("doctor")
    assert (done.returncode, done.stderr) == (0, b"")
    lines = done.stdout.decode().splitlines()
    start = lines.index("local")
    assert [line.split()[:2] for line in lines[start + 1 :]] == [["ok", step] for step in STEPS]
    assert b"\x1b" not in done.stdout


def test_a_terminal_gets_colours_and_no_markup_of_others(acme: dict[str, str]) -> None:
    ours, theirs = pty.openpty()
    try:
        process = subprocess.Popen(
            [*CORRAL, "doctor", "--backend", "raises"],
            stdout=theirs,
            stderr=subprocess.DEVNULL,
            env=environment({**acme, "COLUMNS": "60", "TERM": "xterm"}),
        )
        os.close(theirs)
        shown = b""
        try:
            while chunk := os.read(ours, 65_536):
                shown += chunk
        except OSError:
            pass  # how Linux says that the other end is closed
        assert process.wait(20) == 1
    finally:
        os.close(ours)
    assert b"\x1b[1;31m  failed" in shown
    assert b"[red]here[/red]" in shown
    assert b"\x1b[2J" not in shown


@pytest.mark.backend("local")
def test_the_entries_of_a_file(tmp_path: Path) -> None:
    file = tmp_path / "corral.yaml"
    file.write_text(
        f"- {{id: one, name: local, config: {{cwd: {tmp_path}, env: {{KEY: hunter2}}}}}}\n"
        "- {id: two, name: 'corral_backends.places.local:LocalExecutor', config: {maxOutputBytes: 300000}}\n"
    )
    done = corral("doctor", "--json", "--config", str(file))
    assert done.returncode == 0, done
    assert b"hunter2" not in done.stdout
    one, two = json.loads(done.stdout)["backends"]
    assert (one["entry"], one["name"], one["outcome"]) == ("one", "local", "ok")
    assert (two["entry"], two["distribution"], two["outcome"]) == ("two", None, "ok")
    spill = two["steps"][STEPS.index("spill")]
    assert spill["outcome"] == "not checked"
    assert "kept in memory" in spill["evidence"]


# --- what is broken here


def test_no_warden() -> None:
    found, steps = report("--backend", "local", env={"CORRAL_WARDEN": "/nosuch/warden"}, status=1)
    assert outcomes(steps) == ["ok", "ok", "failed", *["not checked"] * 3, "ok"]
    opened = steps["open"]
    assert opened["evidence"].startswith("UnsupportedPlaceError: CORRAL_WARDEN names /nosuch/warden")
    assert (opened["stage"], opened["retryable"]) == ("open", False)
    assert opened["remedy"] == "Correct or unset CORRAL_WARDEN."
    assert steps["run"]["evidence"] == "the step 'open' failed"
    override = {"name": "CORRAL_WARDEN", "version": None, "error": "No such file or directory"}
    assert override in found["machine"]["wardens"]


@pytest.fixture
def noexec(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "noexec"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "noexec,size=8m", "corral-test", folder], capture_output=True
    )
    if mounted.returncode != 0:
        pytest.skip(f"not run: this user cannot mount ({mounted.stderr.decode().strip()})")
    try:
        yield folder
    finally:
        subprocess.run(["umount", folder], check=True)


@pytest.mark.backend("local")
def test_a_warden_on_a_noexec_file_system(noexec: Path) -> None:
    copy = noexec / "corral-warden"
    shutil.copyfile(find_warden(platform.machine()), copy)
    copy.chmod(0o755)
    env = {"CORRAL_WARDEN": str(copy), "TMPDIR": str(noexec)}
    found, steps = report("--backend", "local", env=env, status=1)
    assert "Permission denied" in steps["open"]["evidence"]
    assert "noexec" in steps["open"]["remedy"]
    where = found["machine"]["temporary_directory"]
    assert (where["file_system"], where["noexec"]) == ("tmpfs", True)
    assert where["free_bytes"] <= 8 << 20


def test_a_warden_that_is_none(tmp_path: Path) -> None:
    program = tmp_path / "warden"
    program.write_text("#!/bin/sh\nexit 3\n")
    program.chmod(0o755)
    found, steps = report("--backend", "local", env={"CORRAL_WARDEN": str(program)}, status=1)
    assert steps["open"]["outcome"] == "failed"
    assert {"name": "CORRAL_WARDEN", "version": None, "error": "ends with status 3"} in found["machine"][
        "wardens"
    ]


@pytest.mark.backend("local")
def test_no_bash(tmp_path: Path) -> None:
    file = tmp_path / "corral.toml"
    file.write_text('[[entries]]\nname = "local"\nconfig = { shell = "/nosuch/bash" }\n')
    _, steps = report("--config", str(file), status=1)
    assert outcomes(steps) == ["ok", "ok", "ok", "failed", "not checked", "not checked", "ok"]
    assert steps["run"]["evidence"].startswith("ShellNotFoundError")
    assert steps["run"]["stage"] == "shell"
    assert "Install bash" in steps["run"]["remedy"]


@pytest.mark.backend("local")
def test_a_path_with_nothing_on_it(tmp_path: Path) -> None:
    """Bash is found where it usually is; what it cannot try without setsid it does not claim."""
    found, steps = report("--backend", "local", env={"PATH": str(tmp_path)})
    assert steps["run"]["outcome"] == "ok"
    assert steps["kill"]["outcome"] == "not checked"
    assert "no setsid" in steps["kill"]["evidence"]
    assert found["machine"]["compiler"] is None


@pytest.mark.backend("local")
def test_a_temporary_directory_that_cannot_be_written() -> None:
    found, steps = report("--backend", "local", env={"TMPDIR": "/proc"}, status=1)
    assert [name for name in STEPS if steps[name]["outcome"] == "failed"] == ["spill"]
    assert "136000 are lost" in steps["spill"]["evidence"]
    assert "TMPDIR" in steps["spill"]["remedy"]
    assert found["machine"]["temporary_directory"]["file_system"] == "proc"


@pytest.mark.backend("local")
def test_a_working_directory_that_is_gone(tmp_path: Path) -> None:
    file = tmp_path / "corral.yaml"
    file.write_text("- {name: local, config: {workdir: /nosuch/directory}}\n")
    _, steps = report("--config", str(file), status=1)
    assert steps["run"]["evidence"].startswith("WorkdirError")
    assert steps["run"]["stage"] == "workdir"


# --- usage


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--backend", "locla"), b"unknown backend 'locla'; did you mean 'local'?"),
        (("--timeout", "soon"), b"is not a duration"),
        (("--backend", "local", "--config", "x.yaml"), b"exclude one another"),
        (("--config", "/nosuch.yaml"), b"/nosuch.yaml: cannot be read"),
        (("local",), b"unexpected extra argument"),
    ],
)
def test_wrong_usage(words: tuple[str, ...], says: bytes) -> None:
    done = corral("doctor", *words)
    assert (done.returncode, done.stdout) == (125, b"")
    assert says in done.stderr
    assert done.stderr.startswith(b"corral: ")
    assert done.stderr.count(b"\n") == 1


MISTAKES = {
    "key": ("- {id: mine, name: local, config: {timoutMs: 5}}\n", "did you mean 'timeout_ms'?"),
    "type": ("- {id: mine, name: local, config: {timeout_ms: hunter2}}\n", "timeout_ms is of type str"),
    "value": ("- {id: mine, name: local, config: {timeoutMs: 0}}\n", "timeout_ms must be from 1"),
    "backend": ("- {id: mine, name: locla}\n", "unknown backend 'locla'; did you mean 'local'?"),
    "entry": ("- {id: mine, name: local, confg: {}}\n", "unknown key 'confg'; did you mean 'config'?"),
    "doubled": ("- {id: mine, name: local, config: {timeout_ms: 5, timeoutMs: 6}}\n", "the same option"),
}


@pytest.mark.parametrize("command", ["doctor", "run"])
@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_file_with_mistakes(tmp_path: Path, command: str, mistake: str) -> None:
    """One line that names the entry, the key and the nearest name; nothing is run, no value is shown."""
    text, says = MISTAKES[mistake]
    file = tmp_path / "corral.yaml"
    file.write_text(text)
    words = ["--json"] if command == "doctor" else ["--", "echo ran"]
    done = corral(command, "--config", str(file), *words)
    assert (done.returncode, done.stdout) == (125, b"")
    line = done.stderr.decode()
    assert line.count("\n") == 1
    assert "'mine'" in line
    assert says in line
    assert "hunter2" not in line


@pytest.mark.parametrize(
    ("command", "text", "says"),
    [
        ("doctor", "[]\n", b"there is no entry"),
        ("run", "[]\n", b"there are 0"),
        (
            "run",
            "- {id: one, name: local}\n- {id: two, name: local}\n",
            b"exactly one entry, and there are 2",
        ),
    ],
)
def test_a_file_with_too_few_or_too_many_entries(
    tmp_path: Path, command: str, text: str, says: bytes
) -> None:
    file = tmp_path / "corral.yaml"
    file.write_text(text)
    done = corral(command, "--config", str(file), *(["true"] if command == "run" else []))
    assert (done.returncode, done.stdout) == (125, b"")
    assert says in done.stderr
    assert done.stderr.count(b"\n") == 1


def test_the_schema_is_in_the_help() -> None:
    said = corral("doctor", "--help").stdout.decode()
    for key in ("schema", "machine", "backends", "outcome", "steps", "evidence", "retryable", "wardens"):
        assert f'"{key}"' in said
