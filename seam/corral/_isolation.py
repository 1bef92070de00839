"""Calling other people's callbacks so that one of them cannot harm the rest."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

logger = logging.getLogger("corral")


def call_each(calls: Iterable[Callable[[], object]], what: str) -> None:
    """Make every call in turn, whatever the ones before it raised.

    `what` names the kind of callback in the log ("abort callback"). An error is logged with its traceback and
    goes no further; this includes `asyncio.CancelledError`, which a callback has no business raising at us.
    `KeyboardInterrupt` and `SystemExit` are addressed to the whole program: the first one is raised again,
    but only after all the other calls were made.
    """
    interruption: BaseException | None = None
    for call in calls:
        try:
            call()
        except (KeyboardInterrupt, SystemExit) as error:
            interruption = interruption or error
        except BaseException:
            logger.exception("%s raised; the error goes no further", what)
    if interruption is not None:
        raise interruption
