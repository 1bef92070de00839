from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest

from tests.packaging.artifacts import build, copy_of_tree

if TYPE_CHECKING:
    from pathlib import Path

# Away from any time of day that a build could see.
EPOCH = 1_600_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Release:
    """One wheel and one sdist, made twice under conditions that must not matter."""

    wheel: Path
    sdist: Path
    other_wheel: Path
    other_sdist: Path


@pytest.fixture(scope="session")
def release(tmp_path_factory: pytest.TempPathFactory) -> Release:
    """The first build makes the sdist, and the wheel from that sdist; the other makes both from the tree.

    The trees differ in directory, and in the age, mode and order of their files; the builds in umask, time
    zone and time. Without isolation, so that ziglang is not fetched for each."""
    settings = {"CORRAL_WARDEN_TARGETS": "x86_64,aarch64", "SOURCE_DATE_EPOCH": str(EPOCH)}
    here = tmp_path_factory.mktemp("here")
    first = build(copy_of_tree(here / "tree"), here / "dist", "--no-isolation", env=settings)

    there = tmp_path_factory.mktemp("there")
    tree = copy_of_tree(there / "ein anderer Baum ü", backwards=True)
    for path in tree.rglob("*"):
        os.utime(path, (EPOCH - 86_400, EPOCH - 86_400))
        path.chmod(path.stat().st_mode & 0o700)
    settings["TZ"] = "Pacific/Chatham"
    options = ("--no-isolation", "--sdist", "--wheel")
    other = build(tree, there / "dist", *options, env=settings, umask=0o077)

    (wheel,), (sdist,) = first.glob("*.whl"), first.glob("*.tar.gz")
    return Release(wheel=wheel, sdist=sdist, other_wheel=other / wheel.name, other_sdist=other / sdist.name)
