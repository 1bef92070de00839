"""Spill files: whole, private, bounded, and withdrawn at the first error."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.warden import frames
from tests.warden.frames import COMPLETE, FAILED, NONE
from tests.warden.procs import ordinary, poll
from tests.warden.test_output import check_tail, pattern, print_pattern

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.warden.conftest import Starter
    from tests.warden.frames import StreamEnd, Task
    from tests.warden.harness import Warden

MIB = 1 << 20
KEEP = 10_000


def directory(warden: Warden) -> Path:
    assert warden.ready is not None
    return Path(warden.ready.spill_directory)


def names(warden: Warden) -> list[str]:
    return sorted(path.name for path in directory(warden).iterdir())


def end(task: Task, stream: int = 0) -> StreamEnd:
    assert task.ends is not None
    return task.ends[stream]


def test_it_is_private_and_whole(start: Starter) -> None:
    with start(prefix=["bash", "-c", 'umask 0; exec "$@"', "-"]) as warden:
        warden.hello(ring=KEEP)
        task = warden.run(f"{print_pattern(500_000)}; {print_pattern(10_001)} >&2; umask")
        for stream, size in ((0, 500_005), (1, 10_001)):
            found = end(task, stream)
            path = Path(found.path)
            assert (found.state, found.spill_start, found.total) == (COMPLETE, 0, size)
            assert path == directory(warden) / f"{task.id}.{('stdout', 'stderr')[stream]}"
            assert path.stat().st_mode & 0o7777 == 0o600
            assert path.read_bytes() == pattern(min(size, 500_000)) + b"0000\n" * (stream == 0)
        assert directory(warden).stat().st_mode & 0o7777 == 0o700


def test_small_output_leaves_no_trace(warden: Warden) -> None:
    for size in (0, 1, 64_000):
        assert end(warden.run(print_pattern(size))).state == NONE
    assert not directory(warden).exists()


def test_its_path_means_something_to_the_next_command(warden: Warden) -> None:
    task = warden.run(print_pattern(200_000))
    assert warden.run(f"wc -c < {end(task).path}").stdout == b"200000\n"


def test_without_a_cap_there_is_no_spill(start: Starter) -> None:
    with start() as warden:
        warden.hello(ring=KEEP, spill_cap=0)
        task = warden.run(print_pattern(200_000))
        assert end(task).state == NONE
        check_tail(task, 0, pattern(200_000), KEEP)


@pytest.mark.parametrize("cap", [4096, 5000, 65_536, 3_000_001])
@pytest.mark.parametrize("where", ["/var/tmp", "/dev/shm"])
def test_the_cap_bounds_the_disk(start: Starter, cap: int, where: str) -> None:
    if not os.access(where, os.W_OK):
        pytest.skip(f"no {where} to write to")
    size = 6 * MIB + 12_345
    with start() as warden:
        warden.hello(ring=KEEP, spill_cap=cap, spill_parent=where)
        task = warden.start(f"{print_pattern(size)}; sleep 0.1")
        used: list[int] = []
        path = directory(warden) / f"{task.id}.stdout"
        while task.state not in ("ended", "gone"):
            warden.listen(0.01)
            with contextlib.suppress(FileNotFoundError):
                used.append(path.stat().st_blocks * 512)
        warden.finish(task)
        found = end(task)
        assert found.state == COMPLETE
        assert path.stat().st_size == size, "offsets stay whole-stream offsets"
        # The block that is written and the one at the edge of the hole are never free.
        slack = 4 * 4096
        assert max(used) <= max(cap, 4096) + slack, "the disk was used beyond the cap"
        assert size - cap <= found.spill_start <= size, "more is claimed than the cap allows"
        assert size - found.spill_start >= min(cap, size) * 3 // 4 - 4096, (
            "much less is kept than the cap allows"
        )
        data = path.read_bytes()
        assert data[found.spill_start :] == pattern(size)[found.spill_start :]
        assert not any(data[: found.spill_start // 4096 * 4096]), "the head was not released"
        check_tail(task, 0, pattern(size), KEEP)
        fetched = warden.finish(warden.fetch(path, offset=found.spill_start))
        assert fetched.stdout == pattern(size)[found.spill_start :]
        if found.spill_start > 8192 and found.spill_start < size:
            refused = warden.finish(warden.fetch(path))
            assert refused.error is not None
            assert (refused.error.code, refused.error.errno) == (frames.FILE, 61)
        warden.write(frames.forget(task.id))


def test_spill_frames_tell_of_a_moving_start(start: Starter) -> None:
    with start() as warden:
        warden.hello(ring=KEEP, spill_cap=100_000)
        task = warden.start("seq 9000000 & sleep 20; wait")
        stream = task.streams[0]
        warden.wait(lambda: (stream.spill or (0, ""))[0] > 1_000_000, "a SPILL with a start", seconds=20)
        assert stream.spill is not None
        assert stream.spill[0] <= stream.at, "the file begins where the data has not come to"
        assert stream.spill[1] == str(directory(warden) / f"{task.id}.stdout")
        warden.write(frames.kill(task.id))
        warden.finish(task)


# --- what can go wrong


def test_no_directory_to_write_to(start: Starter) -> None:
    for parent in ("/nonexistent", "/dev/null", "/proc", "/" + "x" * 5000):
        with start() as warden:
            warden.hello(ring=KEEP, spill_parent=parent)
            task = warden.run(f"{print_pattern(300_000)}; exit 4")
            assert (task.code, end(task).state, end(task).path) == (4, FAILED, "")
            check_tail(task, 0, pattern(300_000), KEEP)


def test_a_directory_that_somebody_else_may_write_to(start: Starter) -> None:
    with start() as warden:
        warden.hello(ring=KEEP)
        directory(warden).mkdir(mode=0o755)
        directory(warden).chmod(0o755)
        task = warden.run(print_pattern(300_000))
        assert (end(task).state, end(task).path) == (FAILED, "")


def test_planted_links_are_not_followed(start: Starter) -> None:
    with start() as warden:
        warden.hello(ring=KEEP)
        victim = warden.scratch / "victim"
        victim.write_text("precious")
        directory(warden).mkdir(mode=0o700)
        (directory(warden) / "1.stdout").symlink_to(victim)
        (directory(warden) / "2.stdout").hardlink_to(victim)
        for _ in range(2):
            assert end(warden.run(print_pattern(300_000))).state == FAILED
        assert victim.read_text() == "precious"
        moved = directory(warden).rename(warden.scratch / "moved")
        directory(warden).symlink_to(moved)
        assert end(warden.run(print_pattern(300_000))).state == FAILED
    # The link itself is removed with the session; where it pointed to is not.


def test_a_limit_on_file_sizes_fails_the_spill_alone(start: Starter) -> None:
    with start(prefix=["bash", "-c", 'ulimit -f 100; exec "$@"', "-"]) as warden:
        warden.hello(ring=KEEP)
        task = warden.run(f"{print_pattern(1_000_000)}; exit 4")
        assert (task.code, task.keeper_lost, end(task).state) == (4, False, FAILED)
        check_tail(task, 0, pattern(1_000_000), KEEP)
        # What the limit is for still works: a command of its own is ended by it.
        assert warden.run("head -c 1000000 /dev/zero > tmp/big; echo $?", workdir="").stdout == b"153\n"
        (warden.scratch / "tmp" / "big").unlink()
        # The same limit holds for the file that carries a large stdin: no such command, but a session.
        failed = warden.run("cat", stdin=bytes(1_000_000))
        assert failed.error is not None
        assert failed.error.code == frames.SPAWN
        assert warden.run("echo on").stdout == b"on\n"
        assert names(warden) == [], "a failed spill is removed at once"


@contextlib.contextmanager
def small_tmpfs(where: Path, size: str) -> Iterator[Path]:
    if os.geteuid() != 0:
        pytest.skip("only root can mount a file system")
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size}", "corral-test", where], capture_output=True
    )
    if mounted.returncode != 0:
        pytest.skip(f"cannot mount a tmpfs here: {mounted.stderr.decode()}")
    try:
        yield where
    finally:
        subprocess.run(["umount", "-l", where], check=True)


def test_a_full_disk(start: Starter, tmp_path: Path) -> None:
    with small_tmpfs(tmp_path, "4m"), start() as warden:
        # The cap is lowered to half of what is free, so somebody else takes the space once the spill exists.
        warden.hello(ring=KEEP, spill_parent=str(tmp_path))
        filler = tmp_path / "filler"
        task = warden.start(
            f"{print_pattern(100_000)}; sleep 0.2; while [ ! -e {tmp_path}/full ]; do sleep 0.01; done; "
            f"{print_pattern(3_000_000)}; exit 4"
        )
        stream = task.streams[0]
        warden.wait(lambda: bool(stream.spill and stream.spill[1]), "the spill has begun")
        with filler.open("wb", buffering=0) as file, contextlib.suppress(OSError):
            for _ in range(4 * 256):
                file.write(bytes(4096))
        (tmp_path / "full").mkdir()
        warden.finish(task)
        assert (task.code, end(task).state, end(task).path) == (4, FAILED, "")
        check_tail(task, 0, pattern(100_000) + pattern(3_000_000), KEEP)
        assert names(warden) == [], "a full disk is short of just these blocks"
        filler.unlink()
        again = warden.run(print_pattern(300_000))
        assert end(again).state == COMPLETE, "the next command spills again"
        warden.write(frames.shutdown())
        warden.wait_eof()
        assert not directory(warden).exists()
        (tmp_path / "full").rmdir()


def test_a_tmpfs_without_any_space(start: Starter, tmp_path: Path) -> None:
    with small_tmpfs(tmp_path, "64k"), start() as warden:
        warden.hello(ring=KEEP, spill_parent=str(tmp_path))
        with (tmp_path / "filler").open("wb", buffering=0) as file, contextlib.suppress(OSError):
            for _ in range(64):
                file.write(bytes(4096))
        task = warden.run(f"{print_pattern(300_000)}; exit 4")
        assert (task.code, end(task).state) == (4, FAILED)


def test_on_a_tmpfs_the_cap_is_half_of_the_free_space(start: Starter, tmp_path: Path) -> None:
    with small_tmpfs(tmp_path, "8m"), start() as warden:
        warden.hello(ring=KEEP, spill_parent=str(tmp_path))
        task = warden.run(print_pattern(20 * MIB), seconds=20)
        found = end(task)
        assert found.state == COMPLETE
        assert 20 * MIB - 4 * MIB <= found.spill_start < 20 * MIB - 2 * MIB
        assert Path(found.path).stat().st_blocks * 512 <= 4 * MIB + 8192
        assert Path(found.path).read_bytes()[found.spill_start :] == pattern(20 * MIB)[found.spill_start :]


def test_a_killed_keeper_leaves_no_spill(start: Starter) -> None:
    with start() as warden:
        warden.hello(ring=KEEP)
        task = warden.start(f"{print_pattern(300_000)}; exec sleep 20")
        warden.wait(lambda: bool(task.streams[0].spill and task.streams[0].spill[1]), "the spill has begun")
        os.kill(warden.keeper(task), signal.SIGKILL)
        warden.finish(task)
        assert (end(task).state, names(warden)) == (FAILED, [])


# --- how long they stay


def test_forget_removes_both(start: Starter) -> None:
    with start() as warden:
        warden.hello(ring=KEEP)
        tasks = [warden.run(f"{print_pattern(20_000)}; {print_pattern(20_000)} >&2") for _ in range(3)]
        assert names(warden) == [f"{n}.{s}" for n in (1, 2, 3) for s in ("stderr", "stdout")]
        warden.write(
            frames.forget(tasks[2].id) + frames.forget(tasks[2].id) + frames.forget(99) + frames.forget(0)
        )
        warden.barrier()
        assert names(warden) == [f"{n}.{s}" for n in (1, 2) for s in ("stderr", "stdout")]
        fourth = warden.run(print_pattern(20_000))
        for task in (tasks[0], fourth, tasks[1]):
            warden.write(frames.forget(task.id))
        warden.barrier()
        assert names(warden) == []


def test_forget_of_a_task_with_leftovers(start: Starter) -> None:
    with start() as warden:
        warden.hello(ring=KEEP)
        task = warden.start(f"{print_pattern(20_000)}; sleep 20 & exit")
        warden.reach(task, "ended")
        warden.write(frames.forget(task.id))
        warden.barrier()
        assert names(warden) == []
        warden.write(frames.kill(task.id))
        warden.finish(task)


def test_forget_of_a_running_task_removes_nothing(start: Starter) -> None:
    with start() as warden:
        warden.hello(ring=KEEP)
        task = warden.start(f"{print_pattern(20_000)}; read -r -t 0.3 <> <(:)")
        warden.wait(lambda: bool(task.streams[0].spill), "the spill has begun")
        warden.write(frames.forget(task.id))
        warden.finish(task)
        assert Path(end(task).path).read_bytes() == pattern(20_000)


def test_the_oldest_go_first(start: Starter) -> None:
    with start() as warden:
        warden.hello(ring=KEEP, spill_total=100_000)
        for _ in range(5):
            warden.run(print_pattern(30_000))
        assert names(warden) == ["3.stdout", "4.stdout", "5.stdout"]
        warden.write(frames.forget(4))
        warden.run(print_pattern(30_000))
        assert names(warden) == ["3.stdout", "5.stdout", "6.stdout"]
        large = warden.run(print_pattern(300_000))
        assert names(warden) == ["7.stdout"], "the newest stays, whatever its size"
        assert Path(end(large).path).read_bytes() == pattern(300_000)
        warden.run(print_pattern(30_000))
        assert names(warden) == ["8.stdout"]


def test_a_running_task_loses_no_spill_to_the_total(start: Starter) -> None:
    with start() as warden:
        warden.hello(ring=KEEP, spill_total=1)
        running = warden.start(
            f"{print_pattern(30_000)}; while [ ! -e tmp/go ]; do sleep 0.01; done", workdir=""
        )
        warden.wait(lambda: bool(running.streams[0].spill), "the spill has begun")
        for _ in range(2):
            warden.run(print_pattern(30_000))
        assert names(warden) == ["1.stdout", "3.stdout"]
        (warden.scratch / "tmp" / "go").touch()
        warden.finish(running)
        assert names(warden) == ["1.stdout"]
        (warden.scratch / "tmp" / "go").unlink()


MESS = (
    "cd {}; mkdir -p a/b/c; touch a/b/c/file .hidden; ln -s / link; ln -s {} dangling; mkfifo fifo; "
    "mkdir -p $(printf 'd/%.0s' {{1..40}}); mkdir locked; touch locked/x; chmod 0 locked 1.stdout"
)


@pytest.mark.parametrize("how", ["shutdown", "hang-up", "protocol"])
def test_everything_in_it_goes_with_the_session(start: Starter, how: str) -> None:
    with start(account=ordinary()) as warden:
        warden.hello(ring=KEEP)
        warden.run(print_pattern(20_000))
        keep = warden.scratch / "tmp" / "outside"
        made = warden.run(MESS.format(directory(warden), keep))
        assert made.code == 0, made.stderr
        leaving = warden.start(f"{print_pattern(200_000)}; sleep 20")
        warden.wait(lambda: bool(leaving.streams[0].spill), "a spill that is being written")
        if how == "shutdown":
            warden.write(frames.shutdown())
            warden.wait_eof()
            assert warden.bye
        elif how == "protocol":
            warden.write(b"\xff" * 12)
            warden.wait_eof()
        else:
            warden.hang_up()
        poll(lambda: not directory(warden).exists(), 3, "the spill directory is gone")
