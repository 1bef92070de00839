"""The host may be unusual: its signals, waits, loops, threads, forks and descriptors disturb nothing."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
import time
from typing import TYPE_CHECKING

import pytest

from corral import BashExecRequest, BashTaskId
from corral_backends.places.local import LocalExecutor
from tests.support.aio import executor, run, run_command
from tests.support.lifeline import Lifeline
from tests.support.lonely import ROOT_AND_LONELY
from tests.support.processes import descendants
from tests.support.shared import shared_directory
from tests.support.witness import Watch

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.support.accounts import Account

pytestmark = pytest.mark.backend("local")

every_account = pytest.mark.parametrize("account", ROOT_AND_LONELY, ids=str)


# --- exit statuses that others could take away


@pytest.mark.parametrize(
    ("ignored", "reaper"), [(True, False), (False, True), (True, True)], ids=["ignored", "reaped", "both"]
)
@every_account
def test_exit_statuses_do_not_depend_on_the_host(ignored: bool, reaper: bool, account: Account) -> None:
    """Right also where the host ignores SIGCHLD, or where a thread of it waits for all children."""
    arguments = {"sigchld_ignored": ignored, "reaper": reaper}
    with Watch("hosts:statuses", arguments, account=account) as watch:
        ends = watch.report("ends", timeout=20)["ends"]
        expected = [[7, None], [0, None], [255, None], [None, "SIGKILL"], [None, "SIGTERM"], [7, None]]
        assert ends == [expected] * 5
        watch.go()
        disposed = watch.report("disposed")
        assert watch.processes() == []
        assert watch.zombies() == []
        assert disposed["after"] == disposed["before"]
        watch.go()
        watch.finish()


# --- event loops


async def a_bit_of_everything(directory: Path) -> None:
    """Runs, a timeout, an abort by cancellation, a background task, a spill and a fetch."""
    async with executor(spill_dir=str(directory)) as made:
        results = await asyncio.gather(*(run_command(made, f"echo {n}; exit {n}") for n in range(20)))
        assert [result.exit_code for result in results] == list(range(20))
        assert (await run_command(made, "echo out; sleep 15", timeout_ms=200)).stdout.text == "out\n"
        task = asyncio.create_task(run_command(made, "sleep 15"))
        await asyncio.sleep(0.05)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        done = asyncio.Event()
        made.on_task_done(lambda _task: done.set())
        background = made.start(made.resolve(BashExecRequest(command="sleep 15; :")))
        await asyncio.sleep(0.05)
        assert made.kill(background.id)
        await done.wait()
        large = await run_command(made, "seq 200000; " + "#" * 300_000)
        assert large.stdout.spill_path is not None
        size = 0
        async for chunk in made.fetch(large.stdout.spill_path):
            size += len(chunk)
        assert size == large.stdout.total_bytes == 1_288_895
    assert [process for process in descendants(os.getpid()) if process.warden] == []


def test_loop_of_uvloop(tmp_path: Path) -> None:
    """uvloop's loop and transports serve as well, and nothing is left unclosed."""
    uvloop = pytest.importorskip("uvloop")

    async def limited() -> None:
        async with asyncio.timeout(20):
            await a_bit_of_everything(tmp_path)

    for _ in range(2):
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(limited())


