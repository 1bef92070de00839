"""The users as whom a driver can run."""

from __future__ import annotations

import os
import pwd
from dataclasses import dataclass

__all__ = ["ACCOUNTS", "Account"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Account:
    """`uid` is None for the user who runs the tests."""

    name: str
    uid: int | None = None
    gid: int | None = None

    def __str__(self) -> str:
        return self.name


def _accounts() -> tuple[Account, ...]:
    if os.geteuid() != 0:
        return (Account(name="user"),)
    nobody = pwd.getpwnam("nobody")
    return (Account(name="root"), Account(name="user", uid=nobody.pw_uid, gid=nobody.pw_gid))


ACCOUNTS: tuple[Account, ...] = _accounts()
"""Root and an ordinary user when the tests run as root, else whoever runs them."""
