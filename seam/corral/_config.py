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
ever taken in place of another.

A configuration may hold secrets, so errors name keys and types, and never show a value."""

# Imports are made at run time, for `typing.get_type_hints`.

from __future__ import annotations

import stat
import tomllib
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final, Protocol, cast

from ._context import Context
from ._errors import ConfigError, DuplicateServiceError
from ._executor import BashExecutor
from ._options import executor_of, unknown_key

if TYPE_CHECKING:
    from yaml.nodes import Node


class _Loader(Protocol):
    """The part of yaml.SafeLoader that is used, which its stubs leave without types."""

    def get_single_node(self) -> Node | None: ...
    def construct_document(self, node: Node) -> object: ...


_ENTRY_KEYS = ("id", "name", "config")

MAX_BYTES: Final = 1 << 20
"""What is larger is no configuration but a wrong path."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigEntry:
    """One entry of a configuration, as it was written. Its options are checked by `make_executor`."""

    id: str
    """What errors call it; unique in its configuration."""
    name: str
    """An installed backend, or `package.module:Class`."""
    config: Mapping[str, object] = field(default_factory=dict[str, object], repr=False)


# --- files


def load_config(path: str | Path) -> tuple[ConfigEntry, ...]:
    """Read a configuration file. `ConfigError`, naming the file, for one that cannot be read (or has more
    than 1 MiB) or parsed, and as in `parse_entries` for what it says."""
    source = f"configuration {path}"
    file = Path(path)
    if file.suffix not in (".yaml", ".yml", ".toml"):
        msg = f"{source}: the suffix must be .yaml, .yml or .toml"
        raise ConfigError(msg)
    text = _text(file, source)
    try:
        data = tomllib.loads(text) if file.suffix == ".toml" else _yaml(text, source)
    except tomllib.TOMLDecodeError as error:  # its messages have the line and no values
        msg = f"{source}: not TOML: {error}"
        raise ConfigError(msg) from None
    except RecursionError:
        msg = f"{source}: nested too deeply"
        raise ConfigError(msg) from None
    return parse_entries(data, source=source)


def _text(file: Path, source: str) -> str:
    try:
        # Reading a FIFO, or a device, might never end.
        if not stat.S_ISREG(file.stat().st_mode):
            msg = f"{source}: is not a regular file"
            raise ConfigError(msg)
        with file.open("rb") as opened:
            data = opened.read(MAX_BYTES + 1)
    except OSError as error:
        msg = f"{source}: cannot be read: {error.strerror or error}"
        raise ConfigError(msg) from error
    except ValueError as error:
        if isinstance(error, ConfigError):
            raise
        msg = f"{source!r}: is no path: {error}"
        raise ConfigError(msg) from error
    if len(data) > MAX_BYTES:
        msg = f"{source}: has more than {MAX_BYTES} bytes, so it is hardly a configuration"
        raise ConfigError(msg)
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        msg = f"{source}: is not UTF-8 (line {line})"
        raise ConfigError(msg) from None


def _yaml(text: str, source: str) -> object:
    import yaml  # noqa: PLC0415  # only who uses a file pays for it

    try:
        loader = cast("_Loader", yaml.SafeLoader(text))
        node = loader.get_single_node()
        if node is None:
            return None
        _refuse_doubled_keys(node, source)
        return loader.construct_document(node)
    except yaml.MarkedYAMLError as error:
        # Its own text shows the line, in which there may be a secret.
        mark = error.problem_mark or error.context_mark
        where = f"line {mark.line + 1}, column {mark.column + 1}: " if mark is not None else ""
        msg = f"{source}: not YAML: {where}{error.problem or error.context}"
        raise ConfigError(msg) from None
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        msg = f"{source}: not YAML: line {line}: a character that is not allowed"
        raise ConfigError(msg) from None
    except (yaml.YAMLError, ValueError) as error:  # ValueError: a date that is none, a number of no digits
        if isinstance(error, ConfigError):
            raise
        msg = (
            f"{source}: not YAML: {type(error).__name__}: a value is not what it looks like; put it in quotes"
        )
        raise ConfigError(msg) from None


def _refuse_doubled_keys(root: Node, source: str) -> None:
    """YAML forbids a key that is there twice; the parser takes the last one without a word."""
    from yaml.nodes import MappingNode, ScalarNode, SequenceNode  # noqa: PLC0415

    pending, seen = [root], set[int]()
    while pending:
        node = pending.pop()
        if id(node) in seen:
            continue
        seen.add(id(node))
        if isinstance(node, SequenceNode):
            pending.extend(cast("list[Node]", node.value))
        elif isinstance(node, MappingNode):
            keys = set[str]()
            for key, value in cast("list[tuple[Node, Node]]", node.value):
                pending += (key, value)
                if not isinstance(key, ScalarNode) or key.tag == "tag:yaml.org,2002:merge":
                    continue
                name = str(key.value)
                if name in keys:
                    line = key.start_mark.line + 1
                    msg = f"{source}: line {line}: the key {name!r} is there twice"
                    raise ConfigError(msg, key=name)
                keys.add(name)


# --- entries


