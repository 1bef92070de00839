"""Run rejects only for infrastructure, by an error that names what is wrong, and then nothing was run.

A place that cannot be opened is in test_opening.py; what root is spared is in test_unprivileged.py.
"""

from __future__ import annotations

import asyncio
import dataclasses
import os
import shutil
from pathlib import PurePosixPath
from typing import TYPE_CHECKING

import pytest

from corral import (
    AbortController,
    AbortedBeforeStartError,
    BashExecRequest,
    ExecutorDisposedError,
    PlaceError,
    ShellNotFoundError,
    WorkdirError,
)
from tests.support.aio import executor, run, run_command, spec
from tests.support.processes import descendants

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.backend("local")


@pytest.fixture
def ran(tmp_path: Path) -> Path:
    """What a command would make if it were run."""
    return tmp_path / "ran"


# --- the working directory


@pytest.mark.parametrize("kind", ["missing", "file", "below-file", "loop", "long", "newline", "not-utf8"])
def test_rejects_workdir(kind: str, tmp_path: Path, ran: Path) -> None:
    """A directory that is missing or none: WorkdirError, whose `workdir` and one-line message name it."""
    (tmp_path / "file").touch()
    (tmp_path / "loop").symlink_to("loop")
    wrong = {
        "missing": tmp_path / "no" / "such",
        "file": tmp_path / "file",
        "below-file": tmp_path / "file" / "x",
        "loop": tmp_path / "loop",
        "long": tmp_path / ("n" * 300),
        "newline": tmp_path / "a\nb",
        "not-utf8": tmp_path / os.fsdecode(b"\xff\xfe"),
    }[kind]

    async def scenario() -> None:
        async with executor() as made:
            with pytest.raises(WorkdirError) as caught:
                await made.run(spec(made, f"touch '{ran}'", workdir=wrong))
            error = caught.value
            assert isinstance(error, PlaceError)
            assert error.workdir == str(wrong)
            assert repr(str(wrong)) in str(error)
            assert "\n" not in str(error)
            assert error.retryable is False
            assert (await run_command(made, "echo next")).stdout.text == "next\n"

    run(scenario())
    assert not ran.exists()


def test_rejects_workdir_that_vanished_between_two_calls(tmp_path: Path, ran: Path) -> None:
    """Also when its name now leads to a file, or to nothing; once it is back, commands run there again."""
    work, real = tmp_path / "work", tmp_path.resolve()
    work.mkdir()

    async def scenario() -> None:
        async with executor(workdir=work) as made:
            assert (await run_command(made, "pwd -P")).stdout.text == f"{real}/work\n"
            work.rmdir()
            with pytest.raises(WorkdirError, match="work"):
                await run_command(made, f"touch '{ran}'")
            work.touch()
            with pytest.raises(WorkdirError, match="work"):
                await run_command(made, f"touch '{ran}'")
            work.unlink()
            work.symlink_to(tmp_path)
            assert (await run_command(made, "pwd -P")).stdout.text == f"{real}\n"

    run(scenario())
    assert not ran.exists()


def test_rejects_one_and_harms_no_other(tmp_path: Path) -> None:
    """Of many commands at once those with a wrong directory fail, and the others run."""

    async def scenario() -> None:
        async with executor() as made:

            async def one(number: int) -> str:
                where = tmp_path if number % 2 else tmp_path / f"missing-{number}"
                return (await made.run(spec(made, f"echo {number}", workdir=where))).stdout.text

            results = await asyncio.gather(*(one(number) for number in range(40)), return_exceptions=True)
            for number, result in enumerate(results):
                if number % 2:
                    assert result == f"{number}\n"
                else:
                    assert isinstance(result, WorkdirError)
                    assert result.workdir.endswith(f"missing-{number}")

    run(scenario())


# --- the shell


@pytest.mark.parametrize("kind", ["missing", "directory", "not-executable", "no-program", "no-interpreter"])
def test_rejects_shell(kind: str, tmp_path: Path, ran: Path) -> None:
    """Where the configured bash is none: ShellNotFoundError with a remedy, for each command."""
    shell = tmp_path / "bash"
    if kind == "directory":
        shell.mkdir()
    elif kind != "missing":
        text = {"no-program": b"\x7fELF garbage", "no-interpreter": b"#!/no/such/interpreter\n"}.get(kind)
        shell.write_bytes(text or b"#!/bin/sh\n")
        shell.chmod(0o644 if kind == "not-executable" else 0o755)

    async def scenario() -> None:
        async with executor(shell=str(shell)) as made:
            for _ in range(2):
                with pytest.raises(ShellNotFoundError) as caught:
                    await run_command(made, f"touch '{ran}'")
                assert caught.value.remedy is not None
                assert "shell" in caught.value.remedy

    run(scenario())
    assert not ran.exists()


