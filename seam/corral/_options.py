"""From the options of an entry to an executor: what a backend takes, checked against its signature."""

# Imports are made at run time, for `typing.get_type_hints`.

from __future__ import annotations

import difflib
import functools
import inspect
import json
import re
import sys
import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Final, cast

from ._errors import ConfigError
from ._executor import BashExecutor
from ._registry import BackendFactory, load_backend

if TYPE_CHECKING:
    from pydantic import BaseModel, ValidationError

_ALIASES_OF = {"workdir": "cwd"}

_MAX_VALUES: Final = 10_000
"""How many values an option may have in it to be tried a second time: an alias in YAML can be an exponential
number of them."""


def executor_of(
    entry: str, backend: str, config: Mapping[str, object], defaults: Mapping[str, object]
) -> BashExecutor:
    """As `make_executor`; `entry` is what errors call it."""
    where = f"entry {entry!r}"
    factory = _factory(entry, backend, where)
    parameters = _parameters(factory)
    if parameters.positional:
        msg = f"{where}: {backend!r} takes {parameters.positional!r} by position only, where no option can go"
        raise ConfigError(msg, entry=entry, key="name")
    given: dict[str, object] = {}
    written: dict[str, str] = {}
    for key, value in config.items():
        name = _option(key, parameters)
        if name not in parameters.known and not parameters.open:
            raise unknown_key(where, entry, key, parameters.known)
        if name in given:
            msg = f"{where}: {key!r} and {written[name]!r} are the same option"
            raise ConfigError(msg, entry=entry, key=key)
        given[name], written[name] = value, key
    for name, value in defaults.items():
        if name in parameters.known:
            given.setdefault(name, value)
    for name in sorted(parameters.required - given.keys()):
        msg = f"{where}: the option {name!r} is missing"
        raise ConfigError(msg, entry=entry, key=name)
    options = {
        name: _checked(value, parameters.known[name], where, entry, written.get(name, name))
        if name in parameters.known
        else value
        for name, value in given.items()
    }
    return _made(factory, options, parameters, where, entry, written)


def _made(
    factory: BackendFactory,
    options: Mapping[str, object],
    parameters: _Parameters,
    where: str,
    entry: str,
    written: Mapping[str, str],
) -> BashExecutor:
    try:
        made = cast("object", factory(**options))
    except (TypeError, ValueError) as error:
        # Constructors name the option first, as all errors of values here do.
        option = re.match(r"\w*", str(error))
        found = option.group() if option else ""
        blamed = written.get(found, found) if found in parameters.known else None
        msg = f"{where}: {error}"
        raise ConfigError(msg, entry=entry, key=blamed, remedy=getattr(error, "remedy", None)) from error
    if not isinstance(made, BashExecutor):
        if inspect.iscoroutine(made):
            made.close()  # else it complains that nobody awaited it
        msg = f"{where}: the backend made a value of type {type(made).__name__}, which is no BashExecutor"
        raise ConfigError(msg, entry=entry, key="name")
    return made


def unknown_key(where: str, entry: str | None, key: object, known: Iterable[str]) -> ConfigError:
    """The error for a key that is not one of `known`, with the nearest of them."""
    known = sorted(known)
    name = key if isinstance(key, str) else str(key)
    short = name if len(name) <= 100 else f"{name[:100]}..."
    nearest = next(iter(difflib.get_close_matches(_snake(short), known, n=1, cutoff=0.5)), None)
    hint = f"did you mean {nearest!r}?" if nearest else f"known are: {', '.join(known) or 'none'}"
    return ConfigError(f"{where}: unknown key {short!r}; {hint}", entry=entry, key=name, suggestion=nearest)


def _snake(name: str) -> str:
    return re.sub(r"(?<=[a-z0-9])([A-Z])", r"_\1", name).lower()


def _factory(entry: str, backend: str, where: str) -> BackendFactory:
    try:
        return _imported(backend) if ":" in backend else load_backend(backend)
    except ConfigError as error:
        msg = f"{where}: {error}"
        raise ConfigError(
            msg, entry=entry, key="name", suggestion=error.suggestion, remedy=error.remedy
        ) from error
    except SystemExit as error:  # a module that ends the program when it is imported
        msg = f"{where}: {backend!r} cannot be imported: SystemExit: {error}"
        raise ConfigError(msg, entry=entry, key="name") from error


def _imported(path: str) -> BackendFactory:
    match = re.fullmatch(r"([\w.]+):([\w.]+)", path)
    if match is None:
        msg = f"{path!r} is neither the name of a backend nor of the form 'package.module:Class'"
        raise ConfigError(msg)
    module, attribute = match.groups()
    try:
        factory: object = functools.reduce(getattr, attribute.split("."), import_module(module))
    except Exception as error:
        msg = f"{path!r} cannot be imported: {type(error).__name__}: {error}"
        raise ConfigError(msg) from error
    if not callable(factory) or (isinstance(factory, type) and not issubclass(factory, BashExecutor)):
        msg = f"{path!r} is no class of executors and no function"
        raise ConfigError(msg)
    return cast("BackendFactory", factory)


def _option(key: str, parameters: _Parameters) -> str:
    if key in parameters.known:
        return key
    meant = [name for name in parameters.known if key in (_camel(name), _ALIASES_OF.get(name))]
    return meant[0] if meant else key


def _camel(name: str) -> str:
    first, *others = name.split("_")
    return first + "".join(map(str.capitalize, others))


# --- signatures


@dataclass(frozen=True, slots=True, kw_only=True)
class _Parameters:
    """What a factory takes by keyword: types by name, which of them it must have, whether it takes any
    others; and the name of what it must have by position, if there is such a thing."""

    known: Mapping[str, object]
    required: frozenset[str]
    open: bool
    positional: str | None


