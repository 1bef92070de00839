"""Frames that do not fit: each ends the session with ERROR PROTOCOL, and kills what runs."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

import pytest

from tests.warden import frames
from tests.warden.frames import frame, start
from tests.warden.test_greeting import refused

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.warden.harness import Warden

GIB = 1 << 30

BAD_STARTS = {
    "empty": frame(frames.START, task=1),
    "task-0": start(0, "true"),
    "unknown-flag": start(1, "true", flags=2),
    "high-flag": start(1, "true", flags=1 << 31),
    "command-over-1-gib": start(1, "true", size=GIB + 1),
    "command-huge": start(1, "true", size=(1 << 64) - 1),
    "stdin-over-1-gib": start(1, "true", stdin_size=GIB + 1),
    "stdin-without-flag": start(1, "true", flags=0, stdin_size=5),
    "more-command-than-said": start(1, "true", size=3),
    "nul-in-command": start(1, b"tr\0ue"),
    "nul-at-the-end": start(1, b"true\0"),
    "nul-in-workdir": start(1, "true", workdir=b"/\0tmp"),
    "env-without-terminator": start(1, "true", env=b"A=1"),
    "env-without-equals": start(1, "true", env=b"A\0"),
    "env-without-name": start(1, "true", env=b"=\0"),
    "env-of-nul": start(1, "true", env=b"\0"),
    "env-cut": frame(frames.START, start(1, b"", env={"A": "b"})[12:-1], task=1),
    "head-cut": frame(frames.START, start(1, b"")[12:40], task=1),
    "workdir-longer-than-frame": frame(
        frames.START, struct.pack("<IQQQI", 0, 4, 0, 0, 0xFFFFFFFF) + b"true", task=1
    ),
    "env-longer-than-frame": frame(
        frames.START, struct.pack("<IQQQII", 0, 4, 0, 0, 0, 0x7FFFFFFF) + b"true", task=1
    ),
}


@pytest.mark.parametrize("data", BAD_STARTS.values(), ids=BAD_STARTS)
def test_malformed_start(warden: Warden, data: bytes) -> None:
    refused(warden, data)


BAD_FETCHES = {
    "empty": frame(frames.FETCH, task=1),
    "task-0": frames.fetch(0, "/etc/passwd"),
    "relative": frames.fetch(1, "etc/passwd"),
    "no-path": frames.fetch(1, ""),
    "nul": frames.fetch(1, b"/etc/pass\0wd"),
    "offset-negative": frames.fetch(1, "/etc/passwd", offset=1 << 63),
    "offset-at-the-limit": frames.fetch(1, "/etc/passwd", offset=(1 << 63) - 1),
    "rest": frame(frames.FETCH, frames.fetch(1, "/etc/passwd")[12:] + b"x", task=1),
    "cut": frame(frames.FETCH, frames.fetch(1, "/etc/passwd")[12:-1], task=1),
}


@pytest.mark.parametrize("data", BAD_FETCHES.values(), ids=BAD_FETCHES)
def test_malformed_fetch(warden: Warden, data: bytes) -> None:
    refused(warden, data)


BAD_SMALL = {
    f"{name}-{problem}": frame(kind, payload, task=1, flags=flags)
    for name, kind, size, flags in (
        ("kill", frames.KILL, 4, 0),
        ("credit", frames.CREDIT, 4, 1),
        ("ping", frames.PING, 8, 0),
        ("shutdown", frames.SHUTDOWN, 4, 0),
        ("forget", frames.FORGET, 0, 0),
    )
    for problem, payload in (("short", bytes(max(0, size - 1))), ("long", bytes(size + 1)), ("empty", b""))
    if len(payload) != size
} | {
    "credit-stream-0": frame(frames.CREDIT, bytes(4), task=1, flags=0),
    "credit-stream-3": frame(frames.CREDIT, bytes(4), task=1, flags=3),
}


@pytest.mark.parametrize("data", BAD_SMALL.values(), ids=BAD_SMALL)
def test_malformed_small_frames(warden: Warden, data: bytes) -> None:
    refused(warden, data)


# --- what is not allowed in the state that the task is in

ASSEMBLING = start(1, "tru", size=4, stdin_size=2)

WRONG_FOR_ASSEMBLING = {
    "same-number": start(1, "true"),
    "fetch-same-number": frames.fetch(1, "/etc/passwd"),
    "credit": frames.credit(1, 1, 5),
    "text-too-long": frame(frames.TEXT, b"ee", task=1),
    "text-with-nul": frame(frames.TEXT, b"\0", task=1),
    "stdin-too-long": frame(frames.STDIN, b"abc", task=1),
}


@pytest.mark.parametrize("data", WRONG_FOR_ASSEMBLING.values(), ids=WRONG_FOR_ASSEMBLING)
def test_wrong_while_assembling(warden: Warden, data: bytes) -> None:
    refused(warden, ASSEMBLING + data)


RUNNING = start(1, "sleep 20", stdin_size=0)

WRONG_FOR_RUNNING = {
    "same-number": start(1, "true"),
    "fetch-same-number": frames.fetch(1, "/etc/passwd"),
    "text": frame(frames.TEXT, b"x", task=1),
    "text-empty": frame(frames.TEXT, b"", task=1),
    "stdin": frame(frames.STDIN, b"x", task=1),
    "stdin-empty": frame(frames.STDIN, b"", task=1),
    "credit-stream-3": frames.credit(1, 3, 5),
}


@pytest.mark.parametrize("data", WRONG_FOR_RUNNING.values(), ids=WRONG_FOR_RUNNING)
def test_wrong_while_running(warden: Warden, data: bytes) -> None:
    task = warden.expect(1)
    warden.write(RUNNING)
    warden.reach(task, "started")
    refused(warden, data)  # and the end of the test sees that the sleep is gone


@pytest.mark.parametrize("kind", [frames.TEXT, frames.STDIN])
def test_a_fetch_takes_neither_text_nor_stdin(warden: Warden, kind: int) -> None:
    warden.fetch("/proc/self/status", credit=0)
    refused(warden, frame(kind, b"x", task=1))


def test_an_assembling_task_that_never_comes_to_run_leaves_nothing(warden: Warden) -> None:
    warden.write(ASSEMBLING)
    warden.barrier()


def test_kill_ends_an_assembling_task(warden: Warden) -> None:
    task = warden.expect(1)
    warden.write(
        ASSEMBLING + frames.kill(1) + frame(frames.TEXT, b"e", task=1) + frame(frames.STDIN, b"ab", task=1)
    )
    assert warden.finish(task).error is not None
    assert task.error is not None
    assert task.error.code == frames.REFUSED


@pytest.fixture
def ended(warden: Warden) -> Iterator[int]:
    """The number of a task that is gone."""
    yield warden.run("true").id
    warden.barrier()
    assert warden.run("echo on").stdout == b"on\n"


@pytest.mark.parametrize("kind", ["kill", "credit", "forget", "kill-0"])
def test_frames_that_crossed_the_end_are_ignored(warden: Warden, ended: int, kind: str) -> None:
    warden.write(
        {
            "kill": frames.kill(ended),
            "kill-0": frames.kill(0),
            "credit": frames.credit(ended, 2, 1000),
            "forget": frames.forget(ended),
        }[kind]
    )


def test_every_task_dies_with_the_session(warden: Warden) -> None:
    for number in range(5):
        task = warden.start(f"trap '' TERM; setsid sleep 20 & echo {number}; wait", credit=1000)
        warden.reach(task, "started")
    refused(warden, b"this is no frame at all")
