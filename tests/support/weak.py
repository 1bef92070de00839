"""A scenario without corral: killers known to be too weak, to prove that the witness sees survivors."""

from __future__ import annotations

import os
import signal
import subprocess
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.support.driver import Stage

__all__ = ["weak"]


async def weak(stage: Stage, *, command: str, killer: str) -> None:
    """Starts `command`, kills only its `leader` or only its process `group`, and waits to be counted."""
    process = subprocess.Popen(
        ["bash", "-c", command],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    await stage.ask("running")
    if killer == "leader":
        process.kill()
    elif killer == "group":
        os.killpg(process.pid, signal.SIGKILL)
    else:
        msg = f"unknown killer {killer!r}"
        raise ValueError(msg)
    process.wait()
    await stage.ask("ended")
