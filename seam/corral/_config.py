"""Configuration: which backend, with which options, chosen by a file and not by the program.

A file is YAML or TOML, by its suffix. It is a list of entries, in YAML at the top, in TOML under `entries`::

    - id: bash
      name: local
      config:
        workdir: /srv/project
        timeout_ms: 60000

`name` is an installed backend or `package.module:Class`; `config` are its constructor's keywords, with the
types that its signature says. `timeoutMs` is understood as `timeout_ms`, and `cwd` as `workdir`. Nothing is
guessed beyond that: whatever is unknown, doubled or of the wrong type is a `ConfigError`, and no backend is
ever taken in place of another."""

# Imports are made at run time, for `typing.get_type_hints`.

from __future__ import annotations

import difflib
import inspect
import re
import tomllib
import typing
from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import TYPE_CHECKING, cast

from ._context import Context
from ._errors import ConfigError, CorralError
from ._executor import BashExecutor
from ._registry import GROUP, BackendFactory, load_backend

if TYPE_CHECKING:
    from pydantic import BaseModel, ValidationError

_ENTRY_KEYS = ("id", "name", "config")
_ALIASES = {"cwd": "workdir"}


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigEntry:
    """One entry of a configuration, as it was written. Its options are checked by `make_executor`."""

    id: str
    """What errors call it; unique in its configuration."""
    name: str
    """An installed backend, or `package.module:Class`."""
    config: Mapping[str, object] = field(default_factory=dict[str, object], repr=False)


def load_config(path: str | Path) -> tuple[ConfigEntry, ...]:
    """Read a configuration file. `ConfigError`, naming file and entry, for what is not a list of entries."""
    file = Path(path)
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        msg = f"configuration {file}: cannot be read: {reason}"
        raise ConfigError(msg) from error
    return parse_entries(_parse(text, file), source=str(file))


def _parse(text: str, file: Path) -> object:
    if file.suffix == ".toml":
        try:
            return tomllib.loads(text)
        except tomllib.TOMLDecodeError as error:
            msg = f"configuration {file}: not TOML: {error}"
            raise ConfigError(msg) from error
    if file.suffix not in (".yaml", ".yml"):
        msg = f"configuration {file}: the suffix must be .yaml, .yml or .toml"
        raise ConfigError(msg)
    import yaml  # noqa: PLC0415  # only who uses a file pays for it

    try:
        parsed: object = yaml.safe_load(text)
    except yaml.YAMLError as error:
        msg = f"configuration {file}: not YAML: {error}"
        raise ConfigError(msg) from error
    return parsed


def parse_entries(data: object, *, source: str = "configuration") -> tuple[ConfigEntry, ...]:
    """Entries from what a file or a program says: a list of mappings, or a mapping with such a list as
    `entries`.

    `source` is what errors call it.
    """
    if isinstance(data, Mapping):
        mapping = cast("Mapping[object, object]", data)
        unknown = [key for key in mapping if key != "entries"]
        if unknown or "entries" not in mapping:
            keys = ", ".join(map(repr, unknown)) or "nothing"
            msg = f"{source}: expected a list of entries, or a mapping with the key 'entries'; found {keys}"
            raise ConfigError(msg)
        data = mapping["entries"]
    if not isinstance(data, Sequence) or isinstance(data, str | bytes):
        msg = f"{source}: expected a list of entries, found {type(data).__name__}"
        raise ConfigError(msg)
    entries: dict[str, ConfigEntry] = {}
    for position, item in enumerate(cast("Sequence[object]", data), 1):
        entry = item if isinstance(item, ConfigEntry) else _entry(item, f"{source}, entry {position}")
        if entry.id in entries:
            msg = f"{source}: two entries have the id {entry.id!r}"
            raise ConfigError(msg, entry=entry.id, key="id")
        entries[entry.id] = entry
    return tuple(entries.values())


