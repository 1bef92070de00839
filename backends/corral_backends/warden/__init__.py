"""Both ends of the warden: the host's in Python, the place's in C under `src/`.

For authors of backends: a `Place` makes a place and hands over a `DuplexStream` to a warden in it; a
`WardenExecutor` on top of it is a whole `BashExecutor`. `find_warden` is the program to put there."""

from __future__ import annotations

from .binary import find_warden
from .config import WardenConfig, WardenOptions, posix_path
from .executor import WardenExecutor
from .heartbeat import LeasedStream, PrivateLoop
from .place import DuplexStream, Place, Receiver, SocketStream

__all__ = [
    "DuplexStream",
    "LeasedStream",
    "Place",
    "PrivateLoop",
    "Receiver",
    "SocketStream",
    "WardenConfig",
    "WardenExecutor",
    "WardenOptions",
    "find_warden",
    "posix_path",
]
