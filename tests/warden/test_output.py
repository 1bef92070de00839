"""Output: exact bytes, credit, the ring, and a host that does not read."""

from __future__ import annotations

import functools
import hashlib
import os
import signal
import subprocess
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.warden import frames
from tests.warden.frames import COMPLETE, MAX_CREDIT, NONE
from tests.warden.procs import poll, stat

if TYPE_CHECKING:
    from tests.warden.conftest import Starter
    from tests.warden.frames import Task
    from tests.warden.harness import Warden

MIB = 1 << 20


def print_pattern(size: int) -> str:
    """Counting numbers: every piece tells its place."""
    return f"seq 99999999 | head -c {size}"


@functools.cache
def pattern(size: int) -> bytes:
    return subprocess.run(
        ["sh", "-c", print_pattern(size)], stdout=subprocess.PIPE, check=True, timeout=20
    ).stdout


def check_tail(task: Task, stream: int, whole: bytes, keep: int) -> None:
    """END's total is exact, and what is known of the stream is its end, at least `keep` of it."""
    assert task.ends is not None
    data, end = task.streams[stream].data, task.ends[stream]
    assert end.total == len(whole)
    assert len(data) >= min(keep, len(whole))
    assert data == whole[len(whole) - len(data) :], "the tail is not the end of what was written"


def test_bytes_come_as_they_are(warden: Warden) -> None:
    odd = b"\0\r\n\r\xff\xfe\xc3(\x1b[0m\xed\xa0\x80 no newline"
    task = warden.run("cat; cat /dev/stdin >&2", stdin=odd)
    assert (task.stdout, task.stderr) == (odd, odd)


@pytest.mark.parametrize("size", [1, 63_999, 64_000, 64_001, 65_535, 65_536, 65_537, 131_072, 1_000_000])
def test_around_the_bound(warden: Warden, size: int) -> None:
    task = warden.run(f"{print_pattern(size)}; {print_pattern(size)} >&2", credit=0)
    assert task.ends is not None
    for stream in range(2):
        check_tail(task, stream, pattern(size), 64_000)
        assert len(task.streams[stream].data) == min(size, 64_000), (
            "no more than the tail goes without credit"
        )
        assert task.ends[stream].state == (COMPLETE if size > 64_000 else NONE)


@pytest.mark.parametrize("ring", [1, 2, 4095, 4096, 4097, 100_000, MIB + 1])
def test_rings_of_any_size(start: Starter, ring: int) -> None:
    with start() as warden:
        warden.hello(ring=ring)
        for size in (ring - 1, ring, ring + 1, 2 * ring + 1, 200_000):
            task = warden.run(print_pattern(size), credit=0)
            check_tail(task, 0, pattern(size), ring)
            assert len(task.stdout) == min(size, ring)


def test_the_largest_ring(start: Starter) -> None:
    with start() as warden:
        warden.hello(ring=16 * MIB)
        task = warden.run(print_pattern(20 * MIB), credit=0, seconds=20)
        assert len(task.stdout) == 16 * MIB
        check_tail(task, 0, pattern(20 * MIB), 16 * MIB)


@pytest.mark.parametrize("step", [1, 7, 4095, 4097, 70_000])
def test_wrapping_at_any_offset(start: Starter, step: int) -> None:
    # Writes of a size that divides no ring, so that every wrap is cut differently; the spill is the witness.
    size = min(step * 3000, 3 * MIB)
    with start() as warden:
        warden.hello(ring=5000)
        task = warden.run(f"{print_pattern(size)} | stdbuf -o0 dd bs={step} status=none", seconds=20)
        check_tail(task, 0, pattern(size), 5000)
        assert task.ends is not None
        if task.ends[0].path:
            spilled = warden.finish(warden.fetch(task.ends[0].path))
            assert spilled.stdout == pattern(size)


def test_live_data_has_no_gap_while_there_is_credit(warden: Warden) -> None:
    task = warden.run("for i in {1..200}; do echo line $i; sleep 0.001; done")
    assert task.streams[0].gaps == 0
    assert task.stdout == b"".join(b"line %d\n" % i for i in range(1, 201))


