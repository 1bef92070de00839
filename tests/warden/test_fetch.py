"""FETCH: a file of the place, as the stdout of a task."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.warden import frames
from tests.warden.frames import COMPLETE, NONE
from tests.warden.procs import below, poll, stat, timed
from tests.warden.test_output import pattern, print_pattern

if TYPE_CHECKING:
    from tests.warden.conftest import Starter
    from tests.warden.frames import Task
    from tests.warden.harness import Warden

ENOENT, EACCES, EISDIR, EINVAL, ELOOP, ENODATA, ECANCELED = 2, 13, 21, 22, 40, 61, 125


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "file"
    path.write_bytes(pattern(3_000_000))
    return path


def failed(warden: Warden, task: Task, number: int) -> None:
    warden.finish(task)
    assert task.error is not None
    assert (task.error.code, task.error.errno) == (frames.FILE, number)


@pytest.mark.parametrize("offset", [0, 1, 65_535, 65_536, 2_999_999, 3_000_000])
def test_a_file_from_an_offset_on(warden: Warden, file: Path, offset: int) -> None:
    task = warden.finish(warden.fetch(file, offset=offset))
    assert task.stdout == pattern(3_000_000)[offset:]
    assert task.ends is not None
    assert [(end.total, end.state, end.path) for end in task.ends] == [(3_000_000, NONE, ""), (0, NONE, "")]
    assert (task.exit, task.leftovers, task.survivors, task.keeper_lost) == (None, False, 0, False)


@pytest.mark.parametrize("offset", [3_000_001, 1 << 40, (1 << 63) - 2])
def test_an_offset_past_the_end_is_an_empty_rest(warden: Warden, file: Path, offset: int) -> None:
    task = warden.finish(warden.fetch(file, offset=offset))
    if task.error:  # the file system may know of no such offset
        assert task.error.errno == EINVAL
    else:
        assert task.stdout == b""


def test_an_empty_file(warden: Warden, tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    assert warden.finish(warden.fetch(tmp_path / "empty")).stdout == b""


def test_names_are_bytes(warden: Warden, tmp_path: Path) -> None:
    path = tmp_path / "\udcff \n'ä"
    path.write_bytes(b"x")
    task = warden.expect(1, fetch=True)
    warden.write(frames.fetch(1, os.fsencode(path)))
    assert warden.finish(task).stdout == b"x"


def test_files_that_do_not_know_their_size(warden: Warden) -> None:
    task = warden.finish(warden.fetch("/proc/self/status"))
    assert b"Name:\tcorral-warden" in task.stdout


def test_what_cannot_be_fetched(warden: Warden, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "loop").symlink_to("loop")
    expected = {
        tmp_path / "missing": ENOENT,
        tmp_path: EISDIR,
        tmp_path / "fifo": EINVAL,
        tmp_path / "loop": ELOOP,
        Path("/dev/zero"): EINVAL,
        Path("/dev/null"): EINVAL,
        Path("/" + "x" * 300): 36,
    }
    with timed(0, 2 * warden.patience, "refusals"):
        for path, number in expected.items():
            failed(warden, warden.fetch(path), number)
    if os.geteuid() != 0:
        (tmp_path / "closed").touch(mode=0)
        failed(warden, warden.fetch(tmp_path / "closed"), EACCES)
    assert warden.run("echo on").stdout == b"on\n"


# --- credit


def test_no_byte_without_credit(warden: Warden, file: Path) -> None:
    task = warden.fetch(file, credit=0)
    assert warden.listen(0.1) == []
    warden.write(frames.credit(task.id, frames.STDOUT, 5))
    warden.wait(lambda: len(task.stdout) >= 5, "five bytes")
    assert warden.listen(0.1) == []
    assert task.stdout == pattern(5)
    warden.write(frames.credit(task.id, frames.STDERR, 1000))  # of no use for a file
    assert warden.listen(0.05) == []
    warden.write(frames.credit(task.id, frames.STDOUT, 3_000_000))
    assert warden.finish(task).stdout == pattern(3_000_000)


def test_credit_for_exactly_the_file(warden: Warden, file: Path) -> None:
    # The end of the file is no byte of it, but to see it one has to read.
    task = warden.fetch(file, credit=3_000_000)
    warden.wait(lambda: task.streams[0].at == 3_000_000, "all bytes")
    warden.listen(0.1)
    warden.write(frames.credit(task.id, frames.STDOUT, 1))
    assert warden.finish(task).stdout == pattern(3_000_000)


def test_nothing_is_dropped_however_slow_the_host_is(warden: Warden, file: Path) -> None:
    task = warden.fetch(file, credit=100_000)
    while not task.over:
        had = task.streams[0].at
        warden.receive(time.monotonic() + 5, "data")
        warden.write(frames.credit(task.id, frames.STDOUT, task.streams[0].at - had or 1))
    assert task.stdout == pattern(3_000_000)


def test_a_large_file_waits_for_a_host_that_does_not_read(warden: Warden, tmp_path: Path) -> None:
    with (tmp_path / "large").open("wb") as large:
        large.truncate(1 << 30)
    task = warden.fetch(tmp_path / "large", credit=1 << 40)
    before = warden.rss()
    time.sleep(0.3)
    assert warden.rss() - before < (4 << 20) * warden.patience
    warden.write(frames.kill(task.id))
    failed(warden, task, ECANCELED)


def test_many_at_once(warden: Warden, file: Path) -> None:
    tasks = [warden.fetch(file, offset=number * 1000) for number in range(20)]
    tasks += [warden.start(f"cat {file}") for _ in range(3)]
    for number, task in enumerate(tasks[:20]):
        assert warden.finish(task, seconds=20).stdout == pattern(3_000_000)[number * 1000 :]
    for task in tasks[20:]:
        assert warden.finish(task, seconds=20).code == 0


# --- abandoned


@pytest.mark.parametrize("grace_ms", [0, 60_000])
@pytest.mark.parametrize("credit", [0, 1000, frames.MAX_CREDIT])
def test_kill_abandons_it(warden: Warden, tmp_path: Path, credit: int, grace_ms: int) -> None:
    with (tmp_path / "large").open("wb") as large:
        large.truncate(1 << 34)
    task = warden.fetch(tmp_path / "large", credit=credit)
    if credit:
        warden.wait(lambda: task.streams[0].at > 0, "the first data")
    warden.write(frames.kill(task.id, grace_ms))
    with timed(0, 1.0 * warden.patience, "the end of an abandoned fetch"):
        failed(warden, task, ECANCELED)
    poll(lambda: not below(warden.pid), 1, "its process is gone")
    warden.write(frames.kill(task.id) + frames.credit(task.id, 1, 5))
    warden.barrier()


def test_kill_after_the_reader_has_exited(warden: Warden, tmp_path: Path) -> None:
    # All of it is in the pipe, and waits there for credit.
    (tmp_path / "small").write_bytes(b"waiting")
    task = warden.fetch(tmp_path / "small", credit=3)
    warden.wait(lambda: task.stdout == b"wai", "the first credit")
    poll(lambda: not below(warden.pid), 2, "the reader has exited")
    warden.write(frames.kill(task.id))
    failed(warden, task, ECANCELED)


def test_a_waiting_fetch_does_not_outlive_the_session(warden: Warden, tmp_path: Path) -> None:
    (tmp_path / "small").write_bytes(b"waiting")
    warden.fetch(tmp_path / "small", credit=0)
    warden.fetch("/proc/self/maps", credit=1)
    warden.barrier()


def test_a_reader_that_is_killed(warden: Warden, tmp_path: Path) -> None:
    with (tmp_path / "large").open("wb") as large:
        large.truncate(1 << 34)
    task = warden.fetch(tmp_path / "large", credit=1000)
    warden.wait(lambda: task.streams[0].at == 1000, "the first data")
    (reader,) = below(warden.pid)
    os.kill(reader.pid, 9)
    poll(lambda: stat(reader.pid) is None, 2, "it was reaped")
    warden.write(frames.credit(task.id, frames.STDOUT, 1 << 30))
    warden.finish(task)
    assert task.error is not None, "a cut file must not look like a whole one"


def test_a_shutdown_ends_it_before_the_good_bye(warden: Warden, file: Path) -> None:
    task = warden.fetch(file, credit=10)
    warden.write(frames.shutdown(5000))
    with timed(0, 1.5 * warden.patience, "the shutdown"):
        warden.wait_eof()
    assert warden.bye
    assert task.error is not None


# --- spill files


def test_a_spill_while_it_is_written(warden: Warden) -> None:
    task = warden.start(f"{print_pattern(500_000)}; sleep 20")
    stream = task.streams[0]
    warden.wait(lambda: stream.at == 500_000, "the data")
    assert stream.spill is not None
    assert warden.finish(warden.fetch(stream.spill[1], offset=400_000)).stdout == pattern(500_000)[400_000:]
    warden.write(frames.kill(task.id))
    warden.finish(task)
    assert task.ends is not None
    assert task.ends[0].state == COMPLETE


def test_zeros_that_a_command_wrote_are_data(warden: Warden) -> None:
    task = warden.run("head -c 300000 /dev/zero; echo end")
    assert task.ends is not None
    assert warden.finish(warden.fetch(task.ends[0].path)).stdout == bytes(300_000) + b"end\n"


def test_a_hole_in_a_file_of_a_command_is_zeros(warden: Warden, tmp_path: Path) -> None:
    with (tmp_path / "sparse").open("wb") as sparse:
        sparse.truncate(200_000)
        sparse.seek(200_000)
        sparse.write(b"end")
    assert warden.finish(warden.fetch(tmp_path / "sparse")).stdout == bytes(200_000) + b"end"


@pytest.mark.parametrize("slow", [True, False])
def test_a_head_that_is_released_under_the_reader(start: Starter, slow: bool) -> None:
    # Either its own bytes, or ENODATA; never zeros, which the command has not written.
    with start() as warden:
        warden.hello(ring=10_000, spill_cap=400_000)
        task = warden.start("yes 123456789012345", credit=1)
        assert warden.ready is not None
        path = Path(warden.ready.spill_directory) / f"{task.id}.stdout"
        poll(path.exists, 5, "the spill has begun")
        for _ in range(5):
            offset = max(0, path.stat().st_size - 100_000) // 16 * 16
            fetched = warden.fetch(path, offset=offset, credit=20_000 if slow else frames.MAX_CREDIT)
            deadline = time.monotonic() + 0.3
            while not fetched.over and time.monotonic() < deadline:
                warden.write(frames.credit(fetched.id, frames.STDOUT, 20_000))
                warden.listen(0.02)
            warden.write(frames.kill(fetched.id))
            warden.finish(fetched)
            data = fetched.stdout
            assert data == (b"123456789012345\n" * (len(data) // 16 + 1))[: len(data)]
            assert fetched.error is None or fetched.error.errno in (ENODATA, ECANCELED)
        warden.write(frames.kill(task.id))
        warden.finish(task)
