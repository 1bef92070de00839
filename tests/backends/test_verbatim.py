"""Any command text works unchanged: a run does what a plain `bash -c` does with the same text."""

from __future__ import annotations

import hashlib
import os
import shlex
import subprocess
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from corral import BashExecRequest
from corral_backends.places.local import LocalExecutor
from tests.support.aio import executor, run, run_command, spec
from tests.support.batches import gathered

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.backend("local")

LONGEST_ARGUMENT = 131_071
"""Bytes that the kernel takes in one argument: MAX_ARG_STRLEN, 32 pages of 4 KiB, less the NUL."""


def plain(command: str, cwd: Path) -> tuple[int, bytes, bytes]:
    """Status, output and errors of a plain `bash -c`; a status below 0 is a signal."""
    done = subprocess.run(
        ["bash", "-c", "--", os.fsencode(command)],
        cwd=cwd,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        check=False,
        timeout=10,
    )
    return done.returncode, done.stdout, done.stderr


PLANES = "".join(chr((plane << 16) + 0xFFFD) for plane in range(17))

TEXTS = {
    "empty": "",
    "blank": " \t\n\n  ",
    "single-quotes": """echo 'a"b\\c$HOME`x`' 'two\nlines' ''""",
    "double-quotes": r'''echo "a'b\"c\\d\$e\`f" "$((6 * 7)) $(echo "nested $(echo "deeper")")"''',
    "dollar": r"""echo $HOME ${HOME} $ x$ $'a\tb\x41\u20ac' $"x" ${X:-"a b"} $? $! $_ "$@" "$*" "$", "$'" """,
    "backslashes": "echo a\\\nb \\\\ \\a '\\' \"\\\"\"",
    "globs": "touch a1 a2 'b c'; echo * ? [ab]* {1..3} ~root b\\ *",
    "newlines": "\n\necho one\n\n\necho two\n\n",
    "crlf": "echo one\r\necho two\r\nif true; then\r\necho three\r\nfi\r\n",
    "lone-cr": "echo a\rb; echo c\r",
    "heredoc": "cat <<EOF\n$((6 * 7)) `echo x` \\$y \"\nEOF\ncat <<'EOF'\n$((6 * 7)) \\\nEOF\n",
    "heredoc-tabs": "cat <<-EOF\n\t\tindented\n\tEOF\necho after",
    "heredoc-unfinished": "cat <<EOF\nno end\nno newline",
    "heredoc-without-final-newline": "cat <<EOF\nbody\nEOF",
    "herestring": "cat <<<'a\nb'",
    "trailing-backslash": "echo a \\",
    "trailing-backslashes": "echo a \\\\",
    "trailing-comment": "echo a # comment",
    "trailing-hash": "echo a #",
    "only-comment": "# nothing",
    "trailing-semicolon": "echo a;",
    "trailing-ampersand": "echo a & wait",
    "trailing-pipe": "echo a |",
    "leading-dash": "-c 'echo no'",
    "leading-double-dash": "--version",
    "leading-plus": "+x",
    "unbalanced-quote": "echo 'open",
    "unbalanced-parenthesis": "echo (",
    "syntax-error-after-output": "echo first\nfi\necho no",
    "functions": "f() { local x=$1; echo \"$x\" \"$#\" \"${FUNCNAME[0]}\"; return 3; }; f a b; echo $?",
    "return-outside": "return 5; echo after $?",
    "exit-in-middle": "echo a; exit 6; echo b",
    "errexit": "set -e; echo a; false; echo b",
    "exit-trap": "trap 'echo trapped $?' EXIT; exit 4",
    "arrays": "a=(1 '2 3'); declare -A m=([k]=v); echo ${#a[@]} ${a[1]} ${m[k]}",
    "mapfile": "mapfile -t x <<<$'p\\nq'; echo ${#x[@]} ${x[1]}",
    "parameters": 'printf "%s|" "$0" "$#" "$-" "$1" "${BASH_SOURCE[0]-}" "$BASH_SUBSHELL" "$LINENO"',
    "execution-string": 'printf %s "$BASH_EXECUTION_STRING"',
    "reply": 'echo "${REPLY-unset}" "${MAPFILE-unset}"',
    "aliases": "shopt -s expand_aliases\nalias hi='echo hello'\nhi there",
    "history": "echo !! !x; echo \"a!b\"",
    "descriptors": "ls -l /proc/self/fd | sed 's/.* \\([0-9]* -> [a-z/]*\\).*/\\1/' | grep -v /proc",
    "descriptor-9": "echo x >&9",
    "stdio-by-name": "echo a >/dev/stdout; echo b >/dev/stderr; echo c >/dev/fd/1; cat /dev/stdin",
    "jobs": "sleep 0.01 & wait $!; echo $?; jobs; kill -0 $! 2>/dev/null; echo $?",
    "pipestatus": "false | true | (exit 3); echo ${PIPESTATUS[@]}; set -o pipefail; false | true; echo $?",
    "bytes": os.fsdecode(b"printf '\xff\xfe\x80'; echo \xc3\x28"),
    "controls": "printf '%s' '" + "".join(map(chr, (*range(1, 39), *range(40, 160)))) + "'",
    "byte-order-mark": "\ufeffecho x",
    "planes": "printf '%s' '" + PLANES + "\uffff\U0010ffff'",
    "combining": "echo 'e\u0301\u200d\u202e\U0001f468\u200d\U0001f469 \u0130\u00df'",
    "exec": "exec printf '%s' replaced",
    "signal": "kill -TERM $$; echo no",
    "coproc": "coproc cat; echo hi >&${COPROC[1]}; exec {COPROC[1]}>&-; cat <&${COPROC[0]}",
}  # fmt: skip


