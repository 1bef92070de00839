from __future__ import annotations

import inspect
import pkgutil
import subprocess
import sys
import typing
from collections.abc import Callable
from pathlib import Path

import pytest

import corral
from corral import BashExecutor

PUBLIC = [(name, getattr(corral, name)) for name in corral.__all__]
CLASSES = [value for _, value in PUBLIC if isinstance(value, type)]


def functions() -> list[tuple[str, Callable[..., object]]]:
    found: list[tuple[str, Callable[..., object]]] = [
        (name, value) for name, value in PUBLIC if inspect.isfunction(value)
    ]
    for kind in CLASSES:
        for name, member in vars(kind).items():
            if isinstance(member, property):
                member = member.fget
            elif isinstance(member, classmethod):
                member = member.__func__
            if inspect.isfunction(member) and member.__module__.startswith("corral"):
                found.append((f"{kind.__name__}.{name}", member))
    return found


def test_all_is_sorted_and_complete() -> None:
    assert corral.__all__ == sorted(corral.__all__)
    named = {name for name, value in vars(corral).items() if not name.startswith("_")}
    assert named - {"annotations"} == set(corral.__all__)


@pytest.mark.parametrize("kind", CLASSES, ids=lambda kind: kind.__name__)
def test_every_class_has_annotations_that_can_be_evaluated(kind: type) -> None:
    """Tools that read annotations at run time (pydantic, Sphinx) find every name in its module."""
    typing.get_type_hints(kind)


@pytest.mark.parametrize(
    ("name", "function"), functions(), ids=lambda value: str(value) if isinstance(value, str) else ""
)
def test_every_function_has_annotations_that_can_be_evaluated(
    name: str, function: Callable[..., object]
) -> None:
    hints = typing.get_type_hints(function)
    parameters = [
        parameter for parameter in inspect.signature(function).parameters if parameter not in ("self", "cls")
    ]
    if not name.endswith("__"):
        assert set(hints) == {*parameters, "return"}
    for hint in hints.values():
        assert "typing.Any" not in str(hint), f"{name}: {hint}"


def test_everything_public_is_documented() -> None:
    undocumented = [name for name, value in PUBLIC if isinstance(value, type) and not value.__doc__]
    undocumented += [
        name
        for name, value in functions()
        if "_" not in name.split(".")[-1][:1] and not inspect.getdoc(value)
    ]
    # What these say is in their names and types.
    assert set(undocumented) <= {"AbortSignal.aborted", "BashTask.command", "BashTask.id", "BashTask.workdir"}


def test_an_executor_is_abstract_in_exactly_these() -> None:
    assert BashExecutor.__abstractmethods__ == {
        "resolve",
        "run",
        "start",
        "get",
        "list",
        "owner_of",
        "read_output",
        "kill",
        "fetch",
        "_dispose",
    }


def test_the_package_is_typed() -> None:
    assert (Path(corral.__file__).parent / "py.typed").is_file()


def test_it_depends_on_nothing_but_the_standard_library() -> None:
    """In an interpreter that sees no installed package: the seam, and every module of it, can be imported."""
    modules = [f"corral.{module.name}" for module in pkgutil.iter_modules(corral.__path__)]
    root = Path(corral.__file__).parent.parent
    program = f"import sys; sys.path.insert(0, {str(root)!r}); import corral, {', '.join(modules)}"
    subprocess.run([sys.executable, "-I", "-S", "-W", "error", "-c", program], check=True, timeout=30)
