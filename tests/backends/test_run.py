"""Run, in the local place: how a command ends, and within what time.

Commands that cannot be started are in test_rejects.py and test_opening.py, what a command leaves behind in
test_leftovers.py, what it is given in test_environment.py and test_verbatim.py.
"""

from __future__ import annotations

import asyncio
import signal
import time
from typing import TYPE_CHECKING

import pytest

from corral import AbortController, BashExecRequest, EndReason
from tests.support.aio import executor, run, run_command, spec, until
from tests.support.batches import gathered
from tests.support.lifeline import Lifeline
from tests.support.processes import look

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = pytest.mark.backend("local")

GRACE = 0.3  # seconds; what tests.support.aio.executor configures


@pytest.fixture
def line() -> Iterator[Lifeline]:
    with Lifeline() as made:
        yield made


# --- exit codes and signals


def test_exit_code() -> None:
    """Every status from 0 to 255 comes back as it is, also those that look like a death by signal."""

    async def scenario() -> None:
        async with executor() as made:
            results = await gathered(run_command(made, f"exit {status}") for status in range(256))
            assert [result.exit_code for result in results] == list(range(256))
            assert {(result.signal, result.reason) for result in results} == {(None, EndReason.EXITED)}
            # bash takes a status modulo 256, and that is what it exits with.
            assert [(await run_command(made, f"exit {n}")).exit_code for n in (256, 257, -1)] == [0, 1, 255]

    run(scenario(), timeout=40)


IGNORED_OR_STOPPING = {"CHLD", "CONT", "STOP", "TSTP", "TTIN", "TTOU", "URG", "WINCH"}
FATAL = {number: name for number in signal.Signals if (name := number.name)[3:] not in IGNORED_OR_STOPPING}
REALTIME = {int(signal.SIGRTMIN) + 1: "SIGRTMIN+1", int(signal.SIGRTMAX) - 1: "SIGRTMIN+29"}


def test_signal_death() -> None:
    """Every signal that ends a process is named, and no number takes the place of the exit code."""
    names = {**{int(number): name for number, name in FATAL.items()}, **REALTIME}
    assert len(names) >= 25

    async def scenario() -> None:
        async with executor() as made:
            commands = [f"ulimit -c 0; kill -{number} $$; sleep 5" for number in names]
            # bash itself ignores this one, so another program takes its place first.
            commands[list(names).index(signal.SIGQUIT)] = (
                "{ until [[ $(</proc/$$/comm) == sleep ]]; do :; done; kill -QUIT $$; } & exec sleep 5"
            )
            results = await gathered(run_command(made, command) for command in commands)
            assert [result.signal for result in results] == list(names.values())
            assert {(result.exit_code, result.reason) for result in results} == {(None, EndReason.SIGNALLED)}

    run(scenario())


def test_signal_death_is_not_status_137() -> None:
    """`exit 137`, and a child that was killed, are exit codes; only the leader's own death is a signal."""

    async def scenario() -> None:
        async with executor() as made:
            for command, expected in (
                ("kill -9 $$", (None, "SIGKILL", EndReason.SIGNALLED)),
                ("exit 137", (137, None, EndReason.EXITED)),
                ("bash -c 'kill -9 $$'; exit $?", (137, None, EndReason.EXITED)),
                ("exec bash -c 'kill -9 $$'", (None, "SIGKILL", EndReason.SIGNALLED)),
            ):
                result = await run_command(made, command)
                assert (result.exit_code, result.signal, result.reason) == expected, command

    run(scenario())


# --- any end is a result, with what came until then


def test_nonzero_resolves() -> None:
    """A failing command is a result with its output, whatever way it fails."""

    async def scenario() -> None:
        async with executor() as made:
            for command, status in (
                ("echo out; echo err >&2; exit 3", 3),
                ("echo out; echo err >&2; no-such-program 2>&-", 127),
                ("echo out; echo err >&2; /etc/passwd 2>&-", 126),
                ("echo out; echo err >&2; set -e; false; echo no", 1),
            ):
                result = await run_command(made, command)
                assert (result.exit_code, result.reason) == (status, EndReason.EXITED)
                assert (result.stdout.text, result.stderr.text) == ("out\n", "err\n")
                assert (result.timed_out, result.aborted) == (False, False)

    run(scenario())


def test_timeout_resolves() -> None:
    """With the partial output, the limit that applied, and how the leader was ended."""

    async def scenario() -> None:
        async with executor() as made:
            result = await run_command(made, "echo out; echo err >&2; sleep 15; echo no", timeout_ms=300)
            assert (result.timed_out, result.aborted, result.reason) == (True, False, EndReason.TIMED_OUT)
            assert (result.exit_code, result.signal) == (None, "SIGTERM")
            assert (result.stdout.text, result.stderr.text) == ("out\n", "err\n")
            assert (result.timeout_ms, result.survivors) == (300, 0)
            assert 300 <= result.duration_ms < 300 + GRACE * 1_000 + 1_000

    run(scenario())


