"""Standard input: exactly the bytes that were given, else nothing, and never the host's."""

from __future__ import annotations

import hashlib
import random
import subprocess
import sys

import pytest

from tests.support.aio import executor, run, spec
from tests.support.batches import gathered

pytestmark = pytest.mark.backend("local")


@pytest.mark.parametrize("stdin", [None, b""], ids=["none", "empty"])
def test_stdin_eof(stdin: bytes | None) -> None:
    """Nothing given: a command that reads is at the end at once, and never reads from the host."""

    async def scenario() -> None:
        async with executor() as made:
            command = 'cat; read -r x; echo "$? [$x]"; wc -c; python3 -c "" 2>&-; cat /dev/stdin | wc -c'
            result = await made.run(spec(made, command, stdin=stdin, timeout_ms=5_000))
            assert result.stdout.text == "1 []\n0\n0\n"

    run(scenario())


@pytest.mark.parametrize("size", [1, 4_096, 65_537, 1 << 20, 5 << 20])
def test_stdin_exact(size: int) -> None:
    """The command reads exactly the bytes that were given, then the end of file."""
    data = random.Random(size).randbytes(size)

    async def scenario() -> None:
        async with executor() as made:
            result = await made.run(spec(made, "sha256sum | cut -d ' ' -f 1; cat | wc -c", stdin=data))
            assert result.stdout.text == f"{hashlib.sha256(data).hexdigest()}\n0\n"

    run(scenario())


def test_stdin_is_shared_by_the_commands_of_one_call() -> None:
    """One reader takes up where the other has stopped, as with any standard input."""

    async def scenario() -> None:
        async with executor() as made:
            command = 'read -r first; head -c 3; echo "<$first>"; (read -r x; echo "$x"); exec cat'
            result = await made.run(spec(made, command, stdin=b"one\ntwo three\n\0\xff\r\nfour"))
            assert result.stdout.data == b"two<one>\nthree\n\0\xff\r\nfour"

    run(scenario())


def test_stdin_that_nobody_reads_is_no_matter() -> None:
    """A command that leaves a megabyte unread is neither delayed nor ended by it."""

    async def scenario() -> None:
        async with executor() as made:
            for command in ("echo hi", "exec <&-; echo hi", "head -c 1 >&2; echo hi"):
                result = await made.run(spec(made, command, stdin=b"x" * (1 << 20)))
                assert (result.exit_code, result.stdout.text) == (0, "hi\n")

    run(scenario())


def test_stdin_is_of_its_own_call() -> None:
    """Thirty calls at once, each with bytes of its own, and a long command text in some of them."""

    async def scenario() -> None:
        async with executor() as made:

            async def one(number: int) -> str:
                data = random.Random(number).randbytes(100_000 + number)
                padding = "#" * (200_000 if number % 3 == 0 else 0)
                asked = spec(made, f"sha256sum | cut -d ' ' -f 1 {padding}", stdin=data)
                result = await made.run(asked)
                assert result.stdout.text == f"{hashlib.sha256(data).hexdigest()}\n"
                return result.stdout.text

            assert len(set(await gathered((one(number) for number in range(30)), at_once=30))) == 30

    run(scenario())


def test_stdin_of_the_host_is_left_alone() -> None:
    """What waits on the host's own standard input is still there when commands have read theirs."""
    program = """
import asyncio, sys
from corral import BashExecRequest
from corral_backends.places.local import LocalExecutor
async def main():
    async with LocalExecutor() as made:
        result = await made.run(made.resolve(BashExecRequest(command="cat; echo end")))
        print(result.stdout.text, end="")
asyncio.run(main())
print(sys.stdin.read(), end="")
"""
    done = subprocess.run(
        [sys.executable, "-c", program], input="for the host\n", capture_output=True, text=True, timeout=20
    )
    assert (done.stdout, done.stderr) == ("end\nfor the host\n", "")


def test_stdin_may_be_any_buffer() -> None:
    """A bytearray or a memoryview is copied when it is resolved: later changes do not reach the command."""

    async def scenario() -> None:
        async with executor() as made:
            data = bytearray(b"before")
            asked = spec(made, "cat", stdin=memoryview(data))  # type: ignore[arg-type]
            data[:] = b"after!"
            assert (await made.run(asked)).stdout.data == b"before"
            with pytest.raises(TypeError, match="stdin"):
                spec(made, "cat", stdin="text")  # type: ignore[arg-type]

    run(scenario())
