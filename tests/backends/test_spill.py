"""Spill files: the full stream on the disk of the place, private and bounded.

Disks that are full, slow or not there are in test_disks.py, the way of a file to the host in test_fetch.py.
"""

from __future__ import annotations

import asyncio
import errno
import hashlib
import os
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from corral_backends.places.local import LocalExecutor
from tests.support.aio import executor, run, run_command
from tests.support.batches import gathered
from tests.support.spills import entries, fetched, files, path_of

if TYPE_CHECKING:
    from corral import BashExecutor

pytestmark = pytest.mark.backend("local")

MIB = 1 << 20


@pytest.fixture
def spill(tmp_path: Path) -> Path:
    """Where spill files go."""
    made = tmp_path / "spill"
    made.mkdir()
    return made


# --- what is in it


def test_spill_is_the_full_stream(spill: Path) -> None:
    """Of each stream that is longer than the bound; 0600 in a directory 0700 of the executor's own."""

    async def scenario() -> None:
        async with executor(spill_dir=str(spill)) as made:
            result = await run_command(made, "umask 0; seq 1 60000; seq 60000 -1 1 >&2")
            numbers = [str(number) for number in range(1, 60_001)]
            for output, lines in ((result.stdout, numbers), (result.stderr, numbers[::-1])):
                kept = path_of(output)
                assert kept.read_text() == "\n".join(lines) + "\n"
                assert (kept.stat().st_mode & 0o7777, kept.parent.stat().st_mode & 0o7777) == (0o600, 0o700)
                assert kept.stat().st_uid == kept.parent.stat().st_uid == os.geteuid()
                assert kept.parent.parent == spill
                assert output.spill_start == 0
            assert len(files(spill)) == 2
        assert entries(spill) == []

    run(scenario())


def test_spill_of_many_sizes_is_whole(spill: Path) -> None:
    """Around the bound, the ring and the chunks of the pump, in small writes and in large ones."""
    size = 64_000

    async def one(made: BashExecutor, total: int, piece: int) -> None:
        line = "x" * (piece - 11)
        command = f"i=0; yes {line} | head -c {total} | nl -b a -w 10 -s '' | head -c {total}"
        result = await run_command(made, f"{{ {command}; }} | tee >(sha256sum >&2); sleep 0.05")
        digest = result.stderr.text.split()[0]
        content = await asyncio.to_thread(path_of(result.stdout).read_bytes)
        assert result.stdout.total_bytes == len(content) == total
        assert hashlib.sha256(content).hexdigest() == digest

    async def scenario() -> None:
        async with executor(spill_dir=str(spill), max_output_bytes=size) as made:
            totals = (size + 1, 65_535, 65_536, 65_537, 2 * 65_536 + 1, 262_144, 262_145, 3 * MIB + 7)
            await gathered((one(made, total, p) for total in totals for p in (12, 5_000)), at_once=3)

    run(scenario(), timeout=40)


def test_spill_nothing_for_small_output(spill: Path) -> None:
    """Up to the bound and exactly at it, not even a directory is made; one byte more makes a file."""

    async def scenario() -> None:
        async with executor(spill_dir=str(spill), max_output_bytes=10_000) as made:
            for size in (0, 1, 9_999, 10_000):
                result = await run_command(made, f"head -c {size} /dev/zero; head -c {size} /dev/zero >&2")
                assert (result.stdout.spill_path, result.stderr.spill_path) == (None, None)
                assert entries(spill) == []
            result = await run_command(made, "head -c 10001 /dev/zero")
            assert files(spill) == [path_of(result.stdout)]
            assert result.stderr.spill_path is None

    run(scenario())


def test_spill_is_for_the_next_command(tmp_path: Path, spill: Path) -> None:
    """Its path means something there: `grep` and `tail` work on it, and so does a background task."""

    async def scenario() -> None:
        async with executor(spill_dir=str(spill)) as made:
            path = (await run_command(made, "seq 1 100000")).stdout.spill_path
            look = await run_command(made, f"grep -c 7 '{path}'; tail -n 1 '{path}'; sed -n 500p '{path}'")
            assert look.stdout.text == "40951\n100000\n500\n"

    run(scenario())


def test_spill_of_a_timeout_is_kept(spill: Path) -> None:
    """A command that is killed leaves the file of what it wrote until then."""

    async def scenario() -> None:
        async with executor(spill_dir=str(spill)) as made:
            result = await run_command(made, "seq 1 100000; sleep 15", timeout_ms=1_000)
            assert result.timed_out
            assert path_of(result.stdout).read_text().endswith("\n99999\n100000\n")

    run(scenario())


