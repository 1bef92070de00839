"""`corral backends`: what is installed, and whether it can be used."""

# Imports stand where they are needed: the start of `corral run` is what a user waits for.
# ruff: noqa: PLC0415

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

import click

from corral_tools.cli import exits

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from corral import BackendInfo

HELP = """List the installed backends: the names that 'corral run --backend' takes.

Each backend is imported to see whether it can be. What it needs beyond that (a daemon, a remote host) is not
tried. On a terminal the list is a table, elsewhere one line for each backend with tabs between the columns.

\b
With --json, one array of
  {"name": str, "object": "module:attribute", "distribution": str|null,
   "version": str|null, "importable": bool, "error": str|null, "remedy": str|null}
The exit status is 0, also when a backend cannot be imported.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Listed:
    """One installed backend. `error` says why it cannot be imported, None if it can."""

    info: BackendInfo
    error: str | None
    remedy: str | None


@click.command("backends", help=HELP, short_help="List the installed backends.")
@click.option("--json", "as_json", is_flag=True, help="Print a JSON array.")
def backends_command(*, as_json: bool) -> Callable[[], int]:
    def action() -> int:
        listed = list_backends()
        if as_json:
            _print_json(listed)
        elif sys.stdout.isatty():
            _print_table(listed)
        else:
            _print_lines(listed)
        return 0

    return action


def list_backends() -> Sequence[Listed]:
    """All installed backends by name, each imported. One that is broken harms only its own entry."""
    from contextlib import redirect_stdout  # `corral run` needs none of it

    from corral import backends

    with redirect_stdout(sys.stderr):  # a module that prints on import must not get into the list
        return [_try(info) for info in backends().values()]


def _try(info: BackendInfo) -> Listed:
    from corral import ConfigError, load_backend

    try:
        load_backend(info.name)
    except ConfigError as error:
        return Listed(info=info, error=exits.one_line(str(error)), remedy=error.remedy)
    except (Exception, SystemExit) as error:  # a module that calls sys.exit() is as broken as any
        return Listed(info=info, error=exits.one_line(f"{type(error).__name__}: {error}"), remedy=None)
    return Listed(info=info, error=None, remedy=None)


def _print_json(listed: Sequence[Listed]) -> None:
    import json

    rows = [
        {
            "name": each.info.name,
            "object": each.info.value,
            "distribution": each.info.distribution,
            "version": each.info.version,
            "importable": each.error is None,
            "error": each.error,
            "remedy": each.remedy,
        }
        for each in listed
    ]
    print(json.dumps(rows, indent=2))


def _cells(each: Listed) -> tuple[str, str, str, str]:
    distribution = " ".join(filter(None, (each.info.distribution, each.info.version))) or "unknown"
    state = "importable"
    if each.error is not None:
        state = f"not importable: {each.error}" + (f"; {each.remedy}" if each.remedy else "")
    return each.info.name, each.info.value, distribution, state


def _print_lines(listed: Sequence[Listed]) -> None:
    for each in listed:
        print("\t".join(map(exits.one_line, _cells(each))))


def _print_table(listed: Sequence[Listed]) -> None:
    if not listed:
        print("No backend is installed.")
        return
    from rich.console import Console  # 60 ms
    from rich.table import Table
    from rich.text import Text

    table = Table("Name", "Object", "Distribution", "State", box=None, pad_edge=False)
    for each in listed:
        name, value, distribution, state = _cells(each)
        # Text: what a third party calls itself is not markup.
        table.add_row(
            Text(name, style="bold"),
            Text(value),
            Text(distribution),
            Text(state, style="green" if each.error is None else "red"),
        )
    Console().print(table)
