"""Prints how many combinations the conformance suite has gone through, from what its tests have recorded."""

from collections import Counter

import pytest


_PRINTED = pytest.StashKey[bool]()


def pytest_terminal_summary(terminalreporter) -> None:
    if terminalreporter.config.stash.get(_PRINTED, False):  # registered by two conftest files
        return
    terminalreporter.config.stash[_PRINTED] = True
    found = [
        dict(report.user_properties) for report in terminalreporter.stats.get("passed", []) if report.when == "call"
    ]
    rows = [tuple(properties["conformance"]) for properties in found if "conformance" in properties]
    if rows:
        architectures, ways, laws = (len({row[i] for row in rows}) for i in range(3))
        exact = sum(row[3] == "exact" for row in rows)
        terminalreporter.section("conformance")
        terminalreporter.line(
            f"{architectures} architectures × {ways} ways to generate × {laws} laws: {exact} exact, "
            f"{len(rows) - exact} refused by name"
        )
        for reason, count in Counter(row[3] for row in rows if row[3] != "exact").most_common():
            terminalreporter.line(f"  {count:5d} {reason}")
    rows = [tuple(properties["source"]) for properties in found if "source" in properties]
    if rows:
        architectures, kinds = (len({row[i] for row in rows}) for i in range(2))
        exact = sum(row[2] == "exact" for row in rows)
        terminalreporter.line(
            f"{architectures} architectures × {kinds} kinds of source cache, batched and padded: {exact} exact, "
            f"{len(rows) - exact} refused by name"
        )
