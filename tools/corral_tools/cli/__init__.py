"""The `corral` command: `corral run`, `corral backends`.

It stands on the public seam alone and finds backends through their entry points, so it serves a third party's
backend as it serves a built-in one. Start it with `corral` or `python -m corral_tools.cli`.
"""

from __future__ import annotations
