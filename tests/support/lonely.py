"""A user of these tests' own: what others run as the usual ordinary user is no part of what is counted."""

from __future__ import annotations

import os

from tests.support.accounts import ACCOUNTS, Account

__all__ = ["LONELY", "ROOT_AND_LONELY"]


def _lonely() -> Account:
    if os.geteuid() != 0:
        return ACCOUNTS[-1]
    # No account has such a number, and no other run of the tests at the same time.
    number = 1_000_000 + os.getpid()
    return Account(name="user", uid=number, gid=number)


LONELY: Account = _lonely()
"""An ordinary user without any other process, where root can make one up; else whoever runs the tests."""

ROOT_AND_LONELY: tuple[Account, ...] = (*ACCOUNTS[:-1], LONELY)
"""As ACCOUNTS."""
