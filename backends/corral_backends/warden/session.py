"""The life of an executor's place: opened once for all who wait, lost, opened again, closed."""

from __future__ import annotations

import asyncio

from corral import AbortSignal, PlaceError, PlaceLostError, PlaceOpenError
from corral._isolation import logger

from . import protocol
from .config import QUIET_ENVIRONMENT, WardenConfig
from .connection import Connection
from .place import Place
from .protocol import Ready

SILENCE_S = 5.0
"""A warden that failed to do what it must and does not answer a PING for this long is given up."""

GOODBYE_MARGIN_S = 3.0
"""Past the grace, how long the warden has for its good-bye."""


class Session:
    """Owns the place and the connection to its warden.

    `connection` is None while there is none: before the first command, while opening, after a loss.
    """

    def __init__(self, place: Place, config: WardenConfig) -> None:
        self._place = place
        self._config = config
        self._opening: asyncio.Task[Connection] | None = None
        self._cleaning: asyncio.Task[None] | None = None
        self._ready: Ready | None = None
        self._touched = False  # whether there is anything to close
        self._closing = False
        self.connection: Connection | None = None

    async def opened(self, signal: AbortSignal | None) -> Connection | None:
        """The connection; opens the place unless somebody already does.

        `None` when `signal` was aborted first, or the opening was stopped: the caller knows why. Cancelling a
        waiter cancels only its waiting. A failed opening is told to all who waited for it.
        """
        if self._opening is None:
            self._opening = asyncio.get_running_loop().create_task(self._open(), name="corral-open")
            self._opening.add_done_callback(self._opening_done)
        opening = self._opening
        await _first_of(opening, signal)
        return opening.result() if opening.done() and not opening.cancelled() else None

    def _opening_done(self, opening: asyncio.Task[Connection]) -> None:
        self._opening = None
        if not opening.cancelled():
            opening.exception()  # it may be that nobody waits any more

    async def _open(self) -> Connection:
        if self._cleaning is not None:
            await asyncio.wait({self._cleaning})
        self._touched = True
        limit = self._config.open_timeout_ms / 1000
        try:
            async with asyncio.timeout(limit):
                stream = await self._place.open()
                connection = Connection(stream, self)
                self._ready = await connection.open(self._hello())
            if not connection.alive:  # it ended in the moment it was ready, before there was somebody to tell
                msg = "the warden went away as soon as it was ready"
                raise PlaceOpenError(msg, retryable=True)
        except BaseException as error:
            await self._close_place()
            if isinstance(error, TimeoutError):
                msg = f"the place was not ready within {limit:g} s"
                raise PlaceOpenError(msg, remedy="Raise open_timeout_ms.", retryable=True) from error
            if isinstance(error, Exception) and not isinstance(error, PlaceError):
                msg = f"the place could not be opened: {error}"
                raise PlaceOpenError(msg) from error
            raise
        self.connection = connection
        return connection

    def _hello(self) -> bytes:
        config = self._config
        return protocol.hello(
            lease_ms=self._place.lease_ms,
            ring_bytes=config.max_output_bytes,
            spill_cap=config.max_spill_bytes,
            spill_total=config.max_spill_total_bytes,
            spill_parent=config.spill_dir or "",
            shell=config.shell or "",
            env={**QUIET_ENVIRONMENT, **config.env},
        )

    def suspect(self, connection: Connection) -> None:
        """The warden owes an answer. Cut it off unless it shows a sign of life."""
        if self._place.stuck():
            connection.close()
            return
        connection.send(protocol.ping(0))
        self._await_sign(connection)

    def _await_sign(self, connection: Connection) -> None:
        heard, unsent = connection.heard, connection.unsent

        def judge() -> None:
            if not connection.alive or connection.heard != heard:
                return
            if 0 < connection.unsent < unsent:  # the PING is still queued, and the queue moves
                self._await_sign(connection)
            else:
                connection.close()

        asyncio.get_running_loop().call_later(SILENCE_S, judge)

    def on_session_lost(self, connection: Connection, why: str) -> None:
        del why
        if connection is self.connection:
            self.connection = None
            if not self._closing:
                self._cleaning = asyncio.get_running_loop().create_task(self._clean(), name="corral-clean")

    async def _clean(self) -> None:
        await self._close_place()
        if self._ready is not None:
            await self._place.remove_spills(self._ready.spill_directory)

    async def _close_place(self) -> None:
        """Close the place after trouble: whatever that says comes second to the trouble itself."""
        try:
            await self._place.close()
        except PlaceError:
            logger.exception("closing a place that had failed")

    async def stop_opening(self) -> None:
        """Whoever waits for the opening is told that it was abandoned."""
        self._closing = True
        if self._opening is not None:
            self._opening.cancel()
            await asyncio.wait({self._opening})

    async def close(self, grace_ms: int) -> None:
        """End every tree, then the place. `PlaceLostError` when the place did not confirm it."""
        connection = self.connection
        confirmed = True
        if connection is not None:
            connection.send(protocol.shutdown(grace_ms))
            over = await connection.wait_over(grace_ms / 1000 + GOODBYE_MARGIN_S)
            confirmed = over and connection.said_bye
            connection.close()
            await connection.wait_over(1.0)
        if self._cleaning is not None:
            await asyncio.wait({self._cleaning})
        if self._touched:
            await self._place.close()
        if not confirmed:
            if self._ready is not None:
                await self._place.remove_spills(self._ready.spill_directory)
            msg = "the place went away before it confirmed that every command is gone"
            raise PlaceLostError(msg, stage="dispose", remedy="Look for processes left in it.")


async def _first_of(opening: asyncio.Task[Connection], signal: AbortSignal | None) -> None:
    """Wait for the opening, or for the signal's abort."""
    if signal is None:
        await asyncio.wait({opening})
        return
    loop = asyncio.get_running_loop()
    aborted: asyncio.Future[None] = loop.create_future()

    def wake() -> None:
        if not aborted.done():
            aborted.set_result(None)

    def from_any_thread() -> None:
        loop.call_soon_threadsafe(wake)

    forget = signal.on_abort(from_any_thread)
    waited: set[asyncio.Future[None] | asyncio.Task[Connection]] = {opening, aborted}
    try:
        await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
    finally:
        forget()
