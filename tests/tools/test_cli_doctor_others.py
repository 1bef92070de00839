"""`corral doctor` on backends of third parties: broken, hanging, crashing, or lying."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import pytest

from tests.tools.command import Running, corral, install
from tests.tools.doctor import BACKENDS, MODULES, STEPS, outcomes, report


@pytest.fixture
def acme(tmp_path: Path) -> dict[str, str]:
    return install(tmp_path / "site", BACKENDS, MODULES)


@pytest.mark.slow
def test_one_that_leaves_processes_and_has_no_spill(acme: dict[str, str]) -> None:
    """It is told, and what the check itself has started is gone."""
    _, steps = report("--backend", "plain", env=acme, status=1)
    assert outcomes(steps) == ["ok", "ok", "ok", "ok", "failed", "failed", "ok"]
    assert "session of its own was still alive" in steps["kill"]["evidence"]
    assert "there is no spill file" in steps["spill"]["evidence"]


@pytest.mark.slow
def test_the_end_of_the_time_leaves_nothing_either(acme: dict[str, str]) -> None:
    _, steps = report("--backend", "plain", "--timeout", "4s", env=acme, status=1)
    assert "has not ended after" in steps["kill"]["evidence"]
    assert steps["spill"]["evidence"] == "there was no time left"
    assert steps["dispose"]["outcome"] == "ok"


@pytest.mark.parametrize(
    ("name", "says", "remedy"),
    [
        ("absent", "acme_nosuch", "pip install 'acme-backends[cloud]'"),
        ("raises", "RuntimeError: no driver", None),
        ("exits", "please set ACME_HOME", None),
    ],
)
def test_one_that_cannot_be_imported(acme: dict[str, str], name: str, says: str, remedy: str | None) -> None:
    _, steps = report("--backend", name, env=acme, status=1)
    assert outcomes(steps) == ["failed", *["not checked"] * 6]
    assert says in steps["import"]["evidence"]
    assert steps["import"]["remedy"] == remedy


def test_one_that_cannot_be_constructed(acme: dict[str, str]) -> None:
    _, steps = report("--backend", "fails", env=acme, status=1)
    assert outcomes(steps) == ["ok", "failed", *["not checked"] * 5]
    assert steps["construct"]["evidence"] == "LookupError: no ACME account"


@pytest.mark.parametrize("name", ["opening", "deaf"])
def test_one_that_hangs_while_it_opens(acme: dict[str, str], name: str) -> None:
    begun = time.monotonic()
    _, steps = report("--backend", name, "--timeout", "1s", env=acme, status=1)
    assert time.monotonic() - begun < 15
    assert outcomes(steps) == ["ok", "ok", "failed", *["not checked"] * 3, "ok"]
    assert "has not ended after" in steps["open"]["evidence"]
    assert "--timeout" in steps["open"]["remedy"]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "step"), [("blocks", "open"), ("sleeps", "import")])
def test_one_that_blocks_its_process(acme: dict[str, str], name: str, step: str) -> None:
    begun = time.monotonic()
    _, steps = report("--backend", name, "--timeout", "1s", env=acme, status=1)
    assert time.monotonic() - begun < 25
    assert steps[step]["outcome"] == "failed"
    assert "which was killed after" in steps[step]["evidence"]
    later = STEPS[STEPS.index(step) + 1 :]
    assert {steps[name]["outcome"] for name in later} == {"not checked"}


def test_one_that_ends_its_process(acme: dict[str, str]) -> None:
    _, steps = report("--backend", "crashes", env=acme, status=1)
    assert (
        steps["open"]["evidence"] == f"the process that checked it ended with signal {signal.SIGABRT.value}"
    )


@pytest.mark.slow
def test_one_that_cannot_be_disposed_of(acme: dict[str, str]) -> None:
    _, steps = report("--backend", "disposes", "--timeout", "4s", env=acme, status=1)
    assert steps["dispose"]["outcome"] == "failed"
    assert "has not ended after" in steps["dispose"]["evidence"]


def test_one_that_gives_other_output(acme: dict[str, str]) -> None:
    _, steps = report("--backend", "lies", env=acme, status=1)
    assert steps["run"]["outcome"] == "failed"
    assert "forged" in steps["run"]["evidence"]


@pytest.mark.slow
def test_one_that_needs_a_configuration(acme: dict[str, str], tmp_path: Path) -> None:
    done = corral("doctor", "--json", "--backend", "picky", env=acme)
    assert done.returncode == 125
    assert b"no backend could be checked without a configuration" in done.stderr
    (backend,) = json.loads(done.stdout)["backends"]
    assert backend["outcome"] == "not checked"
    construct = backend["steps"][1]
    assert construct["outcome"] == "not checked"
    assert "use --config: entry 'picky': the option 'host' is missing" in construct["evidence"]
    file = tmp_path / "corral.yaml"
    file.write_text("- {name: picky, config: {host: acme, token: hunter2}}\n")
    done = corral("doctor", "--json", "--config", str(file), env=acme)
    assert json.loads(done.stdout)["backends"][0]["steps"][3]["outcome"] == "ok"
    assert b"hunter2" not in done.stdout + done.stderr


@pytest.mark.backend("local")
def test_a_broken_one_does_not_hide_one_that_works(acme: dict[str, str]) -> None:
    done = corral("doctor", "--json", "--backend", "raises", "--backend", "local", env=acme)
    assert done.returncode == 1
    assert [each["outcome"] for each in json.loads(done.stdout)["backends"]] == ["failed", "ok"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_being_stopped_leaves_nothing(acme: dict[str, str], number: signal.Signals) -> None:
    with Running("doctor", "--backend", "opening", env=acme) as running:
        running.read_until(b"construct  with its default options\n")
        os.kill(running.process.pid, number)
        status, _, _ = running.finish()
        assert status == (130 if number is signal.SIGINT else -number)
        deadline = time.monotonic() + 8
        while running.alive():
            assert time.monotonic() < deadline, running.alive()
            time.sleep(0.05)
