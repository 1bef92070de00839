"""The wardens under test: the released one, and one with sanitizers made on the spot."""

from __future__ import annotations

import atexit
import functools
import os
import platform
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

import corral_backends.warden
from corral_backends.warden import find_warden

SOURCES = Path(corral_backends.warden.__file__).with_name("src")

# Leaks cannot be looked for: the warden is not dumpable, so nothing may ptrace it. The first finding ends the
# process by SIGABRT, and is written to a file, since the warden's standard error is /dev/null.
ASAN = "detect_leaks=0:abort_on_error=1:disable_coredump=1:handle_abort=0:log_path="
UBSAN = "halt_on_error=1:abort_on_error=1:print_stacktrace=1:log_path="


class CannotBuildError(Exception):
    """Why there is no such build here."""


@dataclass(frozen=True, slots=True)
class Build:
    name: str
    program: Path
    patience: float
    """By how much it may be slower than the released one."""

    def environment(self, logs: Path) -> dict[str, str]:
        if self.name == "released":
            return {}
        return {"ASAN_OPTIONS": f"{ASAN}{logs}/report", "UBSAN_OPTIONS": f"{UBSAN}{logs}/report"}


@functools.cache
def released() -> Build:
    return Build("released", find_warden(platform.machine()), 1.0)


@functools.cache
def scratch() -> Path:
    """A directory for what is made on the spot, open to other users, gone at the end."""
    where = Path(tempfile.mkdtemp(prefix="corral-builds-"))
    where.chmod(0o755)
    atexit.register(shutil.rmtree, where, ignore_errors=True)
    return where


def _compiles_with_sanitizers(compiler: str, where: Path) -> bool:
    source, program = where / "probe.c", where / "probe"
    source.write_text("int main(void) { return 0; }\n")
    line = [compiler, "-fsanitize=address,undefined", "-o", program, source]
    built = subprocess.run(line, capture_output=True, timeout=60)
    return (
        built.returncode == 0 and subprocess.run([program], capture_output=True, timeout=10).returncode == 0
    )


@functools.cache
def _try_sanitized() -> Build | str:
    compiler = os.environ.get("CC", "cc")
    if shutil.which("make") is None or shutil.which(compiler.split()[0]) is None:
        return f"no make or no {compiler} here"
    if not (SOURCES / "Makefile").is_file():
        return f"the sources of the warden are not in {SOURCES}"
    where = scratch()
    if not _compiles_with_sanitizers(compiler.split()[0], where):
        return f"{compiler} cannot build with sanitizers"
    line = ["make", "-s", "-C", str(SOURCES), f"BIN={where}", "debug"]
    made = subprocess.run(line, capture_output=True, text=True, timeout=120)
    if made.returncode != 0:
        msg = f"{' '.join(line)} failed:\n{made.stdout}{made.stderr}"
        raise AssertionError(msg)
    return Build("sanitized", where / "corral-warden-debug", 4.0)


def sanitized() -> Build:
    """`CannotBuildError` where the compiler has no sanitizers; a build that breaks otherwise is a failure."""
    found = _try_sanitized()
    if isinstance(found, str):
        raise CannotBuildError(found)
    return found


@functools.cache
def for_others(build: Build) -> Build:
    """The same program where any user can run it: the package may be closed to others."""
    copy = scratch() / f"corral-warden-{build.name}-{hash(build.program):x}"
    shutil.copyfile(build.program, copy)
    copy.chmod(0o755)
    return Build(build.name, copy, build.patience)
