"""Values of options: durations and environment assignments."""

from __future__ import annotations

import re
from typing import Final

_DURATION: Final = re.compile(r"([0-9]+(?:\.[0-9]*)?|\.[0-9]+)(ms|s|m|h)?")
_UNITS_MS: Final = {"ms": 1, "s": 1_000, "m": 60_000, "h": 3_600_000}

LONGEST_MS: Final = 2**31 - 1
"""The longest time limit, a little under 25 days: what a signed 32-bit count of milliseconds holds."""


def parse_duration(text: str) -> int:
    """Milliseconds of `500ms`, `5s`, `2m`, `1h`, `1.5h`; a plain number is seconds.

    `ValueError` for anything else, for less than a millisecond and for more than `LONGEST_MS`.
    """
    match = _DURATION.fullmatch(text.strip())
    if match is None:
        msg = f"{text!r} is not a duration; write it like 500ms, 5s, 2m or 1h (a plain number is seconds)"
        raise ValueError(msg)
    number, unit = match.groups()
    ms = float(number) * _UNITS_MS[unit or "s"]
    if ms < 1:
        msg = f"{text!r} is less than a millisecond; leave the option out for no limit"
        raise ValueError(msg)
    if ms > LONGEST_MS:
        msg = f"{text!r} is too long; the most is {LONGEST_MS}ms (596h); leave the option out for no limit"
        raise ValueError(msg)
    return round(ms)


def format_duration(ms: int) -> str:
    """The shortest exact form: 5000 is `5s`, 90000 is `90s`, 120000 is `2m`, 1500 is `1500ms`."""
    for unit in ("h", "m", "s"):
        if ms % _UNITS_MS[unit] == 0:
            return f"{ms // _UNITS_MS[unit]}{unit}"
    return f"{ms}ms"


def parse_assignment(text: str) -> tuple[str, str]:
    """`("K", "V=1")` of `K=V=1`. `ValueError` when there is no `=` or no name before it."""
    name, equals, value = text.partition("=")
    if not equals:
        msg = f"{text!r} has no '='; write NAME=VALUE"
        raise ValueError(msg)
    if not name:
        msg = f"{text!r} has no name before the '='; write NAME=VALUE"
        raise ValueError(msg)
    return name, value
