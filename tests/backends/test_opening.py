"""The place is opened by the first command, once for all who wait, with a limit of its own."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from typing import TYPE_CHECKING

import pytest

from corral import (
    AbortController,
    AbortedBeforeStartError,
    BashExecRequest,
    ExecutorDisposedError,
    PlaceLostError,
    PlaceOpenError,
    UnsupportedPlaceError,
)
from corral_backends.places.local import LocalPlace
from corral_backends.warden import DuplexStream, WardenConfig, WardenExecutor
from tests.support.aio import executor, run, run_command, spec, until
from tests.support.processes import Process, descendants

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.backend("local")


class GatedPlace(LocalPlace):
    """This machine, behind a gate that the test opens. `failures` is what the first openings raise."""

    def __init__(self, *failures: Exception) -> None:
        super().__init__()
        self.gate = asyncio.Event()
        self.failures = list(failures)
        self.openings = 0
        self.abandoned = 0
        self.closings = 0

    async def open(self) -> DuplexStream:
        self.openings += 1
        try:
            await self.gate.wait()
        except asyncio.CancelledError:
            self.abandoned += 1
            raise
        if self.failures:
            raise self.failures.pop(0)
        return await super().open()

    async def close(self) -> None:
        self.closings += 1
        await super().close()


def gated(place: GatedPlace, **options: int) -> WardenExecutor:
    return WardenExecutor(place, WardenConfig(kill_grace_ms=300, **options))  # type: ignore[arg-type]


async def turns() -> None:
    """Long enough for whatever can go on to go on."""
    for _ in range(20):
        await asyncio.sleep(0)


def ours() -> list[Process]:
    """The living processes below this one."""
    return [process for process in descendants(os.getpid()) if not process.zombie]


def test_opening_is_lazy() -> None:
    """Making an executor, resolving, listing and asking start nothing; the first command does."""

    async def scenario() -> None:
        async with executor() as made:
            made.resolve(BashExecRequest(command="true"))
            assert list(made.list()) == []
            made.on_task_done(lambda _task: None)
            assert ours() == []
            await run_command(made, "true")
            assert [process.warden for process in ours()] == [True]
        assert ours() == []

    run(scenario())


def test_opening_is_shared() -> None:
    """Ten first commands at once wait for one opening, and all of them are served."""

    async def scenario() -> None:
        place = GatedPlace()
        async with gated(place) as made:
            tasks = [asyncio.create_task(run_command(made, f"echo {number}")) for number in range(10)]
            await turns()
            place.gate.set()
            results = await asyncio.gather(*tasks)
            assert [result.stdout.text for result in results] == [f"{number}\n" for number in range(10)]
            assert (place.openings, place.closings) == (1, 0)
        assert place.closings == 1

    run(scenario())


@pytest.mark.parametrize("cancelled", [1, 3], ids=["one", "all"])
def test_opening_outlives_a_waiter_that_is_cancelled(cancelled: int) -> None:
    """Cancelling those who wait, even all of them, does not cancel the opening; the next command finds it."""

    async def scenario() -> None:
        place = GatedPlace()
        async with gated(place) as made:
            tasks = [asyncio.create_task(run_command(made, "echo served")) for _ in range(3)]
            await turns()
            for task in tasks[:cancelled]:
                task.cancel()
            await turns()
            assert [task.cancelled() for task in tasks] == [number < cancelled for number in range(3)]
            place.gate.set()
            for task in tasks[cancelled:]:
                assert (await task).stdout.text == "served\n"
            assert (await run_command(made, "echo next")).stdout.text == "next\n"
            assert (place.openings, place.abandoned) == (1, 0)

    run(scenario())


def test_opening_that_fails_is_told_to_all_and_tried_again() -> None:
    """Every waiter is told, by the place's own error; the next command opens anew."""

    async def scenario() -> None:
        first = PlaceOpenError("no way there", stage="connect", remedy="Build a road.", retryable=True)
        place = GatedPlace(first, ValueError("broken"))
        async with gated(place) as made:
            tasks = [asyncio.create_task(run_command(made, "true")) for _ in range(5)]
            await turns()
            place.gate.set()
            errors = await asyncio.gather(*tasks, return_exceptions=True)
            assert errors == [first] * 5
            with pytest.raises(PlaceOpenError, match="broken"):
                await run_command(made, "true")
            assert (await run_command(made, "echo at last")).stdout.text == "at last\n"
            assert (place.openings, place.closings) == (3, 2)

    run(scenario())


def test_opening_has_its_own_limit() -> None:
    """A place that does not get ready: PlaceOpenError after `open_timeout_ms`, which the remedy names."""

    async def scenario() -> None:
        place = GatedPlace()
        async with gated(place, open_timeout_ms=200) as made:
            began = time.monotonic()
            with pytest.raises(PlaceOpenError) as caught:
                await run_command(made, "true")
            assert 0.2 <= time.monotonic() - began < 1.5
            assert "open_timeout_ms" in (caught.value.remedy or "")
            assert (place.openings, place.abandoned, place.closings) == (1, 1, 1)
            place.gate.set()
            assert (await run_command(made, "echo ready")).stdout.text == "ready\n"

    run(scenario())


def test_opening_does_not_count_as_time_of_the_command() -> None:
    """The timeout of a command, and its duration, begin when its leader starts."""

    async def scenario() -> None:
        place = GatedPlace()
        async with gated(place) as made:
            task = asyncio.create_task(run_command(made, "echo in time", timeout_ms=400))
            await asyncio.sleep(0.6)
            place.gate.set()
            result = await task
            assert (result.exit_code, result.stdout.text) == (0, "in time\n")
            assert result.duration_ms < 400

    run(scenario())


