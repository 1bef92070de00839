"""Factories as third parties might write them, for the tests of configurations."""

from __future__ import annotations

import enum
import functools

# The options are checked by these.
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, NotRequired, Required, TypedDict, TypeVar, Unpack

from corral import BashExecutor
from tests.seam.memory import MemoryExecutor

if TYPE_CHECKING:
    from corral_nosuch import Nothing

T = TypeVar("T")

number = 7


class Recorder(MemoryExecutor):
    """Keeps what it was given."""

    given: Mapping[str, object]


def recorded(**options: object) -> Recorder:
    executor = Recorder()
    executor.given = options
    return executor


class Plain(MemoryExecutor):
    def __init__(self, host, port=22):  # type: ignore[no-untyped-def]
        super().__init__()
        self.given = {"host": host, "port": port}


class Checked(MemoryExecutor):
    def __init__(self, *, limit: int = 1) -> None:
        super().__init__()
        if limit < 1:
            msg = f"limit must be at least 1, not {limit}"
            raise ValueError(msg)


class Abstract(BashExecutor):
    pass


class Mode(enum.Enum):
    FAST = "fast"


class Options(TypedDict, total=False):
    host: Required[str]
    port: NotRequired[int]


def typed(
    key_file: Path | None = None,
    mode: Mode = Mode.FAST,
    ports: tuple[int, ...] = (),
    limits: Mapping[str, int] | None = None,
    json: str = "",
    model_config: str = "",
    _private: str = "",
) -> Recorder:
    return recorded(key_file=key_file, mode=mode, ports=ports, limits=limits, json=json, private=_private)


def unpacked(**options: Unpack[Options]) -> Recorder:
    return recorded(**options)


def for_type_checkers(token: str, session: Nothing | None = None) -> Recorder:
    return recorded(token=token, session=session)


def generic(value: T) -> Recorder:
    return recorded(value=value)


def positional(host: str, /, *, port: int = 22) -> Recorder:
    return recorded(host=host, port=port)


def mixed(host: str, port: int = 22) -> Recorder:
    return recorded(host=host, port=port)


partial = functools.partial(mixed, host="fixed")


class Maker:
    def __call__(self, *, port: int) -> Recorder:
        return recorded(port=port)


maker = Maker()


def nothing() -> None:
    pass


async def coroutine() -> Recorder:
    return recorded()


def broken() -> Recorder:
    msg = "no account"
    raise LookupError(msg)
