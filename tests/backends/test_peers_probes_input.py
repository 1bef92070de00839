"""Further probes that command executors are known to fail: what commands are given.

As test_peers_probes.py.
"""

from __future__ import annotations

import subprocess
from typing import TYPE_CHECKING

import pytest

from tests.support.aio import executor, run, run_command

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.backend("local")


@pytest.mark.parametrize("size", [10_000, 131_071, 131_072, 200_000, 3_000_000])
def test_a_command_larger_than_an_argument_may_be_runs(size: int) -> None:
    """A here-document with one line of that length, around the 128 KiB that the kernel allows an argument."""
    body = "z" * size

    async def scenario() -> None:
        async with executor(max_output_bytes=4_000_000) as made:
            result = await run_command(made, f"cat <<'EOF'\n{body}\nEOF\nexit 5")
            assert (result.exit_code, result.stdout.data) == (5, body.encode() + b"\n")
            assert result.stderr.data == b""

    run(scenario())


@pytest.mark.parametrize(
    "command",
    [
        'echo "a\'b" \'c"d\' $((1 + 1)) \\$HOME `echo x` ${X:-"y z"} {1..3} *',
        'printf \'%s,\' "$0" "$#" "$-"',
        "cat <<EOF\n$((6 * 7))\nEOF",
        "cat <<EOF\nno final newline",
        "echo one\r\necho two\r\n",
        "echo x # comment",
        "echo \\",
        "echo 'open",
        "echo \U0001f600 \u00e9 \u4e2d\n\n",
        "if true; then\n  echo yes\nfi\n\n\n# end",
        "",
        "exit 3; echo no",
        "ls /proc/self/fd | wc -l",
    ],
)
def test_a_command_means_what_it_means_to_bash(command: str, tmp_path: Path) -> None:
    """Quotes, expansions, line ends, an unfinished text: output and status are those of a plain `bash -c`."""
    plain = subprocess.run(
        ["bash", "-c", command],
        cwd=tmp_path,
        capture_output=True,
        stdin=subprocess.DEVNULL,
        check=False,
        timeout=10,
    )

    async def scenario() -> None:
        async with executor(workdir=tmp_path) as made:
            result = await run_command(made, command)
            assert (result.exit_code, result.stdout.data, result.stderr.data) == (
                plain.returncode,
                plain.stdout,
                plain.stderr,
            )

    run(scenario())


def test_standard_input_is_at_its_end() -> None:
    """A command that reads does not wait, and is not given the host's standard input."""

    async def scenario() -> None:
        async with executor() as made:
            result = await run_command(made, 'cat; read -r line; echo "$? $line"', timeout_ms=5_000)
            assert (result.exit_code, result.stdout.text) == (0, "1 \n")

    run(scenario())


def test_nothing_is_carried_from_one_command_to_the_next(tmp_path: Path) -> None:
    here = f"{tmp_path.resolve()}\n"

    async def scenario() -> None:
        async with executor(workdir=tmp_path) as made:
            await run_command(
                made, "cd /; X=1; export X; umask 0; ulimit -n 17; set -e; alias ls=false; f() { :; }"
            )
            result = await run_command(
                made,
                'pwd -P; echo "${X-unset}"; [[ $(ulimit -n) != 17 ]]; echo $?; type -t f; false; echo on',
            )
            assert result.stdout.text == f"{here}unset\n0\non\n"

    run(scenario())
