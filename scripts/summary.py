"""Adds up JUnit reports: one line for each, and a last line with the totals.

Usage: summary.py REPORT.xml...
"""

from __future__ import annotations

import sys
import xml.etree.ElementTree as ET
from pathlib import Path


def count(report: Path) -> tuple[int, int, int, float]:
    """(passed, failed, skipped, seconds) of one report; an error counts as failed."""
    passed = failed = skipped = 0
    seconds = 0.0
    for suite in ET.parse(report).iter("testsuite"):
        tests, errors, failures, left_out = (
            int(suite.get(name, "0")) for name in ("tests", "errors", "failures", "skipped")
        )
        failed += errors + failures
        skipped += left_out
        passed += tests - errors - failures - left_out
        seconds += float(suite.get("time", "0"))
    return passed, failed, skipped, seconds


def main() -> None:
    totals = [0, 0, 0]
    for report in map(Path, sys.argv[1:]):
        if not report.is_file():
            continue
        passed, failed, skipped, seconds = count(report)
        print(f"{report.stem}: {passed} passed, {failed} failed, {skipped} skipped in {seconds:.0f} s")
        totals = [total + new for total, new in zip(totals, (passed, failed, skipped), strict=True)]
    print("{} passed, {} failed, {} skipped".format(*totals))


if __name__ == "__main__":
    main()
