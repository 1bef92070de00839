from __future__ import annotations

from datetime import UTC, datetime, timedelta, timezone
from pathlib import PurePosixPath

import pytest

from corral import BashTask, BashTaskId, EndReason, PlaceLostError, TaskRecord, TaskStatus

AT = datetime(2024, 1, 2, 3, 4, 5, tzinfo=UTC)
FIELDS = (
    "id", "command", "workdir", "started_at", "status", "exit_code", "signal", "reason", "ended_at", "error",
)  # fmt: skip


def make() -> TaskRecord:
    return TaskRecord(task_id=BashTaskId("id-1"), command="sleep 1", workdir=PurePosixPath("/w"))


def state(task: BashTask) -> dict[str, object]:
    return {name: getattr(task, name) for name in FIELDS}


def test_a_new_task_runs_although_it_has_not_been_started() -> None:
    record = make()
    assert record.task is record.task
    assert state(record.task) == {
        "id": "id-1",
        "command": "sleep 1",
        "workdir": PurePosixPath("/w"),
        "started_at": None,
        "status": TaskStatus.RUNNING,
        "exit_code": None,
        "signal": None,
        "reason": None,
        "ended_at": None,
        "error": None,
    }


def test_the_view_follows_the_record() -> None:
    record = make()
    task = record.task
    record.started(AT)
    assert (task.status, task.started_at) == (TaskStatus.RUNNING, AT)
    end = AT + timedelta(seconds=1)
    record.finished(exit_code=3, signal=None, reason=EndReason.EXITED, at=end)
    assert (task.status, task.exit_code, task.signal) == (TaskStatus.FINISHED, 3, None)
    assert (task.reason, task.ended_at, task.error) == (EndReason.EXITED, end, None)


@pytest.mark.parametrize(
    ("exit_code", "signal", "reason"),
    [
        (0, None, EndReason.KILLED),
        (None, "SIGKILL", EndReason.SIGNALLED),
        (None, None, EndReason.DISPOSED),
    ],
)
def test_ends(exit_code: int | None, signal: str | None, reason: EndReason) -> None:
    record = make()
    record.started()
    record.finished(exit_code=exit_code, signal=signal, reason=reason)
    task = record.task
    assert (task.exit_code, task.signal, task.reason) == (exit_code, signal, reason)


@pytest.mark.parametrize("was_started", [False, True])
def test_a_failed_task_has_an_error(was_started: bool) -> None:
    record = make()
    if was_started:
        record.started(AT)
    error = PlaceLostError("gone")
    record.failed(error=error, reason=EndReason.LOST, at=AT)
    task = record.task
    assert task.status is TaskStatus.FAILED
    assert task.error is error
    assert (task.started_at is not None) == was_started
    assert (task.reason, task.ended_at, task.exit_code, task.signal) == (EndReason.LOST, AT, None, None)


@pytest.mark.parametrize("first", ["finished", "failed"])
@pytest.mark.parametrize("second", ["started", "finished", "failed"])
def test_a_final_status_comes_once(first: str, second: str) -> None:
    record = make()
    moves = {
        "started": lambda: record.started(AT),
        "finished": lambda: record.finished(exit_code=1, signal=None, reason=EndReason.EXITED),
        "failed": lambda: record.failed(error=PlaceLostError("gone")),
    }
    record.started()
    moves[first]()
    before = state(record.task)
    with pytest.raises(RuntimeError, match="already ended"):
        moves[second]()
    assert state(record.task) == before


def test_it_starts_once() -> None:
    record = make()
    record.started(AT)
    with pytest.raises(RuntimeError, match="twice"):
        record.started()
    assert record.task.started_at == AT


def test_what_never_ran_has_not_finished() -> None:
    record = make()
    with pytest.raises(RuntimeError, match="before started"):
        record.finished(exit_code=0, signal=None, reason=EndReason.EXITED)
    assert record.task.status is TaskStatus.RUNNING


def test_an_exit_code_excludes_a_signal() -> None:
    record = make()
    record.started()
    with pytest.raises(ValueError, match="exclude"):
        record.finished(exit_code=137, signal="SIGKILL", reason=EndReason.KILLED)
    assert record.task.status is TaskStatus.RUNNING


def test_times_are_utc_and_now_when_left_out() -> None:
    record = make()
    elsewhere = timezone(timedelta(hours=5))
    record.started(AT.astimezone(elsewhere))
    assert record.task.started_at == AT
    assert record.task.started_at.tzinfo is UTC
    before = datetime.now(UTC)
    record.finished(exit_code=0, signal=None, reason=EndReason.EXITED)
    assert record.task.ended_at is not None
    assert before <= record.task.ended_at <= datetime.now(UTC)


def test_a_time_without_a_zone_is_refused_and_changes_nothing() -> None:
    naive = AT.replace(tzinfo=None)
    record = make()
    with pytest.raises(ValueError, match="aware"):
        record.started(naive)
    record.started()
    with pytest.raises(ValueError, match="aware"):
        record.finished(exit_code=0, signal=None, reason=EndReason.EXITED, at=naive)
    with pytest.raises(ValueError, match="aware"):
        record.failed(error=PlaceLostError("gone"), at=naive)
    assert record.task.status is TaskStatus.RUNNING
    assert record.task.reason is None


def test_the_view_is_read_only_and_does_not_know_the_owner() -> None:
    task = make().task
    for name in FIELDS:
        with pytest.raises(AttributeError):
            setattr(task, name, None)
    with pytest.raises(AttributeError):
        task.extra = 1  # type: ignore[attr-defined]
    assert not hasattr(task, "owner")


def test_tasks_compare_by_identity() -> None:
    one, other = make(), make()
    assert one.task != other.task
    assert len({one.task, one.task, other.task}) == 2


def test_reprs_are_short() -> None:
    record = TaskRecord(task_id=BashTaskId("id-1"), command="x" * 100_000, workdir=PurePosixPath("/w"))
    assert repr(record.task).startswith("<BashTask id-1 running 'xxx")
    assert len(repr(record)) < 200
