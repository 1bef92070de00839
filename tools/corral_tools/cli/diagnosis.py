"""`corral doctor`: which backends are checked, each in a process of its own, and how it is told."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, cast

from corral import ConfigError, backends, load_config
from corral_tools.cli import exits
from corral_tools.cli.checkup import GRACE, STEPS, Subject
from corral_tools.cli.exits import CliError
from corral_tools.cli.machine import machine_facts

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from corral_tools.cli.machine import Json

SCHEMA: Final = 1

_PROGRAM: Final = (
    "import json, sys\n"
    "sys.path[:] = json.loads(sys.argv.pop(1))\n"
    "from corral_tools.cli.checkup import main\n"
    "main()\n"
)
"""With the path of this process: the child finds what we would find, and nothing in the current directory."""

_COLORS: Final = {"ok": "green", "failed": "bold red", "not checked": "yellow"}


@dataclass(slots=True, kw_only=True)
class Examined:
    """One backend, and what has been found about it."""

    subject: Subject
    steps: list[Mapping[str, Json]] = field(default_factory=list["Mapping[str, Json]"])

    @property
    def outcome(self) -> str:
        outcomes = {str(step["step"]): step["outcome"] for step in self.steps}
        if "failed" in outcomes.values():
            return "failed"
        return "ok" if outcomes.get("run") == "ok" else "not checked"

    def document(self) -> Mapping[str, Json]:
        info = backends().get(self.subject.backend)
        return {
            "name": self.subject.backend,
            "entry": self.subject.entry,
            "object": self.subject.backend if info is None else info.value,
            "distribution": None if info is None else info.distribution,
            "version": None if info is None else info.version,
            "outcome": self.outcome,
            "steps": self.steps,
        }


def diagnose(names: Sequence[str], config: str | None, *, seconds: float, as_json: bool) -> int:
    """Checks, tells, and returns the exit status. `CliError` for what is wrong with the question."""
    subjects = _subjects(names, config)
    facts = machine_facts()
    printer = _Printer(as_json=as_json)
    printer.machine(facts)
    found: list[Examined] = []
    for subject in subjects:
        examined = Examined(subject=subject)
        found.append(examined)
        printer.backend(examined)

        def told(step: Mapping[str, Json], steps: list[Mapping[str, Json]] = examined.steps) -> None:
            steps.append(step)
            printer.step(step)

        _examine(subject, seconds, told)
    failed = [each.subject.backend for each in found if each.outcome == "failed"]
    checked = [each for each in found if each.outcome != "not checked"]
    if as_json:
        documents = [each.document() for each in found]
        report = {"schema": SCHEMA, "ok": not failed, "machine": facts, "backends": documents}
        exits.write_out(json.dumps(report, indent=2).encode() + b"\n")
    if not checked:
        msg = "no backend could be checked without a configuration"
        raise CliError(msg, remedy="write one and name it with --config")
    return 1 if failed else 0


def _subjects(names: Sequence[str], config: str | None) -> Sequence[Subject]:
    installed = backends()
    if config is not None:
        try:
            entries = load_config(config)
        except ConfigError as error:
            raise CliError(str(error), remedy=error.remedy) from error
        for entry in entries:
            if ":" not in entry.name:
                _require(entry.name, installed, f"configuration {config}, entry {entry.id!r}: ")
        if not entries:
            msg = f"configuration {config}: there is no entry"
            raise CliError(msg, remedy="add one, with at least the name of a backend")
        return [Subject(entry.name, config, entry.id) for entry in entries]
    for name in names:
        _require(name, installed, "")
    if not installed:
        msg = "no backend is installed"
        raise CliError(msg, remedy="pip install corral")
    return [Subject(name) for name in (dict.fromkeys(names) or installed)]


def _require(name: str, installed: Mapping[str, object], where: str) -> None:
    if name in installed:
        return
    import difflib  # noqa: PLC0415

    nearest = next(iter(difflib.get_close_matches(name, installed, n=1)), None)
    hint = f"did you mean {nearest!r}?" if nearest else f"installed are: {', '.join(installed) or 'none'}"
    msg = f"{where}unknown backend {name!r}; {hint}"
    raise CliError(msg)


# --- the process that checks


def _examine(subject: Subject, seconds: float, told: Callable[[Mapping[str, Json]], None]) -> None:
    """Tells of every step, the missing ones included, within `seconds` and a grace."""
    ours, theirs = socket.socketpair()
    with ours:
        with theirs:
            descriptor = theirs.fileno()
            words = (json.dumps(sys.path), str(descriptor), str(seconds), json.dumps(subject))
            process = subprocess.Popen(
                [sys.executable, "-P", "-c", _PROGRAM, *words],
                stdin=subprocess.DEVNULL,
                stdout=2,
                pass_fds=[descriptor],
                start_new_session=True,
            )
        missing = list(STEPS)
        current, ended = STEPS[0], False
        try:
            for message in _messages(ours, time.monotonic() + seconds + GRACE):
                if "trouble" in message:
                    remedy = message.get("remedy")
                    raise CliError(str(message["trouble"]), remedy=None if remedy is None else str(remedy))
                if "begin" in message:
                    current = str(message["begin"])
                elif "step" in message:
                    missing.remove(str(message["step"]))
                    told(message)
                else:
                    ended = True
        finally:
            ours.close()  # it has said what it had to, or is to end
            status = _end(process)
        if ended:
            return
        why = f"the process that checked it ended with {status}"
        if status is None:
            why = f"it has blocked the process that checked it, which was killed after {seconds + GRACE:g} s"
        for step in missing:
            outcome = "failed" if step == current else "not checked"
            told(_step(step, outcome, why if step == current else f"the step {current!r} did not end"))


def _messages(connection: socket.socket, deadline: float) -> Iterator[Mapping[str, Json]]:
    """What the other end says until its end or ours; nothing of it is later than the deadline."""
    buffer = b""
    while (left := deadline - time.monotonic()) > 0:
        connection.settimeout(left)
        try:
            data = connection.recv(65_536)
        except (TimeoutError, ConnectionResetError):
            return
        if not data:
            return
        *lines, buffer = (buffer + data).split(b"\n")
        for line in lines:
            yield cast("Mapping[str, Json]", json.loads(line))


def _end(process: subprocess.Popen[bytes]) -> str | None:
    """How it ended; None when it had to be ended."""
    try:
        status = process.wait(1)
    except subprocess.TimeoutExpired:
        # It leads a group, in which there may be what it started.
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        return None
    return f"signal {-status}" if status < 0 else f"status {status}"


def _step(step: str, outcome: str, evidence: str) -> Mapping[str, Json]:
    return {
        "step": step,
        "outcome": outcome,
        "evidence": evidence,
        "remedy": None,
        "stage": None,
        "retryable": None,
        "duration_ms": None,
    }


# --- for people


class _Printer:
    """A line for each fact and step, as soon as it is known; colours on a terminal. Nothing for JSON."""

    def __init__(self, *, as_json: bool) -> None:
        self._silent = as_json
        self._console = None
        if not as_json and sys.stdout.isatty():
            from rich.console import Console  # noqa: PLC0415  # slow, and only for people

            self._console = Console(highlight=False)

    def machine(self, facts: Mapping[str, Json]) -> None:
        self._line("machine", style="bold")
        for name, value in facts.items():
            for text in _shown(value):
                self._line(f"  {name.replace('_', ' '):<21}{text}")

    def backend(self, examined: Examined) -> None:
        subject = examined.subject
        self._line("")
        self._line(subject.backend + (f" (entry {subject.entry!r})" if subject.entry else ""), style="bold")

    def step(self, step: Mapping[str, Json]) -> None:
        outcome = str(step["outcome"])
        self._line(f"  {outcome:<13}{step['step']:<11}{step['evidence']}", style=_COLORS.get(outcome))
        if outcome == "failed" and step["stage"] is not None:
            retry = {True: "yes", False: "no"}.get(cast("bool", step["retryable"]), "not known")
            self._line(f"  {'':<24}stage: {step['stage']}; may work when tried again: {retry}")
        if step["remedy"]:
            self._line(f"  {'':<24}remedy: {step['remedy']}")

    def _line(self, text: str, *, style: str | None = None) -> None:
        if self._silent:
            return
        if self._console is None:
            data = text.encode("utf-8", "backslashreplace") + b"\n"
            exits.write_out(data)
            return
        from rich.text import Text  # noqa: PLC0415

        # Text: what a third party says is not markup.
        self._console.print(Text(text, style=style or ""), soft_wrap=True)


def _shown(value: Json) -> Sequence[str]:
    """The value as lines of text."""
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [text for each in value for text in _shown(each)] or ["none"]
    if isinstance(value, Mapping):
        fields = value.items()
        return [", ".join(f"{k.replace('_', ' ')} {_word(v)}" for k, v in fields if v is not None)]
    return [_word(value)]


def _word(value: Json) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "none" if value is None else exits.one_line(str(value))
