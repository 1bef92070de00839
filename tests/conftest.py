"""Which backends can be tested here, and what the report says about those that cannot.

A test that needs a backend is marked `@pytest.mark.backend("local")`. Where that backend cannot work,
the test is skipped and the summary names the backend as *not run*. `CORRAL_REQUIRE=local` names those that
have to be tested: if one cannot be, the run fails before its first test, and CI is
never green on what it left out.

`CORRAL_RERUNS=2` tries a test that failed twice more. The summary shows each such try as RERUN: on a machine
that is too busy for the bounds of a test that says little, anywhere else it is to be looked into.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings

if TYPE_CHECKING:
    from collections.abc import Callable


# On a busy machine a slow example says nothing. In CI hypothesis has a profile of its own that does the same.
if "CI" not in os.environ:
    settings.register_profile("corral", deadline=None)
    settings.load_profile("corral")


def local_problem() -> str | None:
    return None if sys.platform == "linux" else f"the warden needs Linux, this is {sys.platform}"


# Why a backend cannot be tested on this machine; None where it can.
PROBLEMS: dict[str, Callable[[], str | None]] = {"local": local_problem}

REASONS = pytest.StashKey[dict[str, str]]()


def pytest_configure(config: pytest.Config) -> None:
    found = {name: problem() for name, problem in PROBLEMS.items()}
    reasons = {name: reason for name, reason in found.items() if reason is not None}
    config.stash[REASONS] = reasons
    if again := os.environ.get("CORRAL_RERUNS"):
        config.option.reruns = int(again)
    for name in filter(None, (part.strip() for part in os.environ.get("CORRAL_REQUIRE", "").split(","))):
        if name not in PROBLEMS:
            msg = f"CORRAL_REQUIRE names {name!r}; the backends with tests are {', '.join(sorted(PROBLEMS))}"
            raise pytest.UsageError(msg)
        if name in reasons:
            msg = f"CORRAL_REQUIRE names {name!r}, which cannot be tested here: {reasons[name]}"
            raise pytest.UsageError(msg)


def pytest_runtest_setup(item: pytest.Item) -> None:
    for mark in item.iter_markers("backend"):
        (name,) = mark.args
        if name not in PROBLEMS:
            msg = f"no such backend: {name!r}; add it to PROBLEMS in tests/conftest.py"
            raise pytest.UsageError(msg)
        if name in item.config.stash[REASONS]:
            pytest.skip(f"not run: {name} ({item.config.stash[REASONS][name]})")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    for name, reason in sorted(terminalreporter.config.stash[REASONS].items()):
        terminalreporter.write_line(f"not run: {name} ({reason})", yellow=True)
