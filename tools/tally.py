"""Print one line that adds up what the sessions of `make test` ran: "N passed, N failed"."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

REPORTS = Path(__file__).resolve().parent.parent / ".nox" / "junit"


def main() -> None:
    """Add up the JUnit reports that the sessions left."""
    suites = [
        suite
        for report in REPORTS.glob("*.xml")
        for suite in ElementTree.parse(report).iter("testsuite")
    ]
    total = {key: sum(int(suite.get(key, 0)) for suite in suites) for key in ("tests", "skipped")}
    failed = sum(int(suite.get(key, 0)) for suite in suites for key in ("failures", "errors"))
    passed = total["tests"] - failed - total["skipped"]
    print(f"{passed} passed, {failed} failed, {total['skipped']} skipped")


if __name__ == "__main__":
    main()
