"""Many commands at a time, without more processes at once than a machine is glad to have."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from collections.abc import Coroutine, Iterable

__all__ = ["gathered"]

T = TypeVar("T")


async def gathered(coros: Iterable[Coroutine[Any, Any, T]], *, at_once: int = 16) -> list[T]:
    """The results in order. The first error cancels the others and comes out."""
    gate = asyncio.Semaphore(at_once)

    async def one(coro: Coroutine[Any, Any, T]) -> T:
        async with gate:
            return await coro

    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(one(coro)) for coro in coros]
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from None
    return [task.result() for task in tasks]
