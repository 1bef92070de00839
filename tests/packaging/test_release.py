"""What a release is: wardens for two machines from one compiler, and the same bytes wherever it is built."""

from __future__ import annotations

import gzip
import hashlib
import importlib.util
import stat
import subprocess
import sys
import tarfile
import time
import zipfile
from typing import TYPE_CHECKING

import pytest

from tests.packaging.artifacts import EM, Installed, read_elf, warden_name
from tests.packaging.conftest import EPOCH

if TYPE_CHECKING:
    from pathlib import Path

    from tests.packaging.conftest import Release

# Here, so that the many environments without it report one skip and not one for every test.
pytest.importorskip("ziglang", reason="ziglang is not installed: `scripts/test -e release` has it")

# With nothing in zig's cache the first build compiles a libc for each machine.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

LARGEST = 110_000
"""Bytes of a warden: it is sent to a place over slow lines too."""


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_the_wheel_carries_a_small_static_warden_for(release: Release, machine: str) -> None:
    with zipfile.ZipFile(release.wheel) as archive:
        mode = archive.getinfo(warden_name(machine)).external_attr >> 16
        program = archive.read(warden_name(machine))
    assert stat.S_IMODE(mode) == 0o755
    assert len(program) < LARGEST
    elf = read_elf(program)
    assert elf.machine == EM[machine]
    assert elf.static


def test_the_wheel_has_these_wardens_and_no_other(release: Release) -> None:
    with zipfile.ZipFile(release.wheel) as archive:
        found = {name for name in archive.namelist() if "/bin/" in name}
    assert found == {warden_name("x86_64"), warden_name("aarch64")}
    assert release.wheel.name.endswith("-py3-none-any.whl")


def test_two_builds_give_the_same_wheel(release: Release) -> None:
    """One of them from the sdist, the other from the tree."""
    with zipfile.ZipFile(release.wheel) as one, zipfile.ZipFile(release.other_wheel) as other:
        # First what differs, for the report.
        crcs = [{entry.filename: entry.CRC for entry in archive.infolist()} for archive in (one, other)]
    assert crcs[0] == crcs[1]
    assert digest(release.wheel) == digest(release.other_wheel)


def test_two_builds_give_the_same_sdist(release: Release) -> None:
    listings = []
    for path in (release.sdist, release.other_sdist):
        with tarfile.open(path) as archive:
            listings.append([(entry.name, entry.mode, entry.size, entry.mtime) for entry in archive])
    assert listings[0] == listings[1]
    assert digest(release.sdist) == digest(release.other_sdist)


def test_the_date_in_the_archives_is_the_one_that_was_asked_for(release: Release) -> None:
    with zipfile.ZipFile(release.wheel) as archive:
        dates = {entry.date_time for entry in archive.infolist()}
    assert dates == {time.gmtime(EPOCH)[:6]}
    with tarfile.open(release.sdist) as archive:
        assert {entry.mtime for entry in archive} == {EPOCH}
    with gzip.open(release.sdist) as stream:
        stream.read(1)
        assert stream.mtime == EPOCH


def test_an_index_accepts_the_metadata(release: Release) -> None:
    if importlib.util.find_spec("twine") is None:
        pytest.skip("twine is not installed: `scripts/test -e release` has it")
    ran = subprocess.run(
        [sys.executable, "-m", "twine", "check", "--strict", str(release.wheel), str(release.sdist)],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert ran.stdout.count("PASSED") == 2


def test_it_installs_and_runs_a_command_without_a_compiler(release: Release, tmp_path: Path) -> None:
    installed = Installed(release.wheel, tmp_path)
    with zipfile.ZipFile(release.wheel) as archive:
        sent = archive.read(installed.warden.relative_to(installed.warden.parents[3]).as_posix())
    assert installed.warden.read_bytes() == sent
    installed.check()
