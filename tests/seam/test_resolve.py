from __future__ import annotations

import dataclasses
import enum
import math
import os
import re
import resource
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import PurePath, PurePosixPath, PureWindowsPath

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from corral import AbortController, BashExecRequest, BashExecSpec, OwnerToken, require_spec, resolve_request

BASE = PurePosixPath("/base/dir")
MAX_STRING = 131_071
MAX_TOTAL = 6 * 1024 * 1024


def resolve(**fields: object) -> BashExecSpec:
    request = BashExecRequest(**{"command": "true", **fields})  # type: ignore[arg-type]
    return resolve_request(request, workdir=BASE, timeout_ms=120_000, max_timeout_ms=600_000)


def words(error: pytest.ExceptionInfo[Exception]) -> str:
    return str(error.value)


class TestDefaults:
    def test_what_is_left_out_is_filled_in(self) -> None:
        assert resolve(command="echo hi") == BashExecSpec(
            command="echo hi",
            workdir=BASE,
            timeout_ms=120_000,
            signal=None,
            owner=None,
            env={},
            stdin=None,
        )

    def test_what_is_given_is_carried(self) -> None:
        signal = AbortController().signal
        spec = resolve(
            command=" \t$x\r\n",
            workdir="/elsewhere",
            timeout_ms=5,
            signal=signal,
            owner=OwnerToken("me"),
            env={"A": "1", "b_2": ""},
            stdin=b"\0\xff",
        )
        assert spec.command == " \t$x\r\n"
        assert spec.workdir == PurePosixPath("/elsewhere")
        assert spec.timeout_ms == 5
        assert spec.signal is signal
        assert spec.owner == "me"
        assert dict(spec.env) == {"A": "1", "b_2": ""}
        assert spec.stdin == b"\0\xff"

    @given(
        st.fixed_dictionaries(
            {"command": st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]))},
            optional={
                "workdir": st.sampled_from(["a", "/a", PurePosixPath("b"), None]),
                "timeout_ms": st.one_of(st.none(), st.integers(1, 10**9)),
                "owner": st.one_of(st.none(), st.text()),
                "env": st.one_of(st.none(), st.dictionaries(st.sampled_from("ABC"), st.just("v"))),
                "stdin": st.one_of(st.none(), st.binary()),
            },
        )
    )
    def test_equal_requests_give_equal_specs(self, fields: dict[str, object]) -> None:
        assert resolve(**fields) == resolve(**fields)

    def test_the_environment_is_a_read_only_copy(self) -> None:
        env = {"A": "1"}
        spec = resolve(env=env)
        env["A"] = "2"
        assert dict(spec.env) == {"A": "1"}
        with pytest.raises(TypeError):
            spec.env["A"] = "3"  # type: ignore[index]
        assert dataclasses.replace(spec, timeout_ms=1).env == spec.env

    def test_specs_and_requests_do_not_show_secrets(self) -> None:
        fields = {"owner": "secret-1", "env": {"TOKEN": "secret-2"}, "stdin": b"secret-3"}
        request = BashExecRequest(command="true", **fields)  # type: ignore[arg-type]
        assert "secret" not in repr(request)
        assert "TOKEN" not in repr(request)
        assert "secret" not in repr(resolve(**fields))