def test_rejects_shell_until_there_is_one(tmp_path: Path) -> None:
    """A bash that is installed later is found by the next command."""
    bash = shutil.which("bash")
    assert bash is not None
    shell = tmp_path / "bash"

    async def scenario() -> None:
        async with executor(shell=str(shell)) as made:
            with pytest.raises(ShellNotFoundError):
                await run_command(made, "true")
            shutil.copy(bash, shell)
            result = await run_command(made, "readlink /proc/$$/exe; :")
            assert result.stdout.text == f"{shell}\n"

    run(scenario())


def test_a_path_without_bash_is_no_place_without_bash(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The host's PATH may name none, or none that can be run: the system's own places are searched too."""
    (tmp_path / "bash").write_text("not a program")
    (tmp_path / "dir" / "bash").mkdir(parents=True)

    async def scenario() -> None:
        for path in (f"{tmp_path}", f"{tmp_path}/dir:.::relative", "", "/nonexistent"):
            monkeypatch.setenv("PATH", path)
            async with executor(workdir=tmp_path) as made:
                assert (await run_command(made, 'echo "$PATH"')).stdout.text == f"{path}\n"

    run(scenario())


# --- the caller


def test_rejects_pre_aborted(ran: Path) -> None:
    """A signal that is aborted already: AbortedBeforeStartError with its reason; not even the place opens."""

    async def scenario() -> None:
        controller = AbortController()
        reason = ValueError("enough")
        controller.abort(reason)
        before = [process.pid for process in descendants(os.getpid())]
        async with executor() as made:
            request = BashExecRequest(command=f"touch '{ran}'", signal=controller.signal)
            with pytest.raises(AbortedBeforeStartError) as caught:
                await made.run(made.resolve(request))
            assert caught.value.reason is reason
            assert [process.pid for process in descendants(os.getpid())] == before
            await run_command(made, "true")
            with pytest.raises(AbortedBeforeStartError):
                await made.run(made.resolve(request))

    run(scenario())
    assert not ran.exists()


@pytest.mark.parametrize("opened", [False, True], ids=["never-opened", "opened"])
def test_rejects_disposed(opened: bool, ran: Path) -> None:
    """After `dispose` has been called, also before it is over: ExecutorDisposedError, and nothing is run."""

    async def scenario() -> None:
        async with executor() as made:
            if opened:
                await run_command(made, "true")
            resolved = spec(made, f"touch '{ran}'")
            disposal = made.dispose()
            for _ in range(2):
                with pytest.raises(ExecutorDisposedError):
                    await made.run(resolved)
                with pytest.raises(ExecutorDisposedError):
                    made.start(resolved)
                with pytest.raises(ExecutorDisposedError):
                    async for _ in made.fetch("/etc/passwd"):
                        pass
                await disposal
            assert made.resolve(BashExecRequest(command="true")).command == "true"

    run(scenario())
    assert not ran.exists()


def test_rejects_a_spec_that_was_changed_by_hand(ran: Path) -> None:
    """What `resolve` would have refused is a ValueError in `run` too, and ends no other command."""
    changes: list[dict[str, object]] = [
        {"command": f"touch '{ran}'\0"},
        {"env": {"A": "b\0c"}},
        {"env": {"A=": "b"}},
        {"env": {"": "b"}},
        {"env": {"BASH_ENV": "/etc/passwd"}},
        {"workdir": PurePosixPath("/\0")},
    ]

    async def scenario() -> None:
        async with executor() as made:
            other = asyncio.create_task(run_command(made, "sleep 0.3; echo other"))
            resolved = spec(made, f"touch '{ran}'")
            for change in changes:
                with pytest.raises(ValueError, match=next(iter(change))):
                    await made.run(dataclasses.replace(resolved, **change))  # type: ignore[arg-type]
            assert (await other).stdout.text == "other\n"

    run(scenario())
    assert not ran.exists()