def parse_entries(data: object, *, source: str = "configuration") -> tuple[ConfigEntry, ...]:
    """Entries from what a file or a program says: a list of mappings, or a mapping with such a list as
    `entries`. A `ConfigEntry` in the list is taken as it is.

    `source` is what errors call it. `ConfigError`, naming entry and key, for everything else.
    """
    if isinstance(data, Mapping):
        mapping = cast("Mapping[object, object]", data)
        for key in mapping:
            if key in _ENTRY_KEYS:
                msg = f"{source}: expected a list of entries, found one entry that is in no list"
                remedy = "In YAML begin it with '- '; in TOML put [[entries]] before it."
                raise ConfigError(msg, key=str(key), remedy=remedy)
            if key != "entries":
                raise unknown_key(source, None, key, ("entries",))
        if not mapping:
            msg = f"{source}: the key 'entries' is missing"
            raise ConfigError(msg, key="entries")
        data = mapping["entries"]
    if not isinstance(data, Sequence) or isinstance(data, str | bytes):
        msg = f"{source}: expected a list of entries, found {_kind(data)}"
        raise ConfigError(msg)
    entries: dict[str, ConfigEntry] = {}
    for position, item in enumerate(cast("Sequence[object]", data), 1):
        entry = item if isinstance(item, ConfigEntry) else _entry(item, f"{source}, entry {position}")
        if entry.id in entries:
            msg = f"{source}, entry {position}: there is another entry with the id {entry.id!r}"
            remedy = "Give each an id of its own; without one its name is its id."
            raise ConfigError(msg, entry=entry.id, key="id", remedy=remedy)
        entries[entry.id] = entry
    return tuple(entries.values())


def _entry(item: object, where: str) -> ConfigEntry:
    if not isinstance(item, Mapping):
        msg = f"{where}: expected a mapping with id, name and config, found {_kind(item)}"
        raise ConfigError(msg)
    mapping = cast("Mapping[object, object]", item)
    entry_id = mapping.get("id", mapping.get("name"))
    label = entry_id if isinstance(entry_id, str) else None
    if label is not None:
        where = f"{where} ({label!r})"
    for key in mapping:
        if key not in _ENTRY_KEYS:
            raise unknown_key(where, label, key, _ENTRY_KEYS)
    if "name" not in mapping:
        msg = f"{where}: the key 'name' is missing"
        raise ConfigError(msg, entry=label, key="name", remedy="Name the backend.")
    name, config = mapping["name"], mapping.get("config")
    for key, value in (("name", name), ("id", entry_id)):
        if not isinstance(value, str) or not value:
            found = "an empty one" if value == "" else _kind(value)
            msg = f"{where}: {key} must be a string that is not empty, not {found}"
            raise ConfigError(msg, entry=label, key=key)
    if config is not None and not isinstance(config, Mapping):
        msg = f"{where}: config must be a mapping of options, not {_kind(config)}"
        raise ConfigError(msg, entry=label, key="config")
    options = cast("Mapping[object, object]", config or {})
    for key in options:
        if not isinstance(key, str):
            msg = f"{where}: the names of options are strings, and one is {_kind(key)}"
            raise ConfigError(msg, entry=label, key="config")
    return ConfigEntry(
        id=cast("str", entry_id), name=cast("str", name), config=cast("Mapping[str, object]", dict(options))
    )


def _kind(value: object) -> str:
    return "nothing" if value is None else f"a value of type {type(value).__name__}"


# --- executors


def make_executor(entry: ConfigEntry, **defaults: object) -> BashExecutor:
    """The executor that an entry describes. Nothing is started.

    `defaults` are options that apply where the entry does not say otherwise; those that the backend does not
    have are left out. `ConfigError`, naming entry and key, for an unknown backend or option, a wrong type, a
    bad value (a `TypeError` or `ValueError` of the constructor), and a function that makes no executor. Any
    other error of the constructor comes as it is."""
    return executor_of(entry.id, entry.name, entry.config, defaults)


@asynccontextmanager
async def open_context(source: str | Path | Sequence[object]) -> AsyncGenerator[Context, None]:
    """A context with the executor that a configuration describes, disposed of at the end.

    `source` is the path of a file, or entries as `parse_entries` takes them. There must be exactly one:
    `ConfigError` for none, `DuplicateServiceError` for several. Nothing is started before the first
    command. ::

        async with open_context("corral.yaml") as context:
            result = await context.bash.run(context.bash.resolve(BashExecRequest(command="make")))
    """
    if isinstance(source, str | Path):
        entries, name = load_config(source), f"configuration {source}"
    else:
        entries, name = parse_entries(source), "configuration"
    if not entries:
        msg = f"{name}: there is no entry, so there is no executor"
        raise ConfigError(msg, remedy="Add one, with at least the name of a backend.")
    entry, *others = entries
    if others:
        ids = ", ".join(repr(each.id) for each in entries)
        msg = f"{name}: a context has one executor, and here are {len(entries)} entries: {ids}"
        remedy = "Keep one of them, or open a context for each."
        raise DuplicateServiceError(msg, remedy=remedy)
    async with Context(name) as context:
        context.provide(make_executor(entry))
        yield context