class TestCommand:
    @pytest.mark.parametrize("command", [None, 7, b"true", ["true"]])
    def test_it_is_text(self, command: object) -> None:
        with pytest.raises(TypeError, match="command"):
            resolve(command=command)

    @pytest.mark.parametrize("command", ["\0", "echo\0", "a" * 1000 + "\0b"])
    def test_no_nul(self, command: str) -> None:
        with pytest.raises(ValueError, match="command contains a NUL"):
            resolve(command=command)

    @given(st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"])))
    @example("")
    @example("\ud7ff\ue000\U0010ffff\u2028\x85\r\n\\")
    def test_all_other_text_is_carried_unchanged(self, command: str) -> None:
        assert resolve(command=command).command == command

    @given(st.binary().filter(lambda data: b"\0" not in data))
    def test_any_bytes_can_be_given_as_python_decodes_them(self, data: bytes) -> None:
        command = data.decode("utf-8", "surrogateescape")
        assert resolve(command=command).command == command

    @pytest.mark.parametrize("surrogate", [0xD800, 0xDC7F, 0xDD00, 0xDFFF])
    def test_a_surrogate_that_stands_for_no_byte(self, surrogate: int) -> None:
        with pytest.raises(ValueError, match="command contains a lone surrogate at index 3"):
            resolve(command="abc" + chr(surrogate))


class TestTimeout:
    @pytest.mark.parametrize(
        ("asked", "got"),
        [(1, 1), (599_999, 599_999), (600_000, 600_000), (600_001, 600_000), (10**30, 600_000)],
    )
    def test_it_is_clamped_to_the_maximum(self, asked: int, got: int) -> None:
        assert resolve(timeout_ms=asked).timeout_ms == got

    def test_the_default_is_clamped_too(self) -> None:
        request = BashExecRequest(command="true")
        spec = resolve_request(request, workdir=BASE, timeout_ms=500, max_timeout_ms=100)
        assert spec.timeout_ms == 100

    @pytest.mark.parametrize(
        "bad",
        [0, -1, -(10**30), True, False, 1.0, 1.5, 0.0, math.nan, math.inf, -math.inf, "5", "", b"5", [5], 1j],
        ids=repr,
    )
    def test_anything_but_a_positive_integer(self, bad: object) -> None:
        with pytest.raises(ValueError, match="timeout_ms"):
            resolve(timeout_ms=bad)

    def test_a_member_of_an_int_enum_becomes_the_plain_number(self) -> None:
        class Limit(enum.IntEnum):
            SHORT = 500

        assert type(resolve(timeout_ms=Limit.SHORT).timeout_ms) is int


class TestWorkdir:
    @pytest.mark.parametrize(
        ("given_", "expected"),
        [
            (None, "/base/dir"),
            (".", "/base/dir"),
            ("sub", "/base/dir/sub"),
            ("sub/", "/base/dir/sub"),
            ("./a//b", "/base/dir/a/b"),
            ("..", "/base/dir/.."),
            ("../other", "/base/dir/../other"),
            ("a/../b", "/base/dir/a/../b"),
            ("/", "/"),
            ("/abs/x", "/abs/x"),
            ("/abs/../x", "/abs/../x"),
            ("~", "/base/dir/~"),
            (" ", "/base/dir/ "),
            ("a\nb", "/base/dir/a\nb"),
            (PurePosixPath("p"), "/base/dir/p"),
            (PurePath("/q"), "/q"),
            (PureWindowsPath("a\\b"), "/base/dir/a/b"),
            (os.fsdecode(b"caf\xe9"), "/base/dir/caf\udce9"),
        ],
    )
    def test_it_is_joined_by_posix_rules_and_otherwise_left_alone(
        self, given_: str | PurePath | None, expected: str
    ) -> None:
        workdir = resolve(workdir=given_).workdir
        assert str(workdir) == expected
        assert type(workdir) is PurePosixPath

    def test_the_default_of_a_place_whose_directory_is_not_known(self) -> None:
        request = BashExecRequest(command="true", workdir="sub")
        spec = resolve_request(request, workdir=PurePosixPath(), timeout_ms=1, max_timeout_ms=1)
        assert spec.workdir == PurePosixPath("sub")

    @pytest.mark.parametrize("bad", ["", "\0", "a\0b", "\ud800", PurePosixPath("a\0b")])
    def test_a_value_that_names_no_directory(self, bad: str | PurePath) -> None:
        with pytest.raises(ValueError, match="workdir"):
            resolve(workdir=bad)

    @pytest.mark.parametrize("bad", ["C:\\x", "C:x", "\\\\server\\share"])
    def test_a_windows_path_with_a_drive(self, bad: str) -> None:
        with pytest.raises(ValueError, match="workdir must be a POSIX path"):
            resolve(workdir=PureWindowsPath(bad))

    @pytest.mark.parametrize("bad", [b"/x", 7, ["/x"]])
    def test_a_wrong_type(self, bad: object) -> None:
        with pytest.raises(TypeError, match="workdir"):
            resolve(workdir=bad)


class TestOwner:
    @given(st.one_of(st.none(), st.text()))
    @example("")
    @example("\0\n\ud800")
    @example("x" * 1_000_000)
    def test_it_is_carried_verbatim(self, owner: str | None) -> None:
        assert resolve(owner=owner).owner == owner

    def test_empty_is_an_owner(self) -> None:
        assert resolve(owner="").owner is not None

    @pytest.mark.parametrize("bad", [b"me", 0, False, ("a",)])
    def test_a_wrong_type(self, bad: object) -> None:
        with pytest.raises(TypeError, match="owner"):
            resolve(owner=bad)


@pytest.mark.parametrize("bad", ["abort", 0, AbortController()])
def test_a_signal_of_a_wrong_type(bad: object) -> None:
    with pytest.raises(TypeError, match="signal"):
        resolve(signal=bad)


class TestEnv:
    @pytest.mark.parametrize("bad", [[("A", "1")], "A=1", 5, {"A"}])
    def test_it_is_a_mapping(self, bad: object) -> None:
        with pytest.raises(TypeError, match="env"):
            resolve(env=bad)

    @pytest.mark.parametrize("bad", [{1: "a"}, {b"A": "a"}, {None: "a"}, {"A": 1}, {"A": b"a"}, {"A": None}])
    def test_of_text_to_text(self, bad: object) -> None:
        with pytest.raises(TypeError, match="env"):
            resolve(env=bad)

    @pytest.mark.parametrize(
        "bad", [{"": "a"}, {"=": "a"}, {"A=B": "a"}, {"=A": "a"}, {"A\0": "a"}, {"A": "\0"}, {"A": "\ud800"}]
    )
    def test_names_and_values_that_cannot_be(self, bad: dict[str, str]) -> None:
        with pytest.raises(ValueError, match="env"):
            resolve(env=bad)

    @pytest.mark.parametrize(
        "name", ["BASH_ENV", "ENV", "SHELLOPTS", "BASHOPTS", "BASH_FUNC_ls%%", "BASH_FUNC_", "BASH_FUNC_x()"]
    )
    def test_what_changes_how_bash_starts(self, name: str) -> None:
        with pytest.raises(ValueError, match=re.escape(f"env: {name} changes")) as error:
            resolve(env={"OK": "1", name: "secret"})
        assert "secret" not in words(error)

    @pytest.mark.parametrize("name", ["env", "MY_ENV", "ENV2", "BASH_ENVX", "BASH", "PATH", "a b", "ä", "1"])
    def test_other_names_are_fine(self, name: str) -> None:
        assert resolve(env={name: "v"}).env == {name: "v"}

    def test_values_do_not_appear_in_errors(self) -> None:
        for env in ({"A": "secret\0"}, {"A": "secret\ud800"}, {"A=secret": ""}, {"A": "secret" * 30_000}):
            with pytest.raises(ValueError, match="env") as error:
                resolve(env=env)
            assert "secret" not in words(error)

    @pytest.mark.parametrize("filler", ["x", "ä", "\U0001f600", "\udc80"])
    def test_one_string_may_be_as_long_as_the_kernel_allows(self, filler: str) -> None:
        unit = len(filler.encode(errors="surrogateescape"))
        room = MAX_STRING - len("NAME=")
        value = filler * (room // unit) + "x" * (room % unit)
        assert resolve(env={"NAME": value}).env["NAME"] == value
        with pytest.raises(ValueError, match=f"env: NAME takes {MAX_STRING + 1} bytes"):
            resolve(env={"NAME": value + "x"})

    @pytest.mark.skipif(resource.getpagesize() != 4096, reason="the kernel allows 32 pages")
    def test_the_kernel_draws_the_line_there_too(self) -> None:
        """The bound on one string, asked of the kernel itself."""
        fits = "x" * (MAX_STRING - len("NAME="))
        subprocess.run(["/bin/true"], env={"NAME": fits}, check=True, timeout=10)
        with pytest.raises(OSError, match="Argument list too long"):
            subprocess.run(["/bin/true"], env={"NAME": fits + "x"}, check=False, timeout=10)

    def test_all_of_them_together(self) -> None:
        name = "NAME_{:03d}".format
        each = "x" * 100_000
        size = len(name(0)) + len("=") + len(each) + 1
        count = MAX_TOTAL // size
        env = {name(number): each for number in range(count)}
        rest = MAX_TOTAL - count * size
        env["R"] = "x" * (rest - len("R=") - 1)
        assert len(resolve(env=env).env) == count + 1
        env["R"] += "x"
        with pytest.raises(ValueError, match=f"env takes {MAX_TOTAL + 1} bytes"):
            resolve(env=env)

    def test_a_mapping_is_read_only_once(self) -> None:
        """One that changes between reads must not get past the checks."""

        class Changing(Mapping[str, str]):
            reads = 0

            def __getitem__(self, key: str) -> str:
                self.reads += 1
                return "fine" if self.reads == 1 else "\0"

            def __iter__(self) -> Iterator[str]:
                return iter(["A"])

            def __len__(self) -> int:
                return 1

        assert resolve(env=Changing()).env == {"A": "fine"}


class TestStdin:
    @pytest.mark.parametrize("given_", [b"", b"a\0b", bytearray(b"a\0b"), memoryview(b"a\0b")])
    def test_it_is_bytes_in_the_end(self, given_: bytes) -> None:
        stdin = resolve(stdin=given_).stdin
        assert stdin == bytes(given_)
        assert type(stdin) is bytes

    def test_what_can_change_is_copied(self) -> None:
        data = bytearray(b"before")
        spec = resolve(stdin=data)
        data[:] = b"after!"
        assert spec.stdin == b"before"

    def test_empty_is_not_left_out(self) -> None:
        assert resolve(stdin=b"").stdin == b""

    @pytest.mark.parametrize("bad", ["text", 3, [1, 2], object()])
    def test_a_wrong_type(self, bad: object) -> None:
        with pytest.raises(TypeError, match="stdin must be bytes"):
            resolve(stdin=bad)


class TestOnlySpecs:
    @pytest.mark.parametrize("bad", [None, "true", {"command": "true"}, resolve()])
    def test_only_a_request_is_resolved(self, bad: object) -> None:
        with pytest.raises(TypeError, match=f"BashExecRequest, not {type(bad).__name__}"):
            resolve_request(bad, workdir=BASE, timeout_ms=1, max_timeout_ms=1)  # type: ignore[arg-type]

    def test_only_a_spec_is_run(self) -> None:
        spec = resolve()
        assert require_spec(spec) is spec
        with pytest.raises(TypeError) as error:
            require_spec(BashExecRequest(command="true"))
        assert words(error) == "run() takes the BashExecSpec that resolve() returns, not BashExecRequest"

    def test_the_method_is_named(self) -> None:
        with pytest.raises(TypeError, match=r"^start\(\) takes .* not str$"):
            require_spec("true", "start")

    def test_a_spec_has_no_defaults(self) -> None:
        assert all(
            field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
            for field in dataclasses.fields(BashExecSpec)
        )

    def test_a_spec_made_by_hand_is_read_only_too(self) -> None:
        env = {"A": "1"}
        spec = BashExecSpec(
            command="true", workdir=BASE, timeout_ms=1, signal=None, owner=None, env=env, stdin=None
        )
        env.clear()
        assert spec.env == {"A": "1"}
