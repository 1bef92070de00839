"""Compiles storm.c, once per test session."""

from __future__ import annotations

import atexit
import functools
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

__all__ = ["setuid_program", "storm_program"]

SOURCE = Path(__file__).with_name("storm.c")


@functools.cache
def storm_program() -> Path | None:
    """The built program, executable by every user, or None where there is no C compiler."""
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        return None
    directory = Path(tempfile.mkdtemp(prefix="corral-storm-"))
    directory.chmod(0o755)
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    program = directory / "storm"
    # Static where possible: fewer mappings to copy, so the walkers move faster.
    for extra in (["-static"], []):
        built = subprocess.run(
            [compiler, "-O2", "-std=gnu11", "-D_GNU_SOURCE", "-pthread", *extra, "-o", program, SOURCE],
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )
        if built.returncode == 0:
            program.chmod(0o755)
            return program
    msg = f"{compiler} cannot build {SOURCE}:\n{built.stderr}"
    raise RuntimeError(msg)


@functools.cache
def setuid_program() -> Path | None:
    """The same with root's set-user-id bit; None where it cannot be made or would not be heeded."""
    program = storm_program()
    if program is None or os.geteuid() != 0 or os.statvfs(program).f_flag & os.ST_NOSUID:
        return None
    setuid = program.with_name("storm-setuid")
    shutil.copyfile(program, setuid)
    setuid.chmod(0o4755)
    return setuid
