"""Build hook: compiles the warden, the static C program that supervises commands, and puts it into the wheel.

What it writes is `warden/bin/corral-warden-<machine>`, `<machine>` being what `uname -m` says in a place.

Compiler: `$CC`, `cc`, `gcc`, `clang`, whichever first links a static program for this machine; it is tried,
not guessed, because many systems have a compiler without a static libc. Failing all, the `ziglang` wheel,
which carries clang and musl for every architecture, becomes a build dependency. So a machine without any
compiler, and one that is not Linux, can still build.

Environment:
    CC                     a compiler command to try first
    CORRAL_WARDEN_TARGETS  comma-separated machines (`x86_64,aarch64`) to build, all through ziglang: releases
    CORRAL_WARDEN_WERROR   `1` makes compiler warnings errors: CI, since a user's compiler may warn of more
"""

from __future__ import annotations

import functools
import importlib.util
import os
import platform
import shlex
import shutil
import struct
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

WARDEN = Path("backends", "corral_backends", "warden")
IN_WHEEL = "corral_backends/warden/bin"

# Newer releases have changed libc and linker defaults; move the cap after a look at the built warden.
ZIGLANG = "ziglang>=0.14,<0.18"

# `uname -m` -> (zig's target, ELF e_machine). e_machine values are those of <elf.h>.
MACHINES: dict[str, tuple[str, int]] = {
    "x86_64": ("x86_64-linux-musl", 62),
    "aarch64": ("aarch64-linux-musl", 183),
    "armv7l": ("arm-linux-musleabihf", 40),
    "ppc64le": ("powerpc64le-linux-musl", 21),
    "riscv64": ("riscv64-linux-musl", 243),
    "s390x": ("s390x-linux-musl", 22),
}

# What other systems call the same machines.
ALIASES = {"amd64": "x86_64", "arm64": "aarch64"}

FLAGS = (
    "-std=c11",
    "-O2",
    "-D_GNU_SOURCE",
    "-Wall",
    "-Wextra",
    "-ffunction-sections",
    "-fdata-sections",
    "-static",
    "-s",
    "-Wl,--gc-sections",
    # The same sources give the same bytes: no build id, and no path of this machine (see compile_warden).
    "-Wl,--build-id=none",
)

PROBE = """\
#include <linux/types.h>
#include <stdio.h>
#include <sys/epoll.h>
int main(void) { return printf("%d", epoll_create1(EPOLL_CLOEXEC)) < 0; }
"""


class WardenBuildError(Exception):
    """The warden could not be built; the message says what to do about it."""


class WardenBuildHook(BuildHookInterface):  # type: ignore[type-arg]
    """Runs for wheels, editable ones included; a source distribution carries the C sources instead."""

    PLUGIN_NAME = "custom"

    def dependencies(self) -> list[str]:
        """`ziglang`, only where this machine's own compilers cannot do it."""
        try:
            wanted = targets() if sources(Path(self.root)) else []
        except WardenBuildError as error:
            self.app.abort(str(error))
        return [ZIGLANG] if any(compiler_for(machine) is None for machine in wanted) else []

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        try:
            self.build(Path(self.root), build_data, editable=version == "editable")
        except WardenBuildError as error:
            # Without a traceback: the message says what to do.
            self.app.abort(str(error))

    def build(self, root: Path, build_data: dict[str, Any], *, editable: bool) -> None:
        if not sources(root):
            msg = f"there is no .c file in {root / WARDEN / 'src'}: this tree is incomplete"
            if not editable:
                raise WardenBuildError(msg)
            self.app.display_warning(f"the warden is not built: {msg}")
            return
        if editable:
            # Imports come from the tree, so the warden has to be there too; git ignores it.
            for machine in targets():
                output = root / WARDEN / "bin" / file_name(machine)
                if is_stale(output, root):
                    compile_warden(root, machine, output)
            return
        # Apart from the tree, so that a wheel never carries a binary that some earlier build left behind.
        self.scratch = tempfile.TemporaryDirectory(prefix="corral-warden-")
        for machine in targets():
            output = Path(self.scratch.name, file_name(machine))
            compile_warden(root, machine, output)
            build_data["force_include"][str(output)] = f"{IN_WHEEL}/{output.name}"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        if hasattr(self, "scratch"):
            self.scratch.cleanup()


def file_name(machine: str) -> str:
    return f"corral-warden-{machine}"


def sources(root: Path) -> list[Path]:
    """The C files, in an order that does not depend on the file system."""
    return sorted((root / WARDEN / "src").glob("*.c"))


def targets() -> list[str]:
    """The machines to build for, by their `uname -m` names."""
    listed = os.environ.get("CORRAL_WARDEN_TARGETS", "")
    names = [name.strip() for name in listed.split(",") if name.strip()] or [platform.machine().lower()]
    machines = list(dict.fromkeys(ALIASES.get(name, name) for name in names))
    unknown = [machine for machine in machines if machine not in MACHINES]
    if unknown and listed:
        msg = f"CORRAL_WARDEN_TARGETS names {', '.join(unknown)}; it may name {', '.join(MACHINES)}"
        raise WardenBuildError(msg)
    return machines


