"""Single sessions with a warden in memory: silence, floods, losses, and files that are not whole."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import PurePosixPath

import pytest

from corral import (
    BashRunResult,
    CorralError,
    PlaceError,
    PlaceLostError,
    PlaceOpenError,
)
from tests.warden import frames, peer
from tests.warden.frames import Frame
from tests.warden.peer import JumpingLoop, PeerStream
from tests.warden.scripted import (
    LIMIT,
    Scripted,
    Step,
    executor,
    request,
    whole_end,
)


def outcome(
    script: list[Step] | Callable[[int], list[Step]], **fields: bool
) -> BashRunResult | BaseException:
    """What one `run` comes to, and nothing else."""

    async def scenario(_: JumpingLoop) -> BashRunResult | BaseException:
        make = script if callable(script) else lambda _: script
        runner, _place = executor(Scripted([make], **fields))
        try:
            return await runner.run(runner.resolve(request()))
        except Exception as error:  # this is what is looked at
            return error
        finally:
            try:
                await runner.dispose()
            except PlaceLostError:
                pass

    return peer.run(scenario)


SILENT = {
    "no-start": [],
    "no-exit": [(0, peer.started(1))],
    "no-end": [(0, peer.started(1)), (0, peer.exited(1))],
    "no-gone": [(0, peer.started(1)), (0, peer.exited(1, frames.LOST)), (0, whole_end(1))],
}


@pytest.mark.parametrize("script", SILENT.values(), ids=SILENT)
def test_silence_at_any_point_is_a_loss(script: list[Step]) -> None:
    assert isinstance(outcome(script, on_kill=False), PlaceError)


@pytest.mark.parametrize(
    "what", ["hang up", "broken", b"\0" * 12, peer.started(1) * 2, peer.gone(1), peer.ready()]
)
def test_a_broken_session_keeps_what_had_come(what: bytes | str) -> None:
    found = outcome([(0, peer.started(1)), (0, peer.data(1, 1, 0, b"partial")), (0.1, what)])
    assert isinstance(found, PlaceLostError)
    assert found.stdout is not None
    assert found.stdout.data == b"partial"


def test_one_broken_task_ends_them_all_and_the_place_is_opened_again() -> None:
    async def scenario(_: JumpingLoop) -> None:
        quiet: Callable[[int], list[Step]] = lambda task: [(0, peer.started(task))]  # noqa: E731
        bad: Callable[[int], list[Step]] = lambda task: [(0.1, peer.gone(task))]  # noqa: E731
        runner, place = executor(Scripted([quiet, bad]))
        async with runner:
            spec = runner.resolve(request())
            both = await asyncio.gather(runner.run(spec), runner.run(spec), return_exceptions=True)
            assert [type(found) for found in both] == [PlaceLostError, PlaceLostError]
            assert len(place.streams) == 1
            assert (await runner.run(spec)).exit_code == 0
            assert len(place.streams) == 2

    peer.run(scenario)


@pytest.mark.parametrize("last", [b"", peer.BYE, b"\xff" * 12, peer.gone(3)])
def test_a_session_that_is_lost_in_the_moment_it_is_ready(last: bytes) -> None:
    class OnceBroken(Scripted):
        def heard(self, stream: PeerStream, found: Frame) -> None:
            if found.kind == frames.HELLO and self.greeting:
                stream.say(self.greeting + last)
                stream.hang_up()
                self.greeting = b""
            else:
                self.greeting = self.greeting or peer.ready()
                super().heard(stream, found)

    async def scenario(loop: JumpingLoop) -> None:
        runner, place = executor(OnceBroken([]))
        async with runner:
            with pytest.raises(PlaceOpenError):
                await runner.run(runner.resolve(request()))
            began = loop.time()
            assert (await runner.run(runner.resolve(request()))).exit_code == 0
            assert loop.time() - began < 1, "the next command opens the place again, at once"
            assert len(place.streams) == 2

    peer.run(scenario)


# --- fetches


def fetched(script: Callable[[int], list[Step]], *, pause: float = 0) -> tuple[bytes, BaseException | None]:
    async def scenario(_: JumpingLoop) -> tuple[bytes, BaseException | None]:
        runner, _place = executor(Scripted([script]))
        content = b""
        try:
            async with runner:
                async for chunk in runner.fetch(PurePosixPath("/file")):
                    content += chunk
                    await asyncio.sleep(pause)
        except (OSError, CorralError) as error:
            return content, error
        return content, None

    return peer.run(scenario)


def test_a_fetch() -> None:
    found = fetched(
        lambda n: [
            (0, peer.data(n, 1, 0, b"one")),
            (1, peer.data(n, 1, 3, b"two")),
            (0, whole_end(n, 6) + peer.gone(n)),
        ]
    )
    assert found == (b"onetwo", None)


@pytest.mark.parametrize("code", [frames.FILE, frames.REFUSED, frames.SPAWN])
@pytest.mark.parametrize("errno", [0, 2])
def test_a_fetch_that_fails_never_looks_whole(code: int, errno: int) -> None:
    for before in (b"", b"part"):
        said = (peer.data(1, 1, 0, before) if before else b"") + peer.error(1, code, errno)
        content, error = fetched(lambda _, said=said: [(0, said)])
        assert content == before
        assert error is not None


UNDUE = {
    "gone-without-end": [(0, peer.gone(1))],
    "end-at-another-place": [(0, peer.data(1, 1, 0, b"xyz") + whole_end(1, 4) + peer.gone(1))],
    "end-twice": [(0, whole_end(1) * 2 + peer.gone(1))],
    "a-gap": [(0, peer.data(1, 1, 1, b"x") + whole_end(1, 2) + peer.gone(1))],
    "stderr": [(0, peer.data(1, 2, 0, b"x") + whole_end(1, 0, 1) + peer.gone(1))],
    "started": [(0, peer.started(1) + whole_end(1) + peer.gone(1))],
    "data-after-end": [(0, whole_end(1) + peer.data(1, 1, 0, b"x") + peer.gone(1))],
    "hang-up": [(0, "hang up")],
}


@pytest.mark.parametrize("script", UNDUE.values(), ids=UNDUE)
def test_a_fetch_that_is_not_as_it_must_be_is_lost(script: list[Step]) -> None:
    _, error = fetched(lambda _: script)
    assert isinstance(error, PlaceLostError)


def test_a_peer_that_ignores_credit_is_cut_off() -> None:
    # Forty times what was asked for, while the consumer sleeps.
    chunk = bytes(1 << 19)
    flood: list[Step] = [
        (0, b"".join(peer.data(1, 1, at << 19, chunk) for at in range(part, part + 8)))
        for part in range(0, 80, 8)
    ]
    content, error = fetched(lambda _: flood, pause=100)
    assert isinstance(error, PlaceLostError)
    assert len(content) <= 2 << 20


@pytest.mark.parametrize("stream", [1, 2])
def test_a_flood_of_output_costs_no_more_than_the_tail(stream: int) -> None:
    flood: list[Step] = [(0, peer.data(1, stream, at << 19, bytes(1 << 19))) for at in range(60)]
    totals = (60 << 19, 0) if stream == 1 else (0, 60 << 19)
    found = outcome(
        [(0, peer.started(1)), *flood, (0, peer.exited(1) + whole_end(1, *totals) + peer.gone(1))]
    )
    assert isinstance(found, BashRunResult)
    collected = (found.stdout, found.stderr)[stream - 1]
    assert (len(collected.data), collected.total_bytes) == (LIMIT, 60 << 19)
