"""Where the warden program is."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

from corral import UnsupportedPlaceError

BIN: Final = Path(__file__).with_name("bin")

_ALIASES: Final = {"amd64": "x86_64", "arm64": "aarch64"}


def find_warden(machine: str) -> Path:
    """The warden for an architecture, named as `uname -m` names it.

    The environment variable `CORRAL_WARDEN` names another one, for tests and for architectures that no
    release carries. `UnsupportedPlaceError` when there is none."""
    override = os.environ.get("CORRAL_WARDEN")
    machine = _ALIASES.get(machine.lower(), machine)
    path = Path(override) if override else BIN / f"corral-warden-{machine}"
    if path.is_file():
        return path
    if override:
        msg = f"CORRAL_WARDEN names {override}, which is not a file"
        raise UnsupportedPlaceError(msg, remedy="Correct or unset CORRAL_WARDEN.")
    known = sorted(found.name.removeprefix("corral-warden-") for found in BIN.glob("corral-warden-*"))
    msg = f"no warden for {machine} in {BIN} (there: {', '.join(known) or 'none'})"
    remedy = (
        "On such a machine run `cc -std=c11 -D_GNU_SOURCE -O2 -static -o corral-warden *.c` in "
        f"{BIN.with_name('src')} and name the result in the environment variable CORRAL_WARDEN."
    )
    raise UnsupportedPlaceError(msg, remedy=remedy)
