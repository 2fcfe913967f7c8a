"""
The documents of the tasks in this folder. lm-evaluation-harness loads this file by its path. Where a task file is named
by its path, that happens before the model is looked up, so that the program `lm_eval` knows the model type by then.
"""

import itertools
import json
import re
from pathlib import Path
from typing import Any

from datasets import Dataset

from hf_kvtransfer.errors import KVTransferError
from hf_kvtransfer.harness.registration import register


register()

_DATA = Path(__file__).parent / "data"
_FIELDS = ("kind", "document", "question", "answer", "choices")
# Long enough for words to come again, and near the length of the rows that the tiny family was trained on.
_WORDS_PER_PASSAGE = 90
_SHORTEST_WORD = 5
_WORDS_BETWEEN = 10


def stories(questions: str | None = None, **_: Any) -> dict[str, Dataset]:
    """
    Documents with a question that the document answers.

    Args:
        questions (`str`, *optional*):
            A `.jsonl` file with `kind`, `document`, `question`, `answer` and `choices`; by default the package's.
        **_: what else the harness passes on: model arguments and metadata.

    Raises:
        [`KVTransferError`]: if the file can't be read, or a question has no answer among its choices.
    """
    path = Path(questions or _DATA / "stories.jsonl")
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
        rows = [{name: row[name] for name in _FIELDS} for row in map(json.loads, filter(str.strip, lines))]
        if not rows or any(row["answer"] not in row["choices"] for row in rows):
            raise ValueError("no rows, or an answer that is none of the choices")
    except (OSError, ValueError, LookupError, TypeError, RecursionError) as error:
        raise KVTransferError(
            f"No stories could be read from {path} ({type(error).__name__}: {error}); expected one JSON object a line "
            'with "kind", "document", "question", "answer" and "choices", the answer among them.'
        ) from error
    return {"test": Dataset.from_list(rows)}


def passages(text: str | None = None, **_: Any) -> dict[str, Dataset]:
    """
    Passages of whole sentences.

    Args:
        text (`str`, *optional*): a file of plain text, one paragraph a line; by default the package's.
        **_: what else the harness passes on.

    Raises:
        [`KVTransferError`]: if the file can't be read or is empty.
    """
    return {"test": Dataset.from_list([{"text": passage} for passage in _passages(text)])}


def cloze(text: str | None = None, **_: Any) -> dict[str, Dataset]:
    """
    The beginning of each passage, up to its last word that the passage has used before: a word of five letters or more,
    at least ten words after the last time. Arguments as in [`passages`].
    """
    rows = []
    for passage in _passages(text):
        last: dict[str, int] = {}
        found = None
        for place, word in enumerate(re.finditer(r"[A-Za-z]+", passage)):
            name = word.group()
            is_look_up = place - last.get(name, place) >= _WORDS_BETWEEN and len(name) >= _SHORTEST_WORD
            if is_look_up and passage[word.start() - 1] == " ":
                found = word
            last[name] = place
        if found is not None:
            rows.append({"context": passage[: found.start() - 1], "word": f" {found.group()}"})
    if not rows:
        raise KVTransferError(
            "The text has no passage in which a word comes again; expected running text of some hundred words or more. "
            "Give more of it."
        )
    return {"test": Dataset.from_list(rows)}


def _passages(text: str | None) -> list[str]:
    path = Path(text or _DATA / "text.txt")
    try:
        paragraphs = path.read_text(encoding="utf-8").split("\n")
    except (OSError, ValueError) as error:
        raise KVTransferError(
            f"No text could be read from {path} ({type(error).__name__}: {error}); expected a file of plain text in "
            "UTF-8, one paragraph a line."
        ) from error
    found = []
    for paragraph in paragraphs:
        sentences = re.findall(r"\S.*?(?:[.!?]+(?=\s)|$)", paragraph)
        words = itertools.accumulate(len(sentence.split()) for sentence in sentences)
        numbered = [(count // _WORDS_PER_PASSAGE, sentence) for count, sentence in zip(words, sentences, strict=True)]
        for _, group in itertools.groupby(numbered, key=lambda item: item[0]):
            passage = " ".join(sentence for _, sentence in group)
            if len(passage.split()) >= _WORDS_PER_PASSAGE // 2:
                found.append(passage)
    if not found:
        raise KVTransferError(
            f"The text in {path} is too short; expected a paragraph of {_WORDS_PER_PASSAGE // 2} words or more."
        )
    return found
