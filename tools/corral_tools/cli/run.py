"""`corral run`: the options, and what they add up to."""

# Imports stand where they are needed: the start of `corral run` is what a user waits for.
# ruff: noqa: PLC0415

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

import click
from click.core import ParameterSource

from corral_tools.cli.values import parse_assignment, parse_duration

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

T = TypeVar("T")

HELP = """Run a shell command and pass on its output and exit status.

A single COMMAND argument is bash text, taken verbatim: corral run -- 'make test | tail'. Several arguments
are one program and its arguments, and are quoted so that bash sees them unchanged: corral run -- grep 'a b'
notes.txt. Options of corral come first; everything from the first argument on, or after '--', belongs to the
command.

Both outputs are passed on byte for byte, each in order, as they come (the order between the two is not kept).
A slow reader never holds the command up: what does not fit in memory waits in a spill file of the place.
Processes that the command leaves in the background are killed when corral exits. The command's standard input
is empty unless --stdin is given.

\b
Exit status:
  the command's own, and
  128+N  signal N ended the command (137 for SIGKILL)
  124    the time limit ended it; "corral: timed out after ..." is on standard error
  125    corral could not do its part: usage, directory, backend, place, or lost output of
         a command that succeeded; "corral: <reason>; <remedy>" is on standard error
  130    Ctrl-C (129 SIGHUP, 143 SIGTERM): the command and all its descendants were told to
         end (SIGTERM) and, after a grace, killed; a second Ctrl-C does not wait
  141    whoever read the output went away, as in: corral run -- yes | head

\b
With --json nothing is streamed; one object is printed at the end:
  {"exit_code": int|null, "signal": "SIGKILL"|null, "reason": "exited"|"signalled"|
   "timed_out"|"aborted"|"killed"|"disposed"|"out_of_memory"|"lost",
   "timed_out": bool, "aborted": bool, "timeout_ms": int|null, "duration_ms": float,
   "survivors": int, "stdout": OUTPUT, "stderr": OUTPUT, "backend": str}
  OUTPUT is {"text": str, "total_bytes": int, "dropped_bytes": int, "truncated": bool,
   "spill_path": null, "spill_start": null}: the last --max-output bytes, as UTF-8 with
   U+FFFD for what is not. The spill is gone when corral exits, so its path is null.
  When corral could not do its part (status 125), or was stopped before the command ran:
  {"error": {"type": str, "message": str, "stage": str|null, "remedy": str|null,
   "retryable": bool|null}}; for a place that was lost, "stdout" and "stderr" beside
   it hold what had come until then, if anything is known.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    """One invocation of `corral run`, checked. `timeout_ms` and `max_output` are None when not given."""

    script: str
    backend: str
    config: str | None
    """A configuration file, which then says which backend."""
    workdir: str | None
    timeout_ms: int | None
    env: Mapping[str, str]
    forward_stdin: bool
    as_json: bool
    max_output: int | None


def _parsed(parse: Callable[[str], T]) -> Callable[[click.Context, click.Parameter, str | None], T | None]:
    """A click callback that says what `parse` says, with the name of the option before it."""

    def callback(context: click.Context, parameter: click.Parameter, value: str | None) -> T | None:
        if value is None:
            return None
        try:
            return parse(value)
        except ValueError as error:
            raise click.BadParameter(str(error), ctx=context, param=parameter) from error

    return callback


def _assignments(
    context: click.Context, parameter: click.Parameter, values: tuple[str, ...]
) -> dict[str, str]:
    try:
        return dict(map(parse_assignment, values))
    except ValueError as error:
        raise click.BadParameter(str(error), ctx=context, param=parameter) from error


@click.command(
    "run",
    help=HELP,
    short_help="Run a shell command and pass on its output and exit status.",
    options_metavar="[OPTIONS]",
    # The first word that is not an option begins the command: `corral run ls -l` needs no '--'.
    context_settings={"allow_interspersed_args": False},
)
@click.option(
    "--backend",
    envvar="CORRAL_BACKEND",
    default="local",
    show_default=True,
    show_envvar=True,
    metavar="NAME",
    help="Where to run it; see 'corral backends'.",
)
@click.option(
    "--config",
    metavar="FILE",
    help="A configuration file (YAML or TOML) with one entry, which says where to run it and with which "
    "options; instead of --backend.",
)
@click.option(
    "--workdir", metavar="DIR", help="Working directory, a path of the place where the command runs."
)
@click.option(
    "--timeout",
    "timeout_ms",
    metavar="TIME",
    callback=_parsed(parse_duration),
    help="Kill the command after this time: 500ms, 5s, 2m, 1h; a plain number is seconds. It counts from the "
    "start of the command; making the place ready is not part of it. Default: no limit, or that "
    "of the configuration.",
)
@click.option(
    "--env",
    "env",
    multiple=True,
    metavar="NAME=VALUE",
    callback=_assignments,
    help="Set an environment variable of the command; may be repeated.",
)
@click.option(
    "--stdin",
    "forward_stdin",
    is_flag=True,
    help="Read standard input to its end and give it to the command.",
)
@click.option(
    "--json", "as_json", is_flag=True, help="Print one JSON object at the end instead of the output."
)
@click.option(
    "--max-output",
    type=click.IntRange(min=1),
    metavar="BYTES",
    help="With --json: how much of the end of each output to keep. Default: 64000, or what the "
    "configuration says.",
)
@click.argument("command", nargs=-1, type=click.UNPROCESSED, metavar="[--] COMMAND...")
def run_command(
    *,
    backend: str,
    config: str | None,
    workdir: str | None,
    timeout_ms: int | None,
    env: dict[str, str],
    forward_stdin: bool,
    as_json: bool,
    max_output: int | None,
    command: tuple[str, ...],
) -> Callable[[], int]:
    if not command:
        msg = "no command given; write it at the end, for example: corral run -- 'make test'"
        raise click.UsageError(msg)
    if max_output is not None and not as_json:
        msg = "--max-output needs --json; without it all of the output is passed on"
        raise click.UsageError(msg)
    source = click.get_current_context().get_parameter_source("backend")
    if config is not None and source is ParameterSource.COMMANDLINE:
        msg = "--backend and --config exclude one another: the configuration says which backend"
        raise click.UsageError(msg)
    import shlex

    options = RunOptions(
        script=command[0] if len(command) == 1 else shlex.join(command),
        backend=backend,
        config=config,
        workdir=workdir,
        timeout_ms=timeout_ms,
        env=env,
        forward_stdin=forward_stdin,
        as_json=as_json,
        max_output=max_output,
    )

    def action() -> int:
        from corral_tools.cli.session import run  # asyncio: not for --help

        return run(options)

    return action