def _entry(item: object, where: str) -> ConfigEntry:
    if not isinstance(item, Mapping):
        msg = f"{where}: expected a mapping with id, name and config, found {type(item).__name__}"
        raise ConfigError(msg)
    mapping = cast("Mapping[object, object]", item)
    name, config = mapping.get("name"), mapping.get("config")
    entry_id = mapping.get("id", name)
    label = entry_id if isinstance(entry_id, str) else None
    for key in mapping:
        if key not in _ENTRY_KEYS:
            raise _unknown(where, label, str(key), _ENTRY_KEYS)
    for field_name, value in (("name", name), ("id", entry_id)):
        if not isinstance(value, str) or not value:
            msg = f"{where}: {field_name} must be a string that is not empty, not {value!r}"
            raise ConfigError(msg, entry=label, key=field_name)
    if config is not None and not isinstance(config, Mapping):
        msg = f"{where}: config must be a mapping of options, not {config!r}"
        raise ConfigError(msg, entry=label, key="config")
    options = cast("Mapping[object, object]", config or {})
    for key in options:
        if not isinstance(key, str):
            msg = f"{where}: option names are strings, not {key!r}"
            raise ConfigError(msg, entry=label, key=str(key))
    return ConfigEntry(
        id=cast("str", entry_id), name=cast("str", name), config=cast("Mapping[str, object]", dict(options))
    )


def _unknown(where: str, entry: str | None, key: str, known: Iterable[str]) -> ConfigError:
    known = sorted(known)
    snake = _snake(key)
    nearest = next(iter(difflib.get_close_matches(snake, known, n=1, cutoff=0.5)), None)
    hint = f"did you mean {nearest!r}?" if nearest else f"known are: {', '.join(known) or 'none'}"
    return ConfigError(f"{where}: unknown key {key!r}; {hint}", entry=entry, key=key, suggestion=nearest)


def _snake(name: str) -> str:
    return re.sub(r"(?<=[a-z0-9])([A-Z])", r"_\1", name).lower()


# --- options


def make_executor(entry: ConfigEntry, **defaults: object) -> BashExecutor:
    """The executor that an entry describes. Nothing is started.

    `defaults` are options that apply where the entry does not say otherwise; those that the backend does not
    have are left out. `ConfigError`, naming entry and key, for an unknown backend or option, a wrong type or
    a bad value."""
    where = f"entry {entry.id!r}"
    factory = _factory(entry, where)
    parameters = _parameters(factory)
    given: dict[str, object] = {}
    written: dict[str, str] = {}
    for key, value in entry.config.items():
        name = _option(key, parameters)
        if name not in parameters.known and not parameters.open:
            raise _unknown(where, entry.id, key, parameters.known)
        if name in given:
            msg = f"{where}: {key!r} and {written[name]!r} are the same option"
            raise ConfigError(msg, entry=entry.id, key=key)
        given[name], written[name] = value, key
    for name, value in defaults.items():
        if name in parameters.known:
            given.setdefault(name, value)
    options = _validated(parameters, given, entry, where, written)
    try:
        return factory(**options)
    except (TypeError, ValueError) as error:
        # Constructors name the option first, as all errors of values here do.
        option = re.match(r"\w*", str(error))
        found = option.group() if option else ""
        blamed = written.get(found, found) if found in parameters.known else None
        msg = f"{where}: {error}"
        raise ConfigError(msg, entry=entry.id, key=blamed) from error


def _factory(entry: ConfigEntry, where: str) -> BackendFactory:
    if ":" in entry.name:
        try:
            factory: object = EntryPoint(name=entry.id, value=entry.name, group=GROUP).load()
        except Exception as error:
            msg = f"{where}: {entry.name!r} cannot be imported: {type(error).__name__}: {error}"
            raise ConfigError(msg, entry=entry.id, key="name") from error
        if not callable(factory) or (isinstance(factory, type) and not issubclass(factory, BashExecutor)):
            msg = f"{where}: {entry.name!r} is no class of executors and no function"
            raise ConfigError(msg, entry=entry.id, key="name")
        return cast("BackendFactory", factory)
    try:
        return load_backend(entry.name)
    except ConfigError as error:
        msg = f"{where}: {error}"
        raise ConfigError(
            msg, entry=entry.id, key="name", suggestion=error.suggestion, remedy=error.remedy
        ) from error


def _option(key: str, parameters: _Parameters) -> str:
    for name in (key, _snake(key), _ALIASES.get(key, key)):
        if name in parameters.known:
            return name
    return key