@pytest.mark.parametrize("ring", [4096, 65_536, MIB])
def test_no_data_is_torn(start: Starter, ring: int) -> None:
    """What is copied out of a ring while it is overwritten must not be sent, wherever that is held up."""
    with start() as warden:
        warden.hello(ring=ring, spill_cap=0)
        # Four times the ring, and every piece tells its place.
        period = b"".join(number.to_bytes(8, "little") for number in range(ring // 2))
        (warden.scratch / "tmp" / "period").write_bytes(period)
        doubled, seen = period * 2, 0
        task = warden.start("while :; do cat tmp/period{,,,,,,,}; done", workdir="")
        stream = task.streams[0]

        def look(_stream: int, offset: int, content: bytes) -> None:
            nonlocal seen
            at = offset % len(period)
            assert content == doubled[at : at + len(content)], f"torn at {offset}"
            seen += 1
            if len(stream.data) > 8 * ring:  # END's tail is all that is needed of it
                stream.start += 7 * ring
                del stream.data[: 7 * ring]
            warden.write(frames.credit(task.id, frames.STDOUT, len(content)))

        task.watch = look
        warden.reach(task, "started")
        for _ in range(60):
            warden.listen(0.004)
            os.kill(warden.pid, signal.SIGSTOP)
            time.sleep(0.002)
            os.kill(warden.pid, signal.SIGCONT)
        assert seen > 60, "nothing was seen"
        warden.write(frames.kill(task.id))
        warden.finish(task)
        (warden.scratch / "tmp" / "period").unlink()


# --- credit


def test_without_credit_nothing_comes_before_the_end(warden: Warden) -> None:
    task = warden.start("echo out; echo err >&2; read -r -t 0.2 <> <(:); exit 3", credit=0)
    warden.reach(task, "started")
    seen = [frame.kind for frame in warden.listen(0.1)]
    assert frames.DATA not in seen
    warden.finish(task)
    assert (task.stdout, task.stderr, task.code) == (b"out\n", b"err\n", 3)


def test_credit_is_per_stream_and_to_the_byte(warden: Warden) -> None:
    task = warden.start("printf 0123456789; printf abcdefghij >&2; exec sleep 20", credit=4)
    warden.wait(lambda: len(task.stdout) >= 4 and len(task.stderr) >= 4, "the first credit")
    warden.listen(0.1)
    assert (task.stdout, task.stderr) == (b"0123", b"abcd")
    warden.write(frames.credit(task.id, frames.STDERR, 3))
    warden.wait(lambda: len(task.stderr) >= 7, "more of stderr")
    warden.listen(0.1)
    assert (task.stdout, task.stderr) == (b"0123", b"abcdefg")
    warden.write(frames.credit(task.id, frames.STDOUT, 0) + frames.credit(task.id, frames.STDOUT, 1000))
    warden.wait(lambda: len(task.stdout) == 10, "the rest of stdout")
    warden.write(frames.kill(task.id))
    warden.finish(task)
    assert (task.stdout, task.stderr) == (b"0123456789", b"abcdefghij")


def test_a_gap_shows_in_the_offset(warden: Warden) -> None:
    size = 3 * MIB + 17
    task = warden.start(f"echo first; sleep 0.1; {print_pattern(size)}; exec sleep 20", credit=6)
    stream = task.streams[0]
    warden.wait(lambda: stream.at >= 6, "the first credit")
    assert task.stdout == b"first\n"
    whole = b"first\n" + pattern(size)
    # Until all of it has arrived in the ring, of which the spill file is the witness.
    assert warden.ready is not None
    spill = Path(warden.ready.spill_directory) / f"{task.id}.stdout"
    poll(lambda: spill.exists() and spill.stat().st_size == len(whole), 10, "the output is complete")
    time.sleep(0.05)
    warden.write(frames.credit(task.id, frames.STDOUT, 10))
    warden.wait(lambda: stream.gaps > 0, "data after the gap")
    warden.listen(0.05)
    assert stream.start == len(whole) - 65_536, "a ring of 64000 bytes holds the next power of two"
    assert task.stdout == whole[stream.start : stream.start + 10]
    warden.write(frames.credit(task.id, frames.STDOUT, MAX_CREDIT))
    warden.wait(lambda: stream.at == len(whole), "the rest")
    assert stream.gaps == 1
    assert task.stdout == whole[-65_536:]
    warden.write(frames.kill(task.id))
    warden.finish(task)
    check_tail(task, 0, whole, 64_000)


def blocked_in_sleep(pid: int) -> bool:
    with open(f"/proc/{pid}/comm") as file:
        return file.read() == "sleep\n"


@pytest.mark.parametrize("first", [(1 << 64) - 1, MAX_CREDIT - 5])
def test_credit_saturates(start: Starter, first: int) -> None:
    with start() as warden:
        warden.hello(ring=MAX_CREDIT)
        task = warden.start(
            f"sleep 0.1; head -c {MAX_CREDIT} /dev/zero; read -r -t 9 < <(sleep 0.2; echo); "
            "echo more; exec sleep 20",
            credit=first,
        )
        warden.write(frames.credit(task.id, frames.STDOUT, 0xFFFFFFFF) * 20)
        warden.wait(lambda: task.streams[0].at >= MAX_CREDIT, "all that the credit is for", seconds=20)
        poll(lambda: blocked_in_sleep(task.pid), 10, "more was written")
        warden.barrier()
        warden.listen(0.1)
        assert (task.streams[0].gaps, task.streams[0].at) == (0, MAX_CREDIT)
        warden.write(frames.credit(task.id, frames.STDOUT, 3))
        warden.wait(lambda: task.streams[0].at == MAX_CREDIT + 3, "new credit")
        warden.write(frames.kill(task.id))
        assert warden.finish(task).stdout[-5:] == b"more\n"


def test_credit_for_a_task_that_has_ended_its_output(warden: Warden) -> None:
    task = warden.start("sleep 20 & echo x", credit=0)
    warden.reach(task, "ended")
    warden.write(frames.credit(task.id, 1, 100) + frames.credit(task.id, 2, 100))
    warden.barrier()
    assert task.stdout == b"x\n"
    warden.write(frames.kill(task.id))
    warden.finish(task)


def test_spill_frames_come_before_the_data_that_the_file_has(warden: Warden) -> None:
    task = warden.start(f"{print_pattern(300_000)}; exec sleep 20")
    warden.wait(lambda: task.streams[0].at == 300_000, "all of the data")
    assert task.streams[0].spill is not None
    start, path = task.streams[0].spill
    assert start == 0
    with open(path, "rb") as file:
        assert file.read() == pattern(300_000)
    warden.write(frames.kill(task.id))
    warden.finish(task)
    assert task.ends is not None
    assert (task.ends[0].state, task.ends[0].path) == (COMPLETE, path)


# --- a host that does not read


def digest(path: Path | str) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def test_a_host_that_stops_reading(start: Starter) -> None:
    """200 MB in all, with all the credit there is, and nobody reads: no command waits, no memory grows."""
    with start() as warden:
        warden.hello(ring=256 << 10)
        each = (200 if warden.patience == 1 else 50) * 1_000_000 // 4
        where = warden.scratch / "tmp"
        tasks = [
            warden.start(f"{print_pattern(each)}; echo $? > {where}/done{number}; exit {number}")
            for number in range(4)
        ]
        idle = warden.rss()
        poll(lambda: all((where / f"done{n}").exists() for n in range(4)), 30, "all commands, unread")
        grown = warden.rss() - idle
        # Rings are mapped by the dispatcher too, and count as far as it has read them. Its queue has a bound.
        assert grown < (4 * (256 << 10) + 3 * MIB) * warden.patience**2, f"{grown} bytes more"
        # It still takes what it is told.
        other = warden.start("echo through; exit 9")
        warden.write(frames.ping(1))
        for task in (*tasks, other):
            warden.finish(task, seconds=20)
        assert (other.stdout, other.code) == (b"through\n", 9)
        whole = pattern(each)
        for number, task in enumerate(tasks):
            assert task.code == number
            check_tail(task, 0, whole, 256 << 10)
            assert task.ends is not None
            assert task.ends[0].state == COMPLETE
            assert (where / f"done{number}").read_text() == "0\n"
            (where / f"done{number}").unlink()
        assert tasks[0].ends is not None
        assert digest(tasks[0].ends[0].path) == hashlib.sha256(whole).hexdigest()


def test_a_host_that_neither_reads_nor_stops_asking(warden: Warden) -> None:
    # A PONG of 20 bytes for a PING of 20: past 8 MiB of answers nothing more is read.
    batch = b"".join(frames.ping(number) for number in range(50_000))
    answers = batch.replace(frames.ping(0)[:12], frames.frame(frames.PONG, bytes(8))[:12])
    sent = 0
    while sent < 100 and warden.takes(batch, 0.4):
        sent += 1
    assert 8 * MIB <= (sent + 1) * len(batch) <= 20 * MIB
    assert warden.rss() < 40 * MIB * warden.patience
    for _ in range(sent):
        assert warden.read_raw(len(answers)) == answers


def test_a_stopped_dispatcher_delays_no_command(warden: Warden) -> None:
    done = warden.scratch / "tmp" / "done"
    task = warden.start(f"sleep 0.1; {print_pattern(5_000_000)}; echo x > {done}")
    warden.reach(task, "started")
    os.kill(warden.pid, signal.SIGSTOP)
    try:
        poll(done.exists, 5, "the command has written all")
        assert (found := stat(warden.pid)) is not None
        assert found.state == "T"
    finally:
        os.kill(warden.pid, signal.SIGCONT)
    warden.finish(task)
    check_tail(task, 0, pattern(5_000_000), 64_000)
    done.unlink()


def test_quick_commands_lose_no_last_byte(warden: Warden) -> None:
    for _ in range(8 if warden.patience == 1 else 4):
        tasks = [warden.start("printf %s a; printf %s b >&2; (printf %s z)") for _ in range(25)]
        for task in tasks:
            warden.finish(task, seconds=20)
            assert (task.stdout, task.stderr) == (b"az", b"b")


def test_what_is_written_just_after_the_exit(warden: Warden) -> None:
    # 50 ms are given to whoever still holds the pipe. On a busy machine `cat` may get no processor that long,
    # hence several tries; without any drain, ten in a row do not happen.
    for _ in range(10):
        if {warden.run("exec > >(cat); printf %s z").stdout for _ in range(10)} == {b"z"}:
            return
    pytest.fail("the last byte was lost again and again")
