"""`corral doctor`: the options, and the schema of its report. What it does is in `diagnosis`."""

# Imports stand where they are needed: the start of `corral run` is what a user waits for.
# ruff: noqa: PLC0415

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from corral_tools.cli.values import parse_duration

if TYPE_CHECKING:
    from collections.abc import Callable

HELP = """Check whether backends work here, and say what to do where they do not.

Without options every installed backend is checked as it is without configuration; with --config each entry of
the file, as it is configured. Each is checked in a process of its own, and each check is really made:

\b
  import     its module can be imported
  construct  an executor can be made; "not checked" when it needs a configuration
  open       its place gets ready
  run        a command runs and its output comes back
  kill       a process that left its session is killed with the task that started it
  spill      output that is too much for memory can be had in full
  dispose    everything is given back

What it says of the machine is meant for reports of problems: no host name, no user name, and of the
environment only TMPDIR. The errors that it quotes may contain paths.

\b
Exit status:
  0    every backend that could be checked works
  1    one does not
  125  usage, an unknown backend, a mistake in the configuration, or nothing to check

\b
With --json one object is printed at the end. New keys may be added; "schema" changes when others do:
  {"schema": 1, "ok": bool, "machine": MACHINE, "backends": [BACKEND, ...]}
  BACKEND is {"name": str, "entry": str|null, "object": "module:attribute",
   "distribution": str|null, "version": str|null, "outcome": OUTCOME, "steps": [STEP, ...]}
  OUTCOME is "ok", "failed" or "not checked"; a backend is "ok" when none of its steps
   failed and a command was run
  STEP is {"step": str, "outcome": OUTCOME, "evidence": str, "remedy": str|null,
   "stage": str|null, "retryable": bool|null, "duration_ms": float|null}, all of the
   above in this order
  MACHINE is {"corral": str|null, "python": str, "system": str, "kernel": str,
   "architecture": str, "distribution": str|null, "libc": str|null, "cpus": int|null,
   "uid": int, "euid": int, "open_files": {"soft": int|null, "hard": int|null},
   "pids_limit": int|null, "cgroup_version": 1|2|null,
   "user_namespaces": {"allowed": bool|null, "reason": str|null},
   "temporary_directory": {"path": str, "file_system": str|null, "noexec": bool|null,
   "free_bytes": int|null, "writable": bool}, "wardens": [PROGRAM, ...],
   "compiler": PROGRAM|null}; a limit that is null is none
  PROGRAM is {"name": str, "version": str|null, "error": str|null}
"""


def _seconds(context: click.Context, parameter: click.Parameter, value: str) -> float:
    try:
        return parse_duration(value) / 1000
    except ValueError as error:
        raise click.BadParameter(str(error), ctx=context, param=parameter) from error


@click.command("doctor", help=HELP, short_help="Check whether backends work here.")
@click.option(
    "--backend",
    "names",
    multiple=True,
    metavar="NAME",
    help="Check this one; may be repeated. Default: all that are installed.",
)
@click.option("--config", metavar="FILE", help="Check the entries of a configuration file (YAML or TOML).")
@click.option(
    "--timeout",
    "seconds",
    default="30s",
    show_default=True,
    metavar="TIME",
    callback=_seconds,
    help="The time for each backend: 500ms, 5s, 2m. What has not ended by then has failed.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead.")
def doctor_command(
    *, names: tuple[str, ...], config: str | None, seconds: float, as_json: bool
) -> Callable[[], int]:
    if names and config is not None:
        msg = "--backend and --config exclude one another: the configuration says which backends"
        raise click.UsageError(msg)

    def action() -> int:
        from corral_tools.cli.diagnosis import diagnose

        return diagnose(names, config, seconds=seconds, as_json=as_json)

    return action
