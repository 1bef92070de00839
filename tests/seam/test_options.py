"""From an entry to an executor, and from a configuration to a context."""

from __future__ import annotations

import asyncio
import sys
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, cast

import pytest

from corral import (
    BashExecRequest,
    ConfigEntry,
    ConfigError,
    DuplicateServiceError,
    make_executor,
    open_context,
)
from corral_backends.places.local import LocalExecutor
from tests.seam.factories import Mode, Plain, Recorder
from tests.seam.memory import MemoryExecutor
from tests.support.aio import run

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

HERE = "tests.seam.factories"
SECRET = "hunter2"


def entry(name: str, **config: object) -> ConfigEntry:
    return ConfigEntry(
        id="mine", name=name if name == "local" or ":" in name else f"{HERE}:{name}", config=config
    )


def made(name: str, **config: object) -> Mapping[str, object]:
    """What the factory of this name was given."""
    return cast("Recorder", make_executor(entry(name, **config))).given


def refused(name: str, **config: object) -> ConfigError:
    """The one error for this entry. It names the entry, and shows no secret, also not as its cause."""
    with pytest.raises(ConfigError) as caught:
        make_executor(entry(name, **config))
    assert str(caught.value).startswith("entry 'mine': ")
    assert caught.value.entry == "mine"
    assert SECRET not in "".join(traceback.format_exception(caught.value))
    return caught.value


# --- names of options


@pytest.mark.parametrize("key", ["timeout_ms", "timeoutMs"])
def test_both_spellings(key: str) -> None:
    executor = make_executor(entry("local", **{key: 5}))
    assert executor.resolve(BashExecRequest(command="true")).timeout_ms == 5


@pytest.mark.parametrize("key", ["cwd", "workdir"])
def test_cwd_is_the_workdir(key: str, tmp_path: Path) -> None:
    executor = make_executor(entry("local", **{key: str(tmp_path)}))
    assert Path(executor.resolve(BashExecRequest(command="true")).workdir) == tmp_path


def test_an_option_may_be_given_once() -> None:
    for first, second in (("timeout_ms", "timeoutMs"), ("cwd", "workdir")):
        error = refused("local", **{first: 5, second: 6})
        assert f"{second!r} and {first!r} are the same option" in str(error)
        assert error.key == second


@pytest.mark.parametrize(
    ("key", "suggestion"),
    [
        ("timout_ms", "timeout_ms"),
        ("timoutMs", "timeout_ms"),
        ("killGrace", "kill_grace_ms"),
        ("Shell", "shell"),
        ("TIMEOUT_MS", "timeout_ms"),
        ("timeoutMS", "timeout_ms"),
    ],
)
def test_unknown_options(key: str, suggestion: str) -> None:
    error = refused("local", **{key: SECRET})
    assert (error.key, error.suggestion) == (key, suggestion)
    assert f"unknown key {key!r}; did you mean {suggestion!r}?" in str(error)


def test_an_unknown_option_that_is_like_none() -> None:
    error = refused("local", zzzzzz=1)
    assert "known are: env, env_inherit, kill_grace_ms" in str(error)
    assert error.suggestion is None
    assert len(str(refused("local", **{"x" * 100_000: 1}))) < 1_000


# --- types and values


@pytest.mark.parametrize(
    ("key", "value", "says"),
    [
        ("timeout_ms", "60000", "of type str: input should be a valid integer"),
        ("timeout_ms", 5.5, "of type float"),
        ("timeout_ms", 5.0, "of type float"),
        ("timeout_ms", True, "of type bool"),
        ("timeout_ms", None, "is null: input should be a valid integer"),
        ("timeoutMs", [SECRET], "timeoutMs is of type list"),
        ("workdir", 7, "of type int"),
        ("env", SECRET, "of type str"),
        ("env", {"TOKEN": 112358}, "of type dict, at TOKEN: input should be a valid string"),
        ("env", [SECRET], "of type list"),
        ("env_inherit", SECRET, "of type str: input should be a valid boolean or"),
        ("spill_dir", False, "of type bool"),
    ],
)
def test_wrong_types(key: str, value: object, says: str) -> None:
    error = refused("local", **{key: value})
    assert says in str(error)
    assert "112358" not in str(error)
    assert error.key == key