def _parameters(factory: BackendFactory) -> _Parameters:
    try:
        signature = inspect.signature(factory)
    except (TypeError, ValueError):  # of something written in C: it alone knows
        return _Parameters(known={}, required=frozenset(), open=True, positional=None)
    namespace = _namespace(factory)
    known: dict[str, object] = {}
    required: set[str] = set()
    takes_any, positional = False, None
    for name, parameter in signature.parameters.items():
        if parameter.kind is parameter.VAR_KEYWORD:
            hint = _evaluated(parameter.annotation, namespace)
            if typing.get_origin(hint) is typing.Unpack:
                (options,) = typing.get_args(hint)
                keys, needed = _typed_dict(options)
                known.update(keys)
                required.update(needed)
            else:
                takes_any = True
        elif parameter.kind in (parameter.KEYWORD_ONLY, parameter.POSITIONAL_OR_KEYWORD):
            known[name] = _evaluated(parameter.annotation, namespace)
            if parameter.default is parameter.empty:
                required.add(name)
        elif parameter.kind is parameter.POSITIONAL_ONLY and parameter.default is parameter.empty:
            positional = positional or name
    return _Parameters(known=known, required=frozenset(required), open=takes_any, positional=positional)


def _namespace(factory: object) -> dict[str, object]:
    """The globals in which the annotations of a factory were written."""
    while isinstance(factory, functools.partial):
        factory = cast("functools.partial[object]", factory).func
    if isinstance(factory, type):
        # A class's own hints are those of its attributes; what it takes is what its constructor says.
        module = vars(sys.modules[factory.__module__]) if factory.__module__ in sys.modules else {}
        function: object = getattr(factory, "__init__")  # noqa: B009
    else:
        module = {}
        # An object that can be called: what it takes is what that method takes.
        function = factory if hasattr(factory, "__globals__") else vars(type(factory)).get("__call__")
    if callable(function):
        function = inspect.unwrap(function)
    return cast("dict[str, object]", getattr(function, "__globals__", module))


def _evaluated(annotation: object, namespace: dict[str, object]) -> object:
    """What an annotation means; `object` where there is none, or where it cannot be told.

    Each by itself: what was imported for type checkers only must not take the others with it.
    """
    if annotation is inspect.Parameter.empty:
        return object
    holder = types.SimpleNamespace(__annotations__={"value": annotation})
    try:
        hints = typing.get_type_hints(holder, namespace, include_extras=True)
    except Exception:
        return object
    return cast("object", hints["value"])


def _typed_dict(options: type) -> tuple[dict[str, object], frozenset[str]]:
    """The keys of a TypedDict with their types, and those that must be there."""
    namespace = vars(sys.modules[options.__module__])
    known: dict[str, object] = {}
    required = set(cast("frozenset[str]", getattr(options, "__required_keys__")))  # noqa: B009
    for key, annotation in options.__annotations__.items():
        hint = _evaluated(annotation, namespace)
        # As text they were not yet understood when the class was made.
        if typing.get_origin(hint) in (typing.Required, typing.NotRequired):
            (required.add if typing.get_origin(hint) is typing.Required else required.discard)(key)
            (hint,) = typing.get_args(hint)
        known[key] = hint
    return known, frozenset(required)


# --- types


def _checked(value: object, hint: object, where: str, entry: str, key: str) -> object:
    """The value as a parameter with this annotation takes it.

    Strict: a number in quotes is not a number. But a file has no paths, tuples or enumerations, so what JSON
    can only write as a string or a list may be one."""
    if hint is object:
        return value
    from pydantic import ConfigDict, ValidationError, create_model  # noqa: PLC0415  # slow to import

    make = cast("Callable[..., type[BaseModel]]", create_model)
    try:
        model = make(
            "Option",
            __config__=ConfigDict(arbitrary_types_allowed=True, hide_input_in_errors=True),
            value=(hint, ...),
        )
    except Exception:  # it cannot be checked (a TypeVar, say); the constructor will see
        return value
    try:
        return _value(model.model_validate({"value": value}, strict=True))
    except ValidationError as error:
        wrong = error
    if _is_small(value):
        try:
            return _value(model.model_validate_json(json.dumps({"value": value}), strict=True))
        except ValidationError as error:
            wrong = error
        except (TypeError, ValueError, RecursionError):
            pass  # not JSON, so there is no second way
    raise _wrong_type(wrong, value, where, entry, key) from None


def _value(model: BaseModel) -> object:
    return cast("object", getattr(model, "value"))  # noqa: B009


def _is_small(value: object) -> bool:
    pending = [value]
    for _ in range(_MAX_VALUES):
        if not pending:
            return True
        found = pending.pop()
        if isinstance(found, Mapping):
            pending.extend(cast("Mapping[object, object]", found).values())
        elif isinstance(found, list | tuple):
            pending.extend(cast("Sequence[object]", found))
    return False


def _wrong_type(error: ValidationError, value: object, where: str, entry: str, key: str) -> ConfigError:
    # A union reports once for each of its members. Values are not shown: they may be secrets.
    found = error.errors(include_url=False, include_context=False, include_input=False)
    told = " or ".join(dict.fromkeys(item["msg"][:1].lower() + item["msg"][1:] for item in found))
    inside = ""
    if len(found) == 1 and len(found[0]["loc"]) > 1:
        inside = f", at {'.'.join(str(part) for part in found[0]['loc'][1:])}"
    kind = "null" if value is None else f"of type {type(value).__name__}"
    return ConfigError(f"{where}: {key} is {kind}{inside}: {told}", entry=entry, key=key)
