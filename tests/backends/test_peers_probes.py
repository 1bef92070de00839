"""Probes that command executors are known to fail: each is a bug that users of some executor met.

One test for each behaviour. What a command leaves is counted by a lifeline (tests/support/lifeline.py), which
every process of the command holds and of which the executor knows nothing. This file: children, kills, exit
statuses. The others: what commands are given (_input), and output and what concerns the host (_host).
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from typing import TYPE_CHECKING

import pytest

from corral import EndReason, PlaceLostError, TaskStatus, WorkdirError
from tests.support.aio import ended, executor, run, run_command, spec, start_command, until
from tests.support.lifeline import Lifeline
from tests.support.processes import descendants

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = pytest.mark.backend("local")

GRACE = 0.3  # seconds; what tests.support.aio.executor configures


@pytest.fixture
def line() -> Iterator[Lifeline]:
    with Lifeline() as made:
        yield made


# --- background children and pipes


def test_a_background_child_does_not_delay_the_result(line: Lifeline) -> None:
    """The result comes when the shell has exited, although a child holds its pipes; the child lives on."""

    async def scenario() -> None:
        async with executor() as made:
            began = time.monotonic()
            result = await run_command(made, line.prologue + "n sleep 15 & echo done")
            assert time.monotonic() - began < 1
            assert (result.exit_code, result.stdout.text) == (0, "done\n")
            assert result.reason is EndReason.EXITED
            assert line.held()
        assert not line.held()

    run(scenario())


def test_a_chattering_background_child_does_not_delay_the_result(line: Lifeline) -> None:
    """What it writes does not prolong the time for which more output is awaited, and is bounded."""

    async def scenario() -> None:
        async with executor() as made:
            began = time.monotonic()
            result = await run_command(made, line.prologue + "n timeout 15 yes >&1 & echo x")
            assert time.monotonic() - began < 1
            assert result.exit_code == 0
            assert len(result.stdout.data) <= 64_000
            assert set(result.stdout.data) <= set(b"xy\n")
            await asyncio.sleep(0.2)
            assert line.held(), "it was ended by a closed pipe"
        assert not line.held()

    run(scenario())


def test_an_escaped_child_neither_delays_nor_survives_a_timeout(line: Lifeline) -> None:
    """A child in a session of its own holds the pipes: the limit holds all the same, and it is killed."""

    async def scenario() -> None:
        async with executor() as made:
            began = time.monotonic()
            result = await run_command(
                made, line.prologue + "setsid sleep 15 & echo s; sleep 15", timeout_ms=500
            )
            assert 0.5 <= time.monotonic() - began < 0.5 + GRACE + 1
            assert not line.held()
            assert (result.timed_out, result.stdout.text) == (True, "s\n")

    run(scenario())


def test_the_exit_status_is_known_although_a_child_holds_the_pipes(line: Lifeline) -> None:
    async def scenario() -> None:
        async with executor() as made:
            assert (await run_command(made, line.prologue + "sleep 15 & exit 7")).exit_code == 7

    run(scenario())


def test_a_server_started_in_one_call_serves_the_next(line: Lifeline, tmp_path: Path) -> None:
    """Its log is read on after the call that started it: more than fits a pipe neither blocks nor ends it."""
    server = """\
n timeout 15 bash -c '
    exec 3<>requests
    while read -r word <&3; do printf "%0100000d\\n" 0 >&2; echo "served $word" >>answers; done' &"""

    async def scenario() -> None:
        async with executor(workdir=tmp_path) as made:
            assert (await run_command(made, line.prologue + server)).exit_code == 0
            for number in range(5):
                ask = (
                    f"echo {number} >requests; until grep -qs 'served {number}' answers; do sleep 0.01; done"
                )
                assert (await run_command(made, ask, timeout_ms=5_000)).exit_code == 0
        assert not line.held()

    os.mkfifo(tmp_path / "requests")
    run(scenario())


def test_output_through_a_process_substitution_is_complete() -> None:
    """What still runs through `tee` when the shell exits arrives."""

    async def scenario() -> None:
        async with executor() as made:
            for _ in range(50):
                result = await run_command(made, "exec > >(cat); echo one; echo two")
                assert result.stdout.text == "one\ntwo\n"

    run(scenario())


# --- timeouts and kills


