"""Output: byte-exact, apart, bounded in memory by its tail, with exact counts; and no last byte is lost.

What goes to disk is in test_spill.py.
"""

from __future__ import annotations

import os
import random
import subprocess
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from corral import CollectedOutput
from corral_backends.places.local import LocalExecutor
from tests.support.aio import executor, run, run_command
from tests.support.batches import gathered

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = pytest.mark.backend("local")

KIB = 1 << 10


@pytest.fixture(scope="module")
def blob(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """4 MiB in which every piece is unlike every other."""
    path = tmp_path_factory.mktemp("blob") / "blob"
    path.write_bytes(random.Random(5).randbytes(4 << 20))
    return path


def expect_tail(output: CollectedOutput, stream: bytes, bound: int) -> None:
    """`output` is what is kept of `stream` under `bound`, and says so exactly."""
    kept = min(len(stream), bound)
    assert output.total_bytes == len(stream)
    assert output.dropped_bytes == len(stream) - kept
    assert output.truncated == (len(stream) > bound)
    assert output.data == stream[len(stream) - kept :]
    assert (output.spill_path is not None) == output.truncated
    assert output.spill_start == 0


# --- bytes


def test_output_bytes(tmp_path: Path) -> None:
    """CRLF, NUL, invalid UTF-8, a lone CR, no final newline, every byte: as they were written."""
    samples = {
        "nothing": b"",
        "newline": b"\n",
        "crlf": b"a\r\nb\r\n",
        "lone-cr": b"10%\r20%\r",
        "nul": b"\0a\0\0b\0",
        "invalid": b"\xff\xfe\xc3(\xe2\x82 \xf0\x9f\x98",
        "overlong": b"\xc0\xaf\xed\xa0\x80\xf4\x90\x80\x80",
        "bom": b"\xef\xbb\xbfx\xff\xfex\0",
        "no-final-newline": b"line\nrest",
        "controls": bytes(range(256)) * 3,
        "escapes": b"\x1b[31mred\x1b[0m\x1b]0;title\x07\x07\x7f",
    }
    for name, data in samples.items():
        (tmp_path / name).write_bytes(data)

    async def scenario() -> None:
        async with executor(workdir=tmp_path) as made:
            for name, data in samples.items():
                result = await run_command(made, f"cat {name}; cat {name} nothing {name} >&2")
                assert result.stdout.data == data
                assert result.stderr.data == data * 2
                assert result.stdout.text == data.decode(errors="replace")
                expect_tail(result.stdout, data, 64_000)

    run(scenario())


def test_output_streams_are_apart() -> None:
    """Lines that alternate between the two come out in order, each on its own."""
    command = "for i in {1..500}; do echo out $i; echo err $i >&2; done"

    async def scenario() -> None:
        async with executor() as made:
            result = await run_command(made, command)
            assert result.stdout.text == "".join(f"out {number}\n" for number in range(1, 501))
            assert result.stderr.text == "".join(f"err {number}\n" for number in range(1, 501))
            merged = await run_command(made, f"exec 2>&1; {command}")
            lines = [f"{name} {number}\n" for number in range(1, 501) for name in ("out", "err")]
            assert (merged.stdout.text, merged.stderr.total_bytes) == ("".join(lines), 0)

    run(scenario())


def test_output_goes_through_pipes_that_can_be_opened_by_name() -> None:
    """`> /dev/stderr` and `tee /dev/stdout` neither fail nor truncate what was captured before."""

    async def scenario() -> None:
        async with executor() as made:
            result = await run_command(
                made,
                "echo 1; echo 2 >/dev/stdout; echo 3 | tee /dev/stderr; echo 4 >/dev/stderr; echo 5",
            )
            assert (result.stdout.text, result.stderr.text) == ("1\n2\n3\n5\n", "3\n4\n")
            assert result.exit_code == 0

    run(scenario())


# --- the tail

BOUND = 5_000
RING = 8_192
"""What the warden makes of the bound: the next power of two."""
CHUNK = 256 * KIB
"""What the warden reads at once."""
EDGES = [0, 1, BOUND, RING, 2 * RING, BOUND + RING, 64 * KIB, CHUNK, CHUNK + RING, 2 * CHUNK]
sizes = st.one_of(
    st.builds(lambda edge, by: max(0, edge + by), st.sampled_from(EDGES), st.integers(-2, 2)),
    st.integers(0, 3 * RING),
    st.integers(0, 600_000),
)
pieces = st.sampled_from([7, 100, 4_095, 4_096, 4_097, 65_536, 1 << 20])


@settings(
    max_examples=12,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
@given(st.lists(st.tuples(sizes, sizes, pieces), min_size=4, max_size=8))
@example([(BOUND - 1, BOUND, 1 << 20), (BOUND + 1, RING - 1, 1 << 20), (RING, RING + 1, 1 << 20)])
@example([(CHUNK - 1, CHUNK, 1 << 20), (CHUNK + 1, CHUNK + RING + 1, 65_536)])
def test_output_tail(blob: Path, asked: list[tuple[int, int, int]]) -> None:
    """Of any number of bytes, in any pieces, the last `max_output_bytes` are kept; counts are exact."""
    whole = blob.read_bytes()

    async def one(made: LocalExecutor, out: int, err: int, piece: int) -> None:
        # dd writes in pieces of that size, but not so many of them that it takes long.
        size = max(piece, out // 2_000 + 1)
        result = await run_command(
            made,
            f"dd if='{blob}' ibs={size} obs={size} count={out} iflag=count_bytes status=none; "
            f"tail -c +1001 '{blob}' | head -c {err} >&2",
        )
        expect_tail(result.stdout, whole[:out], BOUND)
        expect_tail(result.stderr, whole[1_000 : 1_000 + err], BOUND)

    async def scenario() -> None:
        async with executor(max_output_bytes=BOUND) as made:
            await gathered((one(made, *sizes) for sizes in asked), at_once=4)

    run(scenario(), timeout=40)


@pytest.mark.parametrize("bound", [1, 2, 4_096, 65_536, 1 << 20, 16 << 20])
def test_output_tail_of_any_bound(bound: int, blob: Path) -> None:
    """From one byte to 16 MiB, powers of two included."""
    whole = blob.read_bytes()

    async def scenario() -> None:
        async with executor(max_output_bytes=bound) as made:
            for size in sorted({0, 1, min(bound, len(whole)), min(bound + 1, len(whole)), len(whole)}):
                result = await run_command(made, f"head -c {size} '{blob}'")
                expect_tail(result.stdout, whole[:size], bound)

    run(scenario())


def test_output_tail_after_a_timeout(blob: Path) -> None:
    """The partial output of a command that was killed is counted and kept by the same rules."""

    whole = blob.read_bytes()

    async def scenario() -> None:
        async with executor() as made:
            result = await run_command(made, f"cat '{blob}'; sleep 15", timeout_ms=1_000)
            assert result.timed_out
            expect_tail(result.stdout, whole, 64_000)

    run(scenario())


def test_output_bound_cannot_be_nonsense() -> None:
    """`max_output_bytes` from 1 to 16 MiB; anything else is refused when the executor is made."""
    for wrong in (0, -1, (16 << 20) + 1):
        with pytest.raises(ValueError, match="max_output_bytes"):
            LocalExecutor(max_output_bytes=wrong)
    with pytest.raises(TypeError, match="max_output_bytes"):
        LocalExecutor(max_output_bytes=1.5)  # type: ignore[arg-type]


# --- text


def test_output_utf8() -> None:
    """Wherever the cut goes through a character, `text` begins with a whole one; `data` keeps the bytes."""
    alphabet = "a\u00e9\u20ac\U0001f600"

    async def scenario() -> None:
        for bound in range(40, 60):
            async with executor(max_output_bytes=bound) as made:
                result = await run_command(made, f"printf '{alphabet}%.0s' {{1..50}}")
                stream = (alphabet * 50).encode()
                expect_tail(result.stdout, stream, bound)
                assert "\ufffd" not in result.stdout.text
                assert (alphabet * 50).endswith(result.stdout.text)
                assert bound - len(result.stdout.text.encode()) <= 3

    run(scenario())


def test_output_utf8_of_what_is_none() -> None:
    """Continuation bytes without a character are shown as such: at most three are taken for a cut one."""

    async def scenario() -> None:
        async with executor(max_output_bytes=10) as made:
            cut = await run_command(made, r"printf '\200%.0s' {1..20}")
            assert (len(cut.stdout.data), cut.stdout.text) == (10, "\ufffd" * 7)
            whole = await run_command(made, r"printf '\200%.0s' {1..10}")
            assert (len(whole.stdout.data), whole.stdout.text) == (10, "\ufffd" * 10)

    run(scenario())


# --- the last byte


@pytest.fixture
def load() -> Iterator[None]:
    """Every processor is busy, for at most 50 s."""
    busy = [
        subprocess.Popen(["timeout", "50", "bash", "-c", "while :; do :; done"])
        for _ in range(os.cpu_count() or 1)
    ]
    yield
    for process in busy:
        process.terminate()
    for process in busy:
        process.wait(5)


def test_output_last_bytes(load: None) -> None:
    """1,000 quick commands on a busy machine, sixteen at a time: the last byte of each stream is there."""
    commands = (
        "printf 'o{n}'; printf 'e{n}' >&2",
        "printf 'e{n}' >&2; exec printf 'o{n}'",
        "(printf 'o{n}'; printf 'e{n}' >&2); exit 3",
        "printf 'o{n}'; printf 'e{n}' >&2; ulimit -c 0; kill -SEGV $$",
    )

    async def scenario() -> None:
        async with executor() as made:

            async def one(number: int) -> None:
                result = await run_command(made, commands[number % 4].replace("{n}", str(number)))
                assert (result.stdout.text, result.stderr.text) == (f"o{number}", f"e{number}")

            await gathered((one(number) for number in range(1_000)), at_once=16)

    run(scenario(), timeout=50)


def test_output_last_bytes_of_floods(load: None, blob: Path) -> None:
    """The same with more than fits a pipe, a ring and a credit, so that bytes are under way at the exit."""
    whole = blob.read_bytes()

    async def scenario() -> None:
        async with executor() as made:

            async def one(number: int) -> None:
                size = 60_000 + number * 10_007
                result = await run_command(made, f"head -c {size} '{blob}'; printf end{number}")
                expect_tail(result.stdout, whole[:size] + b"end%d" % number, 64_000)

            await gathered((one(number) for number in range(100)), at_once=8)

    run(scenario(), timeout=50)
