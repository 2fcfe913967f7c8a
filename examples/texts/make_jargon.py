"""
Writes `jargon_calibration.txt` and `jargon_test.txt` from Debian's package `dict-jargon`.

    apt-get download dict-jargon && dpkg -x dict-jargon_*.deb jargon
    python examples/texts/make_jargon.py jargon/usr/share/dictd/jargon.dict.dz
"""

import gzip
import hashlib
import re
import sys
from pathlib import Path


HERE = Path(__file__).resolve().parent
SIZES = {"test": 60_000, "calibration": 300_000}
"""Characters of each file; an entry belongs to one of them by its hash."""


def entries(text: str) -> list[str]:
    """Each dictionary entry as one paragraph: its term, a colon, its text without layout and cross-reference braces."""
    result = []
    for block in re.split(r"\n(?=\S)", text):
        head, _, body = block.partition("\n")
        plain = " ".join(re.sub(r"[{}]", "", body).split())
        if len(plain) > 300 and not head.startswith("00-"):
            result.append(f"{head.strip()}: {plain}")
    return result


def main() -> None:
    with gzip.open(sys.argv[1], "rt", encoding="utf-8") as file:
        text = file.read()
    parts: dict[str, list[str]] = {name: [] for name in SIZES}
    for entry in entries(text):
        share = int(hashlib.sha256(entry.encode()).hexdigest(), 16) % 100
        name = "test" if share < 15 else "calibration"
        if sum(map(len, parts[name])) < SIZES[name]:
            parts[name].append(entry)
    for name, chosen in parts.items():
        (HERE / f"jargon_{name}.txt").write_text("\n\n".join(chosen) + "\n", encoding="utf-8")
        print(f"{name}: {len(chosen)} entries, {sum(map(len, chosen)):,} characters")


if __name__ == "__main__":
    main()
