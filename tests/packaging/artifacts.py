"""Making what is published, and looking into it: copies of the tree, builds, ELF headers, installations."""

from __future__ import annotations

import os
import platform
import shutil
import struct
import subprocess
import sys
import venv
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

ROOT = Path(__file__).parents[2]
PACKAGES = frozenset({"corral", "corral_backends", "corral_conformance", "corral_tools"})

# ELF constants, from <elf.h>.
PT_LOAD, PT_INTERP = 1, 3
EM = {"x86_64": 62, "aarch64": 183}


def warden_name(machine: str) -> str:
    """Where the wheel has the warden for a machine."""
    return f"corral_backends/warden/bin/corral-warden-{machine}"


def copy_of_tree(target: Path, *, backwards: bool = False) -> Path:
    """What git would commit, so that nothing of an earlier build slips in; without git, all files.

    `backwards` creates the files in the reverse order, in which some file systems then list them.
    """
    if shutil.which("git") and (ROOT / ".git").exists():
        git = ["git", "-c", f"safe.directory={ROOT}"]
        command = [*git, "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
        listed = subprocess.run(command, cwd=ROOT, capture_output=True, check=True, timeout=60).stdout
        names = [os.fsdecode(name) for name in listed.split(b"\0") if name]
    else:
        hidden = {".tox", ".git", "reports", "bin", "__pycache__"}
        files = [path.relative_to(ROOT) for path in ROOT.rglob("*") if path.is_file()]
        names = [
            str(path)
            for path in files
            if not hidden & set(path.parts) and not path.parts[0].startswith(".venv")
        ]
    for name in sorted(names, reverse=backwards):
        if (ROOT / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target / name)
    return target


def build(
    tree: Path,
    out: Path,
    *options: str,
    env: Mapping[str, str] | None = None,
    umask: int = 0o022,
    seconds: float = 280,
) -> Path:
    """`python -m build` of `tree`; returns `out`, which then has the wheel and the sdist."""
    ran = subprocess.run(
        [sys.executable, "-m", "build", *options, "--outdir", str(out), str(tree)],
        env={**os.environ, **(env or {})},
        umask=umask,
        capture_output=True,
        text=True,
        check=False,
        timeout=seconds,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return out


@dataclass(frozen=True, slots=True, kw_only=True)
class Elf:
    """What the header says: `e_machine`, and the `p_type` of every segment."""

    machine: int
    segments: tuple[int, ...]

    @property
    def static(self) -> bool:
        return PT_LOAD in self.segments and PT_INTERP not in self.segments


def read_elf(program: bytes) -> Elf:
    """Of a 64-bit little-endian program, which those for x86_64 and aarch64 are."""
    assert program[:6] == b"\x7fELF\x02\x01"
    (machine,) = struct.unpack_from("<H", program, 18)
    (offset,) = struct.unpack_from("<Q", program, 32)
    size, count = struct.unpack_from("<HH", program, 54)
    segments = (struct.unpack_from("<I", program, offset + index * size)[0] for index in range(count))
    return Elf(machine=machine, segments=tuple(segments))


class Installed:
    """A wheel in an empty environment of its own, with nothing but bash on PATH: no compiler, no git."""

    def __init__(self, wheel: Path, where: Path) -> None:
        self.where = where
        venv.create(where / "env", with_pip=True)
        self.bin = where / "env" / "bin"
        path = where / "path"
        path.mkdir()
        shell = shutil.which("bash")
        assert shell is not None
        (path / "bash").symlink_to(shell)
        dropped = ("CC", "CORRAL_WARDEN", "PYTHONPATH")
        self.env = {name: value for name, value in os.environ.items() if name not in dropped}
        self.env["PATH"] = str(path)
        self.python(
            "-m", "pip", "install", "--disable-pip-version-check", "--no-compile", str(wheel), seconds=200
        )
        (site,) = (where / "env").glob("lib/python*/site-packages")
        self.warden = site / warden_name(platform.machine())

    def python(self, *arguments: str, seconds: float = 60) -> str:
        return self.run("python", *arguments, seconds=seconds)

    def run(self, program: str, *arguments: str, status: int = 0, seconds: float = 60) -> str:
        """The stdout of a program of the environment, which has to exit with `status`."""
        ran = subprocess.run(
            [str(self.bin / program), *arguments],
            cwd=self.where,
            env=self.env,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
            timeout=seconds,
        )
        assert ran.returncode == status, f"status {ran.returncode}\n{ran.stdout}{ran.stderr}"
        return ran.stdout

    def check(self) -> None:
        """Everything imports, the backends are found, and a command runs from end to end."""
        self.python("-c", f"import {', '.join(sorted(PACKAGES))}")
        assert self.python("-c", "import corral; print(*corral.backends())").split() == ["local"]
        assert os.access(self.warden, os.X_OK)
        assert "Usage" in self.run("corral", "--help")
        assert self.run("corral", "run", "--", "echo hello") == "hello\n"
        assert self.run("corral", "run", "--", "type -P cc gcc clang; exit 7", status=7) == ""
