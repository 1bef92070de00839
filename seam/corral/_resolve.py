"""The checks of `BashExecutor.resolve`, the same for every executor, so that all keep the same promises."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import PurePath, PurePosixPath

from ._abort import AbortSignal
from ._vocabulary import BashExecRequest, BashExecSpec

_MAX_ENV_STRING = 131_071
"""Bytes of one `NAME=value`: the kernel's MAX_ARG_STRLEN (32 pages of 4 KiB) less the NUL at its end."""

_MAX_ENV_TOTAL = 6 * 1024 * 1024
"""Bytes of all of them, each with its NUL: three quarters of the kernel's _STK_LIM of 8 MiB (fs/exec.c)."""

_SHELL_STARTUP = frozenset({"BASH_ENV", "ENV", "SHELLOPTS", "BASHOPTS"})
_SHELL_FUNCTION = "BASH_FUNC_"


def resolve_request(
    request: BashExecRequest,
    *,
    workdir: PurePosixPath,
    timeout_ms: int,
    max_timeout_ms: int,
) -> BashExecSpec:
    """Check a request and fill in what it leaves out: the whole of `BashExecutor.resolve` for most executors.

    Does no I/O and changes nothing; equal requests give equal specs. The keywords are the executor's
    configuration.

    - `workdir`: a relative one is joined to the configured one by POSIX rules. Symlinks and `..` are left for
      the place to resolve, for only the place knows what is there.
    - `timeout_ms`: the configured one when left out; never more than `max_timeout_ms`.
    - `owner`: carried verbatim, never looked at.
    - `env`: copied. `stdin`: any bytes-like object, copied into `bytes`.

    Text is passed to the place as UTF-8 with `surrogateescape`, so what `os.fsdecode` made of arbitrary bytes
    comes out as those bytes again; other lone surrogates stand for no bytes and are refused.

    `TypeError` when something is of the wrong type, starting with `request` itself; `ValueError` when the
    value cannot be used: a NUL, a timeout that is not a positive integer, an environment that the kernel
    would refuse, a variable that changes how bash starts. Both name the field.
    """
    _require(request, BashExecRequest, "resolve() takes a BashExecRequest")
    if request.signal is not None:
        _require(request.signal, AbortSignal, "signal must be an AbortSignal or None")
    if request.owner is not None:
        _require(request.owner, str, "owner must be a str or None")
    _encode(request.command, "command")
    return BashExecSpec(
        command=request.command,
        workdir=_workdir(request.workdir, workdir),
        timeout_ms=min(_timeout(request.timeout_ms, timeout_ms), max_timeout_ms),
        signal=request.signal,
        owner=request.owner,
        env=check_env(request.env),
        stdin=_stdin(request.stdin),
    )


def require_spec(value: object, operation: str = "run") -> BashExecSpec:
    """`value` if it is a `BashExecSpec`, else `TypeError`: only what `resolve` has checked may be executed.

    A spec that was changed since, by `dataclasses.replace` say, is checked again for what no place can be
    given: `ValueError` as from `resolve_request`. `operation` is the method that was called, `"run"` or
    `"start"`."""
    if not isinstance(value, BashExecSpec):
        msg = f"{operation}() takes the BashExecSpec that resolve() returns, not {type(value).__name__}"
        raise TypeError(msg)
    _encode(value.command, "command")
    _encode(str(value.workdir), "workdir")
    _timeout(value.timeout_ms, 1)
    if value.env:
        check_env(value.env)
    return value


def _require(value: object, kind: type | tuple[type, ...], expected: str) -> None:
    if not isinstance(value, kind):
        msg = f"{expected}, not {type(value).__name__}"
        raise TypeError(msg)


def _encode(value: str, field: str) -> bytes:
    """The bytes that `value` stands for. `field` is what errors call it."""
    _require(value, str, f"{field} must be a str")
    if "\0" in value:
        msg = f"{field} contains a NUL at index {value.index(chr(0))}, which no program can be given"
        raise ValueError(msg)
    try:
        return value.encode(errors="surrogateescape")
    except UnicodeEncodeError as error:
        msg = f"{field} contains a lone surrogate at index {error.start}, which stands for no bytes"
        raise ValueError(msg) from None


def _workdir(value: str | PurePath | None, base: PurePosixPath) -> PurePosixPath:
    if value is None:
        return base
    if isinstance(value, PurePath):
        if value.drive:
            msg = f"workdir must be a POSIX path, and {str(value)!r} is one of Windows"
            raise ValueError(msg)
        text = value.as_posix()
    else:
        text = value
    _encode(text, "workdir")
    if not text:
        msg = "workdir is empty; leave it out (None) for the executor's own"
        raise ValueError(msg)
    return base / text


def _timeout(value: object, default: int) -> int:
    if value is None:
        return default
    if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
        msg = f"timeout_ms must be a positive integer of milliseconds, not {value!r}"
        raise ValueError(msg)
    return int(value)  # of a subclass, the plain number


def check_env(env: Mapping[str, str] | None) -> dict[str, str]:
    """A copy of `env`, checked as `resolve_request` says. For executors whose options have variables too."""
    if env is None:
        return {}
    _require(env, Mapping, "env must be a mapping of str to str or None")
    copy = dict(env)
    total = 0
    for name, value in copy.items():
        # The values are left out of all messages, and so is a name that may be one by mistake.
        encoded = _encode(name, "env: a name")
        if not name or "=" in name:
            msg = f"env: a name is empty or contains '=': {name.partition('=')[0]!r}"
            raise ValueError(msg)
        if name in _SHELL_STARTUP or name.startswith(_SHELL_FUNCTION):
            msg = f"env: {name} changes how bash starts and is not allowed; set what you need in the command"
            raise ValueError(msg)
        size = len(encoded) + 1 + len(_encode(value, f"env: {name}"))
        if size > _MAX_ENV_STRING:
            msg = f"env: {name} takes {size} bytes; the kernel allows {_MAX_ENV_STRING}; use stdin or a file"
            raise ValueError(msg)
        total += size + 1
    if total > _MAX_ENV_TOTAL:
        msg = f"env takes {total} bytes, and the kernel allows {_MAX_ENV_TOTAL} at most; use stdin or a file"
        raise ValueError(msg)
    return copy


def _stdin(value: bytes | None) -> bytes | None:
    if value is None:
        return None
    _require(value, (bytes, bytearray, memoryview), "stdin must be bytes or None")
    return bytes(value)
