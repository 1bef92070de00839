"""The installed backends, each tried, as a table, lines or JSON."""

from __future__ import annotations

import json
import sys
from contextlib import redirect_stdout
from dataclasses import dataclass
from typing import TYPE_CHECKING

from corral import BackendInfo, ConfigError, backends, load_backend
from corral_tools.cli import exits

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True, slots=True, kw_only=True)
class Listed:
    """One installed backend. `error` says why it cannot be imported, None if it can."""

    info: BackendInfo
    error: str | None
    remedy: str | None

    def cells(self) -> tuple[str, str, str, str]:
        distribution = " ".join(filter(None, (self.info.distribution, self.info.version))) or "unknown"
        state = "importable"
        if self.error is not None:
            state = f"not importable: {self.error}" + (f"; {self.remedy}" if self.remedy else "")
        return self.info.name, self.info.value, distribution, state


def show_backends(*, as_json: bool) -> int:
    """Prints the list and returns the exit status, which is 0."""
    with redirect_stdout(sys.stderr):  # a module that prints on import must not get into the list
        listed = [_try(info) for info in backends().values()]
    if as_json:
        _print_json(listed)
    elif sys.stdout.isatty():
        _print_table(listed)
    else:
        for each in listed:
            print("\t".join(map(exits.one_line, each.cells())))
    return 0


def _try(info: BackendInfo) -> Listed:
    """One that is broken harms only its own entry."""
    try:
        load_backend(info.name)
    except ConfigError as error:
        return Listed(info=info, error=exits.one_line(str(error)), remedy=error.remedy)
    except (Exception, SystemExit) as error:  # a module that calls sys.exit() is as broken as any
        return Listed(info=info, error=exits.one_line(f"{type(error).__name__}: {error}"), remedy=None)
    return Listed(info=info, error=None, remedy=None)


def _print_json(listed: Sequence[Listed]) -> None:
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


def _print_table(listed: Sequence[Listed]) -> None:
    if not listed:
        print("No backend is installed.")
        return
    from rich.console import Console  # noqa: PLC0415  # slow, and not needed elsewhere
    from rich.table import Table  # noqa: PLC0415
    from rich.text import Text  # noqa: PLC0415

    table = Table("Name", "Object", "Distribution", "State", box=None, pad_edge=False)
    for each in listed:
        # Text: what a third party calls itself is not markup.
        name, value, distribution, state = map(exits.one_line, each.cells())
        color = "green" if each.error is None else "red"
        table.add_row(Text(name, style="bold"), Text(value), Text(distribution), Text(state, style=color))
    Console().print(table)