@pytest.mark.parametrize(
    ("key", "value", "says"),
    [
        ("timeoutMs", 0, "timeout_ms must be from 1"),
        ("max_output_bytes", 1 << 40, "max_output_bytes must be from 1 to 16777216"),
        ("spillDir", "relative", "spill_dir must be an absolute path"),
        ("env", {"BASH_ENV": "x"}, "BASH_ENV"),
    ],
)
def test_what_the_constructor_refuses(key: str, value: object, says: str) -> None:
    error = refused("local", **{key: value})
    assert says in str(error)
    assert error.key == key
    assert isinstance(error.__cause__, ValueError)


def test_a_value_that_a_third_party_refuses() -> None:
    error = refused("Checked", limit=0)
    assert "limit must be at least 1" in str(error)
    assert error.key == "limit"


def test_what_a_file_can_write_of_other_types(tmp_path: Path) -> None:
    given = made(
        "typed", keyFile=str(tmp_path), mode="fast", ports=[1, 2], limits={"a": 1}, json="x", model_config="y"
    )
    assert given["key_file"] == tmp_path
    assert given["mode"] is Mode.FAST
    assert given["ports"] == (1, 2)
    assert given["limits"] == {"a": 1}
    # And what a program can.
    given = made("typed", key_file=tmp_path, mode=Mode.FAST, ports=(3,))
    assert (given["key_file"], given["ports"]) == (tmp_path, (3,))


@pytest.mark.parametrize(
    ("key", "value"),
    [("key_file", 7), ("mode", "slow"), ("ports", ["1"]), ("ports", 1), ("limits", {"a": "1"}), ("json", 1)],
)
def test_but_nothing_else(key: str, value: object) -> None:
    assert refused("typed", **{key: value}).key == key


def test_a_value_that_is_exponentially_large() -> None:
    value: object = [1]
    for _ in range(60):
        value = [value, value]
    assert refused("typed", ports=value).key == "ports"


# --- factories


def test_a_class_without_annotations() -> None:
    executor = make_executor(entry("Plain", host="acme"))
    assert cast("Plain", executor).given == {"host": "acme", "port": 22}
    assert "the option 'host' is missing" in str(refused("Plain", port=1))
    assert refused("Plain", host="acme", prt=1).suggestion == "port"


def test_a_factory_that_takes_anything() -> None:
    assert made("recorded", anythingAtAll=1, cwd="/x") == {"anythingAtAll": 1, "cwd": "/x"}


def test_options_of_a_typed_dict() -> None:
    assert made("unpacked", host="acme") == {"host": "acme"}
    assert refused("unpacked", port=1).key == "host"
    assert refused("unpacked", host="acme", port="1").key == "port"
    assert refused("unpacked", host="acme", prot=1).suggestion == "port"


def test_annotations_that_only_type_checkers_know() -> None:
    """They cannot be checked; the others are."""
    assert made("for_type_checkers", token="x", session=5) == {"token": "x", "session": 5}
    assert refused("for_type_checkers", token=5).key == "token"
    assert made("generic", value=[1]) == {"value": [1]}


def test_objects_that_can_be_called() -> None:
    assert made("partial", port=1) == {"host": "fixed", "port": 1}
    assert refused("partial", port="1").key == "port"
    assert made("maker", port=1) == {"port": 1}
    assert refused("maker", port="1").key == "port"
    assert "'port' is missing" in str(refused("maker"))


def test_positions() -> None:
    assert made("mixed", host="acme") == {"host": "acme", "port": 22}
    error = refused("positional", port=1)
    assert "takes 'host' by position only" in str(error)
    assert error.key == "name"


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("nothing", "made a value of type NoneType, which is no BashExecutor"),
        ("coroutine", "made a value of type coroutine"),
        ("Abstract", "abstract"),
        ("number", "is no class of executors and no function"),
        ("Mode", "is no class of executors and no function"),
        ("nosuch", "cannot be imported: AttributeError"),
        ("tests.nosuch:Executor", "cannot be imported: ModuleNotFoundError"),
        ("a:b:c", "neither the name of a backend nor of the form"),
        (":", "neither the name of a backend nor of the form"),
        ("../../etc:passwd", "neither the name of a backend nor of the form"),
    ],
)
def test_names_that_make_no_executor(name: str, says: str) -> None:
    error = refused(name)
    assert says in str(error)
    if name != "Abstract":
        assert error.key == "name"


