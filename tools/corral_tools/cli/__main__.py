"""`python -m corral_tools.cli` is the `corral` command."""

from __future__ import annotations

import sys

from corral_tools.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
