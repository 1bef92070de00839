from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import pytest

from tests.warden.builds import Build, CannotBuildError, released, sanitized
from tests.warden.harness import Warden

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    Starter = Callable[..., Warden]


@pytest.fixture(params=["released", "sanitized"])
def build(request: pytest.FixtureRequest) -> Build:
    """Each build of the warden in turn."""
    if request.param == "released":
        return released()
    try:
        return sanitized()
    except CannotBuildError as error:
        pytest.skip(f"no warden with sanitizers: {error}")


@pytest.fixture
def warden(build: Build) -> Iterator[Warden]:
    """A warden that has been greeted; its end is checked."""
    with Warden(build) as running:
        running.hello()
        yield running


@pytest.fixture
def start(build: Build) -> Starter:
    """Starts a warden with options; use it with `with`."""
    return functools.partial(Warden, build)
