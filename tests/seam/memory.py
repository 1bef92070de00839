"""An executor without processes, for what `BashExecutor` itself does."""

from __future__ import annotations

import asyncio
import itertools
from pathlib import PurePath, PurePosixPath
from typing import TYPE_CHECKING

from corral import (
    BashExecRequest,
    BashExecSpec,
    BashExecutor,
    BashRunResult,
    BashTask,
    BashTaskId,
    BashTaskRead,
    CollectedOutput,
    EndReason,
    OwnerToken,
    StreamRead,
    TaskRecord,
    UnknownTaskError,
    require_spec,
    resolve_request,
)

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

NOTHING = CollectedOutput(data=b"", total_bytes=0, dropped_bytes=0, spill_path=None, spill_start=0)


class MemoryExecutor(BashExecutor):
    """Tasks run until `end` is called. `disposal_gate`, when given, is what `_dispose` waits for."""

    def __init__(self, *, disposal_error: Exception | None = None) -> None:
        super().__init__()
        self.disposal_error = disposal_error
        self.disposal_gate: asyncio.Event | None = None
        self.disposals = 0
        self._ids = itertools.count(1)
        self._records: dict[BashTaskId, TaskRecord] = {}
        self._owners: dict[BashTaskId, OwnerToken | None] = {}

    def end(self, task: BashTask, reason: EndReason = EndReason.EXITED) -> None:
        exited = reason is EndReason.EXITED
        self._records[task.id].finished(
            exit_code=0 if exited else None, signal=None if exited else "SIGTERM", reason=reason
        )
        self.notify_task_done(task)

    def resolve(self, request: BashExecRequest) -> BashExecSpec:
        return resolve_request(
            request, workdir=PurePosixPath("/work"), timeout_ms=120_000, max_timeout_ms=600_000
        )

    async def run(self, spec: BashExecSpec) -> BashRunResult:
        self._check_open("run")
        spec = require_spec(spec)
        return BashRunResult(
            exit_code=0,
            signal=None,
            timed_out=False,
            aborted=False,
            timeout_ms=spec.timeout_ms,
            stdout=NOTHING,
            stderr=NOTHING,
            duration_ms=0.0,
            reason=EndReason.EXITED,
            survivors=0,
        )

    def start(self, spec: BashExecSpec) -> BashTask:
        self._check_open("start")
        spec = require_spec(spec, "start")
        task_id = BashTaskId(f"task-{next(self._ids)}")
        record = TaskRecord(task_id=task_id, command=spec.command, workdir=spec.workdir)
        record.started()
        self._records[task_id] = record
        self._owners[task_id] = spec.owner
        return record.task

    def get(self, task_id: BashTaskId) -> BashTask | None:
        self._check_usable("get")
        record = self._records.get(task_id)
        return None if record is None else record.task

    def list(self) -> Sequence[BashTask]:
        self._check_usable("list")
        return [record.task for record in self._records.values()]

    def owner_of(self, task_id: BashTaskId) -> OwnerToken | None:
        self._check_usable("owner_of")
        return self._owners.get(task_id)

    def read_output(self, task_id: BashTaskId) -> BashTaskRead:
        self._check_usable("read_output")
        if task_id not in self._records:
            raise UnknownTaskError(task_id)
        nothing = StreamRead(
            data=b"", text="", start=0, end=0, dropped_bytes=0, spill_path=None, spill_start=0
        )
        return BashTaskRead(
            stdout=nothing, stderr=nothing, lossy=False, status=self._records[task_id].task.status
        )

    def kill(self, task_id: BashTaskId) -> bool:
        self._check_usable("kill")
        if task_id not in self._records:
            raise UnknownTaskError(task_id)
        task = self._records[task_id].task
        if task.reason is not None:
            return False
        self.end(task, EndReason.KILLED)
        return True

    async def fetch(self, path: str | PurePath, *, start: int = 0) -> AsyncIterator[bytes]:
        self._check_open("fetch")
        yield str(path).encode()[start:]

    async def _dispose(self) -> None:
        self.disposals += 1
        if self.disposal_gate is not None:
            await self.disposal_gate.wait()
        for record in self._records.values():
            if record.task.reason is None:
                self.end(record.task, EndReason.DISPOSED)
        if self.disposal_error is not None:
            raise self.disposal_error
