"""How the warden's compiler is chosen and checked, and what is said when there is none."""

from __future__ import annotations

import importlib.util
import os
import platform
import shutil
import subprocess
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

ROOT = Path(__file__).parents[2]
MACHINE = platform.machine()


@pytest.fixture
def hook() -> ModuleType:
    """A fresh import of hatch_build.py, with nothing remembered of the compilers."""
    spec = importlib.util.spec_from_file_location("hatch_build", ROOT / "hatch_build.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(autouse=True)
def _unset(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("CC", "CORRAL_WARDEN_TARGETS", "CORRAL_WARDEN_WERROR"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def tree(tmp_path: Path, hook: ModuleType) -> Path:
    """A tree whose warden is a program that prints one word."""
    sources = tmp_path / hook.WARDEN / "src"
    sources.mkdir(parents=True)
    (sources / "main.c").write_text('#include <stdio.h>\nint main(void) { return puts("word") < 0; }\n')
    return tmp_path


def need_compiler(hook: ModuleType) -> None:
    if hook.compiler_for(MACHINE) is None:
        pytest.skip("no compiler here links a static program")


class TestTargets:
    def test_the_default_is_this_machine(self, hook: ModuleType) -> None:
        assert hook.targets() == [MACHINE]

    def test_listed_machines_are_taken_once_and_by_their_linux_names(
        self, hook: ModuleType, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("CORRAL_WARDEN_TARGETS", "arm64, x86_64,aarch64,")
        assert hook.targets() == ["aarch64", "x86_64"]

    def test_an_unknown_machine_is_named(self, hook: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("CORRAL_WARDEN_TARGETS", "x86_64,vax")
        with pytest.raises(hook.WardenBuildError, match=r"vax; it may name .*x86_64"):
            hook.targets()


class TestCompiler:
    def test_a_compiler_that_cannot_link_is_passed_over(
        self, hook: ModuleType, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        need_compiler(hook)
        hook.compiler_for.cache_clear()
        monkeypatch.setenv("CC", "false --whatever")
        assert hook.compiler_for(MACHINE) in {("cc",), ("gcc",), ("clang",)}

    def test_cc_may_have_arguments(self, hook: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
        need_compiler(hook)
        command = " ".join(hook.compiler_for(MACHINE))
        hook.compiler_for.cache_clear()
        monkeypatch.setenv("CC", f"{command} -O1")
        assert hook.compiler_for(MACHINE) == (*command.split(), "-O1")

    def test_a_compiler_for_another_machine_does_not_do(self, hook: ModuleType) -> None:
        other = "aarch64" if MACHINE != "aarch64" else "x86_64"
        assert hook.compiler_for(other) is None

    def test_without_a_compiler_the_way_out_is_named(
        self, hook: ModuleType, monkeypatch: pytest.MonkeyPatch, tree: Path
    ) -> None:
        monkeypatch.setenv("PATH", str(tree))
        absent = SimpleNamespace(util=SimpleNamespace(find_spec=lambda name: None))
        monkeypatch.setattr(hook, "importlib", absent)
        with pytest.raises(
            hook.WardenBuildError, match=r"apt-get install gcc libc6-dev.*pip install 'ziglang"
        ):
            hook.compile_warden(tree, MACHINE, tree / "warden")

    def test_releases_use_one_compiler_for_all(
        self, hook: ModuleType, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("CORRAL_WARDEN_TARGETS", MACHINE)
        assert hook.compiler_for(MACHINE) is None


class TestCompiling:
    def test_what_comes_out_runs(self, hook: ModuleType, tree: Path) -> None:
        need_compiler(hook)
        made = tree / "bin" / "warden"
        hook.compile_warden(tree, MACHINE, made)
        assert subprocess.run([made], capture_output=True, check=True, timeout=10).stdout == b"word\n"
        assert [path.name for path in made.parent.iterdir()] == ["warden"]

    def test_an_error_shows_what_the_compiler_said_and_leaves_nothing(
        self, hook: ModuleType, tree: Path
    ) -> None:
        need_compiler(hook)
        (tree / hook.WARDEN / "src" / "other.c").write_text("int broken(void) { return missing_name; }\n")
        with pytest.raises(hook.WardenBuildError, match=r"(?s)other\.c.*missing_name"):
            hook.compile_warden(tree, MACHINE, tree / "bin" / "warden")
        assert list((tree / "bin").iterdir()) == []

    def test_a_warning_is_an_error_only_on_request(
        self, hook: ModuleType, tree: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        need_compiler(hook)
        (tree / hook.WARDEN / "src" / "other.c").write_text("static int unused_one(void) { return 1; }\n")
        hook.compile_warden(tree, MACHINE, tree / "warden")
        monkeypatch.setenv("CORRAL_WARDEN_WERROR", "1")
        with pytest.raises(hook.WardenBuildError, match="unused_one"):
            hook.compile_warden(tree, MACHINE, tree / "warden")

    def test_it_is_stale_once_a_source_or_header_is_newer(self, hook: ModuleType, tree: Path) -> None:
        made = tree / "warden"
        assert hook.is_stale(made, tree)
        made.touch()
        newest = max(made.stat().st_mtime, (ROOT / "hatch_build.py").stat().st_mtime) + 10
        os.utime(made, (newest, newest))
        assert not hook.is_stale(made, tree)
        header = tree / hook.WARDEN / "src" / "warden.h"
        header.touch()
        os.utime(header, (newest + 1, newest + 1))
        assert hook.is_stale(made, tree)


class TestCheck:
    def test_a_program_that_needs_a_loader_is_refused(self, hook: ModuleType, tmp_path: Path) -> None:
        shell = shutil.which("bash")
        assert shell is not None
        if b"ld-" not in Path(shell).read_bytes()[:8192]:
            pytest.skip("bash is static here")
        assert hook.elf_problem(Path(shell), MACHINE) == "is not statically linked"

    def test_a_script_is_refused(self, hook: ModuleType, tmp_path: Path) -> None:
        (tmp_path / "script").write_text("#!/bin/sh\n")
        assert hook.elf_problem(tmp_path / "script", MACHINE) == "is not an ELF file"

    def test_another_machine_is_refused(self, hook: ModuleType) -> None:
        other = "aarch64" if MACHINE != "aarch64" else "x86_64"
        shell = shutil.which("bash")
        assert shell is not None
        assert "another machine" in (hook.elf_problem(Path(shell), other) or "")
