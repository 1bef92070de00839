"""From the name of a backend to an executor: the one place where the command line makes one."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, TypeAlias

from corral import CorralError, load_backend
from corral_tools.cli.exits import CliError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from corral import BackendFactory, BashExecutor

Options: TypeAlias = "Mapping[str, int]"


def open_executor(backend: str, *, preferred: Options, required: Options) -> BashExecutor:
    """An executor of the installed backend of this name. The place itself is opened by the first command.

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
        return factory(**options)
    except CorralError:
        raise
    except Exception as error:
        msg = f"the backend {backend!r} could not be set up: {type(error).__name__}: {error}"
        raise CliError(msg) from error


def _keywords(factory: BackendFactory) -> frozenset[str] | None:
    """The names that `factory` takes as keywords; None when it takes any."""
    try:
        parameters = inspect.signature(factory).parameters.values()
    except (TypeError, ValueError):
        return frozenset()
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return None
    return frozenset(p.name for p in parameters if p.kind in (p.KEYWORD_ONLY, p.POSITIONAL_OR_KEYWORD))
