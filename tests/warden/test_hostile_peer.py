"""`WardenExecutor` and a warden that says anything at all, at any time.

The peer and the clock are in memory (`peer.py`), so whole sessions with all their timeouts take
milliseconds. Whatever comes, every `run` has an outcome that the seam knows, every task ends once, and
nothing is left.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeAlias

from hypothesis import given
from hypothesis import strategies as st

from corral import (
    AbortController,
    BashRunResult,
    BashTask,
    CorralError,
    EndReason,
    PlaceLostError,
    TaskStatus,
)
from corral_backends.warden import WardenExecutor
from tests.warden import peer
from tests.warden.peer import JumpingLoop
from tests.warden.scripted import (
    GRACE_MS,
    LIMIT,
    SETTINGS,
    TIMEOUT_MS,
    Scripted,
    Step,
    executor,
    killed,
    request,
    whole_end,
)

# --- legal sessions


@given(
    st.lists(
        st.tuples(
            st.integers(0, 1), st.sampled_from([0, 0, 0, 5, 70_000]), st.binary(min_size=1, max_size=60)
        ),
        max_size=8,
    ),
    st.integers(0, 255),
    st.sampled_from([0, 1, 13, 100]),
    st.integers(0, 8),
)
@SETTINGS
def test_what_the_warden_says_is_what_comes_out(
    written: list[tuple[int, int, bytes]], code: int, pieces: int, exit_after: int
) -> None:
    def script(task: int) -> list[Step]:
        steps: list[Step] = [(0, peer.started(task))]
        for number, (stream, skipped, content) in enumerate(written):
            if number == exit_after:
                steps.append((0, peer.exited(task, value=code)))
            at[stream] += skipped
            tails[stream] = content if skipped else tails[stream] + content
            steps.append((0.001, peer.data(task, stream + 1, at[stream], content)))
            at[stream] += len(content)
        if exit_after >= len(written):
            steps.append((0, peer.exited(task, value=code)))
        return [*steps, (0.01, whole_end(task, *at) + peer.gone(task))]

    at, tails = [0, 0], [b"", b""]

    async def scenario(_: JumpingLoop) -> BashRunResult:
        runner, _place = executor(Scripted([script], pieces=pieces))
        async with runner:
            return await runner.run(runner.resolve(request()))

    result = peer.run(scenario)
    assert (result.exit_code, result.signal, result.reason) == (code, None, EndReason.EXITED)
    for collected, total, tail in zip((result.stdout, result.stderr), at, tails, strict=True):
        assert (collected.total_bytes, collected.data) == (total, tail)
        assert collected.dropped_bytes == total - len(tail)


# --- arbitrary ones

numbers = st.sampled_from([0, 1, 2, 3, 4, 77, 0xFFFFFFFF])
offsets = st.sampled_from([0, 1, 5, 100, 64_000, 1 << 40, (1 << 64) - 1])
said = st.one_of(
    st.builds(peer.started, numbers),
    st.builds(peer.data, numbers, st.integers(1, 2), offsets, st.binary(max_size=30)),
    st.builds(lambda task, stream: peer.data(task, stream, 0, bytes(100_000)), numbers, st.integers(1, 2)),
    st.builds(peer.spill, numbers, st.integers(1, 2), offsets, st.sampled_from(["", "/x", "y"])),
    st.builds(peer.exited, numbers, st.integers(1, 3), st.sampled_from([0, 1, 9, 34, 64, 128])),
    st.builds(peer.end, numbers, *[st.builds(peer.stream_end, offsets, st.sampled_from([0, 0, 5]))] * 2),
    st.builds(whole_end, numbers),
    st.builds(peer.gone, numbers, st.integers(0, 2)),
    st.builds(peer.error, numbers, st.integers(1, 7), st.sampled_from([0, 1, 2, 11, 4095])),
    st.builds(peer.pong, st.integers(0, 5)),
    st.just(peer.BYE),
    st.just(peer.ready()),
    st.binary(max_size=40),
    st.builds(killed, numbers),
    st.sampled_from(["hang up", "broken"]),
)
delays = st.sampled_from([0.0, 0.0, 0.0, 0.001, 0.3, 3.0, 30.0])
scripts = st.lists(st.tuples(delays, said), max_size=8)


@st.composite
def mostly_legal(draw: st.DrawFn) -> Callable[[int], list[Step]]:
    """A legal session of one task in which some steps were dropped, doubled, moved or replaced."""
    damage = draw(
        st.lists(
            st.tuples(st.sampled_from(["drop", "double", "swap", "put"]), st.integers(0, 6), scripts),
            max_size=3,
        )
    )
    wait = draw(delays)

    def script(task: int) -> list[Step]:
        content = b"some output"
        steps: list[Step] = [
            (0, peer.started(task)),
            (wait, peer.data(task, 1, 0, content)),
            (0, peer.data(task, 2, 3, content)),
            (0.001, peer.exited(task, value=3)),
            (0, peer.data(task, 1, 11, content)),
            (0.01, whole_end(task, 22, 14)),
            (wait, peer.gone(task)),
        ]
        for how, at, instead in damage:
            at %= max(1, len(steps))
            if how == "drop":
                del steps[at : at + 1]
            elif how == "double":
                steps[at:at] = steps[at : at + 1]
            elif how == "swap" and steps:
                steps.append(steps.pop(at))
            else:
                steps[at:at] = instead
        return steps

    return script


Doing: TypeAlias = tuple[str, float]
doings = st.lists(
    st.tuples(st.sampled_from(["run", "run", "start", "abort", "cancel", "kill", "read"]), delays),
    min_size=1,
    max_size=6,
)

# A foreground command: 10 s until its start is suspect, 5 s until the warden is, its timeout and grace;
# twice, since the one before it may have cost the place. More, and something waits for what never comes.
LONGEST = 2 * (10 + 5 + (TIMEOUT_MS + GRACE_MS) / 1000 + 5)


class Consumer:
    """Does things with an executor, and checks every outcome."""

    def __init__(self, runner: WardenExecutor) -> None:
        self.runner = runner
        self.done: list[BashTask] = []
        self.tasks: list[BashTask] = []
        self.runs: list[asyncio.Task[None]] = []
        runner.on_task_done(self.done.append)

    async def outcome(self, abort: AbortController | None) -> None:
        loop = asyncio.get_running_loop()
        began = loop.time()
        try:
            result = await self.runner.run(self.runner.resolve(request("x", abort)))
        except (CorralError, ValueError):
            pass
        else:
            assert (result.exit_code is None) or (result.signal is None)
            assert result.stdout.total_bytes == result.stdout.dropped_bytes + len(result.stdout.data)
            assert len(result.stdout.data) <= LIMIT
        assert loop.time() - began < LONGEST, "an outcome that came too late"

    async def do(self, what: str) -> None:
        if what == "run":
            self.runs.append(asyncio.create_task(self.outcome(None)))
        elif what == "abort":
            abort = AbortController()
            self.runs.append(asyncio.create_task(self.outcome(abort)))
            asyncio.get_running_loop().call_later(0.1, abort.abort)
        elif what == "cancel":
            self.runs.append(asyncio.create_task(self.outcome(None)))
            asyncio.get_running_loop().call_later(0.05, self.runs[-1].cancel)
        elif what == "start":
            self.tasks.append(self.runner.start(self.runner.resolve(request("y"))))
        else:
            for task in self.tasks:
                read = self.runner.read_output(task.id)
                assert read.stdout.end == read.stdout.start + len(read.stdout.data)
                if what == "kill":
                    self.runner.kill(task.id)

    async def finish(self) -> None:
        for run in self.runs:
            try:
                await run
            except asyncio.CancelledError:
                assert run.cancelled()
        for task in self.tasks:
            self.runner.kill(task.id)
        loop = asyncio.get_running_loop()
        until = loop.time() + LONGEST
        while any(task.status is TaskStatus.RUNNING for task in self.tasks) and loop.time() < until:
            await asyncio.sleep(0.5)
        await asyncio.sleep(0)
        for task in self.tasks:
            assert task.status is not TaskStatus.RUNNING, "a task that was killed does not end"
            assert task.status is TaskStatus.FINISHED or task.error is not None
            assert self.done.count(task) == 1, f"told {self.done.count(task)} times"


def play(talker: Scripted, doing: list[Doing]) -> None:
    async def scenario(loop: JumpingLoop) -> None:
        runner, place = executor(talker)
        consumer = Consumer(runner)
        for what, delay in doing:
            await consumer.do(what)
            await asyncio.sleep(delay)
        await consumer.finish()
        began = loop.time()
        try:
            await runner.dispose()
        except PlaceLostError:
            pass  # it did not say good-bye
        assert loop.time() - began < 15, "a disposal that took too long"
        assert not place.is_open
        assert not any(stream.open for stream in place.streams)

    peer.run(scenario)


@given(st.lists(mostly_legal(), max_size=4), doings, st.booleans(), st.sampled_from([0, 1, 13]))
@SETTINGS
def test_sessions_that_are_nearly_legal(
    each: list[Callable[[int], list[Step]]], doing: list[Doing], on_kill: bool, pieces: int
) -> None:
    play(Scripted(list(each), on_kill=on_kill, pieces=pieces), doing)


@given(st.lists(scripts, max_size=4), doings, st.booleans(), st.sampled_from([0, 1, 13]))
@SETTINGS
def test_sessions_that_are_not(
    each: list[list[Step]], doing: list[Doing], on_kill: bool, pieces: int
) -> None:
    play(
        Scripted([lambda _, steps=steps: list(steps) for steps in each], on_kill=on_kill, pieces=pieces),
        doing,
    )


@given(st.lists(said.filter(lambda what: isinstance(what, bytes)), max_size=4).map(b"".join), doings)
@SETTINGS
def test_greetings_that_are_none(greeting: bytes, doing: list[Doing]) -> None:
    play(Scripted([], greeting=greeting), doing)
