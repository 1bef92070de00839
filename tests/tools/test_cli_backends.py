"""`corral backends`, and backends of third parties that are broken."""

from __future__ import annotations

import json
import os
import pty
import subprocess
from typing import TYPE_CHECKING, Any

import pytest

from tests.tools.command import CORRAL, corral, environment, install

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

BROKEN = {
    "raises": "acme_raises:Executor",
    "exits": "acme_exits:Executor",
    "absent": "acme_nosuch:Executor [cloud]",
    "nothing": "acme_prints:nothing",
    "number": "acme_prints:number",
}
MODULES = {
    "acme_raises": "raise RuntimeError('no driver\\n[red]here[/red]\\x1b[2J')",
    "acme_exits": "import sys; sys.exit('please set ACME_HOME')",
    "acme_prints": "print('hello from acme'); number = 7",
}


@pytest.fixture
def acme(tmp_path: Path) -> dict[str, str]:
    return install(tmp_path, BROKEN, MODULES)


def listed(env: Mapping[str, str] | None = None) -> dict[str, dict[str, Any]]:
    done = corral("backends", "--json", env=env)
    assert done.returncode == 0
    return {each["name"]: each for each in json.loads(done.stdout)}


def test_the_local_backend_is_listed() -> None:
    assert listed()["local"] == {
        "name": "local",
        "object": "corral_backends.places.local:LocalExecutor",
        "distribution": "corral",
        "version": corral("--version").stdout.decode().split()[1],
        "importable": True,
        "error": None,
        "remedy": None,
    }


def test_broken_ones_harm_nobody_else(acme: dict[str, str]) -> None:
    found = listed(acme)
    assert found["local"]["importable"] is True
    for name in BROKEN:
        assert found[name]["importable"] is False
        assert (found[name]["distribution"], found[name]["version"]) == ("acme-backends", "1.2")
    assert "RuntimeError: no driver" in found["raises"]["error"]
    assert "please set ACME_HOME" in found["exits"]["error"]
    assert "acme_nosuch" in found["absent"]["error"]
    assert found["absent"]["remedy"] == "pip install 'acme-backends[cloud]'"


def test_a_pipe_gets_a_line_for_each(acme: dict[str, str]) -> None:
    done = corral("backends", env=acme)
    rows = [line.split("\t") for line in done.stdout.decode().splitlines()]
    assert [row[0] for row in rows] == sorted([*BROKEN, "local"])
    assert {len(row) for row in rows} == {4}
    assert [row[3] for row in rows if row[0] == "local"] == ["importable"]
    assert b"\x1b" not in done.stdout
    # What a module says on import is not part of the list.
    assert b"hello" not in done.stdout
    assert b"hello from acme" in done.stderr


def test_a_terminal_gets_a_table(acme: dict[str, str]) -> None:
    ours, theirs = pty.openpty()
    try:
        process = subprocess.Popen(
            [*CORRAL, "backends"],
            stdout=theirs,
            stderr=subprocess.DEVNULL,
            env=environment({**acme, "COLUMNS": "200", "TERM": "xterm"}),
        )
        os.close(theirs)
        shown = b""
        try:
            while chunk := os.read(ours, 65_536):
                shown += chunk
        except OSError:
            pass  # how Linux says that the other end is closed
        assert process.wait(20) == 0
    finally:
        os.close(ours)
    assert b"Distribution" in shown
    assert b"acme-backends 1.2" in shown
    assert b"corral_backends.places.local:LocalExecutor" in shown
    # Neither markup nor control characters of a third party are obeyed.
    assert b"[red]here[/red]" in shown
    assert b"\x1b[2J" not in shown


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("raises", b"no driver"),
        ("exits", b"please set ACME_HOME"),
        ("absent", b"; pip install 'acme-backends[cloud]'"),
        ("number", b"no class of executors"),
        ("locla", b"did you mean 'local'?"),
        ("", b"unknown backend ''"),
    ],
)
def test_a_run_on_one_that_cannot_be_used(acme: dict[str, str], name: str, says: bytes) -> None:
    done = corral("run", "--backend", name, "--", "echo ran", env=acme)
    assert (done.returncode, done.stdout) == (125, b"")
    assert says in done.stderr
    # What a module prints must not look like output of the command.
    lines = [line for line in done.stderr.splitlines() if line != b"hello from acme"]
    assert len(lines) == 1
    assert lines[0].startswith(b"corral: ")


def test_the_environment_names_the_default(acme: dict[str, str]) -> None:
    done = corral("run", "--", "echo ran", env={**acme, "CORRAL_BACKEND": "raises"})
    assert (done.returncode, done.stdout) == (125, b"")
    assert b"'raises'" in done.stderr


@pytest.mark.backend("local")
def test_the_option_wins_and_an_empty_variable_is_none() -> None:
    done = corral("run", "--backend", "local", "echo", "ran", env={"CORRAL_BACKEND": "nosuch"})
    assert done.stdout == b"ran\n"
    assert corral("run", "echo", "ran", env={"CORRAL_BACKEND": ""}).stdout == b"ran\n"


def test_a_constructor_that_fails(tmp_path: Path) -> None:
    source = "def make(**options):\n    raise LookupError('no ACME account')\n"
    env = install(tmp_path, {"fails": "acme_fails:make"}, {"acme_fails": source})
    done = corral("run", "--backend", "fails", "true", env=env)
    assert done.returncode == 125
    assert done.stderr == b"corral: the backend 'fails' could not be set up: LookupError: no ACME account\n"
