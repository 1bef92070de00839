"""What a command finds: a fresh shell, and an environment in layers."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
from typing import TYPE_CHECKING

import pytest

from corral import BashExecRequest
from corral_backends.places.local import LocalExecutor
from tests.support.aio import executor, run, run_command, spec

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

pytestmark = pytest.mark.backend("local")

QUIET = {"NO_COLOR": "1", "TERM": "dumb", "PAGER": "cat", "GIT_PAGER": "cat"}
STARTUP = ("BASH_ENV", "ENV", "SHELLOPTS", "BASHOPTS", "BASH_FUNC_echo%%", "BASH_FUNC_x()")


def plain(command: str, *, cwd: Path, env: Mapping[str, str]) -> bytes:
    """What a plain `bash -c` prints."""
    return subprocess.run(
        ["bash", "-c", command],
        cwd=cwd,
        env=env,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        check=True,
        timeout=10,
    ).stdout


def environment(output: bytes) -> dict[str, str]:
    """What `env -0` printed, less what bash sets for itself, and less the previous directory of the host."""
    found = dict(os.fsdecode(entry).split("=", 1) for entry in output.split(b"\0") if entry)
    return {name: value for name, value in found.items() if name not in ("_", "PWD", "SHLVL", "OLDPWD")}


# --- a fresh shell


def test_fresh_shell_knows_nothing_of_the_call_before(tmp_path: Path) -> None:
    """Directory, variables, functions, aliases, options, traps, jobs, umask and limits are as at first."""
    change = """\
cd /; X=1; export Y=2; f() { :; }; shopt -s expand_aliases extglob; alias a=b; set -e -u -f; trap : EXIT USR1
umask 0123; ulimit -n 17; ulimit -c 1; hash -p /bin/false true; exec 3</dev/null; readonly HOME; sleep 15 &"""
    show = """\
pwd -P; set -o; shopt; alias; jobs; umask; ulimit -a; hash; ls /proc/self/fd | wc -l; echo "$-"
declare -F; declare -p X Y OLDPWD 2>&1; HOME=/x; echo $HOME"""

    async def scenario() -> None:
        async with executor(workdir=tmp_path) as made:
            first = await run_command(made, show)
            await run_command(made, change)
            assert (await run_command(made, show)).stdout.data == first.stdout.data
            here = {name: value for name, value in os.environ.items() if name != "OLDPWD"}
            assert first.stdout.data == plain(show, cwd=tmp_path, env=here)
            # Not compared with a plain bash, which also lists what the host ignores.
            assert (await run_command(made, "trap")).stdout.data == b""

    run(scenario())


def test_fresh_shell_reads_no_startup_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even `~/.bashrc`, which bash reads for `-c` too when it takes itself for a child of sshd."""
    for name in (".bashrc", ".bash_profile", ".bash_login", ".profile", "env"):
        (tmp_path / name).write_text("echo read; MARK=1\n")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("SSH_CLIENT", "192.0.2.1 5 22")
    monkeypatch.setenv("SSH2_CLIENT", "192.0.2.1 5 22")
    monkeypatch.setenv("SSH_CONNECTION", "192.0.2.1 5 192.0.2.2 22")
    monkeypatch.setenv("BASH_ENV", str(tmp_path / "env"))
    monkeypatch.setenv("ENV", str(tmp_path / "env"))
    monkeypatch.delenv("SHLVL", raising=False)

    async def scenario() -> None:
        async with executor() as made:
            result = await run_command(made, 'shopt -q login_shell; echo "$? ${MARK-unset} $-"')
            assert result.stdout.text == "1 unset hBc\n"

    run(scenario())


