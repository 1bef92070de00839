"""What a report of a problem should say of the machine. Nothing of it names the host or a user, and no value
of an environment variable is shown but the temporary directory, which is one.

Every fact is bounded in time, and one that cannot be had is `None`: a report is wanted most where things are
broken.
"""

from __future__ import annotations

import os
import platform
import re
import resource
import shutil
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Final

from corral_tools.cli import exits

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    Json = str | int | float | bool | None | Sequence["Json"] | Mapping[str, "Json"]

_PATIENCE: Final = 5.0
"""Seconds for a program that only says its version."""

_CGROUPS: Final = Path("/sys/fs/cgroup")

_NEW_USER_NAMESPACE: Final = (
    "import ctypes, os, sys\n"
    "libc = ctypes.CDLL(None, use_errno=True)\n"
    "sys.exit(os.strerror(ctypes.get_errno()) if libc.unshare(0x10000000) else 0)\n"
)
"""A program that makes itself a user namespace (CLONE_NEWUSER of linux/sched.h), or says why it may not."""


def machine_facts() -> Mapping[str, Json]:
    """The object `machine` of the report; see the help of `corral doctor`."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return {
        "corral": _corral_version(),
        "python": f"{platform.python_implementation()} {platform.python_version()}",
        "system": platform.system(),
        "kernel": platform.release(),
        "architecture": platform.machine(),
        "distribution": _distribution(),
        "libc": " ".join(filter(None, platform.libc_ver())) or None,
        "cpus": os.cpu_count(),
        "uid": os.getuid(),
        "euid": os.geteuid(),
        "open_files": {"soft": _limit(soft), "hard": _limit(hard)},
        "pids_limit": _pids_limit(),
        "cgroup_version": _cgroup_version(),
        "user_namespaces": _user_namespaces(),
        "temporary_directory": _directory(os.environ.get("TMPDIR") or "/tmp"),
        "wardens": _wardens(),
        "compiler": _compiler(),
    }


def _corral_version() -> str | None:
    try:
        return version("corral")
    except PackageNotFoundError:
        return None


def _distribution() -> str | None:
    try:
        return platform.freedesktop_os_release().get("PRETTY_NAME")
    except OSError:
        return None


def _limit(value: int) -> int | None:
    return None if value == resource.RLIM_INFINITY else value


# --- control groups and namespaces


def _cgroup_version() -> int | None:
    if (_CGROUPS / "cgroup.controllers").exists():
        return 2
    return 1 if (_CGROUPS / "pids").exists() or (_CGROUPS / "memory").exists() else None


def _pids_limit() -> int | None:
    """The lowest limit of processes of our control groups, as far up as they can be seen. None: no limit."""
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return None
    limits: list[int] = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers not in ("", "pids"):
            continue
        root = _CGROUPS / controllers
        group = root / path.lstrip("/")
        while group.is_relative_to(root):
            try:
                limits.append(int((group / "pids.max").read_text()))
            except (OSError, ValueError):  # not there, or "max"
                pass
            group = group.parent
    return min(limits, default=None)


def _user_namespaces() -> Mapping[str, Json]:
    """Whether this user can make one: tried, since any of several mechanisms may forbid it."""
    if sys.platform != "linux":
        return {"allowed": None, "reason": "not Linux"}
    try:
        done = subprocess.run(
            [sys.executable, "-I", "-S", "-c", _NEW_USER_NAMESPACE],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            timeout=_PATIENCE,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return {"allowed": None, "reason": type(error).__name__}
    if done.returncode == 0:
        return {"allowed": True, "reason": None}
    reason = exits.one_line(done.stderr.decode(errors="replace"))
    knobs = (
        "kernel/unprivileged_userns_clone",
        "kernel/apparmor_restrict_unprivileged_userns",
        "user/max_user_namespaces",
    )
    told = [f"{knob.replace('/', '.')}={value}" for knob in knobs if (value := _sysctl(knob)) is not None]
    return {"allowed": False, "reason": "; ".join([reason, *told])}


def _sysctl(name: str) -> str | None:
    try:
        return Path("/proc/sys", name).read_text().strip()
    except OSError:
        return None


# --- directories


def _directory(path: str) -> Mapping[str, Json]:
    kind, options = _mount(path)
    try:
        free: int | None = shutil.disk_usage(path).free
    except OSError:
        free = None
    return {
        "path": path,
        "file_system": kind,
        "noexec": None if options is None else "noexec" in options,
        "free_bytes": free,
        # As a directory in which files can be made.
        "writable": Path(path).is_dir() and os.access(path, os.W_OK | os.X_OK),
    }


def _mount(path: str) -> tuple[str | None, Sequence[str] | None]:
    """Type and options of the file system on which `path` is (proc(5), mountinfo)."""
    real = Path(path).resolve()
    best: tuple[int, str | None, Sequence[str] | None] = (-1, None, None)
    try:
        lines = Path("/proc/self/mountinfo").read_text().splitlines()
    except OSError:
        return None, None
    for line in lines:
        left, _, right = line.partition(" - ")
        fields, kind = left.split(), right.split()
        point = Path(re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), fields[4]))
        # Of several on one point the last one is on top.
        if real.is_relative_to(point) and len(point.parts) >= best[0]:
            best = len(point.parts), kind[0], fields[5].split(",")
    return best[1], best[2]


# --- programs


def _wardens() -> Sequence[Mapping[str, Json]]:
    """The supervisors that are installed, and what each says of itself when it is run."""
    found: list[tuple[str, Path]] = []
    # Without an import: what is broken in there must not break the report.
    spec = find_spec("corral_backends")
    for folder in (spec.submodule_search_locations or ()) if spec is not None else ():
        found += [(path.name, path) for path in sorted(Path(folder, "warden", "bin").glob("corral-warden-*"))]
    if override := os.environ.get("CORRAL_WARDEN"):
        found.append(("CORRAL_WARDEN", Path(override)))
    return [{"name": name, **_said(path)} for name, path in found]


def _said(path: Path) -> Mapping[str, Json]:
    try:
        done = subprocess.run(
            [str(path), "--version"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            timeout=_PATIENCE,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return {"version": None, "error": f"says nothing within {_PATIENCE:g} s"}
    except OSError as error:
        return {"version": None, "error": error.strerror}
    line = exits.one_line(done.stdout.decode(errors="replace").partition("\n")[0])
    if done.returncode != 0:
        return {"version": None, "error": f"ends with status {done.returncode}"}
    return {"version": line, "error": None}


def _compiler() -> Mapping[str, Json] | None:
    """The first C compiler on PATH, which could build a warden for another architecture."""
    for name in ("cc", "gcc", "clang"):
        if path := shutil.which(name):
            return {"name": name, **_said(Path(path))}
    return None
