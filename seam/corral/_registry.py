"""Finding backends by name: those that come with corral and those of third parties, alike.

A backend is an entry point of the group `corral.backends`. Its name is what configurations call it; its value
is an executor class, or a function that returns an executor, which takes its options as keywords::

    [project.entry-points."corral.backends"]
    local = "corral_backends.places.local:LocalExecutor"

An entry point may name the extra that installs what it needs::

    docker = "acme_docker:DockerExecutor [docker]"
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from types import MappingProxyType
from typing import TypeAlias, cast

from ._errors import ConfigError
from ._executor import BashExecutor

GROUP = "corral.backends"

BackendFactory: TypeAlias = Callable[..., BashExecutor]
"""Makes an executor of the options given as keywords. Most often a subclass of `BashExecutor`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BackendInfo:
    """An installed backend, as its distribution describes it. Nothing of it has been imported."""

    name: str
    value: str
    """Where it is: `"module:attribute"`."""
    distribution: str | None
    """The distribution that provides it, and its version. `None` when its metadata do not say."""
    version: str | None
    extras: tuple[str, ...]
    """Extras of the distribution that it needs."""
    conflicts: tuple[str, ...]
    """Other values that are registered under the same name. Unless there are none, it cannot be loaded."""


def backends() -> Mapping[str, BackendInfo]:
    """All installed backends by name, sorted. Imports none of them, so it works where some are broken."""
    found = _find()
    return MappingProxyType({name: _describe(found[name]) for name in sorted(found)})


def load_backend(name: str) -> BackendFactory:
    """Import the backend of this name and return what makes its executors.

    `ConfigError` when there is none of this name (with the nearest one that there is), when several
    distributions claim it, when it cannot be imported, and when it is not a class of executors or a function.
    No other backend is ever taken instead.
    """
    found = _find()
    if name not in found:
        suggestion = next(iter(difflib.get_close_matches(name, found, n=1)), None)
        msg = f"unknown backend {name!r}; installed are: {', '.join(sorted(found)) or 'none'}"
        if suggestion is not None:
            msg = f"unknown backend {name!r}; did you mean {suggestion!r}?"
        raise ConfigError(msg, entry=name, suggestion=suggestion)
    entries = found[name]
    info = _describe(entries)
    if info.conflicts:
        msg = f"backend {name!r} is claimed more than once: {', '.join((info.value, *info.conflicts))}"
        raise ConfigError(msg, entry=name, remedy="Uninstall all but one of the distributions that claim it.")
    try:
        factory: object = entries[0].load()
    except Exception as error:
        remedy = None
        if info.extras and info.distribution is not None:
            remedy = f"pip install '{info.distribution}[{','.join(info.extras)}]'"
        msg = f"backend {name!r} ({info.value}) cannot be imported: {type(error).__name__}: {error}"
        raise ConfigError(msg, entry=name, remedy=remedy) from error
    if not callable(factory) or (isinstance(factory, type) and not issubclass(factory, BashExecutor)):
        msg = f"backend {name!r} ({info.value}) is no class of executors and no function: {factory!r}"
        raise ConfigError(msg, entry=name)
    return cast("BackendFactory", factory)


def _find() -> dict[str, list[EntryPoint]]:
    """Entry points by name. Those of the same value count once: `sys.path` can lead to one thing twice."""
    found: dict[str, list[EntryPoint]] = {}
    for entry in entry_points(group=GROUP):
        same_name = found.setdefault(entry.name, [])
        if all(entry.value != other.value for other in same_name):
            same_name.append(entry)
    return found


def _describe(entries: list[EntryPoint]) -> BackendInfo:
    entry = entries[0]
    # Not `entry.extras`, which raises where the value cannot be parsed.
    value, _, extras = entry.value.partition("[")
    return BackendInfo(
        name=entry.name,
        value=value.strip(),
        distribution=entry.dist.name if entry.dist is not None else None,
        version=entry.dist.version if entry.dist is not None else None,
        extras=tuple(stripped for extra in extras.rstrip("] ").split(",") if (stripped := extra.strip())),
        conflicts=tuple(other.value for other in entries[1:]),
    )