def test_fresh_shell_takes_nothing_from_the_host_that_changes_bash(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """BASH_ENV, ENV, SHELLOPTS, BASHOPTS, exported functions and OLDPWD of the host are removed."""
    (tmp_path / "env").write_text("echo sourced\n")
    monkeypatch.setenv("BASH_ENV", str(tmp_path / "env"))
    monkeypatch.setenv("ENV", str(tmp_path / "env"))
    monkeypatch.setenv("SHELLOPTS", "xtrace:errexit")
    monkeypatch.setenv("BASHOPTS", "extdebug:nullglob")
    monkeypatch.setenv("BASH_FUNC_ls%%", "() { echo stolen; }")
    monkeypatch.setenv("BASH_FUNC_old()", "() { echo stolen; }")
    monkeypatch.setenv("OLDPWD", str(tmp_path))

    async def scenario() -> None:
        async with executor(workdir="/") as made:
            found = environment((await run_command(made, "env -0")).stdout.data)
            assert [name for name in found if name.startswith(("BASH_", "SHELLOPTS", "ENV", "OLDPWD"))] == []
            result = await run_command(made, "false; type -t ls old; cd - ; shopt nullglob extdebug; sh -c :")
            assert result.stdout.text == "file\nnullglob       \toff\nextdebug       \toff\n"
            assert "OLDPWD" in result.stderr.text
            assert "+" not in result.stderr.text

    run(scenario())


@pytest.mark.parametrize("name", STARTUP)
def test_fresh_shell_refuses_what_changes_bash(name: str) -> None:
    """In a request and in the executor's own options such a variable is a ValueError that names it."""
    with pytest.raises(ValueError, match=name[:9]):
        LocalExecutor().resolve(BashExecRequest(command="true", env={name: "x"}))
    with pytest.raises(ValueError, match=name[:9]):
        LocalExecutor(env={name: "x"})


@pytest.fixture
def odd_signals() -> Iterator[None]:
    """A host that ignores some signals and blocks others, beside those that Python ignores."""
    ignored = [signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGTSTP]
    blocked = {signal.SIGINT, signal.SIGUSR2, signal.SIGTERM}
    before = [(number, signal.signal(number, signal.SIG_IGN)) for number in ignored]
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, blocked)
    yield
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    for number, handler in before:
        signal.signal(number, handler)


def test_fresh_shell_has_default_signals(odd_signals: None) -> None:
    """No signal is ignored or blocked in a command, whatever the host has done with its own."""

    async def scenario() -> None:
        async with executor() as made:
            # A program in place of bash, which handles some signals itself.
            status = (await run_command(made, "exec cat /proc/self/status")).stdout.text
            masks = dict(line.split(":\t") for line in status.splitlines() if line.startswith("Sig"))
            assert {masks[name] for name in ("SigBlk", "SigIgn", "SigCgt")} == {"0" * 16}
            result = await run_command(made, 'yes | head -n 1; echo "${PIPESTATUS[@]}"')
            assert (result.stdout.text, result.stderr.text) == ("y\n141 0\n", "")

    run(scenario())


def test_fresh_shell_has_the_limits_of_the_host() -> None:
    """Soft and hard limits are those of the host, whatever the warden needs for itself."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)

    async def scenario() -> None:
        lowered = min(soft, 4_000)
        resource.setrlimit(resource.RLIMIT_NOFILE, (lowered, hard))
        try:
            async with executor() as made:
                result = await run_command(made, "ulimit -Sn; ulimit -Hn")
                hard_text = "unlimited" if hard == resource.RLIM_INFINITY else str(hard)
                assert result.stdout.text.split() == [str(lowered), hard_text]
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))

    run(scenario())


# --- the environment


def test_env_is_quiet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """NO_COLOR, TERM, PAGER and GIT_PAGER keep output plain, whatever the host has there."""
    for name in QUIET:
        monkeypatch.setenv(name, "of the host")

    async def scenario() -> None:
        async with executor() as made:
            found = environment((await run_command(made, "env -0")).stdout.data)
            assert {name: found[name] for name in QUIET} == QUIET

    run(scenario())


def test_env_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host's variables, then the quiet ones, then the executor's, then the request's; for one call."""
    monkeypatch.setenv("A", "host")
    monkeypatch.setenv("B", "host")
    monkeypatch.setenv("C", "host")
    show = 'echo "$A $B $C $TERM $PAGER"'

    async def scenario() -> None:
        async with executor(env={"B": "option", "C": "option", "TERM": "vt100"}) as made:
            layered = await made.run(spec(made, show, env={"C": "request", "PAGER": "less"}))
            assert layered.stdout.text == "host option request vt100 less\n"
            assert (await run_command(made, show)).stdout.text == "host option option vt100 cat\n"

    run(scenario())


def test_env_inherits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By default all of the host's: the whole environment is that of a plain `bash -c` in the host."""
    monkeypatch.setenv("ODD", "a=b\n\ttab 'quote' \U0001f600")
    monkeypatch.setenv("EMPTY", "")
    monkeypatch.setenv("with-dash.and space", "1")
    os.environb[b"BYTES"] = b"\xff\xfe"
    monkeypatch.setitem(os.environ, "BYTES", os.fsdecode(b"\xff\xfe"))

    async def scenario() -> None:
        async with executor(workdir=tmp_path) as made:
            found = (await run_command(made, "env -0")).stdout.data
            assert environment(found) == environment(
                plain("env -0", cwd=tmp_path, env={**os.environ, **QUIET})
            )

    try:
        run(scenario())
    finally:
        os.environb.pop(b"BYTES", None)


