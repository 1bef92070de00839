"""`corral run --config`: the file says where and how, the command line has the last word."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from tests.tools.command import corral

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.backend("local")


def written(folder: Path, text: str, suffix: str = ".yaml") -> str:
    path = folder / f"corral{suffix}"
    path.write_text(text)
    return str(path)


def reported(*words: str) -> dict[str, Any]:
    value: dict[str, Any] = json.loads(corral("run", "--json", *words).stdout)
    return value


def test_the_file_says_where_and_how(tmp_path: Path) -> None:
    file = written(
        tmp_path, f"- id: bash\n  name: local\n  config:\n    cwd: {tmp_path}\n    env: {{GREETING: hello}}\n"
    )
    done = corral("run", "--config", file, "--", "pwd; echo $GREETING")
    assert (done.stdout, done.stderr) == (f"{tmp_path}\nhello\n".encode(), b"")


def test_toml(tmp_path: Path) -> None:
    file = written(
        tmp_path, f'[[entries]]\nname = "local"\n[entries.config]\nworkdir = "{tmp_path}"\n', ".toml"
    )
    assert corral("run", "--config", file, "pwd").stdout == f"{tmp_path}\n".encode()


def test_its_time_limit_applies_in_both_modes(tmp_path: Path) -> None:
    file = written(tmp_path, "- name: local\n  config: {timeoutMs: 400}\n")
    done = corral("run", "--config", file, "sleep", "600")
    assert (done.returncode, done.stderr) == (124, b"corral: timed out after 400ms\n")
    assert reported("--config", file, "sleep", "600")["timeout_ms"] == 400
    assert reported("--config", file, "--timeout", "9s", "true")["timeout_ms"] == 9_000


def test_its_maximum_holds_against_the_option(tmp_path: Path) -> None:
    file = written(tmp_path, "- name: local\n  config: {max_timeout_ms: 400}\n")
    done = corral("run", "--config", file, "--timeout", "1h", "sleep", "600")
    assert done.returncode == 124
    assert done.stderr == b"corral: timed out after 400ms, which is the most that the backend allows\n"
    assert reported("--config", file, "--timeout", "1h", "true")["timeout_ms"] == 400


def test_max_output_replaces_what_the_file_says(tmp_path: Path) -> None:
    file = written(tmp_path, "- name: local\n  config: {maxOutputBytes: 4}\n")
    assert reported("--config", file, "--", "printf 123456789")["stdout"]["text"] == "6789"
    report = reported("--config", file, "--max-output", "6", "--", "printf 123456789")
    assert report["stdout"]["text"] == "456789"


def test_a_small_memory_does_not_cost_output(tmp_path: Path) -> None:
    file = written(tmp_path, "- name: local\n  config: {max_output_bytes: 10}\n")
    done = corral("run", "--config", file, "seq", "1", "200000")
    assert done.stdout == "".join(f"{n}\n" for n in range(1, 200_001)).encode()
    assert (done.stderr, done.returncode) == (b"", 0)


def test_it_wins_over_the_variable_and_excludes_the_option(tmp_path: Path) -> None:
    file = written(tmp_path, "- name: local\n")
    assert corral("run", "--config", file, "echo", "x", env={"CORRAL_BACKEND": "nosuch"}).stdout == b"x\n"
    done = corral("run", "--config", file, "--backend", "local", "echo", "x")
    assert (done.returncode, done.stdout) == (125, b"")
    assert b"--backend and --config exclude one another" in done.stderr


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("- name: local\n  config: {timoutMs: 5}\n", b"unknown key 'timoutMs'; did you mean 'timeout_ms'?"),
        ("- name: local\n  config: {timeout_ms: soon}\n", b"timeout_ms"),
        ("- name: locla\n", b"did you mean 'local'?"),
        ("[]\n", b"exactly one entry, and there are 0"),
        ("- name: local\n- {id: other, name: local}\n", b"exactly one entry, and there are 2"),
        ("- [\n", b"not YAML"),
    ],
)
def test_a_file_with_mistakes_runs_nothing(tmp_path: Path, text: str, says: bytes) -> None:
    done = corral("run", "--config", written(tmp_path, text), "--", "echo ran")
    assert (done.returncode, done.stdout) == (125, b"")
    assert done.stderr.startswith(b"corral: ")
    assert says in done.stderr
    assert done.stderr.count(b"\n") == 1


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    done = corral("run", "--config", str(tmp_path / "nosuch.yaml"), "true")
    assert done.returncode == 125
    assert b"nosuch.yaml: cannot be read: No such file or directory" in done.stderr
