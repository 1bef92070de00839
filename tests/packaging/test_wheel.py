"""What is published: the wheel has our packages and a warden that runs, the sdist has what builds it."""

from __future__ import annotations

import os
import platform
import shutil
import stat
import struct
import subprocess
import sys
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = {"corral", "corral_backends", "corral_conformance", "corral_tools"}
WARDEN = f"corral_backends/warden/bin/corral-warden-{platform.machine()}"

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def copy_of_tree(target: Path) -> Path:
    """What git would commit, so that nothing of an earlier build slips in; without git, all files."""
    if shutil.which("git") and (ROOT / ".git").exists():
        git = ["git", "-c", f"safe.directory={ROOT}"]
        command = [*git, "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
        listed = subprocess.run(command, cwd=ROOT, capture_output=True, check=True).stdout
        names = [os.fsdecode(name) for name in listed.split(b"\0") if name]
    else:
        hidden = {".tox", ".git", "reports", "bin", "__pycache__"}
        files = [path.relative_to(ROOT) for path in ROOT.rglob("*") if path.is_file()]
        names = [
            str(path)
            for path in files
            if not hidden & set(path.parts) and not path.parts[0].startswith(".venv")
        ]
    for name in names:
        if (ROOT / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target / name)
    return target


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the sdist, and the wheel built from that sdist, as a release makes them."""
    tree = copy_of_tree(tmp_path_factory.mktemp("tree"))
    out = tmp_path_factory.mktemp("dist")
    ran = subprocess.run(
        [sys.executable, "-m", "build", "--outdir", str(out), str(tree)],
        capture_output=True,
        text=True,
        check=False,
        timeout=280,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return out


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
    assert program[:4] == b"\x7fELF"
    # 64-bit little-endian program headers, as on every machine that the tests run on; see <elf.h>.
    assert program[4:6] == b"\x02\x01"
    (offset,) = struct.unpack_from("<Q", program, 32)
    size, count = struct.unpack_from("<HH", program, 54)
    kinds = [struct.unpack_from("<I", program, offset + index * size)[0] for index in range(count)]
    assert 1 in kinds  # PT_LOAD
    assert 3 not in kinds  # PT_INTERP


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


def test_it_installs_into_an_empty_environment_without_a_compiler(
    wheel: Path, names: list[str], tmp_path: Path
) -> None:
    venv.create(tmp_path / "env", with_pip=True)
    python = tmp_path / "env" / "bin" / "python"
    # Nothing on PATH at all: neither the installation nor the import may need a program.
    bare = {**os.environ, "PATH": str(tmp_path)}

    def run(*arguments: str) -> str:
        ran = subprocess.run(
            [str(python), *arguments],
            cwd=tmp_path,
            env=bare,
            capture_output=True,
            text=True,
            check=False,
            timeout=200,
        )
        assert ran.returncode == 0, ran.stdout + ran.stderr
        return ran.stdout

    run("-m", "pip", "install", "--disable-pip-version-check", "--no-compile", str(wheel))
    run("-c", f"import {', '.join(sorted(PACKAGES))}")
    assert run("-c", "import corral; print(*corral.backends())").split() == ["local"]
    (folder,) = (tmp_path / "env").glob("lib/python*/site-packages")
    installed = folder / WARDEN
    assert os.access(installed, os.X_OK)
    # The console script points at something that is there.
    assert (
        "Usage"
        in subprocess.run(
            [str(tmp_path / "env" / "bin" / "corral"), "--help"],
            env=bare,
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
        ).stdout
    )
