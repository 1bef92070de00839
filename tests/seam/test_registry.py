"""Backends are looked up among installed distributions, so these tests install some, on `sys.path`."""

from __future__ import annotations

import importlib
import sys
import textwrap
from typing import TYPE_CHECKING

import pytest

from corral import BashExecutor, ConfigError, backends, load_backend
from tests.seam.memory import MemoryExecutor

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    Install = Callable[..., None]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """Install a distribution: its entry points, and modules by name. Undone after the test."""
    modules: list[str] = []

    def install(name: str, entry_points: dict[str, str], **sources: str) -> None:
        root = tmp_path / name
        info = root / f"{name.replace('-', '_')}-1.2.3.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.2.3\n")
        lines = [f"{key} = {value}" for key, value in entry_points.items()]
        (info / "entry_points.txt").write_text("\n".join(["[corral.backends]", *lines, ""]))
        for module, source in sources.items():
            (root / f"{module}.py").write_text(textwrap.dedent(source))
            modules.append(module)
        monkeypatch.syspath_prepend(str(root))
        importlib.invalidate_caches()

    yield install
    for module in modules:
        sys.modules.pop(module, None)


GOOD = """
    from tests.seam.memory import MemoryExecutor

    class AcmeExecutor(MemoryExecutor):
        pass

    def make(**options):
        return AcmeExecutor(**options)
"""


def test_an_installed_backend_is_found_and_makes_executors(install: Install) -> None:
    install("acme-corral", {"acme": "acme_good:AcmeExecutor"}, acme_good=GOOD)
    assert "acme_good" not in sys.modules
    info = backends()["acme"]
    assert (info.name, info.value) == ("acme", "acme_good:AcmeExecutor")
    assert (info.distribution, info.version) == ("acme-corral", "1.2.3")
    assert (info.extras, info.conflicts) == ((), ())
    assert "acme_good" not in sys.modules, "listing imports nothing"
    factory = load_backend("acme")
    assert isinstance(factory, type)
    assert issubclass(factory, BashExecutor)
    executor = load_backend("acme")(disposal_error=None)
    assert isinstance(executor, MemoryExecutor)
    assert type(executor) is factory


def test_a_function_can_make_them_too(install: Install) -> None:
    install("acme-corral", {"acme": "acme_good:make"}, acme_good=GOOD)
    executor = load_backend("acme")(disposal_error=None)
    assert type(executor).__name__ == "AcmeExecutor"


def test_the_list_is_sorted_and_read_only(install: Install) -> None:
    install("acme-corral", {"zz": "m:X", "aa": "m:X", "mm": "m:X"})
    names = list(backends())
    assert names == sorted(names)
    assert {"aa", "mm", "zz"} <= set(names)
    with pytest.raises(TypeError):
        backends()["aa"] = backends()["zz"]  # type: ignore[index]


@pytest.mark.parametrize(("asked", "suggestion"), [("acme2", "acme"), ("akme", "acme"), ("Acme", "acme")])
def test_an_unknown_name_is_answered_with_the_nearest(install: Install, asked: str, suggestion: str) -> None:
    install("acme-corral", {"acme": "m:X"})
    with pytest.raises(ConfigError, match=f"unknown backend '{asked}'; did you mean '{suggestion}'") as error:
        load_backend(asked)
    assert (error.value.entry, error.value.suggestion) == (asked, suggestion)


def test_a_name_near_to_nothing_is_answered_with_all(install: Install) -> None:
    install("acme-corral", {"acme": "m:X"})
    with pytest.raises(ConfigError, match=r"unknown backend 'qqqqqq'; installed are: .*acme") as error:
        load_backend("qqqqqq")
    assert error.value.suggestion is None


def test_nothing_is_loaded_where_two_distributions_claim_a_name(install: Install) -> None:
    install("acme-corral", {"acme": "acme_good:AcmeExecutor"}, acme_good=GOOD)
    install("other-corral", {"acme": "other_module:Executor"})
    info = backends()["acme"]
    assert {info.value, *info.conflicts} == {"acme_good:AcmeExecutor", "other_module:Executor"}
    with pytest.raises(ConfigError, match="claimed more than once: ") as error:
        load_backend("acme")
    assert error.value.entry == "acme"
    assert error.value.remedy is not None
    assert "acme_good" not in sys.modules


def test_the_same_thing_found_twice_is_no_conflict(install: Install) -> None:
    install("acme-corral", {"acme": "acme_good:AcmeExecutor"}, acme_good=GOOD)
    install("acme-corral-again", {"acme": "acme_good:AcmeExecutor"})
    assert load_backend("acme").__name__ == "AcmeExecutor"


@pytest.mark.parametrize(
    ("value", "why"),
    [
        ("acme_absent:X", "ModuleNotFoundError"),
        ("acme_good:Absent", "AttributeError"),
        ("acme_broken:X", "ZeroDivisionError"),
        ("not a module", "cannot be imported"),
        ("acme_good:VALUE", "no class of executors"),
        ("acme_good:Other", "no class of executors"),
        ("acme_good", "no class of executors"),
    ],
)
def test_what_cannot_be_loaded_is_listed_and_refused(install: Install, value: str, why: str) -> None:
    source = GOOD + "\n    VALUE = 7\n\n    class Other:\n        pass\n"
    install("acme-corral", {"acme": value}, acme_good=source, acme_broken="1 / 0\n")
    assert backends()["acme"].value == value
    with pytest.raises(ConfigError, match=why) as error:
        load_backend("acme")
    assert error.value.entry == "acme"
    assert "'acme'" in str(error.value)


@pytest.mark.parametrize(
    ("extras", "parsed"), [("[docker]", ("docker",)), (" [ a-b , c ] ", ("a-b", "c")), ("[]", ())]
)
def test_the_extra_that_is_missing_is_named(install: Install, extras: str, parsed: tuple[str, ...]) -> None:
    install("acme-corral", {"acme": f"acme_absent:X{extras}"})
    assert backends()["acme"].value == "acme_absent:X"
    assert backends()["acme"].extras == parsed
    with pytest.raises(ConfigError) as error:
        load_backend("acme")
    assert isinstance(error.value.__cause__, ModuleNotFoundError)
    expected = f"pip install 'acme-corral[{','.join(parsed)}]'" if parsed else None
    assert error.value.remedy == expected


def test_an_interruption_during_the_import_is_not_hidden(install: Install) -> None:
    install("acme-corral", {"acme": "acme_slow:X"}, acme_slow="raise KeyboardInterrupt\n")
    with pytest.raises(KeyboardInterrupt):
        load_backend("acme")