def test_opening_and_an_abort(tmp_path: Path) -> None:
    """Aborted while opening: AbortedBeforeStartError at once; nothing is run, and the others are served."""

    async def scenario() -> None:
        controller = AbortController()
        place = GatedPlace()
        async with gated(place) as made:
            request = BashExecRequest(command=f"touch '{tmp_path}/ran'", signal=controller.signal)
            aborted = asyncio.create_task(made.run(made.resolve(request)))
            other = asyncio.create_task(run_command(made, "echo other"))
            await turns()
            await asyncio.to_thread(controller.abort, "enough")
            with pytest.raises(AbortedBeforeStartError) as caught:
                await asyncio.wait_for(aborted, 1)
            assert caught.value.reason == "enough"
            assert not other.done()
            place.gate.set()
            assert (await other).stdout.text == "other\n"
            assert place.openings == 1

    run(scenario())
    assert list(tmp_path.iterdir()) == []


def test_opening_and_a_dispose(tmp_path: Path) -> None:
    """Disposed while opening: the opening is given up, and whoever waited is told; nothing is run."""

    async def scenario() -> None:
        place = GatedPlace()
        made = gated(place)
        tasks = [asyncio.create_task(run_command(made, f"touch '{tmp_path}/ran'")) for _ in range(3)]
        await turns()
        await asyncio.wait_for(asyncio.shield(made.dispose()), 1)
        assert (place.openings, place.abandoned) == (1, 1)
        errors = await asyncio.gather(*tasks, return_exceptions=True)
        assert [type(error) for error in errors] == [ExecutorDisposedError] * 3

    run(scenario())
    assert list(tmp_path.iterdir()) == []


# --- wardens that are none

BROKEN = {
    "ends": "exit 0",
    "echoes": "exec cat",
    "chatters": "exec head -c 1000000 /dev/zero",
    "garbles": "printf 'CRRL%0100d' 0; exec sleep 20",
}


@pytest.mark.parametrize("how", BROKEN)
def test_opening_a_place_with_a_broken_warden(
    how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A warden that does not speak the protocol: PlaceOpenError, and no process of it is left."""
    program = tmp_path / "warden"
    program.write_text(f"#!/bin/sh\n{BROKEN[how]}\n")
    program.chmod(0o755)

    async def scenario() -> None:
        async with executor() as made:
            monkeypatch.setenv("CORRAL_WARDEN", str(program))
            with pytest.raises(PlaceOpenError):
                await asyncio.wait_for(run_command(made, "true"), 5)
            assert ours() == []
            monkeypatch.delenv("CORRAL_WARDEN")
            assert (await run_command(made, "echo healed")).stdout.text == "healed\n"

    run(scenario())


def test_opening_a_place_with_a_mute_warden(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that never answers is given up after the limit of the opening, and killed."""
    program = tmp_path / "warden"
    program.write_text("#!/bin/sh\ntrap '' TERM\nexec sleep 20\n")
    program.chmod(0o755)
    monkeypatch.setenv("CORRAL_WARDEN", str(program))

    async def scenario() -> None:
        async with executor(open_timeout_ms=300) as made:
            began = time.monotonic()
            with pytest.raises(PlaceOpenError, match="not ready"):
                await run_command(made, "true")
            assert time.monotonic() - began < 6
            assert ours() == []

    run(scenario())


def test_opening_a_place_without_a_warden(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No such program: UnsupportedPlaceError. One that may not be run: PlaceOpenError. Each names it."""
    program = tmp_path / "warden"
    monkeypatch.setenv("CORRAL_WARDEN", str(program))

    async def scenario() -> None:
        async with executor() as made:
            with pytest.raises(UnsupportedPlaceError, match="warden"):
                await run_command(made, "true")
            program.write_text("#!/bin/sh\n")
            for _ in range(2):
                with pytest.raises(PlaceOpenError, match="warden") as caught:
                    await run_command(made, "true")
                assert caught.value.remedy is not None
            assert ours() == []

    run(scenario())


# --- a place that goes away


def test_a_lost_place_is_opened_again(tmp_path: Path) -> None:
    """The command that was under way is lost with its output and not run again; the next one opens anew."""
    log = tmp_path / "log"

    async def scenario() -> None:
        async with executor() as made:
            for number in (1, 2):
                task = asyncio.create_task(run_command(made, f"echo out; echo {number} >>'{log}'; sleep 15"))
                await until(lambda: log.exists() and len(log.read_text().split()) == number)  # noqa: B023
                (dispatcher,) = [p for p in ours() if p.warden and p.ppid == os.getpid()]
                os.kill(dispatcher.pid, signal.SIGKILL)
                with pytest.raises(PlaceLostError) as caught:
                    await task
                assert caught.value.stdout is not None
                assert caught.value.stdout.text == "out\n"
                assert (await run_command(made, "echo again")).stdout.text == "again\n"
        assert log.read_text() == "1\n2\n"
        assert ours() == []

    run(scenario())


def test_opening_that_is_abandoned_leaves_nothing(tmp_path: Path) -> None:
    """Cancelled and disposed at every stage of a real opening: neither process nor descriptor is left."""

    def descriptors() -> int:
        return len(os.listdir("/proc/self/fd"))

    async def scenario() -> None:
        before = descriptors()
        for turn in range(12):
            async with executor(spill_dir=str(tmp_path)) as made:
                task = asyncio.create_task(made.run(spec(made, "sleep 15")))
                for _ in range(turn):
                    await asyncio.sleep(0)
                if turn % 2:
                    task.cancel()
                disposal = made.dispose()
            await disposal
            with contextlib.suppress(asyncio.CancelledError, ExecutorDisposedError):
                await task
            assert ours() == []
            assert descriptors() == before

    run(scenario())
    assert list(tmp_path.iterdir()) == []