def test_loop_in_another_thread(tmp_path: Path) -> None:
    """The executor may live in any thread, also in several at once; the thread may end after it."""
    errors: list[BaseException] = []

    def work(number: int) -> None:
        try:
            directory = tmp_path / str(number)
            directory.mkdir()
            asyncio.run(asyncio.wait_for(a_bit_of_everything_alone(directory), 20))
        except BaseException as error:
            errors.append(error)

    async def a_bit_of_everything_alone(directory: Path) -> None:
        async with executor(spill_dir=str(directory)) as made:
            for status in range(10):
                assert (await run_command(made, f"exit {status}")).exit_code == status
            assert (await run_command(made, "sleep 15", timeout_ms=200)).timed_out
            assert (await run_command(made, "seq 100000")).stdout.spill_path is not None

    threads = [threading.Thread(target=work, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(25)
    assert errors == []
    assert not any(thread.is_alive() for thread in threads)
    assert [process for process in descendants(os.getpid()) if process.warden] == []


NOBODY = BashTaskId("nobody")
USES: dict[str, Callable[[LocalExecutor], object]] = {
    "run": lambda made: made.run(made.resolve(BashExecRequest(command="true"))).send(None),
    "start": lambda made: made.start(made.resolve(BashExecRequest(command="true"))),
    "get": lambda made: made.get(NOBODY),
    "list": lambda made: made.list(),
    "owner_of": lambda made: made.owner_of(NOBODY),
    "read_output": lambda made: made.read_output(NOBODY),
    "kill": lambda made: made.kill(NOBODY),
    "fetch": lambda made: made.fetch("/x").__anext__().send(None),  # type: ignore[attr-defined]
    "dispose": lambda made: made.dispose(),
}


@pytest.mark.parametrize("use", USES)
def test_loop_of_its_own(use: str) -> None:
    """Without a loop, and in another one than that which used it first: RuntimeError, and no harm done."""

    async def elsewhere(made: LocalExecutor) -> None:
        with pytest.raises(RuntimeError, match=f"{use}: .*event loop"):
            USES[use](made)

    async def scenario() -> None:
        async with LocalExecutor() as made:
            assert (await run_command(made, "echo at home")).stdout.text == "at home\n"
            await asyncio.to_thread(asyncio.run, elsewhere(made))

            def nowhere() -> None:
                with pytest.raises(RuntimeError, match=f"{use}: no event loop"):
                    USES[use](made)

            await asyncio.to_thread(nowhere)
            assert (await run_command(made, "echo still")).stdout.text == "still\n"

    run(scenario())


# --- forks


@every_account
def test_forked_child(account: Account) -> None:
    """It is refused everything, may have an executor of its own, and its end disposes of nothing."""
    with (
        Lifeline() as line,
        Watch("hosts:forks", {"line": line.prologue}, account=account, line=line) as watch,
    ):
        for _ in ("fork", "multiprocessing"):
            forked = watch.report("forked", timeout=20)
            assert forked["child"].pop("own") == "child\n"
            for use, said in forked["child"].items():
                assert said.startswith(f"RuntimeError: {use}: "), said
                assert "forked child" in said
            assert (forked["then"]["stdout"], forked["task"]) == ("then\n", "running")
            assert line.held()
            assert len([p for p in watch.wardens() if p.ppid == watch.driver]) == 1
            watch.go()
        assert watch.report("over")["stdout"] == "parent\n"
        watch.go()
        watch.finish()
        assert not line.held()


@pytest.mark.parametrize("closed", [False, True], ids=["open", "closed"])
@every_account
def test_host_that_dies_before_its_forked_child(closed: bool, account: Account) -> None:
    """The child keeps the stream open; all the same everything is gone within 1 s of the host's SIGKILL.

    Also where the host had closed its standard descriptors, whose numbers then go to others.
    """
    arguments = {"line": "", "closed": closed}
    with Lifeline() as line:
        arguments["line"] = line.prologue
        with Watch("hosts:daemon", arguments, account=account, line=line) as watch:
            watch.report("running")
            assert line.wait_marks(2, timeout=5), watch.describe()
            watch.kill_driver()
            assert line.wait_released(timeout=1), watch.describe()
            deadline = time.monotonic() + 0.5
            while watch.wardens():
                assert time.monotonic() < deadline, watch.describe()
                time.sleep(0.01)


# --- descriptors

CLOSED = """
import asyncio, os, sys
from corral import BashExecRequest
from corral_backends.places.local import LocalExecutor
out = os.open(sys.argv[1], os.O_WRONLY | os.O_CREAT)
if out < 3:  # as it happens where they are closed
    out = [os.dup(out) for _ in range(3)][-1]
    for low in range(3):
        os.close(low)
async def main():
    if sys.argv[2] == "late":
        for low in range(3):
            os.close(low)
    async with LocalExecutor() as made:
        async def run(command):
            result = await made.run(made.resolve(BashExecRequest(command=command)))
            os.write(out, b"%d " % result.exit_code + result.stdout.data)
        await run("echo first; cat; exit 7")
        for low in range(3):
            try:
                os.write(low, b"a stray message, as of a library that logs to descriptor 2")
            except OSError:
                pass
        await run("ls /proc/self/fd | wc -l")
        await run("seq 30000 | tail -n 1; exit 5")
asyncio.run(main())
"""


@pytest.mark.parametrize("when", ["early", "late"])
def test_closed_standard_descriptors(when: str, tmp_path: Path) -> None:
    """A host without descriptors 0 to 2, from its start or later: what goes there by mistake does no harm."""
    out = tmp_path / "out"
    closing = 'exec "$@" <&- >&- 2>&-' if when == "early" else 'exec "$@"'
    program = ["bash", "-c", closing, "bash", sys.executable, "-c", CLOSED, str(out), when]
    done = subprocess.run(program, capture_output=True, timeout=20, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")
    assert out.read_text() == "7 first\n0 4\n5 30000\n"


@every_account
def test_few_descriptors(account: Account) -> None:
    """Where they run out, commands and openings fail at once with an error that says so; then all is well."""
    with Watch("hosts:few_descriptors", {"limit": 64}, account=account) as watch:
        crowd = watch.report("crowd", timeout=30)
        errors = [told for told in crowd["outcomes"] if "error" in told]
        fine = [told for told in crowd["outcomes"] if "error" not in told]
        assert len(fine) >= 20
        assert len(errors) >= 20, "the limit was not reached"
        assert {(told["error"], told["errno"], told["retryable"]) for told in errors} == {
            ("SpawnError", 24, True)
        }
        assert all("Too many open files" in told["message"] for told in errors)
        assert {told["exit_code"] for told in fine} == {0}
        assert crowd["then"]["stdout"] == "then\n"
        watch.go()
        openings = watch.report("openings", timeout=40)["openings"]
        assert watch.processes() == []
        for told in openings:
            assert (told["leaked"], told["left"]) == (0, []), told
            assert told["elapsed_ms"] < 5_000
            if "error" in told:
                assert told["error"] in ("PlaceOpenError", "SpawnError"), told
                assert "Too many open files" in told["message"]
            else:
                assert told["stdout"] == "opened\n"
                assert "--host-pidfd" in told["arguments"][0], told
        assert "error" in openings[0]
        assert "error" not in openings[-1]
        watch.go()
        watch.finish()


@every_account
def test_nothing_is_left_after_dispose(account: Account) -> None:
    """Descriptors, threads, asyncio tasks, processes, zombies and files are as many as before."""
    with shared_directory() as spill, Watch("hosts:uses", {"spill": str(spill)}, account=account) as watch:
        for _ in range(3):
            used = watch.report("used", timeout=20)
            assert watch.processes() == []
            assert watch.zombies() == []
            assert used["after"] == used["before"]
            assert used["left"] == []
            # While it is open: one socket, and a descriptor of the warden; no thread, and no task for a run.
            assert len(used["during"]["fds"]) == len(used["before"]["fds"]) + 2
            assert used["during"]["threads"] == used["before"]["threads"]
            assert used["during"]["tasks"] == used["before"]["tasks"]
            watch.go()
        watch.finish()


STRICT = """
import asyncio, logging, sys
# In development mode asyncio logs whatever took a busy machine more than 100 ms.
logging.getLogger("asyncio").setLevel(logging.ERROR)
sys.path.insert(0, sys.argv[1])
from tests.support.hosts import use
from corral_backends.places.local import LocalExecutor
async def main():
    async with LocalExecutor(kill_grace_ms=300) as made:
        await use(made)
asyncio.run(main())
forgotten = LocalExecutor()
del forgotten
"""


def test_no_warnings() -> None:
    """`python -X dev -W error` has nothing to say: nothing is left unclosed, unawaited, or deprecated."""
    root = __file__.rsplit("/tests/", 1)[0]
    done = subprocess.run(
        [sys.executable, "-X", "dev", "-W", "error", "-c", STRICT, root],
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
