"""A run is back when its leader has exited; what that leaves behind lives on until dispose."""

from __future__ import annotations

import asyncio
import os
import time
from typing import TYPE_CHECKING

import pytest

from corral import AbortController, BashExecRequest, BashRunResult, EndReason
from tests.support.aio import executor, run, run_command, until
from tests.support.batches import gathered
from tests.support.lifeline import Lifeline
from tests.support.processes import descendants

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from corral import BashExecutor

pytestmark = pytest.mark.backend("local")


@pytest.fixture
def line() -> Iterator[Lifeline]:
    with Lifeline() as made:
        yield made


async def quickest(made: BashExecutor, command: str) -> tuple[float, BashRunResult]:
    """The least time in seconds that one of five runs takes, and its result: the machine may be busy."""
    runs = []
    for _ in range(5):
        began = time.monotonic()
        result = await run_command(made, command)
        runs.append((time.monotonic() - began, result))
    return min(runs, key=lambda timed: timed[0])


# --- the leader exits


def test_leader_exit_ends_the_run(line: Lifeline) -> None:
    """`sleep 60 & echo hi` is back at once with its output and status; the sleep lives until dispose."""

    async def scenario() -> None:
        async with executor() as made:
            elapsed, result = await quickest(made, line.prologue + "n sleep 60 & echo hi; exit 7")
            assert elapsed < 0.3
            assert (result.exit_code, result.reason) == (7, EndReason.EXITED)
            assert (result.stdout.text, result.survivors) == ("hi\n", 0)
            assert line.wait_marks(5, timeout=5)
            await asyncio.sleep(0.2)
            assert line.held()
            assert len([p for p in descendants(os.getpid()) if p.comm == "sleep"]) == 5
        assert not line.held()

    run(scenario())


def test_leader_exit_without_anybody_at_the_pipes_waits_for_nothing(line: Lifeline) -> None:
    """A leftover that has let go of both pipes costs no wait at all: end of file is there."""

    async def scenario() -> None:
        async with executor() as made:
            elapsed, result = await quickest(made, line.prologue + "n sleep 60 >/dev/null 2>&1 & echo hi")
            assert elapsed < 0.045
            assert result.stdout.text == "hi\n"
            assert line.held()

    run(scenario())


def test_leader_exit_loses_nothing_through_a_process_substitution() -> None:
    """`echo hi > >(cat)` brings its output 100 times of 100, although the `cat` outlives the leader.

    Without waiting for it most of them bring nothing. On a machine that is so busy that a program does not
    get to run for 50 ms some may, hence a second chance.
    """

    async def complete(made: BashExecutor, command: str, expected: tuple[str, str]) -> bool:
        results = [await run_command(made, command) for _ in range(100)]
        return {(result.stdout.text, result.stderr.text) for result in results} == {expected}

    async def scenario() -> None:
        async with executor() as made:
            for command, expected in (
                ("echo hi > >(cat)", ("hi\n", "")),
                ("exec > >(cat) 2> >(cat >&2); echo hi; echo he >&2", ("hi\n", "he\n")),
            ):
                for _ in range(4):
                    if await complete(made, command, expected):
                        break
                else:
                    pytest.fail(f"output was lost in each of four hundreds: {command}")

    run(scenario(), timeout=50)


def test_leader_exit_is_not_put_off_by_a_chatty_leftover(line: Lifeline) -> None:
    """Output that keeps coming does not prolong the 50 ms that are waited for more of it."""

    async def scenario() -> None:
        async with executor() as made:
            for chatty in ("exec timeout 20 yes", "while :; do echo y; sleep 0.01; done"):
                elapsed, result = await quickest(made, line.prologue + f"({chatty}) & echo hi")
                assert elapsed < 0.3
                assert result.exit_code == 0
                assert set(result.stdout.data) <= set(b"hiy\n")
        assert not line.held()

    run(scenario())


def test_leader_exit_keeps_what_was_written_before_it() -> None:
    """All that the leader and its children wrote before the exit is there, also when pipes are full."""
    command = "head -c 300000 /dev/zero; head -c 200000 /dev/zero >&2; sleep 60 & printf end; printf end >&2"

    async def scenario() -> None:
        async with executor(max_output_bytes=1_000_000) as made:
            for _ in range(10):
                result = await run_command(made, command)
                assert result.stdout.data == bytes(300_000) + b"end"
                assert result.stderr.data == bytes(200_000) + b"end"

    run(scenario())


# --- leftovers


