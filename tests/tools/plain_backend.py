"""A third party's backend, written against the public seam alone: subprocesses, a small memory, no spill.

It has none of the options that corral's own backends share: the command line must do without them.
`PlainExecutor(memory=N)` keeps N bytes per stream. The place of a `NeverReadyExecutor` never gets ready.
"""

from __future__ import annotations

import asyncio
import os
import signal
import uuid
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from corral import (
    AbortedBeforeStartError,
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
    from pathlib import PurePath


class _Buffer:
    def __init__(self, memory: int) -> None:
        self.memory = memory
        self.data = b""
        self.end = 0
        self.read_until = 0

    def add(self, data: bytes) -> None:
        self.data = (self.data + data)[-self.memory :]
        self.end += len(data)

    def take(self) -> StreamRead:
        kept_from = self.end - len(self.data)
        start = max(self.read_until, kept_from)
        data = self.data[start - kept_from :]
        lost = start - self.read_until
        self.read_until = self.end
        text = data.decode(errors="replace")
        return StreamRead(
            data=data,
            text=text,
            start=start,
            end=self.end,
            dropped_bytes=lost,
            spill_path=None,
            spill_start=0,
        )

    def collect(self) -> CollectedOutput:
        dropped = self.end - len(self.data)
        return CollectedOutput(
            data=self.data, total_bytes=self.end, dropped_bytes=dropped, spill_path=None, spill_start=0
        )


class _Job:
    def __init__(self, record: TaskRecord, memory: int) -> None:
        self.record = record
        self.out = _Buffer(memory)
        self.err = _Buffer(memory)
        self.process: asyncio.subprocess.Process | None = None
        self.killed = False
        self.worker: asyncio.Task[None] | None = None

    def end(self) -> None:
        self.killed = True
        if self.process is not None and self.process.returncode is None:
            os.killpg(self.process.pid, signal.SIGKILL)


class PlainExecutor(BashExecutor):
    def __init__(self, *, memory: int = 65_536) -> None:
        super().__init__()
        self._memory = memory
        self._jobs: dict[BashTaskId, _Job] = {}

    def resolve(self, request: BashExecRequest) -> BashExecSpec:
        return resolve_request(
            request, workdir=PurePosixPath(Path.cwd()), timeout_ms=120_000, max_timeout_ms=600_000
        )

    async def run(self, spec: BashExecSpec) -> BashRunResult:
        job = self._launch(spec)
        assert job.worker is not None
        done, _ = await asyncio.wait({job.worker}, timeout=spec.timeout_ms / 1000)
        if not done:
            job.end()
            await job.worker
        task = job.record.task
        return BashRunResult(
            exit_code=task.exit_code,
            signal=task.signal,
            timed_out=not done,
            aborted=False,
            timeout_ms=spec.timeout_ms,
            stdout=job.out.collect(),
            stderr=job.err.collect(),
            duration_ms=1.0,
            reason=EndReason.EXITED if done else EndReason.TIMED_OUT,
            survivors=0,
        )

    def start(self, spec: BashExecSpec) -> BashTask:
        return self._launch(spec).record.task

    def _launch(self, spec: BashExecSpec) -> _Job:
        self._check_open("start")
        require_spec(spec)
        task_id = BashTaskId(uuid.uuid4().hex)
        record = TaskRecord(task_id=task_id, command=spec.command, workdir=spec.workdir)
        job = self._jobs[task_id] = _Job(record, self._memory)
        job.worker = asyncio.create_task(self._work(job, spec))
        return job

    async def _work(self, job: _Job, spec: BashExecSpec) -> None:
        job.process = process = await asyncio.create_subprocess_exec(
            *("bash", "-c", spec.command),
            cwd=spec.workdir,
            env={**os.environ, **spec.env},
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            start_new_session=True,
        )
        job.record.started()
        assert process.stdout is not None
        assert process.stderr is not None
        await asyncio.gather(self._drain(process.stdout, job.out), self._drain(process.stderr, job.err))
        status = await process.wait()
        job.record.finished(
            exit_code=status if status >= 0 else None,
            signal=signal.Signals(-status).name if status < 0 else None,
            reason=EndReason.KILLED
            if job.killed
            else (EndReason.EXITED if status >= 0 else EndReason.SIGNALLED),
        )
        self.notify_task_done(job.record.task)

    async def _drain(self, stream: asyncio.StreamReader, buffer: _Buffer) -> None:
        while data := await stream.read(65_536):
            buffer.add(data)

    def get(self, task_id: BashTaskId) -> BashTask | None:
        job = self._jobs.get(task_id)
        return None if job is None else job.record.task

    def list(self) -> Sequence[BashTask]:
        return [job.record.task for job in self._jobs.values()]

    def owner_of(self, task_id: BashTaskId) -> OwnerToken | None:
        return None

    def read_output(self, task_id: BashTaskId) -> BashTaskRead:
        job = self._job(task_id)
        out, err = job.out.take(), job.err.take()
        lossy = bool(out.dropped_bytes or err.dropped_bytes)
        return BashTaskRead(stdout=out, stderr=err, lossy=lossy, status=job.record.task.status)

    def kill(self, task_id: BashTaskId) -> bool:
        job = self._job(task_id)
        job.end()
        return True

    def _job(self, task_id: BashTaskId) -> _Job:
        if task_id not in self._jobs:
            raise UnknownTaskError(task_id)
        return self._jobs[task_id]

    async def fetch(self, path: str | PurePath, *, start: int = 0) -> AsyncIterator[bytes]:
        data = await asyncio.to_thread(Path(path).read_bytes)
        if data[start:]:
            yield data[start:]

    async def _dispose(self) -> None:
        for job in self._jobs.values():
            job.end()
        await asyncio.gather(
            *(job.worker for job in self._jobs.values() if job.worker), return_exceptions=True
        )


class NeverReadyExecutor(PlainExecutor):
    """Says `opening` on standard error, and runs nothing until it is told not to."""

    async def run(self, spec: BashExecSpec) -> BashRunResult:
        assert spec.signal is not None
        aborted = asyncio.Event()
        spec.signal.on_abort(aborted.set)
        os.write(2, b"opening\n")
        await aborted.wait()
        raise AbortedBeforeStartError(reason=spec.signal.reason)

    async def _work(self, job: _Job, spec: BashExecSpec) -> None:
        os.write(2, b"opening\n")
        while not job.killed:
            await asyncio.sleep(0.01)
        job.record.failed(error=AbortedBeforeStartError(), reason=EndReason.KILLED)
        self.notify_task_done(job.record.task)