MINIMAL = {"PATH", "HOME", "USER", "LOGNAME", "SHELL", "TMPDIR", "LANG", "LC_CTYPE", "LC_ALL", "TZ"}


@pytest.mark.parametrize(
    ("inherit", "expected"),
    [
        (False, MINIMAL),
        ([], set()),
        (["PATH", "SECRET_*"], {"PATH", "SECRET_A", "SECRET_B"}),
        (["SECRET_?", "!*", "[!A-Z_]*"], {"SECRET_A", "SECRET_B", "lower"}),
    ],
    ids=["minimal", "nothing", "names-and-patterns", "patterns"],
)
def test_env_inherits_what_is_allowed(
    inherit: bool | list[str], expected: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`env_inherit`: False is a short list that programs need, and a list is names and patterns."""
    for name in (*MINIMAL, "SECRET_A", "SECRET_B", "lower", "AWS_KEY", "LD_PRELOAD_NOT"):
        monkeypatch.setenv(name, "C" if name.startswith(("LC_", "LANG")) else os.environ.get(name, "/"))

    async def scenario() -> None:
        async with executor(env_inherit=inherit) as made:
            # By its path: without PATH, bash looks in places of its own.
            found = environment((await run_command(made, "/usr/bin/env -0")).stdout.data)
            assert set(found) - set(QUIET) == expected

    run(scenario())


def test_env_carries_any_text(tmp_path: Path) -> None:
    """Values with newlines, quotes, `=`, every plane of Unicode, arbitrary bytes, and nothing at all."""
    values = {
        "LINES_": "a\nb\r\n\n",
        "QUOTES": "'\"\\$(exit 9)`exit 9`${X}",
        "EQUALS": "==a=b",
        "NOTHING": "",
        "PLANES": "".join(chr((plane << 16) + 0xFFFD) for plane in range(17)),
        "BYTES": os.fsdecode(bytes(range(1, 256))),
        "dash-ed.name": "x",
        "N\u00e4me": "x",
        "LONG": "x" * (131_071 - len("LONG=")),
    }

    async def scenario() -> None:
        async with executor(max_output_bytes=400_000) as made:
            found = environment((await made.run(spec(made, "env -0", env=values))).stdout.data)
            assert {name: found.get(name) for name in values} == values

    run(scenario())


def test_env_that_cannot_be() -> None:
    """Names that are none, NUL, and a value longer than the kernel takes: ValueError, naming `env`."""
    made = LocalExecutor()
    for wrong in (
        {"": "x"},
        {"A=B": "x"},
        {"A\0": "x"},
        {"A": "x\0y"},
        {"A": "\ud800"},
        {"A": "x" * (131_071 - len("A=") + 1)},
        {f"A{number}": "x" * 100_000 for number in range(70)},
    ):
        with pytest.raises(ValueError, match="env"):
            made.resolve(BashExecRequest(command="true", env=wrong))
        with pytest.raises(ValueError, match="env"):
            LocalExecutor(env=wrong)


def test_env_too_large_for_the_kernel(tmp_path: Path) -> None:
    """What only the kernel can refuse, for it depends on its limits, is a ValueError of `run`."""
    if resource.getrlimit(resource.RLIMIT_STACK)[0] != 8 << 20:
        pytest.skip("the kernel's limit is a quarter of the stack's, and that is not the usual 8 MiB here")

    async def scenario() -> None:
        async with executor() as made:
            for size, fits in ((18, True), (24, False), (60, False)):
                env = {f"A{number}": "x" * 100_000 for number in range(size)}
                asked = spec(made, f"touch '{tmp_path}/{size}'", env=env)
                if fits:
                    assert (await made.run(asked)).exit_code == 0
                    continue
                with pytest.raises(ValueError, match="env") as caught:
                    await made.run(asked)
                assert "too large" in str(caught.value)
                assert "xxxx" not in str(caught.value)
            assert (await run_command(made, "echo next")).stdout.text == "next\n"

    run(scenario())
    assert [file.name for file in tmp_path.iterdir()] == ["18"]