def test_a_timeout_reaches_both_ends_of_a_fifo(line: Lifeline, tmp_path: Path) -> None:
    """Writer and reader of a named pipe both die, and what came through it until then is kept."""
    command = "mkfifo p; (while :; do echo c; sleep 0.2; done) >p & cat p"

    async def scenario() -> None:
        async with executor(workdir=tmp_path) as made:
            began = time.monotonic()
            result = await run_command(made, line.prologue + command, timeout_ms=600)
            assert time.monotonic() - began < 0.6 + GRACE + 1
            assert not line.held()
            assert result.timed_out
            assert result.stdout.text.startswith("c\nc\n")

    run(scenario())


def test_a_timeout_reaches_the_children_of_a_nested_shell(line: Lifeline) -> None:
    async def scenario() -> None:
        async with executor() as made:
            result = await run_command(made, line.prologue + "sh -c 'sleep 15 & wait'", timeout_ms=400)
            assert result.timed_out
            assert not line.held()

    run(scenario())


def test_a_timeout_ends_a_shell_that_became_its_only_command(line: Lifeline) -> None:
    """`bash -c 'sleep 15'` is replaced by sleep: there is only the leader, and it must go."""

    async def scenario() -> None:
        async with executor() as made:
            result = await run_command(made, line.prologue + "exec sleep 15", timeout_ms=300)
            assert (result.timed_out, result.exit_code, result.signal) == (True, None, "SIGTERM")
            assert not line.held()

    run(scenario())


def test_a_kill_reaches_the_whole_tree(line: Lifeline) -> None:
    """When the task is told to be done, neither the leader nor a child of it is alive."""

    async def scenario() -> None:
        async with executor() as made:
            task = start_command(made, line.prologue + "n sleep 15 & n sleep 15; :")
            await until(lambda: line.marks() >= 1)
            assert made.kill(task.id) is True
            assert made.kill(task.id) is False
            await ended(made, task)
            assert not line.held()
            assert (task.status, task.reason) == (TaskStatus.FINISHED, EndReason.KILLED)
            assert made.kill(task.id) is False

    run(scenario())


def test_sigterm_comes_first_and_its_trap_is_heard(line: Lifeline) -> None:
    """The output and the exit status of a trap count, and the rest of the tree dies too."""

    async def scenario() -> None:
        async with executor() as made:
            result = await run_command(
                made, line.prologue + "trap 'echo bye; exit 3' TERM; sleep 15 & wait", timeout_ms=400
            )
            assert (result.timed_out, result.exit_code, result.stdout.text) == (True, 3, "bye\n")
            assert not line.held()

    run(scenario())


def test_sigkill_follows_where_sigterm_is_ignored(line: Lifeline) -> None:
    """After the grace, not before it: a slow trap has that long."""

    async def scenario() -> None:
        async with executor() as made:
            began = time.monotonic()
            result = await run_command(
                made, line.prologue + "trap 'echo heard' TERM; while :; do sleep 0.01; done", timeout_ms=400
            )
            assert 0.4 + GRACE <= time.monotonic() - began < 0.4 + GRACE + 1
            assert (result.timed_out, result.signal, result.stdout.text) == (True, "SIGKILL", "heard\n")
            assert not line.held()

    run(scenario())


def test_a_kill_does_not_reach_the_host() -> None:
    """A command has a session and a process group of its own, also when it replaces its shell."""

    async def scenario() -> None:
        async with executor() as made:
            ids = (
                await run_command(
                    made, "read -r _ _ _ _ group session _ </proc/$$/stat; echo $group $session"
                )
            ).stdout
            group, session = ids.text.split()
            assert int(group) != os.getpgid(0)
            assert int(session) != os.getsid(0)
            task = start_command(made, "echo up; exec sleep 15")
            await until(lambda: made.read_output(task.id).stdout.data != b"")
            assert made.kill(task.id)
            await ended(made, task)
            # A signal to its own group ends the command, and nobody else.
            result = await run_command(made, "kill -TERM 0; sleep 1")
            assert (result.reason, result.signal) == (EndReason.SIGNALLED, "SIGTERM")
            assert (await run_command(made, "echo alive")).stdout.text == "alive\n"

    run(scenario())


# --- exit statuses and classes of errors


def test_every_exit_status_comes_back_as_it_is() -> None:
    async def scenario() -> None:
        async with executor() as made:
            for status in (0, 1, 7, 124, 125, 126, 127, 128, 130, 137, 143, 255):
                result = await run_command(made, f"exit {status}")
                assert (result.exit_code, result.signal, result.reason) == (status, None, EndReason.EXITED)

    run(scenario())


