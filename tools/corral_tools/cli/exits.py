"""Exit statuses of the command line, and the one-line form of what went wrong.

A command's own status passes through, so what `corral` itself has to say needs numbers that commands rarely
use. They follow `timeout(1)`, `env(1)` and the shells:

    124  the time limit ended the command
    125  `corral` itself failed: usage, an unknown backend, a missing directory, a place that went away
    128+N  signal N ended the command, or `corral` was told to stop by signal N (130 for Ctrl-C)
    141  (128 + SIGPIPE) whoever read the output went away
"""

from __future__ import annotations

import os
import select
import signal
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from corral import CorralError

STDOUT: Final = "standard output"
STDERR: Final = "standard error"

TIMED_OUT: Final = 124
TROUBLE: Final = 125
BROKEN_PIPE: Final = 128 + signal.SIGPIPE


class CliError(Exception):
    """`corral` cannot do what was asked; caused by the caller or by where its output goes.

    `str(error)` says what, in one line; `remedy` says what to do about it.
    """

    def __init__(self, message: str, *, remedy: str | None = None) -> None:
        super().__init__(message)
        self.remedy = remedy


def status_of(exit_code: int | None, signal_name: str | None) -> int:
    """The shell's status of a command: its own, or 128 + N for a death by signal N ("SIGKILL" gives 137).

    The numbers are Linux's, as those of this process are; "SIGRTMIN+2" is 36. 125 for a name that Linux does
    not know, and when the backend tells neither.
    """
    if signal_name is None:
        return TROUBLE if exit_code is None else exit_code
    base, _, above = signal_name.partition("+")
    try:
        return 128 + signal.Signals[base] + (int(above) if above else 0)
    except (KeyError, ValueError):
        return TROUBLE


def one_line(text: str) -> str:
    """`text` without line breaks and control characters, which could garble a terminal or forge a line."""
    return " ".join(text.split()).translate(_CONTROLS)


_CONTROLS: Final = {code: repr(chr(code))[1:-1] for code in (*range(32), *range(127, 160))}


def explain(error: CorralError | CliError) -> str:
    """`<reason>; <remedy>`, or the reason alone when nothing is known to help. One line, no prefix."""
    reason = one_line(str(error)) or type(error).__name__
    if not error.remedy:
        return reason
    return f"{reason}; {clause(error.remedy)}"


def clause(sentence: str) -> str:
    """A sentence as a part of one: without its full stop and its first capital."""
    text = one_line(sentence).rstrip(".")
    # "API" stays as it is.
    return text[:1].lower() + text[1:] if text[1:2].islower() else text


def as_bytes(line: str) -> bytes:
    """`corral: <line>` as it is written to standard error. What is undecodable comes out as it came in."""
    text = f"corral: {line}\n"
    try:
        return text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        return text.encode("utf-8", "backslashreplace")


def tell(line: str) -> None:
    """Writes `corral: <line>` to standard error; a closed or full standard error is no reason to fail."""
    data = as_bytes(line)
    try:
        while data:
            data = data[os.write(2, data) :]
    except OSError:
        pass


def write_out(data: bytes) -> None:
    """Writes all of `data` to standard output. Raises `BrokenPipeError` as it is, else `CliError`."""
    rest = memoryview(data)
    while rest:
        try:
            rest = rest[os.write(1, rest) :]
        except BlockingIOError:
            wait_writable(1)
        except BrokenPipeError:
            raise
        except OSError as error:
            raise write_failure(STDOUT, error) from error


def write_failure(name: str, error: OSError) -> CliError:
    """What is said when the descriptor called `name` ("standard output") cannot be written."""
    msg = f"cannot write {name}: {os.strerror(error.errno) if error.errno else error}"
    return CliError(msg, remedy="send it somewhere that is open and has space")


def wait_writable(fd: int) -> None:
    """Waits until `fd` takes bytes again: another process may have made the description non-blocking."""
    poller = select.poll()
    poller.register(fd, select.POLLOUT)
    poller.poll()
