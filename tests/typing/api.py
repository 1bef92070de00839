"""The seam as its users type it. Checked by mypy and pyright in strict mode, never run."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path, PurePath, PurePosixPath
from typing import assert_never, assert_type

from corral import (
    AbortController,
    AbortSignal,
    BackendFactory,
    BackendInfo,
    BashExecRequest,
    BashExecSpec,
    BashExecutor,
    BashRunResult,
    BashTask,
    BashTaskId,
    BashTaskListener,
    BashTaskRead,
    CollectedOutput,
    ConfigError,
    CorralError,
    Disposer,
    EndReason,
    OwnerToken,
    PlaceError,
    PlaceLostError,
    SpawnError,
    StreamRead,
    TaskRecord,
    TaskStatus,
    UnknownTaskError,
    WorkdirError,
    backends,
    load_backend,
    require_spec,
    resolve_request,
)


async def consumer(executor: BashExecutor, path: Path) -> None:
    async with executor as same:
        assert_type(same, BashExecutor)
    request = BashExecRequest(
        command="make",
        workdir=path,
        timeout_ms=5_000,
        signal=AbortSignal.any(AbortController().signal, AbortSignal.timeout(100)),
        owner=OwnerToken("session-1"),
        env={"CI": "1"},
        stdin=b"yes\n",
    )
    spec = executor.resolve(request)
    assert_type(spec, BashExecSpec)
    assert_type(spec.workdir, PurePosixPath)
    assert_type(spec.timeout_ms, int)
    assert_type(spec.owner, OwnerToken | None)
    assert_type(spec.env, Mapping[str, str])

    result = await executor.run(spec)
    assert_type(result, BashRunResult)
    assert_type(result.exit_code, int | None)
    assert_type(result.signal, str | None)
    assert_type(result.duration_ms, float)
    assert_type(result.stdout, CollectedOutput)
    assert_type(result.stdout.data, bytes)
    assert_type(result.stdout.text, str)
    assert_type(result.stdout.truncated, bool)
    assert_type(result.stdout.spill_path, PurePosixPath | None)

    task = executor.start(spec)
    assert_type(task, BashTask)
    assert_type(task.id, BashTaskId)
    assert_type(task.started_at, datetime | None)
    assert_type(task.error, CorralError | None)
    assert_type(executor.get(task.id), BashTask | None)
    assert_type(executor.list(), Sequence[BashTask])
    assert_type(executor.owner_of(task.id), OwnerToken | None)
    assert_type(executor.kill(task.id), bool)

    read = executor.read_output(task.id)
    assert_type(read, BashTaskRead)
    assert_type(read.stdout, StreamRead)
    assert_type(read.lossy, bool)

    chunks = executor.fetch("/tmp/file", start=10)
    assert_type(chunks, AsyncIterator[bytes])
    async for chunk in chunks:
        assert_type(chunk, bytes)

    assert_type(executor.disposed, bool)
    assert_type(executor.dispose(), Awaitable[None])
    await executor.dispose()


def every_end_has_a_word(reason: EndReason) -> str:
    match reason:
        case EndReason.EXITED | EndReason.SIGNALLED:
            return "by itself"
        case EndReason.TIMED_OUT | EndReason.ABORTED | EndReason.KILLED | EndReason.DISPOSED:
            return "by us"
        case EndReason.OUT_OF_MEMORY | EndReason.LOST:
            return "by its place"
        case _:
            assert_never(reason)


def listeners(executor: BashExecutor, seen: list[BashTask]) -> None:
    listener: BashTaskListener = seen.append
    undo = executor.on_task_done(listener)
    assert_type(undo, Disposer)
    undo()
    executor.on_task_done(lambda task: print(task.status is TaskStatus.FINISHED))


def aborts() -> None:
    controller = AbortController()
    controller.abort()
    controller.abort("why")
    controller.abort(reason=ValueError("why"))
    assert_type(controller.signal, AbortSignal)
    assert_type(controller.signal.aborted, bool)
    assert_type(controller.signal.reason, BaseException | str | None)
    assert_type(controller.signal.on_abort(lambda: None), Callable[[], None])


def errors(error: Exception) -> None:
    match error:
        case WorkdirError():
            assert_type(error.workdir, str)
        case PlaceLostError():
            assert_type(error.stdout, CollectedOutput | None)
        case SpawnError():
            assert_type(error.errno, int | None)
        case PlaceError():
            assert_type(error.stage, str)
            assert_type(error.retryable, bool | None)
        case UnknownTaskError():
            assert_type(error.task_id, BashTaskId)
        case ConfigError():
            assert_type(error.suggestion, str | None)
        case CorralError():
            assert_type(error.remedy, str | None)
        case _:
            pass


def lookup() -> BashExecutor:
    assert_type(backends(), Mapping[str, BackendInfo])
    factory: BackendFactory = load_backend("local")
    return factory(workdir="/work", timeout_ms=1_000)


def mistakes(executor: BashExecutor, task: BashTask, result: BashRunResult) -> None:
    """What type checkers must refuse; an ignore that is not needed is an error itself."""
    executor.resolve("make")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    executor.start(BashExecRequest(command="make"))  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    executor.kill("id")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    BashExecRequest(command="make", owner="me")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    task.status = TaskStatus.FINISHED  # type: ignore[misc]  # pyright: ignore[reportAttributeAccessIssue]
    result.exit_code = 0  # type: ignore[misc]  # pyright: ignore[reportAttributeAccessIssue]


class ThirdParty(BashExecutor):
    """A backend that uses the public API alone."""

    def __init__(self, *, workdir: str | PurePath | None = None) -> None:
        super().__init__()
        self._workdir = PurePosixPath("/" if workdir is None else PurePath(workdir).as_posix())
        self._records: dict[BashTaskId, TaskRecord] = {}

    def resolve(self, request: BashExecRequest) -> BashExecSpec:
        return resolve_request(request, workdir=self._workdir, timeout_ms=120_000, max_timeout_ms=600_000)

    async def run(self, spec: BashExecSpec) -> BashRunResult:
        self._check_open("run")
        assert_type(require_spec(spec), BashExecSpec)
        raise SpawnError("nothing can be run here", errno=11)  # noqa: EM101

    def start(self, spec: BashExecSpec) -> BashTask:
        self._check_open("start")
        require_spec(spec, "start")
        record = TaskRecord(task_id=BashTaskId("1"), command=spec.command, workdir=spec.workdir)
        record.started()
        record.finished(exit_code=0, signal=None, reason=EndReason.EXITED)
        self._records[record.task.id] = record
        self.notify_task_done(record.task)
        return record.task

    def get(self, task_id: BashTaskId) -> BashTask | None:
        self._check_usable("get")
        return self._records[task_id].task if task_id in self._records else None

    def list(self) -> Sequence[BashTask]:
        return [record.task for record in self._records.values()]

    def owner_of(self, task_id: BashTaskId) -> OwnerToken | None:
        return None

    def read_output(self, task_id: BashTaskId) -> BashTaskRead:
        raise UnknownTaskError(task_id)

    def kill(self, task_id: BashTaskId) -> bool:
        raise UnknownTaskError(task_id)

    async def fetch(self, path: str | PurePath, *, start: int = 0) -> AsyncIterator[bytes]:
        yield str(path).encode()[start:]

    async def _dispose(self) -> None:
        self._records.clear()


def third_party() -> type[BashExecutor]:
    ThirdParty(workdir="/work")
    return ThirdParty