@dataclass(frozen=True, slots=True, kw_only=True)
class _Parameters:
    """What a factory takes by keyword: types by name, which of them it must have, whether it takes any
    others."""

    known: Mapping[str, object]
    required: frozenset[str]
    open: bool


def _parameters(factory: BackendFactory) -> _Parameters:
    signature = inspect.signature(factory)
    # A class's own hints are those of its attributes; what it takes is what its constructor says.
    constructor: object = getattr(factory, "__init__") if isinstance(factory, type) else factory  # noqa: B009
    hints = typing.get_type_hints(constructor, include_extras=True)
    known: dict[str, object] = {}
    required: set[str] = set()
    takes_any = False
    for name, parameter in signature.parameters.items():
        if parameter.kind is parameter.VAR_KEYWORD:
            hint = hints.get(name)
            if typing.get_origin(hint) is typing.Unpack:
                (options,) = typing.get_args(hint)
                known.update(typing.get_type_hints(options, include_extras=True))
                required.update(cast("frozenset[str]", options.__required_keys__))
            else:
                takes_any = True
        elif parameter.kind in (parameter.KEYWORD_ONLY, parameter.POSITIONAL_OR_KEYWORD):
            known[name] = hints.get(name, object)
            if parameter.default is parameter.empty:
                required.add(name)
    return _Parameters(known=known, required=frozenset(required), open=takes_any)


def _validated(
    parameters: _Parameters,
    given: Mapping[str, object],
    entry: ConfigEntry,
    where: str,
    written: Mapping[str, str],
) -> dict[str, object]:
    """The options, checked against the types of the signature. Strict: a number in quotes is not a number."""
    from pydantic import ConfigDict, ValidationError, create_model  # noqa: PLC0415  # slow to import

    fields: dict[str, object] = {
        name: (hint, ... if name in parameters.required else None) for name, hint in parameters.known.items()
    }
    make = cast("typing.Callable[..., type[BaseModel]]", create_model)
    model = make(
        "Options",
        __config__=ConfigDict(
            strict=True, extra="allow", arbitrary_types_allowed=True, protected_namespaces=()
        ),
        **fields,
    )
    try:
        checked = model.model_validate(dict(given))
    except ValidationError as error:
        raise _invalid(error, entry, where, written) from error
    return {name: cast("object", getattr(checked, name)) for name in given}


def _invalid(
    error: ValidationError, entry: ConfigEntry, where: str, written: Mapping[str, str]
) -> ConfigError:
    # A union reports once for each of its members, at places below the option.
    first = error.errors(include_url=False)[0]
    option = str(first["loc"][0])
    key = written.get(option, option)
    if first["type"] == "missing":
        return ConfigError(f"{where}: option {key!r} is missing", entry=entry.id, key=key)
    value: object = entry.config.get(key)
    # A number may be shown; anything else may be a secret in the wrong place.
    shown = repr(value) if isinstance(value, int | float) else f"of type {type(value).__name__}"
    reasons = [item["msg"] for item in error.errors(include_url=False) if item["loc"][0] == option]
    told = " or ".join(dict.fromkeys(reason[:1].lower() + reason[1:] for reason in reasons))
    return ConfigError(f"{where}: {key} is {shown}: {told}", entry=entry.id, key=key)


# --- contexts


@asynccontextmanager
async def open_context(source: str | Path | Sequence[object]) -> AsyncGenerator[Context, None]:
    """A context with the executor that a configuration describes, disposed of at the end.

    `source` is the path of a file, or entries as `parse_entries` takes them. Everything is checked before
    anything is made; nothing is started before the first command. ::

        async with open_context("corral.yaml") as context:
            result = await context.bash.run(context.bash.resolve(BashExecRequest(command="make")))
    """
    if isinstance(source, str | Path):
        entries, name = load_config(source), str(source)
    else:
        entries, name = parse_entries(source), "configuration"
    if not entries:
        msg = f"{name}: there is no entry, so there is no executor"
        raise ConfigError(msg)
    async with Context(name) as context:
        for entry in entries:
            executor = make_executor(entry)
            try:
                context.provide(executor)
            except CorralError as error:
                await executor.dispose()
                error.add_note(f"at entry {entry.id!r}")
                raise
        yield context
