"""From the command line to an executor: the one place where one is made."""

from __future__ import annotations

import inspect
import typing
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from corral import CorralError, load_backend, load_config, make_executor
from corral_tools.cli.exits import CliError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from corral import BackendFactory, BashExecutor

Options: TypeAlias = "Mapping[str, int]"


class Opened(NamedTuple):
    """An executor, and what its backend is called. The place itself is opened by the first command."""

    executor: BashExecutor
    backend: str


def from_backend(backend: str, *, preferred: Options, required: Options) -> Opened:
    """An executor of the installed backend of this name.

    Of the options, a backend of a third party may know none. Those that are merely `preferred` are left out
    where they are unknown; one that is `required` (the user asked for it) is an error then, never ignored.
    """
    try:
        factory = load_backend(backend)
    except SystemExit as error:  # a module that ends the program when it is imported
        msg = f"the backend {backend!r} cannot be imported: SystemExit: {error}"
        raise CliError(msg) from error
    names = _keywords(factory)
    if names is not None and (unknown := sorted(set(required) - names)):
        msg = f"the backend {backend!r} has no option {unknown[0]}"
        raise CliError(msg, remedy="leave it out, or use another backend")
    options = {**{k: v for k, v in preferred.items() if names is None or k in names}, **required}
    try:
        return Opened(factory(**options), backend)
    except CorralError:
        raise
    except Exception as error:
        msg = f"the backend {backend!r} could not be set up: {type(error).__name__}: {error}"
        raise CliError(msg) from error


def from_file(path: str, *, preferred: Options, required: Options) -> Opened:
    """The executor that a configuration file describes. What the file says wins over `preferred`."""
    entries = load_config(path)
    if len(entries) != 1:
        msg = f"configuration {path}: a run needs exactly one entry, and there are {len(entries)}"
        raise CliError(msg)
    # What the user asks for on the command line replaces what the file says, however that is spelled.
    plain = {name.replace("_", "") for name in required}
    kept = {k: v for k, v in entries[0].config.items() if k.replace("_", "").lower() not in plain}
    entry = replace(entries[0], config={**kept, **required})
    return Opened(make_executor(entry, **preferred), entry.name)


def _keywords(factory: BackendFactory) -> frozenset[str] | None:
    """The names that `factory` takes as keywords; None when it takes any."""
    try:
        parameters = inspect.signature(factory).parameters.values()
    except (TypeError, ValueError):
        return frozenset()
    names = {p.name for p in parameters if p.kind in (p.KEYWORD_ONLY, p.POSITIONAL_OR_KEYWORD)}
    for parameter in parameters:
        if parameter.kind is parameter.VAR_KEYWORD:
            constructor: object = getattr(factory, "__init__") if isinstance(factory, type) else factory  # noqa: B009
            try:
                hint = typing.get_type_hints(constructor).get(parameter.name)
            except Exception:  # hints that cannot be evaluated say nothing
                return None
            if typing.get_origin(hint) is not typing.Unpack:
                return None
            (listed,) = typing.get_args(hint)
            names |= typing.get_type_hints(listed).keys()
    return frozenset(names)
