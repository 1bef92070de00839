"""Start-up, HELLO and READY, and how the stream may be cut into pieces."""

from __future__ import annotations

import os
import platform
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.warden import frames
from tests.warden.builds import Build
from tests.warden.frames import frame, hello, text

if TYPE_CHECKING:
    from tests.warden.conftest import Starter
    from tests.warden.harness import Warden


def call(build: Build, *arguments: str) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        [build.program, *arguments], stdin=subprocess.DEVNULL, capture_output=True, timeout=10
    )


def test_version_is_the_protocols(build: Build) -> None:
    found = call(build, "--version")
    assert (found.returncode, found.stdout) == (0, b"corral-warden protocol 1\n")


@pytest.mark.parametrize(
    "arguments", [["--help"], ["x"], ["--host-pidfd"], ["--host-pidfd", "-1"], ["--host-pidfd", "7x"]]
)
def test_wrong_arguments_are_refused(build: Build, arguments: list[str]) -> None:
    found = call(build, *arguments)
    assert found.returncode == 2
    assert found.stdout == b"", "nothing but frames may go out on descriptor 1"
    assert found.stderr


def test_ready_tells_where_it_is(start: Starter) -> None:
    with start() as warden:
        assert warden.listen(0.05) == [], "the first byte out is READY's"
        ready = warden.hello()
        assert (ready.version, ready.pid, ready.uid) == (1, warden.pid, os.geteuid())
        assert ready.machine == platform.machine()
        assert ready.start_directory == str(warden.scratch)
        assert Path(ready.spill_directory).parent == warden.scratch / "tmp"
        assert not Path(ready.spill_directory).exists(), "it is made when it is first needed"


@pytest.mark.parametrize("tmpdir", ["relative", ""])
def test_spills_go_to_tmp_without_a_usable_tmpdir(start: Starter, tmpdir: str) -> None:
    with start(env={"TMPDIR": tmpdir}) as warden:  # an empty value leaves the variable out
        assert Path(warden.hello().spill_directory).parent == Path("/tmp")


def test_spills_go_where_hello_says(start: Starter) -> None:
    with start(env={"TMPDIR": "/nowhere"}) as warden:
        ready = warden.hello(spill_parent=f"{warden.scratch}/tmp///")
        assert Path(ready.spill_directory).parent == warden.scratch / "tmp"
        assert "//" not in ready.spill_directory


def test_names_of_spill_directories_cannot_be_guessed(start: Starter) -> None:
    with start() as one, start() as other:
        names = {Path(warden.hello().spill_directory).name for warden in (one, other)}
    assert len(names) == 2
    assert all(len(name.removeprefix("corral-")) >= 24 for name in names)


def test_it_keeps_a_session_and_signals_of_its_own(warden: Warden) -> None:
    assert os.getsid(warden.pid) == warden.pid
    if os.geteuid() != 0:
        with pytest.raises(PermissionError):
            os.listdir(f"/proc/{warden.pid}/fd")
        return
    for number in (0, 1, 2):
        assert Path(f"/proc/{warden.pid}/fd/{number}").readlink() == Path("/dev/null")


def test_pipes_do_as_well_as_a_socket(start: Starter) -> None:
    with start(pipes=True) as warden:
        warden.hello()
        assert warden.run("cat; echo end >&2", stdin=b"through a pipe").stdout == b"through a pipe"


# --- refusals


def refused(warden: Warden, data: bytes) -> frames.Failure:
    """The session ends with ERROR PROTOCOL, as the answer to `data`."""
    warden.write(data)
    warden.wait_eof()
    assert [error.code for error in warden.errors] == [frames.PROTOCOL]
    assert warden.errors[0].message
    assert not warden.bye
    return warden.errors[0]


@pytest.mark.parametrize("version", [0, 2, 65535])
def test_another_version_is_named(start: Starter, version: int) -> None:
    with start() as warden:
        message = refused(warden, hello(version=version)).message
        assert f"protocol {version}," in message
        assert "1" in message.split(",")[1]


def test_another_version_may_have_another_layout(start: Starter) -> None:
    with start() as warden:
        assert "protocol 9," in refused(warden, frame(frames.HELLO, b"CRRL\x09\0future")).message


GOOD = hello()

BAD_HELLOS = {
    "empty": frame(frames.HELLO),
    "magic": hello(magic=b"CRRM"),
    "reserved": hello(zero=1),
    "ring-0": hello(ring=0),
    "ring-too-large": hello(ring=(16 << 20) + 1),
    "ring-huge": hello(ring=0xFFFFFFFF),
    "relative-spill-parent": hello(spill_parent="tmp"),
    "nul-in-spill-parent": hello(spill_parent=b"/tm\0p"),
    "nul-in-shell": hello(shell=b"/bin/ba\0sh"),
    "env-without-terminator": hello(env=b"A=1"),
    "env-without-equals": hello(env=b"A\0"),
    "env-without-name": hello(env=b"=1\0"),
    "env-empty-entry": hello(env=b"A=1\0\0"),
    "env-second-entry-cut": hello(env=b"A=1\0B=2"),
    "rest": hello(rest=b"\0"),
    "flags": frame(frames.HELLO, GOOD[12:], flags=1),
    "text-longer-than-frame": frame(frames.HELLO, GOOD[12:44] + b"\xff\xff\xff\xff"),
    "last-text-cut": frame(frames.HELLO, GOOD[12:-1]),
    "header-reserved": frame(frames.HELLO, GOOD[12:], zero=1),
}