def test_spill_into_the_temporary_directory_by_default(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """TMPDIR of the place, and `/tmp` where that is not set or not absolute."""

    async def scenario(expected: Path) -> None:
        async with executor() as made:
            result = await run_command(made, "seq 1 20000")
            kept = path_of(result.stdout)
            assert kept.parent.parent == expected
        assert not kept.parent.exists()

    monkeypatch.setenv("TMPDIR", str(tmp_path))
    run(scenario(tmp_path))
    monkeypatch.setenv("TMPDIR", "relative")
    run(scenario(Path("/tmp")))
    monkeypatch.delenv("TMPDIR")
    run(scenario(Path("/tmp")))


def test_spill_is_not_led_astray(tmp_path: Path, spill: Path) -> None:
    """What a command puts in the way, a symlink or a file of that name, is not written through."""
    victim = tmp_path / "victim"
    victim.write_text("safe")

    async def scenario() -> None:
        async with executor(spill_dir=str(spill)) as made:
            first = path_of((await run_command(made, "seq 1 20000")).stdout)
            # The names of the next ones can be guessed by a command of the same user.
            plant = f"for i in {{1..9}}; do ln -s '{victim}' '{first.parent}'/$i.stdout; done 2>&-; true"
            assert (await run_command(made, plant)).exit_code == 0
            result = await run_command(made, "seq 1 20000")
            assert (result.exit_code, result.stdout.spill_path) == (0, None)
            assert result.stdout.text.endswith("\n20000\n")
            assert victim.read_text() == "safe"
        assert entries(spill) == []
        assert victim.read_text() == "safe"

    run(scenario())


# --- its bounds


def test_spill_cap(spill: Path) -> None:
    """Past the cap the head goes: blocks on disk are bounded, offsets stay, `spill_start` is exact."""
    cap, line = 1 * MIB, 16

    async def scenario() -> None:
        async with executor(spill_dir=str(spill), max_spill_bytes=cap) as made:
            output = (await run_command(made, "seq -f %015.0f 0 999999")).stdout
            kept, start = path_of(output), output.spill_start
            assert output.total_bytes == kept.stat().st_size == 16_000_000
            assert 0 < start < output.total_bytes
            # The head goes in steps of an eighth.
            assert cap * 3 // 4 <= output.total_bytes - start <= cap
            assert kept.stat().st_blocks * 512 <= cap + 65_536

            tail = await fetched(made, kept, start)
            assert tail == b"".join(b"%015d\n" % number for number in range(1_000_000))[start:]
            first = (start + line - 1) // line * line
            look = await run_command(made, f"tail -c +{first + 1} '{kept}' | head -n 1")
            assert look.stdout.text == f"{first // line:015d}\n"
            for hole in (0, start // 2, start - 1):
                with pytest.raises(OSError, match=os.strerror(errno.ENODATA)) as caught:
                    await fetched(made, kept, hole)
                assert caught.value.errno == errno.ENODATA

    run(scenario())


@pytest.mark.parametrize("cap", [65_536, 100_000, 320_000, 320_001])
def test_spill_cap_of_any_size(cap: int, spill: Path) -> None:
    """Never more blocks than the cap and a little; what the file holds is right, and whole if it fits."""

    async def scenario() -> None:
        async with executor(spill_dir=str(spill), max_spill_bytes=cap) as made:
            output = (await run_command(made, "seq -f %015.0f 0 19999")).stdout
            assert (output.total_bytes, len(output.data)) == (320_000, 64_000)
            kept = path_of(output)
            assert kept.stat().st_blocks * 512 <= cap + 8_192
            whole = b"".join(b"%015d\n" % number for number in range(20_000))
            assert kept.read_bytes()[output.spill_start :] == whole[output.spill_start :]
            assert (output.spill_start == 0) == (cap >= 320_000)

    run(scenario())


def test_spill_cap_of_nothing(spill: Path) -> None:
    """0 means no files at all; a cap below 64 KiB, which no file could keep to, is refused."""

    async def scenario() -> None:
        async with executor(spill_dir=str(spill), max_spill_bytes=0) as made:
            output = (await run_command(made, "seq -f %015.0f 0 19999")).stdout
            assert (output.total_bytes, len(output.data), output.spill_path) == (320_000, 64_000, None)
            assert entries(spill) == []

    run(scenario())
    for wrong in (-1, 1, 65_535):
        with pytest.raises(ValueError, match="max_spill_bytes"):
            LocalExecutor(max_spill_bytes=wrong)


def test_spill_total(spill: Path) -> None:
    """All files of finished commands together have a bound too; the oldest go first."""

    async def scenario() -> None:
        async with executor(spill_dir=str(spill), max_spill_total_bytes=1_000_000) as made:
            kept = [path_of((await run_command(made, "head -c 300000 /dev/zero")).stdout) for _ in range(6)]
            assert files(spill) == sorted(kept[-3:])
            # One that is larger than all of it stays while it is the latest.
            large = path_of((await run_command(made, "head -c 2000000 /dev/zero")).stdout)
            assert files(spill) == [large]

    run(scenario())