@pytest.mark.parametrize("from_thread", [False, True], ids=["same-thread", "other-thread"])
def test_abort_resolves(from_thread: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """With the partial output; the signal may be aborted in any thread."""
    up = tmp_path / "up"

    async def scenario() -> None:
        # So that the loop complains of use from another thread.
        asyncio.get_running_loop().set_debug(True)
        controller = AbortController()
        async with executor() as made:
            command = f"echo out; echo err >&2; touch '{up}'; sleep 15"
            request = BashExecRequest(command=command, signal=controller.signal)
            task = asyncio.create_task(made.run(made.resolve(request)))
            await until(up.exists)
            began = time.monotonic()
            if from_thread:
                await asyncio.to_thread(controller.abort, "enough")
            else:
                controller.abort("enough")
            result = await task
            assert time.monotonic() - began < GRACE + 1
            assert (result.timed_out, result.aborted, result.reason) == (False, True, EndReason.ABORTED)
            assert (result.exit_code, result.signal) == (None, "SIGTERM")
            assert (result.stdout.text, result.stderr.text) == ("out\n", "err\n")

    run(scenario())
    assert [record.getMessage() for record in caplog.records if record.name == "corral"] == []


def test_first_cause_wins(line: Lifeline) -> None:
    """An abort during the grace of a timeout changes neither the reason nor the time of the end."""

    async def scenario() -> None:
        controller = AbortController()
        async with executor() as made:
            command = line.prologue + "trap 'printf m >&9; sleep 0.1; exit 9' TERM; sleep 15 & wait"
            request = BashExecRequest(command=command, timeout_ms=300, signal=controller.signal)
            task = asyncio.create_task(made.run(made.resolve(request)))
            assert await asyncio.to_thread(line.wait_marks, 1, timeout=5)
            controller.abort()
            result = await task
            assert (result.reason, result.exit_code) == (EndReason.TIMED_OUT, 9)
            assert (result.timed_out, result.aborted) == (True, False)

    run(scenario())


# --- the end of a command that does not end


def test_timeout_bound(line: Lifeline) -> None:
    """Whatever ignores SIGTERM, is stopped, or has left the session: gone within timeout + grace + 1 s."""
    tree = """\
trap '' TERM INT HUP
n sleep 15 &
setsid bash -c 'printf m >&9; kill -STOP $$; sleep 15' &
setsid -f bash -c 'printf m >&9; exec sleep 15'
printf m >&9
while :; do sleep 15; done"""

    async def scenario() -> None:
        async with executor() as made:
            await run_command(made, "true")
            began = time.monotonic()
            result = await run_command(made, line.prologue + tree, timeout_ms=800)
            elapsed = time.monotonic() - began
            assert not line.held(), line.holders()
            assert line.marks() == 4
            assert (result.timed_out, result.signal, result.survivors) == (True, "SIGKILL", 0)
            assert 0.8 + GRACE <= elapsed < 0.8 + GRACE + 1

    run(scenario())


def test_term_then_kill_keeps_the_trap(tmp_path: Path) -> None:
    """SIGTERM comes first and to all of the tree; what traps write, and the leader's exit code, count."""
    command = f"""\
trap 'echo bye; echo err >&2; exit 42' TERM
setsid bash -c 'trap "echo child >{tmp_path}/child; exit" TERM; touch {tmp_path}/up; sleep 15 & wait' &
until [ -e {tmp_path}/up ]; do sleep 0.01; done
touch {tmp_path}/ready
sleep 15 & wait"""

    async def scenario() -> None:
        controller = AbortController()
        async with executor(kill_grace_ms=3_000) as made:
            request = BashExecRequest(command=command, signal=controller.signal)
            task = asyncio.create_task(made.run(made.resolve(request)))
            await until((tmp_path / "ready").exists)
            began = time.monotonic()
            controller.abort()
            result = await task
            assert time.monotonic() - began < 2, "it waited although all of the tree had ended"
            assert (result.exit_code, result.signal, result.aborted) == (42, None, True)
            assert (result.stdout.text, result.stderr.text) == ("bye\n", "err\n")
            assert (tmp_path / "child").read_text() == "child\n"

    run(scenario())


def test_term_then_kill_waits_for_the_grace() -> None:
    """SIGKILL comes after the grace and not before: a slow trap has that long, and its output is kept."""
    command = "trap 'for i in {1..100}; do echo $i; sleep 0.05; done' TERM; sleep 15 & wait; sleep 15"

    async def scenario() -> None:
        async with executor() as made:
            began = time.monotonic()
            result = await run_command(made, command, timeout_ms=300)
            assert 0.3 + GRACE <= time.monotonic() - began < 0.3 + GRACE + 1
            assert (result.signal, result.timed_out) == ("SIGKILL", True)
            assert result.stdout.text.startswith("1\n2\n")

    run(scenario())


def test_term_then_kill_without_grace(tmp_path: Path) -> None:
    """With a grace of 0 SIGKILL comes at once, and no trap is run."""

    async def scenario() -> None:
        async with executor(kill_grace_ms=0) as made:
            command = f"trap 'touch {tmp_path}/trapped' TERM; sleep 15 & wait; sleep 15"
            began = time.monotonic()
            result = await run_command(made, command, timeout_ms=300)
            assert time.monotonic() - began < 0.3 + 1
            assert (result.signal, result.timed_out) == ("SIGKILL", True)
            assert not (tmp_path / "trapped").exists()

    run(scenario())


def test_term_then_kill_continues_the_stopped() -> None:
    """A stopped process is continued, hears the SIGTERM, and ends in its own way before the grace is over."""

    async def scenario() -> None:
        async with executor(kill_grace_ms=5_000) as made:
            began = time.monotonic()
            result = await run_command(made, "trap 'echo heard; exit 3' TERM; kill -STOP $$", timeout_ms=300)
            assert time.monotonic() - began < 2
            assert (result.exit_code, result.timed_out, result.stdout.text) == (3, True, "heard\n")

    run(scenario())


def test_cancel(line: Lifeline) -> None:
    """Cancelling the awaiting task kills the tree, and only then raises CancelledError."""

    async def scenario() -> None:
        async with executor() as made:
            task = asyncio.create_task(run_command(made, line.prologue + "n setsid sleep 15 & n sleep 15"))
            assert await asyncio.to_thread(line.wait_marks, 2, timeout=5)
            task.cancel("enough")
            with pytest.raises(asyncio.CancelledError):
                await task
            assert not line.held()
            assert (await run_command(made, "echo next")).stdout.text == "next\n"

    run(scenario())


# --- in parallel


def test_concurrent_runs_do_not_mix() -> None:
    """100 at once, each with its own directory, environment, input, output and exit code."""

    async def scenario() -> None:
        async with executor(workdir="/") as made:

            async def one(number: int) -> None:
                command = 'read -r x; echo "$x $V $PWD"; echo "e$V" >&2; sleep 0.2; exit "$V"'
                where = ("/", "/etc", "/usr", "/tmp")[number % 4]
                asked = spec(made, command, env={"V": str(number)}, stdin=b"in%d\n" % number, workdir=where)
                result = await made.run(asked)
                assert result.exit_code == number
                assert result.stdout.text == f"in{number} {number} {where}\n"
                assert result.stderr.text == f"e{number}\n"

            await gathered((one(number) for number in range(100)), at_once=100)

    run(scenario(), timeout=40)


def test_concurrent_runs_do_not_wait_for_one_another(tmp_path: Path) -> None:
    """40 commands of which each waits until all of them run: one after the other they would never end."""
    command = "echo $$ >>here; until [ $(wc -l <here) = 40 ]; do sleep 0.05; done"

    async def scenario() -> None:
        async with executor(workdir=tmp_path) as made:
            results = await gathered(
                (run_command(made, command, timeout_ms=20_000) for _ in range(40)), at_once=40
            )
            assert {(result.exit_code, result.timed_out) for result in results} == {(0, False)}

    run(scenario(), timeout=40)


def test_concurrent_floods_do_not_block_the_loop() -> None:
    """Ten commands write as fast as they can: 20 ms ticks keep coming, and bytes are not handled for long.

    How late a tick comes depends on how busy the machine is, so what decides is also how much processor time
    the loop's thread spends between two of them.
    """

    async def scenario() -> None:
        late: list[float] = []
        spent: list[float] = []

        async def tick() -> None:
            while True:
                due, before = time.monotonic() + 0.02, time.thread_time()
                await asyncio.sleep(0.02)
                late.append(time.monotonic() - due)
                spent.append(time.thread_time() - before)

        async with executor(max_spill_bytes=4 << 20) as made:
            await run_command(made, "true")
            ticker = asyncio.create_task(tick())
            floods = (run_command(made, "exec cat /dev/zero", timeout_ms=1_500) for _ in range(10))
            results = await asyncio.gather(*floods)
            ticker.cancel()
            assert {result.timed_out for result in results} == {True}
            assert min(result.stdout.total_bytes for result in results) > 10 << 20
            assert len(late) >= 25
            assert sorted(late)[len(late) // 2] < 0.02
            assert max(late) < 0.5
            assert max(spent) < 0.05

    run(scenario())


def test_the_leader_is_reaped(line: Lifeline) -> None:
    """When `run` is back its bash is no more: neither alive nor a zombie, whatever leftovers there are."""

    async def scenario() -> None:
        async with executor() as made:
            for ending in ("exit 3", "kill -9 $$", "n sleep 15 & exit 0"):
                result = await run_command(made, line.prologue + f"echo $$\n{ending}")
                assert look(int(result.stdout.text)) is None

    run(scenario())
