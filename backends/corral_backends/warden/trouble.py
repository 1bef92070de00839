"""What the warden's errors are called in the seam."""

from __future__ import annotations

import errno
import os

from corral import BashExecSpec, PlaceError, ShellNotFoundError, SpawnError, WorkdirError

from .protocol import ErrorCode, Failed

_WORKDIR_REMEDY = {
    errno.ENOENT: "Create it, or name another workdir.",
    errno.ENOTDIR: "Name a directory.",
    errno.EACCES: "Let the user that runs commands enter it, or name another workdir.",
}


def start_error(failed: Failed, spec: BashExecSpec) -> PlaceError | ValueError:
    """Why the command could not be started, as the exception that the contract names."""
    detail = os.strerror(failed.errno) if failed.errno else failed.message
    if failed.code is ErrorCode.WORKDIR:
        return WorkdirError(
            f"workdir {str(spec.workdir)!r} cannot be entered: {detail}",
            workdir=str(spec.workdir),
            remedy=_WORKDIR_REMEDY.get(failed.errno),
        )
    if failed.code is ErrorCode.SHELL:
        return ShellNotFoundError(
            f"bash cannot be run in this place: {detail}",
            remedy="Install bash there, or set the option `shell`.",
        )
    if failed.code is ErrorCode.TOO_LARGE:
        size = sum(len(name) + len(value) + 2 for name, value in spec.env.items())
        return ValueError(
            f"env ({size} bytes), with what it is added to, is too large for the place's kernel"
        )
    retryable = failed.errno in (errno.EAGAIN, errno.ENOMEM, errno.EMFILE, errno.ENFILE)
    msg = f"the command could not be started: {detail}"
    return SpawnError(msg, errno=failed.errno or None, retryable=retryable)