def test_a_module_that_ends_the_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "acme_exits.py").write_text("import sys; sys.exit('please set ACME_HOME')")
    monkeypatch.syspath_prepend(tmp_path)
    assert "SystemExit: please set ACME_HOME" in str(refused("acme_exits:Executor"))
    assert "acme_exits" not in sys.modules


def test_an_unknown_backend() -> None:
    with pytest.raises(
        ConfigError, match="entry 'mine': unknown backend 'locla'; did you mean 'local'"
    ) as caught:
        make_executor(ConfigEntry(id="mine", name="locla"))
    assert (caught.value.key, caught.value.suggestion) == ("name", "local")


def test_other_errors_of_a_factory_come_as_they_are() -> None:
    with pytest.raises(LookupError, match="no account"):
        make_executor(entry("broken"))


def test_defaults_yield_to_the_entry() -> None:
    executor = make_executor(entry("local", timeoutMs=5), timeout_ms=7, max_timeout_ms=9, nosuch=1)
    assert executor.resolve(BashExecRequest(command="true")).timeout_ms == 5
    assert executor.resolve(BashExecRequest(command="true", timeout_ms=10)).timeout_ms == 9


# --- contexts


async def program(source: str | Path | Sequence[object]) -> tuple[str, int | None]:
    """Knows of no backend."""
    async with open_context(source) as context:
        bash = context.bash
        heard: list[str] = []
        with_scope = context.scope("consumer")
        with_scope.on_task_done(lambda task: heard.append(task.id))
        result = await bash.run(bash.resolve(BashExecRequest(command="exit 0")))
        task = bash.start(bash.resolve(BashExecRequest(command="sleep 600")))
        assert bash.kill(task.id)
        async with asyncio.timeout(10):
            while not heard:
                await asyncio.sleep(0.005)
        assert heard == [task.id]
    assert bash.disposed
    return type(bash).__name__, result.exit_code


@pytest.mark.backend("local")
def test_the_same_program_by_another_entry(tmp_path: Path) -> None:
    found: list[tuple[str, int | None]] = []
    for number, name in enumerate(["local", "tests.seam.memory:MemoryExecutor", f"{HERE}:recorded"]):
        file = tmp_path / f"{number}.yaml"
        file.write_text(f"- id: bash\n  name: {name}\n")
        found.append(run(program(file)))
    assert found == [("LocalExecutor", 0), ("MemoryExecutor", 0), ("Recorder", 0)]


def test_without_an_entry(tmp_path: Path) -> None:
    file = tmp_path / "empty.toml"
    file.write_text("entries = []")
    with pytest.raises(ConfigError, match=r"empty\.toml: there is no entry"):
        run(program(str(file)))


def test_two_executors() -> None:
    entries = [{"name": "local"}, {"id": "other", "name": "local"}]
    with pytest.raises(DuplicateServiceError, match="one executor, and here are 2 entries: 'local', 'other'"):
        run(program(entries))


def test_an_error_before_anything_is_opened() -> None:
    with pytest.raises(ConfigError, match="unknown backend"):
        run(program([{"name": "nosuch"}]))
    with pytest.raises(ConfigError, match="found a value of type int"):
        run(program(cast("list[object]", 7)))


def test_an_error_inside_disposes(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[MemoryExecutor] = []
    monkeypatch.setattr(f"{HERE}.recorded", lambda: made.append(MemoryExecutor()) or made[-1])

    async def scenario() -> None:
        async with open_context([{"name": f"{HERE}:recorded"}]):
            msg = "inside"
            raise LookupError(msg)

    with pytest.raises(LookupError, match="inside"):
        run(scenario())
    assert [executor.disposals for executor in made] == [1]


def test_an_entry_that_was_made_by_a_program() -> None:
    async def scenario() -> None:
        async with open_context([entry("local", timeout_ms=5)]) as context:
            assert isinstance(context.bash, LocalExecutor)

    run(scenario())
