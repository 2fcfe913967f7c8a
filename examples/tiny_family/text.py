"""The King James Bible as plain prose: reading Debian's ``bible`` output, cleaning it, and holding parts of it out."""

from __future__ import annotations

import re
from collections import defaultdict
from pathlib import Path


TEST_BOOKS = frozenset({"Ruth", "Jonah", "Jas"})
"""Whole books that only the test text uses."""

CALIBRATION_BOOKS = frozenset({"1Sm", "Mark", "Est", "Dan", "Gal", "Eph"})
"""Whole books that only the calibration text uses."""

TEST_EVERY = 40
"""Every so many chapters of the remaining books, one is held out for the test text."""

_VERSE = re.compile(r"^(\d?[A-Za-z]+)(\d+):(\d+) (.*)$")


def read_chapters(path: Path) -> dict[tuple[str, int], str]:
    """Chapters of the file that ``bible -f 'Gen1:1-Rev22:21'`` writes, as prose without verse numbers."""
    verses: dict[tuple[str, int], list[str]] = defaultdict(list)
    for line in path.read_text(encoding="ascii").splitlines():
        match = _VERSE.match(line.strip())
        if match:
            verses[match[1], int(match[2])].append(re.sub(r"\s+", " ", match[4]).strip())
    if not verses:
        raise ValueError(f"{path} has no verses; write it with: bible -f 'Gen1:1-Rev22:21' > {path}")
    return {chapter: " ".join(lines) for chapter, lines in verses.items()}


def split_chapters(chapters: dict[tuple[str, int], str]) -> dict[str, list[str]]:
    """Chapters by split: ``train``, ``calibration`` (whole books), ``test`` (whole books, then single chapters)."""
    splits: dict[str, list[str]] = {"train": [], "calibration": [], "test": []}
    single: list[str] = []
    remaining = 0
    for (book, _), prose in chapters.items():
        if book in TEST_BOOKS:
            splits["test"].append(prose)
        elif book in CALIBRATION_BOOKS:
            splits["calibration"].append(prose)
        else:
            remaining += 1
            (single if remaining % TEST_EVERY == 0 else splits["train"]).append(prose)
    splits["test"] += single
    return splits
