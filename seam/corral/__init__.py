"""corral: run bash commands in a place, through one seam, whatever the place is.

This package is the seam: the abstract `BashExecutor`, the words it speaks, its errors, and the lookup of
backends. It runs nothing by itself and depends on nothing.
"""

from __future__ import annotations

from ._abort import AbortController, AbortSignal, Disposer
from ._config import ConfigEntry, load_config, make_executor, open_context, parse_entries
from ._context import Context, Scope
from ._errors import (
    AbortedBeforeStartError,
    ConfigError,
    CorralError,
    DuplicateServiceError,
    ExecutorDisposedError,
    PlaceError,
    PlaceLostError,
    PlaceOpenError,
    ShellNotFoundError,
    SpawnError,
    UnknownTaskError,
    UnsupportedPlaceError,
    WorkdirError,
)
from ._executor import BashExecutor
from ._registry import BackendFactory, BackendInfo, backends, load_backend
from ._resolve import check_env, require_spec, resolve_request
from ._task import BashTask, BashTaskListener, TaskRecord
from ._vocabulary import (
    BashExecRequest,
    BashExecSpec,
    BashRunResult,
    BashTaskId,
    BashTaskRead,
    CollectedOutput,
    EndReason,
    OwnerToken,
    StreamRead,
    TaskStatus,
)

__all__ = [
    "AbortController",
    "AbortSignal",
    "AbortedBeforeStartError",
    "BackendFactory",
    "BackendInfo",
    "BashExecRequest",
    "BashExecSpec",
    "BashExecutor",
    "BashRunResult",
    "BashTask",
    "BashTaskId",
    "BashTaskListener",
    "BashTaskRead",
    "CollectedOutput",
    "ConfigEntry",
    "ConfigError",
    "Context",
    "CorralError",
    "Disposer",
    "DuplicateServiceError",
    "EndReason",
    "ExecutorDisposedError",
    "OwnerToken",
    "PlaceError",
    "PlaceLostError",
    "PlaceOpenError",
    "Scope",
    "ShellNotFoundError",
    "SpawnError",
    "StreamRead",
    "TaskRecord",
    "TaskStatus",
    "UnknownTaskError",
    "UnsupportedPlaceError",
    "WorkdirError",
    "backends",
    "check_env",
    "load_backend",
    "load_config",
    "make_executor",
    "open_context",
    "parse_entries",
    "require_spec",
    "resolve_request",
]
