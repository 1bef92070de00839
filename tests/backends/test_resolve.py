"""Resolve, for the local place: what a request becomes with this executor's options.

The checks that all executors share are in tests/seam/test_resolve.py.
"""

from __future__ import annotations

import os
from pathlib import Path, PurePosixPath

import pytest

from corral import BashExecRequest, OwnerToken
from corral_backends.places.local import LocalExecutor
from tests.support.aio import executor, run, run_command
from tests.support.processes import descendants

pytestmark = pytest.mark.backend("local")


def test_resolve_defaults() -> None:
    """What a request leaves out comes from the executor's options; equal requests give equal specs."""
    made = LocalExecutor(workdir="/srv", timeout_ms=5_000)
    resolved = made.resolve(BashExecRequest(command="true"))
    assert (resolved.workdir, resolved.timeout_ms) == (PurePosixPath("/srv"), 5_000)
    assert (resolved.signal, resolved.owner, dict(resolved.env), resolved.stdin) == (None, None, {}, None)
    assert made.resolve(BashExecRequest(command="true")) == resolved
    plain = LocalExecutor().resolve(BashExecRequest(command="true"))
    assert (plain.workdir, plain.timeout_ms) == (PurePosixPath(Path.cwd()), 120_000)


def test_resolve_does_no_io(tmp_path: Path) -> None:
    """No process and no file is made, a missing directory is no error yet, and no loop is needed."""
    before = [process.pid for process in descendants(os.getpid())]
    made = LocalExecutor(spill_dir=str(tmp_path))
    made.resolve(BashExecRequest(command="true", workdir=tmp_path / "missing"))
    assert [process.pid for process in descendants(os.getpid())] == before
    assert list(tmp_path.iterdir()) == []


def test_resolve_clamp() -> None:
    """A timeout above the cap is the cap, also the configured one; what is no positive integer is refused."""
    made = LocalExecutor(timeout_ms=700, max_timeout_ms=900)

    def timeout(value: int | None) -> int:
        return made.resolve(BashExecRequest(command="true", timeout_ms=value)).timeout_ms

    assert [timeout(value) for value in (None, 1, 900, 901, 10**12)] == [700, 1, 900, 900, 900]
    assert LocalExecutor(timeout_ms=10**9).resolve(BashExecRequest(command="true")).timeout_ms == 600_000
    for wrong in (0, -1, float("nan"), float("inf"), 1.0, "5", True):
        with pytest.raises(ValueError, match="timeout_ms"):
            timeout(wrong)  # type: ignore[arg-type]


def test_resolve_workdir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A relative directory is joined to the configured one, and that to where the host was when made."""
    monkeypatch.chdir(tmp_path)
    made = LocalExecutor(workdir="a")
    monkeypatch.chdir("/")

    def workdir(value: str | PurePosixPath | None) -> str:
        return str(made.resolve(BashExecRequest(command="true", workdir=value)).workdir)

    assert workdir(None) == f"{tmp_path}/a"
    assert workdir("b/../c") == f"{tmp_path}/a/b/../c"
    assert workdir(PurePosixPath("..")) == f"{tmp_path}/a/.."
    assert workdir("/etc") == "/etc"


def test_resolve_owner() -> None:
    """The token is carried as it is; the empty one is a token, and not the lack of one."""
    made = LocalExecutor()
    for token in ("", "a\nb\0c", "\U0001f600", "x" * 1_000_000):
        request = BashExecRequest(command="true", owner=OwnerToken(token))
        assert made.resolve(request).owner == token
    assert made.resolve(BashExecRequest(command="true")).owner is None


def test_resolve_only_specs(tmp_path: Path) -> None:
    """`run` and `start` take no raw request: TypeError, and nothing is run."""
    request = BashExecRequest(command=f"touch '{tmp_path}/ran'")

    async def scenario() -> None:
        async with executor() as made:
            with pytest.raises(TypeError, match=r"run\(\) takes the BashExecSpec"):
                await made.run(request)  # type: ignore[arg-type]
            with pytest.raises(TypeError, match=r"start\(\) takes the BashExecSpec"):
                made.start(request)  # type: ignore[arg-type]
            await run_command(made, "true")

    run(scenario())
    assert list(tmp_path.iterdir()) == []
