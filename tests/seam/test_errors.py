from __future__ import annotations

import copy
import pickle
import sys
import traceback

import pytest

import corral
from corral import (
    AbortedBeforeStartError,
    BashTaskId,
    CollectedOutput,
    ConfigError,
    CorralError,
    DuplicateServiceError,
    ExecutorDisposedError,
    PlaceError,
    PlaceLostError,
    PlaceOpenError,
    ShellNotFoundError,
    SpawnError,
    UnknownTaskError,
    UnsupportedPlaceError,
    WorkdirError,
)

OUTPUT = CollectedOutput(data=b"part", total_bytes=4, dropped_bytes=0, spill_path=None, spill_start=0)

ERRORS: list[CorralError] = [
    CorralError("m", remedy="r"),
    PlaceError("m", stage="pull", remedy="r", retryable=True),
    PlaceOpenError("m", stage="connect", retryable=False),
    PlaceLostError("m", stdout=OUTPUT, stderr=None),
    UnsupportedPlaceError("m", remedy="r"),
    WorkdirError("m", workdir="/gone"),
    ShellNotFoundError("m"),
    SpawnError("m", errno=11, retryable=True),
    AbortedBeforeStartError(reason="why"),
    ExecutorDisposedError(),
    UnknownTaskError(BashTaskId("t-1")),
    ConfigError("m", entry="bash", key="timeout", suggestion="timeout_ms", remedy="r"),
    DuplicateServiceError("m"),
]


def by_name(error: CorralError) -> str:
    return type(error).__name__


def test_these_are_all() -> None:
    public = {
        value
        for name in corral.__all__
        if isinstance(value := getattr(corral, name), type) and issubclass(value, BaseException)
    }
    assert public == {type(error) for error in ERRORS}


def test_the_tree_is_the_one_that_is_drawn() -> None:
    module = corral.CorralError.__module__
    drawing = sys.modules[module].__doc__
    assert drawing is not None
    stack: list[str] = []
    drawn: dict[str, str] = {}
    for line in drawing.splitlines():
        name = next((word for word in line.split() if word.endswith("Error")), None)
        if name is None or not line.startswith("    ") or line.lstrip()[0] not in "│├└C":
            continue
        depth = (line.index(name) - 4) // 4
        del stack[depth:]
        if stack:
            drawn[name] = stack[-1]
        stack.append(name)
    actual = {
        type(error).__name__: next(b.__name__ for b in type(error).__bases__ if issubclass(b, CorralError))
        for error in ERRORS
        if type(error) is not CorralError
    }
    assert drawn == actual


@pytest.mark.parametrize("error", ERRORS, ids=by_name)
@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_they_survive_pickle(error: CorralError, protocol: int) -> None:
    again = pickle.loads(pickle.dumps(error, protocol))
    assert type(again) is type(error)
    assert str(again) == str(error)
    assert vars(again) == vars(error)


@pytest.mark.parametrize("error", ERRORS, ids=by_name)
def test_they_survive_copy(error: CorralError) -> None:
    again = copy.deepcopy(error)
    assert (type(again), str(again), vars(again)) == (type(error), str(error), vars(error))


@pytest.mark.parametrize("error", ERRORS, ids=by_name)
def test_they_say_something_in_one_line(error: CorralError) -> None:
    assert str(error)
    assert len(str(error).splitlines()) == 1


def test_line_breaks_in_a_message_become_spaces() -> None:
    assert str(PlaceOpenError("docker said:\nno such image\r\nreally")) == (
        "docker said: no such image really"
    )


def test_a_remedy_is_an_attribute_and_shows_in_the_traceback() -> None:
    error = UnsupportedPlaceError("no warden for riscv64", remedy="build one with cc -static")
    assert error.remedy == "build one with cc -static"
    assert "remedy" not in str(error).lower()
    shown = "".join(traceback.format_exception(error))
    assert shown.endswith("no warden for riscv64\nRemedy: build one with cc -static\n")
    assert not hasattr(CorralError("m"), "__notes__")


def test_what_callers_may_also_catch() -> None:
    assert issubclass(UnknownTaskError, LookupError)
    assert issubclass(ConfigError, ValueError)
    assert not issubclass(PlaceError, ValueError | LookupError | OSError)
    assert not issubclass(CorralError, OSError)


@pytest.mark.parametrize(
    ("error", "stage", "retryable"),
    [
        (PlaceError("m"), "place", None),
        (PlaceOpenError("m"), "open", None),
        (PlaceLostError("m"), "session", None),
        (UnsupportedPlaceError("m"), "open", False),
        (WorkdirError("m", workdir="/x"), "workdir", False),
        (ShellNotFoundError("m"), "shell", False),
        (SpawnError("m"), "spawn", None),
        (WorkdirError("m", workdir="/x", stage="chdir", retryable=True), "chdir", True),
        (SpawnError("m", stage="", retryable=True), "", True),
    ],
)
def test_stages_and_retries(error: PlaceError, stage: str, retryable: bool | None) -> None:
    assert (error.stage, error.retryable) == (stage, retryable)


def test_the_reason_of_an_abort_is_told() -> None:
    cause = TimeoutError("too late")
    error = AbortedBeforeStartError(reason=cause)
    assert error.reason is cause
    assert str(error).endswith("nothing was run: too late")
    assert str(AbortedBeforeStartError()) == "aborted before the command was started; nothing was run"


def test_an_unknown_task_is_named_readably() -> None:
    error = UnknownTaskError(BashTaskId("x\ny"))
    assert error.task_id == "x\ny"
    assert str(error).startswith(r"unknown task 'x\ny': ")