@pytest.mark.parametrize("data", BAD_HELLOS.values(), ids=BAD_HELLOS)
def test_malformed_hello_ends_the_session(start: Starter, data: bytes) -> None:
    with start() as warden:
        refused(warden, data)


def test_hello_cut_at_any_length_is_refused(start: Starter) -> None:
    payload = hello(spill_parent="/tmp", shell="bash", env={"A": "1"})[12:]
    for length in range(0, len(payload), 7):
        with start() as warden:
            refused(warden, frame(frames.HELLO, payload[:length]))


@pytest.mark.parametrize("kind", [kind for kind in frames.FROM_HOST if kind != frames.HELLO])
def test_nothing_comes_before_hello(start: Starter, kind: int) -> None:
    payload = {
        frames.START: frames.start(1, "true")[12:],
        frames.FETCH: frames.fetch(1, "/etc/passwd")[12:],
        frames.PING: bytes(8),
    }.get(kind, bytes(4))
    with start() as warden:
        refused(warden, frame(kind, payload, task=1) + hello())
        assert warden.ready is None


def test_hello_comes_once(warden: Warden) -> None:
    refused(warden, hello())


# --- pieces


def test_one_byte_at_a_time(start: Starter) -> None:
    with start() as warden:
        whole = hello(env={"A": "b"}) + frames.start(1, "cat; echo $A", stdin_size=3)
        whole += frame(frames.STDIN, b"xyz", task=1) + frames.ping(7)
        task = warden.expect(1)
        for at in range(len(whole)):
            warden.write(whole[at : at + 1])
        warden.finish(task)
        assert (task.stdout, task.code) == (b"xyzb\n", 0)
        warden.wait(lambda: 7 in warden.pongs, "PONG")


def test_many_frames_in_one_write(start: Starter) -> None:
    with start() as warden:
        tasks = [warden.expect(number) for number in range(1, 31)]
        whole = hello() + b"".join(
            frames.start(task.id, f"echo {task.id}; exit {task.id}") + frames.ping(task.id) for task in tasks
        )
        warden.write(whole + frames.kill(999) + frames.credit(999, 1, 5) + frames.forget(999))
        for task in tasks:
            warden.finish(task, seconds=15)
            assert (task.stdout, task.code) == (f"{task.id}\n".encode(), task.id)
        assert sorted(warden.pongs) == [task.id for task in tasks]


def test_a_frame_cut_anywhere_waits_for_its_rest(start: Starter) -> None:
    whole = hello() + frames.start(1, "echo cut", env={"A": "b"})
    for cut in (1, 4, 11, 12, 13, len(hello()) - 1, len(hello()) + 5, len(hello()) + 40, len(whole) - 1):
        with start() as warden:
            task = warden.expect(1)
            warden.write(whole[:cut])
            assert not warden.listen(0.02) or cut >= len(hello())
            warden.write(whole[cut:])
            assert warden.finish(task).stdout == b"cut\n"


def test_the_largest_frame(warden: Warden) -> None:
    task = warden.expect(1)
    env = {"A": "x" * 100}
    size = frames.MAX_TO_WARDEN - len(frames.start(1, b"", env=env)[12:])
    command = b": " + b"y" * (size - 2)
    warden.write(frames.start(1, command, env=env))
    assert warden.finish(task, seconds=15).code == 0


def test_one_byte_more_is_too_large(warden: Warden) -> None:
    header = frame(frames.TEXT, task=1)
    error = refused(warden, (frames.MAX_TO_WARDEN + 1).to_bytes(4, "little") + header[4:])
    assert "8 MiB" in error.message


def test_a_broken_frame_cut_off_by_the_end_leaves_nothing(start: Starter) -> None:
    for data in (b"\x01", hello()[:-1], hello() + text("x")[:3], hello() + frames.start(1, "sleep 9")[:-2]):
        with start() as warden:
            warden.write(data)


@pytest.mark.parametrize("kind", [0x00, 0x0B, 0x7F, 0x81, 0x83, 0x8A, 0xFF])
def test_unknown_types_end_the_session(warden: Warden, kind: int) -> None:
    refused(warden, frame(kind, bytes(8)))


@pytest.mark.parametrize("kind", list(frames.FROM_HOST))
@pytest.mark.parametrize("lie", ["flags", "zero"])
def test_reserved_header_fields_are_zero(warden: Warden, kind: int, lie: str) -> None:
    payloads = {
        frames.START: frames.start(1, "true")[12:],
        frames.FETCH: frames.fetch(1, "/etc/passwd")[12:],
        frames.KILL: bytes(4),
        frames.CREDIT: bytes(4),
        frames.PING: bytes(8),
        frames.SHUTDOWN: bytes(4),
    }
    flags = 0x80 if lie == "flags" else kind == frames.CREDIT  # a CREDIT's are the stream, 1 or 2
    zero = 1 << kind if lie == "zero" else 0  # each bit in turn
    refused(warden, frame(kind, payloads.get(kind, b""), task=1, flags=flags, zero=zero))