def test_verbatim_texts(tmp_path: Path) -> None:
    """Quotes, expansions, line ends, texts that end too early: status, output and errors of a plain bash."""

    async def one(made: LocalExecutor, name: str) -> None:
        (tmp_path / name).mkdir()
        (tmp_path / f"{name}-plain").mkdir()
        status, out, err = plain(TEXTS[name], tmp_path / f"{name}-plain")
        result = await made.run(spec(made, TEXTS[name], workdir=tmp_path / name, timeout_ms=10_000))
        ended = -15 if result.signal == "SIGTERM" else result.exit_code
        assert (name, ended, result.stdout.data, result.stderr.data) == (name, status, out, err)

    async def scenario() -> None:
        async with executor() as made:
            for name in TEXTS:
                await one(made, name)

    run(scenario())


# Everything a command can hold: all planes, no NUL, no surrogates.
texts = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=300)


@settings(
    max_examples=15, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large]
)
@given(st.lists(texts, min_size=10, max_size=20))
def test_verbatim_any_text(some: list[str]) -> None:
    """Any text comes out of single quotes, and out of a heredoc, as it went in."""

    async def one(made: LocalExecutor, text: str) -> None:
        quoted = await run_command(made, f"printf %s {shlex.quote(text)}")
        assert quoted.stdout.data == text.encode()
        document = await run_command(made, f"cat <<'END OF TEXT'\n{text}\nEND OF TEXT")
        assert document.stdout.data == text.encode() + b"\n"

    async def scenario() -> None:
        async with executor() as made:
            await gathered(one(made, text) for text in some)

    run(scenario())


LENGTHS = (
    LONGEST_ARGUMENT - 1,
    LONGEST_ARGUMENT,
    LONGEST_ARGUMENT + 1,
    LONGEST_ARGUMENT + 2,
    262_144,
    393_217,
)
# The padding stands in front, behind, or in the middle, with an unfinished ending behind it.
SHAPES = {
    "comment-first": ("#{pad}\n", 'printf "%s|" "$0" "$#" "$-" "${REPLY-unset}" "${MAPFILE-unset}"; exit 5'),
    "comment-last": ("", 'printf "%s|" "$0" "$#" "$-"; exit 5 #{pad}'),
    "string": ("x='{pad}'\n", 'echo "${{#x}}"; ls /proc/self/fd | wc -l; return 7; echo "after $?"; exit 5'),
    "heredoc": ("wc -c <<EOF; (exit 5)\n{pad}", ""),
    "backslash": ("x='{pad}'; (exit 5)", "\\"),
    "crlf": ("x='{pad}'\r\n", "echo one\r\ncat <<'EOF'\r\ntwo\r\nEOF\r\nexit 5"),
    "function": ("f() {{ local y='{pad}'; echo ${{#y}} $1 $LINENO; exit 5; }}\n", "f a"),
}


@pytest.mark.parametrize("shape", SHAPES)
def test_verbatim_around_the_longest_argument(shape: str, tmp_path: Path) -> None:
    """Around the 128 KiB that the kernel takes as an argument: a text does the same, however long it is.

    What it does is seen from a plain bash that is given a shorter text of the same shape.
    """
    first, last = SHAPES[shape]

    def text(pad: int) -> str:
        return (first + last).replace("{{", "{").replace("}}", "}").replace("{pad}", "p" * pad)

    def told(out: bytes, pad: int) -> bytes:
        return out.replace(b"%d" % pad, b"PAD").replace(b"%d" % (pad + 1), b"PAD+1")

    overhead = len(text(0))
    short = 100_003
    status, out, _ = plain(text(short), tmp_path)

    async def scenario() -> None:
        async with executor(workdir=tmp_path) as made:
            for length in LENGTHS:
                pad = length - overhead
                assert len(text(pad)) == length
                result = await run_command(made, text(pad))
                assert result.exit_code == status
                assert told(result.stdout.data, pad) == told(out, short)

    run(scenario())


@pytest.mark.parametrize("size", [200_000, 10_000_000])
def test_verbatim_long_heredoc(size: int) -> None:
    """A heredoc of 200 KB and one of 10 MB arrive whole, and what follows them runs."""
    body = "".join(f"{number:09d}\n" for number in range(size // 10))

    async def scenario() -> None:
        async with executor() as made:
            command = f"sha256sum <<'EOF' | cut -d ' ' -f 1\n{body}EOF\necho \"$0 $#\"; exit 5"
            result = await run_command(made, command)
            assert result.stdout.text == f"{hashlib.sha256(body.encode()).hexdigest()}\nbash 0\n"
            assert (result.exit_code, result.stderr.text) == (5, "")

    run(scenario(), timeout=40)


def test_verbatim_long_text_of_all_planes(tmp_path: Path) -> None:
    """A long text of multi-byte characters: its length counts in bytes, and no character is cut."""
    body = PLANES * 4_000
    assert len(body.encode()) > LONGEST_ARGUMENT

    async def scenario() -> None:
        async with executor(max_output_bytes=1_000_000) as made:
            result = await run_command(made, f"cat <<'EOF'\n{body}\nEOF")
            assert result.stdout.text == body + "\n"

    run(scenario())


def test_verbatim_nul() -> None:
    """A NUL, which no program can be given, is a ValueError that says where it is."""
    with pytest.raises(ValueError, match=r"command .*NUL at index 5"):
        LocalExecutor().resolve(BashExecRequest(command="echo \0"))
    with pytest.raises(ValueError, match="surrogate"):
        LocalExecutor().resolve(BashExecRequest(command="echo \ud800"))