def test_leftovers_are_neither_blocked_nor_signalled(tmp_path: Path) -> None:
    """After the run a leftover writes 4 MB to each pipe: no SIGPIPE, no waiting, no error."""
    command = """\
(
    until [ -e go ]; do sleep 0.01; done
    head -c 4000000 /dev/zero && head -c 4000000 /dev/zero >&2 && echo "fine $?" >done
) &
echo hi"""

    async def scenario() -> None:
        async with executor(workdir=tmp_path) as made:
            assert (await run_command(made, command)).stdout.text == "hi\n"
            (tmp_path / "go").touch()
            done = tmp_path / "done"
            await until(lambda: done.exists() and done.read_text() == "fine 0\n")

    run(scenario())


def test_leftovers_write_into_no_spill(tmp_path: Path) -> None:
    """What comes after the result is discarded: no file is made for it, and none grows."""
    work, spill = tmp_path / "work", tmp_path / "spill"
    work.mkdir()
    spill.mkdir()
    late = """\
(
    until [ -e go ]; do sleep 0.01; done
    head -c 3000000 /dev/zero; head -c 3000000 /dev/zero >&2; echo >>done
) &"""

    async def scenario() -> None:
        async with executor(workdir=work, spill_dir=str(spill)) as made:
            small = await run_command(made, late + "\necho hi")
            large = await run_command(made, "head -c 200000 /dev/zero\n" + late)
            assert (small.stdout.spill_path, small.stderr.spill_path) == (None, None)
            assert large.stdout.spill_path is not None
            kept = spill / large.stdout.spill_path
            assert [file for file in spill.rglob("*") if file.is_file()] == [kept]
            (work / "go").touch()
            await until(lambda: (work / "done").exists() and (work / "done").read_text() == "\n\n")
            assert [file for file in spill.rglob("*") if file.is_file()] == [kept]
            assert kept.stat().st_size == large.stdout.total_bytes == 200_000
        assert list(spill.iterdir()) == []

    run(scenario())


def test_leftovers_serve_the_next_call(tmp_path: Path) -> None:
    """A server that one call starts answers in those that follow, whatever it logs to its old pipes."""
    os.mkfifo(tmp_path / "in")
    os.mkfifo(tmp_path / "out")
    server = """\
while read -r word; do
    printf '%0100000d\\n' 0; printf '%0100000d\\n' 0 >&2
    echo "served $word" >&3
done <>in 3<>out &
echo up"""

    async def scenario() -> None:
        async with executor(workdir=tmp_path) as made:
            assert (await run_command(made, server)).stdout.text == "up\n"
            for number in range(15):
                result = await run_command(made, f"echo {number} >in; read -r -t 5 answer <out; echo $answer")
                assert result.stdout.text == f"served {number}\n"

    run(scenario())


def test_leftovers_are_no_concern_of_the_call_that_is_over(line: Lifeline) -> None:
    """Neither its timeout nor its abort reaches them."""

    async def scenario() -> None:
        controller = AbortController()
        async with executor() as made:
            command = line.prologue + "n setsid sleep 60 & n sleep 60 & until [ -e /proc/$!/exe ]; do :; done"
            request = BashExecRequest(command=command, timeout_ms=400, signal=controller.signal)
            result = await made.run(made.resolve(request))
            assert (result.exit_code, result.reason) == (0, EndReason.EXITED)
            assert await asyncio.to_thread(line.wait_marks, 2, timeout=5)
            sleeps = {p.pid for p in descendants(os.getpid()) if p.comm == "sleep"}
            assert len(sleeps) == 2
            await asyncio.sleep(0.5)
            controller.abort()
            await asyncio.sleep(0.1)
            assert {p.pid for p in descendants(os.getpid()) if p.comm == "sleep"} == sleeps
        assert not line.held()

    run(scenario())


def test_leftovers_of_a_killed_command_are_none(line: Lifeline) -> None:
    """A timeout is another matter: the leader has not exited by itself, and nothing is left over."""

    async def scenario() -> None:
        async with executor() as made:
            command = line.prologue + "n setsid sleep 60 & n sleep 60 & n sleep 60"
            result = await run_command(made, command, timeout_ms=500)
            assert result.timed_out
            assert line.marks() == 3
            assert not line.held()

    run(scenario())


def test_leftovers_end_with_dispose(line: Lifeline) -> None:
    """Of twenty calls each leaves one that ignores SIGTERM: none is alive when `dispose` is back."""
    command = line.prologue + "(trap '' TERM HUP INT; printf m >&9; while :; do sleep 60; done) & disown; :"

    async def scenario() -> None:
        async with executor() as made:
            await gathered(run_command(made, command) for _ in range(20))
            assert await asyncio.to_thread(line.wait_marks, 20, timeout=5)
            began = time.monotonic()
            await made.dispose()
            assert not line.held()
            assert time.monotonic() - began < 0.3 + 1.5

    run(scenario())
