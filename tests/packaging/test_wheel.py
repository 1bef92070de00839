"""What is published: the wheel has our packages and a warden that runs, the sdist has what builds it."""

from __future__ import annotations

import platform
import stat
import tarfile
import zipfile
from pathlib import Path

import pytest

from tests.packaging.artifacts import (
    EM,
    PACKAGES,
    ROOT,
    Installed,
    build,
    copy_of_tree,
    read_elf,
    warden_name,
)

WARDEN = warden_name(platform.machine())

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the sdist, and the wheel built from that sdist, as a release makes them."""
    tree = copy_of_tree(tmp_path_factory.mktemp("tree"))
    out = tmp_path_factory.mktemp("dist")
    return build(tree, out)


@pytest.fixture(scope="module")
def wheel(built: Path) -> Path:
    (path,) = built.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def names(wheel: Path) -> list[str]:
    with zipfile.ZipFile(wheel) as archive:
        return archive.namelist()


def test_the_wheel_fits_every_system_and_python_3(wheel: Path) -> None:
    assert wheel.name.endswith("-py3-none-any.whl")


def test_the_top_levels_are_ours_alone(names: list[str]) -> None:
    tops = {name.split("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == PACKAGES
    assert len(tops) == len(PACKAGES) + 1


def test_every_package_is_typed(names: list[str]) -> None:
    assert {f"{package}/py.typed" for package in PACKAGES} <= set(names)


def test_no_byte_code_or_object_file_is_in_the_wheel(names: list[str]) -> None:
    assert [name for name in names if "__pycache__" in name or name.endswith((".pyc", ".o", ".so"))] == []


def test_the_kit_is_imported_by_every_pytest_run_and_so_has_an_empty_init(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        assert archive.read("corral_conformance/__init__.py") == b""


def test_the_warden_is_executable_and_static(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        mode = archive.getinfo(WARDEN).external_attr >> 16
        program = archive.read(WARDEN)
    assert stat.S_IMODE(mode) == 0o755
    elf = read_elf(program)
    assert elf.machine == EM[platform.machine()]
    assert elf.static


def test_the_warden_names_no_path_of_the_machine_that_built_it(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        program = archive.read(WARDEN)
    assert b"warden/src" not in program


def test_the_sdist_has_the_sources_and_no_binary(built: Path) -> None:
    (path,) = built.glob("*.tar.gz")
    with tarfile.open(path) as archive:
        files = {name.split("/", 1)[1] for name in archive.getnames() if "/" in name}
    sources = {
        str(file.relative_to(ROOT)) for file in ROOT.glob("backends/corral_backends/warden/src/*.[ch]")
    }
    assert sources
    assert sources <= files
    assert {"pyproject.toml", "hatch_build.py", "LICENSE", "tox.ini", "scripts/test"} <= files
    assert [file for file in files if "/bin/" in file] == []


def test_it_installs_into_an_empty_environment_and_runs_a_command_without_a_compiler(
    wheel: Path, tmp_path: Path
) -> None:
    Installed(wheel, tmp_path).check()