def is_stale(output: Path, root: Path) -> bool:
    """Whether `output` is missing or older than anything it is made from."""
    if not output.is_file():
        return True
    inputs = [*(root / WARDEN / "src").glob("*.[ch]"), Path(__file__)]
    return output.stat().st_mtime < max(path.stat().st_mtime for path in inputs)


@functools.cache
def compiler_for(machine: str) -> tuple[str, ...] | None:
    """The first of this machine's compilers that links a static program for `machine`, or None."""
    # One compiler for all the binaries of a release, so that they differ in nothing but the architecture.
    if os.environ.get("CORRAL_WARDEN_TARGETS") or sys.platform != "linux":
        return None
    for candidate in (os.environ.get("CC", ""), "cc", "gcc", "clang"):
        command = tuple(shlex.split(candidate))
        if command and shutil.which(command[0]) and links_static(command, machine):
            return command
    return None


def links_static(command: tuple[str, ...], machine: str) -> bool:
    with tempfile.TemporaryDirectory(prefix="corral-probe-") as folder:
        source, program = Path(folder, "probe.c"), Path(folder, "probe")
        source.write_text(PROBE, encoding="utf-8")
        ran = subprocess.run(
            [*command, *FLAGS, "-o", str(program), str(source)], check=False, capture_output=True, cwd=folder
        )
        return ran.returncode == 0 and elf_problem(program, machine) is None


def compile_warden(root: Path, machine: str, output: Path) -> None:
    """Compile all C files into `output`, checked and with mode 0755; raises `WardenBuildError`."""
    command = compiler_for(machine)
    if command is None:
        command = zig_command(machine)
    folder = root / WARDEN / "src"
    output.parent.mkdir(parents=True, exist_ok=True)
    # Beside the target and renamed over it: a warden that is running is never written to (ETXTBSY).
    fresh = output.with_name(f".{output.name}.{os.getpid()}")
    line = [*command, *FLAGS]
    if os.environ.get("CORRAL_WARDEN_WERROR") == "1":
        line.append("-Werror")
    line += [f"-ffile-prefix-map={folder}=.", "-o", str(fresh), *(path.name for path in sources(root))]
    try:
        ran = subprocess.run(
            line,
            check=False,
            cwd=folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )
        if ran.returncode != 0:
            said = f"{shlex.join(line)}\n{ran.stdout}"
            msg = f"compiling the warden for {machine} failed with status {ran.returncode}:\n{said}"
            raise WardenBuildError(msg)
        # A warning is shown even where it is no error.
        sys.stderr.write(ran.stdout)
        problem = elf_problem(fresh, machine)
        if problem is not None:
            made = f"the warden that {shlex.join(command)} made for {machine}"
            msg = f"{made} {problem}; set CC to another compiler"
            raise WardenBuildError(msg)
        fresh.chmod(0o755)
        fresh.replace(output)
    finally:
        fresh.unlink(missing_ok=True)


def zig_command(machine: str) -> tuple[str, ...]:
    if machine not in MACHINES:
        msg = (
            f"no compiler here links a static program for {machine}, and ziglang is set up for "
            f"{', '.join(MACHINES)} only; install a C compiler with a static libc"
        )
        raise WardenBuildError(msg)
    if importlib.util.find_spec("ziglang") is None:
        msg = (
            f"no compiler here links a static program for {machine}, and the ziglang package is missing; "
            f"install a C compiler with a static libc (Debian: apt-get install gcc libc6-dev), or run: "
            f"{sys.executable} -m pip install '{ZIGLANG}' (a build with isolation does that by itself)"
        )
        raise WardenBuildError(msg)
    # zig adds the undefined-behaviour sanitizer by itself when it takes a build for a debug build.
    return (sys.executable, "-m", "ziglang", "cc", "-target", MACHINES[machine][0], "-fno-sanitize=undefined")


def elf_problem(path: Path, machine: str) -> str | None:
    """Why the file at `path` is not a static Linux program for `machine`, or None if it is one."""
    data = path.read_bytes()
    if data[:4] != b"\x7fELF" or data[4] not in (1, 2) or data[5] not in (1, 2):
        return "is not an ELF file"
    order = "<" if data[5] == 1 else ">"
    wide = data[4] == 2
    (found,) = struct.unpack_from(f"{order}H", data, 18)
    if machine in MACHINES and found != MACHINES[machine][1]:
        return f"is for another machine (e_machine {found})"
    (offset,) = struct.unpack_from(f"{order}{'Q' if wide else 'I'}", data, 32 if wide else 28)
    size, count = struct.unpack_from(f"{order}HH", data, 54 if wide else 42)
    for index in range(count):
        (kind,) = struct.unpack_from(f"{order}I", data, offset + index * size)
        if kind == 3:  # PT_INTERP: it asks for a dynamic loader
            return "is not statically linked"
    return None
