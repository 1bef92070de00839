"""Backends of third parties that fail in every way, and reports of `corral doctor` as they come."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.tools.command import corral

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["BACKENDS", "MODULES", "STEPS", "outcomes", "report"]

STEPS = ["import", "construct", "open", "run", "kill", "spill", "dispose"]
PLAIN = (Path(__file__).parent / "plain_backend.py").read_text()
HANGS = """
import asyncio, os, time
from acme_plain import PlainExecutor

class Opening(PlainExecutor):
    async def run(self, spec):
        await asyncio.sleep(600)

class Deaf(PlainExecutor):
    async def run(self, spec):
        while True:
            try:
                await asyncio.sleep(600)
            except asyncio.CancelledError:
                pass

class Blocks(PlainExecutor):
    async def run(self, spec):
        time.sleep(600)

class Crashes(PlainExecutor):
    async def run(self, spec):
        os.abort()

class Disposes(PlainExecutor):
    async def _dispose(self):
        await asyncio.sleep(600)

class Lies(PlainExecutor):
    async def _work(self, job, spec):
        from dataclasses import replace
        await super()._work(job, replace(spec, command="echo forged"))

class Picky(PlainExecutor):
    def __init__(self, *, host: str, token: str = "") -> None:
        super().__init__()

def fails():
    raise LookupError("no ACME account")
"""
BACKENDS = {
    "plain": "acme_plain:PlainExecutor",
    "absent": "acme_nosuch:Executor [cloud]",
    "raises": "acme_raises:Executor",
    "exits": "acme_exits:Executor",
    "sleeps": "acme_sleeps:Executor",
    "fails": "acme_hangs:fails",
    **{name: f"acme_hangs:{name.capitalize()}" for name in ("opening", "deaf", "blocks", "crashes")},
    **{name: f"acme_hangs:{name.capitalize()}" for name in ("disposes", "lies", "picky")},
}
MODULES = {
    "acme_plain": PLAIN,
    "acme_hangs": HANGS,
    "acme_raises": "raise RuntimeError('no driver\\n[red]here[/red]\\x1b[2J')",
    "acme_exits": "import sys; print('noise'); sys.exit('please set ACME_HOME')",
    "acme_sleeps": "import time; time.sleep(600)",
}


def report(
    *words: str, env: Mapping[str, str] | None = None, status: int = 0
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The whole of a report with one backend, and the steps of that by name."""
    done = corral("doctor", "--json", *words, env=env)
    assert done.returncode == status, done
    found = json.loads(done.stdout)
    (backend,) = found["backends"]
    assert [step["step"] for step in backend["steps"]] == STEPS
    assert found["ok"] is (status == 0)
    return found, {step["step"]: step for step in backend["steps"]}


def outcomes(steps: Mapping[str, Any]) -> list[str]:
    return [steps[name]["outcome"] for name in STEPS]