def test_the_status_of_a_task_is_known_when_its_listener_is_called() -> None:
    """Watching a task, and reading while it runs, does not change the status that it ends with."""

    async def scenario() -> None:
        async with executor() as made:
            seen: list[tuple[TaskStatus, int | None]] = []
            made.on_task_done(lambda task: seen.append((task.status, task.exit_code)))
            task = start_command(made, "echo one; sleep 0.05; echo two; exit 7")
            text = ""
            while task.status is TaskStatus.RUNNING:
                text += made.read_output(task.id).stdout.text
                await asyncio.sleep(0.005)
            text += made.read_output(task.id).stdout.text
            assert (seen, text) == ([(TaskStatus.FINISHED, 7)], "one\ntwo\n")

    run(scenario())


@pytest.mark.parametrize("name", ["SIGHUP", "SIGINT", "SIGKILL", "SIGSEGV", "SIGTERM", "SIGUSR1"])
def test_a_death_by_signal_names_the_signal(name: str) -> None:
    """And no made-up number takes the place of an exit status."""

    async def scenario() -> None:
        async with executor() as made:
            result = await run_command(made, f"ulimit -c 0; kill -{signal.Signals[name].value} $$; sleep 1")
            assert (result.exit_code, result.signal, result.reason) == (None, name, EndReason.SIGNALLED)

    run(scenario())


@pytest.mark.parametrize("victim", ["keeper", "dispatcher"])
def test_a_supervisor_that_dies_is_not_a_success(victim: str, line: Lifeline) -> None:
    """No exit status is made up, and no process outlives it.

    The keeper watches one command, the dispatcher all of them.
    """

    async def scenario() -> None:
        async with executor() as made:
            await run_command(made, "true")
            (dispatcher,) = [p.pid for p in descendants(os.getpid()) if p.warden]
            command = asyncio.create_task(
                run_command(made, line.prologue + "echo early; n sleep 15 & n sleep 15")
            )
            assert await asyncio.to_thread(line.wait_marks, 2, timeout=5)
            wardens = [p.pid for p in descendants(os.getpid()) if p.warden]
            (keeper,) = [pid for pid in wardens if pid != dispatcher]
            os.kill(keeper if victim == "keeper" else dispatcher, signal.SIGKILL)
            began = time.monotonic()
            with pytest.raises(PlaceLostError) as caught:
                await command
            assert time.monotonic() - began < 2
            assert caught.value.stdout is not None
            assert caught.value.stdout.text == "early\n"
            assert await asyncio.to_thread(line.wait_released, timeout=1)
            if victim == "keeper":
                assert (await run_command(made, "echo next")).stdout.text == "next\n"

    run(scenario())


def test_output_cannot_pass_for_a_failure_of_the_place() -> None:
    """Words of shells, daemons and protocols in the output are output."""
    texts = ["No such container", "bash: fork: retry", "\\x00CRRL\\x84", "\\xff" * 24, "__END__ 0", "exit 0"]

    async def scenario() -> None:
        async with executor() as made:
            for text in texts:
                result = await run_command(made, f"printf '{text}'; printf '{text}' >&2; exit 1")
                assert (result.exit_code, result.reason) == (1, EndReason.EXITED)
                expected = text.encode().decode("unicode_escape").encode("latin-1")
                assert result.stdout.data == result.stderr.data == expected

    run(scenario())


def test_a_missing_working_directory_is_named(tmp_path: Path) -> None:
    """By an error of its own, which is not the one about a missing shell; nothing is run."""
    file = tmp_path / "file"
    file.touch()

    async def scenario() -> None:
        async with executor() as made:
            for wrong in (tmp_path / "no" / "such", file):
                with pytest.raises(WorkdirError) as caught:
                    await made.run(spec(made, "echo ran >&2", workdir=wrong))
                assert caught.value.workdir == str(wrong)
                assert str(wrong) in str(caught.value)

    run(scenario())


def test_a_working_directory_that_vanishes_between_two_calls_is_named(tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()

    async def scenario() -> None:
        async with executor(workdir=gone) as made:
            assert (await run_command(made, "pwd -P")).stdout.text == f"{gone.resolve()}\n"
            gone.rmdir()
            with pytest.raises(WorkdirError) as caught:
                await run_command(made, "pwd")
            assert caught.value.workdir == str(gone)
            gone.mkdir()
            assert (await run_command(made, "pwd -P")).exit_code == 0

    run(scenario())
