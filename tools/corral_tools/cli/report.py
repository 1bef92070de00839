"""`corral run --json`: one object on standard output. The schema is in the help of `corral run`."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from corral_tools.cli import exits
from corral_tools.cli.exits import CliError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from corral import BashRunResult, CollectedOutput, CorralError

    Json = str | int | float | bool | None | Mapping[str, "Json"]


def result_document(result: BashRunResult, *, backend: str, timeout_ms: int | None) -> Mapping[str, Json]:
    """`timeout_ms` is the limit that applied, None when there was none."""
    return {
        "exit_code": result.exit_code,
        "signal": result.signal,
        "reason": str(result.reason),
        "timed_out": result.timed_out,
        "aborted": result.aborted,
        "timeout_ms": timeout_ms,
        "duration_ms": round(result.duration_ms, 3),
        "survivors": result.survivors,
        "stdout": _output(result.stdout),
        "stderr": _output(result.stderr),
        "backend": backend,
    }


def _output(output: CollectedOutput) -> Mapping[str, Json]:
    return {
        "text": output.text,
        "total_bytes": output.total_bytes,
        "dropped_bytes": output.dropped_bytes,
        "truncated": output.truncated,
        # The file goes with the executor, which is gone by the time somebody reads this.
        "spill_path": None,
        "spill_start": None,
    }


def failure_document(error: CorralError | CliError) -> Mapping[str, Json]:
    """The error, and the partial output if it has any. `type` is its class; what we wrap keeps its own."""
    told = error.__cause__ if isinstance(error, CliError) and error.__cause__ is not None else error
    document = error_document(
        type(told).__name__,
        str(error),
        stage=getattr(error, "stage", None),
        remedy=error.remedy,
        retryable=getattr(error, "retryable", None),
    )
    partial: dict[str, CollectedOutput | None] = {n: getattr(error, n, None) for n in ("stdout", "stderr")}
    return {**document, **{name: _output(output) for name, output in partial.items() if output is not None}}


def error_document(
    kind: str,
    message: str,
    *,
    stage: str | None = None,
    remedy: str | None = None,
    retryable: bool | None = None,
) -> Mapping[str, Json]:
    return {
        "error": {"type": kind, "message": message, "stage": stage, "remedy": remedy, "retryable": retryable}
    }


def write_document(document: Mapping[str, Json]) -> None:
    """Writes the object and a line break to standard output, as UTF-8.

    Lone surrogates (a path that is not UTF-8) become JSON escapes. Raises `CliError` or `BrokenPipeError`.
    """
    text = json.dumps(document, ensure_ascii=False)
    exits.write_out(text.encode("utf-8", "backslashreplace") + b"\n")
