"""The options that every backend with a warden has."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import PurePath, PurePosixPath
from typing import Final, TypedDict

from corral import check_env

QUIET_ENVIRONMENT: Final = {"NO_COLOR": "1", "TERM": "dumb", "PAGER": "cat", "GIT_PAGER": "cat"}
"""So that neither colours nor pagers garble what a program reads. A request's `env` may say otherwise."""

START_DIRECTORY: Final = PurePosixPath()

MAX_RING: Final = 16 << 20
"""The protocol's bound on `max_output_bytes`."""

MIN_SPILL: Final = 64 << 10
"""Less would be all overhead: heads are released in steps of an eighth, in whole blocks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WardenConfig:
    """Defaults and bounds of an executor. `ValueError`, naming the option, for what cannot be."""

    workdir: PurePosixPath = START_DIRECTORY
    """Where commands run that do not say otherwise. Relative: to the place's start directory."""
    timeout_ms: int = 120_000
    """Limit of a foreground run that asks for none."""
    max_timeout_ms: int = 600_000
    """More than this cannot be asked for."""
    max_output_bytes: int = 64_000
    """How much of each stream is kept in memory: its tail."""
    max_spill_bytes: int = 1 << 30
    """Disk space of one stream's spill file, at least 64 KiB; the head goes first. 0: no spill files."""
    max_spill_total_bytes: int = 4 << 30
    """Disk space of all spill files of finished commands; the oldest go first."""
    kill_grace_ms: int = 3_000
    """Between SIGTERM and SIGKILL."""
    open_timeout_ms: int = 30_000
    """Limit for making the place ready."""
    max_finished_tasks: int = 1_000
    """How many finished background tasks are remembered; the oldest go first."""
    spill_dir: str | None = None
    """An absolute directory of the place under which spill files go; `None`: its temporary directory."""
    shell: str | None = None
    """The path of bash in the place; `None`: as its `PATH` has it."""
    env: Mapping[str, str] = field(default_factory=dict[str, str], repr=False)
    """Variables that every command gets."""

    def __post_init__(self) -> None:
        at_least = {
            "timeout_ms": 1,
            "max_timeout_ms": 1,
            "max_output_bytes": 1,
            "max_spill_bytes": 0 if self.max_spill_bytes == 0 else MIN_SPILL,
            "max_spill_total_bytes": 0,
            "kill_grace_ms": 0,
            "open_timeout_ms": 1,
            "max_finished_tasks": 0,
        }
        at_most = {"max_output_bytes": MAX_RING}
        for option in fields(self):
            value: object = getattr(self, option.name)
            if option.name not in at_least:
                continue
            if not isinstance(value, int) or isinstance(value, bool):
                msg = f"{option.name} must be a whole number, not {value!r}"
                raise TypeError(msg)
            low, high = at_least[option.name], at_most.get(option.name, (1 << 63) - 1)
            if not low <= value <= high:
                msg = f"{option.name} must be from {low} to {high}, not {value}"
                raise ValueError(msg)
        object.__setattr__(self, "env", check_env(self.env))
        for name in ("spill_dir", "shell"):
            path: object = getattr(self, name)
            if path is not None and not (isinstance(path, str) and path.startswith("/") and "\0" not in path):
                msg = f"{name} must be an absolute path of the place, not {path!r}"
                raise ValueError(msg)


class WardenOptions(TypedDict, total=False):
    """`WardenConfig` as keyword arguments of a backend, but for `workdir`, whose default differs."""

    timeout_ms: int
    max_timeout_ms: int
    max_output_bytes: int
    max_spill_bytes: int
    max_spill_total_bytes: int
    kill_grace_ms: int
    open_timeout_ms: int
    max_finished_tasks: int
    spill_dir: str | None
    shell: str | None
    env: Mapping[str, str]


def posix_path(path: str | PurePath) -> PurePosixPath:
    """A path option as a path of the place, whatever this machine's own paths look like."""
    return PurePosixPath(path if isinstance(path, str) else path.as_posix())
