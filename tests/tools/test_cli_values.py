"""What options accept, and what `corral` makes of values and messages."""

from __future__ import annotations

import pytest

from corral_tools.cli.exits import CliError, as_bytes, explain, one_line, status_of
from corral_tools.cli.values import LONGEST_MS, format_duration, parse_assignment, parse_duration


@pytest.mark.parametrize(
    ("text", "ms"),
    [
        ("500ms", 500),
        ("5s", 5_000),
        ("2m", 120_000),
        ("1h", 3_600_000),
        ("5", 5_000),
        ("0.5", 500),
        (".5s", 500),
        ("1.5h", 5_400_000),
        ("1ms", 1),
        ("0.001", 1),
        ("1.1s", 1_100),
        (f"{LONGEST_MS}ms", LONGEST_MS),
    ],
)
def test_durations(text: str, ms: int) -> None:
    assert parse_duration(text) == ms


@pytest.mark.parametrize(
    "text",
    [
        "",
        "5x",
        "s",
        "5 s",
        "-1",
        "-1s",
        "0",
        "0ms",
        "0.4ms",
        "nan",
        "inf",
        "1e3",
        "5S",
        "\u0661s",
        "9" * 400,
        "597h",
    ],
)
def test_durations_that_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"\A'.*' is "):
        parse_duration(text)


@pytest.mark.parametrize(
    ("ms", "text"), [(500, "500ms"), (5_000, "5s"), (90_000, "90s"), (120_000, "2m"), (7_200_000, "2h")]
)
def test_durations_are_shown_short_and_exact(ms: int, text: str) -> None:
    assert format_duration(ms) == text
    assert parse_duration(text) == ms


@pytest.mark.parametrize(
    ("text", "pair"),
    [("A=b", ("A", "b")), ("A=", ("A", "")), ("A=b=c", ("A", "b=c")), ("a b= ", ("a b", " "))],
)
def test_assignments(text: str, pair: tuple[str, str]) -> None:
    assert parse_assignment(text) == pair


@pytest.mark.parametrize("text", ["A", "", "=b"])
def test_assignments_that_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="write NAME=VALUE"):
        parse_assignment(text)


@pytest.mark.parametrize(
    ("exit_code", "name", "status"),
    [
        (0, None, 0),
        (255, None, 255),
        (None, "SIGKILL", 137),
        (None, "SIGTERM", 143),
        (None, "SIGRTMIN", 162),
        (None, "SIGRTMIN+2", 164),
        (None, "SIGNOSUCH", 125),
        (None, None, 125),
    ],
)
def test_statuses(exit_code: int | None, name: str | None, status: int) -> None:
    assert status_of(exit_code, name) == status


def test_a_message_is_one_line_whatever_it_quotes() -> None:
    assert one_line("a\n b\r\tc\x1b[31m\x9b") == r"a b c\x1b[31m\x9b"


def test_reason_and_remedy() -> None:
    assert explain(CliError("it broke", remedy="Mend it.\nSoon.")) == "it broke; mend it. Soon"
    assert explain(CliError("it broke", remedy="API keys help.")) == "it broke; API keys help"
    assert explain(CliError("it broke")) == "it broke"


def test_a_path_that_is_not_utf8_comes_out_as_its_bytes() -> None:
    assert as_bytes("no \udcff") == b"corral: no \xff\n"
    assert as_bytes("no \ud800") == b"corral: no \\ud800\n"
