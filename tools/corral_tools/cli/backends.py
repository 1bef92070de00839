"""`corral backends`: the options. What it does is in `listing`, which a run need not load."""

# Imports stand where they are needed: the start of `corral run` is what a user waits for.
# ruff: noqa: PLC0415

from __future__ import annotations

from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from collections.abc import Callable

HELP = """List the installed backends: the names that 'corral run --backend' takes.

Each backend is imported to see whether it can be. What it needs beyond that (a daemon, a remote host) is
not tried. On a terminal the list is a table, elsewhere one line for each backend with tabs between the
columns.

\b
With --json, one array of
  {"name": str, "object": "module:attribute", "distribution": str|null,
   "version": str|null, "importable": bool, "error": str|null, "remedy": str|null}
The exit status is 0, also when a backend cannot be imported.
"""


@click.command("backends", help=HELP, short_help="List the installed backends.")
@click.option("--json", "as_json", is_flag=True, help="Print a JSON array.")
def backends_command(*, as_json: bool) -> Callable[[], int]:
    def action() -> int:
        from corral_tools.cli.listing import show_backends

        return show_backends(as_json=as_json)

    return action
