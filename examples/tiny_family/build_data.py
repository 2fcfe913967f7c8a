"""Write the files under ``data/``, the same every time.

``python examples/tiny_family/build_data.py --text kjv.txt``
"""

from __future__ import annotations

import argparse
import json
import random
import re
from collections.abc import Iterable
from pathlib import Path

import stories
import text
from transformers import AutoTokenizer, PreTrainedTokenizerBase


HERE = Path(__file__).resolve().parent
STORY_TOKENS = 105_000
PROSE_TOKENS = 70_000
TEST_TOKENS = 15_000
CALIBRATION_CHARACTERS = 300_000


def count_tokens(tokenizer: PreTrainedTokenizerBase, prose: str) -> int:
    """Tokens in ``prose``."""
    return len(tokenizer.encode(prose, add_special_tokens=False))


def calibration_stories(tokenizer: PreTrainedTokenizerBase, seed: int) -> list[str]:
    """Stories of all kinds with questions and answers inline, until there are ``STORY_TOKENS``."""
    rng = random.Random(seed)
    documents: list[str] = []
    tokens = 0
    while tokens < STORY_TOKENS:
        kind = stories.KINDS[len(documents) % len(stories.KINDS)]
        pieces = stories.told_story(rng, kind, rng.randint(3, 8), "calibration", mixed=0.1)
        documents.append("".join(piece for piece, _ in pieces))
        tokens += count_tokens(tokenizer, documents[-1])
    return documents


def calibration_prose(tokenizer: PreTrainedTokenizerBase, chapters: list[str], seed: int) -> list[str]:
    """Whole sentences of the calibration books in documents of 150 to 400 tokens, ``PROSE_TOKENS`` in all."""
    rng = random.Random(seed)
    documents: list[str] = []
    total = 0
    for chapter in chapters:
        document, size, wanted = "", 0, rng.randint(150, 350)
        for sentence in re.split(r"(?<=[.?!]) ", chapter):
            joined = f"{document} {sentence}".strip()
            size = count_tokens(tokenizer, joined)
            if size > 400 and document:  # a long sentence: leave it to the next document
                documents.append(document)
                total += count_tokens(tokenizer, document)
                document, wanted = sentence, rng.randint(150, 350)
            elif size >= wanted:
                documents.append(joined)
                total += size
                document, wanted = "", rng.randint(150, 350)
            else:
                document = joined
            if total >= PROSE_TOKENS:
                return documents
    return documents


def question_set(split: str, per_kind: int, seed: int) -> list[dict[str, object]]:
    """``per_kind`` different questions of every kind, over six to eight facts."""
    rng = random.Random(seed)
    records: list[dict[str, object]] = []
    seen: set[str] = set()
    for kind in stories.KINDS:
        number = 0
        while number < per_kind:
            question = stories.draw_question(rng, kind, 6 + number % 3, split)
            if str(question["document"]) in seen:
                continue
            seen.add(str(question["document"]))
            records.append({"id": f"{split}-{kind}-{number:03d}", **question})
            number += 1
    return records


def write_lines(path: Path, records: Iterable[dict[str, object]]) -> None:
    """Write JSON lines."""
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")


def main() -> None:
    """Write all files."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--text", type=Path, required=True, help="the King James Bible, see README.md")
    parser.add_argument("--tokenizer", type=Path, default=HERE / "small")
    parser.add_argument("--out", type=Path, default=HERE / "data")
    args = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(args.tokenizer)
    splits = text.split_chapters(text.read_chapters(args.text))
    args.out.mkdir(parents=True, exist_ok=True)

    documents = calibration_stories(tokenizer, seed=11)
    documents += calibration_prose(tokenizer, splits["calibration"], seed=12)
    random.Random(13).shuffle(documents)
    write_lines(args.out / "calibration.jsonl", [{"text": document} for document in documents])
    write_lines(args.out / "questions.jsonl", question_set("test", per_kind=100, seed=14))
    write_lines(args.out / "selection.jsonl", question_set("selection", per_kind=40, seed=15))

    chapters: list[str] = []
    tokens = 0
    for chapter in splits["test"]:
        if tokens < TEST_TOKENS:
            chapters.append(chapter)
            tokens += count_tokens(tokenizer, chapter)
    (args.out / "text_test.txt").write_text("\n".join(chapters) + "\n", encoding="utf-8")
    chapters, size = [], 0
    for chapter in splits["calibration"]:
        if size < CALIBRATION_CHARACTERS:
            chapters.append(chapter)
            size += len(chapter) + 1
    (args.out / "text_calibration.txt").write_text("\n".join(chapters) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
