"""A short run of both fuzzers; `fuzz/mutate.py` and `fuzz/Makefile` say how to run them for long."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.warden.builds import SOURCES, Build, scratch
from tests.warden.fuzz import mutate

FUZZ = Path(mutate.__file__).parent


@pytest.mark.parametrize("seed", range(0, 60, 2))
def test_damaged_sessions(build: Build, seed: int) -> None:
    mutate.run(build, seed + (build.name == "sanitized"))


def test_seeds_say_what_they_did() -> None:
    # A failure is of use only if its seed brings it back.
    for seed in range(20):
        one, other = (b"".join(bytes(piece.data) for piece in mutate.make(seed)[1]) for _ in range(2))
        assert one == other
    assert len({b"".join(bytes(piece.data) for piece in mutate.make(seed)[1]) for seed in range(50)}) > 45


def test_the_oracle_sees_a_warden_that_does_not_end(tmp_path: Path) -> None:
    """What the fuzzer must not take for a warden: a program that answers nothing, and stays."""
    program = tmp_path / "no-warden"
    program.write_text("#!/bin/sh\nexec sleep 20\n")
    program.chmod(0o755)
    with pytest.raises(AssertionError, match=r"lives on|does not read"):
        mutate.run(Build("released", program, 0.1), 0)


def test_the_dispatcher_alone(tmp_path: Path) -> None:
    """The libFuzzer target, on sessions of the other fuzzer and some seconds of its own ideas."""
    if shutil.which("clang") is None or shutil.which("objcopy") is None or shutil.which("make") is None:
        pytest.skip("needs clang, objcopy and make")
    probe = tmp_path / "probe.c"
    probe.write_text(
        "int LLVMFuzzerTestOneInput(const unsigned char *d, unsigned long n) { return 0 * (d[0] + n); }\n"
    )
    line = ["clang", "-fsanitize=fuzzer,address,undefined", "-o", tmp_path / "probe", probe]
    if subprocess.run(line, capture_output=True, timeout=60).returncode != 0:
        pytest.skip("this clang has no libFuzzer")
    out = scratch() / "fuzz"
    line = [
        "make",
        "-s",
        "-C",
        str(FUZZ),
        f"OUT={out}",
        f"SRC={SOURCES}",
        "CC=clang",
        "-j",
        str(os.cpu_count() or 1),
    ]
    made = subprocess.run(line, capture_output=True, text=True, timeout=120)
    assert made.returncode == 0, made.stdout + made.stderr
    seeds, found = tmp_path / "seeds", tmp_path / "found"
    found.mkdir()
    mutate.corpus(seeds, 150)
    ran = subprocess.run(
        [out / "frames_fuzzer", "-max_total_time=3", "-max_len=4096", "-timeout=20", "-seed=1", found, seeds],
        capture_output=True,
        text=True,
        errors="replace",
        timeout=50,
        cwd=tmp_path,
    )
    assert ran.returncode == 0, ran.stderr[-5000:]
