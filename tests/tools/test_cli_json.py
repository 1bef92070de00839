"""`corral run --json`: one object and nothing else, on the real local backend."""

from __future__ import annotations

import json
import signal
import time
from typing import TYPE_CHECKING, Any

import pytest

from tests.tools.command import Running, corral

if TYPE_CHECKING:
    import subprocess

pytestmark = pytest.mark.backend("local")

KEYS = {
    *("exit_code", "signal", "reason", "timed_out", "aborted", "timeout_ms", "duration_ms", "survivors"),
    *("stdout", "stderr", "backend"),
}
OUTPUT_KEYS = {"text", "total_bytes", "dropped_bytes", "truncated", "spill_path", "spill_start"}


def only_object(data: bytes) -> dict[str, Any]:
    """The one object that is all of standard output."""
    assert data.endswith(b"\n")
    assert data.count(b"\n") == 1
    value: dict[str, Any] = json.loads(data)
    assert isinstance(value, dict)
    return value


def result_of(done: subprocess.CompletedProcess[bytes]) -> dict[str, Any]:
    assert done.stderr == b""
    value = only_object(done.stdout)
    assert value.keys() == KEYS
    assert value["stdout"].keys() == OUTPUT_KEYS
    assert value["stderr"].keys() == OUTPUT_KEYS
    return value


def error_of(done: subprocess.CompletedProcess[bytes]) -> dict[str, Any]:
    assert (done.returncode, done.stderr) == (125, b"")
    value = only_object(done.stdout)
    assert value.keys() == {"error"}
    assert value["error"].keys() == {"type", "message", "stage", "remedy", "retryable"}
    return dict(value["error"])


def test_a_result() -> None:
    done = corral("run", "--json", "--", "echo out; echo err >&2; exit 7")
    result = result_of(done)
    assert done.returncode == 7
    assert 0 < result.pop("duration_ms") < 20_000
    output = {"dropped_bytes": 0, "truncated": False, "spill_path": None, "spill_start": None}
    assert result == {
        "exit_code": 7,
        "signal": None,
        "reason": "exited",
        "timed_out": False,
        "aborted": False,
        "timeout_ms": None,
        "survivors": 0,
        "stdout": {"text": "out\n", "total_bytes": 4, **output},
        "stderr": {"text": "err\n", "total_bytes": 4, **output},
        "backend": "local",
    }


def test_a_death_by_signal() -> None:
    done = corral("run", "--json", "--", "kill -9 $$")
    result = result_of(done)
    assert done.returncode == 137
    assert (result["exit_code"], result["signal"], result["reason"]) == (None, "SIGKILL", "signalled")


def test_a_timeout() -> None:
    done = corral("run", "--json", "--timeout", "1s", "--", "echo early; sleep 600")
    result = result_of(done)
    assert done.returncode == 124
    assert result["timed_out"] is True
    assert (result["reason"], result["timeout_ms"], result["survivors"]) == ("timed_out", 1_000, 0)
    assert result["stdout"]["text"] == "early\n"


def test_a_limit_above_the_default_maximum_is_not_cut() -> None:
    assert result_of(corral("run", "--json", "--timeout", "10h", "true"))["timeout_ms"] == 36_000_000


def test_the_tail_is_kept() -> None:
    command = "seq 1 100000; printf é >&2; head -c 99 /dev/zero | tr '\\0' x >&2"
    done = corral("run", "--json", "--max-output", "100", "--", command)
    result = result_of(done)
    full = "".join(f"{n}\n" for n in range(1, 100_001))
    out = result["stdout"]
    assert out["text"] == full[-100:]
    assert (out["total_bytes"], out["dropped_bytes"], out["truncated"]) == (len(full), len(full) - 100, True)
    assert (out["spill_path"], out["spill_start"]) == (None, None)
    # The cut goes through a character of two bytes: its second half is not shown.
    err = result["stderr"]
    assert (err["text"], err["total_bytes"], err["dropped_bytes"]) == ("x" * 99, 101, 1)


def test_what_is_not_utf8_is_replaced() -> None:
    result = result_of(corral("run", "--json", "--", r"printf 'a\377\0\r\nü'"))
    assert result["stdout"]["text"] == "a\ufffd\0\r\nü"
    assert result["stdout"]["total_bytes"] == 7


def test_a_missing_workdir() -> None:
    error = error_of(corral("run", "--json", "--workdir", "/no/such\udcff", "true"))
    assert error["type"] == "WorkdirError"
    assert "/no/such" in error["message"]
    assert error["stage"] == "workdir"
    assert error["retryable"] is False


@pytest.mark.parametrize(
    ("words", "kind", "says"),
    [
        (["--timeout", "never", "true"], "UsageError", "'--timeout'"),
        (["--no-such", "--", "true"], "UsageError", "--no-such"),
        (["--config", "/no/such\udcff.yaml", "true"], "ConfigError", "/no/such\udcff.yaml"),
        ([], "UsageError", "no command given"),
        (["--env", "BASH_ENV=x", "true"], "ValueError", "BASH_ENV"),
        (["--backend", "locla", "true"], "ConfigError", "did you mean 'local'?"),
    ],
)
def test_mistakes_of_the_caller(words: list[str], kind: str, says: str) -> None:
    error = error_of(corral("run", "--json", *words))
    assert error["type"] == kind
    assert says in error["message"]


def test_json_of_the_command_is_not_ours() -> None:
    done = corral("run", "--timeout", "nonsense", "--", "x", "--json")
    assert done.stdout == b""
    assert done.stderr.startswith(b"corral: ")


def test_an_interrupted_run_still_reports() -> None:
    with Running("run", "--json", "--", "trap 'echo bye; exit 3' TERM; echo hi; sleep 600 & wait") as running:
        deadline = time.monotonic() + 20
        while not any(line.startswith("sleep 600") for line in running.alive().values()):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        running.signal(signal.SIGINT)
        status, stdout, stderr = running.finish()
        running.assert_gone()
    assert (status, stderr) == (130, b"")
    result = only_object(stdout)
    assert (result["aborted"], result["reason"], result["survivors"]) == (True, "aborted", 0)
    assert result["stdout"]["text"] == "hi\nbye\n"
